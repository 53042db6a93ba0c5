"""Where users' functions run: tools, rewards, metrics and environments.

They are other people's code: they may block, hang, raise whatever can be raised, or never
come back. So none of them runs on the engine's event loop:

- A plain function runs in `thread_pool.POOL`, a bounded pool of daemon threads. A call
  that takes longer than its time-out is abandoned: it gives up its place at once, is
  counted by name, and nobody waits for its thread, not even the end of the interpreter.
- A coroutine function runs on an event loop in a thread of its own, by
  `call_on_user_loop`; the loop's `asyncio.to_thread` uses the same pool. A coroutine that
  is late is cancelled, and counts as abandoned if it goes on all the same.
- Coroutines that block this loop cost their own episodes only, however many do: calls
  that have not started move to other loops, and their time begins when they do; calls
  that were caught on the blocked one raise LoopBlockedError, after which their episodes
  can be played again. Once the blocked loop goes on, it gets new calls again, because
  locks, semaphores and sessions that coroutines share work only on the event loop that
  they were first used on; so an episode, too, stays where it began (`Home`).

While too many abandoned calls hang, threads and coroutines together, no call is started.

What holds the interpreter itself (a catastrophic regular expression) stops every thread;
isolated.in_subprocess is for that.
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

# An event loop that starts no call for so long counts as blocked.
BLOCKED_SECONDS = 5.0
# Calls that another one holds up are spread among so many event loops.
_MOST_LOOPS = 16
# A timer that is so late says that its event loop was held up.
_HELD_UP_SECONDS = 0.5
# A call is named in the log after half of its time, and after so many seconds at most.
_NAMED_SECONDS = 60.0


class CallTimeoutError(TimeoutError):
  """A call gave no answer in its time and was abandoned."""


class LoopBlockedError(LostCallError):
  """The event loop that the call was on is blocked by another call."""


@dataclasses.dataclass(eq=False)
class Home:
  """The event loop of one episode's coroutines.

  Attributes:
    spread: Whether it is chosen among many, because other episodes block it.
    loop: The loop on which the first call began, where the later ones follow it.
  """

  spread: bool = False
  loop: 'UserLoop | None' = None


# The home of the episode that is being played.
home: contextvars.ContextVar[Home | None] = contextvars.ContextVar('home', default=None)


class UserLoop:
  """An event loop for users' coroutines, in a daemon thread."""

  def __init__(self, spread: bool):
    """Starts the loop's thread."""
    self.spread = spread  # Whether it is for calls that others have held up.
    self.homes: weakref.WeakSet[Home] = weakref.WeakSet()  # Whose calls came here.
    self.loop = asyncio.new_event_loop()
    self.loop.set_default_executor(thread_pool.Executor())
    self.loop.set_task_factory(self._make_task)
    self._callers = weakref.WeakKeyDictionary()
    self.blocked = False
    self._thread = threading.Thread(target=self._run, name='users', daemon=True)
    self._thread.start()

  def pass_over(self):
    """Keeps new calls away from this loop until it goes on."""
    self.blocked = True
    # It is set before: this runs when the loop goes on, and so comes last.
    self.loop.call_soon_threadsafe(setattr, self, 'blocked', False)

  def find_blocker(self) -> tuple[thread_pool.Caller | None, str]:
    """Finds who blocks the loop, which is known not to go on.

    Returns:
      The outermost caller, if it is known, and a text with name and place.
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
        pass  # A task raised SystemExit; whoever awaits the task gets it.


# The event loops of users' coroutines, oldest first. None ends: one that is no longer
# needed is used again when another one is blocked.
_loops: list[UserLoop] = []
_loops_lock = threading.Lock()


def _choose_loop(episode_home: Home, moved: bool) -> UserLoop:
  """Chooses an event loop that is not blocked for a call, and adds its home there.

  It is the home's or the oldest one, so that coroutines may share what is bound to it.
  For a call that moves, or a home that is spread, it is that of some others, which new
  episodes do not enter, with the fewest homes.
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
  """Calls a user's function: a plain one in the pool, a coroutine function on this loop.

  An Exception that it raises passes through, but for StopIteration. A function that takes
  too long, or whose caller is cancelled, is abandoned; a coroutine is cancelled, and
  abandoned if it goes on all the same. `seconds` include the wait for a free thread.

  `name` is what errors and counts call it, by default its own name; `field` is the
  configuration's field that sets `seconds`, for the error's text.

  Raises:
    CallTimeoutError: It took longer.
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
  """Cancels a call; counts a coroutine that goes on all the same."""
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

  It is for callers whose own loop must go on whatever a coroutine does.

  Raises:
    LoopBlockedError: Another call blocks that event loop, and this one was on it.
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
  """A coroutine function that waits to begin, or runs, on one of the users' event loops.

  Where another call blocks that loop, this one may move to another loop, but must never
  run twice. So there is one lock, which whoever comes first takes and never gives back:
  the loop, when it begins the call, or the caller, who has waited BLOCKED_SECONDS:

    the loop is free:      it takes the lock and runs the call; the caller only waits.
    another call blocks:   the caller takes the lock and makes a new attempt elsewhere;
                           the loop, when it goes on, finds it taken and does nothing.
    this call blocks:      the loop has the lock, so that the call is late where it is.

  Attributes:
    future: What `thread_pool.catch_async` returns; it belongs to the caller's loop.
    deadline: When a call that has begun is late, in seconds of time.monotonic().
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
    """Waits until the call has ended, or began and is late; returns whether it moves."""
    await _wait(self.future, min(BLOCKED_SECONDS, self._seconds))
    if not (self.future.done() or self._claim.locked()):
      # The caller's loop may have been held up together with the other one.
      await _wait(self.future, BLOCKED_SECONDS / 20)
    if self.future.done():
      return False
    if self._claim.acquire(blocking=False):
      self._user_loop.pass_over()
      return True
    await _wait(self.future, self.deadline - time.monotonic())
    return False

  async def give_up(self) -> tuple[thread_pool.Caller | None, str]:
    """Cancels the call, and counts it if it goes on all the same.

    Calls that wait while another one blocks the loop are not counted: the loop ends them
    as soon as it goes on.

    Returns:
      Who blocks the loop, as `UserLoop.find_blocker` says it; the text is '' if nobody
      does.
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
    """Makes the task; this and what follows run on the users' loop."""
    work = thread_pool.catch_async(self._claim_and_call, (), {})
    self._task = self._user_loop.loop.create_task(work)
    self._task.add_done_callback(self._send_answer)

  async def _claim_and_call(self):
    # Before the lock is taken: the caller reads it once it is.
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
  """Whether a call gave no answer in its time.

  A busy pool may give it up, or what it waits for, before its caller wakes.
  """
  if not future.done():
    return True
  given_up = future.cancelled() or isinstance(future.result()[1], asyncio.CancelledError)
  return given_up and time.monotonic() >= deadline


async def _wait(future: asyncio.Future, seconds: float):
  """Waits for a future; time for which somebody holds up this loop does not count."""
  while True:
    start, timeout = time.monotonic(), None if seconds == math.inf else max(seconds, 0)
    await asyncio.wait([future], timeout=timeout)
    seconds = time.monotonic() - start - (timeout or 0)
    if future.done() or seconds < _HELD_UP_SECONDS:
      return


def _name_if_late(name: str, seconds: float) -> asyncio.TimerHandle:
  """Names a call in the log before it is given up, unless the timer is cancelled."""
  late, where = min(seconds / 2, _NAMED_SECONDS), thread_pool.current_turn.get()
  text = (
    f'{name} has given no answer for {round(late, 2):g} of {round(seconds, 2):g} seconds'
  )
  text += f' ({where})' if where else ''
  return asyncio.get_running_loop().call_later(late, logging.warning, '%s', text)
