"""Clients' requests: one thread that computes them, and their results for later.

A client gets an id for its request at once, and polls until the result is there.
Everything here runs in the event loop, except the functions that `Worker` calls. A long
one is a generator function: between its steps, such as micro-batches, others run.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator
import functools
import hashlib
import logging
from typing import Any, NamedTuple
import weakref

from agent_r1_jax.host import thread_pool
from agent_r1_jax.web import fairness, http

_LOGGER = logging.getLogger(__name__)
_POLL_SECONDS = 20.0  # Of one poll for a result; the client's own limit is 45.
_MOST_RESULTS = 4096
_MOST_BYTES = 1 << 28  # Of all results.
_MOST_WAITING = 64  # Operations of one run.
_GAP_SECONDS = 60.0  # How long an operation waits for earlier ones to arrive.


class Worker:
  """Runs functions in one thread: each owner's in order, the owners in turn.

  Attributes:
    stuck: Why it no longer runs anything, or ''.
  """

  def __init__(self, seconds: float):
    """Starts nothing.

    Args:
      seconds: The time limit of a function, or of a step of one. If it does not return,
        the thread is lost with the device that it waits for, and everything that waits
        fails.
    """
    self.stuck, self._seconds = '', seconds
    self._pool, self._turns = thread_pool.Pool(threads=1), fairness.Turns(1)
    # Only of owners with functions here.
    self._owners = weakref.WeakValueDictionary[str, asyncio.Lock]()

  def check(self):
    """Raises RefusedError if the thread is lost."""
    if self.stuck:
      raise http.RefusedError(503, self.stuck)

  async def run(self, owner: str, fn: Callable[[], Any]) -> Any:
    """Runs a function in its owner's turn; returns its result.

    Args:
      owner: An owner's functions run in the order of the calls.
      fn: The function, or a generator function that returns the result. Between its steps
        the other owners have their turns.

    Raises:
      RefusedError: The thread is lost.
    """
    http.client.set(owner)
    async with self._owners.setdefault(owner, asyncio.Lock()):
      steps, done = _run(fn), None
      while done is None:
        async with self._turns.take():
          done = await self._advance(steps)
      return done[0]

  async def _advance(self, steps: Generator[None, None, Any]) -> tuple[Any] | None:
    """Runs the next step; returns (the result,) after the last one."""
    self.check()
    step = asyncio.wrap_future(self._pool.submit(functools.partial(_advance, steps)))
    await asyncio.wait([step], timeout=self._seconds)
    if not step.done():
      self.stuck = (
        f'a computation did not end within {self._seconds:g} seconds, and the device is '
        'taken as lost: start the server again; saved states are there'
      )
      _LOGGER.error(self.stuck)
      self.check()
    return step.result()


def _run(fn: Callable[[], Any]) -> Generator[None, None, Any]:
  result = fn()
  return (yield from result) if isinstance(result, Generator) else result


def _advance(steps: Generator[None, None, Any]) -> tuple[Any] | None:
  """Runs the next step in the thread; returns (the result,) after the last one."""
  try:
    next(steps)
  except StopIteration as end:
    return (end.value,)
  return None


class Order:
  """Runs a run's operations in the order of their numbers, which begin at 1."""

  def __init__(self):
    self._next = 1  # The lowest number neither begun nor refused.
    self._refused: set[int] = set()  # Numbers that may come again.
    self._waiting: dict[int, asyncio.Future] = {}  # Operations that came too early.
    self._count = 0  # Unfinished operations.

  def check(self, number: int):
    """Raises RefusedError for a past number, or if too many operations wait."""
    if number < self._next and number not in self._refused:
      text = f'seq_id is {number}, and {self._next - 1} has been answered already'
      raise http.RefusedError(400, text)
    # Besides operations that came too early, leave room for those they wait for.
    awaited = number == self._next and self._waiting
    if self._count >= _MOST_WAITING * (2 if awaited else 1):
      text = f'{self._count} requests of this model wait already; ask again later'
      raise http.RefusedError(429, text)

  def skip(self, number: int):
    """Tells later operations not to wait for a refused one."""
    if number >= self._next:
      self._refused.add(number)
      self._go_on()

  async def run(self, number: int, compute: Callable[[], Awaitable]) -> Any:
    """Computes once all earlier operations have begun.

    Raises:
      RefusedError: One did not come within _GAP_SECONDS.
    """
    self._count += 1
    try:
      await self._wait(number)
      return await compute()
    finally:
      self._count -= 1

  async def _wait(self, number: int):
    self._refused.discard(number)
    if number < self._next:
      return
    turn = self._waiting[number] = asyncio.get_running_loop().create_future()
    self._go_on()
    while not turn.done():
      await asyncio.wait([turn], timeout=_GAP_SECONDS)
      if not turn.done() and number == min(self._waiting):
        text = f'seq_id {self._next} did not come within {_GAP_SECONDS:g} seconds after '
        self._next = number
        self._go_on()
        raise http.RefusedError(400, f'{text}{number}, which fails')

  def _go_on(self):
    """Moves past all numbers that have come or been refused."""
    while self._next in self._waiting or self._next in self._refused:
      if turn := self._waiting.pop(self._next, None):
        turn.set_result(None)
      self._next += 1


class _Entry(NamedTuple):
  task: asyncio.Task
  digest: bytes

  @property
  def size(self) -> int:
    """The bytes of its result, once it is done."""
    result = b'' if self.task.cancelled() else self.task.result()
    return len(result) if isinstance(result, bytes) else 1000


class Results:
  """The results of requests by id, until there are too many newer ones."""

  def __init__(self):
    self._entries: dict[str, _Entry] = {}

  def begin(
    self, request_id: str, request: Any, start: Callable[[], Awaitable[bytes | dict]]
  ) -> asyncio.Task | None:
    """Begins a request and returns its task, or None if it is a repeated one.

    Args:
      request_id: The request's id.
      request: Its bytes or fields, which distinguish it from others.
      start: Returns the future result; its exceptions are raised here.

    Raises:
      RefusedError: Another request has begun with this id.
    """
    text = request if isinstance(request, bytes) else repr(request).encode()
    digest = hashlib.blake2b(text, digest_size=16).digest()
    if entry := self._entries.get(request_id):
      if entry.digest != digest:
        text = f'{request_id!r:.120} was the number of another request; count on'
        raise http.RefusedError(409, text)
      return None
    task = asyncio.ensure_future(_catch(start()))
    self._entries[request_id] = _Entry(task, digest)
    task.add_done_callback(lambda _: self._drop())
    return task

  def cancel(self, request_id: str):
    """Ends a request that its client has given up; ignores unknown ids."""
    if entry := self._entries.get(request_id):
      entry.task.cancel()

  async def wait(self, request_id: str) -> bytes | dict | None:
    """Waits for a result, up to _POLL_SECONDS; returns None if it is not there yet.

    Raises:
      RefusedError: The request is unknown.
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
  """Awaits a result; converts an exception to the description of a failure."""
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
