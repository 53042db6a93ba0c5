"""Advantages: hand-computed multi-turn cases and what every estimator promises.

The peers' numbers are in test_advantages_golden.py.
"""

import copy
import dataclasses
import functools
import itertools

import episodes
import numpy as np
import pytest

from agent_r1_jax.rl import advantages, rewards
from agent_r1_jax.rl import episodes as episodes_lib

_CRITIC = {
  'gae': functools.partial(advantages.gae, gamma=0.97, lam=0.9),
  'step_gae': functools.partial(advantages.step_gae, gamma=0.97, lam=0.9),
  'bi_level_gae': functools.partial(advantages.bi_level_gae, gamma=0.99, lam=0.9),
}
_GROUP = {
  'grpo': advantages.group_relative,
  'dr_grpo': functools.partial(advantages.group_relative, divide_by_std=False),
  'rloo': advantages.leave_one_out,
  'gigpo': advantages.gigpo,
  'gigpo_std': functools.partial(advantages.gigpo, divide_by_std=True),
}
_ALL = {
  **_CRITIC,
  **_GROUP,
  'returns_to_go': functools.partial(advantages.returns_to_go, gamma=0.97),
  'greedy_baseline': functools.partial(advantages.greedy_baseline, gamma=0.97),
  'gdpo': advantages.gdpo,
  'reverse_kl': advantages.reverse_kl,
  'accepted': functools.partial(advantages.accepted, threshold=0.0),
  'whitened': lambda eps: advantages.whiten(advantages.returns_to_go(eps)),
}


def _close(actual, expected, tolerance=1e-12):
  np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def _episode(*pictures, masked=True, values=None, **kwargs):
  """What is seen of a drawn trajectory; see tests/episodes.py."""
  e = episodes_lib.episode(episodes.trajectory(*pictures, **kwargs), masked=masked)
  e.values = None if values is None else np.array(values, float)
  return e


def _scored(*groups):
  """One-token episodes with these scores, group by group."""
  return [
    _episode('..0', rewards=[score], group=number)
    for number, scores in enumerate(groups)
    for score in scores
  ]


def _flat(credits):
  return np.concatenate([c.advantages for c in credits])


def _batch(masked=True):
  """Groups of two of every shape, with all that any estimator asks for."""
  rng = np.random.default_rng(1)
  batch = []
  for i, t in enumerate(episodes.varied(12)):
    e = episodes_lib.episode(t, masked=masked)
    e.values, e.ref_logprobs = rng.normal(size=(2, len(e.rewards)))
    e.truncated, e.final_value, e.baseline = i % 3 == 0, rng.normal(), rng.normal()
    e.parts = {'answer': rng.normal(), 'format': float(i % 2)}
    # Turns of one state within an episode, within a group, and across groups.
    e.anchors = [b'start', b'again', b'again', b'end'][: len(e.anchors)]
    batch.append(e)
  return batch


# What every estimator promises.


@pytest.mark.parametrize('masked', [True, False])
@pytest.mark.parametrize('name', _ALL)
def test_one_credit_an_episode_and_a_number_a_token(name, masked):
  """The log-probs of what the environment wrote are nan, and never reach a number."""
  batch = _batch(masked)
  batch.insert(3, dataclasses.replace(_empty(), group=batch[3].group))
  out = _ALL[name](batch)
  assert len(out) == len(batch)
  for e, credit in zip(batch, out):
    for array in credit if credit.returns is not None else credit[:1]:
      assert array.shape == e.rewards.shape and array.dtype == np.float64
      assert np.isfinite(array).all()
  assert _flat(out).any()


def _empty():
  none = np.zeros(0)
  e = _episode('....', values=none)
  return dataclasses.replace(e, ref_logprobs=none, baseline=0.0, parts={'answer': 1.0})


@pytest.mark.parametrize('name', _ALL)
def test_without_a_token_there_is_nothing(name):
  out = _ALL[name]([_empty(), _empty()])
  assert [len(c.advantages) for c in out] == [0, 0]
  if name != 'gdpo':
    assert _ALL[name]([]) == []


@pytest.mark.parametrize('name', _ALL)
def test_what_is_given_stays(name):
  batch = _batch()
  before = copy.deepcopy(batch)
  _ALL[name](batch)
  for e, b in zip(batch, before):
    for field in dataclasses.fields(e):
      np.testing.assert_array_equal(getattr(e, field.name), getattr(b, field.name))


