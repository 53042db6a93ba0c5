"""What a dialect is: how requests are read and their answers are written.

serve/server.py and serve/answer.py know no dialect, but forms alone: CHAT and TEXT of
completions_form.py, MESSAGES and COUNT of messages_form.py and RESPONSES of
responses_form.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from agent_r1_jax.serve import kept_responses, replies, requests
from agent_r1_jax.web import http


class Asked(NamedTuple):
  """A request.

  Attributes:
    request: What it asks for, whatever the dialect.
    body: The same as the dialect has it.
    kept: Where the answer is kept, if later requests may go on from it.
  """

  request: requests.ApiRequest
  body: Any
  kept: kept_responses.KeptResponses | None = None


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


class Part(NamedTuple):
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


class Stream(Protocol):
  """Writes the events of one answer."""

  def begin(self) -> Sequence[Event]:
    """Writes what comes before the first part."""
    ...

  def add(self, part: Part) -> Sequence[Event]:
    """Writes a part."""
    ...

  def finish(self, sampled: int) -> Sequence[Event]:
    """Writes the end, when `sampled` tokens were sampled in all."""
    ...

  def fail(self, error: http.RefusedError) -> Sequence[Event]:
    """Writes the end of an answer that cannot go on."""
    ...


class Form(Protocol):
  """A dialect."""

  def read(self, fields: dict[str, Any], kept: kept_responses.KeptResponses) -> Asked:
    """Reads the body of a request, which may go on from `kept`; raises RefusedError."""
    ...

  def write(self, head: Head, parts: Sequence[Part], sampled: int) -> dict[str, Any]:
    """Writes an answer: a part for each reply, with its whole text and log-probs."""
    ...

  def stream(self, head: Head) -> Stream:
    """Begins an answer that is sent as it is sampled."""
    ...

  def describe(self, error: http.RefusedError) -> dict[str, Any]:
    """Writes the body of an error."""
    ...
