"""Environments: what the agent's replies lead to."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
import inspect
import json
import math
from typing import Protocol

from agent_r1_jax import types
from agent_r1_jax.agent import calls as calls_lib
from agent_r1_jax.agent import tool as tool_lib

Call = calls_lib.ToolCall | calls_lib.CallError
Score = float | dict[str, float]
# The whole conversation to a score, sync or async. A dict names the parts of a sum.
Reward = Callable[[types.Task, list[types.Message]], Score | Awaitable[Score]]
# As the method `ToolEnv.process_reward`, the environment first.
ProcessReward = Callable[
  ['ToolEnv', Sequence[Call], Sequence[tool_lib.ToolResult]], Score | Awaitable[Score]
]
Metrics = Callable[[types.Task, list[types.Message]], dict[str, float]]


class Env(Protocol):
  """One episode: plain attributes are its state.

  An attribute `tools`, a sequence of Tool, is optional; their schemas go into the prompt.
  Whatever these methods raise marks the trajectory 'error'.
  """

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins the episode: what the agent sees first."""
    ...

  async def step(self, reply: str) -> types.Step:
    """Answers one reply."""
    ...


class ToolEnv:
  """The agent calls tools until it replies without a call; then the reward is given.

  Calls of one reply run at the same time and are answered in order. Calls that are
  malformed, unknown or too many are answered with an error text, and the episode goes on.

  Every turn is paid its process reward, the last one the reward of the conversation too.
  Every step's metrics hold tool_calls, tool_errors and format_errors, and the named parts
  of its reward as 'reward/<name>'; the last step's also what `metrics` returns.

  Attributes:
    task: The current one.
    messages: The conversation so far.
  """

  def __init__(
    self,
    tools: Sequence[tool_lib.Tool],
    reward: Reward,
    *,
    process_reward: ProcessReward | None = None,
    parse: Callable[[str], list[Call]] = calls_lib.hermes,
    metrics: Metrics | None = None,
    max_parallel_calls: int = 8,
  ):
    """Nothing runs before `reset`.

    Args:
      tools: With different names.
      reward: Of the conversation, when the agent replied without a call.
      process_reward: Of a turn, in place of the method of that name.
      parse: The tool-call format.
      metrics: Further numbers to log for the episode, such as F1.
      max_parallel_calls: Of one reply; the calls beyond are refused.
    """
    for item in tools:
      if not isinstance(item, tool_lib.Tool):
        raise ValueError(f'tools: {item!r} is not a Tool; decorate it with @tool.')
    self.tools = tuple(tools)
    self._by_name = {item.name: item for item in tools}
    if len(self._by_name) < len(self.tools):
      raise ValueError(f'tools: two have one name in {[t.name for t in self.tools]}.')
    if max_parallel_calls < 1:
      raise ValueError(f'max_parallel_calls={max_parallel_calls} must be at least 1.')
    self._reward, self._metrics = reward, metrics
    self._process_reward = process_reward or type(self).process_reward
    self._parse, self._max_parallel_calls = parse, max_parallel_calls
    self._done = True

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins with the task's messages."""
    self.task = task
    self.messages = [dict(message) for message in task.messages]
    self._done = False
    return list(self.messages)

  async def step(self, reply: str) -> types.Step:
    """Runs the reply's calls; without a call the episode is done."""
    if self._done:
      raise ValueError('step: the episode is over or never began; call reset first.')
    self.messages.append({'role': 'assistant', 'content': reply})
    calls = self._parse(reply)
    self._done = not calls
    results = await asyncio.gather(
      *(self._answer(call) for call in calls[: self._max_parallel_calls])
    )
    messages = [_message(*pair) for pair in zip(calls, results, strict=False)]
    if refused := len(calls) - len(results):
      text = f'Error: {refused} more calls were not run; at most {len(results)} a turn.'
      messages.append({'role': 'tool', 'content': text})
    self.messages += messages
    copies = [dict(message) for message in messages]
    step = types.Step(copies, done=self._done, metrics=_counts(calls, results))
    process_reward = self._process_reward(self, calls[: len(results)], results)
    await self._pay(step, 'process reward', process_reward)
    if self._done:
      await self._pay(step, 'reward', self._reward(self.task, self.messages))
      if self._metrics:
        step.metrics |= self._metrics(self.task, self.messages)
    return step

  def process_reward(
    self, calls: Sequence[Call], results: Sequence[tool_lib.ToolResult]
  ) -> Score | Awaitable[Score]:
    """The reward of a turn: the sum of what its tools reported, by the name 'process'.

    Subclasses may think otherwise, sync or async; a dict names the parts of a sum, and a
    part that the final reward has too adds to it.

    Args:
      calls: What was run, or could not be read; none in the last turn.
      results: What came of each; `messages` ends with them.
    """
    rewards = [result.reward for result in results]
    return {'process': float(sum(rewards))} if any(rewards) else 0.0

  async def _answer(self, call: Call) -> tool_lib.ToolResult:
    if isinstance(call, calls_lib.CallError):
      return tool_lib.ToolResult(f'Error: {call.message}', ok=False)
    if call.name not in self._by_name:
      known = ', '.join(self._by_name) or 'none'
      text = f'Error: there is no tool {json.dumps(call.name)}; there are: {known}'
      return tool_lib.ToolResult(text, ok=False)
    return await tool_lib.call(self._by_name[call.name], call.arguments)

  async def _pay(self, step: types.Step, kind: str, score: Score | Awaitable[Score]):
    """Adds a score and its named parts to a step."""
    score = await settled(score)
    parts = score if isinstance(score, dict) else {}
    value = float(sum(parts.values()) if isinstance(score, dict) else score)
    if not math.isfinite(value):
      raise ValueError(f'the {kind} of task {self.task.id!r} is {score}; make it finite.')
    step.reward += value
    for name, part in parts.items():
      key = f'reward/{name}'
      step.metrics[key] = step.metrics.get(key, 0.0) + float(part)


async def settled(score: Score | Awaitable[Score]) -> Score:
  """What a reward returned, once it is there."""
  return await score if inspect.isawaitable(score) else score


def _message(call: Call, result: tool_lib.ToolResult) -> types.Message:
  name = {'name': call.name} if isinstance(call, calls_lib.ToolCall) else {}
  return {'role': 'tool', **name, 'content': result.text}


def _counts(calls, results) -> dict[str, float]:
  """Counts a turn's calls; a refused call is an error of the call."""
  malformed = sum(isinstance(call, calls_lib.CallError) for call in calls)
  failed = len(calls) - sum(result.ok for result in results)
  return {
    'tool_calls': float(len(calls) - malformed),
    'tool_errors': float(failed - malformed),
    'format_errors': float(malformed),
  }
