"""Ray itself: connects to a cluster, starts and calls actors, and packs their arguments.

Apart from cluster.py's object store, only this file touches Ray, so the rest is tested
without it.
"""

import asyncio
from collections.abc import Iterator, Mapping
import contextlib
import importlib.util
import logging
import signal
import sys
import threading
from typing import Any

from agent_r1_jax.contrib.ray import remote as remote_lib

# How many calls of an actor may run at once; its own code limits them further.
_MOST_CALLS = 10_000


def check_installed(what: str) -> None:
  """Raises ValueError if Ray is not installed; `what` needs it."""
  if importlib.util.find_spec('ray') is None:
    raise ValueError(
      f"{what}: Ray is not installed; pip install 'agent_r1_jax[ray]', or leave them out."
    )


def start(kind: type, takes: Mapping[str, Any]) -> remote_lib.Remote:
  """Requests an actor from Ray; it starts once a machine has room for it.

  Args:
    kind: The actor's class, whose methods are coroutine functions.
    takes: The resources that it takes: num_cpus, num_gpus, resources.

  Raises:
    LostError: The connection to the cluster has ended.
  """
  import ray

  if not ray.is_initialized():
    # Ray would start a cluster here.
    raise remote_lib.LostError('the connection to the cluster of Ray has ended')
  actor = ray.remote(kind).options(
    **takes,
    max_restarts=0,
    max_task_retries=0,
    max_concurrency=_MOST_CALLS,
    scheduling_strategy='SPREAD',
  )
  return _Actor(actor.remote())


class _Actor:
  """A remote.Remote on a Ray actor."""

  def __init__(self, actor: Any):
    self._actor = actor

  async def call(self, method: str, *args: Any) -> Any:
    """See remote.Remote."""
    import ray
    from ray import exceptions

    reference = getattr(self._actor, method).remote(*args)
    try:
      return await reference
    except asyncio.CancelledError:
      with contextlib.suppress(Exception):  # Its actor is gone.
        ray.cancel(reference)
      raise
    except exceptions.RayTaskError as error:
      cause = error.cause if isinstance(error.cause, Exception) else error
      text = f'{type(cause).__name__}: {cause}'
      raise remote_lib.RaisedError(text) from error
    except exceptions.RayError as error:
      text = ' '.join(str(error).split())
      raise remote_lib.LostError(f'{type(error).__name__}: {text:.300}') from error

  def kill(self) -> None:
    """See remote.Remote."""
    import ray

    with contextlib.suppress(Exception):  # It is gone, or Ray is.
      ray.kill(self._actor)


def pack(value: Any, what: str) -> bytes:
  """Pickles an actor's argument, with the file of the script that may define it.

  Raises:
    ValueError: It cannot be pickled; `what` names it.
  """
  from ray import cloudpickle

  try:
    script = getattr(sys.modules['__main__'], '__file__', None)
    packed = cloudpickle.dumps((value, script))  # pyright: ignore[reportPrivateImportUsage]
    return packed
  except Exception as error:
    raise ValueError(
      f'{what} cannot be sent to other machines ({type(error).__name__}: {error}). Make '
      'servers, files and locks inside make_env, which each of them calls itself.'
    ) from error


def unpack(packed: bytes) -> Any:
  """Unpickles in an actor what `pack` pickled.

  Classes of the learner's script belong to `__main__` here, too. The fingerprint tells
  them from classes of installed packages by its file.
  """
  from ray import cloudpickle

  value, script = cloudpickle.loads(packed)
  if script:  # A notebook has no script.
    sys.modules['__main__'].__file__ = script
  return value


# The number of users of this module's connection; 0 if the script connected itself.
_users, _lock = 0, threading.Lock()


def connect(address: str | None, what: str) -> None:
  """Connects to the cluster, unless this process is connected.

  Raises:
    ValueError: There is no cluster; `what` needs it.
  """
  global _users
  import ray

  with _lock:
    if not ray.is_initialized():
      _connect(address, what)
      _users = 1
    elif _users:
      _users += 1


def disconnect() -> None:
  """Closes a connection of `connect`, once nobody uses it."""
  global _users
  with _lock:
    _users -= 1
    if _users == 0:
      import ray

      ray.shutdown()
    _users = max(_users, 0)


@contextlib.contextmanager
def connection(address: str | None, what: str) -> Iterator[None]:
  """Connects to the cluster inside `with`."""
  connect(address, what)
  try:
    yield
  finally:
    disconnect()


def _connect(address: str | None, what: str):
  import ray

  main = threading.current_thread() is threading.main_thread()
  numbers = (signal.SIGTERM, signal.SIGINT) if main else ()
  handlers = {number: signal.getsignal(number) for number in numbers}
  # It warns that it handles no SIGTERM outside of the main thread, which is intended.
  logging.getLogger('ray._private.worker').setLevel(logging.ERROR)
  try:
    # Not `init()`, which would start a cluster here: that forks, which a process with
    # JAX's threads must not.
    ray.init(address=address or 'auto', log_to_driver=False, logging_level=logging.ERROR)
  except ConnectionError as error:
    raise ValueError(
      f'{what}: there is no cluster of Ray at {address or "RAY_ADDRESS or here"} '
      f'({error}); start one with `ray start --head`, and `ray start --address=...` on '
      'the other machines.'
    ) from error
  # Ray's handlers would end the process before the run is saved.
  for number, handler in handlers.items():
    signal.signal(number, handler)
