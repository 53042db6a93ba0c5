"""The engine: many clients on few rows, whatever their tools do meanwhile."""

import asyncio
import itertools
import random
import threading
import types as types_lib

import clients
import jax
import numpy as np
import pytest
import tiny

from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import replica as replica_lib
from agent_r1_jax.engine import sampling as sampling_lib
from agent_r1_jax.engine import state as state_lib

_HALVES = (range(8), range(8, 16))
_EXACT = {'bucket': clients.SLOTS, 'narrow': False}


class TestOnPolicy:
  def test_log_probs_are_the_learners(self):
    """Of ragged, copied and interrupted texts, in rows that were used before."""
    played = clients.reference()
    assert len({len(s.tokens) for s in played.values()}) > 8
    tiny.assert_on_policy(clients.params(), list(played.values()))

  def test_also_at_another_temperature_and_with_slow_tools(self):
    sampling = sampling_lib.Sampling(0.7)
    latency = clients.random_latency
    first, second = (
      clients.run(
        clients.engine(**_EXACT), range(16), latency=latency(), sampling=sampling
      )
      for _ in range(2)
    )
    tiny.assert_on_policy(clients.params(), list(first.values()), temperature=0.7)
    # The shapes are always the same here, and so is every bit.
    clients.assert_same(second, first, exactly=True)

  def test_a_new_policy_forgets_what_the_rows_hold(self):
    engine, other = clients.engine(), clients.other_params()
    clients.run(engine, range(16))
    engine.sync_weights(other, 1)
    # Fewer than before: the other rows still hold the prompt as it was.
    tiny.assert_on_policy(other, list(clients.run(engine, range(12, 14)).values()))


class TestScheduleIndependence:
  @pytest.mark.parametrize('seconds', [0.002, 0.02])
  def test_latencies(self, seconds):
    latency = clients.random_latency(seconds)
    played = clients.run(clients.engine(), range(16), latency=latency)
    clients.assert_same(played, clients.reference())

  def test_order_and_company(self):
    numbers = random.Random(1).sample(range(16), 16)
    clients.assert_same(clients.run(clients.engine(), numbers), clients.reference())
    some = {number: clients.reference()[number] for number in (6, 3, 13)}
    clients.assert_same(clients.run(clients.engine(), some), some)

  def test_sizes(self):
    engine = clients.engine(
      rows=2, steps=5, feed_rows=7, feed_tokens=3, bucket=clients.SLOTS
    )
    played = clients.run(engine, range(16), latency=clients.random_latency())
    clients.assert_same(played, clients.reference())

  def test_the_same_engine_again(self):
    engine = clients.engine()
    clients.run(engine, range(3, 11))
    clients.assert_same(clients.run(engine, range(16)), clients.reference())


