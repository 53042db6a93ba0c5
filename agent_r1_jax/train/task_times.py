"""Checks that a run's limits leave tasks the time that their environment says they need.

Nothing is learned from an episode that is late, so code that hangs the tests of a task
would escape a bad reward, if the limits were below the task's own times.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.train import identity


def check(
  env: Any, sets: Mapping[str, Sequence[types.Task]], limits: config_lib.Limits
) -> None:
  """Refuses limits below what `env.least_limits` says of a task, if it has that method.

  `sets` has the tasks by the name of their set in messages.

  Raises:
    ValueError: The message names the field and the task.
  """
  if not hasattr(env, 'least_limits'):
    return
  for name, tasks in sets.items():
    for number, task in identity.sample_tasks(tasks):
      for field, least in env.least_limits(task).items():
        if getattr(limits, field) < least:
          raise ValueError(
            f'limits.{field} is {getattr(limits, field):g}, and {name}[{number}] '
            f'({task.id!r}) needs {least:g}: raise it. Nothing is learned from an '
            'episode that is late, so the agent could escape a bad reward.'
          )
