"""Fetches the outside data, models and indexes of manifest.json, and verifies them.

  python third_party/fetch.py                        what there is, with its licence
  python third_party/fetch.py hotpotqa e5-base-v2    into third_party/downloads/<name>/
  python third_party/fetch.py hotpotqa --record      trusts what comes this once

A file is kept only if its sha256 is the manifest's. Where that is not known (null), the
file is refused unless --record is given, which writes the sum of what came into the
manifest, for the next one. A download that was cut off goes on where it was. Needs the
standard library alone.
"""

import argparse
from collections.abc import Mapping, Sequence
import hashlib
import json
import pathlib
import sys
from typing import Any
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).parent
_CHUNK = 1 << 20


def read_manifest(path: pathlib.Path) -> dict[str, Any]:
  """Reads and checks the manifest.

  Raises:
    ValueError: A field is missing, a sum is no sha256 or a path leaves its folder; the
      message names the entry.
  """
  manifest = json.loads(path.read_text(encoding='utf-8'))
  for name, entry in manifest['entries'].items():
    missing = {'what', 'version', 'licence', 'home', 'files'} - entry.keys()
    if missing:
      raise ValueError(f'{path}, {name}: {sorted(missing)} missing')
    for file in entry['files']:
      if {'path', 'url', 'sha256'} - file.keys():
        raise ValueError(f'{path}, {name}: a file needs path, url and sha256: {file}')
      parts = pathlib.PurePosixPath(file['path'])
      if parts.is_absolute() or '..' in parts.parts:
        raise ValueError(f'{path}, {name}: {file["path"]} is outside of its folder')
      if file['sha256'] is not None and len(file['sha256']) != 64:
        raise ValueError(f'{path}, {name}: the sha256 of {file["path"]} has 64 digits')
  return manifest


def fetch(
  name: str, entry: Mapping[str, Any], directory: pathlib.Path, *, record: bool = False
) -> None:
  """Brings the files of one entry into `directory`, each whole and verified.

  With `record`, sums that are null in `entry` are filled in.

  Raises:
    ValueError: A sum is null and `record` is not given (before anything is fetched), or
      a file has another sum.
    OSError: The download failed; run it again, and it goes on.
  """
  unknown = [file['path'] for file in entry['files'] if file['sha256'] is None]
  if unknown and not record:
    raise ValueError(
      f'{name}: the sha256 of {", ".join(unknown)} is not known, so what comes cannot be '
      f'verified. Look at {entry["home"]}, and if you trust it, fetch with --record'
    )
  for file in entry['files']:
    target = directory / file['path']
    if target.exists() and _sum(target) == file['sha256']:
      print(f'{name}: {file["path"]} is there')
      continue
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + '.part')
    _download(file['url'], part)
    found = _sum(part)
    if file['sha256'] is None:
      file['sha256'] = found
    elif file['sha256'] != found:
      part.unlink()
      raise ValueError(
        f'{name}: {file["path"]} has the sha256 {found} and not {file["sha256"]}; it was '
        'deleted. The file at its address has changed, or somebody changed it on the way'
      )
    part.replace(target)
    print(f'{name}: {file["path"]}, {target.stat().st_size:,} bytes, {found[:12]}...')


def _download(url: str, part: pathlib.Path) -> None:
  """Appends to `part` where the server allows it."""
  have = part.stat().st_size if part.exists() else 0
  request = urllib.request.Request(url, headers={'User-Agent': 'agent-r1-jax'})
  if have:
    request.add_header('Range', f'bytes={have}-')
  try:
    response = urllib.request.urlopen(request, timeout=60)
  except urllib.error.HTTPError as error:
    if have and error.code == 416:  # nothing is left, or the file has become shorter
      part.unlink()
      return _download(url, part)
    raise OSError(f'{url} answered {error.code} {error.reason}') from None
  with response:
    if response.headers.get_content_type() == 'text/html':
      raise OSError(f'{url} answered with a web page: fetch it with a browser')
    going_on = response.status == 206
    length = int(response.headers.get('Content-Length') or -1)
    got = 0
    with part.open('ab' if going_on else 'wb') as out:
      while chunk := response.read(_CHUNK):
        got += out.write(chunk)
  if 0 <= length != got:
    raise OSError(f'{url} ended after {got} of {length} bytes: run again, it goes on')


def _sum(path: pathlib.Path) -> str:
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  parser.add_argument('names', nargs='*', help='entries of the manifest; none: list them')
  parser.add_argument('--to', type=pathlib.Path, default=HERE / 'downloads')
  parser.add_argument('--record', action='store_true', help='write down unknown sums')
  parser.add_argument('--manifest', type=pathlib.Path, default=HERE / 'manifest.json')
  arguments = parser.parse_args(argv)
  try:
    manifest = read_manifest(arguments.manifest)
    entries = manifest['entries']
    for name in arguments.names:
      if name not in entries:
        raise ValueError(f'no entry {name!r}; there are {", ".join(entries)}')
    for name in arguments.names:
      print(f'{name}: licence {entries[name]["licence"]}, from {entries[name]["home"]}')
      try:
        fetch(name, entries[name], arguments.to / name, record=arguments.record)
      finally:
        if arguments.record:
          _write(arguments.manifest, manifest)
  except (ValueError, OSError) as error:
    print(f'fetch.py: {error}', file=sys.stderr)
    return 1
  if not arguments.names:
    for name, entry in entries.items():
      print(f'{name:22} {entry["licence"]:45} {entry["what"]}')
  return 0


def _write(path: pathlib.Path, manifest: Mapping[str, Any]) -> None:
  part = path.with_suffix('.part')
  part.write_text(
    json.dumps(manifest, indent=2, ensure_ascii=False) + '\n', encoding='utf-8'
  )
  part.replace(path)


if __name__ == '__main__':
  sys.exit(main())
