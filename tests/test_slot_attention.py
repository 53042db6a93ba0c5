"""A decode's attention on GPUs (slot_attention.py), by Pallas' interpreter."""

import functools
import threading

import interpreted
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_r1_jax.models import attention, kv_cache, sharding
from agent_r1_jax.models.kernels import attention_kernels, hopper, slot_attention


def _interpret_anew():
  """The kernel, compiled as the module's constants are now."""
  interpret = interpreted.InterpretGPUParams(detect_races=True)
  attend = functools.partial(slot_attention.attend, interpret=interpret)
  return jax.jit(attend, static_argnames='heads')


_interpreted = _interpret_anew()
_attend_plainly = jax.jit(slot_attention.attend_plainly)


def inputs(B: int, T: int, N: int, K: int, S: int, H: int):
  """Random queries, keys and values in bfloat16."""
  rng, shapes = np.random.default_rng(1), ((B, T, N, H), (B, K, S, H), (B, K, S, H))
  return tuple(rng.normal(size=shape).astype(jnp.bfloat16) for shape in shapes)


@pytest.mark.parametrize(
  ('T', 'N', 'K', 'S', 'H'),
  [
    (1, 8, 1, 320, 128),
    (17, 8, 1, 192, 64),  # Three tiles of queries, of which the last is not full.
  ],
)
def test_used_slots_are_the_plain_attention(T, N, K, S, H):
  """Texts of T slots to all, more and fewer blocks than fit the shared memory."""
  first = np.array([0, 62, 63, 64, S - T])[:, None].clip(max=S - T)
  positions = first + np.arange(T)
  q, k, v = inputs(len(first), T, N, K, S, H)
  # What lies in blocks after a text is never read: it may be anything.
  blocks = positions.max(1, keepdims=True) // slot_attention.BLOCK
  unread = (np.arange(S) // slot_attention.BLOCK > blocks)[:, None, :, None]
  spoil = lambda x, value: np.where(unread, np.array(value, x.dtype), x)
  out = _interpreted(q, spoil(k, np.nan), spoil(v, np.nan), positions)
  assert out.dtype == jnp.bfloat16
  plain = jax.jit(attention.cached)(q, spoil(k, 0), spoil(v, 0), positions)
  np.testing.assert_allclose(_widen(out), _widen(plain), atol=0.02)


def _widen(x):
  """In NumPy, float32."""
  return np.asarray(x, np.float32)


def test_of_eight_bits_integers_and_scales_are_read():
  """Five blocks, more than are in shared memory, and a text of one slot."""
  q, k, v = inputs(2, 1, 4, 2, 320, 128)
  positions = np.array([[0], [317]])
  (k, k_scale), (v, v_scale) = map(jax.jit(kv_cache.round_heads), (k, v))
  # Slots that are larger than others by as much as two scales are.
  seven = 1 + np.arange(320, dtype=np.float32) % 7
  scales = np.asarray(k_scale) * 3, np.asarray(v_scale) * seven
  plain = _attend_plainly(q, k, v, positions, scales)
  unread = (np.arange(320) >= slot_attention.BLOCK) & (positions == 0)
  spoil = lambda x: np.where(unread[:, None], np.float32(np.nan), x)
  out = _interpreted(q, k, v, positions, scales=tuple(map(spoil, scales)))
  assert out.dtype == jnp.bfloat16
  # XLA's attention is the same.
  for found in (out, jax.jit(attention.cached)(q, k, v, positions, scales=scales)):
    far = np.abs(_widen(found) - plain).max(-1) / np.abs(plain).max(-1)
    assert far.max() < 0.02


def test_parts_keep_the_cores_busy_and_compute_the_same(monkeypatch):
  """Two rows are few for 132 cores: each is computed in parts, some of them empty."""
  counts = [
    slot_attention._count_parts(*sizes) for sizes in ((4, 5), (64, 64), (132, 64))
  ]
  assert counts == [5, 2, 1]
  positions = np.array([[38, 39], [628, 629]])
  q, k, v = inputs(2, 2, 2, 1, 640, 64)
  plain = _attend_plainly(q, k, v, positions)
  for parts in (1, 2, 10):  # Ten blocks one after the other, five, or one.
    monkeypatch.setattr(slot_attention, '_MOST_PARTS', parts)
    out = _interpret_anew()(q, k, v, positions)
    np.testing.assert_allclose(_widen(out), plain, atol=0.02, err_msg=str(parts))


def test_of_several_heads_those_that_the_queries_share_are_read():
  q, k, v = inputs(2, 2, 4, 3, 128, 64)
  positions = np.array([[5, 6], [126, 127]])
  plain = np.asarray(_attend_plainly(q, k[:, 1:], v[:, 1:], positions))
  k[:, 0] = v[:, 0] = np.nan
  out = _interpreted(q, k, v, positions, 1, heads=2)
  np.testing.assert_allclose(_widen(out), plain, atol=0.02)


def test_a_token_past_the_last_slot_is_harmless(monkeypatch):
  monkeypatch.setattr(sharding, 'platform', lambda: 'gpu')
  monkeypatch.setattr(slot_attention, 'attend', _interpreted)
  q, k, v = inputs(3, 3, 4, 2, 128, 64)
  positions = np.array([[5], [127], [128]]) - np.arange(3)
  out = _widen(jax.jit(attention_kernels.over_used_slots)(q, k, v, positions))
  assert np.isfinite(out).all()
  plain, known = np.asarray(_attend_plainly(q, k, v, positions)), positions < 128
  np.testing.assert_allclose(out[known], plain[known], atol=0.02)


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
  for queries in (1, 256):
    for rounded in (False, True):
      sizes = (8, 2, 4096, H), dtype, queries, rounded
      assert attention_kernels.reads_used_slots(*sizes) == reads


@pytest.fixture
def check(monkeypatch):
  """The check of a GPU, which measures what `gap` returns."""

  def run(gap):
    monkeypatch.setattr(slot_attention, 'measure_gap', lambda *args: gap())
    hopper.passes_check.cache_clear()
    return hopper.passes_check(slot_attention, 128)

  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  yield run
  hopper.passes_check.cache_clear()


@pytest.mark.parametrize('gap', [0.004, 0.3, float('nan')])
def test_on_a_gpu_it_is_checked_before_it_is_used(check, caplog, gap):
  """What differs from XLA's attention is left to XLA."""
  assert check(lambda: gap) == (gap == 0.004)
  assert ('The cache is read by XLA' in caplog.text) == (gap != 0.004)


def test_what_cannot_be_compiled_is_left_to_xla(check, caplog):
  def fail():
    raise RuntimeError('no ptxas')

  assert not check(fail)
  assert 'The cache is read by XLA, in whole buckets: no ptxas' in caplog.text


def test_a_check_without_an_answer_says_how_to_go_on(check, monkeypatch):
  waits = threading.Event()
  monkeypatch.setattr(hopper, '_CHECK_SECONDS', 0.05)
  try:
    with pytest.raises(RuntimeError, match='AGENT_R1_SLOT_ATTENTION=0 leaves the kernel'):
      check(waits.wait)
    monkeypatch.setenv(slot_attention.VARIABLE, '0')
    assert not check(waits.wait)
  finally:
    waits.set()


@pytest.mark.parametrize('rounded', [False, True])
def test_the_check_measures_the_largest_difference(monkeypatch, rounded):
  given = []

  def off(*args, scales=None):
    given.extend(args[1:3])
    return slot_attention.attend_plainly(*args, scales).at[2, 3, 5, 7].add(0.5)

  monkeypatch.setattr(slot_attention, 'attend', off)
  assert slot_attention.measure_gap(64, rounded) == pytest.approx(0.5, abs=0.02)
  assert {x.dtype.name for x in given} == {'int8' if rounded else 'bfloat16'}
