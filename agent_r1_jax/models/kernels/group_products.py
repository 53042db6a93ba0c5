"""Grouped matmuls: products of rows, sorted by group, with their group's matrix.

XLA has no kernel for them on GPUs: its ragged product computes every group for every row.
The kernels here ship with JAX's Pallas, for Hopper GPUs and for TPUs (megablox), and read
only a group's own rows. On a Hopper GPU each process checks the kernel first; without it
experts compute in rounds (experts.py).

Letters: S rows, E groups, X numbers of a row, Y numbers of its product.
"""

import importlib
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, Int

from agent_r1_jax.models import sharding
from agent_r1_jax.models.kernels import hopper

# 0 in the environment disables the GPU kernels.
VARIABLE = 'AGENT_R1_GROUP_PRODUCTS'
INSTEAD = 'Experts compute in rounds, as many as the busiest one needs'
# GPUs: numbers per row in a block, and blocks in shared memory at a time.
_DEPTH, _STEPS = 64, 4
# TPUs: the lanes of a tile, and the most numbers per row in a block.
_LANES, _WIDEST = 128, 1024


def supports(rows: int, sizes: tuple[int, ...], dtype: Any) -> bool:
  """Whether this platform has a kernel for so many rows, and sizes of rows."""
  parts = (rows, *sizes) if sharding.platform() == 'tpu' else sizes
  least = _LANES if sharding.platform() == 'tpu' else _DEPTH
  return jnp.dtype(dtype) == jnp.bfloat16 and not any(n % least for n in parts)


@jax.custom_vjp
def multiply(
  x_SX: Float[Array, 'S X'], kernel_EXY: Float[Array, 'E X Y'], sizes_E: Int[Array, 'E']
) -> Float[Array, 'S Y']:
  """Multiplies the first sizes[0] rows by the first matrix, the next by the second, ...

  The remaining rows become 0.
  """
  return _multiply(x_SX, kernel_EXY, sizes_E, transposed=False)


def _forward(x_SX, kernel_EXY, sizes_E):
  return multiply(x_SX, kernel_EXY, sizes_E), (x_SX, kernel_EXY, sizes_E)


def _backward(saved, dy_SY):
  x_SX, kernel_EXY, sizes_E = saved
  # A kernel masks rows of other groups by multiplying with 0, so the rows of no group
  # must be finite in both operands, and 0 in one.
  dkernel_EXY = _multiply_groups(x_SX, _clear(dy_SY, sizes_E), sizes_E)
  return _multiply(dy_SY, kernel_EXY, sizes_E, transposed=True), dkernel_EXY, None


multiply.defvjp(_forward, _backward)


def _multiply(x_SX, kernel_EXY, sizes_E, *, transposed: bool) -> Array:
  """Computes [S, X] by [E, X, Y]; or, transposed, by [E, Y, X]."""
  S, X = x_SX.shape
  Y = kernel_EXY.shape[1 if transposed else 2]
  rows = _choose_rows(S, len(sizes_E))
  if sharding.platform() == 'tpu':
    tiles = rows, _choose_tile(X), _choose_tile(Y)
    given = x_SX, kernel_EXY, sizes_E, x_SX.dtype, tiles
    y_SY = _import_megablox().gmm(*given, transpose_rhs=transposed)
  else:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    y_SY = ragged_dot_mgpu.ragged_dot(
      x_SX,
      kernel_EXY,
      group_sizes=sizes_E,
      block_m=rows,
      block_n=_choose_block(Y),
      transpose_rhs=transposed,
      **_describe_pipeline(),
    )
  return _clear(y_SY, sizes_E)


def _multiply_groups(x_SX, y_SY, sizes_E) -> Array:
  """Computes the sum over each group's rows of x times y, [E, X, Y]."""
  (S, X), Y = x_SX.shape, y_SY.shape[1]
  if sharding.platform() == 'tpu':
    tiles = _choose_rows(S, len(sizes_E)), _choose_tile(X), _choose_tile(Y)
    return _import_megablox().tgmm(x_SX.swapaxes(0, 1), y_SY, sizes_E, x_SX.dtype, tiles)
  from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

  return transposed_ragged_dot_mgpu.transposed_ragged_dot(
    x_SX,
    y_SY,
    group_sizes=sizes_E,
    block_m=_choose_block(X),
    block_n=_choose_block(Y),
    **_describe_pipeline(),
  )


def _import_megablox() -> Any:
  # The package has a function of the module's name.
  return importlib.import_module('jax.experimental.pallas.ops.tpu.megablox.gmm')


def _describe_pipeline() -> dict[str, Any]:
  return {'block_k': _DEPTH, 'max_concurrent_steps': _STEPS, 'grid_block_n': 4}


def _choose_rows(S: int, groups: int) -> int:
  """Returns the rows per block: a quarter of a mean group, since its end wastes one."""
  sizes = (512, 256, 128) if sharding.platform() == 'tpu' else (128, 64)
  return next((n for n in sizes if 4 * n * groups <= S and S % n == 0), sizes[-1])


def _choose_block(size: int) -> int:
  return 2 * _DEPTH if size % (2 * _DEPTH) == 0 else _DEPTH


def _choose_tile(size: int) -> int:
  """Returns the largest divisor of `size` that a TPU's block may have."""
  return max(n for n in range(_LANES, _WIDEST + 1, _LANES) if size % n == 0)


def _clear(y_SY, sizes_E) -> Array:
  """Sets rows of no group to 0, which kernels leave unwritten."""
  return jnp.where((jnp.arange(len(y_SY)) < sizes_E.sum())[:, None], y_SY, 0)


def measure_gap() -> float:
  """Measures the largest difference to plain products and their gradients on this device.

  The result is relative to the largest number. One group is empty, others end within a
  block, and some rows have no group.
  """
  sizes_E = jnp.asarray([100, 0, 300, 57, 500], jnp.int32)
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (1024, 128), (5, 128, 256), (1024, 256)
  x_SX, kernel_EXY, dy_SY = (
    jax.random.normal(key, shape, jnp.bfloat16)
    for key, shape in zip(keys, shapes, strict=True)
  )

  def differentiate(function, x_SX, kernel_EXY):
    y_SY, pull = jax.vjp(lambda *given: function(*given, sizes_E), x_SX, kernel_EXY)
    return y_SY, *pull(dy_SY.astype(y_SY.dtype))

  wide = x_SX.astype(jnp.float32), kernel_EXY.astype(jnp.float32)
  found = jax.jit(lambda *given: differentiate(multiply, *given))(x_SX, kernel_EXY)
  plain = jax.jit(lambda *given: differentiate(multiply_plainly, *given))(*wide)
  return hopper.find_gap(found, plain)


def multiply_plainly(x_SX, kernel_EXY, sizes_E) -> Array:
  """The definition of `multiply`: multiplies rows by all matrices, and masks others'."""
  starts_S = jnp.arange(len(x_SX))
  group_S = jnp.searchsorted(jnp.cumsum(sizes_E), starts_S, side='right')
  mine_SE = group_S[:, None] == jnp.arange(len(sizes_E))[None]
  return jnp.einsum('sx,exy,se->sy', x_SX, kernel_EXY, mine_SE.astype(x_SX.dtype))
