"""Statistics of scores: pass@k and majority votes, and how scores predict success."""

import collections
from collections.abc import Hashable, Sequence
import math

from jaxtyping import Bool, Float
import numpy as np


def estimate(
  scores: Float[np.ndarray, 'tasks n'],
  answers: Sequence[Sequence[Hashable | None]] | None = None,
) -> dict[str, float]:
  """Computes statistics of n samples of each task.

  Args:
    scores: The score of each sample; 1 is right.
    answers: The answer of each sample, None without one. Answers that mean the same must
      be equal.

  Returns:
    'mean', 'best' (the mean of each task's best score) and 'pass@k' for k = 1, 2, 4, ...
    up to n; 'majority' if there are answers; with two tasks or more also 'error', the
    standard error of the mean. It is over tasks, because the samples of one task are not
    independent of each other.
  """
  tasks, n = scores.shape
  right = (scores >= 1.0).sum(axis=1)
  estimates = {'mean': float(scores.mean()), 'best': float(scores.max(axis=1).mean())}
  if tasks > 1:
    estimates['error'] = float(scores.mean(axis=1).std(ddof=1) / tasks**0.5)
  if answers is not None:
    votes = [majority(*pair) for pair in zip(scores, answers, strict=True)]
    estimates['majority'] = float(np.mean(votes))
  for k in (2**i for i in range(n.bit_length())):
    estimates[f'pass@{k}'] = float(np.mean([pass_at_k(n, int(c), k) for c in right]))
  return estimates


def majority(scores: Sequence[float], answers: Sequence[Hashable | None]) -> float:
  """Returns the score of the most frequent answer; 0 if there is none.

  If several are equally frequent, one is drawn at random, and this returns the expected
  score. So majority@1 is mean@1, and majority@2 is mean@2 if every sample has an answer.

  Args:
    scores: The score of each sample.
    answers: The answer of each sample; samples without one (None) do not vote.
  """
  votes = collections.Counter(answer for answer in answers if answer is not None)
  most = max(votes.values(), default=0)
  chosen = [
    score
    for score, answer in zip(scores, answers, strict=True)
    if answer is not None and votes[answer] == most
  ]
  # All these answers are equally frequent, so each of them has the same weight.
  return float(np.mean(chosen)) if chosen else 0.0


def pass_at_k(n: int, correct: int, k: int) -> float:
  """Estimates the chance that one of k samples is right: 1 - C(n - c, k) / C(n, k).

  The unbiased estimator of the Codex paper (arXiv 2107.03374, section 2.1).

  Args:
    n: Samples of a task.
    correct: How many of them are right.
    k: At most n.
  """
  if not 1 <= k <= n or not 0 <= correct <= n:
    raise ValueError(f'k={k} must be in [1, n={n}], correct={correct} in [0, n={n}].')
  return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def auc(scores: Float[np.ndarray, 'n'], success: Bool[np.ndarray, 'n']) -> float:
  """Returns the probability that a success scores above a failure, ties counted as half.

  The area under the ROC curve is Mann and Whitney's U over the number of pairs. NaN if
  there are only successes or only failures.
  """
  from scipy import stats

  wins, losses = int(success.sum()), int((~success).sum())
  if not wins * losses:
    return float('nan')
  ranks = stats.rankdata(scores)[success].sum()
  return float((ranks - wins * (wins + 1) / 2) / (wins * losses))


def pair_margins(scores, rewards, groups) -> Float[np.ndarray, 'pairs']:
  """Returns sᵢ - sⱼ for each pair of one group with rᵢ > rⱼ."""
  better = (groups[:, None] == groups) & (rewards[:, None] > rewards)
  return (scores[:, None] - scores)[better]


def calibration(
  probabilities: Float[np.ndarray, 'n'], success: Bool[np.ndarray, 'n'], bins: int = 10
) -> tuple[float, list[tuple[float, float, int]]]:
  """Compares probabilities of success with frequencies, in bins of equal width.

  Returns:
    The expected calibration error, Σ_b n_b/n |mean probability - share of successes|
    (Guo et al. 2017, arXiv 1706.04599, with the probability of success in place of the
    confidence), and for each bin that is not empty both numbers and n_b.
  """
  bin_of = np.minimum((probabilities * bins).astype(int), bins - 1)
  rows = [
    (
      float(probabilities[inside].mean()),
      float(success[inside].mean()),
      int(inside.sum()),
    )
    for inside in (bin_of == b for b in np.unique(bin_of))
  ]
  error = sum(n * abs(mean - share) for mean, share, n in rows) / max(len(success), 1)
  return error, rows
