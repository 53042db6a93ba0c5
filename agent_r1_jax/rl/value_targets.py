"""What the values of a critic mean: how an algorithm trained it, for its config.json."""

from collections.abc import Callable
import functools
import hashlib
import os
from typing import Any

from agent_r1_jax.host import model_paths
from agent_r1_jax.rl import algorithms, kl


def describe(
  algorithm: algorithms.Algorithm, model: str | os.PathLike, *, privileged: bool
) -> dict[str, Any] | None:
  """Describes how an algorithm trains its critic, for JSON; None if it has none.

  The fields are those of algorithms.ValueTargets (None if the algorithm does not say
  them) and

    rewards: The names of the reward's transforms, in order.
    kl_coef: The coefficient of the KL in the reward.
    privileged: Whether the critic is told what the policy is not.
    tokenizer: The sha256 of tokenizer.json.

  Args:
    algorithm: The algorithm that trains the critic.
    model: The directory of the policy, whose tokenizer it reads.
    privileged: Whether the run has a function `privileged`.
  """
  if not algorithm.needs_critic:
    return None
  unknown = dict.fromkeys(algorithms.ValueTargets._fields)
  targets = algorithm.value_targets
  return {
    **(targets._asdict() if targets else unknown),
    'rewards': [_name(transform) for transform in algorithm.rewards],
    'kl_coef': algorithm.kl.coef if isinstance(algorithm.kl, kl.InReward) else 0.0,
    'privileged': privileged,
    'tokenizer': tokenizer_digest(model),
  }


def tokenizer_digest(directory: str | os.PathLike) -> str:
  """Returns the sha256 of a model's tokenizer.json."""
  file = model_paths.get_directory(directory) / 'tokenizer.json'
  return hashlib.sha256(file.read_bytes()).hexdigest()


def _name(function: Callable) -> str:
  if isinstance(function, functools.partial):
    given = ', '.join(f'{k}={v}' for k, v in function.keywords.items())
    return f'{_name(function.func)}({given})'
  return getattr(function, '__name__', type(function).__name__)
