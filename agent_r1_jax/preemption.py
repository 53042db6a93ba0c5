"""Preemption: a signal asks the run to end; it saves, and says so by its exit status."""

from collections.abc import Iterator
import contextlib
import signal
import threading

from agent_r1_jax import processes

# EX_TEMPFAIL of sysexits.h: start the same command again. What launch/ restarts on.
STATUS = 75


class Preempted(SystemExit):
  """Ends the process with STATUS; what had been learned is saved."""

  def __init__(self):
    super().__init__(STATUS)


@contextlib.contextmanager
def watch() -> Iterator[processes.Notice]:
  """Until it is left, SIGTERM and a first Ctrl-C give the notice and do nothing else.

  A second Ctrl-C ends the process at once. Only Python's main thread can watch.
  """
  notice = processes.Notice('preempted')
  if threading.current_thread() is not threading.main_thread():
    yield notice
    return
  before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}

  def hear(number, frame):
    notice.give()
    signal.signal(signal.SIGINT, before[signal.SIGINT])

  for number in before:
    signal.signal(number, hear)
  try:
    yield notice
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
