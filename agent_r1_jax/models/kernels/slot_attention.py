"""Attention to the used slots of a cache: a kernel for Hopper GPUs.

XLA's attention reads in every row the slots that the longest sequence needs, rounded up
to a bucket, and in a prefill it stores all scores. This kernel (Pallas, Mosaic GPU) reads
in each row only the blocks that its sequence uses, and keeps scores in registers.

Queries of a row that share a key-value head, from all its heads and tokens, are computed
in tiles of 64, the tensor cores' size, padded with zeros. A program computes one tile
over every `parts`-th block of slots, so that few rows fill a GPU too and parts have equal
work. It copies blocks to shared memory ahead of the tensor cores, and stores the maximum
and the sum of its weights next to its output, so that XLA can combine the parts.

From an 8-bit cache (kv_cache.py) integers and scales are copied. A block is cast in
shared memory before its product; the scales multiply the other operand or the result.

The kernel has been compiled for an H100 and interpreted on a CPU, and has not run on a
GPU: there it is used only if its results match XLA's (attention_kernels.py).

Letters as in attention.py, and M = 64 queries of a tile, Q tiles, P parts, U slots of a
block.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Float, Int, Num
import numpy as np

from agent_r1_jax.models import kv_cache
from agent_r1_jax.models.kernels import gpu

# The queries of a tile, and the slots of a block.
_M = BLOCK = gpu.SIZE
# Blocks of keys and of values in shared memory at a time: with 128 16-bit numbers per
# head they take 128 of 227 KiB.
_DEPTH = 4
# The cores of an H100, and the most parts.
_CORES, _MOST_PARTS = 132, 16
# 0 in the environment disables the kernel; INSTEAD names the fallback.
VARIABLE = 'AGENT_R1_SLOT_ATTENTION'
INSTEAD = 'The cache is read by XLA, in whole buckets'
# Stands for -∞, whose differences would be NaN in a part without slots.
_LOWEST = -1e30


def supports(shape: tuple[int, ...], dtype: Any) -> bool:
  """Whether the kernel supports a cache [B, K, S, H] and a model of this dtype."""
  _, _, S, H = shape
  return jnp.dtype(dtype) == jnp.bfloat16 and S % BLOCK == 0 and H in (64, 128)


def measure_gap(H: int, rounded: bool = False) -> float:
  """Measures the largest difference to plain attention on this device, on a few rows.

  With `rounded`, the cache has 8 bits.
  """
  B, T, N, K, S = 4, 5, 32, 2, 4 * BLOCK
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (B, T, N, H), (B, K, S, H), (B, K, S, H)
  normal = lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16)
  first_B1 = jnp.asarray([[0], [BLOCK - 3], [BLOCK], [S - T]])
  positions_BT = first_B1 + jnp.arange(T)[None]
  q_BTNH, k_BKSH, v_BKSH = map(normal, keys, shapes)
  scales = None
  if rounded:
    (k_BKSH, k_BKS), (v_BKSH, v_BKS) = map(kv_cache.round_heads, (k_BKSH, v_BKSH))
    scales = k_BKS, v_BKS
  out_BTNH = jax.jit(attend)(q_BTNH, k_BKSH, v_BKSH, positions_BT, scales=scales)
  plain_BTNH = attend_plainly(q_BTNH, k_BKSH, v_BKSH, positions_BT, scales)
  # On the host, as in hopper.find_gap; the outputs are of size 1.
  return float(np.abs(np.asarray(out_BTNH, np.float32) - np.asarray(plain_BTNH)).max())


def attend_plainly(
  q_BTNH, k_BKSH, v_BKSH, positions_BT, scales: kv_cache.Scales | None = None
) -> Float[Array, 'B T N H']:
  """Computes `attend` in float32 with XLA."""
  if scales:
    k_BKSH, v_BKSH = k_BKSH * scales[0][..., None], v_BKSH * scales[1][..., None]
  k_BSKH, v_BSKH = jnp.swapaxes(k_BKSH, 1, 2), jnp.swapaxes(v_BKSH, 1, 2)
  q_BTNH, *kv = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH))
  seen_BTS = jnp.arange(k_BSKH.shape[1])[None, None] <= positions_BT[..., None]
  return jax.nn.dot_product_attention(q_BTNH, *kv, mask=seen_BTS[:, None])


def attend(
  q_BTNH: Float[Array, 'B T N H'],
  k_BKSH: Num[Array, 'B K S H'],
  v_BKSH: Num[Array, 'B K S H'],
  positions_BT: Int[Array, 'B T'],
  first: Int[Array, ''] | int = 0,
  heads: int | None = None,
  interpret: Any = None,
  scales: kv_cache.Scales | None = None,
) -> Float[Array, 'B T N H']:
  """Attends to every slot up to the query's position, which must be below S.

  The queries share `heads` key-value heads from `first` on, by default all; other heads
  are not read. `interpret` has the parameters of Pallas' interpreter, for tests. An int8
  cache has `scales`.
  """
  B, T, N, H = q_BTNH.shape
  K, S = heads or k_BKSH.shape[1], k_BKSH.shape[2]
  G = N // K
  tiles = -(-G * T // _M)
  # The queries of a tile that are written.
  rows = min(_M, -(-G * T // 8) * 8)
  parts = _count_parts(B * K * tiles, S // BLOCK)
  spare = (0, tiles * _M - G * T)
  q_BKXH = jnp.moveaxis(q_BTNH.reshape(B, T, K, G, H), 1, 2).reshape(B, K, T * G, H)
  q_BKXH = jnp.pad(q_BKXH, ((0, 0), (0, 0), spare, (0, 0)))
  last_BX = jnp.pad(
    jnp.repeat(positions_BT.astype(jnp.int32), G, axis=1), ((0, 0), spare)
  )
  last_BQM = last_BX.reshape(B, tiles, _M)
  registers = gpu.choose(interpret)
  k_scale_BKS, v_scale_BKS = scales or (None, None)
  numbers = jax.ShapeDtypeStruct((B, K, tiles, parts, _M), jnp.float32)
  out_BKQPMH, top_BKQPM, sum_BKQPM = plgpu.kernel(
    functools.partial(_kernel, parts=parts, rows=rows, registers=registers),
    out_type=(
      jax.ShapeDtypeStruct((B, K, tiles, parts, rows, H), jnp.float32),
      numbers,
      numbers,
    ),
    scratch_types=_list_scratch(H, q_BTNH.dtype, rounded=scales is not None),
    grid=(parts, tiles, K, B),
    grid_names=('part', 'tile', 'head', 'row'),
    interpret=interpret,
    kernel_name='slot_attention',
  )(
    *(q_BKXH, last_BQM, last_BQM.max(-1), jnp.full(1, first, jnp.int32)),
    *((k_BKSH, k_scale_BKS), (v_BKSH, v_scale_BKS)),
  )
  top_BKQPM, sum_BKQPM = top_BKQPM[..., :rows], sum_BKQPM[..., :rows]
  scale_BKQPM = jnp.exp2(top_BKQPM - top_BKQPM.max(3, keepdims=True))
  total_BKQM = (scale_BKQPM * sum_BKQPM).sum(3)
  out_BKQMH = (scale_BKQPM[..., None] * out_BKQPMH).sum(3) / total_BKQM[..., None]
  out_BKTGH = out_BKQMH.reshape(B, K, -1, H)[:, :, : T * G].reshape(B, K, T, G, H)
  return jnp.moveaxis(out_BKTGH, 1, 2).reshape(B, T, N, H).astype(q_BTNH.dtype)


def _list_scratch(H: int, dtype: Any, *, rounded: bool) -> tuple:
  """Returns the shared memory and the barriers of `_kernel`."""

  def block(*shape: int, dtype: Any) -> Any:
    """Describes memory in tiles of 8 rows of at most 128 bytes."""
    size = min(128, H * jnp.dtype(dtype).itemsize)
    tiling = plgpu.TilingTransform((8, size // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(size)))

  blocks: Any = block(_DEPTH, BLOCK, H, dtype=jnp.int8 if rounded else dtype), None
  if rounded:
    blocks = blocks[0], plgpu.SMEM((_DEPTH, BLOCK), jnp.float32)
  return (
    (block(_M, H, dtype=dtype), plgpu.SMEM((_M,), jnp.int32)),
    (blocks, blocks, block(BLOCK, H, dtype=dtype) if rounded else None),
    tuple(plgpu.SMEM(shape, jnp.float32) for shape in ((_M, H), (_M,), (_M,))),
    plgpu.Barrier(num_arrivals=2),
    (plgpu.Barrier(num_arrivals=1 + rounded, num_barriers=_DEPTH),) * 2,
  )


def _count_parts(programs: int, blocks: int) -> int:
  """Returns the smallest number of parts that keeps the most cores busy."""

  def share(parts: int) -> float:
    waves = -(-programs * parts // _CORES)
    return programs * parts / (waves * _CORES)

  return max(range(1, min(_MOST_PARTS, blocks) + 1), key=share)


class _Slots(NamedTuple):
  """Keys or values on their way from main memory to the tensor cores."""

  refs: tuple[Any, Any]  # The full arrays: numbers, and scales or None.
  smem: tuple[Any, Any]  # _DEPTH blocks of each.
  barriers: Any
  wide_smem: Any  # Where 8-bit blocks are cast to.

  def fetch(self, at: tuple, place: Any) -> None:
    """Starts copying a block."""
    for ref, smem in zip(self.refs, self.smem, strict=True):
      if ref is not None:
        plgpu.copy_gmem_to_smem(ref.at[at], smem.at[place], self.barriers.at[place])

  def receive(self, place: Any, registers: Any) -> tuple[Any, Array | None]:
    """Waits for a block; returns it and its scales, repeated per query [M, U], if any."""
    plgpu.barrier_wait(self.barriers.at[place])
    block, scales = self.smem
    if scales is None:
      return block.at[place], None
    # Before the cast, after which the scales may be overwritten.
    scale_MU = registers.load_columns(scales.at[place])
    registers.cast(block.at[place], self.wide_smem)
    return self.wide_smem, scale_MU


def _kernel(
  q_ref,
  last_ref,
  longest_ref,
  first_ref,
  k_refs,
  v_refs,
  out_ref,
  top_ref,
  sum_ref,
  queries_smem,
  blocks_smem,
  sums_smem,
  queries_barrier,
  blocks_barriers,
  *,
  parts: int,
  rows: int,
  registers: gpu.Registers,
):
  """Computes blocks part, part + parts, ... of one tile of queries."""
  (q_smem, last_smem), (k_smem, v_smem, wide_smem) = queries_smem, blocks_smem
  keys = _Slots(k_refs, k_smem, blocks_barriers[0], wide_smem)
  values = _Slots(v_refs, v_smem, blocks_barriers[1], wide_smem)
  names = 'part', 'tile', 'head', 'row'
  part, tile, head, row = (jax.lax.axis_index(name) for name in names)
  blocks = jax.lax.div(longest_ref[row, tile], jnp.int32(BLOCK)) + 1
  steps = jax.lax.div(jnp.maximum(blocks - part + (parts - 1), 0), jnp.int32(parts))

  def fetch(step):
    """Starts copying a block to the place of the block _DEPTH steps before."""
    place = jax.lax.rem(step, jnp.int32(_DEPTH))
    at = row, first_ref[0] + head, pl.ds((part + step * parts) * BLOCK, BLOCK)
    keys.fetch(at, place)
    values.fetch(at, place)

  queries = pl.ds(tile * _M, _M)
  plgpu.copy_gmem_to_smem(q_ref.at[row, head, queries], q_smem, queries_barrier)
  plgpu.copy_gmem_to_smem(last_ref.at[row, tile], last_smem, queries_barrier)
  for step in range(_DEPTH):
    pl.when(step < steps)(functools.partial(fetch, jnp.int32(step)))
  plgpu.barrier_wait(queries_barrier)
  last_M = registers.load(last_smem)

  def compute(step, sums):
    """Adds a block to the output, the maximum and the sum."""
    slot_MU = registers.count(1) + (part + step * parts) * BLOCK
    seen_MU = slot_MU <= jax.lax.broadcast_in_dim(last_M, slot_MU.shape, [0])
    place = jax.lax.rem(step, jnp.int32(_DEPTH))
    sums = _add_block(q_smem, keys, values, place, seen_MU, sums, registers)
    pl.when(step + _DEPTH < steps)(lambda: fetch(step + _DEPTH))
    return sums

  nothing = [((_M, q_smem.shape[1]), 0.0), ((_M,), _LOWEST), ((_M,), 0.0)]
  sums = jax.lax.fori_loop(0, steps, compute, tuple(registers.full(*x) for x in nothing))
  at = row, head, tile, part
  _store(sums, sums_smem, [ref.at[at] for ref in (out_ref, top_ref, sum_ref)], rows)


def _add_block(q_smem, keys: _Slots, values: _Slots, place, seen_MU, sums, registers):
  """Adds the block at `place` to the output, the maximum and the sum."""
  block, scale_MU = keys.receive(place, registers)
  score_MU = registers.multiply(q_smem, block, seen_MU.shape, transposed=True)
  score_MU = score_MU if scale_MU is None else score_MU * scale_MU
  weight_MU, (out_MH, top_M, sum_M) = _weigh(score_MU, seen_MU, sums)
  block, scale_MU = values.receive(place, registers)
  weight_MU = weight_MU if scale_MU is None else weight_MU * scale_MU
  out_MH += registers.multiply(weight_MU.astype(q_smem.dtype), block, out_MH.shape)
  return out_MH, top_M, sum_M


def _store(sums, sums_smem, refs, rows: int) -> None:
  """Copies the output of `rows` queries, and all maxima and sums, to main memory."""
  for smem, x in zip(sums_smem, sums, strict=True):
    smem[...] = x
  plgpu.commit_smem()
  out_smem, *others_smem = sums_smem
  for smem, ref in zip([out_smem.at[pl.ds(0, rows)], *others_smem], refs, strict=True):
    plgpu.copy_smem_to_gmem(smem, ref)
  plgpu.wait_smem_to_gmem(0)


def _weigh(score_MU: Array, seen_MU: Array, sums: tuple) -> tuple[Array, tuple]:
  """Returns a block's weights, and the earlier sums rescaled to the new maximum.

  Weights are powers of 2, which a GPU computes faster than powers of e.
  """
  out_MH, top_M, sum_M = sums
  score_MU *= out_MH.shape[1] ** -0.5 * math.log2(math.e)
  score_MU = jnp.where(seen_MU, score_MU, _LOWEST)
  new_top_M = jnp.maximum(top_M, score_MU.max(axis=1))
  kept_M = jnp.exp2(top_M - new_top_M)
  top_MU = jax.lax.broadcast_in_dim(new_top_M, score_MU.shape, [0])
  weight_MU = jnp.exp2(score_MU - top_MU)
  out_MH *= jax.lax.broadcast_in_dim(kept_M, out_MH.shape, [0])
  return weight_MU, (out_MH, new_top_M, sum_M * kept_M + weight_MU.sum(axis=1))
