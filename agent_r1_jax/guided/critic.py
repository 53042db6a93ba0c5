"""A run's critic, saved for decoding with the settings needed to read its values.

A run with a critic writes it at its end: to WORKDIR/critic or, if it is a value head of
the policy, with the policy to WORKDIR/model. Under `value_head`, config.json has the
settings of its training (train/fingerprint.py); `load` compares them with the caller's.
"""

from collections.abc import Sequence
import dataclasses
import os
import pathlib
from typing import Any

from jax.sharding import Mesh

from agent_r1_jax.models import decoder, sharding
from agent_r1_jax.models.files import hf_config, json_fields, tensor_files, weights
from agent_r1_jax.train import fingerprint


def load(
  directory: str | os.PathLike,
  policy: str | os.PathLike,
  *,
  mesh: Mesh | None = None,
  formats: Sequence[tensor_files.Format] = (),
  **expected: Any,
) -> tuple[decoder.Params, dict[str, Any]]:
  """Loads a critic that values the states of a policy.

  `directory` is the critic's, or a policy's with a value head; the critic must have the
  tokenizer and shape of `policy`, which may have one of `formats`. `expected` has the
  settings that the caller relies on, such as gamma=1.0.

  Returns:
    The parameters, float32, and the critic's description.

  Raises:
    ValueError: The critic has no description, saw more than the policy does, or differs
      from `expected`; the message names the field.
  """
  found = json_fields.read_json(pathlib.Path(directory) / 'config.json').get('value_head')
  if not isinstance(found, dict):
    raise ValueError(
      f'{directory}: config.json does not say in value_head how a critic was trained; '
      'take the critic/ that a run with a critic writes.'
    )
  expected = {
    'privileged': False,
    'tokenizer': fingerprint.tokenizer_digest(policy),
  } | expected
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
  policy_shape = hf_config.read(policy, formats)
  for field in dataclasses.fields(shape):
    ours, theirs = getattr(shape, field.name), getattr(policy_shape, field.name)
    if field.name not in ('dtype', 'remat', 'max_positions') and ours != theirs:
      raise ValueError(
        f'{field.name}: the critic in {directory} has {ours} and the policy {theirs}; '
        'they are read by one engine and must have one shape.'
      )
  return params, found
