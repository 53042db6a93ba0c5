"""The texts of an episode's requests, and the place in them where a request goes on."""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.agent import calls
from agent_r1_jax.agent import transcript as transcript_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.serve import requests


@dataclasses.dataclass(eq=False)
class Branch:
  """A text and the segment that it is trained as.

  Attributes:
    tools: The tools that its prompt describes, as JSON.
    messages: All messages of the text, as the client has them.
    rendered: The same as they are logged and encoded again; replies are as they were
      sampled.
    shared_messages: The number of messages that the text shares with the one that it was
      forked from.
    ends: For each reply, the number of messages and of tokens up to its end.
    passage: Its tokens and replies in the episode's transcript.
    text: What the engine holds of it; it may have tokens that no client got.
    key: The randomness of its replies.
    key_id: What the key was made of: the digest of the tokens that the text began with,
      and its number among the texts that began with them.
    pending: The request that is being answered: its messages, as they came
      and as they are rendered, and its prompt.
    session: The session of the request that was made last.
  """

  tools: str
  messages: list[types.Message]
  rendered: list[types.Message]
  shared_messages: int
  ends: list[tuple[int, int]]
  passage: transcript_lib.Passage
  text: request_lib.Text | None
  key: np.ndarray
  key_id: tuple[bytes, int]
  pending: tuple[list[types.Message], list[types.Message], types.Prompt] | None = None
  session: str = ''


class ForkPoint(NamedTuple):
  """A place in a text.

  Attributes:
    branch: The text; None if messages begin a text of their own.
    count: How many messages come before it.
    length: How many tokens come before it.
    is_end: Whether it is the text's end.
  """

  branch: Branch | None
  count: int
  length: int
  is_end: bool


def find_place(
  branches: Sequence[Branch], tools: str, messages: list[types.Message]
) -> ForkPoint:
  """Finds the text that messages go on from, and where."""
  candidates = [
    (count, not branch.pending and (count, length) == branch.ends[-1], -i, length)
    for i, branch in enumerate(branches)
    if branch.tools == tools
    for count, length in branch.ends
    if messages[:count] == branch.messages[:count]
  ]
  if not candidates:
    return ForkPoint(None, 0, 0, False)
  count, is_end, i, length = max(candidates)
  return ForkPoint(branches[-i], count, length, is_end)


def render(
  messages: Sequence[types.Message],
  task: types.Task,
  branches: Sequence[Branch],
  call_format: calls.CallFormat,
) -> list[types.Message]:
  """Makes the messages to encode.

  What the task's own messages mark as control text is control text again, and a reply
  that the policy gave in another text is as it was sampled.
  """
  task_contents = {str(m.get('content')): m.get('content') for m in task.messages}
  sampled = [
    (message, rendered)
    for branch in branches
    for message, rendered in zip(branch.messages, branch.rendered, strict=True)
    if message['role'] == 'assistant'
  ]
  written = requests.to_chat(messages, call_format)
  for i, message in enumerate(messages):
    if message['role'] == 'assistant':
      same = requests.make_comparable(message)
      written[i] = next((rendered for m, rendered in sampled if m == same), written[i])
    else:
      given = message['content']
      written[i]['content'] = task_contents.get(str(given), given)
  return written
