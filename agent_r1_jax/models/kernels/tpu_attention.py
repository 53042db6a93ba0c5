"""Attention on TPUs, in Pallas: along the paths of trees, and of many tokens to a cache.

As in FlashAttention (arXiv 2205.14135), the softmax is accumulated over blocks of keys: a
kernel keeps the weighted sum of the values, the sum of the weights and the largest score
so far. Scores never leave the core.

Arrays of scores have keys in rows and queries in columns, so that a number per query,
such as the sum of its weights, is a contiguous row; a column would take 128 times the
memory. The only column is the keys' ends in trees, which all heads share.

Along trees, a block of queries reads the blocks of keys that any of its queries sees, and
the backward pass recomputes the scores. The lists of blocks are computed before a kernel
begins, so that blocks without a reader are not fetched.

From a cache, the kernel reads the blocks of slots that a row's tokens see. Queries that
share a key-value head, from all its heads and tokens, are computed together, so that keys
and values are read once per block of queries. This kernel has been interpreted on a CPU
and compiled for TPUs, and has not run on a TPU.

Letters as in attention.py, and: A blocks of a row, U tokens of a block of keys or queries
in trees; with a cache, X = T G queries in blocks of Q, and P slots of a block.
"""

import math
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agent_r1_jax.models.kernels import block_attention

# Tokens per block: the first size that divides a row. All are multiples of a TPU's tile.
BLOCKS = (512, 256, 128)
# The most slots per block of a cache, and the sizes of a block of queries, of which the
# first that divides them is used. A block's scores take at most 2 MiB.
_SLOTS, _QUERIES = 512, (1024, *BLOCKS)
_HIDDEN = float(jnp.finfo(jnp.float32).min)  # The score of a key that is not seen.
# The contracted axis of each matrix in x · yᵀ, x · y and xᵀ · y.
_ROWS_BY_ROWS, _ROWS_BY_COLUMNS, _COLUMNS_BY_COLUMNS = (
  (((x,), (y,)), ((), ())) for x, y in ((1, 1), (1, 0), (0, 0))
)


def attend_along_trees(
  q_BTNH: Float[Array, 'B T N H'],
  k_BTKH: Float[Array, 'B T K H'],
  v_BTKH: Float[Array, 'B T K H'],
  ends_BT: Int[Array, 'B T'],
) -> Float[Array, 'B T N H']:
  """Attends from position t to each position s with s <= t < ends[s] (types.Tree).

  T is a multiple of the smallest of BLOCKS.
  """
  heads_first = (
    jnp.swapaxes(x, 1, 2) for x in (q_BTNH * q_BTNH.shape[3] ** -0.5, k_BTKH, v_BTKH)
  )
  out_BNHT = _attend(*heads_first, ends_BT)
  return jnp.transpose(out_BNHT, (0, 3, 1, 2))


@jax.custom_vjp
def _attend(q_BNTH, k_BKTH, v_BKTH, ends_BT) -> Float[Array, 'B N H T']:
  return _forward(q_BNTH, k_BKTH, v_BKTH, ends_BT)[0]


