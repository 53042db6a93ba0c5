"""Packing: every token has one place, and comes back from it."""

import dataclasses

import jax
import numpy as np
import pytest

from agent_r1_jax import types
from agent_r1_jax.rl import packing, table


def _segments(lengths, seed=0):
  """Segments whose tokens are all different."""
  rng = np.random.default_rng(seed)
  ends = np.cumsum(lengths)
  return [
    types.Segment(
      np.arange(end - n, end, dtype=np.int32) + 1,
      rng.random(n) < 0.5,
      rng.normal(size=n).astype(np.float32),
    )
    for n, end in zip(lengths, ends)
  ]


def _cases():
  rng = np.random.default_rng(0)
  yield from (([], 1), ([32], 1), ([1], 4), ([32, 32, 1], 2), ([5] * 13, 3))
  for _ in range(10):
    yield rng.integers(1, 33, rng.integers(1, 20)).tolist(), int(rng.integers(1, 5))


_CASES = list(_cases())


@pytest.mark.parametrize(('lengths', 'multiple'), _CASES)
def test_every_token_has_a_place_of_its_own_and_comes_back_from_it(lengths, multiple):
  where = packing.plan_layout(lengths, row_tokens=32, row_multiple=multiple)
  assert where.rows % multiple == 0 and where.rows > 0
  used = np.zeros((where.rows, 32), int)
  for n, (row, offset) in zip(lengths, where.starts, strict=True):
    assert 0 <= offset and offset + n <= 32
    used[row, offset : offset + n] += 1
  assert used.max(initial=0) <= 1 and used.sum() == sum(lengths)
  # No row that could be saved by moving it whole into another, nor one too many.
  filled = used.sum(axis=1)
  filled = np.sort(filled[filled > 0])
  assert len(filled) < 2 or filled[0] + filled[1] > 32
  assert where.rows - max(len(filled), 1) < multiple
  column = np.random.default_rng(0).normal(size=sum(lengths))
  packed = where.place(column, np.float64)
  assert packed.shape == (where.rows, 32) and packed.dtype == np.float64
  np.testing.assert_allclose(packed.sum(), column.sum(), atol=1e-9)
  np.testing.assert_array_equal(where.extract(packed), column)
  parts = np.split(column, np.cumsum(lengths, dtype=int))
  for n, part, (row, offset) in zip(lengths, parts, where.starts, strict=False):
    np.testing.assert_array_equal(packed[row, offset : offset + n], part)


def test_layout_is_first_fit_decreasing():
  where = packing.plan_layout([3, 10, 6, 7, 2], row_tokens=10)
  assert where.starts == ((1, 7), (0, 0), (2, 0), (1, 0), (2, 6))
  assert (where.rows, where.row_tokens, where.lengths) == (3, 10, (3, 10, 6, 7, 2))


def test_a_segment_longer_than_a_row_is_refused():
  with pytest.raises(ValueError, match='33 tokens does not fit a row of 32.*row_tokens'):
    packing.plan_layout([1, 33, 4], row_tokens=32)


@pytest.mark.parametrize(('lengths', 'multiple'), _CASES)
def test_pack(lengths, multiple):
  segments = _segments(lengths)
  where = packing.plan_layout(lengths, row_tokens=32, row_multiple=multiple)
  batch = packing.pack(table.from_segments(segments), where)
  padding = batch.segment_ids == 0
  assert padding.sum() == where.rows * 32 - sum(lengths)
  columns = *batch.rows[:2], *batch[1:4]
  for column in columns:
    assert (column[padding] == 0).all()
  assert not batch.advantages.any() and not batch.weights.any()
  assert set(batch[6:]) == set(batch.rows[3:]) == {None}
  edges = np.cumsum(lengths, dtype=int)[:-1]
  parts = (np.split(where.extract(x), edges) for x in columns)
  for s, tokens, positions, ids, mask, logprobs in zip(segments, *parts):
    np.testing.assert_array_equal(tokens, s.tokens)
    np.testing.assert_array_equal(positions, np.arange(len(s.tokens)))
    np.testing.assert_array_equal(mask, s.action_mask)
    np.testing.assert_array_equal(logprobs, s.behaviour_logprobs)
    assert len(set(ids)) == 1
  # 1, 2, 3, ...: no two segments of a row share a number.
  for ids, positions in zip(batch.segment_ids, batch.rows.positions):
    starts = ids[(positions == 0) & (ids > 0)]
    assert sorted(starts) == list(range(1, len(starts) + 1))
  dtypes = [str(x.dtype) for x in columns]
  assert dtypes == ['int32', 'int32', 'int32', 'bool', 'float32']


def test_every_column_that_a_batch_has_a_field_for_is_packed():
  names = types.Batch._fields[3:-1]
  segments = _segments([5, 7, 9])
  columns = {name: np.arange(21) + 100.0 * i for i, name in enumerate(names)}
  text = dataclasses.replace(table.from_segments(segments), **columns)
  where = packing.plan_layout([5, 7, 9], row_tokens=16)
  batch = packing.pack(text, where)
  for name, column in columns.items():
    packed = getattr(batch, name)
    assert packed.dtype == np.float32 and packed.shape == (2, 16)
    np.testing.assert_array_equal(where.extract(packed), column)


def test_microbatches_are_the_batch():
  text = table.from_segments(_segments([20] * 6))
  where = packing.plan_layout([20] * 6, row_tokens=32, row_multiple=2)
  batch = packing.pack(text, where)
  parts, same = packing.pack_microbatches(
    text, packing.MicrobatchShape(2, 32, trees=False)
  )
  assert len(parts) == 3 and same == where
  for whole, *of_parts in zip(*map(jax.tree.leaves, (batch, *parts)), strict=True):
    assert {x.shape for x in of_parts} == {(2, 32)}
    np.testing.assert_array_equal(np.concatenate(of_parts), whole)
