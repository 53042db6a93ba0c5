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

# Queries [B, T, N, H], keys and values [B, T, K, H] -> attention output [B, T, N, H].
Attend = Callable[[Array, Array, Array], Array]


def _clamped_swiglu(gate: Array, up: Array) -> Array:
  """gpt-oss's SwiGLU: clips both inputs and adds 1 to the linear one."""
  gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
  return gate * nn.sigmoid(1.702 * gate) * (up + 1.0)


# (gate, up) -> the input of the down projection.
_ACTIVATIONS = {
  'silu': lambda gate, up: nn.silu(gate) * up,
  'gelu_pytorch_tanh': lambda gate, up: nn.gelu(gate) * up,
  'clamped_swiglu': _clamped_swiglu,
}


def make_norm(c: DecoderConfig, name: str | None = None, axes: int = 1) -> RMSNorm:
  """Makes the family's RMSNorm over the last `axes` axes."""
  return RMSNorm(c.norm_eps, c.facts.norm_offset, axes, name=name)


class Attention(nn.Module):
  """Grouped-query attention with RoPE, and the family's biases and q/k norms.

  `attend`, a function of queries, keys and values, replaces attention over packed rows.
  """

  config: DecoderConfig
  shape: LayerShape
  attend: Attend | None = None

  @nn.compact
  def __call__(self, x_BTD, rows, angles, kind, cache):
    """Attends within packed rows or, given a cache, to its slots.

    Returns the output with the new cache or, for packed rows, with keys and values.
    """
    c = self.config
    angles = self._choose_angles(angles, kind)
    q_BTNH, gate_BTNH = self._compute_queries(x_BTD, angles, cache is not None)
    k_BTKH: Any = None
    v_BTKH: Any = None
    if not self.shape.shares:
      k_BTKH, v_BTKH = self._compute_keys(x_BTD, angles)
    elif kind and cache is None:
      k_BTKH, v_BTKH = kind.shared
    given = q_BTNH, k_BTKH, v_BTKH
    if cache is None:
      out_BTNH, kept = self._attend_rows(*given, rows, kind), (k_BTKH, v_BTKH)
    else:
      out_BTNH, kept = self._attend_slots(*given, rows, kind, cache)
    if gate_BTNH is not None:
      out_BTNH *= nn.sigmoid(gate_BTNH)
    init = nn.initializers.variance_scaling(1 / (2 * c.num_layers), 'fan_in', 'normal')
    biased = c.facts.has('attn/o/bias')
    out = Projection((c.embed_dim,), c.dtype, 2, biased, init, name='o')
    return apply_flat(out, out_BTNH), kept

  @property
  def _head_dim(self) -> int:
    return self.config.get_heads(self.shape.sees_all)[1]

  def _choose_angles(self, angles: tuple[Array, Array], kind) -> tuple[Array, Array]:
    """Takes the sin and cos of this layer's rotation, [B, T, 1, H / 2] or fewer."""
    angles = jax.tree.map(lambda x: x[kind.rotation if kind else 0], angles)
    if self.config.full_head_dim:  # Angles are computed for the largest heads.
      angles = jax.tree.map(lambda x: x[..., : self._head_dim // 2], angles)
    return angles

  def _project(self, outputs: tuple[int, ...], name: str) -> Projection:
    biased = self.config.facts.has('attn/q/bias')
    return Projection(outputs, self.config.dtype, use_bias=biased, name=name)

  @nn.nowrap
  def _normalise(self, x: Array, name: str) -> Array:
    """Applies the family's norm of queries or keys, of each head or of all of them."""
    for kind, axes in (('norm', 1), ('norm_of_all', 2)):
      if self.config.facts.has(f'attn/{name}_{kind}/scale'):
        x = make_norm(self.config, f'{name}_{kind}', axes)(x)
    return x

  @nn.nowrap
  def _compute_queries(
    self, x_BTD: Array, angles: tuple[Array, Array], cached: bool
  ) -> tuple[Array, Array | None]:
    """Computes queries, and the gates of the attention output if the family has them."""
    c, H, N = self.config, self._head_dim, self.config.num_heads
    size = H * (2 if c.facts.gates else 1)
    # The engine's kernel of the queries has one axis for all heads; see
    # engine_params.unstack.
    q_BTNH = apply_flat(self._project((N * size,) if cached else (N, size), 'q'), x_BTD)
    q_BTNH, gate_BTNH = q_BTNH.reshape(*x_BTD.shape[:2], N, size), None
    if c.facts.gates:
      q_BTNH, gate_BTNH = jnp.split(q_BTNH, 2, axis=-1)
    q_BTNH = rope.rotate(self._normalise(q_BTNH, 'q'), angles)
    if scale := c.query_scale or c.facts.query_scale:
      q_BTNH *= math.sqrt(H / scale)
    return q_BTNH, gate_BTNH

  @nn.nowrap
  def _compute_keys(
    self, x_BTD: Array, angles: tuple[Array, Array]
  ) -> tuple[Array, Array]:
    """Computes keys and values, which are equal before the norms in some families."""
    c, heads = self.config, self.config.get_heads(self.shape.sees_all)
    k_BTKH = v_BTKH = apply_flat(self._project(heads, 'k'), x_BTD)
    if not (self.shape.sees_all and c.keys_are_values):
      v_BTKH = apply_flat(self._project(heads, 'v'), x_BTD)
    if c.facts.normalizes_values:
      v_BTKH = normalise(v_BTKH, c.norm_eps)
    return rope.rotate(self._normalise(k_BTKH, 'k'), angles), v_BTKH

  @nn.nowrap
  def _get_sinks(self) -> Array | None:
    """Returns the attention sink of each head in the engine's type, if there are any."""
    c = self.config
    if not c.facts.has('attn/sinks'):
      return None
    sinks_N = self.param('sinks', nn.initializers.zeros, (c.num_heads,))
    return sinks_N.astype(c.dtype)

  @nn.nowrap
  def _attend_rows(self, q_BTNH, k_BTKH, v_BTKH, rows, kind) -> Array:
    """Attends within packed rows, as rows.sees allows."""
    c, sinks_N, local = self.config, self._get_sinks(), None
    if (
      self.is_initializing()
    ):  # Attention has no parameters, and no mesh can split one token.
      return q_BTNH
    if self.attend:
      return self.attend(q_BTNH, k_BTKH, v_BTKH)
    if c.window and kind.slides is not False:
      ahead_BT = rows_lib.find_ahead(rows) if c.sees_ahead else None
      local = attention.Local(jnp.asarray(kind.slides), rows.positions, ahead_BT)
    rules = attention.Rules(c.window, c.attention_cap)
    return attention.packed(q_BTNH, k_BTKH, v_BTKH, rows.sees, local, rules, sinks_N)

  @nn.nowrap
  def _attend_slots(self, q_BTNH, k_BTKH, v_BTKH, rows, kind, cache):
    """Writes keys and values, unless the layer shares them, and attends to the cache."""
    c, sinks_N, slides = self.config, self._get_sinks(), bool(kind and kind.slides)
    if self.shape.shares:
      read = kind.shared
    else:
      read = cache = kv_cache.write(cache, k_BTKH, v_BTKH, rows.positions, slides)
    rules = attention.Rules(c.window if slides else 0, c.attention_cap)
    slots = read.keys, read.values, rows.positions, rules, read.scales, sinks_N
    ahead_BT = rows_lib.find_ahead(rows) if c.sees_ahead and slides else None
    return attention.cached(q_BTNH, *slots, ahead_BT), cache


class Block(nn.Module):
  """One layer of the decoder.

  `shape` lists its parts, `kind` is this layer's LayerKind (None if all layers are
  alike), `route_BTk` names the experts to use if they are known, and `cache` is this
  layer's, None in training. Returns the residual stream with the new cache or, in
  training, with the loads of any experts (and with keys and values if layers share them).
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
    """Computes the feed-forward, experts, or both; also returns each token's experts."""
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
    """Computes each token's experts, and the shared expert if there is one."""
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
