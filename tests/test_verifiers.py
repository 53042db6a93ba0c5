"""Environments written for verifiers 0.4, as their packages would be installed."""

import json

import pytest

from agent_r1_jax import testing
from agent_r1_jax.tasks import verifiers

pytest.importorskip('verifiers', reason='the extra `verifiers` is not installed')

# What its author would publish: a task with a rubric of rewards and a metric, and a tool.
_PACKAGE = """
import verifiers.v1 as vf

class Data(vf.TaskData):
  answer: str

class Task(vf.Task[Data]):
  @vf.reward
  async def right(self, task, trace) -> float:
    return float(task.answer in trace.last_reply)

  @vf.reward(weight=0.5)
  async def short(self, trace) -> float:
    return float(len(trace.last_reply) < 20)

  @vf.metric
  async def turns(self, trace) -> float:
    return float(trace.num_turns)

class Taskset(vf.Taskset[Task, vf.TasksetConfig]):
  def load(self):
    for n in range(3):
      data = Data(prompt=f'What is {n} + 1?', system_prompt='Add.', answer=str(n + 1))
      yield Task(data, self.config.task)

__all__ = ['Taskset']
"""
_TOOLS = """
import verifiers.v1 as vf

class Adder(vf.Toolset[vf.ToolsetConfig]):
  TOOL_PREFIX = 'adder'

  @vf.tool
  async def add(self, a: int, b: int) -> int:
    'Adds two numbers.'
    return a + b

if __name__ == '__main__':
  Adder.run()
"""
# An environment of its own shape: the agent is asked twice.
_TWICE = """
import verifiers.v1 as vf
from adding_env import Taskset
from adding_tools import Adder

class Config(vf.EnvConfig):
  agent: vf.AgentConfig = vf.AgentConfig()

class Twice(vf.Env[Config]):
  async def run(self, task, agents):
    async with agents.agent.interaction(task) as talk:
      await talk.turn()
      await talk.turn('Are you sure?')

class Tools(Taskset):
  @classmethod
  def toolsets(cls, config):
    return [Adder(vf.ToolsetConfig())]

__all__ = ['Tools', 'Twice']
"""


@pytest.fixture(autouse=True)
def packages(tmp_path, monkeypatch):
  for name, text in (('env', _PACKAGE), ('tools', _TOOLS), ('twice', _TWICE)):
    (tmp_path / f'adding_{name}.py').write_text(text)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))


async def test_an_environment_is_played():
  tasks, make_env = verifiers.load({'taskset': {'id': 'adding_env'}})
  assert len(tasks) == 3 and len({task.id for task in tasks}) == 3
  env = make_env()
  assert await env.reset(tasks[1]) == [
    {'role': 'system', 'content': 'Add.'},
    {'role': 'user', 'content': 'What is 1 + 1?'},
  ]
  await env.close()
  (step,) = await testing.check_env(make_env, tasks[1], ['It is 2.'])
  assert step.reward == 1.5
  assert step.metrics == {'turns': 1.0, 'reward/right': 1.0, 'reward/short': 0.5}
  env = make_env()
  await env.reset(tasks[1])
  assert (await env.finish('truncated', 'It is 2, and ' * 9)).reward == 1.0
  await env.close()


# verifiers calls tenacity so.
@pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated")
async def test_tools_and_turns():
  tasks, make_env = verifiers.load({'taskset': {'id': 'adding_twice'}})
  env = make_env()
  await env.reset(tasks[2])
  (tool,) = env.tools
  assert tool.schema['function']['description'] == 'Adds two numbers.'
  call = {'name': tool.name, 'arguments': {'a': 2, 'b': 1}}
  replies = [f'<tool_call>{json.dumps(call)}</tool_call>', 'Two.', 'No: 3.']
  steps = [await env.step(reply) for reply in replies]
  assert [step.messages for step in steps] == [
    [{'role': 'tool', 'content': '3'}],
    [{'role': 'user', 'content': 'Are you sure?'}],
    [],
  ]
  assert (steps[2].done, steps[2].reward) == (True, 1.5)
  assert not any(step.fresh for step in steps)
  await env.close()
  env = make_env()
  await env.reset(tasks[2])
  assert (await env.finish('truncated', 'Perhaps')).metrics['turns'] == 2.0
  await env.close()
