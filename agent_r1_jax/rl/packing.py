"""Packing: ragged segments into rows of a fixed length, and back.

Letters: R rows, T tokens of a row.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from agent_r1_jax import types


@dataclasses.dataclass(frozen=True)
class Layout:
  """Where each segment lies.

  Attributes:
    lengths: Of the segments.
    places: (row, offset) of each.
    rows: R, padding rows included.
    row_tokens: T.
  """

  lengths: tuple[int, ...]
  places: tuple[tuple[int, int], ...]
  rows: int
  row_tokens: int

  def place(self, arrays: Sequence[np.ndarray], dtype) -> np.ndarray:
    """Puts one array a segment into [R, T]; 0 elsewhere."""
    out = np.zeros((self.rows, self.row_tokens), dtype)
    for array, n, (row, offset) in zip(arrays, self.lengths, self.places, strict=True):
      out[row, offset : offset + n] = array
    return out

  def extract(self, packed: np.ndarray) -> list[np.ndarray]:
    """The inverse of `place`."""
    return [
      packed[row, offset : offset + n]
      for n, (row, offset) in zip(self.lengths, self.places, strict=True)
    ]


def layout(lengths: Sequence[int], *, row_tokens: int, row_multiple: int = 1) -> Layout:
  """First-fit decreasing.

  Args:
    lengths: Of the segments.
    row_tokens: T.
    row_multiple: R is rounded up to a multiple of this, so that micro-batches are whole.

  Raises:
    ValueError: A segment is longer than a row.
  """
  if max(lengths, default=0) > row_tokens:
    raise ValueError(
      f'A segment of {max(lengths)} tokens does not fit a row of {row_tokens}: '
      'raise row_tokens.'
    )
  used: list[int] = []
  places = [(0, 0)] * len(lengths)
  for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    fits = (row for row, n in enumerate(used) if n + lengths[i] <= row_tokens)
    row = next(fits, len(used))
    if row == len(used):
      used.append(0)
    places[i] = (row, used[row])
    used[row] += lengths[i]
  rows = -(-max(len(used), 1) // row_multiple) * row_multiple
  return Layout(tuple(lengths), tuple(places), rows, row_tokens)


def pack(segments: Sequence[types.Segment], where: Layout) -> types.Batch:
  """A batch of the segments' tokens, masks, log-probs; advantages and weights are 0."""
  number, seen = [], [0] * where.rows
  for row, _ in where.places:
    seen[row] += 1
    number.append(seen[row])
  # Until the learner takes it, a batch is of NumPy arrays.
  zeros: Any = np.zeros((where.rows, where.row_tokens), np.float32)
  place: Callable[..., Any] = where.place
  return types.Batch(
    tokens=place([s.tokens for s in segments], np.int32),
    positions=place([np.arange(len(s.tokens)) for s in segments], np.int32),
    segment_ids=place(
      [np.full(len(s.tokens), i) for i, s in zip(number, segments, strict=True)], np.int32
    ),
    action_mask=place([s.action_mask for s in segments], bool),
    logprobs=place([s.logprobs for s in segments], np.float32),
    advantages=zeros,
    weights=zeros,
  )


def microbatches(batch: types.Batch, rows: int) -> Iterator[types.Batch]:
  """Splits a batch into parts of `rows` rows; R is a multiple of it."""
  for start in range(0, batch.tokens.shape[0], rows):
    yield jax.tree.map(lambda x, at=slice(start, start + rows): x[at], batch)


def gather(masks: Sequence[np.ndarray], per_segment: Sequence[np.ndarray]) -> np.ndarray:
  """The numbers of one trajectory's chosen tokens, joined over its segments: float64."""
  parts = [x[mask] for mask, x in zip(masks, per_segment, strict=True)]
  return np.concatenate(parts).astype(np.float64)


def scatter(masks: Sequence[np.ndarray], values: np.ndarray) -> list[np.ndarray]:
  """The inverse of `gather`: one array a segment, 0 elsewhere."""
  out, begin = [], 0
  for mask in masks:
    array, end = np.zeros(len(mask)), begin + int(mask.sum())
    array[mask] = values[begin:end]
    out.append(array)
    begin = end
  return out
