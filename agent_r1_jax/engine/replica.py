"""A replica: the rows of one cache, and what is computed for them next.

It answers requests by the engine's policy or by another one that a request names.

Clients submit requests; `serve` gives their texts rows, prefills what is not in the cache
yet, decodes some tokens of all that are ready, and hands out chunks. A decode runs in a
thread of its own, so that tools run while the device does.
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
from agent_r1_jax.engine import active_request
from agent_r1_jax.engine import automaton as automaton_lib
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.engine import rows as rows_lib
from agent_r1_jax.engine import sizes as sizes_lib
from agent_r1_jax.host import sharding
from agent_r1_jax.models import decoder

# How often `interrupted` is asked while there is nothing to compute.
_POLL_SECONDS = 0.5
# How long the device waits at most for the next requests of clients that got a reply.
_ANSWER_SECONDS = 0.002


class PreemptedError(Exception):
  """The process was told to end, before all requests were answered."""


@dataclasses.dataclass
class Stats:
  """Counts since the engine was made."""

  prefilled: int = 0  # Tokens that prefills computed.
  shared: int = 0  # Tokens that were copied from another row in place of computing them.
  sampled: int = 0  # Tokens that decodes sampled.
  steps: int = 0  # Steps of all rows of all decodes, idle rows included.
  # Host time of prefills; the device's time is part of the decode that follows.
  prefill_seconds: float = 0.0
  decode_seconds: float = 0.0  # Wall time of decodes.
  # Wall time without anything to compute, while clients waited for tools.
  idle_seconds: float = 0.0
  # Wall time from the end of a decode to the next call to the device, while requests
  # waited.
  host_seconds: float = 0.0


@dataclasses.dataclass(eq=False)
class Policy:
  """Parameters that requests are sampled with."""

  # The parameters on each chip (or on `tensor` of them), as decoder.extend takes them.
  copies: list[decoder.Params]
  step: int  # The policy_step of engine.sync_weights, reported with each token.
  version: int  # A number that differs where the parameters do.


class Replica:
  """One copy of the policy at work.

  Attributes:
    policy: Samples the requests that ask for no other; any thread may assign it.
    interrupted: Asked before each piece of work; True ends `serve`.
    cache: The keys and values, on the device.
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
    copy_index: int = 0,
  ):
    """Allocates the cache on `mesh`, on which Policy.copies[copy_index] lies."""
    self.config, self.sizes, self.stats, self.mesh = config, sizes, stats, mesh
    self._copy_index = copy_index
    self.policy: Policy | None = None
    self.interrupted: Callable[[], bool] = lambda: False
    self.cache = decoder.empty_cache(config, sizes.rows, sizes.slots)
    if mesh is not None:
      self.cache = sharding.shard_cache(self.cache, mesh)
    self.rows = rows_lib.Rows(sizes.rows, sizes.slots)
    self.pool = automaton_lib.AutomatonPool(config.vocab_size)
    self._guide_params = {
      automaton_lib.AUTOMATA: None,  # The tables; see _load_automata.
      guide_lib.TRUNCATION: None,
      **guides,
    }
    self.guides = tuple(self._guide_params)
    # The automata that are on the device, and their tables.
    self._loaded: tuple[automaton_lib.Entry, ...] = ()
    self._tables: automaton_lib.Tables | None = None
    self._numbers = itertools.count()
    self.start()

  def start(self):
    """Prepares for `serve`, in the event loop that it will run in."""
    self._wake, self._places = asyncio.Event(), asyncio.Semaphore(self.sizes.rows)
    # The clients that wait for a row's place, in a line for each policy's version.
    self._lines = collections.defaultdict(asyncio.Lock)
    self._taking = asyncio.Lock()
    self._reserved = 0
    self._live: list[active_request.ActiveRequest] = []
    # Replies of the last decode after which nobody has asked for another yet.
    self._answered = 0
    self._decoded: float | None = None
    self._served: Policy | None = None
    # Its own: whatever hangs in other threads, decodes do not wait for it.
    self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix='decode')
    self.rows.stop_sharing()

  def stop(self):
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
  async def reserve(
    self, policy: Policy | None = None, rows: int = 1
  ) -> AsyncIterator['Replica']:
    """Waits until as many rows are not reserved; see Engine.reserve."""
    first_in_line = self._lines[policy.version if policy else None]
    taken = 0
    try:
      # The locks serve whoever came first. As no more than one client of each policy
      # waits for the second, the policies get their rows in turns. Two clients that each
      # had some of their rows would wait for each other's.
      async with first_in_line, self._taking:
        while taken < rows:
          await self._places.acquire()
          taken += 1
      self._reserved += 1
      try:
        yield self
      finally:
        self._reserved -= 1
    finally:
      for _ in range(taken):
        self._places.release()

  def submit(self, request: request_lib.Request) -> request_lib.Generation:
    """Takes a request; only inside the event loop that `serve` runs in.

    Raises:
      ValueError: The text and the reply would not fit a row, one of them is empty, the
        text is being sampled, a guide is unknown, or an automaton does not fit.
    """
    request_lib.check(
      request,
      vocab_size=self.config.vocab_size,
      slots=self.sizes.slots,
      guides=self.guides,
    )
    parent, tokens = request.parent, np.asarray(request.tokens, np.int32)
    if any(r.generation.text is parent and not r.generation.done for r in self._live):
      raise ValueError(
        'The text is being sampled for another request: wait for that one, cancel it, or '
        'fork the text.'
      )
    automata = self.pool.acquire(request.automata)
    if isinstance(parent, request_lib.Text):
      text = parent
      text.append(tokens)
    else:
      prefix = parent.text.tokens[: parent.length] if parent else tokens[:0]
      text = request_lib.Text(self, np.concatenate([prefix, tokens]))
    number = next(self._numbers)
    generation = request_lib.Generation(request, text, number, self._wake.set)
    self._live.append(active_request.ActiveRequest(generation, self.guides, automata))
    # Nobody waits any more for the next request of a client that got its reply.
    self._answered -= 1
    self._wake.set()
    return generation

  def warm_up(self, on_done: Callable[[], None], automata: Sequence[types.Automaton]):
    """Compiles every program, with calls that use no row."""
    assert self.policy is not None
    sizes, params = self.sizes, self.policy.copies[self._copy_index]
    for bucket in sizes.buckets:
      for size in sizes.prefill_rows:
        zeros, no_rows = np.zeros(size, np.int32), np.full(size, sizes.rows, np.int32)
        tokens = np.zeros((size, sizes.prefill_tokens), np.int32)
        self._call_prefill(params, no_rows, zeros, tokens, zeros, bucket)
        on_done()
      # Copies are always of the most rows.
      self._call_copy(zeros, no_rows, bucket)
      on_done()
    acquired = [self.pool.acquire([automaton]) for automaton in automata]
    for bucket, size in itertools.product(sizes.decode_buckets, sizes.decode_rows):
      self._call_decode(params, *self._arguments({}, size), bucket)
      on_done()
    for state in acquired:
      self.pool.release(state)

  async def serve(self):
    """Answers requests, for ever.

    Raises:
      PreemptedError: `interrupted` returned True.
    """
    while True:
      if self.interrupted():
        raise PreemptedError
      await self._wait_for_clients()
      self._drop_done()
      if self._live:
        await self._work()
      else:
        self._decoded = self._served = None
        start = time.perf_counter()
        await self._wait(_POLL_SECONDS)
        if self._reserved:
          self.stats.idle_seconds += time.perf_counter() - start

  async def _work(self):
    """Does one piece of work; afterwards nothing here refers to its policy any more."""
    policy, chosen = self._choose_requests()
    if not chosen:
      return  # Requests of another policy run in all rows.
    if self._decoded is not None:
      self.stats.host_seconds += time.perf_counter() - self._decoded
      self._decoded = None
    params = policy.copies[self._copy_index]
    if not self._prefill(params, chosen):
      await self._decode(params, policy.step, chosen)

  async def _wait_for_clients(self):
    """Lets the clients that got replies ask for more, before the device works again."""
    await asyncio.sleep(0)
    # Environments answer from another thread, which takes a moment.
    end = time.perf_counter() + _ANSWER_SECONDS
    while self._answered > 0 and (left := end - time.perf_counter()) > 0:
      await self._wait(left)
    self._answered = 0

  async def _wait(self, seconds: float):
    """Waits until a request comes or is cancelled, at most this long."""
    self._wake.clear()
    # Not asyncio.wait_for: in Python 3.11 it may swallow a cancellation.
    poll = asyncio.get_running_loop().call_later(seconds, self._wake.set)
    try:
      await self._wake.wait()
    finally:
      poll.cancel()

  def _drop_done(self):
    """Frees the rows and automata of requests that have ended or were cancelled."""
    for running in self._live:
      if running.generation.done:
        running.release_row()
        self.pool.release(running.automata)
    self._live = [r for r in self._live if not r.generation.done]

  def _choose_requests(self) -> tuple[Policy, list[active_request.ActiveRequest]]:
    """Chooses the requests of the next piece of work, and gives them rows.

    All are for one policy; if several are asked for, the policies take turns. Requests
    for the same policy are served in their order. (Decoding texts of similar length
    together was slower: decodes read fewer slots, but prefills became more and smaller.)
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
        running.row = self.rows.assign(running.generation, policy.version)
      if running.row is not None:
        running.row.note_policy(policy.version)
        chosen.append(running)
      if len(chosen) == self.sizes.decode_rows[-1]:
        break
    return policy, chosen

  def _prefill(self, params, chosen: list[active_request.ActiveRequest]) -> bool:
    """Copies shared prefixes or prefills one chunk a row; False if nothing is missing."""
    begin = time.perf_counter()
    most = self.sizes.prefill_rows[-1]
    rows = [r.row for r in chosen if r.row and not r.row.prefilled]
    copies, waiting = self.rows.find_sources(rows, most)
    if copies:
      self._copy(copies)
      return True
    rows = [row for row in rows if row not in waiting][:most]
    if not rows:
      return False
    size = sizes_lib.round_up(self.sizes.prefill_rows, len(rows))
    indices, start, count = np.zeros((3, size), np.int32)
    indices[len(rows) :] = (
      self.sizes.rows
    )  # Past the last row: what it writes is dropped.
    tokens = np.zeros((size, self.sizes.prefill_tokens), np.int32)
    for m, row in enumerate(rows):
      chunk = row.missing[: self.sizes.prefill_tokens]
      indices[m], start[m], count[m] = row.index, row.cached, len(chunk)
      tokens[m, : len(chunk)] = chunk
      row.cached += len(chunk)
      self.stats.prefilled += len(chunk)
    bucket = sizes_lib.round_up(self.sizes.buckets, max(row.cached for row in rows))
    self._call_prefill(params, indices, start, tokens, count, bucket)
    self.stats.prefill_seconds += time.perf_counter() - begin
    return True

  def _copy(self, copies: list[tuple[rows_lib.Source, rows_lib.Row]]):
    """Copies prefixes from rows to others."""
    size = self.sizes.prefill_rows[-1]
    source, rows = np.zeros(size, np.int32), np.full(size, self.sizes.rows, np.int32)
    for m, (found, row) in enumerate(copies):
      source[m], rows[m] = found.row.index, row.index
      self.stats.shared += found.length - row.cached
      row.cached = found.length
    longest = max(found.length for found, _ in copies)
    self._call_copy(source, rows, sizes_lib.round_up(self.sizes.buckets, longest))

  async def _decode(self, params, step: int, chosen: list[active_request.ActiveRequest]):
    """Samples tokens for the rows that are prefilled, and hands out their chunks."""
    start, sizes = time.perf_counter(), self.sizes
    rows = {r: r.row for r in chosen if r.row and r.row.prefilled}
    size = sizes_lib.round_up(sizes.decode_rows, len(rows))
    longest = max(row.cached for row in rows.values())
    bucket = sizes_lib.round_up(sizes.decode_buckets, longest + sizes.steps)
    in_place = sizes.decodes_in_place(size, bucket)
    places = {
      row.index if in_place else m: running
      for m, (running, row) in enumerate(rows.items())
    }
    arguments = self._arguments(places, size)
    top_wanted = bool(arguments[0].top.any())

    def decode():
      states, out = self._call_decode(params, *arguments, bucket)
      # The log-probs of the likeliest tokens are many, and seldom asked for.
      none = np.zeros((size, sizes.steps, 0), np.int32)
      tops = jax.device_get(out[6:]) if top_wanted else (none, np.float32(none))
      return jax.device_get(states), programs_lib.Decoded(*jax.device_get(out[:6]), *tops)

    # The call is made there, too: a CPU computes what one thread asks of it in turn.
    states, out = await self._in_thread(decode)
    self._decoded = time.perf_counter()
    self.stats.decode_seconds += self._decoded - start
    self.stats.sampled += int(out.count.sum())
    self.stats.steps += int(out.count.max()) * size
    for m, running in places.items():
      # A request that was cancelled meanwhile gets nothing: its text ends where it did.
      if not running.generation.done:
        row_states = [jax.tree.map(lambda x, m=m: x[m], state) for state in states]
        running.add_chunk(out, m, step, row_states)
        self._answered += running.generation.done

  def _arguments(self, places: dict[int, active_request.ActiveRequest], size: int):
    return active_request.make_decode_arguments(
      places, size, self.guides, self.sizes.rows
    )

  def _in_thread(self, fn: Callable[[], Any]) -> asyncio.Future:
    return asyncio.get_running_loop().run_in_executor(self._thread, fn)

  def _call_copy(self, source, rows, bucket):
    with sharding.use_mesh(self.mesh):
      self.cache = programs_lib.copy(self.cache, source, rows, bucket=bucket)

  def _call_prefill(self, params, rows, start, tokens, count, bucket):
    with sharding.use_mesh(self.mesh):
      self.cache = programs_lib.prefill(
        params,
        self.cache,
        *(rows, start, tokens, count),
        config=self.config,
        bucket=bucket,
      )

  def _call_decode(self, params, places, guided, states, bucket):
    with sharding.use_mesh(self.mesh):
      self._load_automata()
      self.cache, states, out = programs_lib.decode(
        params,
        self.cache,
        places,
        guided,
        states,
        tuple(self._guide_params.values()),
        config=self.config,
        guides=self.guides,
        steps=self.sizes.steps,
        bucket=bucket,
        in_place=self.sizes.decodes_in_place(len(places.rows), bucket),
      )
    return states, out

  def _load_automata(self):
    """Puts the automata on the device, if one came in since the last decode."""
    entries = self.pool.entries
    if entries is not self._loaded:
      self._loaded = entries
      self._tables = automaton_lib.make_tables(entries, self._tables)
      self._guide_params[automaton_lib.AUTOMATA] = jax.device_put(self._tables)
