"""The event loops of users' coroutines: what blocks or hangs there costs nobody else."""

import asyncio
import collections
import contextlib
import functools
import textwrap
import threading
import time
import types

import late
import pools
import pytest
import script
import waiting

from agent_r1_jax.host import thread_pool, workers

pool, hang = pools.pool, pools.hang


class _Clock:
  """A clock that the test sets: `asyncio.wait` and `workers` go by it."""

  def __init__(self, monkeypatch):
    self.now, self.ends, self._wait = 0.0, [], asyncio.wait
    monkeypatch.setattr(workers, 'time', types.SimpleNamespace(monotonic=self.read))
    monkeypatch.setattr(asyncio, 'wait', self.wait)

  def read(self):
    return self.now

  def advance(self, seconds):
    self.now += seconds

  async def wait(self, futures, *, timeout=None):
    end = float('inf') if timeout is None else self.now + timeout
    self.ends.append(end)
    while self.now < end and not any(future.done() for future in futures):
      await self._wait(futures, timeout=0.005)
    self.ends.remove(end)


@pytest.fixture
def clock(monkeypatch):
  return _Clock(monkeypatch)


class TestCoroutines:
  @pytest.mark.parametrize('name', ['call', 'call_on_user_loop'])
  @pytest.mark.parametrize('reason', ['late', 'cancelled'])
  async def test_one_that_swallows_its_cancellation_is_counted_until_it_ends(
    self, no_clock, pool, name, reason
  ):
    begun, may_end, call = [], threading.Event(), getattr(workers, name)

    async def stubborn():
      begun.append(late.this_call())
      while not may_end.is_set():
        with contextlib.suppress(asyncio.CancelledError):
          await asyncio.sleep(0.01)

    thread_pool.abandoned_calls.set(tally := collections.Counter())
    limits = {'seconds': 60, 'field': 'step_seconds'}
    calls = [asyncio.ensure_future(call(stubborn, **limits)) for _ in range(6)]
    await waiting.soon(lambda: len(begun) == 6)
    for task, started in zip(calls, begun, strict=True):
      _ = started.strike() if reason == 'late' else task.cancel()
    errors = await asyncio.gather(*calls, return_exceptions=True)
    if reason == 'late':
      text = 'stubborn gave no answer within 60 seconds (step_seconds)'
      assert {str(error) for error in errors} == {text}
    else:
      assert {type(error) for error in errors} == {asyncio.CancelledError}
    assert tally == pool.abandoned == {'stubborn': 6}
    for fn in (stubborn, lambda: 'served'):
      with pytest.raises(thread_pool.PoolFullError, match='stubborn: 6'):
        await call(fn)
    may_end.set()
    await waiting.soon(lambda: not pool.abandoned)
    assert await call(lambda: 'served') == 'served'

  @pytest.mark.parametrize('name', ['call', 'call_on_user_loop'])
  async def test_of_two_calls_the_one_that_goes_on_is_counted(
    self, no_clock, pool, monkeypatch, name
  ):
    outer = thread_pool.Caller('outer')
    assert thread_pool.Caller('inner', outer=outer).grace_seconds < outer.grace_seconds
    # The outer one is given time, however slow the machine is.
    seconds = lambda caller: 0.05 if caller.outer else 600.0
    monkeypatch.setattr(thread_pool.Caller, 'grace_seconds', property(seconds))
    begun, may_end = threading.Event(), threading.Event()

    async def inner():
      begun.set()
      while not may_end.is_set():
        with contextlib.suppress(asyncio.CancelledError):
          await asyncio.sleep(0.01)

    async def around():
      await workers.call(inner)

    thread_pool.abandoned_calls.set(tally := collections.Counter())
    call = asyncio.ensure_future(getattr(workers, name)(around))
    await waiting.soon(begun.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
      await call
    assert tally == pool.abandoned == {'inner': 1}
    may_end.set()
    await waiting.soon(lambda: not pool.abandoned)

  async def test_to_thread_of_a_coroutine_runs_in_the_pool(self, pool, hang):
    """As many that hang there as it has threads hold nobody up."""

    async def hang_in_thread():
      await asyncio.to_thread(hang)

    async def works():
      return await asyncio.to_thread(lambda: threading.current_thread().name)

    thread_pool.abandoned_calls.set(tally := collections.Counter())
    for _ in range(5):
      with pytest.raises(workers.CallTimeoutError):
        await workers.call_on_user_loop(hang_in_thread, name='fetch', seconds=60)
      assert await workers.call_on_user_loop(works) == 'worker'
    await waiting.soon(lambda: pool.abandoned == tally == {'fetch': 5})

  async def test_a_shielded_thread_loses_its_place_once_nobody_waits(
    self, pool, hang, monkeypatch
  ):
    async def hang_shielded():
      await asyncio.shield(asyncio.to_thread(hang))

    for _ in range(3):
      with pytest.raises(workers.CallTimeoutError):
        await workers.call_on_user_loop(hang_shielded, seconds=60)
    later = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 60)
    monkeypatch.setattr(thread_pool, 'time', later)
    assert await workers.call(lambda: 'served') == 'served'
    assert sum(pool.abandoned.values()) >= 1

  async def test_one_that_blocks_holds_up_nobody_who_comes_later(
    self, no_clock, monkeypatch, gate
  ):
    resting, blocking = threading.Event(), threading.Event()
    running = {}  # Of each function: its call, and its event loop's thread.

    async def blocks():
      running['blocks'] = late.this_call(), threading.get_ident()
      blocking.set()
      gate.wait()

    async def waits():
      running['waits'] = late.this_call(), threading.get_ident()
      resting.set()
      await asyncio.sleep(3600)

    async def thread():
      return threading.get_ident()

    async def failure(fn):
      with pytest.raises((workers.CallTimeoutError, workers.LoopBlockedError)) as caught:
        await workers.call_on_user_loop(fn, seconds=60)
      return caught.value

    thread_pool.abandoned_calls.set(tally := collections.Counter())
    for _ in range(2):  # One loop after the other is lost.
      # So that no call leaves a loop that is slow and not blocked.
      monkeypatch.setattr(workers, 'BLOCKED_SECONDS', 600)
      resting.clear()
      blocking.clear()
      caught = asyncio.create_task(failure(waits))
      await waiting.soon(resting.is_set)
      blocker = asyncio.create_task(failure(blocks))
      await waiting.soon(blocking.is_set)
      monkeypatch.setattr(workers, 'BLOCKED_SECONDS', 0.1)
      (first_call, first_thread), (call, lost_thread) = running.values()
      assert first_thread == lost_thread != await workers.call_on_user_loop(thread)
      call.strike()
      error = await blocker
      assert type(error) is workers.CallTimeoutError
      assert str(error).startswith('blocks gave no answer within 60 seconds; blocks (')
      assert str(error).endswith('blocks its event loop')
      first_call.strike()
      error = await caught
      assert type(error) is workers.LoopBlockedError
      assert 'waits was on an event loop that blocks (' in str(error)
      assert 'threading.py' in str(error)
    assert tally == {'blocks': 2}

  async def test_a_loop_that_goes_on_takes_the_calls_again(self, monkeypatch):
    """What coroutines share works on the event loop alone that it was first used on."""
    monkeypatch.setattr(workers, '_loops', [])
    # No call finds by itself that the loop is blocked: the test says so.
    monkeypatch.setattr(workers, 'BLOCKED_SECONDS', 600.0)
    one = asyncio.Semaphore(1)

    async def share():
      async def use():
        async with one:
          await asyncio.sleep(0)

      await asyncio.gather(*(use() for _ in range(3)))
      return threading.current_thread()

    async def where():
      return threading.current_thread()

    async def block(begun, gate):
      begun.set()
      gate.wait()
      await asyncio.sleep(0)
      return threading.current_thread()

    first, stood_in = await workers.call_on_user_loop(share), set()
    for _ in range(3):
      begun, gate = threading.Event(), threading.Event()
      blocked = asyncio.ensure_future(workers.call_on_user_loop(block, begun, gate))
      await waiting.soon(begun.is_set)
      for _ in range(2):  # As two calls do that wait there.
        workers._loops[0].pass_over()
      stood_in.add(await workers.call_on_user_loop(where))
      gate.set()
      assert await blocked is first  # It was late for nothing.
      assert await workers.call_on_user_loop(share) is first
    assert len(stood_in) == 1 and first not in stood_in

  async def test_of_any_number_that_block_at_once_each_costs_its_own_call(
    self, clock, monkeypatch, gate
  ):
    """The clock passes the limit of all while most of them have not begun."""
    monkeypatch.setattr(workers, '_loops', [])
    inside = []

    async def blocks():
      inside.append(threading.get_ident())
      gate.wait()

    async def serves():
      return threading.get_ident()

    call = functools.partial(workers.call_on_user_loop, seconds=3)
    blocked = [asyncio.ensure_future(call(blocks)) for _ in range(6)]
    served = [asyncio.ensure_future(call(serves)) for _ in range(8)]
    await waiting.soon(lambda: inside)
    clock.advance(3.2)  # The first has had its time; the others have waited for it,
    later = clock.now + workers.BLOCKED_SECONDS / 20  # and wait a little longer.
    await waiting.soon(lambda: clock.ends.count(later) == 13)
    clock.advance(0.3)
    threads = await asyncio.gather(*served)
    await waiting.soon(lambda: len(inside) == 6)
    assert not set(threads) & set(inside)
    assert not any(task.done() for task in blocked[1:])
    while not all(task.done() for task in blocked):
      clock.advance(0.3)
      await asyncio.sleep(0.01)
    for error in await asyncio.gather(*blocked, return_exceptions=True):
      assert type(error) is workers.CallTimeoutError
      assert 'blocks gave no answer within 3 seconds; blocks (' in str(error)

  async def test_the_time_of_a_call_begins_when_it_does(self, clock, monkeypatch, gate):
    """Another one blocks for nearly the limit and goes on; this one has its time."""
    monkeypatch.setattr(workers, '_loops', [])
    inside, may_end = threading.Event(), threading.Event()

    async def blocks():
      inside.set()
      gate.wait()

    async def serves():
      await asyncio.to_thread(may_end.wait, 60)
      return 'served'

    blocked = asyncio.ensure_future(workers.call_on_user_loop(blocks, seconds=4))
    await waiting.soon(inside.is_set)
    served = asyncio.ensure_future(workers.call_on_user_loop(serves, seconds=4))
    await asyncio.sleep(0)
    clock.advance(3)
    gate.set()
    await blocked
    await waiting.soon(lambda: thread_pool.POOL.busy)
    clock.advance(3)
    await asyncio.sleep(0.1)
    may_end.set()
    assert await served == 'served'

  async def test_an_episode_stays_on_the_loop_that_it_began_on(self, monkeypatch):
    """Also where the loop of the others goes on: what it has opened works there alone."""
    monkeypatch.setattr(workers, '_loops', [])

    async def where():
      return threading.get_ident()

    first = await workers.call_on_user_loop(where)
    workers._loops[0].blocked = True
    workers.home.set(workers.Home())
    own = await workers.call_on_user_loop(where)
    workers._loops[0].blocked = False
    assert own == await workers.call_on_user_loop(where) != first
    workers.home.set(workers.Home())
    assert await workers.call_on_user_loop(where) == first
    alone = set()
    homes = [workers.Home(spread=True) for _ in range(5)]
    for home in homes:
      workers.home.set(home)
      alone.add(await workers.call_on_user_loop(where))
    assert len(alone) == 5 and not alone & {first, own}

  async def test_a_call_does_not_pay_for_what_blocks_beside_it(self, clock):
    """An answer that arrives while another coroutine blocks is read after that."""

    async def arrives():
      await asyncio.sleep(0.1)
      return 'answer'

    async def blocks():
      clock.advance(4)

    tool = asyncio.ensure_future(workers.call(arrives, seconds=3))
    asyncio.ensure_future(blocks())
    assert await tool == 'answer'

  async def test_a_coroutine_that_a_function_returns_is_awaited(self):
    async def later():
      return threading.current_thread().name

    assert await workers.call(lambda: later()) == threading.current_thread().name
    assert await workers.call_on_user_loop(lambda: later()) == 'users'
    assert await workers.call_on_user_loop(functools.partial(later)) == 'users'


