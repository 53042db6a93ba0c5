"""Solutions of benchmarks with a call less, or with an argument that differs."""

from collections.abc import Iterator, Sequence
import copy
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, calls

Turn = list[Any]  # [name, arguments] of each call.


def change(value: Any) -> Any:
  """Returns another value of the same type."""
  if isinstance(value, bool):
    return not value
  if isinstance(value, int | float):
    return value + 1
  if isinstance(value, str):
    return value + 'x'
  if isinstance(value, list):
    return [change(item) for item in value]
  return {key: change(item) for key, item in value.items()}


def mutate(turns: Sequence[Turn]) -> Iterator[tuple[str, list[Turn]]]:
  """Yields (kind, turns): no call at all, each call dropped, each argument changed."""
  yield 'no call', [[] for _ in turns]
  for t, turn in enumerate(turns):
    for i, (_, arguments) in enumerate(turn):
      mutant = copy.deepcopy([list(turn) for turn in turns])
      del mutant[t][i]
      yield 'dropped', mutant
      for name in arguments:
        mutant = copy.deepcopy([list(turn) for turn in turns])
        mutant[t][i][1][name] = change(arguments[name])
        yield 'changed', mutant


def write(turn: Turn) -> str:
  """Writes the calls of one reply."""
  return ''.join(call_formats.HERMES.render(calls.ToolCall(*call)) for call in turn)


async def play(env: Any, task: types.Task, replies: Sequence[str]) -> float:
  """Plays an episode; returns its reward. A budget ends it after the replies."""
  await env.reset(task)
  reward = 0.0
  for reply in replies:
    step = await env.step(reply)
    reward += step.reward
    if step.done:
      return reward
  return reward + (await env.finish('max_turns')).reward
