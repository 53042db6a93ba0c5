"""Serialises plain data and trajectories; unlike pickle, reading executes no code.

The format is MessagePack, with extension types for tuples, sets, large integers, and
NumPy's arrays and numbers, which are restored bit for bit. Other types cannot be written.

The task of a trajectory is not written: the reader of a rollout has its tasks.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jaxtyping import Int
import msgpack
import numpy as np

from agent_r1_jax import types

_COLUMNS = ('tokens', 'action_mask', 'behaviour_logprobs', 'policy_steps')
_TUPLE, _SET, _FROZENSET, _INTEGER, _ARRAY, _NUMBER = range(6)
_COLLECTIONS = {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset}
# Booleans, integers, floats and complex numbers in this machine's byte order. Arrays of
# Python objects are the reason for this list: they would be unpickled.
_DTYPES = {
  np.dtype(code).str
  for code in '?' + np.typecodes['AllInteger'] + np.typecodes['AllFloat']
}


def pack(value: Any) -> bytes:
  """Serialises any nesting of JSON's types, tuples, sets, bytes and NumPy's arrays.

  Raises:
    ValueError: The value contains another type, is nested too deeply, or contains itself.
  """
  try:
    packer = msgpack.Packer(
      default=_tagged, strict_types=True, unicode_errors='surrogatepass'
    )
    return bytes(packer.pack(value))
  except (TypeError, OverflowError, RecursionError) as error:
    raise ValueError(f'cannot be written: {error}') from None


def unpack(data: bytes) -> Any:
  """The inverse of `pack`; arrays are writable.

  Raises:
    ValueError: The bytes were not made by `pack`.
  """
  try:
    return msgpack.unpackb(
      data, ext_hook=_untagged, strict_map_key=False, unicode_errors='surrogatepass'
    )
  except Exception as error:
    # MessagePack raises its own types, and wrong extension data various others.
    raise ValueError(f'no record: {type(error).__name__} {error}') from None


def fields(trajectory: types.Trajectory) -> dict[str, Any]:
  """Returns a trajectory's fields without its task, for `pack`."""
  values = _fields(trajectory)
  del values['task']
  for name in ('segments', 'turns'):
    values[name] = [_fields(part) for part in values[name]]
  return values


def trajectory(fields: Any, task: types.Task) -> types.Trajectory:
  """The inverse of `fields`, which may have been packed and unpacked.

  Raises:
    ValueError: They are not the fields of a trajectory.
  """
  try:
    parts = {
      'segments': [types.Segment(**part) for part in fields['segments']],
      'turns': [types.Turn(**part) for part in fields['turns']],
    }
    restored = types.Trajectory(task=task, **fields | parts)
    if restored.status not in types.STATUSES:
      raise ValueError(f'the status is {restored.status!r}')
    for segment in restored.segments:
      shapes = {np.shape(values) for values in _fields(segment).values()}
      if shapes != {(len(segment.tokens),)}:
        raise ValueError(f'the arrays of a segment have the shapes {shapes}')
  except (TypeError, KeyError, ValueError) as error:
    raise ValueError(f'no trajectory: {error}') from None
  return restored


def split(
  trajectories: Sequence[types.Trajectory],
) -> tuple[list[dict[str, Any]], Int[np.ndarray, 'n 4']]:
  """Splits trajectories into small records and the columns of all their tokens.

  Returns:
    For each trajectory, its `fields` without messages, and with the lengths of its
    segments in place of the segments; and int32 columns of the tokens of all segments,
    one after the other: token ids, action masks, log-probs (their bits), policy steps.
  """
  heads, columns = [], [np.zeros((0, 4), np.int32)]
  for each in trajectories:
    head = fields(each)
    head['messages'] = []
    head['segments'] = [len(segment.tokens) for segment in each.segments]
    heads.append(head)
    for s in each.segments:
      logprobs = s.behaviour_logprobs.astype(np.float32).view(np.int32)
      columns.append(
        np.stack([s.tokens, s.action_mask, logprobs, s.policy_steps], axis=1)
      )
  return heads, np.concatenate(columns).astype(np.int32)


def join(
  heads: Sequence[dict[str, Any]],
  columns: Int[np.ndarray, 'n 4'],
  tasks: Sequence[types.Task],
) -> list[types.Trajectory]:
  """The inverse of `split`, with the tasks by group; messages are empty."""
  trajectories, begin = [], 0
  for head in heads:
    segments = []
    for length in head['segments']:
      tokens, mask, logprobs, steps = columns[begin : begin + length].T.copy()
      parts = (tokens, mask.astype(bool), logprobs.view(np.float32), steps)
      segments.append(dict(zip(_COLUMNS, parts, strict=True)))
      begin += length
    trajectories.append(trajectory(head | {'segments': segments}, tasks[head['group']]))
  return trajectories


def _fields(record: Any) -> dict[str, Any]:
  return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _tagged(value: Any) -> Any:
  """Encodes types that MessagePack lacks; subclasses become their base types."""
  kind: Any
  if isinstance(value, str):
    return str.__str__(value)  # str() of an enumeration may be its name.
  for kind in (bytes, dict, list):
    if isinstance(value, kind):
      return kind(value)
  for tag, kind in _COLLECTIONS.items():
    if isinstance(value, kind):
      return msgpack.ExtType(tag, pack(list(value)))
  if isinstance(value, np.ndarray | np.generic | jax.Array):
    array = np.asarray(value)
    if array.dtype.str not in _DTYPES:
      raise TypeError(f'an array of {array.dtype}')
    tag = _NUMBER if isinstance(value, np.generic) else _ARRAY
    parts = array.dtype.str, list(array.shape), array.tobytes()
    return msgpack.ExtType(tag, pack(list(parts)))
  if isinstance(value, bool | int):
    length = value.bit_length() // 8 + 1
    return msgpack.ExtType(_INTEGER, value.to_bytes(length, 'little', signed=True))
  if isinstance(value, float):
    return float(value)
  # Without the value's repr, which would run its code.
  raise TypeError(
    f'{type(value).__name__} is no plain data; give text, numbers, lists, dicts'
  )


def _untagged(tag: int, data: bytes) -> Any:
  if tag == _INTEGER:
    return int.from_bytes(data, 'little', signed=True)
  content = unpack(data)
  if tag in _COLLECTIONS:
    return _COLLECTIONS[tag](content)
  if tag not in (_ARRAY, _NUMBER):
    raise ValueError(f'unknown tag {tag}')
  dtype, shape, raw = content
  if dtype not in _DTYPES:
    raise ValueError(f'an array of {dtype}')
  array = np.frombuffer(raw, dtype).reshape(shape).copy()
  return array[()] if tag == _NUMBER else array
