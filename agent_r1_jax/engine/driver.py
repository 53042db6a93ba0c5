"""The driver: keeps the rows of a DecodeState busy for many episodes at once.

Episodes are coroutines. Each takes a row, and in turns awaits `Row.generate` and its
tools; the driver feeds and decodes whichever rows want it and resolves their futures. A
decode is awaited in a thread, so tools run while the device does.
"""

import asyncio
import bisect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent import futures
import contextlib
import dataclasses
import hashlib
import itertools
import time
from typing import NamedTuple

import jax
import numpy as np

from agent_r1_jax.engine import grammar as grammar_lib
from agent_r1_jax.engine import sampling as sampling_lib
from agent_r1_jax.engine import state as state_lib
from agent_r1_jax.engine import stop as stop_lib
from agent_r1_jax.models import decoder


class Reply(NamedTuple):
  """What the policy said: tokens and log-probs [n]; `stopped` is False if it ran out."""

  tokens: np.ndarray
  logprobs: np.ndarray
  stopped: bool


def key(*parts: int | str) -> np.ndarray:
  """A row's key, uint32 [2], from what identifies its trajectory (seed, task, sample)."""
  digest = hashlib.sha256('/'.join(map(str, parts)).encode()).digest()
  return np.frombuffer(digest[:8], np.uint32).copy()


@dataclasses.dataclass
class Stats:
  """Counts since the driver was made.

  Attributes:
    fed: Tokens computed by feeds.
    forked: Tokens that a fork spared.
    sampled: Tokens sampled.
    steps: Row-steps of decoding, idle rows included.
    feed_seconds: Host time of feeds; the device's is part of the decode that follows.
    decode_seconds: Wall time of decodes.
    idle_seconds: Wall time of waiting for tools with nothing to compute.
    host_seconds: Wall time between a decode and what the device was asked for next,
      while rows wanted it.
  """

  fed: int = 0
  forked: int = 0
  sampled: int = 0
  steps: int = 0
  feed_seconds: float = 0.0
  decode_seconds: float = 0.0
  idle_seconds: float = 0.0
  host_seconds: float = 0.0


@dataclasses.dataclass
class Row:
  """The host's record of one row; episodes use `length`, `restart` and `generate`.

  Attributes:
    index: Of the row in the DecodeState.
    driver: Whose row it is.
    length: Tokens of the text.
    fresh_key: What the device's row is to be reset with before anything else.
    asked: The prompt that the still empty row waits for, as bytes.
    prompt: The prompt that the text begins with, or will once it is fed.
    pending: Tokens that are still to be fed.
    budget: Tokens that the reply may still have.
    turn: How many replies had been asked for before; first come, first served.
    parts: The reply so far, a part a decode segment.
    future: Of the reply; None while the episode wants none.
  """

  index: int
  driver: 'Driver'
  length: int = 0
  fresh_key: np.ndarray | None = None
  asked: bytes | None = None
  prompt: bytes | None = None
  pending: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  budget: int = 0
  turn: int = 0
  parts: list[Reply] = dataclasses.field(default_factory=list)
  future: asyncio.Future | None = None

  def restart(self, row_key: np.ndarray):
    """Empties the row's text and gives it a key."""
    self.length, self.asked, self.prompt = 0, None, None
    self.fresh_key = row_key

  async def generate(self, tokens: np.ndarray, max_tokens: int) -> Reply:
    """Appends `tokens` to the text, samples until a stop or `max_tokens`.

    Where this is cancelled, the text is unknown: nothing but `restart` may follow.

    Raises:
      ValueError: The text and the reply would not fit the row, or one of them is empty.
    """
    if len(tokens) == 0 or max_tokens < 1:
      raise ValueError(
        f'{len(tokens)} tokens to feed, {max_tokens} to sample: both need 1.'
      )
    if self.length + len(tokens) + max_tokens > self.driver.slots:
      raise ValueError(
        f'A text of {self.length} + {len(tokens)} tokens and a reply of {max_tokens} do '
        f'not fit a row of {self.driver.slots} slots: raise slots or shorten the reply.'
      )
    self.pending = np.asarray(tokens, np.int32)
    self.asked = self.pending.tobytes() if self.length == 0 else None
    self.budget, self.parts = max_tokens, []
    self.turn = next(self.driver.turns)
    self.future = asyncio.get_running_loop().create_future()
    self.driver.wake.set()
    try:
      return await self.future
    finally:
      self._leave()

  @property
  def holds_prompt(self) -> bool:
    """The prompt has been fed to its end."""
    return self.prompt is not None and 4 * self.length >= len(self.prompt)

  def read(self, tokens: int):
    """Notes that the next pending tokens are part of the text."""
    if self.asked is not None:
      self.prompt, self.asked = self.asked, None
    self.length += tokens
    self.pending = self.pending[tokens:]

  def wrote(self, part: Reply) -> Reply | None:
    """Notes what a segment sampled; gives the whole reply if that ended it."""
    self.parts.append(part)
    self.length += len(part.tokens)
    self.budget -= len(part.tokens)
    if not part.stopped and self.budget:
      return None
    tokens, logprobs, _ = zip(*self.parts, strict=True)
    return Reply(np.concatenate(tokens), np.concatenate(logprobs), part.stopped)

  def _leave(self):
    """Wants nothing more; after a cancellation, no other row may wait for its prompt."""
    self.future, self.asked, self.pending = None, None, self.pending[:0]
    if not self.holds_prompt:
      self.prompt = None


