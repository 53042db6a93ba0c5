"""The practice that experiments/guided.py fits values to."""

from experiments import guided
from experiments.worlds import arithmetic


def test_the_tasks_of_a_world_are_not_those_that_its_policy_was_trained_on():
  ((tasks, make_env),) = guided.practise('arithmetic', 0, 50)
  assert [tool.name for tool in make_env().tools] == ['calculator']
  trained = {task.messages[0]['content'] for task in arithmetic.WORLD.tasks(0, 4096)}
  asked = {task.messages[0]['content'] for task in tasks}
  assert len(tasks) == 50 and not asked & trained
