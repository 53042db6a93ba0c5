"""A run's open orders: which sampler plays which, until each has one result."""

import asyncio
import collections
from collections.abc import Callable
import dataclasses

from agent_r1_jax import types
from agent_r1_jax.contrib.ray import places as places_lib
from agent_r1_jax.rollout import sockets

# An episode that raised on this many samplers, or during which this many were lost, ends
# the run: it would take all of them down, one after the other.
_MOST_ERRORS, _MOST_LOSSES = 3, 10


def now() -> float:
  """Returns the time of the event loop, in seconds; a simulation has its own."""
  return asyncio.get_running_loop().time()


@dataclasses.dataclass(eq=False)
class OpenOrder:
  """An order without a result.

  Attributes:
    order: The order.
    result: Its trajectory, once there is one.
    players: The samplers that play it, each with its task.
    began: When it was last handed out.
    losses: How many samplers were lost while they played it.
    errors: On how many samplers it raised.
  """

  order: sockets.Order
  result: asyncio.Future[types.Trajectory]
  players: dict['Player', asyncio.Task] = dataclasses.field(default_factory=dict)
  began: float = 0.0
  losses: int = 0
  errors: int = 0

  def __str__(self) -> str:
    return f'task {self.order.task.id!r}, sample {self.order.sample}'


@dataclasses.dataclass(eq=False)
class Player(places_lib.Member):
  """An admitted sampler.

  Attributes:
    capacity: How many episodes it can play at once.
    version: Its policy's version; -1 before the first.
    playing: The orders that it plays.
  """

  capacity: int
  version: int = -1
  playing: set[OpenOrder] = dataclasses.field(default_factory=set)


class Orders:
  """The open orders.

  Attributes:
    counts: Episodes that were 'replayed', since a sampler was lost, or played 'twice'.
  """

  def __init__(
    self, notify: Callable[[], None], twice: bool, counts: collections.Counter
  ):
    """Starts without orders; `notify` is called when samplers may have work."""
    self._notify, self._twice, self.counts = notify, twice, counts
    self._open: dict[OpenOrder, None] = {}
    self._waiting = collections.deque[OpenOrder]()
    self._failure: BaseException | None = None
    # The mean duration of episodes, weighted towards recent ones; 0 before the first
    # ends.
    self._mean_seconds = 0.0

  async def play(self, order: sockets.Order) -> types.Trajectory:
    """Opens an order and waits for its trajectory; see sockets.Samplers.play."""
    if self._failure:
      raise self._failure
    opened = OpenOrder(order, asyncio.get_running_loop().create_future())
    self._open[opened] = None
    self._waiting.append(opened)
    self._notify()
    try:
      return await opened.result
    finally:
      opened.result.cancel()
      self._close(opened)

  def fail(self, error: BaseException):
    """Ends all open and future orders with an error."""
    self._failure = error
    for opened in list(self._open):
      self._end(opened, error)

  def choose(self, player: Player, players: int) -> OpenOrder | None:
    """Chooses what one of `players` plays next: orders in turn, up to its share.

    If no order waits, an idle sampler plays one that another has played for longer than
    the mean episode: results are equal, and the first one counts.
    """
    share = -(-len(self._open) // max(1, players))
    if len(player.playing) >= min(share, player.capacity):
      return None
    while self._waiting:
      opened = self._waiting.popleft()
      if not opened.result.done():
        return opened
    idle = all(len(opened.players) > 1 for opened in player.playing)
    if not (self._twice and idle and self._mean_seconds):
      return None
    late = now() - self._mean_seconds
    for opened in self._open:
      alone = len(opened.players) == 1 and player not in opened.players
      if alone and opened.began < late:
        self.counts['twice'] += 1
        return opened
    return None

  def hand_out(self, opened: OpenOrder, player: Player, task: asyncio.Task):
    """Records that a sampler plays an order in a task."""
    player.playing.add(opened)
    opened.players[player], opened.began = task, now()
    # As a callback, since a task may be cancelled before it begins.
    task.add_done_callback(lambda _: self._leave(opened, player))

  def finish(self, opened: OpenOrder, trajectory: types.Trajectory, seconds: float):
    """Sets an order's result, unless another sampler has."""
    before = self._mean_seconds or seconds
    self._mean_seconds = 0.9 * before + 0.1 * seconds
    if not opened.result.done():
      opened.result.set_result(trajectory)
      self._close(opened)

  def note_error(self, opened: OpenOrder, error: Exception):
    """Records that an order raised on a sampler."""
    opened.errors += 1
    if opened.errors == _MOST_ERRORS:
      text = f'an episode ({opened}) raised on {_MOST_ERRORS} samplers: {error}'
      self._end(opened, RuntimeError(text))

  def _leave(self, opened: OpenOrder, player: Player):
    """Re-queues an order that has no player and no result."""
    player.playing.discard(opened)
    opened.players.pop(player, None)
    if opened.result.done() or opened.players:
      return
    opened.losses += player.broken
    if opened.losses == _MOST_LOSSES:
      text = f'samplers: {_MOST_LOSSES} of them were lost while they played {opened}'
      self._end(opened, RuntimeError(f'{text}; it may be what ends them.'))
      return
    self.counts['replayed'] += 1
    self._waiting.appendleft(opened)
    self._notify()

  def _end(self, opened: OpenOrder, error: BaseException):
    if not opened.result.done():
      opened.result.set_exception(error)
      self._close(opened)

  def _close(self, opened: OpenOrder):
    """Forgets an order, and cancels it wherever it is still played."""
    if opened not in self._open:
      return
    del self._open[opened]
    for task in opened.players.values():
      if task is not asyncio.current_task():
        task.cancel()
    self._notify()
