"""Aggregations: the weights that make one loss of the losses of all tokens.

An aggregation takes the token counts of a mini-batch's trajectories, int [N], and returns
the weight of each token of each trajectory, float64 [N].
"""

from collections.abc import Callable

import numpy as np

Aggregate = Callable[[np.ndarray], np.ndarray]


def token_mean(counts: np.ndarray) -> np.ndarray:
  """All tokens of the batch have the same weight, 1 / Σ counts (DAPO, verl's default)."""
  return np.full(len(counts), 1.0 / max(counts.sum(), 1))


def seq_mean_token_mean(counts: np.ndarray) -> np.ndarray:
  """All trajectories have the same weight, and so do the tokens of each (GRPO's paper).

  As in verl, trajectories without an action token are not counted.
  """
  return 1.0 / (max((counts > 0).sum(), 1) * np.maximum(counts, 1))


def seq_mean_token_sum(counts: np.ndarray) -> np.ndarray:
  """Sums over the tokens, averages over the trajectories: 1 / #{counts > 0}."""
  return np.full(len(counts), 1.0 / max((counts > 0).sum(), 1))


def seq_mean_token_sum_norm(length: float) -> Aggregate:
  """Dr.GRPO's norm (arXiv 2503.20783): the sum of a trajectory's tokens over a constant.

  The constant `length` may be the most action tokens that a trajectory can have.
  """
  if not length > 0:
    raise ValueError(f'length is {length}; it must be above 0.')
  return lambda counts: seq_mean_token_sum(counts) / length
