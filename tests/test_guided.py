"""What experiments/selection.py takes and counts, on episodes that are made by hand."""

import numpy as np
import pytest

from agent_r1_jax import types
from agent_r1_jax.guided import implicit_value
from experiments import guided_data, selection
from experiments.worlds import arithmetic


def _episode(said: str, em: float, logprob: float):
  mask = np.array([False, True, True, False, True, True])
  logprobs = np.where(mask, logprob, 0.0).astype(np.float32)
  segment = types.Segment(np.arange(6), mask, logprobs, np.zeros(6, np.int32))
  return types.Trajectory(
    types.Task('a', [], ''),
    0,
    0,
    [segment],
    [types.Turn(0, 1, 3), types.Turn(0, 4, 6)],
    [{'role': 'assistant', 'content': f'<answer> {said}</answer>'}],
    status='done',
    metrics={'em': em},
  )


def _is_solved(episode):
  return episode.metrics['em']


def test_one_of_several_episodes_is_taken_in_each_way():
  group = [
    _episode('Left', 0.0, -0.1),
    _episode('right', 1.0, -0.9),
    _episode('The right', 1.0, -0.8),
    _episode('wrong', 0.0, -0.7),
  ]
  judged = {id(t): weight for t, weight in zip(group, (0.3, 0.2, 0.25, 0.4), strict=True)}
  taken = selection.select_episodes([group], {'value': judged}, _is_solved)
  numbers = {id(t): number for number, t in enumerate(group)}
  assert {how: numbers[id(chosen)] for how, (chosen,) in taken.items()} == {
    'episodes, random': 0,
    'episodes, majority': 1,  # Articles and case do not count.
    'episodes, best (oracle)': 1,
    'episodes, highest value': 3,
    'episodes, vote by value': 1,
  }
  group[2].metrics['sampled_tokens'] = 32.0
  assert selection.sampled_tokens(group) == 3 * 4 + 32


def test_odds_are_fitted_to_what_succeeds():
  sums = np.random.default_rng(0).normal(-5, 3, 4000)
  success = np.random.default_rng(1).random(4000) < 1 / (1 + np.exp(-1.5 - 0.4 * sums))
  np.testing.assert_allclose(selection.fit_odds(sums, success), (1.5, 0.4), atol=0.15)


def test_calibration_of_values():
  episodes = [_episode('a', 1.0, 0.0), _episode('b', 0.0, 0.0)]
  sums = [np.array([-1.0, -1.0]), np.array([-0.5, -7.0])]
  scales, odds = [implicit_value.Odds(0.0, 1.0)], implicit_value.Odds(4.0, 1.0)
  found = selection.calibrate(episodes, sums, scales, odds, _is_solved)
  said = 1 / (1 + np.exp(3.0))
  np.testing.assert_allclose(found['last turn']['bins'], [[said, 0, 1], [1 - said, 1, 1]])
  assert found['last turn']['ece'] == pytest.approx(said)
  for name, known in (('last turn', 1.0), ('turns before', 0.0), ('turn 1', 0.0)):
    assert found[name]['auc'] == known


def test_the_tasks_of_a_world_are_not_those_that_its_policy_was_trained_on():
  data = guided_data.read('arithmetic', 0, 3, 'test')
  assert data.sets == arithmetic.held_out(0, 3, 'test') and data.score == 'accuracy'
  ((tasks, make_env),) = data.practice(50)
  assert [tool.name for tool in make_env().tools] == ['calculator']
  trained = {task.messages[0]['content'] for task in arithmetic.WORLD.tasks(0, 4096)}
  asked = {task.messages[0]['content'] for task in tasks}
  assert len(tasks) == 50 and not asked & trained
  assert data.answer(_episode('x', 1.0, -0.1)) == '<answer> x</answer>'
