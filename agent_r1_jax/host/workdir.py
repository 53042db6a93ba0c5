"""A run's directory: one run at a time writes to it, with one configuration."""

from collections.abc import Callable, Collection, Iterator, Mapping
import contextlib
import fcntl
import json
import os
import pathlib
import socket
from typing import Any
import warnings

import jax

from agent_r1_jax.host import disk


@contextlib.contextmanager
def lock(workdir: str | os.PathLike) -> Iterator[None]:
  """Locks `<workdir>/.lock` inside `with`; the kernel releases the lock after a kill.

  Raises:
    ValueError: Another run holds the lock, or `workdir` cannot be written to.
  """
  path = make_writable(pathlib.Path(workdir)) / '.lock'
  with path.open('a+') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      raise ValueError(
        f'workdir={workdir} is in use by another run ({file.read().strip()}): give '
        'another workdir, or end that run first'
      ) from None
    except OSError as error:
      # Some network file systems have no locks; running without a lock is better than not
      # at all.
      warnings.warn(f'{path} cannot be locked ({error.strerror})', stacklevel=3)
    # On a full disk this fails; a second run's error then names no process.
    with contextlib.suppress(OSError):
      os.ftruncate(file.fileno(), 0)
      text = f'process {os.getpid()} on {socket.gethostname()}\n'
      os.write(file.fileno(), text.encode())
    yield


def check_config(
  workdir: str | os.PathLike,
  config: Mapping[str, Any],
  *,
  may_change: Collection[str] = (),
  write: bool = True,
  name: str = 'config.json',
  remedy: str = 'Give another workdir, or the same values',
) -> None:
  """Writes the configuration the first time, and compares it with the file afterwards.

  Fields in `may_change` (dotted names, such as 'schedule.steps') may differ; the file
  then gets the new values. Without `write` the file does not change. `remedy` ends the
  error's message if a field differs.

  Raises:
    ValueError: Fields differ from the file (they are listed), the file cannot be read,
      the configuration is not JSON, or `workdir` cannot be written to.
  """
  path = make_writable(pathlib.Path(workdir)) / name
  try:
    new = json.loads(json.dumps(config))
  except (TypeError, ValueError) as error:
    raise ValueError(f'the configuration cannot be written as JSON: {error}') from None
  if path.exists():
    try:
      old = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
      raise ValueError(f'{path} is no JSON ({error}): delete it if it is yours') from None
    old_fields, new_fields = flatten_fields(old), flatten_fields(new)
    for field in may_change:
      old_fields.pop(field, None)
      new_fields.pop(field, None)
    if lines := list_differences(old_fields, new_fields, json.dumps):
      if old_fields.keys() != new_fields.keys():
        lines.append('Fields are absent where another version of this project wrote it.')
      raise ValueError('\n'.join([f'{path} has another configuration:', *lines, remedy]))
    if old == new:
      return
  if write and jax.process_index() == 0:
    with disk.explain_write_errors(path, 'The configuration'):
      disk.write_atomically(path, (json.dumps(new, indent=2) + '\n').encode())


def list_differences(
  old: Mapping[str, Any], new: Mapping[str, Any], show: Callable[[Any], str]
) -> list[str]:
  """Returns a line for each name whose value differs, is new or is gone."""
  absent, lines = object(), []
  for name in sorted(old.keys() | new.keys()):
    if old.get(name, absent) != new.get(name, absent):
      before, now = (show(x[name]) if name in x else 'absent' for x in (old, new))
      lines.append(f'  {name}: {before} there, {now} now')
  return lines


def flatten_fields(tree: Any, prefix: str = '') -> dict[str, Any]:
  """{'a': {'b': 1}} -> {'a.b': 1}; an empty dict is a value."""
  if not isinstance(tree, dict) or not tree:
    return {prefix: tree}
  fields = {}
  for key, value in tree.items():
    fields |= flatten_fields(value, f'{prefix}.{key}' if prefix else key)
  return fields


def make_writable(workdir: pathlib.Path) -> pathlib.Path:
  """Makes the directory, tries to write into it, and returns its absolute path."""
  workdir = workdir.absolute()
  probe = workdir / f'.writable.{os.getpid()}'
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    probe.touch()
    probe.unlink()
  except OSError as error:
    raise ValueError(
      f'workdir={workdir} cannot be written to ({error.strerror}): give another workdir '
      'or change its permissions'
    ) from None
  return workdir
