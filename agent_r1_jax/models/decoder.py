"""One functional decoder for Qwen2, Qwen2.5, Qwen3, Llama 3 and Gemma.

Parameters are a plain dict whose layer leaves are stacked over L; the cache is an
argument and a result. The same Block computes training (packed rows, layers scanned) and
generation (cached rows, layers unrolled, because a scanned cache would be copied at every
layer).

Letters: B rows (packed, or of the cache), T query tokens, S key slots, L layers, D embed,
F feed-forward, N query heads, K key-value heads, G = N / K, H head dim, V vocabulary.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

from flax import linen as nn
import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Float, Int

from agent_r1_jax.models import attention, families, lora, sharded_params, sharding

Params = dict[str, Any]
# The scan over at most this many layers is unrolled: a scan copies its residuals into one
# array and out of it, which takes 15 % of a small model's gradient.
UNROLLED_LAYERS = 8
# The policies of jax.checkpoint for the activations of a layer; None stores all.
_REMAT: dict[str, Any] = {
  'none': None,
  'full': jax.checkpoint_policies.nothing_saveable,
  'dots': jax.checkpoint_policies.save_only_these_names('projection'),
}
_ACTIVATIONS = {'silu': nn.silu, 'gelu_pytorch_tanh': nn.gelu}
# One (k, v) pair a layer, each [B, K, S, H].
Cache = tuple[tuple[Array, Array], ...]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """The shape of a decoder."""

  family: str  # A key of families.FAMILIES; what config.json will call it.
  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  rope_theta: float = 10_000.0
  # Llama 3's {'factor', 'low_freq_factor', 'high_freq_factor',
  # 'original_max_position_embeddings'}, or None.
  rope_scaling: dict[str, Any] | None = dataclasses.field(default=None, hash=False)
  norm_eps: float = 1e-6
  tie_embeddings: bool = False
  max_positions: int = 32_768  # The longest context that the model supports.
  # The dtype of activations and cache; parameters are cast where they are used.
  dtype: str = 'float32'
  # The activations of a layer that are recomputed in the backward pass: 'none'; 'full',
  # all but its input; 'dots', all but its projections' outputs. docs/memory.md has the
  # costs.
  remat: str = 'none'

  def __post_init__(self):
    if self.family not in families.FAMILIES:
      raise ValueError(
        f'family is {self.family!r}; give one of {", ".join(families.FAMILIES)}.'
      )
    if self.remat not in _REMAT:
      raise ValueError(f'remat is {self.remat!r}; give one of {tuple(_REMAT)}.')

  @property
  def facts(self) -> families.Family:
    """The properties of the family."""
    return families.FAMILIES[self.family]


def rope_frequencies(config: DecoderConfig) -> Float[Array, 'half']:
  """The inverse wavelengths of RoPE, with Llama 3's scaling if there is rope_scaling."""
  half = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32)
  freq = 1.0 / config.rope_theta ** (half / config.head_dim)
  s = config.rope_scaling
  if s is None:
    return freq
  rotations = s['original_max_position_embeddings'] * freq / (2 * math.pi)
  low, high = s['low_freq_factor'], s['high_freq_factor']
  # 1 keeps a frequency, 0 divides it by the factor, between them the two are mixed.
  keep = jnp.clip((rotations - low) / (high - low), 0.0, 1.0)
  return keep * freq + (1.0 - keep) * freq / s['factor']


def _rope_angles(positions_BT: Array, config: DecoderConfig) -> tuple[Array, Array]:
  """Sin and cos of RoPE at each position, [B, T, 1, H/2]; the same in all layers."""
  frequencies = rope_frequencies(config)[None, None, None]
  angles = positions_BT[:, :, None, None].astype(jnp.float32) * frequencies
  return jnp.sin(angles), jnp.cos(angles)


def _rope(x_BTNH: Array, angles: tuple[Array, Array]) -> Array:
  sin, cos = angles
  a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTNH.dtype)


def _apply_flat(layer: Callable[[Array], Array], x_BTX: Array) -> Array:
  """Applies a layer to all tokens as one axis.

  The gradient of a kernel then contracts one axis, which takes half the time of two on a
  CPU. Rows and tokens that a mesh splits cannot become one axis.
  """
  if sharding.uses_context_parallelism():
    return layer(x_BTX)
  B, T = x_BTX.shape[:2]
  y_MY = layer(x_BTX.reshape(B * T, *x_BTX.shape[2:]))
  return y_MY.reshape(B, T, *y_MY.shape[1:])


def _scale_embeddings(x_BTD: Array, config: DecoderConfig) -> Array:
  # Rounded to the activations' dtype, as in transformers.
  scale = jnp.asarray(config.embed_dim**0.5, x_BTD.dtype)
  return x_BTD * scale if config.facts.scaled_embeddings else x_BTD


