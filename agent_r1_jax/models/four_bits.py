"""Kernels of experts in 4 bits (MXFP4, the OCP microscaling format v1.0).

Published files of gpt-oss hold them so (files/mxfp4.py), and with config.model.frozen
they stay so in the learner, under adapters of other kernels, and in the engine. 32 inputs
of an output share a power of 2. The powers are a leaf beside the kernel:

  {'kernel': uint8 [E, X/2, Y], 'block_scale': uint8 [E, X/32, Y]}

A byte of the kernel has the numbers of two inputs, the first one in its low half; that of
a power is its exponent with 127 added. All products of both are exact in bfloat16, so
that what is computed has the bits that it has with the kernel of 16 bits. They are
computed where a kernel is multiplied: no more than those of a layer are in memory.

Letters: E experts, X inputs, Y outputs.
"""

from typing import Any, NamedTuple

from flax import traverse_util
import jax
from jax import Array
import jax.numpy as jnp

FORMAT = 'mxfp4'  # As config.model.frozen has it.
SCALE = 'block_scale'
GROUP = 32  # Inputs with one power of 2.
# Exponents from which on the format's largest number, 6, is not finite in bfloat16.
TOO_LARGE = 253
_BIAS = 127  # Of the exponents of bfloat16 as well.


class Packed(NamedTuple):
  """The kernels of E experts: bytes [E, X/2, Y], and exponents [E, X/32, Y]."""

  codes: Array
  exponents: Array

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the kernels, [E, X, Y]."""
    *outer, half, outputs = self.codes.shape
    return *outer, 2 * half, outputs


def unpack(kernel: Any, dtype: Any) -> Array:
  """Returns kernels [*E, X, Y] in `dtype`; what is not packed, as it is."""
  if not isinstance(kernel, Packed):
    return kernel
  *outer, groups, outputs = kernel.exponents.shape
  pairs = jnp.stack([kernel.codes & 15, kernel.codes >> 4], axis=-2)
  codes = pairs.reshape(*outer, groups, GROUP, outputs).astype(jnp.uint16)
  # A sign, two bits of exponent and one after the first of the number; where the exponent
  # is 0, the last bit is a half.
  exponent, last = codes >> 1 & 3, codes & 1
  small = jnp.where(last == 1, jnp.uint16(_BIAS - 1 << 7), jnp.uint16(0))
  bits = jnp.where(exponent > 0, (exponent + (_BIAS - 1) << 7) | last << 6, small)
  numbers = _read_bits(bits | codes >> 3 << 15)
  # 2^-127 has no first bit in bfloat16.
  powers = jnp.maximum(kernel.exponents.astype(jnp.uint16) << 7, jnp.uint16(1 << 6))
  values = numbers * jnp.expand_dims(_read_bits(powers), -2)
  return values.reshape(kernel.shape).astype(dtype)


def _read_bits(bits: Array) -> Array:
  return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def is_in(params: dict[str, Any]) -> bool:
  """Whether experts of the parameters have 4 bits."""
  return any(path[-1] == SCALE for path in traverse_util.flatten_dict(params))


def put_zeros(params: dict[str, Any]) -> dict[str, Any]:
  """Puts zeros of 4 bits in place of the kernels of experts [L, E, X, Y].

  For shapes alone: numbers of 4 bits come from a file.
  """
  moe = dict(params['layers'].get('moe', {}))
  for name in {'gate', 'up', 'down'} & moe.keys():
    *outer, inputs, outputs = moe[name]['kernel'].shape
    zeros = lambda rows, o=outer, y=outputs: jnp.zeros((*o, rows, y), jnp.uint8)
    moe[name] |= {'kernel': zeros(inputs // 2), SCALE: zeros(inputs // GROUP)}
  return params | {'layers': params['layers'] | {'moe': moe}}


def count_numbers(x: Any) -> int:
  """Counts the numbers of a kernel, of whatever format; x is its array or its shape."""
  return x.size * (2 if x.dtype == jnp.uint8 else 1)
