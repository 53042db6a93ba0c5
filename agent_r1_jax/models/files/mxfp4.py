"""Tensors of 4 bits in safetensors files: the experts of gpt-oss as they are published.

MXFP4 is the OCP microscaling format (v1.0): 32 numbers of a row share an exponent of 8
bits, and each has a sign, two bits of exponent and one of mantissa. A tensor NAME of the
shape [E, inputs, outputs] is stored in two:

  NAME_blocks  uint8 [E, outputs, inputs / 32, 16]  two numbers a byte, low half first
  NAME_scales  uint8 [E, outputs, inputs / 32]      the exponents, 127 added

bfloat16 holds all products exactly.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import safetensors

from agent_r1_jax.models.files import tensor_files

_BLOCKS, _SCALES = '_blocks', '_scales'
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
  for name in tensors:
    whole = name.removesuffix(_BLOCKS)
    if whole == name or whole + _SCALES not in tensors:
      continue
    blocks, scales = joined.pop(name), joined.pop(whole + _SCALES)
    if len(blocks.shape) != 4 or blocks.shape != (*scales.shape, 16):
      raise ValueError(
        f'{blocks.file}: {name} has shape {list(blocks.shape)}, and {whole}{_SCALES} '
        f'{list(scales.shape)}: no numbers of 4 bits; fetch both again'
      )
    experts, outputs, groups, _ = blocks.shape
    joined[whole] = tensor_files.Tensor(
      blocks.file,
      whole,
      'BF16',
      (experts, 32 * groups, outputs),
      reader=lambda blocks=blocks, scales=scales: _read(blocks, scales),
    )
  return joined


def _read(blocks: tensor_files.Tensor, scales: tensor_files.Tensor) -> np.ndarray:
  """Reads [E, inputs, outputs], an expert at a time."""
  experts, outputs, groups, _ = blocks.shape
  values = np.empty((experts, 32 * groups, outputs), jnp.bfloat16)
  exponents = tensor_files.read(scales).astype(np.int32) - 127
  with safetensors.safe_open(blocks.file, 'np') as opened:
    stored = opened.get_slice(blocks.name)
    for expert in range(experts):
      numbers = _PAIRS[stored[expert]].reshape(outputs, groups, 32)
      numbers = np.ldexp(numbers, exponents[expert][..., None])
      values[expert] = numbers.reshape(outputs, -1).T
  return values
