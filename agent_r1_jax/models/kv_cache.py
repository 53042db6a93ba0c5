"""The key-value cache: its contents per layer, and how they are written.

With config.engine.cache='int8', keys and values have 8 bits, and each slot of each head
has a scale: the largest magnitude divided by 127. k ≈ keys · scale, so q · k =
(q · keys) · scale: attention multiplies scores by the keys' scales and weights by the
values' scales, and nothing of the cache's size is written in a wider type.

Keys are rounded once, after their rotation, when they are written. A prefill chunk reads
its own rounded keys, as later tokens do.

A sliding layer needs only its window of a sequence, and may have fewer slots than other
layers: a ring, in which each token overwrites the token that many positions before it.
When a call begins, the ring must hold the window before the call's first token and have
room for the call's tokens (engine/sizes.py and engine/rows.py ensure both).

A recurrent layer (delta_net.py) has a state instead of slots and cannot rewind: besides
the current state it has room for a few copies from earlier in the sequence, which
engine/rows.py chooses.

Letters: B rows, S slots of a row, T tokens, K key-value heads, H head dim, k experts of a
token. In a recurrent layer: n states of a row, U heads, Z tokens of its convolutions; the
rest as in delta_net.py.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, Int

from agent_r1_jax.models import quantization
from agent_r1_jax.models.decoder_config import DecoderConfig, LayerShape

# The formats of keys and values: the activations' dtype, or integers.
NUMBERS = ('model', 'int8')
# The position of a token that is computed and not written.
NOWHERE = 1 << 30
# The states of a row (n): the current state, and saved copies.
STATES = 4
# Scales of int8 keys and of int8 values, float32 [B, K, S] each.
Scales = tuple[Array, Array]


class LayerCache(NamedTuple):
  """The cache of one attention layer.

  Experts and scales have the slots last, because a TPU would pad a last axis of k, or of
  K, to 128.
  """

  # [B, K, S, H] in the model's dtype or int8; None in a layer that reads an earlier
  # layer's.
  keys: Any
  values: Any
  # The experts that computed each slot; None in a dense model.
  experts: Int[Array, 'B k S'] | None = None
  scales: Scales | None = None


class StateCache(NamedTuple):
  """The cache of one recurrent layer; state 0 of each row is the current one."""

  states: Float[Array, 'B U n X Y']  # float32.
  # The last inputs of the convolutions of queries, keys and values, each
  # [B, heads, n, Z - 1, numbers].
  windows: tuple[Array, Array, Array]
  experts: Int[Array, 'B k S'] | None = None  # As in LayerCache.


Cache = tuple[LayerCache | StateCache, ...]


def empty(
  config: DecoderConfig,
  rows: int,
  slots: int,
  numbers: str = 'model',
  window_slots: int | None = None,
) -> Cache:
  """Makes a cache of zeros.

  Args:
    config: The model's shape.
    rows: Number of sequences (B).
    slots: Most tokens of a sequence (S).
    numbers: One of NUMBERS.
    window_slots: Slots of a sliding layer, by default as many as other layers have.
  """
  ring = slots if window_slots is None else min(window_slots, slots)
  layer = functools.partial(_empty_layer, config, rows, slots, numbers)
  sliding = config.sliding or (False,) * config.num_layers
  return tuple(
    _empty_states(config, rows, slots)
    if shape.recurs
    else layer(ring if slides else slots, shape)
    for slides, shape in zip(sliding, config.layer_shapes, strict=True)
  )


def _empty_states(c: DecoderConfig, rows: int, slots: int) -> StateCache:
  zeros = lambda heads, *rest, dtype: jnp.zeros((rows, heads, STATES, *rest), dtype)
  window = lambda heads, numbers: zeros(heads, c.conv_width - 1, numbers, dtype=c.dtype)
  key, value = (
    (c.linear_key_heads, c.linear_key_dim),
    (c.linear_value_heads, c.linear_value_dim),
  )
  states = zeros(value[0], key[1], value[1], dtype=jnp.float32)
  windows = window(*key), window(*key), window(*value)
  return StateCache(states, windows, _empty_experts(c, rows, slots))


def _empty_experts(c: DecoderConfig, rows: int, slots: int) -> Array | None:
  """Makes room for every token's experts: the learner replays them (read_routes)."""
  dtype = jnp.int8 if c.num_experts <= 128 else jnp.int16
  return jnp.zeros((rows, c.experts_per_token, slots), dtype) if c.num_experts else None


def _empty_layer(
  c: DecoderConfig,
  rows: int,
  slots: int,
  numbers: str,
  layer_slots: int,
  shape: LayerShape,
) -> LayerCache:
  if shape.shares:
    return LayerCache(None, None, _empty_experts(c, rows, slots))
  zeros = lambda heads, *rest, dtype: jnp.zeros((rows, heads, layer_slots, *rest), dtype)
  rounds, (K, H) = numbers == 'int8', c.get_heads(shape.sees_all)
  head = jnp.int8 if rounds else c.dtype
  scale = lambda: zeros(K, dtype=jnp.float32)
  return LayerCache(
    zeros(K, H, dtype=head),
    zeros(K, H, dtype=head),
    _empty_experts(c, rows, slots),
    (scale(), scale()) if rounds else None,
  )


