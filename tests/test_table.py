"""The token table: no token, turn or reward is lost, with the mask on or off."""

import copy
import dataclasses

import episodes
import numpy as np
import pytest

from agent_r1_jax import types
from agent_r1_jax.rl import spans
from agent_r1_jax.rl import table as table_lib


def _build(*pictures, masked=True, **kwargs):
  return episodes.visible_table(episodes.trajectory(*pictures, **kwargs), masked=masked)


def test_every_token_has_a_number_in_every_column():
  ts = episodes.make_varied(12)
  table = table_lib.build(ts, baselines=range(12))
  segments = [s for t in ts for s in t.segments]
  for name, column in (
    ('tokens', table.tokens),
    ('action_mask', table.action_mask),
    ('behaviour_logprobs', table.old_logprobs),
    ('behaviour_logprobs', table.behaviour_logprobs),
    ('policy_steps', table.policy_steps),
  ):
    expected = np.concatenate([getattr(s, name) for s in segments])
    np.testing.assert_array_equal(column, expected)
  assert table.rewards.dtype == table.old_logprobs.dtype == np.float64
  owner = np.repeat(range(12), [len(t.segments) for t in ts])
  lengths = [len(s.tokens) for s in segments]
  np.testing.assert_array_equal(table.segment, np.repeat(range(len(segments)), lengths))
  np.testing.assert_array_equal(table.trajectory, np.repeat(owner, lengths))
  np.testing.assert_array_equal(table.segment_lengths, lengths)
  assert table.lengths.sum() == len(table) == sum(lengths)
  assert table.turn_trajectory.tolist() == [i for i, t in enumerate(ts) for _ in t.turns]
  assert table.group.tolist() == [i // 2 for i in range(12)]
  assert table.baselines.tolist() == list(range(12))
  assert table_lib.build(ts).baselines is None
  ts = [episodes.trajectory('.0', group=group) for group in (7, 3, 7, 40)]
  assert table_lib.build(ts).group.tolist() == [1, 0, 1, 2]


def test_a_table_shares_nothing_with_its_trajectories_and_changes_none():
  ts = episodes.make_varied(4)
  before = copy.deepcopy(ts)
  table = table_lib.build(ts)
  for name, column in vars(table).items():
    if isinstance(column, np.ndarray):
      column += 1 if column.dtype != bool else False
      assert column.flags.writeable, name
  for t, b in zip(ts, before):
    for s, was in zip(t.segments, b.segments):
      for field in dataclasses.fields(s):
        np.testing.assert_array_equal(getattr(s, field.name), getattr(was, field.name))
    assert t.turns == b.turns


def test_actions_are_in_order_over_turns_and_segments():
  t = episodes.trajectory('..00...111.', '...2', rewards=[0.5, 0.0, -2.0], group=7)
  table = episodes.visible_table(t)
  np.testing.assert_array_equal(table.turn, [0, 0, 1, 1, 1, 2])
  np.testing.assert_array_equal(table.rewards, [0, 0.5, 0, 0, 0, -2.0])
  first, second = t.segments
  expected = [*first.behaviour_logprobs[[2, 3, 7, 8, 9]], second.behaviour_logprobs[3]]
  np.testing.assert_array_equal(table.old_logprobs, expected)


def test_without_the_mask_what_follows_a_reply_belongs_to_its_turn():
  pictures = '..00..11.', '.2.', '....'
  table = _build(*pictures, rewards=[0.5, 1.0, -2.0], masked=False)
  # Of each segment all that follows its first prompt: the tokens 2-8, and 1-2.
  np.testing.assert_array_equal(table.turn, [0, 0, 0, 0, 1, 1, 1, 2, 2])
  np.testing.assert_array_equal(table.rewards, [0, 0.5, 0, 0, 0, 1, 0, -2, 0])
  acted = [True, True, False, False, True, True, False, True, False]
  np.testing.assert_array_equal(table.action_mask, acted)
  whole = table_lib.build([episodes.trajectory(*pictures)])
  expected = [False] * 2 + [True] * 7 + [False, True, True] + [False] * 4
  assert whole.find_visible(False).tolist() == expected


@pytest.mark.parametrize('masked', [True, False])
def test_no_trajectory_loses_its_reward(masked):
  ts = episodes.make_varied(12)
  assert all(t.reward for t in ts)
  table = episodes.visible_table(*ts, masked=masked)
  np.testing.assert_allclose(table.scores, [t.reward for t in ts], rtol=1e-12)
  # It sits on an action token; KL may come off it there, and only there.
  assert table.action_mask[table.rewards != 0].all()


@pytest.mark.parametrize('masked', [True, False])
def test_turn_rewards_and_ends_are_those_of_the_turns(masked):
  table = _build('..00..1.', '.22..', rewards=[0.5, 0.0, -2.0], masked=masked)
  np.testing.assert_array_equal(table.turn_rewards, [0.5, 0.0, -2.0])
  expected = [1, 2, 4] if masked else [3, 5, 9]
  np.testing.assert_array_equal(spans.ends(table.turn), expected)
  # A cost of single tokens counts for their turn.
  table = dataclasses.replace(table, rewards=table.rewards - 1.0)
  sizes = [2, 1, 2] if masked else [4, 2, 4]
  expected = [0.5 - sizes[0], -sizes[1], -2 - sizes[2]]
  np.testing.assert_array_equal(table.turn_rewards, expected)


@pytest.mark.parametrize('masked', [True, False])
def test_a_trajectory_without_a_turn_has_no_action(masked):
  for t in [episodes.trajectory('....'), episodes.trajectory()]:
    table = episodes.visible_table(t, masked=masked)
    assert len(table) == len(table.rewards) == len(table.old_logprobs) == 0
    assert len(table.states) == len(table.turn_rewards) == 0
    assert table.scores.tolist() == [0] and table.scores.dtype == np.float64


def test_a_state_is_what_was_shown_right_before_the_turn():
  """Replies and earlier text have no effect."""
  t = episodes.trajectory('...00..11.', '.2.', '4')
  first, second, _ = (s.tokens for s in t.segments)
  shown = [first[:3], first[5:7], second[:1], second[:0]]
  alone = []
  for tokens in shown:
    mask = np.arange(len(tokens) + 1) == len(tokens)
    segment = types.Segment(np.append(tokens, np.int32(1)), mask, np.zeros(len(mask)))
    turn = types.Turn(0, len(tokens), len(tokens) + 1)
    alone.append(dataclasses.replace(t, segments=[segment], turns=[turn]))
  states = table_lib.build([t, *alone]).states
  np.testing.assert_array_equal(states[:4], states[4:])
  assert len({*states.tolist()}) == 4


def test_states_meet_where_the_text_is_the_same():
  """The replies and the number of the turn have no effect."""
  one, other = episodes.trajectory('..0...1..2'), episodes.trajectory('..00...1', seed=1)
  one.segments[0].tokens[:] = [5, 6, 10, 7, 8, 9, 11, 7, 8, 12]
  other.segments[0].tokens[:] = [5, 6, 13, 14, 7, 8, 9, 15]
  a, b = np.split(table_lib.build([one, other]).states, [3])
  assert a[0] == b[0] and a[1] == b[1]
  assert len({*a, *b}) == 3


def test_parts_of_rewards_and_truncation_become_columns():
  ts = [episodes.trajectory('..0', rewards=[1.0]) for _ in types.Status]
  for t, status in zip(ts, types.Status):
    t.status = status
  ts[0].metrics = {'reward/answer': 1.0, 'calls': 3.0, 'reward/format': -0.5}
  ts[2].metrics = {'reward/answer': 2.0}
  table = table_lib.build(ts)
  parts = {name: part.tolist() for name, part in table.parts.items()}
  assert parts == {'answer': [1, 0, 2, 0], 'format': [-0.5, 0, 0, 0]}
  # done, truncated, max_turns, error
  assert table.truncated.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
  ('start', 'stop'), [(2, 5), (3, 5), (5, 8), (2, 2), (3, 2), (8, 12), (20, 22)]
)
def test_a_turn_must_span_action_tokens_alone(start, stop):
  """Its reward would sit on a token that is not trained: in verl it is lost."""
  t = episodes.trajectory('..00...111', rewards=[1.0, 1.0])
  t.turns[0] = types.Turn(0, start, stop, 1.0)
  with pytest.raises(ValueError, match=f"Turn 0 of task 'task 0' spans.*{start}:{stop}"):
    table_lib.build([t])


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
    table_lib.build([t])


