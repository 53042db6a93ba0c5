"""Runs users' functions: tools, rewards, metrics and environments.

They are other people's code: they may block, hang, raise anything, or never return. So
none of them runs on the engine's event loop:

- A plain function runs in `thread_pool.POOL`, a bounded pool of daemon threads. A call
  that times out is abandoned: it gives up its place at once, is counted by name, and
  nothing waits for its thread, not even the interpreter's exit.
- A coroutine function runs on an event loop in another thread (`call_on_user_loop`),
  whose `asyncio.to_thread` uses the same pool. A late coroutine is cancelled, and counts
  as abandoned if it keeps running.
- Coroutines that block this loop cost only their own episodes: calls that have not
  started move to other loops, and their time starts there; calls that had started on the
  blocked loop raise LoopBlockedError, and their episodes can be played again. When the
  blocked loop continues, it gets new calls, because locks, semaphores and sessions that
  coroutines share work only on the event loop of their first use. For the same reason an
  episode stays on its loop (`Home`).

While too many abandoned calls hang, in threads and coroutines, no call is started.

Code that holds the interpreter itself (a catastrophic regular expression) stops every
thread; isolated.in_subprocess is for that.
"""

import asyncio
from collections.abc import Callable
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import logging
import math
import sys
import threading
import time
from typing import Any
import weakref

from agent_r1_jax.host import thread_pool
from agent_r1_jax.host.thread_pool import BaseExceptionError as BaseExceptionError
from agent_r1_jax.host.thread_pool import LostCallError as LostCallError
from agent_r1_jax.host.thread_pool import describe_error as describe_error
from agent_r1_jax.host.thread_pool import is_async as is_async
from agent_r1_jax.host.thread_pool import locate_error as locate_error

# An event loop that starts no call for this long counts as blocked.
BLOCKED_SECONDS = 5.0
# The most event loops for calls that another call holds up.
_MOST_LOOPS = 16
# If a timer is this late, its event loop was held up.
_HELD_UP_SECONDS = 0.5
# The log names a call after half of its time, or after this many seconds.
_NAMED_SECONDS = 60.0


class CallTimeoutError(TimeoutError):
  """A call timed out and was abandoned."""


class LoopBlockedError(LostCallError):
  """The event loop that the call was on is blocked by another call."""


@dataclasses.dataclass(eq=False)
class Home:
  """The event loop of one episode's coroutines.

  Attributes:
    spread: Whether to choose among several loops, because others blocked the episode.
    loop: The loop of the first call, where later calls follow.
  """

  spread: bool = False
  loop: 'UserLoop | None' = None


# The home of the current episode.
home: contextvars.ContextVar[Home | None] = contextvars.ContextVar('home', default=None)


class UserLoop:
  """An event loop for users' coroutines, in a daemon thread."""

  def __init__(self, spread: bool):
    """Starts the loop's thread."""
    self.spread = spread  # Whether the loop is for calls that others have held up.
    self.homes: weakref.WeakSet[Home] = weakref.WeakSet()  # Homes with calls here.
    self.loop = asyncio.new_event_loop()
    self.loop.set_default_executor(thread_pool.Executor())
    self.loop.set_task_factory(self._make_task)
    self._callers = weakref.WeakKeyDictionary()
    self.blocked = False
    self._thread = threading.Thread(target=self._run, name='users', daemon=True)
    self._thread.start()

  def pass_over(self):
    """Keeps new calls away from this loop until it continues."""
    self.blocked = True
    # Runs when the loop continues, so after the line above.
    self.loop.call_soon_threadsafe(setattr, self, 'blocked', False)

  def find_blocker(self) -> tuple[thread_pool.Caller | None, str]:
    """Finds who blocks the loop, which must be blocked.

    Returns:
      The outermost caller, if known, and a text with name and place.
    """
    frame = sys._current_frames().get(self._thread.ident or 0)
    task = asyncio.current_task(self.loop)
    if frame is None:
      return None, ''
    caller = self._callers.get(task) if task else None
    where = f'({frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name})'
    name = caller.name if caller else 'a task of its own'
    text = f'{name} {where}, which should be a plain function or await asyncio.to_thread,'
    return (caller and caller.root), text

  def _make_task(self, loop, coroutine, **kwargs):
    task = asyncio.Task(coroutine, loop=loop, **kwargs)
    self._callers[task] = thread_pool.current_caller.get()
    return task

  def _run(self):
    thread_pool.mark_user_thread()
    while not self.loop.is_closed():
      try:
        self.loop.run_forever()
      except BaseException:
        pass  # A task raised SystemExit, which the task's awaiter gets.


# The event loops of users' coroutines, oldest first. They never end: an unneeded loop is
# used again when another is blocked.
_loops: list[UserLoop] = []
_loops_lock = threading.Lock()


