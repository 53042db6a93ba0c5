"""Environments written for verifiers 0.4, as their packages would be installed."""

import textwrap

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
class Adder(vf.Toolset):
  @vf.tool
  async def add(self, a: int, b: int) -> int:
    return a + b
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
  (tmp_path / 'adding_env.py').write_text(textwrap.dedent(_PACKAGE))
  monkeypatch.syspath_prepend(tmp_path)
  return 'adding_env'


async def test_an_environment_is_played(package):
  tasks, make_env = verifiers.load({'taskset': {'id': package}})
  assert len(tasks) == 3 and len({task.id for task in tasks}) == 3
  (step,) = await testing.check_env(make_env, tasks[1], ['It is 2.'])
  assert step.reward == 1.5
  assert step.metrics == {'turns': 1.0, 'reward/right': 1.0, 'reward/short': 0.5}
