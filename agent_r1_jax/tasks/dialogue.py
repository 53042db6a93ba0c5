"""Dialogue with a simulated user, played by another policy.

  user = dialogue.endpoint_user('http://localhost:8000/v1', 'model')
  make_env = lambda: dialogue.DialogueEnv([], reward, user)

A task's messages are the agent's instructions, such as a system message; info['user'] is
the user's: who they are and what they want. The user's words are a message's content like
any other text: control tokens in them stay text.
"""

from collections.abc import Awaitable, Callable, Sequence
import itertools
import json
import os
from typing import Any
import urllib.request

from agent_r1_jax import types
from agent_r1_jax.agent import env
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.host import workers

# Gets the conversation as the user sees it, and returns the user's next message.
User = Callable[[list[types.Message]], str | Awaitable[str]]

STOP = '[END]'
PROMPT = (
  'You are the user in a conversation with an assistant; do not play the assistant. Say '
  f'one short message at a time. When you have what you want, or give up, say {STOP}.\n\n'
)


class DialogueEnv(env.ToolEnv):
  """The agent talks with a user, and may use tools before it answers.

  A reply without a tool call goes to the user. The episode ends when the user says the
  stop mark; the text before the mark is the last message, and the reward judges the
  complete conversation. If the task has no user message, the user speaks first. If the
  user fails or takes too long, the trajectory is an error.
  """

  def __init__(
    self,
    tools: Sequence[tool_lib.Tool],
    reward: env.Reward,
    user: User,
    *,
    prompt: str = PROMPT,
    stop: str = STOP,
    user_seconds: float = 60.0,
    **kwargs: Any,
  ):
    """Checks the arguments.

    Args:
      tools: The agent's tools.
      reward: Scores the conversation when it ends.
      user: Plays the user, sync or async: gets messages in which the user's have the role
        'assistant' and the agent's the role 'user', and returns a text.
      prompt: The user's first instructions, before the task's info['user'].
      stop: The mark with which the user ends the conversation.
      user_seconds: Time limit of each user message.
      **kwargs: Further arguments of ToolEnv.
    """
    super().__init__(tools, reward, **kwargs)
    if not user_seconds > 0 or not stop:
      raise ValueError(f'user_seconds={user_seconds} and stop={stop!r} must be given.')
    self._user, self._user_seconds = user, user_seconds
    self._prompt, self._stop = prompt, stop

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins the conversation; the user speaks first if the task has no user message."""
    opening = await super().reset(task)
    if not any(message['role'] == 'user' for message in opening):
      message, _ = await self._ask_user()
      self.messages.append(message)
      opening.append(dict(message))
    return opening

  async def answer_text(self) -> list[types.Message]:
    """Lets the user answer the agent's reply."""
    message, ended = await self._ask_user()
    if ended:
      self.messages.append(message)
      return []
    return [message]

  async def _ask_user(self) -> tuple[types.Message, bool]:
    """Returns the user's message, and whether it ends the conversation."""
    conversation = [
      {'role': 'system', 'content': self._prompt + self.task.info.get('user', '')}
    ]
    roles = {'user': 'assistant', 'assistant': 'user'}
    for message, after in itertools.pairwise([*self.messages, {'role': ''}]):
      # The user does not see tools, their calls, or the agent's instructions.
      if after['role'] != 'tool' and (role := roles.get(message['role'])):
        conversation.append({'role': role, 'content': message['content']})
    seconds = self._user_seconds
    text = await workers.call(
      self._user, conversation, name='user', seconds=seconds, field='user_seconds'
    )
    if not isinstance(text, str):
      raise ValueError(f'the user said {text!r:.100}; it must be a text.')
    # The text after the mark is dropped.
    spoken, mark, _ = text.partition(self._stop)
    return {'role': 'user', 'content': spoken.strip()}, bool(mark)


def endpoint_user(
  url: str, model: str, *, key: str = '', seconds: float = 60.0, **sampling: Any
) -> User:
  """Makes a user that a model behind an OpenAI-compatible endpoint plays.

  Args:
    url: The endpoint, such as 'http://localhost:8000/v1'.
    model: The model's name there.
    key: The name of the environment variable that holds the API key, if one is needed.
    seconds: Time limit of one request.
    **sampling: Further fields of the request, such as temperature.
  """
  headers = {'Content-Type': 'application/json'}
  if key:
    headers['Authorization'] = f'Bearer {os.environ[key]}'

  def speak(messages: list[types.Message]) -> str:
    body = json.dumps({'model': model, 'messages': messages, **sampling}).encode()
    request = urllib.request.Request(f'{url}/chat/completions', body, headers)
    with urllib.request.urlopen(request, timeout=seconds) as response:
      return json.load(response)['choices'][0]['message']['content']

  return speak
