"""Corrections: verl's numbers in float64 (golden/), hand-made cases, the engine's."""

import dataclasses

import clients
import episodes
import numpy as np
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.config import Sampling
from agent_r1_jax.engine import guide
from agent_r1_jax.rl import losses
from agent_r1_jax.rl import table as table_lib

_LOGPROBS = ('in/old_logp', 'in/rollout_logp')


def _table(old, behaviour):
  """Trajectories of action tokens with these log-probs under the two policies."""
  join = lambda parts: np.concatenate([np.zeros(0), *parts]).astype(np.float64)
  return episodes.make_table(
    [[len(x)] if len(x) else [] for x in old],
    old_logprobs=join(old),
    behaviour_logprobs=join(behaviour),
  )


def test_weights_are_verls():
  g, mask = episodes.golden(), episodes.golden_mask()
  numbers = ([x[m] for x, m in zip(g[key], mask)] for key in _LOGPROBS)
  out = losses.token_truncated(cap=2.0)(_table(*numbers))
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
    (losses.token_truncated(), [[2, 0.6, 1], [0.2]]),
    (losses.token_truncated(cap=0.4), [[0.4, 0.4, 0.4], [0.2]]),
  ],
)
def test_weights_by_hand(correct, expected):
  out = _weights(correct, [4.0, 0.6, 1.0], [0.2])
  for x, y in zip(out, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-12)


def test_log_ratios_are_clipped_at_20():
  far = _table([np.array([40.0, -40.0, 3.0])], [np.zeros(3)])
  out = losses.token_truncated(cap=1e99)(far)
  np.testing.assert_allclose(out, np.exp([20.0, -20.0, 3.0]), rtol=1e-12)


@pytest.mark.parametrize('cap', [0.0, -1.0, float('nan')])
def test_a_cap_that_is_not_positive_is_refused(cap):
  with pytest.raises(ValueError, match='cap is'):
    losses.token_truncated(cap=cap)


def test_statistics_are_verls():
  g, mask = episodes.golden(), episodes.golden_mask()

  def statistics(old, behaviour, join=lambda x: x):
    rows = [[join(x[m]) for x, m in zip(g[key], mask)] for key in (old, behaviour)]
    return losses.measure_correction(_table(*rows))

  def verls(level, name):
    return float(g[f'verl/rollout_is/{level}/th2.0/metrics/rollout_is_{name}'])

  out, n = statistics(*_LOGPROBS), mask.sum()
  mean, effective = verls('token', 'mean'), verls('token', 'eff_sample_size')
  # verl adds 1e-8 to the count of tokens, and to the mean that it divides by.
  expected = {
    'ratio_mean': mean * (n + 1e-8) / n,
    'effective_sample': effective * (n + 1e-8) / n / (1 + 1e-8 / mean) ** 2,
    'ratio_max': verls('token', 'max'),
    'ratio_outside': sum(verls('token', f'ratio_fraction_{x}') for x in ('low', 'high')),
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


# Through the engine.


@pytest.mark.parametrize('temperature', [1.0, 0.7])
def test_what_was_sampled_from_another_distribution_is_corrected(temperature):
  """A forced token has weight π(token), one of the likeliest 3 their probability."""
  params = clients.params()
  engine = tiny.engine(params, guides={guide.FORCED: None})
  forced = {guide.FORCED: guide.forced_state(clients.tokens(1, 12))}
  given = clients.tokens(0, 7)

  async def play(key, guides, **truncation):
    chosen = {'sampling': Sampling(temperature, **truncation), 'guides': guides}
    options = chosen | {'top_logprobs': 3} | clients.ENDLESS
    return await engine.submit(clients.request(given, None, 12, key, **options))

  plays = [play(0, forced), play(1, {}, top_k=3), play(2, {})]
  replies = tiny.within(engine.run, plays)
  empty = types.Segment.read(types.Prompt())
  segments = [empty.add_turn(types.Prompt(given), reply) for reply in replies]
  weights = []
  for segment, old in zip(
    segments, tiny.learned(params, segments, temperature=temperature), strict=True
  ):
    table = table_lib.from_segments([segment])
    table = dataclasses.replace(table, old_logprobs=old).take(segment.action_mask)
    weights.append(losses.token_truncated()(table))
  pi = [np.exp(replies[0].logprobs), np.exp(replies[1].top_logprobs).sum(axis=1), 1.0]
  assert (weights[0] < 0.1).all() and (weights[1] < 0.9).any()
  for weight, expected, bound in zip(weights, pi, (1e-5, 1e-5, 2e-5), strict=True):
    np.testing.assert_allclose(weight, expected, rtol=0, atol=bound)
  # Beside rows that have guides, a row without any keeps its numbers to the last bit.
  np.testing.assert_array_equal(replies[2].behaviour_logprobs, replies[2].logprobs)
