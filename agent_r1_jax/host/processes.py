"""Several processes, one per host: shares of tasks, exchange of data, a common end.

Each process samples its share of a rollout on its own chips, independently of the others.
Then the processes exchange their tokens as arrays (`gather_arrays`), so that every
process computes the same advantages and packing, and puts its own rows of a batch on its
chips (models/sharding.py).

JAX's coordination service carries small values (`gather`). The processes connect in
`runtime.initialize`. With one process, the functions here do nothing or return their
argument.
"""

import atexit
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from typing import Any

import jax

# JAX does not document these names; tests/test_packaging.py checks that they exist.
from jax._src import distributed
from jax.experimental import multihost_utils
import numpy as np

from agent_r1_jax.host import records, watchdog

# Bytes per value in JAX's coordination service, whose messages gRPC bounds.
_PART = 1 << 20
_DAY = 24 * 3600
_POLL_SECONDS = 1.0
# The interval at which each process asks the coordination service which have ended.
_ASK_SECONDS = 0.4
# How long a process waits before it exits, so that the others can read its reason. The
# first process, which hosts the service, waits longer.
_LINGER_SECONDS, _FIRST_LINGER_SECONDS = 1.0, 2.5
# The service's keys under which a process writes why it ends.
_ENDED = 'agent_r1/ended/'

_rounds = itertools.count()


class LostError(RuntimeError):
  """Another process ended; the run can resume from the last checkpoint."""


def is_first() -> bool:
  """Whether this process is the first, which writes files."""
  return jax.process_index() == 0


def is_distributed() -> bool:
  """Whether there are several processes; usable before `runtime.initialize`."""
  return distributed.global_state.num_processes > 1


def take_share(n: int) -> range:
  """Returns this process's share of n indices."""
  return range(jax.process_index(), n, jax.process_count())


def gather(mine: Any) -> list[Any]:
  """Returns the small values of all processes, in order; waits for all of them.

  Raises:
    ValueError: The value is not plain data.
    LostError: Another process ended, or does not answer.
  """
  if jax.process_count() == 1:
    return [mine]
  # All processes make the same calls in the same order, so their counters agree.
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


def check_same(mine: Mapping[str, Any]) -> None:
  """Raises ValueError in all processes if they do not call it with equal values.

  `mine` has plain data by name; messages use the names.
  """
  shares = gather({'host': socket.gethostname(), 'values': dict(mine)})
  if lines := list_disagreements([share['values'] for share in shares]):
    hosts = ', '.join(f'{i} on {share["host"]}' for i, share in enumerate(shares))
    raise ValueError(
      f'the processes of this run ({hosts}) were given different things:'
      f'{"".join(lines)}\n'
      'Start all with the same command, code and data, and a workdir that all see.'
    )


