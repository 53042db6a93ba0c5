"""Tensors of 4 bits in safetensors files: the experts of gpt-oss as they are published.

MXFP4 is the OCP microscaling format (v1.0): 32 numbers of a row share an exponent of 8
bits, and each has a sign, two bits of exponent and one of mantissa. A tensor NAME of the
shape [E, inputs, outputs] is stored in two:

  NAME_blocks  uint8 [E, outputs, inputs / 32, 16]  two numbers a byte, low half first
  NAME_scales  uint8 [E, outputs, inputs / 32]      the exponents, 127 added

bfloat16 holds all products exactly. A policy may have them in 4 bits too, inputs before
outputs (models/four_bits.py).
"""

from collections.abc import Mapping
import contextlib
import functools
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from agent_r1_jax.models import four_bits
from agent_r1_jax.models.files import tensor_files

BLOCKS, SCALES = '_blocks', '_scales'
PACKED = 'U8'
# What config.json says of such files.
CONFIG: dict[str, Any] = {
  'quant_method': 'mxfp4',
  'modules_to_not_convert': [
    'model.layers.*.self_attn',
    'model.layers.*.mlp.router',
    'model.embed_tokens',
    'lm_head',
  ],
}
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
# A byte -> its two numbers.
_PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=1)


def join(tensors: Mapping[str, tensor_files.Tensor]) -> dict[str, tensor_files.Tensor]:
  """Puts one tensor of bfloat16 in place of each pair.

  Raises:
    ValueError: The shapes of a pair do not fit each other.
  """
  joined = dict(tensors)
  for whole, (blocks, scales) in _find_pairs(tensors).items():
    del joined[whole + BLOCKS], joined[whole + SCALES]
    experts, outputs, groups, _ = blocks.shape
    joined[whole] = tensor_files.Tensor(
      blocks.file,
      whole,
      'BF16',
      (experts, 32 * groups, outputs),
      reader=functools.partial(_read, blocks, scales),
    )
  return joined


def turn(
  directory: pathlib.Path, tensors: Mapping[str, tensor_files.Tensor]
) -> dict[str, tensor_files.Tensor]:
  """Makes of each pair the leaves of four_bits.py.

  Raises:
    ValueError: The shapes of a pair do not fit each other, or there is none.
  """
  turned, pairs = dict(tensors), _find_pairs(tensors)
  if not pairs:
    raise ValueError(
      f"{directory}: model.frozen is '{four_bits.FORMAT}', yet no tensor of this model "
      f'has 4 bits (NAME{BLOCKS} and NAME{SCALES}); leave it out'
    )
  for pair in pairs.values():
    for tensor in pair:
      experts, outputs, *inputs = tensor.shape
      turned[tensor.name] = tensor._replace(
        shape=(experts, int(np.prod(inputs)), outputs),
        reader=functools.partial(_read_turned, tensor),
      )
  return turned


def turn_back(name: str, array: np.ndarray) -> np.ndarray:
  """Lays a leaf of 4 bits out as the tensor of this name; the inverse of `turn`."""
  return array.swapaxes(1, 2).reshape(get_shape(name, array.shape))


def get_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape in a file of what is [E, inputs, outputs] here."""
  experts, inputs, outputs = shape
  block = (inputs // 16, 16) if name.endswith(BLOCKS) else (inputs,)
  return experts, outputs, *block


def _find_pairs(
  tensors: Mapping[str, tensor_files.Tensor],
) -> dict[str, tuple[tensor_files.Tensor, tensor_files.Tensor]]:
  pairs = {}
  for name, blocks in tensors.items():
    whole = name.removesuffix(BLOCKS)
    if whole == name or whole + SCALES not in tensors:
      continue
    pairs[whole] = blocks, (scales := tensors[whole + SCALES])
    if len(blocks.shape) != 4 or blocks.shape != (*scales.shape, 16):
      raise ValueError(
        f'{blocks.file}: {name} has shape {list(blocks.shape)}, and {whole}{SCALES} '
        f'{list(scales.shape)}: no numbers of 4 bits; fetch both again'
      )
  return pairs


def _read(blocks: tensor_files.Tensor, scales: tensor_files.Tensor) -> np.ndarray:
  """Reads [E, inputs, outputs], an expert at a time."""
  experts, outputs, groups, _ = blocks.shape
  values = np.empty((experts, 32 * groups, outputs), jnp.bfloat16)
  exponents = tensor_files.read(scales).astype(np.int32) - 127
  with contextlib.ExitStack() as stack:
    if blocks.reader:
      stored: Any = blocks.reader()
    else:
      opened = stack.enter_context(safetensors.safe_open(blocks.file, 'np'))
      stored = opened.get_slice(blocks.name)
    for expert in range(experts):
      numbers = _PAIRS[stored[expert]].reshape(outputs, groups, 32)
      with np.errstate(over='ignore'):  # Numbers that are not finite are found later.
        numbers = np.ldexp(numbers, exponents[expert][..., None])
      values[expert] = numbers.reshape(outputs, -1).T
  return values


def _read_turned(tensor: tensor_files.Tensor) -> np.ndarray:
  """Reads bytes [E, inputs / 2 or / 32, outputs]."""
  stored = tensor_files.read(tensor)
  if tensor.name.endswith(SCALES) and stored.max() >= four_bits.TOO_LARGE:
    raise ValueError(
      f'{tensor.file}: numbers of {tensor.name} are not finite; fetch it again'
    )
  experts, outputs, *_ = stored.shape
  return stored.reshape(experts, outputs, -1).swapaxes(1, 2)
