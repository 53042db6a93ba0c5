"""Graders that a test of isolated functions has processes import."""

import os
import pathlib
import re
import sys
import threading
import time


def length(text: str, *, times: int = 1) -> int:
  """A grader as it should be."""
  return times * len(text)


def imported(module: str) -> bool:
  """Whether the grader's process has imported a module."""
  return module in sys.modules


def process(_: object = None) -> int:
  """Which process grades."""
  return os.getpid()


def catastrophe(text: str) -> bool:
  """A regular expression that backtracks 2**n times, and holds the interpreter."""
  return bool(re.fullmatch('(a+)+b', text))


def hang(*_: object):
  """A grader that waits for ever."""
  threading.Event().wait()


def wait_for(file: str) -> str:
  """A grader that says that it began, and waits to be told to go on."""
  pathlib.Path(f'{file}.begun').touch()
  while not pathlib.Path(file).exists():
    time.sleep(0.01)
  return 'went on'


def leave(*_: object):
  """A grader that ends its process and says that all is well."""
  os._exit(0)


def allocate(mib: int) -> int:
  """A grader that takes so much memory, without a page of it being touched."""
  return len(bytes(mib << 20))


def allocate_beside_threads(mib: int) -> int:
  """The same, after two threads have allocated a little each, and while they live."""
  allocated, ended = threading.Barrier(3), threading.Event()

  def work():
    _some = bytes(100_000)
    allocated.wait()
    ended.wait()

  threads = [threading.Thread(target=work) for _ in range(2)]
  for thread in threads:
    thread.start()
  allocated.wait()
  try:
    return allocate(mib)
  finally:
    ended.set()


def allocate_much(*_: object):
  """A grader that takes more memory than the judges of tasks may have."""
  return allocate(2048)


def fail(kind: str):
  """A grader that raises."""
  raise {'exit': SystemExit(0), 'value': ValueError('bad'), 'stop': StopIteration()}[kind]


def odd():
  """A grader whose result is not JSON."""
  return time


def chat(text: str) -> str:
  """A grader that prints."""
  print(text)
  return text
