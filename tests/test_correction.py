"""Corrections: verl's and AReaL's numbers in float64 (golden/), hand-made cases."""

import copy
import dataclasses

import episodes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_r1_jax import types
from agent_r1_jax.rl import correction, kl, losses

UNTOUCHED = [np.array([-1.0, -2.0, -0.5]), np.zeros(0), np.array([-3.0])]


def _table(old, behaviour):
  """Trajectories of action tokens with these log-probs under the two policies."""
  join = lambda parts: np.concatenate([np.zeros(0), *parts]).astype(np.float64)
  return episodes.made(
    [[len(x)] if len(x) else [] for x in old],
    logprobs=join(old),
    behaviour_logprobs=join(behaviour),
  )


# One of each, with options under which each of them keeps what is on-policy.
EVERY = {
  'token_truncated': correction.token_truncated(),
  'sequence_truncated': correction.sequence_truncated(),
  'token_band': correction.token_band(),
  'sequence_band': correction.sequence_band(),
  'geometric_band': correction.geometric_band(),
  'reject': correction.reject(kl.k3, np.max, high=0.1),
  'normalized': correction.normalized(correction.token_truncated()),
  'by_trajectory': correction.normalized(correction.token_band(), by_trajectory=True),
  'product': correction.product(
    correction.geometric_band(), correction.token_truncated(), correction.token_band()
  ),
}


def _golden_weights(correct, old='in/old_logp', behaviour='in/rollout_logp'):
  """The weights of the peers' episodes, [12, 24]; 0 off the action tokens."""
  g, mask = episodes.golden(), episodes.golden_mask()
  numbers = ([x[m] for x, m in zip(g[key], mask)] for key in (old, behaviour))
  out = np.zeros(mask.shape)
  out[mask] = correct(_table(*numbers))
  return out


@pytest.mark.parametrize(
  ('key', 'correct', 'by_trajectory'),
  [
    ('token/th2.0', correction.token_truncated(cap=2.0), False),
    ('token/th0.5_5.0', correction.token_band(low=0.5, high=5.0), False),
    ('sequence/th2.0', correction.sequence_truncated(cap=2.0), True),
    ('sequence/th0.5_5.0', correction.sequence_band(low=0.5, high=5.0), True),
  ],
)
@pytest.mark.parametrize('normalized', [False, True])
def test_weights_are_verls(key, correct, by_trajectory, normalized):
  g, mask = episodes.golden(), episodes.golden_mask()
  expected = g[f'verl/rollout_is/{key}/bn{int(normalized)}/w']
  if normalized:
    correct = correction.normalized(correct, by_trajectory=by_trajectory)
    # verl divides by a mean that has 1e-8 added to its count, or to each trajectory's.
    weights = g[f'verl/rollout_is/{key}/bn0/w']
    counts = mask.sum(axis=1) if by_trajectory else mask.sum()
    sums = weights.sum(axis=1) if by_trajectory else weights.sum()
    expected = expected * np.mean(sums / (counts + 1e-8)) / np.mean(sums / counts)
  np.testing.assert_allclose(_golden_weights(correct), expected, rtol=1e-12)


@pytest.mark.parametrize(
  ('key', 'estimator', 'over', 'bounds'),
  [
    ('token_k1/th0.8_1.25', kl.k1, None, (0.8, 1.25)),
    ('token_k2/th0.02', kl.k2, None, 0.02),
    ('token_k3/th0.02', kl.k3, None, 0.02),
    ('seq_sum_k1/th0.5_2.0', kl.k1, np.sum, (0.5, 2.0)),
    ('seq_sum_k2/th0.2', kl.k2, np.sum, 0.2),
    ('seq_sum_k3/th0.2', kl.k3, np.sum, 0.2),
    ('seq_mean_k1/th0.95_1.05', kl.k1, np.mean, (0.95, 1.05)),
    ('seq_mean_k2/th0.012', kl.k2, np.mean, 0.012),
    ('seq_mean_k3/th0.012', kl.k3, np.mean, 0.012),
    ('seq_max_k2/th0.05', kl.k2, np.max, 0.05),
    ('seq_max_k3/th0.05', kl.k3, np.max, 0.05),
  ],
)
def test_rejection_is_verls(key, estimator, over, bounds):
  low, high = np.log(bounds) if isinstance(bounds, tuple) else (-np.inf, bounds)
  out = _golden_weights(correction.reject(estimator, over, low=low, high=high))
  np.testing.assert_array_equal(out, episodes.golden()[f'verl/rollout_rs/{key}/mask'])
  mask = episodes.golden_mask()
  assert 0 < out.sum() < mask.sum()


