"""Safetensors files, read and written one tensor at a time.

The format (https://github.com/huggingface/safetensors): 8 bytes of header length, a JSON
header {name: {dtype, shape, data_offsets}}, the tensors. Its library only reads here: to
write, it needs all tensors of a file in memory, unlike `write`, and on a full disk it
does not raise OSError.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import math
import os
import pathlib
import re
import struct
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from agent_r1_jax.models.files import json_fields

DTYPES = {
  'F32': jnp.dtype('float32'),
  'BF16': jnp.dtype('bfloat16'),
  'F16': jnp.dtype('float16'),
}
# Suffixes of the pairs of tensors of 4 bits (mxfp4.py).
_PACKED = ('_blocks', '_scales')
_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {jnp.dtype('uint8'): 'U8'}
_SINGLE = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'


class Tensor(NamedTuple):
  """A tensor in a file; `dtype` is the file format's name of its dtype."""

  file: pathlib.Path
  name: str
  dtype: str
  shape: tuple[int, ...]
  # A NumPy index of this tensor in the file's tensor, if it is a part: a slice of rows, a
  # row and a slice in it, or any tuple with an ellipsis.
  part: Any = None
  # Reads the tensor; None: the safetensors library does.
  reader: Callable[[], np.ndarray] | None = None


class Spec(NamedTuple):
  """The name, dtype and shape of a tensor to write."""

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]

  @property
  def nbytes(self) -> int:
    """Bytes in the file."""
    return math.prod(self.shape) * self.dtype.itemsize


class Format(NamedTuple):
  """A format of models other than Hugging Face's.

  Attributes:
    find_file: (path) -> the path's file in this format; None if the path is a model in
      another format.
    read_config: (file) -> the equivalent of config.json.
    find_tensors: (file) -> its tensors, by their names in a Hugging Face checkpoint.
  """

  find_file: Callable[[pathlib.Path], pathlib.Path | None]
  read_config: Callable[[pathlib.Path], dict[str, Any]]
  find_tensors: Callable[[pathlib.Path], dict[str, Tensor]]


def find_file(
  path: pathlib.Path, formats: Sequence[Format]
) -> tuple[Format, pathlib.Path] | None:
  """Finds the first of the formats that a path has, and its file."""
  for format_ in formats:
    if file := format_.find_file(path):
      return format_, file
  return None


def find(
  directory: pathlib.Path,
  ignore: tuple[str, ...] = (),
  formats: Sequence[Format] = (),
) -> dict[str, Tensor]:
  """Finds the tensors of model.safetensors, or of the shards that the index names.

  Tensors whose names end with one of `ignore` are left out, whatever their dtypes. A
  model in one of `formats` is read by that format.

  Raises:
    ValueError: A file is missing, broken or contradicts the index; the message names it.
  """
  if found := find_file(directory, formats):
    format_, file = found
    return format_.find_tensors(file)
  index = directory / _INDEX
  if (directory / _SINGLE).is_file():
    return read_header(directory / _SINGLE, ignore)
  if not index.is_file():
    raise ValueError(
      f'{directory}: has neither {_SINGLE} nor {_INDEX}; convert other formats first '
      '(transformers: model.save_pretrained)'
    )
  weight_map = json_fields.read_json(index).get('weight_map')
  if not isinstance(weight_map, dict):
    raise ValueError(f'{index}: has no weight_map; fetch it again')
  for name in weight_map.values():
    # Links are followed: someone on this machine made them, such as a download cache. The
    # names in the index are untrusted.
    if not isinstance(name, str) or not re.fullmatch(r'[^/\\\0]+\.safetensors', name):
      raise ValueError(
        f'{index}: weight_map names {name!r:.80}, and not a .safetensors file beside it; '
        'fetch it again'
      )
  tensors = {}
  for name in sorted(set(weight_map.values())):
    file = directory / name
    if not file.is_file():
      raise ValueError(f'{file}: missing, though {_INDEX} names it; fetch it')
    header = read_header(file, ignore)
    misplaced = [tensor for tensor in header if weight_map.get(tensor) != name]
    if misplaced:
      raise ValueError(
        f'{file}: has tensor {misplaced[0]}, which {_INDEX} does not put there; fetch '
        'both'
      )
    tensors |= header
  missing = [n for n in weight_map if n not in tensors and not n.endswith(ignore)]
  if missing:
    raise ValueError(
      f'{directory / weight_map[missing[0]]}: no tensor {missing[0]}, which {_INDEX} '
      'puts there; fetch both'
    )
  return tensors