class TestOpen:
  def test_runs_may_overlap(self):
    engine = clients.engine()

    def play():
      with engine.open():
        halves = [
          engine.start([clients.play(engine, n) for n in part]) for part in _HALVES
        ]
        return [segment for half in halves for segment in half.result()]

    played = tiny.within(play)
    numbers = itertools.chain(*_HALVES)
    clients.assert_same(dict(zip(numbers, played, strict=True)), clients.reference())

  def test_another_sampling_may_be_asked_for_while_clients_play(self):
    """Evaluation beside training: each plays what it plays alone."""
    engine = clients.engine()
    greedy = {'sampling': sampling_lib.GREEDY}
    alone = clients.run(clients.engine(), range(8), **greedy)

    def play():
      with engine.open():
        training = engine.start([clients.play(engine, n) for n in range(16)])
        evaluation = engine.start([clients.play(engine, n, **greedy) for n in alone])
        return training.result(), evaluation.result()

    training, evaluation = tiny.within(play)
    clients.assert_same(dict(enumerate(training)), clients.reference())
    clients.assert_same(dict(enumerate(evaluation)), alone)

  def test_nothing_starts_where_it_is_closed(self):
    with pytest.raises(RuntimeError, match='not open'):
      clients.engine().start([])

  def test_a_run_does_not_depend_on_the_one_before(self):
    """As it would if it copied the prompts that rows still hold."""
    engine, prefilled = clients.engine(), [0]

    def play():
      with engine.open():
        for _ in range(2):
          engine.start([clients.play(engine, n) for n in range(12, 16)]).result()
          prefilled.append(engine.stats.prefilled)

    tiny.within(play)
    assert prefilled[2] - prefilled[1] == prefilled[1] > 0

  @pytest.mark.parametrize('end', [SystemExit('bad data'), KeyboardInterrupt()])
  def test_a_client_cannot_end_the_process(self, end):
    async def leaves():
      await asyncio.sleep(0)
      raise end

    engine = clients.engine()
    with pytest.raises(RuntimeError, match='wanted to end the process'):
      tiny.within(engine.run, [leaves(), clients.play(engine, 0)], seconds=60)
    clients.assert_same(clients.run(engine, range(16)), clients.reference())

  def test_a_client_that_cancels_itself_says_so(self):
    async def leaves():
      await asyncio.sleep(0)
      raise asyncio.CancelledError

    engine = clients.engine()
    with pytest.raises(RuntimeError, match='raised CancelledError by itself'):
      tiny.within(engine.run, [leaves(), clients.play(engine, 0)], seconds=60)
    clients.assert_same(clients.run(engine, range(16)), clients.reference())

  def test_threads_that_hang_hold_no_decode_up(self):
    """As many as asyncio's own executor can have; they go on once all have played."""
    engine, over = clients.engine(), threading.Event()
    hanging = [asyncio.to_thread(over.wait, 60) for _ in range(64)]

    async def plays():
      played = await asyncio.gather(*(clients.play(engine, n) for n in range(16)))
      over.set()
      return played

    *waited, played = tiny.within(engine.run, [*hanging, plays()])
    assert all(waited)
    clients.assert_same(dict(enumerate(played)), clients.reference())

  def test_what_is_left_ends(self):
    engine, ended = clients.engine(), []

    async def waits():
      try:
        async with engine.reserve():
          await asyncio.sleep(3600)
      finally:
        ended.append(True)

    def leave():
      with engine.open():
        future = engine.start([waits(), clients.play(engine, 3)])
        tiny.within(engine.run, [clients.play(engine, 4)])
      return future

    assert tiny.within(leave, seconds=60).cancelled() and ended == [True]
    clients.assert_same(clients.run(engine, range(16)), clients.reference())

  def test_a_reply_that_nobody_awaits_ends_with_the_engine(self):
    engine, generations = clients.engine(), []

    async def asks():
      generations.append(engine.submit(clients.request(clients.tokens(0, 9))))

    def leave():
      with engine.open():
        engine.start([asks()]).result()

    tiny.within(leave, seconds=60)
    assert generations[0].done
    clients.assert_same(clients.run(engine, range(16)), clients.reference())


class TestFailure:
  def test_a_client_that_raises_ends_the_run(self):
    engine = clients.engine()

    async def fails():
      await engine.submit(clients.request(clients.tokens(0, 9)))
      raise LookupError('a bug in the caller')

    async def waits():
      async with engine.reserve():
        await asyncio.sleep(3600)

    coroutines = [waits(), *(clients.play(engine, n) for n in range(8)), fails()]
    with pytest.raises(LookupError, match='a bug in the caller'):
      tiny.within(engine.run, coroutines)
    # The engine is as good as new.
    clients.assert_same(clients.run(engine, range(16)), clients.reference())

  @pytest.mark.parametrize('name', ['prefill', 'copy', 'decode'])
  def test_a_device_that_raises_ends_the_run(self, monkeypatch, name):
    def broken(*args, **kwargs):
      raise MemoryError('out of device memory')

    monkeypatch.setattr(state_lib, name, broken)
    engine = clients.engine()
    with pytest.raises(MemoryError, match='out of device memory'):
      tiny.within(engine.run, [clients.play(engine, n) for n in range(12, 16)])

  def test_a_result_that_cannot_be_fetched_ends_the_run(self, monkeypatch):
    _break_fetches(monkeypatch)
    engine = clients.engine()
    with pytest.raises(RuntimeError, match='device lost'):
      tiny.within(engine.run, [clients.play(engine, n) for n in range(8)])

  def test_after_an_error_of_the_device_nothing_plays(self, monkeypatch):
    _break_fetches(monkeypatch)
    engine = clients.engine()

    def play():
      with engine.open():
        for number in range(2):
          with pytest.raises(RuntimeError, match='device lost'):
            engine.start([clients.play(engine, number)]).result()

    tiny.within(play, seconds=60)

  @pytest.mark.parametrize('seconds', [0, 3600])
  def test_a_call_for_the_end_is_heard(self, seconds):
    """In the midst of replies, and where all that clients do is wait."""
    engine = clients.engine()
    engine.interrupted = lambda: engine.stats.sampled > 20
    coroutines = [clients.play(engine, n, latency=lambda: seconds) for n in range(8)]
    with pytest.raises(replica_lib.PreemptedError):
      tiny.within(engine.run, coroutines, seconds=60)


