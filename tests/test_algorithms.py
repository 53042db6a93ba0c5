"""Algorithms: advantages and loss put together, against the peers' numbers (golden/)."""

import functools

import episodes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_r1_jax import types
from agent_r1_jax.rl import advantages, algorithms, losses


@pytest.fixture(autouse=True)
def float64():
  """The formulas are compared where rounding cannot hide a difference."""
  with jax.enable_x64(True):
    yield


def _flat(credits, field='advantages'):
  return np.concatenate([getattr(c, field) for c in credits])


@functools.cache
def _inputs():
  """The peers' episodes, one a row, as TokenStats and Batch of float64 numpy arrays."""
  g, mask = episodes.golden(), episodes.golden_mask()
  counts = np.arange(24) * np.ones((12, 1), np.int32)
  entropy = np.random.default_rng(0).uniform(0, 3, (12, 24))
  batch = types.Batch(
    tokens=counts,
    positions=counts,
    segment_ids=np.ones((12, 24), np.int32),
    action_mask=mask,
    logprobs=g['in/old_logp'],
    advantages=g['in/adv'],
    weights=mask / mask.sum(),
    ref_logprobs=g['in/ref_logp'],
    values=g['in/values'],
    returns=g['in/rewards_process'],
  )
  return losses.TokenStats(g['in/logp'], entropy, g['in/vpreds']), batch


@functools.cache
def _compiled(algorithm):
  """(stats, batch) -> ((loss, metrics), gradient of the stats)."""
  return jax.jit(jax.value_and_grad(algorithm.loss, has_aux=True))


@functools.cache
def _grpo():
  return algorithms.grpo(kl_coef=0.001)


@functools.cache
def _ppo():
  return algorithms.ppo(value_coef=0.7, entropy_coef=0.01)


# What tokens are worth.


@pytest.mark.parametrize('std', [True, False])
def test_grpo_gives_every_action_its_groups_advantage(std):
  actions = episodes.golden_actions('rewards_process')
  credits = algorithms.grpo(divide_by_std=std).advantages(actions)
  expected = advantages.group_relative(actions, divide_by_std=std)
  np.testing.assert_array_equal(_flat(credits), np.concatenate(expected))
  assert all(c.returns is None for c in credits)
  assert (_flat(credits) != 0).any()


@pytest.mark.parametrize(
  ('variant', 'gamma', 'lam'), [('g1.0_l1.0', 1.0, 1.0), ('g0.99_l0.95', 0.99, 0.95)]
)
def test_ppo_gives_verls_whitened_gae(variant, gamma, lam):
  algorithm = algorithms.ppo(gamma=gamma, lam=lam, kl_coef=0.0)
  credits = algorithm.advantages(episodes.golden_actions('rewards_process'))
  for field, key in (('advantages', 'adv'), ('returns', 'ret')):
    expected = episodes.golden_at_actions(f'verl/gae/rewards_process/{variant}/{key}')
    np.testing.assert_allclose(_flat(credits, field), expected, rtol=1e-9, atol=1e-9)


def test_ppo_takes_verls_kl_off_the_rewards():
  actions = episodes.golden_actions('rewards_outcome')
  before = [a.rewards.copy() for a in actions]
  credits = algorithms.ppo(kl_coef=0.05).advantages(actions)
  np.testing.assert_array_equal(
    np.concatenate(before), np.concatenate([a.rewards for a in actions])
  )
  rewards = episodes.golden_at_actions('verl/kl_in_reward/beta0.05_kl')
  parts = np.split(rewards, np.cumsum([len(a.rewards) for a in actions])[:-1])
  pairs = [advantages.gae(r, a.values) for r, a in zip(parts, actions)]
  expected = np.concatenate(advantages.whiten([a for a, _ in pairs]))
  np.testing.assert_allclose(_flat(credits), expected, rtol=1e-9, atol=1e-9)
  returns = np.concatenate([r for _, r in pairs])
  np.testing.assert_allclose(_flat(credits, 'returns'), returns, rtol=1e-9, atol=1e-9)


