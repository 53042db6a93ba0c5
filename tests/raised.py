"""What users' functions may raise, and functions that raise it."""

import asyncio
from collections.abc import Callable
import concurrent.futures
from typing import Any


class Mute(Exception):
  """An exception that cannot even be printed."""

  def __str__(self):
    raise SystemExit(3)


ERRORS: tuple[BaseException, ...] = (
  ValueError('bad'),
  KeyError('x'),
  Mute(),
  MemoryError(),
  TimeoutError('theirs'),
  concurrent.futures.CancelledError(),
  ExceptionGroup('two', [ValueError('a'), ValueError('b')]),
  RecursionError(),
  StopAsyncIteration(),
)
# No Exception, or none that a coroutine can raise.
ENDS: tuple[BaseException, ...] = (
  asyncio.CancelledError(),
  SystemExit(0),
  KeyboardInterrupt(),
  GeneratorExit(),
  BaseExceptionGroup('all', [SystemExit(1), ValueError()]),
  StopIteration(1),
)


def make(error: BaseException) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """A function and a coroutine function that raise it, whatever they are given."""

  def now(*args: Any, **kwargs: Any) -> Any:
    raise error.with_traceback(None)

  async def later(*args: Any, **kwargs: Any) -> Any:
    raise error.with_traceback(None)

  return now, later