# Tokens of a table.


def _numbered():
  """A table whose every column has another number for each token."""
  table = table_lib.build(episodes.make_varied(6))
  columns = {'values': 0.1, 'ref_logprobs': 0.2, 'advantages': 0.3, 'returns': 0.4}
  columns |= {'weights': 0.5, 'kl_weights': 0.6, 'correction': 0.7}
  numbers = {name: np.arange(len(table)) + x for name, x in columns.items()}
  return dataclasses.replace(table, **numbers)


def test_take_gives_tokens_with_all_their_numbers():
  table, rows = _numbered(), [5, 30, 2]
  taken = table.take(np.array(rows))
  assert len(taken) == 3 and len(taken.group) == 6
  of_rows = 0
  for name, column in vars(table).items():
    if name == 'parts' or column is None:
      continue
    of_rows += len(column) == len(table)
    expected = column[rows] if len(column) == len(table) else column
    np.testing.assert_array_equal(getattr(taken, name), expected)
  # All but turn_trajectory, states, group, truncated, parts, baselines, final_values,
  # pictures and routes.
  assert of_rows == len(dataclasses.fields(table)) - 9
  same = table.take(table.action_mask)
  np.testing.assert_array_equal(same.tokens, table.tokens[table.action_mask])


def test_find_tokens_gives_those_of_trajectories_in_the_given_order():
  table = _numbered()
  taken = table.take(table.find_tokens([4, 0, 2]))
  assert list(dict.fromkeys(taken.trajectory.tolist())) == [4, 0, 2]
  np.testing.assert_array_equal(taken.lengths[[4, 0, 2]], table.lengths[[4, 0, 2]])
  assert len(table.take(table.find_tokens([]))) == 0


