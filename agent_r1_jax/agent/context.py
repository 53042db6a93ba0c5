"""Context strategies: what the policy sees of a conversation that grows.

Without any, the context is all that was said and is only appended to. A strategy wraps an
environment and is one itself: `make_env=lambda: SlidingWindow(ToolEnv(...), turns=4)`.
Where it forgets, its Step is `fresh`: a whole new prompt, whose tokens are given, and a
new segment. What the policy said before was trained in the segment where it said it.

Each passes on the reward of a turn, done and the metrics as they are, and adds the metric
'context/fresh', 1 for a step that begins a new context. Where the environment itself
begins one, the strategy takes it as the opening from then on.

Letters: a turn is a reply and what the environment answered.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.agent import workers

SUMMARY = (
  'Only the task and your next reply will be kept; all else is forgotten. Write down '
  'what is needed to go on: what was found, what was tried, and what is left to do. Do '
  'not call a tool and do not answer yet.'
)
RECALL = 'What you wrote down of the work so far:\n\n{summary}'


class _Strategy:
  """An environment around another."""

  def __init__(self, env: env_lib.Env):
    self.env = env

  @property
  def tools(self) -> Sequence[tool_lib.Tool]:
    return getattr(self.env, 'tools', ())

  async def finish(self, status: str, reply: str | None = None) -> types.Step:
    """What the environment makes of an end by a budget, if it makes anything of it."""
    return await env_lib.finish_episode(self.env, status, reply) or types.Step(
      [], done=True
    )


class SlidingWindow(_Strategy):
  """The opening and the last turns: earlier ones are forgotten.

  Once `turns` are full, every step begins a new context, so an episode of K turns trains
  on up to K prompts of that length.
  """

  def __init__(self, env: env_lib.Env, *, turns: int):
    """Nothing runs before `reset`.

    Args:
      env: Whose conversation it is.
      turns: To remember, at least 1.
    """
    super().__init__(env)
    self._turns = collections.deque[list[types.Message]](maxlen=_at_least_1(turns))

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins with the environment's opening."""
    self._turns.clear()
    self._opening = await workers.call(self.env.reset, task)
    return _copied(self._opening)

  async def step(self, reply: str) -> types.Step:
    """The environment's answer; fresh where a turn had to be forgotten."""
    step = await workers.call(self.env.step, reply)
    if step.fresh:
      self._turns.clear()
      self._opening = _copied(step.messages)
      return _counted(step)
    full = len(self._turns) == self._turns.maxlen
    self._turns.append([_assistant(reply), *_copied(step.messages)])
    if step.done or not full:
      return _counted(step)
    return _fresh(step, [*self._opening, *(m for turn in self._turns for m in turn)])


class Summary(_Strategy):
  """After so many turns the policy writes a summary, and goes on with it alone.

  The request for it follows the environment's answer. The reply to it is a turn like any
  other: sampled, trained on, counted by the rollout's max_turns. The environment never
  sees it, so nothing in it is a call, and its reward is 0: what a summary is worth is
  what the episode earns after it. The new context is the opening and the summary, without
  thoughts that ended with </think>.
  """

  def __init__(self, env: env_lib.Env, *, turns: int, prompt: str = SUMMARY):
    """Nothing runs before `reset`.

    Args:
      env: Whose conversation it is.
      turns: Between two summaries, at least 1.
      prompt: Asks for the summary.
    """
    super().__init__(env)
    self._every, self._prompt = _at_least_1(turns), prompt

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins with the environment's opening."""
    self._turns, self._asked = 0, False
    self._opening = await workers.call(self.env.reset, task)
    return _copied(self._opening)

  async def step(self, reply: str) -> types.Step:
    """The environment's answer; or what follows a summary."""
    if self._asked:
      self._turns, self._asked = 0, False
      summary = reply.rpartition('</think>')[2].strip()
      note = {'role': 'user', 'content': RECALL.format(summary=summary)}
      return _fresh(types.Step([]), [*self._opening, note])
    step = await workers.call(self.env.step, reply)
    self._turns += 1
    if step.fresh:
      self._turns, self._opening = 0, _copied(step.messages)
    elif self._turns == self._every and not step.done:
      self._asked = True
      request = {'role': 'user', 'content': self._prompt}
      step = dataclasses.replace(step, messages=[*step.messages, request])
    return _counted(step)

  async def finish(self, status: str, reply: str | None = None) -> types.Step:
    """As the environment does, which never sees a summary, an unfinished one neither."""
    return await super().finish(status, None if self._asked else reply)


class Rebuilt(_Strategy):
  """Every turn begins with what `render` makes of the environment's state."""

  def __init__(self, env: env_lib.Env, render: Callable[[Any], list[types.Message]]):
    """Nothing runs before `reset`.

    Args:
      env: Whose state it is.
      render: From the environment to a whole prompt, the first one included. The policy
        sees nothing else, so the environment has to keep what it answered.
    """
    super().__init__(env)
    self._render = render

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins with a rendering."""
    await workers.call(self.env.reset, task)
    return await self._prompt()

  async def step(self, reply: str) -> types.Step:
    """Answers with a rendering."""
    step = await workers.call(self.env.step, reply)
    return _counted(step) if step.done else _fresh(step, await self._prompt())

  async def _prompt(self) -> list[types.Message]:
    messages = await workers.call(self._render, self.env)
    if not messages or messages[0]['role'] not in ('system', 'user'):
      raise ValueError(
        f'render gave {messages[:1]}: a prompt begins with a system or user message.'
      )
    return _copied(messages)


def _fresh(step: types.Step, messages: list[types.Message]) -> types.Step:
  return _counted(dataclasses.replace(step, messages=_copied(messages), fresh=True))


def _counted(step: types.Step) -> types.Step:
  metrics = step.metrics | {'context/fresh': float(step.fresh)}
  return dataclasses.replace(step, metrics=metrics)


def _assistant(reply: str) -> types.Message:
  return {'role': 'assistant', 'content': reply}


def _copied(messages: Sequence[types.Message]) -> list[types.Message]:
  return [dict(message) for message in messages]


def _at_least_1(turns: int) -> int:
  if turns < 1:
    raise ValueError(f'turns={turns} must be at least 1.')
  return turns