class Projection(nn.Module):
  """x · kernel (+ bias) in `dtype`, [*M, *inputs] to [*M, *outputs], with any adapter."""

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
    if self.has_variable('params', 'lora_a'):
      adapter = (self.get_variable('params', leaf) for leaf in lora.LEAVES)
      y = lora.project(x, kernel, name, *adapter)
    else:
      kernel = sharded_params.gather_kernel(kernel.astype(self.dtype), name)
      y = jnp.tensordot(x, kernel, self.input_axes)
    if self.use_bias:
      bias = self.param('bias', nn.initializers.zeros, self.outputs).astype(self.dtype)
      y += jnp.expand_dims(bias, tuple(range(y.ndim - bias.ndim)))
    return checkpoint_name(y, 'projection')


class RMSNorm(nn.Module):
  """x / rms(x) * (scale + the family's offset), computed in float32."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x):
    """Normalises the last axis of x [..., D]."""
    c = self.config
    init = nn.initializers.constant(1.0 - c.facts.norm_offset)
    scale = self.param('scale', init, (x.shape[-1],))
    x32 = x.astype(jnp.float32)
    x32 *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + c.norm_eps)
    scale = scale.astype(jnp.float32) + c.facts.norm_offset
    return (x32 * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class Attention(nn.Module):
  """Grouped-query attention with RoPE; biases and q/k norms as the family has them."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x_BTD, positions_BT, angles, segments, cache):
    """Attends inside segments, or to the cache where there is one; returns it too."""
    c = self.config
    project = functools.partial(Projection, dtype=c.dtype, use_bias=c.facts.qkv_bias)
    # The engine's kernel of the queries has one axis for all heads; see
    # sampling_params.unstack.
    flat = (c.num_heads * c.head_dim,)
    heads = flat if cache is not None else (c.num_heads, c.head_dim)
    q_BTNH = _apply_flat(project(heads, name='q'), x_BTD)
    q_BTNH = q_BTNH.reshape(*x_BTD.shape[:2], c.num_heads, c.head_dim)
    k_BTKH = _apply_flat(project((c.num_kv_heads, c.head_dim), name='k'), x_BTD)
    v_BTKH = _apply_flat(project((c.num_kv_heads, c.head_dim), name='v'), x_BTD)
    if c.facts.qk_norm:
      q_BTNH = RMSNorm(c, name='q_norm')(q_BTNH)
      k_BTKH = RMSNorm(c, name='k_norm')(k_BTKH)
    q_BTNH, k_BTKH = _rope(q_BTNH, angles), _rope(k_BTKH, angles)
    if self.is_initializing():
      out_BTNH = q_BTNH  # Attention has no parameters, and no mesh can split one token.
    elif cache is None:
      out_BTNH = attention.packed(q_BTNH, k_BTKH, v_BTKH, *segments)
    else:
      k_BKSH, v_BKSH = (
        _write_slots(x_BKSH, x_BTKH, positions_BT)
        for x_BKSH, x_BTKH in zip(cache, (k_BTKH, v_BTKH), strict=True)
      )
      cache = (k_BKSH, v_BKSH)
      out_BTNH = attention.cached(q_BTNH, k_BKSH, v_BKSH, positions_BT)
    init = nn.initializers.variance_scaling(1 / (2 * c.num_layers), 'fan_in', 'normal')
    out = Projection((c.embed_dim,), c.dtype, 2, kernel_init=init, name='o')
    return _apply_flat(out, out_BTNH), cache


def _write_slots(cache_BKSH: Array, x_BTKH: Array, positions_BT: Array) -> Array:
  """Writes tokens to their slots; those past the last slot are dropped."""
  B, K = cache_BKSH.shape[:2]
  # Each head has an index. If the heads were a slice, a TPU's compiler would lay them out
  # behind the slots, and copy the whole cache for the kernel that reads it.
  rows_B11, heads_11K = jnp.arange(B)[:, None, None], jnp.arange(K)[None, None]
  where = rows_B11, heads_11K, positions_BT[..., None]
  return cache_BKSH.at[where].set(x_BTKH, mode='drop')


