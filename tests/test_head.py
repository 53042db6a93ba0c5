"""models/head.py: log-probs and entropies, block by block."""

import functools

import episodes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_r1_jax.models import head

M, D, V, TEMPERATURE = 29, 8, 37, 0.7


def inputs(seed=0):
  rng = np.random.default_rng(seed)
  x, kernel = (rng.normal(size=n).astype(np.float32) for n in ((M, D), (D, V)))
  return x, kernel, rng.integers(0, V, M).astype(np.int32), rng.random(M) < 0.6


def plain(x, kernel, tokens, temperature=TEMPERATURE, cap=None):
  """All logits at once."""
  logits = x @ kernel if cap is None else cap * jnp.tanh(x @ kernel / cap)
  logp = jax.nn.log_softmax(logits / temperature)
  chosen = jnp.take_along_axis(logp, tokens[:, None], axis=1)[:, 0]
  return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def masked(x, kernel, tokens, mask, temperature, block, cap):
  """The plain formula, in one block."""
  return [jnp.where(mask, y, 0.0) for y in plain(x, kernel, tokens, temperature, cap)]


@functools.partial(jax.jit, static_argnums=(0, 5, 6, 7))
def both(f, x, kernel, tokens, mask, temperature, block, cap):
  """Values and gradients."""
  slopes = np.random.default_rng(1).normal(size=(2, M)).astype(np.float32)

  def total(x, kernel):
    out = f(x, kernel, tokens, mask, temperature, block, cap)
    return sum(jnp.vdot(s, y) for s, y in zip(slopes, out, strict=True)), out

  gradients, out = jax.grad(total, argnums=(0, 1), has_aux=True)(x, kernel)
  return out, gradients


def assert_plain(x, kernel, tokens, masks, temperature, block, cap=None, tolerance=2e-5):
  """Values and gradients are the plain formula's, whichever tokens a mask wants."""
  for mask in masks:
    given = x, kernel, tokens, mask
    found = both(head.logprobs, *given, temperature, block, cap)
    expected = both(masked, *given, temperature, None, cap)
    for mine, other in zip(found[0], expected[0], strict=True):
      np.testing.assert_allclose(mine, other, rtol=1e-6, atol=tolerance / 10)
    for mine, other in zip(found[1], expected[1], strict=True):
      assert np.isfinite(mine).all()
      np.testing.assert_allclose(mine, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize('block', [1, 7, 29, 64])
@pytest.mark.parametrize('cap', [None, 1.5])
def test_blocks_and_their_gradient_are_the_plain_formula(block, cap):
  """Where some tokens are wanted, all, and none."""
  x, kernel, tokens, some = inputs()
  masks = some, np.ones(M, bool), np.zeros(M, bool)
  assert_plain(x, kernel, tokens, masks, TEMPERATURE, block, cap)


def test_entropy_is_verls():
  """Of its logits, which the identity as the head's kernel leaves as they are."""
  g = episodes.golden()
  logits = g['in/logits'].reshape(-1, 17).astype(np.float32)
  chosen, everything = np.zeros(len(logits), np.int32), np.ones(len(logits), bool)
  logprobs = jax.jit(head.logprobs, static_argnums=(4, 5))
  _, out = logprobs(logits, np.eye(17, dtype=np.float32), chosen, everything, 1.0, 7)
  expected = g['verl/entropy_from_logits'][:2].reshape(-1)
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_what_is_not_wanted_is_never_read():
  x, kernel, tokens, wanted = map(jnp.asarray, inputs())
  broken = jnp.where(wanted[:, None], x, jnp.nan)

  def loss(x, kernel):
    logprobs, entropy = head.logprobs(x, kernel, tokens, wanted, 1.0, 7)
    return logprobs.sum() + entropy.sum()

  both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
  found, expected = both(broken, kernel), both(x, kernel)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize('block', [2, 4, 64])
def test_a_padding_slot_reads_no_token(block):
  """Each logit is -200 + noise: e^200 is infinite, and 0 times that is no number."""
  x, kernel, tokens, _ = inputs()
  # Three tokens in a block of four; and the last is wanted.
  wanted = np.arange(M) >= M - 3
  x[:, 0], kernel[0] = 1.0, -200.0
  assert_plain(x, kernel, tokens, [wanted], 1.0, block, tolerance=2e-3)


def test_bfloat16_sums_in_float32():
  x, kernel, tokens, wanted = inputs()
  low, low_kernel = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
  logprobs = jax.jit(head.logprobs, static_argnums=(4, 5))
  out = logprobs(low, low_kernel, tokens, wanted, 1.0, 7)
  wide = (x.astype(np.float32) for x in (low, low_kernel))
  exact = jax.jit(plain)(*wide, tokens, 1.0)
  for mine, other in zip(out, exact, strict=True):
    assert mine.dtype == jnp.float32
    np.testing.assert_allclose(mine, np.where(wanted, other, 0), rtol=0, atol=2e-6)
  total = lambda x, kernel: logprobs(x, kernel, tokens, wanted, 1.0, 7)[0].sum()
  grads = jax.eval_shape(jax.grad(total, argnums=(0, 1)), low, low_kernel)
  assert [g.dtype for g in grads] == [jnp.bfloat16] * 2


def test_only_the_blocks_that_are_wanted_are_computed():
  """The loop's length follows the mask: no logits for what the policy did not choose."""
  order, blocks = jax.jit(head._order, static_argnums=1)(np.arange(M) % 4 == 1, 3)
  assert int(blocks) == 3  # 7 wanted tokens, 3 a block
  assert order.shape == (30,)
  assert order[:9].tolist() == [1, 5, 9, 13, 17, 21, 25, M, M]


def test_no_array_of_all_logits_exists():
  x, kernel, tokens, wanted = map(jnp.asarray, inputs())
  loss = functools.partial(head.logprobs, temperature=1.0, block=4)
  gradient = jax.grad(lambda x, k: loss(x, k, tokens, wanted)[0].sum(), argnums=(0, 1))
  text = str(jax.make_jaxpr(gradient)(x, kernel))
  assert f'f32[4,{V}]' in text
  assert f'f32[{M},{V}]' not in text
