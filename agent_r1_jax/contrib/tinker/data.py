"""Data of the Tinker API, and how they are packed into micro-batches of one shape.

A datum has an input x and targets y: y[i] is a token that may follow x[0] ... x[i], most
often x[i + 1]. Each target is the last token of a sequence that begins like the input:

  x      a b c     sequences   a b c d    has y[0], y[1] and y[2]
  y      b c d

  x      a b c     sequences   a b c d    has y[0] and y[2]
  y      b z d                 a b z      has y[1]

So targets other than the input's next token, or several targets per position, need no
other program: packing computes shared prefixes once (rl/prefix_trees.py), here among a
datum's own sequences and among data with the same prompt.

Letters: n tokens of a datum, K targets of each position, B, E as in types.Batch.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.rl import packing, prefix_trees, table

# The maximum number of tokens of all sequences of a request, shared ones counted in each;
# of sequences besides the inputs' own, which packing handles in a second; and of targets
# of a datum, including those that a sparse matrix does not list.
MAX_TOKENS = 1 << 22
_MAX_BRANCHES = 1 << 14
_MAX_TARGETS = 1 << 20


# The columns of a batch, the data columns they are made from, and the default.
_SOURCES = {
  'advantages': (('weights', 'advantages'), 1.0),
  'old_logprobs': (('logprobs',), 0.0),
  'correction': (('sequence_ratio_mask',), 1.0),
}


class Datum(NamedTuple):
  """An input, its targets, and numbers for these targets."""

  tokens: np.ndarray  # int32 [n].
  # int32 [n] or [n, K]; masked where there is no target.
  targets: np.ma.MaskedArray
  columns: dict[str, np.ndarray]  # By name, float32 of the targets' shape.

  @property
  def wanted(self) -> np.ndarray:
    """Where there is a target."""
    return ~np.ma.getmaskarray(self.targets)


def make_column(
  values: np.ndarray,
  shape: Sequence[int],
  name: str,
  csr: Sequence[np.ndarray] | None = None,
) -> np.ma.MaskedArray:
  """Makes a column of a flat array, or of a CSR matrix, masked where it lists nothing.

  `csr` has each row's first index into the values, then the end; and each value's column.

  Raises:
    ValueError: The arrays do not have this shape.
  """
  if csr is None:
    if any(size < 0 for size in shape) or int(np.prod(shape)) != len(values):
      raise ValueError(
        f'{name} has {len(values)} numbers, and its shape is {list(shape)}'
      )
    return np.ma.masked_array(values.reshape(shape), mask=False)
  rows, columns = csr
  if not (
    len(shape) == 2
    and min(shape) >= 0
    and shape[0] * shape[1] <= _MAX_TARGETS
    and len(rows) == shape[0] + 1
    and rows[0] == 0
    and rows[-1] == len(values) == len(columns)
    and (np.diff(rows) >= 0).all()
    and ((columns >= 0) & (columns < shape[1])).all()
  ):
    raise ValueError(f'{name} is no sparse matrix of the shape {list(shape)}')
  dense = np.ma.masked_array(np.zeros(tuple(shape), values.dtype), mask=True)
  dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
  return dense


def make_datum(tokens: np.ndarray, columns: Mapping[str, np.ma.MaskedArray]) -> Datum:
  """Makes a datum from a client's tensors.

  Raises:
    ValueError: There are no tokens or no targets, shapes differ, or a number is not
      finite.
  """
  columns = dict(columns)
  if not len(tokens):
    raise ValueError('model_input has no tokens')
  targets = columns.pop('target_tokens', None)
  if targets is None:
    raise ValueError('target_tokens is missing')
  if targets.dtype.kind != 'i' or targets.ndim not in (1, 2):
    raise ValueError('target_tokens must be token ids, [n] or [n, K]')
  if len(targets) != len(tokens) or not targets.count():
    raise ValueError(
      f'model_input has {len(tokens)} tokens, and target_tokens the shape '
      f'{list(targets.shape)}; each position has a target'
    )
  numbers = {}
  for name, x in columns.items():
    if x.shape != targets.shape:
      raise ValueError(
        f'{name} has the shape {list(x.shape)}; it must be that of target_tokens, '
        f'{list(targets.shape)}'
      )
    numbers[name] = np.asarray(x.filled(0), np.float32)
    if not np.isfinite(numbers[name]).all():
      raise ValueError(f'{name} has numbers that are not finite')
  return Datum(tokens, targets, numbers)


def check(data: Sequence[Datum], vocab_size: int, row_tokens: int):
  """Raises ValueError for data that the model cannot compute.

  A sequence is an input and its last target, and must fit a packed row of `row_tokens`.
  """
  if not data:
    raise ValueError('data is empty')
  total = branches = 0
  for number, datum in enumerate(data):
    n = len(datum.tokens)
    if n + 1 > row_tokens:
      raise ValueError(
        f'data[{number}] has {n} tokens, and there is room for {row_tokens - 1}; cut it, '
        'or start the server with a higher --config.batch.row_tokens'
      )
    for ids in (datum.tokens, datum.targets.compressed()):
      if len(outside := ids[(ids < 0) | (ids >= vocab_size)]):
        raise ValueError(
          f'data[{number}]: token {outside[0]} is outside the vocabulary of {vocab_size}'
        )
    found = _list_branches(datum)
    branches += len(found)
    total += n + 1 + int((found[:, 0] + 2).sum())
  if branches > _MAX_BRANCHES:
    raise ValueError(
      f'the data have {branches:,} targets that are not the next token of model_input, '
      f'and {_MAX_BRANCHES:,} are allowed at once: send them in several requests'
    )
  if total > MAX_TOKENS:
    raise ValueError(
      f'the texts have {total:,} tokens in all, and {MAX_TOKENS:,} are allowed: send '
      'fewer data, or fewer targets that are not the next token'
    )


@dataclasses.dataclass(frozen=True)
class Packed:
  """Data as micro-batches.

  Attributes:
    batches: The micro-batches; weights are 1 at each target.
    plain: Whether every target is in its input's sequence, so that a segment is a datum.
  """

  batches: list[types.Batch]
  plain: bool
  _data: Sequence[Datum]
  _layout: prefix_trees.TreeLayout
  _places: list[np.ndarray]  # The positions of each datum's targets in the table.

  def unpack(self, packed: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Extracts the targets' numbers from a column of all micro-batches, [B, E] each.

    Returns:
      One array per datum, of the targets' shape, 0 where they are masked.
    """
    column = np.zeros(len(self._layout.index), np.float32)
    column[self._layout.entries] = np.concatenate(packed).reshape(-1)[self._layout.places]
    result = []
    for datum, places in zip(self._data, self._places, strict=True):
      result.append(np.zeros(datum.targets.shape, np.float32))
      result[-1][datum.wanted] = column[places]
    return result


