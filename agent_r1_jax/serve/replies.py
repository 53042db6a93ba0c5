"""Replies as OpenAI's API has them: what a stream shows, what is a call, log-probs."""

from collections.abc import Callable, Sequence
import itertools
import json
import re
import time
from typing import Any, NamedTuple

from agent_r1_jax import types
from agent_r1_jax.agent import calls, tokenizer
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.engine import request
from agent_r1_jax.serve import requests

# Replies and calls have names that this process gives once.
numbers = itertools.count()


class Reply(NamedTuple):
  """A reply that is complete.

  Attributes:
    text: What the client is shown of it, besides its calls.
    calls: The calls in it, pairs of name and arguments; the arguments of a call that
      could not be parsed are its text.
    reason: Why it ended: 'stop', 'tool_calls' or 'length'.
  """

  text: str
  calls: list[tuple[str, dict[str, Any] | str]]
  reason: str

  def as_message(self) -> types.Message:
    """Returns the message in the form of `ChatRequest.messages`."""
    return {'role': 'assistant', 'content': self.text, 'calls': self.calls}


class Choice:
  """One of the replies to a request, while it is sampled.

  Attributes:
    index: Its number.
    generation: What the engine samples.
    tokens: The tokens so far.
  """

  def __init__(
    self,
    index: int,
    generation: request.Generation,
    api_request: requests.ApiRequest,
    chat: chat_lib.Chat,
  ):
    """Begins with the generation."""
    self.index, self.generation, self.tokens = index, generation, []
    self._api_request, self._chat = api_request, chat
    self._decode = tokenizer.make_stream_decoder(chat.tokenizer)
    # How many characters `add` has returned, and the text after them.
    self._sent, self._unsent, self._ended = 0, '', False
    self._openings = chat.format.openings if api_request.tools else ()
    self._held_back = *api_request.stop, *self._openings

  def add(self, chunk: request.Chunk) -> str:
    """Adds tokens; returns further text that is surely part of the reply's."""
    tokens = chunk.tokens.tolist()
    self.tokens += tokens
    if self._ended:
      return ''
    self._unsent += self._decode([i for i in tokens if i not in self._chat.stop_ids])
    starts = [i for s in self._held_back if (i := self._unsent.find(s)) >= 0]
    self._ended = bool(starts)
    # What may be the beginning of a stop string or of a call is held back.
    beginnings = (s[:n] for s in self._held_back for n in range(1, len(s)))
    cuts = [len(text) for text in beginnings if self._unsent.endswith(text)]
    length = min(starts) if starts else len(self._unsent) - max(cuts, default=0)
    text, self._unsent = self._unsent[:length], self._unsent[length:]
    self._sent += length
    return text

  def finish(self) -> tuple[Reply, str]:
    """Returns the reply, and what of its text `add` has not returned."""
    text = str(self._chat.decode(self.tokens))
    stopped = self.generation.chunks[-1].stopped
    ends = [i for s in self._api_request.stop if (i := text.find(s)) >= 0]
    text = text[: min(ends)] if ends else text
    tool_calls = []
    if self._api_request.tools and stopped:
      tool_calls = self._chat.format.parse(text, self._api_request.tools)
    if tool_calls:
      begin = text.rfind('</think>') + 1
      starts = [i for s in self._openings if (i := text.find(s, begin)) >= 0]
      text = text[: min(starts, default=None)]
    reason = 'length' if not stopped else 'tool_calls' if tool_calls else 'stop'
    reply = Reply(text, [_name_call(call) for call in tool_calls], reason)
    return reply, text[self._sent :]


def _name_call(call: calls.Call) -> tuple[str, dict[str, Any] | str]:
  """Returns name and arguments of a call; a client sees for itself what is malformed."""
  if isinstance(call, calls.ToolCall):
    return call.name, call.arguments
  name = re.search(r'"name"\s*:\s*"([\w.-]+)"', call.text)
  return name[1] if name else 'malformed', call.text


