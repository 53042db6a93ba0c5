"""Losses on the device: the peers' numbers in float64 (golden/), hand-made cases."""

import episodes
import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

from agent_r1_jax.rl import algorithms, losses


@pytest.fixture(autouse=True)
def float64():
  """The formulas are compared where rounding cannot hide a difference."""
  with jax.enable_x64(True):
    yield


def _golden(*keys):
  return [jnp.asarray(episodes.golden()[key]) for key in keys]


def _weights(aggregate=algorithms.token_mean):
  mask = episodes.golden_mask()
  return jnp.asarray(mask * aggregate(mask.sum(axis=1))[:, None])


def _check(fn, argument, key, tolerance=1e-9):
  """The value and gradient of fn are golden at key/loss and key/grad."""
  loss, grad = jax.jit(jax.value_and_grad(fn))(argument)
  expected_loss, expected_grad = _golden(f'{key}/loss', f'{key}/grad')
  np.testing.assert_allclose(loss, expected_loss, rtol=tolerance)
  np.testing.assert_allclose(grad, expected_grad, rtol=tolerance, atol=tolerance / 100)


def _ppo(aggregate=algorithms.token_mean, **kwargs):
  old, adv = _golden('in/old_logp', 'in/adv')

  def loss(logprobs):
    log_ratio = losses.log_ratio(logprobs, old)
    per_token, _ = losses.ppo_clip(log_ratio, adv, **kwargs)
    return losses.weighted(per_token, _weights(aggregate))

  return loss


@pytest.mark.parametrize(
  ('key', 'kwargs'),
  [
    ('verl/ppo_vanilla/token-mean', {}),
    ('verl/ppo_vanilla/clip_higher_0.2_0.28', {'clip_high': 0.28}),
    ('verl/ppo_vanilla/dual_clip_c1.5', {'dual_clip': 1.5}),
    ('searchr1/ppo_0.2', {'dual_clip': None}),
  ],
)
def test_ppo_clip_is_the_peers(key, kwargs):
  _check(_ppo(**kwargs), *_golden('in/logp'), key)


def test_ppo_clip_is_verls_where_trajectories_weigh_the_same():
  # verl adds 1e-8 to the count of a sequence's tokens.
  key = 'verl/ppo_vanilla/seq-mean-token-mean'
  loss = _ppo(algorithms.seq_mean_token_mean)
  _check(loss, *_golden('in/logp'), key, tolerance=4e-9)


@pytest.mark.parametrize(
  ('ratio', 'advantage', 'kwargs', 'loss', 'slope', 'clipped'),
  [
    (1.0, 2.0, {}, -2.0, -2.0, False),
    (1.0, -2.0, {}, 2.0, 2.0, False),
    (1.5, 2.0, {}, -2.4, 0.0, True),  # gained enough
    (0.5, 2.0, {}, -1.0, -1.0, False),  # lost: goes back
    (0.5, -2.0, {}, 1.6, 0.0, True),
    (1.5, -2.0, {}, 3.0, 3.0, False),
    (4.0, -2.0, {}, 6.0, 0.0, False),  # dual clip: at most 3 * 2
    (4.0, -2.0, {'dual_clip': None}, 8.0, 8.0, False),
    (4.0, -2.0, {'dual_clip': 1.5}, 3.0, 0.0, False),
    (4.0, 2.0, {'dual_clip': 1.1}, -2.4, 0.0, True),  # for A < 0 only
    (1.25, 1.0, {'clip_high': 0.28}, -1.25, -1.25, False),
    (1.25, 1.0, {'clip_low': 0.28}, -1.2, 0.0, True),
    (0.75, -1.0, {'clip_low': 0.28}, 0.75, 0.75, False),
    (0.75, -1.0, {'clip_high': 0.28}, 0.8, 0.0, True),
    (1.5, 0.0, {}, 0.0, 0.0, False),
  ],
)
def test_ppo_clip_by_hand(ratio, advantage, kwargs, loss, slope, clipped):
  def one(log_ratio):
    adv = jnp.full((1, 1), advantage)
    per_token, where = losses.ppo_clip(log_ratio[None, None], adv, **kwargs)
    return per_token[0, 0], where[0, 0]

  (value, where), grad = jax.value_and_grad(one, has_aux=True)(jnp.log(ratio))
  np.testing.assert_allclose(value, loss, rtol=1e-12)
  # d loss / d log ρ, where d ρ / d log ρ = ρ.
  np.testing.assert_allclose(grad, slope, rtol=1e-12, atol=1e-15)
  assert where == clipped


def test_log_ratio_is_clipped():
  new = jnp.array([[-1.0, -50.0, 0.0, -20.0]])
  old = jnp.array([[-3.0, -1.0, -30.0, -1.0]])
  out, back = jax.vjp(lambda x: losses.log_ratio(x, old), new)
  np.testing.assert_array_equal(out, [[2, -20, 20, -19]])
  np.testing.assert_array_equal(back(jnp.ones((1, 4)))[0], [[1, 0, 0, 1]])


# KL.


@pytest.mark.parametrize(
  ('estimator', 'key'), [(losses.k1, 'k1'), (losses.k3, 'low_var_kl')]
)
def test_kl_is_verls(estimator, key):
  logp, ref = _golden('in/logp', 'in/ref_logp')
  mask = jnp.asarray(episodes.golden_mask())
  value, grad = _golden(f'verl/kl/{key}/val', f'verl/kl/{key}/grad')
  out, back = jax.vjp(lambda x: estimator(x, ref), logp)
  np.testing.assert_allclose(out, value, rtol=1e-9, atol=1e-12)
  (grads,) = back(jnp.where(mask, 1.0, 0.0))
  np.testing.assert_allclose(grads, grad, rtol=1e-9, atol=1e-12)


