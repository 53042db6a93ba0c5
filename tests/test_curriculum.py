"""curriculum.py: the order of tasks, and how the rewards so far change it."""

import collections
import copy
import dataclasses
import json
import warnings

import grain
import pytest

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.train import curriculum

_VARIANCE = config_lib.Curriculum(weight='variance', uniform_share=0.1)


def _tasks(n):
  levels = ('easy', 'middle', 'hard')
  return [types.Task(f't{i}', [], info={'level': levels[i % 3]}) for i in range(n)]


def _sampler(n=6, config=None, seed=0, draws=None):
  config = config or config_lib.Curriculum()
  return curriculum.TaskStream(config, _tasks(n), seed=seed, draws=draws)


def _group(task, rewards):
  """Trajectories of one task; None is an error."""
  return [
    types.Trajectory(
      *(task, 0, i, [], [types.Turn(0, 0, 1, reward or 0.0)], []),
      status='error' if reward is None else 'done',
    )
    for i, reward in enumerate(rewards)
  ]


# Rewards of a group by the level of its task: always, sometimes and never solved.
_REWARDS = {'easy': [1, 1], 'middle': [0, 1], 'hard': [0, 0, None]}


def _play(sampler, steps, n):
  """Plays steps whose rewards follow the level; returns how often each was drawn."""
  levels = collections.Counter()
  for _ in range(steps):
    tasks = sampler.start_rollout(n)
    levels.update(task.info['level'] for task in tasks)
    sampler.finish_rollout([_group(t, _REWARDS[t.info['level']]) for t in tasks])
  return levels


def test_every_epoch_is_an_order_of_all_tasks():
  sampler = _sampler(7, seed=1)
  seen = [t.id for _ in range(14) for t in sampler.start_rollout(3)]
  epochs = [tuple(seen[i : i + 7]) for i in range(0, 42, 7)]
  assert all(sorted(epoch) == [t.id for t in _tasks(7)] for epoch in epochs)
  assert len(set(epochs)) == 6
  assert tuple(t.id for t in _sampler(7, seed=2).start_rollout(7)) != epochs[0]


def test_asked_for_more_tasks_than_there_are_it_repeats_them():
  for config in (None, _VARIANCE):
    chosen = _sampler(3, config).start_rollout(8)
    assert len(chosen) == 8 and {t.id for t in chosen} == {'t0', 't1', 't2'}


@pytest.mark.parametrize('by', ['', ' level'])
def test_tasks_whose_groups_are_tied_rest_and_come_back(by):
  config = config_lib.Curriculum(weight='variance', by=by, uniform_share=0.1)
  sampler = _sampler(30, config)
  _play(sampler, 20, 10)  # All have been played by now.
  levels = _play(sampler, 60, 5)
  # 90 % and a third of the rest, of 300; less what cannot be drawn twice in a step.
  assert levels['middle'] > 240
  assert 0 < levels['easy'] < 40 and 0 < levels['hard'] < 40


def test_a_kind_that_becomes_interesting_is_practised_again():
  config = config_lib.Curriculum(weight='variance', by='level', uniform_share=0.3)
  sampler = _sampler(30, config)
  _play(sampler, 5, 10)
  assert sampler.draws.variances == {'easy': 0, 'middle': 0.25, 'hard': 0}
  tasks = sampler.start_rollout(10)
  sampler.finish_rollout([_group(t, [0, 1]) for t in tasks])
  assert set(sampler.draws.variances.values()) == {0.125, 0.25}


def test_an_episode_that_failed_is_no_reward():
  """Else tasks whose tools break would look as if they were sometimes solved."""
  sampler = _sampler(6, _VARIANCE)
  tasks = sampler.start_rollout(4)
  rewards = [1, 1, None], [0, 1, None], [1, None], [None, None]
  sampler.finish_rollout([_group(t, r) for t, r in zip(tasks, rewards, strict=True)])
  assert sampler.draws.variances == {tasks[0].id: 0, tasks[1].id: 0.25}


@pytest.mark.parametrize('config', [config_lib.Curriculum(), _VARIANCE])
def test_restored_it_draws_what_an_uninterrupted_one_draws(config):
  """Two rollouts are under way when the state is kept, and a refill follows."""

  def step(sampler):
    refill = sampler.refill(1)
    sampler.finish_rollout([_group(t, _REWARDS[t.info['level']]) for t in _tasks(4)])
    return refill + sampler.start_rollout(3)

  sampler = _sampler(12, config)
  begun = sampler.start_rollout(3), sampler.start_rollout(3)
  step(sampler)
  draws = copy.deepcopy(sampler.draws)
  expected = [task.id for _ in range(3) for task in step(sampler)]
  restored = _sampler(12, config, draws=draws)
  assert restored.start_rollout(3) == begun[1]
  restored.start_rollout(3)
  assert [task.id for _ in range(3) for task in step(restored)] == expected
  assert len(draws.pending) == 2  # Not changed by the sampler that went on.
  # As earlier versions kept it: without the ids of tasks.
  draws.pending = [[index for index, _ in rollout] for rollout in draws.pending]
  assert _sampler(12, config, draws=draws).start_rollout(3) == begun[1]


class _Reads(list):
  """Counts how often a task is read."""

  count = 0

  def __getitem__(self, i):
    self.count += 1
    return super().__getitem__(i)


@pytest.mark.parametrize('config', [config_lib.Curriculum(), _VARIANCE])
@pytest.mark.parametrize('kept', [range(9), range(11, -1, -1), range(4, 12)])
def test_a_pending_rollout_has_its_own_tasks_whatever_else_changed(config, kept):
  """The tasks became fewer, or stand elsewhere; those that are gone are said."""
  sampler = _sampler(12, config)
  begun = [task.id for task in sampler.start_rollout(6)]
  draws = curriculum.Draws(**json.loads(json.dumps(dataclasses.asdict(sampler.draws))))
  tasks = [_tasks(12)[i] for i in kept]
  left = {task.id for task in tasks}
  with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter('always')
    reads = _Reads(tasks)
    restored = curriculum.TaskStream(config, reads, draws=draws)
    found = [task.id for task in restored.start_rollout(6)]
  for before, now in zip(begun, found, strict=True):
    assert now == before if before in left else now in left
  # Each task once to find its new place, however many are sought; and those of a rollout.
  assert reads.count <= 12 + 4 * 6
  gone = [task for task in begun if task not in left]
  assert [str(w.message).split("'")[1] for w in said] == gone
  again = curriculum.TaskStream(config, tasks, draws=restored.draws)
  assert [task.id for task in again.start_rollout(6)] == found


def test_tasks_are_read_when_they_are_drawn():
  read = []

  def make(i):
    read.append(i)
    return types.Task(str(i), [])

  tasks = grain.MapDataset.source(range(1000)).map(make)
  drawn = curriculum.TaskStream(config_lib.Curriculum(), tasks).start_rollout(4)
  assert [int(t.id) for t in drawn] == read and len(read) == 4


def test_an_unknown_field_or_weight_is_refused(refused):
  config = config_lib.Curriculum(weight='variance', by='hops')
  with refused('hops'):
    _sampler(3, config)
  for wrong in ({'weight': 'hard'}, {'by': 'level'}, {'uniform_share': 0.0}):
    with refused('curriculum'):
      config_lib.Curriculum(**wrong).check()
