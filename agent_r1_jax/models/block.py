"""One layer of the decoder, over packed rows or a cache. Letters as in decoder.py."""

from collections.abc import Callable
import math
from typing import Any

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp

from agent_r1_jax.models import (
  attention,
  delta_net,
  experts,
  kv_cache,
  layer_inputs,
  rope,
)
from agent_r1_jax.models import rows as rows_lib
from agent_r1_jax.models.decoder_config import DecoderConfig, LayerShape
from agent_r1_jax.models.layers import (
  MLP,
  Projection,
  RMSNorm,
  Scale,
  apply_flat,
  normalise,
)

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


def make_norm(c: DecoderConfig, name: str | None = None, axes: int = 1) -> RMSNorm:
  """Makes a norm of the family."""
  return RMSNorm(c.norm_eps, c.facts.norm_offset, axes, name=name)


class Attention(nn.Module):
  """Grouped-query attention with RoPE; biases and q/k norms as the family has them.

  `attend`, a function of queries, keys and values, replaces the products of attention.
  """

  config: DecoderConfig
  shape: LayerShape
  attend: Attend | None = None

  @nn.compact
  def __call__(self, x_BTD, rows, angles, kind, cache):
    """Attends to what rows see, or to the cache where there is one.

    What is returned too is the cache, or of packed rows keys and values.
    """
    c, has = self.config, self.config.facts.has
    H, query_dim = self._head_dim, self._head_dim * (2 if c.facts.gates else 1)
    # The engine's kernel of the queries has one axis for all heads; see
    # engine_params.unstack.
    flat = (c.num_heads * query_dim,)
    heads = flat if cache is not None else (c.num_heads, query_dim)
    q_BTNH = apply_flat(self._project(heads, 'q'), x_BTD)
    q_BTNH = q_BTNH.reshape(*x_BTD.shape[:2], c.num_heads, query_dim)
    gate_BTNH = None
    if c.facts.gates:
      q_BTNH, gate_BTNH = jnp.split(q_BTNH, 2, axis=-1)
    k_BTKH: Any = None
    v_BTKH: Any = None
    if not self.shape.shares:
      k_BTKH, v_BTKH = self._project_keys(x_BTD)
    elif kind and cache is None:
      k_BTKH, v_BTKH = kind.shared
    for name, axes in (('norm', 1), ('norm_of_all', 2)):
      if has(f'attn/q_{name}/scale'):
        q_BTNH = make_norm(c, f'q_{name}', axes)(q_BTNH)
        k_BTKH = k_BTKH if self.shape.shares else make_norm(c, f'k_{name}', axes)(k_BTKH)
    angles = jax.tree.map(lambda x: x[kind.rotation if kind else 0], angles)
    if c.full_head_dim:  # Those of the largest heads are longer.
      angles = jax.tree.map(lambda x: x[..., : H // 2], angles)
    q_BTNH = rope.rotate(q_BTNH, angles)
    k_BTKH = k_BTKH if self.shape.shares else rope.rotate(k_BTKH, angles)
    if scale := c.query_scale or c.facts.query_scale:
      q_BTNH *= math.sqrt(H / scale)
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
      local = None
      if c.window and kind.slides is not False:
        local = attention.Local(jnp.asarray(kind.slides), rows.positions)
      seen = rows.sees, local, rules, sinks_N
      out_BTNH = attention.packed(q_BTNH, k_BTKH, v_BTKH, *seen)
    else:
      slides = bool(kind and kind.slides)
      if not self.shape.shares:
        cache = kv_cache.write(cache, k_BTKH, v_BTKH, rows.positions, slides)
      read = kind.shared if self.shape.shares else cache
      rules = rules._replace(window=c.window if slides else 0)
      slots = read.keys, read.values, rows.positions, rules, read.scales, sinks_N
      out_BTNH = attention.cached(q_BTNH, *slots)
    if gate_BTNH is not None:
      out_BTNH *= nn.sigmoid(gate_BTNH)
    init = nn.initializers.variance_scaling(1 / (2 * c.num_layers), 'fan_in', 'normal')
    biased = has('attn/o/bias')
    out = Projection((c.embed_dim,), c.dtype, 2, biased, init, name='o')
    kept = (k_BTKH, v_BTKH) if cache is None else cache
    return apply_flat(out, out_BTNH), kept

  @property
  def _head_dim(self) -> int:
    return self.config.get_heads(self.shape.sees_all)[1]

  def _project(self, outputs: tuple[int, ...], name: str) -> Projection:
    biased = self.config.facts.has('attn/q/bias')
    return Projection(outputs, self.config.dtype, use_bias=biased, name=name)

  @nn.nowrap
  def _project_keys(self, x_BTD: Array) -> tuple[Array, Array]:
    """Computes keys, and values or the same again."""
    c, heads = self.config, self.config.get_heads(self.shape.sees_all)
    k_BTKH = v_BTKH = apply_flat(self._project(heads, 'k'), x_BTD)
    if not (self.shape.sees_all and c.keys_are_values):
      v_BTKH = apply_flat(self._project(heads, 'v'), x_BTD)
    if c.facts.normalizes_values:
      v_BTKH = normalise(v_BTKH, c.norm_eps)
    return k_BTKH, v_BTKH


class Block(nn.Module):
  """One layer. `cache` is None in training, else this layer's.

  `shape` says what it has; `kind` is this layer's, or None if all are alike; `route_BTk`
  names the experts to take, if they are known; `attend` is as in Attention. What is
  returned beside the residual stream is the cache, or in training the loads of the
  experts, if there are any; where layers share keys and values, with these.
  """

  config: DecoderConfig
  attend: Attend | None = None
  shape: LayerShape = LayerShape()

  @nn.compact
  def __call__(self, x_BTD, rows, angles, kind, route_BTk=None, cache=None):
    """Adds attention, then the feed-forward, to the residual stream."""
    c = self.config
    normed = self._normalise('attn_norm', x_BTD)
    kept: Any
    if self.shape.recurs:
      out, kept = delta_net.DeltaNet(c, name='linear')(normed, rows, cache)
    else:
      place = 'full' if self.shape.sees_all else 'attn'
      attn = Attention(c, self.shape, self.attend, name=place)
      out, kept = attn(normed, rows, angles, kind, cache)
    x_BTD += self._normalise('attn_out_norm', out)
    out, expert_BTk = self._feed_forward(x_BTD, route_BTk)
    x_BTD += self._normalise('mlp_out_norm', out)
    if c.input_dim:
      x_BTD += layer_inputs.Input(c, name='input')(x_BTD, kind and kind.inputs)
    if c.facts.has('out/scale'):  # transformers does not train it.
      scale = jax.lax.stop_gradient(Scale((1,), name='out')()).astype(x_BTD.dtype)
      x_BTD *= scale[None, None]
    x_BTD = rows_lib.add_features(x_BTD, rows, kind and kind.number)
    if cache is None:
      loads_E = None
      if expert_BTk is not None:
        counts_BT = rows_lib.find_text(rows)
        loads_E = experts.count_loads(expert_BTk, c.num_experts, counts_BT)
      return x_BTD, (loads_E, kept) if c.shared_layers else loads_E
    if expert_BTk is not None:
      kept = kv_cache.write_experts(kept, expert_BTk, rows.positions)
    return x_BTD, kept

  @nn.nowrap
  def _feed_forward(
    self, x_BTD: Array, route_BTk: Array | None
  ) -> tuple[Array, Array | None]:
    """Computes the feed-forward, experts, or both; returns each token's experts too."""
    c, normed = self.config, self._normalise('mlp_norm', x_BTD)
    if c.num_experts and not c.facts.has('mlp/gate/kernel'):
      return self._mix_experts(normed, route_BTk)
    dim, name = (2 * c.mlp_dim, 'wide_mlp') if self.shape.widens else (c.mlp_dim, 'mlp')
    out = MLP(dim, **self._list_options(), name=name)(normed)
    if not c.num_experts:
      return out, None
    normed = self._normalise('moe_norm', x_BTD)
    mixed, expert_BTk = self._mix_experts(normed, route_BTk, x_BTD)
    parts = ('mlp_part_norm', out), ('moe_part_norm', mixed)
    first, second = (self._normalise(*part) for part in parts)
    return first + second, expert_BTk

  @nn.nowrap
  def _mix_experts(
    self, x_BTD: Array, route_BTk: Array | None, routed_BTD: Array | None = None
  ) -> tuple[Array, Array]:
    """Computes the experts of each token, and the one that is shared, if any."""
    c = self.config
    mixture = experts.Experts(
      num_experts=c.num_experts,
      per_token=c.experts_per_token,
      expert_dim=c.expert_dim,
      normalize=c.normalize_experts,
      use_bias=c.facts.has('moe/gate/bias'),
      router_eps=c.norm_eps if c.facts.has('moe/router_norm/scale') else None,
      **self._list_options(),
      name='moe',
    )
    out, expert_BTk = mixture(x_BTD, route_BTk, routed_BTD)
    if c.shared_dim:
      shared = MLP(c.shared_dim, **self._list_options(), name='shared')
      weight_BT1 = Projection((1,), c.dtype, name='shared_weight')(x_BTD)
      out += nn.sigmoid(weight_BT1) * shared(x_BTD)
    return out, expert_BTk

  def _list_options(self) -> dict[str, Any]:
    c = self.config
    activate = _ACTIVATIONS[c.facts.activation]
    return {'dtype': c.dtype, 'activate': activate, 'out_scale': 1 / (2 * c.num_layers)}

  def _normalise(self, name: str, x: Array) -> Array:
    """Applies a norm if the family has it."""
    has = self.config.facts.has(f'{name}/scale')
    return make_norm(self.config, name)(x) if has else x
