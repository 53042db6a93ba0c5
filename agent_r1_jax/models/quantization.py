"""Kernels of 8 bits, each with a scale for every output channel.

W ≈ values · scale. The values are integers (int8) or small floats (float8_e4m3fn), and a
channel's scale is its largest |W| divided by the largest number of the format. The scale
is a leaf beside the kernel:

  {'kernel': int8 [D, N, H], 'kernel_scale': float32 [N, H]}

It does not depend on the inputs, so it multiplies the product and not the kernel:
x · W = (x · values) · scale. Both formats are exact in bfloat16, so that a compiler can
cast the values inside the product and write no kernel of 16 bits to memory. Qwix (0.1.8)
is not used: where only the kernel is quantised, its dot_general multiplies values and
scale before the product, in float32; and families.py's dimensions lack its arrays, which
are a type of their own.
"""

from jax import Array
import jax.numpy as jnp

from agent_r1_jax.models import families

# The name of a format -> its type and its largest number.
FORMATS = {'int8': (jnp.int8, 127.0), 'fp8': (jnp.float8_e4m3fn, 448.0)}
SCALE = 'kernel_scale'
# The kernels that may have 8 bits, by path: those of projections, of which most of a
# model consists. Embeddings, heads, norms and routers keep their type.
KERNELS = {target.path: target for target in families.TARGETS.values()}


def check(format_name: str, num_experts: int, name: str) -> None:
  """Raises ValueError for an unknown format, or for a mixture of experts.

  Args:
    format_name: One of FORMATS.
    num_experts: Experts of a layer of the model.
    name: The name of the setting, for the message.
  """
  if format_name not in FORMATS:
    raise ValueError(f'{name} is {format_name!r}; give one of {", ".join(FORMATS)}.')
  if num_experts:
    raise ValueError(
      f'{name} is {format_name!r}, but the kernels of experts, of which this model '
      'mostly consists, have no form of 8 bits here; leave it out.'
    )


def quantize(kernel: Array, inputs: int, format_name: str) -> tuple[Array, Array]:
  """Rounds a kernel to 8 bits.

  Args:
    kernel: [*inputs, *outputs] of any float type.
    inputs: The number of axes that the product contracts; they come first.
    format_name: One of FORMATS.

  Returns:
    The values, shaped as the kernel, and the scales [*outputs], float32. A channel that
    is 0 everywhere has scale 1.
  """
  dtype, largest = FORMATS[format_name]
  kernel = kernel.astype(jnp.float32)
  most = jnp.abs(kernel).max(tuple(range(inputs)))
  scale = jnp.where(most > 0, most / largest, 1.0)
  scaled = kernel / _expand(scale, kernel.ndim)
  if format_name == 'int8':
    scaled = jnp.round(scaled)
  # The largest number itself may come out of the division a bit too large.
  return jnp.clip(scaled, -largest, largest).astype(dtype), scale


def dequantize(values: Array, scale: Array) -> Array:
  """Returns values · scale, float32 [*inputs, *outputs]."""
  return values.astype(jnp.float32) * _expand(scale, values.ndim)


def project(x: Array, values: Array, scale: Array) -> Array:
  """(x · values) · scale in x's type, [*M, *inputs] to [*M, *outputs].

  Sums and scales are float32.
  """
  inputs = values.ndim - scale.ndim
  y = jnp.tensordot(x, values.astype(x.dtype), inputs, preferred_element_type=jnp.float32)
  return (y * _expand(scale, y.ndim)).astype(x.dtype)


def _expand(scale: Array, ndim: int) -> Array:
  return jnp.expand_dims(scale, tuple(range(ndim - scale.ndim)))
