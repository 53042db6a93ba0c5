"""Manages samplers that come and go, and distributes a run's orders to them.

Each place (places.py) keeps one sampler: it compares the sampler's code with the
learner's, and sends it parameters and orders. Everything runs in one event loop.
"""

import asyncio
from collections.abc import Callable, Mapping
import contextlib
from typing import Any, NamedTuple

from agent_r1_jax import types
from agent_r1_jax.contrib.ray import orders as orders_lib
from agent_r1_jax.contrib.ray import places as places_lib
from agent_r1_jax.contrib.ray import remote as remote_lib
from agent_r1_jax.rollout import sockets

# How long to collect orders before handing them out: a rollout's orders arrive together,
# and each sampler should get neighbours, whose prompts share a prefix.
_COLLECT_SECONDS = 0.02
# How often a sampler checks whether others' episodes are late.
_LOOK_SECONDS = 0.25


class Options(NamedTuple):
  """The pool's settings; see ray.samplers."""

  minimum: int = 1
  maximum: int = 1
  wait_seconds: float = 1800.0
  silence_seconds: float = 60.0
  twice: bool = True


class Pool:
  """The samplers of a run.

  Attributes:
    orders: The run's orders. Their counts include samplers that 'joined', were 'lost' and
      were 'refused'.
  """

  def __init__(
    self,
    start: Callable[[int], remote_lib.Remote],
    job: Any,
    refuse: Callable[[Mapping[str, Any]], str | None],
    read: Callable[[Any, sockets.Order], types.Trajectory],
    options: Options,
  ):
    """Starts nothing yet; make it inside the event loop.

    Args:
      start: Starts the process of a place; a call of it may wait for a machine.
      job: The argument of Sampler.open.
      refuse: Returns why a sampler with this description is refused, or None.
      read: Makes an order's trajectory from the result of Sampler.play.
      options: The numbers of samplers, and time limits.
    """
    self._job, self._refuse, self._read = job, refuse, read
    self._options = options
    self._places = places_lib.Places[orders_lib.Player](
      'Sampler', start, self._admit, self._hand_out, options.silence_seconds
    )
    counts = self._places.counts
    self.orders = orders_lib.Orders(self._announce, options.twice, counts)
    self._policy: remote_lib.Policy | None = None
    self._announced = False

  @property
  def size(self) -> int:
    """The number of samplers that can play now."""
    return len(self._places.ready)

  async def run(self) -> None:
    """Keeps samplers running at all places until it is cancelled."""
    try:
      async with asyncio.TaskGroup() as group:
        group.create_task(self._watch_minimum())
        for number in range(self._options.maximum):
          group.create_task(self._places.keep(number))
    except BaseException as error:
      # Otherwise nobody who waits for an order would learn of it.
      first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
      self.orders.fail(first)
      raise

  def publish(self, policy: remote_lib.Policy) -> None:
    """Makes all samplers load this policy before they begin another episode."""
    self._policy = policy
    self._places.notify()

  def _announce(self):
    """Wakes all places soon."""
    if not self._announced:
      self._announced = True
      asyncio.get_running_loop().call_later(_COLLECT_SECONDS, self._notify)

  def _notify(self):
    self._announced = False
    self._places.notify()

  async def _watch_minimum(self):
    """Ends the run if there are too few samplers for too long."""
    enough_at = orders_lib.now()
    while True:
      options, now = self._options, orders_lib.now()
      if self.size >= options.minimum:
        enough_at = now
      elif now - enough_at > options.wait_seconds:
        said = ' '.join(self._places.complaints) or 'Nobody has been refused or lost.'
        error = sockets.SamplersLostError(
          f'samplers: for {options.wait_seconds:g} s (wait_seconds) there were fewer '
          f'than minimum={options.minimum}; there are {self.size}. {said} The run is '
          'saved, and the same command resumes it.'
        )
        self.orders.fail(error)
        return
      await asyncio.sleep(min(1.0, options.wait_seconds / 10))

  async def _admit(self, remote: remote_lib.Remote) -> orders_lib.Player:
    """Compares a sampler with the learner, and makes it create its engine.

    Raises:
      RefusedError: Its code or its machine differs from the learner's.
      LostError, RaisedError: It is gone, or something raised there.
    """
    # The first call waits without limit for a machine that has room.
    await remote.call('ping')
    # Half of the time that ends the run, so that another sampler can be tried.
    async with places_lib.bound(self._options.wait_seconds / 2, 'loading'):
      self._check(await remote.call('describe'))
      try:
        found = await remote.call('open', self._job)
      except remote_lib.RaisedError as error:
        raise remote_lib.RefusedError(str(error)) from None
      self._check(found)
      while not self._policy:
        await self._places.changed.wait()
      player = orders_lib.Player(remote, found['capacity'])
      await self._sync(player)
    return player

  def _check(self, found: Mapping[str, Any]):
    if reason := self._refuse(found):
      raise remote_lib.RefusedError(reason)

  async def _hand_out(self, player: orders_lib.Player, group: asyncio.TaskGroup):
    """Repeatedly sends a sampler the newest policy and orders."""
    while True:
      changed = self._places.changed
      await self._sync(player)
      while opened := self.orders.choose(player, self.size):
        task = group.create_task(self._play(player, opened))
        self.orders.hand_out(opened, player, task)
      # With a time-out, since no event says that another sampler's episode is late.
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LOOK_SECONDS):
          await changed.wait()

  async def _sync(self, player: orders_lib.Player):
    """Sends a sampler the newest policy, and all parameters the first time."""
    policy = self._policy
    if policy and policy.version != player.version:
      frozen = (policy.frozen,) if player.version < 0 else ()
      async with places_lib.bound(self._options.wait_seconds / 2, 'taking parameters'):
        await player.remote.call('sync', policy.step, policy.learned, *frozen)
      player.version = policy.version

  async def _play(self, player: orders_lib.Player, opened: orders_lib.OpenOrder):
    """Makes a sampler play an order, and sets the order's result."""
    began = orders_lib.now()
    with places_lib.marking(player):
      try:
        packed = await player.remote.call('play', opened.order)
      except remote_lib.RaisedError as error:
        self.orders.note_error(opened, error)
        raise
    trajectory = self._read(packed, opened.order)
    self.orders.finish(opened, trajectory, orders_lib.now() - began)
