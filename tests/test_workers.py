"""The pool and the loop of users' functions: what hangs there costs nobody else."""

import asyncio
import collections
import os
import sys
import threading
import time
import types

import pools
import pytest
import raised
import waiting

from agent_r1_jax.host import thread_pool, workers

pool, hang = pools.pool, pools.hang


class TestPool:
  async def test_so_many_run_at_a_time_and_all_get_their_turn(self, pool):
    inside, most, lock = 0, 0, threading.Lock()
    barrier = threading.Barrier(3)

    def work(number):
      nonlocal inside, most
      with lock:
        inside += 1
        most = max(most, inside)
      barrier.wait(60)  # Opens only where three are inside.
      with lock:
        inside -= 1
      return number

    results = await asyncio.gather(*(workers.call(work, n) for n in range(12)))
    assert (results, most) == (list(range(12)), 3)

  async def test_what_hangs_frees_its_place_and_is_counted_until_it_comes_back(
    self, pool, gate, hang
  ):
    thread_pool.abandoned_calls.set(tally := collections.Counter())
    for number in range(5):
      with pytest.raises(workers.CallTimeoutError, match=r'^hang .* within 2\.5 s'):
        await workers.call(hang, seconds=2.5)
      assert pool.abandoned == tally == {'hang': number + 1}
      assert await workers.call(lambda: 'served') == 'served'
    await waiting.soon(lambda: pool.busy == 0)
    gate.set()
    await waiting.soon(lambda: not pool.abandoned)
    assert await workers.call(lambda: 'served') == 'served'

  async def test_too_many_that_hang_are_told_at_once(self, pool, gate, hang):
    for _ in range(6):
      with pytest.raises(workers.CallTimeoutError):
        await workers.call(hang, name='fetch', seconds=60)
    with pytest.raises(thread_pool.PoolFullError, match=r'6 .*\(fetch: 6\)'):
      await workers.call(lambda: 'served')
    gate.set()
    await waiting.soon(lambda: not pool.abandoned)
    assert await workers.call(lambda: 'served') == 'served'

  async def test_the_wait_for_a_thread_counts_and_is_told(self, pool, gate):
    busy = [asyncio.ensure_future(workers.call(gate.wait)) for _ in range(3)]
    await waiting.soon(lambda: pool.busy == 3)
    ran = []
    with pytest.raises(workers.CallTimeoutError, match='waited .*, and 3 calls'):
      await workers.call(ran.append, 1, seconds=0.01)
    gate.set()
    assert await asyncio.gather(*busy) == [True] * 3
    assert ran == [] and pool.abandoned == {}

  async def test_where_no_thread_can_be_had_a_call_waits_for_one(self, pool, monkeypatch):
    assert await workers.call(lambda: 'first') == 'first'
    held = threading.Event()
    first = asyncio.ensure_future(workers.call(held.wait))
    await waiting.soon(lambda: pool.busy == 1)

    def refuse(thread):
      raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, 'start', refuse)
    second = asyncio.ensure_future(workers.call(lambda: 'second'))
    await asyncio.sleep(0)
    held.set()
    assert await second == 'second' and await first

  async def test_a_grown_pool_runs_more_calls_at_a_time(self, pool, gate):
    pool.grow(2)  # It has more.
    pool.grow(5)
    busy = [asyncio.ensure_future(workers.call(gate.wait)) for _ in range(7)]
    await waiting.soon(lambda: pool.busy == 5)
    gate.set()
    assert await asyncio.gather(*busy) == [True] * 7

  async def test_a_cancelled_call_gives_its_place_away(self, pool, gate):
    busy = [asyncio.ensure_future(workers.call(gate.wait)) for _ in range(3)]
    await waiting.soon(lambda: pool.busy == 3)
    for task in busy:
      task.cancel()
    assert await workers.call(lambda: 'served') == 'served'
    assert pool.abandoned == {'wait': 3}

  @pytest.mark.parametrize('call', [workers.call, workers.call_on_user_loop])
  async def test_a_late_call_that_a_busy_pool_gives_up_is_late(
    self, pool, gate, call, monkeypatch
  ):
    async def in_thread():
      await asyncio.to_thread(gate.wait)

    fn = gate.wait if call is workers.call else in_thread
    ahead = 0.0
    now = lambda: time_of() + ahead
    time_of, clock = time.monotonic, types.SimpleNamespace(monotonic=lambda: now())
    monkeypatch.setattr(workers, 'time', clock)
    monkeypatch.setattr(thread_pool, 'time', clock)
    late = [asyncio.ensure_future(call(fn, name='late', seconds=600)) for _ in range(3)]
    await waiting.soon(lambda: pool.busy == 3)
    ahead = 601.0  # The pool sees it at the next call, the timers of the callers do not.
    assert await workers.call(lambda: 'served') == 'served'
    for task in late:
      with pytest.raises(workers.CallTimeoutError, match='late .* within 600'):
        await asyncio.wait_for(task, 60)


class TestRaising:
  @pytest.mark.parametrize('error', raised.ERRORS, ids=lambda e: type(e).__name__)
  @pytest.mark.parametrize('call', [workers.call, workers.call_on_user_loop])
  async def test_an_exception_is_raised_as_it_is(self, call, error):
    for fn in raised.make(error):
      with pytest.raises(type(error)) as caught:
        await call(fn)
      assert caught.value is error
      assert 'raised.py' in workers.locate_error(error)
      assert workers.describe_error(error).startswith(type(error).__name__)

  @pytest.mark.parametrize('error', raised.ENDS, ids=lambda e: type(e).__name__)
  @pytest.mark.parametrize('call', [workers.call, workers.call_on_user_loop])
  async def test_what_would_end_more_than_the_call_is_an_error_of_it(self, call, error):
    for fn in raised.make(error):
      with pytest.raises(RuntimeError, match=type(error).__name__):
        await call(fn)
      assert await call(lambda: 'served') == 'served'

  async def test_a_task_that_a_coroutine_starts_cannot_end_the_loop(self):
    async def starts():
      await asyncio.create_task(raised.make(SystemExit(0))[1]())

    async def stops():
      asyncio.get_running_loop().stop()
      await asyncio.sleep(0)
      return 'goes on'

    with pytest.raises(workers.BaseExceptionError, match='SystemExit: 0'):
      await workers.call_on_user_loop(starts)
    assert await workers.call_on_user_loop(stops) == 'goes on'

  @pytest.mark.parametrize('leave', [os._exit, sys.modules['posix']._exit])
  async def test_leaving_the_process_is_an_error_of_the_call(self, leave):
    async def later():
      leave(0)

    for call in (workers.call, workers.call_on_user_loop):
      for fn in (lambda: leave(0), later):
        if call is workers.call and fn is later:
          continue  # It would run in this thread, which is ours.
        with pytest.raises(workers.BaseExceptionError, match=r'os._exit\(0\)'):
          await call(fn)
