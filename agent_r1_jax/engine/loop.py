"""The event loop, in a thread of its own, where episodes play and replicas serve."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from concurrent import futures
import threading

from agent_r1_jax.engine import replica as replica_lib

# Python hears a signal between two waits of this length, whatever thread got it.
_POLL_SECONDS = 0.5


def wait(future: futures.Future) -> futures.Future:
  """The future once it is done; signals are heard meanwhile."""
  while not future.done():
    futures.wait([future], _POLL_SECONDS)
  return future


class Loop:
  """Replicas that serve until it is closed."""

  def __init__(self, replicas: Sequence[replica_lib.Replica]):
    """Starts the thread."""
    self._replicas = replicas
    self._under_way: set[futures.Future] = set()
    opened: futures.Future[None] = futures.Future()
    self._thread = threading.Thread(
      target=lambda: self._run(opened), name='engine', daemon=True
    )
    self._thread.start()
    wait(opened).result()

  @property
  def busy(self) -> bool:
    """Whether episodes are under way."""
    return any(not future.done() for future in self._under_way)

  def start(self, episodes: Iterable[Coroutine]) -> futures.Future[list]:
    """Plays episodes; the first exception of one, or of a replica, ends all of them."""
    future = asyncio.run_coroutine_threadsafe(self._play(episodes), self._loop)
    self._under_way = {f for f in self._under_way if not f.done()} | {future}
    return future

  def close(self):
    """Cancels what is under way, and waits for its end."""
    if not self._loop.is_closed():
      self._loop.call_soon_threadsafe(self._closed.set)
    while self._thread.is_alive():
      self._thread.join(_POLL_SECONDS)

  def _run(self, opened: futures.Future):
    try:
      asyncio.run(self._serve(opened))
    except BaseException as error:
      # Nobody waits for this thread, but for what it was to give.
      for future in (opened, *self._under_way):
        if not future.done():
          future.set_exception(error)
    finally:
      for replica in self._replicas:
        replica.end()

  async def _serve(self, opened: futures.Future):
    self._loop, self._closed = asyncio.get_running_loop(), asyncio.Event()
    for replica in self._replicas:
      replica.begin()
    self._serving = asyncio.gather(*(replica.serve() for replica in self._replicas))
    # An error of theirs is raised by what was started, if anything was.
    self._serving.add_done_callback(lambda f: f.cancelled() or f.exception())
    opened.set_result(None)
    await self._closed.wait()

  async def _play(self, episodes):
    try:
      async with asyncio.TaskGroup() as group:
        watching = group.create_task(self._watch())
        tasks = [group.create_task(_staying(episode)) for episode in episodes]
        await asyncio.gather(*tasks)
        watching.cancel()
    except BaseExceptionGroup as error:
      # One failure cancels the rest; the group around it says nothing more.
      raise error.exceptions[0] from None
    return [task.result() for task in tasks]

  async def _watch(self):
    """Raises what a replica raises; its own end is not that of the replicas."""
    await asyncio.wait([self._serving])
    await self._serving


async def _staying(episode):
  try:
    return await episode
  except asyncio.CancelledError as error:
    task = asyncio.current_task()
    if task and not task.cancelling():
      # As our own cancellation it would end all the others without a word.
      raise RuntimeError('An episode raised CancelledError by itself.') from error
    raise
  except (SystemExit, KeyboardInterrupt) as error:
    # It would end the event loop and nothing else.
    raise RuntimeError(f'An episode wanted to end the process: {error!r}.') from error
