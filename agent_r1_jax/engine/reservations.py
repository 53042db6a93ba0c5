"""Who may use the rows of a replica's cache, where there are more clients than rows."""

import asyncio
import collections
from collections.abc import AsyncIterator, Hashable
import contextlib


class Reservations:
  """The rows of one replica that clients have reserved; see Engine.reserve.

  Attributes:
    count: How many clients hold rows.
  """

  def __init__(self, rows: int):
    """Begins with `rows` free rows."""
    self.count = 0
    self._free_rows = asyncio.Semaphore(rows)
    # The lock at which the clients of each policy's version queue; and the lock at which
    # the first ones of all queues wait, whose holder takes rows.
    self._queues = collections.defaultdict(asyncio.Lock)
    self._next_client = asyncio.Lock()

  @contextlib.asynccontextmanager
  async def reserve(self, version: Hashable, rows: int) -> AsyncIterator[None]:
    """Waits for `rows` free rows and holds them inside `with`.

    Args:
      version: That of the policy that the client's requests name; None if they name none.
      rows: The most texts that the client continues at a time.
    """
    taken = 0
    try:
      # A lock admits clients in the order in which they came. Only the first of each
      # policy's queue waits for the second lock, so that the policies take turns. Its
      # holder takes all its rows before another client takes any: two that each held a
      # part of theirs would deadlock.
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
