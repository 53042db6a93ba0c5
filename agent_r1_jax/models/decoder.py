"""One functional decoder for all families of families.py.

Parameters are a plain dict whose layer leaves are stacked over L; the cache is an
argument and a result. The same Block computes training (packed rows, layers scanned) and
generation (cached rows, layers unrolled, because a scanned cache would be copied at every
layer).

Letters: B rows (packed, or of the cache), T query tokens, S key slots, L layers, D embed,
F feed-forward, N query heads, K key-value heads, G = N / K, H head dim, V vocabulary.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.models import (
  attention,
  delta_net,
  experts,
  head,
  kv_cache,
  mixed_layers,
  rope,
  sharded_params,
  sharding,
)
from agent_r1_jax.models import rows as rows_lib
from agent_r1_jax.models.decoder_config import DecoderConfig, layer_kinds
from agent_r1_jax.models.layers import (
  MLP,
  Projection,
  RMSNorm,
  apply_flat,
  scan_layers,
)
from agent_r1_jax.models.pictures import vision

Params = dict[str, Any]
# Queries [B, T, N, H], keys and values [B, T, K, H] -> what is attended to [B, T, N, H].
Attend = Callable[[Array, Array, Array], Array]


def _clamped_swiglu(gate: Array, up: Array) -> Array:
  """That of gpt-oss: large numbers are cut off, and the linear part begins at 1."""
  gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
  return gate * nn.sigmoid(1.702 * gate) * (up + 1.0)


# (gate, up) -> the inputs of a feed-forward's last product.
_ACTIVATIONS = {
  'silu': lambda gate, up: nn.silu(gate) * up,
  'gelu_pytorch_tanh': lambda gate, up: nn.gelu(gate) * up,
  'clamped_swiglu': _clamped_swiglu,
}


def compute_angles(rows: types.Rows, c: DecoderConfig) -> tuple[Array, Array]:
  """Sin and cos [R, B, T, 1, P] of all rotations that layers have."""
  size = int(c.head_dim * c.rope_fraction)
  frequencies = functools.partial(rope.frequencies, size=size)
  factor = (c.rope_scaling or {}).get('attention_factor', 1.0)
  rotations = [(frequencies(c.rope_theta, scaling=c.rope_scaling), factor)]
  if c.local_rope_theta is not None:
    rotations.append((frequencies(c.local_rope_theta), 1.0))
  if any(c.nope):
    rotations.append((jnp.zeros(size // 2), 1.0))
  coordinates_BT3 = rows_lib.get_coordinates(rows)
  if coordinates_BT3 is None or not c.mrope_section:
    return rope.compute_angles(rows.positions, rotations)
  axes_P = np.repeat(np.arange(3), c.mrope_section)
  return rope.compute_angles(coordinates_BT3[..., axes_P], rotations)


def scale_embeddings(x_BTD: Array, config: DecoderConfig) -> Array:
  """Multiplies embeddings by sqrt(D) where a family does; rounds as transformers does."""
  scale = jnp.asarray(config.embed_dim**0.5, x_BTD.dtype)
  return x_BTD * scale if config.facts.scaled_embeddings else x_BTD


def _norm(c: DecoderConfig, name: str | None = None, axes: int = 1) -> RMSNorm:
  return RMSNorm(c.norm_eps, c.facts.norm_offset, axes, name=name)


class Attention(nn.Module):
  """Grouped-query attention with RoPE; biases and q/k norms as the family has them.

  `attend`, a function of queries, keys and values, replaces the products of attention.
  """

  config: DecoderConfig
  attend: Attend | None = None

  @nn.compact
  def __call__(self, x_BTD, rows, angles, kind, cache):
    """Attends to what rows see, or to the cache where there is one; returns it too."""
    c, has = self.config, self.config.facts.has
    project = functools.partial(Projection, dtype=c.dtype, use_bias=has('attn/q/bias'))
    # The engine's kernel of the queries has one axis for all heads; see
    # engine_params.unstack.
    flat = (c.num_heads * c.query_dim,)
    heads = flat if cache is not None else (c.num_heads, c.query_dim)
    q_BTNH = apply_flat(project(heads, name='q'), x_BTD)
    q_BTNH = q_BTNH.reshape(*x_BTD.shape[:2], c.num_heads, c.query_dim)
    gate_BTNH = None
    if c.facts.gates:
      q_BTNH, gate_BTNH = jnp.split(q_BTNH, 2, axis=-1)
    k_BTKH = apply_flat(project((c.num_kv_heads, c.head_dim), name='k'), x_BTD)
    v_BTKH = apply_flat(project((c.num_kv_heads, c.head_dim), name='v'), x_BTD)
    for name, axes in (('norm', 1), ('norm_of_all', 2)):
      if has(f'attn/q_{name}/scale'):
        q_BTNH = _norm(c, f'q_{name}', axes)(q_BTNH)
        k_BTKH = _norm(c, f'k_{name}', axes)(k_BTKH)
    angles = jax.tree.map(lambda x: x[kind.rotation if kind else 0], angles)
    q_BTNH, k_BTKH = rope.rotate(q_BTNH, angles), rope.rotate(k_BTKH, angles)
    if c.query_scale:
      q_BTNH *= math.sqrt(c.head_dim / c.query_scale)
    rules = attention.Rules(c.window, c.attention_cap)
    sinks_N = None
    if has('attn/sinks'):
      sinks_N = self.param('sinks', nn.initializers.zeros, (c.num_heads,))
      sinks_N = sinks_N.astype(c.dtype)  # As the engine has them.
    if self.is_initializing():  # It has no parameters; no mesh can split one token.
      out_BTNH: Any = q_BTNH
    elif self.attend:
      out_BTNH = self.attend(q_BTNH, k_BTKH, v_BTKH)
    elif cache is None:
      local = attention.Local(kind.slides, rows.positions) if c.window else None
      seen = rows.sees, local, rules, sinks_N
      out_BTNH = attention.packed(q_BTNH, k_BTKH, v_BTKH, *seen)
    else:
      slides = bool(kind and kind.slides)
      cache = kv_cache.write(cache, k_BTKH, v_BTKH, rows.positions, slides)
      rules = rules._replace(window=c.window if slides else 0)
      slots = cache.keys, cache.values, rows.positions, rules, cache.scales, sinks_N
      out_BTNH = attention.cached(q_BTNH, *slots)
    if gate_BTNH is not None:
      out_BTNH *= nn.sigmoid(gate_BTNH)
    init = nn.initializers.variance_scaling(1 / (2 * c.num_layers), 'fan_in', 'normal')
    biased = has('attn/o/bias')
    out = Projection((c.embed_dim,), c.dtype, 2, biased, init, name='o')
    return apply_flat(out, out_BTNH), cache


class Block(nn.Module):
  """One layer. `cache` is None in training, else this layer's.

  One that `recurs` has a state in place of keys and values; `kind` is this layer's, or
  None if all are alike; `route_BTk` names the experts to take,
  if they are known; `attend` is as in Attention. What is returned beside the residual
  stream is the cache, or in training the loads of the experts, if there are any.
  """

  config: DecoderConfig
  attend: Attend | None = None
  recurs: bool = False

  @nn.compact
  def __call__(self, x_BTD, rows, angles, kind, route_BTk=None, cache=None):
    """Adds attention, then the feed-forward, to the residual stream."""
    c = self.config
    normed = self._normalise('attn_norm', x_BTD)
    if self.recurs:
      out, cache = delta_net.DeltaNet(c, name='linear')(normed, rows, cache)
    else:
      attn = Attention(c, self.attend, name='attn')
      out, cache = attn(normed, rows, angles, kind, cache)
    x_BTD += self._normalise('attn_out_norm', out)
    normed = self._normalise('mlp_norm', x_BTD)
    if not c.num_experts:
      out, beside = MLP(c.mlp_dim, **self._feed_forward(), name='mlp')(normed), cache
    else:
      out, expert_BTk = self._mix_experts(normed, route_BTk)
      if cache is None:
        counts_BT = rows_lib.find_text(rows)
        beside = experts.count_loads(expert_BTk, c.num_experts, counts_BT)
      else:
        beside = kv_cache.write_experts(cache, expert_BTk, rows.positions)
    return x_BTD + self._normalise('mlp_out_norm', out), beside

  def _mix_experts(self, x_BTD: Array, route_BTk: Array | None) -> tuple[Array, Array]:
    """Computes the experts of each token, and the one that is shared, if any."""
    c = self.config
    mixture = experts.Experts(
      num_experts=c.num_experts,
      per_token=c.experts_per_token,
      expert_dim=c.expert_dim,
      normalize=c.normalize_experts,
      use_bias=c.facts.has('moe/gate/bias'),
      **self._feed_forward(),
      name='moe',
    )
    out, expert_BTk = mixture(x_BTD, route_BTk)
    if c.shared_dim:
      shared = MLP(c.shared_dim, **self._feed_forward(), name='shared')
      weight_BT1 = Projection((1,), c.dtype, name='shared_weight')(x_BTD)
      out += nn.sigmoid(weight_BT1) * shared(x_BTD)
    return out, expert_BTk

  def _feed_forward(self) -> dict[str, Any]:
    c = self.config
    activate = _ACTIVATIONS[c.facts.activation]
    return {'dtype': c.dtype, 'activate': activate, 'out_scale': 1 / (2 * c.num_layers)}

  def _normalise(self, name: str, x: Array) -> Array:
    """Applies a norm if the family has it."""
    has = self.config.facts.has(f'{name}/scale')
    return _norm(self.config, name)(x) if has else x


class Decoder(nn.Module):
  """The model over packed rows; `init` makes its parameters."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, rows):
    """Final hidden states [B, T, D]; the loads of any experts [L, E]."""
    c = self.config
    init = nn.initializers.normal(0.02)
    embed = nn.Embed(
      c.vocab_size, c.embed_dim, dtype=c.dtype, embedding_init=init, name='embed'
    )
    angles, tokens_BT = compute_angles(rows, c), rows_lib.find_vocabulary_ids(rows)
    if self.is_initializing() or sharding.active_mesh() is None:
      x_BTD = embed(tokens_BT)
    else:
      x_BTD = sharded_params.look_up(embed.embedding.astype(c.dtype), tokens_BT)
    x_BTD = rows_lib.put_features(scale_embeddings(x_BTD, c), rows)
    route_LBTk = None if rows.routes is None else jnp.moveaxis(rows.routes, 2, 0)
    given = x_BTD, rows_lib.leave_to_layers(rows), angles
    if c.recurrent:
      layers = mixed_layers.Layers(c, Block, name='layers')
      x_BTD, loads_LE = layers(*given, route_LBTk)
    else:
      # All layers get the same arguments, but for their kinds and routes.
      all_get = nn.broadcast
      layers = scan_layers(Block, c.remat, c.num_layers, all_get, all_get, 0, 0)
      kinds = layer_kinds(c)
      kinds = kinds and jax.tree.map(lambda *x: jnp.asarray(x), *kinds)
      x_BTD, loads_LE = layers(c, name='layers')(*given, kinds, route_LBTk)
    x_BTD = _norm(c, 'final_norm')(x_BTD)
    if self.is_initializing() and not c.tie_embeddings:
      nn.Dense(c.vocab_size, use_bias=False, kernel_init=init, name='lm_head')(x_BTD)
    return x_BTD, loads_LE


