"""What a dialect is: how requests are read and their answers are written.

serve/server.py and serve/answer.py know no dialect by name: CHAT and TEXT of
serve/completions.py are always served, and further ones are given by the caller.
"""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

from agent_r1_jax.serve import replies, requests
from agent_r1_jax.web import http


class Asked(NamedTuple):
  """A request.

  Attributes:
    request: What it asks for, whatever the dialect.
    body: The same as the dialect has it.
  """

  request: requests.ApiRequest
  body: Any


class Head(NamedTuple):
  """What is known of an answer when it begins.

  Attributes:
    asked: The request.
    model: The name of the policy or adapter that answers.
    number: A number that this process gives once.
    prompt_tokens: The number of tokens before the replies, over all prompts.
  """

  asked: Asked
  model: str
  number: int
  prompt_tokens: int


class ReplyPart(NamedTuple):
  """Further text of one of the replies to a request.

  Attributes:
    index: The reply's number.
    text: The text.
    logprobs: The log-probs of its tokens, of replies.write_logprobs, if they are wanted.
    reply: The whole reply, in its last part; else None.
  """

  index: int
  text: str
  logprobs: list[dict[str, Any]] | None
  reply: replies.Reply | None


class Event(NamedTuple):
  """An event of a stream: its name, if it has one, and JSON, or a text as it is."""

  name: str | None
  data: Any


class EventStream(abc.ABC):
  """Writes the events of one answer."""

  def begin(self) -> Sequence[Event]:
    """Writes what comes before the first part; by default nothing."""
    return ()

  @abc.abstractmethod
  def add(self, part: ReplyPart) -> Sequence[Event]:
    """Writes a part."""

  @abc.abstractmethod
  def finish(self, sampled: int) -> Sequence[Event]:
    """Writes the end, when `sampled` tokens were sampled in all."""

  @abc.abstractmethod
  def fail(self, error: http.RefusedError) -> Sequence[Event]:
    """Writes the end of an answer that cannot go on."""

  def write(self, sampled: int) -> dict[str, Any]:
    """Writes the whole answer when all parts have come, if it was not streamed.

    A dialect that writes whole answers by a `write` of its own needs none here.
    """
    raise NotImplementedError


class Dialect(abc.ABC):
  """A dialect.

  Attributes:
    path: Where it is served.
    count_path: Where it counts the tokens of a request; None if nowhere.
    conversation: The field of a body that has the conversation.
  """

  path: str
  count_path: str | None = None
  conversation = 'messages'

  @abc.abstractmethod
  def read(
    self, fields: dict[str, Any], memory: dict[str, Any], counts: bool = False
  ) -> Asked:
    """Reads the body of a request.

    Args:
      fields: The body.
      memory: What dialects keep for later requests of the client, by names of their own.
      counts: Whether the request is for the number of its tokens alone.

    Raises:
      RefusedError: A field is wrong.
    """

  def write(self, head: Head, parts: Sequence[ReplyPart], sampled: int) -> dict[str, Any]:
    """Writes an answer: a part for each reply, with its whole text and log-probs."""
    stream = self.stream(head)
    for part in parts:
      stream.add(part)
    return stream.write(sampled)

  @abc.abstractmethod
  def stream(self, head: Head) -> EventStream:
    """Begins an answer that is sent as it is sampled."""

  def write_count(self, tokens: int) -> dict[str, Any]:
    """Writes the number of tokens of a request, if there is a `count_path`."""
    raise NotImplementedError

  def describe(self, error: http.RefusedError) -> dict[str, Any]:
    """Writes the body of an error; by default as OpenAI's API has it."""
    kind = 'server_error' if error.status >= 500 else 'invalid_request_error'
    return {'error': {'message': str(error), 'type': kind, 'code': error.code}}
