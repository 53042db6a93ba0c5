"""Attention over packed rows on Hopper GPUs, in Pallas (Mosaic GPU).

cuDNN takes a mask only as a bias of T x T numbers per row. This kernel takes the end of
each key's span, as the TPU kernel does (tpu_attention.py), which covers both segments and
the paths of trees. As in FlashAttention (arXiv 2205.14135), the softmax is accumulated
over blocks, and the backward pass recomputes the scores.

Tiles (gpu.py) are queries, past which keys and values are streamed. In the kernel for the
gradients of keys and values, tiles are keys, past which the queries of all heads that
share them are streamed.

The kernel has been compiled for an H100 and interpreted on a CPU, and has not run on a
GPU: there it is used only if its results match XLA's (attention_kernels.py).

Letters as in attention.py, and: M = 64 tokens of a tile in one group of threads, U = 64
tokens of a block, A blocks of a row, C tiles of a row.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, Int

from agent_r1_jax.models.kernels import block_attention, gpu, hopper

_M = _U = gpu.SIZE
# 0 in the environment disables the kernel; INSTEAD names the fallback.
VARIABLE = 'AGENT_R1_ROW_ATTENTION'
INSTEAD = 'Rows attend by cuDNN, with a mask of T x T numbers'
# Stands for -∞, whose differences would be NaN.
_LOWEST = -1e30


def supports(tokens: int, head_dim: int, dtype: Any) -> bool:
  """Whether the kernel supports rows of so many tokens, and this head dim and dtype."""
  return (
    jnp.dtype(dtype) == jnp.bfloat16 and tokens % gpu.TILE == 0 and head_dim in (64, 128)
  )


def measure_gap(H: int) -> float:
  """Measures the largest difference to plain attention on this device.

  One row has three segments and padding, the other a tree. For gradients, the difference
  is relative to the largest number.
  """
  T, keys = 2 * gpu.TILE, jax.random.split(jax.random.key(0), 4)
  tree = [T] * 100 + [170] * 70 + [T] * (T - 170)
  texts = [30] * 30 + [200] * 170 + [240] * 40 + list(range(241, T + 1))
  ends_2T = jnp.asarray([texts, tree])
  shapes = (2, T, 4, H), (2, T, 2, H), (2, T, 2, H), (2, T, 4, H)
  normal = lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16)
  *inputs, dout = map(normal, keys, shapes)

  def differentiate(function, *inputs):
    out, pull = jax.vjp(lambda *inputs: function(*inputs, ends_2T), *inputs)
    return out, *pull(dout.astype(out.dtype))

  own = jax.jit(functools.partial(differentiate, attend))(*inputs)
  wide = [x.astype(jnp.float32) for x in inputs]
  plain = jax.jit(functools.partial(differentiate, block_attention.attend))(*wide)
  return hopper.find_gap(own, plain)


def attend(
  q_BTNH: Float[Array, 'B T N H'],
  k_BTKH: Float[Array, 'B T K H'],
  v_BTKH: Float[Array, 'B T K H'],
  ends_BT: Int[Array, 'B T'],
  interpret: Any = None,
) -> Float[Array, 'B T N H']:
  """Attends from position t to each position s with s <= t < ends[s].

  T is a multiple of gpu.TILE, and each token sees itself. `interpret` has the parameters
  of Pallas' interpreter, for tests.
  """
  return _attend(q_BTNH, k_BTKH, v_BTKH, ends_BT.astype(jnp.int32), interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q_BTNH, k_BTKH, v_BTKH, ends_BT, interpret) -> Float[Array, 'B T N H']:
  return _forward(q_BTNH, k_BTKH, v_BTKH, ends_BT, interpret)[0]


def _forward(q_BTNH, k_BTKH, v_BTKH, ends_BT, interpret):
  B, T, N, _ = q_BTNH.shape
  out_BTNH, lse_BNT = gpu.compute(
    gpu.Work('row_attention_forward', _begin_forward, _add_keys, _end_forward),
    _list_seen(ends_BT, of_keys=False),
    tiles=(q_BTNH,),
    blocks=(k_BTKH, v_BTKH, ends_BT),
    outputs=(q_BTNH, jax.ShapeDtypeStruct((B, N, T), jnp.float32)),
    interpret=interpret,
  )
  return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, ends_BT, out_BTNH, lse_BNT)


def _backward(interpret, saved, dout_BTNH):
  q_BTNH, k_BTKH, v_BTKH, ends_BT, out_BTNH, lse_BNT = saved
  # d score = p (d p - Σ p d p), and the sum over all keys is out · d out.
  sum_BTN = (dout_BTNH.astype(jnp.float32) * out_BTNH).sum(-1)
  numbers = lse_BNT, jnp.swapaxes(sum_BTN, 1, 2)
  (dq_BTNH,) = gpu.compute(
    gpu.Work(
      'row_attention_queries', _begin_gradients(1), _differentiate_queries, _end_queries
    ),
    _list_seen(ends_BT, of_keys=False),
    tiles=(q_BTNH, dout_BTNH, *numbers),
    blocks=(k_BTKH, v_BTKH, ends_BT),
    outputs=(q_BTNH,),
    interpret=interpret,
  )
  dk_BTKH, dv_BTKH = gpu.compute(
    gpu.Work('row_attention_keys', _begin_gradients(2), _differentiate_keys, _end_keys),
    _list_seen(ends_BT, of_keys=True),
    tiles=(k_BTKH, v_BTKH, ends_BT),
    blocks=(q_BTNH, dout_BTNH, *numbers),
    outputs=(k_BTKH, v_BTKH),
    interpret=interpret,
  )
  return dq_BTNH, dk_BTKH, dv_BTKH, None


_attend.defvjp(_forward, _backward)


def _list_seen(ends_BT, *, of_keys: bool) -> tuple[Array, Array]:
  """Lists the blocks to stream past each tile, [B, C, A], and counts them, [B, C].

  They are the blocks of keys that a tile of queries sees, or, with `of_keys`, the blocks
  of queries that see a tile of keys. Entries after the count are not streamed.
  """
  seen_BAA = block_attention.find_seen(ends_BT.reshape(len(ends_BT), -1, _U))
  seen_BAA = jnp.swapaxes(seen_BAA, 1, 2) if of_keys else seen_BAA
  B, A, _ = seen_BAA.shape
  seen_BCA = seen_BAA.reshape(B, A // gpu.GROUPS, gpu.GROUPS, A).any(2)
  blocks_BCA = jnp.argsort(~seen_BCA, axis=-1, stable=True).astype(jnp.int32)
  return blocks_BCA, seen_BCA.sum(-1, dtype=jnp.int32)


def _begin_forward(registers, H: int) -> tuple:
  shapes = ((_M, H), 0.0), ((_M,), _LOWEST), ((_M,), 0.0)
  return tuple(registers.full(*shape) for shape in shapes)


def _add_keys(registers, tile: gpu.Tokens, block: gpu.Tokens, sums: tuple) -> tuple:
  """Adds a block of keys to the output, the maximum score and the sum of weights."""
  (q_ref,), (k_ref, v_ref, ends_ref) = tile.refs, block.refs
  out_MH, top_M, sum_M = sums
  score_MU = _score_queries(registers, q_ref, k_ref, ends_ref, tile, block)
  new_top_M = jnp.maximum(top_M, score_MU.max(axis=1))
  rescale_M = jnp.exp2(top_M - new_top_M)
  weight_MU = jnp.exp2(score_MU - _repeat(new_top_M, score_MU))
  out_MH *= _repeat(rescale_M, out_MH)
  out_MH = registers.add_product(out_MH, weight_MU.astype(v_ref.dtype), v_ref)
  return out_MH, new_top_M, sum_M * rescale_M + weight_MU.sum(axis=1)


def _end_forward(sums: tuple, H: int) -> tuple:
  """Returns the output, and the base-2 logarithm of the sum of its weights."""
  out_MH, top_M, sum_M = sums
  return out_MH / _repeat(sum_M, out_MH), top_M + jnp.log(sum_M) * math.log2(math.e)


def _begin_gradients(count: int) -> Callable:
  return lambda registers, H: (registers.full((_M, H), 0.0),) * count


def _differentiate_queries(
  registers, tile: gpu.Tokens, block: gpu.Tokens, sums: tuple
) -> tuple:
  """Adds a block of keys to the gradient of the queries."""
  (q_ref, dout_ref, lse_ref, sum_ref), (k_ref, v_ref, ends_ref) = tile.refs, block.refs
  score_MU = _score_queries(registers, q_ref, k_ref, ends_ref, tile, block)
  p_MU = jnp.exp2(score_MU - _repeat(registers.load(lse_ref), score_MU))
  dp_MU = registers.multiply(dout_ref, v_ref, (_M, _U), transposed=True)
  dscore_MU = p_MU * (dp_MU - _repeat(registers.load(sum_ref), dp_MU))
  return (registers.add_product(sums[0], dscore_MU.astype(k_ref.dtype), k_ref),)


def _end_queries(sums: tuple, H: int) -> tuple:
  return (sums[0] * H**-0.5,)


def _differentiate_keys(
  registers, tile: gpu.Tokens, block: gpu.Tokens, sums: tuple
) -> tuple:
  """Adds a block of queries to the gradients of keys and values."""
  (k_ref, v_ref, ends_ref), (q_ref, dout_ref, lse_ref, sum_ref) = tile.refs, block.refs
  dk_MH, dv_MH = sums
  score_MU = registers.multiply(k_ref, q_ref, (_M, _U), transposed=True)
  key_MU, query_MU = registers.count(0) + tile.first, registers.count(1) + block.first
  end_MU = _repeat(registers.load(ends_ref), key_MU)
  score_MU = _hide(score_MU, key_MU, query_MU, end_MU, k_ref.shape[-1])
  p_MU = jnp.exp2(score_MU - registers.load_columns(lse_ref))
  dv_MH = registers.add_product(dv_MH, p_MU.astype(dout_ref.dtype), dout_ref)
  dp_MU = registers.multiply(v_ref, dout_ref, (_M, _U), transposed=True)
  dscore_MU = p_MU * (dp_MU - registers.load_columns(sum_ref))
  return registers.add_product(dk_MH, dscore_MU.astype(q_ref.dtype), q_ref), dv_MH


def _end_keys(sums: tuple, H: int) -> tuple:
  dk_MH, dv_MH = sums
  return dk_MH * H**-0.5, dv_MH


def _score_queries(registers, q_ref, k_ref, ends_ref, tile, block) -> Array:
  score_MU = registers.multiply(q_ref, k_ref, (_M, _U), transposed=True)
  query_MU, key_MU = registers.count(0) + tile.first, registers.count(1) + block.first
  end_MU = registers.load_columns(ends_ref)
  return _hide(score_MU, key_MU, query_MU, end_MU, k_ref.shape[-1])


def _hide(score_MU, key_MU, query_MU, end_MU, H: int) -> Array:
  """Scales scores for exp2, and masks the keys that a query does not see."""
  seen_MU = (key_MU <= query_MU) & (query_MU < end_MU)
  return jnp.where(seen_MU, score_MU * (H**-0.5 * math.log2(math.e)), _LOWEST)


def _repeat(x_M: Array, like: Array) -> Array:
  """Repeats each row's number in all columns of `like`."""
  return jax.lax.broadcast_in_dim(x_M, like.shape, [0])
