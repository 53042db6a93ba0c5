"""Publishes a run: writes its card, shows what would be uploaded, and uploads it."""

from collections.abc import Mapping
import pathlib
import re
from typing import Any

from agent_r1_jax.contrib.hub import model_card, run_record, upload


def publish(
  workdir: pathlib.Path,
  *,
  repository: str = '',
  part: str = 'model',
  public: bool = False,
  license_id: str = '',
  base: str = '',
  downloads: Mapping[str, Any] | None = None,
  rewrite: bool = False,
) -> None:
  """Writes a run's card into its workdir and, with a repository, uploads.

  Args:
    workdir: The run's directory.
    repository: USER/NAME on the Hub; '' uploads nothing.
    part: 'model' or 'adapter', the folder of the workdir to publish.
    public: Whether everybody may read the repository.
    license_id: The licence, by the Hub's identifier.
    base: The repository of the base model; '' uses `find_base`.
    downloads: The entries of third_party/manifest.json.
    rewrite: Whether to overwrite an existing card.

  Raises:
    ValueError: The run or an argument is unsuitable; nothing has been uploaded.
    OSError: A file cannot be read or written, or the Hub fails.
  """
  with run_record.open_run(workdir, part) as record:
    base = base or find_base(record.config.get('model.path', ''), downloads or {})
    path = workdir / f'{part}_card.md'
    if rewrite or not path.exists():
      card = model_card.write(record, base=base, license_id=license_id)
      path.write_text(card, encoding='utf-8')
      print(f'model card: {path}')
    else:
      card = _read_card(path, record)
      print(f'model card: {path}, as it is (--rewrite writes it again)')
    if not repository:
      print('Nothing was uploaded: --repo=USER/NAME does that.')
      return
    files = upload.collect(record, card, repository, base)
    sizes = {name: upload.measure(content) for name, content in files.items()}
    print(f'uploads to {repository} ({"public" if public else "private"}):')
    for name, size in sizes.items():
      print(f'{size:16,} bytes  {name}')
    print(f'{sum(sizes.values()):16,} bytes in {len(sizes)} files', flush=True)
    print(upload.push(repository, files, public=public))


def _read_card(path: pathlib.Path, record: run_record.RunRecord) -> str:
  """Reads a card, unless the run has written the published part since."""
  written = path.stat().st_mtime
  if any(file.stat().st_mtime > written for file in record.folder.iterdir()):
    raise ValueError(
      f'{path} is older than {record.folder}, and its numbers may be of an earlier step: '
      'give --rewrite, or save it again if it is right'
    )
  return path.read_text(encoding='utf-8')


def find_base(path: str, downloads: Mapping[str, Any]) -> str:
  """Returns the Hub repository that a directory was downloaded from, or ''.

  Knows the Hub's own cache, and the downloads of `agent-r1-jax fetch`.
  """
  parts = pathlib.PurePath(path).parts
  for part in parts:
    if match := re.fullmatch(r'models--([^-].*?)--(.+)', part):
      return f'{match[1]}/{match[2]}'
  hub = downloads.get(parts[-1], {}).get('hub', {}) if 'downloads' in parts else {}
  return hub['repo'] if hub.get('type') == 'model' else ''
