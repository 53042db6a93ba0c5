"""Layers with a state: chunks compute what one token after the other does."""

import dataclasses

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
  out = []
  for t in range(_T):
    keeps = jnp.where(inputs.begins[:, t, None], 0.0, jnp.exp(inputs.g[:, t]))
    state = state * keeps[..., None, None]
    known = jnp.einsum('buxy,bux->buy', state, k[:, t])
    change = inputs.beta[:, t, :, None] * (inputs.v[:, t] - known)
    state = state + jnp.einsum('bux,buy->buxy', k[:, t], change)
    out.append(jnp.einsum('buxy,bux->buy', state, q[:, t]))
  return jnp.stack(out, 1), state


def test_outputs_states_and_gradients_are_the_definition(monkeypatch):
  monkeypatch.setattr(delta_net, '_CHUNK', 8)
  inputs, state = _inputs()
  rng = np.random.default_rng(1)
  slope = rng.normal(size=(_B, _T, _U, _Y)), rng.normal(size=(_B, _U, _X, _Y))

  @jax.jit
  def both(numbers, state):
    given = delta_net.Inputs(*numbers, inputs.begins)
    made = [f(given, state) for f in (delta_net.compute, _by_tokens)]
    return made

  def total(which):
    pick = lambda *given: both(*given)[which]
    return jax.grad(
      lambda *given: sum(jnp.vdot(x, y) for x, y in zip(pick(*given), slope)), (0, 1)
    )

  found, expected = both(inputs[:5], state)
  made = [(found, total(0)(inputs[:5], state)), (expected, total(1)(inputs[:5], state))]
  for x, y in zip(*map(jax.tree.leaves, made), strict=True):
    np.testing.assert_allclose(x, y, atol=2e-5 * np.abs(y).max())
  # jaxlib's own solve can wait for itself on a CPU; see delta_net._solve.
  program = jax.make_jaxpr(total(0))(inputs[:5], state)
  assert 'dot_general' in str(program) and 'triangular_solve' not in str(program)


def test_what_is_computed_again_changes_nothing():
  shape = tiny.config('qwen3_5_text')
  tokens, params = jnp.arange(24).reshape(2, 12), tiny.params(shape)

  def differentiate(remat):
    config = dataclasses.replace(shape, remat=remat)
    hidden = lambda params: decoder.hidden(params, config, tiny.rows(tokens))
    total = lambda params: jnp.square(hidden(params)).sum()
    return jax.jit(jax.value_and_grad(total))(params)

  both = map(jax.tree.leaves, map(differentiate, ('full', 'none')))
  for x, y in zip(*both, strict=True):
    np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(y).max())


def test_trees_are_refused():
  shape = tiny.config('qwen3_5_text')
  tokens = jnp.zeros((1, 4), jnp.int32)
  rows = types.Rows(tokens, tokens, types.Tree(tokens, tokens))
  with pytest.raises(ValueError, match='batch.trees=False'):
    jax.eval_shape(lambda p: decoder.hidden(p, shape, rows), tiny.params(shape))
