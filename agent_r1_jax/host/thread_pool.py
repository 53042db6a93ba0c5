"""A bounded pool of daemon threads for users' functions, and what their calls report.

What runs in it and why is in workers.py. Importing this module replaces os._exit, which
raises in these threads.
"""

import asyncio
import collections
from collections.abc import Callable
from concurrent import futures
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import math
import os
import threading
import time
import traceback
from typing import Any

# Counts the abandoned calls of the episode that is being played, by name.
abandoned_calls: contextvars.ContextVar[collections.Counter | None] = (
  contextvars.ContextVar('abandoned_calls', default=None)
)
# Where the episode that is being played is, for the log, such as 'task 7, turn 2'.
current_turn: contextvars.ContextVar[str] = contextvars.ContextVar(
  'current_turn', default=''
)
# Threads that run users' functions have the attribute `process`, the process's id.
_thread = threading.local()
# An exception's text is cut to so many characters.
_MAX_CHARS = 10_000


class PoolFullError(RuntimeError):
  """Too many abandoned calls still hang, so no further call is started."""


class LostCallError(RuntimeError):
  """A call has no answer, and is not to blame: its episode can be played again."""


class BaseExceptionError(RuntimeError):
  """A call raised what would end more than the call, or was cancelled.

  Its __cause__ is what was raised: SystemExit or the like, or StopIteration, which no
  coroutine can raise. A future that was cancelled leaves no cause.
  """


@dataclasses.dataclass(eq=False)
class Caller:
  """On whose behalf a function runs.

  Attributes:
    name: What errors and counts call the work.
    deadline: When nobody waits for it any longer, in seconds of time.monotonic().
    outer: The caller of the function that makes this call, if that is a user's, too.
  """

  name: str
  deadline: float = math.inf
  outer: 'Caller | None' = None

  @property
  def root(self) -> 'Caller':
    """The outermost caller."""
    return self.outer.root if self.outer else self

  @property
  def grace_seconds(self) -> float:
    """How long a cancelled coroutine has to end before it counts as abandoned.

    A call has half as long as the call around it, so that of the two only the one that
    hangs is counted.
    """
    return self.outer.grace_seconds / 2 if self.outer else 1.0


current_caller: contextvars.ContextVar[Caller | None] = contextvars.ContextVar(
  'caller', default=None
)


class Call(futures.Future):
  """One function in a pool.

  The future stays 'pending' while the function runs, so that it can be cancelled at any
  time. A call that is cancelled while it runs is abandoned.

  Attributes:
    name: What errors and counts call it.
    deadline: When nobody waits for it any longer, in seconds of time.monotonic().
    started: Whether a thread runs it, or ran it.
  """

  def __init__(self, pool: 'Pool', fn: Callable[[], Any]):
    super().__init__()
    caller = current_caller.get()
    self._pool, self._abandoned_calls = pool, abandoned_calls.get()
    self._fn = functools.partial(contextvars.copy_context().run, fn)
    self.name = caller.name if caller else function_name(fn)
    self.deadline = caller.deadline if caller else math.inf
    self.started = False

  def cancel(self) -> bool:
    """Gives the call up, and its place in the pool to another."""
    if not super().cancel():
      return False
    if self._pool.release(self):
      _count_abandoned(self._abandoned_calls, self.name)
    return True

  def run(self):
    """Calls the function; whatever it raises becomes the future's exception."""
    fn, self._fn = self._fn, None
    try:
      finish = functools.partial(self.set_result, fn())  # type: ignore
    except StopIteration as error:
      # An asyncio future refuses it, and whoever awaits that would wait for ever.
      error = RuntimeError(f'StopIteration: {error}')
      finish = functools.partial(self.set_exception, error)
    except BaseException as error:
      finish = functools.partial(self.set_exception, error)
    # It may have been abandoned, or the loop that waited for it is closed.
    with contextlib.suppress(futures.InvalidStateError, RuntimeError):
      finish()


