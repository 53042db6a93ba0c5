"""Keeps one process running at each of several places.

A place starts a process, admits it, employs it until it is lost, and starts the next one.
Nobody waits for a particular process. Everything runs in one event loop.
"""

import asyncio
import collections
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
import contextlib
import dataclasses
import logging
from typing import Generic, TypeVar

from agent_r1_jax.contrib.ray import remote as remote_lib

_LOGGER = logging.getLogger(__name__)
# How often to check that a process answers.
_PING_SECONDS = 1.0
# The pause before a place replaces a lost process. It grows while processes never get to
# work, or are refused.
_RESTART_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0


@dataclasses.dataclass(eq=False)
class Member:
  """An admitted process.

  Attributes:
    remote: The process.
    broken: Whether it is lost.
  """

  remote: remote_lib.Remote
  broken: bool = dataclasses.field(default=False, kw_only=True)


M = TypeVar('M', bound=Member)


class Places(Generic[M]):
  """Places for processes of one kind.

  Attributes:
    ready: The members that can work now, the oldest first.
    counts: How many 'joined', were 'lost' and were 'refused'.
    complaints: Why the last ones were refused or lost.
    changed: Set, and replaced by another event, at each `notify`.
  """

  def __init__(
    self,
    name: str,
    start: Callable[[int], remote_lib.Remote],
    admit: Callable[[remote_lib.Remote], Awaitable[M]],
    employ: Callable[[M, asyncio.TaskGroup], Awaitable[None]],
    silence_seconds: float,
  ):
    """Starts nothing yet; make it inside the event loop.

    Args:
      name: The name of a process in messages.
      start: Starts the process of a place; a call of it may wait for a machine.
      admit: Makes a process ready to work, or raises RefusedError.
      employ: Runs a member's work in a task group, until it is cancelled.
      silence_seconds: A process that does not answer for this long is lost.
    """
    self._name, self._start, self._admit, self._employ = name, start, admit, employ
    self._silence = silence_seconds
    self.ready: dict[M, None] = {}
    self.counts = collections.Counter()
    self.complaints = collections.deque[str](maxlen=3)
    self.changed = asyncio.Event()

  def notify(self) -> None:
    """Wakes everyone who waits for `changed`."""
    self.changed.set()
    self.changed = asyncio.Event()

  async def keep(self, number: int) -> None:
    """Keeps a process running at a place until it is cancelled."""
    own_task, pause = asyncio.current_task(), _RESTART_SECONDS
    # If it is cancelled while a process is lost, only the loss is raised.
    while not (own_task and own_task.cancelling()):
      remote = None
      try:
        remote = self._start(number)
        member = await self._admit(remote)
        pause = _RESTART_SECONDS
        await self._employ_until_lost(member)
      except remote_lib.RefusedError as error:
        self.counts['refused'] += 1
        self._complain(f'{self._name} {number} is refused: {error}')
        pause = _LONGEST_PAUSE_SECONDS
      except (remote_lib.LostError, remote_lib.RaisedError) as error:
        self._complain(f'{self._name} {number} is lost: {error}')
      finally:
        if remote:
          remote.kill()
      self.notify()
      await asyncio.sleep(pause)
      pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

  def _complain(self, text: str):
    if text not in self.complaints:  # A refused process is refused repeatedly.
      self.complaints.append(text)
      _LOGGER.warning('%s', text)

  async def _employ_until_lost(self, member: M):
    """Runs a member's work until the member is lost.

    Raises:
      LostError, RaisedError: It is gone, or something raised there.
    """
    self.ready[member] = None
    self.counts['joined'] += 1
    self.notify()
    try:
      async with asyncio.TaskGroup() as group:
        group.create_task(self._ping(member))
        with marking(member):
          await self._employ(member, group)
    except ExceptionGroup as error:
      self.counts['lost'] += 1
      raise error.exceptions[0] from None
    finally:
      del self.ready[member]
      self.notify()

  async def _ping(self, member: M):
    """Raises LostError when a member does not answer."""
    while True:
      await asyncio.sleep(min(_PING_SECONDS, self._silence))
      with marking(member):
        async with bound(self._silence, 'silent'):
          await member.remote.call('ping')


@contextlib.contextmanager
def marking(member: Member) -> Iterator[None]:
  """Marks a member that is lost inside `with`, before its other tasks are cancelled."""
  try:
    yield
  except (remote_lib.LostError, remote_lib.RaisedError):
    member.broken = True
    raise


@contextlib.asynccontextmanager
async def bound(seconds: float, doing: str) -> AsyncIterator[None]:
  """Raises LostError if the body of `with` takes longer."""
  try:
    async with asyncio.timeout(seconds):
      yield
  except TimeoutError:
    raise remote_lib.LostError(f'it was {doing} for {seconds:g} s.') from None
