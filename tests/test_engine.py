"""The engine: many clients on few rows, whatever their tools do meanwhile."""

import asyncio
import random
import threading
import types as types_lib

import clients
import jax
import numpy as np
import pytest
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax.engine import device as device_lib
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.engine import protocol
from agent_r1_jax.engine import replica as replica_lib
from agent_r1_jax.engine import sizes as sizes_lib


class TestOnPolicy:
  def test_log_probs_are_the_learners(self):
    """Of ragged, copied and interrupted texts, in rows that were used before."""
    played = clients.reference()
    assert len({len(s.tokens) for s in played.values()}) > 8
    tiny.assert_on_policy(clients.params(), list(played.values()))

  @pytest.mark.usefixtures('family')
  def test_log_probs_are_the_learners_at_another_temperature_and_with_slow_tools(self):
    play = lambda: clients.run(
      clients.engine(**clients.EXACT),
      range(16),
      latency=clients.random_latency(),
      sampling=config_lib.Sampling(0.7),
    )
    first, second = play(), play()
    tiny.assert_on_policy(clients.params(), list(first.values()), temperature=0.7)
    # The shapes are always the same here, and so is every bit.
    clients.assert_same(second, first, exactly=True)

  def test_a_new_policy_reads_nothing_that_rows_hold_of_the_old(self, engine):
    other = clients.other_params()
    clients.run(engine, range(16))
    engine.sync_weights(other, 1)
    # Fewer than before: the other rows still hold the same prompt.
    tiny.assert_on_policy(other, list(clients.run(engine, range(12, 14)).values()))


class TestScheduleIndependence:
  def test_replies_do_not_depend_on_latencies(self, engine):
    clients.assert_plays(engine, latency=clients.random_latency(0.02))

  def test_replies_do_not_depend_on_order_and_company(self, engine):
    clients.assert_plays(clients.engine(), random.Random(1).sample(range(16), 16))
    clients.assert_plays(engine, (6, 3, 13))

  def test_replies_do_not_depend_on_sizes(self):
    sizes = {'rows': 2, 'decode_steps': 5, 'prefill_rows': 7, 'prefill_tokens': 3}
    engine = clients.engine(bucket=clients.SLOTS, **sizes)
    clients.assert_plays(engine, latency=clients.random_latency())


class TestOpen:
  def test_overlapping_runs_sample_as_each_alone(self, engine):
    """Training beside evaluation, which samples in another way: as each plays alone."""
    greedy = {'sampling': config_lib.GREEDY}
    alone = clients.run(clients.engine(), range(8), **greedy)

    def play():
      with engine.open():
        first = engine.start([clients.play(engine, n) for n in range(8)])
        evaluation = engine.start([clients.play(engine, n, **greedy) for n in alone])
        second = engine.start([clients.play(engine, n) for n in range(8, 16)])
        return first.result() + second.result(), evaluation.result()

    training, evaluation = tiny.within(play)
    clients.assert_reference(dict(enumerate(training)))
    clients.assert_same(dict(enumerate(evaluation)), alone)

  def test_start_on_a_closed_engine_is_refused(self, engine):
    with pytest.raises(RuntimeError, match='not open'):
      engine.start([])
    assert tiny.within(engine.run, []) == []

  def test_a_run_does_not_depend_on_the_one_before(self, engine):
    """As it would if it copied the prompts that rows still hold."""
    prefilled = [0]

    def play():
      with engine.open():
        for _ in range(2):
          engine.start([clients.play(engine, n) for n in range(12, 16)]).result()
          prefilled.append(engine.stats.prefilled)

    tiny.within(play)
    assert prefilled[2] - prefilled[1] == prefilled[1] > 0

  def test_hanging_threads_delay_no_decode(self, engine):
    """As many as asyncio's own executor can have; they go on once all have played."""
    over = threading.Event()
    hanging = [asyncio.to_thread(over.wait, 60) for _ in range(64)]

    async def plays():
      played = await asyncio.gather(*(clients.play(engine, n) for n in range(16)))
      over.set()
      return played

    *waited, played = tiny.within(engine.run, [*hanging, plays()])
    assert all(waited)
    clients.assert_reference(dict(enumerate(played)))

  def test_close_cancels_clients_and_replies_under_way(self, engine):
    ended, generations = [], []

    async def waits():
      try:
        async with engine.reserve():
          await asyncio.sleep(3600)
      finally:
        ended.append(True)

    async def asks():
      generations.append(engine.submit(clients.request(clients.tokens(0, 9))))

    def leave():
      with engine.open():
        future = engine.start([waits(), clients.play(engine, 3)])
        tiny.within(engine.run, [clients.play(engine, 4)])
        engine.start([asks()]).result()
      return future

    assert tiny.within(leave, seconds=60).cancelled() and ended == [True]
    assert generations[0].done
    clients.assert_plays(engine)


