"""Lists the tests of a change, the nearest first; `make check` runs them.

  python tests/changed.py           # the files that differ from the last commit
  python tests/changed.py main      # those that differ from a branch

First the changed tests and those of changed files, then what imports a changed module,
then the tests of its importers. With --sources, the changed files that are no tests.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
_FOLDERS = ('agent_r1_jax', 'experiments', 'third_party', 'tests')


def list_changed(base: str) -> list[str]:
  """Lists the Python files that differ from a commit, new ones included."""
  found = []
  for command in (
    ['diff', '--name-only', '--diff-filter=d', base],
    ['ls-files', '--others', '--exclude-standard'],
  ):
    run = subprocess.run(['git', *command], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
      raise SystemExit(run.stderr)
    found += run.stdout.split()
  return [x for x in found if x.endswith('.py') and x.split('/')[0] in _FOLDERS]


def read_imports() -> dict[str, set[str]]:
  """Reads which files of the repository each of them imports."""
  paths = [path for folder in _FOLDERS for path in (ROOT / folder).rglob('*.py')]
  names = {_name(path): str(path.relative_to(ROOT)) for path in paths}
  imported: dict[str, set[str]] = {}
  for path in paths:
    found = imported[str(path.relative_to(ROOT))] = set()
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        wanted = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom):
        wanted = [f'{node.module}.{alias.name}' for alias in node.names]
        wanted.append(f'{node.module}')
      else:
        continue
      found |= {names[name] for name in wanted if name in names}
  return imported


def _name(path: pathlib.Path) -> str:
  """The name by which a file is imported; tests import each other by their stems."""
  parts = path.relative_to(ROOT).with_suffix('').parts
  return parts[-1] if parts[0] == 'tests' else '.'.join(parts).removesuffix('.__init__')


def choose(changed: Sequence[str], imported: Mapping[str, Iterable[str]]) -> list[str]:
  """Chooses the test files of changed files, the nearest first."""
  importers = [x for x, found in imported.items() if set(found) & set(changed)]

  def named_after(paths: Iterable[str]) -> list[str]:
    stems = {f'test_{pathlib.Path(x).stem}' for x in paths if not x.startswith('tests/')}
    return [x for x in imported if pathlib.Path(x).stem in stems]

  near = *changed, *named_after(changed), *importers, *named_after(importers)
  ordered = dict.fromkeys(near)
  return [x for x in ordered if pathlib.Path(x).name.startswith('test_')]


def main(args: Sequence[str]) -> None:
  """Prints the files, one a line."""
  changed = list_changed(next((x for x in args if not x.startswith('-')), 'HEAD'))
  if '--sources' in args:
    found = [x for x in changed if not x.startswith('tests/')]
  else:
    found = choose(changed, read_imports())
  print(*found, sep='\n')


if __name__ == '__main__':
  main(sys.argv[1:])
