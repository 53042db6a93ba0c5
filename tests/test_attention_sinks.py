"""Sinks: a score of each head that takes its part of every softmax, and gives nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_r1_jax import types
from agent_r1_jax.models import attention, sharding
from agent_r1_jax.models.kernels import attention_kernels

_ENDS = np.array([[9, 9, 4, 4, 9, 9, 9, 9, 9, 10, 11, 12]])  # Two branches, then padding.
_SINKS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
_WINDOW = 3


def _inputs(queries=12):
  rng = np.random.default_rng(0)
  make = lambda T, heads: rng.normal(size=(1, T, heads, 8)).astype(np.float32)
  return make(queries, 4), make(12, 2), make(12, 2), make(queries, 4)


def _define(q, k, v, sinks, visible):
  """The definition: one more column of scores, whose weight is dropped."""
  k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
  scores = jnp.einsum('btnh,bsnh->bnts', q, k) / 8**0.5
  scores = jnp.where(visible[None, None], scores, -jnp.inf)
  column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
  weights = jax.nn.softmax(jnp.concatenate([scores, column], -1))[..., :-1]
  return jnp.einsum('bnts,bsnh->btnh', weights, v)


@functools.partial(jax.jit, static_argnums=0)
def _differentiate(attend, slope, *inputs):
  """The slope's part of what is attended to, and its gradient."""
  total = lambda *inputs: jnp.vdot(attend(*inputs), slope)
  return jax.value_and_grad(total, argnums=(0, 1, 2, 3))(*inputs)


@pytest.mark.parametrize('slides', [False, True])
@pytest.mark.parametrize('trees', [False, True])
@pytest.mark.parametrize('platform', ['cpu', 'gpu', 'tpu'])
def test_outputs_and_gradients_are_the_definition(monkeypatch, platform, trees, slides):
  """By every path of packed rows; sinks learn too."""
  monkeypatch.setattr(sharding, 'platform', lambda: platform)
  q, k, v, slope = _inputs()
  at, ids = np.arange(12), np.repeat([1, 2, 0], [5, 5, 2])[None]
  visible = at[:, None] >= at
  visible &= at[:, None] < _ENDS[0] if trees else ids[0][:, None] == ids[0]
  visible &= at[:, None] - at < _WINDOW if slides else True
  sees = types.Tree(jnp.zeros_like(_ENDS), jnp.asarray(_ENDS))
  sees = sees if trees else types.Segments(jnp.asarray(ids))
  # What padding computes has no meaning.
  slope *= (_ENDS > at + 1 if trees else ids > 0)[..., None, None]
  local = attention.Local(jnp.asarray(slides), jnp.asarray(at)[None])

  def attend(q, k, v, sinks):
    return attention.packed(q, k, v, sees, local, attention.Rules(_WINDOW), sinks)

  found = _differentiate(attend, slope, q, k, v, _SINKS)
  define = functools.partial(_define, visible=visible)
  wanted = _differentiate(define, slope, q, k, v, _SINKS)
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ('slides', 'dtype', 'tolerance'),
  [(False, 'float32', 1e-4), (True, 'float32', 1e-4), (False, 'bfloat16', 0.1)],
)
def test_the_kernel_for_tpus_has_them(slides, dtype, tolerance):
  """Splash attention, interpreted: it takes whole tiles of 128 tokens and numbers."""
  rng = np.random.default_rng(0)
  make = lambda heads: rng.normal(size=(1, 128, heads, 8)).astype(np.float32)
  q, k, v, slope = make(4), make(2), make(2), make(4)
  at, ids = np.arange(128), np.repeat([1, 2, 0], [70, 50, 8])[None]
  visible = (at[:, None] >= at) & (ids[0][:, None] == ids[0])
  visible &= at[:, None] - at < _WINDOW if slides else True
  slope *= (ids > 0)[..., None, None]

  def attend(q, k, v, sinks):
    layer = jnp.asarray(slides), _WINDOW, None, sinks.astype(dtype)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    out = attention_kernels.splash(q, k, v, jnp.asarray(ids), *layer, interpret=True)
    return out.astype(jnp.float32)

  found = _differentiate(attend, slope, q, k, v, _SINKS)
  define = functools.partial(_define, visible=visible)
  wanted = _differentiate(define, slope, q, k, v, _SINKS)
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * np.abs(y).max())


@pytest.mark.parametrize('window', [0, _WINDOW])
def test_a_cache_has_them_too(window):
  """Of the last two tokens of a text; a cache that slides holds all of it here."""
  q, k, v = _inputs(queries=2)[:3]
  positions = np.array([[10, 11]])
  after = np.array([[10], [11]]) - np.arange(12)
  visible = (after >= 0) & (after < (window or 12))
  slots = (np.swapaxes(x, 1, 2) for x in (k, v))
  attend = jax.jit(attention.cached, static_argnums=4)
  found = attend(q, *slots, positions, attention.Rules(window), None, _SINKS)
  wanted = jax.jit(_define)(q, k, v, _SINKS, visible)
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
