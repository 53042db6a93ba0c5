"""GGUF files, as llama.cpp's converter writes them: their config and their tensors.

The package gguf reads the format and dequantises. What the converter changed is undone
here: the names; the order of the rows of Llama's q and k, where it puts beside each other
what RoPE rotates together; the 1 that it adds to the scales of Gemma's norms; and the
experts of a layer, which are one tensor.
"""

from __future__ import annotations

import functools
import pathlib
import re
import struct
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from agent_r1_jax.contrib.gguf import metadata
from agent_r1_jax.models import families
from agent_r1_jax.models.files import tensor_files

if TYPE_CHECKING:
  import gguf

_ROPE_FACTORS = 'rope_freqs.weight'
_ROTATED = ('layers/attn/q/kernel', 'layers/attn/k/kernel')
# More bools, tensors and fields are in no file of a known model, of 1,000 layers at most;
# nor more texts, which are the tokens or merges of a vocabulary.
_MAX_BOOLS = 1_000
_MAX_ENTRIES, _MAX_TEXTS = 100_000, 4_000_000


def find_file(path: pathlib.Path) -> pathlib.Path | None:
  """Finds the GGUF file that a path stands for.

  Args:
    path: A GGUF file, or a directory that holds one and no safetensors.

  Returns:
    The file; None if the path stands for another kind of model.

  Raises:
    ValueError: There are several, or a part of one, or the file is missing.
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
  """Makes what config.json would hold from the file's metadata.

  Raises:
    ValueError: The file is broken, or its model is one that the decoder does not compute.
  """
  return _make_config(file, _open(file))


def find_tensors(file: pathlib.Path) -> dict[str, tensor_files.Tensor]:
  """Finds the file's tensors.

  Returns:
    Name in a Hugging Face checkpoint -> the tensor as it was before the conversion. Its
    type is F32 if it is quantised.

  Raises:
    ValueError: The file is broken, or has a tensor that no parameter is made of or whose
      type cannot be dequantised.
  """
  reader = _open(file)
  raw = _make_config(file, reader)
  architecture = reader.fields['general.architecture'].contents()
  # A damaged count of layers must not make us list a billion names.
  layers = min(raw['num_hidden_layers'], len(reader.tensors))
  names = _list_names(architecture, layers)
  row = metadata.ARCHITECTURES[architecture]
  family = families.FAMILIES[raw['model_type']]
  tensors, types = {}, set()
  for tensor in reader.tensors:
    if tensor.name == _ROPE_FACTORS:
      continue
    if tensor.name not in names:
      raise ValueError(
        f'{file}: tensor {tensor.name} has no place in a model of architecture '
        f'{architecture}; take the model in HF layout if the decoder knows it'
      )
    if tensor.tensor_type not in types:
      _check_type(file, tensor)
      types.add(tensor.tensor_type)
    name, path = names[tensor.name]
    shape = tuple(int(size) for size in tensor.shape[::-1])
    parts = {name: tensor.data}
    if '{}' in name and len(shape) == 3:  # The experts of a layer.
      parts = {name.format(i): tensor.data[i] for i in range(shape[0])}
      shape = shape[1:]
    if path.endswith('/kernel') and len(shape) == 1:
      shape = (1, *shape)  # Older converters leave out dimensions of size 1.
    kind = tensor.tensor_type
    offset = family.norm_offset if path.endswith('/scale') else 0.0
    pairs = raw['head_dim'] // 2 if row.pairs and path in _ROTATED else 0
    for part, data in parts.items():
      read = functools.partial(_read, data, kind, shape, offset, pairs)
      dtype = kind.name if kind.name in ('F16', 'BF16') else 'F32'
      tensors[part] = tensor_files.Tensor(file, part, dtype, shape, reader=read)
  return tensors


def _open(file: pathlib.Path) -> gguf.GGUFReader:
  """Parses the header; the tensors are mapped, not read."""
  try:
    import gguf
  except ImportError as error:
    raise ValueError(
      f"{file}: GGUF files need the package gguf: pip install 'agent_r1_jax[gguf]'"
    ) from error

  class Reader(gguf.GGUFReader):
    """Skips arrays: 150,000 tokens and as many merges took 13 seconds and 490 MB.

    It reads those of bools, which say which layers have a window.
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
      if kind == gguf.GGUFValueType.BOOL and length <= _MAX_BOOLS:
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
  if count > most:  # It would take minutes to learn that they are not there.
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
      )
  except ValueError as error:
    raise ValueError(f'{file}: {error}') from error


def _read_value(field: gguf.ReaderField) -> Any:
  value = field.contents() if field.data else 'an array'
  return tuple(value) if isinstance(value, list) else value


def _list_names(architecture: str, layers: int) -> dict[str, tuple[str, str]]:
  """Returns each tensor's name in the file -> its name in HF layout, its parameter.

  In the name of a tensor that holds all experts of a layer, '{}' stands for the expert.
  """
  import gguf

  family = families.FAMILIES[metadata.ARCHITECTURES[architecture].family]
  table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], layers)
  fused = {part: whole for whole, parts in family.fused.items() for part in parts}
  names = {}
  for parameter in family.parameters:
    pattern = fused.get(parameter.tensor, parameter.tensor)
    for layer in range(layers if '{}' in pattern else 1):
      name = pattern.replace('{}', str(layer), 1)
      stem, _, kind = name.replace('.{}', '').rpartition('.')
      names[f'{table.get_name(stem)}.{kind}'] = name, parameter.path
  return names


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
  with np.errstate(all='ignore'):  # Numbers that are not finite are found later.
    return quants.dequantize(data, kind)


def _read(
  data: np.ndarray,
  kind: gguf.GGMLQuantizationType,
  shape: tuple[int, ...],
  offset: float,
  pairs: int,
) -> np.ndarray:
  """Reads a tensor as it was before the conversion.

  Args:
    data: Its numbers or blocks in the file.
    kind: Their type.
    shape: Its shape before the conversion.
    offset: What was added to it.
    pairs: How many pairs of a head's rows lie beside each other; 0 if none do.
  """
  x = _dequantise(kind, np.asarray(data))
  x = x - x.dtype.type(offset) if offset else x
  if pairs:
    # A head's rows are r0 r4 r1 r5 r2 r6 r3 r7 in the file, r0 ... r7 here.
    x = x.reshape(-1, pairs, 2, x.shape[-1]).swapaxes(1, 2)
  return x.reshape(shape)


FORMAT = tensor_files.Format(find_file, read_config, find_tensors)
