"""What a client asks the engine for, and what it gets: requests, texts, chunks.

generation = engine.submit(Request(prompt, max_tokens=200))
async for chunk in generation:      # as the tokens are sampled, or
  ...
reply = await generation            # all of them together
generation = engine.submit(Request(answer, parent=generation.text))  # goes on
generation = engine.submit(Request(answer, parent=Fork(text, length=120)))  # branches
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
import dataclasses
import hashlib
from typing import Any, NamedTuple

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import sampling as sampling_lib


def make_key(*parts: int | str) -> np.ndarray:
  """Makes a request's key, uint32 [2], of what identifies it (seed, task, sample ...)."""
  digest = hashlib.sha256('/'.join(map(str, parts)).encode()).digest()
  return np.frombuffer(digest[:8], np.uint32).copy()


class Chunk(NamedTuple):
  """Tokens that were sampled, n of them: a segment's, or a whole reply's.

  Attributes:
    tokens: int32 [n].
    logprobs: float32 [n], of the temperature-scaled full softmax of the policy, whatever
      guides or truncation made of it: the number that the learner computes. Greedy
      requests report temperature 1.
    policy_steps: int32 [n], the updates that the policy had seen which chose each token.
    stopped: Whether a guide ended the reply with the last token.
    top_tokens: int32 [n, top_logprobs], the likeliest tokens where they were asked for.
    top_logprobs: float32 [n, top_logprobs], their log-probs.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  policy_steps: np.ndarray
  stopped: bool
  top_tokens: np.ndarray
  top_logprobs: np.ndarray


def join(chunks: Sequence[Chunk]) -> Chunk:
  """Joins the chunks of one reply; there is at least one."""
  column = lambda name: np.concatenate([getattr(chunk, name) for chunk in chunks])
  columns = {name: column(name) for name in Chunk._fields if name != 'stopped'}
  return Chunk(**columns, stopped=chunks[-1].stopped)


class Text:
  """A text that the engine holds: what was appended and sampled, in order.

  A text stays usable for as long as someone has it. The engine keeps its keys and values
  in a row of the cache, and gives the row to another text when it needs one: first those
  of closed texts, then the ones that were asked about longest ago. A text that lost its
  row is prefilled again when it goes on.

  Attributes:
    replica: The copy of the policy that holds it.
    closed: Nobody will ask for it again; its row goes first.
  """

  def __init__(self, replica: Any, tokens: np.ndarray):
    """Makes a text of some tokens, which is in no row yet."""
    self.replica, self.closed = replica, False
    self._tokens = np.array(tokens, np.int32)

  def __len__(self) -> int:
    return len(self._tokens)

  @property
  def tokens(self) -> np.ndarray:
    """All tokens, int32."""
    return self._tokens

  def append(self, tokens: np.ndarray):
    """Adds tokens at the end; only the engine does."""
    self._tokens = np.concatenate([self._tokens, np.asarray(tokens, np.int32)])

  def close(self):
    """Says that no request will go on from this text; forks of it still may."""
    self.closed = True


class Fork(NamedTuple):
  """The first `length` tokens of a text, as the beginning of another."""

  text: Text
  length: int


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """What a client asks for: tokens to append to a text, and how to go on from there.

  Attributes:
    tokens: int32 [n], at least one.
    parent: The text that they are appended to, or a fork of one; None begins a new text.
    max_tokens: The most tokens of the reply.
    sampling: How its tokens are chosen.
    key: uint32 [2], the randomness of the reply, from `make_key`: the same key, text and
      policy sample the same tokens.
    automata: At most automaton.PER_ROW of them, which end the reply or restrict it: stop
      ids and stop strings, a grammar.
    guides: Further guides that the engine was made with, and the state in which the reply
      begins.
    top_logprobs: How many of the likeliest tokens are told with each token, with their
      log-probs; at most state.TOP.
    policy: Which policy samples, from Engine.make_policy; None is the engine's own, also
      where that changes in the midst of the reply.
  """

  tokens: np.ndarray
  parent: Text | Fork | None = None
  max_tokens: int = 512
  sampling: sampling_lib.Sampling = sampling_lib.ON_POLICY
  key: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(2, np.uint32))
  automata: Sequence[types.Automaton] = ()
  guides: Mapping[guide_lib.Guide, guide_lib.State] = dataclasses.field(
    default_factory=dict
  )
  top_logprobs: int = 0
  policy: Any = None


class Generation:
  """The reply to a request, while it is being sampled.

  Attributes:
    request: What was asked.
    text: The text that it goes on, with the chunks so far.
    chunks: The chunks so far.
    number: How many requests the engine had got before: first come, first served.
    done: Whether the reply has ended, whichever way.
  """

  def __init__(
    self, request: Request, text: Text, number: int, on_cancel: Callable[[], None]
  ):
    """Begins without chunks; `on_cancel` is called if the client gives it up."""
    self.request, self.text, self.number = request, text, number
    self.chunks: list[Chunk] = []
    self.done = False
    self._on_cancel = on_cancel
    self._changed = asyncio.Event()
    self._error: BaseException | None = None

  @property
  def remaining(self) -> int:
    """The most tokens that are still to come."""
    return self.request.max_tokens - sum(len(chunk.tokens) for chunk in self.chunks)

  def cancel(self):
    """Gives the reply up; its text ends with the last chunk, and its row is free."""
    if not self.done:
      self.end(asyncio.CancelledError('The request was cancelled.'))
      self._on_cancel()

  def add(self, chunk: Chunk):
    """Takes what a segment has sampled; only the engine does."""
    self.chunks.append(chunk)
    self.done = chunk.stopped or self.remaining == 0
    self._changed.set()

  def end(self, error: BaseException):
    """Ends without a whole reply; only the engine does."""
    self.done, self._error = True, error
    self._changed.set()

  def __await__(self) -> Generator[Any, None, Chunk]:
    """Waits for the whole reply; where the waiting is cancelled, so is the request."""
    return self._whole().__await__()

  async def _whole(self) -> Chunk:
    async for _ in self:
      pass
    return join(self.chunks)

  async def __aiter__(self) -> AsyncIterator[Chunk]:
    given = 0
    try:
      while True:
        while given < len(self.chunks):
          given += 1
          yield self.chunks[given - 1]
        if self._error is not None:
          raise self._error
        if self.done:
          return
        self._changed.clear()
        await self._changed.wait()
    finally:
      self.cancel()
