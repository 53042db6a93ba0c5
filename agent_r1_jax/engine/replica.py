"""A replica: one key-value cache, and the scheduler of the requests that use it.

Clients submit requests to the engine's policy, or to another policy that they name.
`serve` assigns cache rows to their sequences, prefills the tokens that are not cached
yet, decodes some tokens for all prefilled rows, and adds them to the replies. Decodes run
in their own thread, so that tools run at the same time as the device.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import functools
import itertools
import time
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.engine import active_request, drafts, protocol
from agent_r1_jax.engine import adapters as adapters_lib
from agent_r1_jax.engine import device as device_lib
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.engine import rows as rows_lib
from agent_r1_jax.engine import sizes as sizes_lib
from agent_r1_jax.models import decoder, kv_cache

# The interval at which `serve` calls `interrupted` while there is nothing to compute.
_POLL_SECONDS = 0.5
# The maximum wait for the next requests of clients that have just received a reply.
_ANSWER_SECONDS = 0.002


class Replica(protocol.AnyReplica):
  """One cache on the chips of one copy of the policy; serves the requests sent to it.

  Attributes:
    policy: Samples the requests that name no other policy; any thread may assign it.
    device: The cache on the chips, with the guides and automata that requests use.
    rows: The host's record of the sequence in each row of the cache.
  """

  def __init__(
    self,
    config: decoder.DecoderConfig,
    sizes: sizes_lib.ProgramSizes,
    guides: Mapping[guide_lib.Guide, Any],
    stats: protocol.Stats,
    adapters: adapters_lib.AdapterTable,
    mesh: Mesh | None = None,
    copy_index: int = 0,
  ):
    """Allocates the cache on `mesh`, the chips of Policy.copies[copy_index]."""
    self.config, self.sizes, self.stats = config, sizes, stats
    self._adapters = adapters
    self._copy_index = copy_index
    self.policy: protocol.Policy | None = None
    ring = sizes.window_slots < sizes.slots
    max_rewind = sizes.window_slots - config.window if ring else None
    states = kv_cache.STATES if config.recurrent else 0
    self.rows = rows_lib.CacheRows(sizes.rows, sizes.slots, max_rewind, states)
    self.device = device_lib.Device(config, sizes, guides, mesh)
    self.index = drafts.Index() if sizes.drafts else None
    self._request_numbers = itertools.count()
    self.start()

  def start(self):
    """Resets the state of `serve`; call it in the event loop that will run `serve`."""
    # The queued and active requests, in the order of `submit`; and an event that ends
    # `_wait`, set when a request is submitted or cancelled.
    self._active: list[active_request.ActiveRequest] = []
    self._changed = asyncio.Event()
    # The policy of the last prefill, copy or decode, so that policies take turns; None
    # means the engine's own.
    self._last_policy: protocol.Policy | None = None
    # The number of replies that ended in the last decode, minus the requests submitted
    # since: while it is above 0, `_wait_for_clients` waits for more.
    self._unanswered_replies = 0
    # When the last decode ended, for Stats.host_seconds; None once counted.
    self._decode_ended_at: float | None = None
    # Runs decodes and nothing else, so that no user's code delays them.
    self._decode_thread = futures.ThreadPoolExecutor(1, thread_name_prefix='decode')
    super().start()
    self.stop_sharing()

  def stop_sharing(self):
    """Stops new sequences from sharing keys and values with existing ones."""
    self.rows.stop_sharing()

  def stop(self):
    """Waits for any running decode, and cancels all requests."""
    self._decode_thread.shutdown()
    for active in self._active:
      active.generation.cancel()
    self._drop_done()

  @property
  def load(self) -> int:
    """The number of requests that are queued or active."""
    return sum(not active.generation.done for active in self._active)

  def submit(self, request: request_lib.Request) -> request_lib.Generation:
    """Queues a request; call it only inside the event loop that `serve` runs in.

    Raises:
      ValueError: The tokens and the reply would not fit a row, or either is empty; the
        sequence is being sampled; a guide or an adapter is unknown; or an automaton does
        not fit.
    """
    self.device.check(request)
    parent, prompt = request.parent, request.prompt
    if any(
      a.generation.sequence is parent and not a.generation.done for a in self._active
    ):
      raise ValueError(
        'The sequence is being sampled for another request: wait for that one, cancel '
        'it, or fork the sequence.'
      )
    slot = self._adapters.acquire(request.adapter)
    try:
      automata = self.device.pool.acquire(request.automata)
    except ValueError:
      self._adapters.release(slot)
      raise
    sequence = self._extend_sequence(request)
    self.device.add(sequence, request)
    if self.index:
      self.index.add(sequence.tokens, len(prompt))
    number = next(self._request_numbers)
    generation = request_lib.Generation(request, sequence, number, self._changed.set)
    self._active.append(
      active_request.ActiveRequest(generation, self.device.guides, automata, slot)
    )
    self._unanswered_replies -= 1
    self._changed.set()
    return generation

  def warm_up(self, on_done: Callable[[], None], automata: Sequence[types.Automaton]):
    """Compiles every program; see Device.warm_up."""
    assert self.policy is not None
    params = self.policy.copies[self._copy_index]
    select = functools.partial(self._adapters.slots.select, self._copy_index)
    self.device.warm_up(params, on_done, automata, select)

  async def serve(self):
    """Answers requests until it is cancelled.

    Raises:
      PreemptedError: `interrupted` returned True.
    """
    while True:
      if self.interrupted():
        raise protocol.PreemptedError
      await self._wait_for_clients()
      self._drop_done()
      if self._active:
        await self._work()
      else:
        self._decode_ended_at = self._last_policy = None
        start = time.perf_counter()
        await self._wait(_POLL_SECONDS)
        if self._reservations.count:
          self.stats.idle_seconds += time.perf_counter() - start

  async def _work(self):
    """Runs one prefill, copy or decode.

    Separate from `serve`, whose locals would keep old policies in memory.
    """
    slots = self._adapters.slots
    turns = active_request.take_turns(self._active)
    candidates = [active for active in turns if active.can_run(self.device.fits)]
    if not candidates:
      await self._wait(_POLL_SECONDS)  # Larger programs are being compiled for them.
      return
    policy, chosen = self._choose_requests(slots, candidates)
    if not chosen:
      return  # Requests of another policy occupy all rows.
    if self._decode_ended_at is not None:
      self.stats.host_seconds += time.perf_counter() - self._decode_ended_at
      self._decode_ended_at = None
    params = policy.copies[self._copy_index]
    if not await self._prefill(params, policy.version, slots, chosen):
      await self._decode(params, policy.step, slots, chosen)

  async def _wait_for_clients(self):
    """Waits briefly for the next requests of clients whose replies have just ended.

    These requests can then be batched in one prefill and decode.
    """
    await asyncio.sleep(0)
    # Environments answer from another thread, with a short delay.
    deadline = time.perf_counter() + _ANSWER_SECONDS
    while self._unanswered_replies > 0 and time.perf_counter() < deadline:
      await self._wait(deadline - time.perf_counter())
    self._unanswered_replies = 0

  async def _wait(self, seconds: float):
    """Waits until a request is submitted or cancelled, or for at most `seconds`."""
    self._changed.clear()
    # Not asyncio.wait_for: in Python 3.11 it may swallow a cancellation.
    poll = asyncio.get_running_loop().call_later(seconds, self._changed.set)
    try:
      await self._changed.wait()
    finally:
      poll.cancel()

  def _drop_done(self):
    """Frees the rows, automata and adapters of requests that are done."""
    for active in self._active:
      if active.generation.done:
        active.release_row()
        self.device.pool.release(active.automata)
        self._adapters.release(active.slot)
    self._active = [active for active in self._active if not active.generation.done]

  def _choose_requests(
    self,
    slots: adapters_lib.Slots,
    candidates: Sequence[active_request.ActiveRequest],
  ) -> tuple[protocol.Policy, list[active_request.ActiveRequest]]:
    """Chooses the requests of the next prefill, copy or decode, and assigns rows to them.

    All chosen requests are for one policy; several policies take turns. Requests for the
    same policy are served in order. (Batching sequences of similar length was slower:
    decodes read fewer slots, but prefills became smaller and more frequent.)
    """
    policies = list(dict.fromkeys(a.generation.request.policy for a in candidates))
    last = self._last_policy
    next_index = policies.index(last) + 1 if last in policies else 0
    self._last_policy = policies[next_index % len(policies)]
    policy = self._last_policy or self.policy
    assert policy is not None
    chosen = []
    for active in candidates:
      if active.generation.request.policy is not self._last_policy:
        continue
      weights = slots.weights[active.slot]
      version = policy.version, weights.version
      if active.row is None:
        active.row = self.rows.assign(active.generation, version, weights.adapter)
      if active.row is not None:
        active.row.note_policy(version)
        chosen.append(active)
      if len(chosen) == self.sizes.decode_rows[-1]:
        break
    return policy, chosen

  async def _prefill(
    self,
    params,
    version: int,
    slots: adapters_lib.Slots,
    chosen: list[active_request.ActiveRequest],
  ) -> bool:
    """Copies shared prefixes if there are any, else prefills one chunk of each row.

    Returns:
      Whether there was anything to copy or to prefill.
    """
    start_time, sizes = time.perf_counter(), self.sizes
    most = sizes.prefill_rows[-1]
    missing = {a.row: a for a in chosen if a.row and not a.row.prefilled}
    copies, waiting = self.rows.find_sources([*missing], most)
    if copies:
      self._copy(copies)
      return True
    rows = [row for row in missing if row not in waiting]
    if not rows:
      return False
    # Requests with score_prompt need a different program, so the batch has one kind.
    is_scored = lambda row: missing[row].generation.request.score_prompt
    scored = is_scored(rows[0])
    rows = [row for row in rows if is_scored(row) == scored][:most]
    size = sizes_lib.round_up(sizes.prefill_rows, len(rows))
    options = size, sizes.prefill_tokens, sizes.rows  # The last one is not written.
    whole = self.config.sees_ahead
    batch, count_M = active_request.make_prefill_batch(rows, *options, whole)
    batch = self.device.look(params, version, rows, batch)
    actives = [missing[row] for row in rows]
    if scored:
      targets = active_request.make_targets(actives, size, sizes.prefill_tokens)
      batch = batch._replace(targets=targets)
    counts = count_M.tolist()
    for row, count in zip(rows, counts, strict=False):
      row.prefill(count)
      self.stats.prefilled += count
    bucket = sizes_lib.round_up(sizes.buckets, max(row.cached for row in rows))
    slot_M = active_request.make_slots(dict(enumerate(actives)), size)
    adapters = slots.select(self._copy_index, slot_M)
    batch = batch._replace(rows=batch.rows._replace(adapters=adapters))
    call = functools.partial(self.device.prefill, params, batch, bucket)
    # Only a prefill with scores blocks, so only that one runs in the thread.
    if scores := await self._in_thread(call) if scored else call():
      for m, active in enumerate(actives):
        active.add_scores(scores, m, counts[m])
    self.stats.prefill_seconds += time.perf_counter() - start_time
    return True

  def _copy(self, copies: list[tuple[rows_lib.Prefix, rows_lib.Row]]):
    """Copies the keys and values of prefixes to other rows."""
    size = self.sizes.prefill_rows[-1]
    source, rows = np.zeros(size, np.int32), np.full(size, self.sizes.rows, np.int32)
    # The device reads all sources before it writes: a row may be a source and a target.
    for m, (prefix, row) in enumerate(copies):
      source[m], rows[m] = prefix.row.index, row.index
      self.stats.shared += prefix.length - row.cached
      row.copy(prefix)
    longest = max(prefix.length for prefix, _ in copies)
    self.device.copy(source, rows, sizes_lib.round_up(self.sizes.buckets, longest))

  async def _decode(
    self,
    params,
    policy_step: int,
    slots: adapters_lib.Slots,
    chosen: list[active_request.ActiveRequest],
  ):
    """Samples tokens for the prefilled rows, and adds them to the replies."""
    start_time, sizes = time.perf_counter(), self.sizes
    rows = {
      active: active.row for active in chosen if active.row and active.row.prefilled
    }
    for row in rows.values():
      row.note_write(sizes.decode_tokens)
    size = sizes_lib.round_up(sizes.decode_rows, len(rows))
    longest = max(row.cached for row in rows.values())
    bucket = sizes_lib.round_up(sizes.decode_buckets, longest + sizes.decode_tokens)
    in_place = sizes.decodes_in_place(size, bucket)
    entries = {
      row.index if in_place else m: active for m, (active, row) in enumerate(rows.items())
    }
    guides = self.device.guides
    batch = active_request.make_decode_batch(
      entries, size, guides, sizes.rows, sees=self.config.vision is not None
    )
    # The thread makes the call too: on a CPU the call blocks until it has computed.
    places = self.index.offer() if self.index else None
    slot_M = active_request.make_slots(entries, size)
    batch = batch._replace(adapters=slots.select(self._copy_index, slot_M))
    decode = functools.partial(self.device.decode, params, batch, bucket, places)
    guide_states, decoded = await self._in_thread(decode)
    self._decode_ended_at = time.perf_counter()
    self.stats.decode_seconds += self._decode_ended_at - start_time
    sampled, calls = int(decoded.count.sum()), int(decoded.calls.sum())
    self.stats.sampled += sampled
    self.stats.calls += calls
    if self.index and places:
      self.index.note(sampled, calls)
    self.stats.steps += int(decoded.calls.max()) * size
    for m, active in entries.items():
      # Requests that were cancelled during the decode get none of its tokens.
      if not active.generation.done:
        states = [jax.tree.map(lambda x, m=m: x[m], state) for state in guide_states]
        step = slots.weights[active.slot].step if active.slot else policy_step
        active.add_chunk(decoded, m, step, states)
        if self.index:
          active.add_to(self.index)
        self._unanswered_replies += active.generation.done

  def _in_thread(self, decode: Callable[[], Any]) -> asyncio.Future:
    return asyncio.get_running_loop().run_in_executor(self._decode_thread, decode)
