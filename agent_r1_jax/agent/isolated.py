"""Functions in a process of their own, for graders that may hold the interpreter.

A regular expression that backtracks, a huge power or another long call into C holds the
interpreter: no thread goes on meanwhile, the engine's neither. In a process it can be
killed:

  # grader.py, which the process imports
  def grade(answer: str, golden: str) -> float: ...

  # the run's script
  _grade = isolated.in_subprocess(grader.grade, seconds=5)

  async def reward(task, messages):
    return await _grade(messages[-1]['content'], task.answer)
"""

import asyncio
from collections.abc import Callable, Coroutine
import faulthandler
import functools
import importlib
import json
from multiprocessing import connection
import os
import signal
import subprocess
import sys
import threading
from typing import Any
import weakref

from agent_r1_jax.agent import threads, workers

# Of a process's start: it imports the module of the function.
_START_SECONDS = 60.0
# A process ends by itself so long after its call was late, if nobody is left to kill it.
_ALONE_SECONDS = 5.0
_MAX_BYTES = 64 << 20


class LostError(RuntimeError):
  """The process ended before it answered, such as by os._exit or for want of memory."""


class FailedError(RuntimeError):
  """The function raised; type and text are told."""


def in_subprocess(
  fn: Callable, *, seconds: float, processes: int = 4
) -> Callable[..., Coroutine[Any, Any, Any]]:
  """fn as an async function that runs in a process, and is killed when it is late.

  Processes are started when they are needed, kept for further calls, and replaced where
  one was killed or ended. They end when this process does, however it ends: at once, or
  in the midst of a call when its time is over.

  Args:
    fn: Of a module that can be imported: its name is what the process gets. pickle
      carries what it takes, JSON what it returns.
    seconds: That a call may take, once it has a process.
    processes: At most so many at a time; further calls wait.

  Returns:
    An async function of the same arguments. It raises FailedError where fn raises,
    TimeoutError where it is late, and LostError where its process ended.

  Raises:
    ValueError: fn cannot be imported by its name, or a number is not above 0.
  """
  if not seconds > 0 or processes < 1:
    raise ValueError(f'seconds={seconds} and processes={processes} must be above 0.')
  if fn.__module__ == '__main__' or _imported(fn.__module__, fn.__qualname__) is not fn:
    raise ValueError(
      f'{fn.__module__}.{fn.__qualname__} is no name to import it by: define it at the '
      'top of a module that is not the script itself.'
    )
  kept = _Processes(fn, seconds, processes)

  @functools.wraps(fn)
  async def call(*args, **kwargs):
    return await kept.call(args, kwargs)

  return call


def _imported(module: str, name: str) -> Any:
  found = importlib.import_module(module)
  for part in name.split('.'):
    found = getattr(found, part, None)
  return found


class _Processes:
  """Processes for one function, and a thread for each that is at work."""

  def __init__(self, fn, seconds, processes):
    self._fn, self._seconds = fn, seconds
    self._threads = threads.Pool(threads=processes)
    self._idle: list[_Process] = []

  async def call(self, args, kwargs) -> Any:
    work = self._threads.submit(functools.partial(self._call, args, kwargs))
    try:
      return await asyncio.wrap_future(work)
    finally:
      work.cancel()

  def _call(self, args, kwargs) -> Any:
    process = self._take() or _Process(self._fn)
    try:
      ok, answer = process.call((args, kwargs), self._seconds)
    except BaseException:
      process.end()
      raise
    self._idle.append(process)
    if not ok:
      raise FailedError(answer)
    return answer

  def _take(self) -> '_Process | None':
    """One that waits for a call; those that ended meanwhile are dropped."""
    while self._idle:
      try:
        process = self._idle.pop()
      except IndexError:
        break  # Another thread took the last one.
      if process.lives:
        return process
      process.end()
    return None


class _Process:
  """One process, and the pipe to it."""

  def __init__(self, fn):
    self._name = fn.__name__
    here, there = connection.Pipe()
    names = [str(there.fileno()), fn.__module__, fn.__qualname__]
    self._pipe = here
    self._process = subprocess.Popen(
      [sys.executable, '-m', __name__, *names],
      stdin=subprocess.DEVNULL,
      pass_fds=[there.fileno()],
      # Ctrl-C and a signal to the trainer's group are not for it: see _serve.
      start_new_session=True,
      env=os.environ | {'PYTHONPATH': os.pathsep.join(p or os.curdir for p in sys.path)},
    )
    there.close()
    self.end = weakref.finalize(self, _end, self._process, here)
    ok, answer = self._answer(_START_SECONDS)
    if not ok:
      self.end()
      raise FailedError(answer)

  @property
  def lives(self) -> bool:
    """Whether it can take a call."""
    return self._process.poll() is None

  def call(self, arguments, seconds) -> tuple[bool, Any]:
    """Whether the function returned, and what it returned or how it failed."""
    try:
      self._pipe.send((arguments, seconds))
    except OSError as error:
      raise self._lost() from error
    return self._answer(seconds)

  def _answer(self, seconds) -> tuple[bool, Any]:
    try:
      if not self._pipe.poll(seconds):
        raise TimeoutError(f'{self._name} gave no answer within {seconds:g} seconds')
      ok, answer = json.loads(self._pipe.recv_bytes(_MAX_BYTES))
    except TimeoutError:
      raise
    except (OSError, EOFError, ValueError, RecursionError) as error:
      raise self._lost() from error
    return bool(ok), answer

  def _lost(self) -> LostError:
    self.end()
    return LostError(
      f'the process of {self._name} ended with status {self._process.returncode} before '
      'it answered'
    )


def _end(process: subprocess.Popen, pipe):
  process.kill()
  process.wait()
  pipe.close()


def _serve(pipe, module: str, name: str):
  """Answers calls until nobody is left to ask.

  Whoever ends a run may send its signal to every process of it. The trainer decides what
  becomes of the call under way: a process that ended by itself would fail its episode.
  """
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    # A handler and not SIG_IGN, which the programs that the function starts would keep.
    signal.signal(number, lambda *_: None)
  try:
    fn = _imported(module, name)
  except BaseException as error:
    _send(pipe, False, workers.describe_error(error))
    return
  _send(pipe, True, None)
  nowhere = open(os.devnull, 'w')
  while True:
    try:
      (args, kwargs), seconds = pipe.recv()
    except EOFError:
      return
    # Its thread needs no interpreter, whoever holds that.
    seconds = min(seconds + _ALONE_SECONDS, threading.TIMEOUT_MAX)
    faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
    try:
      ok, answer = True, fn(*args, **kwargs)
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
