"""Episodes: no token, turn or reward of a trajectory is lost, with the mask on or off."""

import episodes
import numpy as np
import pytest

from agent_r1_jax import types
from agent_r1_jax.rl import episodes as episodes_lib


def test_actions_are_in_order_over_turns_and_segments():
  t = episodes.trajectory('..00...111.', '...2', rewards=[0.5, 0.0, -2.0], group=7)
  e = episodes_lib.episode(t)
  assert e.group == 7
  np.testing.assert_array_equal(e.turn, [0, 0, 1, 1, 1, 2])
  np.testing.assert_array_equal(e.rewards, [0, 0.5, 0, 0, 0, -2.0])
  first, second = t.segments
  expected = [*first.logprobs[[2, 3, 7, 8, 9]], second.logprobs[3]]
  np.testing.assert_array_equal(e.logprobs, expected)
  assert e.rewards.dtype == e.logprobs.dtype == np.float64


def test_without_the_mask_what_follows_a_reply_belongs_to_its_turn():
  t = episodes.trajectory('..00..11.', '.2.', '....', rewards=[0.5, 1.0, -2.0])
  e = episodes_lib.episode(t, masked=False)
  # Of each segment all that follows its first prompt: the tokens 2-8, and 1-2.
  np.testing.assert_array_equal(e.turn, [0, 0, 0, 0, 1, 1, 1, 2, 2])
  np.testing.assert_array_equal(e.rewards, [0, 0.5, 0, 0, 0, 1, 0, -2, 0])
  first, second, _ = (s.logprobs for s in t.segments)
  given = [*first[2:4], np.nan, np.nan, *first[6:8], np.nan, second[1], np.nan]
  np.testing.assert_array_equal(e.logprobs, given)
  masks = episodes_lib.seen(t, False)
  assert [mask.tolist() for mask in masks] == [
    [False] * 2 + [True] * 7,
    [False, True, True],
    [False] * 4,
  ]


@pytest.mark.parametrize('masked', [True, False])
def test_seen_and_the_episode_count_the_same_tokens(masked):
  for t in episodes.varied(12):
    e = episodes_lib.episode(t, masked=masked)
    count = sum(int(mask.sum()) for mask in episodes_lib.seen(t, masked))
    assert len(e.turn) == len(e.rewards) == len(e.logprobs) == count
    actions = sum(int(s.action_mask.sum()) for s in t.segments)
    assert (~np.isnan(e.logprobs)).sum() == actions


@pytest.mark.parametrize('masked', [True, False])
def test_no_trajectory_loses_its_reward(masked):
  for t in episodes.varied(12):
    assert t.reward != 0
    e = episodes_lib.episode(t, masked=masked)
    np.testing.assert_allclose(e.score, t.reward, rtol=1e-12)
    # It sits on an action token; KL may come off it there, and only there.
    assert not np.isnan(e.logprobs[e.rewards != 0]).any()


@pytest.mark.parametrize('masked', [True, False])
def test_turns(masked):
  t = episodes.trajectory('..00..1.', '.22..', rewards=[0.5, 0.0, -2.0])
  e = episodes_lib.episode(t, masked=masked)
  np.testing.assert_array_equal(e.turn_rewards, [0.5, 0.0, -2.0])
  expected = [1, 2, 4] if masked else [3, 5, 9]
  np.testing.assert_array_equal(e.turn_ends, expected)
  # A cost of single tokens counts for their turn.
  e.rewards = e.rewards - 1.0
  sizes = [2, 1, 2] if masked else [4, 2, 4]
  np.testing.assert_array_equal(
    e.turn_rewards, [0.5 - sizes[0], -sizes[1], -2 - sizes[2]]
  )


@pytest.mark.parametrize('masked', [True, False])
def test_a_trajectory_without_a_turn_has_no_action(masked):
  for t in [episodes.trajectory('....'), episodes.trajectory()]:
    e = episodes_lib.episode(t, masked=masked)
    assert len(e.turn) == len(e.rewards) == len(e.logprobs) == len(e.anchors) == 0
    assert len(e.turn_ends) == len(e.turn_rewards) == 0
    assert e.score == 0


def test_an_anchor_is_what_was_shown_right_before_the_turn():
  t = episodes.trajectory('...00..11.', '.2.', '4')
  first, second, _ = (s.tokens for s in t.segments)
  expected = [first[:3], first[5:7], second[:1], second[:0]]
  for masked in (True, False):
    anchors = episodes_lib.episode(t, masked=masked).anchors
    assert anchors == [tokens.tobytes() for tokens in expected]


def test_anchors_meet_where_the_text_is_the_same():
  """Whatever the policy said, and wherever the turn stands."""
  one, other = episodes.trajectory('..0...1..2'), episodes.trajectory('..00...1', seed=1)
  one.segments[0].tokens[:] = [5, 6, 10, 7, 8, 9, 11, 7, 8, 12]
  other.segments[0].tokens[:] = [5, 6, 13, 14, 7, 8, 9, 15]
  a, b = (episodes_lib.episode(t).anchors for t in (one, other))
  assert a[0] == b[0] and a[1] == b[1]
  assert len({*a, *b}) == 3


def test_parts_and_status():
  t = episodes.trajectory('..0', rewards=[1.0])
  t.metrics = {'reward/answer': 1.0, 'calls': 3.0, 'reward/format': -0.5}
  e = episodes_lib.episode(t)
  assert e.parts == {'answer': 1.0, 'format': -0.5}
  truncated = {}
  for t.status in types.STATUSES:
    truncated[t.status] = episodes_lib.episode(t).truncated
  assert truncated == {
    'done': False,
    'truncated': True,
    'max_turns': True,
    'error': False,
  }


@pytest.mark.parametrize('masked', [True, False])
@pytest.mark.parametrize(
  ('start', 'stop'), [(2, 5), (3, 5), (5, 8), (2, 2), (3, 2), (8, 12), (20, 22)]
)
def test_a_turn_must_span_action_tokens_alone(start, stop, masked):
  """Its reward would sit on a token that is not trained: in verl it is lost."""
  t = episodes.trajectory('..00...111', rewards=[1.0, 1.0])
  t.turns[0] = types.Turn(0, start, stop, 1.0)
  with pytest.raises(ValueError, match=f"Turn 0 of task 'task 0' spans.*{start}:{stop}"):
    episodes_lib.episode(t, masked=masked)


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
    episodes_lib.episode(t)


def test_tied():
  assert episodes_lib.tied(np.array([0.1 + 0.2, 0.3]))
  assert episodes_lib.tied(np.array([0.1 + 0.2, 0.3]) * 1e9)
  assert episodes_lib.tied(np.zeros(3))
  assert not episodes_lib.tied(np.array([1e-13, 2e-13]))
  assert not episodes_lib.tied(np.array([0.0, 1e-9]))
  assert not episodes_lib.tied(np.array([-1.0, 1.0]))
  # Alone, or nothing at all.
  assert episodes_lib.tied(np.array([3.0])) and episodes_lib.tied(np.zeros(0))
