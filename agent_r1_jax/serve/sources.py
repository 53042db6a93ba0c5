"""Where the replies to a client's requests come from, and where messages are encoded.

The server shares the engine's event loop, so nothing here may block it. A request that
cannot fit a row is refused before it is encoded. Short texts are encoded at once, long
ones in a few threads, since encoding takes many times a text's memory.
"""

import abc
import asyncio
from collections.abc import Callable, MutableMapping, Sequence
import functools
from typing import Any
import weakref

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.serve import replies, requests
from agent_r1_jax.web import fairness, http

TOO_LONG = 'context_length_exceeded'  # The error code.
_MAX_CHARACTERS = 1 << 14  # Texts up to this are encoded at once, in milliseconds.
# The queue for texts that are encoded in threads, by event loop.
_TURNS: MutableMapping[Any, fairness.Turns] = weakref.WeakKeyDictionary()


class ReplySource(abc.ABC):
  """Where the replies to a client's requests come from.

  Attributes:
    slots: The maximum number of tokens of a conversation and its reply.
    memory: What dialects store for later requests, under their own names.
  """

  def __init__(self, slots: int):
    self.slots = slots
    self.memory: dict[str, Any] = {}

  @property
  def adapters(self) -> Sequence[str]:
    """The names of the adapters that requests may name; none by default."""
    return ()

  def note_refusal(self, error: http.RefusedError) -> None:
    """Called when a request for replies is refused; not for token counts."""
    return None

  @abc.abstractmethod
  async def submit(
    self, api_request: requests.ApiRequest, automata: Sequence[types.Automaton]
  ) -> list[request_lib.Generation]:
    """Begins `api_request.n` replies; raises RefusedError if that is impossible."""

  @abc.abstractmethod
  async def count(self, api_request: requests.ApiRequest) -> int:
    """Counts a request's prompt tokens."""

  def accept(self, generation: request_lib.Generation, reply: replies.Reply) -> None:
    """Called with a complete reply, before the client gets it."""
    return None

  def close(self, generation: request_lib.Generation) -> None:
    """Called when a reply has ended, for whatever reason."""
    return None

  def cancel(self, generations: Sequence[request_lib.Generation]):
    """Cancels replies that are still running, and closes them."""
    for generation in generations:
      generation.cancel()
      self.close(generation)


class StatelessSource(ReplySource):
  """Answers each request on its own, for any client."""

  def __init__(self, engine: engine_lib.Engine, chat: chat_lib.Chat, name: str):
    """Makes a source; `name` is the policy without an adapter."""
    super().__init__(engine.sizes.slots)
    self._engine, self._chat, self._name = engine, chat, name

  @property
  def adapters(self) -> Sequence[str]:
    """The engine's current adapters."""
    return self._engine.adapters.names

  async def submit(self, api_request, automata):
    """Encodes the conversation; the engine reuses cached prefixes."""
    adapter = self._find_adapter(api_request.model)
    scored = api_request.echo and api_request.top_logprobs is not None
    prompts = await self._encode(api_request)
    room = self.slots - max(map(len, prompts))
    max_tokens = room if api_request.max_tokens is None else api_request.max_tokens
    if room < 1 or max_tokens > room:
      raise refuse_length(
        f'the prompt has {self.slots - room} tokens and the reply may have '
        f'{max(max_tokens, 1)}; there is room for {self.slots}'
      )
    begun = []
    try:
      for prompt in prompts:
        for i in range(api_request.n):
          request = request_lib.Request(
            prompt,
            max_tokens=max(max_tokens, 1),
            sampling=api_request.sampling,
            key=api_request.make_key(i),
            automata=automata,
            top_logprobs=api_request.top_logprobs or 0,
            adapter=adapter,
            score_prompt=scored,
            client=http.client.get(),
          )
          begun.append(self._engine.submit(request))
    except ValueError:  # One of several prompts has tokens unknown to the policy.
      self.cancel(begun)
      raise
    return begun

  async def count(self, api_request):
    """Encodes and counts the conversation."""
    return sum(map(len, await self._encode(api_request)))

  async def _encode(self, api_request) -> list[types.Prompt]:
    """Encodes the conversation or the texts."""
    if api_request.messages is not None:
      messages = requests.to_chat(api_request.messages, self._chat.format)
      begun = messages.pop()['content'] if api_request.continue_final_message else ''
      return [await encode(self, self._encode_chat, messages, api_request.tools, begun)]
    given = api_request.prompts
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    encoded = iter(await encode(self, self._encode_texts, texts))
    ids = [next(encoded) if isinstance(p, str) else np.array(p) for p in given]
    return [*map(types.Prompt.of, ids)]

  def _encode_chat(self, messages, tools, begun: str, max_tokens: int) -> types.Prompt:
    """Encodes messages and the beginning of the reply."""
    ids = self._chat.encode_prompt(messages, tools, max_tokens=max_tokens)
    reply = self._chat.encode_reply(begun, max_tokens=max_tokens) if begun else ids[:0]
    ids = np.append(ids, reply[:-1])  # Without its stop token.
    return self._chat.attach(ids, messages)

  def _encode_texts(self, texts: list[str], max_tokens: int) -> list[np.ndarray]:
    return [self._chat.encode_text(text, max_tokens=max_tokens) for text in texts]

  def _find_adapter(self, model: str | None) -> str | None:
    """Finds the adapter that `model` names; None is the policy without one."""
    # Without adapters, any model name is accepted.
    if not self._engine.adapters.count or model in (None, self._name):
      return None
    if model not in self.adapters:
      names = ', '.join((self._name, *self.adapters))
      text = f'the model {model!r:.80} does not exist; there are: {names}'
      raise http.RefusedError(404, text, 'model_not_found')
    return model

  def close(self, generation):
    """Frees the row; the next request may still copy from it."""
    generation.sequence.close()


def refuse_length(text: str) -> http.RefusedError:
  """Makes the error for a conversation that does not fit a row."""
  return http.RefusedError(400, text, TOO_LONG)


def check_count(source: ReplySource, fields: dict[str, Any], conversation: str):
  """Rejects requests with more messages, parts, calls and tools than a row has slots.

  Each takes at least one token if it is not empty. The messages are in the field
  `conversation`.
  """
  size = lambda some: len(some) if isinstance(some, list) else 0
  count = 0
  for name in (conversation, 'tools'):
    messages = fields.get(name)
    count += size(messages)
    for m in messages if isinstance(messages, list) else ():
      if isinstance(m, dict):
        count += sum(size(m.get(part)) for part in ('tool_calls', 'content', 'output'))
  if count > source.slots:
    text = f'there are {count} messages, parts, calls and tools'
    raise refuse_length(f'{text}; there is room for {source.slots} tokens')


async def encode(source: ReplySource, fn: Callable[..., Any], *args: Any) -> Any:
  """Encodes the texts of a request, in a thread if they are long or have pictures.

  Args:
    source: The source of the request's replies.
    fn: Encodes, such as a method of a Chat; it gets the source's slots as `max_tokens`.
    *args: Arguments for `fn`.

  Raises:
    RefusedError: The text does not fit a row, or no thread was free in time.
  """
  fn = functools.partial(fn, *args, max_tokens=source.slots)
  try:
    text = repr(args)
    if len(text) <= _MAX_CHARACTERS and "'image_url'" not in text:
      return fn()
    turns = _TURNS.setdefault(asyncio.get_running_loop(), fairness.Turns(2))
    async with turns.take():
      return await http.run_in_thread(fn)
  except chat_lib.TooLongError as error:
    raise refuse_length(str(error)) from None
