"""What clients have asked for: one thread that computes it, and the results for later.

A client gets an id for its request at once, and asks for the result until it is there.
Everything here runs in the event loop, except for the functions that `Worker` calls. A
long one is a generator function: between its steps, such as micro-batches, others are
served.
"""

import asyncio
import collections
from collections.abc import Awaitable, Callable, Generator
import dataclasses
import functools
import logging
from typing import Any

from agent_r1_jax.host import thread_pool
from agent_r1_jax.web import http

_LOGGER = logging.getLogger(__name__)
_POLL_SECONDS = 20.0  # Of one question for a result; the client's own limit is 45.
_MOST_RESULTS = 4096
_MOST_BYTES = 1 << 28  # Of all results.


class Worker:
  """Runs functions in one thread: each owner's in their order, the owners in turn.

  Attributes:
    stuck: Why it runs nothing any longer, or ''.
  """

  def __init__(self, *, most_waiting: int, most_bytes: int, seconds: float):
    """Starts nothing.

    Args:
      most_waiting: How many functions of one owner may wait.
      most_bytes: How large all requests that wait may be.
      seconds: The longest that a function, or a step of one, may run. If it does not
        return, the thread is lost with the device that it waits for: everything that
        waits fails.
    """
    self.stuck = ''
    self._most_waiting, self._most_bytes = most_waiting, most_bytes
    self._seconds, self._bytes = seconds, 0
    self._pool = thread_pool.Pool(threads=1)
    self._waiting: dict[str, collections.deque[tuple[Generator, asyncio.Future]]] = {}
    self._draining: asyncio.Task | None = None

  def submit(self, owner: str, fn: Callable[[], Any], size: int = 0) -> asyncio.Future:
    """Lets a function wait for its owner's turn; the future has its result.

    Args:
      owner: Whose functions run in their order.
      fn: The function, or a generator function that returns the result.
      size: Bytes of the request.

    Raises:
      RefusedError: Too much waits already, or the thread is stuck.
    """
    if self.stuck:
      raise http.RefusedError(503, self.stuck)
    count = len(self._waiting.get(owner, ()))
    if count >= self._most_waiting or self._bytes + size > self._most_bytes:
      text = f'{count} requests of this model wait already, in all {self._bytes:,} bytes'
      raise http.RefusedError(429, f'{text}; ask again later')
    future = asyncio.get_running_loop().create_future()
    self._waiting.setdefault(owner, collections.deque()).append((_run(fn), future))
    self._bytes += size
    future.add_done_callback(lambda _: self._free(size))
    if self._draining is None or self._draining.done():
      self._draining = asyncio.create_task(self._drain())
    return future

  def _free(self, size: int):
    self._bytes -= size

  async def _drain(self):
    while self._waiting:
      owner = next(iter(self._waiting))
      queue = self._waiting.pop(owner)
      steps, future = queue.popleft()
      if queue:
        self._waiting[owner] = queue  # Behind the others.
      if not future.done() and await self._advance(steps, future):
        self._waiting.setdefault(owner, collections.deque()).appendleft((steps, future))

  async def _advance(self, steps: Generator, future: asyncio.Future) -> bool:
    """Runs a function's next step; returns whether another one follows."""
    try:
      async with asyncio.timeout(self._seconds) as limit:
        call = self._pool.submit(functools.partial(_advance, steps))
        returned = await asyncio.wrap_future(call)
    except Exception as error:
      # A function may raise TimeoutError itself: a disk that did not answer, for one.
      if not (isinstance(error, TimeoutError) and limit.expired()):
        if not future.done():
          future.set_exception(error)
        return False
      self.stuck = (
        f'a computation did not end within {self._seconds:g} seconds, and the device is '
        'taken as lost: start the server again; saved states are there'
      )
      _LOGGER.error(self.stuck)
      failed = [future, *(f for queue in self._waiting.values() for _, f in queue)]
      self._waiting.clear()
      for one in failed:
        if not one.done():
          one.set_exception(http.RefusedError(503, self.stuck))
    else:
      if returned is None:
        return True
      if not future.done():
        future.set_result(returned[0])
    return False


def _run(fn: Callable[[], Any]) -> Generator[None, None, Any]:
  result = fn()
  if isinstance(result, Generator):
    result = yield from result
  return result


def _advance(steps: Generator[None, None, Any]) -> tuple[Any] | None:
  """Runs the next step in the thread; returns (the result,) after the last one."""
  try:
    next(steps)
  except StopIteration as end:
    return (end.value,)
  return None


@dataclasses.dataclass
class _Entry:
  task: asyncio.Task
  size: int = 0


class Results:
  """The results of requests by id, until there are too many newer ones."""

  def __init__(self):
    self._entries: dict[str, _Entry] = {}

  def __contains__(self, request_id: str) -> bool:
    return request_id in self._entries

  def begin(self, request_id: str, work: Awaitable[bytes | dict]) -> asyncio.Task:
    """Begins a request, whose id must be new; returns what waits for it."""
    task = asyncio.ensure_future(_catch(work))
    self._entries[request_id] = entry = _Entry(task)

    def finish(task: asyncio.Task):
      result = b'' if task.cancelled() else task.result()
      entry.size = len(result) if isinstance(result, bytes) else 1000
      self._drop()

    task.add_done_callback(finish)
    return task

  def cancel(self, request_id: str):
    """Ends a request whose client does not wait for it; unknown ids are ignored."""
    if entry := self._entries.get(request_id):
      entry.task.cancel()

  async def wait(self, request_id: str) -> bytes | dict | None:
    """Waits for a result, for _POLL_SECONDS at most; None: it is not there yet.

    Raises:
      RefusedError: No such request is known.
    """
    entry = self._entries.get(request_id)
    if entry is None:
      text = (
        f'no result of {request_id!r:.120} is known: it is too old, or the server has '
        'been started again'
      )
      raise http.RefusedError(404, text)
    await asyncio.wait([entry.task], timeout=_POLL_SECONDS)
    if not entry.task.done():
      return None
    if entry.task.cancelled():
      return _fail('the request was cancelled', 'user')
    return entry.task.result()

  def _drop(self):
    """Drops the oldest results while there are too many."""
    done = {k: e for k, e in self._entries.items() if e.task.done()}
    size = sum(entry.size for entry in done.values())
    for request_id, entry in done.items():
      if len(self._entries) <= _MOST_RESULTS and size <= _MOST_BYTES:
        return
      del self._entries[request_id]
      size -= entry.size


def _fail(text: str, category: str) -> dict:
  """Describes a failure as the client reads it."""
  return {'error': text, 'category': category}


async def _catch(work: Awaitable[bytes | dict]) -> bytes | dict:
  """Awaits a result; an exception becomes the description of a failure."""
  try:
    return await work
  except http.RefusedError as error:
    return _fail(str(error), 'server' if error.status >= 500 else 'user')
  except (ValueError, FloatingPointError) as error:
    return _fail(str(error), 'user')
  except OSError as error:
    return _fail(str(error), 'server')
  except Exception as error:
    _LOGGER.exception('A request failed.')
    return _fail(f'{type(error).__name__}: {error}', 'server')
