"""Scores a rollout's tokens with the models: log-probs, and the critic's values.

table = scoring.score(table, algorithm, models, shape=shape)
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import NamedTuple

from jaxtyping import Float, Int
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import algorithms, learner, packing, spans
from agent_r1_jax.rl.table import TokenTable

# For each trajectory, tokens before each of its segments that only the critic sees.
Prefixes = Sequence[Int[np.ndarray, '_']]
_NO_PREFIX = np.zeros(0, np.int32)


class Models(NamedTuple):
  """The models that compute log-probs and values before an update."""

  policy: decoder.Params  # The policy's parameters before the update.
  config: decoder.DecoderConfig  # The shape of the policy and of the critic.
  # The critic's parameters (the policy's, if its critic is a second head), or None.
  critic: decoder.Params | None = None
  # The parameters of the reference policy or the teacher, if there is one.
  reference: decoder.Params | None = None
  # The shape of the reference policy.
  reference_config: decoder.DecoderConfig | None = None


def score(
  table: TokenTable,
  algorithm: algorithms.Algorithm,
  models: Models,
  *,
  shape: packing.MicrobatchShape,
  temperature: float = 1.0,
  prefixes: Prefixes | None = None,
) -> TokenTable:
  """Adds the log-probs, reference log-probs and values that the algorithm needs.

  Raises:
    ValueError: A segment, with its prefix, does not fit a packed row.
  """
  columns = {}

  def logprobs(table, params, config):
    options = {'config': config, 'temperature': temperature}
    return _score_tokens(table, lambda b: learner.logprobs(params, b, **options), shape)

  if algorithm.needs_reference:
    other = table.for_other_model()
    columns['ref_logprobs'] = logprobs(other, models.reference, models.reference_config)
  if algorithm.correction or not algorithm.loss_mask:
    # With a correction, all tokens get the log-probs of the policy before the update.
    # Without one, only the environment's tokens do, since they have a loss too; sampled
    # tokens keep their behaviour log-probs.
    old = logprobs(table, models.policy, models.config)
    keep = table.action_mask & (algorithm.correction is None)
    columns['old_logprobs'] = np.where(keep, table.old_logprobs, old)
  if algorithm.needs_critic:
    values = lambda b: learner.values(models.critic, b, config=models.config)
    longer, in_table = table.add_prefixes(prefixes or [_NO_PREFIX] * len(table.group))
    _check_lengths(longer, in_table, shape)
    after = _score_tokens(longer, values, shape)
    # The state before a token is the state after the token before it.
    columns['values'] = spans.previous_values(longer.segment, after)[in_table]
    last = spans.ends(table.trajectory)
    columns['final_values'] = np.zeros(len(table.group))
    columns['final_values'][table.trajectory[last]] = after[in_table][last]
  return dataclasses.replace(table, **columns)


def _score_tokens(
  table: TokenTable,
  score: Callable[[types.Batch], np.ndarray],
  shape: packing.MicrobatchShape,
) -> Float[np.ndarray, 'n']:
  """Computes a column with a function that maps a micro-batch to numbers [B, T]."""
  batches, layout = packing.pack_microbatches(table, shape)
  packed = np.concatenate([np.asarray(score(batch), np.float64) for batch in batches])
  return layout.extract(packed)


def _check_lengths(longer: TokenTable, in_table, shape: packing.MicrobatchShape) -> None:
  """Raises ValueError if a segment does not fit a row because of its prefix."""
  sizes = np.bincount(longer.segment)
  longest = np.argmax(sizes)
  text, size = in_table[longer.segment == longest].sum(), sizes[longest]
  if text < size > shape.row_tokens:
    raise ValueError(
      f'A segment of {text} tokens and the {size - text} before it that only the critic '
      f'sees do not fit a row of {shape.row_tokens}: raise row_tokens, or tell the '
      'critic less.'
    )