def test_k3_far_from_the_reference_is_verls():
  logp, ref, far = _golden('in/logp', 'in/ref_logp', 'in/logp_far_offset30')
  for sign, key in ((1, 'far'), (-1, 'farneg')):
    out, back = jax.vjp(lambda x: losses.k3(x, ref), logp + sign * far)
    np.testing.assert_allclose(out, *_golden(f'verl/kl/low_var_kl_{key}/val'), rtol=1e-9)
    assert (back(jnp.ones_like(out))[0] == 0).all()


def test_kl_estimators_by_hand():
  p, q = jnp.log(jnp.array([[0.5, 0.25, 0.25]])), jnp.log(jnp.array([[0.2, 0.3, 0.5]]))
  exact = jnp.sum(jnp.exp(p) * (p - q))
  # Both are unbiased under p, and k3 is never negative.
  for estimator in (losses.k1, losses.k3):
    np.testing.assert_allclose(jnp.sum(jnp.exp(p) * estimator(p, q)), exact, rtol=1e-12)
  assert (losses.k3(p, q) > 0).all() and (losses.k1(p, q) < 0).any()
  assert (losses.k3(p, p) == 0).all()
  # k1 serves the host, too.
  assert isinstance(losses.k1(np.zeros(3), np.ones(3)), np.ndarray)


# Values and entropy.


@pytest.mark.parametrize('clip', [0.5, 0.2])
def test_value_clip_is_verls(clip):
  # The oracle's targets are the process rewards.
  new, old, returns = _golden('in/vpreds', 'in/values', 'in/rewards_process')

  def loss(values):
    per_token = losses.value_clip(values, old, returns, clip=clip)
    return losses.weighted(per_token, _weights())

  _check(loss, new, f'verl/value_loss/clip{clip}')


@pytest.mark.parametrize(
  ('value', 'old', 'target', 'loss', 'slope'),
  [
    (1.0, 1.0, 3.0, 2.0, -2.0),
    (2.0, 1.0, 3.0, 1.125, 0.0),  # moved to 1.5 at most: (1.5 - 3)² / 2
    (4.0, 1.0, 3.0, 1.125, 0.0),
    (5.0, 1.0, 3.0, 2.0, 2.0),  # beyond the target: the plain error is larger
    (0.0, 1.0, 3.0, 4.5, -3.0),
  ],
)
def test_value_clip_by_hand(value, old, target, loss, slope):
  def one(v):
    return losses.value_clip(*(jnp.full((1, 1), x) for x in (v, old, target)))[0, 0]

  out, grad = jax.value_and_grad(one)(value)
  assert (out, grad) == (loss, slope)


def test_entropy_is_verls():
  logits, expected = _golden('in/logits', 'verl/entropy_from_logits')
  np.testing.assert_allclose(jax.jit(losses.entropy)(logits), expected, rtol=1e-9)


def test_entropy_by_hand():
  shifted = np.log([0.5, 0.25, 0.25]) + 7.0
  logits = jnp.array([[0.0, 0.0, 0.0], [0.0, 800.0, 0.0], shifted])
  expected = [np.log(3), 0, 1.5 * np.log(2)]
  out = jax.jit(losses.entropy)(logits)
  np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)


# Aggregation.


def test_weighted_reads_nothing_where_nothing_weighs():
  x = jnp.array([[1.0, np.nan, 3.0, np.inf, -np.inf]])
  w = jnp.array([[0.5, 0.0, -1.0, 0.0, 0.0]])
  out, grad = jax.value_and_grad(losses.weighted)(x, w)
  assert out == 0.5 - 3.0
  np.testing.assert_array_equal(grad, w)


@pytest.mark.parametrize('mode', ['token-mean', 'seq-mean-token-mean'])
@pytest.mark.parametrize('empty', [False, True])
def test_aggregation_is_verls(mode, empty):
  aggregate = getattr(algorithms, mode.replace('-', '_'))
  mask = episodes.golden_mask().copy()
  if empty:
    mask[2] = False
  weights = jnp.asarray(mask * aggregate(mask.sum(axis=1))[:, None])
  x, expected = _golden(
    'in/values', f'verl/agg_loss{"_emptyrow" if empty else ""}/{mode}'
  )
  np.testing.assert_allclose(losses.weighted(x, weights), expected, rtol=1e-8)


# Gradients.


def test_gradients_are_derivatives():
  rng = np.random.default_rng(0)
  x, y, z = (jnp.asarray(rng.normal(size=(2, 5))) for _ in range(3))
  ratio = jnp.log(jnp.array([[0.5, 0.9, 1.1, 1.6, 5.0], [0.5, 0.9, 1.1, 1.6, 5.0]]))
  signs = jnp.array([[1.0] * 5, [-1.0] * 5])
  # Each branch of the clips, and no point near a kink.

  @jax.jit
  def every(ratio, x, y):
    return (
      losses.ppo_clip(ratio, signs)[0],
      losses.k1(x, y),
      losses.k3(x, y),
      losses.log_ratio(x, y),
      losses.entropy(x),
      losses.weighted(x, y),
      losses.value_clip(x, y, z),
    )

  check_grads(every, (ratio, x, y), order=1)
