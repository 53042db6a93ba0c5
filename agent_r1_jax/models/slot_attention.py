"""Attention of a decode step to the used slots of a cache: a kernel for GPUs.

XLA's attention reads as many slots of each row as the longest text needs, rounded up to a
bucket. This kernel (Pallas, Mosaic GPU) reads of each row the blocks that its text uses.

A program computes all query heads of one key-value head of one row, so that no slot is
read for two heads, over each `parts`-th block of slots, so that few rows fill a GPU too
and all parts have equally much to do. It copies blocks to shared memory ahead of the
tensor cores, and leaves the maximum and the sum of its weights with its output, by which
XLA joins the parts. The tensor cores multiply 64 queries at a time; where a key-value
head has fewer, the others are zeros.

It has been compiled for an H100 and interpreted on a CPU, and has not run on a GPU: there
it is used only if it computes what XLA does (attention_kernels.py).

Letters as in attention.py, and P parts, U slots of a block, M = 64 queries.
"""

import functools
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, Int

# Rows of a product of the tensor cores, and the slots of a block.
_M, BLOCK = 64, 64
# Blocks of keys and of values that are in shared memory at a time: with heads of 128
# numbers 128 of 227 KiB.
_DEPTH = 4
# The cores of an H100, and the most parts.
_CORES, _MOST_PARTS = 132, 16
# Stands for -∞ where a part has no slot, so that no difference is NaN.
_LOWEST = -1e30


def supports(shape: tuple[int, ...], dtype: Any) -> bool:
  """Whether the kernel takes a cache [B, K, S, H] of this dtype."""
  _, _, S, H = shape
  return jnp.dtype(dtype) == jnp.bfloat16 and S % BLOCK == 0 and H in (64, 128)


def measure_gap(H: int) -> float:
  """Measures the largest difference to XLA's attention, on a few rows of this machine."""
  keys = jax.random.split(jax.random.key(0), 3)
  q_BNH = jax.random.normal(keys[0], (4, 8, H), jnp.bfloat16)
  slots = 4, 2, 4 * BLOCK, H
  k_BKSH, v_BKSH = (jax.random.normal(key, slots, jnp.bfloat16) for key in keys[1:])
  used_B = jnp.asarray([1, BLOCK, BLOCK + 1, 4 * BLOCK])
  out_BNH = jax.jit(attend)(q_BNH, k_BKSH, v_BKSH, used_B)
  plain_BNH = _attend_plainly(q_BNH, k_BKSH, v_BKSH, used_B)
  return float(jnp.abs(out_BNH.astype(jnp.float32) - plain_BNH).max())


def _attend_plainly(q_BNH, k_BKSH, v_BKSH, used_B) -> Float[Array, 'B N H']:
  """Computes `attend` in float32 by XLA."""
  B, N, H = q_BNH.shape
  q_BKGH = q_BNH.reshape(B, k_BKSH.shape[1], -1, H)
  q_BKGH, k_BKSH, v_BKSH = (x.astype(jnp.float32) for x in (q_BKGH, k_BKSH, v_BKSH))
  score_BKGS = jnp.einsum('bkgh,bksh->bkgs', q_BKGH, k_BKSH) * H**-0.5
  used_BS = jnp.arange(k_BKSH.shape[2])[None] < used_B[:, None]
  score_BKGS = jnp.where(used_BS[:, None, None], score_BKGS, _LOWEST)
  weight_BKGS = jax.nn.softmax(score_BKGS)
  return jnp.einsum('bkgs,bksh->bkgh', weight_BKGS, v_BKSH).reshape(B, N, H)


