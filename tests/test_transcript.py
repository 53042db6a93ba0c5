"""agent/transcript.py: which tokens carry loss, in one text, in forks and in copies."""

from typing import NamedTuple

import numpy as np

from agent_r1_jax.agent import transcript


class Reply(NamedTuple):
  tokens: np.ndarray
  behaviour_logprobs: np.ndarray
  policy_steps: np.ndarray
  routes: np.ndarray | None = None


def reply(*tokens, step=3):
  n = len(tokens)
  return Reply(np.array(tokens, np.int32), np.full(n, -0.5, np.float32), np.full(n, step))


def ids(*tokens):
  return np.array(tokens, np.int32)


def test_what_the_policy_sampled_is_an_action_and_what_it_read_is_not():
  record = transcript.Transcript()
  passage = record.begin()
  record.add_turn(passage, ids(1, 2, 3), reply(10, 11))
  turn = record.add_turn(passage, ids(4), reply(12, step=4))
  turn.reward = 0.5
  (segment,), turns = record.collect()
  assert segment.tokens.tolist() == [1, 2, 3, 10, 11, 4, 12]
  assert segment.action_mask.tolist() == [False] * 3 + [True] * 2 + [False, True]
  np.testing.assert_array_equal(segment.behaviour_logprobs, -0.5 * segment.action_mask)
  assert segment.policy_steps.tolist() == [0, 0, 0, 3, 3, 0, 4]
  assert [(t.segment, t.start, t.stop, t.reward) for t in turns] == [
    (0, 3, 5, 0.0),
    (0, 6, 7, 0.5),
  ]


def test_what_was_sampled_before_a_fork_carries_loss_once():
  record = transcript.Transcript()
  first = record.begin()
  record.add_turn(first, ids(1), reply(10, 11))
  record.add_turn(first, ids(2), reply(12))
  second = record.fork(first, 3)
  record.add_turn(second, ids(5), reply(13))
  segments, _ = record.collect()
  assert [s.tokens.tolist() for s in segments] == [[1, 10, 11, 2, 12], [1, 10, 11, 5, 13]]
  assert [s.action_mask.astype(int).tolist() for s in segments] == [
    [0, 1, 1, 0, 1],
    [0, 0, 0, 0, 1],
  ]


def test_segments_are_in_the_order_of_their_last_turns_and_empty_ones_are_left_out():
  record = transcript.Transcript()
  first, second, _ = record.begin(), record.begin(), record.begin()
  record.add_turn(first, ids(1), reply(10))
  record.add_turn(second, ids(2), reply(11))
  record.add_turn(first, ids(3), reply(12))
  segments, turns = record.collect()
  assert [s.tokens.tolist() for s in segments] == [[2, 11], [1, 10, 3, 12]]
  assert [t.segment for t in turns] == [0, 1, 1]


def test_a_copy_goes_on_and_is_rewarded_by_itself():
  record = transcript.Transcript()
  record.add_turn(record.begin(), ids(1), reply(10))
  other = record.copy()
  other.add_turn(other.passage, ids(2), reply(11))
  other.turns[0].reward = 1.0
  assert [t.reward for t in record.turns] == [0.0]
  assert len(record.passage) == 2 and len(other.passage) == 4
  assert other.collect()[1] == other.turns


def test_experts_are_those_that_sampled_and_the_last_tokens_have_none():
  """A row that was computed again, perhaps by a newer policy, changes none of them."""
  one = lambda n, expert: np.full((n, 2, 1), expert, 'i1')
  record = transcript.Transcript()
  passage = record.begin()
  record.add_turn(passage, ids(1, 2), reply(10)._replace(routes=one(2, 5)))
  other = record.fork(passage, 2)
  record.add_turn(passage, ids(3), reply(11)._replace(routes=one(4, 6)))
  record.add_turn(other, ids(4), reply(12)._replace(routes=one(3, 7)))
  segments, _ = record.copy().collect()
  found = [segment.routes[:, :, 0].T.tolist() for segment in segments]
  assert found == [[[5, 5, 6, 6, -1]] * 2, [[7, 7, 7, -1]] * 2]
