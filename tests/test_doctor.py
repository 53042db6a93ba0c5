"""The doctor finds what would cost device time, on the machine and in environments."""

import asyncio
import importlib.util
import json
import pathlib
import re
import time
from types import SimpleNamespace

import jax
import pytest
import script
import tiny

from agent_r1_jax import types
from agent_r1_jax.agent import env, tool
from agent_r1_jax.checks import doctor, environment_check
from agent_r1_jax.models import decoder
from agent_r1_jax.models.files import hf_config
from agent_r1_jax.rl import algorithms
from agent_r1_jax.serve import program
from agent_r1_jax.train.plan import footprint
from experiments import published

_TASKS = [
  types.Task(f't{i}', [{'role': 'user', 'content': f'{i} + 100 + 200?'}], f'{300 + i}')
  for i in range(5)
]


@tool.tool
def add(a: int, b: int) -> str:
  """Adds.

  Args:
    a: A number.
    b: Another.
  """
  return str(a + b)


def right(task, messages):
  return float(messages[-1]['content'].strip() == task.answer)


def broken(task, messages):
  raise KeyError('score')


async def hangs(task, messages):
  await asyncio.Event().wait()


class Leaks(env.ToolEnv):
  async def reset(self, task):
    opening = await super().reset(task)
    return [*opening, {'role': 'user', 'content': f'Hint: {task.answer}.'}]


class Forgets(env.ToolEnv):
  begun = 0

  async def reset(self, task):
    Forgets.begun += 1
    opening = await super().reset(task)
    return [{'role': 'user', 'content': f'Game {Forgets.begun}'}, *opening]


def look(make_env, **options):
  found = environment_check.check_env(_TASKS, make_env, **options)
  return {finding.name: finding for finding in found}


def test_a_sound_environment_has_no_failed_finding():
  made = []
  make_env = lambda: tiny.ClosedOnce(made, [add], right)
  found = look(make_env, solve=lambda task: [task.answer])
  assert [f.name for f in found.values() if f.status == 'fail'] == []
  assert found['rewards'] == ('rewards', 'ok', '2 different ones: 0, 1', '')
  assert found['leaks'].status == found['conformance'].status == 'ok'
  assert '16 episodes played' in found['environment'].text
  assert {env.closings for env in made} == {1}


@pytest.mark.parametrize(
  ('make_env', 'options', 'name', 'status', 'text'),
  [
    (lambda: env.ToolEnv([], lambda *_: 0.5), {}, 'rewards', 'warn', 'all 24 episodes'),
    (
      lambda: env.ToolEnv([], right),
      {'solve': lambda task: ['?']},
      'rewards',
      'fail',
      'all 12 episodes got 0',
    ),
    (
      lambda: env.ToolEnv([], lambda _, m: float(len(m[-1]['content']) > 3)),
      {'solve': lambda task: [task.answer]},
      'rewards',
      'fail',
      'get at most 0, others as much',
    ),
    (lambda: Leaks([], right), {}, 'leaks', 'warn', "5 of 5 tasks .* '300' of task 't0'"),
    (lambda: Forgets([], right), {}, 'conformance', 'fail', 'reset is not repeatable'),
    (
      lambda: env.ToolEnv([], broken),
      {},
      'environment',
      'fail',
      r"step\(''\): KeyError: 'score' .*test_doctor.py:\d+, in broken",
    ),
    (
      lambda: env.ToolEnv([], hangs),
      {'seconds': 1.0},
      'environment',
      'fail',
      r"step\(''\) gave no answer; 1 seconds were left",
    ),
  ],
)
def test_a_faulty_environment_is_found(make_env, options, name, status, text):
  finding = look(make_env, **options)[name]
  assert finding.status == status
  assert re.search(text, finding.text), finding.text
  assert finding.remedy or name == 'environment'


