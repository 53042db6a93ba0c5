"""Advantages: hand-computed multi-turn cases and what every estimator promises.

The peers' numbers are in test_advantages_golden.py.
"""

import copy
import dataclasses
import functools

import episodes
import numpy as np
import pytest

from agent_r1_jax.rl import advantages, spans

_trajectory, _table = episodes.trajectory, episodes.visible_table
_close = episodes.assert_close
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
  'whitened': lambda table: advantages.whiten(advantages.returns_to_go(table)),
}


def _scored(*groups):
  """Makes trajectories of one token with these scores, group by group."""
  return [
    _trajectory('..0', rewards=[score], group=number)
    for number, scores in enumerate(groups)
    for score in scores
  ]


def _batch(masked=True, more=()):
  """Makes groups of two with all columns that any estimator reads.

  Args:
    masked: Whether only action tokens are visible.
    more: (index, trajectory) of further trajectories.
  """
  ts = episodes.make_varied(12)
  for place, t in more:
    ts.insert(place, t)
  table, rng = _table(*ts, masked=masked), np.random.default_rng(1)
  values, ref_logprobs = rng.normal(size=(2, len(table)))
  final_values, baselines, answer = rng.normal(size=(3, len(ts)))
  numbers = np.arange(len(ts))
  # Turns of one state within a trajectory, within a group, and across groups.
  places = [[0, 1, 1, 2][: len(t.turns)] for t in ts]
  return dataclasses.replace(
    table,
    old_logprobs=np.where(table.action_mask, table.old_logprobs, np.nan),
    values=values,
    ref_logprobs=ref_logprobs,
    truncated=numbers % 3 == 0,
    final_values=final_values,
    baselines=baselines,
    parts={'answer': answer, 'format': numbers % 2.0},
    states=np.array(sum(places, [])),
  )


# What every estimator promises.


@pytest.mark.parametrize('masked', [True, False])
@pytest.mark.parametrize('name', _ALL)
def test_every_visible_token_gets_a_finite_number(name, masked):
  """The NaN log-probs of the environment's tokens have no effect."""
  table = _batch(masked, more=[(3, _trajectory('....', group=1))])
  out = _ALL[name](table)
  for column in (out.advantages, out.returns):
    if column is not None:
      assert column.shape == (len(table),) and column.dtype == np.float64
      assert np.isfinite(column).all()
  assert out.advantages.any()
  # Whitening goes on from an estimator that has returns.
  with_returns = ('gae', 'step_gae', 'bi_level_gae', 'returns_to_go', 'greedy_baseline')
  assert (out.returns is not None) == (name in (*with_returns, 'whitened'))


@pytest.mark.parametrize('name', _ALL)
def test_table_without_tokens_gives_empty_advantages(name):
  none = {'values': [], 'ref_logprobs': [], 'baselines': [0.0, 0.0]}
  table = _table(
    _trajectory('....'), _trajectory('....'), **none, final_values=[0.0, 0.0]
  )
  table = dataclasses.replace(table, parts={'answer': np.ones(2)})
  assert len(_ALL[name](table).advantages) == 0
  none = {key: [] for key in (*none, 'final_values')}
  nobody = dataclasses.replace(_table(**none), parts={'answer': np.zeros(0)})
  assert len(_ALL[name](nobody).advantages) == 0


@pytest.mark.parametrize('name', _ALL)
def test_estimators_change_no_column_they_are_given(name):
  table = _batch()
  before = copy.deepcopy(table)
  out = _ALL[name](table)
  for field in dataclasses.fields(table):
    given, was = getattr(table, field.name), getattr(before, field.name)
    np.testing.assert_equal(given, was)
    if field.name not in ('advantages', 'returns'):
      np.testing.assert_equal(getattr(out, field.name), was)


@pytest.mark.parametrize('name', _ALL)
def test_the_order_of_trajectories_does_not_matter(name):
  table = _batch()
  order = np.random.default_rng(0).permutation(len(table.group))
  expected = episodes.reorder(_ALL[name](table), order)
  out = _ALL[name](episodes.reorder(table, order))
  _close(out.advantages, expected.advantages)
  if out.returns is not None:
    _close(out.returns, expected.returns)


