"""ReAct prompting (arXiv 2210.03629): thought, action and observation as text.

The format is call_formats.REACT, whatever the chat's own format: here the task itself
describes the tools, so that methods with and without it can be played together.
"""

from collections.abc import Sequence
import dataclasses
import functools

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, env, tool

FORMAT = call_formats.REACT


def ask(task: types.Task, tools: Sequence[tool.Tool]) -> types.Task:
  """Adds the form and the tools before the task's first message."""
  first, *rest = task.messages
  described = FORMAT.describe([item.schema for item in tools])
  content = types.ControlText('{}\n\n{}').format(described, first['content'])
  return dataclasses.replace(task, messages=[{**first, 'content': content}, *rest])


class ReAct:
  """A ToolEnv with tools outside the chat template and marked answers."""

  def __init__(
    self, tools: Sequence[tool.Tool], reward: env.Reward, metrics: env.Metrics
  ):
    parse = functools.partial(FORMAT.parse, schemas=[item.schema for item in tools])
    self._inner = env.ToolEnv(tools, reward, metrics=metrics, parse=parse)

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins the episode."""
    return await self._inner.reset(task)

  async def step(self, reply: str) -> types.Step:
    """Runs the action; the episode is done if there is none."""
    step = await self._inner.step(reply)
    assert FORMAT.answer is not None
    mark = FORMAT.answer.format
    observed = [{**m, 'content': str(mark(m['content']))} for m in step.messages]
    return dataclasses.replace(step, messages=observed)

  async def finish(self, status: str, reply: str | None = None) -> types.Step:
    """Scores an episode that a budget ended."""
    return await self._inner.finish(status, reply)
