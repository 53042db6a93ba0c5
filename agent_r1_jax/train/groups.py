"""Groups of episodes: which tasks a step draws, and what of them can be learned from."""

from collections.abc import Callable, Sequence
import functools

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.rl import table

Group = list[types.Trajectory]


def epoch_tasks(
  tasks: Sequence[types.Task], start: int, n: int, seed: int
) -> list[types.Task]:
  """The n tasks after the first `start`: every epoch is a seeded order of all tasks."""

  @functools.cache
  def order(epoch):
    return np.random.default_rng([seed, epoch]).permutation(len(tasks)).tolist()

  places = (divmod(i, len(tasks)) for i in range(start, start + n))
  return [tasks[order(epoch)[place]] for epoch, place in places]


def collect_groups(
  collect: Callable[..., list[types.Trajectory]],
  draw_tasks: Callable[[int, int], list[types.Task]],
  *,
  n: int,
  samples: int,
  max_refills: int,
) -> tuple[list[Group], int]:
  """A step's groups, and how many tasks were drawn; tied groups are drawn anew.

  Args:
    collect: (tasks, refill) -> the trajectories of each, side by side.
    draw_tasks: (start, n) -> the n tasks after this step's first `start`.
    n: Groups that are wanted.
    samples: Episodes of a task.
    max_refills: Rollouts that may take the place of tied groups (DAPO).
  """
  groups: list[Group] = []
  live, drawn = 0, 0
  for refill in range(max_refills + 1):
    missing = n - live
    if not missing:
      break
    played = collect(draw_tasks(drawn, missing), refill)
    drawn += missing
    new = [played[i : i + samples] for i in range(0, len(played), samples)]
    for number, group in enumerate(new, start=len(groups)):
      for trajectory in group:
        trajectory.group = number
    groups += new
    live += sum(not tied(group) for group in new)
  return groups, drawn


def usable(
  groups: Sequence[Group],
  *,
  max_error_rate: float,
  refilled: bool = False,
  mask_truncated: bool = False,
) -> list[Group]:
  """What can be learned from.

  Args:
    groups: Of one step.
    max_error_rate: Share of episodes whose environment may raise or be late.
    refilled: Tied groups are left out: others took their place.
    mask_truncated: What a budget ended is left out.

  Raises:
    RuntimeError: Too many environments raised; the first error is told.
  """
  played = [t for group in groups for t in group]
  errors = [t.error for t in played if t.status == 'error']
  if len(errors) > max_error_rate * len(played):
    raise RuntimeError(
      f'{len(errors)} of {len(played)} episodes raised or were late, more than '
      f'max_error_rate={max_error_rate}. The first: {errors[0]}'
    )
  if refilled:
    groups = [group for group in groups if not tied(group)]
  masked = ('error', *(types.BUDGETS if mask_truncated else ()))
  # A prompt that did not fit its row left no turn.
  kept = [[t for t in group if t.status not in masked and t.turns] for group in groups]
  return [group for group in kept if group]


def check_played(groups: Sequence[Group]) -> None:
  """Refuses a rollout in which no prompt left room for a reply.

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


def tied(group: Group) -> bool:
  """Whether a group's rewards are all equal; an error has none."""
  rewards = [t.reward for t in group if t.status != 'error']
  return not rewards or table.tied(np.array(rewards))