@pytest.mark.parametrize(
  ('reward', 'status', 'text'),
  [
    ([], 'ok', 'and has no reward of its own'),
    ([right], 'ok', 'a program is not played .*; an empty answer gets 0$'),
    ([broken], 'fail', r"an empty answer: KeyError: 'score' .*, in broken"),
    ([hangs], 'fail', 'empty answer gave no answer; 0.1 seconds were left'),
  ],
)
def test_a_program_is_not_played_and_its_reward_is_looked_at(reward, status, text):
  seconds = 0.1 if reward == [hangs] else 60.0
  make_env = lambda: program.Program(lambda task, url: 1.0, *reward)
  (finding,) = look(make_env, seconds=seconds).values()
  assert finding.status == status and re.search(text, finding.text), finding.text


def test_a_reward_that_holds_the_event_loop():
  calls = []

  async def reward(task, messages):
    calls.append(task)
    if len(calls) == 1:
      time.sleep(0.7)
    return right(task, messages)

  found = environment_check.check_env(_TASKS[:1], lambda: env.ToolEnv([], reward))
  assert found[0].status == 'warn' and 'the event loop was held for' in found[0].text


def test_no_task_or_no_environment():
  assert look(lambda: 1 / 0)['environment'].text == 'ZeroDivisionError: division by zero'
  (finding,) = environment_check.check_env([], lambda: env.ToolEnv([], right))
  assert finding.status == 'fail' and 'tasks is empty' in finding.text


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny.save(tmp_path_factory.mktemp('model') / 'tiny')


def examine(config, workdir):
  return {f.name: f for f in doctor.examine(config, workdir, algorithms.grpo())}


def test_a_machine_that_fits_is_all_ok(model, tmp_path, capsys):
  found = examine(tiny.run_config(model=str(model)), tmp_path / 'run')
  # What may be another way where somebody else tests.
  machine = {'versions', 'isolation', 'disk'}
  assert {f.status for n, f in found.items() if n not in machine} == {'ok'}
  assert 'estimated peak' in found['memory'].text
  assert 'checkpoints and model take 0.0' in found['disk'].text
  assert not (tmp_path / 'run').exists()
  assert doctor.show(list(found.values())) == int(
    any(f.status == 'fail' for f in found.values())
  )
  assert all(name in capsys.readouterr().out for name in ['estimated'])


def test_what_does_not_fit_is_found_with_its_remedy(model, monkeypatch):
  monkeypatch.setenv('AGENT_R1_MEMORY_GB', '.5')
  config = tiny.run_config(model=str(model), clip_norm=0.0)
  found = examine(config, '/proc/nowhere')
  assert found['configuration'].text.startswith('optimizer.clip_norm is 0.0')
  assert 'is estimated to take' in found['memory'].text and found['memory'].remedy
  assert found['disk'].remedy.startswith('Give another --workdir')
  failed = [n for n in ('configuration', 'memory', 'disk') if found[n].status == 'fail']
  assert len(failed) == 3 and doctor.show(list(found.values())) == 1


def test_a_critic_that_is_a_second_head_is_not_written_twice(tmp_path):
  directory = pathlib.Path(tiny.save(tmp_path / 'model'))
  config, needed = tiny.run_config(model=str(directory)), []
  for value_head in (False, True):
    path = directory / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'value_head': value_head}))
    needed.append(doctor._needed_bytes(config, algorithms.ppo()))
  init = lambda: decoder.init(tiny.config(layers=1), jax.random.key(0))
  model = 4 * sum(x.size for x in jax.tree.leaves(jax.eval_shape(init)))
  # A value head of 17 numbers is written in either case.
  assert needed[0] - model == pytest.approx(2 * (needed[1] - model), rel=0.01)


def test_other_versions_are_a_warning_and_missing_packages_fail(monkeypatch, tmp_path):
  here = doctor.importlib.metadata.version('numpy')
  wanted = [*map(doctor.requirements.Requirement, ('jax<0.1', f'numpy=={here}'))]
  monkeypatch.setattr(doctor, '_read_requirements', lambda: wanted)
  finding = doctor.check_versions()
  assert finding.status == 'warn' and '1 packages differ: jax 0.' in finding.text
  assert finding.remedy == 'pip install -r requirements.txt'
  with monkeypatch.context() as installed:
    installed.setattr(doctor, '_ROOT', tmp_path)
    assert doctor.check_versions().remedy == "pip install 'jax<0.1'"
  wanted.append(doctor.requirements.Requirement('no-such-package>=1'))
  finding = doctor.check_versions()
  assert (finding.status, finding.remedy) == ('fail', "pip install 'no-such-package>=1'")


