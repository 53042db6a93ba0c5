"""models/slot_attention.py: a decode's attention on GPUs, by Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_r1_jax.models import attention, attention_kernels, sharding, slot_attention

try:
  from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
except ImportError:  # Before jax 0.11 it has no public name.
  from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

_interpreted = functools.partial(
  slot_attention.attend, interpret=InterpretGPUParams(detect_races=True)
)


def inputs(B: int, N: int, K: int, S: int, H: int):
  """Random queries, keys and values in bfloat16."""
  keys = jax.random.split(jax.random.key(1), 3)
  shapes = (B, N, H), (B, K, S, H), (B, K, S, H)
  normal = lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16)
  return tuple(map(normal, keys, shapes))


@pytest.mark.parametrize(
  ('N', 'K', 'S', 'H'), [(8, 1, 512, 128), (14, 2, 384, 64), (4, 4, 128, 128)]
)
def test_used_slots_are_the_plain_attention(N, K, S, H):
  """Texts of one slot to all, more and fewer blocks than fit the shared memory."""
  used = jnp.asarray([1, 63, 64, 65, S - 1, S])
  q, k, v = inputs(len(used), N, K, S, H)
  # What lies in slots after a text is never read: it may be anything.
  read = -(-used // slot_attention.BLOCK) * slot_attention.BLOCK
  unread = (jnp.arange(S)[None] >= read[:, None])[:, None, :, None]
  k, v = (jnp.where(unread, jnp.nan, x) for x in (k, v))
  out = _interpreted(q, k, v, used)
  assert out.dtype == jnp.bfloat16
  k, v = (jnp.where(unread, 0, x) for x in (k, v))
  plain = attention.cached(q[:, None], k, v, used[:, None] - 1)[:, 0]
  np.testing.assert_allclose(out.astype(float), plain.astype(float), atol=0.02)


def test_parts_keep_the_cores_busy_and_compute_the_same(monkeypatch):
  """Two rows are few for 132 cores: each is computed in parts, some of them empty."""
  counts = [
    slot_attention._count_parts(*sizes) for sizes in ((4, 5), (64, 64), (132, 64))
  ]
  assert counts == [5, 2, 1]
  used = jnp.asarray([40, 630])
  q, k, v = inputs(2, 4, 2, 640, 64)
  plain = slot_attention._attend_plainly(q, k, v, used)
  for parts in (1, 2, 10):  # Ten blocks one after the other, five, or one.
    monkeypatch.setattr(slot_attention, '_MOST_PARTS', parts)
    out = _interpreted(q, k, v, used)
    np.testing.assert_allclose(out.astype(float), plain, atol=0.02, err_msg=str(parts))


def test_a_decode_attends_by_it_and_a_row_past_the_last_slot_is_harmless(monkeypatch):
  monkeypatch.setattr(sharding, 'platform', lambda: 'gpu')
  monkeypatch.setattr(slot_attention, 'attend', _interpreted)
  q, k, v = inputs(3, 4, 2, 128, 64)
  positions = jnp.asarray([[5], [127], [128]])
  out = attention_kernels.over_used_slots(q[:, None], k, v, positions)
  assert jnp.isfinite(out).all()
  plain = slot_attention._attend_plainly(q, k, v, positions[:, 0] + 1)
  np.testing.assert_allclose(out[:2, 0].astype(float), plain[:2], atol=0.02)


@pytest.mark.parametrize(
  ('kind', 'H', 'dtype', 'reads'),
  [
    ('NVIDIA H100 80GB HBM3', 128, 'bfloat16', True),
    ('NVIDIA H200', 64, 'bfloat16', True),
    ('NVIDIA H100 80GB HBM3', 128, 'float32', False),
    ('NVIDIA H100 80GB HBM3', 80, 'bfloat16', False),
    ('NVIDIA A100-SXM4-80GB', 128, 'bfloat16', False),
    ('NVIDIA B200', 128, 'bfloat16', False),
  ],
)
def test_it_is_for_gpus_with_its_instructions(monkeypatch, kind, H, dtype, reads):
  monkeypatch.setattr(sharding, 'platform', lambda: 'gpu')
  monkeypatch.setattr(sharding, 'device_kind', lambda: kind)
  assert attention_kernels.reads_used_slots((8, 2, 4096, H), dtype) == reads


@pytest.mark.parametrize('gap', [0.004, 0.3, float('nan'), RuntimeError('no ptxas')])
def test_on_a_gpu_it_is_checked_before_it_is_used(monkeypatch, caplog, gap):
  """What differs from XLA's attention, or cannot be compiled, is left to XLA."""

  def measure(H):
    if isinstance(gap, Exception):
      raise gap
    return gap

  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(slot_attention, 'measure_gap', measure)
  attention_kernels._passes_check.cache_clear()
  try:
    assert attention_kernels._passes_check(128) == (gap == 0.004)
  finally:
    attention_kernels._passes_check.cache_clear()
  assert ('Decodes attend by XLA' in caplog.text) == (gap != 0.004)


def test_the_check_measures_the_largest_difference(monkeypatch):
  monkeypatch.setattr(slot_attention, 'attend', _interpreted)
  assert 0 < slot_attention.measure_gap(64) < 0.02
  off = lambda *args: _interpreted(*args).at[2, 3, 5].add(0.5)
  monkeypatch.setattr(slot_attention, 'attend', off)
  assert slot_attention.measure_gap(64) == pytest.approx(0.5, abs=0.03)


def test_too_many_queries_of_a_key_value_head_are_refused():
  q, k, v = inputs(1, 65, 1, 64, 64)
  with pytest.raises(ValueError, match='65 query heads share a key-value head'):
    slot_attention.attend(q, k, v, jnp.asarray([1]))
