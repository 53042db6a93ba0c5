"""groups.py: the order of tasks, and which groups are sampled again."""

import collections

import pytest

from agent_r1_jax import types
from agent_r1_jax.train import groups


def _tasks(n):
  return [types.Task(f't{i}', []) for i in range(n)]


def test_every_epoch_is_an_order_of_all_tasks():
  tasks = _tasks(7)
  seen = [t.id for step in range(14) for t in groups.sample_tasks(tasks, 3 * step, 3, 1)]
  epochs = [tuple(seen[i : i + 7]) for i in range(0, 42, 7)]
  assert all(sorted(epoch) == [t.id for t in tasks] for epoch in epochs)
  assert len(set(epochs)) == 6
  other = [t.id for t in groups.sample_tasks(tasks, 0, 7, 2)]
  assert tuple(other) != epochs[0]


def test_more_than_there_are():
  chosen = groups.sample_tasks(_tasks(3), 0, 8, 0)
  assert sorted(collections.Counter(t.id for t in chosen).values()) == [2, 3, 3]


def _played(rewards):
  """One task's trajectories; None is an error."""
  found = []
  for sample, reward in enumerate(rewards):
    turn = types.Turn(0, 0, 1, reward or 0.0)
    status = 'error' if reward is None else 'done'
    error = 'KeyError: lost' if reward is None else None
    found.append(types.Trajectory(_tasks(1)[0], 0, sample, [], [turn], [], status))
    found[-1].error = error
  return found


def test_tied_rewards():
  # 0.1 + 0.2 is not 0.3 to a computer; one alone has nothing to compare.
  for rewards in ([1.0, 1.0], [0.3, 0.1 + 0.2], [5.0], [2.0, None], [None]):
    assert groups.is_tied(_played(rewards))
  assert not groups.is_tied(_played([0.0, 1.0]))


def test_tied_groups_are_drawn_anew_within_bounds():
  rewards = iter([[1, 1], [0, 1], [0, 0], [0, 0]])
  asked = []

  def collect(tasks, refill):
    asked.append((len(tasks), refill))
    return [t for _ in tasks for t in _played(next(rewards))]

  found, drawn = groups.collect_groups(
    collect, lambda start, n: _tasks(n), n=2, samples=2, max_refills=2
  )
  assert asked == [(2, 0), (1, 1), (1, 2)] and drawn == 4
  assert [[t.group for t in group] for group in found] == [[i, i] for i in range(4)]
  (left,) = groups.select_usable(found, max_error_rate=0, refilled=True)
  assert [t.reward for t in left] == [0, 1]


def test_errors_are_left_out_up_to_a_rate():
  found = [_played([1, None]), _played([0, 1])]
  kept = groups.select_usable(found, max_error_rate=0.25)
  assert [len(group) for group in kept] == [1, 2]
  with pytest.raises(RuntimeError, match='1 of 4 episodes raised.*KeyError: lost'):
    groups.select_usable(found, max_error_rate=0.2)
