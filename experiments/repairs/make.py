r"""Makes tasks for an agent that mends programs: packages with one changed line each.

  python -m experiments.repairs.make --sdists=runs/sdists --folder=runs/repairs

Takes small pure-Python packages with permissive licences, whose source distributions have
their tests, changes one line (a comparison, an operator, a constant, a connective, a
dropped not), and keeps the change if a test that passed fails for it. Each becomes a
directory in the layout of docs/directories.md: the changed package, an instruction that
names the test, the package's tests as judge, and the line as solution. Equal seeds make
equal tasks.

What `--sdists` lacks is fetched by pip. `python -m experiments.directories --check_only`
then checks every task once more, by its solution and by doing nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
import functools
import pathlib
import random
import re
import subprocess
import sys
import tarfile
from typing import NamedTuple

from absl import app, flags

from agent_r1_jax.contrib.harbor import directories, task_folders
from experiments.repairs import mutations

_FOLDER = flags.DEFINE_string('folder', 'runs/repairs', 'Where the tasks are written.')
_SDISTS = flags.DEFINE_string('sdists', 'runs/sdists', 'The source distributions.')
_TASKS = flags.DEFINE_integer('tasks', 100, 'Tasks to make.', 1)
_PACKAGES = flags.DEFINE_list('packages', [], 'Packages; all by default.')
_SEED = flags.DEFINE_integer('seed', 0, 'Chooses the lines.')
_WORKERS = flags.DEFINE_integer('workers', 2, 'Mutants that are tested at a time.', 1)
_FETCH_SECONDS = 300.0
_TEST_SECONDS = 20


class Package(NamedTuple):
  """A package: its version, and its folders in the source distribution."""

  version: str
  source: str
  tests: str
  licence: str


PACKAGES = {
  'inflection': Package('0.5.1', 'inflection', 'test_inflection.py', 'MIT'),
  'parse': Package('1.22.4', 'parse', 'tests', 'MIT'),
  'toolz': Package('1.2.0', 'toolz', 'toolz/tests', 'BSD-3-Clause'),
  'boltons': Package('26.2.0', 'boltons', 'tests', 'BSD-3-Clause'),
}
_DOCKERFILE = """FROM python:3-slim
RUN pip install pytest
WORKDIR /app
COPY {name} {name}
"""
_SETTINGS = f"""schema_version = "1.1"

[metadata]
package = "{{name}} {{version}}, {{licence}}"
changed = "{{kind}}"

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = {_TEST_SECONDS}.0
"""
# No plugins that happen to be installed: they may be of another Python than the shell's.
# pytest is imported before what the agent left can be: it may have a pytest.py. Code that
# ends the process has the status 0 too, so the last line has to be pytest's, with as many
# tests that passed as with the solution.
_TEST = """#!/bin/bash
COLUMNS=200 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python3 -P -c '
import os, sys, pytest
sys.path.insert(0, os.getcwd())
sys.exit(pytest.main(sys.argv[1:]))
' -q --tb=line -p no:cacheprovider -c /dev/null \\
  --rootdir=/tests --confcutdir=/tests {files} > /logs/verifier/printed.txt
status=$? reward=0
cat /logs/verifier/printed.txt
last=$(tail -n 1 /logs/verifier/printed.txt)
if [ $status = 0 ] && [[ $last =~ ^{passed}" passed"[\\ ,] ]]; then reward=1; fi
echo $reward > /logs/verifier/reward.txt
"""
_INSTRUCTION = """One line of the Python package {name} in /app is wrong. For it the test
{test} of the package fails:

{message}

Find the line in /app/{name} and mend it. The package's tests are run in the end.
"""
_SOLUTION = """#!/bin/bash
python3 - <<'END'
import pathlib

path = pathlib.Path('/app/{path}')
lines = path.read_text().split('\\n')
assert lines[{line}] == {new!r}
lines[{line}] = {old!r}
path.write_text('\\n'.join(lines))
END
"""


class Mutant(NamedTuple):
  """A mutation, the test that fails for it, and how many of its files pass without it."""

  path: str
  change: mutations.Mutation
  files: tuple[str, ...]
  passed: int
  test: str
  message: str


def main(_):
  folder = pathlib.Path(_FOLDER.value)
  sources = {name: read(name) for name in _PACKAGES.value or PACKAGES}
  with futures.ThreadPoolExecutor(_WORKERS.value) as pool:
    found = {name: find_mutants(name, *sources[name], pool) for name in sources}
    made = 0
    while found and made < _TASKS.value:
      for name in [*found]:
        if made < _TASKS.value and (mutant := next(found[name], None)):
          made += 1
          write(folder / f'{name}-{made:03d}', name, *sources[name], mutant)
          print(f'{made}: {name}, {mutant.change.kind}, {mutant.test}', flush=True)
        elif not mutant:
          del found[name]


def read(name: str) -> tuple[dict[str, str], dict[str, str]]:
  """Returns a package's source by path below its parent, and its tests by name."""
  package, folder = PACKAGES[name], pathlib.Path(_SDISTS.value)
  path = folder / f'{name}-{package.version}.tar.gz'
  if not path.exists():
    command = 'pip download --quiet --no-deps --no-binary=:all: --dest'.split()
    command = [sys.executable, '-m', *command, str(folder), f'{name}=={package.version}']
    subprocess.run(command, check=True, timeout=_FETCH_SECONDS)
  source, tests = {}, {}
  with tarfile.open(path) as archive:
    for member in archive:
      inner = member.name.partition('/')[2]
      file = archive.extractfile(member) if member.isfile() else None
      if file is None:
        continue
      text = file.read().decode(errors='surrogateescape')
      if inner == package.tests or inner.startswith(f'{package.tests}/'):
        tests[pathlib.PurePosixPath(inner).name] = text
      elif inner.startswith(f'{package.source}/') and '/tests/' not in inner:
        source[f'{name}{inner.removeprefix(package.source)}'] = text
  # With it, tests would be modules of a package of their own.
  tests.pop('__init__.py', None)
  return source, tests


