"""The token sequences of an episode's requests, and where a request continues them."""

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
  """A token sequence and the segment that trains on it.

  Attributes:
    tools: The tools that its prompt describes, as JSON.
    messages: All its messages, as the client has them.
    rendered: The same messages as they are logged and encoded again; replies are as
      they were sampled.
    shared_messages: The number of messages shared with the sequence it was forked from.
    ends: For each reply, the number of messages and of tokens up to its end.
    passage: Its tokens and replies in the episode's transcript.
    sequence: The engine's sequence; it may have tokens that no client received.
    key: The random key of its replies.
    key_id: What the key was made from: the digest of the first prompt's tokens, and this
      sequence's number among those with the same first prompt.
    pending: The request being answered: its messages, as received and as rendered, and
      its prompt.
    session: The session of the latest request.
  """

  tools: str
  messages: list[types.Message]
  rendered: list[types.Message]
  shared_messages: int
  ends: list[tuple[int, int]]
  passage: transcript_lib.Passage
  sequence: request_lib.Sequence | None
  key: np.ndarray
  key_id: tuple[bytes, int]
  pending: tuple[list[types.Message], list[types.Message], types.Prompt] | None = None
  session: str = ''


class ForkPoint(NamedTuple):
  """A position in a sequence.

  Attributes:
    branch: The sequence; None if the messages start a new one.
    count: The number of messages before the position.
    length: The number of tokens before the position.
    is_end: Whether the position is the end of the sequence.
  """

  branch: Branch | None
  count: int
  length: int
  is_end: bool


def find_place(
  branches: Sequence[Branch], tools: str, messages: list[types.Message]
) -> ForkPoint:
  """Finds the sequence that the messages continue, and the position in it."""
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
  """Renders messages for encoding.

  Restores the control text that the task's own messages mark as such, and replies that
  the policy gave in other sequences as they were sampled.
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
