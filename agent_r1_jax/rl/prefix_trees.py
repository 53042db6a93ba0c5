"""Packs segments as prefix trees: a packed row stores their common prefixes once.

Segments that begin with the same tokens share these tokens' hidden states and log-probs.
So a packed row holds trees, in which each path from a root is a segment:

  segments   a b c    a b d e    x y

  column     0  1  2  3  4  5  6
  token      a  b  c  d  e  x  y
  parent     0  0  1  1  3  5  5     the column of the token before; a root's own column
  end        5  5  3  5  5  7  7     the column after the last descendant

The order is depth-first, so that the descendants of a token are the columns up to its
end: a query at column t reads the key at column s if s <= t < end(s). The inputs of a
token's loss, such as its advantage, differ between the segments that share it. They are
stored per entry, one for each segment; Batch.columns has the column of each entry's token
in the tree.

Letters: n tokens of a table, S segments, R packed rows, T tokens and E entries per row.
"""

from collections.abc import Iterator
import dataclasses
import itertools
from typing import Any, NamedTuple

from jaxtyping import Int
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.rl import spans
from agent_r1_jax.rl.table import TokenTable

# The maximum number of entries of a packed row per token. If segments share actions, such
# as equal first turns, a row has more entries than tokens.
ENTRIES = 2


@dataclasses.dataclass(frozen=True)
class TreeLayout:
  """Where the tokens of a table are in packed rows of prefix trees."""

  index: Int[np.ndarray, 'n']  # The index of each token in the flattened packed rows.
  parents: Int[np.ndarray, 'R T']  # See above; for padding, its own column.
  ends: Int[np.ndarray, 'R T']  # See above; for padding, the next column.
  positions: Int[np.ndarray, 'n']  # The position of each token in its segment.
  places: Int[np.ndarray, 'm']  # The index of each entry in the flattened [R, E].
  entries: Int[np.ndarray, 'm']  # The index of each entry's token in the table.
  segment_ids: Int[np.ndarray, 'n']  # The segments of a packed row, numbered from 1.
  columns: int  # E.

  @property
  def shape(self) -> tuple[int, int]:
    """(R, T)."""
    return self.parents.shape[0], self.parents.shape[1]

  @property
  def computed(self) -> int:
    """The number of tokens in the packed rows."""
    used = np.zeros(self.parents.size, bool)
    used[self.index] = True
    return int(used.sum())

  def place(self, column: np.ndarray, dtype) -> Any:
    """Packs the entries of a column [n] into an array [R, E], padded with 0."""
    out = np.zeros((len(self.ends), self.columns), dtype)
    out.reshape(-1)[self.places] = column[self.entries]
    return out

  def extract(self, packed: np.ndarray) -> np.ndarray:
    """Returns the value of each token of the table: [R, T] -> [n]."""
    return packed.reshape(-1)[self.index]

  def pack_rows(self, tokens: Int[np.ndarray, 'n']) -> tuple[types.Rows, Any]:
    """Packs the tokens of a table; also returns the column of each entry's token."""
    # The arrays stay NumPy arrays until the learner puts them on the mesh.
    text: Any = np.zeros((2, *self.ends.shape), np.int32)
    text.reshape(2, -1)[:, self.index] = tokens, self.positions
    parents: Any = self.parents
    ends: Any = self.ends
    columns = self.place(self.index % ends.shape[1], np.int32)
    return types.Rows(text[0], text[1], types.Tree(parents, ends)), columns


class _Entries(NamedTuple):
  """The last fields of a TreeLayout."""

  places: np.ndarray
  entries: np.ndarray
  segment_ids: np.ndarray
  columns: int


class _Sorted(NamedTuple):
  """The segments of a table, sorted lexicographically by their tokens."""

  starts: Int[np.ndarray, 'S']  # The index of each segment's first token in the table.
  lengths: Int[np.ndarray, 'S']
  # The length of the prefix that a segment shares with the one before it, which is the
  # longest that it shares with any before it; 0 for the first.
  shared: Int[np.ndarray, 'S']
  entries: Int[np.ndarray, 'S']  # The number of entries of each segment.


