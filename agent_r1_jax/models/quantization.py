"""Kernels in 8 bits, with a scale for each output channel.

The engine's copy may have them (config.engine.weights); and learner and engine may have
them for the frozen kernels under LoRA (config.model.frozen).

W ≈ values · scale. The values are integers (int8) or small floats (float8_e4m3fn), and a
channel's scale is its largest |W| divided by the largest number of the format. The scale
is a leaf next to the kernel:

  {'kernel': int8 [D, N, H], 'kernel_scale': float32 [1, N, H]}

It does not depend on the inputs, so it multiplies the product instead of the kernel:
x · W = (x · values) · scale. Both formats are exact in bfloat16, so a compiler can cast
the values inside the product without writing a 16-bit kernel to memory. Qwix (0.1.8) is
not used: if only the kernel is quantised, its dot_general multiplies values and scale
before the product, in float32; and its array type does not fit the dimensions in
families.py.
"""

import functools
from typing import Any

from flax import traverse_util
import jax
from jax import Array
import jax.numpy as jnp

from agent_r1_jax.models import decoder_config, families, four_bits, sharded_params

# The name of a format -> its dtype and its largest number.
FORMATS = {'int8': (jnp.int8, 127.0), 'fp8': (jnp.float8_e4m3fn, 448.0)}
SCALE = 'kernel_scale'
# The kernels that may have 8 bits, by path: projections, which are most of a model.
# Embeddings, heads, norms and routers keep their dtype, and so do the small kernels `a`
# and `b` of delta_net.py.
KERNELS = {path: x for path, x in families.KERNELS.items() if x.target not in ('a', 'b')}


def check(format_name: str, config: decoder_config.DecoderConfig, name: str) -> None:
  """Raises ValueError for an unknown format, or one that the model does not support.

  Args:
    format_name: One of FORMATS; for an engine also 'model' or four_bits.UNPACKED, for the
      learner four_bits.FORMAT.
    config: The shape of the model.
    name: The name of the setting, for the message.
  """
  if format_name in ('model', four_bits.UNPACKED) and name != 'model.frozen':
    return
  if format_name == four_bits.FORMAT and name == 'model.frozen':
    if not config.facts.packs_experts:
      raise ValueError(
        f'{name} is {format_name!r}, the 4 bits that files of gpt-oss have, and this '
        f'model is a {config.family}; leave it out.'
      )
    return
  if format_name not in FORMATS:
    raise ValueError(f'{name} is {format_name!r}; give one of {", ".join(FORMATS)}.')
  if config.num_experts:
    raise ValueError(
      f'{name} is {format_name!r}, but the kernels of experts, of which this model '
      'mostly consists, have no form of 8 bits here; leave it out.'
    )


def quantize(kernel: Array, inputs: int, format_name: str) -> tuple[Array, Array]:
  """Rounds a kernel to 8 bits.

  Args:
    kernel: [*inputs, *outputs] of any float dtype.
    inputs: The number of leading axes that the product contracts.
    format_name: One of FORMATS.

  Returns:
    The values, with the kernel's shape, and the float32 scales, with size 1 for each axis
    of inputs. A channel that is all 0 has scale 1.
  """
  dtype, largest = FORMATS[format_name]
  kernel = kernel.astype(jnp.float32)
  most = jnp.abs(kernel).max(tuple(range(inputs)), keepdims=True)
  # Numbers below 1e-35 would also give a scale of 0.
  scale = jnp.where(most / largest > 0, most / largest, 1.0)
  scaled = kernel / scale
  if format_name == 'int8':
    scaled = jnp.round(scaled)
  # The division may round the largest number up.
  return jnp.clip(scaled, -largest, largest).astype(dtype), scale


def dequantize(values: Array, scale: Array) -> Array:
  """Returns values · scale in float32, for a kernel or a stack of kernels."""
  return values.astype(jnp.float32) * scale