class Driver:
  """Runs episodes on `rows` rows of `slots` tokens.

  Attributes:
    params: Of the policy; assign new ones between runs.
    sampling: How tokens are chosen; may be changed between runs.
    grammar: What a reply may say; may be changed between runs. None allows all.
    stats: Counts so far.
  """

  def __init__(
    self,
    config: decoder.DecoderConfig,
    params: decoder.Params,
    *,
    stop: stop_lib.Stop,
    sampling: sampling_lib.Sampling = sampling_lib.ON_POLICY,
    grammar: grammar_lib.Grammar | None = None,
    rows: int = 64,
    slots: int = 1024,
    steps: int = 32,
    width: int | None = None,
    feed_rows: int = 16,
    feed_tokens: int = 64,
    bucket: int = 256,
    narrow: bool = True,
  ):
    """Allocates the cache.

    Args:
      config: Of the policy.
      params: Of the policy.
      stop: What ends a reply.
      sampling: How tokens are chosen.
      grammar: What a reply may say. It makes the samples off-policy.
      rows: Texts at a time (B).
      slots: Most tokens of a text (S).
      steps: Tokens of one decode segment: what a row that has been answered by its tool
        waits for, at most.
      width: Most rows that are decoded at a time; all by default. With slow tools, twice
        as many rows as this keep the device busy.
      feed_rows: Rows of one feed (M).
      feed_tokens: Tokens of one feed (T).
      bucket: Cache reads are rounded up to this, twice this, four times this ...
      narrow: Whether few rows are fed and decoded by programs for a quarter of them.

    A log-prob's last bits depend on the program that computed it: runs whose tools take
    their time repeat to the last bit only with bucket = slots and narrow = False.
    """
    width = rows if width is None else min(width, rows)
    sizes = {'rows': rows, 'slots': slots, 'steps': steps, 'bucket': bucket}
    sizes['width'] = width
    for name, size in (
      sizes | {'feed_rows': feed_rows, 'feed_tokens': feed_tokens}
    ).items():
      if size < 1:
        raise ValueError(f'{name} is {size}; it must be at least 1.')
    self.config, self.params, self.stop, self.sampling = config, params, stop, sampling
    self.grammar = grammar
    self.slots, self.steps, self.feed_tokens = slots, steps, feed_tokens
    self.buckets = [b for i in range(32) if (b := bucket << i) < slots] + [slots]
    widths = lambda n: sorted({max(1, n // 4), n}) if narrow else [n]
    self.decode_rows, self.feed_rows = widths(width), widths(min(feed_rows, rows))
    self.state = state_lib.empty(config, rows, slots)
    self.rows = [Row(i, self) for i in range(rows)]
    self.stats = Stats()
    self.wake, self.turns = asyncio.Event(), itertools.count()
    self._free: asyncio.Queue[Row] = asyncio.Queue()
    self._decoded: float | None = None

  def run(self, episodes: Iterable[Coroutine]) -> list:
    """Runs episodes to their ends and returns their results in order.

    The first exception of an episode or of the engine cancels the others and is raised.
    """
    if not _in_a_loop():
      return asyncio.run(self._run(episodes))
    # As in a notebook, whose own event loop holds this thread.
    with futures.ThreadPoolExecutor(1) as thread:
      return thread.submit(asyncio.run, self._run(episodes)).result()

  @property
  def programs(self) -> int:
    """The most programs that runs with one `sampling` compile."""
    return len(self.buckets) * (1 + len(self.feed_rows) + len(self.decode_rows)) + 1

  def warm_up(self, on_done: Callable[[int, int], None] = lambda done, all: None):
    """Compiles every program, on places without rows; on_done(compiled, programs)."""
    done = itertools.count(1)
    nobody = lambda size: np.full(size, len(self.rows), np.int32)
    zeros = lambda size: np.zeros(size, np.int32)
    ones = lambda size: np.ones(size, np.int32)
    self._call_reset({})
    on_done(next(done), self.programs)
    for bucket in self.buckets:
      size = self.feed_rows[-1]
      self._call_fork(zeros(size), nobody(size), ones(size), zeros(size), bucket)
      on_done(next(done), self.programs)
      for size in self.feed_rows:
        tokens = np.zeros((size, self.feed_tokens), np.int32)
        self._call_feed(nobody(size), tokens, ones(size), bucket)
        on_done(next(done), self.programs)
      for size in self.decode_rows:
        self._call_decode(nobody(size), zeros(size), bucket)
        on_done(next(done), self.programs)

  @contextlib.asynccontextmanager
  async def row(self, row_key: np.ndarray) -> AsyncIterator[Row]:
    """An empty row for one episode; waits until one is free."""
    row = await self._free.get()
    row.restart(row_key)
    try:
      yield row
    finally:
      self._free.put_nowait(row)

  async def _run(self, episodes):
    self.wake, self._free = asyncio.Event(), asyncio.Queue()
    for row in self.rows:
      row.prompt = None  # It was computed with other params, perhaps.
      self._free.put_nowait(row)
    try:
      async with asyncio.TaskGroup() as group:
        serving = group.create_task(self._serve())
        tasks = [group.create_task(e) for e in episodes]
        await asyncio.gather(*tasks)
        serving.cancel()
    except BaseExceptionGroup as error:
      # One failure cancels the rest; the group around it says nothing more.
      raise error.exceptions[0] from None
    return [task.result() for task in tasks]

  async def _serve(self):
    while True:
      # Whoever can go on without waiting does, and asks, before the device works again.
      await asyncio.sleep(0)
      waiting = [row for row in self.rows if row.future is not None]
      if not waiting:
        self._decoded = None
        await self._idle()
        continue
      waiting.sort(key=lambda row: row.turn)
      self._reset(waiting)
      if self._decoded is not None:
        self.stats.host_seconds += time.perf_counter() - self._decoded
        self._decoded = None
      if not (self._fork(waiting) or self._feed(waiting)):
        await self._decode(waiting)

  async def _idle(self):
    start = time.perf_counter()
    self.wake.clear()
    await self.wake.wait()
    self.stats.idle_seconds += time.perf_counter() - start

  def _reset(self, waiting: list[Row]):
    fresh = {}
    for row in waiting:
      if row.fresh_key is not None:
        fresh[row.index], row.fresh_key = row.fresh_key, None
    if fresh:
      self._call_reset(fresh)

  def _fork(self, waiting: list[Row]) -> bool:
    """Copies prompts that other rows hold; False if there is none to copy."""
    asking = [row for row in waiting if row.asked is not None]
    if not asking:
      return False
    holders = {row.prompt: row.index for row in self.rows if row.holds_prompt}
    size = self.feed_rows[-1]
    forks = [row for row in asking if row.asked in holders][:size]
    if not forks:
      return False
    source, last = np.zeros((2, size), np.int32)
    rows, count = np.full(size, len(self.rows), np.int32), np.ones(size, np.int32)
    for m, row in enumerate(forks):
      source[m], rows[m] = holders[row.asked], row.index
      count[m], last[m] = len(row.pending), row.pending[-1]
      self.stats.forked += len(row.pending)
      row.read(len(row.pending))
    self._call_fork(source, rows, count, last, self._bucket(int(count.max())))
    return True

  def _feed(self, waiting: list[Row]) -> bool:
    """Feeds one chunk to the rows that have something to read; False if none has."""
    pending = [row for row in waiting if len(row.pending)]
    if not pending:
      return False
    start = time.perf_counter()
    fed = self._unshared(pending)[: self.feed_rows[-1]]
    size, chunk = _least(self.feed_rows, len(fed)), self.feed_tokens
    rows, count = np.full(size, len(self.rows), np.int32), np.ones(size, np.int32)
    tokens = np.zeros((size, chunk), np.int32)
    for m, row in enumerate(fed):
      part = row.pending[:chunk]
      rows[m], count[m], tokens[m, : len(part)] = row.index, len(part), part
      self.stats.fed += len(part)
      row.read(len(part))
    self._call_feed(rows, tokens, count, self._bucket(max(row.length for row in fed)))
    self.stats.feed_seconds += time.perf_counter() - start
    return True

  def _unshared(self, pending: list[Row]) -> list[Row]:
    """Of the rows that ask for one prompt the first; none if another is being fed it."""
    taken = {row.prompt for row in self.rows} - {None}
    chosen = []
    for row in pending:
      if row.asked is None or row.asked not in taken:
        chosen.append(row)
        taken.add(row.asked)
    return chosen

  async def _decode(self, waiting: list[Row]):
    start = time.perf_counter()
    waiting = waiting[: self.decode_rows[-1]]
    running = [(row, row.future) for row in waiting if row.future]
    size = _least(self.decode_rows, len(running))
    rows, budget = np.full(size, len(self.rows), np.int32), np.zeros(size, np.int32)
    for m, row in enumerate(waiting):
      rows[m], budget[m] = row.index, row.budget
    longest = max(row.length for row in waiting)
    out = self._call_decode(rows, budget, self._bucket(longest + self.steps))
    tokens, logprobs, count, stopped = await asyncio.to_thread(jax.device_get, out)
    self._decoded = time.perf_counter()
    self.stats.decode_seconds += self._decoded - start
    self.stats.sampled += int(count.sum())
    self.stats.steps += int(count.max()) * size
    for m, (row, future) in enumerate(running):
      # Who asked during the decode, or took over a row that was left, has nothing here.
      if row.future is not future or future.done():
        continue
      n = count[m]
      reply = row.wrote(Reply(tokens[m, :n], logprobs[m, :n], bool(stopped[m])))
      if reply is not None:
        row.future = None
        future.set_result(reply)

  def _call_reset(self, fresh: dict[int, np.ndarray]):
    chosen = np.zeros(len(self.rows), bool)
    keys = np.zeros((len(self.rows), 2), np.uint32)
    for index, row_key in fresh.items():
      chosen[index], keys[index] = True, row_key
    self.state = state_lib.reset(self.state, chosen, keys)

  def _call_fork(self, source, rows, count, last, bucket):
    self.state = state_lib.fork(self.state, source, rows, count, last, bucket=bucket)

  def _call_feed(self, rows, tokens, count, bucket):
    self.state = state_lib.feed(
      self.params, self.state, rows, tokens, count, config=self.config, bucket=bucket
    )

  def _call_decode(self, rows, budget, bucket) -> state_lib.Decoded:
    self.state, out = state_lib.decode(
      self.params,
      self.state,
      rows,
      budget,
      self.stop,
      self.grammar,
      config=self.config,
      sampling=self.sampling,
      steps=self.steps,
      bucket=bucket,
    )
    return out

  def _bucket(self, length: int) -> int:
    return _least(self.buckets, min(length, self.slots))


def _least(sizes: list[int], n: int) -> int:
  """The least of ascending sizes that holds n."""
  return sizes[bisect.bisect_left(sizes, n)]


def _in_a_loop() -> bool:
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    return False
  return True