def _break_fetches(monkeypatch):
  def broken(out):
    raise RuntimeError('device lost')

  fake = types_lib.SimpleNamespace(
    device_get=broken, tree=jax.tree, device_put=jax.device_put
  )
  monkeypatch.setattr(replica_lib, 'jax', fake)


class TestTools:
  def test_others_go_on_while_one_waits(self):
    """Its tool ends when they have: an engine that waited for it would hang."""
    engine = clients.engine()
    others_done = asyncio.Event()

    async def waits():
      async with engine.reserve() as replica:
        first = replica.submit(clients.request(clients.tokens(0, 9)))
        await first
        await others_done.wait()
        await replica.submit(clients.request(clients.tokens(1, 9), first.text))

    async def others():
      await asyncio.gather(*(clients.play(engine, number) for number in range(10)))
      others_done.set()

    tiny.within(engine.run, [waits(), others()])

  def test_they_run_while_the_device_does(self, monkeypatch):
    """A decode that ends only after a tool's answer."""
    engine, answered = clients.engine(), threading.Event()

    def device_get(out):
      assert answered.wait(60)
      return jax.device_get(out)

    async def tool():
      await asyncio.sleep(0.01)
      answered.set()

    fake = types_lib.SimpleNamespace(
      device_get=device_get, tree=jax.tree, device_put=jax.device_put
    )
    monkeypatch.setattr(replica_lib, 'jax', fake)
    tiny.within(engine.run, [clients.play(engine, 0), tool()])

  def test_a_wait_for_tools_alone_is_counted_and_costs_no_step(self):
    engine = clients.engine()
    clients.run(engine, [0], latency=lambda: 0.05, turns=2)
    assert 0.04 < engine.stats.idle_seconds
    # One row runs in the program for the fewest.
    assert engine.stats.steps == engine.stats.sampled * engine.sizes.decode_rows[0]

  def test_who_is_ready_at_once_runs_in_the_next_segment(self):
    engine, steps = clients.engine(), clients.STEPS

    async def play(number):
      text = None
      for most in ([2 * steps], [steps, steps])[number % 2]:
        given = clients.tokens(number, 3)
        generation = engine.submit(
          clients.request(given, text, most, number, automata=())
        )
        await generation
        text = generation.text

    tiny.within(engine.run, [play(number) for number in range(clients.ROWS)])
    assert engine.stats.steps == engine.stats.sampled == 2 * steps * clients.ROWS


def test_inside_a_running_loop():
  """As in a notebook."""
  engine = clients.engine()

  async def cell():
    return clients.run(engine, range(4))

  played = asyncio.run(cell())
  clients.assert_same(played, {n: clients.reference()[n] for n in range(4)})

  async def fails():
    raise LookupError

  async def broken_cell():
    engine.run([fails()])

  with pytest.raises(LookupError):
    asyncio.run(broken_cell())


@pytest.mark.parametrize('name', [*tiny.SIZES, 'bucket'])
def test_sizes_must_allow_something(name):
  with pytest.raises(ValueError, match=f'{name} is 0; it must be at least 1'):
    clients.engine(**{name: 0})


def test_no_clients_are_no_work():
  assert tiny.within(clients.engine().run, []) == []


