"""Tensors of 4 bits in safetensors files: the experts of gpt-oss as published.

MXFP4 is the OCP microscaling format (v1.0): 32 numbers of a row share an exponent of 8
bits, and each has a sign, two bits of exponent and one of mantissa. A tensor NAME of
shape [E, inputs, outputs] is stored as two:

  NAME_blocks  uint8 [E, outputs, inputs / 32, 16]  two numbers per byte, low half first
  NAME_scales  uint8 [E, outputs, inputs / 32]      the exponents plus 127

All values are exact in bfloat16. A policy may also keep them in 4 bits, with inputs
before outputs (models/four_bits.py).
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
# The `quantization_config` of such models.
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
  """Replaces each pair by one bfloat16 tensor.

  Raises:
    ValueError: The shapes of a pair do not match.
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
  """Converts each pair to the layout of four_bits.py.

  Raises:
    ValueError: The shapes of a pair do not match, or there is no pair.
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
  """Converts a leaf of 4 bits to the file's layout of this tensor; inverse of `turn`."""
  stored = array.swapaxes(1, 2).reshape(get_shape(name, array.shape))
  return _pair_neighbours(stored) if name.endswith(BLOCKS) else stored


def get_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape in a file of a leaf [E, inputs, outputs]."""
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
  """Reads and unpacks [E, inputs, outputs], one expert at a time."""
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
      with np.errstate(over='ignore'):  # weights.check_finite finds infinities.
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
  if tensor.name.endswith(BLOCKS):
    stored = _pair_halves(stored)
  experts, outputs, *_ = stored.shape
  return stored.reshape(experts, outputs, -1).swapaxes(1, 2)


def _pair_halves(bytes_: np.ndarray) -> np.ndarray:
  """Converts groups [..., 16]: byte i has inputs 2i and 2i + 1, then i and i + 16."""
  first, second = bytes_[..., :8], bytes_[..., 8:]
  even, odd = (first & 15) | (second << 4), (first >> 4) | (second & 240)
  return np.stack([even, odd], axis=-1).reshape(bytes_.shape)


def _pair_neighbours(bytes_: np.ndarray) -> np.ndarray:
  """Inverse of `_pair_halves`."""
  even, odd = bytes_[..., ::2], bytes_[..., 1::2]
  first, second = (even & 15) | (odd << 4), (even >> 4) | (odd & 240)
  return np.concatenate([first, second], axis=-1)
