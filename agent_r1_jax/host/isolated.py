"""Runs functions in a subprocess, for graders that may hold the interpreter.

A backtracking regular expression, a huge power or another long call into C holds the
interpreter and stops every thread, including the engine's. A subprocess can be killed:

  # grader.py, which the process imports
  def grade(answer: str, golden: str) -> float: ...

  # the run's script
  _grade = isolated.in_subprocess(grader.grade, seconds=5)

  async def reward(task, messages):
    return await _grade(messages[-1]['content'], task.answer)
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
import contextlib
import ctypes
import errno
import faulthandler
import functools
import importlib
import json
from multiprocessing import connection
import os
import resource
import signal
import subprocess
import sys
import threading
from typing import Any
import weakref

from agent_r1_jax.host import thread_pool, workers

# The time for a subprocess to start and to import the function's module.
_START_SECONDS = 60.0
# A subprocess ends itself this long after its call timed out, if nobody kills it.
_ALONE_SECONDS = 5.0
_MAX_BYTES = 64 << 20
_ARENA_MAX = -8  # M_ARENA_MAX of glibc's malloc.h.


class EndedError(RuntimeError):
  """The subprocess ended before it answered, by os._exit or for lack of memory.

  Attributes:
    status: Its exit status; if negative, minus the number of the signal that ended it.
  """

  def __init__(self, text: str, status: int):
    super().__init__(text)
    self.status = status


class FailedError(RuntimeError):
  """The function raised; the message has the exception's type and text."""


def in_subprocess(
  fn: Callable,
  *,
  seconds: float,
  processes: int = 4,
  memory_mb: int | None = None,
  imports: Sequence[str] = (),
) -> 'IsolatedFunction':
  """Makes an async function that calls fn in a subprocess, and kills it after a time.

  Subprocesses are started on demand, reused, and replaced if they are killed or end. They
  end with this process, even if it is killed: at once, or after the time limit of a call
  that is under way.

  Args:
    fn: A function that can be imported by its name. Arguments are pickled; the result is
      sent as JSON.
    seconds: The time limit of a call, once it has a subprocess.
    processes: The most subprocesses that work at a time; further calls wait.
    memory_mb: MiB that a subprocess may allocate after it has imported fn's module; if it
      needs more, it ends. None means no limit, as do systems without /proc (macOS).
    imports: More modules to import when a subprocess starts, so that imports do not count
      toward the first call's time and memory.

  Returns:
    An async function of the same arguments. It raises FailedError if fn raises,
    TimeoutError if it takes too long, and EndedError if its subprocess ended.

  Raises:
    ValueError: fn cannot be imported by its name, or a number is not above 0.
  """
  numbers = {'seconds': seconds, 'processes': processes, 'memory_mb': memory_mb}
  if not all(number is None or number > 0 for number in numbers.values()):
    text = ', '.join(f'{name}={number}' for name, number in numbers.items())
    raise ValueError(f'{text} must be above 0.')
  if (
    fn.__module__ == '__main__'
    or _import_function(fn.__module__, fn.__qualname__) is not fn
  ):
    raise ValueError(
      f'{fn.__module__}.{fn.__qualname__} is no name to import it by: define it at the '
      'top of a module that is not the script itself.'
    )
  return IsolatedFunction(fn, seconds, processes, memory_mb, imports)


def _import_function(module: str, name: str) -> Any:
  value = importlib.import_module(module)
  for part in name.split('.'):
    value = getattr(value, part, None)
  return value


class IsolatedFunction:
  """The async function that `in_subprocess` returns."""

  def __init__(self, fn, seconds, processes, memory_mb, imports):
    functools.update_wrapper(self, fn)
    self._make_process = functools.partial(_Process, fn, memory_mb, imports)
    self._seconds, self._threads = seconds, thread_pool.Pool(threads=processes)
    self._idle: list[_Process] = []

  async def __call__(self, *args, **kwargs) -> Any:
    """Calls the function in a subprocess."""
    work = self._threads.submit(functools.partial(self.call_and_wait, *args, **kwargs))
    try:
      return await asyncio.wrap_future(work)
    finally:
      work.cancel()

  def call_and_wait(self, *args, **kwargs) -> Any:
    """Calls the function and waits; the call does not count toward `processes`."""
    process = self._take_idle() or self._make_process()
    try:
      ok, answer = process.call((args, kwargs), self._seconds)
    except BaseException:
      process.end()
      raise
    self._idle.append(process)
    if not ok:
      raise FailedError(answer)
    return answer

  def _take_idle(self) -> '_Process | None':
    """Returns an idle subprocess, and drops subprocesses that have ended."""
    while True:
      try:
        process = self._idle.pop()
      except IndexError:  # Another thread may have taken the last one.
        return None
      if process.is_alive:
        return process
      process.end()


