"""The lists of requirements agree with each other and with the rules."""

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import agent_r1_jax

ROOT = pathlib.Path(__file__).parents[1]


def requirements(name: str) -> list[str]:
  lines = (line.split(' #')[0].strip() for line in (ROOT / name).read_text().splitlines())
  return [line for line in lines if line and not line.startswith('#')]


def test_every_requirement_is_pinned_and_says_what_for():
  for name in ('requirements.txt', 'requirements-test.txt'):
    for line in (ROOT / name).read_text().splitlines():
      if not line.startswith('#'):
        assert re.match(
          r'[\w.-]+==[\w.]+(; python_version [<>=]+ "3.12")? +# \w', line
        ), line


def test_extras_agree_with_the_files():
  extras = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project'][
    'optional-dependencies'
  ]
  assert extras['test'] == requirements('requirements-test.txt')
  for extra, wanted in (('cuda', 'cuda12'), ('cuda13', 'cuda13'), ('tpu', 'tpu')):
    assert extras[extra] == [f'jax[{wanted}]'], 'requirements.txt has the version'


def test_files_that_are_no_code_are_in_the_wheel():
  """The page's style and scripts; each line of package-data finds something."""
  tools = tomllib.loads((ROOT / 'pyproject.toml').read_text())['tool']['setuptools']
  found = {
    path
    for package, patterns in tools['package-data'].items()
    for pattern in patterns
    for path in (
      ROOT / package.removeprefix('agent_r1_jax.scripts.').replace('.', '/')
    ).glob(pattern)
  }
  tracked = subprocess.check_output(
    ['git', 'ls-files', 'agent_r1_jax', 'experiments', 'third_party'], cwd=ROOT, text=True
  )
  others = {ROOT / line for line in tracked.split('\n') if line and line[-3:] != '.py'}
  assert others and others <= found


def test_the_version_is_in_one_place():
  (line,) = re.findall('^## (.*)$', (ROOT / 'CHANGELOG.md').read_text(), re.M)[:1]
  assert line == agent_r1_jax.__version__
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())
  assert 'version' in project['project']['dynamic']
  assert project['tool']['setuptools']['dynamic']['version'] == {
    'attr': 'agent_r1_jax.__version__'
  }


def test_importing_the_package_imports_no_library():
  code = 'import sys; before = {*sys.modules}; import agent_r1_jax; '
  code += 'print(len({*sys.modules} - before), "numpy" in sys.modules)'
  found = subprocess.check_output([sys.executable, '-c', code], cwd=ROOT, text=True)
  number, numpy = found.split()
  assert int(number) < 40 and numpy == 'False'


def test_names_are_imported_when_they_are_used():
  from agent_r1_jax.agent import env, tool
  from agent_r1_jax.rl import algorithms

  assert agent_r1_jax.ToolEnv is env.ToolEnv
  assert agent_r1_jax.tool is tool.tool
  assert agent_r1_jax.algorithms is algorithms
  with pytest.raises(AttributeError, match="no attribute 'Toolenv'"):
    getattr(agent_r1_jax, 'Toolenv')  # noqa: B009


def test_the_example_of_the_readme_needs_four_imports_at_most():
  (code,) = re.findall('```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.S)
  assert len(re.findall('^ *(?:import|from) ', code, re.M)) <= 4


def test_jax_has_the_names_that_it_does_not_document():
  """What is public neither stores values nor says which process is lost."""
  from jax._src import distributed
  from jax._src.lib import _jax

  source = (ROOT / 'agent_r1_jax' / 'host' / 'processes.py').read_text()
  used = {
    distributed.global_state: set(re.findall(r'\bstate\.(\w+)', source)),
    _jax.DistributedRuntimeClient: set(re.findall(r'\bclient\.(\w+)\(', source)),
  }
  for owner, names in used.items():
    assert names, 'no name was found: has the source changed?'
    missing = sorted(name for name in names if not hasattr(owner, name))
    assert not missing, f'JAX lacks {missing} now: agent_r1_jax/host/processes.py uses it'
