"""The automata of requests: stop strings, schemas, required calls.

They are made in processes with limits (grammars/compiler.py) and cached.
"""

import asyncio
from collections.abc import Callable, Sequence
import hashlib
import json
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent import byte_automata, call_formats
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.grammars import byte_grammars, compiler
from agent_r1_jax.host import workers
from agent_r1_jax.serve import requests
from agent_r1_jax.web import fairness, http

_SECONDS = 60.0  # How long a request waits for its grammar, queueing included.
# CPU-seconds that each grammar gets at first; one that needs more starts again after all
# that do not.
_QUICK_SECONDS = 0.3
_MOST_UNDER_WAY = 32  # Grammars queued or in progress; further ones get HTTP 429.
_MOST_KEPT, _MOST_BYTES = 64, 1 << 28  # Of the cache of automata.


class Grammars:
  """Makes the automata of requests."""

  def __init__(self, chat: chat_lib.Chat, vocab_size: int):
    self._chat, self._vocab_size = chat, vocab_size
    # The task that makes each automaton, by a digest of its inputs; last used, last.
    self._made: dict[bytes, asyncio.Task[types.Automaton]] = {}
    self._turns = fairness.Turns(compiler.PROCESSES)
    self._shares = fairness.Shares()

  async def make(
    self, api_request: requests.ApiRequest, restrict: bool
  ) -> list[types.Automaton]:
    """Returns the automata of a request, once they are made.

    Args:
      api_request: The request.
      restrict: Whether schemas and required calls restrict the reply.

    Raises:
      RefusedError: A grammar is invalid, too large, or has to wait too long.
    """
    chat, size = self._chat, self._vocab_size
    result = [chat.stop_automaton(size)]
    strings = [*api_request.stop]
    if api_request.tools and not api_request.parallel_tool_calls:
      strings.append(self._find_closing())
    if strings:
      # The first call reads the bytes of all tokens.
      stops = await asyncio.to_thread(chat.find_stops, size, strings)
      ids, _, strings, pieces = stops
      result = [await self._find(byte_automata.find_any, [strings], (ids, pieces, size))]
    if not restrict or not (api_request.json_schema is not None or api_request.required):
      return result
    pieces = await asyncio.to_thread(lambda: chat.token_bytes)
    if api_request.json_schema is not None:
      vocabulary = (chat.stop_ids, pieces, size)
      restricted = self._find(
        byte_grammars.json_schema, [api_request.json_schema], vocabulary
      )
    elif chat.format == call_formats.HERMES:
      restricted = self._find(
        byte_grammars.tool_calls, [api_request.tools, True], ((), pieces, size)
      )
    else:
      text = f'calls in the format {chat.format.name} cannot be required'
      raise http.RefusedError(400, text)
    return [*result, await restricted]

  def _find_closing(self) -> str:
    """Returns the text that ends a reply restricted to one call."""
    if self._chat.format.closing is None:
      text = f'calls in the format {self._chat.format.name} have no end tag at which a '
      text += 'reply could end: parallel calls cannot be forbidden; leave it out'
      raise http.RefusedError(400, text)
    return self._chat.format.closing

  async def _find(
    self, make: Callable, args: Sequence, vocabulary: tuple[Sequence[int], Any, int]
  ) -> types.Automaton:
    """Returns an automaton of compiler.compile_grammar, from the cache if possible."""
    try:
      text = json.dumps([make.__name__, args, vocabulary[0]])
      key = hashlib.sha256(text.encode()).digest()
      work = self._made.pop(key, None) or self._begin(make, args, vocabulary)
      self._made[key] = work
      async with asyncio.timeout(_SECONDS):
        # Other requests may wait for it too.
        return await asyncio.shield(work)
    except TimeoutError:
      text = f'the grammar was not made within {_SECONDS:g} seconds; ask again later'
      raise http.RefusedError(429, text, 'overloaded') from None
    except (ValueError, RecursionError) as error:
      text = f'the request has no grammar: {workers.describe_error(error)}'
      raise http.RefusedError(400, text[:2000]) from None
    finally:
      self._forget()

  def _begin(self, make, args, vocabulary) -> asyncio.Task[types.Automaton]:
    owner = http.client.get()
    self._shares.take(owner, 1, _MOST_UNDER_WAY, 'grammars are being made')
    work = asyncio.create_task(self._compile(make, args, vocabulary))
    work.add_done_callback(lambda _: self._shares.give(owner, 1))
    # Retrieves the exception if no request is left to await it.
    work.add_done_callback(lambda work: work.cancelled() or work.exception())
    return work

  async def _compile(self, make, args, vocabulary) -> types.Automaton:
    try:
      async with self._turns.take():
        automaton = await compiler.compile_grammar(make, args, vocabulary, _QUICK_SECONDS)
    except compiler.TooMuchError:
      async with self._turns.take(slow=True):
        automaton = await compiler.compile_grammar(make, args, vocabulary)
    # Computed here, since it takes up to a second and would block the next decode.
    await asyncio.to_thread(lambda: automaton.kinds)
    return automaton

  def _forget(self):
    """Drops failed automata, and the oldest if there are too many or too large."""
    count, size = 0, 0
    for key, work in reversed(list(self._made.items())):
      if not work.done():
        continue
      if not work.cancelled() and work.exception() is None:
        count += 1
        automaton = work.result()
        size += automaton.table.nbytes + automaton.kinds[1].nbytes
        if count <= _MOST_KEPT and size <= _MOST_BYTES:
          continue
      del self._made[key]
