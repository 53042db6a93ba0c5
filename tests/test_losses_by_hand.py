"""Losses of tokens whose ratios and advantages are given, computed by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_losses

from agent_r1_jax.rl import losses

pytestmark = pytest.mark.usefixtures('float64')


def _each(surrogate, ratios, advantages, old=-2.0):
  """Loss, d loss / d log π, and whether it is clipped, [3, n], of n tokens."""
  ratios, advantages = (jnp.asarray(x, float)[:, None] for x in (ratios, advantages))
  batch = test_losses.make_batch(jnp.full(ratios.shape, old), advantages)

  @jax.jit
  def compute(logprobs):
    loss = lambda x: surrogate(test_losses.make_stats(x), batch)
    per_token, back, watched = jax.vjp(loss, logprobs, has_aux=True)
    (slopes,) = back(jnp.ones_like(per_token))
    return per_token, slopes, watched.get('clip_fraction', jnp.zeros_like(slopes))

  return np.stack(compute(old + jnp.log(ratios)))[..., 0]


def _one(surrogate, ratio, advantage):
  return _each(surrogate, [ratio], [advantage])[:, 0]


# Ratio, advantage and options; loss, slope, and whether it is clipped.
_CLIPPED = [
  (1.0, 2.0, {}, -2.0, -2.0, False),
  (1.0, -2.0, {}, 2.0, 2.0, False),
  (1.5, 2.0, {}, -2.4, 0.0, True),  # gained enough
  (0.5, 2.0, {}, -1.0, -1.0, False),  # lost: goes back
  (0.5, -2.0, {}, 1.6, 0.0, True),
  (1.5, -2.0, {}, 3.0, 3.0, False),
  (4.0, -2.0, {}, 6.0, 0.0, False),  # dual clip: at most 3 * 2
  (1.5, 0.0, {}, 0.0, 0.0, False),
  (4.0, -2.0, {'dual_clip': None}, 8.0, 8.0, False),
  (4.0, -2.0, {'dual_clip': 1.5}, 3.0, 0.0, False),
  (4.0, 2.0, {'dual_clip': 1.1}, -2.4, 0.0, True),  # for A < 0 only
  (1.25, 1.0, {'clip_high': 0.28}, -1.25, -1.25, False),
  (0.75, -1.0, {'clip_high': 0.28}, 0.8, 0.0, True),
  (1.25, 1.0, {'clip_low': 0.28}, -1.2, 0.0, True),
  (0.75, -1.0, {'clip_low': 0.28}, 0.75, 0.75, False),
]


def test_ppo_clip_by_hand():
  for kwargs, rows in itertools.groupby(_CLIPPED, lambda row: row[2]):
    ratio, advantage, _, *expected = zip(*rows, strict=True)
    found = _each(losses.ppo_clip(**kwargs), ratio, advantage)
    # d loss / d log π = d loss / d log ρ, and d ρ / d log ρ = ρ.
    np.testing.assert_allclose(
      found, np.array(expected, float), rtol=1e-12, atol=1e-15, err_msg=str(kwargs)
    )


# Surrogate, ratio and advantage; weight, and whether it is clipped.
_CISPO, _WIDE = losses.cispo(), losses.cispo(clip_low=1.0, clip_high=4.0)


_TV = losses.dppo_tv()


_WEIGHED = [
  (_CISPO, 1.1, 2.0, 1.1, False),
  (_CISPO, 3.0, 2.0, 1.2, True),  # held, not lost as in PPO
  (_CISPO, 0.1, 2.0, 0.8, True),
  (_CISPO, 0.1, -2.0, 0.8, True),
  (_WIDE, 7.0, 2.0, 5.0, True),
  (_WIDE, 0.1, -2.0, 0.1, False),
  (losses.reinforce(), 7.0, 2.0, 1.0, False),
  # p_old = 1/4; p = 0.35, 0.45, 0.05, 0.15.
  (_TV, 1.4, 2.0, 1.4, False),
  (_TV, 1.8, 2.0, 0.0, True),
  (_TV, 1.8, -2.0, 1.8, False),  # comes back
  (_TV, 0.2, -2.0, 0.0, True),
  (_TV, 0.2, 2.0, 0.2, False),
  (losses.dppo_tv(low=0.3), 0.2, -2.0, 0.2, False),
  (losses.dppo_tv(high=0.3, cap=1.5), 1.8, 2.0, 1.5, False),
]


def test_weighted_likelihoods_by_hand():
  old = np.log(0.25)
  for surrogate, rows in itertools.groupby(_WEIGHED, lambda row: row[0]):
    _, ratio, advantage, weight, clipped = map(np.array, zip(*rows, strict=True))
    slope = -weight * advantage
    expected = slope * (old + np.log(ratio)), slope, clipped.astype(float)
    found = _each(surrogate, ratio, advantage, old)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_sapo_by_hand():
  # At ρ = 1 its slope is the likelihood ratio's, on either side; far away it fades.
  for advantage in (2.0, -2.0):
    _, grad, _ = _one(losses.sapo(), 1.0, advantage)
    np.testing.assert_allclose(grad, -advantage, rtol=1e-12)
  value, grad, _ = _one(losses.sapo(tau_positive=2.0), 1.5, 3.0)
  gate = 1 / (1 + np.exp(-1.0))
  np.testing.assert_allclose(value, -3.0 * gate * 4 / 2, rtol=1e-12)
  np.testing.assert_allclose(grad, -3.0 * 4 * gate * (1 - gate) * 1.5, rtol=1e-12)
  steep, soft = (_one(losses.sapo(tau_negative=t), 3.0, -1.0)[1] for t in (2.0, 1.0))
  assert 0 < steep < soft


def _gspo(logprobs, batch, **options):
  surrogate = jax.jit(lambda x: losses.gspo(**options)(test_losses.make_stats(x), batch))
  return jax.device_get(surrogate(jnp.asarray(logprobs)))


def test_gspo_by_hand():
  # ρ = 2 and 1/2 make s = 1: within the clip though each token is far outside.
  old = np.full((1, 2), -2.0)
  new = old + np.log([[2.0, 0.5]])
  batch = test_losses.make_batch(jnp.asarray(old), jnp.array([[3.0, -1.0]]))
  per_token, watched = _gspo(new, batch)
  np.testing.assert_allclose(per_token, [[-3, 1]], rtol=1e-12)
  assert (watched['clip_fraction'] == 0).all()
  np.testing.assert_allclose(watched['behaviour_kl'], old - new, rtol=1e-12)
  # ρ = 2 and 2 make s = 2: clipped where A > 0.
  per_token, watched = _gspo(old + np.log(2.0), batch, clip_high=0.5)
  np.testing.assert_allclose(per_token, [[-4.5, 2]], rtol=1e-12)
  np.testing.assert_array_equal(watched['clip_fraction'], [[1, 0]])
  # A log ratio in the mean of 100 is taken as 10.
  per_token, _ = _gspo(old + 100.0, batch)
  np.testing.assert_allclose(per_token[0, 1], np.exp(10), rtol=1e-12)


def test_gspo_of_one_token_segments_is_the_ratio_of_each():
  old = np.full((2, 3), -2.0)
  ratio = np.array([[2.0, 0.5, 3.0], [0.25, 4.0, 1.0]])
  ids = jnp.array([[1, 2, 3], [1, 2, 3]])
  batch = test_losses.make_batch(jnp.asarray(old), jnp.ones((2, 3)), segment_ids=ids)
  per_token, _ = _gspo(old + np.log(ratio), batch, clip_high=9.0)
  np.testing.assert_allclose(per_token, -ratio, rtol=1e-12)


# Of an old value of 1 and a target of 3: the value and the clip, its loss and slope.
_VALUES = [
  (1.0, 0.5, 2.0, -2.0),
  (2.0, 0.5, 1.125, 0.0),  # moved to 1.5 at most: (1.5 - 3)² / 2
  (4.0, 0.5, 1.125, 0.0),
  (5.0, 0.5, 2.0, 2.0),  # beyond the target: the plain error is larger
  (0.0, 0.5, 4.5, -3.0),
  (2.0, None, 0.5, -1.0),
  (4.0, None, 0.5, 1.0),
]


def test_value_clip_by_hand():
  full = lambda x: jnp.full((1, 1), x)
  for clip, rows in itertools.groupby(_VALUES, lambda row: row[1]):
    value, _, *expected = zip(*rows, strict=True)
    fn = test_losses.make_value_loss(clip, full(1.0), full(3.0), full(1.0))
    both = jax.jit(jax.vmap(jax.value_and_grad(lambda v, fn=fn: fn(v[None, None]))))
    np.testing.assert_array_equal(both(jnp.asarray(value)), expected)
