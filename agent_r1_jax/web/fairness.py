"""Fairness between the clients of a server: who is next, and who may begin yet more."""

import asyncio
import collections
from collections.abc import AsyncIterator
import contextlib

from agent_r1_jax.web import http


class Shares:
  """Counts what each client has under way.

  Attributes:
    total: That of all clients.
  """

  def __init__(self):
    self.total = 0
    self._counts: collections.Counter[str] = collections.Counter()

  def take(
    self, owner: str, count: int, most: float, what: str = 'replies are under way'
  ):
    """Counts what a client begins.

    Raises:
      RefusedError: All have more than `most` then, and the client more than its share.
    """
    own = self._counts[owner] + count
    clients = len(self._counts.keys() | {owner})
    if self.total + count > most and own * clients > most:
      raise http.RefusedError(429, f'{self.total} {what}; ask again later', 'overloaded')
    self._counts[owner], self.total = own, self.total + count

  def give(self, owner: str, count: int):
    """Counts what has ended."""
    self._counts[owner] -= count
    self._counts, self.total = +self._counts, self.total - count


class Turns:
  """Lets so much work be done at a time; clients who wait take turns.

  Quick work comes first, and slow work leaves it a place.
  """

  def __init__(self, places: int):
    self._places = places
    self._taken = [0, 0]  # By quick work, and by slow.
    self._waiting: list[dict[str, collections.deque[asyncio.Future]]] = [{}, {}]

  @contextlib.asynccontextmanager
  async def take(self, *, slow: bool = False) -> AsyncIterator[None]:
    """Waits for a place, and holds it inside `async with`."""
    turn = asyncio.get_running_loop().create_future()
    queue = self._waiting[slow].setdefault(http.client.get(), collections.deque())
    queue.append(turn)
    self._give()
    try:
      await turn
      yield
    finally:
      self._taken[slow] -= not turn.cancelled()
      self._give()

  def _give(self):
    """Gives the free places to those who wait."""
    for slow, most in enumerate((self._places, max(1, self._places - 1))):
      waiting = self._waiting[slow]
      while waiting and sum(self._taken) < self._places and self._taken[slow] < most:
        owner = next(iter(waiting))
        queue = waiting.pop(owner)
        turn = queue.popleft()
        if queue:
          waiting[owner] = queue  # Behind the others.
        if not turn.done():
          turn.set_result(None)
          self._taken[slow] += 1
