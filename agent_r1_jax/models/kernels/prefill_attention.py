"""Attention of many tokens of a row to the used slots of a cache: a kernel for TPUs.

XLA's attention keeps the scores of all slots in memory. Here they stay in the core, and
of each row the blocks of slots are read that its tokens see (Pallas; a softmax that is
joined from block to block, online_softmax.py).

The queries of a row that share a key-value head, all heads of all tokens, are computed
together, so that keys and values are read once for a block of them.

It has been interpreted on a CPU and compiled for TPUs, and has not run on one.

Letters as in attention.py, and X = T G queries in A blocks of Q, and P slots of a block.
"""

import math

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jaxtyping import Float, Int

from agent_r1_jax.models.kernels import online_softmax

# The most queries and slots of a block, whose scores have 2 MiB then; and numbers of a
# tile, of which both have a multiple.
_QUERIES, _SLOTS, _LANES = 1024, 512, 128


def attend(
  q_BTNH: Float[Array, 'B T N H'],
  k_BKSH: Float[Array, 'B K S H'],
  v_BKSH: Float[Array, 'B K S H'],
  positions_BT: Int[Array, 'B T'],
  first: Int[Array, ''] | int,
  heads: int,
) -> Float[Array, 'B T N H']:
  """Attends to every slot at or before the query's position, which is one of S.

  The queries share `heads` key-value heads from `first` on. T N / heads and S are
  multiples of 128.
  """
  B, T, N, H = q_BTNH.shape
  S, G = k_BKSH.shape[2], N // heads
  X = T * G
  q_BKXH = (q_BTNH * H**-0.5).reshape(B, T, heads, G, H)
  q_BKXH = jnp.moveaxis(q_BKXH, 1, 2).reshape(B, heads, X, H)
  position_BX = jnp.repeat(positions_BT.astype(jnp.int32), G, axis=1)
  Q = next(n for n in (_QUERIES, 512, 256, _LANES) if X % n == 0)
  P = math.gcd(S, _SLOTS)
  count_BA = position_BX.reshape(B, -1, Q).max(2) // P + 1
  A = count_BA.shape[1]

  def queries(b, k, a, p, count_ref, first_ref):
    return b, k, a, 0

  def slots(b, k, a, p, count_ref, first_ref):
    # The last block that is seen is named again, and so not fetched again.
    return b, first_ref[0] + k, jnp.minimum(p, count_ref[b * A + a] - 1), 0

  def columns(b, k, a, p, count_ref, first_ref):
    return b, k, 0, a

  def numbers(b, k, a, p, count_ref, first_ref):
    return b, 0, a

  out_BKHX = pl.pallas_call(
    _kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(B, heads, A, S // P),
      in_specs=[
        pl.BlockSpec((None, None, Q, H), queries),
        pl.BlockSpec((None, None, P, H), slots),
        pl.BlockSpec((None, None, P, H), slots),
        pl.BlockSpec((None, 1, Q), numbers),
      ],
      out_specs=pl.BlockSpec((None, None, H, Q), columns),
      scratch_shapes=[
        pltpu.VMEM(shape, jnp.float32) for shape in online_softmax.Sums.shapes(H, Q)
      ],
    ),
    out_shape=jax.ShapeDtypeStruct((B, heads, H, X), q_BTNH.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel',) * 3 + ('arbitrary',)
    ),
    name='prefill_attention',
  )(
    count_BA.reshape(-1),
    jnp.asarray(first, jnp.int32).reshape(1),
    *(q_BKXH, k_BKSH, v_BKSH, position_BX[:, None]),
  )
  out_BKHTG = out_BKHX.reshape(B, heads, H, T, G)
  return jnp.transpose(out_BKHTG, (0, 3, 1, 4, 2)).reshape(B, T, N, H)


def _kernel(count_ref, first_ref, q_ref, k_ref, v_ref, position_ref, out_ref, *scratch):
  """Computes a block of queries, [H, Q]."""
  sums = online_softmax.Sums(*scratch)
  p = pl.program_id(3)
  used = p < count_ref[pl.program_id(0) * pl.num_programs(2) + pl.program_id(2)]
  pl.when(p == 0)(sums.begin)

  @pl.when(used)
  def add_slots():
    scores_PQ = online_softmax.dot(k_ref[...], q_ref[...], online_softmax.ROWS_BY_ROWS)
    slot_PQ = jax.lax.broadcasted_iota(jnp.int32, scores_PQ.shape, 0) + p * len(scores_PQ)
    sees_PQ = slot_PQ <= position_ref[...]
    sums.add(jnp.where(sees_PQ, scores_PQ, online_softmax.HIDDEN), v_ref[...])

  @pl.when(p == pl.num_programs(3) - 1)
  def end():
    out_ref[...] = sums.mean().astype(out_ref.dtype)
