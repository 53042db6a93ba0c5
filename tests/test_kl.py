"""KL to the reference: verl's numbers in float64 (golden/), hand-made cases."""

import episodes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.rl import kl, losses

pytestmark = pytest.mark.usefixtures('float64')
ESTIMATORS = {
  'kl': kl.k1,
  'k1': kl.k1,
  'mse': kl.k2,
  'k2': kl.k2,
  'low_var_kl': kl.k3,
  'k3': kl.k3,
  'k1+': kl.straight_through(kl.k1),
  'k2+': kl.straight_through(kl.k2),
  'k3+': kl.straight_through(kl.k3),
  'low_var_kl+': kl.straight_through(kl.k3),
}


def _golden(*keys, dtype=None):
  return [jnp.asarray(episodes.golden()[key], dtype) for key in keys]


# In float32 log-probs of up to -4 are rounded by 1e-7, and so are the terms of k3, whose
# sum is near 0: that much of the difference is absolute.
@pytest.mark.parametrize(
  ('dtype', 'rtol', 'atol'),
  [(np.float64, 1e-9, 1e-12), (np.float32, 1e-5, 2e-7)],
  ids=['f64', 'f32'],
)
@pytest.mark.parametrize('name', ESTIMATORS)
def test_estimator_is_verls(name, dtype, rtol, atol):
  logp, ref = _golden('in/logp', 'in/ref_logp', dtype=dtype)
  value, grad = _golden(f'verl/kl/{name}/val', f'verl/kl/{name}/grad')
  out, back = jax.vjp(jax.jit(lambda x: ESTIMATORS[name](x, ref)), logp)
  (grads,) = back(jnp.asarray(episodes.golden_mask(), dtype))
  assert out.dtype == grads.dtype == dtype
  np.testing.assert_allclose(out, value, rtol=rtol, atol=atol)
  np.testing.assert_allclose(grads, grad, rtol=rtol, atol=atol)


def test_k3_far_from_the_reference_is_verls():
  logp, ref, far = _golden('in/logp', 'in/ref_logp', 'in/logp_far_offset30')
  for sign, key in ((1, 'far'), (-1, 'farneg')):
    out, back = jax.vjp(jax.jit(lambda x: kl.k3(x, ref)), logp + sign * far)
    np.testing.assert_allclose(out, *_golden(f'verl/kl/low_var_kl_{key}/val'), rtol=1e-9)
    assert (back(jnp.ones_like(out))[0] == 0).all()


@pytest.mark.parametrize('name', ['k1', 'k2', 'k3', 'k1+', 'k2+', 'k3+'])
def test_estimators_are_the_same_on_the_host(name):
  logp, ref = (episodes.golden()[key] for key in ('in/logp', 'in/ref_logp'))
  for shift in (0.0, 30.0, -30.0):
    out = ESTIMATORS[name](logp + shift, ref)
    assert type(out) is np.ndarray and out.dtype == np.float64
    device = jax.jit(ESTIMATORS[name])(jnp.asarray(logp + shift), jnp.asarray(ref))
    np.testing.assert_allclose(out, device, rtol=1e-13, atol=1e-15)
    with jax.enable_x64(False):
      assert ESTIMATORS[name](logp, ref).dtype == np.float64


def test_estimators_by_hand():
  p, q = np.log([0.5, 0.25, 0.25]), np.log([0.2, 0.3, 0.5])
  exact = np.sum(np.exp(p) * (p - q))
  # Both are unbiased under p, and k3 is never negative.
  for estimator in (kl.k1, kl.k3):
    np.testing.assert_allclose(np.sum(np.exp(p) * estimator(p, q)), exact, rtol=1e-12)
  assert (kl.k3(p, q) > 0).all() and (kl.k1(p, q) < 0).any()
  np.testing.assert_allclose(kl.k2(p, q), (p - q) ** 2 / 2, rtol=1e-12)
  for estimator in ESTIMATORS.values():
    assert (estimator(p, p) == 0).all()


