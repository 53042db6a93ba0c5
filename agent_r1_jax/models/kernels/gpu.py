"""Building blocks of kernels for Hopper GPUs: registers, and tiles of tokens.

Pallas kernels for Hopper (Mosaic GPU) state how numbers are laid out over threads.
Pallas' interpreter (jax 0.10.2) supports copies and barriers, but not layouts or
transposed operands. So a kernel is written once, for two classes with the same methods.

Each program of `compute` processes a tile of 128 tokens of one head and row, streaming
blocks of the other side past it. It has three groups of 128 threads: two hold 64 tokens
of the tile each, in shared memory; the third copies blocks of 64 tokens of the other
side, ahead of the tensor cores.

M = U = SIZE: rows of a product, and columns of a block.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

# Rows of a tensor-core product, and tokens of a group or a block.
SIZE = 64
# The number of computing groups, and the tokens of a tile.
GROUPS = 2
TILE = GROUPS * SIZE
# Blocks in shared memory at a time. With 128 16-bit numbers per head and two arrays per
# side, blocks and tile take 192 of 227 KiB.
_DEPTH = 4
# Registers per thread: 3 groups of 128 share 65,536, and the copying group needs few.
_COPYING, _COMPUTING = 40, 232


class Hopper:
  """Operations on numbers in the registers of a Hopper GPU, which have layouts."""

  def full(self, shape: tuple[int, ...], value: float) -> Array:
    """Makes a float32 array of rows [M], or of rows and columns [M, ...]."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

  def load(self, ref: Any) -> Array:
    """Loads one number per row from shared memory."""
    return plgpu.load(ref, (), layout=plgpu.Layout.WGMMA.reduce(1))

  def load_columns(self, ref: Any) -> Array:
    """Loads one number per column and repeats it in each row, [M, U]."""
    x_U = plgpu.load(ref, (), layout=plgpu.Layout.WGMMA.reduce(0))
    x_MU = jax.lax.broadcast_in_dim(x_U, (SIZE, SIZE), [1])
    return plgpu.layout_cast(x_MU, plgpu.Layout.WGMMA)

  def cast(self, ref: Any, wide_ref: Any) -> None:
    """Casts a block of integers, from shared memory to shared memory."""
    x_UH = plgpu.load(ref, (), layout=plgpu.Layout.WGMMA_UPCAST_2X)
    wide_UH = x_UH.astype(wide_ref.dtype)
    wide_ref[...] = plgpu.layout_cast(wide_UH, plgpu.Layout.WGMMA)
    plgpu.commit_smem()

  def count(self, axis: int) -> Array:
    """Returns [M, U] with 0, 1, ... along an axis."""
    layout = plgpu.Layout.WGMMA
    return plgpu.broadcasted_iota(jnp.int32, (SIZE, SIZE), axis, layout=layout)

  def multiply(self, left, right_ref, shape, *, transposed: bool = False) -> Array:
    """Multiplies on the tensor cores, and waits for the product."""

    def run(sum_ref):
      right = plgpu.transpose_ref(right_ref, (1, 0)) if transposed else right_ref
      plgpu.wgmma(sum_ref, left, right)
      return sum_ref[...]

    accumulator = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(run, accumulator(shape, jnp.float32))

  def add_product(self, sums: Array, left: Array, right_ref) -> Array:
    """Adds a product to sums, [M, ...] in float32, and waits for it."""
    accumulator = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
    multiply = lambda sum_ref: plgpu.wgmma(sum_ref, left, right_ref)
    total: Any = pl.run_state(multiply)(accumulator.init(sums))
    return total


