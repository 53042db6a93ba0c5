"""models/attention.py: the kernels for TPUs and GPUs, and heads dealt to chips.

That chips which share a row compute what one does is in test_sharding.py.
"""

import functools
from typing import Any

import jax

# It lowers only where cuDNN says its version, which it cannot say here.
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from agent_r1_jax import types
from agent_r1_jax.models import attention, sharding
from agent_r1_jax.models.kernels import attention_kernels


def inputs(B, T, N, K, H):
  """Queries, keys, values and a slope for the result, all random."""
  rng = np.random.default_rng(0)
  make = lambda heads: rng.normal(size=(B, T, heads, H)).astype(np.float32)
  return make(N), make(K), make(K), make(N)


def spoil(x, where):
  """A copy that is NaN at these tokens."""
  x = x.copy()
  x[:, where] = np.nan
  return x


def segments(T):
  """Two, and padding, or as much of them as there is room for."""
  ids = np.searchsorted([100, 240], np.arange(T), 'right') + 1
  return np.where(ids == 3, 0, ids)[None].astype(np.int32)


def plain(q, k, v, visible, cap=None):
  """Attention by its definition, visible [B, T, T]; float32."""
  q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
  scores = jnp.einsum('btnh,bsnh->bnts', q, k) / q.shape[3] ** 0.5
  scores = scores if cap is None else cap * jnp.tanh(scores / cap)
  weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf))
  return jnp.einsum('bnts,bsnh->btnh', weights, v)


def forest(T, seed):
  """The ends of random trees that branch some 30 times, and of padding; NumPy [T]."""
  rng, ends, path, used = np.random.default_rng(seed), np.arange(1, T + 1), [], T - T // 9
  second = used * (seed + 1) // 3
  for t in range(used):
    if t == second or rng.random() < 30 / T:
      # The next token has a parent earlier on the path, or a tree begins.
      kept = int(rng.integers(0, len(path) + 1)) if t != second else 0
      ends[path[kept:]] = t
      del path[kept:]
    path.append(t)
  ends[path] = used
  return ends


def tree(ends):
  """What rows of trees see; attention reads no parents."""
  return types.Tree(jnp.zeros_like(ends), jnp.asarray(ends))


def assert_plain(
  attend,
  *,
  H=32,
  T=256,
  heads=(2, 1),
  dtype='float32',
  ends=None,
  cap=None,
  **tolerance: Any,
):
  """Forward and backward; what padding of segments computes has no meaning."""
  rows = 1 if ends is None else len(ends)
  q, k, v, slope = (x.astype(jnp.dtype(dtype)) for x in inputs(rows, T, *heads, H))
  ids, at = segments(T), np.arange(T)
  visible = (at[:, None] >= at)[None]
  if ends is None:
    visible = visible & (ids[:, :, None] == ids[:, None])
    slope *= (ids > 0)[..., None, None]
  else:
    visible = visible & (at[:, None] < ends[:, None])

  @functools.partial(jax.jit, static_argnums=0)
  def both(attend, spans, q, k, v):
    def total(q, k, v):
      out = attend(q, k, v, spans).astype(jnp.float32) * (slope != 0)
      return jnp.vdot(out, slope.astype(jnp.float32)), out

    gradient, out = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return [x.astype(jnp.float32) for x in (out, *gradient)]

  sees = types.Segments(ids) if ends is None else tree(ends)
  found = both(attend, sees, q, k, v)
  expected = both(functools.partial(plain, cap=cap), visible, q, k, v)
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, **tolerance)


def test_a_cpus_blocks_in_bfloat16():
  assert_plain(attention.packed, dtype='bfloat16', rtol=0.05, atol=0.1)


def test_blocks_before_the_window_are_not_read():
  q, k, v, _ = inputs(1, 256, 2, 1, 32)
  spoilt, ids = spoil(v, slice(64)), jnp.ones((1, 256), int)
  local = attention.Local(jnp.asarray(True), jnp.arange(256)[None])
  attend = functools.partial(attention.packed, rules=attention.Rules(window=64))
  attend = jax.jit(attend)
  out = attend(q, k, spoilt, types.Segments(ids), local=local)
  # Token 126 sees token 63, so that its block reads the spoilt one; the next does not.
  np.testing.assert_array_equal(np.isnan(out[0]).any((1, 2)), np.arange(256) < 128)
  everything = local._replace(slides=jnp.asarray(False))
  assert np.isnan(attend(q, k, spoilt, types.Segments(ids), local=everything)).all()


def test_blocks_that_nothing_sees_are_not_read():
  """NaN in a segment's keys reaches that segment alone: it is masked nowhere else."""
  q, k, v, _ = inputs(1, 256, 2, 1, 32)
  ids = np.arange(256)[None] // 64 + 1
  spoilt = spoil(k, slice(64, 128))
  attend = jax.jit(attention.packed)
  out, clean = (attend(q, x, v, types.Segments(ids)) for x in (spoilt, k))
  assert np.isnan(out[:, 64:128]).all()
  np.testing.assert_array_equal(out[:, :64], clean[:, :64])
  np.testing.assert_array_equal(out[:, 128:], clean[:, 128:])