@pytest.mark.parametrize('name', _ALL)
def test_the_order_of_episodes_does_not_matter(name):
  batch = _batch()
  order = np.random.default_rng(0).permutation(len(batch))
  expected, out = _ALL[name](batch), _ALL[name]([batch[i] for i in order])
  for credit, i in zip(out, order):
    _close(credit.advantages, expected[i].advantages)
    if credit.returns is not None:
      _close(credit.returns, expected[i].returns)


@pytest.mark.parametrize('name', _ALL)
def test_what_the_environment_wrote_does_not_matter(name):
  def batch(*pictures):
    out = []
    for i, picture in enumerate(pictures):
      e = _episode(picture, rewards=[1.0, 2.0 * i], values=np.arange(5.0) * (i + 1))
      e.logprobs = np.arange(5.0)
      e.anchors, e.parts, e.baseline = [b'a', b'b'], {'all': e.score}, 0.5
      e.ref_logprobs = e.logprobs * e.rewards
      out.append(e)
    return out

  tight = _ALL[name](batch('00011', '01111'))
  loose = _ALL[name](batch('....000...........11...', '..0.1111.....'))
  np.testing.assert_array_equal(_flat(tight), _flat(loose))
  assert _flat(tight).any()


@pytest.mark.parametrize(
  ('name', 'missing'),
  [
    ('gae', 'values.*value_loss'),
    ('step_gae', 'values.*value_loss'),
    ('bi_level_gae', 'values.*value_loss'),
    ('greedy_baseline', 'group 0.*baseline.*greedy_baseline'),
    ('reverse_kl', 'ref_logprobs.*reads_reference'),
    ('gdpo', r'no part.*\[\].*\[\].*reward/NAME'),
  ],
)
def test_what_an_estimator_misses_is_named(name, missing):
  with pytest.raises(ValueError, match=missing):
    _ALL[name]([_episode('..0', rewards=[1.0])])


# Groups.


@pytest.mark.parametrize('name', _GROUP)
def test_a_group_without_variance_gets_exactly_nothing(name):
  assert np.std([0.1] * 3, ddof=1) > 0, 'the case is there to be hit'
  groups = [[0.1] * 3, [3.0], [0.0] * 4, [-1 / 3] * 7, [1e6 + 0.1] * 5]
  batch = _scored(*groups)
  for e in batch:
    e.anchors = [b'same']
  assert (_flat(_GROUP[name](batch)) == 0).all()
  # 0.1 + 0.2 is not 0.3; the order of a sum's terms is seen too.
  parts = [[0.1, 0.2], [0.2, 0.1], [0.3, 0.0]]
  same = [_episode('.0.1', rewards=r, seed=i) for i, r in enumerate(parts)]
  assert len({e.score for e in same}) > 1
  assert (_flat(_GROUP[name](same)) == 0).all()


def _baseline(batch):
  """REINFORCE++-baseline."""
  return advantages.whiten(advantages.group_relative(batch, divide_by_std=False))


def test_a_constant_added_to_a_groups_rewards_changes_nothing():
  batch = _batch()
  moved = copy.deepcopy(batch)
  for e in moved:
    constant = [1.0, -7.5, 100.0][e.group % 3]
    e.rewards[-1] += constant
    e.baseline += constant
  whole = [_GROUP[name] for name in ('grpo', 'dr_grpo', 'rloo')]
  for estimator in (*whole, _baseline, advantages.greedy_baseline):
    _close(_flat(estimator(moved)), _flat(estimator(batch)))


def test_group_relative_by_hand():
  # Group 0: mean 1, deviations -1, 0, 1, std 1. Group 1: mean 3, std sqrt(2).
  long = _episode('..0..11', '.222', rewards=[0.5, 0.5, -1.0])
  batch = [long, *_scored([1.0, 2.0], [2.0, 4.0])]
  out = advantages.group_relative(batch, eps=0.0)
  np.testing.assert_array_equal(out[0].advantages, [-1.0] * 6)
  assert all(c.returns is None for c in out)
  _close(_flat(out[1:]), [0, 1, -(0.5**0.5), 0.5**0.5], 1e-15)
  plain = advantages.group_relative(batch, divide_by_std=False)
  np.testing.assert_array_equal(_flat(plain), [-1] * 6 + [0, 1, -1, 1])


