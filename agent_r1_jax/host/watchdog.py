"""A small process that kills a trainer whose Python threads can no longer run.

`preemption.watch` runs this file as a script (`python -I -S watchdog.py`), without JAX
and without this package; it takes about 10 MB. The trainer writes bytes to its standard
input:

- the number of a signal. Python's C handler writes it (`signal.set_wakeup_fd`), even
  while other code holds the interpreter. The watchdog writes it to its standard output,
  from which a thread of the trainer reads it;
- HEARTBEAT every second from that thread, ANSWERED after a signal, DISTRIBUTED if the
  run has other processes, FINISHED before an end whose reason has been printed.

A signal without ANSWERED, or a long time without HEARTBEAT, means that some code does not
release the interpreter: Python's stacks are printed (`faulthandler`, on STACKS_SIGNAL),
and the trainer is killed. Time in which the trainer is stopped (SIGSTOP), or this process
or the machine sleeps, does not count. Linux only.
"""

import contextlib
import os
import select
import signal
import sys
import time

HEARTBEAT, ANSWERED, DISTRIBUTED, FINISHED = 0x80, 0x81, 0x82, 0x83
END_SIGNALS = (int(signal.SIGTERM), int(signal.SIGINT))
# A real-time signal that nothing else uses.
STACKS_SIGNAL = int(getattr(signal, 'SIGRTMAX', 64)) - 1
_TICK = 0.5


# In the trainer: the file descriptor of the pipe to the watchdog; -1 without a watch.
pipe = -1


def send(byte: int) -> None:
  """Sends a byte to the watchdog, if there is one."""
  if pipe >= 0:
    with contextlib.suppress(OSError):  # The watchdog has ended, or the pipe is full.
      os.write(pipe, bytes([byte]))


def print_line(text: str) -> None:
  """Writes a line to standard error at once, without Python's buffers and locks."""
  with contextlib.suppress(OSError):  # Standard error may be a closed pipe.
    os.write(2, f'agent_r1_jax: {text}\n'.encode(errors='replace'))


def _can_run(pid: int) -> bool:
  """Whether the process exists and is not stopped, by /proc."""
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rpartition(')')[2].split()[0] not in 'TtZX'
  except OSError:
    return False


def _end(pid: int, reason: str) -> None:
  """Prints the reason and the trainer's stacks, and kills the trainer."""
  print_line(
    f'{reason}: some code holds the interpreter, such as a regular expression in a '
    'reward. Run such code in a process of its own. Its stacks follow, then it is '
    'killed; the same command goes on from the last checkpoint.'
  )
  try:
    os.kill(pid, STACKS_SIGNAL)
    time.sleep(1.0)  # The stacks are a few pages.
    os.kill(pid, signal.SIGKILL)
  except ProcessLookupError:
    pass


def main(pid: int, answer_seconds: float, silence_seconds: float) -> None:
  """Watches the trainer `pid` until it ends.

  Args:
    pid: The trainer's process.
    answer_seconds: How long a signal may remain without ANSWERED.
    silence_seconds: How long HEARTBEAT may be missing; 0 means forever.
  """
  for number in (*END_SIGNALS, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)  # Often sent to all processes.
  # The unanswered signal, for how long, and the time without a heartbeat.
  pending, unanswered, silent = '', 0.0, 0.0
  distributed, before = False, time.monotonic()
  while True:
    ready = select.select([0], [], [], _TICK)[0]
    received = os.read(0, 4096) if ready else b''
    now = time.monotonic()
    elapsed, before = min(now - before, 2 * _TICK), now
    for byte in received:
      if byte in END_SIGNALS:
        pending, unanswered = pending or signal.Signals(byte).name, 0.0
        os.write(1, bytes([byte]))
      elif byte == ANSWERED:
        pending = ''
      elif byte == FINISHED:
        return
    distributed |= DISTRIBUTED in received
    if (ready and not received) or os.getppid() != pid:
      # The pipe is closed; or a child of the trainer keeps it open, and only getppid
      # shows that the trainer has ended.
      other = ', or aborted by JAX for want of process 0' if distributed else ''
      return print_line(
        f'process {pid} ended without a word: killed (out of memory?), or by os._exit in '
        f'some code{other}; the same command goes on from the last checkpoint.'
      )
    if not _can_run(pid):
      continue
    silent = 0.0 if HEARTBEAT in received else silent + elapsed
    unanswered += elapsed if pending else 0.0
    name = f'process {pid}'
    if unanswered > answer_seconds:
      return _end(pid, f'{name} gave no answer to {pending} for {answer_seconds:g} s')
    if 0 < silence_seconds < silent:
      limit = f'{silence_seconds:g} s, AGENT_R1_SILENCE_SECONDS'
      return _end(pid, f'{name} gave no sign of life for {limit}')


if __name__ == '__main__':
  with contextlib.suppress(OSError):  # The trainer has ended and closed a pipe.
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
