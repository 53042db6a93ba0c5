"""The world 'both': tasks are asked and judged as in their own world, with both tools."""

import itertools
import random

import confined
import pytest
import test_programs

from experiments.worlds import arithmetic, both, programs
from experiments.worlds import arithmetic_lessons as lessons
from experiments.worlds import arithmetic_stories as stories

pytestmark = pytest.mark.usefixtures('needs_sandbox')
needs_sandbox = confined.needs_sandbox


def play(task, messages):
  return test_programs.play(task, messages, both.make_env)


def test_demonstrations_of_both_worlds_are_solved_with_both_tools():
  names = [tool.name for tool in both.make_env().tools]
  assert names == [schema['function']['name'] for schema in both.WORLD.schemas()]
  assert names == ['calculator', 'python']
  rng = random.Random(0)
  story = stories.make_story(rng, lessons.PRACTISED, 'train')
  problem = programs.make_problem(rng, 'dev')
  demonstrations = (
    (arithmetic.make_task('a', story), lessons.demonstrate(story, rng)),
    (programs.make_task('p', problem), programs.demonstrate(problem)),
  )
  for task, messages in demonstrations:
    steps = play(task, messages)
    assert steps[-1].done and steps[-1].reward == 1, task
    assert [s.messages[0]['content'] for s in steps[:-1]] == [
      m['content'] for m in messages if m['role'] == 'tool'
    ]
  # Neither is solved by the last reply of the other.
  (one, said_one), (other, said_other) = demonstrations
  assert play(one, said_other[-1:])[-1].metrics['reward/solved'] == 0
  assert play(other, said_one[-1:])[-1].metrics['reward/solved'] == 0


def test_a_story_may_be_computed_by_the_python_tool():
  story = stories.make_story(random.Random(1), lessons.PRACTISED, 'train')
  code = {'role': 'assistant', 'content': programs.call('print(6 * 7)')}
  (step,) = play(arithmetic.make_task('a', story), [code])
  assert step.messages[0]['content'] == '42\n' and step.metrics['tool_errors'] == 0


def test_worlds_take_turns():
  tasks = both.tasks(0, 5)
  assert ['check' in task.info for task in tasks] == [False, True, False, True, False]
  alone = [world.tasks(0, 3) for world in both.WORLDS]
  assert tasks[0::2] == alone[0] and tasks[1::2] == alone[1][:2]
  sets = both.held_out(0, 2, 'test')
  assert sets['new_stories'] == arithmetic.held_out(0, 2, 'test')['new_stories']
  assert sets['new_pairs'] == programs.held_out(0, 2, 'test')['new_pairs']
  kinds = {example.kind for example in itertools.islice(both.examples(0), 200)}
  assert {'plan', 'step', 'right', 'stop', 'compute'} <= kinds