def test_leave_one_out_is_the_score_less_the_mean_of_the_others():
  long = _episode('..0..11', rewards=[0.5, -0.5])
  out = advantages.leave_one_out([long, *_scored([3.0, 6.0], [2.0, 4.0], [9.0])])
  # 0 - (3+6)/2, 3 - (0+6)/2, 6 - (0+3)/2; 2 - 4, 4 - 2; none.
  np.testing.assert_array_equal(_flat(out), [-4.5] * 3 + [0, 4.5, -2, 2, 0])


def test_long_trajectories_do_not_vote_more():
  short = _episode('..0', rewards=[1.0])
  long = _episode('..0..11111111..22222222', rewards=[0.0, 0.0, 0.0])
  for divide, expected in ((False, 0.5), (True, 0.5**0.5)):
    out = advantages.group_relative([short, long], divide_by_std=divide, eps=0.0)
    _close(_flat(out), [expected] + [-expected] * 17, 1e-15)


def test_a_small_difference_is_one():
  out = _flat(advantages.group_relative(_scored([1.0, 1.0 + 1e-4])))
  expected = 0.5e-4 / (0.5**0.5 * 1e-4 + 1e-6)
  _close(out, [-expected, expected], 1e-9)


def test_a_groups_unit_of_reward_does_not_matter():
  scores = np.array([0.3, -1.0, 2.0, 0.0])
  once = advantages.group_relative(_scored(scores), eps=0.0)
  _close(_flat(advantages.group_relative(_scored(scores * 10), eps=0.0)), _flat(once))


# A critic.


def test_gae_by_hand():
  """Two turns, the second in a new segment; γ = 1/2, λ = 1/2, so γλ = 1/4.

  V = 1, 2, 4 and r = 0, 1, 2. δ_2 = 2 - 4 = -2; δ_1 = 1 + 4/2 - 2 = 1; δ_0 = 2/2 - 1 = 0.
  A_2 = -2; A_1 = 1 - 2/4 = 1/2; A_0 = 0 + (1/2)/4 = 1/8.
  """
  e = _episode('..00....', '....1', rewards=[1.0, 2.0], values=[1, 2, 4])
  (out,) = advantages.gae([e], gamma=0.5, lam=0.5)
  np.testing.assert_array_equal(out.advantages, [0.125, 0.5, -2.0])
  np.testing.assert_array_equal(out.returns, [1.125, 2.5, 2.0])


def test_gae_of_a_truncated_episode_goes_on_with_its_final_value_if_it_is_asked_to():
  """V after it is 8: δ_2 = 2 + 8/2 - 4 = 2; A_2 = 2; A_1 = 1 + 2/4; A_0 = 0 + (3/2)/4."""
  e = _episode('..00....', '....1', rewards=[1.0, 2.0], values=[1, 2, 4])
  e.final_value = 8.0
  options = {'gamma': 0.5, 'lam': 0.5}
  (ended,) = advantages.gae([e], bootstrap=True, **options)
  assert ended.advantages[-1] == -2, 'what follows an end is worth nothing'
  e.truncated = True
  (out,) = advantages.gae([e], bootstrap=True, **options)
  np.testing.assert_array_equal(out.advantages, [0.375, 1.5, 2.0])
  (out,) = advantages.gae([e], **options)
  np.testing.assert_array_equal(out.advantages, ended.advantages)


@pytest.mark.parametrize('name', _CRITIC)
def test_by_default_an_episode_that_ran_out_has_ended(name):
  """Whatever the critic says of what would have followed."""
  ended = [dataclasses.replace(e, truncated=False) for e in _batch()]
  cut = [dataclasses.replace(e, truncated=True, final_value=9.0) for e in ended]
  for a, b in zip(_CRITIC[name](cut), _CRITIC[name](ended), strict=True):
    np.testing.assert_array_equal(a.advantages, b.advantages)
    np.testing.assert_array_equal(a.returns, b.returns)
  asked = _CRITIC[name](cut, bootstrap=True)
  assert not np.allclose(_flat(asked), _flat(_CRITIC[name](ended)))