def pack(data: Sequence[Datum], shape: packing.MicrobatchShape) -> Packed:
  """Packs checked data; _SOURCES defines the columns."""
  segments: list[types.Segment] = []
  places, begin, plain = [], 0, True
  for datum in data:
    texts, where = _list_texts(datum)
    plain &= len(texts) == 1
    starts = np.cumsum([0, *(len(text) for text in texts)])
    places.append(begin + starts[where[:, 0]] + where[:, 1])
    begin += starts[-1]
    for text in texts:
      zeros = np.zeros(len(text))
      segments.append(types.Segment(text, zeros > 0, zeros))
  tokens, index = table.from_segments(segments), np.concatenate(places)
  columns = {'weights': np.zeros(len(tokens))}
  columns['weights'][index] = 1.0
  used = {name for datum in data for name in datum.columns}
  for name, (sources, rest) in _SOURCES.items():
    if name == 'advantages' or used.intersection(sources):
      columns[name] = np.zeros(len(tokens))
      columns[name][index] = np.concatenate([_take(x, sources, rest) for x in data])
  tokens = dataclasses.replace(tokens, **columns, action_mask=columns['weights'] > 0)
  batches, layout = packing.pack_microbatches(tokens, shape)
  assert isinstance(layout, prefix_trees.TreeLayout)  # One chip supports trees.
  return Packed(batches, plain, data, layout, places)


def _take(datum: Datum, sources: Sequence[str], rest: float) -> np.ndarray:
  """Returns the numbers of a datum's targets from its first available source."""
  found = [datum.columns[name] for name in sources if name in datum.columns]
  return found[0][datum.wanted] if found else np.full(datum.targets.count(), rest)


def _list_branches(datum: Datum) -> np.ndarray:
  """Lists the (position, column) of targets that are not in the input's own sequence."""
  targets = datum.targets.reshape(len(datum.tokens), -1)
  follows = np.zeros(targets.shape, bool)
  follows[:-1] = targets[:-1].data == datum.tokens[1:, None]
  follows[-1] = True  # The last position's first target ends the text.
  wanted = datum.wanted.reshape(targets.shape)
  follows &= wanted
  follows &= np.cumsum(follows, axis=1) == 1  # Of equal targets, only the first.
  return np.argwhere(~follows & wanted)


def _list_texts(datum: Datum) -> tuple[list[np.ndarray], np.ndarray]:
  """Lists a datum's sequences, and each target's sequence and position in it, [m, 2]."""
  n = len(datum.tokens)
  targets = datum.targets.reshape(n, -1)
  last = targets[-1].compressed()[:1]
  texts = [np.concatenate([datum.tokens, last]).astype(np.int32)]
  where = np.zeros((*targets.shape, 2), int)
  where[:, :, 1] = np.arange(1, n + 1)[:, None]
  for i, k in _list_branches(datum):
    where[i, k] = len(texts), i + 1
    text = np.append(datum.tokens[: i + 1], targets.data[i, k]).astype(np.int32)
    texts.append(text)
  return texts, where[datum.wanted.reshape(targets.shape)]
