"""models/kernels/group_products.py: JAX's kernels for the products of experts."""

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from agent_r1_jax.models import experts, sharding
from agent_r1_jax.models.kernels import group_products, hopper


def on(monkeypatch, platform: str, kind: str = '') -> None:
  """Programs are for this platform, of which this machine has no chip."""
  monkeypatch.setattr(sharding, 'platform', lambda: platform)
  monkeypatch.setattr(sharding, 'device_kind', lambda: kind)


def test_on_a_tpu_products_and_gradients_are_the_definition(monkeypatch):
  """As Pallas interprets the kernel for TPUs."""
  on(monkeypatch, 'tpu')
  with pltpu.force_tpu_interpret_mode():
    assert group_products.measure_gap() < 0.01


def _leave_rest(y, sizes):
  """What no kernel writes."""
  return jnp.where((jnp.arange(len(y)) < sizes.sum())[:, None], y, jnp.nan)


@pytest.fixture
def kernels_for_gpus(monkeypatch):
  """Stands in for JAX's kernels for GPUs, which no CPU interprets, by their contract."""
  from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as one
  from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as other

  def multiply(x, kernel, *, group_sizes, block_m, block_n, block_k, transpose_rhs, **_):
    kernel = kernel.swapaxes(1, 2) if transpose_rhs else kernel
    assert kernel.shape[1] % block_k == kernel.shape[2] % block_n == block_m % 64 == 0
    y = group_products.multiply_plainly(x, kernel, group_sizes)
    return _leave_rest(y, group_sizes)

  def multiply_groups(x, y, *, group_sizes, block_m, block_n, **_):
    assert x.shape[1] % block_m == y.shape[1] % block_n == 0
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(len(x)), side='right')
    # Rows of other groups are left out by a product with 0.
    mine = (group[:, None] == jnp.arange(len(group_sizes))[None]).astype(x.dtype)
    return jnp.einsum('sx,sy,se->exy', x, y, mine)

  monkeypatch.setattr(one, 'ragged_dot', multiply)
  monkeypatch.setattr(other, 'transposed_ragged_dot', multiply_groups)
  on(monkeypatch, 'gpu', 'NVIDIA H100 80GB HBM3')


def test_on_a_gpu_rows_of_no_group_reach_nothing(kernels_for_gpus, monkeypatch):
  """Whatever the kernels leave there; the check of a GPU would see it."""
  assert group_products.measure_gap() < 0.01

  def leave_rest(x, kernel, sizes):
    return _leave_rest(group_products.multiply_plainly(x, kernel, sizes), sizes)

  monkeypatch.setattr(group_products, 'multiply', leave_rest)
  assert not group_products.measure_gap() < 0.01


def test_experts_on_an_h100_compute_what_blocks_do(kernels_for_gpus, monkeypatch):
  """Of two chips that share the experts, so that rows are left, with their gradients."""
  monkeypatch.setattr(hopper, 'passes_everywhere', lambda kernel: True)
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  kernels = experts.Kernels(draw(3, 64, 128), draw(3, 64, 128), draw(3, 128, 64))
  x, weight, slope = draw(2, 32, 64), jnp.full((2, 32, 2), 0.5), draw(2, 32, 64)
  expert = jnp.asarray(rng.integers(-1, 4, (2, 32, 2)))  # -1 and 3 are elsewhere.

  def differentiate(x, kernels, slope):
    activate = lambda gate, up: jax.nn.silu(gate) * up
    mix = lambda x, kernels: experts.mix(x, weight, expert, kernels, activate)
    out, pull = jax.vjp(mix, x, kernels)
    return out, pull(slope)

  found = jax.jit(differentiate)(x, kernels, slope)
  on(monkeypatch, 'cpu')
  plain = jax.jit(lambda *given: differentiate(*given))(x, kernels, slope)
  for y, z in zip(*map(jax.tree.leaves, (found, plain)), strict=True):
    y, z = (np.asarray(array, np.float32) for array in (y, z))
    np.testing.assert_allclose(y, z, rtol=0, atol=0.03 * np.abs(z).max())


def test_where_no_kernel_knows_the_shape_others_compute(monkeypatch):
  choose = lambda rows, D, I, dtype=jnp.bfloat16: experts._choose_product(
    rows, experts.Kernels(jnp.zeros((2, D, I), dtype), *jnp.zeros((2, 1))), dtype
  )
  monkeypatch.setattr(hopper, 'passes_everywhere', lambda kernel: True)
  on(monkeypatch, 'gpu', 'NVIDIA H100 80GB HBM3')
  assert choose(100, 192, 64) is group_products.multiply
  assert choose(100, 192, 60) is choose(100, 192, 64, jnp.float32) is None
  on(monkeypatch, 'gpu', 'NVIDIA A100-SXM4-80GB')
  assert choose(100, 192, 64) is None
  on(monkeypatch, 'tpu')
  assert choose(256, 128, 256) is group_products.multiply
  assert choose(100, 128, 256) is choose(256, 128, 192) is experts._multiply_ragged
