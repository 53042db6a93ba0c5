"""ReAct prompting (arXiv 2210.03629): thought, action and observation as text.

The prompt, not the chat template, describes the tools, and a tool's answer is marked as
an observation. An action is written as the tool calls of agent/calls.py.
"""

import dataclasses

from agent_r1_jax import types
from agent_r1_jax.agent import chat, env, tool

PROMPT = types.ControlText(
  'Go on in steps. In each step write a line that begins with "Thought:" and says what '
  'you know and what is missing, and then a line that begins with "Action:" and calls a '
  'tool. Stop there: what the tool answers follows as "Observation:". When nothing is '
  'missing, write a last "Thought:", and then the answer in place of an action.\n\n'
  '{tools}\n\n{task}'
)


def ask(task: types.Task, tools: tuple[tool.Tool, ...]) -> types.Task:
  """Puts the form and the tools before the task's first message."""
  first, *rest = task.messages
  described = chat.describe_tools([tool.schema for tool in tools])
  content = PROMPT.format(tools=described, task=first['content'])
  return dataclasses.replace(task, messages=[{**first, 'content': content}, *rest])


class ReAct:
  """A ToolEnv whose tools are not in the chat template, and which observes."""

  def __init__(self, inner: env.ToolEnv):
    self._inner = inner

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins the episode."""
    return await self._inner.reset(task)

  async def step(self, reply: str) -> types.Step:
    """Runs the action, or ends the episode if there is none."""
    step = await self._inner.step(reply)
    observed = [
      {**m, 'content': f'Observation: {m["content"]}'} if m['role'] == 'tool' else m
      for m in step.messages
    ]
    return dataclasses.replace(step, messages=observed)

  async def finish(self, status: str, reply: str | None = None) -> types.Step:
    """Scores an episode that a budget ended."""
    return await self._inner.finish(status, reply)
