"""models/kernels/row_attention.py: training rows on GPUs, by Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_slot_attention

from agent_r1_jax import types
from agent_r1_jax.models import attention, sharding
from agent_r1_jax.models.kernels import (
  attention_kernels,
  block_attention,
  gpu,
  row_attention,
)

_interpreted = functools.partial(
  row_attention.attend,
  interpret=test_slot_attention.InterpretGPUParams(detect_races=True),
)


def inputs(T: int, N: int, K: int, H: int, B: int = 1):
  """Random queries, keys, values and the gradient of the output, in bfloat16."""
  keys = jax.random.split(jax.random.key(1), 4)
  shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)
  normal = lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16)
  return tuple(map(normal, keys, shapes))


def test_output_and_gradients_are_those_of_blocks(monkeypatch):
  """Of padding too; with fewer blocks in shared memory than come by.

  Heads that share keys; texts of which one fills a block, and a tree of two branches.
  """
  monkeypatch.setattr(gpu, '_DEPTH', 1)
  rows, T = ([64] * 64 + [101] * 37, [120] * 20 + [70] * 50 + [120] * 50), 128
  ends = jnp.asarray([row + list(range(len(row) + 1, T + 1)) for row in rows])
  *qkv, dout = inputs(T, 4, 2, 128, len(rows))
  out, pull = jax.vjp(lambda *qkv: _interpreted(*qkv, ends), *qkv)
  wide = [x.astype(jnp.float32) for x in qkv]
  plain, pull_plain = jax.vjp(lambda *qkv: block_attention.attend(*qkv, ends), *wide)
  found = out, *pull(dout)
  expected = plain, *pull_plain(dout.astype(jnp.float32))
  for x, y in zip(found, expected, strict=True):
    assert x.dtype == jnp.bfloat16
    far = np.abs(np.asarray(x, float) - y).max() / np.abs(y).max()
    assert far < 0.01


@pytest.mark.parametrize('trees', [False, True])
def test_rows_on_an_h100_attend_by_it(monkeypatch, trees):
  """Padding included; other sizes, kinds of layers and GPUs do without."""
  monkeypatch.setattr(row_attention, 'attend', block_attention.attend)
  spans = jnp.repeat(jnp.asarray([[1, 2, 0]]), jnp.asarray([60, 190, 6]), axis=1)
  spans = block_attention.find_ends(spans) if trees else spans
  q, k, v, _ = inputs(256, 2, 1, 64)
  sees = types.Tree(spans, spans) if trees else types.Segments(spans)
  plain = attention.packed(q, k, v, sees)
  monkeypatch.setattr(sharding, 'platform', lambda: 'gpu')
  monkeypatch.setattr(sharding, 'device_kind', lambda: 'NVIDIA H100 80GB HBM3')
  np.testing.assert_array_equal(attention.packed(q, k, v, sees), plain)
  assert attention_kernels.knows_spans(q)
  for other in (q[:, :192], q[..., :32], q.astype(jnp.float32)):
    assert not attention_kernels.knows_spans(other)
  monkeypatch.setenv(row_attention.VARIABLE, '0')
  attention_kernels._passes_check.cache_clear()
  assert not attention_kernels.knows_spans(q)
  monkeypatch.delenv(row_attention.VARIABLE)
  attention_kernels._passes_check.cache_clear()
  monkeypatch.setattr(sharding, 'device_kind', lambda: 'NVIDIA A100-SXM4-80GB')
  assert not attention_kernels.knows_spans(q)


def test_one_process_of_several_cannot_choose_another_kernel(monkeypatch):
  monkeypatch.setattr(attention_kernels, 'is_hopper', lambda: True)
  monkeypatch.setattr(attention_kernels, '_passes_check', lambda *_: False)
  q = inputs(128, 1, 1, 64)[0]
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
