"""The critic of a run, saved for decoding with what must be known to read its values.

A run with a critic writes it at its end: to WORKDIR/critic or, if it is a second head of
the policy, with the policy to WORKDIR/model. Under `value_head`, config.json says how it
was trained; `load` compares that with what a caller expects.
"""

from collections.abc import Callable
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from typing import Any

from jax.sharding import Mesh

from agent_r1_jax.guided import implicit_value
from agent_r1_jax.models import decoder, hf_config, sharding, weights
from agent_r1_jax.rl import algorithms, kl
from agent_r1_jax.train import identity

# What an implicit value is of, in its directory.
IMPLICIT = 'implicit_value.json'


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


def load(
  directory: str | os.PathLike,
  policy: str | os.PathLike,
  *,
  mesh: Mesh | None = None,
  **expected: Any,
) -> tuple[decoder.Params, dict[str, Any]]:
  """Loads a critic that values the states of a policy.

  Args:
    directory: The critic's directory, or that of a policy with a value head.
    policy: The policy's directory; the critic must have its tokenizer and its shape.
    mesh: The mesh that the parameters are sharded over.
    **expected: Values of the description's fields that the caller relies on, such as
      gamma=1.0.

  Returns:
    The parameters, float32, and the description.

  Raises:
    ValueError: The critic is not described, was told more than the policy, or differs
      from what is expected; the message names the field.
  """
  found = hf_config.read_json(pathlib.Path(directory) / 'config.json').get('value_head')
  if not isinstance(found, dict):
    raise ValueError(
      f'{directory}: config.json does not say in value_head how a critic was trained; '
      'take the critic/ that a run with a critic writes.'
    )
  expected = {'privileged': False, 'tokenizer': tokenizer_digest(policy)} | expected
  for field, value in expected.items():
    if field not in found:
      raise ValueError(f'{field}: a critic is described by {", ".join(found)}.')
    if found[field] != value:
      raise ValueError(
        f'{field}: the critic in {directory} was trained with {found[field]!r}, and '
        f'{value!r} is expected; train one that agrees.'
      )
  if found['gamma'] is None:
    raise ValueError(
      f'gamma: the algorithm of the critic in {directory} did not say what its values '
      'are; give algorithm._replace(value_targets=...) in training.'
    )
  place = sharding.make_placer(mesh)
  shape, params = weights.load(directory, dtype='float32', place=place)
  policy_shape = hf_config.read(policy)
  for field in dataclasses.fields(shape):
    ours, theirs = getattr(shape, field.name), getattr(policy_shape, field.name)
    if field.name not in ('dtype', 'remat', 'max_positions') and ours != theirs:
      raise ValueError(
        f'{field.name}: the critic in {directory} has {ours} and the policy {theirs}; '
        'they are read by one engine and must have one shape.'
      )
  return params, found


def save_implicit(
  directory: str | os.PathLike,
  shape: decoder.DecoderConfig,
  params: decoder.Params,
  policy: str | os.PathLike,
  odds: implicit_value.Odds,
) -> None:
  """Writes an implicit value, and in implicit_value.json what it is of."""
  weights.save(directory, shape, params, tokenizer_from=policy)
  found = {**odds._asdict(), 'policy': identity.model_digest(policy)}
  (pathlib.Path(directory) / IMPLICIT).write_text(json.dumps(found))


def load_implicit(
  directory: str | os.PathLike, policy: str | os.PathLike, *, mesh: Mesh | None = None
) -> tuple[decoder.Params, implicit_value.Odds]:
  """Loads what `save_implicit` wrote: the parameters, float32, with b and β.

  Raises:
    ValueError: It was fitted to episodes of another policy.
  """
  found = json.loads((pathlib.Path(directory) / IMPLICIT).read_text())
  if found['policy'] != identity.model_digest(policy):
    raise ValueError(
      f'policy: {directory} has the values of another policy than {policy}; fit one to '
      'its episodes.'
    )
  place = sharding.make_placer(mesh)
  params = weights.load(directory, dtype='float32', place=place)[1]
  return params, implicit_value.Odds(found['prior'], found['beta'])


def _name(function: Callable) -> str:
  if isinstance(function, functools.partial):
    given = ', '.join(f'{k}={v}' for k, v in function.keywords.items())
    return f'{_name(function.func)}({given})'
  return getattr(function, '__name__', type(function).__name__)


def tokenizer_digest(directory: str | os.PathLike) -> str:
  """Returns the sha256 of a model's tokenizer.json."""
  file = pathlib.Path(directory) / 'tokenizer.json'
  return hashlib.sha256(file.read_bytes()).hexdigest()