def test_gae_without_the_mask_by_hand():
  """The environment's token takes part: r = 1, 0, 2 and V = 1, 2, 4.

  δ_2 = 2 - 4 = -2; δ_1 = 0 + 4/2 - 2 = 0; δ_0 = 1 + 2/2 - 1 = 1.
  A_2 = -2; A_1 = -2/4 = -1/2; A_0 = 1 - (1/2)/4 = 7/8.
  """
  e = _episode('..0.1', rewards=[1.0, 2.0], values=[1, 2, 4], masked=False)
  (out,) = advantages.gae([e], gamma=0.5, lam=0.5)
  np.testing.assert_array_equal(out.advantages, [0.875, -0.5, -2.0])


@pytest.mark.parametrize('factor', [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.5)])
@pytest.mark.parametrize('n', [1, 2, 3, 64, 1000])
def test_gae_is_the_recursion(factor, n):
  gamma, lam = factor
  rng = np.random.default_rng(n)
  rewards, values, none = rng.normal(size=(3, n))
  e = episodes_lib.Episode(0, np.zeros(n, int), rewards, none, values=values)
  e.truncated, e.final_value = True, 0.7
  expected, following, value = np.zeros(n), 0.0, 0.7
  for t in reversed(range(n)):
    following = rewards[t] + gamma * value - values[t] + gamma * lam * following
    expected[t], value = following, values[t]
  (out,) = advantages.gae([e], gamma=gamma, lam=lam, bootstrap=True)
  _close(out.advantages, expected)
  _close(out.returns, expected + values)


def test_step_gae_by_hand():
  """A turn is a step: test_gae_by_hand's V = 1, 2, 4 at the turns' beginnings."""
  values = [1, 9, 2, 4, 9, 9]
  e = _episode('..00..1', '..222', rewards=[0.0, 1.0, 2.0], values=values)
  (out,) = advantages.step_gae([e], gamma=0.5, lam=0.5, normalize=False)
  np.testing.assert_array_equal(out.advantages, [0.125, 0.125, 0.5, -2, -2, -2])
  np.testing.assert_array_equal(out.returns, [1.125, 1.125, 2.5, 2, 2, 2])
  # With a further episode of one turn, A = 0: the mean and the std are of four turns.
  other = _episode('.00000', rewards=[3.0], values=[3, 0, 0, 0, 0])
  white = advantages.step_gae([e, other], gamma=0.5, lam=0.5)
  turns = np.array([0.125, 0.5, -2, 0])
  expected = (turns - turns.mean()) / (turns.std(ddof=1) + 1e-8)
  _close(_flat(white), expected[[0, 0, 1, 2, 2, 2, 3, 3, 3, 3, 3]])
  np.testing.assert_array_equal(white[0].returns, out.returns)
  e.truncated, e.final_value = True, 8.0
  options = {'gamma': 0.5, 'lam': 0.5, 'normalize': False}
  (ran_out,) = advantages.step_gae([e], **options)
  np.testing.assert_array_equal(ran_out.advantages, out.advantages)
  (out,) = advantages.step_gae([e], bootstrap=True, **options)
  np.testing.assert_array_equal(out.advantages, [0.375, 0.375, 1.5, 2, 2, 2])


def test_step_gae_without_the_mask_takes_the_value_before_the_reply():
  e = _episode('..0..1.', rewards=[1.0, 2.0], values=[1, 9, 9, 4, 9], masked=False)
  (out,) = advantages.step_gae([e], gamma=0.5, lam=0.5, normalize=False)
  # δ_1 = 2 - 4; δ_0 = 1 + 4/2 - 1.
  np.testing.assert_array_equal(out.advantages, [1.5, 1.5, 1.5, -2, -2])