def attend(
  q_BNH: Float[Array, 'B N H'],
  k_BKSH: Float[Array, 'B K S H'],
  v_BKSH: Float[Array, 'B K S H'],
  used_B: Int[Array, 'B'],
  interpret: Any = None,
) -> Float[Array, 'B N H']:
  """Attends to slots 0 to used - 1 of each row; used is at least 1 and at most S.

  `interpret` are the parameters of Pallas' interpreter, for tests.

  Raises:
    ValueError: A key-value head has more than 64 query heads.
  """
  # The import is slow, and useless on other platforms.
  from jax.experimental.pallas import mosaic_gpu as plgpu

  B, N, H = q_BNH.shape
  K, S = k_BKSH.shape[1:3]
  G = N // K
  if G > _M:
    raise ValueError(f'{G} query heads share a key-value head; at most {_M} may.')
  rows = -(-G // 8) * 8  # Of the 64 queries, those that are written.
  parts = _count_parts(B * K, S // BLOCK)
  q_BKMH = jnp.pad(q_BNH.reshape(B, K, G, H), ((0, 0), (0, 0), (0, _M - G), (0, 0)))
  tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
  blocks = plgpu.SMEM((_DEPTH, BLOCK, H), q_BNH.dtype, transforms=tiles)
  out_BKPMH, top_BKPM, sum_BKPM = plgpu.kernel(
    functools.partial(_kernel, parts=parts, rows=rows, on_gpu=interpret is None),
    out_type=(
      jax.ShapeDtypeStruct((B, K, parts, rows, H), jnp.float32),
      jax.ShapeDtypeStruct((B, K, parts, _M), jnp.float32),
      jax.ShapeDtypeStruct((B, K, parts, _M), jnp.float32),
    ),
    scratch_types=(
      plgpu.SMEM((_M, H), q_BNH.dtype, transforms=tiles),
      blocks,
      blocks,
      plgpu.SMEM((_M, H), jnp.float32),
      plgpu.SMEM((_M,), jnp.float32),
      plgpu.SMEM((_M,), jnp.float32),
      plgpu.Barrier(),
      plgpu.Barrier(num_barriers=_DEPTH),
      plgpu.Barrier(num_barriers=_DEPTH),
    ),
    grid=(parts, K, B),
    grid_names=('part', 'head', 'row'),
    interpret=interpret,
  )(q_BKMH, k_BKSH, v_BKSH, used_B.astype(jnp.int32))
  top_BKPG, sum_BKPG = top_BKPM[..., :G], sum_BKPM[..., :G]
  scale_BKPG = jnp.exp2(top_BKPG - top_BKPG.max(2, keepdims=True))
  total_BKG = (scale_BKPG * sum_BKPG).sum(2)
  out_BKGH = (scale_BKPG[..., None] * out_BKPMH[..., :G, :]).sum(2) / total_BKG[..., None]
  return out_BKGH.reshape(B, N, H).astype(q_BNH.dtype)


def _count_parts(programs: int, blocks: int) -> int:
  """Returns the number of parts that keeps most cores busy; of equals the fewest."""

  def share(parts: int) -> float:
    waves = -(-programs * parts // _CORES)
    return programs * parts / (waves * _CORES)

  return max(range(1, min(_MOST_PARTS, blocks) + 1), key=share)


def _kernel(
  q_ref,
  k_ref,
  v_ref,
  used_ref,
  out_ref,
  top_ref,
  sum_ref,
  q_smem,
  k_smem,
  v_smem,
  out_smem,
  top_smem,
  sum_smem,
  q_barrier,
  k_barriers,
  v_barriers,
  *,
  parts: int,
  rows: int,
  on_gpu: bool,
):
  """Computes blocks part, part + parts, ... of one row and key-value head.

  Pallas' interpreter (jax 0.10.2) has copies and barriers, but knows neither layouts of
  registers nor transposed operands: with on_gpu False they are left out.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import mosaic_gpu as plgpu

  part, head, row = (jax.lax.axis_index(name) for name in ('part', 'head', 'row'))
  H = q_smem.shape[1]
  used = used_ref[row]
  blocks = jax.lax.div(used + (BLOCK - 1), jnp.int32(BLOCK))
  steps = jax.lax.div(jnp.maximum(blocks - part + (parts - 1), 0), jnp.int32(parts))

  def fetch(step):
    """Begins to copy a block, to where the block _DEPTH steps before was."""
    place = jax.lax.rem(step, jnp.int32(_DEPTH))
    slots = pl.ds((part + step * parts) * BLOCK, BLOCK)
    for ref, smem, barriers in ((k_ref, k_smem, k_barriers), (v_ref, v_smem, v_barriers)):
      plgpu.copy_gmem_to_smem(
        ref.at[row, head, slots], smem.at[place], barriers.at[place]
      )

  plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_smem, q_barrier)
  for step in range(_DEPTH):
    pl.when(step < steps)(functools.partial(fetch, jnp.int32(step)))
  plgpu.barrier_wait(q_barrier)

  tile = plgpu.Layout.WGMMA

  def full(shape, value, layout):
    x = jnp.full(shape, value, jnp.float32)
    return plgpu.layout_cast(x, layout) if on_gpu else x

  carry = (
    full((_M, H), 0.0, tile),
    full((_M,), _LOWEST, tile.reduce(1)),
    full((_M,), 0.0, tile.reduce(1)),
  )

  def multiply(left, right_ref, shape, transposed=False):
    """Multiplies on the tensor cores, and waits for the product."""
    if not on_gpu:
      right = right_ref[...].T if transposed else right_ref[...]
      return jnp.dot(left[...], right, preferred_element_type=jnp.float32)

    def run(sum_ref):
      right = plgpu.transpose_ref(right_ref, (1, 0)) if transposed else right_ref
      plgpu.wgmma(sum_ref, left, right)
      return sum_ref[...]

    accumulator = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(run, accumulator(shape, jnp.float32))

  def compute(step, carry):
    """Adds a block to the output, the maximum and the sum; weights are powers of 2."""
    out_MH, top_M, sum_M = carry
    place = jax.lax.rem(step, jnp.int32(_DEPTH))
    plgpu.barrier_wait(k_barriers.at[place])

    score_MU = multiply(q_smem, k_smem.at[place], (_M, BLOCK), transposed=True)
    score_MU *= H**-0.5 * math.log2(math.e)
    if on_gpu:
      slot_MU = plgpu.broadcasted_iota(jnp.int32, (_M, BLOCK), 1, layout=tile)
    else:
      slot_MU = jax.lax.broadcasted_iota(jnp.int32, (_M, BLOCK), 1)
    slot_MU += (part + step * parts) * BLOCK
    score_MU = jnp.where(slot_MU < used, score_MU, _LOWEST)
    new_top_M = jnp.maximum(top_M, score_MU.max(axis=1))
    kept_M = jnp.exp2(top_M - new_top_M)
    weight_MU = jnp.exp2(score_MU - jax.lax.broadcast_in_dim(new_top_M, (_M, BLOCK), [0]))
    sum_M = sum_M * kept_M + weight_MU.sum(axis=1)
    out_MH *= jax.lax.broadcast_in_dim(kept_M, (_M, H), [0])
    plgpu.barrier_wait(v_barriers.at[place])

    out_MH += multiply(weight_MU.astype(q_smem.dtype), v_smem.at[place], (_M, H))
    pl.when(step + _DEPTH < steps)(lambda: fetch(step + _DEPTH))
    return out_MH, new_top_M, sum_M

  out_MH, top_M, sum_M = jax.lax.fori_loop(0, steps, compute, carry)
  out_smem[...], top_smem[...], sum_smem[...] = out_MH, top_M, sum_M
  plgpu.commit_smem()
  at = (row, head, part)
  plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, rows)], out_ref.at[at])
  plgpu.copy_smem_to_gmem(top_smem, top_ref.at[at])
  plgpu.copy_smem_to_gmem(sum_smem, sum_ref.at[at])
  plgpu.wait_smem_to_gmem(0)