def list_disagreements(shares: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns a line for each name whose value differs between processes."""
  lines = []
  for name in sorted(set().union(*shares)):
    holders: dict[str, list[str]] = {}
    for number, share in enumerate(shares):
      text = json.dumps(share[name]) if name in share else 'absent'
      holders.setdefault(text, []).append(str(number))
    if len(holders) > 1:
      # Long values are shown from shortly before the first difference.
      begin = max(0, len(os.path.commonprefix([*holders])) - 20)
      shown = {x: f'{"..." if begin else ""}{x[begin:]:.80}' for x in holders}
      parts = (f'{shown[x]} in process {", ".join(ps)}' for x, ps in holders.items())
      lines.append(f'\n  {name}: {"; ".join(parts)}')
  return lines


def gather_arrays(mine: np.ndarray) -> list[np.ndarray]:
  """Returns the arrays of all processes, in order; waits for all of them.

  The chips exchange the arrays, not the coordination service. Lengths may differ between
  processes; other dimensions and the dtype, of at most 32 bits, must not.

  Raises:
    LostError: Another process ended, or does not answer.
  """
  if jax.process_count() == 1:
    return [mine]
  # `gather` first: unlike a collective, it can wait long for a late process.
  lengths = gather(len(mine))
  # Powers of two, so that few shapes are compiled.
  longest = 1 << max(max(lengths) - 1, 0).bit_length()
  padded = np.zeros((longest, *mine.shape[1:]), mine.dtype)
  padded[: len(mine)] = mine
  shares = multihost_utils.process_allgather(padded)
  return [share[:length] for share, length in zip(shares, lengths, strict=True)]


def watch_others() -> None:
  """Starts a thread that ends this process, with one line on stderr, if another ends.

  A process writes why it ends, if it can (`leave`). JAX's coordination service detects a
  killed process or a lost host by missing heartbeats. The service runs in process 0: if
  that is killed, JAX aborts the others at once with lines of its own, and the watchdog
  adds a line of ours. With one process, this does nothing.
  """
  global _watcher
  if _watcher or not is_distributed():
    return
  watchdog.send(watchdog.DISTRIBUTED)
  # JAX's service does not abort all processes when one is lost if they ask it for live
  # nodes. Then it does not wait for all at the end either, so `_wait_for_others` does.
  _watcher = threading.Thread(target=_watch, daemon=True, name='watch others')
  _watcher.start()
  atexit.register(_wait_for_others)


def leave(status: int, reason: str) -> None:
  """Ends this process at once if there are several, and tells the others why."""
  state = distributed.global_state
  if not is_distributed() or state.client is None:
    return
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    word = f'{status} {reason}'
    state.client.key_value_set(f'{_ENDED}{state.process_id}', word, allow_overwrite=True)
  _end(status)


_watcher: threading.Thread | None = None
_finishing = threading.Event()


def _watch() -> None:
  """Asks the coordination service which processes have ended, until this one ends."""
  state, client = distributed.global_state, _client()
  everyone = [*range(state.num_processes)]
  while not _finishing.is_set():
    _finishing.wait(_ASK_SECONDS)
    try:
      for key, word in client.key_value_dir_get(_ENDED):
        if (number := int(key.rpartition('/')[2])) != state.process_id:
          status, _, reason = word.partition(' ')
          _end_like(int(status), f'process {number} of {len(everyone)} {reason}')
      # This blocks until all live processes call it. Each calls it once more at its end,
      # since others may wait, and Python aborts if a thread still waits at exit.
      lost = {*everyone} - client.get_live_nodes(everyone).keys()
    except jax.errors.JaxRuntimeError:
      continue  # This process or the first one is ending, and JAX handles that.
    if lost and not _finishing.is_set():
      names = ', '.join(map(str, sorted(lost)))
      _end_like(
        1,
        f'process {names} of {len(everyone)} is lost (killed, or its host or network is '
        'gone)',
      )
  if state.process_id == 0:
    _wait_until_alone(client)


def _end_like(status: int, cause: str) -> None:
  """Prints which process ended and why, and ends this process with the same status."""
  me = distributed.global_state.process_id
  watchdog.print_line(
    f'{cause}, so process {me} ends too; the same command, started in all, continues '
    'from the last checkpoint.'
  )
  _end(status)


def _end(status: int) -> None:
  first = distributed.global_state.process_id == 0
  time.sleep(_FIRST_LINGER_SECONDS if first else _LINGER_SECONDS)
  watchdog.send(watchdog.FINISHED)
  os._exit(status)


def _wait_for_others() -> None:
  """At Python's exit, keeps the first process alive until the others have ended."""
  if client := _client():
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      client.wait_at_barrier('agent_r1/exit', timeout_in_ms=300_000)
    _finishing.set()
    # In the first process, the thread finally waits until the others have ended.
    if _watcher:
      _watcher.join(30)


def _wait_until_alone(client) -> None:
  """Waits until the service knows no other live process."""
  everyone = [*range(distributed.global_state.num_processes)]
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    while len(client.get_live_nodes(everyone)) > 1:
      time.sleep(_ASK_SECONDS / 4)


@contextlib.contextmanager
def exit_together() -> Iterator[None]:
  """Ends all of a run's processes if an error is raised inside `with`.

  Python's normal exit would wait for minutes for the others, which wait for this process.
  The others print the reason. An error of JAX's runtime (a broken collective) may result
  from another process's end, so this process first waits to learn which.
  """
  try:
    yield
  except Exception as error:
    if not is_distributed():
      raise
    reason = f'{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}'
    if _is_runtime_error(error):
      seconds = 1.5 * heartbeat_seconds() + 5
      watchdog.print_line(f'{reason}; waiting up to {seconds:g} s to hear who is lost')
      time.sleep(seconds)  # `_watch` ends the process meanwhile.
    sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    leave(1, f'raised {reason}')
    raise  # Reached only if the others cannot be told.


def heartbeat_seconds() -> int:
  """Returns the seconds without heartbeats after which a process counts as lost."""
  return int(os.environ.get('AGENT_R1_HEARTBEAT_SECONDS', 60))


def _is_runtime_error(error: BaseException | None) -> bool:
  while error is not None:
    if isinstance(error, LostError):
      return True
    if isinstance(error, jax.errors.JaxRuntimeError):
      return 'RESOURCE_EXHAUSTED' not in str(error)  # Out of memory has a local cause.
    error = error.__cause__ or error.__context__
  return False


class SharedFlag:
  """A flag that any process can set and all can read, such as a request to end."""

  def __init__(self, name: str):
    self._key = f'agent_r1/flag/{name}'
    self._set_here = threading.Event()
    self._asked_at = 0.0

  def set(self):
    """Sets the flag; other processes see it after this one has called `is_set`.

    May be called in a signal handler.
    """
    self._set_here.set()

  def is_set(self) -> bool:
    """Whether any process has set the flag; other processes see it within a second."""
    if jax.process_count() == 1 or time.monotonic() - self._asked_at < _POLL_SECONDS:
      return self._set_here.is_set()
    self._asked_at = time.monotonic()
    client = _client()
    if self._set_here.is_set():
      client.key_value_set(self._key, '1', allow_overwrite=True)
    elif client.key_value_dir_get(self._key):
      self._set_here.set()
    return self._set_here.is_set()


def _fetch(client, name: str) -> bytes:
  wait = 60_000
  count = int(client.blocking_key_value_get(f'{name}/parts', wait))
  parts = (client.blocking_key_value_get_bytes(f'{name}/{i}', wait) for i in range(count))
  return b''.join(parts)


def _client() -> Any:
  return distributed.global_state.client
