"""Where the replies to a client's requests come from, and who encodes their texts.

The server's event loop is the engine's, so nothing here may hold it up. What no row can
hold is refused before it is encoded. Of the rest, short texts are encoded at once, and
long ones in threads; these are few, because encoding takes many times a text's memory.
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

TOO_LONG = 'context_length_exceeded'  # The code of such a refusal.
_MAX_CHARACTERS = 1 << 14  # Of texts that are encoded at once, which takes milliseconds.
# For texts that are encoded in threads: those of each event loop.
_TURNS: MutableMapping[Any, fairness.Turns] = weakref.WeakKeyDictionary()


class ReplySource(abc.ABC):
  """Where the replies to a client's requests come from.

  Attributes:
    slots: The most tokens of a conversation and its reply.
    memory: What dialects keep for later requests, by names of their own.
  """

  def __init__(self, slots: int):
    self.slots = slots
    self.memory: dict[str, Any] = {}

  @property
  def adapters(self) -> Sequence[str]:
    """The names of the policy's adapters, which requests may ask; by default none."""
    return ()

  def note_refusal(self, error: http.RefusedError) -> None:
    """Is called when a request for replies is refused; a count of tokens is none."""
    return None

  @abc.abstractmethod
  async def submit(
    self, api_request: requests.ApiRequest, automata: Sequence[types.Automaton]
  ) -> list[request_lib.Generation]:
    """Begins `api_request.n` replies; raises RefusedError if there can be none."""

  @abc.abstractmethod
  async def count(self, api_request: requests.ApiRequest) -> int:
    """Counts the tokens before the reply that a request would get."""

  def accept(self, generation: request_lib.Generation, reply: replies.Reply) -> None:
    """Is called with a complete reply, before the client gets it."""
    return None

  def close(self, generation: request_lib.Generation) -> None:
    """Is called when a reply has ended, in whatever way."""
    return None

  def cancel(self, generations: Sequence[request_lib.Generation]):
    """Ends replies, if they have not ended, and closes them."""
    for generation in generations:
      generation.cancel()
      self.close(generation)


class StatelessSource(ReplySource):
  """Answers each request by itself, whoever asks."""

  def __init__(self, engine: engine_lib.Engine, chat: chat_lib.Chat, name: str):
    """Makes a source; clients call the policy without an adapter by its name."""
    super().__init__(engine.sizes.slots)
    self._engine, self._chat, self._name = engine, chat, name

  @property
  def adapters(self) -> Sequence[str]:
    """The adapters that the engine has now."""
    return self._engine.adapters.names

  async def submit(self, api_request, automata):
    """Encodes the conversation; what the cache holds of it is not computed again."""
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
    except ValueError:  # One of several prompts has what the policy does not know.
      self.cancel(begun)
      raise
    return begun

  async def count(self, api_request):
    """Encodes the conversation, and nothing else."""
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
    """Finds the adapter that a client means by a model; None is the policy alone."""
    # Without adapters, clients may call the policy whatever they like.
    if not self._engine.adapters.count or model in (None, self._name):
      return None
    if model not in self.adapters:
      names = ', '.join((self._name, *self.adapters))
      text = f'the model {model!r:.80} does not exist; there are: {names}'
      raise http.RefusedError(404, text, 'model_not_found')
    return model

  def close(self, generation):
    """Lets others have the row; the next request may still copy from it."""
    generation.text.close()


def refuse_length(text: str) -> http.RefusedError:
  """Makes the refusal of a conversation that no row can hold."""
  return http.RefusedError(400, text, TOO_LONG)


def check_count(source: ReplySource, fields: dict[str, Any], conversation: str):
  """Refuses more messages, parts, calls and tools than a row has slots.

  Each has a token at least, as far as it says something. The messages are those of the
  field `conversation`.
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
    source: Whose texts they are.
    fn: Encodes, such as a method of a Chat; it gets the source's slots as `max_tokens`.
    *args: Its arguments.

  Raises:
    RefusedError: No row can hold so long a text, or no thread was free in time.
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