class Pool:
  """Runs at most so many calls at a time; further calls wait for a place.

  Threads are daemons and are never joined. An abandoned call loses its place to the next
  one; its thread ends when the function returns after all.
  """

  def __init__(self, threads: int = 64, max_abandoned: int = 256):
    """Starts no thread.

    At most `threads` calls run at a time, abandoned ones aside; while `max_abandoned` of
    those hang, no further call is started.
    """
    self._threads, self._max_abandoned = threads, max_abandoned
    self._changed = threading.Condition()
    self._waiting: collections.deque[Call] = collections.deque()
    self._running: set[Call] = set()
    self._abandoned: set[Call] = set()
    # Coroutines that go on though they were cancelled, with their names.
    self._coroutines: dict[asyncio.Task, str] = {}
    self._idle = 0  # Threads without a call; with the running ones, at most `threads`.

  def grow(self, threads: int):
    """Lets at least so many calls run at a time."""
    self._threads = max(self._threads, threads)

  @property
  def abandoned(self) -> dict[str, int]:
    """How many abandoned calls still hang, by name."""
    with self._changed:
      names = [call.name for call in self._abandoned]
      names += [name for task, name in self._coroutines.items() if not task.done()]
    return dict(collections.Counter(names))

  @property
  def busy(self) -> int:
    """How many calls run, abandoned ones aside."""
    return len(self._running)

  def submit(self, fn: Callable[[], Any]) -> Call:
    """Calls fn in a thread, in the present context.

    Raises:
      PoolFullError: Too many abandoned calls hang.
      RuntimeError: The system gives no thread, and no thread of the pool is alive.
    """
    call = Call(self, fn)
    with self._changed:
      if len(self._running) >= self._threads:
        # Nobody waits for these any longer, though a shield kept them from being
        # cancelled.
        for overdue in [c for c in self._running if c.deadline < time.monotonic()]:
          overdue.cancel()
      self.check_room()
      self._waiting.append(call)
      try:
        self._start_threads()
      except RuntimeError:
        if not (self._running or self._idle):  # Else one of those threads takes it.
          self._waiting.remove(call)
          raise
    return call

  def check_room(self):
    """Raises PoolFullError if too many abandoned calls hang."""
    hanging = collections.Counter(self.abandoned)
    if hanging.total() >= self._max_abandoned:
      counts = ', '.join(f'{name}: {count}' for name, count in hanging.most_common(5))
      raise PoolFullError(
        f'{hanging.total()} calls hang ({counts}); no further call is started before '
        'some of them come back.'
      )

  def abandon(self, task: asyncio.Task, name: str):
    """Counts a coroutine that goes on though it was cancelled, until it ends."""
    with self._changed:
      for ended in [task for task in self._coroutines if task.done()]:
        del self._coroutines[ended]
      self._coroutines[task] = name
    _count_abandoned(abandoned_calls.get(), name)

  def release(self, call: Call) -> bool:
    """Takes a cancelled call out; returns whether it was running, and is abandoned."""
    with self._changed:
      if call in self._waiting:
        self._waiting.remove(call)
      if call not in self._running:
        return False
      self._running.remove(call)
      self._abandoned.add(call)
      # Without new threads, the others take the waiting calls one by one.
      with contextlib.suppress(RuntimeError):
        self._start_threads()
      return True

  def _start_threads(self):
    """Wakes or starts a thread for each waiting call with a place; the lock is held."""
    ready = min(len(self._waiting), self._threads - len(self._running))
    self._changed.notify(ready)
    while self._idle < ready:
      threading.Thread(target=self._work, name='worker', daemon=True).start()
      self._idle += 1

  def _work(self):
    mark_user_thread()
    while True:
      with self._changed:
        while not self._waiting:
          self._changed.wait()
        call = self._waiting.popleft()
        call.started = True
        self._idle -= 1
        self._running.add(call)
      call.run()
      with self._changed:
        if call in self._abandoned:
          self._abandoned.remove(call)
          return  # Another thread has this one's place.
        self._running.remove(call)
        self._idle += 1
      del call  # While this thread waits, it keeps no result alive.


