"""Corrections: importance weights where another policy sampled than the one to update.

Where trajectories are stale, or were sampled by other code than the learner's, let
r = π_old/π_behaviour of each action token, π_old being the policy before the update. A
correction takes the table of all action tokens (rl/table.py), whose columns `logprobs`
and `behaviour_logprobs` are log π_old and log π_behaviour, and returns a weight for each
row, float64. The weights multiply the policy loss and take no gradient.

A rejected token has weight 0, but counts in the loss's denominators: what is left is not
weighed up. That is AReaL's convention; verl takes what it rejects out of the mask, and so
out of the denominators too.
"""

from collections.abc import Callable

from jaxtyping import Float
import numpy as np

from agent_r1_jax.rl import kl
from agent_r1_jax.rl.table import TokenTable, map_by, sum_by

Correction = Callable[[TokenTable], Float[np.ndarray, 'n']]
# Log-ratios beyond this are clipped before exp, as in verl.
_MAX_LOG_RATIO = 20.0


def token_truncated(*, cap: float = 2.0) -> Correction:
  """w = min(r, C): truncated importance sampling a token (verl's, and its default C).

  Args:
    cap: C.
  """
  _check(0.0, cap)
  return lambda table: np.minimum(_exp(_log_ratio(table)), cap)


def sequence_truncated(*, cap: float = 2.0) -> Correction:
  """w = min(Π r, C), one weight a trajectory: less biased, of greater variance (verl).

  Args:
    cap: C.
  """
  _check(0.0, cap)
  return lambda table: np.minimum(_exp(_product(table)), cap)


def token_band(*, low: float = 0.5, high: float = 5.0) -> Correction:
  """w = r where low ≤ r ≤ high, else 0: IcePop (Ring-1T, arXiv 2510.18855).

  AReaL's token mask is low = 0.

  Args:
    low: The least r.
    high: The greatest.
  """
  _check(low, high)
  return lambda table: _band(_exp(_log_ratio(table)), low, high)


def sequence_band(*, low: float = 0.0, high: float = 3.0) -> Correction:
  """w = Π r where low ≤ Π r ≤ high, else 0, one weight a trajectory.

  The defaults are TRL's sequence_mask.

  Args:
    low: The least product.
    high: The greatest.
  """
  _check(low, high)
  return lambda table: _band(_exp(_product(table)), low, high)


def geometric_band(*, low: float = 0.99, high: float = 1.01) -> Correction:
  """w = 1 where low ≤ exp(mean log r) ≤ high, else 0, one weight a trajectory (SkyRL).

  Args:
    low: The least geometric mean, above 0.
    high: The greatest.
  """
  if not 0 < low <= high:
    raise ValueError(f'low ({low}) must be above 0 and at most high ({high}).')
  # k1 is log 1/r.
  return reject(kl.k1, np.mean, low=-np.log(high), high=-np.log(low))


def reject(
  estimator: kl.Estimator,
  over: Callable[[np.ndarray], float] | None = None,
  *,
  low: float = -np.inf,
  high: float,
) -> Correction:
  """w = 1 where low ≤ KL(π_behaviour ‖ π_old) ≤ high as the estimator has it, else 0.

  verl's rollout rejection, {token, seq_sum, seq_mean, seq_max} by {k1, k2, k3}. verl
  gives k1's bounds as ratios: [l, h] there is low = log l, high = log h here. And its k3
  is not clipped to 10 a token.

  Args:
    estimator: kl.k1, kl.k2 or kl.k3.
    over: np.sum, np.mean or np.max over the trajectory, which is kept or rejected as a
      whole; None looks at each token alone.
    low: The least divergence; below 0 with k1 only.
    high: The greatest.
  """
  if not low <= high:
    raise ValueError(f'low ({low}) must be at most high ({high}).')

  def correction(table):
    x = estimator(table.behaviour_logprobs, table.logprobs)
    x = map_by([table.trajectory], x, over) if over else x
    return ((low <= x) & (x <= high)).astype(np.float64)

  return correction


def product(*corrections: Correction) -> Correction:
  """The product of the corrections' weights.

  Args:
    *corrections: Such as geometric_band and token_truncated.
  """
  return lambda table: np.prod([weigh(table) for weigh in corrections], axis=0)


def normalized(correction: Correction, *, by_trajectory: bool = False) -> Correction:
  """w / mean w over the batch: corrections change who counts, not how much is learned.

  verl's batch normalisation, without its 1e-8.

  Args:
    correction: Gives the weights w.
    by_trajectory: The mean is of the trajectories' means, as verl's for weights of
      trajectories; otherwise of all tokens.
  """

  def scaled(table):
    weights = correction(table)
    means = sum_by(table.trajectory, weights, len(table.group)) / table.lengths.clip(1)
    each = means[table.lengths > 0] if by_trajectory else weights
    return weights / each.mean() if weights.any() else weights

  return scaled


def statistics(table: TokenTable) -> dict[str, float]:
  """How far the two policies are apart on the tokens of a batch; empty without tokens.

  Returns:
    kl: Mean k1 of KL(π_behaviour ‖ π_old).
    ratio_mean: The mean of r; 1 on average if the tokens are the behaviour policy's.
    ratio_max: The greatest r.
    ratio_outside: Share of the tokens whose r is outside [1/2, 2].
    effective_sample: (Σ r)² / (n Σ r²): the share of the tokens that r's variance leaves.
  """
  x = _log_ratio(table)
  if not x.size:
    return {}
  ratio = _exp(x)
  return {
    'kl': float(-x.mean()),
    'ratio_mean': float(ratio.mean()),
    'ratio_max': float(ratio.max()),
    'ratio_outside': float(np.mean((ratio < 0.5) | (ratio > 2.0))),
    'effective_sample': float(ratio.mean() ** 2 / np.mean(ratio**2)),
  }


def _log_ratio(table: TokenTable) -> Float[np.ndarray, 'n']:
  """log r of each token."""
  return table.logprobs - table.behaviour_logprobs


def _product(table: TokenTable) -> Float[np.ndarray, 'n']:
  """log Π r of each token's trajectory."""
  sums = sum_by(table.trajectory, _log_ratio(table), len(table.group))
  return sums[table.trajectory]


def _band(ratio: np.ndarray, low: float, high: float) -> np.ndarray:
  return np.where((low <= ratio) & (ratio <= high), ratio, 0.0)


def _exp(x: np.ndarray) -> np.ndarray:
  return np.exp(np.clip(x, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def _check(low: float, high: float) -> None:
  if not 0 <= low <= high or high == 0:
    raise ValueError(f'Ratios are from {low} to {high}; let 0 ≤ low ≤ high, 0 < high.')
