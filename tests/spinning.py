"""Finds threads that a file's tests leave behind and that compute for ever."""

import threading
import time


def find(seconds: float) -> list[str]:
  """Returns the names of this process's threads if it computed all these seconds.

  One pause in them is enough: what ends by itself, such as a computation that a test
  began, has ended. Call it while nothing of the process is at work.
  """
  end = time.monotonic() + seconds
  while time.monotonic() < end:
    before = time.process_time()
    time.sleep(0.05)
    if time.process_time() - before < 0.002:
      return []
  return [thread.name for thread in threading.enumerate()]
