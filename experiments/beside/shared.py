"""What the systems beside each other have in common: tasks, rewards, numbers, clocks."""

import copy
import functools
import json
import pathlib
import resource
import time
from typing import Any

from absl import flags

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.tools import search
from agent_r1_jax.train import curriculum
from experiments.miniwiki import shapes
from experiments.miniwiki import tasks as miniwiki

SEED = flags.DEFINE_integer('seed', 0, 'Seed of the order of tasks and of the sampling.')
WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.', required=True)
STEPS = flags.DEFINE_integer('steps', shapes.CONFIG.schedule.steps, 'Number of steps.')
TASKS = flags.DEFINE_integer('tasks', shapes.CONFIG.schedule.tasks, 'Tasks of a step.')

# TRL adds this to the standard deviation of a group's rewards; this project 1e-6.
EPSILON = 1e-4


def make_config() -> config_lib.Config:
  """Makes the quickstart's configuration, for one core and without evaluations."""
  config = copy.deepcopy(shapes.CONFIG)
  config.seed = SEED.value
  config.schedule.steps, config.schedule.tasks = STEPS.value, TASKS.value
  config.schedule.eval_every = 0
  config.engine.replicas = 1
  return config


@functools.cache
def train_tasks() -> list[types.Task]:
  """The quickstart's questions."""
  return miniwiki.train_tasks(0, 4096)


def draw_tasks(config: config_lib.Config) -> list[types.Task]:
  """Draws the tasks of all steps, as this project's trainer does."""
  stream = curriculum.TaskStream(config.curriculum, train_tasks(), seed=config.seed)
  drawn = (stream.start_rollout(TASKS.value) for _ in range(STEPS.value))
  return [task for step in drawn for task in step]


def make_search_tool():
  """Makes the quickstart's search tool."""
  return search.search_tool(miniwiki.index(0), k=1)


class Record:
  """Writes the numbers of each step and of the whole run into the working directory.

  CPU-seconds are those of all threads of this process.
  """

  def __init__(self):
    self._workdir = pathlib.Path(WORKDIR.value)
    self._workdir.mkdir(parents=True, exist_ok=True)
    self._begin = self._last = _clocks()

  def lap(self) -> dict[str, float]:
    """Returns the seconds and CPU-seconds since the last lap."""
    last, self._last = self._last, _clocks()
    return _difference(self._last, last)

  def add(self, **numbers: float) -> None:
    """Writes the numbers of a step as a line of steps.jsonl."""
    with (self._workdir / 'steps.jsonl').open('a') as file:
      file.write(json.dumps(numbers) + '\n')

  def finish(self, **numbers: Any) -> None:
    """Writes cost.json: what the run took since this record was made."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cost = {**_difference(_clocks(), self._begin), 'peak_mb': round(peak), **numbers}
    (self._workdir / 'cost.json').write_text(json.dumps(cost, indent=2) + '\n')


def _clocks() -> dict[str, float]:
  return {'seconds': time.time(), 'cpu_seconds': time.process_time()}


def _difference(now, before) -> dict[str, float]:
  return {name: round(now[name] - before[name], 3) for name in now}
