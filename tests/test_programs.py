"""The world 'programs': its problems, the tool that tries them, the judge."""

import asyncio
import itertools
import random

import confined
import pytest

from agent_r1_jax.tasks import programming
from experiments.worlds import programs, world

pytestmark = pytest.mark.usefixtures('needs_sandbox')
needs_sandbox = confined.needs_sandbox


def play(task, messages, make_env=programs.TriedEnv):
  """Plays the replies of a conversation; returns the steps."""

  async def run():
    env = make_env()
    await env.reset(task)
    replies = [m['content'] for m in messages if m['role'] == 'assistant']
    return [await env.step(reply) for reply in replies]

  return asyncio.run(run())


def problems(count, held_out=False):
  rng = random.Random(0)
  return [programs.make_problem(rng, 'dev', held_out) for _ in range(count)]


def test_only_what_is_meant_passes_the_visible_test_and_it_passes_the_hidden():
  for problem in problems(30):
    task = programs.make_task('t', problem)
    passed = [
      programming.run_tests(text, {**task.answer, 'tests': task.answer['tests'][:2]})
      is None
      for text in problem.readings
    ]
    assert passed == [n == problem.right for n in range(4)], problem
    assert programming.run_tests(problem.readings[problem.right], task.answer) is None
    assert task.answer['tests'][1] in task.messages[0]['content']
    assert task.answer['tests'][2] not in task.messages[0]['content']


def test_every_reading_of_every_step_runs():
  for step in programs.STEPS:
    inputs = {'number': 24, 'text': 'one two three', 'list': [3, 25, 10]}
    types = {'number': int, 'text': str, 'list': list}
    values = []
    for line in step.readings:
      scope = {}
      exec(programs.write_program([line]), scope)
      values.append(scope['f'](inputs[step.takes]))
      assert isinstance(values[-1], types[step.gives]), step
    assert step.readings[0] != step.readings[1]
  assert len({step.says for step in programs.STEPS}) == len(programs.STEPS) >= 20


def test_demonstrations_are_what_the_tool_answers():
  for problem in problems(12):
    task = programs.make_task('t', problem)
    messages = programs.demonstrate(problem)
    steps = play(task, messages)
    assert steps[-1].done and steps[-1].reward == 1
    assert [s.messages[0]['content'] for s in steps[:-1]] == [
      m['content'] for m in messages if m['role'] == 'tool'
    ]
    assert len(steps) == problem.right + 2
    failed = float(problem.right > 0)
    counted = [steps[-1].metrics[name] for name in ('tries', 'first_failed', 'mended')]
    assert counted == [problem.right + 1, failed, failed]
    assert play(task, programs.demonstrate(problem, 'stop'))[-1].reward == (
      problem.right == 0
    )
    alone = messages[-1:]
    assert play(task, alone, programs.make_env_alone)[-1].reward == 1


def test_an_error_of_the_code_is_told():
  (problem,) = problems(1)
  step = play(
    programs.make_task('t', problem),
    [{'role': 'assistant', 'content': programs.call('x = 1 / 0')}],
  )[0]
  assert not step.done and 'ZeroDivisionError' in step.messages[0]['content']


def test_the_held_out_sets_are_held_out():
  says = {step.says: step for step in programs.STEPS}

  def pair(task):
    text = task.info['question'].split(' that ')[1].split('.\n')[0]
    return [says[part] for part in text.split(' and then ')]

  practised = programs.WORLD.tasks(0, 300)
  assert not any(programs.is_held_out(*pair(task)) for task in practised)
  sets = programs.held_out(0, 60, 'test')
  assert all(programs.is_held_out(*pair(task)) for task in sets['new_pairs'])
  arguments = lambda tasks: {t.answer['tests'][1].split(' ==')[0] for t in tasks}
  assert arguments(sets['new_programs']).isdisjoint(arguments(practised))
  every = [(a, b) for a in programs.STEPS for b in programs.STEPS if a.gives == b.takes]
  assert 0.15 < sum(programs.is_held_out(*p) for p in every) / len(every) < 0.35


def test_equal_arguments_make_equal_tasks():
  assert programs.make_tasks(3, 5, 'dev') == programs.make_tasks(3, 5, 'dev')
  assert programs.make_tasks(3, 5, 'dev') != programs.make_tasks(4, 5, 'dev')


def test_practice_has_no_pair_that_is_held_out():
  kinds = {*programs.MIXTURE, 'step', 'alone'}
  seen = set()
  for example in itertools.islice(programs.examples(0), 200):
    seen.add(example.kind)
    assert example.tools == (example.kind in programs.MIXTURE)
  assert seen == kinds
  assert isinstance(programs.WORLD, world.World)
