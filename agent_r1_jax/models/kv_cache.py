"""The key-value cache: what each layer keeps of the tokens, and how it is written.

Letters: B rows, S slots of a row, T tokens, K key-value heads, H head dim, k experts of a
token.
"""

from typing import NamedTuple

from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, Int

from agent_r1_jax.models.decoder_config import DecoderConfig


class LayerCache(NamedTuple):
  """What a layer keeps of each slot.

  Numbers of which a slot has few are laid out with the slots last: a TPU would fill a
  last axis of k up to 128.
  """

  keys: Float[Array, 'B K S H']
  values: Float[Array, 'B K S H']
  # The experts that have computed each slot; None where there are none.
  experts: Int[Array, 'B k S'] | None = None


Cache = tuple[LayerCache, ...]


def empty(config: DecoderConfig, rows: int, slots: int) -> Cache:
  """Makes a cache of zeros."""
  c, experts = config, None
  if c.num_experts:
    dtype = jnp.int8 if c.num_experts <= 128 else jnp.int16
    experts = (rows, c.experts_per_token, slots), dtype
  heads = (rows, c.num_kv_heads, slots, c.head_dim), c.dtype
  return tuple(
    LayerCache(jnp.zeros(*heads), jnp.zeros(*heads), experts and jnp.zeros(*experts))
    for _ in range(c.num_layers)
  )


def write(
  cache: LayerCache,
  k_BTKH: Float[Array, 'B T K H'],
  v_BTKH: Float[Array, 'B T K H'],
  positions_BT: Int[Array, 'B T'],
) -> LayerCache:
  """Writes keys and values to the tokens' slots, none past the last."""
  return cache._replace(
    keys=_write_slots(cache.keys, k_BTKH, positions_BT),
    values=_write_slots(cache.values, v_BTKH, positions_BT),
  )


def write_experts(
  cache: LayerCache, expert_BTk: Int[Array, 'B T k'], positions_BT: Int[Array, 'B T']
) -> LayerCache:
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
