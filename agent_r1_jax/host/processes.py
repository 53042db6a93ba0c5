"""Several processes, one a host: who plays which tasks, and that all end together.

Each process samples its share of a rollout on its own chips and waits for nobody in it.
At its end the processes exchange their tokens as arrays (`gather_arrays`). What follows
(credit, packing) is the same computation on the same numbers in every process, and each
places its own rows of a batch (host/sharding.py).

JAX's coordination service carries small values (`gather`); the processes find each other
in `runtime.initialize`. With one process, nothing here does anything.
"""

import atexit
from collections.abc import Iterator
import contextlib
import itertools
import os
import sys
import threading
import time
from typing import Any

import jax

# The only names here that JAX does not document; Orbax relies on the same.
from jax._src import distributed
from jax.experimental import multihost_utils
import numpy as np

from agent_r1_jax.host import records, watchdog

# Of one message: what gRPC carries at a time is bounded.
_PART = 1 << 20
_DAY = 24 * 3600
_POLL_SECONDS = 1.0
# How often it is asked who has ended, how long a process that says so goes on living, and
# how long the first does, whom the others ask.
_ASK_SECONDS, _LINGER_SECONDS, _FIRST_LINGERS_SECONDS = 0.4, 1.0, 2.5
_ENDED = 'agent_r1/ended/'

_rounds = itertools.count()


class LostError(RuntimeError):
  """Another process is gone; from the last checkpoint, all can go on."""


def is_first() -> bool:
  """Whether this process is the one that writes files."""
  return jax.process_index() == 0


def is_distributed() -> bool:
  """Whether there are others; usable before `runtime.initialize`."""
  return distributed.global_state.num_processes > 1


def take_share(n: int) -> range:
  """The places, of n, that are this process's."""
  return range(jax.process_index(), n, jax.process_count())


def gather(mine: Any) -> list[Any]:
  """Returns the small value that each process gave, in their order; waits for all.

  Args:
    mine: This process's value, as plain data (records.pack). With one process, this very
      object is returned.

  Raises:
    ValueError: The value is not plain data.
    LostError: Another process ended, or does not answer.
  """
  if jax.process_count() == 1:
    return [mine]
  # All processes call this at the same places of a run, so their counters agree.
  name = f'agent_r1/{next(_rounds)}'
  client, data = _client(), records.pack(mine)
  parts = [data[i : i + _PART] for i in range(0, len(data), _PART)]
  try:
    for i, part in enumerate(parts):
      client.key_value_set_bytes(f'{name}/{jax.process_index()}/{i}', part)
    client.key_value_set(f'{name}/{jax.process_index()}/parts', str(len(parts)))
    client.wait_at_barrier(f'{name}/there', timeout_in_ms=_DAY * 1000)
    shares = [_fetch(client, f'{name}/{p}') for p in range(jax.process_count())]
    client.wait_at_barrier(f'{name}/read', timeout_in_ms=_DAY * 1000)
    client.key_value_delete(f'{name}/{jax.process_index()}/')
  except jax.errors.JaxRuntimeError as error:
    reason = str(error).splitlines()[0]
    raise LostError(
      f'Process {jax.process_index()} of {jax.process_count()} lost the others '
      f'({reason}). Start all of them again with the same command: the run goes on from '
      'its last checkpoint.'
    ) from None
  return [records.unpack(share) for share in shares]


def gather_arrays(mine: np.ndarray) -> list[np.ndarray]:
  """Returns the array that each process gave, in their order; waits for all.

  The chips exchange the arrays, so nothing large passes through the coordinator.

  Args:
    mine: This process's array [n, ...]. n may differ between processes; the other
      dimensions and the dtype, of at most 32 bits, may not.

  Raises:
    LostError: Another process ended, or does not answer.
  """
  if jax.process_count() == 1:
    return [mine]
  # A collective may not wait long for a process that comes late; `gather` may.
  lengths = gather(len(mine))
  # Powers of two, so that few shapes are compiled.
  longest = 1 << max(max(lengths) - 1, 0).bit_length()
  padded = np.zeros((longest, *mine.shape[1:]), mine.dtype)
  padded[: len(mine)] = mine
  shares = multihost_utils.process_allgather(padded)
  return [share[:length] for share, length in zip(shares, lengths, strict=True)]


def watch_others() -> None:
  """From now on, a process that ends before its time ends this one, with one line.

  Each says why it ends, if it can (`leave`). Of one that was killed or whose host is
  gone, JAX's coordination service knows after its heartbeat's time. The service lives in
  process 0: if that is killed, JAX aborts the others at once with some lines of its own,
  and ours is among them (watchdog.py). One process is left alone.
  """
  global _looking
  if _looking or not is_distributed():
    return
  _looking = True
  watchdog.send(watchdog.DISTRIBUTED)
  # Without it, JAX's service would abort all processes when one is lost. With it, it also
  # no longer waits for all at the end (`_wait_for_the_others`).
  threading.Thread(target=_look, daemon=True, name='look out').start()
  atexit.register(_wait_for_the_others)


