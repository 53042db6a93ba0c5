"""Reads task directories in the layout of Harbor (harborframework.com).

  task.toml            time limits, and other requirements
  instruction.md       the prompt
  environment/         the files of the workspace, and a Dockerfile that copies them
  tests/test.sh        judges, and writes /logs/verifier/reward.txt
  solution/solve.sh    solves the task; without it, `directories.check` fails

There is no container: a Dockerfile may have FROM, WORKDIR, COPY and pip install of
packages that are already here. Anything else raises, so that no task is played half.
"""

import hashlib
from importlib import metadata
import json
import os
import pathlib
import posixpath
import re
import shlex
import sys
import tomllib
from typing import Any, NamedTuple

# Limits of a folder, which travels to a shell's process in one request.
MOST_FILES = 2000
MOST_BYTES = 1 << 22
MOST_SECONDS = 86_400
# Harbor's default.
_SECONDS = 600.0
# The layout's own directories.
OWN_PLACES = ('/tests', '/logs', '/solution')
_SYSTEM = 'bin boot dev etc lib lib64 proc root run sbin sys tmp usr var'.split()
_IMAGE = re.compile(r'(?:docker\.io/)?(?:library/)?(debian|ubuntu|python)(?::([\w.-]+))?')
_PIP = re.compile(r'(?:python3? -m )?pip3? install ((?:-q|--quiet|--no-cache-dir) )*')
_REQUIREMENT = re.compile(r'([A-Za-z0-9][\w.-]*)(?:==([\w.]+))?')
_CAN_DO = (
  'FROM debian, ubuntu or python, WORKDIR, COPY of files, and pip install of packages '
  'that are installed here'
)
# Keys that need more than a shell, by table; '' is the top of task.toml.
_REFUSED = {
  '': 'steps artifacts',
  'environment': 'docker_image gpus tpu mcp_servers env healthcheck skills_dir',
  'agent': 'user network_mode',
  'verifier': 'env user collect environment',
  'solution': 'env',
}
_COMPOSE = ('docker-compose.yaml', 'docker-compose.yml', 'compose.yaml', 'compose.yml')


class Folder(NamedTuple):
  """A task's folder.

  Attributes:
    instruction: The prompt.
    files: The initial files, as texts by absolute path; bytes that are not UTF-8 are
      surrogates.
    tests: The files of tests/, by path below it.
    solution: The files of solution/, by path below it.
    workdir: The initial directory of the agent and the tests.
    places: The absolute directories of the task's files, and the layout's own.
    agent_seconds: Time limit of the agent.
    test_seconds: Time limit of tests/test.sh.
    digest: Of all fields; equal for equal tasks.
  """

  instruction: str
  files: dict[str, str]
  tests: dict[str, str]
  solution: dict[str, str]
  workdir: str
  places: tuple[str, ...]
  agent_seconds: float
  test_seconds: float
  digest: str


def read(path: str | os.PathLike) -> Folder:
  """Reads a task's folder.

  Raises:
    ValueError: It is not such a folder, or needs something unsupported; names file and
      line.
  """
  folder = pathlib.Path(path)
  if folder.is_symlink():
    raise ValueError(f'{folder}: it is a link; copy the folder.')
  texts = _read_files(folder)
  for name in ('task.toml', 'instruction.md', 'tests/test.sh'):
    if not texts.get(name, '').strip():
      raise ValueError(f'{folder / name}: it is missing or empty.')
  settings = _parse_settings(folder / 'task.toml', texts['task.toml'])
  below = lambda top: {
    name.removeprefix(top): text for name, text in texts.items() if name.startswith(top)
  }
  context = below('environment/')
  if found := [name for name in _COMPOSE if name in context]:
    raise ValueError(
      f'{folder / "environment" / found[0]}: there are no containers here.'
    )
  workdir, files = _lay_out(folder / 'environment', context)
  places = {_find_place(name) for name in (f'{workdir}/', *files)}
  return Folder(
    texts['instruction.md'].encode(errors='replace').decode(),
    files,
    below('tests/'),
    below('solution/'),
    workdir,
    (*OWN_PLACES, *sorted(places)),
    *(_read_seconds(folder, settings, table) for table in ('agent', 'verifier')),
    digest=hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest(),
  )


def _read_files(folder: pathlib.Path) -> dict[str, str]:
  """Reads all files below a folder, by relative path; rejects links and large files."""
  texts, left, directories = {}, MOST_BYTES, [folder]
  while directories:
    for entry in sorted(os.scandir(directories.pop()), key=lambda entry: entry.name):
      if entry.is_dir(follow_symlinks=False):
        directories.append(pathlib.Path(entry.path))
        continue
      if not entry.is_file(follow_symlinks=False):
        raise ValueError(f'{entry.path}: it is a link or no regular file; copy the file.')
      left -= entry.stat(follow_symlinks=False).st_size
      if left < 0 or len(texts) == MOST_FILES:
        raise ValueError(
          f'{folder}: a task has at most {MOST_FILES} files and {MOST_BYTES >> 20} MiB; '
          f'{entry.path} is beyond that.'
        )
      data = pathlib.Path(entry.path).read_bytes()
      name = os.fsencode(os.path.relpath(entry.path, folder)).decode(errors='replace')
      texts[name] = data.decode(errors='surrogateescape')
  return texts


def _parse_settings(path: pathlib.Path, text: str) -> dict[str, Any]:
  try:
    settings = tomllib.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path}: it is no TOML: {error}') from None
  for table, names in _REFUSED.items():
    values = settings.get(table, {}) if table else settings
    if not isinstance(values, dict):
      raise ValueError(f'{path}: {table} is {values!r:.50}; make it a table [{table}].')
    for name in names.split():
      if values.get(name):
        place = f'{table}.{name}' if table else name
        raise ValueError(f'{path}: {place} is set, which needs more than a shell.')
  return settings


