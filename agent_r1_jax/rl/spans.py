"""Functions of columns over spans of tokens, for estimators: sums, shifts and groups.

A span is a trajectory, a turn or a segment. `ids` has the number of each entry's span;
equal ids are contiguous.
"""

from collections.abc import Callable, Sequence

from jaxtyping import Float, Int
import numpy as np


def starts(ids: Int[np.ndarray, 'n']) -> Int[np.ndarray, 'm']:
  """Returns the first index of each run of equal ids."""
  first = np.ones(len(ids), bool)
  first[1:] = ids[1:] != ids[:-1]
  return np.flatnonzero(first)


def ends(ids: Int[np.ndarray, 'n']) -> Int[np.ndarray, 'm']:
  """Returns the last index of each run of equal ids."""
  last = np.ones(len(ids), bool)
  last[:-1] = ids[1:] != ids[:-1]
  return np.flatnonzero(last)


def sum_by(
  ids: Int[np.ndarray, 'n'], x: Float[np.ndarray, 'n'], count: int
) -> Float[np.ndarray, 'm']:
  """Σ x for each id 0, 1, ..., count - 1; ids may be in any order."""
  # bincount of an empty array returns integers even with weights.
  return np.bincount(ids, x, minlength=count).astype(np.float64)


def discounted_sum(
  ids: Int[np.ndarray, 'n'], x: Float[np.ndarray, 'n'], factor: float
) -> Float[np.ndarray, 'n']:
  """y_t = x_t + f y_{t+1} within each run of equal ids, in log₂ n array operations.

  After j rounds y_t is the sum of the first 2ʲ terms of x_t + f x_{t+1} + f² x_{t+2} ...
  """
  y, reach, longest = x.copy(), 1, np.max(ends(ids) - starts(ids), initial=-1) + 1
  while reach < longest:
    same = ids[reach:] == ids[:-reach]
    y[:-reach] += factor**reach * np.where(same, y[reach:], 0.0)
    reach *= 2
  return y


def next_values(
  ids: Int[np.ndarray, 'n'], x: Float[np.ndarray, 'n'], after: Float[np.ndarray, 'm']
) -> Float[np.ndarray, 'n']:
  """Returns x_{t+1} within each run of equal ids, and after[id] at its end."""
  y, last = np.append(x[1:], np.zeros(1))[: len(x)], ends(ids)
  y[last] = after[ids[last]]
  return y


def previous_values(
  ids: Int[np.ndarray, 'n'], x: Float[np.ndarray, 'n']
) -> Float[np.ndarray, 'n']:
  """Returns x_{t-1} within each run of equal ids, and 0 at its beginning."""
  y = np.append(np.zeros(1), x)[: len(x)]
  y[starts(ids)] = 0.0
  return y


def map_by(
  keys: Sequence[np.ndarray],
  x: Float[np.ndarray, 'n'],
  measure: Callable[[np.ndarray], np.ndarray | float],
) -> Float[np.ndarray, 'n']:
  """Applies a function to the numbers of each group.

  map_by([table.group], table.scores, np.mean) has the mean score of each trajectory's
  group.

  The members of a group have equal integers in all arrays of `keys`. `measure` takes the
  numbers of a group, in order, and returns as many, or one for all.
  """
  members: dict[tuple, list[int]] = {}
  for i, key in enumerate(zip(*(k.tolist() for k in keys), strict=True)):
    members.setdefault(key, []).append(i)
  out = np.zeros(len(x))
  for chosen in members.values():
    out[chosen] = measure(x[chosen])
  return out


def tied(scores: Float[np.ndarray, 'n']) -> bool:
  """Whether all scores are equal, up to the rounding of sums of rewards."""
  return len(scores) < 2 or bool(np.ptp(scores) <= 1e-12 * np.abs(scores).max())