def find_mutants(
  name: str, source: Mapping[str, str], tests: Mapping[str, str], pool: futures.Executor
) -> Iterator[Mutant]:
  """Yields mutants that a test finds, of lines that differ, in an order by the seed."""
  files = sorted(test for test in tests if re.match(r'tests?_|tests?\.', test))
  # The tests that pass in some files without a change; 0 if others fail.
  count = functools.cache(lambda *files: count_passed(run_tests(source, tests, files)))
  passing = [test for test, n in zip(files, pool.map(count, files), strict=True) if n]
  changes = [
    (path, change)
    for path, text in sorted(source.items())
    if path.endswith('.py')
    for change in mutations.find(text)
  ]
  random.Random(f'{_SEED.value} {name}').shuffle(changes)
  lines, batch = set(), _WORKERS.value
  for first in range(0, len(changes), batch):
    tried = changes[first : first + batch]
    judged = pool.map(lambda t: judge(t[0], t[1], source, tests, passing, count), tried)
    for mutant in filter(None, judged):
      if (line := (mutant.path, mutant.change.line)) not in lines:
        lines.add(line)
        yield mutant


def judge(path, change, source, tests, passing: list[str], count) -> Mutant | None:
  """Returns a mutant if a test of its module, or else of the package, fails for it."""
  stem = pathlib.PurePosixPath(path).stem
  files = [test for test in passing if test == f'test_{stem}.py'] or passing
  mutated = {**source, path: change.apply(source[path])}
  output = run_tests(mutated, tests, files)
  found = output and re.search(r'^FAILED (\S+?::\S+)(?: - (.*))?$', output, re.MULTILINE)
  if not found or not (passed := count(*files)):
    return None
  test = found[1].removeprefix('../tests/')
  return Mutant(path, change, tuple(files), passed, test, found[2] or 'It fails.')


def count_passed(printed: str) -> int:
  """Returns how many tests passed by what pytest printed; 0 if one did not."""
  found = re.search(r'^(\d+) passed[ ,](?!.*error).*\Z', printed.rstrip(), re.MULTILINE)
  return int(found[1]) if found else 0


def run_tests(source, tests, files: Sequence[str]) -> str:
  """Runs tests in a workspace as the judge will; returns what they print, '' if late."""
  workspace = directories.Workspace()
  try:
    workspace.lay(
      task_folders.Folder(
        instruction='',
        files={f'/app/{path}': text for path, text in source.items()},
        tests={**tests, 'test.sh': write_script(files, 0)},
        solution={},
        workdir='/app',
        places=(*task_folders.OWN_PLACES, '/app'),
        agent_seconds=60.0,
        test_seconds=_TEST_SECONDS / 2,  # So that no task is at the edge of its time.
        digest='',
      )
    )
    workspace.judge()
    return '' if workspace.reason else workspace.printed
  finally:
    workspace.close()


def write_script(files: Sequence[str], passed: int) -> str:
  """Writes the script that runs test files and says whether so many tests passed."""
  return _TEST.format(files=' '.join(f'/tests/{file}' for file in files), passed=passed)


def write(folder: pathlib.Path, name: str, source, tests, mutant: Mutant) -> None:
  """Writes a task's folder."""
  package, change = PACKAGES[name], mutant.change
  names = {'name': name, 'version': package.version, 'licence': package.licence}
  helpers = {k: v for k, v in tests.items() if not k.startswith('test_')}
  judging = {k: tests[k] for k in mutant.files} | helpers
  mutated = {**source, mutant.path: change.apply(source[mutant.path])}
  files = {
    'task.toml': _SETTINGS.format(**names, kind=change.kind),
    'instruction.md': _INSTRUCTION.format(
      name=name, test=mutant.test, message=f'    {mutant.message}'
    ),
    'environment/Dockerfile': _DOCKERFILE.format(name=name),
    **{f'environment/{path}': text for path, text in mutated.items()},
    **{f'tests/{file}': text for file, text in judging.items()},
    'tests/test.sh': write_script(mutant.files, mutant.passed),
    'solution/solve.sh': _SOLUTION.format(
      path=mutant.path, line=change.line, new=change.new, old=change.old
    ),
  }
  for path, text in files.items():
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(text.encode(errors='surrogateescape'))


if __name__ == '__main__':
  app.run(main)