def _choose_loop(episode_home: Home, moved: bool) -> UserLoop:
  """Chooses an unblocked event loop for a call, and adds the episode's home to it.

  Prefers the home's loop, then the oldest, so that coroutines can share objects bound to
  a loop. A call that moves, or a spread home, gets the loop with the fewest homes among
  loops that new episodes do not use.
  """
  spread = moved or episode_home.spread
  with _loops_lock:
    free = [loop for loop in _loops if not (loop.blocked or loop.loop.is_closed())]
    loops = [loop for loop in free if loop.spread == spread]
    chosen = min(loops, key=lambda loop: len(loop.homes) * spread, default=None)
    if episode_home.loop in free and not moved:
      chosen = episode_home.loop
    elif not chosen or (spread and chosen.homes and len(loops) < _MOST_LOOPS):
      _loops.append(chosen := UserLoop(spread))
    chosen.homes.add(episode_home)
    return chosen


async def call(
  fn: Callable,
  *args,
  name: str = '',
  seconds: float = math.inf,
  field: str = '',
  **kwargs,
) -> Any:
  """Calls a user's function, plain in the pool or a coroutine function on this loop.

  Every Exception except StopIteration passes through. A function that takes too long, or
  whose caller is cancelled, is abandoned; a coroutine is cancelled, and abandoned if it
  keeps running. `seconds` includes the wait for a free thread.

  Errors and counts use `name`, by default the function's name; `field` is the
  configuration's field that sets `seconds`, for the error's text.

  Raises:
    CallTimeoutError: The call took too long.
    BaseExceptionError: It raised SystemExit, CancelledError, StopIteration or the like.
    PoolFullError: Too many abandoned calls hang.
  """
  name, outer = name or thread_pool.function_name(fn), thread_pool.current_caller.get()
  deadline = time.monotonic() + seconds
  caller = thread_pool.Caller(name, deadline, outer)
  with thread_pool.acting_for(caller):
    if is_async(fn):
      thread_pool.POOL.check_room()
      work = future = asyncio.ensure_future(thread_pool.catch_async(fn, args, kwargs))
    else:
      work = thread_pool.POOL.submit(
        functools.partial(thread_pool.catch, fn, args, kwargs)
      )
      future = asyncio.wrap_future(work)
  timer = _name_if_late(name, seconds)
  try:
    await _wait(future, seconds)
  except asyncio.CancelledError:
    await _give_up(work, caller)
    raise
  finally:
    timer.cancel()
  if _is_late(future, deadline):
    queued = isinstance(work, thread_pool.Call) and not work.started
    await _give_up(work, caller)
    raise CallTimeoutError(thread_pool.describe_timeout(name, seconds, field, queued))
  value = thread_pool.unwrap(future)
  if not inspect.isawaitable(value):
    return value
  left = deadline - time.monotonic()
  return await call(_await, value, name=name, seconds=left, field=field)


async def _give_up(work: thread_pool.Call | asyncio.Task, caller: thread_pool.Caller):
  """Cancels a call; counts a coroutine that keeps running."""
  work.cancel()
  if isinstance(work, asyncio.Task):
    try:
      await _wait(work, caller.grace_seconds)
    finally:
      if not work.done():
        thread_pool.POOL.abandon(work, caller.name)


async def call_on_user_loop(
  fn: Callable, *args, name: str = '', seconds: float = math.inf, field: str = ''
) -> Any:
  """Like `call`, but a coroutine function runs on the event loop of users' functions.

  For callers whose own loop must not be blocked by a coroutine.

  Raises:
    LoopBlockedError: Another call blocks the event loop that this call is on.
  """
  name = name or thread_pool.function_name(fn)
  if not is_async(fn):
    # A plain function may return a coroutine. `catch` keeps it in a tuple, so that
    # `call` leaves it to the user loop below.
    run = functools.partial(thread_pool.catch, fn, args, {})
    value, error = await call(run, name=name, seconds=seconds, field=field)
    if error is not None or not inspect.isawaitable(value):
      return thread_pool.return_or_raise(value, error)
    fn, args = _await, (value,)
  thread_pool.POOL.check_room()
  caller, episode_home = thread_pool.Caller(name), home.get() or Home()
  timer = _name_if_late(name, seconds)
  attempt = _UserLoopCall(fn, args, caller, seconds, episode_home)
  try:
    while await attempt.wait():
      attempt = _UserLoopCall(fn, args, caller, seconds, episode_home, moved=True)
  except asyncio.CancelledError:
    await attempt.give_up()
    raise
  finally:
    timer.cancel()
  if not _is_late(attempt.future, attempt.deadline):
    return thread_pool.unwrap(attempt.future)
  blocker, text = await attempt.give_up()
  if text and blocker is not caller:
    raise LoopBlockedError(f'{name} was on an event loop that {text} blocks.')
  reason = f'; {text} blocks its event loop' if text else ''
  raise CallTimeoutError(thread_pool.describe_timeout(name, seconds, field) + reason)


