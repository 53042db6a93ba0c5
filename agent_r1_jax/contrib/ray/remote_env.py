"""Environments on other machines, as the engine's process sees them.

`ray.environments(make_env, ...)` is a make_env. Its environments forward every method to
an environment in an actor (host.py), so tools, sandboxes and rewards run there. If the
actor is lost, the episode is played again from its beginning.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent import futures
import contextlib
import dataclasses
import functools
import itertools
import threading
from typing import Any, NoReturn

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, scoring
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.contrib.ray import actors, host, places
from agent_r1_jax.contrib.ray import remote as remote_lib
from agent_r1_jax.host import thread_pool, workers
from agent_r1_jax.rollout import faults
from agent_r1_jax.train import fingerprint

# Time limit for an actor to load the user's modules and make its first environment.
_LOAD_SECONDS = 600.0
# How long closing waits for the thread that manages actors.
_CLOSE_SECONDS = 10.0


class EnvironmentLostError(workers.LostCallError):
  """An environment's machine is gone, or does not answer."""


@dataclasses.dataclass(eq=False)
class Holder(places.Member):
  """An actor that holds environments.

  Attributes:
    made_of: Describes the environments' code.
    lost: Done once the actor is lost.
    count: The number of environments that it holds.
    reason: Why a call of it was lost; empty if none was.
  """

  made_of: Mapping[str, Any]
  lost: asyncio.Future[None]
  count: int = 0
  reason: str = ''


class Environments:
  """Makes environments on other machines; use ray.environments."""

  def __init__(
    self,
    make_env: Callable[[], Any],
    maximum: int,
    takes: Mapping[str, Any],
    address: str | None,
    wait_seconds: float,
    silence_seconds: float,
  ):
    """Connects to nothing yet; see ray.environments."""
    actors.check_installed('environments')
    if maximum < 1:
      raise ValueError(f'environments: maximum is {maximum}; it must be at least 1.')
    self._given = make_env, maximum, takes, address, wait_seconds, silence_seconds
    self._lock, self._holders = threading.Lock(), None

  def __reduce__(self):
    """Pickles without the connection, for samplers that are actors too."""
    return Environments, self._given

  def __call__(self) -> 'RemoteEnv':
    """Makes an environment on the machine that holds the fewest.

    Raises:
      faults.EnvironmentFaultError: The user's make_env raised there.
      EnvironmentLostError: The machine is gone.
      RuntimeError: There was no machine for `wait_seconds`, or all were refused.
    """
    with self._lock:
      if not self._holders:
        self._holders = self._connect()
    holders = self._holders
    return holders.run(holders.make(call_formats.chat_format.get())).result()

  def measure(self) -> dict[str, int]:
    """Counts actors that joined, were lost or refused, and environments by place."""
    if not self._holders:
      return {}
    return self._holders.measure()

  def close(self) -> None:
    """Ends all actors, which otherwise end with this process."""
    with self._lock:
      holders, self._holders = self._holders, None
    if holders:
      holders.close()
      actors.disconnect()

  def _connect(self) -> '_Holders':
    """Connects to the cluster, and starts the thread that manages the actors."""
    make_env, maximum, takes, address, wait_seconds, silence_seconds = self._given
    packed = actors.pack(make_env, 'environments: make_env')
    actors.connect(address, 'environments')
    made = futures.Future()

    async def look_after():
      holders = _Holders(packed, takes, wait_seconds, silence_seconds)
      made.set_result(holders)
      await holders.keep(maximum)

    run = functools.partial(asyncio.run, look_after())
    threading.Thread(target=run, daemon=True, name='environments').start()
    return made.result()