class Interpreted:
  """The operations of `Hopper` for Pallas' interpreter."""

  def full(self, shape: tuple[int, ...], value: float) -> Array:
    """Makes a float32 array of `shape`."""
    return jnp.full(shape, value, jnp.float32)

  def load(self, ref: Any) -> Array:
    """Loads all of `ref`."""
    return ref[...]

  def load_columns(self, ref: Any) -> Array:
    """Repeats all of `ref` in each row."""
    return jax.lax.broadcast_in_dim(ref[...], (SIZE, SIZE), [1])

  def cast(self, ref: Any, wide_ref: Any) -> None:
    """Casts a block of integers."""
    wide_ref[...] = ref[...].astype(wide_ref.dtype)

  def count(self, axis: int) -> Array:
    """Returns [M, U] with 0, 1, ... along an axis."""
    return jax.lax.broadcasted_iota(jnp.int32, (SIZE, SIZE), axis)

  def multiply(self, left, right_ref, shape, *, transposed: bool = False) -> Array:
    """Multiplies; the result has `shape`."""
    right = right_ref[...].T if transposed else right_ref[...]
    product = jnp.dot(left[...], right, preferred_element_type=jnp.float32)
    return product.reshape(shape)

  def add_product(self, sums: Array, left: Array, right_ref) -> Array:
    """Adds a product to sums."""
    return sums + self.multiply(left, right_ref, sums.shape)


Registers = Hopper | Interpreted


def choose(interpret: Any) -> Registers:
  """Returns the interpreter's operations if `interpret` has its parameters."""
  return Interpreted() if interpret else Hopper()


class Tokens(NamedTuple):
  """Tokens in shared memory: one group's part of a tile, or a block.

  Attributes:
    refs: The tokens' numbers, in the order of the arrays passed to `compute`.
    first: The index of the first token in its row.
  """

  refs: tuple
  first: Array


class Work(NamedTuple):
  """The computation of a group.

  Attributes:
    name: The kernel's name in a profile.
    begin: (registers, head dim) -> the sums before the first block.
    add: (registers, the tile, a block, the sums) -> the sums with the block.
    end: (the sums, head dim) -> the outputs.
  """

  name: str
  begin: Callable
  add: Callable
  end: Callable