def plan(table: TokenTable, *, row_tokens: int, row_multiple: int = 1) -> TreeLayout:
  """Assigns segments, none longer than `row_tokens` (T), to packed rows of trees.

  Entries are the tokens with a weight in the loss, at most E = 2 T per row. A table
  without weights is only scored: each token of a tree is then one entry, at its column.

  It uses the better of two assignments, the one with fewer rows. Both cut trees that are
  too large, so that a row repeats the shared prefix of its first segment. The first
  assignment fills rows in the order of the segments, with cuts that minimise the number
  of rows and then the repeated tokens. The second cuts each tree by itself, and assigns
  the parts by first-fit decreasing, which is better if little is shared.
  """
  weighed = np.zeros(len(table), bool) if table.weights is None else table.weights != 0
  segments = _sort(table, weighed)
  rows = [[part] for part in _cut(segments, row_tokens)]
  trees = np.flatnonzero(segments.shared == 0).tolist()
  parts = [
    (first + begin, first + end)
    for first, stop in itertools.pairwise([*trees, len(segments.starts)])
    for begin, end in _cut(_Sorted(*(x[first:stop] for x in segments)), row_tokens)
  ]
  fitted = _fit(segments, parts, row_tokens)
  rows = fitted if len(fitted) < len(rows) else rows
  count = -(-max(len(rows), 1) // row_multiple) * row_multiple
  return _lay_out(table, segments, rows, (count, row_tokens), weighed)


def count_distinct(table: TokenTable) -> int:
  """Counts distinct tokens; tokens are equal only if their prefixes are equal too."""
  segments = _sort(table, np.zeros(len(table), bool))
  return int((segments.lengths - segments.shared).sum())


def _sort(table: TokenTable, weighed) -> _Sorted:
  starts = spans.starts(table.segment)
  ends = np.append(starts[1:], len(table))[: len(starts)]  # A table may be empty.
  # Big-endian bytes sort like the numbers.
  texts = [table.tokens[a:b] for a, b in zip(starts, ends, strict=True)]
  keys = [text.astype('>u4').tobytes() for text in texts]
  order = sorted(range(len(texts)), key=keys.__getitem__)
  shared = np.zeros(len(texts), int)
  for k, (i, j) in enumerate(itertools.pairwise(order), start=1):
    length = min(len(texts[i]), len(texts[j]))
    differs = np.flatnonzero(texts[i][:length] != texts[j][:length])
    shared[k] = differs[0] if len(differs) else length
  counts = np.append(0, np.cumsum(weighed))
  starts, ends = starts[order], ends[order]
  return _Sorted(starts, ends - starts, shared, counts[ends] - counts[starts])


def _cut(segments: _Sorted, row_tokens: int) -> list[tuple[int, int]]:
  """Cuts the sorted segments into runs that fit a row each; returns (begin, end) pairs.

  Minimises the number of runs, then the number of repeated tokens.
  """
  # A run i:j has new[j] - new[i] tokens plus repeated ones; and entries[j] - entries[i].
  new = np.append(0, np.cumsum(segments.lengths - segments.shared))
  entries = np.append(0, np.cumsum(segments.entries))
  S, row = len(segments.lengths), 1 + int(segments.shared.sum())
  cost, before = np.zeros(S + 1, np.int64), np.zeros(S + 1, int)
  for j in range(1, S + 1):
    i = np.arange(np.searchsorted(new, new[j] - row_tokens), j)
    repeated = segments.shared[i]
    fits = new[j] - new[i] + repeated <= row_tokens
    fits &= entries[j] - entries[i] <= ENTRIES * row_tokens
    i, repeated = i[fits], repeated[fits]
    # A row costs more than all repeated tokens together.
    costs = cost[i] + row + repeated
    best = int(np.argmin(costs))
    cost[j], before[j] = costs[best], i[best]
  cuts = [S]
  while cuts[-1]:
    cuts.append(int(before[cuts[-1]]))
  return list(itertools.pairwise(cuts[::-1]))


def _fit(
  segments: _Sorted, parts: list[tuple[int, int]], row_tokens: int
) -> list[list[tuple[int, int]]]:
  """Assigns parts of trees to rows by first-fit decreasing."""
  new = np.append(0, np.cumsum(segments.lengths - segments.shared))
  entries = np.append(0, np.cumsum(segments.entries))
  size = lambda a, b: np.array(
    [new[b] - new[a] + segments.shared[a], entries[b] - entries[a]]
  )
  room = np.tile([row_tokens, ENTRIES * row_tokens], (len(parts), 1))
  rows: list[list[tuple[int, int]]] = [[] for _ in parts]
  for part in sorted(parts, key=lambda part: -size(*part)[0]):
    row = int(np.argmax((room >= size(*part)).all(axis=1)))
    rows[row].append(part)
    room[row] -= size(*part)
  return [row for row in rows if row]


def _lay_out(table, segments: _Sorted, rows, shape: tuple[int, int], weighed):
  """Makes the layout of an assignment; `shape` is (R, T)."""
  R, T = shape
  index = np.zeros(len(table), int)
  # int32, as on the device, since these are the largest arrays of a plan.
  parents = np.tile(np.arange(T, dtype=np.int32), (R, 1))
  ends = parents + 1
  for r, parts in enumerate(rows):
    path, column = np.zeros(0, int), 0  # The columns of a segment's tokens.
    for k, kept in _walk(segments, parts):
      ends[r, path[kept:]] = column  # No later segment continues these.
      new = np.arange(column, column + segments.lengths[k] - kept)
      path = np.append(path[:kept], new)
      if kept and len(new):
        parents[r, new[0]] = path[kept - 1]
      parents[r, new[1:]] = new[:-1]
      start = segments.starts[k]
      index[start : start + len(path)] = r * T + path
      column += len(new)
    ends[r, path] = column
  if table.weights is None:
    entries = _enter_each(index, R * T, T)
  else:
    entries = _enter(table.segment, index // T, weighed, ENTRIES * T)
  positions = _count_up(table.segment).astype(np.int32)
  return TreeLayout(index, parents, ends, positions, *entries)


def _walk(segments: _Sorted, parts) -> Iterator[tuple[int, int]]:
  """Yields a row's segments, each with the length of the prefix shared in the row."""
  for begin, end in parts:
    for k in range(begin, end):
      yield k, int(segments.shared[k]) if k > begin else 0


def _enter_each(index, size: int, columns: int) -> _Entries:
  """Gives each used token of the packed rows one entry, at the token's own column."""
  first = np.full(size, -1)
  # If several tokens of the table share it, the first wins.
  first[index[::-1]] = np.arange(len(index))[::-1]
  places = np.flatnonzero(first >= 0)
  return _Entries(places, first[places], np.ones(len(index), int), columns)


def _enter(segment, row, weighed, columns: int) -> _Entries:
  """Gives each token with a weight a column in its row, in the order of the table."""
  tokens = np.flatnonzero(weighed)
  tokens = tokens[np.argsort(row[tokens], kind='stable')]
  row, ids = row[tokens], np.zeros(len(segment), np.int32)
  number = _count_runs(segment[tokens])
  # The first entry of a row is in the row's segment 1.
  ids[tokens] = 1 + number - number[spans.starts(row)][_count_runs(row)]
  return _Entries(row * columns + _count_up(row), tokens, ids, columns)


def _count_runs(ids: np.ndarray) -> np.ndarray:
  """Numbers the runs of equal ids: 4 4 4 7 7 -> 0 0 0 1 1."""
  first = np.zeros(len(ids), int)
  first[spans.starts(ids)] = 1
  return np.cumsum(first) - 1


def _count_up(ids: np.ndarray) -> np.ndarray:
  """Counts from 0 in each run of equal ids: 4 4 4 7 7 -> 0 1 2 0 1."""
  return np.arange(len(ids)) - spans.starts(ids)[_count_runs(ids)]