def test_bi_level_gae_by_hand():
  """γ = λ = γ_h = 1/2. V = 1, 2 | 4, 8; the first turn's reward is 0, the second's 2.

  Turns: δ_1 = 2 - 8 = -6; δ_0 = 0 + 8/2 - 2 = 2; A_1 = -6; A_0 = 2 - 6/4 = 1/2. Ends are
  rewarded with A + V = 5/2 and 2. Tokens: 5/2 - 2 = 1/2, before it 2/2 - 1 + (1/2)/4 =
  1/8; 2 - 8 = -6, before it 8/2 - 4 - 6/4 = -3/2.
  """
  e = _episode('..00..', '.11', rewards=[0.0, 2.0], values=[1, 2, 4, 8])
  options = {'gamma': 0.5, 'lam': 0.5, 'high_gamma': 0.5}
  (out,) = advantages.bi_level_gae([e], **options)
  np.testing.assert_array_equal(out.advantages, [0.125, 0.5, -1.5, -6])
  np.testing.assert_array_equal(out.returns, [1.125, 2.5, 2.5, 2])
  # V after it is 4: δ_1 = -4 = A_1, A_0 = 2 - 4/4 = 1.
  e.truncated, e.final_value = True, 4.0
  (ran_out,) = advantages.bi_level_gae([e], **options)
  np.testing.assert_array_equal(ran_out.advantages, out.advantages)
  (out,) = advantages.bi_level_gae([e], bootstrap=True, **options)
  np.testing.assert_array_equal(out.advantages, [0.25, 1, -1, -4])


def test_bi_level_gae_counts_a_reward_within_a_turn_once():
  """With a reward on every token, undiscounted, the return is the sum of what follows."""
  for e in _batch():
    e.truncated = False
    e.rewards = np.random.default_rng(0).normal(size=len(e.rewards))
    (out,) = advantages.bi_level_gae([e], high_gamma=1.0)
    _close(out.returns, np.cumsum(e.rewards[::-1])[::-1])


def test_step_gae_of_turns_that_do_not_differ_is_nothing():
  alone = _episode('.00', rewards=[1.0], values=[0.1, 0])
  assert (_flat(advantages.step_gae([alone])) == 0).all()
  assert (_flat(advantages.step_gae([alone] * 3)) == 0).all()


# Returns.


def test_returns_to_go_are_carried_past_what_the_environment_wrote():
  e = _episode('..00...1.', '..2', rewards=[1.0, 0.0, 4.0])
  (out,) = advantages.returns_to_go([e], gamma=0.5)
  np.testing.assert_array_equal(out.advantages, [1, 2, 2, 4])
  np.testing.assert_array_equal(out.returns, out.advantages)
  (out,) = advantages.returns_to_go([e])
  np.testing.assert_array_equal(out.advantages, [5, 5, 4, 4])
  # Without the mask the environment's token takes part, with reward 0.
  e = _episode('.0.1', rewards=[1.0, 4.0], masked=False)
  (out,) = advantages.returns_to_go([e], gamma=0.5)
  np.testing.assert_array_equal(out.advantages, [2, 2, 4])


def test_greedy_baseline_by_hand():
  e = _episode('..00..1', rewards=[1.0, 4.0])
  e.baseline = 0.5
  (out,) = advantages.greedy_baseline([e], gamma=0.5)
  np.testing.assert_array_equal(out.advantages, [1, 2.5, 3.5])
  np.testing.assert_array_equal(out.returns, [1.5, 3, 4])


# Turns in groups, parts of the reward, distillation, rejection sampling.


def test_gigpo_by_hand():
  """γ = 1/2. Task 0: scores 1 and 3, so A_E = -1 and 1. Returns of the turns:

  first: 'a' 0 + 1/2, 'b' 1. second: 'a' 2 + (0 + 1/2)/2, 'a' 0 + 1/2, 'c' 1.
  'a' holds 1/2, 9/4, 1/2: mean 13/12. 'b' and 'c' are alone. In task 1 'a' is alone.
  """
  first = _episode('..00..1', rewards=[0.0, 1.0])
  second = _episode('..0..1', '..222', rewards=[2.0, 0.0, 1.0])
  third = _episode('..0', rewards=[5.0], group=1)
  first.anchors, second.anchors = [b'a', b'b'], [b'a', b'a', b'c']
  third.anchors = [b'a']
  batch = [first, second, third]
  out = advantages.gigpo(batch, gamma=0.5, step_weight=12.0)
  _close(out[0].advantages, [-1 - 7, -1 - 7, -1])
  _close(out[1].advantages, [1 + 14, 1 - 7, 1, 1, 1])
  assert (out[2].advantages == 0).all()
  whole = _flat(advantages.gigpo(batch, gamma=0.5, step_weight=0.0))
  np.testing.assert_array_equal(whole, [-1, -1, -1, 1, 1, 1, 1, 1, 0])
  scaled = advantages.gigpo(batch, gamma=0.5, divide_by_std=True, eps=0.0)
  std = np.std([0.5, 2.25, 0.5], ddof=1)
  expected = -(0.5**0.5) - 7 / 12 / std
  _close(scaled[0].advantages, [expected, expected, -(0.5**0.5)])


