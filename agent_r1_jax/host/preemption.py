"""Preemption: on SIGTERM or Ctrl-C, a run saves and ends with the exit status 75.

Python calls signal handlers only in the main thread, between bytecodes, and that thread
may be computing or waiting. So another thread and a process help. Python's C handler
immediately writes a signal's number to a pipe:

  signal -> C handler -> pipe -> watchdog process -> pipe -> thread 'signals'

The thread sets a flag that the main thread reads, prints a line, and ends the process if
the main thread does not start to save in time. If code that holds the interpreter stops
the thread too, the watchdog kills the process (watchdog.py).
"""

from collections.abc import Callable, Iterator
import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import threading
import time

from agent_r1_jax.host import memory, processes, watchdog

# EX_TEMPFAIL of sysexits.h: start the same command again, as launch/ does.
EXIT_STATUS = 75
_HEARTBEAT_SECONDS = 1.0
# SIGINTs within this time count as one Ctrl-C: a terminal and a wrapper may both send it.
_SAME_SECONDS = 0.5
_REASON = 'was told to end'
# Called before the line that answers the first signal, for example to end a live view.
before_answer: list[Callable[[], None]] = []


class Preempted(SystemExit):
  """Ends the process with EXIT_STATUS, after the run has been saved."""

  def __init__(self):
    super().__init__(EXIT_STATUS)


class Watch:
  """Tracks whether a signal has come, and whether the run has started to save.

  Attributes:
    phase: The name of the main thread's work, for messages.
    newest_step: Returns the step that the same command would resume from, 0 without a
      checkpoint, None if unknown.
  """

  def __init__(self):
    self.phase = 'the start'
    self.newest_step: Callable[[], int | None] = lambda: None
    self._flag = processes.SharedFlag('preempted')
    self._grace = _read_seconds('AGENT_R1_GRACE_SECONDS', 7.0)
    self._signalled_at = 0.0  # When the first signal came; 0 before it.
    self._saving_started, self._closed = threading.Event(), threading.Event()

  def is_requested(self) -> bool:
    """Whether this or another process got a signal; needs `runtime.initialize`."""
    return self._flag.is_set()

  def raise_if_requested(self) -> None:
    """Raises Preempted if a signal has come; for phases in which nothing can be saved."""
    if self.is_requested():
      raise self.end_unsaved()

  def end_unsaved(self) -> Preempted:
    """Prints that nothing is saved, and returns the exception to raise.

    If the run has several processes, it ends this one and does not return.
    """
    self._print_unsaved()
    processes.leave(EXIT_STATUS, _REASON)
    return Preempted()

  def start_saving(self, step: int) -> None:
    """Prints that the main thread saves; it may then take as long as it needs."""
    self._saving_started.set()
    why = '' if self._signalled_at else ': another process was told to end'
    watchdog.print_line(f'saving step {step}{why}')

  def finish_saving(self, step: int) -> None:
    """Prints that all is on disk; ends the process if it outlives the grace period."""
    watchdog.print_line(f'saved step {step}; the same command goes on from there')
    self._call_after_grace(lambda: _end(EXIT_STATUS), self._closed)

  def handle_signal(self, number: int) -> None:
    """Answers a signal, in the thread that reads signals."""
    name = 'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name
    first, now = not self._signalled_at, time.monotonic()
    if first:
      self._signalled_at = now
      self.request()
      for prepare in list(before_answer):
        prepare()
      watchdog.print_line(
        f'{name}: saving and ending. If it cannot save within {self._grace:g} s, it ends '
        'without; a second Ctrl-C ends at once.'
      )
      self._call_after_grace(self._give_up, self._saving_started)
    elif number == signal.SIGINT and now - self._signalled_at > _SAME_SECONDS:
      watchdog.print_line(f'{name} again: ended at once; the same command goes on')
      _end(128 + number)

  def request(self, *_) -> None:
    """Asks all processes to end; also the signal handler of the main thread."""
    self._flag.set()

  def close(self) -> None:
    """Stops the threads of this object, without any other effect."""
    self._saving_started.set()
    self._closed.set()

  def _call_after_grace(self, act: Callable[[], None], unless: threading.Event) -> None:
    """Calls `act` after the grace period, unless the event is set first."""
    wait = lambda: None if unless.wait(self._grace) else act()
    threading.Thread(target=wait, daemon=True, name='grace').start()

  def _give_up(self) -> None:
    self._print_unsaved()
    _end(EXIT_STATUS)

  def _print_unsaved(self) -> None:
    step = self.newest_step()
    where = 'what is saved' if step is None else f'step {step}'
    watchdog.print_line(
      f'ended during {self.phase} without a new checkpoint; the same command goes on '
      f'from {where}'
    )


