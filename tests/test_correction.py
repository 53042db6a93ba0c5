"""Corrections: verl's numbers in float64 (golden/), hand-made cases."""

import episodes
import numpy as np
import pytest

from agent_r1_jax.rl import correction

_LOGPROBS = ('in/old_logp', 'in/rollout_logp')


def _table(old, behaviour):
  """Trajectories of action tokens with these log-probs under the two policies."""
  join = lambda parts: np.concatenate([np.zeros(0), *parts]).astype(np.float64)
  return episodes.make_table(
    [[len(x)] if len(x) else [] for x in old],
    logprobs=join(old),
    behaviour_logprobs=join(behaviour),
  )


def test_weights_are_verls():
  g, mask = episodes.golden(), episodes.golden_mask()
  numbers = ([x[m] for x, m in zip(g[key], mask)] for key in _LOGPROBS)
  out = correction.token_truncated(cap=2.0)(_table(*numbers))
  np.testing.assert_allclose(
    out, g['verl/rollout_is/token/th2.0/bn0/w'][mask], rtol=1e-12
  )


# By hand.


def _weights(correct, *ratios):
  """The weights of trajectories whose tokens have these ratios."""
  behaviour = [np.full(len(r), -1.5) for r in ratios]
  old = [b + np.log(r) for b, r in zip(behaviour, ratios)]
  table = _table(old, behaviour)
  return [w.tolist() for w in episodes.split_by_trajectory(table, correct(table))]


@pytest.mark.parametrize(
  ('correct', 'expected'),
  [
    (correction.token_truncated(), [[2, 0.6, 1], [0.2]]),
    (correction.token_truncated(cap=0.4), [[0.4, 0.4, 0.4], [0.2]]),
  ],
)
def test_by_hand(correct, expected):
  out = _weights(correct, [4.0, 0.6, 1.0], [0.2])
  for x, y in zip(out, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-12)


def test_ratios_are_clipped():
  far = _table([np.array([40.0, -40.0, 3.0])], [np.zeros(3)])
  out = correction.token_truncated(cap=1e99)(far)
  np.testing.assert_allclose(out, np.exp([20.0, -20.0, 3.0]), rtol=1e-12)


@pytest.mark.parametrize('cap', [0.0, -1.0, float('nan')])
def test_a_cap_must_be_positive(cap):
  with pytest.raises(ValueError, match='cap is'):
    correction.token_truncated(cap=cap)


def test_statistics_are_verls():
  g, mask = episodes.golden(), episodes.golden_mask()

  def statistics(old, behaviour, join=lambda x: x):
    rows = [[join(x[m]) for x, m in zip(g[key], mask)] for key in (old, behaviour)]
    return correction.statistics(_table(*rows))

  def verls(level, name):
    return float(g[f'verl/rollout_is/{level}/th2.0/metrics/rollout_is_{name}'])

  out, n = statistics(*_LOGPROBS), mask.sum()
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
  products = statistics(*_LOGPROBS, lambda x: x.sum(keepdims=True))
  assert products['ratio_max'] == pytest.approx(verls('sequence', 'max'), rel=1e-9)
  shares = [verls('sequence', f'ratio_fraction_{side}') for side in ('low', 'high')]
  # These are float32.
  assert products['ratio_outside'] == np.float32(sum(shares)) > 0
  # The mean of verl's k1.
  mean_k1 = statistics('in/ref_logp', 'in/logp')['kl']
  assert mean_k1 == pytest.approx(g['verl/kl/k1/val'][mask].mean(), rel=1e-9)
