"""Waits of tests: for what is to happen, never for a time."""

import asyncio
from collections.abc import Callable
import pathlib
import time


def until(condition: Callable[[], object], what: str, seconds: float = 60):
  """Waits until a condition holds; a minute is far more than it takes."""
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, f'{what} did not happen in {seconds:g} s'
    time.sleep(0.01)


async def soon(condition: Callable[[], object], what: str = 'it', seconds: float = 60):
  """Does the same while other coroutines run."""
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, f'{what} did not happen in {seconds:g} s'
    await asyncio.sleep(0.005)


def has_ended(pid: int) -> bool:
  """Whether a process has ended; one that its parent has not waited for counts."""
  try:
    # After the name, which is in parentheses and may hold any character.
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2][1] == 'Z'
  except FileNotFoundError:
    return True
