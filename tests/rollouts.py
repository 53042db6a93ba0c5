"""Rollouts of the tiny policy, for the tests of what they record."""

import asyncio
import functools
import random

import numpy as np
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.rollout import rollout

LIMITS = config_lib.Limits(max_turns=3, max_turn_tokens=16)
SLOTS = 256


@functools.cache
def params():
  # Replies end after ten tokens or so.
  return tiny.params(tiny.config(), likely={tiny.chat().stop_ids[0]: 2.0})


def make_engine(tree=None):
  return tiny.engine(tree or params(), slots=SLOTS, bucket=SLOTS, narrow=False)


def make_tasks(n, text='What is {}?'):
  return [
    types.Task(f'task {i}', [{'role': 'user', 'content': text.format(i)}], answer=i)
    for i in range(n)
  ]


def collect(make_env, tasks=None, *, engine=None, chat=None, limits=LIMITS, **kwargs):
  given = engine or make_engine(), chat or tiny.chat(), tasks or make_tasks(4), make_env
  return tiny.within(rollout.collect, *given, limits=limits, **kwargs)


class Env:
  """Goes on for a number of turns that depends on the replies."""

  def __init__(self, wait=0.0, fresh=lambda turn: False, forever=False):
    self.wait, self.fresh, self.forever, self.turn = wait, fresh, forever, 0

  async def reset(self, task):
    self.task = task
    return list(task.messages)

  async def step(self, reply):
    self.turn += 1
    if self.wait:
      await asyncio.sleep(self.wait * random.random())
    reward, metrics = len(reply) / 8, {'length': float(len(reply)), 'steps': 1.0}
    if not self.forever and len(reply) % 4 == 0:
      return types.Step([], reward, done=True, metrics=metrics)
    message = {'role': 'user', 'content': f'{self.turn}. You said {len(reply)} letters.'}
    return types.Step([message], reward, metrics=metrics, fresh=self.fresh(self.turn))


def expected_tokens(trajectory, schemas=()):
  """The one segment of a trajectory, from its messages and replies by the rules."""
  chat, (segment,) = tiny.chat(), trajectory.segments
  messages, turns = trajectory.messages, iter(trajectory.turns)
  first = next(i for i, m in enumerate(messages) if m['role'] == 'assistant')
  parts = [(chat.encode_prompt(messages[:first], schemas), False)]
  after = []
  for message in [*messages[first:], {'role': 'assistant'}]:
    if message['role'] != 'assistant':
      after.append(message)
      continue
    if after:
      parts.append((chat.encode_delta(after), False))
    if turn := next(turns, None):
      parts.append((segment.tokens[turn.start : turn.stop], True))
    after = []
  if not parts[-1][1]:
    parts.pop()  # What was said last, and not answered.
  tokens = np.concatenate([tokens for tokens, _ in parts])
  mask = np.concatenate([np.full(len(tokens), chosen) for tokens, chosen in parts])
  return tokens, mask


def assert_exact(trajectory, schemas=()):
  tokens, mask = expected_tokens(trajectory, schemas)
  (segment,) = trajectory.segments
  np.testing.assert_array_equal(segment.tokens, tokens)
  np.testing.assert_array_equal(segment.action_mask, mask)
  assert (
    segment.tokens.dtype == np.int32 and segment.behaviour_logprobs.dtype == np.float32
  )


def assert_same(a, b):
  for s, t in zip(a.segments, b.segments, strict=True):
    np.testing.assert_array_equal(s.tokens, t.tokens)
    np.testing.assert_array_equal(s.action_mask, t.action_mask)
    np.testing.assert_allclose(s.behaviour_logprobs, t.behaviour_logprobs, atol=2e-5)
  assert (a.turns, a.messages, a.status) == (b.turns, b.messages, b.status)