def test_what_is_needed_is_said():
  needs = [
    (a.needs_reference, a.needs_critic)
    for a in (
      algorithms.grpo(),
      algorithms.grpo(kl_coef=0.0),
      algorithms.ppo(),
      algorithms.ppo(kl_coef=0.0),
    )
  ]
  assert needs == [(True, False), (False, False), (True, True), (False, True)]


def test_weights_of_trajectories():
  counts = np.array([1, 3, 0, 4])
  each = algorithms.token_mean(counts)
  np.testing.assert_array_equal(each, [1 / 8] * 4)
  each = algorithms.seq_mean_token_mean(counts)
  # The one without an action is not counted.
  np.testing.assert_allclose(each[[0, 1, 3]] * 3, [1, 1 / 3, 1 / 4], rtol=1e-15)
  for aggregate in (algorithms.token_mean, algorithms.seq_mean_token_mean):
    np.testing.assert_allclose(aggregate(counts) @ counts, 1, rtol=1e-15)
    assert np.isfinite(aggregate(np.zeros(2, int))).all()


# Losses.


def test_grpos_loss_is_verls():
  stats, batch = _inputs()
  (loss, metrics), grad = _compiled(_grpo())(stats, batch)
  g = episodes.golden()
  np.testing.assert_allclose(loss, g['verl/ppo_plus_klloss0.001/loss'], rtol=1e-9)
  np.testing.assert_allclose(
    grad.logprobs, g['verl/ppo_plus_klloss0.001/grad'], rtol=1e-9, atol=1e-12
  )
  expected = {
    'policy_loss': g['verl/ppo_vanilla/token-mean/loss'],
    'clip_fraction': g['verl/ppo_vanilla/metrics/pg_clipfrac'],
    'behaviour_kl': g['verl/ppo_vanilla/metrics/ppo_kl'],
    'kl': (g['verl/kl/low_var_kl/val'] * batch.weights).sum(),
    'entropy': (stats.entropy * batch.weights).sum(),
  }
  assert metrics.keys() == expected.keys()
  for name, value in expected.items():
    # verl's masked means have an ε of 1e-8; the clip fraction is a float32.
    np.testing.assert_allclose(metrics[name], value, rtol=1e-7, err_msg=name)


def test_ppos_loss_is_the_sum_of_verls():
  stats, batch = _inputs()
  (loss, metrics), grad = _compiled(_ppo())(stats, batch)
  g = episodes.golden()
  entropy = (stats.entropy * batch.weights).sum()
  expected = (
    g['verl/ppo_vanilla/token-mean/loss']
    + 0.7 * g['verl/value_loss/clip0.5/loss']
    - 0.01 * entropy
  )
  np.testing.assert_allclose(loss, expected, rtol=1e-9)
  for part, value in (
    (grad.logprobs, g['verl/ppo_vanilla/token-mean/grad']),
    (grad.values, 0.7 * g['verl/value_loss/clip0.5/grad']),
    (grad.entropy, -0.01 * batch.weights),
  ):
    np.testing.assert_allclose(part, value, rtol=1e-9, atol=1e-12)
  np.testing.assert_allclose(metrics['entropy'], entropy, rtol=1e-12)
  value_loss = g['verl/value_loss/clip0.5/loss']
  np.testing.assert_allclose(metrics['value_loss'], value_loss, rtol=1e-9)


