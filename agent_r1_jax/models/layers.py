"""Building blocks of the decoder's layers. Letters as in decoder.py."""

from collections.abc import Callable
import math
from typing import Any

from flax import linen as nn
import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from agent_r1_jax.models import lora, quantization, sharded_params, sharding

# jax.checkpoint policies for a layer's activations, by DecoderConfig.remat; None stores
# all activations.
REMAT_POLICIES: dict[str, Any] = {
  'none': None,
  'full': jax.checkpoint_policies.nothing_saveable,
  'dots': jax.checkpoint_policies.save_only_these_names('projection'),
}

# A scan over at most this many layers is unrolled: a scan copies its residuals into and
# out of a stacked array, which takes 15 % of a small model's gradient.
UNROLLED_LAYERS = 8


def scan_layers(block: type[nn.Module], remat: str, count: int, *in_axes: Any) -> Any:
  """Scans a block over `count` layers with stacked parameters.

  Args:
    block: A module of (x, *arguments) -> (x, a result for each layer).
    remat: Which activations are recomputed, a key of REMAT_POLICIES.
    count: Number of layers.
    *in_axes: For each argument nn.broadcast, or the axis along which layers differ.
  """
  policy = REMAT_POLICIES[remat]
  block = nn.remat(block, prevent_cse=False, policy=policy) if policy else block
  axes: Any = in_axes
  return nn.scan(
    block,
    variable_axes={'params': 0},
    split_rngs={'params': True},
    in_axes=axes,
    length=count,
    unroll=count if count <= UNROLLED_LAYERS else 1,
  )


def apply_flat(layer: Callable[[Array], Array], x_BTX: Array) -> Array:
  """Applies a layer to rows and tokens merged into one axis.

  A kernel's gradient then contracts one axis, in half the time of two on a CPU. Under
  context parallelism both axes are sharded and cannot be merged.
  """
  if sharding.uses_context_parallelism():
    return layer(x_BTX)
  B, T = x_BTX.shape[:2]
  y_MY = layer(x_BTX.reshape(B * T, *x_BTX.shape[2:]))
  return y_MY.reshape(B, T, *y_MY.shape[1:])


class Projection(nn.Module):
  """x · kernel (+ bias) in `dtype`, [*M, *inputs] to [*M, *outputs], with any adapter.

  Kernels in the engine, and frozen kernels under an adapter, may have 8 bits; see
  quantization.py. The collection 'adapters' (lora.Adapters.get_layer) gives each row its
  own adapter.
  """

  outputs: tuple[int, ...]
  dtype: str
  input_axes: int = 1
  use_bias: bool = False
  kernel_init: Callable[..., Array] = nn.initializers.lecun_normal()

  @nn.compact
  def __call__(self, x):
    inputs = x.shape[-self.input_axes :]

    def init(key, shape):
      flat = (math.prod(inputs), math.prod(self.outputs))
      return self.kernel_init(key, flat).reshape(shape)

    x = x.astype(self.dtype)
    kernel = self.param('kernel', init, inputs + self.outputs)
    name = '/'.join((*self.path, 'kernel'))
    adapted = self.has_variable('params', 'lora_a')
    adapter = [self.get_variable('params', leaf) for leaf in lora.LEAVES if adapted]
    if self.has_variable('params', quantization.SCALE):
      scale = self.get_variable('params', quantization.SCALE)
      y: Any = quantization.project(x, kernel, scale, self.input_axes, name)
      y = (y + lora.project_alone(x, *adapter) if adapted else y).astype(self.dtype)
    elif adapted:
      y = lora.project(x, kernel, name, *adapter)
    else:
      kernel = sharded_params.gather_kernel(kernel.astype(self.dtype), name)
      y = jnp.tensordot(x, kernel, self.input_axes)
    if self.has_variable('adapters', 'index'):
      rows = (self.get_variable('adapters', leaf) for leaf in ('a', 'b', 'index'))
      tokens = x.shape[: -self.input_axes]
      adapted = lora.project_rows(x.reshape(*tokens, -1), *rows)
      y = (y + adapted.reshape(y.shape)).astype(self.dtype)
    if self.use_bias:
      bias = self.param('bias', nn.initializers.zeros, self.outputs).astype(self.dtype)
      y += jnp.expand_dims(bias, tuple(range(y.ndim - bias.ndim)))
    return checkpoint_name(y, 'projection')


class RMSNorm(nn.Module):
  """x / rms(x) * (scale + offset), computed in float32."""

  eps: float
  offset: float = 0.0
  axes: int = 1  # How many of the last axes are normalised together.

  @nn.compact
  def __call__(self, x):
    """Normalises x [..., D], or [..., N, H] over two axes."""
    init = nn.initializers.constant(1.0 - self.offset)
    scale = self.param('scale', init, x.shape[-self.axes :])
    x32, last = x.astype(jnp.float32), tuple(range(-self.axes, 0))
    x32 *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=last, keepdims=True) + self.eps)
    scale = scale.astype(jnp.float32) + self.offset
    return (x32 * scale.reshape((1,) * (x.ndim - self.axes) + scale.shape)).astype(
      x.dtype
    )


def normalise(x: Array, eps: float) -> Array:
  """Applies RMSNorm without a scale."""
  x32 = x.astype(jnp.float32)
  x32 *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
  return x32.astype(x.dtype)


class Scale(nn.Module):
  """A multiplicative parameter, initialised to 1."""

  shape: tuple[int, ...]

  @nn.compact
  def __call__(self):
    """Returns the parameter, of `shape`."""
    return self.param('scale', nn.initializers.ones, self.shape)


class MLP(nn.Module):
  """A gated feed-forward: SwiGLU, or GeGLU in Gemma."""

  dim: int
  dtype: str
  activate: Callable[[Array, Array], Array]  # (gate, up) -> the input of down.
  out_scale: float  # The initial variance of down's kernel, times its fan-in.

  @nn.compact
  def __call__(self, x_BTD):
    """Down(activate(gate(x), up(x))), [B, T, D] to [B, T, D]."""
    gate = Projection((self.dim,), self.dtype, name='gate')
    up = Projection((self.dim,), self.dtype, name='up')
    init = nn.initializers.variance_scaling(self.out_scale, 'fan_in', 'normal')
    embed = (x_BTD.shape[-1],)
    down = Projection(embed, self.dtype, kernel_init=init, name='down')

    def feed_forward(x_MD):
      hidden_MF = self.activate(gate(x_MD), up(x_MD))
      if x_BTD.shape[1] == 1 and sharding.platform() == 'tpu':
        # Otherwise one kernel computes up and down, which probably reads them slower.
        hidden_MF = jax.lax.optimization_barrier(hidden_MF)
      return down(hidden_MF)

    return apply_flat(feed_forward, x_BTD)