POOL = Pool()


class Executor(futures.ThreadPoolExecutor):
  """Lets asyncio.to_thread use the pool; a real executor's threads are joined at exit."""

  def submit(self, fn, /, *args, **kwargs):
    """Calls fn in the pool."""
    return POOL.submit(functools.partial(fn, *args, **kwargs))

  def shutdown(self, wait=True, *, cancel_futures=False):
    """Does nothing: nobody waits for the pool's threads."""


def _count_abandoned(counts: collections.Counter | None, name: str):
  if counts is not None:
    counts[name] += 1


def function_name(fn: Callable) -> str:
  """Returns what the function is called where it was defined."""
  while isinstance(fn, functools.partial):
    fn = fn.args[0] if fn.args and callable(fn.args[0]) else fn.func
  return getattr(fn, '__name__', type(fn).__name__)


def catch(fn, args, kwargs) -> tuple[Any, BaseException | None]:
  """Returns fn's value and its exception: none of these gets into a future or a loop."""
  try:
    return fn(*args, **kwargs), None
  except BaseException as error:
    return None, error


async def catch_async(fn, args, kwargs) -> tuple[Any, BaseException | None]:
  """Like `catch`, of a coroutine function."""
  try:
    return await fn(*args, **kwargs), None
  except BaseException as error:
    return None, error


def return_or_raise(value: Any, error: BaseException | None) -> Any:
  """Returns or raises what `catch` caught."""
  if error is None:
    return value
  if isinstance(error, Exception) and not isinstance(error, StopIteration):
    raise error
  raise BaseExceptionError(describe_error(error)) from error


def unwrap(future: asyncio.Future) -> Any:
  """Returns or raises what `catch` caught."""
  if future.cancelled():
    raise BaseExceptionError('CancelledError')
  return return_or_raise(*future.result())


@contextlib.contextmanager
def acting_for(caller: Caller):
  """Names the caller of what is started inside."""
  token = current_caller.set(caller)
  try:
    yield
  finally:
    current_caller.reset(token)


def is_async(fn: Callable) -> bool:
  """Whether a call of fn gives a coroutine; fn may be an object that can be called."""
  return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
    getattr(fn, '__call__', None)  # noqa: B004
  )


def describe_timeout(name: str, seconds: float, field: str, queued: bool = False) -> str:
  """Says that a call gave no answer in its time; `queued` is one that never began."""
  text = f'{name} gave no answer within {seconds:g} seconds'
  if field:
    text += f' ({field})'
  if queued:
    busy = POOL.busy
    text += f': it waited for a free thread, and {busy} calls were at work'
  return text


def describe_error(error: BaseException) -> str:
  """Returns the exception's type and text; the type alone if its text raises."""
  try:
    text = str.__str__(str(error))
  except BaseException:
    text = ''
  return f'{type(error).__name__}: {text}'[:_MAX_CHARS] if text else type(error).__name__


def locate_error(error: BaseException) -> str:
  """Returns ' (file:line, in function)' where it was raised, or '' if that is unknown."""
  if isinstance(error, BaseExceptionError) or isinstance(error.__cause__, StopIteration):
    error = error.__cause__ or error
  calls = [(f.f_code, line) for f, line in traceback.walk_tb(error.__traceback__)]
  if calls and calls[-1][0].co_filename == __file__:
    calls.pop()  # os._exit was called, and raised there.
  if not calls:
    return ''
  code, line = calls[-1]
  return f' ({code.co_filename}:{line}, in {code.co_name})'


def mark_user_thread():
  """Marks the present thread as one that runs users' functions."""
  _thread.process = os.getpid()


def _contain_exit():
  """Makes os._exit an error of the call, where a user's function calls it.

  It would end the run with the status that the function chose, such as 0. Other threads
  and forked processes still end by it.
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
