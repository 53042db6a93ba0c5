"""Attention over packed rows in blocks that stay in a CPU's caches.

A block of queries reads in turn the blocks of keys that any of its queries sees, skipping
other segments, later tokens and other branches of a tree. As in FlashAttention (arXiv
2205.14135), the softmax is accumulated over blocks and the backward pass recomputes the
scores, so that no array has T x T numbers.

Letters as in attention.py, and: U tokens of a block, A blocks of a row, Z = B A blocks of
all rows, M = G U queries of a block per key-value head.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

# Tokens per block. With 128 the gradient of a small model takes as long or longer.
_BLOCK = 64
_HIDDEN = float(jnp.finfo(jnp.float32).min)


def find_ends(segment_ids: Int[Array, 'B T']) -> Int[Array, 'B T']:
  """Finds the column after each token's segment; a padding token ends with itself."""
  T = segment_ids.shape[1]
  after_1T = jnp.arange(1, T + 1)[None]
  changes_BT = segment_ids[:, 1:] != segment_ids[:, :-1]
  last_BT = jnp.pad(changes_BT, ((0, 0), (0, 1)), constant_values=True)
  ends_BT = jax.lax.cummin(jnp.where(last_BT, after_1T, T), axis=1, reverse=True)
  return jnp.where(segment_ids > 0, ends_BT, after_1T)


class Reach(NamedTuple):
  """How far tokens see in a layer with a sliding window, [B, T] each."""

  positions: Array  # The tokens' positions in their sequences.
  since: Array  # The first position that each token attends to.
  # The column after the last that each token attends to; None for its own.
  until: Array | None = None


class _Spans(NamedTuple):
  """The limits of the keys that tokens see, in blocks [B, A, U]."""

  ends: Array
  reach: Reach | None


def attend(*inputs: Any) -> Float[Array, 'B T N H']:
  """Computes only the outputs of `attend_and_sum`."""
  return attend_and_sum(*inputs)[0]