def test_gigpo_finds_the_states_of_trajectories():
  one, other = episodes.trajectory('..0.1', '.2'), episodes.trajectory('..0.11', '.2')
  for t, ids in ((one, [7, 7, 1, 5, 1]), (other, [7, 7, 2, 6, 2, 2])):
    t.segments[0].tokens[:], t.segments[1].tokens[:] = ids, [8, ids[-1]]
  for turn, r in zip(one.turns + other.turns, [1.0, 0, 0, 0, 1.0, 0]):
    turn.reward = r
  out = advantages.gigpo([episodes_lib.episode(t) for t in (one, other)], gamma=0.5)
  # The scores are equal. From 7 7: 1 and 1/2. After 5 and after 6: alone. From 8: 0, 0.
  np.testing.assert_array_equal(_flat(out), [0.25, 0, 0, -0.25, 0, 0, 0])


def _told(*parts, picture='..00..1', more=()):
  """Episodes whose reward is the sum of its parts, and of `more` that has no name."""
  batch = []
  for told, rest in itertools.zip_longest(parts, more, fillvalue=0.0):
    rewards = [0.0] * (len(set(picture)) - 2) + [sum(told.values()) + rest]
    batch.append(_episode(picture, rewards=rewards))
    batch[-1].parts = told
  return batch


def test_gdpo_adds_what_no_part_names_in_its_own_unit():
  """Less its group's mean, -1/4 of 1/2, -1 and -1/4; the rounding of a sum is nothing."""
  parts = {'a': 1.0, 'b': 0.1 + 0.2}, {'a': 3.0, 'b': 0.3}, {'a': 2.0, 'b': 0.3}
  plain = advantages.gdpo(_told(*parts))
  out = advantages.gdpo(_told(*parts, more=(0.5, -1.0, -0.25)))
  added = np.repeat([0.75, -0.75, 0.0], [len(c.advantages) for c in out])
  _close(_flat(out), _flat(plain) + added)
  weights = dict.fromkeys('ab', 1.0)
  np.testing.assert_array_equal(
    _flat(plain), _flat(advantages.gdpo(_told(*parts), weights=weights))
  )


def test_a_small_penalty_moves_gdpos_advantages_by_its_size():
  """A KL of 0.1 to 0.4 a token times 0.001, in tied groups too; it moved them by 0.89."""
  batch = _told({'a': 1.0}, {'a': 0.0}, {'a': 1.0}, {'a': 1.0})
  for i, e in enumerate(batch):
    e.group, e.ref_logprobs = i // 2, e.logprobs - 0.1 * (1 + i)
  less = rewards.less_kl(batch, coef=0.001, estimator=lambda p, q: p - q)
  moved = _flat(advantages.gdpo(less)) - _flat(advantages.gdpo(batch))
  # Three tokens each. The first's KL is 0.3 and the second's 0.6: ±0.15 from their mean.
  _close(moved, 1.5e-4 * np.repeat([1, -1, 1, -1], 3))


def test_gdpo_sees_the_parts_in_the_unit_of_the_rewards():
  """Rewards of 2, 0 and 2, 1 that are all of one part: by_group changes nothing there."""
  batch = _told({'a': 2.0}, {'a': 0.0}, {'a': 2.0}, {'a': 1.0})
  for i, e in enumerate(batch):
    e.group = i // 2
  expected = _flat(advantages.gdpo(batch))
  assert (np.abs(expected) > 0.9).all()
  for scaled in (rewards.by_group(batch), rewards.by_reward_to_go(batch)):
    _close(_flat(advantages.gdpo(scaled)), expected, 1e-5)
  # Half of the reward has no name: so has half of what it became, 1.
  half = [dataclasses.replace(e, parts={'a': e.score / 2}) for e in batch]
  scaled = rewards.by_reward_to_go(half, eps=0.0)
  raw = [e.score / 2 for e in scaled]
  assert raw == [0.5, 0.0, 0.5, 0.25]
  added = np.repeat([0.25, -0.25, 0.125, -0.125], 3)
  _close(_flat(advantages.gdpo(scaled)), expected + added, 1e-5)