def test_mean_gradients_are_those_of_their_divergence():
  """Which divergence each estimator's gradient is of, in the loss."""
  z = jnp.array([0.3, -0.5, 0.9])
  q = jnp.log(jnp.array([0.2, 0.3, 0.5]))
  log_p = jax.nn.log_softmax
  fixed_p = jax.nn.softmax(z)
  mean = lambda estimator: lambda z: jnp.sum(fixed_p * estimator(log_p(z), q))
  divergence = lambda z: jnp.sum(jnp.exp(log_p(z)) * (log_p(z) - q))
  reverse = lambda z: jnp.sum(jnp.exp(q) * (q - log_p(z)))
  through = [mean(kl.straight_through(k)) for k in (kl.k1, kl.k3)]
  fns = [divergence, reverse, mean(kl.k1), mean(kl.k2), mean(kl.k3), *through]
  out = jax.jit(lambda z: [jax.value_and_grad(fn)(z) for fn in fns])(z)
  values, grads = zip(*out)
  np.testing.assert_allclose(grads[2], 0, atol=1e-15)
  np.testing.assert_allclose(grads[3], grads[0], rtol=1e-12)
  np.testing.assert_allclose(grads[4], grads[1], rtol=1e-12)
  for value, grad in zip(values[5:], grads[5:]):
    np.testing.assert_allclose(value, values[0], rtol=1e-12)
    np.testing.assert_allclose(grad, grads[0], rtol=1e-12)


@pytest.mark.parametrize(
  ('key', 'coef', 'dual_clip'),
  [('verl/ppo_plus_klloss0.001', 0.001, 3.0), ('trl/dapo_beta0.04', 0.04, None)],
)
def test_k3_in_the_loss_is_the_peers(key, coef, dual_clip):
  g, mask = episodes.golden(), episodes.golden_mask()
  advantages = g['in/adv']
  if key.startswith('trl'):
    mask = mask & (g['in/trl_completion_mask'] > 0)
    advantages = np.broadcast_to(g['in/trl_adv'][:, None], mask.shape)
  weights = jnp.asarray(mask / mask.sum())
  # Of the batch, only what a surrogate reads.
  batch = types.Batch(
    rows=tiny.rows(jnp.zeros(mask.shape, jnp.int32)),
    segment_ids=jnp.zeros(mask.shape, jnp.int32),
    action_mask=jnp.asarray(mask),
    old_logprobs=jnp.asarray(g['in/old_logp']),
    advantages=jnp.asarray(advantages),
    weights=weights,
  )
  surrogate = losses.ppo_clip(dual_clip=dual_clip)

  @jax.value_and_grad
  def loss(logprobs):
    stats = losses.TokenStats(logprobs, jnp.zeros_like(logprobs))
    divergence = kl.k3(logprobs, jnp.asarray(g['in/ref_logp']))
    return losses.weighted(surrogate(stats, batch)[0] + coef * divergence, weights)

  out, grad = jax.jit(loss)(jnp.asarray(g['in/logp']))
  np.testing.assert_allclose(out, g[f'{key}/loss'], rtol=1e-9)
  np.testing.assert_allclose(grad, g[f'{key}/grad'], rtol=1e-9, atol=1e-12)


# Control.


def test_adaptive_is_verls():
  kls, expected = (
    episodes.golden()[f'verl/adaptive_kl/{name}']
    for name in ('current_kl', 'values_init0.001_target0.1_h10000_n512')
  )
  control, coef, out = kl.adaptive(), 0.001, []
  for current in kls.tolist():
    coef = control(coef, current, 512)
    out.append(coef)
  np.testing.assert_allclose(out, expected, rtol=1e-12)


@pytest.mark.parametrize('where', [kl.InReward, kl.InLoss])
@pytest.mark.parametrize('coef', [-0.001, float('nan')])
def test_a_coefficient_below_zero_is_refused(where, coef):
  with pytest.raises(ValueError, match='coef is'):
    where(coef)


@pytest.mark.parametrize('options', [{'target': 0.0}, {'horizon': -1.0}])
def test_a_control_without_a_target_is_refused(options):
  with pytest.raises(ValueError, match='must be above 0'):
    kl.adaptive(**options)
