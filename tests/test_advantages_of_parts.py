"""Advantages of turns in groups, of parts of the reward, and of accepted episodes."""

import dataclasses
import itertools

import episodes
import numpy as np
import pytest

from agent_r1_jax.rl import advantages

_trajectory, _table = episodes.trajectory, episodes.visible_table
_close = episodes.assert_close


def test_gigpo_by_hand():
  """γ = 1/2. Task 0: scores 1 and 3, so A_E = -1 and 1. Returns of the turns:

  first: 'a' 0 + 1/2, 'b' 1. second: 'a' 2 + (0 + 1/2)/2, 'a' 0 + 1/2, 'c' 1.
  'a' holds 1/2, 9/4, 1/2: mean 13/12. 'b' and 'c' are alone. In task 1 'a' is alone.
  """
  first = _trajectory('..00..1', rewards=[0.0, 1.0])
  second = _trajectory('..0..1', '..222', rewards=[2.0, 0.0, 1.0])
  third = _trajectory('..0', rewards=[5.0], group=1)
  a, b, c = 0, 1, 2
  table = _table(first, second, third, states=[a, b, a, a, c, a])
  out = advantages.gigpo(table, gamma=0.5, step_weight=12.0).advantages
  _close(out, [-1 - 7, -1 - 7, -1, 1 + 14, 1 - 7, 1, 1, 1, 0])
  assert out[-1] == 0
  whole = advantages.gigpo(table, gamma=0.5, step_weight=0.0).advantages
  np.testing.assert_array_equal(whole, [-1, -1, -1, 1, 1, 1, 1, 1, 0])
  scaled = advantages.gigpo(table, gamma=0.5, divide_by_std=True, eps=0.0).advantages
  std = np.std([0.5, 2.25, 0.5], ddof=1)
  expected = -(0.5**0.5) - 7 / 12 / std
  _close(scaled[:3], [expected, expected, -(0.5**0.5)])


def test_gigpo_finds_the_states_of_trajectories():
  one, other = _trajectory('..0.1', '.2'), _trajectory('..0.11', '.2')
  for t, ids in ((one, [7, 7, 1, 5, 1]), (other, [7, 7, 2, 6, 2, 2])):
    t.segments[0].tokens[:], t.segments[1].tokens[:] = ids, [8, ids[-1]]
  for turn, r in zip(one.turns + other.turns, [1.0, 0, 0, 0, 1.0, 0]):
    turn.reward = r
  out = advantages.gigpo(_table(one, other), gamma=0.5)
  # The scores are equal. From 7 7: 1 and 1/2. After 5 and after 6: alone. From 8: 0, 0.
  np.testing.assert_array_equal(out.advantages, [0.25, 0, 0, -0.25, 0, 0, 0])


def _told(*parts, picture='..00..1', more=(), group=None):
  """Trajectories whose reward is the sum of its parts, and of `more` that has no name."""
  ts, empty = [], {}
  for i, (told, rest) in enumerate(itertools.zip_longest(parts, more, fillvalue=0.0)):
    rewards = [0.0] * (len(set(picture)) - 2) + [sum(told.values()) + rest]
    ts.append(_trajectory(picture, rewards=rewards, group=group[i] if group else 0))
    empty |= dict.fromkeys(told)
  columns = {name: np.array([told.get(name, 0.0) for told in parts]) for name in empty}
  return dataclasses.replace(_table(*ts), parts=columns)


def test_gdpo_adds_what_no_part_names_in_its_own_unit():
  """Less its group's mean, -1/4 of 1/2, -1 and -1/4; the rounding of a sum is nothing."""
  parts = {'a': 1.0, 'b': 0.1 + 0.2}, {'a': 3.0, 'b': 0.3}, {'a': 2.0, 'b': 0.3}
  plain = advantages.gdpo(_told(*parts)).advantages
  out = advantages.gdpo(_told(*parts, more=(0.5, -1.0, -0.25)))
  _close(out.advantages, plain + np.repeat([0.75, -0.75, 0.0], out.lengths))
  same = advantages.gdpo(_told(*parts), weights=dict.fromkeys('ab', 1.0))
  np.testing.assert_array_equal(plain, same.advantages)


def test_gdpo_sees_the_parts_in_the_unit_of_the_rewards():
  """Rewards of 2, 0 and 2, 1 that are all of one part: their unit changes nothing."""
  parts = {'a': 2.0}, {'a': 0.0}, {'a': 2.0}, {'a': 1.0}
  table = _told(*parts, group=[0, 0, 1, 1])
  expected = advantages.gdpo(table).advantages
  assert (np.abs(expected) > 0.9).all()
  scaled = advantages.by_reward_to_go(table)
  _close(advantages.gdpo(scaled).advantages, expected, 1e-5)
  # Half of the reward has no name, also after the transform.
  half = dataclasses.replace(table, parts={'a': table.scores / 2})
  scaled = advantages.by_reward_to_go(half, eps=0.0)
  assert (scaled.scores / 2).tolist() == [0.5, 0.0, 0.5, 0.25]
  added = np.repeat([0.25, -0.25, 0.125, -0.125], 3)
  _close(advantages.gdpo(scaled).advantages, expected + added, 1e-5)


def test_gdpo_by_hand():
  """Two parts of other sizes, tied sums: (1, 0), (0, 1), (1, 1)."""
  table = _told({'a': 100.0}, {'b': 1.0}, {'a': 100.0, 'b': 1.0})
  third = 3**-0.5  # 1, 0, 1 less 2/3, over the std 1/√3
  out = advantages.gdpo(table, weights={'a': 1.0, 'b': 2.0}, eps=0.0).advantages
  raw = np.array([third - 4 * third, -2 * third + 2 * third, third + 2 * third])
  tokens = np.repeat(raw, 3)
  _close(out, (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8))
  same = advantages.gdpo(table, weights={'a': 1.0, 'b': 1.0}).advantages
  np.testing.assert_array_equal(advantages.gdpo(table).advantages, same)


def test_gdpo_takes_the_parts_that_weigh():
  table = _told({'a': 1.0, 'b': 5.0, 'c': 0.1}, {'a': 0.0, 'b': 7.0, 'c': 0.1})
  alone = advantages.gdpo(_told({'a': 1.0}, {'a': 0.0}))
  out = advantages.gdpo(table, weights={'a': 1.0, 'c': 3.0})
  np.testing.assert_array_equal(out.advantages, alone.advantages)
  tied = advantages.gdpo(table, weights={'c': 1.0})
  assert (tied.advantages == 0).all(), 'c is tied'
  with pytest.raises(ValueError, match=r"\['A'\].*\['a', 'b', 'c'\]"):
    advantages.gdpo(table, weights={'A': 1.0})


def test_accepted_by_hand():
  table = _table(
    _trajectory('..0000..11', rewards=[0.5, 0.5]),
    _trajectory('..000', rewards=[0.9]),
    _trajectory('.0', rewards=[2.0]),
  )
  accepted = lambda threshold: advantages.accepted(table, threshold=threshold).advantages
  out = accepted(1.0)
  np.testing.assert_array_equal(out, np.repeat([10 / 7, 0, 10 / 7], [6, 3, 1]))
  # A mean over the batch is a mean over the accepted tokens.
  numbers = np.arange(10.0) ** 2
  _close((out * numbers).mean(), numbers[[0, 1, 2, 3, 4, 5, 9]].mean())
  assert (accepted(3.0) == 0).all()
  assert (accepted(0.0) == 1).all()
