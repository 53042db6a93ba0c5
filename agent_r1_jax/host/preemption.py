"""Preemption: on a signal, a run saves and ends with an exit status of its own.

Inside `watch`, SIGTERM and Ctrl-C are answered at once, whatever the main thread does:
Python's C handler writes a byte, which a thread reads. If that thread cannot run either,
because some code holds the interpreter, a small process acts (watchdog.py).
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

from agent_r1_jax.host import processes, runtime, watchdog

# EX_TEMPFAIL of sysexits.h: start the same command again, as launch/ does.
EXIT_STATUS = 75
_HEARTBEAT_SECONDS = 1.0
# A terminal and a wrapper may both send one Ctrl-C.
_SAME_SECONDS = 0.5
_TOLD = 'was told to end'
# Called before a first signal is answered: a live view of the terminal ends.
before_answer: list[Callable[[], None]] = []


class Preempted(SystemExit):
  """Ends the process with EXIT_STATUS, after the run has been saved."""

  def __init__(self):
    super().__init__(EXIT_STATUS)


class Watch:
  """The signals that came, and how far the answer to them is.

  Attributes:
    phase: What the main thread is doing, for messages.
    newest_step: Returns the step that the same command would resume from, 0 if there
      is no checkpoint yet, None if that is not known.
  """

  def __init__(self):
    self.phase = 'the start'
    self.newest_step: Callable[[], int | None] = lambda: None
    self._flag = processes.SharedFlag('preempted')
    self._grace = _seconds('AGENT_R1_GRACE_SECONDS', 7.0)
    self._asked_at = 0.0
    self._saving, self._left = threading.Event(), threading.Event()

  def is_requested(self) -> bool:
    """Whether this or another process got a signal; after `runtime.initialize`."""
    return self._flag.is_set()

  def raise_if_requested(self) -> None:
    """Raises Preempted if the run is to end, where there is nothing to save."""
    if self.is_requested():
      raise self.end_unsaved()

  def end_unsaved(self) -> Preempted:
    """Prints that nothing is saved, and returns the exception to raise.

    Where there are several processes, it ends this one instead.
    """
    self._say_unsaved()
    processes.leave(EXIT_STATUS, _TOLD)
    return Preempted()

  def start_saving(self, step: int) -> None:
    """Says that the main thread has begun to save, which may take as long as it needs."""
    self._saving.set()
    why = '' if self._asked_at else ': another process was told to end'
    watchdog.print_line(f'saving step {step}{why}')

  def finish_saving(self, step: int) -> None:
    """Says that all is on disk; the process ends if it still runs after the grace."""
    watchdog.print_line(f'saved step {step}; the same command goes on from there')
    self._later(lambda: _end(EXIT_STATUS), self._left)

  def handle_signal(self, number: int) -> None:
    """Answers a signal in the thread that reads them."""
    name = 'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name
    first, now = not self._asked_at, time.monotonic()
    if first:
      self._asked_at = now
      self.request()
      for prepare in list(before_answer):
        prepare()
      watchdog.print_line(
        f'{name}: saving and ending. If it cannot save within {self._grace:g} s, it ends '
        'without; a second Ctrl-C ends at once.'
      )
      self._later(self._give_up, self._saving)
    elif number == signal.SIGINT and now - self._asked_at > _SAME_SECONDS:
      watchdog.print_line(f'{name} again: ended at once; the same command goes on')
      _end(128 + number)

  def request(self, *_) -> None:
    """Asks all processes to end; also the signal handler of the main thread."""
    self._flag.set()

  def close(self) -> None:
    """Stops the threads that were started here, without any effect."""
    self._saving.set()
    self._left.set()

  def _later(self, act: Callable[[], None], unless: threading.Event) -> None:
    """Calls `act` after the grace, unless the event is set before."""
    wait = lambda: None if unless.wait(self._grace) else act()
    threading.Thread(target=wait, daemon=True, name='grace').start()

  def _give_up(self) -> None:
    self._say_unsaved()
    _end(EXIT_STATUS)

  def _say_unsaved(self) -> None:
    step = self.newest_step()
    where = 'the last checkpoint' if step is None else f'step {step}'
    watchdog.print_line(
      f'ended during {self.phase} without a new checkpoint; the same command goes on '
      f'from {where}'
    )


@contextlib.contextmanager
def watch() -> Iterator[Watch]:
  """Inside `with`, SIGTERM and a first Ctrl-C ask the run to end.

  They are answered at once by a line on standard error. If the main thread has not begun
  to save within AGENT_R1_GRACE_SECONDS (7; clouds give 30 before they kill), the process
  ends with EXIT_STATUS without saving; an unfinished checkpoint is never visible. A
  second Ctrl-C ends the process at once. On Linux, a process that gives no answer for
  that time, or no sign of life for AGENT_R1_SILENCE_SECONDS (300; 0 means never), prints
  its stacks and is killed.

  Only Python's main thread can watch. Inside another watch, this returns that watch.
  """
  global _active
  if _active or threading.current_thread() is not threading.main_thread():
    yield _active or Watch()
    return
  # Before the first thread: glibc gives it memory of its own, and later ones share that.
  runtime.retain_freed_memory()
  current = Watch()
  with contextlib.ExitStack() as stack:
    read, watchdog.pipe = stack.enter_context(_open_pipes(current))
    stack.callback(_forget)
    for number in watchdog.END_SIGNALS:
      stack.callback(signal.signal, number, signal.signal(number, current.request))
    stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(watchdog.pipe))
    reader = threading.Thread(
      target=_answer_signals, args=(current, read), daemon=True, name='signals'
    )
    reader.start()
    stack.callback(reader.join)
    # Ends the watchdog, and so the reader.
    stack.callback(watchdog.send, watchdog.FINISHED)
    stack.callback(current.close)
    _active = current
    yield current


_active: Watch | None = None


def _forget() -> None:
  """Ends the watch in this process, and first of all in a forked child."""
  global _active
  if _active:
    _active, watchdog.pipe = None, -1


_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def _after_fork() -> None:
  """Gives a forked child Python's own handlers: a signal ends it."""
  if _active:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _forget()
  signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


