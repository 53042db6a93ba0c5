"""reasoning-gym's tasks, scored by its own code."""

import pytest

from agent_r1_jax import testing
from agent_r1_jax.agent import env
from agent_r1_jax.tasks import reasoning

pytest.importorskip('reasoning_gym')


def test_tasks_are_those_of_the_seed():
  tasks = reasoning.load('chain_sum', 3, 5)
  assert tasks == reasoning.load('chain_sum', 3, 5) != reasoning.load('chain_sum', 3, 6)
  assert tasks[1].id == 'chain_sum-5-1' and tasks[1].answer == '-4'
  assert tasks[1].messages[0]['content'].endswith('7 - 4 - 0 - 0 + 2 - 9 =')


def test_options_may_be_lists():
  (task,) = reasoning.load('basic_arithmetic', 1, 0, operators=['+'])
  assert reasoning.score(task.info['reasoning_gym'], 0, task.answer) == 1
  assert '+' in task.messages[0]['content']


@pytest.mark.parametrize('name, config', [('sums', {}), ('chain_sum', {'min_terms': -1})])
def test_what_does_not_exist_is_refused(name, config):
  with pytest.raises(ValueError, match='sums|refuses.*min_terms'):
    reasoning.load(name, 1, 0, **config)


async def test_answers_are_scored_in_a_process():
  judge = reasoning.Judge(processes=1)
  make = lambda: env.ToolEnv([], judge.reward, metrics=judge.metrics)
  (task,) = reasoning.load('chain_sum', 1, 5, max_terms=2)
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
  assert (await judge.metrics(task, [{'role': 'assistant', 'content': right}])) == {
    'score': 0.0, 'answered': 1.0, 'scoring_failed': 1.0,
  }  # fmt: skip
