"""Packs the segments of a token table into packed rows of one length, and unpacks them.

A packed row is one sequence of the device's batch and holds several segments. It stores
their common prefixes once (rl/prefix_trees.py), or in each segment if trees are off or
not supported.

Letters: n tokens of a table, R packed rows, T tokens of a packed row.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import logging
from typing import Any, NamedTuple

import jax
from jaxtyping import Int
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.models import attention
from agent_r1_jax.models.pictures.vision_config import VisionConfig
from agent_r1_jax.rl import picture_rows, prefix_trees
from agent_r1_jax.rl.table import TokenTable

_LOGGER = logging.getLogger(__name__)


class MicrobatchShape(NamedTuple):
  """The shape of packed micro-batches: B packed rows of T tokens."""

  rows: int
  row_tokens: int
  # Whether to compute common prefixes of segments once.
  trees: bool = True
  vision: VisionConfig | None = None  # The model's vision tower, if it has one.


@dataclasses.dataclass(frozen=True)
class Layout:
  """Where each segment is in the packed rows."""

  lengths: tuple[int, ...]  # The number of tokens of each segment.
  starts: tuple[tuple[int, int], ...]  # The (row, column) of each segment's first token.
  rows: int  # R, padding rows included.
  row_tokens: int  # T.

  @property
  def shape(self) -> tuple[int, int]:
    """(R, T)."""
    return self.rows, self.row_tokens

  @functools.cached_property
  def positions(self) -> Int[np.ndarray, 'n']:
    """The position of each token in its segment."""
    lengths = np.array(self.lengths, int)  # 3, 2 -> 0 1 2 0 1
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)

  @functools.cached_property
  def index(self) -> Int[np.ndarray, 'n']:
    """The index of each token in the flattened packed rows."""
    # Segments of 3 and 2 at (row 0, column 0) and (1, 4), T = 8: 0 1 2 12 13.
    starts = [row * self.row_tokens + column for row, column in self.starts]
    return self.positions + np.repeat(np.array(starts, int), self.lengths)

  @property
  def computed(self) -> int:
    """The number of tokens in the packed rows."""
    return sum(self.lengths)

  @functools.cached_property
  def segment_ids(self) -> Int[np.ndarray, 'n']:
    """The number of each token's segment in its packed row: 1, 2, ..."""
    counts = [0] * self.rows
    numbers = []
    for row, _ in self.starts:
      counts[row] += 1
      numbers.append(counts[row])
    return np.repeat(np.array(numbers, int), self.lengths)

  def place(self, column: np.ndarray, dtype) -> Any:
    """Packs a column [n] of all segments into an array [R, T], padded with 0."""
    out = np.zeros(self.rows * self.row_tokens, dtype)
    out[self.index] = column
    return out.reshape(self.rows, self.row_tokens)

  def extract(self, packed: np.ndarray) -> np.ndarray:
    """The inverse of `place`: [R, T] -> [n]."""
    return packed.reshape(-1)[self.index]

  def pack_rows(self, tokens: Int[np.ndarray, 'n']) -> tuple[types.Rows, None]:
    """Packs a table's tokens; the columns are None, since entries are the tokens."""
    place = functools.partial(self.place, dtype=np.int32)
    sees = types.Segments(place(self.segment_ids))
    return types.Rows(place(tokens), place(self.positions), sees), None


