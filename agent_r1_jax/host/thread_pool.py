"""A bounded pool of daemon threads for users' functions, and reports of their calls.

workers.py explains what runs in it and why. Importing this module replaces os._exit by a
function that raises in these threads.
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

# Counts the abandoned calls of the current episode, by name.
abandoned_calls: contextvars.ContextVar[collections.Counter | None] = (
  contextvars.ContextVar('abandoned_calls', default=None)
)
# The place in the current episode, for the log, such as 'task 7, turn 2'.
current_turn: contextvars.ContextVar[str] = contextvars.ContextVar(
  'current_turn', default=''
)
# Threads that run users' functions have the attribute `process`, the process's id.
_thread = threading.local()
# The most characters of an exception's text.
_MAX_CHARS = 10_000


class PoolFullError(RuntimeError):
  """Too many abandoned calls still hang, so no more calls are started."""


class LostCallError(RuntimeError):
  """A call got no answer through no fault of its own; its episode can be played again."""


class BaseExceptionError(RuntimeError):
  """A call raised an exception that would end more than the call, or was cancelled.

  Its __cause__ is that exception: SystemExit or the like, or StopIteration, which a
  coroutine cannot raise. A cancelled future leaves no cause.
  """


@dataclasses.dataclass(eq=False)
class Caller:
  """The caller of a function.

  Attributes:
    name: The name of the work in errors and counts.
    deadline: When nobody waits for it any longer, in seconds of time.monotonic().
    outer: The caller of the user's function that makes this call, if any.
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
    """The time in which a cancelled coroutine must end, or count as abandoned.

    A call gets half the time of the call around it, so that only the call that hangs is
    counted.
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
    name: The call's name in errors and counts.
    deadline: When nobody waits for it any longer, in seconds of time.monotonic().
    started: Whether a thread has started it.
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
    """Gives up the call, and frees its place in the pool."""
    if not super().cancel():
      return False
    if self._pool.release(self):
      _count_abandoned(self._abandoned_calls, self.name)
    return True

  def run(self):
    """Calls the function; any exception becomes the future's exception."""
    fn, self._fn = self._fn, None
    try:
      finish = functools.partial(self.set_result, fn())  # type: ignore
    except StopIteration as error:
      # An asyncio future rejects StopIteration, and its awaiter would wait forever.
      error = RuntimeError(f'StopIteration: {error}')
      finish = functools.partial(self.set_exception, error)
    except BaseException as error:
      finish = functools.partial(self.set_exception, error)
    # The call may have been abandoned, or the loop that waited for it closed.
    with contextlib.suppress(futures.InvalidStateError, RuntimeError):
      finish()


class Pool:
  """Runs a limited number of calls at a time; further calls wait for a place.

  Threads are daemons and are never joined. An abandoned call loses its place to the next
  call; its thread ends when the function returns after all.
  """

  def __init__(self, threads: int = 64, max_abandoned: int = 256):
    """Starts no thread.

    At most `threads` calls run at a time, apart from abandoned calls; while
    `max_abandoned` of those hang, no more calls are started.
    """
    self._threads, self._max_abandoned = threads, max_abandoned
    self._changed = threading.Condition()
    self._waiting: collections.deque[Call] = collections.deque()
    self._running: set[Call] = set()
    self._abandoned: set[Call] = set()
    # Coroutines that keep running after they were cancelled, with their names.
    self._coroutines: dict[asyncio.Task, str] = {}
    self._idle = 0  # Threads without a call; with running threads, at most `threads`.

  def grow(self, threads: int):
    """Lets at least `threads` calls run at a time."""
    self._threads = max(self._threads, threads)

  @property
  def abandoned(self) -> dict[str, int]:
    """The number of abandoned calls that still hang, by name."""
    with self._changed:
      names = [call.name for call in self._abandoned]
      names += [name for task, name in self._coroutines.items() if not task.done()]
    return dict(collections.Counter(names))

  @property
  def busy(self) -> int:
    """The number of running calls, without abandoned calls."""
    return len(self._running)

  def submit(self, fn: Callable[[], Any]) -> Call:
    """Calls fn in a thread, in the current context.

    Raises:
      PoolFullError: Too many abandoned calls hang.
      RuntimeError: The system refuses a thread, and no thread of the pool is alive.
    """
    call = Call(self, fn)
    with self._changed:
      if len(self._running) >= self._threads:
        # Nobody waits for these any longer, but a shield kept them from cancellation.
        for overdue in [c for c in self._running if c.deadline < time.monotonic()]:
          overdue.cancel()
      self.check_room()
      self._waiting.append(call)
      try:
        self._start_threads()
      except RuntimeError:
        if not (self._running or self._idle):  # Otherwise an existing thread takes it.
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
    """Counts a cancelled coroutine that keeps running, until it ends."""
    with self._changed:
      for ended in [task for task in self._coroutines if task.done()]:
        del self._coroutines[ended]
      self._coroutines[task] = name
    _count_abandoned(abandoned_calls.get(), name)

  def release(self, call: Call) -> bool:
    """Removes a cancelled call; returns whether it was running and is now abandoned."""
    with self._changed:
      if call in self._waiting:
        self._waiting.remove(call)
      if call not in self._running:
        return False
      self._running.remove(call)
      self._abandoned.add(call)
      # Without new threads, existing threads take the waiting calls one by one.
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
      del call  # A waiting thread must not keep a result alive.


