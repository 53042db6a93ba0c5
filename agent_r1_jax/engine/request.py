"""Requests to the engine and their replies: Request, Sequence, Generation and Chunk.

generation = engine.submit(Request(prompt, max_tokens=200))
async for chunk in generation:      # Streams tokens as they are sampled; or
  ...
reply = await generation            # waits for the complete reply.
generation = engine.submit(Request(answer, parent=generation.sequence))  # continues it
generation = engine.submit(Request(answer, parent=Fork(sequence, length=120)))  # branches
"""

import asyncio
from collections.abc import (
  AsyncIterator,
  Callable,
  Collection,
  Generator,
  Mapping,
)
import dataclasses
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import programs as programs_lib


def make_key(*parts: int | str) -> np.ndarray:
  """Hashes the identity of a request (seed, task ...) to a random key, uint32 [2]."""
  digest = hashlib.sha256('/'.join(map(str, parts)).encode()).digest()
  return np.frombuffer(digest[:8], np.uint32).copy()


class Chunk(NamedTuple):
  """The n sampled tokens of one decode, or of a complete reply.

  Attributes:
    tokens: The tokens, int32 [n].
    logprobs: Their log-probs, float32 [n], under the policy's temperature-scaled full
      softmax, as the learner computes them; guides and truncation do not change them.
      Greedy requests report log-probs at temperature 1.
    policy_steps: int32 [n], the policy_step (engine.sync_weights) of each token's policy.
    stopped: Whether a guide ended the reply with the last token.
    top_tokens: int32 [n, top_logprobs], the likeliest tokens, if requested.
    top_logprobs: float32 [n, top_logprobs], their log-probs.
    values: float32 [n], the critic's value of the state before each token; 0 if the
      policy has no value head.
    behaviour_logprobs: The tokens' log-probs, float32 [n], under the distribution that
      they were sampled from, after guides and truncation. They are the denominators of
      importance weights. Equal to `logprobs` without guides and truncation.
    routes: The experts that computed the sequence from its first token on, [m, L, k], in
      complete replies to requests with `replay`. The last tokens may be missing.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  policy_steps: np.ndarray
  stopped: bool
  top_tokens: np.ndarray
  top_logprobs: np.ndarray
  values: np.ndarray
  behaviour_logprobs: np.ndarray
  routes: np.ndarray | None = None


def join(chunks: list[Chunk]) -> Chunk:
  """Joins the chunks of one reply; there must be at least one chunk."""
  column = lambda name: np.concatenate([getattr(chunk, name) for chunk in chunks])
  whole = ('stopped', 'routes')
  columns = {name: column(name) for name in Chunk._fields if name not in whole}
  return Chunk(**columns, stopped=chunks[-1].stopped, routes=chunks[-1].routes)


class Scores(NamedTuple):
  """The log-probs of n prompt tokens, each given the tokens before it.

  Attributes:
    logprobs: float32 [n], under the policy's temperature-scaled full softmax, as in
      Chunk; NaN for the first token and for tokens outside the vocabulary.
    top_tokens: int32 [n, top_logprobs], the likeliest tokens; 0 for the first token.
    top_logprobs: float32 [n, top_logprobs], their log-probs; NaN for the first token.
  """

  logprobs: np.ndarray
  top_tokens: np.ndarray
  top_logprobs: np.ndarray


class Sequence:
  """A sequence in the engine: all appended and sampled tokens, in order.

  Requests can continue it while a reference to it exists. The engine keeps its keys and
  values in a row of the cache. A new sequence takes the row of a closed one, or else the
  least recently used row. A sequence that lost its row is prefilled again when a request
  continues it.

  Attributes:
    replica: The replica whose cache holds the sequence.
    closed: Whether its row is reused before those of open sequences.
    prompt: All tokens and pictures, as a Prompt.
    saved: How far its last token's coordinates lag its position; see Device.add.
  """

  def __init__(self, replica: Any, tokens: np.ndarray | types.Prompt):
    """Makes a sequence that has no row yet."""
    self.replica, self.closed = replica, False
    self.prompt = types.Prompt() + types.Prompt.of(tokens)
    self.saved = 0

  def __len__(self) -> int:
    return len(self.prompt)

  @property
  def tokens(self) -> np.ndarray:
    """All tokens, int32."""
    return self.prompt.tokens

  def append(self, tokens: np.ndarray | types.Prompt):
    """Appends tokens; called by the engine only."""
    self.prompt += types.Prompt.of(tokens)

  def close(self):
    """Marks it as complete: requests may still fork it, but not continue it."""
    self.closed = True


class Fork(NamedTuple):
  """The first `length` tokens of a sequence, as the start of a new one."""

  sequence: Sequence
  length: int


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """Tokens to append to a sequence, and how to sample the reply.

  Attributes:
    tokens: The tokens to append, int32 [n], at least one; or a Prompt, whose pictures may
      have ids outside the vocabulary.
    parent: The sequence to append them to, or a fork of one; None starts a new one.
    max_tokens: Maximum length of the reply in tokens.
    sampling: How to choose the tokens of the reply; the default samples from the policy's
      own distribution.
    key: uint32 [2], the random key of the reply, from `make_key`: the same key, sequence
      and policy sample the same tokens.
    automata: Stop ids and strings that end the reply, or a grammar that restricts it; at
      most automaton_guide.PER_REQUEST.
    guides: The guides of the engine that this request uses, with their initial states.
    top_logprobs: How many likeliest tokens to report with each token, with their
      log-probs; at most programs.TOP.
    policy: The policy that samples, from Engine.make_policy; None uses the engine's own,
      and its updates take effect during the reply.
    adapter: The name of an adapter of Engine.adapters to add to the policy; None uses the
      policy alone. If the parent was computed with another adapter, it is prefilled
      again.
    replay: Whether to report the experts that computed the sequence, if the policy has
      experts, so that training can use the same ones.
    score_prompt: Whether to report the log-probs of `tokens` in `Generation.prompt`;
      requires parent=None. Recomputes all tokens, even those in the cache.
    client: An id of the client: clients take turns while they wait for rows; '' opts out.
  """

  tokens: np.ndarray | types.Prompt
  parent: Sequence | Fork | None = None
  max_tokens: int = 512
  sampling: config_lib.Sampling = dataclasses.field(default_factory=config_lib.Sampling)
  key: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(2, np.uint32))
  automata: Collection[types.Automaton] = ()
  guides: Mapping[guide_lib.Guide, guide_lib.State] = dataclasses.field(
    default_factory=dict
  )
  top_logprobs: int = 0
  policy: Any = None
  adapter: str | None = None
  replay: bool = False
  score_prompt: bool = False
  client: str = ''

  @property
  def prompt(self) -> types.Prompt:
    """The tokens and their pictures, as a Prompt."""
    return types.Prompt.of(self.tokens)


def check(
  request: Request,
  *,
  vocab_size: int,
  slots: int,
  guides: Collection[guide_lib.Guide],
  more_ids: npt.ArrayLike = (),
):
  """Raises ValueError for a request that the engine cannot answer.

  An error during a decode would end the requests of all clients. `more_ids` are the ids
  outside the vocabulary that stand for the request's pictures.
  """
  request.sampling.check()
  parent, added, most = request.parent, len(request.tokens), request.max_tokens
  if added == 0 or most < 1:
    raise ValueError(f'{added} tokens to append, {most} to sample: at least 1 of each.')
  tokens = request.prompt.tokens
  outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
  # Most requests have no such ids, and isin takes longer than the rest of the check.
  if len(outside) and len(outside := outside[~np.isin(outside, more_ids)]):
    raise ValueError(f'token {outside[0]} is outside the vocabulary of {vocab_size}.')
  if request.score_prompt and parent is not None:
    raise ValueError('score_prompt scores a whole sequence: leave parent out.')
  if np.shape(request.key) != (2,):
    raise ValueError(f'key has the shape {np.shape(request.key)}; make it with make_key.')
  before = len(parent or ())
  if isinstance(parent, Fork):
    before = parent.length
    if not 0 <= before <= len(parent.sequence):
      raise ValueError(
        f'a fork of the first {before} tokens of a sequence that has '
        f'{len(parent.sequence)}.'
      )
  if before + added + most > slots:
    raise ValueError(
      f'A sequence of {before} + {added} tokens and a reply of {most} do not fit a row '
      f'of {slots} slots: raise slots or shorten the reply.'
    )
  if unknown := {*request.guides} - {*guides}:
    raise ValueError(
      f'the request uses {len(unknown)} guides that the engine was not made with: name '
      'them in Engine(guides={...}).'
    )
  # Compare device dtypes: JAX turns 64 bits into 32.
  form = lambda tree: jax.tree.map(lambda x: (np.shape(x), f'{jnp.result_type(x)}'), tree)
  for guide, state in request.guides.items():
    if form(state) != form(guide.off):
      raise ValueError(
        f'the state of a guide has the shapes and dtypes {form(state)}; they must be '
        f'those of its `off`, {form(guide.off)}.'
      )
  if not 0 <= request.top_logprobs <= programs_lib.TOP:
    raise ValueError(
      f'top_logprobs is {request.top_logprobs}; it must be 0 to {programs_lib.TOP}.'
    )


class Generation:
  """The reply to a request, while it is being sampled.

  Attributes:
    request: The request.
    sequence: The sequence, including the chunks so far.
    chunks: The chunks so far.
    number: The number of requests that the replica received before this one.
    done: Whether the reply is complete, was cancelled or has failed.
    prompt: The scores of the prompt, if requested; available with the first chunk.
  """

  def __init__(
    self, request: Request, sequence: Sequence, number: int, on_cancel: Callable[[], None]
  ):
    """Makes an empty reply; `on_cancel` is called if it is cancelled or fails."""
    self.request, self.sequence, self.number = request, sequence, number
    self.chunks: list[Chunk] = []
    self.done = False
    self.prompt: Scores | None = None
    self._on_cancel = on_cancel
    self._changed = asyncio.Event()
    self._error: BaseException | None = None

  @property
  def remaining(self) -> int:
    """How many more tokens can be sampled at most."""
    return self.request.max_tokens - sum(len(chunk.tokens) for chunk in self.chunks)

  def cancel(self):
    """Cancels the reply: the sequence ends with the last chunk, and its row is freed."""
    self.fail(asyncio.CancelledError('The request was cancelled.'))

  def fail(self, error: BaseException):
    """Ends the reply like `cancel`; awaiting it raises `error`."""
    if not self.done:
      self.done, self._error = True, error
      self._changed.set()
      self._on_cancel()

  def add(self, chunk: Chunk):
    """Adds the tokens of a decode; called by the engine only."""
    self.chunks.append(chunk)
    self.done = chunk.stopped or self.remaining == 0
    self._changed.set()

  def __await__(self) -> Generator[Any, None, Chunk]:
    """Waits for the complete reply; cancelling the wait cancels the request."""
    return self._wait().__await__()

  async def _wait(self) -> Chunk:
    async for _ in self:
      pass
    return join(self.chunks)

  async def __aiter__(self) -> AsyncIterator[Chunk]:
    yielded = 0
    try:
      while True:
        while yielded < len(self.chunks):
          yielded += 1
          yield self.chunks[yielded - 1]
        if self._error:
          raise self._error
        if self.done:
          return
        self._changed.clear()
        await self._changed.wait()
    finally:
      self.cancel()