@pytest.mark.parametrize(
  ('key', 'correct', 'dual_clip', 'tolerance'),
  [
    ('verl/ppo_vanilla/tis_token2.0', correction.token_truncated(cap=2.0), 3.0, 1e-9),
    # What it rejects stays in the denominator. AReaL's weights are float32.
    (
      'areal/decoupled/token_mask_upper1.3',
      correction.token_band(low=0.0, high=1.3),
      None,
      3e-7,
    ),
  ],
)
def test_corrected_loss_is_the_peers(key, correct, dual_clip, tolerance):
  g, mask = episodes.golden(), episodes.golden_mask()
  weights = _golden_weights(correct)
  with jax.enable_x64(True):
    # Of the batch, only what a surrogate reads.
    batch = types.Batch(
      *[jnp.zeros(mask.shape, jnp.int32)] * 3,
      action_mask=jnp.asarray(mask),
      logprobs=jnp.asarray(g['in/old_logp']),
      advantages=jnp.asarray(g['in/adv']),
      weights=jnp.asarray(mask / mask.sum()),
    )
    surrogate = losses.ppo_clip(dual_clip=dual_clip)

    @jax.value_and_grad
    def loss(logprobs):
      stats = losses.TokenStats(logprobs, jnp.zeros_like(logprobs))
      return losses.weighted(surrogate(stats, batch)[0] * weights, batch.weights)

    out, grad = jax.jit(loss)(jnp.asarray(g['in/logp']))
  np.testing.assert_allclose(out, g[f'{key}/loss'], rtol=tolerance)
  np.testing.assert_allclose(grad, g[f'{key}/grad'], rtol=tolerance, atol=1e-12)


# By hand.


def _weights(correct, *ratios):
  """The weights of trajectories whose tokens have these ratios."""
  behaviour = [np.full(len(r), -1.5) for r in ratios]
  old = [b + np.log(r) for b, r in zip(behaviour, ratios)]
  table = _table(old, behaviour)
  return [w.tolist() for w in episodes.each(table, correct(table))]


@pytest.mark.parametrize(
  ('correct', 'expected'),
  [
    (correction.token_truncated(), [[2, 0.6, 1], [0.2]]),
    (correction.token_truncated(cap=0.4), [[0.4, 0.4, 0.4], [0.2]]),
    (correction.sequence_truncated(cap=2.5), [[2.4, 2.4, 2.4], [0.2]]),
    (correction.sequence_truncated(), [[2, 2, 2], [0.2]]),
    (correction.token_band(), [[4, 0.6, 1], [0]]),
    (correction.token_band(low=0.7, high=3), [[0, 0, 1], [0]]),
    (correction.sequence_band(low=0.3), [[2.4, 2.4, 2.4], [0]]),
    (correction.sequence_band(low=0.1, high=2.3), [[0, 0, 0], [0.2]]),
    # The geometric means are 1.339 and 0.2.
    (correction.geometric_band(low=0.19, high=1.33), [[0, 0, 0], [1]]),
    (correction.geometric_band(low=0.21, high=1.35), [[1, 1, 1], [0]]),
    # log 1/r is -1.386, 0.511, 0 and 1.609.
    (correction.reject(kl.k1, high=1.0), [[1, 1, 1], [0]]),
    (correction.reject(kl.k1, low=-1.0, high=0.1), [[0, 0, 1], [0]]),
    (correction.reject(kl.k1, np.sum, low=-0.87, high=2.0), [[0, 0, 0], [1]]),
    (correction.reject(kl.k1, np.sum, low=-0.88, high=1.6), [[1, 1, 1], [0]]),
    # Their squares' halves: 0.961, 0.130, 0 and 1.295.
    (correction.reject(kl.k2, np.max, high=0.97), [[1, 1, 1], [0]]),
    (correction.reject(kl.k2, np.max, high=0.95), [[0, 0, 0], [0]]),
    # r - 1 - log r is 1.614, 0.111, 0 and 0.809.
    (correction.reject(kl.k3, high=0.5), [[0, 1, 1], [0]]),
    (correction.reject(kl.k3, np.mean, high=0.6), [[1, 1, 1], [0]]),
    (
      correction.product(
        correction.reject(kl.k1, high=1.0), correction.token_truncated(cap=3.0)
      ),
      [[3, 0.6, 1], [0]],
    ),
    (correction.product(correction.token_truncated()), [[2, 0.6, 1], [0.2]]),
    # The mean of 2, 0.6, 1, 0.2 is 0.95; that of 1.2 and 0.2 is 0.7.
    (
      correction.normalized(correction.token_truncated()),
      [[2 / 0.95, 0.6 / 0.95, 1 / 0.95], [0.2 / 0.95]],
    ),
    (
      correction.normalized(correction.token_truncated(), by_trajectory=True),
      [[2 / 0.7, 0.6 / 0.7, 1 / 0.7], [0.2 / 0.7]],
    ),
    # Nothing is left to be scaled.
    (correction.normalized(correction.token_band(low=8, high=9)), [[0, 0, 0], [0]]),
  ],
)
def test_by_hand(correct, expected):
  out = _weights(correct, [4.0, 0.6, 1.0], [0.2])
  for x, y in zip(out, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-12)


@pytest.mark.parametrize('name', EVERY)
def test_on_policy_nothing_is_corrected(name):
  weights = EVERY[name](_table(UNTOUCHED, UNTOUCHED))
  assert weights.dtype == np.float64
  np.testing.assert_array_equal(weights, np.ones(4))
  assert len(EVERY[name](_table([], []))) == 0


