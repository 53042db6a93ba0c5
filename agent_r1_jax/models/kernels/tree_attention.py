"""Attention along the paths of trees on TPUs, in Pallas.

A block of queries reads, one after the other, the blocks of keys that one of its queries
sees. The softmax is joined from block to block (online_softmax.py), and the backward pass
computes the scores again. The lists of such blocks are computed before a kernel begins,
so that a block that nothing sees is not fetched either.

Arrays of scores have keys in rows and queries in columns. The only column of numbers is
that of the keys' ends, which all heads share.

Letters as in attention.py, and: U tokens of a block, A blocks of a row.
"""

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agent_r1_jax.models.kernels import block_attention, online_softmax

# Tokens of a block: the first of these that divides a row. They are whole tiles of a TPU.
BLOCKS = (512, 256, 128)


def attend(
  q_BTNH: Float[Array, 'B T N H'],
  k_BTKH: Float[Array, 'B T K H'],
  v_BTKH: Float[Array, 'B T K H'],
  ends_BT: Int[Array, 'B T'],
) -> Float[Array, 'B T N H']:
  """Attends from position t to each position s with s <= t < ends[s] (types.Tree).

  T is a multiple of the least of BLOCKS.
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
    _forward_kernel,
    (B, N, A, A),
    _list(seen_BAA),
    [(q_BNTH, queries), (k_BKTH, keys), (v_BKTH, keys), (ends_BT[..., None], ends)],
    [((B, N, H, T), q_BNTH.dtype, columns), ((B, N, 1, T), jnp.float32, numbers)],
    online_softmax.Sums.shapes(H, T // A),
  )
  return out_BNHT, (q_BNTH, k_BKTH, v_BKTH, ends_BT, out_BNHT, lse_BN1T)


def _backward(saved, dout_BNHT):
  q_BNTH, k_BKTH, v_BKTH, ends_BT, out_BNHT, lse_BN1T = saved
  B, N, T, H = q_BNTH.shape
  K = k_BKTH.shape[1]
  seen_BAA = _find_seen(ends_BT)
  A = seen_BAA.shape[1]
  # d score = p (d p - Σ p d p), and the sum over all keys is out · d out.
  sum_BN1T = (dout_BNHT.astype(jnp.float32) * out_BNHT).sum(2, keepdims=True)

  def inputs(queries, keys, numbers, columns, ends):
    arrays = (q_BNTH, k_BKTH, v_BKTH, dout_BNHT, lse_BN1T, sum_BN1T, ends_BT[..., None])
    specs = (queries, keys, keys, columns, numbers, numbers, ends)
    return list(zip(arrays, specs, strict=True))

  specs = _specs(q_BNTH, k_BKTH, A)
  (dq_BNHT,) = _call(
    _queries_kernel,
    (B, N, A, A),
    _list(seen_BAA),
    inputs(*specs),
    [((B, N, H, T), q_BNTH.dtype, specs[3])],
    [(H, T // A)],
  )
  specs = _specs(q_BNTH, k_BKTH, A, of_keys=True)
  dk_BKTH, dv_BKTH = _call(
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
  sums = online_softmax.Sums(*scratch)
  i, n = pl.program_id(2), pl.program_id(3)
  j, used = _next(others_ref, count_ref, n)

  pl.when(n == 0)(sums.begin)

  @pl.when(used)
  def add_keys():
    sums.add(_scores(q_ref, k_ref, ends_ref, i, j), v_ref[...])

  @pl.when(n == pl.num_programs(3) - 1)
  def end():
    # No sum is 0: each token sees itself, padding too.
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
    sums_ref[...] += online_softmax.dot(
      k_ref[...], dscores_UU, online_softmax.COLUMNS_BY_COLUMNS
    )

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
    dv_sums_ref[...] += online_softmax.dot(
      p_UU, dout_ref[...], online_softmax.ROWS_BY_ROWS
    )
    dk_sums_ref[...] += online_softmax.dot(
      dscores_UU, q_ref[...], online_softmax.ROWS_BY_COLUMNS
    )

  @pl.when((g == pl.num_programs(3) - 1) & (n == pl.num_programs(4) - 1))
  def end():
    dk_ref[...] = dk_sums_ref[...].astype(dk_ref.dtype)
    dv_ref[...] = dv_sums_ref[...].astype(dv_ref.dtype)


def _differentiate(inputs, i, j) -> tuple[Float[Array, 'U U'], Float[Array, 'U U']]:
  """Computes the softmax of a block and the gradient of its scores."""
  q_ref, k_ref, v_ref, dout_ref, lse_ref, sum_ref, ends_ref = inputs
  p_UU = jnp.exp(_scores(q_ref, k_ref, ends_ref, i, j) - lse_ref[...])
  dp_UU = online_softmax.dot(v_ref[...], dout_ref[...], online_softmax.ROWS_BY_COLUMNS)
  return p_UU, p_UU * (dp_UU - sum_ref[...])


def _scores(q_ref, k_ref, ends_ref, i, j) -> Float[Array, 'U U']:
  """Computes the scores of the keys of block j and the queries of block i."""
  scores_UU = online_softmax.dot(k_ref[...], q_ref[...], online_softmax.ROWS_BY_ROWS)
  count = lambda block, axis: (
    block * len(scores_UU) + jax.lax.broadcasted_iota(jnp.int32, scores_UU.shape, axis)
  )
  keys_UU, queries_UU = count(j, 0), count(i, 1)
  sees_UU = (keys_UU <= queries_UU) & (queries_UU < ends_ref[...])
  return jnp.where(sees_UU, scores_UU, online_softmax.HIDDEN)


def _next(others_ref, count_ref, n) -> tuple[Array, Array]:
  """Returns the n-th block that this block is computed with, and whether there is one."""
  A = pl.num_programs(2)
  # The lists of block x of row b are the (b A + x)-th.
  place = pl.program_id(0) * A + pl.program_id(2)
  return others_ref[place * A + n], n < count_ref[place]


def _find_seen(ends_BT) -> Bool[Array, 'B A A']:
  T = ends_BT.shape[1]
  block = next(b for b in BLOCKS if T % b == 0)
  return block_attention.find_seen(ends_BT.reshape(len(ends_BT), -1, block))


def _list(seen_BAA) -> tuple[Int[Array, 'BAA'], Int[Array, 'BA']]:
  """Lists for each block in axis 1 those that it sees, and counts them.

  After them the last one is repeated, which is then not fetched again. Lists are flat,
  because the scalar memory of a TPU pads the last axis.
  """
  A = seen_BAA.shape[1]
  count_BA = seen_BAA.sum(-1, dtype=jnp.int32)
  others_BAA = jnp.argsort(~seen_BAA, axis=-1, stable=True).astype(jnp.int32)
  places_BAA = jnp.minimum(jnp.arange(A)[None, None], count_BA[..., None] - 1)
  others_BAA = jnp.take_along_axis(others_BAA, places_BAA, axis=-1)
  return others_BAA.reshape(-1), count_BA.reshape(-1)


def _specs(q_BNTH, k_BKTH, A: int, *, of_keys: bool = False) -> list[pl.BlockSpec]:
  """Which blocks a program of the grid reads and writes.

  A program is for a block of queries and one of its blocks of keys, or with `of_keys` the
  reverse, for one query head of a key-value head.

  Returns:
    Those of queries [U, H]; of keys [U, H]; of a number for each query [1, U]; of
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


def _call(kernel, grid, lists, inputs, outputs, scratch) -> tuple[Array, ...]:
  """Runs a kernel over a grid; `scratch` are the shapes of its sums, in float32."""
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
      # Programs that add to the same sums run one after the other.
      dimension_semantics=('parallel',) * 3 + ('arbitrary',) * (len(grid) - 3)
    ),
    name=f'tree_attention{kernel.__name__.removesuffix("_kernel")}',
  )(*lists, *(x for x, _ in inputs))
