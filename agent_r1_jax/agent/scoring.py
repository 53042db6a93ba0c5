"""Calls users' reward and metric functions, and adds their results to a step."""

import collections
from collections.abc import Awaitable, Callable
import contextvars
import dataclasses
import functools
import inspect
import math
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent.calls import CallError
from agent_r1_jax.host import workers

Score = float | dict[str, float]
# (task, messages) -> score, sync or async; the arguments are copies. A dict names the
# parts of a sum. An optional parameter `status` gets how the episode ended: DONE, or one
# of types.BUDGET_STATUSES, in which case the last message may be an unfinished reply.
Reward = Callable[..., Score | Awaitable[Score]]
Numbers = dict[str, float]
Metrics = Callable[[types.Task, list[types.Message]], Numbers | Awaitable[Numbers]]
# How many rollouts the policy of the episode's last reply was trained on.
policy_step: contextvars.ContextVar[int] = contextvars.ContextVar(
  'policy_step', default=0
)


async def judge(
  step: types.Step,
  task: types.Task,
  messages: list[types.Message],
  status: str,
  reward: Reward,
  metrics: Metrics | None,
  seconds: float = 60.0,
) -> None:
  """Adds the reward and the metrics of an episode that has ended to its last step.

  The functions get copies of the task and the messages, and `seconds` each.

  Raises:
    ValueError: The reward is not a finite number, or the metrics are not a dict.
  """

  async def call(kind: str, fn: Callable) -> Any:
    copies = copy_containers(task), copy_containers(messages)
    return await workers.call(
      fn, *copies, name=kind, seconds=seconds, field='reward_seconds'
    )

  add_score(step, 'reward', task, await call('reward', bind_status(reward, status)))
  if metrics:
    numbers = await call('metrics', metrics)
    if not isinstance(numbers, dict):
      raise ValueError(
        f'the metrics of task {task.id!r} are {numbers!r:.100}; make them a dict of '
        'numbers.'
      )
    step.metrics |= numbers


def add_score(step: types.Step, kind: str, task: types.Task, score: Score) -> None:
  """Adds a score and its named parts to a step.

  `kind` names the score in errors, such as 'reward'.

  Raises:
    ValueError: The score is not a finite number.
  """
  parts = score if isinstance(score, dict) else {}
  try:
    value = float(sum(parts.values()) if isinstance(score, dict) else score)
  except (TypeError, ValueError):
    raise ValueError(
      f'the {kind} of task {task.id!r} is {score!r:.100}; make it a number, or a dict of '
      'numbers.'
    ) from None
  if not math.isfinite(value):
    raise ValueError(f'the {kind} of task {task.id!r} is {score}; make it finite.')
  step.reward += value
  for name, part in parts.items():
    key = f'reward/{name}'
    step.metrics[key] = step.metrics.get(key, 0.0) + float(part)


def count_calls(calls, results) -> dict[str, float]:
  """Counts a turn's calls, as metrics; calls that were not run count as tool errors.

  Rare metrics are left out if they are 0: 'tool_retries'; calls of isolated tools as
  'isolated_calls' and 'isolated/<tool>'; these, and calls whose tool raised or timed out,
  as 'tool_failures'; 'tool_outages'; and exceptions as 'tool_error/<tool>/<type>' or
  'outage/<tool>/<type>'.
  """
  malformed = sum(isinstance(call, CallError) for call in calls)
  failed = len(calls) - sum(result.ok for result in results)
  isolated = [
    call.name for call, result in zip(calls, results, strict=False) if result.isolated
  ]
  rare = collections.Counter(f'isolated/{name}' for name in isolated)
  rare['isolated_calls'] = len(isolated)
  for call, result in zip(calls, results, strict=False):
    if result.error:
      kind = 'outage' if result.outage else 'tool_error'
      rare[f'{kind}/{call.name}/{result.error}'] += 1
    rare['tool_failures'] += bool(result.error) or result.isolated
    rare['tool_outages'] += result.outage
  rare['tool_retries'] = sum(result.retries for result in results)
  return {
    **{name: float(count) for name, count in rare.items() if count},
    'tool_calls': float(len(calls) - malformed),
    'tool_errors': float(failed - malformed),
    'tool_timeouts': float(sum(result.timed_out for result in results)),
    'format_errors': float(malformed),
  }


def bind_status(reward: Reward, status: str) -> Reward:
  """Binds the status to the reward function, if it has a parameter of that name."""
  try:
    parameters = inspect.signature(reward).parameters
  except (TypeError, ValueError):
    return reward  # Functions in other languages have no signature.
  return functools.partial(reward, status=status) if 'status' in parameters else reward


def copy_containers(value: Any) -> Any:
  """Copies only the nested dicts, lists, tuples and sets of a task or messages.

  Text and numbers are immutable, and arrays and other objects may be large. A task with
  circular containers is not copied.
  """
  if isinstance(value, types.Task):
    fields = ('messages', 'answer', 'info')
    try:
      return dataclasses.replace(
        value, **{f: copy_containers(getattr(value, f)) for f in fields}
      )
    except RecursionError:
      return value
  if type(value) is dict:
    return {key: copy_containers(item) for key, item in value.items()}
  if type(value) in (list, tuple, set):
    return type(value)(map(copy_containers, value))
  return value