POOL = Pool()


class Executor(futures.ThreadPoolExecutor):
  """Lets asyncio.to_thread use the pool; a real executor's threads are joined at exit."""

  def submit(self, fn, /, *args, **kwargs):
    """Calls fn in the pool."""
    return POOL.submit(functools.partial(fn, *args, **kwargs))

  def shutdown(self, wait=True, *, cancel_futures=False):
    """Does nothing, because the pool's threads are never joined."""


def _count_abandoned(counts: collections.Counter | None, name: str):
  if counts is not None:
    counts[name] += 1


def function_name(fn: Callable) -> str:
  """Returns the name under which a function was defined."""
  while isinstance(fn, functools.partial):
    fn = fn.args[0] if fn.args and callable(fn.args[0]) else fn.func
  return getattr(fn, '__name__', type(fn).__name__)


def catch(fn, args, kwargs) -> tuple[Any, BaseException | None]:
  """Returns fn's value and its exception, to keep exceptions out of futures and loops."""
  try:
    return fn(*args, **kwargs), None
  except BaseException as error:
    return None, error


async def catch_async(fn, args, kwargs) -> tuple[Any, BaseException | None]:
  """Like `catch`, for a coroutine function."""
  try:
    return await fn(*args, **kwargs), None
  except BaseException as error:
    return None, error


def return_or_raise(value: Any, error: BaseException | None) -> Any:
  """Returns or raises the result of `catch`."""
  if error is None:
    return value
  if isinstance(error, Exception) and not isinstance(error, StopIteration):
    raise error
  raise BaseExceptionError(describe_error(error)) from error


def unwrap(future: asyncio.Future) -> Any:
  """Returns or raises a future's result of `catch`."""
  if future.cancelled():
    raise BaseExceptionError('CancelledError')
  return return_or_raise(*future.result())


@contextlib.contextmanager
def acting_for(caller: Caller):
  """Sets the caller of calls that are started inside `with`."""
  token = current_caller.set(caller)
  try:
    yield
  finally:
    current_caller.reset(token)


def is_async(fn: Callable) -> bool:
  """Whether a call of fn returns a coroutine; fn may be a callable object."""
  return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
    getattr(fn, '__call__', None)  # noqa: B004
  )


def describe_timeout(name: str, seconds: float, field: str, queued: bool = False) -> str:
  """Describes a call that timed out; a `queued` call never started."""
  text = f'{name} gave no answer within {seconds:g} seconds'
  if field:
    text += f' ({field})'
  if queued:
    busy = POOL.busy
    text += f': it waited for a free thread, and {busy} calls were at work'
  return text


def describe_error(error: BaseException) -> str:
  """Returns the exception's type and text; only the type if its text raises."""
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
    calls.pop()  # Our os._exit raised there.
  if not calls:
    return ''
  code, line = calls[-1]
  return f' ({code.co_filename}:{line}, in {code.co_name})'


def mark_user_thread():
  """Marks the current thread as one that runs users' functions."""
  _thread.process = os.getpid()


def _contain_exit():
  """Makes os._exit raise an error if a user's function calls it.

  Otherwise it would end the run with the function's status, such as 0. In other threads
  and in forked processes it still exits.
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