def test_scatter_is_the_inverse_of_take():
  table = _numbered()
  rows = table.find_visible(True)
  column = table.scatter(rows, table.take(rows).values, -1.0)
  np.testing.assert_array_equal(column, np.where(rows, table.values, -1.0))


def test_prefixes_stand_before_every_segment():
  table = _numbered()
  prefixes = [np.arange(i) + 100 for i in (2, 0, 1, 3, 0, 4)]
  wide, own = table.add_prefixes(prefixes)
  for name, column in vars(table).items():
    if isinstance(column, np.ndarray) and len(column) == len(table):
      np.testing.assert_array_equal(getattr(wide, name)[own], column)
  assert (wide.turn[~own] == -1).all() and not wide.values[~own].any()
  owners = table.trajectory[spans.starts(table.segment)]
  edges = np.cumsum(wide.segment_lengths)[:-1]
  for owner, tokens, mine in zip(
    owners, np.split(wide.tokens, edges), np.split(own, edges), strict=True
  ):
    n = len(prefixes[owner])
    assert tokens[:n].tolist() == prefixes[owner].tolist()
    assert mine.tolist() == [False] * n + [True] * (len(mine) - n)


def test_missing_column_raises_and_names_its_remedy():
  table = episodes.make_table([[1]])
  for name, fix in (
    ('values', 'value_loss'),
    ('ref_logprobs', "kl .* 'ref_logprobs' to its reads"),
    ('baselines', "'baselines' to reads"),
    ('advantages', 'return a table'),
    ('returns', 'return a table.*value_loss'),
    ('weights', 'nobody has computed'),
  ):
    with pytest.raises(ValueError, match=f'The table has no {name}: .*{fix}'):
      table.column(name)
  with_values = dataclasses.replace(table, values=np.ones(1))
  assert with_values.column('values') is with_values.values