@pytest.mark.parametrize('name', EVERY)
def test_far_away_is_finite_and_the_table_stays(name):
  table = _table(
    [np.array([-800.0, -0.5]), np.array([-1.0])],
    [np.array([-0.5, -800.0]), np.array([-900.0])],
  )
  before = copy.deepcopy(table)
  weights = EVERY[name](table)
  assert weights.shape == (3,) and weights.dtype == np.float64
  assert np.isfinite(weights).all() and (weights >= 0).all()
  for field in dataclasses.fields(table):
    np.testing.assert_equal(getattr(table, field.name), getattr(before, field.name))


def test_ratios_are_clipped():
  far = _table(
    [np.array([40.0, -40.0, 3.0]), np.array([30.0, -30.0])], [np.zeros(3), np.zeros(2)]
  )
  out = correction.token_truncated(cap=1e99)(far)
  np.testing.assert_allclose(out[:3], np.exp([20.0, -20.0, 3.0]), rtol=1e-12)
  # The sum is clipped, not what is summed.
  out = correction.sequence_truncated(cap=1e99)(far)
  np.testing.assert_allclose(out, np.exp([3, 3, 3, 0, 0]), rtol=1e-12)


def test_rejection_leaves_the_weights_of_others_alone():
  one = _weights(correction.geometric_band(), [1.0, 1.0], [3.0])
  assert one == [[1, 1], [0]]
  assert one[:1] == _weights(correction.geometric_band(), [1.0, 1.0])


@pytest.mark.parametrize(
  'make',
  [
    lambda: correction.token_truncated(cap=0.0),
    lambda: correction.sequence_truncated(cap=-1.0),
    lambda: correction.token_band(low=2.0, high=1.0),
    lambda: correction.sequence_band(low=-1.0),
    lambda: correction.geometric_band(low=0.0),
    lambda: correction.geometric_band(low=1.2),
    lambda: correction.reject(kl.k2, low=1.0, high=0.5),
    lambda: correction.reject(kl.k2, high=float('nan')),
  ],
)
def test_options_are_checked(make):
  with pytest.raises(ValueError, match='low'):
    make()


def test_statistics_are_verls():
  g, mask = episodes.golden(), episodes.golden_mask()

  def statistics(old, behaviour, join=lambda x: x):
    rows = [[join(x[m]) for x, m in zip(g[key], mask)] for key in (old, behaviour)]
    return correction.statistics(_table(*rows))

  def verls(level, name):
    return float(g[f'verl/rollout_is/{level}/th2.0/metrics/rollout_is_{name}'])

  out, n = statistics('in/old_logp', 'in/rollout_logp'), mask.sum()
  mean, effective = verls('token', 'mean'), verls('token', 'eff_sample_size')
  # verl adds 1e-8 to the count of tokens, and to the mean that it divides by.
  expected = {
    'ratio_mean': mean * (n + 1e-8) / n,
    'effective_sample': effective * (n + 1e-8) / n / (1 + 1e-8 / mean) ** 2,
    'ratio_max': verls('token', 'max'),
    'ratio_outside': verls('token', 'ratio_fraction_low'),
  }
  assert {name: out[name] for name in expected} == pytest.approx(expected, rel=1e-9)
  # No token's ratio is outside; of the trajectories' products some are.
  products = statistics('in/old_logp', 'in/rollout_logp', lambda x: x.sum(keepdims=True))
  assert products['ratio_max'] == pytest.approx(verls('sequence', 'max'), rel=1e-9)
  shares = [verls('sequence', f'ratio_fraction_{side}') for side in ('low', 'high')]
  # These are float32.
  assert products['ratio_outside'] == np.float32(sum(shares)) > 0
  # The mean of verl's k1.
  mean_k1 = statistics('in/ref_logp', 'in/logp')['kl']
  assert mean_k1 == pytest.approx(g['verl/kl/k1/val'][mask].mean(), rel=1e-9)


def test_statistics():
  behaviour = [np.full(3, -1.0), np.full(1, -1.0)]
  old = [b + np.log(r) for b, r in zip(behaviour, ([4.0, 0.6, 1.0], [0.2]))]
  expected = {
    'kl': -np.log(4.0 * 0.6 * 0.2) / 4,
    'ratio_mean': 5.8 / 4,
    'ratio_max': 4.0,
    'ratio_outside': 0.5,
    'effective_sample': 5.8**2 / (4 * 17.4),
  }
  assert correction.statistics(_table(old, behaviour)) == pytest.approx(
    expected, rel=1e-12
  )
  assert correction.statistics(_table(UNTOUCHED, UNTOUCHED)) == {
    'kl': 0.0,
    'ratio_mean': 1.0,
    'ratio_max': 1.0,
    'ratio_outside': 0.0,
    'effective_sample': 1.0,
  }
  assert correction.statistics(_table([], [])) == {}