def read(tensor: Tensor) -> np.ndarray:
  """Reads the tensor's values, without other tensors of its file."""
  part = ... if tensor.part is None else tensor.part
  if tensor.reader:
    return tensor.reader()[part]
  with safetensors.safe_open(tensor.file, 'np') as opened:
    if isinstance(part, slice) or (isinstance(part, tuple) and part[0] is not ...):
      return opened.get_slice(tensor.name)[part]
    return opened.get_tensor(tensor.name)[part]


def shards(specs: list[Spec], max_shard_bytes: int) -> dict[str, list[Spec]]:
  """Distributes tensors over files; a tensor above the limit gets its own file.

  Returns:
    File name -> its tensors.
  """
  if max_shard_bytes <= 0:
    raise ValueError(f'max_shard_bytes is {max_shard_bytes}; a positive number is needed')
  lists, room = [], 0
  for spec in specs:
    if not lists or spec.nbytes > room:
      lists.append([])
      room = max_shard_bytes
    lists[-1].append(spec)
    room -= spec.nbytes
  if len(lists) == 1:
    return {_SINGLE: lists[0]}
  n = len(lists)
  return {f'model-{i:05}-of-{n:05}.safetensors': x for i, x in enumerate(lists, start=1)}


def write(
  directory: pathlib.Path,
  files: dict[str, list[Spec]],
  get: Callable[[str], np.ndarray],
) -> None:
  """Writes the files of `shards` and their index, and waits until they are on disk."""
  for file, specs in files.items():
    _write_file(directory / file, specs, get)
  if len(files) > 1:
    total = sum(spec.nbytes for specs in files.values() for spec in specs)
    weight_map = {spec.name: file for file, specs in files.items() for spec in specs}
    index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
    (directory / _INDEX).write_text(json.dumps(index, indent=2) + '\n', 'utf-8')


def save(file: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
  """Writes one file, and waits until it is on disk."""
  specs = [Spec(name, x.dtype, x.shape) for name, x in tensors.items()]
  _write_file(file, specs, tensors.__getitem__)


def read_header(file: pathlib.Path, ignore: tuple[str, ...] = ()) -> dict[str, Tensor]:
  """Lists the tensors of one file, with `ignore` and errors as in `find`."""
  try:
    with safetensors.safe_open(file, 'np') as opened:
      names = [name for name in opened.keys() if not name.endswith(ignore)]
      slices = {name: opened.get_slice(name) for name in names}
      tensors = {
        name: Tensor(file, name, part.get_dtype(), tuple(part.get_shape()))
        for name, part in slices.items()
      }
  except safetensors.SafetensorError as error:
    raise ValueError(
      f'{file}: no safetensors file ({error}); truncated, or a pointer in place of the '
      'file? fetch it again'
    ) from error
  for tensor in tensors.values():
    packed = tensor.dtype == 'U8' and tensor.name.endswith(_PACKED)
    if tensor.dtype not in DTYPES and not packed:
      raise ValueError(
        f'{file}: tensor {tensor.name} is {tensor.dtype}, not one of '
        f'{", ".join(DTYPES)}; take the model that is not quantized'
      )
  return tensors


def _write_file(
  file: pathlib.Path, specs: list[Spec], get: Callable[[str], np.ndarray]
) -> None:
  # Wide dtypes come first, which aligns every tensor to its dtype's size.
  specs = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
  # transformers rejects a file without this metadata.
  header: dict[str, dict] = {'__metadata__': {'format': 'pt'}}
  offset = 0
  for spec in specs:
    header[spec.name] = {
      'dtype': _NAMES[spec.dtype],
      'shape': spec.shape,
      'data_offsets': [offset, offset + spec.nbytes],
    }
    offset += spec.nbytes
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)
  with open(file, 'wb') as stream:
    stream.write(struct.pack('<Q', len(text)) + text)
    for spec in specs:
      stream.write(get(spec.name).reshape(-1).view(np.uint8).data)
    stream.flush()
    os.fsync(stream.fileno())