@contextlib.contextmanager
def watch() -> Iterator[Watch]:
  """Handles SIGTERM and Ctrl-C inside `with`; the first signal asks the run to end.

  A line on standard error answers it at once. If the main thread has not started to save
  within AGENT_R1_GRACE_SECONDS (7; clouds give 30 before they kill), the process ends
  with EXIT_STATUS without saving; an unfinished checkpoint is never visible. A second
  Ctrl-C ends the process at once. On Linux, a process whose threads do not answer for
  that time, or send no heartbeat for AGENT_R1_SILENCE_SECONDS (300; 0 means never),
  prints its stacks and is killed.

  Only Python's main thread can watch. Inside another watch, this yields that watch.
  """
  global _active
  if _active or threading.current_thread() is not threading.main_thread():
    yield _active or Watch()
    return
  # Before the first thread, which would get its own arena from glibc.
  memory.retain_freed_memory()
  current = Watch()
  with contextlib.ExitStack() as stack:
    read, watchdog.pipe = stack.enter_context(_open_pipes(current))
    stack.callback(_deactivate)
    for number in watchdog.END_SIGNALS:
      stack.callback(signal.signal, number, signal.signal(number, current.request))
    stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(watchdog.pipe))
    reader = threading.Thread(
      target=_answer_signals, args=(current, read), daemon=True, name='signals'
    )
    reader.start()
    stack.callback(reader.join)
    # Ends the watchdog, and with it the reader.
    stack.callback(watchdog.send, watchdog.FINISHED)
    stack.callback(current.close)
    _active = current
    yield current


_active: Watch | None = None


def _deactivate() -> None:
  """Ends the watch in this process, which may be a forked child."""
  global _active
  if _active:
    _active, watchdog.pipe = None, -1


_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def _after_fork() -> None:
  """Restores Python's signal handlers in a forked child, so that a signal ends it."""
  if _active:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _deactivate()
  signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


# Signals are blocked during a fork: until the child has its own handlers, a signal to it
# would be written to its parent's pipe.
os.register_at_fork(
  before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS),
  after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS),
  after_in_child=_after_fork,
)


@contextlib.contextmanager
def _open_pipes(current: Watch) -> Iterator[tuple[int, int]]:
  """Yields the file descriptors for reading and for writing signals.

  On Linux it also starts the watchdog, which sits between the two.
  """
  if sys.platform != 'linux':
    watchdog.print_line(
      'no watchdog here (Linux only): code that holds the interpreter hangs'
    )
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
      yield read, write
    finally:
      os.close(read)
      os.close(write)
    return
  limits = current._grace, _read_seconds('AGENT_R1_SILENCE_SECONDS', 300.0)
  # In its own session, so that no signal to the trainer's group reaches it.
  command = [sys.executable, '-I', '-S', watchdog.__file__, str(os.getpid())]
  process = subprocess.Popen(
    [*command, *map(str, limits)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    bufsize=0,
    start_new_session=True,
  )
  assert process.stdin and process.stdout
  write = process.stdin.fileno()
  os.set_blocking(write, False)
  faulthandler.register(watchdog.STACKS_SIGNAL, file=2, all_threads=True)
  try:
    yield process.stdout.fileno(), write
  finally:
    process.wait()
    faulthandler.unregister(watchdog.STACKS_SIGNAL)
    process.stdin.close()
    process.stdout.close()


def _answer_signals(current: Watch, read: int) -> None:
  """Answers signals and sends heartbeats until the watch is closed."""
  if processes.is_distributed():
    watchdog.send(watchdog.DISTRIBUTED)
  poll = select.poll()
  poll.register(read, select.POLLIN)
  while not current._closed.is_set():
    if poll.poll(1000 * _HEARTBEAT_SECONDS):
      received = os.read(read, 64)
      if not received:
        break  # The watchdog has ended.
      for number in received:
        if number in watchdog.END_SIGNALS:
          current.handle_signal(number)
          watchdog.send(watchdog.ANSWERED)
    watchdog.send(watchdog.HEARTBEAT)


def _end(status: int) -> None:
  """Ends this process and the run's other processes, which print a line."""
  flush = threading.Thread(target=sys.stdout.flush, daemon=True)
  flush.start()
  flush.join(1.0)  # It blocks if standard output is a full pipe that nobody reads.
  processes.leave(status, _REASON)
  watchdog.send(watchdog.FINISHED)
  os._exit(status)


def _read_seconds(name: str, default: float) -> float:
  """Reads a number of seconds from an environment variable.

  Raises:
    ValueError: The value is not a number.
  """
  value = os.environ.get(name, default)
  try:
    return float(value)
  except ValueError:
    raise ValueError(f'{name}={value!r}: must be a number of seconds') from None