def write(
  cache: LayerCache,
  k_BTKH: Float[Array, 'B T K H'],
  v_BTKH: Float[Array, 'B T K H'],
  positions_BT: Int[Array, 'B T'],
  slides: bool = False,
) -> LayerCache:
  """Writes keys and values to the tokens' slots; tokens past the last are dropped.

  A sliding layer (`slides`) writes in a ring, and drops only tokens at NOWHERE.
  """
  if slides:
    S = cache.keys.shape[2]
    positions_BT = jnp.where(positions_BT < NOWHERE, positions_BT % S, S)
  put = lambda x, new: _write_slots(x, new, positions_BT)
  if cache.scales:
    (k_BTKH, k_BTK), (v_BTKH, v_BTK) = map(round_heads, (k_BTKH, v_BTKH))
    k_scale_BKS, v_scale_BKS = cache.scales
    cache = cache._replace(scales=(put(k_scale_BKS, k_BTK), put(v_scale_BKS, v_BTK)))
  return cache._replace(keys=put(cache.keys, k_BTKH), values=put(cache.values, v_BTKH))


class Slots(NamedTuple):
  """The indices of a row's states that a call reads and writes; n stands for none."""

  begin: Int[Array, 'B']  # The state that the call continues from.
  keep: Int[Array, 'B'] | None = None  # Where the call first copies that state.
  save: Int[Array, 'B'] | None = None  # Where the call copies the state at its end.


def resume(cache: Cache, slots: Slots | None) -> Cache:
  """Makes `begin` the current state of each recurrent layer, and copies it to `keep`."""
  if slots is None:
    return cache

  def take(x):
    index = slots.begin.reshape(-1, *[1] * (x.ndim - 1))
    return x.at[:, :, :1].set(jnp.take_along_axis(x, index, axis=2))

  return save(tuple(_change_states(layer, take) for layer in cache), slots.keep)


def save(cache: Cache, slot_B: Int[Array, 'B'] | None) -> Cache:
  """Copies each row's current state to another of its places."""
  if slot_B is None:
    return cache

  def put(x):
    return x.at[jnp.arange(len(x)), :, slot_B].set(x[:, :, 0], mode='drop')

  return tuple(_change_states(layer, put) for layer in cache)


def take_now(cache: Cache) -> Cache:
  """Drops saved copies of states, which a loop would otherwise copy at every call."""
  return tuple(_change_states(layer, lambda x: x[:, :, :1]) for layer in cache)


def put_now(cache: Cache, now: Cache) -> Cache:
  """Returns `now`, which calls have updated since `take_now`, with the saved copies."""

  def put(layer, new):
    if isinstance(layer, LayerCache):
      return new
    old = layer.states, layer.windows
    set_ = lambda x, y: x.at[:, :, :1].set(y)
    states, windows = jax.tree.map(set_, old, (new.states, new.windows))
    return new._replace(states=states, windows=windows)

  return tuple(map(put, cache, now))


def _change_states(layer: LayerCache | StateCache, change) -> LayerCache | StateCache:
  if isinstance(layer, LayerCache):
    return layer
  states, windows = jax.tree.map(change, (layer.states, layer.windows))
  return layer._replace(states=states, windows=windows)


def find_held(positions_BT: Int[Array, 'B T'], slots: int) -> Int[Array, 'B S']:
  """Finds the position that each slot of a ring holds after these tokens are written.

  A slot that holds no token has a position below 0.
  """
  last_B1 = jnp.where(positions_BT < NOWHERE, positions_BT, -1).max(1, keepdims=True)
  return last_B1 - (last_B1 - jnp.arange(slots)[None]) % slots


def round_heads(
  x: Float[Array, '*B H'],
) -> tuple[Int[Array, '*B H'], Float[Array, '*B']]:
  """Rounds each head of each token to int8; returns integers and scales."""
  values_HB, scale_1B = quantization.quantize(jnp.moveaxis(x, -1, 0), 1, 'int8')
  return jnp.moveaxis(values_HB, 0, -1), scale_1B[0]


def write_experts(
  cache: LayerCache | StateCache,
  expert_BTk: Int[Array, 'B T k'],
  positions_BT: Int[Array, 'B T'],
) -> LayerCache | StateCache:
  """Writes the tokens' experts, as `write` does keys; recurrent layers have them too."""
  assert cache.experts is not None
  taken_BTk = expert_BTk.astype(cache.experts.dtype)
  return cache._replace(experts=_write_slots(cache.experts, taken_BTk, positions_BT))


def _write_slots(cache_BKSH: Array, x_BTKH: Array, positions_BT: Array) -> Array:
  """Writes tokens to their slots, dropping any past the last; H may be missing."""
  B, K = cache_BKSH.shape[:2]
  # Heads are indexed explicitly. With a slice, the TPU compiler would lay heads out after
  # slots, and copy the whole cache for the kernel that reads it.
  rows_B11, heads_11K = jnp.arange(B)[:, None, None], jnp.arange(K)[None, None]
  where = rows_B11, heads_11K, positions_BT[..., None]
  return cache_BKSH.at[where].set(x_BTKH, mode='drop')
