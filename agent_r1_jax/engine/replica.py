"""A replica: one copy of the policy, the rows of its cache, and what is computed next.

Clients submit requests; `serve` gives their texts rows, prefills what is not in the cache
yet, decodes a segment of all that are ready, and hands out chunks. A decode is awaited in
a thread, so tools run while the device does.
"""

import asyncio
import collections
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import itertools
import time
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.engine import automaton as automaton_lib
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.engine import rows as rows_lib
from agent_r1_jax.engine import running as running_lib
from agent_r1_jax.engine import sizes as sizes_lib
from agent_r1_jax.engine import state as state_lib
from agent_r1_jax.host import sharding
from agent_r1_jax.models import decoder

# How long a call for the end goes unheard where nothing is to be computed.
_POLL_SECONDS = 0.5
# After a reply the device waits so long at most for what its client asks next.
_ANSWER_SECONDS = 0.002


class PreemptedError(Exception):
  """The process is to end: the replies that were asked for were not waited for."""


@dataclasses.dataclass
class Stats:
  """Counts since the engine was made.

  Attributes:
    prefilled: Tokens computed by prefills.
    shared: Tokens that were copied from another row in place of computing them.
    sampled: Tokens sampled.
    steps: Row-steps of decoding, idle rows included.
    prefill_seconds: Host time of prefills; the device's is part of the decode that
      follows.
    decode_seconds: Wall time of decodes.
    idle_seconds: Wall time of waiting for tools with nothing to compute.
    host_seconds: Wall time between a decode and what the device was asked for next,
      while requests waited.
  """

  prefilled: int = 0
  shared: int = 0
  sampled: int = 0
  steps: int = 0
  prefill_seconds: float = 0.0
  decode_seconds: float = 0.0
  idle_seconds: float = 0.0
  host_seconds: float = 0.0


@dataclasses.dataclass(eq=False)
class Policy:
  """Parameters that sample.

  Attributes:
    copies: One for each chip (or `tensor` of them), as decoder.extend takes them.
    step: The updates that they have seen: what their tokens are marked with.
    version: Another number for other parameters.
  """

  copies: list[decoder.Params]
  step: int
  version: int


