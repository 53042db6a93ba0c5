"""Advantages: hand-computed multi-turn cases and the peers' numbers (golden/)."""

import itertools

import episodes
import numpy as np
import pytest

from agent_r1_jax import types
from agent_r1_jax.rl import advantages

_REWARDS = ('rewards_outcome', 'rewards_process')
_GAE = {
  'g1.0_l1.0': (1.0, 1.0),
  'g0.99_l0.95': (0.99, 0.95),
  'g1.0_l0.95': (1.0, 0.95),
  'g0.9_l0.0': (0.9, 0.0),
}


def _close(actual, expected, tolerance=1e-9):
  np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def _scored(*groups):
  """One-token episodes with these scores, group by group."""
  return [
    advantages.actions(episodes.trajectory('..0', rewards=[score], group=number))
    for number, scores in enumerate(groups)
    for score in scores
  ]


def _relative(*groups, **kwargs):
  """Advantages of one-token episodes with these scores."""
  per_token = advantages.group_relative(_scored(*groups), **kwargs)
  return np.concatenate(per_token)


# Actions.


def test_actions_are_in_order_over_turns_and_segments():
  t = episodes.trajectory('..00...111.', '...2', rewards=[0.5, 0.0, -2.0], group=7)
  a = advantages.actions(t)
  assert a.group == 7
  np.testing.assert_array_equal(a.turn, [0, 0, 1, 1, 1, 2])
  np.testing.assert_array_equal(a.rewards, [0, 0.5, 0, 0, 0, -2.0])
  first, second = t.segments
  expected = [*first.logprobs[[2, 3, 7, 8, 9]], second.logprobs[3]]
  np.testing.assert_array_equal(a.logprobs, expected)
  assert a.rewards.dtype == a.logprobs.dtype == np.float64


def test_no_trajectory_loses_its_reward():
  for t in episodes.varied(12):
    assert t.reward != 0
    _close(advantages.actions(t).score, t.reward, 1e-12)


def test_a_trajectory_without_a_turn_has_no_action():
  a = advantages.actions(episodes.trajectory('....'))
  assert len(a.turn) == len(a.rewards) == len(a.logprobs) == 0
  assert a.score == 0


@pytest.mark.parametrize(
  ('start', 'stop'), [(2, 5), (3, 5), (5, 8), (2, 2), (3, 2), (8, 12), (20, 22)]
)
def test_a_turn_must_span_action_tokens_alone(start, stop):
  """Its reward would sit on a token that is not trained: in verl it is lost."""
  t = episodes.trajectory('..00...111', rewards=[1.0, 1.0])
  t.turns[0] = types.Turn(0, start, stop, 1.0)
  with pytest.raises(ValueError, match=f"Turn 0 of task 'task 0' spans.*{start}:{stop}"):
    advantages.actions(t)


@pytest.mark.parametrize(
  'spans',
  [
    [(0, 2, 4)],  # an action token of no turn
    [(0, 2, 4), (0, 7, 9)],
    [(0, 2, 4), (0, 2, 4)],  # as many tokens as there are actions, but one twice
    [(0, 2, 4), (0, 2, 3), (0, 7, 10)],
    [(0, 7, 10), (0, 2, 4)],  # not in order
    [(1, 1, 2), (0, 2, 4), (0, 7, 10)],
    [],
  ],
)
def test_turns_hold_every_action_once_and_in_order(spans):
  t = episodes.trajectory('..00...111', '.2' if len(spans) == 3 else '..')
  t.turns = [types.Turn(*span) for span in spans]
  with pytest.raises(ValueError, match='task 0.*each once and in order'):
    advantages.actions(t)


# Group statistics.


@pytest.mark.parametrize('rewards', _REWARDS)
@pytest.mark.parametrize('variant', ['std1', 'std0'])
def test_group_relative_is_verls_but_for_the_singleton(rewards, variant):
  actions = episodes.golden_actions(rewards)
  out = advantages.group_relative(actions, divide_by_std=variant == 'std1')
  expected = episodes.golden_at_actions(f'verl/grpo/{rewards}/{variant}/adv')
  several = len(expected) - len(out[-1])
  _close(np.concatenate(out)[:several], expected[:several])
  # The last is alone in its group. verl gives it its raw score.
  assert (out[-1] == 0).all() and (expected[several:] != 0).all()


