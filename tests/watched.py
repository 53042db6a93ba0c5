"""A process that does one thing under `preemption.watch`: `python watched.py THING`.

It imports no more than it needs, for test_signals.py starts many of them.
"""

import os
import re
import signal
import sys
import time

from agent_r1_jax.host import preemption


def run_for_hours():
  """Is in C++, where no handler of Python runs."""
  import jax

  loop = lambda x: jax.lax.fori_loop(0, 2**31 - 1, lambda i, x: jax.numpy.sin(x), x)
  jax.jit(loop)(1.0).block_until_ready()


def hold_the_interpreter():
  re.match('(a+)+b', 'a' * 64)


def print_for_ever():
  while True:
    time.sleep(0.2)
    print('still up', flush=True)


def fork(watch):
  child = os.fork()
  if child == 0:
    time.sleep(600)
    os._exit(1)
  os.kill(child, signal.SIGTERM)
  status = os.waitpid(child, 0)[1]
  print(f'child ended with {status}, given {watch.is_requested()}', flush=True)


def main(thing):
  with preemption.watch() as watch:
    watch.phase, watch.newest_step = 'a program', lambda: 7
    print('up', flush=True)
    {
      'xla': run_for_hours,
      'regex': hold_the_interpreter,
      'print': print_for_ever,
      'exit': lambda: os._exit(0),
      'kill': lambda: os.kill(os.getpid(), signal.SIGKILL),
      'fork': lambda: fork(watch),
    }[thing]()


if __name__ == '__main__':
  main(sys.argv[1])