def init(config: DecoderConfig, key: Array) -> Params:
  """Random float32 parameters."""
  one = jnp.zeros((1, 1), jnp.int32)
  rows = types.Rows(one, one, types.Segments(one))
  params = dict(Decoder(config).init(key, rows)['params'])
  if config.vision:
    params['vision'] = vision.init(config, jax.random.fold_in(key, 1))
  return params


def add_value_head(params: Params) -> Params:
  """Adds a critic's value head of zeros, on the mesh that is set: V = 0 everywhere."""
  dim = params['embed']['embedding'].shape[1]
  leaves = lambda: {'kernel': jnp.zeros((dim, 1)), 'bias': jnp.zeros(1)}
  return params | sharding.init_sharded(lambda: {'value_head': leaves()})


def hidden(
  params: Params, config: DecoderConfig, rows: types.Rows
) -> Float[Array, 'B T D']:
  """Final hidden states of packed rows; a token sees those up to it of its segment.

  Where texts share prefixes (types.Tree) it sees those of its path.
  """
  return hidden_and_loads(params, config, rows)[0]


def hidden_and_loads(
  params: Params, config: DecoderConfig, rows: types.Rows
) -> tuple[Float[Array, 'B T D'], Float[Array, 'L E'] | None]:
  """Computes `hidden`, and how many tokens of the rows each expert has computed."""
  rows = rows_lib.look(params, config, rows)
  params = sharded_params.constrain_params(params)
  out: Any = Decoder(config).apply({'params': params}, rows)
  return out