def _read_seconds(folder: pathlib.Path, settings: dict[str, Any], table: str) -> float:
  value = settings.get(table, {}).get('timeout_sec', _SECONDS)
  known = isinstance(value, int | float) and not isinstance(value, bool)
  if not known or not 0 < value <= MOST_SECONDS:
    raise ValueError(
      f'{folder / "task.toml"}: {table}.timeout_sec is {value!r:.50}; make it a number '
      f'above 0 and at most {MOST_SECONDS}.'
    )
  return float(value)


def _lay_out(folder: pathlib.Path, context: dict[str, str]) -> tuple[str, dict[str, str]]:
  """Returns the directory, and the files by absolute path, that a Dockerfile makes."""
  if 'Dockerfile' not in context:
    return '/app', {f'/app/{name}': text for name, text in context.items()}
  workdir, files, images = '/', {}, 0
  directories = {'/'}
  for number, line in _split_lines(context['Dockerfile']):
    name, _, rest = line.partition(' ')
    made: dict[str, str] = {}
    try:
      match name.upper():
        case 'FROM':
          images += 1
          _check_image(rest.strip(), images)
        case 'WORKDIR':
          workdir = posixpath.normpath(posixpath.join(workdir, *_words(rest, 1)))
          directories.add(workdir)
        case 'COPY':
          made = _copy(_words(rest), context, workdir, directories)
          files |= made
          above = (pathlib.PurePosixPath(path).parents for path in made)
          directories |= {str(parent) for parents in above for parent in parents}
        case 'RUN':
          _check_packages(rest.strip())
        case 'CMD' | 'LABEL' | 'EXPOSE' | 'MAINTAINER':
          pass  # Harbor starts its own command; the others only describe.
        case _:
          raise ValueError(f'{name} is not among what can be done without an image')
      for path in (f'{workdir}/', *made) if workdir != '/' else made:
        _find_place(path)
    except ValueError as error:
      raise ValueError(
        f'{folder / "Dockerfile"}, line {number}: {line!r:.200}: {error}. This needs a '
        f'real image, and here is none; supported are {_CAN_DO}.'
      ) from None
  if workdir == '/':
    raise ValueError(f'{folder / "Dockerfile"}: a line such as WORKDIR /app is missing.')
  return workdir, files


def _split_lines(text: str) -> list[tuple[int, str]]:
  """Returns a Dockerfile's instructions, each with its first line's number."""
  found, first, parts = [], 0, []
  for number, line in enumerate(text.splitlines(), 1):
    if not (line := line.strip()) or line.startswith('#'):
      continue
    first = first if parts else number
    parts.append(line.removesuffix('\\'))
    if not line.endswith('\\'):
      found.append((first, ' '.join(''.join(parts).split())))
      parts = []
  return [*found, *([(first, ''.join(parts))] if parts else [])]


def _words(text: str, count: int = 0) -> list[str]:
  words = shlex.split(text)
  if any(re.search(r'[$*?\[<]|^--', word) for word in words):
    raise ValueError('flags, variables, patterns and lists are not read')
  if len(words) != count if count else len(words) < 2:
    raise ValueError(f'it has {len(words)} words')
  return words


def _check_image(image: str, count: int) -> None:
  found = _IMAGE.fullmatch(image)
  if not found or count > 1:
    raise ValueError('the image is another one, or has stages')
  version = re.match(r'\d+(?:\.\d+)?', found[2] or '')
  own = f'{sys.version_info.major}.{sys.version_info.minor}'
  if found[1] == 'python' and version and version[0] not in (own, own.split('.')[0]):
    raise ValueError(f'the Python here is {own}')


def _check_packages(command: str) -> None:
  """Rejects anything but the installation of packages that are installed here."""
  match = _PIP.match(f'{command} ')
  names = shlex.split(command[match.end() :]) if match else []
  if not names:
    raise ValueError('a command would have to be run as root')
  for name in names:
    found = _REQUIREMENT.fullmatch(name)
    try:
      there = metadata.version(found[1]) if found else None
    except metadata.PackageNotFoundError:
      there = None
    if not found or not there or found[2] not in (None, there):
      raise ValueError(f'{name} is not installed here ({there or "in no version"})')


def _copy(
  words: list[str], context: dict[str, str], workdir: str, directories: set[str]
) -> dict[str, str]:
  """Returns the files that a COPY instruction makes, by absolute path."""
  *sources, to = words
  target = posixpath.normpath(posixpath.join(workdir, to))
  into = to.endswith(('/', '/.')) or to == '.' or len(sources) > 1
  into = into or target in directories
  if '.dockerignore' in context:
    raise ValueError('.dockerignore is not read')
  made = {}
  for source in sources:
    name = posixpath.normpath(source).lstrip('/')
    if name in context:
      path = posixpath.join(target, posixpath.basename(name)) if into else target
      made[path] = context[name]
      continue
    top = '' if name == '.' else f'{name}/'
    found = {k.removeprefix(top): v for k, v in context.items() if k.startswith(top)}
    if not found:
      raise ValueError(f'{source} is not in environment/')
    made |= {posixpath.join(target, name): text for name, text in found.items()}
  return made


def _find_place(path: str) -> str:
  """Returns the directory of the root, or of /usr/src, that contains a path."""
  first = path.split('/')[1]
  if path.startswith('/usr/src/') and path != '/usr/src/':
    return '/usr/src'
  if not first or first in _SYSTEM or path.count('/') < 2:
    raise ValueError(f"{path} would be among the system's files")
  if f'/{first}' in OWN_PLACES:
    raise ValueError(f'/{first} is where the layout has its own files')
  return f'/{first}'