@pytest.mark.parametrize('rewards', _REWARDS)
@pytest.mark.parametrize('variant', ['std1', 'std0'])
def test_group_relative_over_segments_is_agent_r1s_over_steps(rewards, variant):
  actions = episodes.golden_actions(rewards, joined=True)
  assert len(actions) == 5
  out = advantages.group_relative(actions, divide_by_std=variant == 'std1')
  key = f'agentr1/grpo/{rewards}/{variant}/adv'
  _close(np.concatenate(out), episodes.golden_at_actions(key, joined=True))


def test_group_relative_by_hand():
  # Group 0: mean 1, deviations -1, 0, 1, std 1. Group 1: mean 3, std sqrt(2).
  long = episodes.trajectory('..0..11', '.222', rewards=[0.5, 0.5, -1.0], group=0)
  rest = _scored([1.0, 2.0], [2.0, 4.0])
  out = advantages.group_relative([advantages.actions(long), *rest], eps=0.0)
  np.testing.assert_array_equal(out[0], [-1.0] * 6)
  _close(np.concatenate(out[1:]), [0, 1, -(0.5**0.5), 0.5**0.5], 1e-15)
  plain = _relative([0.0, 1.0, 2.0], [2.0, 4.0], divide_by_std=False)
  np.testing.assert_array_equal(plain, [-1, 0, 1, -1, 1])


def test_long_trajectories_do_not_vote_more():
  short, long = '..0', '..0..11111111..22222222'
  pairs = [(short, [1.0]), (long, [0.0, 0.0, 0.0])]
  out = advantages.group_relative(
    [advantages.actions(episodes.trajectory(p, rewards=r)) for p, r in pairs],
    divide_by_std=False,
  )
  assert out[0].tolist() == [0.5] and set(out[1]) == {-0.5}


@pytest.mark.parametrize('divide_by_std', [True, False])
def test_a_group_without_variance_gets_exactly_nothing(divide_by_std):
  assert np.std([0.1] * 3, ddof=1) > 0, 'the case is there to be hit'
  groups = [[0.1] * 3, [3.0], [0.0] * 4, [-1 / 3] * 7, [1e6 + 0.1] * 5]
  assert (_relative(*groups, divide_by_std=divide_by_std) == 0).all()
  # 0.1 + 0.2 is not 0.3; the order of a sum's terms is seen too.
  parts = [[0.1, 0.2], [0.2, 0.1], [0.3, 0.0]]
  same = [episodes.trajectory('.0.1', rewards=r) for r in parts]
  assert len({t.reward for t in same}) > 1
  out = advantages.group_relative(
    [advantages.actions(t) for t in same], divide_by_std=divide_by_std
  )
  assert (np.concatenate(out) == 0).all()


def test_a_small_difference_is_one():
  out = _relative([1.0, 1.0 + 1e-4])
  _close(out, [-0.5e-4 / (0.5**0.5 * 1e-4 + 1e-6), 0.5e-4 / (0.5**0.5 * 1e-4 + 1e-6)])
  assert advantages.tied(np.array([0.1 + 0.2, 0.3]))
  assert advantages.tied(np.array([0.1 + 0.2, 0.3]) * 1e9)
  assert advantages.tied(np.zeros(3))
  assert not advantages.tied(np.array([1e-13, 2e-13]))
  assert not advantages.tied(np.array([0.0, 1e-9]))
  assert not advantages.tied(np.array([-1.0, 1.0]))


def test_a_constant_added_to_a_groups_rewards_changes_nothing():
  scores = [0.3, -1.0, 2.0, 0.0]
  for constant, std in itertools.product([1.0, -7.5, 100.0], [True, False]):
    moved = [s + constant for s in scores]
    other = [1.0, 2.0]
    expected = _relative(scores, other, divide_by_std=std)
    _close(_relative(moved, other, divide_by_std=std), expected, 1e-12)


def test_a_groups_unit_of_reward_does_not_matter():
  scores = np.array([0.3, -1.0, 2.0, 0.0])
  _close(_relative(scores * 10, eps=0.0), _relative(scores, eps=0.0), 1e-12)


def test_the_order_of_trajectories_does_not_matter():
  actions = [advantages.actions(t) for t in episodes.varied(12)]
  order = np.random.default_rng(0).permutation(12)
  expected = advantages.group_relative(actions)
  out = advantages.group_relative([actions[i] for i in order])
  for place, i in enumerate(order):
    _close(out[place], expected[i], 1e-14)


