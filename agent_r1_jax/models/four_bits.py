"""Kernels of experts in 4 bits (MXFP4, the OCP microscaling format v1.0).

Published files of gpt-oss have this format (files/mxfp4.py). With config.model.frozen,
the engine and the learner keep it, under adapters of other kernels. 32 inputs of an
output share a power of 2, whose exponents are a leaf next to the kernel:

  {'kernel': uint8 [E, X/2, Y], 'block_scale': uint8 [E, X/32, Y]}

Byte i of a group's 16 has the numbers of its inputs i, in the low half, and i + 16: a TPU
unpacks these in a third of the time that neighbours take. A byte of the scale is an
exponent plus 127. All numbers times their powers are exact in bfloat16, so results equal
those of a 16-bit kernel bit for bit. Kernels are unpacked where they are multiplied, so
only one layer's are in memory at a time; or an engine unpacks its copy once
(config.engine.weights).

Letters: E experts, X inputs, Y outputs.
"""

from typing import Any, NamedTuple

from flax import traverse_util
import jax
from jax import Array
import jax.numpy as jnp

FORMAT = 'mxfp4'  # The name in config.model.frozen.
UNPACKED = 'unpacked'  # The name in config.engine.weights.
SCALE = 'block_scale'
GROUP = 32  # Inputs with one power of 2.
# From this exponent on, the format's largest number, 6, is not finite in bfloat16.
TOO_LARGE = 253
_BIAS = 127  # The same as bfloat16's.


class Packed(NamedTuple):
  """The kernels of E experts: bytes [E, X/2, Y], and exponents [E, X/32, Y]."""

  codes: Array
  exponents: Array

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the kernels, [E, X, Y]."""
    *outer, half, outputs = self.codes.shape
    return *outer, 2 * half, outputs


def pair(leaf: dict[str, Any]) -> dict[str, Any]:
  """Joins the bytes and exponents of a kernel, if there are any, into one Packed."""
  if SCALE not in leaf:
    return leaf
  others = {name: x for name, x in leaf.items() if name != SCALE}
  return others | {'kernel': Packed(leaf['kernel'], leaf[SCALE])}


def unpack(kernel: Any, dtype: Any) -> Array:
  """Returns packed kernels as [*E, X, Y] in `dtype`, and others unchanged."""
  if not isinstance(kernel, Packed):
    return kernel
  *outer, groups, outputs = kernel.exponents.shape
  bytes_ = kernel.codes.reshape(*outer, groups, GROUP // 2, outputs).astype(jnp.uint16)
  codes = jnp.concatenate([bytes_ & 15, bytes_ >> 4], axis=-2)
  # A sign bit, two exponent bits and a mantissa bit; with exponent 0, the last bit is ½.
  exponent, last = codes >> 1 & 3, codes & 1
  small = jnp.where(last == 1, jnp.uint16(_BIAS - 1 << 7), jnp.uint16(0))
  bits = jnp.where(exponent > 0, (exponent + (_BIAS - 1) << 7) | last << 6, small)
  numbers = _read_bits(bits | codes >> 3 << 15)
  # 2^-127 is subnormal in bfloat16.
  powers = jnp.maximum(kernel.exponents.astype(jnp.uint16) << 7, jnp.uint16(1 << 6))
  values = numbers * jnp.expand_dims(_read_bits(powers), -2)
  return values.reshape(kernel.shape).astype(dtype)


def _read_bits(bits: Array) -> Array:
  return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def is_in(params: dict[str, Any]) -> bool:
  """Whether the parameters have experts of 4 bits."""
  return any(path[-1] == SCALE for path in traverse_util.flatten_dict(params))


def put_zeros(params: dict[str, Any]) -> dict[str, Any]:
  """Replaces the kernels of experts [L, E, X, Y] by zeros of 4 bits.

  Only for shapes: real numbers of 4 bits come from a file.
  """
  moe = dict(params['layers'].get('moe', {}))
  for name in {'gate', 'up', 'down'} & moe.keys():
    *outer, inputs, outputs = moe[name]['kernel'].shape
    zeros = lambda rows, o=outer, y=outputs: jnp.zeros((*o, rows, y), jnp.uint8)
    moe[name] |= {'kernel': zeros(inputs // 2), SCALE: zeros(inputs // GROUP)}
  return params | {'layers': params['layers'] | {'moe': moe}}


def count_numbers(x: Any) -> int:
  """Counts the numbers of a kernel in any format; x is its array or shape struct."""
  return x.size * (2 if x.dtype == jnp.uint8 else 1)