# Signals are blocked during a fork: with our handlers, a signal to the child would be
# written to its parent.
os.register_at_fork(
  before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS),
  after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS),
  after_in_child=_after_fork,
)


@contextlib.contextmanager
def _open_pipes(current: Watch) -> Iterator[tuple[int, int]]:
  """Yields the descriptors to read signals from and to write them to.

  On Linux they lead through the watchdog, which this starts.
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
  limits = current._grace, _seconds('AGENT_R1_SILENCE_SECONDS', 300.0)
  # In a session of its own, so that no signal to the trainer's group reaches it.
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
  while not current._left.is_set():
    if poll.poll(1000 * _HEARTBEAT_SECONDS):
      said = os.read(read, 64)
      if not said:
        break  # The watchdog is gone.
      for number in said:
        if number in watchdog.END_SIGNALS:
          current.handle_signal(number)
          watchdog.send(watchdog.ANSWERED)
    watchdog.send(watchdog.HEARTBEAT)


def _end(status: int) -> None:
  """Ends this process and the others, which print a line; waits for no thread."""
  flush = threading.Thread(target=sys.stdout.flush, daemon=True)
  flush.start()
  flush.join(1.0)  # It would wait for ever where nobody reads the output.
  processes.leave(status, _TOLD)
  watchdog.send(watchdog.FINISHED)
  os._exit(status)


def _seconds(name: str, default: float) -> float:
  """Reads a number of seconds from an environment variable.

  Raises:
    ValueError: It is no number.
  """
  given = os.environ.get(name, default)
  try:
    return float(given)
  except ValueError:
    raise ValueError(f'{name}={given!r}: must be a number of seconds') from None
