"""Environments that are elsewhere: here, in actors of this process and without Ray."""

import asyncio
from collections.abc import Callable
import itertools
import time
from unittest import mock

import pytest
import rollouts
import runs
import tiny

from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.contrib import ray
from agent_r1_jax.contrib.ray import actors, host, places, remote_env
from agent_r1_jax.contrib.ray import remote as remote_lib
from agent_r1_jax.host import workers
from agent_r1_jax.rollout import faults, sockets
from agent_r1_jax.train import preflight

pytestmark = pytest.mark.usefixtures('no_curves', 'traced_once')
model, whole = runs.model, runs.whole


class Here:
  """An actor in this process, which some call ends; Here.all has all of them."""

  all: list['Here']
  loses: Callable[[host.Call], bool]

  def __init__(self):
    self.actor, self.lost = host.EnvironmentHost(), asyncio.Event()
    Here.all.append(self)

  async def call(self, method, *args):
    if method == 'call' and Here.loses(args[1]):
      self.lost.set()
    if self.lost.is_set():
      raise remote_lib.LostError('its machine is gone')
    try:
      return await getattr(self.actor, method)(*args)
    except Exception as error:
      raise remote_lib.RaisedError(f'{type(error).__name__}: {error}') from error

  def kill(self):
    pass


@pytest.fixture
def make():
  """Makes a make_env whose actors are here; calls for which `loses` holds end one."""
  made = []

  def make_here(make_env, maximum=2, loses=lambda call: False, **options):
    Here.all, Here.loses = [], loses
    made.append(ray.environments(make_env, maximum, **options))
    return made[-1]

  with (
    mock.patch.object(actors, 'connect'),
    mock.patch.object(actors, 'pack', lambda value, what: value),
    mock.patch.object(actors, 'unpack', lambda packed: packed),
    mock.patch.object(actors, 'start', lambda kind, takes: Here()),
    mock.patch.object(places, '_RESTART_SECONDS', 0.01),
  ):
    yield make_here
    for make_env in made:
      make_env.close()


@pytest.mark.parametrize('lost_at', [0, 40])
def test_a_run_is_the_same_with_environments_elsewhere(
  make, lost_at, model, whole, tmp_path
):
  calls = itertools.count(1)
  make_env = make(runs.make_env, loses=lambda call: next(calls) == lost_at)
  params = runs.run(runs.config(model), tmp_path, make_env=make_env)
  runs.assert_equal(params, whole[0])
  found = runs.read_numbers(tmp_path)
  replays = [n for line in found for n in line if n.endswith('replays')]
  assert bool(replays) == (lost_at > 0), replays
  numbers = [{n: x for n, x in line.items() if n not in replays} for line in found]
  assert numbers == runs.read_numbers(whole[1])
  assert make_env.measure() == {
    'joined': 2 + (lost_at > 0),
    'lost': int(lost_at > 0),
    'refused': 0,
    'held': 0,
  }
  assert not any(here.actor._held for here in Here.all if not here.lost.is_set())


class Env(env_lib.BaseEnv):
  """Does what its task says, and notes what it was told."""

  def __init__(self):
    self.said = []

  def set_seed(self, number):
    self.said.append(number)

  def reset(self, task):
    self.task = task
    self.tools = [runs.look]
    if task.id == 'raise':
      raise KeyError('nothing')
    return task.messages

  async def step(self, reply):
    if self.task.id == 'slow':
      await asyncio.sleep(60)
    if self.task.id == 'exit':
      raise SystemExit(3)
    return types.Step([], reward=float(len(self.said)), done=True)

  def least_limits(self, task):
    return {'step_seconds': 7.0}


def test_what_an_environment_has_and_raises(make):
  make_env = make(Env)
  with preflight.open_environment(make_env, rollouts.LIMITS) as env:
    assert env.least_limits(types.Task('a', [])) == {'step_seconds': 7.0}
    assert env_lib.find_method(env, 'set_seed') and not env_lib.find_method(env, 'finish')
    assert not env_lib.find_method(env, 'clone') and env.tools == []
    assert 'set_seed' in env.made_of['environment']

    async def play(id):
      await env.set_seed(5)
      await env.reset(types.Task(id, [{'role': 'user', 'content': 'x'}]))
      return await env.step('x')

    assert asyncio.run(play('a')).reward == 1.0
    assert [tool.name for tool in env.tools] == ['look']
    for id, name, text in (
      ('raise', 'KeyError', r"KeyError: 'nothing' \(.*test_environments.py:\d+, in rese"),
      ('exit', 'SystemExit', 'SystemExit'),
    ):
      with pytest.raises(faults.EnvironmentFaultError, match=text) as error:
        asyncio.run(play(id))
      assert error.value.name == name


def test_a_late_step_is_cancelled_where_it_runs(make):
  make_env = make(Env, 1)
  env = make_env()
  task = types.Task('slow', [{'role': 'user', 'content': 'x'}])

  async def play():
    await env.reset(task)
    began = time.monotonic()
    with pytest.raises(workers.CallTimeoutError):
      await workers.call(env.step, 'x', seconds=0.1)
    await env.close()
    return time.monotonic() - began

  assert asyncio.run(play()) < 10
  assert not Here.all[0].actor._held


def test_a_silent_machine_is_lost(make):
  env = make(Env, 1, silence_seconds=0.2)()
  never = mock.patch.object(Here, 'call', lambda *_: asyncio.Event().wait())
  with never, pytest.raises(remote_env.EnvironmentLostError, match='does not answer'):
    tiny.within(asyncio.run, env.step('x'))
  tiny.within(asyncio.run, env.close())


class Program(sockets.Player):
  async def play(self, episode, task):
    raise NotImplementedError


def fail():
  raise OSError('no sandbox here')


@pytest.mark.parametrize(
  ('make_env', 'message'),
  [(fail, 'refused: OSError: no sandbox here'), (Program, 'a program, which plays')],
)
def test_an_environment_that_no_machine_can_hold(make, make_env, message):
  with pytest.raises(RuntimeError, match=message):
    make(make_env)()


def test_a_cluster_without_room(make):
  with (
    mock.patch.object(Here, 'call', lambda *_: asyncio.Event().wait()),
    pytest.raises(RuntimeError, match=r'Within 0.1 s .* takes .*sandbox'),
  ):
    make(Env, resources={'sandbox': 1}, wait_seconds=0.1)()


def test_an_episode_that_ends_every_machine_fails(make):
  """It has ten of them; the others are played."""
  deadly = lambda call: call.method == 'reset' and call.args[0].id == 'task 1'
  played = rollouts.collect(make(rollouts.Env, loses=deadly), rollouts.make_tasks(3))
  expected = rollouts.collect(rollouts.Env, rollouts.make_tasks(3))
  assert played[1].status == types.Status.FAILED
  for n in (0, 2):
    assert played[n].metrics.pop('replays', 1) >= 1
    rollouts.assert_same(played[n], expected[n])
  assert played[1].metrics['replays'] == 9
  assert played[1].metrics['error/EnvironmentLostError'] == 1
  assert 'its machine is gone' in played[1].error