class TestPrograms:
  def test_few_rows_run_in_narrow_programs(self):
    narrow, wide = clients.engine(), clients.engine(narrow=False)
    for engine in (narrow, wide):
      clients.assert_same(clients.run(engine, [0]), {0: clients.reference()[0]})
    assert narrow.stats.sampled == wide.stats.sampled
    assert narrow.stats.steps < wide.stats.steps

  def test_more_rows_than_are_decoded_at_once(self):
    """All come to their turn, and are told the same."""
    engine = clients.engine(width=2)
    clients.assert_same(clients.run(engine, range(16)), clients.reference())
    # Of six rows no more than two share a step, and none is sampled for nothing else.
    assert engine.sizes.decode_rows == [1, 2]
    assert engine.stats.sampled <= engine.stats.steps < 1.5 * engine.stats.sampled

  def test_decodes_in_place_give_the_same(self, monkeypatch):
    """As on chips whose attention reads no more slots than are used."""
    fake = types_lib.SimpleNamespace(reads_used_slots=lambda *args: True)
    monkeypatch.setattr(engine_lib, 'attention', fake)
    engine = clients.engine()
    assert engine.sizes.in_place and not clients.engine(width=2).sizes.in_place
    with tiny.compilations() as compiled:
      engine.warm_up()
    assert len([c for c in compiled if 'unstacked' not in c]) <= engine.sizes.programs
    assert engine.sizes.programs == 2 * (1 + 2) + 1
    with tiny.compilations() as compiled:
      played = clients.run(engine, range(16), latency=clients.random_latency())
    assert not compiled
    clients.assert_same(played, clients.reference())

  def test_replicas_share_a_chip(self, monkeypatch):
    """They have the rows between them, one copy of the policy, and decode at one time."""
    both, met = threading.Barrier(2), set()
    decode = replica_lib.Replica._call_decode

    def meet(replica, *args):
      if replica not in met:
        met.add(replica)
        both.wait(20)
      return decode(replica, *args)

    engine = clients.engine(replicas=2, width=4, **_EXACT)
    monkeypatch.setattr(replica_lib.Replica, '_call_decode', meet)
    played = clients.run(engine, range(16))
    monkeypatch.undo()
    clients.assert_same(played, clients.reference())
    first, second = engine.replicas
    assert first.policy.copies[0] is second.policy.copies[0]
    assert len(first.rows.rows) == len(second.rows.rows) == 3
    assert engine.sizes.decode_rows == [2]

  def test_a_request_goes_to_the_replica_that_has_least_to_do_or_its_text(self):
    engine = clients.engine(replicas=2, width=4, **_EXACT)

    async def asks():
      first = [engine.submit(clients.request(clients.tokens(n, 9))) for n in range(4)]
      await asyncio.gather(*first)
      later = [
        engine.submit(clients.request(clients.tokens(5, 3), g.text)) for g in first
      ]
      await asyncio.gather(*later)
      return [[g.text.replica for g in part] for part in (first, later)]

    ((first, later),) = tiny.within(engine.run, [asks()])
    assert first == later == 2 * engine.replicas

  def test_replicas_that_do_not_divide_the_rows(self):
    with pytest.raises(ValueError, match='rows = 6 and width = 6 .* 4, replicas'):
      clients.engine(replicas=4)

  def test_replicas_on_chips_that_share_a_layer(self):
    mesh = jax.sharding.Mesh(jax.devices() * 2, ['tensor'])  # one device, twice
    with pytest.raises(ValueError, match='replicas is 2: with tensor > 1'):
      clients.engine(replicas=2, mesh=mesh)

  def test_buckets_double_up_to_the_slots(self):
    buckets = lambda n: clients.engine(bucket=n).sizes.buckets
    assert buckets(7) == [7, 14, 28, 56, 112, clients.SLOTS]
    assert buckets(clients.SLOTS) == buckets(1000) == [clients.SLOTS]

  def test_warm_up_leaves_no_trace(self):
    engine = clients.engine()
    played = clients.run(engine, range(8))
    cache = jax.device_get(engine.replicas[0].cache)
    engine.warm_up()
    after = jax.device_get(engine.replicas[0].cache)
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
      np.testing.assert_array_equal(old, new)
    clients.assert_same(clients.run(engine, range(8)), played)