def plan_layout(
  lengths: Sequence[int], *, row_tokens: int, row_multiple: int = 1
) -> Layout:
  """Assigns segments to packed rows of `row_tokens` (T) by first-fit decreasing.

  The number of rows (R) is rounded up to `row_multiple`, so that micro-batches are full.

  Raises:
    ValueError: A segment is longer than a packed row.
  """
  check_lengths(lengths, row_tokens)
  used = 0  # Rows that have a segment.
  filled = np.zeros(len(lengths) + 1, int)  # Tokens of each row; the last stays empty.
  starts = [(0, 0)] * len(lengths)
  for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    # The first row with room, which may be the first empty row.
    row = int(np.argmax(filled[: used + 1] <= row_tokens - lengths[i]))
    used = max(used, row + 1)
    starts[i] = (row, int(filled[row]))
    filled[row] += lengths[i]
  rows = -(-max(used, 1) // row_multiple) * row_multiple
  return Layout(tuple(lengths), tuple(starts), rows, row_tokens)


def check_lengths(lengths: Sequence[int], row_tokens: int) -> None:
  """Raises ValueError if a segment is longer than a packed row."""
  if (longest := max(lengths, default=0)) > row_tokens:
    raise ValueError(
      f'A segment of {longest} tokens does not fit a row of {row_tokens}: '
      'raise row_tokens.'
    )


def pack(
  table: TokenTable,
  layout: Layout | prefix_trees.TreeLayout,
  vision: VisionConfig | None = None,
) -> types.Batch:
  """Packs a table into one batch; missing advantages and weights become 0.

  `vision` is the vision tower's shape, if the table has pictures.
  """
  # The arrays stay NumPy arrays until the learner puts them on the mesh.
  rows, columns = layout.pack_rows(table.tokens)
  if table.routes is not None:
    rows = rows._replace(routes=_place_routes(table.routes, layout))
  rows = picture_rows.add(rows, table.pictures, vision)
  ids = layout.place(layout.segment_ids, np.int32)
  zeros = np.zeros(ids.shape, np.float32)
  arrays: dict[str, Any] = {'advantages': zeros, 'weights': zeros, 'columns': columns}
  for name in types.Batch._fields:
    if (column := getattr(table, name, None)) is not None:
      # Tokens and masks keep their types.
      dtype = np.float32 if column.dtype.kind == 'f' else column.dtype
      arrays[name] = layout.place(column, dtype)
  return types.Batch(rows, ids, **arrays)


def _place_routes(routes, layout: Layout | prefix_trees.TreeLayout) -> np.ndarray:
  """Packs the experts of tokens; shared tokens get the known ones of any segment."""
  out = np.full((*layout.shape, *routes.shape[1:]), types.NO_EXPERT, routes.dtype)
  known = (routes != types.NO_EXPERT).all((1, 2))
  out.reshape(-1, *routes.shape[1:])[layout.index[known]] = routes[known]
  return out


def split_microbatches(batch: types.Batch, rows: int) -> Iterator[types.Batch]:
  """Splits a batch into micro-batches of `rows` packed rows; `rows` divides R."""
  for start in range(0, len(batch.weights), rows):
    yield jax.tree.map(lambda x, part=slice(start, start + rows): x[part], batch)


def pack_microbatches(
  table: TokenTable, shape: MicrobatchShape
) -> tuple[list[types.Batch], Layout | prefix_trees.TreeLayout]:
  """Packs a table into micro-batches.

  With trees, if the table has weights, only tokens with a nonzero weight get an entry.

  Returns:
    The micro-batches, and one layout for all their rows.

  Raises:
    ValueError: A segment is longer than a packed row.
  """
  lengths = table.segment_lengths.tolist()
  options = {'row_tokens': shape.row_tokens, 'row_multiple': shape.rows}
  if shape.trees and attention.supports_trees():
    check_lengths(lengths, shape.row_tokens)
    layout = prefix_trees.plan(table, **options)
  else:
    if shape.trees:
      _warn_of_whole_rows()
    layout = plan_layout(lengths, **options)
  batch = pack(table, layout, shape.vision)
  return list(split_microbatches(batch, shape.rows)), layout


@functools.cache
def _warn_of_whole_rows() -> None:
  """Warns once per process that common prefixes are computed repeatedly."""
  _LOGGER.warning(
    'batch.trees: tokens that texts share are computed in each of them, since attention '
    'along trees is not supported with mesh.context above 1.'
  )
