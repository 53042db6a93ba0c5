"""Data of the Tinker API, and how they are packed into micro-batches of one shape.

A datum has an input x and targets y: y[i] is a token that may follow x[0] ... x[i], most
often x[i + 1]. Each target is the last token of a text that begins as the input does:

  x      a b c     texts   a b c d        y[0], y[1] and y[2] are in it
  y      b c d

  x      a b c     texts   a b c d        y[0] and y[2] are in it
  y      b z d             a b z          and y[1] is here

So targets that are not the input's next token, or several targets of one position, need
no other program: packing computes what texts share once (rl/prefix_trees.py), which are
here a datum's own texts, and the prompts that data share.

Letters: n tokens of a datum, K targets of each position, B, E as in types.Batch.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.rl import packing, prefix_trees, table

# The most tokens of all texts of a request, those that are shared counted in each; the
# most texts beyond the inputs' own, for which packing takes a second; and the most
# targets of a datum, those that a sparse matrix does not list counted too.
MAX_TOKENS = 1 << 22
_MAX_BRANCHES = 1 << 14
_MAX_TARGETS = 1 << 20


class Datum(NamedTuple):
  """An input, what may follow its tokens, and numbers of these targets."""

  tokens: np.ndarray  # int32 [n].
  # int32 [n] or [n, K]; where it is masked, there is no target.
  targets: np.ma.MaskedArray
  columns: dict[str, np.ndarray]  # By name, float32 of the targets' shape.


def make_column(x: np.ndarray, shape: Sequence[int], name: str) -> np.ma.MaskedArray:
  """Makes a column of a flat array; raises ValueError if the shape is not the array's."""
  if any(size < 0 for size in shape) or int(np.prod(shape)) != len(x):
    raise ValueError(f'{name} has {len(x)} numbers, and its shape is {list(shape)}')
  return np.ma.masked_array(x.reshape(shape), mask=False)


def make_sparse_column(
  values: np.ndarray,
  rows: np.ndarray,
  columns: np.ndarray,
  shape: Sequence[int],
  name: str,
) -> np.ma.MaskedArray:
  """Makes a column of a matrix in CSR, masked where it lists nothing.

  Raises:
    ValueError: It is no such matrix.
  """
  good = len(shape) == 2 and len(rows) == shape[0] + 1 and min(shape) >= 0
  good = good and len(values) == len(columns) and shape[0] * shape[1] <= _MAX_TARGETS
  good = good and rows[0] == 0 and rows[-1] == len(values) and (np.diff(rows) >= 0).all()
  good = good and ((columns >= 0) & (columns < (shape[1] if good else 0))).all()
  if not good:
    raise ValueError(f'{name} is no sparse matrix of the shape {list(shape)}')
  dense = np.ma.masked_array(np.zeros(tuple(shape), values.dtype), mask=True)
  dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
  return dense


def make_datum(tokens: np.ndarray, columns: Mapping[str, np.ma.MaskedArray]) -> Datum:
  """Makes a datum of the tensors that a client sent.

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

  A text is an input and its last target, and must fit a packed row of `row_tokens`.
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
    batches: Their weights are 1 at each target.
    plain: Whether every target is in the text of its input, so that a segment is a datum.
  """

  batches: list[types.Batch]
  plain: bool
  _data: Sequence[Datum]
  _layout: prefix_trees.TreeLayout
  _places: np.ndarray  # Of each target that is not masked, its token in the table.

  def unpack(self, packed: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Takes the targets' numbers out of a column of all micro-batches, [B, E] each.

    Returns:
      For each datum an array of the targets' shape, 0 where they are masked.
    """
    flat = np.concatenate([np.asarray(x) for x in packed]).reshape(-1)
    column = np.zeros(len(self._layout.index), np.float32)
    column[self._layout.entries] = flat[self._layout.places]
    result, start = [], 0
    for datum in self._data:
      count = datum.targets.count()
      values = np.zeros(datum.targets.shape, np.float32)
      values[~np.ma.getmaskarray(datum.targets)] = column[self._places[start:][:count]]
      result.append(values)
      start += count
    return result


def pack(data: Sequence[Datum], shape: packing.MicrobatchShape) -> Packed:
  """Packs data that `check` has checked.

  The column 'weights' or 'advantages' becomes the batch's advantages, by default 1,
  'logprobs' its old_logprobs, by default 0, and 'sequence_ratio_mask' its correction, by
  default None.
  """
  segments: list[types.Segment] = []
  columns: dict[str, list] = {'advantages': [], 'old_logprobs': []}
  masked = any('sequence_ratio_mask' in datum.columns for datum in data)
  places, begin, plain = [], 0, True
  for datum in data:
    texts, where = _list_texts(datum)
    plain &= len(texts) == 1
    starts = np.cumsum([0, *(len(text) for text in texts)])
    places.append(begin + starts[where[:, 0]] + where[:, 1])
    begin += starts[-1]
    for text in texts:
      zeros = np.zeros(len(text))
      segments.append(types.Segment(text, np.zeros(len(text), bool), zeros))
    wanted = ~np.ma.getmaskarray(datum.targets)
    ones = np.ones(datum.targets.shape, np.float32)
    amount = datum.columns.get('weights', datum.columns.get('advantages', ones))
    columns['advantages'].append(amount[wanted])
    columns['old_logprobs'].append(datum.columns.get('logprobs', 0 * ones)[wanted])
    if masked:
      mask = datum.columns.get('sequence_ratio_mask', ones)
      columns.setdefault('correction', []).append(mask[wanted])
  index = np.concatenate(places)
  tokens = table.from_segments(segments)
  scattered = {}
  for name, parts in columns.items():
    scattered[name] = np.zeros(len(tokens))
    scattered[name][index] = np.concatenate(parts)
  weights = np.zeros(len(tokens))
  weights[index] = 1.0
  tokens = dataclasses.replace(
    tokens, **scattered, weights=weights, action_mask=weights > 0
  )
  batches, layout = packing.pack_microbatches(tokens, shape)
  assert isinstance(layout, prefix_trees.TreeLayout)  # One chip supports trees.
  return Packed(batches, plain, data, layout, index)


def _list_branches(datum: Datum) -> np.ndarray:
  """Lists the (position, column) of the targets that the input's own text has not."""
  targets = datum.targets.reshape(len(datum.tokens), -1)
  follows = np.zeros(targets.shape, bool)
  follows[:-1] = targets[:-1].data == datum.tokens[1:, None]
  follows[-1] = True  # The last position's first target ends the text.
  follows &= ~np.ma.getmaskarray(targets)
  follows &= np.cumsum(follows, axis=1) == 1  # Of equal ones, only the first.
  return np.argwhere(~follows & ~np.ma.getmaskarray(targets))


def _list_texts(datum: Datum) -> tuple[list[np.ndarray], np.ndarray]:
  """Lists a datum's texts, and for each target its text and its place there, [m, 2]."""
  n = len(datum.tokens)
  targets = datum.targets.reshape(n, -1)
  wanted = ~np.ma.getmaskarray(targets)
  last = targets[-1].compressed()[:1]
  texts = [np.concatenate([datum.tokens, last]).astype(np.int32)]
  where = np.zeros((*targets.shape, 2), int)
  where[:, :, 1] = np.arange(1, n + 1)[:, None]
  for i, k in _list_branches(datum):
    where[i, k] = len(texts), i + 1
    text = np.append(datum.tokens[: i + 1], targets.data[i, k]).astype(np.int32)
    texts.append(text)
  return texts, where[wanted]
