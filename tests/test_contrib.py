"""What is contributed can be deleted: the rest neither imports it nor misses it."""

import ast
import functools
import pathlib
import shutil
import subprocess
import sys

import pytest
import test_imports

ROOT = test_imports.ROOT
CONTRIB = ROOT / test_imports.PACKAGE / 'contrib'
NAMES = sorted(path.parent.name for path in CONTRIB.glob('*/__init__.py'))


@functools.cache
def _list_imported(path: pathlib.Path) -> list[str]:
  """What a script or a test imports at its top."""
  tree = ast.parse(path.read_text())
  early = test_imports.at_import_time(tree)
  return [name for node, name in test_imports.imports(tree) if node in early]


def _uses(path: pathlib.Path, name: str) -> bool:
  """Whether a script or a test imports a folder of contrib/ at its top."""
  prefix = f'agent_r1_jax.contrib.{name}.'
  return any(f'{imported}.'.startswith(prefix) for imported in _list_imported(path))


@pytest.mark.parametrize('name', NAMES)
def test_a_folder_says_what_it_is_and_has_its_tests(name):
  readme = (CONTRIB / name / 'README.md').read_text()
  assert len(readme.splitlines()) <= 60 and readme.startswith('# ')
  assert [*(ROOT / 'tests/contrib' / name).glob('test_*.py')]
  for script in sorted(ROOT.glob('experiments/**/*.py')):
    assert not _uses(script, name) or script.stem in readme, script


@pytest.mark.parametrize('name', NAMES)
def test_tests_of_others_do_not_need_it(name):
  for path in sorted(ROOT.glob('tests/**/*.py')):
    if path.relative_to(ROOT).parts[:3] != ('tests', 'contrib', name):
      assert not _uses(path, name), path


def test_without_all_of_them_the_rest_can_be_imported(tmp_path):
  """Of one folder the same holds, since none imports another."""
  left_out = shutil.ignore_patterns('__pycache__', '.*', 'downloads')
  shutil.copytree(ROOT / 'agent_r1_jax', tmp_path / 'agent_r1_jax', ignore=left_out)
  for name in NAMES:
    shutil.rmtree(tmp_path / 'agent_r1_jax/contrib' / name)
  rest = sorted(tmp_path.glob('agent_r1_jax/**/*.py'))
  names = [path.relative_to(tmp_path).with_suffix('').parts for path in rest]
  modules = ['.'.join(name).removesuffix('.__init__') for name in names]
  assert len(modules) > 150 and not any('contrib.' in module for module in modules)
  script = f'import {", ".join(modules)}; print(agent_r1_jax.__file__)'
  command = [sys.executable, '-c', script]
  result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
  assert result.stdout.startswith(str(tmp_path)), result.stdout + result.stderr
