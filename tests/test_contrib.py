"""What is contributed can be deleted: the rest neither imports it nor misses it."""

import ast
import pathlib
import shutil
import subprocess
import sys

import pytest
import test_imports

ROOT = test_imports.ROOT
CONTRIB = ROOT / test_imports.PACKAGE / 'contrib'
NAMES = sorted(path.parent.name for path in CONTRIB.glob('*/__init__.py'))


def _uses(path: pathlib.Path, name: str) -> bool:
  """Whether a script or a test imports a folder of contrib/ at its top."""
  tree = ast.parse(path.read_text())
  early = test_imports.at_import_time(tree)
  prefix = f'agent_r1_jax.contrib.{name}'
  return any(
    node in early and f'{imported}.'.startswith(f'{prefix}.')
    for node, imported in test_imports.imports(tree)
  )


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


def test_without_all_of_them_the_rest_can_be_imported_and_tested(tmp_path):
  """Of one folder the same holds, since none imports another."""
  left_out = shutil.ignore_patterns('__pycache__', '.*', 'downloads')
  for name in ('agent_r1_jax', 'experiments', 'launch', 'third_party', 'tests', 'docs'):
    shutil.copytree(ROOT / name, tmp_path / name, ignore=left_out)
  for path in [path for path in ROOT.iterdir() if path.is_file()]:
    shutil.copy(path, tmp_path)
  for name in NAMES:
    shutil.rmtree(tmp_path / 'agent_r1_jax/contrib' / name)
    shutil.rmtree(tmp_path / 'tests/contrib' / name)
  for script in sorted(tmp_path.glob('experiments/**/*.py')):
    if any(_uses(script, name) for name in NAMES):
      script.unlink()
  command = [sys.executable, '-m', 'pytest', '--collect-only', '-q', '-n0', 'tests']
  result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
  assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