_EXIT = """
  import asyncio, os, threading, time
  from agent_r1_jax.host import thread_pool, workers

  def hang():
    threading.Event().wait()

  async def hang_in_thread():
    await asyncio.to_thread(hang)

  async def block():
    hang()

  ended = threading.Event()

  def late():
    ended.wait()  # It answers after the loop has gone.

  async def begin():
    pass  # It is the event loop of users' functions that begins.

  async def main():
    await workers.call_on_user_loop(begin)
    for fn in (late, hang, hang_in_thread, block):
      try:
        await workers.call_on_user_loop(fn, seconds=0.1)
      except workers.CallTimeoutError as error:
        print(fn.__name__)

    print(await workers.call(fork))

  def fork():
    child = os.fork()
    if not child:
      os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

  asyncio.run(main())
  ended.set()
  while 'late' in thread_pool.POOL.abandoned:
    time.sleep(0.001)
  print('end')
"""


def test_the_interpreter_ends_whatever_hangs_and_a_forked_process_may_leave():
  # Python 3.12 warns of a fork beside threads, which is what users do.
  code = 'import warnings; warnings.simplefilter("ignore")\n' + textwrap.dedent(_EXIT)
  run = script.run('-c', code, timeout=120)
  assert run.stdout.split() == ['late', 'hang', 'hang_in_thread', 'block', '7', 'end']
  named = 'late has given no answer for 0.05 of 0.1 seconds'
  lines = run.stderr.splitlines()
  assert run.returncode == 0 and len(lines) == 4 and named in lines[0], run.stderr
