"""Fairness between a server's clients: who is next, and who may start more."""

import asyncio
import collections
from collections.abc import AsyncIterator
import contextlib

from agent_r1_jax.web import http


class Shares:
  """Counts each client's work in progress.

  Attributes:
    total: The work of all clients.
  """

  def __init__(self):
    self.total = 0
    self._counts: collections.Counter[str] = collections.Counter()

  def take(
    self, owner: str, count: int, most: float, what: str = 'replies are under way'
  ):
    """Counts work that a client starts.

    Raises:
      RefusedError: The total would exceed `most`, and the client its share.
    """
    own = self._counts[owner] + count
    clients = len(self._counts.keys() | {owner})
    if self.total + count > most and own * clients > most:
      raise http.RefusedError(429, f'{self.total} {what}; ask again later', 'overloaded')
    self._counts[owner], self.total = own, self.total + count

  def give(self, owner: str, count: int):
    """Counts work that has ended."""
    self._counts[owner] -= count
    self._counts, self.total = +self._counts, self.total - count


class Turns:
  """Limits concurrent work; waiting clients take turns.

  Quick work comes first, and slow work leaves one place free for it.
  """

  def __init__(self, places: int):
    self._places = places
    self._taken = [0, 0]  # By quick and by slow work.
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
    """Assigns free places to waiting clients."""
    for slow, most in enumerate((self._places, max(1, self._places - 1))):
      waiting = self._waiting[slow]
      while waiting and sum(self._taken) < self._places and self._taken[slow] < most:
        owner = next(iter(waiting))
        queue = waiting.pop(owner)
        turn = queue.popleft()
        if queue:
          waiting[owner] = queue  # To the end of the queue.
        if not turn.done():
          turn.set_result(None)
          self._taken[slow] += 1
