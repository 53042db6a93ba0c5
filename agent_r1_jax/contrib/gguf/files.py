"""Reads the config and the tensors of GGUF files that llama.cpp's converter wrote.

The package gguf parses and dequantises them; names.py undoes the converter's changes. A
tensor of all experts of a layer becomes one tensor per expert. MXFP4 experts of gpt-oss
become the pairs of tensors in Hugging Face files (models/files/mxfp4.py), so that a
policy can keep their 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import pathlib
import re
import struct
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from agent_r1_jax.contrib.gguf import metadata, names
from agent_r1_jax.models.files import mxfp4, tensor_files

if TYPE_CHECKING:
  import gguf

_ROPE_FACTORS = 'rope_freqs.weight'
# Limits above all known models: layers, which are the bools or integers in an array;
# tensors and fields; and strings in an array, a vocabulary's tokens or merges.
_MAX_LAYERS = 1_000
_MAX_ENTRIES, _MAX_TEXTS = 100_000, 4_000_000


def find_file(path: pathlib.Path) -> pathlib.Path | None:
  """Finds the GGUF file of a path.

  Args:
    path: A GGUF file, or a directory with one and no safetensors.

  Returns:
    The file; None if the path is another kind of model.

  Raises:
    ValueError: There are several files, a file is one part of a split file, or missing.
  """
  names = ('model.safetensors', 'model.safetensors.index.json')
  if path.suffix == '.gguf':
    files = [path]
  elif any((path / name).is_file() for name in names):
    return None
  else:
    files = sorted(path.glob('*.gguf'))
  for file in files:
    if part := re.fullmatch(r'(.*)-\d{5}-of-(\d{5})', file.stem):
      raise ValueError(
        f'{file}: is one part of a split file; merge them (llama-gguf-split --merge '
        f'{part[1]}-00001-of-{part[2]}.gguf {part[1]}.gguf) and give the merged file'
      )
  if len(files) > 1:
    found = ', '.join(file.name for file in files)
    raise ValueError(f'{path}: holds several GGUF files ({found}); give the path of one')
  if files and not files[0].is_file():
    raise ValueError(f'{files[0]}: no such file; give a GGUF file on this machine')
  return files[0] if files else None


def read_config(file: pathlib.Path) -> dict[str, Any]:
  """Makes the equivalent of config.json from the file's metadata.

  Raises:
    ValueError: The file is broken, or the decoder does not support its model.
  """
  return _make_config(file, _open(file))


def find_tensors(file: pathlib.Path) -> dict[str, tensor_files.Tensor]:
  """Finds the file's tensors.

  Returns:
    Name in a Hugging Face checkpoint -> the tensor as before the conversion, of dtype F32
    if it is quantised.

  Raises:
    ValueError: The file is broken, a tensor belongs to no parameter, or gguf cannot
      dequantise its type.
  """
  reader = _open(file)
  raw = _make_config(file, reader)
  architecture = reader.fields['general.architecture'].contents()
  # A damaged count of layers must not make us list a billion names.
  layers = min(raw['num_hidden_layers'], len(reader.tensors))
  places = names.list_places(architecture, layers)
  drafts = f'{architecture}.nextn_predict_layers' in reader.fields
  tensors, types = {}, set()
  for tensor in reader.tensors:
    if tensor.name == _ROPE_FACTORS:
      continue
    number = re.match(r'blk\.(\d+)\.', tensor.name) if drafts else None
    if number and int(number[1]) >= layers:  # These layers are not read.
      name = f'mtp.{tensor.name}'
      tensors[name] = tensor_files.Tensor(file, name, 'F32', ())
      continue
    if tensor.name not in places:
      raise ValueError(
        f'{file}: tensor {tensor.name} has no place in a model of architecture '
        f'{architecture}; take the model in HF layout if the decoder knows it'
      )
    if tensor.tensor_type not in types:
      _check_type(file, tensor)
      types.add(tensor.tensor_type)
    place = places[tensor.name]
    if place.turned and tensor.tensor_type.name == 'MXFP4':
      tensors |= _make_pair(file, place.name, tensor)
      continue
    undo = names.find_undo(raw, architecture, place)
    for name, (data, shape) in _divide(tensor, place).items():
      kind = tensor.tensor_type
      read = functools.partial(_read, data, kind, shape, undo)
      dtype = kind.name if kind.name in ('F16', 'BF16') else 'F32'
      shape = _turn(shape) if place.turned else shape
      tensors[name] = tensor_files.Tensor(file, name, dtype, shape, reader=read)
  return tensors


def _divide(
  tensor: gguf.ReaderTensor, place: names.Place
) -> dict[str, tuple[np.ndarray, tuple[int, ...]]]:
  """Divides a tensor into tensors of HF layout; returns the data and shape of each."""
  shape = tuple(int(size) for size in tensor.shape[::-1])
  if place.path.endswith('_conv/kernel'):  # Restores a dimension of size 1.
    shape = (shape[0], 1, shape[-1])
  elif place.path.endswith('/kernel') and len(shape) == 1:
    shape = (1, *shape)  # Older converters drop dimensions of size 1.
  if not place.parts and '{}' not in place.name:
    return {place.name: (tensor.data, shape)}
  parts, divided = place.parts or (place.name,), {}
  if len(shape) != 3 or shape[1] % len(parts):
    return {place.name: (tensor.data, shape)}  # check_tensor rejects its shape later.
  rows = shape[1] // len(parts)
  for expert in range(shape[0]):
    for i, part in enumerate(parts):
      data = tensor.data[expert][i * rows : (i + 1) * rows]
      divided[part.format(expert)] = data, (rows, shape[2])
  return divided


def _turn(shape: tuple[int, ...]) -> tuple[int, ...]:
  return *shape[:-2], *shape[:-3:-1]


def _make_pair(
  file: pathlib.Path, name: str, tensor: gguf.ReaderTensor
) -> dict[str, tensor_files.Tensor]:
  """Makes a pair of tensors: the numbers of 4 bits, and their exponents."""
  columns, outputs, experts = (int(size) for size in tensor.shape)
  shape = experts, outputs, columns // 32
  pair = {mxfp4.BLOCKS: (*shape, 16), mxfp4.SCALES: shape}
  return {
    name + ending: tensor_files.Tensor(
      file,
      name + ending,
      mxfp4.PACKED,
      own,
      reader=functools.partial(_read_pair, tensor.data, shape, ending),
    )
    for ending, own in pair.items()
  }


def _read_pair(data: np.ndarray, shape: tuple[int, ...], ending: str) -> np.ndarray:
  """Reads the exponents, or the numbers of 4 bits, two adjacent numbers per byte.

  A block in the file is its exponent, then bytes with numbers 0 and 16, 1 and 17, ...,
  the first in the low half.
  """
  blocks = np.asarray(data).reshape(*shape, 17)
  if ending == mxfp4.SCALES:
    return np.ascontiguousarray(blocks[..., 0])
  codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
  return codes[..., ::2] | codes[..., 1::2] << 4


def _open(file: pathlib.Path) -> gguf.GGUFReader:
  """Parses the header; tensors are memory-mapped, not read."""
  try:
    import gguf
  except ImportError as error:
    raise ValueError(
      f"{file}: GGUF files need the package gguf: pip install 'agent_r1_jax[gguf]'"
    ) from error

  kinds = gguf.GGUFValueType
  per_layer = kinds.BOOL, kinds.INT32, kinds.UINT32

  class Reader(gguf.GGUFReader):
    """Skips arrays: 150,000 tokens and as many merges took 13 seconds and 490 MB.

    Short arrays of bools and integers are read: they say what each layer has.
    """

    def _push_field(self, field: Any, skip_sum: bool = False) -> int:
      if field.name in ('GGUF.tensor_count', 'GGUF.kv_count'):
        _check_count(field.parts[0][0], _MAX_ENTRIES)
      return super()._push_field(field, skip_sum)

    def _get_field_parts(self, orig_offs: Any, raw_type: Any):
      if self.byte_order != 'I':
        raise ValueError('the numbers are big-endian: convert it for this machine')
      if raw_type != gguf.GGUFValueType.ARRAY:
        return super()._get_field_parts(orig_offs, raw_type)
      content: Any = self.data
      kind, length = struct.unpack_from('<IQ', content, orig_offs)
      if kind in per_layer and length <= _MAX_LAYERS:
        return super()._get_field_parts(orig_offs, raw_type)
      end = orig_offs + 12
      if kind == gguf.GGUFValueType.STRING:
        _check_count(length, _MAX_TEXTS)
        for _ in range(length):
          end += 8 + struct.unpack_from('<Q', content, end)[0]
      else:
        kind = gguf.GGUFValueType(kind)
        end += length * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
      return end - orig_offs, [], [], [gguf.GGUFValueType.ARRAY]

  try:
    with np.errstate(all='ignore'):
      return Reader(file)
  except (ValueError, KeyError, IndexError, OverflowError, struct.error) as error:
    raise ValueError(
      f'{file}: gguf cannot read it ({error}); truncated, a pointer in place of the '
      'file, or newer than the package? Fetch it again, or take another quantisation'
    ) from error


def _check_count(count: Any, most: int) -> None:
  if count > most:  # gguf would take minutes to find out that they are missing.
    raise ValueError(f'it claims {count:,} fields, texts or tensors, and may {most:,}')


def _make_config(file: pathlib.Path, reader: gguf.GGUFReader) -> dict[str, Any]:
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  embedding, factors = tensors.get('token_embd.weight'), tensors.get(_ROPE_FACTORS)
  if embedding is None or len(embedding.shape) != 2:
    raise ValueError(f'{file}: no matrix token_embd.weight; fetch the whole model')
  try:
    with np.errstate(all='ignore'):
      return metadata.parse(
        {key: _read_value(field) for key, field in reader.fields.items()},
        vocab_size=int(embedding.shape[1]),
        tied='output.weight' not in tensors,
        rope_factors=None if factors is None else np.asarray(factors.data),
        tensors=tensors,
      )
  except ValueError as error:
    raise ValueError(f'{file}: {error}') from error


def _read_value(field: gguf.ReaderField) -> Any:
  value = field.contents() if field.data else 'an array'
  return tuple(value) if isinstance(value, list) else value


def _check_type(file: pathlib.Path, tensor: gguf.ReaderTensor) -> None:
  try:
    _dequantise(tensor.tensor_type, np.atleast_2d(tensor.data)[:1])
  except (NotImplementedError, ValueError) as error:
    raise ValueError(
      f'{file}: tensor {tensor.name} is {tensor.tensor_type.name}, which gguf does not '
      f'dequantise ({error}); take a file of another type, such as Q8_0 or BF16'
    ) from error


def _dequantise(kind: gguf.GGMLQuantizationType, data: np.ndarray) -> np.ndarray:
  from gguf import quants

  if kind.name in ('F32', 'F16'):
    return data
  if kind.name == 'BF16':
    return data.view(jnp.bfloat16)
  with np.errstate(all='ignore'):  # weights.check_finite finds non-finite numbers.
    return quants.dequantize(data, kind)


def _read(
  data: np.ndarray,
  kind: gguf.GGMLQuantizationType,
  shape: tuple[int, ...],
  undo: list[Callable[[np.ndarray], np.ndarray]],
) -> np.ndarray:
  """Reads a tensor, and undoes the conversion.

  Args:
    data: The numbers or quantised blocks in the file.
    kind: Their type.
    shape: The tensor's shape in the file.
    undo: The steps from names.find_undo.
  """
  x = _dequantise(kind, np.asarray(data)).reshape(shape)
  for step in undo:
    x = step(x)
  return x


FORMAT = tensor_files.Format(find_file, read_config, find_tensors)
