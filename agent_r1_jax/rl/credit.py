"""Credit: what models say of a rollout's tokens, what these are worth, and mini-batches.

table = credit.score(table, algorithm, models, shape=shape)  # What models say of them.
table, metrics = credit.estimate(table, algorithm)           # What they are worth.
batches = credit.make_minibatch(table, members, algorithm, shape=shape)
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import NamedTuple

from jaxtyping import Float, Int
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import algorithms, correction, learner, packing
from agent_r1_jax.rl import kl as kl_lib
from agent_r1_jax.rl import rewards as rewards_lib
from agent_r1_jax.rl import table as table_lib
from agent_r1_jax.rl.table import TokenTable

# The tokens of each trajectory that only the critic sees, before every segment.
Prefixes = Sequence[Int[np.ndarray, '_']]
_NO_PREFIX = np.zeros(0, np.int32)


class Models(NamedTuple):
  """What scores trajectories before an update.

  Attributes:
    policy: The parameters that will be updated.
    config: The shape of the policy and of the critic.
    critic: The critic's parameters; the policy's own where it has a value head; None
      without a critic.
    reference: The parameters of the reference policy or the teacher, where there is one.
    reference_config: Its shape.
  """

  policy: decoder.Params
  config: decoder.DecoderConfig
  critic: decoder.Params | None = None
  reference: decoder.Params | None = None
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
  """Adds what the models say of every token: log-probs, the reference's, values.

  Args:
    table: All tokens of a rollout.
    algorithm: Says what is needed.
    models: All that the algorithm needs.
    shape: The packed micro-batches'.
    temperature: What the tokens were sampled at.
    prefixes: What only the critic sees.

  Raises:
    ValueError: A segment, with its prefix, does not fit a row.
  """
  columns = {}

  def logprobs(params, config):
    options = {'config': config, 'temperature': temperature}
    return _scored(table, lambda b: learner.logprobs(params, b, **options), shape)

  if algorithm.needs_reference:
    columns['ref_logprobs'] = logprobs(models.reference, models.reference_config)
  if algorithm.correction or not algorithm.loss_mask:
    old = logprobs(models.policy, models.config)
    # Where nothing is stale the sampler's numbers stand; what it did not sample has none.
    sampled = table.action_mask & (algorithm.correction is None)
    columns['logprobs'] = np.where(sampled, table.logprobs, old)
  if algorithm.needs_critic:
    values = lambda b: learner.values(models.critic, b, config=models.config)
    view, own = table.add_prefixes(prefixes or [_NO_PREFIX] * len(table.group))
    _check_rows(view, own, shape)
    after = _scored(view, values, shape)
    # The value before a token is the one after the token before it.
    columns['values'] = table_lib.previous_values(view.segment, after)[own]
    last = table_lib.ends(table.trajectory)
    columns['final_values'] = np.zeros(len(table.group))
    columns['final_values'][table.trajectory[last]] = after[own][last]
  return dataclasses.replace(table, **columns)


def estimate(
  table: TokenTable, algorithm: algorithms.Algorithm, *, kl_coef: float = 0.0
) -> tuple[TokenTable, dict[str, float]]:
  """Adds what the tokens are worth: advantages, returns, importance weights.

  Args:
    table: What `score` gave.
    algorithm: Its transforms of the rewards, estimator and correction are applied.
    kl_coef: The present coefficient of algorithm.kl.

  Returns:
    The table, whose rewards are those before all transforms, and numbers to log.

  Raises:
    ValueError: The estimator needs a column that is missing, or does not give one.
  """
  metrics: dict[str, float] = {}
  rows = table.visible_rows(algorithm.advantage_mask)
  shown = table.take(rows)
  for transform in algorithm.rewards:
    shown = transform(shown)
  if algorithm.reads_reference:
    metrics['kl'] = _mean_kl(shown, kl_lib.k1)
  if isinstance(algorithm.kl, kl_lib.InReward):
    estimator = algorithm.kl.estimator
    metrics['kl'] = _mean_kl(shown, estimator)
    shown = rewards_lib.less_kl(shown, coef=kl_coef, estimator=estimator)
  shown = algorithm.advantages(shown)
  advantages = shown.column('advantages')
  metrics['advantage_std'] = float(advantages.std()) if len(advantages) else 0.0
  columns = {'advantages': table.scatter(rows, advantages)}
  if algorithm.needs_critic:
    columns['returns'] = table.scatter(rows, shown.column('returns'))
  if algorithm.correction:
    acted = table.take(table.action_mask)
    weights = algorithm.correction(acted)
    # What was not sampled needs no correction.
    columns['correction'] = table.scatter(table.action_mask, weights, 1.0)
    found = correction.statistics(acted)
    metrics |= {f'stale_{name}': value for name, value in found.items()}
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
  """The policy's micro-batches of some trajectories.

  Trajectories without an advantage are not in it where only advantages make a loss; the
  weights are the same as with them.

  Args:
    table: What `estimate` gave.
    members: Numbers of the trajectories.
    algorithm: Says which tokens have a loss, and how they are weighed.
    shape: The packed micro-batches'.
    kl_coef: The present coefficient of the KL in the loss.
    dense: Every token adds to the loss: the critic is a second head of the policy.
  """
  in_loss = isinstance(algorithm.kl, kl_lib.InLoss)
  part = _weighted(table, members, algorithm, algorithm.loss_mask)
  if in_loss:
    part = dataclasses.replace(part, kl_weights=kl_coef * part.column('weights'))
  if not dense:
    part = dataclasses.replace(part, values=None, returns=None)
  if not (dense or in_loss or algorithm.entropy_coef):
    live = np.unique(part.trajectory[part.advantages != 0])
    live = live if len(live) else members[:1]
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
  """As `make_minibatch`, for a critic of its own, which sees the prefixes."""
  part = _weighted(table, members, algorithm, algorithm.advantage_mask)
  part = dataclasses.replace(part, advantages=None, ref_logprobs=None, correction=None)
  if prefixes is not None:
    part, _ = part.add_prefixes(prefixes)
  return packing.pack_microbatches(part, shape)[0]


def _scored(
  table: TokenTable,
  say: Callable[[types.Batch], np.ndarray],
  shape: packing.MicrobatchShape,
) -> Float[np.ndarray, 'n']:
  """A number of every token, by a function of packed batches."""
  batches, where = packing.pack_microbatches(table, shape)
  packed = np.concatenate([np.asarray(say(batch), np.float64) for batch in batches])
  return where.extract(packed)


def _weighted(table, members, algorithm, masked: bool) -> TokenTable:
  """The rows of some trajectories, with the weights that the aggregation gives them."""
  rows, members = table.visible_rows(masked), list(members)
  counts = np.bincount(table.trajectory[rows], minlength=len(table.group))
  each = np.zeros(len(table.group))
  each[members] = algorithm.aggregation(counts[members])
  table = dataclasses.replace(table, weights=each[table.trajectory] * rows)
  return table.take(table.find_rows(members))


def _check_rows(view: TokenTable, own, shape: packing.MicrobatchShape) -> None:
  """Raises ValueError where the text fits a row and the critic's view of it does not."""
  sizes = np.bincount(view.segment)
  longest = np.argmax(sizes)
  text, size = own[view.segment == longest].sum(), sizes[longest]
  if text < size > shape.row_tokens:
    raise ValueError(
      f'A segment of {text} tokens and the {size - text} before it that only the critic '
      f'sees do not fit a row of {shape.row_tokens}: raise row_tokens, or tell the '
      'critic less.'
    )


def _mean_kl(table: TokenTable, estimator: kl_lib.Estimator) -> float:
  """The mean over trajectories of the mean over their action tokens (verl's)."""
  acted = table.take(table.action_mask)
  kl = np.asarray(estimator(acted.logprobs, acted.column('ref_logprobs')))
  sums = table_lib.sum_by(acted.trajectory, kl, len(acted.group))
  return float(np.mean(sums / acted.lengths))
