"""A bounded pool of daemon threads that nobody joins; see workers.py."""

import collections
from collections.abc import Callable
from concurrent import futures
import contextlib
import contextvars
import dataclasses
import functools
import math
import os
import threading
import time
from typing import Any

# Where the episode that is being played counts its abandoned calls, by name.
abandoned_calls: contextvars.ContextVar[collections.Counter | None] = (
  contextvars.ContextVar('abandoned_calls', default=None)
)
# `process` is set, to its id, in the threads that run users' functions.
_thread = threading.local()


class PoolFullError(RuntimeError):
  """Too many abandoned calls have not come back, so no further call is begun."""


@dataclasses.dataclass(frozen=True)
class Caller:
  """Whom work is done for.

  Attributes:
    name: What is said of it.
    deadline: Of time.monotonic(), after which nobody waits for it.
    root: The first caller, where one function calls another.
  """

  name: str
  deadline: float = math.inf
  root: 'Caller | None' = None


current_caller: contextvars.ContextVar[Caller | None] = contextvars.ContextVar(
  'caller', default=None
)


class Call(futures.Future):
  """A function at work in a pool.

  It stays 'pending' until it has ended, so that it can be cancelled at any time: a call
  that is cancelled while it runs is abandoned.

  Attributes:
    name: What is said of it.
    begun: Whether a thread has taken it.
  """

  def __init__(self, pool: 'Pool', fn: Callable[[], Any]):
    super().__init__()
    caller = current_caller.get()
    self._pool, self._fn, self._tally = pool, fn, abandoned_calls.get()
    self.name = caller.name if caller else function_name(fn)
    self.deadline = caller.deadline if caller else math.inf
    self.started = False

  def cancel(self) -> bool:
    """Gives the call up."""
    if not super().cancel():
      return False
    self._pool.leave(self)
    return True

  def count(self):
    """Notes in the episode's tally that it was abandoned."""
    if self._tally is not None:
      self._tally[self.name] += 1

  def run(self):
    """Calls the function; whatever it raises is the future's exception."""
    fn, self._fn = self._fn, None
    try:
      end = functools.partial(self.set_result, fn())  # type: ignore
    except StopIteration as error:
      # An asyncio future refuses it, and whoever awaits that would wait for ever.
      end = functools.partial(self.set_exception, RuntimeError(f'StopIteration: {error}'))
    except BaseException as error:
      end = functools.partial(self.set_exception, error)
    try:
      end()
    except (futures.InvalidStateError, RuntimeError):
      pass  # It was abandoned, or the loop that waited for it is closed.


class Pool:
  """At most so many threads at work; further calls wait for one of them.

  Threads are daemons and never joined. A thread whose call was abandoned has lost its
  place to a new one; when its function returns after all, it ends.
  """

  def __init__(self, threads: int = 64, max_abandoned: int = 256):
    """Starts no thread.

    Args:
      threads: The most that are at work at a time, abandoned ones aside.
      max_abandoned: Calls that were abandoned and have not come back: with so many, no
        further call is begun.
    """
    self._threads, self._max_abandoned = threads, max_abandoned
    self._changed = threading.Condition()
    self._waiting: collections.deque[Call] = collections.deque()
    self._busy: set[Call] = set()
    self._abandoned: set[Call] = set()
    self._alive = self._idle = 0

  def grow(self, threads: int):
    """Lets at least so many be at work at a time."""
    self._threads = max(self._threads, threads)

  @property
  def abandoned(self) -> dict[str, int]:
    """How many abandoned calls have not come back, by name."""
    with self._changed:
      return dict(collections.Counter(call.name for call in self._abandoned))

  @property
  def busy(self) -> int:
    """How many calls have a place."""
    return len(self._busy)

  def submit(self, fn: Callable[[], Any]) -> Call:
    """Calls fn in a thread, in the present context.

    Raises:
      PoolFullError: Too many calls were abandoned.
      RuntimeError: The system gives no thread, and the pool has none.
    """
    call = Call(self, functools.partial(contextvars.copy_context().run, fn))
    for late in self._late():
      late.cancel()
    if len(self._abandoned) >= self._max_abandoned:
      raise PoolFullError(
        f'{len(self._abandoned)} calls hang ({_counts(self.abandoned)}); '
        'no further call is begun before some of them come back.'
      )
    with self._changed:
      self._waiting.append(call)
      try:
        self._staff()
      except RuntimeError:
        if not self._alive:  # Else one of those takes it.
          self._waiting.remove(call)
          raise
    return call

  def leave(self, call: Call):
    """Takes a cancelled call out of the queue, or gives its place to another."""
    with self._changed:
      if call in self._waiting:
        self._waiting.remove(call)
      elif call in self._busy:
        self._busy.remove(call)
        self._abandoned.add(call)
        self._alive -= 1
        call.count()
        if self._waiting:
          with contextlib.suppress(RuntimeError):  # The other threads go on.
            self._staff()

  def _late(self) -> list[Call]:
    """Calls nobody waits for, if places are wanting: they may have been shielded."""
    with self._changed:
      if self._alive < self._threads or self._idle > len(self._waiting):
        return []
      now = time.monotonic()
      return [call for call in self._busy if call.deadline < now]

  def _staff(self):
    """Wakes a thread, or starts one; the lock is held."""
    if self._idle >= len(self._waiting) or self._alive >= self._threads:
      self._changed.notify()
      return
    threading.Thread(target=self._work, name='worker', daemon=True).start()
    self._alive += 1

  def _work(self):
    mark_user_thread()
    while True:
      with self._changed:
        while not self._waiting:
          self._idle += 1
          self._changed.wait()
          self._idle -= 1
        call = self._waiting.popleft()
        call.started = True
        self._busy.add(call)
      call.run()
      with self._changed:
        if call in self._abandoned:
          self._abandoned.remove(call)
          return  # Another thread has this one's place.
        self._busy.discard(call)
      del call


def function_name(fn: Callable) -> str:
  """What the function is called where it was defined."""
  while isinstance(fn, functools.partial):
    fn = fn.args[0] if fn.args and callable(fn.args[0]) else fn.func
  return getattr(fn, '__name__', type(fn).__name__)


def _counts(numbers: dict[str, int]) -> str:
  most = sorted(numbers.items(), key=lambda item: -item[1])[:5]
  return ', '.join(f'{name}: {count}' for name, count in most)


def mark_user_thread():
  """Says that the present thread runs users' functions."""
  _thread.process = os.getpid()


def _contain_exit():
  """Makes os._exit an error of the call, where a user's function calls it.

  It would end the run with the status that the function chose, such as 0. Other threads
  and forked processes end as ever.
  """
  leave = os._exit

  def contained(status=0):
    if getattr(_thread, 'process', None) == os.getpid():
      raise SystemExit(f'os._exit({status})')
    leave(status)

  os._exit = contained
  if os.name == 'posix':
    import posix

    posix._exit = contained


_contain_exit()