# GAE.


def _gae(actions, gamma, lam):
  return zip(
    *(advantages.gae(a.rewards, a.values, gamma=gamma, lam=lam) for a in actions)
  )


@pytest.mark.parametrize('rewards', _REWARDS)
@pytest.mark.parametrize('variant', _GAE)
def test_gae_is_verls(rewards, variant):
  raw, returns = _gae(episodes.golden_actions(rewards), *_GAE[variant])
  key = f'verl/gae/{rewards}/{variant}'
  white = np.concatenate(advantages.whiten(raw))
  _close(white, episodes.golden_at_actions(f'{key}/adv'))
  _close(np.concatenate(returns), episodes.golden_at_actions(f'{key}/ret'))


@pytest.mark.parametrize('rewards', _REWARDS)
@pytest.mark.parametrize('variant', ['g1.0_l1.0', 'g0.99_l0.95'])
def test_gae_over_segments_is_agent_r1s_over_steps(rewards, variant):
  actions = episodes.golden_actions(rewards, joined=True)
  raw, returns = _gae(actions, *_GAE[variant])
  key = f'agentr1/token_gae/{rewards}/{variant}'
  white = np.concatenate(advantages.whiten(raw))
  _close(white, episodes.golden_at_actions(f'{key}/adv', joined=True))
  _close(np.concatenate(returns), episodes.golden_at_actions(f'{key}/ret', joined=True))


def test_gae_by_hand():
  """Two turns, the second in a new segment; γ = 1/2, λ = 1/2, so γλ = 1/4.

  V = 1, 2, 4 and r = 0, 1, 2. δ_2 = 2 - 4 = -2; δ_1 = 1 + 4/2 - 2 = 1; δ_0 = 2/2 - 1 = 0.
  A_2 = -2; A_1 = 1 - 2/4 = 1/2; A_0 = 0 + (1/2)/4 = 1/8.
  """
  a = advantages.actions(episodes.trajectory('..00....', '....1', rewards=[1.0, 2.0]))
  values = np.array([1.0, 2.0, 4.0])
  out, returns = advantages.gae(a.rewards, values, gamma=0.5, lam=0.5)
  np.testing.assert_array_equal(out, [0.125, 0.5, -2.0])
  np.testing.assert_array_equal(returns, [1.125, 2.5, 2.0])


def test_what_the_environment_wrote_does_not_discount():
  def out(picture):
    a = advantages.actions(episodes.trajectory(picture, rewards=[1.0, 2.0]))
    return advantages.gae(a.rewards, np.arange(5.0), gamma=0.9, lam=0.8)

  np.testing.assert_array_equal(out('000.11'), out('....000...........11...'))


def test_gae_without_trace_or_discount():
  rng = np.random.default_rng(0)
  rewards, values = rng.normal(size=(2, 9))
  out, returns = advantages.gae(rewards, values)
  to_go = np.cumsum(rewards[::-1])[::-1]
  _close(returns, to_go, 1e-12)
  _close(out, to_go - values, 1e-12)
  out, _ = advantages.gae(rewards, values, gamma=0.7, lam=0.0)
  _close(out, rewards + 0.7 * np.append(values[1:], 0) - values, 1e-12)


# Whitening.


def test_whiten_is_verls():
  mask = episodes.golden_mask()
  values = [row[m] for row, m in zip(episodes.golden()['in/values'], mask)]
  out = advantages.whiten(values)
  assert [len(a) for a in out] == mask.sum(axis=1).tolist()
  _close(np.concatenate(out), episodes.golden_at_actions('verl/masked_whiten'))


def test_whiten_by_hand():
  out = advantages.whiten([np.array([1.0, 2.0]), np.array([3.0])], eps=0.0)
  np.testing.assert_array_equal(out[0], [-1, 0])
  np.testing.assert_array_equal(out[1], [1])


def test_whiten_of_what_does_not_vary_is_nothing():
  assert advantages.whiten([]) == []
  (alone,) = advantages.whiten([np.array([5.0])])
  assert alone == 0
  _close(np.concatenate(advantages.whiten([np.full(3, 0.1)] * 2)), np.zeros(6), 1e-9)
