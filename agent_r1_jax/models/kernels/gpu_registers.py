"""Numbers in the registers of a GPU of Hopper's kind, and products on its tensor cores.

Pallas' kernels for such GPUs (Mosaic GPU) say how numbers are laid out over the threads;
its interpreter (jax 0.10.2) has copies and barriers, but neither layouts nor transposed
operands. So a kernel is written once, with one of two classes of the same methods.

M = U = SIZE: rows of a product, and columns of a block.
"""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

# Rows of a product of the tensor cores, and numbers of a block.
SIZE = 64


class Hopper:
  """What is done with numbers in registers, on an H100: they have layouts."""

  def full(self, shape: tuple[int, ...], value: float) -> Array:
    """Makes float32 numbers for rows, [M], or for rows and columns, [M, ...]."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

  def load(self, ref: Any) -> Array:
    """Loads a number for each row from shared memory."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.load(ref, (), layout=plgpu.Layout.WGMMA.reduce(1))

  def load_columns(self, ref: Any) -> Array:
    """Loads a number for each column, and repeats it in each row, [M, U]."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x_U = plgpu.load(ref, (), layout=plgpu.Layout.WGMMA.reduce(0))
    x_MU = jax.lax.broadcast_in_dim(x_U, (SIZE, SIZE), [1])
    return plgpu.layout_cast(x_MU, plgpu.Layout.WGMMA)

  def cast(self, ref: Any, wide_ref: Any) -> None:
    """Casts the integers of a block, from shared memory to shared memory."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x_UH = plgpu.load(ref, (), layout=plgpu.Layout.WGMMA_UPCAST_2X)
    wide_UH = x_UH.astype(wide_ref.dtype)
    wide_ref[...] = plgpu.layout_cast(wide_UH, plgpu.Layout.WGMMA)
    plgpu.commit_smem()

  def count(self, axis: int) -> Array:
    """Returns [M, U] with 0, 1, ... along an axis."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = plgpu.Layout.WGMMA
    return plgpu.broadcasted_iota(jnp.int32, (SIZE, SIZE), axis, layout=layout)

  def multiply(self, left, right_ref, shape, *, transposed: bool = False) -> Array:
    """Multiplies on the tensor cores, and waits for the product."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def run(sum_ref):
      right = plgpu.transpose_ref(right_ref, (1, 0)) if transposed else right_ref
      plgpu.wgmma(sum_ref, left, right)
      return sum_ref[...]

    accumulator = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(run, accumulator(shape, jnp.float32))

  def add_product(self, sums: Array, left: Array, right_ref) -> Array:
    """Adds a product to sums, [M, ...] in float32, and waits for it."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    accumulator = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
    multiply = lambda sum_ref: plgpu.wgmma(sum_ref, left, right_ref)
    total: Any = pl.run_state(multiply)(accumulator.init(sums))
    return total


class Interpreted:
  """The same for Pallas' interpreter.

  It has copies and barriers, but (jax 0.10.2) neither layouts of registers nor transposed
  operands.
  """

  def full(self, shape: tuple[int, ...], value: float) -> Array:
    """Makes float32 numbers."""
    return jnp.full(shape, value, jnp.float32)

  def load(self, ref: Any) -> Array:
    """Loads all of `ref`."""
    return ref[...]

  def load_columns(self, ref: Any) -> Array:
    """Repeats all of `ref` in each row."""
    return jax.lax.broadcast_in_dim(ref[...], (SIZE, SIZE), [1])

  def cast(self, ref: Any, wide_ref: Any) -> None:
    """Casts."""
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
  """Returns those of the interpreter where its parameters are given."""
  return Interpreted() if interpret else Hopper()
