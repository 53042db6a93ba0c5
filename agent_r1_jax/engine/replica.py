"""A replica: one copy of the policy, the rows of its DecodeState, and who is next there.

Whoever wants a reply says so on its Row; `serve` feeds and decodes those rows and
resolves their futures. A decode is awaited in a thread, so tools run while the device
does.
"""

import asyncio
import bisect
from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import itertools
import time
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
import numpy as np

from agent_r1_jax import sharding
from agent_r1_jax.engine import grammar as grammar_lib
from agent_r1_jax.engine import sampling as sampling_lib
from agent_r1_jax.engine import state as state_lib
from agent_r1_jax.engine import stop as stop_lib
from agent_r1_jax.models import decoder

# How long a call for the end goes unheard where all rows wait for tools.
_POLL_SECONDS = 0.5
# After a reply the device waits so long at most for what its episode asks next.
_ANSWER_SECONDS = 0.002


class PreemptedError(Exception):
  """The process is to end: the replies that were asked for were not waited for."""


class Sizes(NamedTuple):
  """Of everything that is compiled; see Driver for what each costs.

  Attributes:
    rows: Texts at a time (B).
    slots: Most tokens of a text (S).
    steps: Tokens of one decode segment.
    feed_tokens: Tokens of a row in one feed (T).
    feed_rows: Rows of one feed, ascending: the least that holds enough is taken.
    decode_rows: Rows of one decode, likewise.
    buckets: Slots that a cache read covers, likewise.
  """

  rows: int
  slots: int
  steps: int
  feed_tokens: int
  feed_rows: list[int]
  decode_rows: list[int]
  buckets: list[int]

  @property
  def programs(self) -> int:
    """The most programs that one `sampling` compiles."""
    return len(self.buckets) * (1 + len(self.feed_rows)) + self.decodes + 1

  @property
  def decodes(self) -> int:
    """Those of them that another `sampling` compiles again."""
    return len(self.buckets) * len(self.decode_rows)


