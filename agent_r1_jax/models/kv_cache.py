"""The key-value cache: what each layer keeps of the tokens, and how it is written.

With the numbers 'int8' (config.engine.cache), keys and values have 8 bits, and each slot
of each head has a scale, its largest number divided by 127. k ≈ keys · scale, so that
q · k = (q · keys) · scale: attention multiplies scores by the scales of keys, and weights
by those of values, and nothing of the cache's size is written in a wider type.

Keys are rounded after their rotation, when they are written, and never again. A chunk of
a prefill reads its own rounded keys, as later tokens do.

A layer that slides needs of a text no more than its window, and may have fewer slots than
the others: a ring, in which a token takes the place of the one that many before it. Where
a call begins, the window before its first token must be there, and the call's tokens fit
behind it (engine/sizes.py and rows.py see to both).

A layer with a state (delta_net.py) keeps it in place of slots, and cannot go back: beside
the state that calls go on with, it has room for a few from earlier in the text, which
engine/rows.py chooses.

Letters: B rows, S slots of a row, T tokens, K key-value heads, H head dim, k experts of a
token. Of a layer with a state: n states of a row, U heads, Z tokens of its convolutions;
the rest as in delta_net.py.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, Int

from agent_r1_jax.models import quantization
from agent_r1_jax.models.decoder_config import DecoderConfig, LayerShape

# The numbers that keys and values may have: those of the activations, or integers.
NUMBERS = ('model', 'int8')
# The position of a token that is computed and not written.
NOWHERE = 1 << 30
# The states of a row (n): the one that calls go on with, and those that are saved.
STATES = 4
# Of keys and of values that are int8, float32 [B, K, S] each.
Scales = tuple[Array, Array]


class LayerCache(NamedTuple):
  """What a layer keeps of each slot.

  Numbers of which a slot has few are laid out with the slots last: a TPU would fill a
  last axis of k, or of K, up to 128.
  """

  # [B, K, S, H] of the model's dtype, or int8; None where an earlier layer's are read.
  keys: Any
  values: Any
  # The experts that have computed each slot; None where there are none.
  experts: Int[Array, 'B k S'] | None = None
  scales: Scales | None = None


class StateCache(NamedTuple):
  """What a layer with a state keeps of each row; its first state is that of now."""

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
    rows: Texts (B).
    slots: The most tokens of a text (S).
    numbers: One of NUMBERS.
    window_slots: The slots of a layer that slides; as many as others have by default.
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
  """Of all tokens: the learner takes the same (engine.read_routes)."""
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
  """Writes keys and values to the tokens' slots, none past the last.

  The layer of a ring slides; there, only tokens NOWHERE are past the last slot.
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
  """Which of a row's states (n) a call reads and writes; n stands for none."""

  begin: Int[Array, 'B']  # It goes on from this one.
  keep: Int[Array, 'B'] | None = None  # It first copies it here,
  save: Int[Array, 'B'] | None = None  # and in the end that of now here.


def resume(cache: Cache, slots: Slots | None) -> Cache:
  """Makes states those of now, and keeps copies, in layers that have states."""
  if slots is None:
    return cache

  def take(x):
    index = slots.begin.reshape(-1, *[1] * (x.ndim - 1))
    return x.at[:, :, :1].set(jnp.take_along_axis(x, index, axis=2))

  return save(tuple(_change_states(layer, take) for layer in cache), slots.keep)


def save(cache: Cache, slot_B: Int[Array, 'B'] | None) -> Cache:
  """Copies the state of now to another place of each row's."""
  if slot_B is None:
    return cache

  def put(x):
    return x.at[jnp.arange(len(x)), :, slot_B].set(x[:, :, 0], mode='drop')

  return tuple(_change_states(layer, put) for layer in cache)


def take_now(cache: Cache) -> Cache:
  """Leaves out the copies of states, which a loop of calls would copy at each."""
  return tuple(_change_states(layer, lambda x: x[:, :, :1]) for layer in cache)


def put_now(cache: Cache, now: Cache) -> Cache:
  """Returns what calls have made of `take_now`, with the copies of `cache`."""

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
  """Finds which position each slot of a ring holds, after these tokens are written.

  It is below 0 where the text has none for it.
  """
  last_B1 = jnp.where(positions_BT < NOWHERE, positions_BT, -1).max(1, keepdims=True)
  return last_B1 - (last_B1 - jnp.arange(slots)[None]) % slots


def round_heads(
  x: Float[Array, '*B H'],
) -> tuple[Int[Array, '*B H'], Float[Array, '*B']]:
  """Rounds each head of each token to int8, and returns the scales too."""
  values_HB, scale_1B = quantization.quantize(jnp.moveaxis(x, -1, 0), 1, 'int8')
  return jnp.moveaxis(values_HB, 0, -1), scale_1B[0]


def write_experts(
  cache: LayerCache | StateCache,
  expert_BTk: Int[Array, 'B T k'],
  positions_BT: Int[Array, 'B T'],
) -> LayerCache | StateCache:
  """Writes the experts of tokens likewise."""
  assert cache.experts is not None
  taken_BTk = expert_BTk.astype(cache.experts.dtype)
  return cache._replace(experts=_write_slots(cache.experts, taken_BTk, positions_BT))


def _write_slots(cache_BKSH: Array, x_BTKH: Array, positions_BT: Array) -> Array:
  """Writes tokens to their slots, none past the last; there may be no H."""
  B, K = cache_BKSH.shape[:2]
  # Each head has an index. If the heads were a slice, a TPU's compiler would lay them out
  # behind the slots, and copy the whole cache for the kernel that reads it.
  rows_B11, heads_11K = jnp.arange(B)[:, None, None], jnp.arange(K)[None, None]
  where = rows_B11, heads_11K, positions_BT[..., None]
  return cache_BKSH.at[where].set(x_BTKH, mode='drop')