class _Process:
  """One subprocess and the pipe to it.

  Attributes:
    end: Kills the subprocess.
  """

  def __init__(self, fn: Callable, memory_mb: int | None, imports: Sequence[str]):
    """Starts the subprocess; see `in_subprocess` for the arguments."""
    self._name = fn.__name__
    here, there = connection.Pipe()
    arguments = fn.__module__, fn.__qualname__, str(memory_mb or ''), *imports
    self._pipe = here
    self._process = start_module(__name__, there.fileno(), *arguments)
    there.close()
    self.end = weakref.finalize(self, end_process, self._process, here)
    ok, answer = self._receive(_START_SECONDS)
    if not ok:
      self.end()
      raise FailedError(answer)

  @property
  def is_alive(self) -> bool:
    """Whether the subprocess can take a call."""
    return self._process.poll() is None

  def call(self, arguments: tuple, seconds: float) -> tuple[bool, Any]:
    """Calls the function with (args, kwargs).

    Returns:
      Whether the function returned, and its value or its error's text.

    Raises:
      TimeoutError: The call took too long; the caller must then call `end`.
      EndedError: The subprocess ended before it answered.
    """
    try:
      self._pipe.send((arguments, seconds))
    except OSError as error:
      raise self._end_as_lost() from error
    return self._receive(seconds)

  def _receive(self, seconds) -> tuple[bool, Any]:
    try:
      if not self._pipe.poll(seconds):
        raise TimeoutError(f'{self._name} gave no answer within {seconds:g} seconds')
      ok, answer = json.loads(self._pipe.recv_bytes(_MAX_BYTES))
    except TimeoutError:
      raise
    except (OSError, EOFError, ValueError, RecursionError) as error:
      raise self._end_as_lost() from error
    return bool(ok), answer

  def _end_as_lost(self) -> EndedError:
    self.end()
    status = self._process.returncode
    reason = ': it needed more memory than it may have' if status == errno.ENOMEM else ''
    text = f'the process of {self._name} ended with status {status} before it answered'
    return EndedError(text + reason, status)


@contextlib.contextmanager
def limit_processor(seconds: float) -> Iterator[None]:
  """Lets a signal end this process after so many CPU-seconds inside `with`.

  Unlike elapsed time, CPU time does not depend on how busy the machine is.
  """
  signal.setitimer(signal.ITIMER_PROF, seconds)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_PROF, 0)


def start_module(module: str, descriptor: int, *arguments: str) -> subprocess.Popen:
  """Starts `python -P -m module descriptor arguments...` with the paths of this process.

  It has its own session: Ctrl-C and signals to the trainer's group do not reach it. With
  -P it imports only from these paths, not from the working directory.
  """
  paths = os.pathsep.join(path or os.curdir for path in sys.path)
  return subprocess.Popen(
    [sys.executable, '-P', '-m', module, str(descriptor), *arguments],
    stdin=subprocess.DEVNULL,
    pass_fds=[descriptor],
    start_new_session=True,
    env=os.environ | {'PYTHONPATH': paths},
  )


def end_process(process: subprocess.Popen, pipe):
  """Kills the process and closes the pipe or socket to it."""
  process.kill()
  process.wait()
  pipe.close()


def _serve(pipe, module: str, name: str, memory_mb: str, *imports: str):
  """Answers calls until the pipe is closed.

  A signal that ends a run may be sent to all its processes. It is ignored here, because
  the trainer decides about the call under way, whose episode would otherwise fail.
  """
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    # A handler, since programs that the function starts would inherit SIG_IGN.
    signal.signal(number, lambda *_: None)
  try:
    fn = _import_function(module, name)
    for further in imports:
      importlib.import_module(further)
  except BaseException as error:
    _send(pipe, False, workers.describe_error(error))
    return
  if memory_mb:
    _limit_memory(int(memory_mb) << 20)
  _send(pipe, True, None)
  try:
    _answer_calls(pipe, fn)
  except MemoryError:
    # The memory may stay in use and be missing in the next call; a new process replaces
    # this one.
    os._exit(errno.ENOMEM)


def _limit_memory(size: int):
  """Lets this process allocate `size` bytes more than it has."""
  # glibc's allocator may reserve 64 MiB of addresses per thread, including the timer's.
  # With one arena all threads allocate from the same addresses.
  with contextlib.suppress(AttributeError):
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)
  _, hard = resource.getrlimit(resource.RLIMIT_AS)
  with contextlib.suppress(FileNotFoundError), open('/proc/self/statm') as file:
    size += int(file.read().split()[0]) * resource.getpagesize()
    limit = size if hard == resource.RLIM_INFINITY else min(size, hard)
    # Only the soft limit: programs that the function starts, such as the sandbox, may
    # raise it for themselves.
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _answer_calls(pipe, fn: Callable):
  nowhere = open(os.devnull, 'w')
  while True:
    try:
      (args, kwargs), seconds = pipe.recv()
    except EOFError:
      return
    # faulthandler's thread does not need the interpreter.
    seconds = min(seconds + _ALONE_SECONDS, threading.TIMEOUT_MAX)
    faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
    try:
      ok, answer = True, fn(*args, **kwargs)
    except MemoryError:
      raise
    except BaseException as error:
      ok, answer = False, workers.describe_error(error)
    faulthandler.cancel_dump_traceback_later()
    _send(pipe, ok, answer)


def _send(pipe, ok: bool, answer: Any):
  try:
    data = json.dumps([ok, answer])
  except (TypeError, ValueError, RecursionError) as error:
    data = json.dumps(
      [False, f'what it returned is not JSON: {workers.describe_error(error)}']
    )
  pipe.send_bytes(data.encode())


if __name__ == '__main__':
  _serve(connection.Connection(int(sys.argv[1])), *sys.argv[2:])