def attend_and_sum(
  q_BTNH: Float[Array, 'B T N H'],
  k_BTKH: Float[Array, 'B T K H'],
  v_BTKH: Float[Array, 'B T K H'],
  ends_BT: Int[Array, 'B T'],
  reach: Reach | None = None,
  cap: float | None = None,
) -> tuple[Float[Array, 'B T N H'], Float[Array, 'B T N']]:
  """Attends from position t to each position s with s <= t < ends[s].

  With `reach`, s must also be at or after the first position that t reaches, and may be
  later than t; a cap c turns a score x into c · tanh(x / c). Also returns ln Σ
  exp(scores) over visible keys.
  """
  B, T, N, H = q_BTNH.shape
  K = k_BTKH.shape[2]
  spans: Any = jax.tree.map(_split, _Spans(ends_BT, reach))
  Z, U = B * spans.ends.shape[1], spans.ends.shape[2]
  q_ZUKGH = _split(q_BTNH * H**-0.5).reshape(Z, U, K, N // K, H)
  q_ZKMH = jnp.transpose(q_ZUKGH, (0, 2, 3, 1, 4)).reshape(Z, K, -1, H)
  k_ZKUH, v_ZKUH = (
    jnp.swapaxes(_split(x).reshape(Z, U, K, H), 1, 2) for x in (k_BTKH, v_BTKH)
  )
  out: Any = _attend(q_ZKMH, k_ZKUH, v_ZKUH, spans, cap)
  out_ZKGUH, lse_ZKGU = (x.reshape(Z, K, N // K, U, *x.shape[3:]) for x in out)
  out_BTNH = jnp.transpose(out_ZKGUH, (0, 3, 1, 2, 4)).reshape(B, -1, N, H)[:, :T]
  return out_BTNH, jnp.transpose(lse_ZKGU, (0, 3, 1, 2)).reshape(B, -1, N)[:, :T]


def _split(x: Array) -> Array:
  """Splits rows into blocks, [B, T, ...] to [B, A, U, ...].

  The padding of the last block comes after the row's tokens, which do not see it.
  """
  B, T = x.shape[:2]
  U = min(_BLOCK, T)
  x = jnp.pad(x, ((0, 0), (0, -T % U)) + ((0, 0),) * (x.ndim - 2))
  return x.reshape(B, -1, U, *x.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
  q_ZKMH, k_ZKUH, v_ZKUH, spans, cap
) -> tuple[Float[Array, 'Z K M H'], Float[Array, 'Z K M']]:
  return _forward(q_ZKMH, k_ZKUH, v_ZKUH, spans, cap)[0]


def _forward(q_ZKMH, k_ZKUH, v_ZKUH, spans, cap):
  Z, K, M, H = q_ZKMH.shape
  keys_ZA, count_Z = _list_visible(spans)

  def attend_block(z, carry):
    out_ZKMH, lse_ZKM = carry

    def add_keys(j, carry):
      most_KM, sum_KM, out_KMH = carry
      y = keys_ZA[z, j]
      scores_KMU, _ = _scores(q_ZKMH, k_ZKUH, spans, z, y, cap)
      new_KM = jnp.maximum(most_KM, scores_KMU.max(-1))
      p_KMU, before_KM = (
        jnp.exp(scores_KMU - new_KM[..., None]),
        jnp.exp(most_KM - new_KM),
      )
      out_KMH = out_KMH * before_KM[..., None] + _dot('kmu,kuh->kmh', p_KMU, v_ZKUH[y])
      return new_KM, sum_KM * before_KM + p_KMU.sum(-1), out_KMH

    zeros_KM = jnp.zeros((K, M))
    begin = zeros_KM + _HIDDEN, zeros_KM, jnp.zeros((K, M, H))
    most_KM, sum_KM, out_KMH = jax.lax.fori_loop(0, count_Z[z], add_keys, begin)
    out_ZKMH = _put(out_ZKMH, out_KMH / sum_KM[..., None], z)
    return out_ZKMH, _put(lse_ZKM, most_KM + jnp.log(sum_KM), z)

  begin = jnp.zeros_like(q_ZKMH), jnp.zeros((Z, K, M))
  out_ZKMH, lse_ZKM = jax.lax.fori_loop(0, Z, attend_block, begin)
  return (out_ZKMH, lse_ZKM), (q_ZKMH, k_ZKUH, v_ZKUH, spans, out_ZKMH, lse_ZKM)


def _backward(cap, saved, gradients):
  q_ZKMH, k_ZKUH, v_ZKUH, spans, out_ZKMH, lse_ZKM = saved
  keys_ZA, count_Z = _list_visible(spans)
  dout_ZKMH, dlse_ZKM = gradients
  # d score = p (d p - Σ p d p + d lse), and the sum over all keys is out · d out.
  sum_ZKM = (dout_ZKMH.astype(jnp.float32) * out_ZKMH).sum(-1) - dlse_ZKM

  def differentiate_block(z, carry):
    dq_ZKMH, *dkv = carry

    def add_keys(j, carry):
      dq_KMH, dk_ZKUH, dv_ZKUH = carry
      y = keys_ZA[z, j]
      scores_KMU, slope_KMU = _scores(q_ZKMH, k_ZKUH, spans, z, y, cap)
      p_KMU = jnp.exp(scores_KMU - lse_ZKM[z][..., None])
      dp_KMU = _dot('kmh,kuh->kmu', dout_ZKMH[z], v_ZKUH[y])
      dscores_KMU = p_KMU * (dp_KMU - sum_ZKM[z][..., None]) * slope_KMU
      dv_KUH = dv_ZKUH[y] + _dot('kmu,kmh->kuh', p_KMU, dout_ZKMH[z])
      dk_KUH = dk_ZKUH[y] + _dot('kmu,kmh->kuh', dscores_KMU, q_ZKMH[z])
      dq_KMH += _dot('kmu,kuh->kmh', dscores_KMU, k_ZKUH[y])
      return dq_KMH, _put(dk_ZKUH, dk_KUH, y), _put(dv_ZKUH, dv_KUH, y)

    begin = jnp.zeros(q_ZKMH.shape[1:]), *dkv
    dq_KMH, *dkv = jax.lax.fori_loop(0, count_Z[z], add_keys, begin)
    return _put(dq_ZKMH, dq_KMH, z), *dkv

  # Sums over several blocks are float32 for every dtype of the keys.
  begin = jnp.zeros_like(q_ZKMH), *(jnp.zeros(x.shape) for x in (k_ZKUH, v_ZKUH))
  dq_ZKMH, dk_ZKUH, dv_ZKUH = jax.lax.fori_loop(
    0, len(q_ZKMH), differentiate_block, begin
  )
  return dq_ZKMH, dk_ZKUH.astype(k_ZKUH.dtype), dv_ZKUH.astype(v_ZKUH.dtype), None


_attend.defvjp(_forward, _backward)


def find_seen(ends_BAU: Int[Array, 'B A U']) -> Bool[Array, 'B A A']:
  """Finds the blocks of keys (last axis) that each block of queries sees.

  A block always sees itself, so that every softmax has a sum above 0, even for padding.
  """
  _, A, U = ends_BAU.shape
  begins_A, last_BA = jnp.arange(0, A * U, U), ends_BAU.max(-1)
  earlier_AA = begins_A[None] < begins_A[:, None]
  sees_BAA = earlier_AA[None] & (last_BA[:, None] > begins_A[None, :, None])
  return sees_BAA | jnp.eye(A, dtype=bool)[None]


def _list_visible(spans: _Spans) -> tuple[Int[Array, 'Z A'], Int[Array, 'Z']]:
  """Lists the blocks of keys that each block of queries sees, and counts them.

  Entries after the count are not seen.
  """
  B, A, _ = spans.ends.shape
  sees_BAA = find_seen(spans.ends)
  if spans.reach and spans.reach.until is not None:
    begins_A = jnp.arange(A) * spans.ends.shape[2]
    sees_BAA |= (begins_A[None] > begins_A[:, None])[None] & (
      spans.reach.until.max(-1)[..., None] > begins_A[None, None]
    )
  if spans.reach:
    last_BA, first_BA = spans.reach.positions.max(-1), spans.reach.since.min(-1)
    sees_BAA &= last_BA[:, None] >= first_BA[..., None]
  keys_BAA = jnp.argsort(~sees_BAA, axis=-1, stable=True)
  keys_BAA += A * jnp.arange(B)[:, None, None]
  return keys_BAA.reshape(B * A, A), sees_BAA.sum(-1).reshape(-1)


def _scores(q_ZKMH, k_ZKUH, spans: _Spans, z, y, cap):
  """Computes the scores of the queries of block z and the keys of block y of its row.

  Returns:
    The scores [K, M, U], and the slope of the cap, or 1.
  """
  _, A, U = spans.ends.shape
  _, K, M, _ = q_ZKMH.shape
  scores_KMU, slope_KMU = _dot('kmh,kuh->kmu', q_ZKMH[z], k_ZKUH[y]), 1.0
  if cap is not None:
    tanh_KMU = jnp.tanh(scores_KMU / cap)
    scores_KMU, slope_KMU = cap * tanh_KMU, 1.0 - jnp.square(tanh_KMU)
  queries_U1 = (z % A * U + jnp.arange(U))[:, None]
  keys_1U = (y % A * U + jnp.arange(U))[None]
  block = lambda x_BAU, z: x_BAU.reshape(-1, U)[z]
  sees_UU = keys_1U <= queries_U1
  if spans.reach and spans.reach.until is not None:
    sees_UU |= keys_1U < block(spans.reach.until, z)[:, None]
  sees_UU &= queries_U1 < block(spans.ends, y)[None]
  if spans.reach:
    first_U1 = block(spans.reach.since, z)[:, None]
    sees_UU &= block(spans.reach.positions, y)[None] >= first_U1
  scores_KGUU = scores_KMU.reshape(K, M // U, U, U)
  scores_KGUU = jnp.where(sees_UU[None, None], scores_KGUU, _HIDDEN)
  return scores_KGUU.reshape(K, M, U), slope_KMU


def _dot(form: str, x: Array, y: Array) -> Array:
  """Multiplies numbers of y's dtype; the sums are float32."""
  return jnp.einsum(form, x.astype(y.dtype), y, preferred_element_type=jnp.float32)


def _put(x: Array, block: Array, z: Array) -> Array:
  """Replaces block z."""
  return jax.lax.dynamic_update_index_in_dim(x, block.astype(x.dtype), z, 0)
