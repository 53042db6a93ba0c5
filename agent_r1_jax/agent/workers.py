"""Where users' functions run: tools, rewards, metrics and environments.

They are other people's code: they may block, hang, raise whatever can be raised, or never
come back. So none of them runs on the engine's event loop:

- A plain function runs in `POOL`, a bounded pool of daemon threads. A call that is past
  its time-out is abandoned: it frees its place at once, is counted by name, and nobody
  waits for its thread, at the interpreter's end neither.
- A coroutine function runs on an event loop in a thread of its own, by
  `call_on_user_loop`; the loop's `asyncio.to_thread` uses the same pool. A coroutine that
  blocks this loop costs its own episode: the calls that have not begun move to a new
  loop, and those that were caught on the blocked one raise LoopBlockedError, after which
  their episodes can be played again.
  When the blocked loop goes on, calls go to it again: the locks, semaphores and sessions
  that coroutines share work on the event loop alone that they were first used on.

What holds the interpreter itself (a catastrophic regular expression) holds every thread;
for that there is isolated.in_subprocess.
"""

import asyncio
from collections.abc import Callable
from concurrent import futures
import functools
import inspect
import math
import sys
import threading
import time
import traceback
from typing import Any
import weakref

from agent_r1_jax.agent import threads

# An event loop that began nothing for so long is blocked.
BLOCKED_SECONDS = 5.0
# After its cancellation, a coroutine has so long to end.
_GRACE_SECONDS = 0.2
# An exception's text beyond so many characters is cut.
_MAX_CHARS = 10_000


class CallTimeoutError(TimeoutError):
  """A call gave no answer in its time and was abandoned."""


class LoopBlockedError(RuntimeError):
  """The event loop that the call was on is blocked by another call."""


class BaseExceptionError(RuntimeError):
  """A call raised what is no Exception, such as SystemExit; that is its __cause__."""


def describe_error(error: BaseException) -> str:
  """The exception's type and text, also where its text cannot be had."""
  try:
    text = str.__str__(str(error))
  except BaseException:
    text = ''  # It has no words.
  return f'{type(error).__name__}: {text}'[:_MAX_CHARS] if text else type(error).__name__


def locate_error(error: BaseException) -> str:
  """' (file:line, in function)' where the exception was raised, or '' if unknown."""
  if isinstance(error, BaseExceptionError) or isinstance(error.__cause__, StopIteration):
    error = error.__cause__ or error
  frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
  lines = [line for _, line in traceback.walk_tb(error.__traceback__)]
  if frames and frames[-1].f_code.co_filename == threads.__file__:
    frames, lines = frames[:-1], lines[:-1]  # os._exit
  if not frames:
    return ''
  code = frames[-1].f_code
  return f' ({code.co_filename}:{lines[-1]}, in {code.co_name})'


def is_async(fn: Callable) -> bool:
  """Whether a call of fn gives a coroutine; also of an object that can be called."""
  return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
    getattr(fn, '__call__', None)  # noqa: B004
  )


POOL = threads.Pool()


