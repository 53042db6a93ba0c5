"""Replies: what a stream shows of them, their calls and their log-probs."""

from collections.abc import Iterable
import itertools
import math
import re
from typing import Any, NamedTuple

from agent_r1_jax import types
from agent_r1_jax.agent import calls, tokenizer
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.engine import request
from agent_r1_jax.serve import requests

# For names of replies and calls that are unique in this process.
numbers = itertools.count()


class Reply(NamedTuple):
  """A complete reply.

  Attributes:
    text: The text that the client is shown, without calls.
    calls: Its calls, as pairs of name and arguments; the arguments of a malformed call
      are its text as it was sampled, tags included.
    reason: Why it ended: 'stop', 'tool_calls' or 'length'.
    stop: The client's stop string that ended it, if one did.
  """

  text: str
  calls: list[tuple[str, dict[str, Any] | str]]
  reason: str
  stop: str | None = None

  def as_message(self) -> types.Message:
    """Returns the message in the form of `ChatRequest.messages`."""
    return {'role': 'assistant', 'content': self.text, 'calls': self.calls}


class PartialReply:
  """One of a request's replies, while it is sampled.

  Attributes:
    index: Its index.
    generation: The engine's generation.
    tokens: The tokens so far.
  """

  def __init__(
    self,
    index: int,
    generation: request.Generation,
    api_request: requests.ApiRequest,
    chat: chat_lib.Chat,
  ):
    """Wraps a generation that has begun."""
    self.index, self.generation, self.tokens = index, generation, []
    self._api_request, self._chat = api_request, chat
    self._decode = tokenizer.make_stream_decoder(chat.tokenizer)
    # The number of characters that `add` has returned, and the text after them.
    self._sent, self._unsent, self._ended = 0, '', False
    self._held_back = tuple(api_request.stop)
    if api_request.tools:
      self._held_back += chat.format.openings
    # The text of the prompt, if the answer includes it.
    self._echo = ''
    if api_request.echo:
      given: Any = api_request.prompts
      prompt = given[index // api_request.n]  # Its tokens may have a BOS too.
      self._echo = prompt if isinstance(prompt, str) else chat.decode_exactly(prompt)

  def add(self, chunk: request.Chunk) -> str:
    """Adds tokens; returns the new text that is certain to be part of the answer."""
    is_first, tokens = not self.tokens, chunk.tokens.tolist()
    self.tokens += tokens
    return self._echo * is_first + self._show(tokens)

  def _show(self, tokens: list[int]) -> str:
    if self._ended or self._api_request.max_tokens == 0:
      return ''
    self._unsent += self._decode([i for i in tokens if i not in self._chat.stop_ids])
    starts = [i for s in self._held_back if (i := self._unsent.find(s)) >= 0]
    self._ended = bool(starts)
    # Hold back what may be the beginning of a stop string or of a call.
    begun = count_beginning(self._unsent, self._held_back)
    length = min(starts, default=len(self._unsent) - begun)
    text, self._unsent = self._unsent[:length], self._unsent[length:]
    self._sent += length
    return text

  def finish(self) -> tuple[Reply, str]:
    """Returns the reply, and the text that `add` has not returned."""
    text = str(self._chat.decode(self.tokens))
    stopped = self.generation.chunks[-1].stopped
    if self._api_request.max_tokens == 0:  # The client asked for no tokens.
      self.tokens = []
      return Reply(self._echo, [], 'length'), ''
    ends = [(i, s) for s in self._api_request.stop if (i := text.find(s)) >= 0]
    end, stop = min(ends, default=(len(text), None))
    text = text[:end]
    tool_calls = []
    if self._api_request.tools and stopped:
      tool_calls = self._chat.format.parse(text, self._api_request.tools)
      if not self._api_request.parallel_tool_calls:
        tool_calls = tool_calls[:1]  # A format may close several calls at once.
    reason = 'length' if not stopped else 'tool_calls' if tool_calls else 'stop'
    named = [_name_call(call, text) for call in tool_calls]
    text = text[: tool_calls[0].begin] if tool_calls else text
    return Reply(self._echo + text, named, reason, stop), text[self._sent :]

  def write_logprobs(self, chunk: request.Chunk) -> list[dict[str, Any]] | None:
    """Writes the log-probs of the tokens last passed to `add`, if requested."""
    if self._api_request.top_logprobs is None:
      return None
    if self._api_request.max_tokens == 0:
      return []
    return write_logprobs(chunk, self._chat, self._api_request.tokens_as_ids)


def count_beginning(text: str, strings: Iterable[str]) -> int:
  """Counts the characters at a text's end that may begin one of the strings."""
  beginnings = (s[:n] for s in strings for n in range(1, len(s)))
  return max((len(begun) for begun in beginnings if text.endswith(begun)), default=0)


def _name_call(call: calls.Call, reply: str) -> tuple[str, dict[str, Any] | str]:
  """Returns a call's name and arguments; a client checks itself what is malformed."""
  if isinstance(call, calls.ToolCall):
    return call.name, call.arguments
  name = re.search(r'"name"\s*:\s*"([\w.-]+)"', call.text)
  return name[1] if name else 'malformed', reply[call.begin : call.end]


def write_logprobs(
  chunk: request.Chunk, chat: chat_lib.Chat, as_ids: bool = False
) -> list[dict[str, Any]]:
  """Writes the log-probs of tokens, as chat completions have them.

  Tokens that form one character together get the bytes of that character. With `as_ids`,
  a token is named by its id, as in vLLM: 'token_id:9'.
  """
  columns = (chunk.tokens, chunk.logprobs, chunk.top_tokens, chunk.top_logprobs)
  return _write_columns(chat, as_ids, *columns)


def write_prompt(
  generation: request.Generation, chat: chat_lib.Chat, as_ids: bool
) -> list[dict[str, Any]]:
  """Writes the log-probs of a begun reply's prompt, if the prompt was scored."""
  if generation.prompt is None:
    return []
  columns = (generation.request.prompt.tokens, *generation.prompt)
  return _write_columns(chat, as_ids, *columns)


def _write_columns(
  chat: chat_lib.Chat, as_ids: bool, *columns: Iterable
) -> list[dict[str, Any]]:
  """Writes log-probs: tokens, log-probs, top tokens, their log-probs; NaN is null."""

  def one(token, logprob):
    number = None if math.isnan(logprob) else float(logprob)
    if as_ids:
      text = f'token_id:{token}'
      return {'token': text, 'logprob': number, 'bytes': [*text.encode()]}
    text = chat.decode_exactly([token])
    return {'token': text, 'logprob': number, 'bytes': [*chat.get_bytes(int(token))]}

  return [
    one(token, logprob)
    | {'top_logprobs': [one(*pair) for pair in zip(tops, values, strict=True)]}
    for token, logprob, tops, values in zip(*columns, strict=True)
  ]
