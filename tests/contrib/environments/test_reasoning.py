"""reasoning-gym's tasks, scored by its own code."""

import json

import pytest
import test_evaluate_command
import tiny

from agent_r1_jax import testing
from agent_r1_jax.agent import env
from agent_r1_jax.contrib.environments import reasoning


@pytest.fixture(scope='module', autouse=True)
def reasoning_gym():
  """Takes 2 seconds to import: not in each worker that reads this file."""
  pytest.importorskip('reasoning_gym')


def test_tasks_are_those_of_the_seed():
  tasks = reasoning.make_tasks('chain_sum', 3, 5)
  assert tasks == reasoning.make_tasks('chain_sum', 3, 5)
  assert tasks != reasoning.make_tasks('chain_sum', 3, 6)
  assert tasks[1].id == 'chain_sum-5-1' and tasks[1].answer == '-4'
  assert tasks[1].messages[0]['content'].endswith('7 - 4 - 0 - 0 + 2 - 9 =')


def test_options_may_be_lists():
  (task,) = reasoning.make_tasks('basic_arithmetic', 1, 0, operators=['+'])
  assert reasoning.score(task.info['reasoning_gym'], 0, task.answer) == 1
  assert '+' in task.messages[0]['content']


@pytest.mark.parametrize('name, config', [('sums', {}), ('chain_sum', {'min_terms': -1})])
def test_what_does_not_exist_is_refused(name, config):
  with pytest.raises(ValueError, match='sums|refuses.*min_terms'):
    reasoning.make_tasks(name, 1, 0, **config)


async def test_answers_are_scored_in_a_process():
  scorer = reasoning.Scorer(processes=1)
  make = lambda: env.ToolEnv([], scorer.reward, metrics=scorer.metrics)
  (task,) = reasoning.make_tasks('chain_sum', 1, 5, max_terms=2)
  right = f'<answer>0</answer> No: <answer> {task.answer} </answer>'
  for reply, expected in (
    (right, {'score': 1.0, 'answered': 1.0}),
    ('<answer>x</answer>', {'score': 0.0, 'answered': 1.0}),
    (task.answer, {'score': 0.0, 'answered': 0.0}),
  ):
    (step,) = await testing.check_env(make, task, [reply])
    assert step.metrics.items() >= (expected | {'scoring_failed': 0.0}).items()
    assert step.reward == expected['score']
  task.info['index'] = 'one'  # The data set's code raises.
  assert (await scorer.metrics(task, [{'role': 'assistant', 'content': right}])) == {
    'score': 0.0, 'answered': 1.0, 'scoring_failed': 1.0,
  }  # fmt: skip


def test_the_command_that_measures_a_policy_scores_generated_problems(tmp_path):
  stop = tiny.chat().stop_ids[0]
  model = tiny.save(tmp_path / 'model', likely={stop: 1.4})
  flags = ('--task=reasoning-gym', '--data=chain_sum')
  command = test_evaluate_command._flags(model, tmp_path / 'run', *flags)
  (done,) = test_evaluate_command._run(command)
  assert done.returncode == 0, done.stderr[-3000:]
  results = json.loads((tmp_path / 'run' / 'results.json').read_text())
  found = results['methods']['agent']['']
  assert found['tasks'] == 2 and found['scoring_failed'] == 0
