"""The store: writes episodes to disk as they end, so that a kill loses none of them.

A run that resumes from a checkpoint replays the rollouts after it, with the same policies
and randomness, but reads episodes that had ended before the kill instead of playing them.
If the store cannot be written or read, the run warns and continues without it, because
everything in it can be played again.

A file is _MAGIC followed, for each trajectory, by the length and CRC-32 of its record and
the record (host/records.py). Tasks are not written, because the reader has them.
"""

from collections.abc import Hashable, Iterator, Sequence
import dataclasses
import io
import os
import pathlib
import shutil
import struct
from typing import Any
import warnings
import zlib

import jax

from agent_r1_jax import types
from agent_r1_jax.host import disk, records

_MAGIC = b'agent_r1_jax episodes 2\n'
_HEADER = struct.Struct('<QI')


def list_fields(trajectory: types.Trajectory) -> dict[str, Any]:
  """Returns a trajectory's fields without its task, for `records.pack`."""
  values = _fields(trajectory)
  del values['task']
  for name in ('segments', 'turns'):
    values[name] = [_fields(part) for part in values[name]]
  return values


def make_trajectory(fields: Any, task: types.Task) -> types.Trajectory:
  """The inverse of `list_fields`, also after packing and unpacking.

  Raises:
    ValueError: The fields do not make a trajectory.
  """
  try:
    parts = {
      'segments': [types.Segment(**part) for part in fields['segments']],
      'turns': [types.Turn(**part) for part in fields['turns']],
    }
    status = types.Status(fields['status'])
    restored = types.Trajectory(task=task, **fields | parts | {'status': status})
    for segment in restored.segments:
      segment.check()
  except (TypeError, KeyError, ValueError) as error:
    raise ValueError(f'no trajectory: {error}') from None
  return restored


def _fields(record: Any) -> dict[str, Any]:
  return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


class RolloutStore:
  """The finished trajectories of one rollout, by key."""

  def __init__(self, folder: pathlib.Path, tasks: Sequence[types.Task]):
    """Reads all processes' records of the rollout; `tasks` has the task of each group."""
    self._finished: dict[Hashable, types.Trajectory] = {}
    for path in sorted(folder.glob('*')):
      for key, fields in _read(path):
        self._take(path, key, fields, tasks)
    # A new file, because a kill may have truncated an older file's last record.
    number = len(list(folder.glob('*')))
    self._path = folder / f'{jax.process_index()}-{number}-{os.getpid()}.episodes'
    self._warned = False

  def get(self, key: Hashable) -> types.Trajectory | None:
    """Returns the trajectory of an episode that had ended before a restart, or None."""
    return self._finished.get(key)

  def add(self, key: Hashable, trajectory: types.Trajectory):
    """Writes a trajectory, so that it survives a kill of the process.

    Warns once if writing fails; the episode is then played again after a kill.
    """
    try:
      record = records.pack([key, list_fields(trajectory)])
      data = _HEADER.pack(len(record), zlib.crc32(record)) + record
      self._path.parent.mkdir(parents=True, exist_ok=True)
      with io.FileIO(self._path, 'a') as file:
        disk.append(file, data if file.tell() else _MAGIC + data)
    except (OSError, ValueError) as error:
      if not self._warned:
        why = disk.describe_failure(self._path, error)
        warnings.warn(
          f'finished episodes are not written to {self._path} ({why}); after a kill '
          'they will be played again',
          stacklevel=2,
        )
      self._warned = True

  def _take(self, path, key, fields, tasks):
    """Adds a trajectory from a file, if it belongs to one of the tasks."""
    try:
      task = tasks[fields['group']]
      if key[0] != task.id:
        raise ValueError(
          f'an episode of task {key[0]!r:.80} where {task.id!r} was played'
        )
      self._finished[key] = make_trajectory(fields, task)
    except (TypeError, LookupError, ValueError) as error:
      _warn(path, error)


class EpisodeStore:
  """The finished episodes of rollouts, one folder per rollout in `<workdir>/rollouts`."""

  def __init__(self, workdir: str | os.PathLike):
    self._folder = pathlib.Path(workdir) / 'rollouts'

  def open_rollout(
    self, rollout_number: int, tasks: Sequence[types.Task]
  ) -> RolloutStore:
    """Opens the store of a rollout."""
    return RolloutStore(self._folder / str(rollout_number), tasks)

  def delete(self, before: int):
    """Deletes the stores of rollouts below number `before`."""
    for path in self._folder.glob('*'):
      if path.name.isdecimal() and int(path.name) < before:
        shutil.rmtree(path, ignore_errors=True)


def _read(path: pathlib.Path) -> Iterator[tuple[Any, Any]]:
  """Yields the complete records of a file; a kill may have truncated the last one."""
  try:
    with path.open('rb') as file:
      remaining_bytes = path.stat().st_size - len(_MAGIC)
      # A full disk may leave an empty file.
      if remaining_bytes > -len(_MAGIC) and file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError('it was written by another program or an earlier version')
      while remaining_bytes >= _HEADER.size:
        length, checksum = _HEADER.unpack(file.read(_HEADER.size))
        remaining_bytes -= _HEADER.size + length
        if remaining_bytes < 0:
          return
        record = file.read(length)
        if zlib.crc32(record) != checksum:
          raise ValueError('its bytes changed since they were written')
        key, fields = records.unpack(record)
        yield key, fields
  except (OSError, TypeError, ValueError) as error:
    _warn(path, error)


def _warn(path: pathlib.Path, error: Exception):
  warnings.warn(
    f'{path} is skipped ({error}); the episodes in it are played again',
    stacklevel=2,
  )
