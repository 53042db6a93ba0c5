"""Context strategies: how much of a growing conversation the policy sees.

Without a strategy, the context is the complete conversation and only grows. A strategy
is an environment that wraps another:
`make_env=lambda: SlidingWindow(ToolEnv(...), turns=4)`. When it drops messages, its Step
is `fresh`: a new prompt begins a new segment. Earlier replies are trained on in the
segment where the policy sampled them.

A strategy passes on a step's reward, done and metrics, and adds the metric
'context/fresh', which is 1 for a step that begins a new context. If the environment
begins a new context itself, its messages become the opening. A turn is a reply and the
environment's answer to it.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.host import workers

SUMMARY = (
  'Only the task and your next reply will be kept; all else is forgotten. Write down '
  'what is needed to go on: what was found, what was tried, and what is left to do. Do '
  'not call a tool and do not answer yet.'
)
RECALL = 'What you wrote down of the work so far:\n\n{summary}'


class _Strategy:
  """An environment that wraps another.

  Attributes:
    env: The wrapped environment.
    keeps_opening: Whether its first messages are those of `env`.
  """

  keeps_opening = True

  def __init__(self, env: env_lib.Env):
    self.env = env

  @property
  def tools(self) -> Sequence[tool_lib.Tool]:
    return getattr(self.env, 'tools', ())

  async def set_seed(self, number: int):
    """Passes the episode's randomness on to the environment."""
    await env_lib.call_optional(self.env, 'set_seed', number)

  async def finish(self, status: str, reply: str | None = None) -> types.Step:
    """Passes on that a budget ended the episode."""
    step = await env_lib.call_optional(self.env, 'finish', status, reply)
    return step or types.Step([], done=True)

  def least_limits(self, task: types.Task) -> Mapping[str, float]:
    """The limits of the wrapped environment, if it has any."""
    inner = env_lib.find_method(self.env, 'least_limits')
    return inner(task) if inner else {}

  async def close(self):
    """Closes the environment."""
    await env_lib.call_optional(self.env, 'close')


class SlidingWindow(_Strategy):
  """Keeps the opening and the last turns, and drops earlier turns.

  After `turns` turns every step begins a new context, so an episode of K turns trains on
  up to K prompts of that length.
  """

  def __init__(self, env: env_lib.Env, *, turns: int):
    """Wraps an environment.

    Args:
      env: The environment.
      turns: Number of turns to keep, at least 1.
    """
    super().__init__(env)
    self._most_turns = _check_turns(turns)
    self._turns = collections.deque[list[types.Message]](maxlen=turns)

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins with the environment's opening."""
    self._turns.clear()
    self._opening = await workers.call(self.env.reset, task)
    return _copy(self._opening)

  async def step(self, reply: str) -> types.Step:
    """Returns the environment's answer, or a new context if a turn is dropped."""
    step = await workers.call(self.env.step, reply)
    if step.fresh:
      self._turns.clear()
      self._opening = _copy(step.messages)
      return _count_fresh(step)
    # A full deque drops its first turn when one is appended.
    full = len(self._turns) == self._most_turns
    self._turns.append([{'role': 'assistant', 'content': reply}, *_copy(step.messages)])
    if step.done or not full:
      return _count_fresh(step)
    return _begin_context(
      step, [*self._opening, *(m for turn in self._turns for m in turn)]
    )


class Summary(_Strategy):
  """Asks the policy for a summary after some turns, and continues from it alone.

  The request follows the environment's answer. The summary is a turn like any other: it
  is sampled, trained on, and counted by the rollout's max_turns. The environment does not
  see it, so calls in it are not run and its reward is 0: it is worth what the episode
  earns afterwards. The new context is the opening and the summary, without the part up to
  </think>.
  """

  def __init__(self, env: env_lib.Env, *, turns: int, prompt: str = SUMMARY):
    """Wraps an environment.

    Args:
      env: The environment.
      turns: Number of turns between two summaries, at least 1.
      prompt: The request for the summary.
    """
    super().__init__(env)
    self._every, self._prompt = _check_turns(turns), prompt

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins with the environment's opening."""
    self._turns, self._summary_requested = 0, False
    self._opening = await workers.call(self.env.reset, task)
    return _copy(self._opening)

  async def step(self, reply: str) -> types.Step:
    """Returns the environment's answer, or the new context after a summary."""
    if self._summary_requested:
      self._turns, self._summary_requested = 0, False
      summary = reply.rpartition('</think>')[2].strip()
      note = {'role': 'user', 'content': RECALL.format(summary=summary)}
      return _begin_context(types.Step([]), [*self._opening, note])
    step = await workers.call(self.env.step, reply)
    self._turns += 1
    if step.fresh:
      self._turns, self._opening = 0, _copy(step.messages)
    elif self._turns == self._every and not step.done:
      self._summary_requested = True
      request = {'role': 'user', 'content': self._prompt}
      step = dataclasses.replace(step, messages=[*step.messages, request])
    return _count_fresh(step)

  async def finish(self, status: str, reply: str | None = None) -> types.Step:
    """Passes the end on to the environment, without an unfinished summary."""
    return await super().finish(status, None if self._summary_requested else reply)


class Rebuilt(_Strategy):
  """Rebuilds the prompt of every turn from the environment's state."""

  keeps_opening = False

  def __init__(self, env: env_lib.Env, render: Callable[[Any], list[types.Message]]):
    """Wraps an environment.

    Args:
      env: The environment.
      render: Makes all messages of a prompt from the environment, for the first prompt
        too. The policy sees nothing else, so the environment must store its answers.
    """
    super().__init__(env)
    self._render = render

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins with a rendered prompt."""
    await workers.call(self.env.reset, task)
    return await self._prompt()

  async def step(self, reply: str) -> types.Step:
    """Answers with a rendered prompt."""
    step = await workers.call(self.env.step, reply)
    return _count_fresh(step) if step.done else _begin_context(step, await self._prompt())

  async def _prompt(self) -> list[types.Message]:
    messages = await workers.call(self._render, self.env)
    if not messages or messages[0]['role'] not in ('system', 'user'):
      raise ValueError(
        f'render gave {messages[:1]}: a prompt begins with a system or user message.'
      )
    return _copy(messages)


def _begin_context(step: types.Step, messages: list[types.Message]) -> types.Step:
  return _count_fresh(dataclasses.replace(step, messages=_copy(messages), fresh=True))


def _count_fresh(step: types.Step) -> types.Step:
  metrics = step.metrics | {'context/fresh': float(step.fresh)}
  return dataclasses.replace(step, metrics=metrics)


def _copy(messages: Sequence[types.Message]) -> list[types.Message]:
  return [dict(message) for message in messages]


def _check_turns(turns: int) -> int:
  if turns < 1:
    raise ValueError(f'turns={turns} must be at least 1.')
  return turns