def _forward(q_BNTH, k_BKTH, v_BKTH, ends_BT):
  B, N, T, H = q_BNTH.shape
  seen_BAA = _find_seen(ends_BT)
  A = seen_BAA.shape[1]
  queries, keys, numbers, columns, ends = _specs(q_BNTH, k_BKTH, A)
  out_BNHT, lse_BN1T = _call(
    'tree_attention_forward',
    _forward_kernel,
    (B, N, A, A),
    _list(seen_BAA),
    [(q_BNTH, queries), (k_BKTH, keys), (v_BKTH, keys), (ends_BT[..., None], ends)],
    [((B, N, H, T), q_BNTH.dtype, columns), ((B, N, 1, T), jnp.float32, numbers)],
    _Sums.shapes(H, T // A),
  )
  return out_BNHT, (q_BNTH, k_BKTH, v_BKTH, ends_BT, out_BNHT, lse_BN1T)


def _backward(saved, dout_BNHT):
  q_BNTH, k_BKTH, v_BKTH, ends_BT, out_BNHT, lse_BN1T = saved
  B, N, T, H = q_BNTH.shape
  seen_BAA = _find_seen(ends_BT)
  K, A = k_BKTH.shape[1], seen_BAA.shape[1]
  # d score = p (d p - Σ p d p), and the sum over all keys is out · d out.
  sum_BN1T = (dout_BNHT.astype(jnp.float32) * out_BNHT).sum(2, keepdims=True)

  def inputs(queries, keys, numbers, columns, ends):
    arrays = (q_BNTH, k_BKTH, v_BKTH, dout_BNHT, lse_BN1T, sum_BN1T, ends_BT[..., None])
    specs = (queries, keys, keys, columns, numbers, numbers, ends)
    return list(zip(arrays, specs, strict=True))

  specs = _specs(q_BNTH, k_BKTH, A)
  (dq_BNHT,) = _call(
    'tree_attention_queries',
    _queries_kernel,
    (B, N, A, A),
    _list(seen_BAA),
    inputs(*specs),
    [((B, N, H, T), q_BNTH.dtype, specs[3])],
    [(H, T // A)],
  )
  specs = _specs(q_BNTH, k_BKTH, A, of_keys=True)
  dk_BKTH, dv_BKTH = _call(
    'tree_attention_keys',
    _keys_kernel,
    (B, K, A, N // K, A),
    _list(jnp.swapaxes(seen_BAA, 1, 2)),
    inputs(*specs),
    [(x.shape, x.dtype, specs[1]) for x in (k_BKTH, v_BKTH)],
    [(T // A, H)] * 2,
  )
  return jnp.swapaxes(dq_BNHT, 2, 3), dk_BKTH, dv_BKTH, None


_attend.defvjp(_forward, _backward)


def _forward_kernel(
  others_ref, count_ref, q_ref, k_ref, v_ref, ends_ref, out_ref, lse_ref, *scratch
):
  """Computes a block of queries: out [H, U], and the logarithm of the softmax's sum."""
  sums = _Sums(*scratch)
  i, n = pl.program_id(2), pl.program_id(3)
  j, used = _next(others_ref, count_ref, n)

  pl.when(n == 0)(sums.begin)

  @pl.when(used)
  def add_keys():
    sums.add(_scores(q_ref, k_ref, ends_ref, i, j), v_ref[...])

  @pl.when(n == pl.num_programs(3) - 1)
  def end():
    # Every sum is above 0: each token sees itself, even padding.
    out_ref[...] = sums.mean().astype(out_ref.dtype)
    lse_ref[...] = sums.most[...] + jnp.log(sums.weights[...])


def _queries_kernel(others_ref, count_ref, *refs):
  """Computes the gradient of a block of queries, [H, U]."""
  *inputs, dq_ref, sums_ref = refs
  i, n = pl.program_id(2), pl.program_id(3)
  j, used = _next(others_ref, count_ref, n)

  @pl.when(n == 0)
  def begin():
    sums_ref[...] = jnp.zeros_like(sums_ref)

  @pl.when(used)
  def add_keys():
    k_ref = inputs[1]
    _, dscores_UU = _differentiate(inputs, i, j)
    dscores_UU = dscores_UU.astype(k_ref.dtype)
    sums_ref[...] += _dot(k_ref[...], dscores_UU, _COLUMNS_BY_COLUMNS)

  @pl.when(n == pl.num_programs(3) - 1)
  def end():
    dq_ref[...] = sums_ref[...].astype(dq_ref.dtype)


def _keys_kernel(others_ref, count_ref, *refs):
  """Computes the gradients of a block of keys and values, summed over query heads."""
  *inputs, dk_ref, dv_ref, dk_sums_ref, dv_sums_ref = refs
  j, g, n = (pl.program_id(axis) for axis in (2, 3, 4))
  i, used = _next(others_ref, count_ref, n)

  @pl.when((g == 0) & (n == 0))
  def begin():
    dk_sums_ref[...] = jnp.zeros_like(dk_sums_ref)
    dv_sums_ref[...] = jnp.zeros_like(dv_sums_ref)

  @pl.when(used)
  def add_queries():
    q_ref, dout_ref = inputs[0], inputs[3]
    p_UU, dscores_UU = _differentiate(inputs, i, j)
    p_UU, dscores_UU = p_UU.astype(dout_ref.dtype), dscores_UU.astype(q_ref.dtype)
    dv_sums_ref[...] += _dot(p_UU, dout_ref[...], _ROWS_BY_ROWS)
    dk_sums_ref[...] += _dot(dscores_UU, q_ref[...], _ROWS_BY_COLUMNS)

  @pl.when((g == pl.num_programs(3) - 1) & (n == pl.num_programs(4) - 1))
  def end():
    dk_ref[...] = dk_sums_ref[...].astype(dk_ref.dtype)
    dv_ref[...] = dv_sums_ref[...].astype(dv_ref.dtype)


def _differentiate(inputs, i, j) -> tuple[Float[Array, 'U U'], Float[Array, 'U U']]:
  """Computes the softmax of a block and the gradient of its scores."""
  q_ref, k_ref, v_ref, dout_ref, lse_ref, sum_ref, ends_ref = inputs
  p_UU = jnp.exp(_scores(q_ref, k_ref, ends_ref, i, j) - lse_ref[...])
  dp_UU = _dot(v_ref[...], dout_ref[...], _ROWS_BY_COLUMNS)
  return p_UU, p_UU * (dp_UU - sum_ref[...])


def _scores(q_ref, k_ref, ends_ref, i, j) -> Float[Array, 'U U']:
  """Computes the scores of the keys of block j and the queries of block i."""
  scores_UU = _dot(k_ref[...], q_ref[...], _ROWS_BY_ROWS)
  count = lambda block, axis: (
    block * len(scores_UU) + jax.lax.broadcasted_iota(jnp.int32, scores_UU.shape, axis)
  )
  keys_UU, queries_UU = count(j, 0), count(i, 1)
  sees_UU = (keys_UU <= queries_UU) & (queries_UU < ends_ref[...])
  return jnp.where(sees_UU, scores_UU, _HIDDEN)


def _next(others_ref, count_ref, n) -> tuple[Array, Array]:
  """Returns the n-th block to compute with this block, and whether there is one."""
  A = pl.num_programs(2)
  # The lists of block x of row b have index b A + x.
  place = pl.program_id(0) * A + pl.program_id(2)
  return others_ref[place * A + n], n < count_ref[place]


def _find_seen(ends_BT) -> Bool[Array, 'B A A']:
  U = next(b for b in BLOCKS if ends_BT.shape[1] % b == 0)
  return block_attention.find_seen(ends_BT.reshape(len(ends_BT), -1, U))


def _list(seen_BAA) -> tuple[Int[Array, 'BAA'], Int[Array, 'BA']]:
  """Lists for each block in axis 1 the blocks that it sees, and counts them.

  The last block is repeated to fill a list, which fetches nothing again. Lists are flat,
  because a TPU's scalar memory pads the last axis.
  """
  A = seen_BAA.shape[1]
  count_BA = seen_BAA.sum(-1, dtype=jnp.int32)
  others_BAA = jnp.argsort(~seen_BAA, axis=-1, stable=True).astype(jnp.int32)
  places_BAA = jnp.minimum(jnp.arange(A)[None, None], count_BA[..., None] - 1)
  others_BAA = jnp.take_along_axis(others_BAA, places_BAA, axis=-1)
  return others_BAA.reshape(-1), count_BA.reshape(-1)


def _specs(q_BNTH, k_BKTH, A: int, *, of_keys: bool = False) -> list[pl.BlockSpec]:
  """Specifies the blocks that a program of the grid reads and writes.

  A program computes a block of queries with one of its blocks of keys, or with `of_keys`
  the reverse, for one query head of a key-value head.

  Returns:
    The specs of queries [U, H]; of keys [U, H]; of one number per query [1, U]; of
    queries with tokens last [H, U]; and of the keys' ends [U, 1].
  """
  N, T, H = q_BNTH.shape[1:]
  G, U = N // k_BKTH.shape[1], T // A

  def place(index):
    def of_queries(b, head, i, n, others_ref, count_ref):
      return index(b, head, head // G, i, others_ref[(b * A + i) * A + n])

    def of_keys_(b, head, j, g, n, others_ref, count_ref):
      return index(b, head * G + g, head, others_ref[(b * A + j) * A + n], j)

    return of_keys_ if of_keys else of_queries

  return [
    pl.BlockSpec((None, None, U, H), place(lambda b, n, k, i, j: (b, n, i, 0))),
    pl.BlockSpec((None, None, U, H), place(lambda b, n, k, i, j: (b, k, j, 0))),
    pl.BlockSpec((None, None, 1, U), place(lambda b, n, k, i, j: (b, n, 0, i))),
    pl.BlockSpec((None, None, H, U), place(lambda b, n, k, i, j: (b, n, 0, i))),
    pl.BlockSpec((None, U, 1), place(lambda b, n, k, i, j: (b, j, 0))),
  ]


def attend_to_slots(
  q_BTNH: Float[Array, 'B T N H'],
  k_BKSH: Float[Array, 'B K S H'],
  v_BKSH: Float[Array, 'B K S H'],
  positions_BT: Int[Array, 'B T'],
  first: Int[Array, ''] | int,
  heads: int,
) -> Float[Array, 'B T N H']:
  """Attends to every slot up to the query's position, which must be below S.

  The queries share `heads` key-value heads from `first` on. T N / heads and S are
  multiples of 128.
  """
  B, T, N, H = q_BTNH.shape
  S, G = k_BKSH.shape[2], N // heads
  X = T * G
  q_BKXH = (q_BTNH * H**-0.5).reshape(B, T, heads, G, H)
  q_BKXH = jnp.moveaxis(q_BKXH, 1, 2).reshape(B, heads, X, H)
  position_BX = jnp.repeat(positions_BT.astype(jnp.int32), G, axis=1)
  Q = next(n for n in _QUERIES if X % n == 0)
  P = math.gcd(S, _SLOTS)
  count_BA = position_BX.reshape(B, -1, Q).max(2) // P + 1
  A = count_BA.shape[1]

  def slots(b, k, a, p, count_ref, first_ref):
    # Repeating the last visible block fetches nothing.
    return b, first_ref[0] + k, jnp.minimum(p, count_ref[b * A + a] - 1), 0

  queries = pl.BlockSpec((None, None, Q, H), lambda b, k, a, *_: (b, k, a, 0))
  columns = pl.BlockSpec((None, None, H, Q), lambda b, k, a, *_: (b, k, 0, a))
  numbers = pl.BlockSpec((None, 1, Q), lambda b, k, a, *_: (b, 0, a))
  keys = pl.BlockSpec((None, None, P, H), slots)
  (out_BKHX,) = _call(
    'prefill_attention',
    _slots_kernel,
    (B, heads, A, S // P),
    (count_BA.reshape(-1), jnp.asarray(first, jnp.int32).reshape(1)),
    [(q_BKXH, queries), (k_BKSH, keys), (v_BKSH, keys), (position_BX[:, None], numbers)],
    [((B, heads, H, X), q_BTNH.dtype, columns)],
    _Sums.shapes(H, Q),
  )
  out_BKHTG = out_BKHX.reshape(B, heads, H, T, G)
  return jnp.transpose(out_BKHTG, (0, 3, 1, 4, 2)).reshape(B, T, N, H)


def _slots_kernel(
  count_ref, first_ref, q_ref, k_ref, v_ref, position_ref, out_ref, *scratch
):
  """Computes a block of queries, [H, Q]."""
  sums = _Sums(*scratch)
  p = pl.program_id(3)
  used = p < count_ref[pl.program_id(0) * pl.num_programs(2) + pl.program_id(2)]
  pl.when(p == 0)(sums.begin)

  @pl.when(used)
  def add_slots():
    scores_PQ = _dot(k_ref[...], q_ref[...], _ROWS_BY_ROWS)
    slot_PQ = jax.lax.broadcasted_iota(jnp.int32, scores_PQ.shape, 0) + p * len(scores_PQ)
    sees_PQ = slot_PQ <= position_ref[...]
    sums.add(jnp.where(sees_PQ, scores_PQ, _HIDDEN), v_ref[...])

  @pl.when(p == pl.num_programs(3) - 1)
  def end():
    out_ref[...] = sums.mean().astype(out_ref.dtype)


class _Sums(NamedTuple):
  """A kernel's running sums over blocks, as references to float32 arrays."""

  values: Any  # [H, Q]
  weights: Any  # [1, Q]
  most: Any  # [1, Q]

  @staticmethod
  def shapes(H: int, Q: int) -> list[tuple[int, int]]:
    """Returns the shapes of the arrays."""
    return [(H, Q), (1, Q), (1, Q)]

  def begin(self):
    """Resets the sums for a new block of queries."""
    self.values[...] = jnp.zeros_like(self.values)
    self.weights[...] = jnp.zeros_like(self.weights)
    self.most[...] = jnp.full_like(self.most, _HIDDEN)

  def add(self, scores_SQ: Float[Array, 'S Q'], v_SH: Float[Array, 'S H']):
    """Adds a block of keys to the sums."""
    most_1Q = jnp.maximum(self.most[...], scores_SQ.max(0, keepdims=True))
    p_SQ, before_1Q = jnp.exp(scores_SQ - most_1Q), jnp.exp(self.most[...] - most_1Q)
    out_HQ = _dot(v_SH, p_SQ.astype(v_SH.dtype), _COLUMNS_BY_COLUMNS)
    self.values[...] = self.values[...] * before_1Q + out_HQ
    self.weights[...] = self.weights[...] * before_1Q + p_SQ.sum(0, keepdims=True)
    self.most[...] = most_1Q

  def mean(self) -> Float[Array, 'H Q']:
    """Computes the weighted mean of the values; each query has seen a key."""
    return self.values[...] / self.weights[...]


def _dot(x: Array, y: Array, axes: Any) -> Array:
  """Multiplies matrices with float32 sums."""
  return jax.lax.dot_general(x, y, axes, preferred_element_type=jnp.float32)


def _call(name, kernel, grid, lists, inputs, outputs, scratch) -> tuple[Array, ...]:
  """Runs a kernel over a grid; `scratch` has the shapes of its float32 sums."""
  return pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(lists),
      grid=grid,
      in_specs=[spec for _, spec in inputs],
      out_specs=[spec for *_, spec in outputs],
      scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
    ),
    out_shape=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in outputs),
    compiler_params=pltpu.CompilerParams(
      # Programs that add to the same sums must run in sequence.
      dimension_semantics=('parallel',) * 3 + ('arbitrary',) * (len(grid) - 3)
    ),
    name=name,
  )(*lists, *(x for x, _ in inputs))
