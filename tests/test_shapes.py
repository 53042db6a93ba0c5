"""Workflow and ReAct on miniwiki."""

import asyncio

import pytest

from agent_r1_jax import testing
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from experiments import react
from experiments.miniwiki import shapes
from experiments.miniwiki import tasks as miniwiki


@pytest.fixture(scope='module')
def world():
  """A question of several hops, and the tool."""
  tasks = (t for t in miniwiki.train_tasks(0, 64) if t.info['kind'] == 'bridge')
  retriever = miniwiki.make_index(miniwiki.corpus(0, 'train'))
  return next(tasks), search.search_tool(retriever, k=1)


async def _play(environment, task, replies):
  """The last step of an episode that ends with the last reply."""
  step = None
  await environment.reset(task)
  for reply in replies:
    assert step is None or not step.done
    step = await environment.step(reply)
  assert step.done
  return step


def test_a_right_answer_is_rewarded_in_either_shape(world):
  task, tool = world
  names = [*task.info['chain'], *task.answer]
  # A workflow looks up what was answered last, and ends after READS searches.
  named = [*names[1:], *[names[-1]] * shapes.READS][: shapes.READS]
  flow = _play(shapes.Workflow(tool), task, [f'<answer> {x}</answer>' for x in named])
  step = asyncio.run(flow)
  assert step.reward == 1.0 and step.metrics['tool_calls'] == shapes.READS
  calls = [
    f'Thought: I search.\nAction: search\nAction Input: {{"query": " {name}"}}'
    for name in task.info['chain']
  ]
  agent = react.ReAct([tool], qa.paper_reward, qa.metrics)
  end = f'Final Answer: <answer> {names[-1]}</answer>'
  step = asyncio.run(_play(agent, shapes.react_task(task), [*calls, end]))
  assert step.reward == 1.0


def test_workflow_and_react_conform_to_the_protocol(world):
  task, tool = world
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