def test_list_tokens_has_the_computed_columns():
  ts = [
    episodes.trajectory('..0'),
    episodes.trajectory('.00.1', '..2', rewards=[0, 1, 2]),
  ]
  table = table_lib.build(ts)
  logprobs = np.arange(len(table)) / -3.0
  table = dataclasses.replace(table, old_logprobs=logprobs, values=-logprobs)
  rows = table.take(table.trajectory == 1)
  tokens = rows.list_tokens()
  assert tokens.keys() == {
    *('segments', 'tokens', 'action_mask', 'policy_steps'),
    *('old_logprobs', 'behaviour_logprobs', 'rewards', 'values'),
  }
  assert tokens['segments'] == [5, 3] and tokens['rewards'] == [0, 0, 0, 0, 1, 0, 0, 2]
  assert tokens['tokens'] == rows.tokens.tolist()
  assert tokens['action_mask'] == [0, 1, 1, 0, 1, 0, 0, 1]
  assert tokens['values'] == [1.0, 1.3333, 1.6667, 2.0, 2.3333, 2.6667, 3.0, 3.3333]


# Functions of columns.

_IDS = np.array([0, 0, 2, 2, 2, 2, 2, 3])


def test_starts_ends_and_sums_of_spans():
  assert spans.starts(_IDS).tolist() == [0, 2, 7]
  assert spans.ends(_IDS).tolist() == [1, 6, 7]
  assert spans.sum_by(_IDS, np.arange(8.0), 5).tolist() == [1, 0, 20, 7, 0]
  none = np.zeros(0, int)
  assert len(spans.starts(none)) == len(spans.ends(none)) == 0
  assert spans.sum_by(none, np.zeros(0), 2).tolist() == [0, 0]


def test_next_and_previous_values_stay_within_a_span():
  x, after = np.arange(8.0) + 1, np.array([10.0, 11.0, 12.0, 13.0])
  following = spans.next_values(_IDS, x, after)
  assert following.tolist() == [2, 10, 4, 5, 6, 7, 12, 13]
  assert spans.previous_values(_IDS, x).tolist() == [0, 1, 0, 3, 4, 5, 6, 0]
  none = np.zeros(0, int)
  assert len(spans.next_values(none, np.zeros(0), after)) == 0
  assert len(spans.previous_values(none, np.zeros(0))) == 0


@pytest.mark.parametrize('factor', [0.0, 0.5, 1.0])
@pytest.mark.parametrize('seed', range(4))
def test_discounted_sums_are_the_recursion(factor, seed):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, 40, 9)
  ids, x = np.repeat(np.arange(9), lengths), rng.normal(size=lengths.sum())
  expected, later = x.copy(), 0.0
  for t in reversed(range(len(x))):
    later = x[t] + factor * (later if ids[t] == ids[min(t + 1, len(x) - 1)] else 0.0)
    expected[t] = later
  before = x.copy()
  out = spans.discounted_sum(ids, x, factor)
  np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
  np.testing.assert_array_equal(x, before)


def test_map_by_measures_each_group_alone():
  x, group = np.array([1.0, 5.0, 3.0, 7.0]), np.array([1, 0, 1, 0])
  assert spans.map_by([group], x, np.mean).tolist() == [2, 6, 2, 6]
  assert spans.map_by([group], x, np.sort).tolist() == [1, 5, 3, 7]
  # Members of a group are alike in all keys.
  other = np.array([0, 0, 0, 1])
  assert spans.map_by([group, other], x, np.mean).tolist() == [2, 5, 2, 7]
  assert len(spans.map_by([group[:0]], x[:0], np.mean)) == 0


def test_scores_are_tied_if_they_differ_by_the_rounding_of_sums_alone():
  for scores in ([0.1 + 0.2, 0.3], [(0.1 + 0.2) * 1e9, 0.3e9], [0, 0, 0], [3.0], []):
    assert spans.tied(np.array(scores, float)), scores
  for scores in ([1e-13, 2e-13], [0.0, 1e-9], [-1.0, 1.0]):
    assert not spans.tied(np.array(scores)), scores
