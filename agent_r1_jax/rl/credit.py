"""Credit: log-probs and values of a rollout's tokens, their advantages, mini-batches.

table = credit.score(table, algorithm, models, shape=shape)  # Adds log-probs and values.
table, metrics = credit.estimate(table, algorithm)           # Adds advantages.
batches = credit.make_minibatch(table, members, algorithm, shape=shape)
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import NamedTuple

from jaxtyping import Float, Int
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import algorithms, correction, learner, packing, reward_transforms
from agent_r1_jax.rl import kl as kl_lib
from agent_r1_jax.rl import table as table_lib
from agent_r1_jax.rl.table import TokenTable

# For each trajectory, tokens before every segment that only the critic sees.
Prefixes = Sequence[Int[np.ndarray, '_']]
_NO_PREFIX = np.zeros(0, np.int32)


class Models(NamedTuple):
  """The models that score trajectories before an update."""

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
    ValueError: A segment, with its prefix, does not fit a row.
  """
  columns = {}

  def logprobs(params, config):
    options = {'config': config, 'temperature': temperature}
    return _score_tokens(table, lambda b: learner.logprobs(params, b, **options), shape)

  if algorithm.needs_reference:
    columns['ref_logprobs'] = logprobs(models.reference, models.reference_config)
  if algorithm.correction or not algorithm.loss_mask:
    # With a correction, all tokens get the log-probs of the policy before the update.
    # Without one, sampled tokens keep the behaviour log-probs, and only the environment's
    # tokens, which then have a loss too, lack any.
    old = logprobs(models.policy, models.config)
    keep = table.action_mask & (algorithm.correction is None)
    columns['old_logprobs'] = np.where(keep, table.old_logprobs, old)
  if algorithm.needs_critic:
    values = lambda b: learner.values(models.critic, b, config=models.config)
    view, in_table = table.add_prefixes(prefixes or [_NO_PREFIX] * len(table.group))
    _check_rows(view, in_table, shape)
    after = _score_tokens(view, values, shape)
    # The value of the state before a token is that of the state after the last token.
    columns['values'] = table_lib.previous_values(view.segment, after)[in_table]
    last = table_lib.ends(table.trajectory)
    columns['final_values'] = np.zeros(len(table.group))
    columns['final_values'][table.trajectory[last]] = after[in_table][last]
  return dataclasses.replace(table, **columns)


def estimate(
  table: TokenTable, algorithm: algorithms.Algorithm, *, kl_coef: float = 0.0
) -> tuple[TokenTable, dict[str, float]]:
  """Adds advantages, returns and importance weights.

  Returns:
    The table, with the rewards from before all transforms, and metrics to log.

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
    statistics = correction.statistics(actions)
    metrics |= {f'correction_{name}': value for name, value in statistics.items()}
  return dataclasses.replace(table, **columns), metrics


def make_minibatch(
  table: TokenTable,
  members: Sequence[int],
  algorithm: algorithms.Algorithm,
  *,
  shape: packing.MicrobatchShape,
  kl_coef: float = 0.0,
  dense: bool = False,
) -> list[types.Batch]:
  """Makes the policy's micro-batches of some trajectories.

  Trajectories whose advantages are all 0 are left out if only advantages make a loss; the
  weights of the others stay the same.

  Args:
    table: The table that `estimate` returned.
    members: The numbers of the trajectories.
    algorithm: The algorithm, which says which tokens have a loss and how they weigh.
    shape: The shape of the packed micro-batches.
    kl_coef: The present coefficient of the KL in the loss.
    dense: Every token adds to the loss, because the critic is a second head of the
      policy.
  """
  in_loss = isinstance(algorithm.kl, kl_lib.InLoss)
  part = _add_weights(table, members, algorithm, algorithm.loss_mask)
  if in_loss:
    part = dataclasses.replace(part, kl_weights=kl_coef * part.column('weights'))
  if not dense:
    part = dataclasses.replace(part, values=None, returns=None)
  if not (dense or in_loss or algorithm.entropy_coef):
    live = np.unique(part.trajectory[part.advantages != 0])
    live = live if len(live) else members[:1]  # There must be a batch to compute.
    part = part.take(np.isin(part.trajectory, live))
  return packing.pack_microbatches(part, shape)[0]


def make_critic_minibatch(
  table: TokenTable,
  members: Sequence[int],
  algorithm: algorithms.Algorithm,
  *,
  shape: packing.MicrobatchShape,
  prefixes: Prefixes | None = None,
) -> list[types.Batch]:
  """Makes the micro-batches of a critic that is a model of its own.

  As `make_minibatch`; the critic also sees `prefixes` before each segment.
  """
  part = _add_weights(table, members, algorithm, algorithm.advantage_mask)
  part = dataclasses.replace(part, advantages=None, ref_logprobs=None, correction=None)
  if prefixes is not None:
    part, _ = part.add_prefixes(prefixes)
  return packing.pack_microbatches(part, shape)[0]


def _score_tokens(
  table: TokenTable,
  score: Callable[[types.Batch], np.ndarray],
  shape: packing.MicrobatchShape,
) -> Float[np.ndarray, 'n']:
  """Computes a column by a function of packed micro-batches."""
  batches, layout = packing.pack_microbatches(table, shape)
  packed = np.concatenate([np.asarray(score(batch), np.float64) for batch in batches])
  return layout.extract(packed)


def _add_weights(table, members, algorithm, masked: bool) -> TokenTable:
  """Selects trajectories, and adds the weights that the aggregation gives them."""
  weighed, members = table.find_visible(masked), list(members)
  counts = np.bincount(table.trajectory[weighed], minlength=len(table.group))
  each = np.zeros(len(table.group))
  each[members] = algorithm.aggregation(counts[members])
  table = dataclasses.replace(table, weights=each[table.trajectory] * weighed)
  return table.take(table.find_tokens(members))


def _check_rows(view: TokenTable, in_table, shape: packing.MicrobatchShape) -> None:
  """Raises ValueError if a segment fits a row and the critic's view of it does not."""
  sizes = np.bincount(view.segment)
  longest = np.argmax(sizes)
  text, size = in_table[view.segment == longest].sum(), sizes[longest]
  if text < size > shape.row_tokens:
    raise ValueError(
      f'A segment of {text} tokens and the {size - text} before it that only the critic '
      f'sees do not fit a row of {shape.row_tokens}: raise row_tokens, or tell the '
      'critic less.'
    )


def _mean_kl(table: TokenTable, estimator: kl_lib.Estimator) -> float:
  """Averages over trajectories the mean over their action tokens (verl's)."""
  actions = table.take(table.action_mask)
  kl = np.asarray(estimator(actions.old_logprobs, actions.column('ref_logprobs')))
  sums = table_lib.sum_by(actions.trajectory, kl, len(actions.group))
  return float(np.mean(sums / actions.lengths))
