"""Environments that raise, hang or end as a test says, and rollouts of them."""

import asyncio
import functools

import rollouts
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types

LIMITS = config_lib.Limits(max_turns=3, max_turn_tokens=80)


@functools.cache
def params(likely=2.2):
  """Replies end after few tokens; with 1.4, some do not end within 16."""
  return tiny.params(tiny.config(), likely={tiny.chat().stop_ids[0]: likely})


def tasks(n):
  return [
    types.Task(
      f'task {i}', [{'role': 'user', 'content': f'What is {i}?'}], i, {'list': [i]}
    )
    for i in range(n)
  ]


def collect(make_env, tasks, *, limits=LIMITS, tree=None, **kwargs):
  engine = rollouts.make_engine(tree or params())
  return rollouts.collect(make_env, tasks, engine=engine, limits=limits, **kwargs)


class Env:
  """Ends after the second reply at the latest; `do` may raise, hang or give a Step."""

  def __init__(self, do=lambda where, task: None):
    self.do, self.turn = do, 0

  async def reset(self, task):
    self.task = task
    await self._do('reset')
    return list(task.messages)

  async def step(self, reply):
    self.turn += 1
    answer = await self._do('step')
    if answer is not None:
      return answer
    message = {'role': 'user', 'content': f'{len(reply)} letters.'}
    done = self.turn == 2
    return types.Step([] if done else [message], float(len(reply)), done=done)

  async def _do(self, where):
    answer = self.do(where, self.task)
    return await answer if asyncio.iscoroutine(answer) else answer


class PlainEnv(Env):
  """The same with methods that are not async."""

  def reset(self, task):
    return asyncio.run(super().reset(task))

  def step(self, reply):
    return asyncio.run(super().step(reply))
