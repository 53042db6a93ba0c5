"""Layers with a state: chunks compute what one token after the other does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.models import decoder, delta_net

_B, _T, _G, _U, _X, _Y = 2, 21, 2, 4, 5, 3


def _inputs():
  """Two rows of several texts, which begin inside chunks and where they begin."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=(_B, _T, *shape)).astype(np.float32)
  k = normal(_G, _X)
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  begins = np.zeros((_B, _T), bool)
  begins[0, [3, 4, 8, 19]] = begins[1, [0, 13]] = True
  forgets = -rng.exponential(size=(_B, _T, _U)).astype(np.float32)
  weights = rng.uniform(size=(_B, _T, _U)).astype(np.float32)
  inputs = delta_net.Inputs(normal(_G, _X), k, normal(_U, _Y), forgets, weights, begins)
  return inputs, rng.normal(size=(_B, _U, _X, _Y)).astype(np.float32)


def _by_tokens(inputs, state):
  """The definition: S' = α S, then S = S' + k β (v - S'ᵀ k)ᵀ and o = Sᵀ q."""
  inputs = delta_net.Inputs(*map(jnp.asarray, inputs))
  q, k = (jnp.repeat(x, _U // _G, axis=2) for x in inputs[:2])

  def step(state, token):
    q, k, v, g, beta, begins = token
    state = state * jnp.where(begins[:, None], 0.0, jnp.exp(g))[..., None, None]
    change = beta[..., None] * (v - jnp.einsum('buxy,bux->buy', state, k))
    state = state + jnp.einsum('bux,buy->buxy', k, change)
    return state, jnp.einsum('buxy,bux->buy', state, q)

  tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, *inputs[2:])]
  state, out = jax.lax.scan(step, state, tokens)
  return jnp.moveaxis(out, 0, 1), state


def test_outputs_states_and_gradients_are_the_definition(monkeypatch):
  monkeypatch.setattr(delta_net, '_CHUNK', 8)
  inputs, state = _inputs()
  rng = np.random.default_rng(1)
  shapes = (_B, _T, _U, _Y), (_B, _U, _X, _Y)
  slope = tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)

  @jax.jit
  def both(numbers, state):
    made = []
    for compute in (delta_net.compute, _by_tokens):
      run = lambda x, state: compute(delta_net.Inputs(*x, inputs.begins), state)  # noqa: B023
      found, pull = jax.vjp(run, numbers, state)
      made.append((found, pull(slope)))
    return made

  traced = both.trace(inputs[:5], state)
  made = traced.lower().compile()(inputs[:5], state)
  for x, y in zip(*map(jax.tree.leaves, made), strict=True):
    np.testing.assert_allclose(x, y, atol=2e-5 * np.abs(y).max())
  # jaxlib's own solve can wait for itself on a CPU; see delta_net._solve.
  program = str(traced.jaxpr)
  assert 'dot_general' in program and 'triangular_solve' not in program


def test_trees_are_refused():
  shape = tiny.config('qwen3_5_text')
  tokens = jnp.zeros((1, 4), jnp.int32)
  rows = types.Rows(tokens, tokens, types.Tree(tokens, tokens))
  with pytest.raises(ValueError, match='batch.trees=False'):
    jax.eval_shape(lambda p: decoder.hidden(p, shape, rows), tiny.params(shape))
