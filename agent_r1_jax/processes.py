"""Several processes, one a host: who plays which tasks, and that all end together.

Each process samples its share of a rollout on its own chips and waits for nobody in it.
At its end everyone is told everyone's trajectories: what follows (credit, packing) is
the same computation everywhere, on the same numbers, and needs no collective of ours.

JAX's coordination service carries the messages; the processes find each other in
`host.prepare`. With one process, nothing here does anything.
"""

from collections.abc import Callable, Iterator
import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
from typing import Any

import jax

# The only names here that JAX does not document; Orbax relies on the same.
from jax._src import distributed

from agent_r1_jax import records

# Of one message: what gRPC carries at a time is bounded.
_PART = 1 << 20
_DAY = 24 * 3600
_POLL_SECONDS = 1.0

_rounds = itertools.count()


class LostError(RuntimeError):
  """Another process is gone; from the last checkpoint, all can go on."""


def first() -> bool:
  """Whether this process is the one that writes files."""
  return jax.process_index() == 0


def share(n: int) -> range:
  """The places, of n, that are this process's."""
  return range(jax.process_index(), n, jax.process_count())


def gather(
  mine: Any,
  *,
  pack: Callable[[Any], bytes] = records.pack,
  unpack: Callable[[bytes], Any] = records.unpack,
) -> list[Any]:
  """What each process gave, in their order; waits for all of them.

  Args:
    mine: With one process, this very object is returned.
    pack: Makes bytes of it.
    unpack: Makes the others' bytes, and this process's, what they were.

  Raises:
    ValueError: Of `pack` or `unpack`.
    LostError: Another process ended, or does not answer.
  """
  if jax.process_count() == 1:
    return [mine]
  # Every process counts alike: all of them call this at the same places of a run.
  name = f'agent_r1/{next(_rounds)}'
  client, data = _client(), pack(mine)
  parts = [data[i : i + _PART] for i in range(0, len(data), _PART)]
  try:
    for i, part in enumerate(parts):
      client.key_value_set_bytes(f'{name}/{jax.process_index()}/{i}', part)
    client.key_value_set(f'{name}/{jax.process_index()}/parts', str(len(parts)))
    client.wait_at_barrier(f'{name}/there', timeout_in_ms=_DAY * 1000)
    data = [_fetched(client, f'{name}/{p}') for p in range(jax.process_count())]
    client.wait_at_barrier(f'{name}/read', timeout_in_ms=_DAY * 1000)
    client.key_value_delete(f'{name}/{jax.process_index()}/')
  except jax.errors.JaxRuntimeError as error:
    reason = str(error).splitlines()[0]
    raise LostError(
      f'Process {jax.process_index()} of {jax.process_count()} lost the others '
      f'({reason}). Start all of them again with the same command: the run goes on from '
      'its last checkpoint.'
    ) from None
  return [unpack(each) for each in data]


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
  """An error inside ends this process at once, if it is one of several.

  Python's own end would wait for the others, who wait for this process: for minutes.
  They hear of it as of a kill.
  """
  try:
    yield
  except Exception:
    if jax.process_count() == 1:
      raise
    traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class Notice:
  """A word to all processes that can be given once, such as that the run is to end."""

  def __init__(self, name: str):
    self._key = f'agent_r1/notice/{name}'
    self._here = threading.Event()
    self._asked = 0.0

  def give(self):
    """Safe in a signal's handler: the others hear of it when this process asks."""
    self._here.set()

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


def _fetched(client, name: str) -> bytes:
  wait = 60_000
  count = int(client.blocking_key_value_get(f'{name}/parts', wait))
  parts = (client.blocking_key_value_get_bytes(f'{name}/{i}', wait) for i in range(count))
  return b''.join(parts)


def _client() -> Any:
  return distributed.global_state.client
