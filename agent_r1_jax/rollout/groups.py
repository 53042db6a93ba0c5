"""Groups of episodes: collects a step's groups, selects the episodes to learn from."""

from collections.abc import Callable, Sequence

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.agent import env
from agent_r1_jax.rl import spans

Group = list[types.Trajectory]


def collect_groups(
  collect: Callable[[int, int], list[types.Trajectory]],
  *,
  n: int,
  samples: int,
  max_refills: int,
) -> list[Group]:
  """Collects the groups of a step; plays more tasks to replace tied groups (DAPO).

  Args:
    collect: (n, refill) -> the trajectories of n tasks, with a task's episodes adjacent.
      The first call has refill 0.
    n: The wanted number of groups whose rewards are not all equal.
    samples: The number of episodes per task.
    max_refills: The most calls of `collect` after the first.

  Returns:
    All groups, including tied groups.
  """
  groups: list[Group] = []
  untied = 0
  for refill in range(max_refills + 1):
    missing = n - untied
    if not missing:
      break
    played = collect(missing, refill)
    new = [played[i : i + samples] for i in range(0, len(played), samples)]
    for number, group in enumerate(new, start=len(groups)):
      for trajectory in group:
        trajectory.group = number
    groups += new
    untied += sum(not is_tied(group) for group in new)
  return groups


def select_usable(
  groups: Sequence[Group],
  *,
  max_error_rate: float,
  refilled: bool = False,
  mask_truncated: bool = False,
) -> list[Group]:
  """Returns the episodes of a step to learn from, by group.

  Args:
    groups: All groups.
    max_error_rate: The largest share of episodes whose environment may raise or be late,
      and of calls whose tool may be out (ToolResult.outage).
    refilled: Whether to leave out tied groups, which have been replaced.
    mask_truncated: Whether to leave out episodes that a budget ended.

  Raises:
    RuntimeError: Too many environments or tools raised; the message has the first error.
  """
  played = [t for group in groups for t in group]
  errors = [t.error for t in played if t.status == types.Status.FAILED]
  if len(errors) > max_error_rate * len(played):
    raise RuntimeError(
      f'{len(errors)} of {len(played)} episodes raised or were late, more than '
      f'max_error_rate={max_error_rate}. The first: {errors[0]}'
    )
  calls, outages = (
    sum(t.metrics.get(name, 0.0) for t in played)
    for name in ('tool_calls', 'tool_outages')
  )
  if outages > max_error_rate * calls:
    kinds = ((t, x) for t in played for x in sorted(t.metrics) if x.startswith('outage/'))
    first = next((env.find_tool_error(t.messages, name) for t, name in kinds), 'isolated')
    raise RuntimeError(
      f'at {outages:g} of {calls:g} tool calls the tool was out, more than '
      f'max_error_rate={max_error_rate}. The first: {first}. (Tools raise ValueError for '
      'what the agent did wrong.)'
    )
  if refilled:
    groups = [group for group in groups if not is_tied(group)]
  masked = (types.Status.FAILED, *(types.BUDGET_STATUSES if mask_truncated else ()))
  # A trajectory whose prompt did not fit its row has no turns.
  chosen = [[t for t in g if t.status not in masked and t.turns] for g in groups]
  return [group for group in chosen if group]


def check_first_rollout(groups: Sequence[Group]) -> None:
  """Raises ValueError if no prompt of the first rollout left room for a reply.

  Raises:
    ValueError: Names the first task and its length.
  """
  played = [t for group in groups for t in group]
  if played and all(t.metrics.get('prompt_too_long') for t in played):
    first = played[0]
    raise ValueError(
      f'no episode of the first rollout could begin. Task {first.task.id!r}: '
      f'{first.error}. Raise engine.slots, shorten what the environment begins with, or '
      "go on all the same with chat.long_prompts = 'skip'."
    )


def is_tied(group: Group) -> bool:
  """Whether a group's rewards are all equal; failed episodes do not count.

  A group of one episode is never tied: algorithms with one sample do not compare groups.
  """
  rewards = [t.reward for t in group if t.status != types.Status.FAILED]
  return not rewards or (len(group) > 1 and spans.tied(np.array(rewards)))