def leave(status: int, reason: str) -> None:
  """Ends this process at once if it is one of several, and tells the others why.

  Args:
    status: That all of them end with.
    reason: As in 'process 1 raised ...'.
  """
  state = distributed.global_state
  if not is_distributed() or state.client is None:
    return
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    word = f'{status} {reason}'
    state.client.key_value_set(f'{_ENDED}{state.process_id}', word, allow_overwrite=True)
  _end(status)


_looking = False
_finishing, _alone = threading.Event(), threading.Event()


def _look() -> None:
  state, client = distributed.global_state, _client()
  everyone = [*range(state.num_processes)]
  while not _finishing.wait(_ASK_SECONDS):
    try:
      for key, word in client.key_value_dir_get(_ENDED):
        if (number := int(key.rpartition('/')[2])) != state.process_id:
          status, _, reason = word.partition(' ')
          _follow(int(status), f'process {number} of {len(everyone)} {reason}')
      # Waits until all that live have asked the same.
      lost = {*everyone} - client.get_live_nodes(everyone).keys()
    except jax.errors.JaxRuntimeError:
      continue  # The end of this process, or of the first: JAX acts.
    if lost and not _finishing.is_set():
      names = ', '.join(map(str, sorted(lost)))
      _follow(
        1,
        f'process {names} of {len(everyone)} is lost (killed, or its host or network is '
        'gone)',
      )
  if state.process_id == 0:
    _until_alone(client)
    _alone.set()


def _follow(status: int, what: str) -> None:
  """Says who ended, and ends as it did."""
  me = distributed.global_state.process_id
  watchdog.print_line(
    f'{what}, so process {me} ends too; the same command, started in all, goes on from '
    'the last checkpoint.'
  )
  _end(status)


def _end(status: int) -> None:
  lingers = distributed.global_state.process_id == 0
  time.sleep(_FIRST_LINGERS_SECONDS if lingers else _LINGER_SECONDS)
  watchdog.send(watchdog.FINISHED)
  os._exit(status)


def _wait_for_the_others() -> None:
  """At the end of Python, so that the first process outlives the others' last words."""
  if client := _client():
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      client.wait_at_barrier('agent_r1/exit', timeout_in_ms=300_000)
    _finishing.set()
    if distributed.global_state.process_id == 0:
      # The thread that looked out waits: at the end, Python begins no new one.
      _alone.wait(30)


def _until_alone(client) -> None:
  """Until the others have told the service that they end."""
  everyone = [*range(distributed.global_state.num_processes)]
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    while len(client.get_live_nodes(everyone)) > 1:
      time.sleep(_ASK_SECONDS / 4)


@contextlib.contextmanager
def exit_together() -> Iterator[None]:
  """An error inside ends this process at once, if it is one of several.

  Python's own end would wait for the others, who wait for this process: for minutes.
  They are told its reason. An error of the runtime (a collective that broke off) may only
  be what another's end looks like from here: then it is first waited to hear who is lost.
  """
  try:
    yield
  except Exception as error:
    if not is_distributed():
      raise
    reason = f'{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}'
    if _of_the_runtime(error):
      seconds = 1.5 * heartbeat_seconds() + 5
      watchdog.print_line(f'{reason}; waiting up to {seconds:g} s to hear who is lost')
      time.sleep(seconds)  # `_look` ends the process.
    sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    leave(1, f'raised {reason}')
    raise  # The others cannot be told any more.


def heartbeat_seconds() -> int:
  """After so long a silence a process is taken for dead."""
  return int(os.environ.get('AGENT_R1_HEARTBEAT_SECONDS', 60))


def _of_the_runtime(error: BaseException | None) -> bool:
  while error is not None:
    if isinstance(error, LostError):
      return True
    if isinstance(error, jax.errors.JaxRuntimeError):
      return 'RESOURCE_EXHAUSTED' not in str(error)  # Memory is this process's own.
    error = error.__cause__ or error.__context__
  return False


class Notice:
  """A word to all processes that can be given once, such as that the run is to end."""

  def __init__(self, name: str):
    self._key = f'agent_r1/notice/{name}'
    self._here = threading.Event()
    self._asked = 0.0

  def give(self):
    """Safe in a signal's handler: the others hear of it when this process asks."""
    self._here.set()

  def here(self) -> bool:
    """Whether it is known in this process; asks nobody."""
    return self._here.is_set()

  def given(self) -> bool:
    """Whether some process has given it; those of others are heard within a second."""
    if jax.process_count() == 1 or time.monotonic() - self._asked < _POLL_SECONDS:
      return self._here.is_set()
    self._asked = time.monotonic()
    client = _client()
    if self._here.is_set():
      client.key_value_set(self._key, '1', allow_overwrite=True)
    elif client.key_value_dir_get(self._key):
      self._here.set()
    return self._here.is_set()


def _fetch(client, name: str) -> bytes:
  wait = 60_000
  count = int(client.blocking_key_value_get(f'{name}/parts', wait))
  parts = (client.blocking_key_value_get_bytes(f'{name}/{i}', wait) for i in range(count))
  return b''.join(parts)


def _client() -> Any:
  return distributed.global_state.client