def extend(
  params: Params, config: DecoderConfig, rows: types.Rows, cache: kv_cache.Cache
) -> tuple[Float[Array, 'B T D'], kv_cache.Cache]:
  """Writes tokens at their positions and returns their final hidden states.

  A token at kv_cache.NOWHERE is computed but not written; nor is one at or past the last
  slot, but by a layer that slides.
  """
  tokens = rows_lib.find_vocabulary_ids(rows)
  x: Any = params['embed']['embedding'].astype(config.dtype)[tokens]
  x = rows_lib.put_features(scale_embeddings(x, config), rows)
  angles = compute_angles(rows, config)
  kinds = layer_kinds(config) or [None] * config.num_layers
  new_cache: list[Any] = []
  for layer, kind, layer_cache in zip(params['layers'], kinds, cache, strict=True):
    variables = {'params': layer}
    if rows.adapters is not None:
      variables['adapters'] = rows.adapters.get_layer(len(new_cache))
    recurs = bool(config.recurrent) and config.recurrent[len(new_cache)]
    apply = functools.partial(Block(config, recurs=recurs).apply, variables)
    x, layer_cache = apply(x, rows, angles, kind, None, layer_cache)
    new_cache.append(layer_cache)
  x = _norm(config).apply({'params': params['final_norm']}, x)
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
  logits = jnp.matmul(x, kernel_DV, preferred_element_type=jnp.float32)
  return attention.cap_scores(logits, config.logit_cap)


def logprobs(
  params: Params,
  config: DecoderConfig,
  x: Float[Array, 'B T D'],
  tokens: Int[Array, 'B T'],
  wanted: Bool[Array, 'B T'],
  temperature: float,
) -> tuple[Float[Array, 'B T'], Float[Array, 'B T']]:
  """Log-probs of tokens and entropies, from the hidden states before each token.

  Both are 0 where a token is not `wanted`; see head.logprobs.
  """
  block = head.block_tokens(config.vocab_size)
  options = tokens, wanted, temperature, block, config.logit_cap
  return head.logprobs(x, head_kernel(params, config), *options)


def values(params: Params, x: Float[Array, '*B D']) -> Float[Array, '*B']:
  """The critic's value of the state after each position, float32."""
  leaves = params['value_head']
  kernel, bias = leaves['kernel'][:, 0], leaves['bias'][0]
  return jnp.matmul(x.astype(jnp.float32), kernel.astype(jnp.float32)) + bias