def test_an_installed_package_is_compared_with_its_bounds(monkeypatch, tmp_path):
  pinned = {str(package) for package in doctor._read_requirements()}
  monkeypatch.setattr(doctor, '_ROOT', tmp_path)
  bounds = doctor._read_requirements()
  assert len(bounds) == len(pinned) and not pinned & {*map(str, bounds)}
  assert doctor.check_versions().status == 'ok'


def test_a_check_that_hangs_or_raises_is_a_finding(monkeypatch, gate):
  monkeypatch.setattr(doctor, '_SECONDS', 0.1)
  hung = doctor._run_check('devices', gate.wait)
  assert hung.status == 'fail' and 'no answer within 0.1 seconds' in hung.text
  assert doctor._run_check('disk', lambda: 1 / 0).text.startswith('ZeroDivisionError')


def test_the_command_plays_the_task_and_names_wrong_fields(tmp_path):
  command = ['-m', 'experiments.doctor', '--task=miniwiki']
  done = script.run(*command, f'--workdir={tmp_path}', '--config.schedule.tasks=0')
  assert done.returncode == 1, done.stderr
  for text in ('schedule.tasks is 0', '28 episodes played', '2 different ones'):
    assert text in ' '.join(done.stdout.split())


def test_the_command_takes_the_name_of_a_published_shape(tmp_path):
  named = ['--config.model.path=qwen2.5-3b', f'--workdir={tmp_path}']
  done = script.run('-m', 'experiments.doctor', *named, AGENT_R1_MEMORY_GB='1000')
  assert done.returncode in (0, 1), done.stderr
  assert 'estimated peak' in done.stdout and '--compile' in done.stdout, done.stdout


def test_the_command_takes_a_config_file(tmp_path):
  path = tmp_path / 'shape.json'
  shape = published.read_shape('qwen2.5-3b')
  path.write_text(json.dumps(hf_config.make(shape, 'bfloat16')))
  done = script.run('-m', 'experiments.doctor', f'--config.model.path={path}')
  assert done.returncode == 1, done.stderr  # It does not fit here.
  assert '12.34 GB  parameters, float32' in done.stdout, done.stdout


def test_of_chips_that_are_not_here_only_what_concerns_them_is_checked(monkeypatch):
  chip = SimpleNamespace(device_kind='NVIDIA H100')
  machine = footprint.Machine('gpu', 60e9, absent=(chip,))
  monkeypatch.setattr(doctor, 'check_memory', lambda *args: args[-1])
  findings = doctor.examine(tiny.run_config(), '/', machine=machine)
  found = {f.name: f for f in findings if f != machine}
  assert set(found) == {'versions', 'devices', 'configuration'}
  assert found['devices'].text.startswith('1 x NVIDIA H100, not here')


@pytest.mark.skipif(
  not importlib.util.find_spec('jax_cuda12_plugin'),
  reason="no compiler for GPUs: pip install 'jax[cuda12]'",
)
@pytest.mark.parametrize(
  ('name', 'memory', 'said'),
  [('tiny', '0.1', 'ok memory'), ('qwen2.5-3b', '20', 'each chip has 20.0 GB')],
)
def test_the_command_compiles_for_a_gpu_that_is_not_here(tmp_path, name, memory, said):
  flags = [f'--config.model.path={name}', f'--workdir={tmp_path}', '--topology=h100:1']
  given = {'engine.rows': 4, 'engine.slots': 512, 'batch.microbatch': 1}
  given |= {'batch.row_tokens': 512, 'model.remat': 'full'}
  flags += [f'--config.{field}={value}' for field, value in given.items()]
  done = script.run('-m', 'experiments.doctor', *flags, AGENT_R1_MEMORY_GB=memory)
  text = ' '.join(done.stdout.split())
  assert '1 x NVIDIA H100, not here' in text and said in text, done.stdout + done.stderr
  assert done.returncode == (said != 'ok memory')
  assert 'warn' not in text and 'below' not in text, text