class Reply(NamedTuple):
  """What the policy said; n tokens.

  Attributes:
    tokens: int32 [n].
    logprobs: float32 [n].
    policy_steps: int32 [n], the step of the policy that chose each.
    stopped: False if it ran out of tokens.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  policy_steps: np.ndarray
  stopped: bool


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
    replica: Whose row it is.
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
  replica: 'Replica'
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
    if self.length + len(tokens) + max_tokens > self.replica.sizes.slots:
      raise ValueError(
        f'A text of {self.length} + {len(tokens)} tokens and a reply of {max_tokens} do '
        f'not fit a row of {self.replica.sizes.slots} slots: raise slots or shorten the '
        'reply.'
      )
    self.pending = np.asarray(tokens, np.int32)
    self.asked = self.pending.tobytes() if self.length == 0 else None
    self.budget, self.parts = max_tokens, []
    self.turn = next(self.replica.turns)
    self.replica.answered -= 1
    self.future = asyncio.get_running_loop().create_future()
    self.replica.wake.set()
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
    tokens, logprobs, steps = (
      np.concatenate([part[i] for part in self.parts]) for i in range(3)
    )
    return Reply(tokens, logprobs, steps, part.stopped)

  def _leave(self):
    """Wants nothing more; after a cancellation, no other row may wait for its prompt."""
    self.future, self.asked, self.pending = None, None, self.pending[:0]
    if not self.holds_prompt:
      self.prompt = None


class Replica:
  """One copy of the policy at work.

  Attributes:
    params: The copy.
    policy_step: The updates that it has seen.
    sampling: How tokens are chosen.
    grammar: What a reply may say; None allows all.
    interrupted: Asked before each piece of work; True ends `serve`.
    state: On the device.
    rows: The host's record of each row.
    free: The rows that no episode has.
    answered: Replies of the last decode after which nobody has asked for another yet.
  """

  def __init__(
    self,
    config: decoder.DecoderConfig,
    stop: stop_lib.Stop,
    sizes: Sizes,
    stats: Stats,
    mesh: Mesh | None = None,
  ):
    """Allocates the cache.

    Args:
      config: Of the policy.
      stop: What ends a reply.
      sizes: Of programs and state.
      stats: Where it counts.
      mesh: The chips that share this copy; None is JAX's default device.
    """
    self.config, self.stop, self.sizes, self.stats = config, stop, sizes, stats
    self.mesh = mesh
    self.params: decoder.Params = {}
    self.policy_step = 0
    self._handed: tuple[decoder.Params, int] | None = None
    self.sampling = sampling_lib.ON_POLICY
    self.grammar: grammar_lib.Grammar | None = None
    self.interrupted: Callable[[], bool] = lambda: False
    self.state = state_lib.empty(config, sizes.rows, sizes.slots)
    if mesh is not None:
      self.state = sharding.cached(self.state, mesh)
    self.rows = [Row(i, self) for i in range(sizes.rows)]
    self.turns = itertools.count()
    self.begin()

  def begin(self):
    """Before it serves: all rows are free."""
    self.wake, self.free = asyncio.Event(), asyncio.Queue()
    self.answered, self._decoded = 0, None
    # Its own: whatever hangs in other threads, decodes do not wait for it.
    self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix='decode')
    self.forget_prompts()
    for row in self.rows:
      self.free.put_nowait(row)

  def end(self):
    """After it served: waits for a decode under way."""
    self._thread.shutdown()

  def hand(self, params: decoder.Params, policy_step: int):
    """Another policy, which its next piece of work is done with; from any thread.

    Texts under way keep the cache that they have; those that begin share none of it.
    """
    self._handed = params, policy_step

  def forget_prompts(self):
    """Nobody forks what rows hold: so runs do not depend on the ones before."""
    for row in self.rows:
      row.prompt = None

  def forget_policy(self):
    """Frees it; `hand` must follow."""
    self.params, self._handed = {}, None

  def warm_up(
    self, on_done: Callable[[], None], also: Sequence[sampling_lib.Sampling] = ()
  ):
    """Compiles every program, on places without rows.

    Args:
      on_done: Called after each.
      also: Other ways in which tokens will be chosen.
    """
    sizes = self.sizes
    nobody = lambda size: np.full(size, sizes.rows, np.int32)
    zeros = lambda size: np.zeros(size, np.int32)
    ones = lambda size: np.ones(size, np.int32)
    self._take_over()
    self._call_reset({})
    on_done()
    for bucket in sizes.buckets:
      size = sizes.feed_rows[-1]
      self._call_fork(zeros(size), nobody(size), ones(size), zeros(size), bucket)
      on_done()
      for size in sizes.feed_rows:
        tokens = np.zeros((size, sizes.feed_tokens), np.int32)
        self._call_feed(nobody(size), tokens, ones(size), bucket)
        on_done()
    own = self.sampling
    for sampling, bucket in itertools.product((own, *also), sizes.buckets):
      self.sampling = sampling
      for size in sizes.decode_rows:
        self._call_decode(nobody(size), zeros(size), bucket)
        on_done()
    self.sampling = own

  async def serve(self):
    """Feeds and decodes whichever rows want it, for ever.

    Raises:
      PreemptedError: `interrupted` said so.
    """
    while True:
      if self.interrupted():
        raise PreemptedError
      await self._let_ask()
      self._take_over()
      waiting = [row for row in self.rows if row.future is not None]
      if not waiting:
        self._decoded = None
        await self._idle()
        continue
      waiting.sort(key=lambda row: row.turn)
      # What the others ask for is read when their turn comes: more of them in one feed.
      waiting = waiting[: self.sizes.decode_rows[-1]]
      self._reset(waiting)
      if self._decoded is not None:
        self.stats.host_seconds += time.perf_counter() - self._decoded
        self._decoded = None
      if not (self._fork(waiting) or self._feed(waiting)):
        await self._decode(waiting)

  async def _let_ask(self):
    """Whoever can go on at once does, and asks, before the device works again."""
    await asyncio.sleep(0)
    # Environments answer from another thread, which takes a moment.
    end = time.perf_counter() + _ANSWER_SECONDS
    while self.answered > 0 and (left := end - time.perf_counter()) > 0:
      await self._woken(left)
    self.answered = 0

  async def _woken(self, seconds: float):
    """Until somebody asks for a reply, or the time is over."""
    self.wake.clear()
    # Not asyncio.wait_for: in Python 3.11 it may swallow a cancellation.
    poll = asyncio.get_running_loop().call_later(seconds, self.wake.set)
    try:
      await self.wake.wait()
    finally:
      poll.cancel()

  async def _idle(self):
    start = time.perf_counter()
    await self._woken(_POLL_SECONDS)
    if self.free.qsize() < len(self.rows):
      self.stats.idle_seconds += time.perf_counter() - start

  def _take_over(self):
    """Goes on with what was handed last."""
    if (handed := self._handed) is not None:
      if handed[0] is not self.params:
        self.forget_prompts()
      self.params, self.policy_step = handed

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
    holders = {row.prompt: row.index for row in self.rows if row.holds_prompt}
    size = self.sizes.feed_rows[-1]
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
    fed = self._unshared(pending)[: self.sizes.feed_rows[-1]]
    size, chunk = _least(self.sizes.feed_rows, len(fed)), self.sizes.feed_tokens
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
    start, step = time.perf_counter(), self.policy_step
    running = [(row, row.future) for row in waiting if row.future]
    size = _least(self.sizes.decode_rows, len(running))
    rows, budget = np.full(size, len(self.rows), np.int32), np.zeros(size, np.int32)
    for m, row in enumerate(waiting):
      rows[m], budget[m] = row.index, row.budget
    bucket = self._bucket(max(row.length for row in waiting) + self.sizes.steps)
    # The call is made there, too: a CPU computes what one thread asks of it in turn.
    decode = lambda: jax.device_get(self._call_decode(rows, budget, bucket))
    tokens, logprobs, count, stopped = await self._in_thread(decode)
    self._decoded = time.perf_counter()
    self.stats.decode_seconds += self._decoded - start
    self.stats.sampled += int(count.sum())
    self.stats.steps += int(count.max()) * size
    for m, (row, future) in enumerate(running):
      # Who asked during the decode, or took over a row that was left, has nothing here.
      if row.future is not future or future.done():
        continue
      n = count[m]
      part = tokens[m, :n], logprobs[m, :n], np.full(n, step, np.int32)
      reply = row.wrote(Reply(*part, bool(stopped[m])))
      if reply is not None:
        row.future = None
        future.set_result(reply)
        self.answered += 1

  def _in_thread(self, fn: Callable[[], Any]) -> asyncio.Future:
    return asyncio.get_running_loop().run_in_executor(self._thread, fn)

  def _call_reset(self, fresh: dict[int, np.ndarray]):
    chosen = np.zeros(len(self.rows), bool)
    keys = np.zeros((len(self.rows), 2), np.uint32)
    for index, row_key in fresh.items():
      chosen[index], keys[index] = True, row_key
    with sharding.use(self.mesh):
      self.state = state_lib.reset(self.state, chosen, keys)

  def _call_fork(self, source, rows, count, last, bucket):
    with sharding.use(self.mesh):
      self.state = state_lib.fork(self.state, source, rows, count, last, bucket=bucket)

  def _call_feed(self, rows, tokens, count, bucket):
    with sharding.use(self.mesh):
      self.state = state_lib.feed(
        self.params, self.state, rows, tokens, count, config=self.config, bucket=bucket
      )

  def _call_decode(self, rows, budget, bucket) -> state_lib.Decoded:
    with sharding.use(self.mesh):
      self.state, out = state_lib.decode(
        self.params,
        self.state,
        rows,
        budget,
        self.stop,
        self.grammar,
        config=self.config,
        sampling=self.sampling,
        steps=self.sizes.steps,
        bucket=bucket,
      )
    return out

  def _bucket(self, length: int) -> int:
    return _least(self.sizes.buckets, min(length, self.sizes.slots))


def _least(sizes: list[int], n: int) -> int:
  """The least of ascending sizes that holds n."""
  return sizes[bisect.bisect_left(sizes, n)]