def test_a_request_that_is_cancelled_in_a_decode_gets_no_tokens_of_it(
  engine, monkeypatch
):
  """Its neighbour gets its own."""
  replica, cancelled = engine.replicas[0], []

  async def decode(replica, fn):
    result = fn()
    if cancelled and cancelled[0].chunks:
      cancelled[0].cancel()
    return result

  async def play():
    fields = {'most': 6 * clients.STEPS, **clients.ENDLESS}
    first = replica.submit(clients.request(clients.tokens(0, 9), **fields))
    cancelled.append(first)
    second = replica.submit(clients.request(clients.tokens(1, 9), **fields))
    reply = await second
    assert [len(chunk.tokens) for chunk in first.chunks] == [clients.STEPS]
    assert len(first.sequence) == 9 + clients.STEPS
    assert len(reply.tokens) == 6 * clients.STEPS

  monkeypatch.setattr(replica_lib.Replica, '_in_thread', decode)
  tiny.within(engine.run, [play()])


async def _raises(error):
  await asyncio.sleep(0)
  raise error


def _replace_fetch(monkeypatch, device_get):
  names = {'tree': jax.tree, 'device_put': jax.device_put, 'device_get': device_get}
  monkeypatch.setattr(device_lib, 'jax', types_lib.SimpleNamespace(**names))


class TestFailure:
  @pytest.mark.parametrize(
    'error, raised, message',
    [
      (LookupError('a bug'), LookupError, 'a bug'),
      (SystemExit('bad data'), RuntimeError, 'tried to end the process'),
      (KeyboardInterrupt(), RuntimeError, 'tried to end the process'),
      (asyncio.CancelledError(), RuntimeError, 'raised CancelledError by itself'),
    ],
  )
  def test_a_client_that_raises_ends_the_run(self, engine, error, raised, message):
    async def fails():
      await engine.submit(clients.request(clients.tokens(0, 9)))
      await _raises(error)

    async def waits():
      async with engine.reserve():
        await asyncio.sleep(3600)

    coroutines = [waits(), *(clients.play(engine, n) for n in range(8)), fails()]
    with pytest.raises(raised, match=message):
      tiny.within(engine.run, coroutines, seconds=60)
    # The engine is as good as new.
    clients.assert_plays(engine)

  @pytest.mark.parametrize('name', ['prefill', 'copy', 'decode'])
  def test_a_device_that_raises_ends_the_run(self, engine, monkeypatch, name):
    def broken(*args, **kwargs):
      raise MemoryError('out of device memory')

    monkeypatch.setattr(programs_lib, name, broken)
    with pytest.raises(MemoryError, match='out of device memory'):
      tiny.within(engine.run, [clients.play(engine, n) for n in range(12, 16)])

  def test_failed_fetch_ends_every_later_client(self, engine, monkeypatch):
    def broken(out):
      raise RuntimeError('device lost')

    _replace_fetch(monkeypatch, broken)

    def play():
      with engine.open():
        for number in range(2):
          with pytest.raises(RuntimeError, match='device lost'):
            engine.start([clients.play(engine, number)]).result()

    tiny.within(play, seconds=60)

  @pytest.mark.parametrize('seconds', [0, 3600])
  def test_interruption_ends_the_run_with_preempted_error(self, engine, seconds):
    """In the midst of replies, and where all that clients do is wait."""
    engine.interrupted = lambda: engine.stats.sampled > 20
    coroutines = [clients.play(engine, n, latency=lambda: seconds) for n in range(8)]
    with pytest.raises(protocol.PreemptedError):
      tiny.within(engine.run, coroutines, seconds=60)


class TestTools:
  def test_other_clients_go_on_while_a_tool_hangs(self, engine):
    """Its tool ends when they have: an engine that waited for it would hang."""
    others_done = asyncio.Event()

    async def waits():
      async with engine.reserve() as replica:
        first = replica.submit(clients.request(clients.tokens(0, 9)))
        await first
        await others_done.wait()
        await replica.submit(clients.request(clients.tokens(1, 9), first.sequence))

    async def others():
      await asyncio.gather(*(clients.play(engine, number) for number in range(10)))
      others_done.set()

    tiny.within(engine.run, [waits(), others()])

  def test_tools_run_while_the_device_decodes(self, engine, monkeypatch):
    """A decode that ends only after a tool's answer."""
    answered = threading.Event()

    def device_get(out):
      assert answered.wait(60)
      return jax.device_get(out)

    async def tool():
      await asyncio.sleep(0.01)
      answered.set()

    _replace_fetch(monkeypatch, device_get)
    tiny.within(engine.run, [clients.play(engine, 0), tool()])

  def test_a_wait_for_tools_alone_is_counted_and_costs_no_step(self, engine):
    clients.run(engine, [0], latency=lambda: 0.05, turns=2)
    assert engine.stats.idle_seconds > 0
    # One row runs in the program for the fewest.
    assert engine.stats.steps == engine.stats.sampled * engine.sizes.decode_rows[0]

  def test_client_that_answers_at_once_joins_the_next_decode(self, engine):
    steps = clients.STEPS

    async def play(number):
      text = None
      for most in ([2 * steps], [steps, steps])[number % 2]:
        given = clients.tokens(number, 3)
        request = clients.request(given, text, most, number, **clients.ENDLESS)
        generation = engine.submit(request)
        await generation
        text = generation.sequence

    tiny.within(engine.run, [play(number) for number in range(clients.ROWS)])
    assert engine.stats.steps == engine.stats.sampled == 2 * steps * clients.ROWS