@pytest.mark.parametrize('name', _ALL)
def test_what_the_environment_wrote_does_not_matter(name):
  def estimated(*pictures):
    ts = [_trajectory(p, rewards=[1.0, 2.0 * i]) for i, p in enumerate(pictures)]
    table, logprobs = _table(*ts, states=[0, 1, 0, 1]), np.tile(np.arange(5.0), 2)
    return _ALL[name](
      dataclasses.replace(
        table,
        values=logprobs * np.repeat([1, 2], 5),
        old_logprobs=logprobs,
        ref_logprobs=logprobs * table.rewards,
        parts={'all': table.scores},
        baselines=np.array([0.5, 0.5]),
      )
    ).advantages

  tight = estimated('00011', '01111')
  loose = estimated('....000...........11...', '..0.1111.....')
  np.testing.assert_array_equal(tight, loose)
  assert tight.any()


@pytest.mark.parametrize(
  ('name', 'missing'),
  [
    ('gae', 'values.*value_loss'),
    ('step_gae', 'values.*value_loss'),
    ('bi_level_gae', 'values.*value_loss'),
    ('greedy_baseline', 'baselines.*to reads'),
    ('reverse_kl', 'ref_logprobs.*its reads'),
    ('gdpo', r'no part.*\[\].*\[\].*reward/NAME'),
  ],
)
def test_missing_column_is_named_in_the_error(name, missing):
  with pytest.raises(ValueError, match=missing):
    _ALL[name](_table(_trajectory('..0', rewards=[1.0])))


# Groups.


@pytest.mark.parametrize('name', _GROUP)
def test_group_without_variance_gets_exactly_zero(name):
  assert np.std([0.1] * 3, ddof=1) > 0, 'the case is there to be hit'
  groups = [[0.1] * 3, [3.0], [0.0] * 4, [-1 / 3] * 7, [1e6 + 0.1] * 5]
  out = _GROUP[name](_table(*_scored(*groups), states=[0] * 20))
  assert (out.advantages == 0).all()
  # 0.1 + 0.2 is not 0.3; the order of a sum's terms is seen too.
  parts = [[0.1, 0.2], [0.2, 0.1], [0.3, 0.0]]
  same = _table(*(_trajectory('.0.1', rewards=r, seed=i) for i, r in enumerate(parts)))
  assert len({*same.scores}) > 1
  assert (_GROUP[name](same).advantages == 0).all()


def _baseline(table):
  """REINFORCE++-baseline."""
  return advantages.whiten(advantages.group_relative(table, divide_by_std=False))


def test_a_constant_added_to_a_groups_rewards_changes_nothing():
  table = _batch()
  constant = np.array([1.0, -7.5, 100.0])[table.group % 3]
  moved = table.rewards.copy()
  moved[spans.ends(table.trajectory)] += constant
  moved = dataclasses.replace(table, rewards=moved, baselines=table.baselines + constant)
  whole = [_GROUP[name] for name in ('grpo', 'dr_grpo', 'rloo')]
  for estimator in (*whole, _baseline, advantages.greedy_baseline):
    _close(estimator(moved).advantages, estimator(table).advantages)


def _of(name, **options):
  return functools.partial(getattr(advantages, name), **options)


# γ = λ = 1/2, so γλ = 1/4. Of tokens, V = 1, 2, 4 and r = 0, 1, 2: δ = 2/2 - 1 = 0,
# 1 + 4/2 - 2 = 1 and 2 - 4 = -2; A_2 = -2, A_1 = 1 - 2/4, A_0 = 0 + (1/2)/4. With V = 8
# after the last one: δ_2 = 2 + 8/2 - 4 = 2; A_2 = 2, A_1 = 1 + 2/4, A_0 = 0 + (3/2)/4.
_HALVES = {'gamma': 0.5, 'lam': 0.5}
_RAW = {**_HALVES, 'normalize': False}
_LEVELS = {**_HALVES, 'high_gamma': 0.5}
_TWO = ('..00....', '....1'), [1.0, 2.0], [1.0, 2, 4]
_THREE = ('..00..1', '..222'), [0.0, 1.0, 2.0], [1.0, 9, 2, 4, 9, 9]
_PAIRS = ('..00..', '.11'), [0.0, 2.0], [1.0, 2, 4, 8]


