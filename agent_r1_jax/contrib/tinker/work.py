"""What clients have asked for: one thread that computes it, and the results for later.

A client gets an id for its request at once, and asks for the result until it is there.
Everything here runs in the event loop, except for the functions that `Worker` calls. A
long one is a generator function: between its steps, such as micro-batches, others are
served.
"""

import asyncio
import bisect
from collections.abc import Awaitable, Callable, Generator
import dataclasses
import functools
import hashlib
import logging
from typing import Any, NamedTuple

from agent_r1_jax.host import thread_pool
from agent_r1_jax.web import fairness, http

_LOGGER = logging.getLogger(__name__)
_POLL_SECONDS = 20.0  # Of one question for a result; the client's own limit is 45.
_MOST_RESULTS = 4096
_MOST_BYTES = 1 << 28  # Of all results.
_GAP_SECONDS = 60.0  # That a function with a number waits for those before it.


class _Job(NamedTuple):
  """A function that waits."""

  order: int  # 0 if it has no number.
  steps: Generator[None, None, Any]
  future: asyncio.Future


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
    self._seconds, self._bytes = seconds, fairness.Shares()
    self._pool = thread_pool.Pool(threads=1)
    self._waiting: dict[str, list[_Job]] = {}  # By their order.
    self._next: dict[str, int] = {}  # The lowest number of each owner not yet begun.
    self._draining: asyncio.Task | None = None

  def get_next(self, owner: str) -> int:
    """Returns the lowest number of an owner's functions that has not begun."""
    return self._next.get(owner, 1)

  def submit(
    self, owner: str, fn: Callable[[], Any], size: int = 0, order: int = 0
  ) -> asyncio.Future:
    """Lets a function wait for its owner's turn; the future has its result.

    Args:
      owner: Whose functions run in their order.
      fn: The function, or a generator function that returns the result.
      size: Bytes of the request.
      order: The function's number among its owner's, from 1 on. It waits for those
        before it, also if they come later, for _GAP_SECONDS at most.

    Raises:
      RefusedError: Too much waits already, or the thread is stuck.
    """
    if self.stuck:
      raise http.RefusedError(503, self.stuck)
    count, awaited = len(self._waiting.get(owner, ())), self.get_next(owner)
    if count >= self._most_waiting and order != awaited:
      text = f'{count} requests of this model wait already; ask again later'
      raise http.RefusedError(429, text)
    self._bytes.take(owner, size, self._most_bytes, 'bytes wait already')
    job = _Job(order, _run(fn), asyncio.get_running_loop().create_future())
    bisect.insort(self._waiting.setdefault(owner, []), job, key=lambda job: job.order)
    job.future.add_done_callback(lambda _: self._bytes.give(owner, size))
    if order > awaited:
      asyncio.get_running_loop().call_later(_GAP_SECONDS, self._check, owner, job)
    self._wake()
    return job.future

  def _check(self, owner: str, job: _Job):
    """Lets a job fail if those before it have not come."""
    missing = self.get_next(owner)
    if job.order <= missing or job.future.done():
      return
    if self._waiting[owner][0] is not job:
      asyncio.get_running_loop().call_later(_GAP_SECONDS, self._check, owner, job)
      return
    text = f'seq_id {missing} did not come within {_GAP_SECONDS:g} seconds after '
    job.future.set_exception(http.RefusedError(400, f'{text}{job.order}, which fails'))
    self._next[owner] = job.order
    self._wake()

  def _wake(self):
    if self._draining is None or self._draining.done():
      self._draining = asyncio.create_task(self._drain())

  async def _drain(self):
    ready = lambda item: item[1][0].order <= self.get_next(item[0])
    while found := next(filter(ready, self._waiting.items()), None):
      owner, queue = found
      job = queue.pop(0)
      del self._waiting[owner]
      if queue:
        self._waiting[owner] = queue  # Behind the others.
      self._next[owner] = max(self.get_next(owner), job.order + 1)
      if not job.future.done() and await self._advance(job):
        self._waiting.setdefault(owner, []).insert(0, job)

  async def _advance(self, job: _Job) -> bool:
    """Runs a job's next step; returns whether another one follows."""
    future = job.future
    try:
      async with asyncio.timeout(self._seconds) as limit:
        call = self._pool.submit(functools.partial(_advance, job.steps))
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
      failed = [future, *(x.future for queue in self._waiting.values() for x in queue)]
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
  return (yield from result) if isinstance(result, Generator) else result


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
  digest: bytes
  size: int = 0


def make_digest(request: Any) -> bytes:
  """Makes what tells a request from another one: of its bytes, or of its fields."""
  text = request if isinstance(request, bytes) else repr(request).encode()
  return hashlib.blake2b(text, digest_size=16).digest()


class Results:
  """The results of requests by id, until there are too many newer ones."""

  def __init__(self):
    self._entries: dict[str, _Entry] = {}

  def has(self, request_id: str, digest: bytes) -> bool:
    """Whether a request has begun already.

    Raises:
      RefusedError: Another request has begun with its id.
    """
    entry = self._entries.get(request_id)
    if entry and entry.digest != digest:
      text = f'{request_id!r:.120} was the number of another request; count on'
      raise http.RefusedError(409, text)
    return entry is not None

  def begin(
    self, request_id: str, digest: bytes, work: Awaitable[bytes | dict]
  ) -> asyncio.Task:
    """Begins a request, whose id must be new; returns what waits for it."""
    task = asyncio.ensure_future(_catch(work))
    self._entries[request_id] = entry = _Entry(task, digest)

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