def compute(work: Work, lists, *, tiles, blocks, outputs, interpret) -> tuple[Array, ...]:
  """Computes all tiles.

  Args:
    work: The computation.
    lists: The blocks to stream past each tile [rows, tiles, blocks], and their count.
    tiles: The arrays of the tiles' side: [rows, tokens, heads, head dim] first, then
      [rows, heads, tokens] or [rows, tokens].
    blocks: The arrays of the blocks' side. If it has more heads, a tile gets all heads
      that share the tile's head; if it has fewer, the head that the tile's head shares.
    outputs: The outputs' shapes and dtypes: first like the leading arrays of `tiles`,
      whose shared memory they reuse; then [rows, heads, tokens].
    interpret: The parameters of Pallas' interpreter, for tests.
  """
  rows, tokens, heads, head_dim = tiles[0].shape

  def shared(array, *leading: int) -> Any:
    """Describes shared memory for SIZE tokens of an array."""
    if array.ndim < 4:
      return plgpu.SMEM((*leading, SIZE), array.dtype)
    tiling = plgpu.TilingTransform((8, 128 // array.dtype.itemsize))
    layout = tiling, plgpu.SwizzleTransform(128)
    return plgpu.SMEM((*leading, SIZE, head_dim), array.dtype, transforms=layout)

  kernel = plgpu.kernel(
    functools.partial(_kernel, work=work, registers=choose(interpret)),
    out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs),
    scratch_types=(
      tuple(shared(x, GROUPS) for x in tiles),
      tuple(shared(x, _DEPTH) for x in blocks),
      tuple(shared(x, GROUPS) for x in outputs if len(x.shape) < 4),
      plgpu.Barrier(num_arrivals=len(tiles), num_barriers=GROUPS),
      plgpu.Barrier(num_arrivals=len(blocks), num_barriers=_DEPTH),
      plgpu.Barrier(num_arrivals=GROUPS, num_barriers=_DEPTH),
    ),
    grid=(tokens // TILE, heads, rows),
    grid_names=('tile', 'head', 'row'),
    num_threads=GROUPS + 1,
    thread_name='group',
    # Computes powers of 2 with one instruction.
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name=work.name,
  )
  return tuple(kernel(*lists, tiles, blocks))


class _BlockStream(NamedTuple):
  """The blocks streamed past a tile, one after the other.

  Attributes:
    numbers: The blocks' indices.
    count: The number of blocks.
    refs: The blocks' arrays in main memory.
    smem: Shared memory for _DEPTH blocks.
    arrived: For each place in shared memory, the barrier of the copies to it.
    read: For each place, the barrier of the groups that have read it.
    passes: The number of heads to stream.
    head: The first of these heads.
  """

  numbers: Any
  count: Array
  refs: tuple
  smem: tuple
  arrived: Any
  read: Any
  passes: int
  head: Array

  def locate(self, step) -> tuple[Array, Array]:
    """Returns a step's place in shared memory and the first token of its block."""
    block = self.numbers[jax.lax.rem(step, self.count)]
    return jax.lax.rem(step, jnp.int32(_DEPTH)), block * SIZE

  def copy(self, row) -> None:
    """Copies each block to the place of the block _DEPTH steps before, once read."""
    steps = self.count * self.passes

    def fetch(step, _):
      place, first = self.locate(step)
      pl.when(step >= _DEPTH)(lambda: plgpu.barrier_wait(self.read.at[place]))

      @pl.when(step < steps)
      def begin():
        head = self.head + jax.lax.div(step, self.count)
        for ref, smem in zip(self.refs, self.smem, strict=True):
          tokens = _find_tokens(ref, row, head, first)
          plgpu.copy_gmem_to_smem(tokens, smem.at[place], self.arrived.at[place])

    jax.lax.fori_loop(0, steps + _DEPTH, fetch, None)

  def fold(self, add: Callable, sums: tuple) -> tuple:
    """Adds all blocks to the sums, each once it has arrived."""

    def read(step, sums):
      place, first = self.locate(step)
      plgpu.barrier_wait(self.arrived.at[place])
      sums = add(Tokens(tuple(smem.at[place] for smem in self.smem), first), sums)
      plgpu.barrier_arrive(self.read.at[place])
      return sums

    return jax.lax.fori_loop(0, self.count * self.passes, read, sums)


def _kernel(
  blocks_ref,
  count_ref,
  tile_refs,
  block_refs,
  *refs,
  work: Work,
  registers: Registers,
):
  """Computes one tile of one head and row."""
  *out_refs, tiles_smem, blocks_smem, numbers_smem, loaded, arrived, read = refs
  names = 'tile', 'head', 'row', 'group'
  tile, head, row, group = (jax.lax.axis_index(name) for name in names)
  heads, others = tile_refs[0].shape[2], block_refs[0].shape[2]
  passes = max(others // heads, 1)
  stream = _BlockStream(
    blocks_ref.at[row, tile],
    count_ref[row, tile],
    *(block_refs, blocks_smem, arrived, read, passes),
    head * passes if passes > 1 else jax.lax.div(head, jnp.int32(heads // others)),
  )

  @pl.when(group == GROUPS)
  def copy():
    plgpu.set_max_registers(_COPYING, action='decrease')
    stream.copy(row)

  @pl.when(group < GROUPS)
  def compute():
    plgpu.set_max_registers(_COMPUTING, action='increase')
    first = tile * TILE + group * SIZE
    own = Tokens(tuple(smem.at[group] for smem in tiles_smem), first)
    for ref, smem in zip(tile_refs, own.refs, strict=True):
      tokens = _find_tokens(ref, row, head, first)
      plgpu.copy_gmem_to_smem(tokens, smem, loaded.at[group])
    plgpu.barrier_wait(loaded.at[group])
    head_dim = tiles_smem[0].shape[-1]
    add = functools.partial(work.add, registers, own)
    results = work.end(stream.fold(add, work.begin(registers, head_dim)), head_dim)
    matrices = len(out_refs) - len(numbers_smem)
    out_smem = *own.refs[:matrices], *(smem.at[group] for smem in numbers_smem)
    for smem, result in zip(out_smem, results, strict=True):
      smem[...] = result.astype(smem.dtype)
    plgpu.commit_smem()
    for smem, ref in zip(out_smem, out_refs, strict=True):
      plgpu.copy_smem_to_gmem(smem, _find_tokens(ref, row, head, first))
    plgpu.wait_smem_to_gmem(0)


def _find_tokens(ref, row, head, first) -> Any:
  """Returns SIZE tokens of a row from `first` on, of one head if the array has heads."""
  tokens = pl.ds(first, SIZE)
  places = {4: (row, tokens, head), 3: (row, head, tokens), 2: (row, tokens)}
  return ref.at[places[len(ref.shape)]]