def write_logprobs(chunk: request.Chunk, chat: chat_lib.Chat) -> list[dict[str, Any]]:
  """Writes the log-probs of tokens, as chat completions have them.

  The bytes of tokens that make up one character together are that character's.
  """

  def one(token, logprob):
    text = chat.decode_exactly([token])
    piece = [*chat.get_bytes(int(token))]
    return {'token': text, 'logprob': float(logprob), 'bytes': piece}

  columns = (chunk.tokens, chunk.logprobs, chunk.top_tokens, chunk.top_logprobs)
  return [
    one(token, logprob)
    | {'top_logprobs': [one(*pair) for pair in zip(tops, values, strict=True)]}
    for token, logprob, tops, values in zip(*columns, strict=True)
  ]


def _write_calls(tool_calls: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
  """Writes tool calls, with an id for each."""
  return [
    {
      'id': f'call_{next(numbers)}',
      'type': 'function',
      'function': {
        'name': name,
        'arguments': arguments if isinstance(arguments, str) else json.dumps(arguments),
      },
    }
    for name, arguments in tool_calls
  ]


class Form(NamedTuple):
  """How one of the two kinds of requests is read, and its answers are written.

  Attributes:
    model: What the body of a request is read as.
    name: What the kind is called in answers.
    choice: (text, calls, log-probs) -> the fields of a complete choice.
    delta: The same of a part of one that is streamed.
  """

  model: type[requests.ApiRequest]
  name: str
  choice: Callable[..., dict[str, Any]]
  delta: Callable[..., dict[str, Any]]

  def frame(self, model: str, number: str, choices: list, **more: Any) -> dict[str, Any]:
    """Returns an answer, or a part of one, with what surrounds its choices."""
    kind = self.name + ('.chunk' if more.pop('part', False) else '')
    head = {'id': number, 'object': kind, 'created': int(time.time()), 'model': model}
    return head | {'choices': choices} | more


def _write_chat_logprobs(logprobs: list | None) -> dict[str, Any] | None:
  return None if logprobs is None else {'content': logprobs, 'refusal': None}


def _write_chat_choice(
  text: str, tool_calls: Sequence, logprobs: list | None
) -> dict[str, Any]:
  message = {'role': 'assistant', 'content': text or (None if tool_calls else '')}
  message |= {'tool_calls': _write_calls(tool_calls)} if tool_calls else {}
  return {'message': message, 'logprobs': _write_chat_logprobs(logprobs)}


def _write_chat_delta(
  text: str, tool_calls: Sequence, logprobs: list | None
) -> dict[str, Any]:
  delta = {'role': 'assistant', 'content': text}
  numbered = [{'index': i} | call for i, call in enumerate(_write_calls(tool_calls))]
  delta |= {'tool_calls': numbered} if tool_calls else {}
  return {'delta': delta, 'logprobs': _write_chat_logprobs(logprobs)}


def _name_token(item: dict[str, Any]) -> str:
  r"""Names a token of a text completion: a part of a character is 'bytes:\xc3'."""
  try:
    bytes(item['bytes']).decode()
  except UnicodeDecodeError:
    return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in item['bytes'])
  return item['token']


def _write_text_choice(
  text: str, tool_calls: Sequence, logprobs: list | None
) -> dict[str, Any]:
  columns = None
  if logprobs is not None:
    named = lambda tops: {_name_token(top): top['logprob'] for top in tops}
    columns = {
      'tokens': [_name_token(item) for item in logprobs],
      'token_logprobs': [item['logprob'] for item in logprobs],
      'top_logprobs': [named(item['top_logprobs']) for item in logprobs],
    }
  return {'text': text, 'logprobs': columns}


CHAT = Form(
  requests.ChatRequest, 'chat.completion', _write_chat_choice, _write_chat_delta
)
TEXT = Form(
  requests.TextRequest, 'text_completion', _write_text_choice, _write_text_choice
)
