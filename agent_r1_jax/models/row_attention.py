"""Attention over packed rows on GPUs of Hopper's kind, in Pallas (Mosaic GPU).

cuDNN knows a mask only as an addend of T x T numbers for each row. This kernel is told
where the span of each key ends, as that for TPUs is (tree_attention.py), and knows whole
texts and the paths of trees by it. As in FlashAttention (arXiv 2205.14135), the softmax
is joined from block to block, and the backward pass computes the scores again.

A program computes a tile of 128 tokens, of one head, with three groups of 128 threads.
Two of them have 64 tokens each, whose numbers stay in shared memory; the third copies the
blocks of 64 tokens of the other side that come by, ahead of the tensor cores. Tiles are
queries, by which keys and values come, except in the kernel for the gradients of keys and
values, by which the queries of all heads that share them come.

It has been compiled for an H100 and interpreted on a CPU, and has not run on a GPU: there
it is used only if it computes what XLA does (attention_kernels.py).

Letters as in attention.py, and: M = 64 tokens of a tile that one group has, U = 64 tokens
of a block, A blocks of a row, C tiles of a row.
"""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, Int

from agent_r1_jax.models import block_attention, gpu_registers

_M = _U = gpu_registers.SIZE
# The groups that compute, and the tokens of a tile.
_GROUPS = 2
TILE = _GROUPS * _M
# Blocks in shared memory at a time. With heads of 128 numbers of 16 bits, they and what
# stays there take 192 of 227 KiB in the backward pass.
_DEPTH = 4
# Registers of a thread: 3 groups of 128 have 65,536, and the one that copies needs few.
_COPYING, _COMPUTING = 40, 232
# What is 0 in the environment where the kernel is not to be used, and what happens then.
VARIABLE = 'AGENT_R1_ROW_ATTENTION'
INSTEAD = 'Rows attend by cuDNN, with a mask of T x T numbers'
# Stands for -∞, so that no difference is NaN.
_LOWEST = -1e30


def supports(tokens: int, head_dim: int, dtype: Any) -> bool:
  """Whether the kernel takes rows of these tokens, of a model of this dtype."""
  return (
    jnp.dtype(dtype) == jnp.bfloat16 and tokens % TILE == 0 and head_dim in (64, 128)
  )


def measure_gap(H: int) -> float:
  """Measures the largest difference to plain attention, on two rows of this machine.

  One has three texts and padding, the other a tree. Of a gradient it is the share of its
  largest number.
  """
  T, keys = 2 * TILE, jax.random.split(jax.random.key(0), 4)
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
  plain = differentiate(block_attention.attend, *wide)
  gaps = jax.tree.map(lambda x, y: jnp.abs(x - y).max() / jnp.abs(y).max(), own, plain)
  return float(jnp.stack(gaps).max())


def attend(
  q_BTNH: Float[Array, 'B T N H'],
  k_BTKH: Float[Array, 'B T K H'],
  v_BTKH: Float[Array, 'B T K H'],
  ends_BT: Int[Array, 'B T'],
  interpret: Any = None,
) -> Float[Array, 'B T N H']:
  """Attends from position t to each position s with s <= t < ends[s].

  T is a multiple of TILE, and each token sees itself. `interpret` are the parameters of
  Pallas' interpreter, for tests.
  """
  return _attend(q_BTNH, k_BTKH, v_BTKH, ends_BT.astype(jnp.int32), interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q_BTNH, k_BTKH, v_BTKH, ends_BT, interpret) -> Float[Array, 'B T N H']:
  return _forward(q_BTNH, k_BTKH, v_BTKH, ends_BT, interpret)[0]