class _Holders:
  """The actors that hold environments; its coroutines run in the actors' event loop."""

  def __init__(
    self,
    packed: bytes,
    takes: Mapping[str, Any],
    wait_seconds: float,
    silence_seconds: float,
  ):
    self._packed, self._takes, self._wait = packed, takes, wait_seconds
    self._loop, self._numbers = asyncio.get_running_loop(), itertools.count()
    self._closed, self._thread = asyncio.Event(), threading.current_thread()
    self._refusals, self._maximum = 0, 0  # Consecutive refusals.
    self._made_of: Mapping[str, Any] = {}
    self._places = places.Places[Holder](
      'Environments', self._start, self._admit, self._watch, silence_seconds
    )

  def run(self, work) -> futures.Future:
    """Runs a coroutine in the event loop, from any thread."""
    return asyncio.run_coroutine_threadsafe(work, self._loop)

  def close(self):
    """Ends the actors, from any thread."""
    self._loop.call_soon_threadsafe(self._closed.set)
    self._thread.join(_CLOSE_SECONDS)

  def measure(self) -> dict[str, int]:
    """See Environments.measure."""
    counts = {name: self._places.counts[name] for name in ('joined', 'lost', 'refused')}
    return counts | {'held': sum(holder.count for holder in [*self._places.ready])}

  async def keep(self, maximum: int):
    """Keeps actors running at all places until it is closed."""
    self._maximum = maximum
    kept = [asyncio.create_task(self._places.keep(n)) for n in range(maximum)]
    await self._closed.wait()
    for task in kept:
      task.cancel()
    await asyncio.wait(kept)

  async def make(self, chat_format: call_formats.CallFormat) -> 'RemoteEnv':
    """Makes an environment; see Environments.__call__."""
    holder, number = await self._choose(), next(self._numbers)
    holder.count += 1
    try:
      made = await self._ask(holder, 'make', number, chat_format)
    except BaseException:
      holder.count -= 1
      raise
    return RemoteEnv(self, holder, number, made)

  async def call(self, holder: Holder, number: int, call: host.Call) -> host.Answer:
    """Calls a method of an environment.

    Raises:
      EnvironmentLostError, faults.EnvironmentFaultError: See these classes.
    """
    return await self._ask(holder, 'call', number, call)

  async def drop(self, holder: Holder, number: int):
    """Closes an environment, unless it is lost."""
    holder.count -= 1
    with contextlib.suppress(EnvironmentLostError):
      await self._ask(holder, 'close', number)

  async def _choose(self) -> Holder:
    """Waits for an actor, and returns the one with the fewest environments."""
    try:
      async with asyncio.timeout(self._wait):
        while not self._places.ready:
          if self._refusals >= self._maximum:
            break
          await self._places.changed.wait()
    except TimeoutError:
      pass
    if self._places.ready:
      return min(self._places.ready, key=lambda holder: holder.count)
    said = ' '.join(self._places.complaints) or (
      f'Within {self._wait:g} s (wait_seconds) the cluster had no machine with room: '
      f'each takes {dict(self._takes)}.'
    )
    raise RuntimeError(f'environments: no machine can hold one. {said}')

  async def _ask(self, holder: Holder, method: str, *args: Any) -> Any:
    """Calls an actor; gives up once the actor is lost."""
    call = asyncio.ensure_future(holder.remote.call(method, *args))
    try:
      await asyncio.wait([call, holder.lost], return_when=asyncio.FIRST_COMPLETED)
      if not call.done():
        raise remote_lib.LostError('it does not answer')
      answer = call.result()
    except remote_lib.RaisedError as error:  # Its result cannot be sent.
      raise faults.EnvironmentFaultError(str(error)) from error
    except remote_lib.LostError as error:
      holder.reason = str(error)
      self._places.notify()
      raise EnvironmentLostError(f"an environment's machine is lost: {error}") from error
    finally:
      call.cancel()
    if isinstance(answer, host.Fault):
      _raise_fault(answer)
    return answer

  def _start(self, number: int) -> remote_lib.Remote:
    return actors.start(host.EnvironmentHost, self._takes)

  async def _admit(self, remote: remote_lib.Remote) -> Holder:
    """Compares an actor's code with this process's, and makes it load the user's.

    Raises:
      RefusedError: Its code differs, or make_env raises there.
    """
    # The first call waits without limit for a machine that has room.
    await remote.call('ping')
    try:
      async with places.bound(_LOAD_SECONDS, 'loading'):
        found = await remote.call('open', self._packed)
      self._compare(found)
    except (remote_lib.RaisedError, remote_lib.RefusedError) as error:
      self._refusals += 1
      raise remote_lib.RefusedError(str(error)) from None
    self._refusals = 0
    lost = asyncio.get_running_loop().create_future()
    return Holder(remote, found['made_of'], lost)

  def _compare(self, found: Mapping[str, Any]):
    """Raises RefusedError unless the code equals this process's and the other actors'."""
    mine = fingerprint.describe_versions()
    self._made_of = self._made_of or found['made_of']
    for theirs, expected in (
      (found['versions'], mine),
      (found['made_of'], self._made_of),
    ):
      if names := [name for name in theirs if theirs[name] != expected.get(name)]:
        raise remote_lib.RefusedError(
          f'{found["where"]} has other {", ".join(names)} than this machine or the first '
          'one. Install the same versions of everything on all machines.'
        )

  async def _watch(self, holder: Holder, group: asyncio.TaskGroup):
    """Lets an actor hold environments until it is lost."""
    try:
      while not holder.reason:
        await self._places.changed.wait()
    finally:
      if not holder.lost.done():
        holder.lost.set_result(None)
    raise remote_lib.LostError(holder.reason)


