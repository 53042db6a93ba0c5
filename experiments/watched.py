"""Trains on all tasks but the first ones, which are evaluated during the training."""

from collections.abc import Callable, Sequence
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax import report, train, types
from agent_r1_jax.rl import algorithms
from experiments import model_formats


def run(
  config: config_lib.Config,
  workdir: str,
  tasks: Sequence[types.Task],
  make_env: Callable[[], Any],
  watched: int,
) -> None:
  """Trains by GRPO; the set of the first `watched` tasks is called 'watched'.

  Raises:
    ValueError: None is left to train on.
  """
  if not 0 <= watched < len(tasks):
    raise ValueError(
      f'--watched={watched} must leave some of {len(tasks)} to train on; 0 watches none.'
    )
  train.run(
    model_formats.add(config),
    workdir,
    tasks=tasks[watched:],
    make_env=make_env,
    algorithm=algorithms.grpo(),
    evals={'watched': tasks[:watched]} if watched else {},
    watcher=report.Watcher(),
  )
