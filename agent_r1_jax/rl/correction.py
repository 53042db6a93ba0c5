"""Corrections: importance weights where another policy sampled than the one to update.

Where trajectories are stale, or were sampled by other code than the learner's, let
r = π_old/π_behaviour of each action token, π_old being the policy before the update. A
correction takes log π_old and log π_behaviour of each trajectory's action tokens and
returns their weights, float64, which multiply the policy loss and take no gradient.

A rejected token has weight 0, but counts in the loss's denominators: what is left is not
weighed up. That is AReaL's convention; verl takes what it rejects out of the mask, and so
out of the denominators too.
"""

from collections.abc import Callable, Sequence

import numpy as np

from agent_r1_jax.rl import kl

PerTrajectory = Sequence[np.ndarray]
Correction = Callable[[PerTrajectory, PerTrajectory], list[np.ndarray]]
# Log-ratios beyond this are clipped before exp, as in verl.
_MAX_LOG_RATIO = 20.0


def token_truncated(*, cap: float = 2.0) -> Correction:
  """w = min(r, C): truncated importance sampling a token (verl's, and its default C).

  Args:
    cap: C.
  """
  _check(0.0, cap)
  return _each(lambda x: np.minimum(_exp(x), cap))


def sequence_truncated(*, cap: float = 2.0) -> Correction:
  """w = min(Π r, C), one weight a trajectory: less biased, of greater variance (verl).

  Args:
    cap: C.
  """
  _check(0.0, cap)
  return _each(lambda x: np.minimum(_exp(_spread(x, np.sum)), cap))


def token_band(*, low: float = 0.5, high: float = 5.0) -> Correction:
  """w = r where low ≤ r ≤ high, else 0: IcePop (Ring-1T, arXiv 2510.18855).

  AReaL's token mask is low = 0.

  Args:
    low: The least r.
    high: The greatest.
  """
  _check(low, high)
  return _each(lambda x: _band(_exp(x), low, high))


def sequence_band(*, low: float = 0.0, high: float = 3.0) -> Correction:
  """w = Π r where low ≤ Π r ≤ high, else 0, one weight a trajectory.

  The defaults are TRL's sequence_mask.

  Args:
    low: The least product.
    high: The greatest.
  """
  _check(low, high)
  return _each(lambda x: _band(_exp(_spread(x, np.sum)), low, high))


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

  def correction(old: PerTrajectory, behaviour: PerTrajectory) -> list[np.ndarray]:
    weights = []
    for new, sampled in zip(old, behaviour, strict=True):
      x = _spread(estimator(_float64(sampled), _float64(new)), over)
      weights.append(((low <= x) & (x <= high)).astype(np.float64))
    return weights

  return correction


def product(*corrections: Correction) -> Correction:
  """The product of the corrections' weights.

  Args:
    *corrections: Such as geometric_band and token_truncated.
  """

  def correction(old: PerTrajectory, behaviour: PerTrajectory) -> list[np.ndarray]:
    parts = [each(old, behaviour) for each in corrections]
    return [np.prod(factors, axis=0) for factors in zip(*parts, strict=True)]

  return correction


def normalized(correction: Correction, *, by_trajectory: bool = False) -> Correction:
  """w / mean w over the batch: corrections change who counts, not how much is learned.

  verl's batch normalisation, without its 1e-8.

  Args:
    correction: Whose weights.
    by_trajectory: The mean is of the trajectories' means, as verl's for weights of
      trajectories; otherwise of all tokens.
  """

  def scaled(old: PerTrajectory, behaviour: PerTrajectory) -> list[np.ndarray]:
    weights = correction(old, behaviour)
    each = [w.mean(keepdims=True) for w in weights if w.size]
    flat = np.concatenate([np.zeros(0), *(each if by_trajectory else weights)])
    mean = flat.mean() if flat.any() else 1.0
    return [w / mean for w in weights]

  return scaled


def statistics(old: PerTrajectory, behaviour: PerTrajectory) -> dict[str, float]:
  """How far the two policies are apart on the tokens of a batch.

  Returns:
    kl: Mean k1 of KL(π_behaviour ‖ π_old).
    ratio_mean: Of r; 1 in the mean if the tokens are the behaviour policy's.
    ratio_max: The greatest r.
    ratio_outside: Share of the tokens whose r is outside [1/2, 2].
    effective_sample: (Σ r)² / (n Σ r²): the share of the tokens that r's variance leaves.
  """
  x = np.concatenate([np.zeros(0), *_log_ratios(old, behaviour)])
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


def _each(weigh: Callable[[np.ndarray], np.ndarray]) -> Correction:
  """A correction that weighs each trajectory by its log r."""
  return lambda old, behaviour: [weigh(x) for x in _log_ratios(old, behaviour)]


def _log_ratios(old: PerTrajectory, behaviour: PerTrajectory) -> list[np.ndarray]:
  pairs = zip(old, behaviour, strict=True)
  return [_float64(new) - _float64(sampled) for new, sampled in pairs]


def _spread(x: np.ndarray, over: Callable[[np.ndarray], float] | None) -> np.ndarray:
  """At each token, the statistic of all tokens; x itself without one."""
  return np.full(x.shape, over(x)) if over is not None and x.size else x


def _band(ratio: np.ndarray, low: float, high: float) -> np.ndarray:
  return np.where((low <= ratio) & (ratio <= high), ratio, 0.0)


def _exp(x: np.ndarray) -> np.ndarray:
  return np.exp(np.clip(x, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def _float64(x: np.ndarray) -> np.ndarray:
  return np.asarray(x, np.float64)


def _check(low: float, high: float) -> None:
  if not 0 <= low <= high or high == 0:
    raise ValueError(f'Ratios are from {low} to {high}; let 0 ≤ low ≤ high, 0 < high.')