class MLP(nn.Module):
  """A gated feed-forward: SwiGLU, or GeGLU in Gemma."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x_BTD):
    """Down(activation(gate(x)) * up(x)), [B, T, D] to [B, T, D]."""
    c = self.config
    gate = Projection((c.mlp_dim,), c.dtype, name='gate')
    up = Projection((c.mlp_dim,), c.dtype, name='up')
    init = nn.initializers.variance_scaling(1 / (2 * c.num_layers), 'fan_in', 'normal')
    down = Projection((c.embed_dim,), c.dtype, kernel_init=init, name='down')
    activate = _ACTIVATIONS[c.facts.activation]
    return _apply_flat(lambda x_MD: down(activate(gate(x_MD)) * up(x_MD)), x_BTD)


class Block(nn.Module):
  """One layer. `cache` is None in training, else this layer's (k, v).

  `segments` holds the segment_ids and ends of attention.packed, of which one is None.
  """

  config: DecoderConfig

  @nn.compact
  def __call__(self, x_BTD, positions_BT, angles, segments=None, cache=None):
    """Adds attention, then the MLP, to the residual stream; returns the cache too."""
    c = self.config
    normed = RMSNorm(c, name='attn_norm')(x_BTD)
    attend = Attention(c, name='attn')
    out, cache = attend(normed, positions_BT, angles, segments, cache)
    x_BTD += out
    x_BTD += MLP(c, name='mlp')(RMSNorm(c, name='mlp_norm')(x_BTD))
    return x_BTD, cache


class Decoder(nn.Module):
  """The model over packed rows; `init` makes its parameters."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, tokens_BT, positions_BT, segment_ids_BT, ends_BT=None):
    """Final hidden states [B, T, D]."""
    c = self.config
    init = nn.initializers.normal(0.02)
    embed = nn.Embed(
      c.vocab_size, c.embed_dim, dtype=c.dtype, embedding_init=init, name='embed'
    )
    policy = _REMAT[c.remat]
    block = nn.remat(Block, prevent_cse=False, policy=policy) if policy else Block
    layers = nn.scan(
      block,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
      length=c.num_layers,
      unroll=c.num_layers if c.num_layers <= UNROLLED_LAYERS else 1,
    )
    angles = _rope_angles(positions_BT, c)
    if self.is_initializing() or sharding.active_mesh() is None:
      x_BTD = embed(tokens_BT)
    else:
      x_BTD = sharded_params.look_up(embed.embedding.astype(c.dtype), tokens_BT)
    x_BTD = _scale_embeddings(x_BTD, c)
    segments = (segment_ids_BT, ends_BT)
    x_BTD, _ = layers(c, name='layers')(x_BTD, positions_BT, angles, segments)
    x_BTD = RMSNorm(c, name='final_norm')(x_BTD)
    if self.is_initializing() and not c.tie_embeddings:
      nn.Dense(c.vocab_size, use_bias=False, kernel_init=init, name='lm_head')(x_BTD)
    return x_BTD


def init(config: DecoderConfig, key: Array) -> Params:
  """Random float32 parameters."""
  one = jnp.zeros((1, 1), jnp.int32)
  return dict(Decoder(config).init(key, one, one, one)['params'])


def add_value_head(params: Params) -> Params:
  """Adds a critic's value head of zeros, on the mesh that is set: V = 0 everywhere."""
  dim = params['embed']['embedding'].shape[1]
  head = lambda: {'value_head': {'kernel': jnp.zeros((dim, 1)), 'bias': jnp.zeros(1)}}
  return params | sharding.init_sharded(head)


def hidden(
  params: Params,
  config: DecoderConfig,
  tokens: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
  segment_ids: Int[Array, 'B T'] | None,
  ends: Int[Array, 'B T'] | None = None,
) -> Float[Array, 'B T D']:
  """Final hidden states of packed rows; position t sees tokens <= t of its segment.

  In rows of trees, which have `ends` in place of segment_ids, it sees those of its path.
  """
  params = sharded_params.constrain_params(params)
  x: Any = Decoder(config).apply({'params': params}, tokens, positions, segment_ids, ends)
  return x


def empty_cache(config: DecoderConfig, rows: int, slots: int) -> Cache:
  """A zero cache: one (k, v) pair a layer, each [rows, K, slots, H]."""
  shape = (rows, config.num_kv_heads, slots, config.head_dim)
  zeros = functools.partial(jnp.zeros, shape, config.dtype)
  return tuple((zeros(), zeros()) for _ in range(config.num_layers))


def extend(
  params: Params,
  config: DecoderConfig,
  tokens: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
  cache: Cache,
) -> tuple[Float[Array, 'B T D'], Cache]:
  """Writes tokens at their positions and returns their final hidden states.

  A token whose position is at or past the last slot is computed but not written.
  """
  x: Any = params['embed']['embedding'].astype(config.dtype)[tokens]
  x = _scale_embeddings(x, config)
  angles = _rope_angles(positions, config)
  new_cache = []
  for layer, layer_cache in zip(params['layers'], cache, strict=True):
    block = {'params': layer}
    x, layer_cache = Block(config).apply(block, x, positions, angles, None, layer_cache)
    new_cache.append(layer_cache)
  x = RMSNorm(config).apply({'params': params['final_norm']}, x)
  return x, tuple(new_cache)


def head_kernel(params: Params, config: DecoderConfig) -> Float[Array, 'D V']:
  """The output layer's kernel in config.dtype; with tied embeddings, their transpose."""
  if config.tie_embeddings:
    return params['embed']['embedding'].T.astype(config.dtype)
  return params['lm_head']['kernel'].astype(config.dtype)


@jax.named_scope('head')
def logits(params: Params, config: DecoderConfig, x: Float[Array, '*B D']) -> Array:
  """Unnormalised next-token scores, float32 [*B, V]."""
  kernel_DV = head_kernel(params, config)
  return jnp.matmul(x, kernel_DV, preferred_element_type=jnp.float32)


def values(params: Params, x: Float[Array, '*B D']) -> Float[Array, '*B']:
  """The critic's value of the state after each position, float32."""
  head = params['value_head']
  kernel, bias = head['kernel'][:, 0], head['bias'][0]
  return jnp.matmul(x.astype(jnp.float32), kernel.astype(jnp.float32)) + bias
