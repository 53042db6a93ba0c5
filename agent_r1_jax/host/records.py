"""Serialises plain data; unlike pickle, reading executes no code.

The format is MessagePack, with extension types for tuples, sets, large integers, and
NumPy's arrays and numbers, which are restored bit for bit. Other types cannot be written.
"""

from typing import Any

import jax
import msgpack
import numpy as np

_TUPLE, _SET, _FROZENSET, _INTEGER, _ARRAY, _NUMBER = range(6)
_COLLECTIONS = {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset}
# Booleans, integers, floats and complex numbers in this machine's byte order. Arrays of
# Python objects are excluded, because they would be unpickled.
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
    # MessagePack raises its own types, and wrong extension data raises various others.
    raise ValueError(f'no record: {type(error).__name__} {error}') from None


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
  # Not the value's repr, which would run its code.
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
