"""Every attention is the plain definition where spans, windows and texts meet blocks.

Lengths are random, and many are one less than, equal to or one more than an edge of a
block: of queries, keys or slots, of a window or a ring.
"""

import functools

import interpreted
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention

from agent_r1_jax.models import attention, kv_cache, sharding
from agent_r1_jax.models.kernels import (
  attention_kernels,
  row_attention,
  slot_attention,
  tpu_attention,
)


def draw(rng, least: int, most: int, block: int) -> int:
  """A number from least to most, mostly at an edge of a block."""
  near = int(rng.integers(least // block, most // block + 1)) * block
  number = near + int(rng.integers(-1, 3)) if rng.random() < 0.8 else 0
  return number if least <= number <= most else int(rng.integers(least, most + 1))


def draw_ends(rng, T: int, block: int, trees: bool) -> np.ndarray:
  """The ends of texts or of small trees in a row of T tokens, and of padding."""
  ends, begin, used = np.arange(1, T + 1), 0, draw(rng, T // 2, T, block)
  while begin < used:
    end = draw(rng, begin + 1, used, block)
    ends[begin:end] = end
    if trees and end - begin > 2:
      # Branches from `fork` on: one before `second`, one after.
      fork = draw(rng, begin, end - 2, block)
      second = draw(rng, fork + 1, end - 1, block)
      ends[fork:second] = second
    begin = end
  return ends


def draw_rows(B: int, T: int, block: int, trees: bool, seed: int):
  """Ends and windows of rows, what each token sees, and its position in its text.

  With `trees` every other row has trees, the last one among them.
  """
  rng = np.random.default_rng(seed)
  ends = [draw_ends(rng, T, block, trees and (B - row) % 2 == 1) for row in range(B)]
  ends = np.stack(ends)
  at = np.arange(T)
  sees = (at[:, None] >= at) & (at[:, None] < ends[:, None])
  positions = sees.sum(-1) - 1
  windows = np.array([draw(rng, 1, T, block) for _ in range(B)])[:, None]
  near = positions[:, :, None] - positions[:, None] < windows[..., None]
  return ends, windows, sees, sees & near, positions


@functools.partial(jax.jit, static_argnums=0)
def differentiate(attend, q, k, v, slope, *options):
  out, pull = jax.vjp(lambda *qkv: attend(*qkv, *options), q, k, v)
  return out, *pull(slope.astype(out.dtype))


@functools.cache
def plain(cap):
  return functools.partial(test_attention.plain, cap=cap)


def assert_rows(attend, sees, heads, H, dtype='float32', tolerance=1e-4, cap=None):
  """The output and the gradients are those of the definition."""
  B, T, _ = sees.shape
  given = [x.astype(dtype) for x in test_attention.inputs(B, T, *heads, H)]
  found, expected = (
    differentiate(attend, *given),
    differentiate(plain(cap), *given, jnp.asarray(sees)),
  )
  for x, y in zip(found, expected, strict=True):
    x, y = np.asarray(x, float), np.asarray(y, float)
    far = np.abs(x - y).max((1, 2, 3))
    assert (far < tolerance * np.abs(y).max()).all(), far


@pytest.mark.parametrize(
  ('platform', 'T', 'slides'),
  [
    ('cpu', 256, False),
    ('cpu', 250, True),
    ('cpu', 40, True),  # Less than a block.
    ('gpu', 256, False),
    ('gpu', 250, True),
  ],
)
def test_training_by_xla(monkeypatch, platform, T, slides):
  """Blocks of a CPU's caches, and the masks that GPUs get without a kernel."""
  monkeypatch.setattr(sharding, 'platform', lambda: platform)
  block = min(64, T // 2)
  ends, windows, sees, near, positions = draw_rows(24, T, block, True, seed=T + slides)

  class OfRows(attention.Local):
    """With a window for each row."""

    def since(self, window):
      return super().since(window) + window - windows

  local, rules = None, attention.Rules()
  if slides:  # Scores have a cap, too.
    local, rules = OfRows(True, jnp.asarray(positions)), attention.Rules(9, 0.7)
  attend = lambda q, k, v: attention.packed(
    q, k, v, test_attention.tree(ends), local, rules
  )
  assert_rows(attend, near if slides else sees, (2, 1), 8, cap=rules.cap)


def test_training_along_trees_on_tpus(monkeypatch):
  monkeypatch.setattr(sharding, 'platform', lambda: 'tpu')
  ends, _, sees, _, _ = draw_rows(2, 384, 128, trees=True, seed=2)
  with pltpu.force_tpu_interpret_mode():
    attend = lambda q, k, v: attention.packed(q, k, v, test_attention.tree(ends))
    assert_rows(attend, sees, (1, 1), 64)


@pytest.mark.parametrize(('window', 'cap'), [(128, None), (255, 0.7), (256, None)])
def test_training_of_a_layer_that_slides_on_tpus(window, cap):
  """Texts in blocks of 128 tokens; a window of all but one token, and of all."""
  ends, *_ = draw_rows(2, 256, 128, trees=False, seed=window)
  ends[0] = 256  # One text fills the row.
  at = np.arange(256)
  sees = (at[:, None] >= at) & (at[:, None] < ends[:, None])
  sees &= at[:, None] - at < window
  ids = jnp.asarray(ends, jnp.int32)  # No two texts end at the same token.
  attend = lambda q, k, v: attention_kernels.splash(
    *(q, k, v, ids, jnp.asarray(True), window, cap), interpret=True
  )
  assert_rows(attend, sees, (1, 1), 64, cap=cap)


def test_training_over_rows_on_gpus():
  ends, _, sees, _, _ = draw_rows(1, 256, 64, trees=True, seed=3)
  interpret = interpreted.InterpretGPUParams()
  attend = lambda *qkv: row_attention.attend(*qkv, jnp.asarray(ends), interpret)
  assert_rows(attend, sees, (1, 1), 64, 'bfloat16', tolerance=0.01)


def assert_slots(attend, T: int, S: int, block: int, seed: int, G: int = 2):
  """T tokens of each row attend to the slots of its text; no others are read."""
  rng, B, H = np.random.default_rng(seed), 8, 64
  # The last query is in the first slot of a block, or one before or after it.
  begin = int(rng.integers(-(-T // block), S // block)) * block
  others = [draw(rng, T - 1, S - 1, block) for _ in range(B - 3)]
  last = np.array([begin - 1, begin, begin + 1, *others])
  positions = last[:, None] - np.arange(T)[::-1]
  q = test_attention.inputs(B, T, G, 1, H)[0].astype(jnp.bfloat16)
  k, v = (x.astype(jnp.bfloat16) for x in test_attention.inputs(B, S, G, 1, H)[1:3])
  v[np.arange(B), last] = 30.0  # So that the last slot is not lost in rounding.
  expected = np.asarray(_attend_to(q, k, v, positions[:, :, None] >= np.arange(S)))
  unread = np.arange(S) // block > (last // block)[:, None]
  k[unread] = v[unread] = np.nan
  k, v = (np.swapaxes(x, 1, 2) for x in (k, v))
  found = np.asarray(jax.jit(attend)(q, k, v, positions), float)
  np.testing.assert_allclose(found, expected, atol=0.02)


@jax.jit
def _attend_to(q, k, v, sees):
  """The definition with other queries than keys."""
  q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  scores = jnp.einsum('btnh,bskh->bnts', q, k) / q.shape[3] ** 0.5
  weights = jax.nn.softmax(jnp.where(sees[:, None], scores, -jnp.inf))
  return jnp.einsum('bnts,bskh->btnh', weights, v)


def test_a_prefill_on_tpus():
  """Three blocks of queries, three of slots."""
  attend = functools.partial(tpu_attention.attend_to_slots, first=0, heads=1)
  with pltpu.force_tpu_interpret_mode():
    assert_slots(attend, T=192, S=384, block=128, seed=0)


def test_a_decode_on_gpus():
  interpret = interpreted.InterpretGPUParams()
  attend = functools.partial(slot_attention.attend, interpret=interpret)
  assert_slots(attend, T=1, S=256, block=slot_attention.BLOCK, seed=0, G=7)


@pytest.mark.parametrize('window', [1, 2, 8, 9])
@pytest.mark.parametrize('whole', [False, True])
def test_a_cache_that_is_a_ring(window, whole):
  """Turns of random lengths, up to what fits behind the window; and a whole cache."""
  rng, B, most, total = np.random.default_rng(window), 2, 8, 64
  slots = total if whole else window - 1 + most
  q, k, v, _ = test_attention.inputs(B, total + most, 2, 1, 8)
  zeros = np.zeros((B, 1, slots, 8), np.float32)
  cache, begin = kv_cache.LayerCache(zeros, zeros, None, None), 0

  @jax.jit
  def step(cache, q, k, v, positions):
    cache = kv_cache.write(cache, k, v, positions, slides=True)
    kept = cache.keys, cache.values
    return cache, attention.cached(q, *kept, positions, attention.Rules(window))

  after = np.arange(total)[:, None] - np.arange(total)
  sees = ((after >= 0) & (after < window))[None]
  expected = _attend_to(q[:, :total], k[:, :total], v[:, :total], sees)
  while begin < total:
    used = min(total - begin, draw(rng, 1, most, most))
    # As in the engine, a call has a fixed number of tokens, and may need fewer.
    at = begin + np.arange(most)
    positions = np.tile(np.where(at < begin + used, at, kv_cache.NOWHERE), (B, 1))
    cache, out = step(cache, *(x[:, begin : begin + most] for x in (q, k, v)), positions)
    np.testing.assert_allclose(
      out[:, :used], expected[:, begin : begin + used], atol=1e-5
    )
    begin += used
