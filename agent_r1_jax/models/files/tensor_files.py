"""Safetensors files, read and written a tensor at a time.

The format (https://github.com/huggingface/safetensors): 8 bytes of header length, a JSON
header {name: {dtype, shape, data_offsets}}, the tensors. Its own library reads it; to
write, it wants all tensors of a file in memory together, which `write` does not, and its
error on a full disk is no OSError.
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
# What pairs of tensors of 4 bits end with (mxfp4.py).
_PACKED = ('_blocks', '_scales')
_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {jnp.dtype('uint8'): 'U8'}
_SINGLE = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'


class Tensor(NamedTuple):
  """A tensor in a file; `dtype` is the format's name for its type."""

  file: pathlib.Path
  name: str
  dtype: str
  shape: tuple[int, ...]
  # Where it lies in the file's tensor, an index of numpy, if it is a part; a slice is one
  # of rows, and a tuple without an ellipsis one of rows of a row.
  part: Any = None
  # Reads the tensor; None leaves it to the library of safetensors.
  reader: Callable[[], np.ndarray] | None = None


class Spec(NamedTuple):
  """The name, type and shape of a tensor to be written."""

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]

  @property
  def nbytes(self) -> int:
    """Bytes of its values in the file."""
    return math.prod(self.shape) * self.dtype.itemsize


class Format(NamedTuple):
  """A format of models other than Hugging Face's.

  Attributes:
    find_file: (path) -> the file of this format that the path stands for; None if the
      path stands for another kind of model.
    read_config: (file) -> what config.json would hold.
    find_tensors: (file) -> its tensors, under the names that a checkpoint of Hugging Face
      has.
  """

  find_file: Callable[[pathlib.Path], pathlib.Path | None]
  read_config: Callable[[pathlib.Path], dict[str, Any]]
  find_tensors: Callable[[pathlib.Path], dict[str, Tensor]]


def find_file(
  path: pathlib.Path, formats: Sequence[Format]
) -> tuple[Format, pathlib.Path] | None:
  """Finds the first of the formats that a path stands for, and its file."""
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

  Tensors whose names end with one of `ignore` are left out, whatever their types. What
  has one of `formats` is read as it says.

  Raises:
    ValueError: Names the file that is missing or broken, or that contradicts the index.
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
    # A link is followed: whoever made the directory on this machine, such as a cache of
    # downloads, made it one. A name is what a stranger wrote.
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
  """Reads the tensor's values, without the others of its file."""
  part = ... if tensor.part is None else tensor.part
  if tensor.reader:
    return tensor.reader()[part]
  with safetensors.safe_open(tensor.file, 'np') as opened:
    if isinstance(part, slice) or (isinstance(part, tuple) and part[0] is not ...):
      return opened.get_slice(tensor.name)[part]
    return opened.get_tensor(tensor.name)[part]


def shards(specs: list[Spec], max_shard_bytes: int) -> dict[str, list[Spec]]:
  """Divides tensors over files; one larger than the limit has a file of its own.

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
  """Writes files of `shards` and their index, and waits until they are on the disk."""
  for file, specs in files.items():
    _write_file(directory / file, specs, get)
  if len(files) > 1:
    total = sum(spec.nbytes for specs in files.values() for spec in specs)
    weight_map = {spec.name: file for file, specs in files.items() for spec in specs}
    index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
    (directory / _INDEX).write_text(json.dumps(index, indent=2) + '\n', 'utf-8')


def save(file: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
  """Writes one file, and waits until it is on the disk."""
  specs = [Spec(name, x.dtype, x.shape) for name, x in tensors.items()]
  _write_file(file, specs, tensors.__getitem__)


def read_header(file: pathlib.Path, ignore: tuple[str, ...] = ()) -> dict[str, Tensor]:
  """Lists the tensors of one file; `ignore` and the errors are those of `find`."""
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
  # Wide dtypes first keeps every tensor aligned to its own size.
  specs = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
  # transformers refuses a file without this metadata.
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