async def call(
  fn: Callable,
  *args,
  name: str = '',
  seconds: float = math.inf,
  field: str = '',
  **kwargs,
) -> Any:
  """Calls a user's function: a plain one in the pool, a coroutine function on this loop.

  An Exception is raised as it is. A function that is late is abandoned; a coroutine that
  swallows its cancellation, too.

  Args:
    fn: Sync or async.
    *args: Its arguments.
    name: What errors and counts call it; its own name by default.
    seconds: That it may take, the wait for a free thread included.
    field: What sets these seconds, for the error's text.
    **kwargs: Its arguments by name.

  Raises:
    CallTimeoutError: It took longer.
    BaseExceptionError: It raised no Exception, but SystemExit or CancelledError.
    PoolFullError: See Pool.
  """
  name, outer = name or threads.function_name(fn), threads.current_caller.get()
  caller = threads.Caller(
    name, time.monotonic() + seconds, outer and (outer.root or outer)
  )
  token = threads.current_caller.set(caller)
  try:
    if is_async(fn):
      work = future = asyncio.ensure_future(_outcome_later(fn, args, kwargs))
    else:
      work = POOL.submit(functools.partial(_outcome, fn, args, kwargs))
      future = asyncio.wrap_future(work)
  finally:
    threads.current_caller.reset(token)
  try:
    await asyncio.wait([future], timeout=None if seconds == math.inf else seconds)
  finally:
    late = not future.done()
    if late:
      work.cancel()
  if late:
    queued = isinstance(work, threads.Call) and not work.started
    if isinstance(work, asyncio.Task) and await _is_stubborn(work):
      _count(name)
    raise CallTimeoutError(_late_text(name, seconds, field, queued))
  value = _value(future)
  if not inspect.isawaitable(value):
    return value
  left = caller.deadline - time.monotonic()
  return await call(_awaited, value, name=name, seconds=left, field=field)


async def call_on_user_loop(
  fn: Callable, *args, name: str = '', seconds: float = math.inf, field: str = ''
) -> Any:
  """As `call`, but a coroutine function runs on the event loop of users' functions.

  For callers whose own loop must go on whatever a coroutine does.

  Raises:
    LoopBlockedError: Another call blocks that event loop, and this one was on it.
  """
  name, end = name or threads.function_name(fn), time.monotonic() + seconds
  if not is_async(fn):
    result = functools.partial(_outcome, fn, args, {})
    value, error = await call(result, name=name, seconds=seconds, field=field)
    if error is not None or not inspect.isawaitable(value):
      return _settle(value, error)
    fn, args = _awaited, (value,)
  while True:
    caller, loop = threads.Caller(name, end), _user_loop()
    ticket = [caller]
    token = threads.current_caller.set(caller)
    try:
      coroutine = _outcome_later(_begin, (ticket, fn, args), {})
      work = asyncio.run_coroutine_threadsafe(coroutine, loop.loop)
    finally:
      threads.current_caller.reset(token)
    future = asyncio.wrap_future(work)
    try:
      await _wait(future, min(BLOCKED_SECONDS, end - time.monotonic()))
      if not future.done() and ticket:
        # This loop may have been held up together with the other one.
        await _wait(future, BLOCKED_SECONDS / 20)
      if not future.done() and time.monotonic() < end and _take(ticket):
        loop.pass_over()
        continue
      await _wait(future, end - time.monotonic())
    finally:
      late = not future.done()
      if late:
        work.cancel()
        future.cancel()
    if not late:
      return _value(future)
    blocker = await loop.blocker()
    if blocker and blocker[0] is not caller:
      raise LoopBlockedError(f'{name} was on an event loop that {blocker[1]} blocks.')
    text = _late_text(name, seconds, field)
    raise CallTimeoutError(
      f'{text}; {blocker[1]} blocks its event loop' if blocker else text
    )


class _UserLoop:
  """An event loop for users' coroutines, in a daemon thread."""

  def __init__(self):
    self.loop = asyncio.new_event_loop()
    self.loop.set_default_executor(_Executor())
    self.loop.set_task_factory(self._task)
    self._callers = weakref.WeakKeyDictionary()
    self.blocked = False
    self._thread = threading.Thread(target=self._run, name='users', daemon=True)
    self._thread.start()

  def pass_over(self):
    """Keeps calls away from it until it goes on."""
    self.blocked = True
    # In this order: however often it is passed over, what it does last is to go on.
    self.loop.call_soon_threadsafe(self._go_on)

  def _go_on(self):
    self.blocked = False

  async def blocker(self) -> tuple[threads.Caller | None, str] | None:
    """Who keeps the loop from going on, as first caller and in words; None: nobody."""
    answer: futures.Future[None] = futures.Future()
    self.loop.call_soon_threadsafe(answer.set_result, None)
    await _wait(asyncio.wrap_future(answer), min(1.0, BLOCKED_SECONDS))
    frame = sys._current_frames().get(self._thread.ident or 0)
    task = asyncio.current_task(self.loop)
    if answer.done() or frame is None:
      return None
    caller = self._callers.get(task) if task else None
    where = f'({frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name})'
    name = caller.name if caller else 'a task of its own'
    text = f'{name} {where}, which should be a plain function or await asyncio.to_thread,'
    return (caller and (caller.root or caller), text)

  def _task(self, loop, coroutine, **kwargs):
    task = asyncio.Task(coroutine, loop=loop, **kwargs)
    self._callers[task] = threads.current_caller.get()
    return task

  def _run(self):
    threads.mark_user_thread()
    while not self.loop.is_closed():
      try:
        self.loop.run_forever()
      except BaseException:
        pass  # A task raised SystemExit; whoever awaits the task is told.