def test_run_inside_a_running_event_loop_works(engine):
  """As in a notebook."""

  async def cell():
    return clients.run(engine, range(4))

  clients.assert_reference(asyncio.run(cell()))

  async def broken_cell():
    engine.run([_raises(LookupError())])

  with pytest.raises(LookupError):
    asyncio.run(broken_cell())


class TestSizes:
  @pytest.mark.parametrize(
    'sizes, message',
    [({name: 0}, f'{name} is 0; it must be at least 1') for name in tiny.SIZES]
    + [
      ({'bucket': 0}, 'bucket is 0; it must be at least 1'),
      ({'replicas': 4}, 'rows = 6 and width = 6 .* 4, replicas'),
    ],
  )
  def test_size_below_one_is_refused(self, sizes, message):
    with pytest.raises(ValueError, match=message):
      clients.engine(**sizes)

  def test_replicas_with_tensor_parallelism_are_refused(self):
    mesh = jax.sharding.Mesh(jax.devices() * 2, ['tensor'])  # one device, twice
    with pytest.raises(ValueError, match='replicas is 2: with tensor > 1'):
      clients.engine(replicas=2, mesh=mesh)

  def test_buckets_double_up_to_the_slots(self):
    buckets = lambda n: clients.engine(bucket=n).sizes.buckets
    assert buckets(7) == [7, 14, 28, 56, 112, clients.SLOTS]
    assert buckets(clients.SLOTS) == buckets(1000) == [clients.SLOTS]


class TestPrograms:
  def test_few_rows_run_in_narrow_programs(self):
    narrow, wide = clients.engine(), clients.engine(narrow=False)
    for engine in (narrow, wide):
      clients.assert_plays(engine, [0])
    assert narrow.stats.sampled == wide.stats.sampled
    assert narrow.stats.steps < wide.stats.steps

  def test_rows_beyond_the_width_take_turns_and_sample_the_same(self):
    engine = clients.engine(width=2)
    clients.assert_plays(engine)
    # Two of six rows share a step, and few steps are of a row that has ended.
    assert engine.sizes.decode_rows == [1, 2]
    assert engine.stats.sampled <= engine.stats.steps < 1.5 * engine.stats.sampled

  def test_decodes_of_all_rows_and_slots_are_in_place(self, engine, monkeypatch):
    """All decodes, where attention reads no more slots than are used."""
    assert engine.sizes.decodes_in_place(clients.ROWS, clients.SLOTS)
    assert not engine.sizes.decodes_in_place(clients.ROWS, tiny.BUCKET)
    fake = types_lib.SimpleNamespace(reads_used_slots=lambda *args: True)
    monkeypatch.setattr(sizes_lib, 'attention_kernels', fake)
    assert len(clients.engine(width=2).sizes.decode_buckets) == 2
    engine = clients.engine()
    with tiny.compilations() as compiled:
      engine.warm_up()
    assert len([c for c in compiled if 'unstack' not in c]) <= engine.sizes.programs
    assert engine.sizes.programs == 2 * (1 + 2) + 1
    with tiny.compilations() as compiled:
      played = clients.run(engine, range(16), latency=clients.random_latency())
    assert not compiled
    clients.assert_reference(played)

  def test_replicas_share_a_chip(self, monkeypatch):
    """They divide the rows, share a copy of the policy, and decode at the same time."""
    both, met = threading.Barrier(2), set()
    decode = device_lib.Device.decode

    def meet(device, *args):
      if device not in met:
        met.add(device)
        both.wait(20)
      return decode(device, *args)

    engine = clients.engine(replicas=2, width=4, **clients.EXACT)
    monkeypatch.setattr(device_lib.Device, 'decode', meet)
    clients.assert_plays(engine)
    first, second = engine.replicas
    assert first.policy.copies[0] is second.policy.copies[0]
    assert len(first.rows.rows) == len(second.rows.rows) == 3
    assert engine.sizes.decode_rows == [2]

  def test_a_request_goes_to_the_replica_that_has_least_to_do_or_its_text(self):
    engine = clients.engine(replicas=2, width=4, **clients.EXACT)

    async def asks():
      first = [engine.submit(clients.request(clients.tokens(n, 9))) for n in range(4)]
      await asyncio.gather(*first)
      requests = [clients.request(clients.tokens(5, 3), g.sequence) for g in first]
      later = [engine.submit(request) for request in requests]
      await asyncio.gather(*later)
      return [[g.sequence.replica for g in part] for part in (first, later)]

    ((first, later),) = tiny.within(engine.run, [asks()])
    assert first == later == 2 * engine.replicas

  def test_warm_up_changes_no_cache_and_no_reply(self, engine):
    played = clients.run(engine, range(8))
    cache = jax.device_get(engine.replicas[0].device.cache)
    engine.warm_up()
    after = jax.device_get(engine.replicas[0].device.cache)
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
      np.testing.assert_array_equal(old, new)
    clients.assert_same(clients.run(engine, range(8)), played)