class Replica:
  """One copy of the policy at work.

  Attributes:
    policy: Samples what asks for no other; may be assigned from any thread.
    interrupted: Asked before each piece of work; True ends `serve`.
    cache: Keys and values, on the device.
    rows: What the host knows of the cache.
    pool: The automata that requests use.
    guides: All kinds of guides that requests can use.
  """

  def __init__(
    self,
    config: decoder.DecoderConfig,
    sizes: sizes_lib.Sizes,
    guides: Mapping[guide_lib.Guide, Any],
    stats: Stats,
    mesh: Mesh | None = None,
    part: int = 0,
  ):
    """Allocates the cache.

    Args:
      config: The policy's shape.
      sizes: Sizes of the programs and of the cache.
      guides: The kinds of guides that requests may use, and the parameters of each.
      stats: Where it counts.
      mesh: The chips that share this copy; None is JAX's default device.
      part: Which of a policy's copies is on these chips.
    """
    self.config, self.sizes, self.stats, self.mesh = config, sizes, stats, mesh
    self.part = part
    self.policy: Policy | None = None
    self.interrupted: Callable[[], bool] = lambda: False
    self.cache = decoder.empty_cache(config, sizes.rows, sizes.slots)
    if mesh is not None:
      self.cache = sharding.shard_cache(self.cache, mesh)
    self.rows = rows_lib.Rows(sizes.rows, sizes.slots)
    self.pool = automaton_lib.AutomatonPool(config.vocab_size)
    self._guide_params = {
      automaton_lib.AUTOMATA: None,  # The pool's tables; see _call_decode.
      guide_lib.TRUNCATION: None,
      **guides,
    }
    self.guides = tuple(self._guide_params)
    self._loaded: tuple[automaton_lib.Entry, ...] = ()
    self._tables: automaton_lib.Tables | None = None
    self._numbers = itertools.count()
    self.begin()

  def begin(self):
    """Makes it ready to serve."""
    self._wake, self._places = asyncio.Event(), asyncio.Semaphore(self.sizes.rows)
    # The clients that wait for a row's place, in a line for each policy's version.
    self._lines = collections.defaultdict(asyncio.Lock)
    self._reserved = 0
    self._live: list[running_lib.Running] = []
    # Replies of the last decode after which nobody has asked for another yet.
    self._answered = 0
    self._decoded: float | None = None
    self._served: Policy | None = None
    # Its own: whatever hangs in other threads, decodes do not wait for it.
    self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix='decode')
    self.rows.forget()

  def end(self):
    """Waits for a decode that is under way, and cancels the requests that are left."""
    self._thread.shutdown()
    for running in self._live:
      running.generation.cancel()
    self._drop_done()

  @property
  def load(self) -> int:
    """Requests that are waiting or under way."""
    return sum(not running.generation.done for running in self._live)

  @contextlib.asynccontextmanager
  async def reserve(self, policy: Policy | None = None) -> AsyncIterator['Replica']:
    """Waits until fewer than `rows` others are inside; see Engine.reserve."""
    first_in_line = self._lines[policy.version if policy else None]
    # The semaphore serves whoever came first. As no more than one client of each policy
    # waits for it, the policies get their places in turns.
    async with first_in_line:
      await self._places.acquire()
    try:
      self._reserved += 1
      yield self
    finally:
      self._reserved -= 1
      self._places.release()

  def submit(self, request: request_lib.Request) -> request_lib.Generation:
    """Takes a request; only inside the event loop that `serve` runs in.

    Raises:
      ValueError: The text and the reply would not fit a row, one of them is empty, the
        text is being sampled, a guide is unknown, or an automaton does not fit.
    """
    self._check(request)
    automata = self.pool.acquire(request.automata)
    number = next(self._numbers)
    text, tokens = request.parent, np.asarray(request.tokens, np.int32)
    if isinstance(text, request_lib.Text):
      text.append(tokens)
    else:
      begin = text.text.tokens[: text.length] if text else tokens[:0]
      text = request_lib.Text(self, np.concatenate([begin, tokens]))
    generation = request_lib.Generation(request, text, number, self._wake.set)
    self._live.append(running_lib.Running(generation, self.guides, automata))
    # A client that has got its reply and asks again is not waited for any more.
    self._answered -= 1
    self._wake.set()
    return generation

  def _check(self, request: request_lib.Request):
    """Raises ValueError for a request that cannot be answered; see `submit`."""
    parent, added, most = request.parent, len(request.tokens), request.max_tokens
    if added == 0 or most < 1:
      raise ValueError(f'{added} tokens to append, {most} to sample: both need 1.')
    # What else would fail in `serve` would fail all other requests with it.
    vocab, given = self.config.vocab_size, np.asarray(request.tokens)
    if len(outside := given[(given < 0) | (given >= vocab)]):
      raise ValueError(f'token {outside[0]} is none of the {vocab} of the policy.')
    if np.shape(request.key) != (2,):
      raise ValueError(
        f'key has the shape {np.shape(request.key)}; make it with make_key.'
      )
    begun = len(parent or ())
    if isinstance(parent, request_lib.Fork):
      begun = parent.length
      if not 0 <= begun <= len(parent.text):
        raise ValueError(
          f'a fork at {begun} of a text of {len(parent.text)} tokens: it has no such end.'
        )
    elif any(r.generation.text is parent and not r.generation.done for r in self._live):
      raise ValueError(
        'The text is being sampled for another request: wait for that one, cancel it, or '
        'fork the text.'
      )
    if begun + added + most > self.sizes.slots:
      raise ValueError(
        f'A text of {begun} + {added} tokens and a reply of {most} do not fit a row of '
        f'{self.sizes.slots} slots: raise slots or shorten the reply.'
      )
    if unknown := {*request.guides} - {*self.guides}:
      raise ValueError(
        f'the request uses {len(unknown)} guides that the engine was not made with: name '
        'them in Engine(guides={...}).'
      )
    form = lambda tree: jax.tree.map(np.shape, tree)
    for guide, state in request.guides.items():
      if form(state) != form(guide.off):
        raise ValueError(
          f'the state of a guide has the form {form(state)}; it must be that of its '
          f'`off`, {form(guide.off)}.'
        )
    if not 0 <= request.top_logprobs <= state_lib.TOP:
      raise ValueError(
        f'top_logprobs is {request.top_logprobs}; it must be 0 to {state_lib.TOP}.'
      )

  def warm_up(self, on_done: Callable[[], None], automata: Sequence[types.Automaton]):
    """Compiles every program, on places without rows.

    Args:
      on_done: Called after each.
      automata: Larger ones than stop ids that requests will bring: tables grow to them.
    """
    assert self.policy is not None
    acquired = [self.pool.acquire([automaton]) for automaton in automata]
    sizes, params = self.sizes, self.policy.copies[self.part]
    nobody = lambda size: np.full(size, sizes.rows, np.int32)
    zeros = lambda size: np.zeros(size, np.int32)
    for bucket in sizes.buckets:
      size = sizes.prefill_rows[-1]
      self._call_copy(zeros(size), nobody(size), bucket)
      on_done()
      for size in sizes.prefill_rows:
        tokens = np.zeros((size, sizes.prefill_tokens), np.int32)
        self._call_prefill(params, nobody(size), zeros(size), tokens, zeros(size), bucket)
        on_done()
    for bucket, size in itertools.product(sizes.decode_buckets, sizes.decode_rows):
      self._call_decode(params, *self._arguments({}, size), bucket)
      on_done()
    for state in acquired:
      self.pool.release(state)

  async def serve(self):
    """Answers requests, for ever.

    Raises:
      PreemptedError: `interrupted` said so.
    """
    while True:
      if self.interrupted():
        raise PreemptedError
      await self._let_ask()
      self._drop_done()
      if not self._live:
        self._decoded = self._served = None
        await self._idle()
        continue
      await self._work()

  async def _work(self):
    """Does one piece of work; afterwards nothing here holds its policy any more."""
    policy, chosen = self._choose()
    if not chosen:
      return  # All rows are at work for requests of another policy.
    if self._decoded is not None:
      self.stats.host_seconds += time.perf_counter() - self._decoded
      self._decoded = None
    params = policy.copies[self.part]
    if not self._fill(params, chosen):
      await self._decode(params, policy.step, chosen)

  async def _let_ask(self):
    """Lets whoever can go on at once ask for more, before the device works again."""
    await asyncio.sleep(0)
    # Environments answer from another thread, which takes a moment.
    end = time.perf_counter() + _ANSWER_SECONDS
    while self._answered > 0 and (left := end - time.perf_counter()) > 0:
      await self._wait(left)
    self._answered = 0

  async def _wait(self, seconds: float):
    """Waits until somebody asks for something, or the time is over."""
    self._wake.clear()
    # Not asyncio.wait_for: in Python 3.11 it may swallow a cancellation.
    poll = asyncio.get_running_loop().call_later(seconds, self._wake.set)
    try:
      await self._wake.wait()
    finally:
      poll.cancel()

  async def _idle(self):
    start = time.perf_counter()
    await self._wait(_POLL_SECONDS)
    if self._reserved:
      self.stats.idle_seconds += time.perf_counter() - start

  def _drop_done(self):
    """Gives up the rows and automata of what has ended or was cancelled."""
    for running in self._live:
      if running.generation.done:
        running.leave()
        self.pool.release(running.automata)
    self._live = [r for r in self._live if not r.generation.done]

  def _choose(self) -> tuple[Policy, list[running_lib.Running]]:
    """Chooses the requests of the next piece of work, all of one policy, and their rows.

    Where requests are of several policies, these take turns. Of one policy, whoever came
    first is served first.
    """
    asked = list(dict.fromkeys(r.generation.request.policy for r in self._live))
    turn = asked.index(self._served) + 1 if self._served in asked else 0
    self._served = asked[turn % len(asked)]
    policy = self._served or self.policy
    assert policy is not None
    mine = [r for r in self._live if r.generation.request.policy is self._served]
    chosen = []
    for running in sorted(mine, key=lambda r: r.generation.number):
      if running.row is None:
        running.row = self.rows.place(running.generation, policy.version)
      if running.row is not None:
        running.row.note_policy(policy.version)
        chosen.append(running)
      if len(chosen) == self.sizes.decode_rows[-1]:
        break
    return policy, chosen

  def _fill(self, params, chosen: list[running_lib.Running]) -> bool:
    """Copies shared prefixes or prefills one chunk a row; False if nothing is missing."""
    begin = time.perf_counter()
    rows = [r.row for r in chosen if r.row and not r.row.filled]
    copies, waiting = self.rows.find_sources(rows, self.sizes.prefill_rows[-1])
    if copies:
      self._copy(copies)
      return True
    rows = [row for row in rows if row not in waiting][: self.sizes.prefill_rows[-1]]
    if not rows:
      return False
    size, most = (
      sizes_lib.least(self.sizes.prefill_rows, len(rows)),
      self.sizes.prefill_tokens,
    )
    places, start, count = np.zeros((3, size), np.int32)
    places[len(rows) :] = self.sizes.rows
    tokens = np.zeros((size, most), np.int32)
    for m, row in enumerate(rows):
      part = row.missing[:most]
      places[m], start[m], count[m] = row.index, row.cached, len(part)
      tokens[m, : len(part)] = part
      row.cached += len(part)
      self.stats.prefilled += len(part)
    bucket = self.sizes.bucket(max(row.cached for row in rows))
    self._call_prefill(params, places, start, tokens, count, bucket)
    self.stats.prefill_seconds += time.perf_counter() - begin
    return True

  def _copy(self, copies: list[tuple[rows_lib.Source, rows_lib.Row]]):
    size = self.sizes.prefill_rows[-1]
    source, rows = np.zeros(size, np.int32), np.full(size, self.sizes.rows, np.int32)
    for m, (found, row) in enumerate(copies):
      source[m], rows[m] = found.row.index, row.index
      self.stats.shared += found.length - row.cached
      row.cached = found.length
    bucket = self.sizes.bucket(max(found.length for found, _ in copies))
    self._call_copy(source, rows, bucket)

  async def _decode(self, params, step: int, chosen: list[running_lib.Running]):
    """Samples a segment of the rows that are filled, and hands out its chunks."""
    start = time.perf_counter()
    chosen = [running for running in chosen if running.filled]
    size = sizes_lib.least(self.sizes.decode_rows, len(chosen))
    in_row = lambda m, running: running.row.index if self.sizes.in_place else m
    where = [in_row(m, running) for m, running in enumerate(chosen)]
    arguments = self._arguments(dict(zip(where, chosen, strict=True)), size)
    longest = int(arguments[0].length.max())
    bucket = self.sizes.decode_bucket(longest + self.sizes.steps)
    wanted = bool(arguments[0].top.any())

    def decode():
      states, out = self._call_decode(params, *arguments, bucket)
      # The log-probs of the likeliest tokens are many, and seldom asked for.
      none = np.zeros((size, self.sizes.steps, 0), np.int32)
      tops = jax.device_get(out[4:]) if wanted else (none, np.float32(none))
      return jax.device_get(states), state_lib.Decoded(*jax.device_get(out[:4]), *tops)

    # The call is made there, too: a CPU computes what one thread asks of it in turn.
    states, out = await self._in_thread(decode)
    self._decoded = time.perf_counter()
    self.stats.decode_seconds += self._decoded - start
    self.stats.sampled += int(out.count.sum())
    self.stats.steps += int(out.count.max()) * size
    for m, running in zip(where, chosen, strict=True):
      # What was cancelled meanwhile has nothing of it: its text ends where it did.
      if not running.generation.done:
        running.take(out, m, step, [_place(state, m) for state in states])
        self._answered += running.generation.done

  def _arguments(self, chosen: dict[int, running_lib.Running], size: int):
    return running_lib.make_decode_arguments(
      chosen, size, self.guides, unused_row=self.sizes.rows
    )

  def _in_thread(self, fn: Callable[[], Any]) -> asyncio.Future:
    return asyncio.get_running_loop().run_in_executor(self._thread, fn)

  def _call_copy(self, source, rows, bucket):
    with sharding.use_mesh(self.mesh):
      self.cache = state_lib.copy(self.cache, source, rows, bucket=bucket)

  def _call_prefill(self, params, rows, start, tokens, count, bucket):
    with sharding.use_mesh(self.mesh):
      self.cache = state_lib.prefill(
        params,
        self.cache,
        *(rows, start, tokens, count),
        config=self.config,
        bucket=bucket,
      )

  def _call_decode(self, params, places, used, states, bucket):
    with sharding.use_mesh(self.mesh):
      self._load_automata()
      self.cache, states, out = state_lib.decode(
        params,
        self.cache,
        places,
        used,
        states,
        tuple(self._guide_params.values()),
        config=self.config,
        guides=self.guides,
        steps=self.sizes.steps,
        bucket=bucket,
        in_place=self.sizes.in_place,
      )
    return states, out

  def _load_automata(self):
    """Puts the automata on the device, if one came in since the last decode."""
    entries = self.pool.entries
    if entries is not self._loaded:
      self._loaded = entries
      self._tables = automaton_lib.make_tables(entries, self._tables)
      self._guide_params[automaton_lib.AUTOMATA] = jax.device_put(self._tables)


def _place(state: guide_lib.State, m: int) -> guide_lib.State:
  """One place's part of a guide's states."""
  return jax.tree.map(lambda x: x[m], state)
