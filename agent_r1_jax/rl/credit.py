"""Credit assignment: from a rollout's rewards to the advantage of each token.

table, metrics = credit.estimate(table, algorithm)
"""

import dataclasses

import numpy as np

from agent_r1_jax.rl import algorithms, losses, spans
from agent_r1_jax.rl import kl as kl_lib
from agent_r1_jax.rl.table import TokenTable


def estimate(
  table: TokenTable, algorithm: algorithms.Algorithm, *, kl_coef: float = 0.0
) -> tuple[TokenTable, dict[str, float]]:
  """Adds advantages, returns and importance weights to a table.

  Returns:
    The table, with its original rewards, and metrics to log.

  Raises:
    ValueError: The estimator needs a missing column, or does not return a required one.
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
    visible = kl_lib.less_kl(visible, coef=kl_coef, estimator=estimator)
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
    statistics = losses.measure_correction(actions)
    metrics |= {f'correction_{name}': value for name, value in statistics.items()}
  return dataclasses.replace(table, **columns), metrics


def _mean_kl(table: TokenTable, estimator: kl_lib.Estimator) -> float:
  """Averages over each trajectory's action tokens, then over trajectories (as verl)."""
  actions = table.take(table.action_mask)
  kl = np.asarray(estimator(actions.old_logprobs, actions.column('ref_logprobs')))
  sums = spans.sum_by(actions.trajectory, kl, len(actions.group))
  return float(np.mean(sums / actions.lengths))
