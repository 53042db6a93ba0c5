"""Credit assignment: log-probs and values of the tokens, advantages, mini-batches.

table = credit.score(table, algorithm, models, shape=shape)  # Adds log-probs and values.
table, metrics = credit.estimate(table, algorithm)           # Adds advantages.
batches, metrics = credit.make_minibatch(table, members, algorithm, shape=shape)
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import NamedTuple

from jaxtyping import Float, Int
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import (
  algorithms,
  learner,
  packing,
  prefix_trees,
  reward_transforms,
  spans,
)
from agent_r1_jax.rl import correction as correction_lib
from agent_r1_jax.rl import kl as kl_lib
from agent_r1_jax.rl.table import TokenTable

# For each trajectory, tokens that only the critic sees, before each of its segments.
Prefixes = Sequence[Int[np.ndarray, '_']]
_NO_PREFIX = np.zeros(0, np.int32)


class Models(NamedTuple):
  """The models that compute log-probs and values before an update."""

  policy: decoder.Params  # The policy's parameters before the update.
  config: decoder.DecoderConfig  # The shape of the policy and of the critic.
  # The critic's parameters; the policy's if its critic is a second head; None without a
  # critic.
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
    # The reference has routers of its own.
    free = dataclasses.replace(table, routes=None)
    columns['ref_logprobs'] = logprobs(free, models.reference, models.reference_config)
  if algorithm.correction or not algorithm.loss_mask:
    # With a correction, all tokens get the log-probs of the policy before the update.
    # Without one, only the environment's tokens need them, which then have a loss too:
    # the sampled tokens keep their behaviour log-probs.
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


def estimate(
  table: TokenTable, algorithm: algorithms.Algorithm, *, kl_coef: float = 0.0
) -> tuple[TokenTable, dict[str, float]]:
  """Adds advantages, returns and importance weights.

  Returns:
    The table, with its rewards unchanged by the transforms, and metrics to log.

  Raises:
    ValueError: The estimator needs a column that is missing, or does not return one.
  """
  metrics: dict[str, float] = {}
  is_visible = table.find_visible(algorithm.advantage_mask)
  visible = table.take(is_visible)
  for transform in algorithm.rewards:
    visible = transform(visible)
  if algorithm.reads_reference:
    metrics['kl'] = _mean_kl(visible, kl_lib.k1)
  if isinstance(algorithm.kl, kl_lib.InReward):
    estimator = algorithm.kl.estimator
    metrics['kl'] = _mean_kl(visible, estimator)
    visible = reward_transforms.less_kl(visible, coef=kl_coef, estimator=estimator)
  visible = algorithm.advantages(visible)
  advantages = visible.column('advantages')
  metrics['advantage_std'] = float(advantages.std()) if len(advantages) else 0.0
  columns = {'advantages': table.scatter(is_visible, advantages)}
  if algorithm.needs_critic:
    columns['returns'] = table.scatter(is_visible, visible.column('returns'))
  if algorithm.correction:
    actions = table.take(table.action_mask)
    weights = algorithm.correction(actions)
    columns['correction'] = table.scatter(table.action_mask, weights, 1.0)
    statistics = correction_lib.statistics(actions)
    metrics |= {f'correction_{name}': value for name, value in statistics.items()}
  return dataclasses.replace(table, **columns), metrics


def make_minibatch(
  table: TokenTable,
  members: Sequence[int],
  algorithm: algorithms.Algorithm,
  *,
  shape: packing.MicrobatchShape,
  kl_coef: float = 0.0,
  shared_critic: bool = False,
) -> tuple[list[types.Batch], dict[str, float]]:
  """Makes the policy's micro-batches from some trajectories.

  Trajectories whose advantages are all 0 are left out, unless the algorithm
  `needs_all_trajectories`; the weights of the others stay the same.

  Args:
    table: The table that `estimate` returned.
    members: The numbers of the trajectories.
    algorithm: The algorithm, for its masks, aggregation, KL and entropy.
    shape: The shape of the packed micro-batches.
    kl_coef: The present coefficient of the KL in the loss.
    shared_critic: Whether the critic is a second head of the policy, so that the value
      loss of every token is part of the loss.

  Returns:
    The micro-batches, and metrics: 'trained/distinct', how often each token that differs,
    or whose text before it does, is computed.
  """
  kl_in_loss = isinstance(algorithm.kl, kl_lib.InLoss)
  minibatch = _select(table, members, algorithm, algorithm.loss_mask)
  if kl_in_loss:
    kl_weights = kl_coef * minibatch.column('weights')
    minibatch = dataclasses.replace(minibatch, kl_weights=kl_weights)
  if not shared_critic:
    minibatch = dataclasses.replace(minibatch, values=None, returns=None)
  if not algorithm.needs_all_trajectories(shared_critic=shared_critic):
    nonzero = np.unique(minibatch.trajectory[minibatch.advantages != 0])
    # One trajectory stays in any case: there must be a batch to compute.
    kept = nonzero if len(nonzero) else members[:1]
    minibatch = minibatch.take(np.isin(minibatch.trajectory, kept))
  return _pack(minibatch, shape)


def make_critic_minibatch(
  table: TokenTable,
  members: Sequence[int],
  algorithm: algorithms.Algorithm,
  *,
  shape: packing.MicrobatchShape,
  prefixes: Prefixes | None = None,
) -> tuple[list[types.Batch], dict[str, float]]:
  """Makes the micro-batches of a critic that is a model of its own, and metrics.

  As `make_minibatch`, with `prefixes` before the segments.
  """
  minibatch = _select(table, members, algorithm, algorithm.advantage_mask)
  # Columns that the value loss does not read, and the experts of another model.
  unused = dict.fromkeys(('advantages', 'ref_logprobs', 'correction', 'routes'))
  minibatch = dataclasses.replace(minibatch, **unused)
  if prefixes is not None:
    minibatch, _ = minibatch.add_prefixes(prefixes)
  return _pack(minibatch, shape)


def _score_tokens(
  table: TokenTable,
  score: Callable[[types.Batch], np.ndarray],
  shape: packing.MicrobatchShape,
) -> Float[np.ndarray, 'n']:
  """Computes a column by a function that maps a micro-batch to numbers [B, T]."""
  batches, layout = packing.pack_microbatches(table, shape)
  packed = np.concatenate([np.asarray(score(batch), np.float64) for batch in batches])
  return layout.extract(packed)


def _pack(
  minibatch: TokenTable, shape: packing.MicrobatchShape
) -> tuple[list[types.Batch], dict[str, float]]:
  batches, layout = packing.pack_microbatches(minibatch, shape)
  distinct = prefix_trees.count_distinct(minibatch)
  return batches, {'trained/distinct': layout.computed / max(distinct, 1)}


def _select(table, members, algorithm, action_mask: bool) -> TokenTable:
  """Selects trajectories, and adds the weights of their tokens in the loss.

  Args:
    table: The table of all trajectories.
    members: The numbers of the trajectories of the mini-batch.
    algorithm: Has the aggregation, which is over the mini-batch.
    action_mask: Whether only action tokens have a weight; see TokenTable.find_visible.
  """
  weighed, members = table.find_visible(action_mask), list(members)
  counts = np.bincount(table.trajectory[weighed], minlength=len(table.group))
  weight_of = np.zeros(len(table.group))
  weight_of[members] = algorithm.aggregation(counts[members])
  table = dataclasses.replace(table, weights=weight_of[table.trajectory] * weighed)
  return table.take(table.find_tokens(members))


def _check_lengths(longer: TokenTable, in_table, shape: packing.MicrobatchShape) -> None:
  """Raises ValueError if a segment fits a row without its prefix, and not with it."""
  sizes = np.bincount(longer.segment)
  longest = np.argmax(sizes)
  text, size = in_table[longer.segment == longest].sum(), sizes[longest]
  if text < size > shape.row_tokens:
    raise ValueError(
      f'A segment of {text} tokens and the {size - text} before it that only the critic '
      f'sees do not fit a row of {shape.row_tokens}: raise row_tokens, or tell the '
      'critic less.'
    )


def _mean_kl(table: TokenTable, estimator: kl_lib.Estimator) -> float:
  """Averages over each trajectory's action tokens, then over trajectories (verl's)."""
  actions = table.take(table.action_mask)
  kl = np.asarray(estimator(actions.old_logprobs, actions.column('ref_logprobs')))
  sums = spans.sum_by(actions.trajectory, kl, len(actions.group))
  return float(np.mean(sums / actions.lengths))