@pytest.mark.parametrize(
  ('make', 'options'),
  [
    (algorithms.grpo, {'kl_coef': 1.0, 'entropy_coef': 1.0}),
    (algorithms.ppo, {'value_clip': 0.1, 'value_coef': 0.1, 'entropy_coef': 1.0}),
  ],
)
def test_options_reach_the_loss(make, options):
  """Each changes it; what they do is in test_losses."""
  stats, batch = _inputs()
  options = {'clip_low': 0.1, 'clip_high': 0.1, 'dual_clip': 1.1} | options
  chosen = [{}, *({name: value} for name, value in options.items())]
  every = jax.jit(lambda *xs: [make(**kwargs).loss(*xs)[0] for kwargs in chosen])
  assert len(set(map(float, every(stats, batch)))) == len(chosen)


def test_entropy_bonus_and_kl_have_their_signs():
  stats, batch = _inputs()
  grpo = algorithms.grpo(kl_coef=0.5, entropy_coef=0.25)
  (loss, m), grad = _compiled(grpo)(stats, batch)
  expected = m['policy_loss'] + 0.5 * m['kl'] - 0.25 * m['entropy']
  np.testing.assert_allclose(loss, expected, rtol=1e-12)
  np.testing.assert_allclose(grad.entropy, -0.25 * batch.weights, rtol=1e-12)


def test_without_kl_no_reference_is_read():
  stats, batch = _inputs()
  _, metrics = algorithms.grpo(kl_coef=0.0).loss(
    *jax.tree.map(jnp.asarray, (stats, batch._replace(ref_logprobs=None)))
  )
  assert 'kl' not in metrics


@pytest.mark.parametrize('make', [_grpo, _ppo])
def test_off_the_mask_nothing_is_read_and_nothing_changes(make):
  stats, batch = _inputs()
  algorithm, rng = make(), np.random.default_rng(1)
  (loss, metrics), grad = _compiled(algorithm)(stats, batch)

  def other(x, value):
    noise = value if value != value else value * rng.normal(size=x.shape)
    return np.where(batch.action_mask, x, noise)

  fields = ('logprobs', 'advantages', 'ref_logprobs', 'values', 'returns')

  def changed(value):
    new = {name: other(getattr(batch, name), value) for name in fields}
    return jax.tree.map(lambda x: other(x, value), stats), batch._replace(**new)

  (noisy, _), noisy_grad = _compiled(algorithm)(*changed(100.0))
  assert noisy == loss
  for part, expected in zip(noisy_grad, grad):
    np.testing.assert_array_equal(part, expected)
    assert (np.asarray(part)[~batch.action_mask] == 0).all()
  # With NaN the value stands; test_learner shows that the gradient does, too.
  (broken, broken_metrics), _ = _compiled(algorithm)(*changed(np.nan))
  assert broken == loss and broken_metrics == metrics


@pytest.mark.parametrize('make', [_grpo, _ppo])
@pytest.mark.parametrize('rows', [1, 4])
def test_shares_of_micro_batches_add_up(make, rows):
  stats, batch = _inputs()
  fn = _compiled(make())
  whole = fn(stats, batch)
  parts = [
    fn(*jax.tree.map(lambda x, i=i: x[i : i + rows], (stats, batch)))
    for i in range(0, 12, rows)
  ]
  values, grads = zip(*parts)
  summed = jax.tree.map(lambda *xs: sum(xs), *values)
  joined = jax.tree.map(lambda *xs: np.concatenate(xs), *grads)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12), summed, whole[0]
  )
  jax.tree.map(np.testing.assert_array_equal, joined, whole[1])


def test_likelihood_by_hand():
  stats, batch = _inputs()
  weights = np.zeros((12, 24))
  weights[0, :3] = [0.5, 0.25, 0.25]
  advantages_ = np.ones((12, 24))
  advantages_[0, 2] = 0.02
  loss, metrics = jax.jit(algorithms.likelihood)(
    stats, batch._replace(weights=weights, advantages=advantages_)
  )
  a, b, c = stats.logprobs[0, :3]
  np.testing.assert_allclose(loss, -(a / 2 + b / 4 + 0.02 * c / 4), rtol=1e-12)
  assert metrics == {'loss': loss}