class _UserLoopCall:
  """A coroutine function that waits to start, or runs, on one of the users' event loops.

  If another call blocks that loop, this call may move to another loop, but must never run
  twice. So there is one lock, acquired once and never released: by the loop when it
  starts the call, or by the caller after BLOCKED_SECONDS:

    the loop is free:      it takes the lock and runs the call; the caller only waits.
    another call blocks:   the caller takes the lock and makes a new attempt elsewhere;
                           the loop later finds the lock taken and does nothing.
    this call blocks:      the loop has the lock, so the call is late where it is.

  Attributes:
    future: The result of `thread_pool.catch_async`; it belongs to the caller's loop.
    deadline: When a started call is late, in seconds of time.monotonic().
  """

  def __init__(
    self,
    fn: Callable,
    args: tuple,
    caller: thread_pool.Caller,
    seconds: float,
    episode_home: Home,
    moved: bool = False,
  ):
    self._fn, self._args, self._caller, self._seconds = fn, args, caller, seconds
    self._home = episode_home
    self._user_loop = _choose_loop(episode_home, moved)
    self._claim, self.deadline = threading.Lock(), math.inf
    self._task: asyncio.Task | None = None
    self._cancelled = False
    self._own_loop = asyncio.get_running_loop()
    self.future = self._own_loop.create_future()
    with thread_pool.acting_for(caller):
      self._user_loop.loop.call_soon_threadsafe(self._begin)

  async def wait(self) -> bool:
    """Waits until the call has ended or is late; returns True if it moves instead."""
    await _wait(self.future, min(BLOCKED_SECONDS, self._seconds))
    if not (self.future.done() or self._claim.locked()):
      # The caller's loop may have been held up together with the users' loop.
      await _wait(self.future, BLOCKED_SECONDS / 20)
    if self.future.done():
      return False
    if self._claim.acquire(blocking=False):
      self._user_loop.pass_over()
      return True
    await _wait(self.future, self.deadline - time.monotonic())
    return False

  async def give_up(self) -> tuple[thread_pool.Caller | None, str]:
    """Cancels the call, and counts it if it keeps running.

    Calls that wait while another call blocks the loop are not counted: the loop ends them
    as soon as it continues.

    Returns:
      The result of `UserLoop.find_blocker`; the text is '' if nobody blocks the loop.
    """
    self._user_loop.loop.call_soon_threadsafe(self._cancel)
    blocker, text = None, ''
    try:
      await _wait(self.future, min(self._caller.grace_seconds, BLOCKED_SECONDS))
      if not (self.future.done() or self._cancelled):
        blocker, text = self._user_loop.find_blocker()
        self._user_loop.pass_over()
    finally:
      held_up = text and blocker is not self._caller
      if self._task and not (self._task.done() or held_up):
        thread_pool.POOL.abandon(self._task, self._caller.name)
    return blocker, text

  def _begin(self):
    """Makes the task; this and the methods below run on the users' loop."""
    work = thread_pool.catch_async(self._claim_and_call, (), {})
    self._task = self._user_loop.loop.create_task(work)
    self._task.add_done_callback(self._send_answer)

  async def _claim_and_call(self):
    # Set before the lock is taken, after which the caller reads it.
    self.deadline = time.monotonic() + self._seconds
    if self._claim.acquire(blocking=False):
      self._caller.deadline = self.deadline
      self._home.loop = self._home.loop or self._user_loop
      return await self._fn(*self._args)

  def _cancel(self):
    self._cancelled = True
    if self._task:
      self._task.cancel()

  def _send_answer(self, task: asyncio.Task):
    def set_answer():
      if task.cancelled():
        self.future.cancel()
      elif not self.future.done():
        self.future.set_result(task.result())

    with contextlib.suppress(RuntimeError):  # The caller's loop may be closed.
      self._own_loop.call_soon_threadsafe(set_answer)


async def _await(value):
  return await value


def _is_late(future: asyncio.Future, deadline: float) -> bool:
  """Whether a call timed out.

  A busy pool may give up the call, or a call it waits for, before its caller wakes.
  """
  if not future.done():
    return True
  given_up = future.cancelled() or isinstance(future.result()[1], asyncio.CancelledError)
  return given_up and time.monotonic() >= deadline


async def _wait(future: asyncio.Future, seconds: float):
  """Waits for a future; time in which this loop is held up does not count."""
  while True:
    start, timeout = time.monotonic(), None if seconds == math.inf else max(seconds, 0)
    await asyncio.wait([future], timeout=timeout)
    seconds = time.monotonic() - start - (timeout or 0)
    if future.done() or seconds < _HELD_UP_SECONDS:
      return


def _name_if_late(name: str, seconds: float) -> asyncio.TimerHandle:
  """Logs a call's name before it is given up, unless the timer is cancelled."""
  late, where = min(seconds / 2, _NAMED_SECONDS), thread_pool.current_turn.get()
  text = (
    f'{name} has given no answer for {round(late, 2):g} of {round(seconds, 2):g} seconds'
  )
  text += f' ({where})' if where else ''
  return asyncio.get_running_loop().call_later(late, logging.warning, '%s', text)