def _forward(q_BTNH, k_BTKH, v_BTKH, ends_BT, interpret):
  B, T, N, _ = q_BTNH.shape
  out_BTNH, lse_BNT = _call(
    _Work('forward', _begin_forward, _add_keys, _end_forward),
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
  (dq_BTNH,) = _call(
    _Work('queries', _begin_gradients(1), _differentiate_queries, _end_queries),
    _list_seen(ends_BT, of_keys=False),
    tiles=(q_BTNH, dout_BTNH, *numbers),
    blocks=(k_BTKH, v_BTKH, ends_BT),
    outputs=(q_BTNH,),
    interpret=interpret,
  )
  dk_BTKH, dv_BTKH = _call(
    _Work('keys', _begin_gradients(2), _differentiate_keys, _end_keys),
    _list_seen(ends_BT, of_keys=True),
    tiles=(k_BTKH, v_BTKH, ends_BT),
    blocks=(q_BTNH, dout_BTNH, *numbers),
    outputs=(k_BTKH, v_BTKH),
    interpret=interpret,
  )
  return dq_BTNH, dk_BTKH, dv_BTKH, None


_attend.defvjp(_forward, _backward)


def _list_seen(ends_BT, *, of_keys: bool) -> tuple[Array, Array]:
  """Lists the blocks that come by each tile, [B, C, A], and counts them, [B, C].

  They are the blocks of keys that a tile of queries sees, or, with `of_keys`, the blocks
  of queries that see a tile of keys. What stands after the count does not come.
  """
  seen_BAA = block_attention.find_seen(ends_BT.reshape(len(ends_BT), -1, _U))
  seen_BAA = jnp.swapaxes(seen_BAA, 1, 2) if of_keys else seen_BAA
  B, A, _ = seen_BAA.shape
  seen_BCA = seen_BAA.reshape(B, A // _GROUPS, _GROUPS, A).any(2)
  blocks_BCA = jnp.argsort(~seen_BCA, axis=-1, stable=True).astype(jnp.int32)
  return blocks_BCA, seen_BCA.sum(-1, dtype=jnp.int32)


class _Side(NamedTuple):
  """Tokens in shared memory: those of a tile that one group has, or a block.

  Attributes:
    refs: Their numbers, in the order in which `_call` got the arrays.
    first: The place of the first token in its row.
  """

  refs: tuple
  first: Array


class _Work(NamedTuple):
  """What a group computes.

  Attributes:
    name: What the kernel is called in a profile.
    begin: Registers, head dim -> the sums before the first block.
    add: Registers, the tile, a block, the sums -> the sums with the block.
    end: The sums, head dim -> what is stored.
  """

  name: str
  begin: Callable
  add: Callable
  end: Callable


def _begin_forward(registers, H: int) -> tuple:
  shapes = ((_M, H), 0.0), ((_M,), _LOWEST), ((_M,), 0.0)
  return tuple(registers.full(*shape) for shape in shapes)


def _add_keys(registers, tile: _Side, block: _Side, sums: tuple) -> tuple:
  """Adds a block to the output, and to the maximum and the sum of its weights."""
  (q_ref,), (k_ref, v_ref, ends_ref) = tile.refs, block.refs
  out_MH, top_M, sum_M = sums
  score_MU = _score_queries(registers, q_ref, k_ref, ends_ref, tile, block)
  new_top_M = jnp.maximum(top_M, score_MU.max(axis=1))
  kept_M = jnp.exp2(top_M - new_top_M)
  weight_MU = jnp.exp2(score_MU - _repeat(new_top_M, score_MU))
  out_MH *= _repeat(kept_M, out_MH)
  out_MH = registers.add_product(out_MH, weight_MU.astype(v_ref.dtype), v_ref)
  return out_MH, new_top_M, sum_M * kept_M + weight_MU.sum(axis=1)


def _end_forward(sums: tuple, H: int) -> tuple:
  """Returns the output, and the logarithm to base 2 of the sum of its weights."""
  out_MH, top_M, sum_M = sums
  return out_MH / _repeat(sum_M, out_MH), top_M + jnp.log(sum_M) * math.log2(math.e)


def _begin_gradients(count: int) -> Callable:
  return lambda registers, H: (registers.full((_M, H), 0.0),) * count


def _differentiate_queries(registers, tile: _Side, block: _Side, sums: tuple) -> tuple:
  """Adds what a block of keys gives to the gradient of the queries."""
  (q_ref, dout_ref, lse_ref, sum_ref), (k_ref, v_ref, ends_ref) = tile.refs, block.refs
  score_MU = _score_queries(registers, q_ref, k_ref, ends_ref, tile, block)
  p_MU = jnp.exp2(score_MU - _repeat(registers.load(lse_ref), score_MU))
  dp_MU = registers.multiply(dout_ref, v_ref, (_M, _U), transposed=True)
  dscore_MU = p_MU * (dp_MU - _repeat(registers.load(sum_ref), dp_MU))
  return (registers.add_product(sums[0], dscore_MU.astype(k_ref.dtype), k_ref),)


def _end_queries(sums: tuple, H: int) -> tuple:
  return (sums[0] * H**-0.5,)


def _differentiate_keys(registers, tile: _Side, block: _Side, sums: tuple) -> tuple:
  """Adds what a block of queries gives to the gradients of keys and values."""
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
  """Scales scores for powers of 2, and lowers those of keys that a query does not see."""
  seen_MU = (key_MU <= query_MU) & (query_MU < end_MU)
  return jnp.where(seen_MU, score_MU * (H**-0.5 * math.log2(math.e)), _LOWEST)


def _repeat(x_M: Array, like: Array) -> Array:
  """Repeats a number of each row in all columns of `like`."""
  return jax.lax.broadcast_in_dim(x_M, like.shape, [0])


def _call(work: _Work, lists, *, tiles, blocks, outputs, interpret) -> tuple[Array, ...]:
  """Computes all tiles.

  Args:
    work: What is computed.
    lists: Which blocks come by a tile, and how many (_list_seen).
    tiles: The arrays of the tiles' side: [B, T, heads, H] first, then [B, heads, T] or
      [B, T].
    blocks: Those of the blocks' side.
    outputs: Like arrays of the tiles' side, and in the order of the first of them, in
      whose shared memory they are gathered; then [B, heads, T].
    interpret: As in `attend`.
  """
  # The import is slow, and useless on other platforms.
  from jax.experimental.pallas import mosaic_gpu as plgpu

  B, T, heads, H = tiles[0].shape

  def shared(array, *leading: int) -> Any:
    """Shared memory for tokens of an array."""
    if array.ndim < 4:
      return plgpu.SMEM((*leading, _M), array.dtype)
    tiling = plgpu.TilingTransform((8, 128 // array.dtype.itemsize))
    layout = tiling, plgpu.SwizzleTransform(128)
    return plgpu.SMEM((*leading, _M, H), array.dtype, transforms=layout)

  kernel = plgpu.kernel(
    functools.partial(_kernel, work=work, registers=gpu_registers.choose(interpret)),
    out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs),
    scratch_types=(
      tuple(shared(x, _GROUPS) for x in tiles),
      tuple(shared(x, _DEPTH) for x in blocks),
      tuple(shared(x, _GROUPS) for x in outputs if len(x.shape) < 4),
      plgpu.Barrier(num_arrivals=len(tiles), num_barriers=_GROUPS),
      plgpu.Barrier(num_arrivals=len(blocks), num_barriers=_DEPTH),
      plgpu.Barrier(num_arrivals=_GROUPS, num_barriers=_DEPTH),
    ),
    grid=(T // TILE, heads, B),
    grid_names=('tile', 'head', 'row'),
    num_threads=_GROUPS + 1,
    thread_name='group',
    # Powers of 2 by one instruction.
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name=f'row_attention_{work.name}',
  )
  return tuple(kernel(*lists, tiles, blocks))


def _kernel(
  blocks_ref,
  count_ref,
  tile_refs,
  block_refs,
  *refs,
  work: _Work,
  registers: gpu_registers.Registers,
):
  """Computes one tile, of one head and row."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import mosaic_gpu as plgpu

  *out_refs, tiles_smem, blocks_smem, numbers_smem, loaded, arrived, read = refs
  names = 'tile', 'head', 'row', 'group'
  tile, head, row, group = (jax.lax.axis_index(name) for name in names)
  # Of G query heads with the same keys, one or all come by.
  heads, others = tile_refs[0].shape[2], block_refs[0].shape[2]
  passes = max(others // heads, 1)
  count = count_ref[row, tile]
  steps = count * passes

  def locate(step) -> tuple[Array, Array, Array]:
    """Returns the place in shared memory, the first token, and the head of a block."""
    block = blocks_ref[row, tile, jax.lax.rem(step, count)]
    head_of_block = (
      head * passes + jax.lax.div(step, count)
      if passes > 1
      else jax.lax.div(head, jnp.int32(heads // others))
    )
    return jax.lax.rem(step, jnp.int32(_DEPTH)), block * _U, head_of_block

  def fetch(step, _):
    """Copies a block, if there is one, to where the block _DEPTH steps before was."""
    place, first, head_of_block = locate(step)
    pl.when(step >= _DEPTH)(lambda: plgpu.barrier_wait(read.at[place]))

    @pl.when(step < steps)
    def begin():
      for ref, smem in zip(block_refs, blocks_smem, strict=True):
        tokens = _find_tokens(ref, row, head_of_block, first)
        plgpu.copy_gmem_to_smem(tokens, smem.at[place], arrived.at[place])

  @pl.when(group == _GROUPS)
  def copy():
    plgpu.set_max_registers(_COPYING, action='decrease')
    jax.lax.fori_loop(0, steps + _DEPTH, fetch, None)

  @pl.when(group < _GROUPS)
  def compute():
    plgpu.set_max_registers(_COMPUTING, action='increase')
    first = tile * TILE + group * _M
    own = _Side(tuple(smem.at[group] for smem in tiles_smem), first)
    for ref, smem in zip(tile_refs, own.refs, strict=True):
      tokens = _find_tokens(ref, row, head, first)
      plgpu.copy_gmem_to_smem(tokens, smem, loaded.at[group])
    plgpu.barrier_wait(loaded.at[group])

    def add(step, sums):
      place, first, _ = locate(step)
      plgpu.barrier_wait(arrived.at[place])
      block = _Side(tuple(smem.at[place] for smem in blocks_smem), first)
      sums = work.add(registers, own, block, sums)
      plgpu.barrier_arrive(read.at[place])
      return sums

    H = tiles_smem[0].shape[-1]
    sums = jax.lax.fori_loop(0, steps, add, work.begin(registers, H))
    results = work.end(sums, H)
    matrices = len(out_refs) - len(numbers_smem)
    out_smem = *own.refs[:matrices], *(smem.at[group] for smem in numbers_smem)
    for smem, result in zip(out_smem, results, strict=True):
      smem[...] = result.astype(smem.dtype)
    plgpu.commit_smem()
    for smem, ref in zip(out_smem, out_refs, strict=True):
      plgpu.copy_smem_to_gmem(smem, _find_tokens(ref, row, head, first))
    plgpu.wait_smem_to_gmem(0)


def _find_tokens(ref, row, head, first) -> Any:
  """Returns 64 tokens of a row and a head, of [B, T, heads, H], [B, heads, T] or [B, T]."""
  from jax.experimental import pallas as pl

  tokens = pl.ds(first, _M)
  return ref.at[{4: (row, tokens, head), 3: (row, head, tokens), 2: (row, tokens)}[
    len(ref.shape)
  ]]
