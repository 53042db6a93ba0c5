"""models/kernels/row_attention.py: training rows on GPUs, by Pallas' interpreter."""

import functools

import interpreted
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_r1_jax import types
from agent_r1_jax.models import attention, sharding
from agent_r1_jax.models.kernels import (
  attention_kernels,
  block_attention,
  gpu,
  hopper,
  row_attention,
)

_interpreted = functools.partial(
  row_attention.attend,
  interpret=interpreted.InterpretGPUParams(detect_races=True),
)


def inputs(T: int, N: int, K: int, H: int, B: int = 1):
  """Random queries, keys, values and the gradient of the output, in bfloat16."""
  rng = np.random.default_rng(1)
  normal = lambda heads: rng.normal(size=(B, T, heads, H)).astype(jnp.bfloat16)
  return tuple(map(normal, (N, K, K, N)))


def test_output_and_gradients_are_those_of_blocks(monkeypatch):
  """Of padding too; with fewer blocks in shared memory than come by.

  Heads that share keys; texts of which one fills a block, and a tree of two branches.
  """
  monkeypatch.setattr(gpu, '_DEPTH', 1)
  rows, T = ([64] * 64 + [101] * 37, [120] * 20 + [70] * 50 + [120] * 50), 128
  ends = np.array([row + list(range(len(row) + 1, T + 1)) for row in rows])
  given = inputs(T, 4, 2, 128, len(rows))

  @functools.partial(jax.jit, static_argnums=0)
  def both(attend, *qkv_and_slope):
    *qkv, slope = qkv_and_slope
    out, pull = jax.vjp(lambda *qkv: attend(*qkv, jnp.asarray(ends)), *qkv)
    return out, *pull(slope)

  found = both(_interpreted, *given)
  expected = both(block_attention.attend, *(x.astype(np.float32) for x in given))
  for x, y in zip(found, expected, strict=True):
    assert x.dtype == jnp.bfloat16
    far = np.abs(np.asarray(x, np.float32) - y).max() / np.abs(y).max()
    assert far < 0.01


@pytest.mark.parametrize('trees', [False, True])
def test_rows_on_an_h100_attend_by_it(monkeypatch, trees):
  """Padding included; other sizes, kinds of layers and GPUs do without."""
  monkeypatch.setattr(row_attention, 'attend', block_attention.attend)
  spans = jnp.repeat(jnp.asarray([[1, 2, 0]]), jnp.asarray([60, 190, 6]), axis=1)
  spans = block_attention.find_ends(spans) if trees else spans
  q, k, v, _ = map(jnp.asarray, inputs(256, 2, 1, 64))
  sees = types.Tree(spans, spans) if trees else types.Segments(spans)
  plain = jax.jit(attention.packed)(q, k, v, sees)
  monkeypatch.setattr(sharding, 'platform', lambda: 'gpu')
  monkeypatch.setattr(sharding, 'device_kind', lambda: 'NVIDIA H100 80GB HBM3')
  found = jax.jit(lambda *given: attention.packed(*given))(q, k, v, sees)
  np.testing.assert_array_equal(found, plain)
  assert attention_kernels.knows_spans(q)
  for other in (q[:, :192], q[..., :32], q.astype(jnp.float32)):
    assert not attention_kernels.knows_spans(other)
  monkeypatch.setenv(row_attention.VARIABLE, '0')
  hopper.passes_check.cache_clear()
  assert not attention_kernels.knows_spans(q)
  monkeypatch.delenv(row_attention.VARIABLE)
  hopper.passes_check.cache_clear()
  monkeypatch.setattr(sharding, 'device_kind', lambda: 'NVIDIA A100-SXM4-80GB')
  assert not attention_kernels.knows_spans(q)


def test_one_process_of_several_cannot_choose_another_kernel(monkeypatch):
  monkeypatch.setattr(hopper, 'is_here', lambda: True)
  monkeypatch.setattr(hopper, 'passes_check', lambda *_: False)
  q = jnp.asarray(inputs(128, 1, 1, 64)[0])
  assert not attention_kernels.knows_spans(q)
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  with pytest.raises(RuntimeError, match='all of them with AGENT_R1_ROW_ATTENTION=0'):
    attention_kernels.knows_spans(q)
  monkeypatch.setenv(row_attention.VARIABLE, '0')
  assert not attention_kernels.knows_spans(q)


@pytest.mark.parametrize('wrong', [None, 'out', 'gradient'])
def test_its_check_measures_outputs_and_gradients(monkeypatch, wrong):
  @jax.custom_vjp
  def twice(x):
    return x

  twice.defvjp(lambda x: (x, None), lambda _, dx: (2 * dx,))

  def off(q, k, v, ends):
    out = block_attention.attend(q, twice(k) if wrong == 'gradient' else k, v, ends)
    return out.at[1, 200].multiply(1.5) if wrong == 'out' else out

  monkeypatch.setattr(row_attention, 'attend', off)
  gap = row_attention.measure_gap(64)
  assert (gap < 0.02) if wrong is None else (0.05 < gap < 2)