def test_gdpo_by_hand():
  """Two parts of other sizes, tied sums: (1, 0), (0, 1), (1, 1)."""
  batch = _told({'a': 100.0}, {'b': 1.0}, {'a': 100.0, 'b': 1.0})
  third = 3**-0.5  # 1, 0, 1 less 2/3, over the std 1/√3
  out = advantages.gdpo(batch, weights={'a': 1.0, 'b': 2.0}, eps=0.0)
  raw = np.array([third - 4 * third, -2 * third + 2 * third, third + 2 * third])
  tokens = np.repeat(raw, 3)
  _close(_flat(out), (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8))
  same = advantages.gdpo(batch, weights={'a': 1.0, 'b': 1.0})
  np.testing.assert_array_equal(_flat(advantages.gdpo(batch)), _flat(same))


def test_gdpo_takes_the_parts_that_weigh():
  batch = _told({'a': 1.0, 'b': 5.0, 'c': 0.1}, {'a': 0.0, 'b': 7.0, 'c': 0.1})
  alone = _told({'a': 1.0}, {'a': 0.0})
  out = advantages.gdpo(batch, weights={'a': 1.0, 'c': 3.0})
  np.testing.assert_array_equal(_flat(out), _flat(advantages.gdpo(alone)))
  assert (_flat(advantages.gdpo(batch, weights={'c': 1.0})) == 0).all(), 'c is tied'
  with pytest.raises(ValueError, match=r"\['A'\].*\['a', 'b', 'c'\]"):
    advantages.gdpo(batch, weights={'A': 1.0})


def test_reverse_kl_by_hand():
  e = _episode('.0.1', rewards=[1.0, 1.0], masked=False)
  e.logprobs[[0, 2]] = -1.0, -2.0
  e.ref_logprobs = np.array([-3.0, -9.0, -0.5])
  (out,) = advantages.reverse_kl([e])
  # What the environment wrote is not the policy's.
  np.testing.assert_array_equal(out.advantages, [-2, 0, 1.5])


def test_accepted_by_hand():
  batch = [
    _episode('..0000..11', rewards=[0.5, 0.5]),
    _episode('..000', rewards=[0.9]),
    _episode('.0', rewards=[2.0]),
  ]
  out = _flat(advantages.accepted(batch, threshold=1.0))
  np.testing.assert_array_equal(out, np.repeat([10 / 7, 0, 10 / 7], [6, 3, 1]))
  # The mean over the batch of any number a token is the mean over what was accepted.
  numbers = np.arange(10.0) ** 2
  _close((out * numbers).mean(), numbers[[0, 1, 2, 3, 4, 5, 9]].mean())
  assert (_flat(advantages.accepted(batch, threshold=3.0)) == 0).all()
  assert (_flat(advantages.accepted(batch, threshold=0.0)) == 1).all()


# Whitening.


def _credits(*arrays):
  return [episodes_lib.Credit(np.array(a, float), np.array(a, float)) for a in arrays]


def test_whiten_by_hand():
  credits = _credits([1, 2], [], [3])
  out = advantages.whiten(credits, eps=0.0)
  np.testing.assert_array_equal(_flat(out), [-1, 0, 1])
  assert [c.returns is d.returns for c, d in zip(out, credits)] == [True] * 3
  out = advantages.whiten(credits, eps=3.0, shift_mean=False)
  np.testing.assert_array_equal(_flat(out), [1.5, 2, 2.5])


def test_whiten_of_what_does_not_vary_is_nothing():
  assert advantages.whiten([]) == []
  assert _flat(advantages.whiten(_credits([], []))).size == 0
  assert _flat(advantages.whiten(_credits([5.0]))) == 0
  assert _flat(advantages.whiten(_credits([5.0]), shift_mean=False)) == 5
  assert (_flat(advantages.whiten(_credits([0, 0], [0]))) == 0).all()
  _close(_flat(advantages.whiten(_credits(*[[0.1] * 3] * 2))), np.zeros(6), 1e-9)