class _Executor(futures.ThreadPoolExecutor):
  """The pool, for asyncio.to_thread: an executor's own threads are joined at the end."""

  def submit(self, fn, /, *args, **kwargs):
    return POOL.submit(functools.partial(fn, *args, **kwargs))

  def shutdown(self, wait=True, *, cancel_futures=False):
    pass


# Oldest first. None of them ends: one that is not needed any more stands in next time.
_loops: list[_UserLoop] = []
_loops_lock = threading.Lock()


def _user_loop() -> _UserLoop:
  """The event loop that takes calls: the oldest that is not blocked."""
  with _loops_lock:
    for loop in _loops:
      if not (loop.blocked or loop.loop.is_closed()):
        return loop
    _loops.append(_UserLoop())
    return _loops[-1]


def _outcome(fn, args, kwargs) -> tuple[Any, BaseException | None]:
  """What fn returned or raised: nothing that it raises gets into a future or a loop."""
  try:
    return fn(*args, **kwargs), None
  except BaseException as error:
    return None, error


async def _outcome_later(fn, args, kwargs) -> tuple[Any, BaseException | None]:
  try:
    return await fn(*args, **kwargs), None
  except BaseException as error:
    return None, error


async def _is_stubborn(task: asyncio.Task) -> bool:
  """Whether a task swallows its cancellation."""
  await _wait(task, _GRACE_SECONDS)
  return not task.done()


def _count(name: str):
  """Notes in the episode's tally that a call was abandoned."""
  counter = threads.abandoned_calls.get()
  if counter is not None:
    counter[name] += 1


async def drain_cancelled_calls():
  """Until those have ended, or were counted, whose cancellation was asked for before."""

  async def turns():
    for _ in range(20):
      await asyncio.sleep(0)

  work = asyncio.run_coroutine_threadsafe(turns(), _user_loop().loop)
  await _wait(asyncio.wrap_future(work), 1.0)
  work.cancel()


async def _begin(ticket, fn, args):
  """Runs fn unless the call was begun elsewhere: only one gets the ticket."""
  if _take(ticket):
    return await fn(*args)


def _take(ticket: list) -> bool:
  try:
    ticket.pop()
  except IndexError:
    return False
  return True


async def _awaited(value):
  return await value


async def _wait(future: asyncio.Future, seconds: float):
  await asyncio.wait([future], timeout=None if seconds == math.inf else max(seconds, 0))


def _value(future: asyncio.Future) -> Any:
  if future.cancelled():
    raise BaseExceptionError('CancelledError')
  return _settle(*future.result())


def _settle(value: Any, error: BaseException | None) -> Any:
  if error is None:
    return value
  if isinstance(error, Exception) and not isinstance(error, StopIteration):
    raise error
  raise BaseExceptionError(describe_error(error)) from error


def _late_text(name: str, seconds: float, field: str, queued: bool = False) -> str:
  text = f'{name} gave no answer within {seconds:g} seconds'
  if field:
    text += f' ({field})'
  if queued:
    text += f': it waited for a free thread, and {POOL.busy} calls were at work'
  return text
