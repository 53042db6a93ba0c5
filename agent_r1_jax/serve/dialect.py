"""What a dialect is: how requests are read and answers written.

serve/server.py and serve/answer.py know no dialect by name: CHAT and TEXT of
serve/completions.py are always served; the caller passes any others.
"""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

from agent_r1_jax.serve import replies, requests
from agent_r1_jax.web import http


class Asked(NamedTuple):
  """A parsed request.

  Attributes:
    request: The request in a form common to all dialects.
    body: The request as the dialect has it.
  """

  request: requests.ApiRequest
  body: Any


class Head(NamedTuple):
  """What is known of an answer when it begins.

  Attributes:
    asked: The request.
    model: The name of the policy or adapter that answers.
    number: A number that is unique in this process.
    prompt_tokens: The number of prompt tokens, summed over all prompts.
  """

  asked: Asked
  model: str
  number: int
  prompt_tokens: int


class ReplyPart(NamedTuple):
  """The next part of one of a request's replies.

  Attributes:
    index: The reply's index.
    text: The new text.
    logprobs: The log-probs of its tokens, from replies.write_logprobs, if requested.
    reply: The complete reply in its last part; else None.
  """

  index: int
  text: str
  logprobs: list[dict[str, Any]] | None
  reply: replies.Reply | None


class Event(NamedTuple):
  """An event of a stream: its name, if it has one, and JSON or plain text."""

  name: str | None
  data: Any


class EventStream(abc.ABC):
  """Writes the events of one answer."""

  def begin(self) -> Sequence[Event]:
    """Writes what precedes the first part; nothing by default."""
    return ()

  @abc.abstractmethod
  def add(self, part: ReplyPart) -> Sequence[Event]:
    """Writes a part."""

  @abc.abstractmethod
  def finish(self, sampled: int) -> Sequence[Event]:
    """Writes the end, after `sampled` tokens in total."""

  @abc.abstractmethod
  def fail(self, error: http.RefusedError) -> Sequence[Event]:
    """Writes the end of an answer that failed."""

  def write(self, sampled: int) -> dict[str, Any]:
    """Writes the complete answer from all parts, if it was not streamed.

    Not needed if the dialect overrides `Dialect.write`.
    """
    raise NotImplementedError


class Dialect(abc.ABC):
  """A dialect.

  Attributes:
    path: The path it is served at.
    count_path: The path that counts a request's tokens; None if there is none.
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
      memory: What dialects store for later requests of the client, under their own names.
      counts: Whether the request only asks for its number of tokens.

    Raises:
      RefusedError: A field is wrong.
    """

  def write(self, head: Head, parts: Sequence[ReplyPart], sampled: int) -> dict[str, Any]:
    """Writes an answer; each reply has one part, with all its text and log-probs."""
    stream = self.stream(head)
    for part in parts:
      stream.add(part)
    return stream.write(sampled)

  @abc.abstractmethod
  def stream(self, head: Head) -> EventStream:
    """Begins an answer that is sent while it is sampled."""

  def write_count(self, tokens: int) -> dict[str, Any]:
    """Writes the token count of a request, if there is a `count_path`."""
    raise NotImplementedError

  def describe(self, error: http.RefusedError) -> dict[str, Any]:
    """Writes the body of an error; by default in OpenAI's form."""
    kind = 'server_error' if error.status >= 500 else 'invalid_request_error'
    return {'error': {'message': str(error), 'type': kind, 'code': error.code}}