@pytest.mark.parametrize(
  ('estimate', 'episode', 'after', 'expected', 'returns'),
  [
    (_of('gae', **_HALVES), _TWO, None, [0.125, 0.5, -2], [1.125, 2.5, 2]),
    # What follows an end is worth nothing.
    (_of('gae', bootstrap=True, **_HALVES), _TWO, None, [0.125, 0.5, -2], None),
    (_of('gae', bootstrap=True, **_HALVES), _TWO, 8.0, [0.375, 1.5, 2], None),
    (_of('gae', **_HALVES), _TWO, 8.0, [0.125, 0.5, -2], None),
    # A turn is a step, and V is that of its beginning.
    (
      _of('step_gae', **_RAW),
      _THREE,
      None,
      [0.125, 0.125, 0.5, -2, -2, -2],
      [1.125, 1.125, 2.5, 2, 2, 2],
    ),
    (_of('step_gae', **_RAW), _THREE, 8.0, [0.125, 0.125, 0.5, -2, -2, -2], None),
    (
      _of('step_gae', bootstrap=True, **_RAW),
      _THREE,
      8.0,
      [0.375, 0.375, 1.5, 2, 2, 2],
      None,
    ),
    # Turns: δ_1 = 2 - 8 = -6; δ_0 = 0 + 8/2 - 2 = 2; A_1 = -6; A_0 = 2 - 6/4 = 1/2. Ends
    # are rewarded with A + V = 5/2 and 2. Tokens: 5/2 - 2 = 1/2, before it 2/2 - 1 +
    # (1/2)/4 = 1/8; 2 - 8 = -6, before it 8/2 - 4 - 6/4 = -3/2.
    (
      _of('bi_level_gae', **_LEVELS),
      _PAIRS,
      None,
      [0.125, 0.5, -1.5, -6],
      [1.125, 2.5, 2.5, 2],
    ),
    (_of('bi_level_gae', **_LEVELS), _PAIRS, 4.0, [0.125, 0.5, -1.5, -6], None),
    # V after it is 4: δ_1 = -4 = A_1, A_0 = 2 - 4/4 = 1.
    (
      _of('bi_level_gae', bootstrap=True, **_LEVELS),
      _PAIRS,
      4.0,
      [0.25, 1, -1, -4],
      None,
    ),
  ],
)
def test_a_critics_estimators_by_hand(estimate, episode, after, expected, returns):
  """`after` is the value after an episode that a budget ended."""
  pictures, rewards, values = episode
  table = _table(_trajectory(*pictures, rewards=rewards), values=values)
  if after is not None:
    table = dataclasses.replace(
      table, truncated=np.array([True]), final_values=np.array([after])
    )
  out = estimate(table)
  np.testing.assert_array_equal(out.advantages, expected)
  if returns is not None:
    np.testing.assert_array_equal(out.returns, returns)


@pytest.mark.parametrize(
  ('estimate', 'picture', 'columns', 'expected'),
  [
    # r = 1, 0, 2 and V = 1, 2, 4: δ = 1 + 2/2 - 1, 0 + 4/2 - 2 and 2 - 4.
    (_of('gae', **_HALVES), '..0.1', {'values': [1.0, 2, 4]}, [0.875, -0.5, -2]),
    # V is that before the reply: δ_1 = 2 - 4; δ_0 = 1 + 4/2 - 1.
    (
      _of('step_gae', **_RAW),
      '..0..1.',
      {'values': [1.0, 9, 9, 4, 9]},
      [1.5, 1.5, 1.5, -2, -2],
    ),
    (_of('returns_to_go', gamma=0.5), '.0.1', {}, [1.5, 1, 2]),
    (
      _of('reverse_kl'),
      '.0.1',
      {'old_logprobs': [-1.0, np.nan, -2.0], 'ref_logprobs': [-3.0, -9.0, -0.5]},
      [-2, 0, 1.5],
    ),
  ],
)
def test_without_the_mask_the_environments_token_takes_part(
  estimate, picture, columns, expected
):
  """Its reward is 0, and it has no KL. The rewards of the turns are 1 and 2."""
  table = _table(_trajectory(picture, rewards=[1.0, 2.0]), masked=False, **columns)
  np.testing.assert_array_equal(estimate(table).advantages, expected)


