"""groups.py: which groups are sampled again, and which are learned from."""

import pytest

from agent_r1_jax import types
from agent_r1_jax.rollout import groups


def _played(rewards):
  """One task's trajectories; None is an error."""
  found = []
  for sample, reward in enumerate(rewards):
    turn = types.Turn(0, 0, 1, reward or 0.0)
    status = 'error' if reward is None else 'done'
    error = 'KeyError: lost' if reward is None else None
    found.append(types.Trajectory(types.Task('t', []), 0, sample, [], [turn], [], status))
    found[-1].error = error
  return found


def test_groups_of_equal_rewards_are_tied():
  # 0.1 + 0.2 is not 0.3 to a computer; one that is left alone has nothing to compare.
  for rewards in ([1.0, 1.0], [0.3, 0.1 + 0.2], [2.0, None], [None]):
    assert groups.is_tied(_played(rewards))
  for rewards in ([0.0, 1.0], [5.0]):
    assert not groups.is_tied(_played(rewards))


def test_one_episode_a_task_is_learned_from_and_not_drawn_anew():
  found = groups.collect_groups(
    lambda n, refill: [_played([1])[0] for _ in range(n)], n=3, samples=1, max_refills=2
  )
  assert len(found) == 3
  assert groups.select_usable(found, max_error_rate=0, refilled=True) == found


def test_tied_groups_are_drawn_anew_within_bounds():
  rewards = iter([[1, 1], [0, 1], [0, 0], [0, 0]])
  asked = []

  def collect(n, refill):
    asked.append((n, refill))
    return [t for _ in range(n) for t in _played(next(rewards))]

  found = groups.collect_groups(collect, n=2, samples=2, max_refills=2)
  assert asked == [(2, 0), (1, 1), (1, 2)]
  assert [[t.group for t in group] for group in found] == [[i, i] for i in range(4)]
  (left,) = groups.select_usable(found, max_error_rate=0, refilled=True)
  assert [t.reward for t in left] == [0, 1]


def test_errors_are_left_out_up_to_a_rate():
  found = [_played([1, None]), _played([0, 1])]
  kept = groups.select_usable(found, max_error_rate=0.25)
  assert [len(group) for group in kept] == [1, 2]
  with pytest.raises(RuntimeError, match='1 of 4 episodes raised.*KeyError: lost'):
    groups.select_usable(found, max_error_rate=0.2)


def test_a_share_of_outages_of_tools_ends_the_run():
  found = [_played([1, 0]), _played([0, 1])]
  for trajectory in found[1]:
    trajectory.metrics = {'tool_calls': 2.0, 'tool_failures': 2.0}
  found[0][0].metrics = {'tool_calls': 6.0, 'tool_outages': 1.0}
  found[0][0].metrics['outage/look/ConnectionError'] = 1.0
  text = 'Error: look: ConnectionError: the index is down'
  found[0][0].messages = [{'role': 'tool', 'name': 'look', 'content': text}]
  # What a tool raises for the sake of an argument is no outage.
  assert groups.select_usable(found, max_error_rate=0.1) == found
  with pytest.raises(RuntimeError, match=f'1 of 10 tool calls .*_rate=0.09.*{text}'):
    groups.select_usable(found, max_error_rate=0.09)
