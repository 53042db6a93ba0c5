"""Preemption: a signal asks the run to end; it saves, and says so by its exit status.

While `watch` is on, SIGTERM and Ctrl-C are answered at once, whatever the main thread
does: Python's C handler writes a byte, which a thread reads. Where that thread cannot run
either, because some code holds the interpreter, a small process acts (watchdog.py).
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

from agent_r1_jax.host import processes, watchdog

# EX_TEMPFAIL of sysexits.h: start the same command again. What launch/ restarts on.
EXIT_STATUS = 75
_BEAT_SECONDS = 1.0
# A terminal and a wrapper may both pass on one Ctrl-C.
_SAME_SECONDS = 0.5
_TOLD = 'was told to end'


class Preempted(SystemExit):
  """Ends the process with EXIT_STATUS; what had been learned is saved."""

  def __init__(self):
    super().__init__(EXIT_STATUS)


class Watch:
  """What was heard, and how far the answer to it is.

  Attributes:
    phase: What the main thread is doing, for messages.
    newest: The step that the same command would go on from; None where it is not known.
  """

  def __init__(self):
    self.phase = 'the start'
    self.newest_step: Callable[[], int | None] = lambda: None
    self._flag = processes.SharedFlag('preempted')
    self._grace = _seconds('AGENT_R1_GRACE_SECONDS', 7.0)
    self._heard = 0.0
    self._saving, self._left = threading.Event(), threading.Event()

  def is_requested(self) -> bool:
    """Whether this process or another one was told to end; after `runtime.initialize`."""
    return self._flag.is_set()

  def raise_if_requested(self) -> None:
    """Ends the run if it is to end: where there is nothing to save.

    Raises:
      Preempted: It is to end.
    """
    if self.is_requested():
      raise self.end_unsaved()

  def end_unsaved(self) -> Preempted:
    """Says that nothing is saved; what to raise then. Several processes end here."""
    self._say_unsaved()
    processes.leave(EXIT_STATUS, _TOLD)
    return Preempted()

  def start_saving(self, step: int) -> None:
    """Says that the main thread has begun to save: it is waited for, however long."""
    self._saving.set()
    why = '' if self._heard else ': another process was told to end'
    watchdog.print_line(f'saving step {step}{why}')

  def finish_saving(self, step: int) -> None:
    """Says that all is on disk; what may still hang gets the grace once more."""
    watchdog.print_line(f'saved step {step}; the same command goes on from there')
    self._later(lambda: _end(EXIT_STATUS), self._left)

  def handle_signal(self, number: int) -> None:
    """Answers a signal, in the thread that reads them."""
    name = 'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name
    first, now = not self._heard, time.monotonic()
    if first:
      self._heard = now
      self.request()
      watchdog.print_line(
        f'{name}: saving and ending. If it cannot save within {self._grace:g} s, it ends '
        'without; a second Ctrl-C ends at once.'
      )
      self._later(self._give_up, self._saving)
    elif number == signal.SIGINT and now - self._heard > _SAME_SECONDS:
      watchdog.print_line(f'{name} again: ended at once; the same command goes on')
      _end(128 + number)

  def request(self, *_) -> None:
    """Gives the notice; also Python's own handler, which runs in the main thread."""
    self._flag.set()

  def close(self) -> None:
    """Lets what was started here end; it acts no more."""
    self._saving.set()
    self._left.set()

  def _later(self, act: Callable[[], None], unless: threading.Event) -> None:
    """Calls `act` after the grace, if the event does not come before."""
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
  """Until it is left, SIGTERM and a first Ctrl-C are heard and ask the run to end.

  They are answered with a line on standard error at once. If the main thread has not
  begun to save within AGENT_R1_GRACE_SECONDS (7; clouds give 30 before they kill), the
  process ends with EXIT_STATUS as it is: a checkpoint is whole or not there. A second
  Ctrl-C ends it at once. On Linux, a process that gives no answer for as long, or no
  sign of life for AGENT_R1_SILENCE_SECONDS (300; 0: for ever), prints its stacks and is
  killed.

  Only Python's main thread can watch. Inside another watch, it is that watch.
  """
  global _active
  if _active or threading.current_thread() is not threading.main_thread():
    yield _active or Watch()
    return
  heard = Watch()
  with contextlib.ExitStack() as stack:
    read, watchdog.wire = stack.enter_context(_wires(heard))
    stack.callback(_forget)
    for number in watchdog.END_SIGNALS:
      stack.callback(signal.signal, number, signal.signal(number, heard.request))
    stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(watchdog.wire))
    reader = threading.Thread(
      target=_read, args=(heard, read), daemon=True, name='signals'
    )
    reader.start()
    stack.callback(reader.join)
    stack.callback(
      watchdog.send, watchdog.FINISHED
    )  # Ends the watchdog, and so the reader.
    stack.callback(heard.close)
    _active = heard
    yield heard


_active: Watch | None = None


def _forget() -> None:
  """Ends the watch in this process; also what a forked child does first."""
  global _active
  if _active:
    _active, watchdog.wire = None, -1


_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def _after_fork() -> None:
  """A child's signals are its own: told to end, it ends."""
  if _active:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _forget()
  signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


# A signal to a child that still had our handlers would be heard by its parent: they wait.
os.register_at_fork(
  before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS),
  after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS),
  after_in_child=_after_fork,
)


@contextlib.contextmanager
def _wires(heard: Watch) -> Iterator[tuple[int, int]]:
  """What signals are read from, and what they are written to: through the watchdog."""
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
  limits = heard._grace, _seconds('AGENT_R1_SILENCE_SECONDS', 300.0)
  # In a session of its own: no signal to the trainer's group stops or kills it.
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


def _read(heard: Watch, read: int) -> None:
  """Answers signals, and gives signs of life, until the watch is left."""
  if processes.is_distributed():
    watchdog.send(watchdog.DISTRIBUTED)
  poll = select.poll()
  poll.register(read, select.POLLIN)
  while not heard._left.is_set():
    if poll.poll(1000 * _BEAT_SECONDS):
      said = os.read(read, 64)
      if not said:
        break  # The watchdog is gone.
      for number in said:
        if number in watchdog.END_SIGNALS:
          heard.handle_signal(number)
          watchdog.send(watchdog.ANSWERED)
    watchdog.send(watchdog.HEARTBEAT)


def _end(status: int) -> None:
  """Ends this process and, with one line each, the others; waits for no thread."""
  flush = threading.Thread(target=sys.stdout.flush, daemon=True)
  flush.start()
  flush.join(1.0)  # Where nobody reads what is printed, it would wait for ever.
  processes.leave(status, _TOLD)
  watchdog.send(watchdog.FINISHED)
  os._exit(status)


def _seconds(name: str, default: float) -> float:
  """From the environment.

  Raises:
    ValueError: It is no number.
  """
  given = os.environ.get(name, default)
  try:
    return float(given)
  except ValueError:
    raise ValueError(f'{name}={given!r}: must be a number of seconds') from None