def test_step_gae_is_whitened_over_turns():
  """Two episodes, the second one of one turn with A = 0."""
  pictures, rewards, values = _THREE
  ts = _trajectory(*pictures, rewards=rewards), _trajectory('.00000', rewards=[3.0])
  white = advantages.step_gae(_table(*ts, values=[*values, 3.0, 0, 0, 0, 0]), **_HALVES)
  turns = np.array([0.125, 0.5, -2, 0])
  expected = (turns - turns.mean()) / (turns.std(ddof=1) + 1e-8)
  _close(white.advantages, expected[[0, 0, 1, 2, 2, 2, 3, 3, 3, 3, 3]])
  np.testing.assert_array_equal(white.returns[:6], [1.125, 1.125, 2.5, 2, 2, 2])
  alone = _trajectory('.00', rewards=[1.0])
  for n in (1, 3):  # Equal turns.
    out = advantages.step_gae(_table(*[alone] * n, values=[0.1, 0.0] * n))
    assert (out.advantages == 0).all()


@pytest.mark.parametrize(('gamma', 'returns'), [(0.5, [1, 2, 2, 4]), (1.0, [5, 5, 4, 4])])
def test_returns_are_carried_past_what_the_environment_wrote(gamma, returns):
  t = _trajectory('..00...1.', '..2', rewards=[1.0, 0.0, 4.0])
  table = _table(t, baselines=[0.5])
  options = {} if gamma == 1 else {'gamma': gamma}
  plain = advantages.returns_to_go(table, **options)
  less = advantages.greedy_baseline(table, **options)
  for found in (plain.advantages, plain.returns, less.returns, less.advantages + 0.5):
    np.testing.assert_array_equal(found, returns)


def test_group_estimators_by_hand():
  """Of scores 0, 1, 2 and 2, 4 and 9, however long the first trajectory is."""
  long = _trajectory('..0..11', '.222', rewards=[0.5, 0.5, -1.0])
  table = _table(long, *_scored([1.0, 2.0], [2.0, 4.0], [9.0]))
  # Deviations from the means 1, 3 and 9, whose std are 1 and sqrt(2).
  plain = advantages.group_relative(table, divide_by_std=False)
  np.testing.assert_array_equal(plain.advantages, [-1] * 6 + [0, 1, -1, 1, 0])
  out = advantages.group_relative(table, eps=0.0)
  _close(out.advantages, [-1] * 6 + [0, 1, -(0.5**0.5), 0.5**0.5, 0], 1e-15)
  assert out.returns is None
  # 0 - (1+2)/2, 1 - (0+2)/2, 2 - (0+1)/2; 2 - 4, 4 - 2; none.
  out = advantages.leave_one_out(table).advantages
  np.testing.assert_array_equal(out, [-1.5] * 6 + [0, 1.5, -2, 2, 0])
  # A small difference in rewards is no tie.
  out = advantages.group_relative(_table(*_scored([1.0, 1.0 + 1e-4])))
  expected = 0.5e-4 / (0.5**0.5 * 1e-4 + 1e-6)
  _close(out.advantages, [-expected, expected], 1e-9)


def test_bi_level_gae_counts_a_reward_within_a_turn_once():
  """With a reward on every token, undiscounted, the return is the sum of what follows."""
  table = _batch()
  table = dataclasses.replace(
    table,
    truncated=np.zeros_like(table.truncated),
    rewards=np.random.default_rng(0).normal(size=len(table)),
  )
  out = advantages.bi_level_gae(table, high_gamma=1.0)
  for returns, r in zip(
    episodes.split_by_trajectory(table, out.returns),
    episodes.split_by_trajectory(table, table.rewards),
    strict=True,
  ):
    _close(returns, np.cumsum(r[::-1])[::-1])


def _worth(*numbers):
  """One token a trajectory, with these advantages and returns."""
  numbers = np.array(numbers, float)
  turns = [[1]] * len(numbers)
  return episodes.make_table(turns, advantages=numbers, returns=numbers)


def test_whiten_by_hand():
  table = _worth(1, 2, 3)
  out = advantages.whiten(table, eps=0.0)
  np.testing.assert_array_equal(out.advantages, [-1, 0, 1])
  np.testing.assert_array_equal(out.returns, [1, 2, 3])
  out = advantages.whiten(table, eps=3.0)
  np.testing.assert_array_equal(out.advantages, [-0.5, 0, 0.5])


def test_whiten_of_equal_advantages_is_zero():
  assert advantages.whiten(_worth()).advantages.size == 0
  assert advantages.whiten(_worth(5.0)).advantages == 0
  assert (advantages.whiten(_worth(0, 0, 0)).advantages == 0).all()
  _close(advantages.whiten(_worth(*[0.1] * 6)).advantages, np.zeros(6), 1e-9)