@functools.partial(jax.jit, static_argnames=('inputs', 'format_name'))
def quantize_stack(
  kernels: Array, *, inputs: int, format_name: str
) -> tuple[Array, Array]:
  """Rounds kernels [L, *inputs, *outputs], each with its own scales.

  One at a time, because float32 copies of all would need too much memory.
  """
  return jax.lax.map(lambda x: quantize(x, inputs, format_name), kernels)


def freeze_leaf(
  path: str, x: Array, dtype: str, format_name: str
) -> tuple[Array, Array | None]:
  """Converts a frozen parameter of the learner to its storage; also returns any scale.

  Kernels of layers get 8 bits, if the format does. Embeddings and the head, which are
  cast to `dtype` wherever they are used, are stored in it.
  """
  if path in KERNELS and format_name in FORMATS:
    inputs = len(KERNELS[path].inputs)
    return quantize_stack(x, inputs=inputs, format_name=format_name)
  cast = path.endswith('embed/embedding') or path == 'lm_head/kernel'
  return (x.astype(dtype) if cast else x), None


def freeze(
  params: dict[str, Any], config: decoder_config.DecoderConfig, format_name: str
) -> dict[str, Any]:
  """Applies `freeze_leaf` to all parameters; raises ValueError as `check` does.

  Experts in 4 bits become zeros, because their numbers come from a file: for shapes only.
  """
  check(format_name, config, 'model.frozen')
  params = four_bits.put_zeros(params) if format_name == four_bits.FORMAT else params
  flat: Any = traverse_util.flatten_dict(params, sep='/')
  scales: dict[str, Array] = {}
  for path, x in flat.items():
    flat[path], scale = freeze_leaf(path, x, config.dtype, format_name)
    if scale is not None:
      scales[path] = scale
  return add_scales(traverse_util.unflatten_dict(flat, sep='/'), scales)


def add_scales(params: dict[str, Any], scales: dict[str, Array]) -> dict[str, Any]:
  """Returns the parameters with `scales`, a dict from a kernel's path to its scale."""
  flat: Any = traverse_util.flatten_dict(params, sep='/')
  flat |= {path.removesuffix('kernel') + SCALE: x for path, x in scales.items()}
  return traverse_util.unflatten_dict(flat, sep='/')


def is_frozen(params: dict[str, Any]) -> bool:
  """Whether the learner's layers have kernels of 8 bits."""
  return SCALE in params['layers']['attn']['q']


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def project(x: Array, values: Array, scale: Array, inputs: int, name: str) -> Array:
  """Computes (x · values) · scale, from [*M, *inputs] to float32 [*M, *outputs].

  Values and scale are frozen: only x has a gradient. The backward pass casts the values
  again: a scan over layers would stack the casts. `name` is passed to
  sharded_params.gather_kernel; chips exchange 8 bits.
  """
  product = functools.partial(jnp.tensordot, preferred_element_type=jnp.float32)
  y = product(x, _cast(values, name, x.dtype), inputs)
  return y * _match(scale, inputs, y)


def _forward(x, values, scale, inputs, name):
  # An empty array carries x's dtype.
  y = project(x, values, scale, inputs, name)
  return y, (values, scale, jnp.zeros(0, x.dtype))


def _backward(inputs, name, saved, dy):
  values, scale, like = saved
  dy = (dy * _match(scale, inputs, dy)).astype(like.dtype)
  outputs = values.ndim - inputs
  last = lambda y: tuple(range(y.ndim - outputs, y.ndim))
  dx = jnp.tensordot(dy, _cast(values, name, like.dtype), (last(dy), last(values)))
  return dx, None, None


project.defvjp(_forward, _backward)


def _cast(values: Array, name: str, dtype: Any) -> Array:
  return sharded_params.gather_kernel(values, name).astype(dtype)


def _match(scale: Array, inputs: int, y: Array) -> Array:
  """Reshapes a kernel's scale to multiply y [*M, *outputs]."""
  outputs = scale.shape[inputs:]
  return scale.reshape((1,) * (y.ndim - len(outputs)) + outputs)