class RemoteEnv:
  """An environment on another machine.

  Attributes:
    tools: Describe the tools for the prompt; calls run where the environment is.
    call_grammar: See BaseEnv.
    made_of: Describes its code, for train/fingerprint.py.
  """

  def __init__(self, holders: _Holders, holder: Holder, number: int, made: host.Made):
    """Defines the optional methods that the environment has."""
    self._holders, self._place = holders, (holder, number)
    self.made_of, self.call_grammar = holder.made_of, made.call_grammar
    self._set_tools(made.schemas)
    if 'finish' in made.methods:
      self.finish = functools.partial(self._call, 'finish')
    if 'set_seed' in made.methods:
      self.set_seed = functools.partial(self._call, 'set_seed')
    if 'least_limits' in made.methods:
      self.least_limits = self._least_limits

  async def reset(self, task: types.Task) -> list[types.Message]:
    """See BaseEnv."""
    return await self._call('reset', task)

  async def step(self, reply: str) -> types.Step:
    """See BaseEnv."""
    return await self._call('step', reply)

  async def close(self) -> None:
    """See BaseEnv."""
    await asyncio.wrap_future(self._holders.run(self._holders.drop(*self._place)))

  async def _call(self, method: str, *args: Any) -> Any:
    return self._take(await asyncio.wrap_future(self._begin(method, *args)))

  def _least_limits(self, task: types.Task) -> Mapping[str, float]:
    return self._take(self._begin('least_limits', task).result())

  def _begin(self, method: str, *args: Any) -> futures.Future:
    step, turn = scoring.policy_step.get(), thread_pool.current_turn.get()
    call = host.Call(method, args, step, turn)
    return self._holders.run(self._holders.call(*self._place, call))

  def _take(self, answer: host.Answer) -> Any:
    if answer.schemas is not None:
      self._set_tools(answer.schemas)
    return answer.value

  def _set_tools(self, schemas: list[dict[str, Any]]):
    self.tools = [
      tool_lib.Tool(schema['function']['name'], schema, _refuse_call)
      for schema in schemas
    ]


def _refuse_call(**arguments: Any) -> NoReturn:
  raise RuntimeError('this tool is called where its environment is; see contrib/ray.')


def _raise_fault(fault: host.Fault) -> NoReturn:
  """Raises an environment's remote exception here.

  Raises:
    faults.EnvironmentFaultError: Its cause has the original exception's type name.
    EnvironmentLostError: A failure elsewhere on that machine caused it.
  """
  if fault.lost:
    raise EnvironmentLostError(fault.text)
  kinds = {'CallTimeoutError': workers.CallTimeoutError}
  kind = kinds.get(fault.name) or type(fault.name, (Exception,), {})
  raise faults.EnvironmentFaultError(fault.text) from kind(fault.text)
