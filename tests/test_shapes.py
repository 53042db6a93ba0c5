"""Workflow and ReAct on miniwiki: the lessons are what the environments ask."""

import asyncio
import itertools

import pytest

from agent_r1_jax import testing
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from experiments import react
from experiments.miniwiki import shapes
from experiments.miniwiki import tasks as miniwiki


@pytest.fixture(scope='module')
def world():
  """Questions by their text, and the tool of the lessons."""
  tasks = {t.info['question']: t for t in miniwiki.train_tasks(0, 4096, 'base')}
  retriever = miniwiki.make_index(miniwiki.corpus(0, 'base'))
  return tasks, search.search_tool(retriever, k=1)


async def _play(environment, task, replies):
  """The messages of an episode that ends with the last reply, and its last step."""
  told, step = list(await environment.reset(task)), None
  for reply in replies:
    assert step is None or not step.done
    step = await environment.step(reply)
    told += [{'role': 'assistant', 'content': reply}, *step.messages]
  assert step.done
  return told, step


def _said(messages):
  return [m['content'] for m in messages if m['role'] == 'assistant']


def test_right_lessons_are_what_is_asked_and_are_right(world):
  tasks, tool = world
  lessons = list(itertools.islice(shapes.lessons(0, miniwiki.RIGHT), 20 * shapes.READS))
  kinds = set()
  for start in range(0, len(lessons), 2 * shapes.READS):
    reads = lessons[start : start + shapes.READS]
    task = tasks[reads[0][0]['content'].split('\n')[-1]]
    flow = shapes.Workflow(tool)
    told, step = asyncio.run(_play(flow, task, [_said(lesson)[0] for lesson in reads]))
    assert told == list(itertools.chain(*reads))
    assert step.reward == 1.0 and step.metrics['tool_calls'] == shapes.READS
    for lesson in lessons[start + shapes.READS : start + 2 * shapes.READS]:
      task = shapes.react_task(tasks[lesson[0]['content'].split('\n')[0]])
      agent = react.ReAct([tool], qa.paper_reward, qa.metrics)
      told, step = asyncio.run(_play(agent, task, _said(lesson)))
      assert told == lesson and step.reward == 1.0
      assert all(
        text.startswith(('Thought: ', 'Action: ', 'Final Answer: '))
        for text in _said(told)
      )
      kinds.add(task.info['kind'])
  assert kinds == {'bridge', 'comparison'}


def test_workflow_and_react_conform_to_the_protocol(world):
  tasks, tool = world
  task = next(iter(tasks.values()))
  replies = ['<answer> Oslo</answer>'] * shapes.READS
  make = lambda: shapes.Workflow(tool)
  steps = asyncio.run(testing.check_env(make, task, replies))
  assert [step.fresh for step in steps] == [True] * (shapes.READS - 1) + [False]
  # Without an answer there is nothing to search for.
  (step,) = asyncio.run(testing.check_env(make, task, ['I do not know.']))
  assert step.done and step.reward == -0.5
  call = 'Thought: I search.\nAction: search\nAction Input: {"query": "Oslo"}'
  make = lambda: react.ReAct([tool], qa.paper_reward, qa.metrics)
  first, _ = asyncio.run(testing.check_env(make, task, [call, 'Final Answer: Oslo']))
  assert first.messages[0]['content'].startswith('Observation: Doc 1 (Title: ')
