"""Where the replies to a client's requests come from, and who encodes their texts.

The server's event loop is the engine's, so nothing here may hold it up. What no row can
hold is refused before it is encoded. Of the rest, short texts are encoded at once, and
long ones in threads; these are few, because encoding takes many times a text's memory.
"""

import asyncio
from collections.abc import Callable, Sequence
import functools
from typing import Any, Protocol

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.host import thread_pool
from agent_r1_jax.serve import replies, requests
from agent_r1_jax.web import http

_MAX_CHARACTERS = 1 << 14  # Of a text that is encoded at once, which takes milliseconds.
_SECONDS = 60.0  # For a long text, with its wait for a thread.
_POOL = thread_pool.Pool(threads=2)


class Source(Protocol):
  """Where the replies to a client's requests come from.

  Attributes:
    slots: The most tokens of a conversation and its reply.
    adapters: The names of the policy's adapters, which requests may ask.
  """

  @property
  def slots(self) -> int:
    """See the class."""
    ...

  @property
  def adapters(self) -> Sequence[str]:
    """See the class."""
    ...

  def refuse_length(self, text: str) -> http.RefusedError:
    """Makes the refusal of a conversation that no row can hold."""
    ...

  async def submit(
    self, api_request: requests.ApiRequest, automata: Sequence[types.Automaton]
  ) -> list[request_lib.Generation]:
    """Begins `api_request.n` replies; raises RefusedError if there can be none."""
    ...

  def accept(self, generation: request_lib.Generation, reply: replies.Reply):
    """Is called with a complete reply, before the client gets it."""
    ...

  def close(self, generation: request_lib.Generation):
    """Is called when a reply has ended, in whatever way."""
    ...


class StatelessSource:
  """Answers each request by itself, whoever asks."""

  def __init__(self, engine: engine_lib.Engine, chat: chat_lib.Chat, name: str):
    """Makes a source; clients call the policy without an adapter by its name."""
    self._engine, self._chat, self._name = engine, chat, name
    self.slots = engine.sizes.slots

  @property
  def adapters(self) -> Sequence[str]:
    """The adapters that the engine has now."""
    return self._engine.adapters.names

  def refuse_length(self, text: str) -> http.RefusedError:
    """Makes a refusal, and notes nothing."""
    return http.RefusedError(400, text, 'context_length_exceeded')

  async def submit(self, api_request, automata):
    """Encodes the conversation; what the cache holds of it is not computed again."""
    adapter = self._find_adapter(api_request.model)
    pictures = []
    if api_request.messages is not None:
      messages = requests.to_chat(api_request.messages, self._chat.format)
      ids = await encode(self, self._chat.encode_prompt, messages, api_request.tools)
      pictures = self._chat.list_pictures(messages)
    elif isinstance(api_request.prompt, str):
      ids = await encode(self, self._chat.encode_text, api_request.prompt)
    else:
      ids = np.array(api_request.prompt)
    room = self.slots - len(ids)
    max_tokens = room if api_request.max_tokens is None else api_request.max_tokens
    if room < 1 or max_tokens > room:
      raise self.refuse_length(
        f'the prompt has {len(ids)} tokens and the reply may have {max(max_tokens, 1)}; '
        f'there is room for {self.slots}'
      )
    return [
      self._engine.submit(
        request_lib.Request(
          ids,
          max_tokens=max_tokens,
          sampling=api_request.sampling,
          key=api_request.make_key(i),
          automata=automata,
          top_logprobs=api_request.top_logprobs or 0,
          adapter=adapter,
          pictures=pictures,
        )
      )
      for i in range(api_request.n)
    ]

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

  def accept(self, generation, reply):
    """Keeps nothing."""

  def close(self, generation):
    """Lets others have the row; the next request may still copy from it."""
    generation.text.close()


def check_count(source: Source, messages: Any):
  """Refuses more messages and calls than a row has slots: each has a token at least."""
  messages = messages if isinstance(messages, list) else []
  calls = [m.get('tool_calls') for m in messages if isinstance(m, dict)]
  count = len(messages) + sum(len(some) for some in calls if isinstance(some, list))
  if count > source.slots:
    text = (
      f'there are {count} messages and calls; there is room for {source.slots} tokens'
    )
    raise source.refuse_length(text)


async def encode(source: Source, fn: Callable[..., np.ndarray], *args: Any) -> np.ndarray:
  """Encodes a text, in a thread if it is long.

  Args:
    source: Whose text it is.
    fn: A method of a Chat that encodes; it gets the source's slots as `max_tokens`.
    *args: Its arguments.

  Raises:
    RefusedError: No row can hold so long a text, or no thread was free in time.
  """
  fn = functools.partial(fn, *args, max_tokens=source.slots)
  try:
    if len(repr(args)) <= _MAX_CHARACTERS:
      return fn()
    async with asyncio.timeout(_SECONDS):
      return await asyncio.wrap_future(_POOL.submit(fn))
  except chat_lib.TooLongError as error:
    raise source.refuse_length(str(error)) from None
  except (TimeoutError, thread_pool.PoolFullError) as error:
    text = f'the text was not encoded within {_SECONDS:g} seconds; {error}'
    raise http.RefusedError(503, text.rstrip('; ')) from None