@pytest.mark.parametrize('cap', [None, 0.7])
def test_the_kernel_for_tpus_is_the_plain_attention(cap):
  """In a layer that does not slide, the window changes nothing."""

  def attend(q, k, v, sees):
    layer = (jnp.asarray(False), 100, cap) if cap else ()
    return attention_kernels.splash(q, k, v, sees.ids, *layer, interpret=True)

  assert_plain(attend, H=64 if cap else 128, cap=cap, rtol=1e-4, atol=1e-4)


@pytest.fixture
def tpu(monkeypatch):
  """What is traced is for a TPU, whose kernels are interpreted."""
  monkeypatch.setattr(sharding, 'platform', lambda: 'tpu')
  with pltpu.force_tpu_interpret_mode():
    yield


@pytest.mark.parametrize(
  ('T', 'heads', 'H', 'dtype', 'tolerance'),
  [
    (128, (4, 2), 128, 'bfloat16', 0.1),
    (1024, (1, 1), 64, 'float32', 1e-4),
  ],
)
def test_the_kernel_for_trees_on_tpus_is_the_plain_attention(
  tpu, T, heads, H, dtype, tolerance
):
  """One block, and two of the largest; each row has its own trees and padding."""
  ends = np.stack([forest(T, 1), forest(T, 0)]).astype(np.int32)
  shape: Any = {'T': T, 'heads': heads, 'H': H, 'dtype': dtype, 'ends': ends}
  assert_plain(attention.packed, **shape, rtol=tolerance, atol=tolerance)


def test_the_kernel_for_trees_on_tpus_reads_no_block_that_nothing_sees(tpu):
  """A block of a beginning, and two branches: what one has is nothing to the other."""
  q, k, v, slope = inputs(1, 384, 2, 1, 64)
  ends = np.repeat(np.int32([384, 256, 384]), 128)[None]

  attend = lambda q, k, v: attention.packed(q, k, v, tree(ends))

  @jax.jit
  def both(k, v):
    out, backward = jax.vjp(attend, q, k, v)
    return out, *backward(slope)

  out, dq, _, dv = both(k, v)
  spoilt, spoilt_dq, _, spoilt_dv = both(spoil(k, slice(128, 256)), v)
  for x, y in ((spoilt, out), (spoilt_dq, dq)):
    assert np.isnan(x[:, 128:256]).all()
    np.testing.assert_array_equal(x[:, :128], y[:, :128])
    np.testing.assert_array_equal(x[:, 256:], y[:, 256:])
  # What the beginning gives to the spoilt branch is spoilt too.
  assert np.isnan(spoilt_dv[:, :256]).all()
  np.testing.assert_array_equal(spoilt_dv[:, 256:], dv[:, 256:])


@pytest.fixture
def gpu(monkeypatch):
  """What is traced is for a GPU. cuDNN itself is not here to tell its version."""
  monkeypatch.setattr(sharding, 'platform', lambda: 'gpu')
  monkeypatch.setattr(fused_attention_stablehlo, 'check_cudnn_version', lambda: 91000)


def test_what_cudnn_is_given_is_the_plain_attention(gpu, monkeypatch):
  """Its blocks and masks, with XLA in its place."""
  asked = []

  def by_xla(*args, implementation='cudnn'):
    asked.append(implementation)
    return cudnn(*args, implementation='xla')

  cudnn = attention_kernels.cudnn
  monkeypatch.setattr(attention_kernels, 'cudnn', by_xla)
  tolerance: Any = {'rtol': 0.05, 'atol': 0.1}  # bfloat16
  assert_plain(attention.packed, H=64, dtype='bfloat16', **tolerance)
  assert asked


@pytest.mark.parametrize(
  ('dtype', 'H', 'tokens', 'fused'),
  [
    ('bfloat16', 64, 256, True),
    ('bfloat16', 128, 256, True),
    ('float32', 64, 256, False),
    ('bfloat16', 20, 256, False),
    ('bfloat16', 256, 256, False),
    ('bfloat16', 64, 250, False),
  ],
)
def test_it_lowers_for_cuda(gpu, dtype, H, tokens, fused):
  """Forward and backward by cuDNN where it can, else by XLA; with no Pallas."""
  q, k, v, _ = (jax.ShapeDtypeStruct((1, tokens, n, H), dtype) for n in (4, 2, 2, 4))
  ids = jax.ShapeDtypeStruct((1, tokens), 'int32')
  total = lambda *args: attention.packed(*args).astype(jnp.float32).sum()
  gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
  traced = gradient.trace(q, k, v, types.Segments(ids))
  text = traced.lower(lowering_platforms=('cuda',)).as_text()
  assert ('__cudnn$fmha' in text, 'Backward' in text) == (fused, fused)
  assert 'triton' not in text and 'mosaic' not in text


