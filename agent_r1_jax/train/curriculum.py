"""Samples the tasks of each rollout: in shuffled epochs, or by the variance of rewards.

A group of episodes has a learning signal only if its rewards differ. For rewards of 0 and
1 and a task solved with probability p, their variance is p (1 - p): greatest at p = 1/2,
and 0 for tasks that are always or never solved.
"""

import collections
from collections.abc import Sequence
import copy
import dataclasses
import functools
from typing import Any
import warnings

import grain
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types

# The weight of the newest variance in a kind's moving mean.
_NEWEST = 0.5


@dataclasses.dataclass
class Draws:
  """The state of a TaskStream, saved in checkpoints.

  Attributes:
    count: The number of tasks drawn.
    pending: For each rollout that has not been learned from yet, oldest first, its tasks'
      indices in the data set, and their ids.
    variances: Kind of task -> moving mean of the variance of a group's rewards.
  """

  count: int = 0
  pending: list[list[tuple[int, str]]] = dataclasses.field(default_factory=list)
  variances: dict[str, float] = dataclasses.field(default_factory=dict)


class TaskStream:
  """Draws the tasks of a run's rollouts; equal draws and rewards give equal tasks.

  Attributes:
    draws: The tasks drawn so far, as state to save.
  """

  def __init__(
    self,
    config: config_lib.Curriculum,
    tasks: Sequence[types.Task],
    *,
    seed: int = 0,
    draws: Draws | None = None,
  ):
    """Continues from a copy of `draws`, the state at the start of a step.

    `tasks` is a list, or another sequence with random access, such as a grain.MapDataset.

    Raises:
      ValueError: A task lacks a field that curriculum.by names.
    """
    self._config, self._tasks, self._seed = config, tasks, seed
    self.draws = copy.deepcopy(draws or Draws())
    self._started = 0  # The number of pending rollouts that this process has started.
    indices = range(len(tasks))
    self._shuffled: Any = grain.MapDataset.source(indices).seed(seed).shuffle().repeat()
    if config.weight != 'uniform':
      self._kinds, self._kind_of = np.unique(
        [self._kind(task) for task in tasks], return_inverse=True
      )

  def start_rollout(self, n: int) -> list[types.Task]:
    """Returns the n tasks of the next rollout.

    After a restart, first returns the rollouts that were under way. Tasks of theirs that
    no longer exist are replaced by new draws, with a warning.
    """
    pending = self.draws.pending
    drawn = pending[self._started :][:1]
    # Checkpoints of earlier versions have only a task's index.
    find = lambda task: task if isinstance(task, int) else self._find(*task)
    indices = [find(task) for task in drawn[0]] if drawn else self._draw(n)
    tasks = [self._tasks[i] for i in indices]
    named = [(i, task.id) for i, task in zip(indices, tasks, strict=True)]
    pending[self._started : self._started + 1] = [named]
    self._started += 1
    return tasks

  def refill(self, n: int) -> list[types.Task]:
    """Draws n more tasks for the oldest rollout."""
    return [self._tasks[i] for i in self._draw(n)]

  def finish_rollout(self, groups: Sequence[Sequence[types.Trajectory]]):
    """Removes the oldest rollout, and updates the variances from its groups' rewards."""
    self.draws.pending.pop(0)
    self._started -= 1
    if self._config.weight == 'uniform':
      return
    by_kind = collections.defaultdict(list)
    for group in groups:
      rewards = [t.reward for t in group if t.status != types.Status.FAILED]
      if len(rewards) > 1:
        by_kind[self._kind(group[0].task)].append(np.var(rewards))
    for kind, variances in by_kind.items():
      mean = float(np.mean(variances))
      before = self.draws.variances.get(kind, mean)
      self.draws.variances[kind] = before + _NEWEST * (mean - before)

  @functools.cached_property
  def _indices(self) -> dict[str, int]:
    """The indices of tasks by their ids; computing them reads all tasks."""
    return {self._tasks[i].id: i for i in reversed(range(len(self._tasks)))}

  def _find(self, index: int, name: str) -> int:
    """Returns the index of a task that an earlier run drew."""
    # Most often it has kept its index; other tasks may have the same id.
    if index < len(self._tasks) and self._tasks[index].id == name:
      return index
    if name in self._indices:
      return self._indices[name]
    warnings.warn(
      f'task {name!r} of a rollout under way is gone; another is drawn', stacklevel=2
    )
    return self._draw(1)[0]

  def _draw(self, n: int) -> list[int]:
    """Returns the indices of n tasks."""
    start = self.draws.count
    self.draws.count += n
    if self._config.weight == 'uniform':
      return [self._shuffled[i] for i in range(start, start + n)]
    rng = np.random.default_rng([self._seed, start])
    total = len(self._tasks)
    return rng.choice(total, n, replace=n > total, p=self._probabilities()).tolist()

  def _probabilities(self) -> np.ndarray:
    """Returns the probability of drawing each task, float64 [tasks]."""
    variances = self.draws.variances
    # A kind that has not been played gets the mean of the others.
    default = np.mean([*variances.values()]) if variances else 1.0
    weights = np.array([variances.get(kind, default) for kind in self._kinds.tolist()])
    weights = weights[self._kind_of]
    uniform = np.full(len(weights), 1 / len(weights))
    if not weights.any():
      return uniform
    # The uniform share revisits tasks of weight 0, whose last groups were tied.
    share = self._config.uniform_share
    return share * uniform + (1 - share) * weights / weights.sum()

  def _kind(self, task: types.Task) -> str:
    """Returns the kind of a task: its id, or the fields that curriculum.by names."""
    if not self._config.by:
      return task.id
    fields = [field.strip() for field in self._config.by.split(',')]
    if missing := [field for field in fields if field not in task.info]:
      raise ValueError(
        f'curriculum.by names {missing[0]!r}, and the info of task {task.id!r} has '
        f'{", ".join(task.info) or "no fields"}.'
      )
    return '/'.join(str(task.info[field]) for field in fields)
