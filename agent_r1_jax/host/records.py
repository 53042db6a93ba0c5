"""Records: plain data and trajectories as bytes and back, and nothing in them ever runs.

MessagePack carries them, and a few tags that it leaves to its users carry what it lacks:
tuples, sets, large integers, and NumPy's arrays and numbers. All of it comes back as it
was, to the last bit. Nothing else can be written, and nothing that is read is called,
imported or evaluated, which is why it is not pickle.

A trajectory's task does not travel: whoever reads a rollout has its tasks.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import msgpack
import numpy as np

from agent_r1_jax import types

_TUPLE, _SET, _FROZENSET, _INTEGER, _ARRAY, _NUMBER = range(6)
_COLLECTIONS = {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset}
# Booleans, integers, floats and complex numbers, in this machine's order of bytes: no
# text, no records, and above all no Python objects.
_DTYPES = {
  np.dtype(code).str
  for code in '?' + np.typecodes['AllInteger'] + np.typecodes['AllFloat']
}


def pack(value: Any) -> bytes:
  """Any nesting of what JSON knows, tuples, sets, bytes, and NumPy's arrays and numbers.

  Raises:
    ValueError: Something else is in it; or it is too deep, or contains itself.
  """
  try:
    packer = msgpack.Packer(
      default=_tagged, strict_types=True, unicode_errors='surrogatepass'
    )
    return bytes(packer.pack(value))
  except (TypeError, OverflowError, RecursionError) as error:
    raise ValueError(f'cannot be written: {error}') from None


def unpack(data: bytes) -> Any:
  """What `pack` was given; arrays may be written to.

  Raises:
    ValueError: The bytes are none of `pack`'s.
  """
  try:
    return msgpack.unpackb(
      data, ext_hook=_untagged, strict_map_key=False, unicode_errors='surrogatepass'
    )
  except Exception as error:
    # MessagePack raises its own kinds; a tag with a false content others.
    raise ValueError(f'no record: {type(error).__name__} {error}') from None


def fields(trajectory: types.Trajectory) -> dict[str, Any]:
  """A trajectory's fields but its task, for `pack`."""
  found = _fields(trajectory)
  del found['task']
  for name in ('segments', 'turns'):
    found[name] = [_fields(part) for part in found[name]]
  return found


def trajectory(fields: Any, task: types.Task) -> types.Trajectory:
  """The trajectory whose `fields` these are.

  Args:
    fields: As they were read.
    task: The trajectory's.

  Raises:
    ValueError: They are not those of a trajectory.
  """
  try:
    parts = {
      'segments': [types.Segment(**part) for part in fields['segments']],
      'turns': [types.Turn(**part) for part in fields['turns']],
    }
    found = types.Trajectory(task=task, **fields | parts)
    if found.status not in types.STATUSES:
      raise ValueError(f'the status is {found.status!r}')
    for segment in found.segments:
      shapes = {np.shape(values) for values in _fields(segment).values()}
      if shapes != {(len(segment.tokens),)}:
        raise ValueError(f'the arrays of a segment have the shapes {shapes}')
  except (TypeError, KeyError, ValueError) as error:
    raise ValueError(f'no trajectory: {error}') from None
  return found


def pack_trajectories(trajectories: Sequence[types.Trajectory] | None) -> bytes:
  """A share of a rollout, or None; see `pack`."""
  return pack(trajectories and [fields(t) for t in trajectories])


def unpack_trajectories(
  data: bytes, tasks: Sequence[types.Task]
) -> list[types.Trajectory] | None:
  """What `pack_trajectories` was given.

  Args:
    data: Its bytes.
    tasks: Of the rollout, by group.

  Raises:
    ValueError: The bytes are none of them, or of a rollout of other tasks.
  """
  found = unpack(data)
  try:
    return found and [trajectory(each, tasks[each['group']]) for each in found]
  except (TypeError, LookupError) as error:
    raise ValueError(f'no trajectories of this rollout: {error}') from None


def _fields(record: Any) -> dict[str, Any]:
  return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _tagged(value: Any) -> Any:
  """What MessagePack has no form for; subclasses of what it has become the latter."""
  kind: Any  # What a subclass stands for.
  if isinstance(value, str):
    return str.__str__(value)  # Of an enumeration, str() may give the name.
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
  # Without its repr, which may be anybody's code.
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
