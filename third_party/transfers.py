"""Downloads files from the Hugging Face hub, and from addresses elsewhere."""

from collections.abc import Mapping
import http.client
import pathlib
import shutil
from typing import Any
import urllib.error
import urllib.parse
import urllib.request

_CHUNK = 1 << 20


def download_from_hub(entry: Mapping[str, Any], path: str, part: pathlib.Path) -> None:
  """Downloads a file of the hub, at the commit that the manifest names."""
  try:
    import huggingface_hub
  except ModuleNotFoundError:
    raise ValueError(
      "huggingface_hub is missing: make the project's environment with `make "
      '.venv/installed`, and give the same command again'
    ) from None
  folder = part.with_name(part.name + '.hub')  # Kept until the file is whole.
  hub = entry['hub']
  found = huggingface_hub.hf_hub_download(
    hub['repo'],
    path,
    repo_type=hub['type'],
    revision=entry['version'],
    local_dir=folder,
  )
  pathlib.Path(found).replace(part)
  shutil.rmtree(folder)


def download(url: str, part: pathlib.Path) -> None:
  """Downloads what an address of no hub sends."""
  request = urllib.request.Request(url, headers={'User-Agent': 'agent-r1-jax'})
  try:
    with urllib.request.urlopen(request, timeout=60) as response:
      if response.headers.get_content_type() == 'text/html':
        raise OSError(f'{url} answered with a web page: fetch it with a browser')
      length = int(response.headers.get('Content-Length') or -1)
      free = shutil.disk_usage(part.parent).free
      if length > free:
        raise OSError(f'{url}: {length:,} bytes are to come, and {free:,} are free')
      print(f'{url}: {length:,} bytes are to come', flush=True)
      with part.open('wb') as out:
        shutil.copyfileobj(response, out, _CHUNK)
  except urllib.error.HTTPError as error:
    raise OSError(f'{url} answered {error.code} {error.reason}') from None
  except (urllib.error.URLError, http.client.HTTPException) as error:
    reason = getattr(error, 'reason', error)
    raise OSError(f'{url}: {find_host(url)} cannot be reached ({reason})') from None
  if 0 <= length != (got := part.stat().st_size):
    raise OSError(f'{url} ended after {got} of {length} bytes')


def find_host(url: str) -> str:
  """Returns the host of an address."""
  return urllib.parse.urlsplit(url).hostname or url
