#!/usr/bin/env python3
"""Fetches outside data, models and indexes, verifies them, and makes them ready for use.

  agent-r1-jax fetch                        what there is, its licence, what is fetched
  agent-r1-jax fetch hotpotqa e5-base-v2    into third_party/downloads/<name>/
  agent-r1-jax fetch --strict wiki-18       only files whose sum the manifest knows

In a checkout without an environment, third_party/fetch.py does the same.

manifest.json says where each thing is. Archives are extracted; the official files of
HotpotQA, 2WikiMultihopQA and MuSiQue are converted to what the scripts' `--data=` takes;
the commands to run next are printed. What is on the Hugging Face hub comes by its own
library, which goes on where a download was cut off.

Every file is checked by its sha256. Where the manifest knows none, what comes is trusted
the first time: this is said, the sum is printed and written to downloads/sums.json with
the size, and from then on anything else is refused. --strict refuses such files at once.
A file that you put into its folder yourself is taken in the same way: without a network,
the command says which files belong where.

The hub's library and the conversion need the project's environment (`make
.venv/installed`), the rest Python 3.11 and its standard library.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import datetime
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any
import urllib.parse

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
# An installed package is no place for data: there, it is the current folder's.
_OWNED = HERE if (ROOT / 'pyproject.toml').exists() else pathlib.Path('third_party')


def _interpreter():
  """The command of a Python that can run the rest of this file; None if this one can.

  An old Python gets here: no syntax of this file may be newer than 3.6, and what it
  imports of this folder comes below.
  """
  ready = sys.version_info >= (3, 11)
  if ready and importlib.util.find_spec('jax'):
    return None
  own = ROOT / '.venv' / 'bin' / 'python'
  if own.exists() and pathlib.Path(sys.prefix).resolve() != own.parents[1].resolve():
    return str(own)
  if ready:
    return None
  for name in ('python3.12', 'python3.11', 'python3.13'):
    # The name may be a shim of a version that is not installed: run it.
    path = shutil.which(name)
    if path and subprocess.call([path, '-c', ''], stderr=subprocess.DEVNULL) == 0:
      return path
  sys.exit(
    f'fetch.py: this is Python {sys.version.split()[0]}, and 3.11 or later is needed; '
    'none was found on PATH. Install one, or make the environment: make .venv/installed'
  )


def _restart():
  other = _interpreter()
  if other:
    os.execv(other, [other, os.path.abspath(__file__)] + sys.argv[1:])


if __name__ == '__main__':
  _restart()

# Found beside this file, whether it is run as a file, as a module or by a test.
sys.path.insert(0, str(HERE))

import archives  # noqa: E402
import transfers  # noqa: E402

_HUB = 'https://huggingface.co'


def read_manifest(path: pathlib.Path) -> dict[str, Any]:
  """Reads and checks the manifest; files of the hub get their addresses.

  Raises:
    ValueError: A field is missing, a sum is no sha256, an address is not http(s), a
      version of the hub is no commit, or a path leaves its folder; the message names the
      entry.
  """
  manifest = json.loads(path.read_text(encoding='utf-8'))
  for name, entry in manifest['entries'].items():
    missing = {'what', 'version', 'licence', 'home', 'files'} - entry.keys()
    if missing:
      raise ValueError(f'{path}, {name}: {sorted(missing)} missing')
    hub = entry.get('hub')
    if hub and not re.fullmatch('[0-9a-f]{40}', entry['version']):
      raise ValueError(f'{path}, {name}: the version {entry["version"]} is no commit')
    for file in entry['files']:
      if hub:
        kind = 'datasets/' if hub['type'] == 'dataset' else ''
        where = f'{hub["repo"]}/resolve/{entry["version"]}/{file["path"]}'
        file['url'] = f'{_HUB}/{kind}{where}'
      if {'path', 'url', 'sha256'} - file.keys():
        raise ValueError(f'{path}, {name}: a file needs path, url and sha256: {file}')
      parts = pathlib.PurePosixPath(file['path'])
      if parts.is_absolute() or '..' in parts.parts:
        raise ValueError(f'{path}, {name}: {file["path"]} is outside of its folder')
      if urllib.parse.urlsplit(file['url']).scheme not in ('http', 'https'):
        raise ValueError(f'{path}, {name}: {file["url"]} is no http(s) address')
      if file['sha256'] is not None and len(file['sha256']) != 64:
        raise ValueError(f'{path}, {name}: the sha256 of {file["path"]} has 64 digits')
  return manifest


class Sums:
  """The sums of files that were trusted when they first came, in downloads/sums.json."""

  def __init__(self, path: pathlib.Path):
    """Reads the file, if there is one.

    Raises:
      ValueError: It is damaged.
    """
    self.path = path
    try:
      self._known = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
      raise ValueError(
        f'{path} is no JSON ({error}): it holds the sums of what was fetched before. '
        'Mend it, or delete it to trust once more what is there'
      ) from None

  def find(self, name: str, file: Mapping[str, Any]) -> tuple[str | None, str]:
    """The sum that a file must have, and who says so; None if nobody does."""
    if file['sha256'] is not None:
      return file['sha256'], 'the manifest'
    known = self._known.get(f'{name}/{file["path"]}', {})
    # A new version of the manifest may name another address: that is another file.
    if known.get('url') != file['url']:
      return None, ''
    return known['sha256'], f'{self.path}, since {known["first_seen"]}'

  def is_older(self, name: str, file: Mapping[str, Any], found: str) -> bool:
    """Whether what is there, with the sum `found`, came from another address."""
    known = self._known.get(f'{name}/{file["path"]}', {})
    return known.get('url') != file['url'] and known.get('sha256') == found

  def trust(
    self, name: str, file: Mapping[str, Any], found: str, size: int, whence: str
  ) -> None:
    """Records the sum of a file that nobody vouches for, and says so."""
    self._known[f'{name}/{file["path"]}'] = {
      'sha256': found,
      'bytes': size,
      'url': file['url'],
      'first_seen': datetime.date.today().isoformat(),
    }
    _write(self.path, json.dumps(self._known, indent=2) + '\n')
    print(
      f'{name}: TRUSTED ON FIRST USE: the manifest knows no sha256 of {file["path"]}, so '
      f'{whence} could not be verified. Its sha256 is\n  {found}\n'
      f'  recorded in {self.path}; from now on anything else is refused.'
    )


def fetch(
  name: str,
  entry: Mapping[str, Any],
  directory: pathlib.Path,
  sums: Sums,
  *,
  strict: bool = False,
) -> None:
  """Brings the files of one entry into `directory`, each whole and verified.

  Args:
    name: Of the entry.
    entry: Of the manifest.
    directory: Made if missing. Archives are extracted beside themselves.
    sums: Of the files that the manifest knows no sum of.
    strict: Refuse those files before anything is fetched.

  Raises:
    ValueError: A file has another sum than it must have, an archive holds a path that
      leaves its folder, or with `strict`, the manifest knows no sum of a file.
    OSError: The download failed; says which files belong where.
  """
  unknown = [file['path'] for file in entry['files'] if file['sha256'] is None]
  if unknown and strict:
    raise ValueError(
      f'{name}: --strict, and the manifest knows no sha256 of {", ".join(unknown)}. Look '
      f'at {entry["home"]}, and if you trust it, fetch without --strict'
    )
  for file in entry['files']:
    target = directory / file['path']
    wanted, by = sums.find(name, file)
    found = sha256(target) if target.exists() else None
    if found and wanted is None and not sums.is_older(name, file, found):
      shutil.rmtree(archives.find_folder(target), ignore_errors=True)
      size = target.stat().st_size
      sums.trust(name, file, found, size, 'what was in its place already')
    elif found and found == wanted:
      print(f'{name}: {file["path"]} is there, with the sum of {by}')
    else:
      if found:
        cause = f'does not have the sum of {by}' if wanted else 'is of another version'
        print(f'{name}: {file["path"]} {cause}: fetched again')
      try:
        _get(name, entry, file, target, sums)
      except OSError as error:
        missing = [f for f in entry['files'] if not (directory / f['path']).exists()]
        places = (f'\n  {f["url"]}\n    to {directory / f["path"]}' for f in missing)
        raise OSError(
          f'{error}\nWithout a network, put these files to their places, and give the '
          f'same command again:{"".join(places)}'
        ) from None
    if target.name.endswith(archives.SUFFIXES) and archives.extract(target):
      print(f'{target.name}: extracted to {_shown(archives.find_folder(target))}')


def _get(
  name: str,
  entry: Mapping[str, Any],
  file: Mapping[str, Any],
  target: pathlib.Path,
  sums: Sums,
) -> None:
  """Downloads one file and puts it into its place once its sum is right."""
  target.parent.mkdir(parents=True, exist_ok=True)
  part = target.with_name(target.name + '.part')
  if 'hub' in entry:
    transfers.download_from_hub(entry, file['path'], part)
  else:
    transfers.download(file['url'], part)
  found, size = sha256(part), part.stat().st_size
  wanted, by = sums.find(name, file)
  if wanted is None:
    plain = file['url'].startswith('http:')
    way = ', over a connection that anybody on the way can change,' if plain else ''
    sums.trust(
      name, file, found, size, f'what {transfers.find_host(file["url"])} sent{way}'
    )
  elif found != wanted:
    part.unlink()
    raise ValueError(
      f'{name}: {file["path"]} has the sha256 {found} and not {wanted} ({by}); it was '
      'deleted. The file at its address has changed, or somebody changed it on the way'
    )
  part.replace(target)
  # What was extracted from another file is not what is in this one.
  shutil.rmtree(archives.find_folder(target), ignore_errors=True)
  print(f'{name}: {file["path"]}, {size:,} bytes, {found[:12]}...')


def convert(name: str, entry: Mapping[str, Any], directory: pathlib.Path) -> None:
  """Makes corpus.jsonl.gz, train.jsonl.gz and dev.jsonl.gz of official question files.

  Raises:
    ValueError: A file is not there or broken, or the environment is missing.
  """
  named = entry.get('questions')
  if not named:
    return
  sources = {split: _find(name, directory, file) for split, file in named.items()}
  aliases = sources.pop('aliases', None)
  made = [directory / f'{split}.jsonl.gz' for split in (*sources, 'corpus')]
  newest = max(path.stat().st_mtime for path in (*sources.values(), aliases) if path)
  if all(path.exists() and path.stat().st_mtime >= newest for path in made):
    print(f'{name}: is converted')
    return
  sys.path.insert(0, str(ROOT))
  try:
    import convert_questions
  except ModuleNotFoundError as error:
    raise ValueError(
      f"{name} is downloaded and not converted: that needs the project's environment (no "
      f'module {error.name!r} here). Make it with `make .venv/installed`, and give the '
      'same command again'
    ) from None
  print(f'{name}: converting ...', flush=True)
  done = convert_questions.convert(sources, directory, aliases)
  for message in done.broken[:5]:
    print(f'{name}: left out: {message}')
  if len(done.broken) > 5:
    print(f'{name}: left out: {len(done.broken) - 5} rows more')
  counts = ', '.join(f'{count:,} {split}' for split, count in done.questions.items())
  print(f'{name}: {counts} questions and {done.passages:,} passages')


def _find(name: str, directory: pathlib.Path, file: str) -> pathlib.Path:
  """A file by its name, in the folder or in what was extracted there."""
  found = sorted(directory.rglob(file), key=lambda path: len(path.parts))
  if not found:
    raise ValueError(
      f'{name}: there is no {file} in {directory}: is it the official one?'
    )
  return found[0]


def sha256(path: pathlib.Path) -> str:
  """The sum of a file, in hex."""
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _shown(path: pathlib.Path) -> str:
  """A path as the commands that run in the checkout take it."""
  path = path.resolve()
  return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def _write(path: pathlib.Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_name(path.name + '.part')
  part.write_text(text, encoding='utf-8')
  part.replace(path)


def _listed(entries: Mapping[str, Any], to: pathlib.Path) -> Iterator[str]:
  """The lines of the list."""
  yield 'usage: agent-r1-jax fetch NAME [NAME...]      (--help says more)\n'
  for name, entry in entries.items():
    files = entry['files']
    there = sum((to / name / file['path']).exists() for file in files)
    sums = sum(file['sha256'] is not None for file in files)
    yield f'{name}\n    {entry["what"]}\n    licence: {entry["licence"]}'
    yield f'    files: {len(files)} ({there} there; the sums of {sums} are known)\n'


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  parser = argparse.ArgumentParser(
    prog='agent-r1-jax fetch',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('names', nargs='*', help='what to fetch; none: list what there is')
  parser.add_argument('--to', type=pathlib.Path, default=_OWNED / 'downloads')
  parser.add_argument('--strict', action='store_true', help='refuse files of unknown sum')
  parser.add_argument('--manifest', type=pathlib.Path, default=HERE / 'manifest.json')
  arguments = parser.parse_args(argv)
  try:
    entries = read_manifest(arguments.manifest)['entries']
    for name in arguments.names:
      if name not in entries:
        raise ValueError(f'no entry {name!r}; there are {", ".join(entries)}')
    sums = Sums(arguments.to / 'sums.json')
    following = []
    for name in arguments.names:
      entry, directory = entries[name], arguments.to / name
      print(f'{name}: licence {entry["licence"]}, from {entry["home"]}')
      fetch(name, entry, directory, sums, strict=arguments.strict)
      convert(name, entry, directory)
      print(f'{name}: all of it is in {_shown(directory)}')
      following += [c.format(directory=_shown(directory)) for c in entry.get('next', ())]
    if following:
      print('\nNext:')
      print(*(f'  {command}' for command in following), sep='\n')
  except (ValueError, OSError) as error:
    print(f'fetch.py: {error}', file=sys.stderr)
    return 1
  if not arguments.names:
    with contextlib.suppress(BrokenPipeError):
      print(*_listed(entries, arguments.to), sep='\n')
  return 0


if __name__ == '__main__':
  sys.exit(main())
