"""The wheel, in an environment of its own and seen from another folder."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv

from packaging import requirements
import pytest

from agent_r1_jax import __main__ as command

ROOT = pathlib.Path(__file__).parents[1]

# Each command's help, from one process that has imported what they share.
HELP = """
import os, sys, traceback, warnings
import agent_r1_jax.agent.chat, agent_r1_jax.train
import ml_collections.config_flags, transformers
from agent_r1_jax import __main__ as command
warnings.simplefilter('ignore')  # Children of a process that uses no device yet.
for name in command.SCRIPTS:
  if not (child := os.fork()):
    os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), 1)
    sys.argv = ['agent-r1-jax', name, '--help']
    try:
      command.main()
    except SystemExit:
      sys.stdout.flush()
      os._exit(0)
    except BaseException:
      traceback.print_exc()
    os._exit(3)
  assert os.waitpid(child, 0)[1] == 0, name
"""
# A script as a user writes it: a tool, an environment, a test of both.
OWN = """
import asyncio, agent_r1_jax
from agent_r1_jax import ToolEnv, testing, tool, types
@tool
def double(n: int) -> str:
  '''Doubles a number.

  Args:
    n: The number.
  '''
  return str(2 * n)
task = types.Task('1', [{'role': 'user', 'content': '2 * 7?'}], '14')
call = '<tool_call>{"name": "double", "arguments": {"n": 7}}</tool_call>'
reward = lambda task, messages: float('14' in messages[-1]['content'])
make_env = lambda: ToolEnv([double], reward)
steps = asyncio.run(testing.check_env(make_env, task, [call, 'It is 14.']))
print(steps[-1].reward, agent_r1_jax.__file__)
"""


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
  """The folder of an environment with the wheel, beside what the tests run with."""
  folder = tmp_path_factory.mktemp('wheel')
  source = folder / 'source'  # A build writes into its source.
  tracked = subprocess.check_output(['git', 'ls-files'], cwd=ROOT, text=True).split('\n')
  for name in filter(None, tracked):
    if (ROOT / name).is_file() and not name.startswith(('tests/', 'docs/')):
      (source / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(ROOT / name, source / name)
  pip = [sys.executable, '-m', 'pip', '--quiet', '--disable-pip-version-check']
  alone = ['--no-deps', '--no-index']
  subprocess.run(
    [*pip, 'wheel', *alone, '--no-build-isolation', '-w', folder, source], check=True
  )
  (wheel,) = folder.glob('*.whl')
  venv.create(folder / 'env', symlinks=True)
  subprocess.run([*pip, '--python', folder / 'env', 'install', *alone, wheel], check=True)
  # The libraries are the tests' own. What a .pth there names, as this checkout, is not.
  (site,) = (folder / 'env').glob('lib/python*/site-packages')
  (site / 'libraries.pth').write_text(sysconfig.get_path('purelib'))
  return folder / 'env'


def run(installed, *arguments, cwd):
  variables = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
  return subprocess.run(
    [installed / 'bin' / arguments[0], *arguments[1:]],
    cwd=cwd,
    env=variables,
    capture_output=True,
    text=True,
  )


def test_each_command_says_on_a_screen_how_it_is_used(installed, tmp_path):
  done = run(installed, 'python', '-c', HELP, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  for name in command.SCRIPTS:
    text = (tmp_path / name).read_text()
    assert re.search(rf'^ *agent-r1-jax {name}\b', text, re.M), name
    assert text.count('\n') < 80, name


def test_a_script_of_ones_own_runs_elsewhere(installed, tmp_path):
  (tmp_path / 'mine.py').write_text(OWN)
  # Neither a folder of that name in the way, nor one of ours in the user's.
  (tmp_path / 'experiments').mkdir()
  (tmp_path / 'experiments' / '__init__.py').write_text('mine = 1')
  done = run(installed, 'python', 'mine.py', cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  reward, path = done.stdout.split()
  assert float(reward) == 1 and pathlib.Path(path).is_relative_to(installed)
  code = 'import experiments; print(experiments.mine)'
  assert run(installed, 'python', '-c', code, cwd=tmp_path).stdout == '1\n'
  done = run(installed, 'agent-r1-jax', 'fetch', cwd=tmp_path)
  assert done.returncode == 0 and 'hotpotqa' in done.stdout, done.stderr


def test_the_command_lists_what_there_is_and_refuses_the_rest(installed, tmp_path):
  done = run(installed, 'agent-r1-jax', cwd=tmp_path)
  assert done.returncode == 0 and done.stdout == command.describe() + '\n'
  done = run(installed, 'agent-r1-jax', 'nosuch', cwd=tmp_path)
  assert done.returncode == 1 and 'nosuch: there is no such script' in done.stderr
  for name in ('experiments.nosuch', 'experiments.worlds', 'experiments', 'os'):
    done = run(installed, 'agent-r1-jax', name, cwd=tmp_path)
    assert done.returncode == 1 and f'{name}: there is no such' in done.stderr, done
  # No line of a user's own: the mistake is in the flags.
  done = run(installed, 'agent-r1-jax', 'serve', cwd=tmp_path)
  assert done.returncode == 1 and done.stderr.startswith('model.path is empty; '), done


def test_a_script_that_starts_others_finds_them(installed, tmp_path):
  command = ['agent-r1-jax', 'experiments.bench.first_light', '--out=light']
  done = run(installed, *command, '--shape=tiny', '--parts=card', cwd=tmp_path)
  assert done.returncode == 0, done
  assert 'failed' not in (tmp_path / 'light' / 'lines.jsonl').read_text()


def test_the_bounds_allow_what_the_suite_runs_with():
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  bounds = {}
  for line in project['dependencies']:
    bound = requirements.Requirement(line)
    bounds[bound.name] = bound.specifier
  pins = {}
  for line in (ROOT / 'requirements.txt').read_text().splitlines():
    if not line.startswith('#'):
      pin = requirements.Requirement(line.split(' #')[0])
      pins.setdefault(pin.name, []).extend(s.version for s in pin.specifier)
  assert pins.keys() == bounds.keys()
  for name, versions in pins.items():
    assert all(bounds[name].contains(version) for version in versions), name
