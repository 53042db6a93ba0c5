"""The conformance test of environments: good ones pass, and faults are named."""

import asyncio
import dataclasses
import math
import pathlib
import re

import pytest

from agent_r1_jax import testing, types
from agent_r1_jax.agent import env as env_lib


def _check(make_env, replies=('a', 'b')):
  task = types.Task('t', [_message(content='Guess.')], answer='7')
  return testing.check_env(make_env, task, replies)


def _message(**fields):
  return {'role': 'user', 'content': 'No.', **fields}


class Guess:
  """A guessing game of two replies, and with one method that has a fault."""

  left, shared = 0, 0

  def __init__(self, method='', fault=None):
    self.fault = {method: fault}
    if method == 'finish':
      self.finish = fault

  async def reset(self, task):
    self.left = Guess.left = 2
    spoil = self.fault.get('reset', lambda task: [{**m} for m in task.messages])
    return spoil(task)

  async def step(self, reply):
    self.left -= 1
    step = (
      types.Step([_message()]) if self.left else types.Step([], reward=1.0, done=True)
    )
    spoil = self.fault.get('step', lambda env, step: step)
    return spoil(self, step)


def _count():
  """Another number at every call, which all games share."""
  Guess.shared += 1
  return float(Guess.shared)


def _replace(**fields):
  return lambda env, step: dataclasses.replace(step, **fields)


def _say(**message):
  """Steps before the last say it."""
  return lambda env, step: dataclasses.replace(
    step, messages=[_message(**message)] * bool(env.left)
  )


def _play_one_game(env, step):
  """Its end is that of all games."""
  Guess.left = env.left = Guess.left - 1
  return step


def _end(reward):
  return types.Step([], reward=reward, done=True)


# What is named, the method that is wrong, and what it does.
_FAULTS = {
  'alias': ('the task', 'reset', lambda task: task.messages),
  'shallow': ('the task', 'reset', lambda task: list(task.messages)),
  'task': ('the task', 'reset', lambda task: task.info.update(x=1) or [_message()]),
  'opening': ('reset', 'reset', lambda task: []),
  'reset': ('reset', 'reset', lambda task: [_message(content=str(_count()))]),
  'shared': ('step 0', 'step', lambda env, step: _replace(reward=_count())(env, step)),
  'class': ('step 1', 'step', _play_one_game),
  'endless': ('step 1: done', 'step', _replace(messages=[_message()], done=False)),
  'silent': ('step 0', 'step', _replace(messages=[])),
  'chatty': ('step 1: messages', 'step', lambda env, step: _say()(Guess, step)),
  'none': ('step 0', 'step', lambda env, step: None),
  'nan': ('step 0: reward', 'step', _replace(reward=math.nan)),
  'metric': ('step 0: x', 'step', _replace(metrics={'x': '1'})),
  'done': (
    'step 0: done',
    'step',
    lambda env, step: _replace(done=int(step.done))(env, step),
  ),
  'content': ("step 0: no text under 'content'", 'step', _say(content=None)),
  'json': ('step 0: not JSON', 'step', _say(pair=(1, 2))),
  'tuple': ('step 0: messages', 'step', _replace(messages=(_message(),))),
  'other end': ("finish('truncated', ...)", 'finish', lambda *_: _end(_count())),
  'no end': ("finish('truncated', ...)", 'finish', lambda *_: 'x'),
  'nan end': ("finish('truncated', ...): reward", 'finish', lambda *_: _end(math.nan)),
}


@pytest.mark.parametrize('name', _FAULTS)
async def test_a_fault_is_named(refused, name):
  named, method, fault = _FAULTS[name]
  Guess.shared = 0
  with refused(named, AssertionError):
    await _check(lambda: Guess(method, fault))


async def test_a_good_environment_passes():
  steps = await _check(Guess)
  assert [step.reward for step in steps] == [0.0, 1.0]


def test_the_environment_of_the_docs_is_played():
  page = pathlib.Path(__file__).parents[1] / 'docs/environments.md'
  block, *_ = re.findall(r'```python\n(.*?)```', page.read_text(), re.S)
  names = {}
  exec(block, names)
  assert [step.reward for step in names['steps']] == [0.0, 0.0, 1.0]
  assert names['steps'][1].messages == [{'role': 'user', 'content': 'Lower.'}]


async def test_what_was_made_is_closed(refused):
  closed = []

  class Closes(Guess):
    async def close(self):
      closed.append(self)
      if fails:
        raise ValueError('was never reset')

  fails = False
  await _check(Closes)
  assert len(closed) == len({id(env) for env in closed}) > 3
  closed.clear()
  with refused('reward', AssertionError):
    wrong = lambda: Closes('step', _replace(reward=math.nan))
    await _check(wrong)
  assert len(closed) == 3
  fails = True
  with refused('close', AssertionError):
    await _check(Closes)


async def test_methods_need_not_be_async():
  class Plain(Guess):
    def reset(self, task):
      return asyncio.run(super().reset(task))

    def step(self, reply):
      return asyncio.run(super().step(reply))

    def finish(self, status, reply):
      return types.Step([], reward=0.5)

  steps = await _check(Plain)
  assert [step.reward for step in steps] == [0.0, 1.0]


@pytest.mark.parametrize(
  ('replies', 'named'), [(['a', 'b', 'c'], 'step 1: done'), ([], 'reply')]
)
async def test_the_last_reply_ends_the_episode(refused, replies, named):
  with refused(named, AssertionError):
    await _check(Guess, replies)


class Example(env_lib.BaseEnv):
  """The example of BaseEnv."""

  def reset(self, task):
    self.answer = task.answer
    return [dict(message) for message in task.messages]

  def step(self, reply):
    return types.Step([], reward=float(reply == self.answer), done=True)


async def test_of_a_base_env_only_what_a_class_overrides_is_called():
  class Closes(Example):
    def close(self):
      self.answer = 'closed'

  (step,) = await _check(Example, ['7'])
  assert step.reward == 1.0
  names = 'finish', 'set_seed', 'close', 'clone', 'least_limits'
  assert not any(env_lib.find_method(Example(), name) for name in names)
  closes = Closes()
  assert env_lib.find_method(closes, 'close') == closes.close
  assert env_lib.find_method(object(), 'close') is None
  with pytest.raises(TypeError, match='abstract'):
    type('Half', (env_lib.BaseEnv,), {'reset': Example.reset})()
