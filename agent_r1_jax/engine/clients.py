"""The clients of an engine: the event loop that runs them, and the rows they reserve.

The loop runs in its own thread, together with the replicas that serve the clients.
"""

import asyncio
import collections
from collections.abc import AsyncIterator, Coroutine, Hashable, Iterable, Sequence
from concurrent import futures
import contextlib
import threading
from typing import Any

# The main thread waits in steps of this length: Python handles signals only between them.
_POLL_SECONDS = 0.5


def wait(future: futures.Future) -> futures.Future:
  """Waits until the future is done and returns it; handles signals meanwhile."""
  while not future.done():
    futures.wait([future], _POLL_SECONDS)
  return future


class ClientLoop:
  """Runs clients, and the replicas that serve them, until it is closed."""

  def __init__(self, replicas: Sequence[Any]):
    """Starts the thread; each replica has `start`, `serve` and `stop` (replica.py)."""
    self._replicas = replicas
    self._under_way: set[futures.Future] = set()
    self._groups: set[asyncio.Task] = set()
    opened: futures.Future[None] = futures.Future()
    self._thread = threading.Thread(
      target=lambda: self._run_thread(opened), name='engine', daemon=True
    )
    self._thread.start()
    wait(opened).result()

  @property
  def busy(self) -> bool:
    """Whether any client is running."""
    return any(not future.done() for future in self._under_way)

  def start(self, clients: Iterable[Coroutine]) -> futures.Future[list]:
    """Runs clients; the first exception of a client or replica ends all of them."""
    future = asyncio.run_coroutine_threadsafe(self._run_clients(clients), self._loop)
    self._under_way = {f for f in self._under_way if not f.done()} | {future}
    return future

  def close(self):
    """Cancels the running clients and waits until they have ended."""
    if not self._loop.is_closed():
      self._loop.call_soon_threadsafe(self._closed.set)
    while self._thread.is_alive():
      self._thread.join(_POLL_SECONDS)

  def _run_thread(self, opened: futures.Future):
    try:
      asyncio.run(self._serve(opened))
    except BaseException as error:
      # Other threads wait for these futures, and would never learn of the error.
      for future in (opened, *self._under_way):
        if not future.done():
          future.set_exception(error)
    finally:
      for replica in self._replicas:
        replica.stop()

  async def _serve(self, opened: futures.Future):
    self._loop, self._closed = asyncio.get_running_loop(), asyncio.Event()
    for replica in self._replicas:
      replica.start()
    self._serving = asyncio.gather(*(replica.serve() for replica in self._replicas))
    # Clients raise a replica's error, see `_watch`. Without clients, reading it here
    # keeps asyncio from logging that it was never retrieved.
    self._serving.add_done_callback(lambda f: f.cancelled() or f.exception())
    opened.set_result(None)
    await self._closed.wait()
    # Before asyncio.run cancels all tasks: a second cancellation of a client would
    # interrupt its clean-up.
    for group in self._groups:
      group.cancel()
    if self._groups:
      await asyncio.wait(self._groups)

  async def _run_clients(self, clients):
    own_task = asyncio.current_task()
    assert own_task is not None
    self._groups.add(own_task)
    try:
      async with asyncio.TaskGroup() as group:
        watching = group.create_task(self._watch())
        tasks = [group.create_task(_guard(client)) for client in clients]
        # Not `gather`: it returns when the first cancelled client has ended, and the
        # group would then cancel the others a second time.
        if tasks:
          await asyncio.wait(tasks)
        watching.cancel()
    except BaseExceptionGroup as error:
      # The first failure cancels the rest, so the exception group adds nothing.
      raise error.exceptions[0] from None
    finally:
      self._groups.discard(own_task)
    return [task.result() for task in tasks]

  async def _watch(self):
    """Waits for the replicas and raises their first error."""
    # Not only `await self._serving`: cancelling this task would cancel the replicas.
    await asyncio.wait([self._serving])
    await self._serving


async def _guard(client: Coroutine):
  """Awaits a client; turns exceptions that would end a task group into RuntimeError."""
  try:
    return await client
  except asyncio.CancelledError as error:
    task = asyncio.current_task()
    if task and not task.cancelling():
      # A task group would treat it as a cancellation from outside.
      raise RuntimeError(
        'A client of the engine raised CancelledError by itself.'
      ) from error
    raise
  except (SystemExit, KeyboardInterrupt) as error:
    # It would end the event loop, but not the process.
    raise RuntimeError(
      f'A client of the engine tried to end the process: {error!r}.'
    ) from error


class Reservations:
  """The rows of one replica that clients have reserved; see AnyEngine.reserve.

  Attributes:
    count: The number of clients that hold rows.
  """

  def __init__(self, rows: int):
    """Starts with `rows` free rows."""
    self.count = 0
    self._free_rows = asyncio.Semaphore(rows)
    # Clients queue at the lock of their policy's version; the first client of each queue
    # waits for `_next_client`, whose holder takes rows.
    self._queues = collections.defaultdict(asyncio.Lock)
    self._next_client = asyncio.Lock()

  @contextlib.asynccontextmanager
  async def reserve(self, version: Hashable, rows: int) -> AsyncIterator[None]:
    """Waits for `rows` free rows and holds them inside `with`.

    Args:
      version: The version of the policy that the requests name; None if they name none.
      rows: How many sequences the client keeps open at once.
    """
    taken = 0
    try:
      # Locks are first come, first served. Only the first client of each policy's queue
      # waits for the second lock, so that policies take turns. Its holder takes all its
      # rows before another client takes any: two clients with part of their rows would
      # deadlock.
      async with self._queues[version], self._next_client:
        while taken < rows:
          await self._free_rows.acquire()
          taken += 1
      self.count += 1
      try:
        yield
      finally:
        self.count -= 1
    finally:
      for _ in range(taken):
        self._free_rows.release()