@pytest.mark.parametrize(
  ('S', 'N', 'dtype'), [(1024, 28, 'bfloat16'), (384, 16, 'float32')]
)
def test_pages_are_the_plain_attention(S, N, dtype):
  """The kernel that reads pages, of 512 and of 128 slots: texts of 1 to all slots."""
  K = 2
  q, _, _, _ = inputs(6, 1, N, K, 128)
  _, k, v, _ = inputs(6, S, N, K, 128)
  k, v = (np.swapaxes(x, 1, 2).astype(jnp.dtype(dtype)) for x in (k, v))
  q = q.astype(k.dtype)
  positions = np.array([[0], [127], [128], [S // 2], [S - 1], [S]])
  with pltpu.force_tpu_interpret_mode():
    paged = jax.jit(attention_kernels.over_used_slots)(q, k, v, positions)
  assert paged.dtype == dtype and jnp.isfinite(paged).all()
  plain = jax.jit(attention.cached)(q, k, v, positions)
  # The kernel multiplies as a TPU does, in bfloat16. The last row is past the last slot.
  for x, y in zip(paged[:-1], plain[:-1], strict=True):
    np.testing.assert_allclose(*(np.asarray(x, float) for x in (x, y)), atol=0.02)


def test_a_prefill_on_tpus_is_the_plain_attention():
  """Texts that begin in the first, inside and in the last block of slots, and padding."""
  T, S, N, K = 128, 1024, 6, 2  # Three blocks of queries.
  q, _, _, _ = inputs(4, T, N, K, 128)
  _, k, v, _ = inputs(4, S, N, K, 128)
  k, v = (np.swapaxes(x, 1, 2).astype(jnp.bfloat16) for x in (k, v))
  q = q.astype(k.dtype)
  positions = np.array([[0], [S // 2 - 3], [S - T], [7]]) + np.arange(T)
  positions[3, 100:] = S  # They are not written.
  expected = np.asarray(jax.jit(attention.cached)(q, k, v, positions), float)
  for x in (k, v):  # What no query sees is not read.
    x[[0, 3], :, 512:] = np.nan
  with pltpu.force_tpu_interpret_mode():
    found = jax.jit(attention_kernels.over_used_slots)(q, k, v, positions)
  assert found.dtype == 'bfloat16' and jnp.isfinite(found).all()
  known = positions < S
  np.testing.assert_allclose(np.asarray(found, float)[known], expected[known], atol=0.02)


@pytest.mark.parametrize(
  ('B', 'S', 'H', 'dtype', 'reads_pages'),
  [
    (64, 4096, 128, 'bfloat16', True),
    (64, 4096, 128, jnp.bfloat16, True),
    (64, 4096, 128, np.dtype('bfloat16'), True),
    (64, 4096, 128, 'float32', False),
    (64, 4096, 64, 'bfloat16', False),
    (64, 4000, 128, 'bfloat16', False),
    (8192, 4096, 128, 'bfloat16', False),
  ],
)
def test_pages_are_for_tpus_bfloat16_and_whole_tiles(
  monkeypatch, B, S, H, dtype, reads_pages
):
  assert not attention_kernels.reads_used_slots((B, 2, S, H), dtype)
  monkeypatch.setattr(sharding, 'platform', lambda: 'tpu')
  assert attention_kernels.reads_used_slots((B, 2, S, H), dtype) == reads_pages
  assert not attention_kernels.reads_used_slots((B, 2, S, H), dtype, 2)  # Drafts.
  # A prefill has no list of pages.
  prefills = reads_pages or B == 8192
  assert attention_kernels.reads_used_slots((B, 2, S, H), dtype, 256) == prefills
  for queries in (1, 256):
    assert not attention_kernels.reads_used_slots((B, 2, S, H), dtype, queries, True)


@pytest.mark.parametrize(
  ('heads', 'chips', 'dealt'),
  [
    ((4, 2), 2, (4, 2)),
    ((16, 2), 4, (16, 4)),
    ((28, 4), 8, (32, 32)),
  ],
)
def test_each_chip_gets_heads_with_their_keys(heads, chips, dealt):
  """Chips that compute their heads alone give together what one gives."""
  q, k, v, _ = inputs(2, 5, *heads, 4)
  ids = types.Segments(np.array([[1, 1, 1, 2, 2], [1, 2, 2, 2, 0]]))
  arrays = jax.jit(attention._split_heads, static_argnums=3)(q, k, v, chips)
  assert (arrays[0].shape[2], arrays[1].shape[2]) == dealt
  parts = zip(*(np.split(x, chips, axis=2) for x in arrays), strict=True)
  attend = jax.jit(attention.packed)
  out = np.concatenate([attend(*part, ids) for part in parts], axis=2)
  whole = attend(q, k, v, ids)
  np.testing.assert_allclose(out[:, :, : heads[0]], whole, rtol=1e-6, atol=1e-6)
