"""ReAct prompting (arXiv 2210.03629): thought, action and observation as text.

The prompt, not the chat template, describes the tools, and a tool's answer is marked as
an observation. An action is a tool call in Hermes format.
"""

from collections.abc import Sequence
import dataclasses
import json

from agent_r1_jax import types
from agent_r1_jax.agent import calls, chat, env, tool

PROMPT = types.ControlText(
  'Go on in steps. In each step write a line that begins with "Thought:" and says what '
  'you know and what is missing, and then a line that begins with "Action:" and calls a '
  'tool. Stop there: what the tool answers follows as "Observation:". When nothing is '
  'missing, write a last "Thought:", and then the answer in place of an action.\n\n'
  '{tools}\n\n{task}'
)


def ask(task: types.Task, tools: Sequence[tool.Tool]) -> types.Task:
  """Puts the form and the tools before the task's first message."""
  first, *rest = task.messages
  schemas = '\n'.join(json.dumps(item.schema, ensure_ascii=False) for item in tools)
  described = chat.TOOLS.format(schemas=schemas)
  content = PROMPT.format(tools=described, task=first['content'])
  return dataclasses.replace(task, messages=[{**first, 'content': content}, *rest])


def make_env(
  tools: Sequence[tool.Tool], reward: env.Reward, metrics: env.Metrics
) -> 'ReAct':
  """Makes an environment for tasks that were asked in this form."""
  return ReAct(env.ToolEnv(tools, reward, metrics=metrics, parse=calls.parse_hermes))


class ReAct:
  """A ToolEnv whose tools are not in the chat template, and whose answers are marked."""

  def __init__(self, inner: env.ToolEnv):
    self._inner = inner

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins the episode."""
    return await self._inner.reset(task)

  async def step(self, reply: str) -> types.Step:
    """Runs the action; the episode is done if there is none."""
    step = await self._inner.step(reply)
    observe = lambda m: {**m, 'content': f'Observation: {m["content"]}'}
    return dataclasses.replace(step, messages=[observe(m) for m in step.messages])

  async def finish(self, status: str, reply: str | None = None) -> types.Step:
    """Scores an episode that a budget ended."""
    return await self._inner.finish(status, reply)
