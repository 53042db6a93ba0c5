"""The spool: trajectories on disk as they end, so that a kill loses no finished episode.

A run that goes on from a checkpoint plays the rollouts after it again, with the same
policies and the same randomness. What had ended before the kill is then read, not played.
"""

from collections.abc import Hashable, Iterator
import os
import pathlib
import pickle
import shutil
from typing import Any

import jax

from agent_r1_jax import types


class Rollout:
  """One rollout's finished trajectories, by what identifies each in it."""

  def __init__(self, folder: pathlib.Path):
    """Reads what all processes kept of it, and opens a file for what comes."""
    self._found = {
      key: trajectory
      for path in sorted(folder.glob('*.pickle'))
      for key, trajectory in _read(path)
    }
    folder.mkdir(parents=True, exist_ok=True)
    # Never one that a kill may have left with half a trajectory at its end.
    number = len(list(folder.glob('*.pickle')))
    name = f'{jax.process_index()}-{number}-{os.getpid()}.pickle'
    self._file = (folder / name).open('wb')

  def found(self, key: Hashable) -> types.Trajectory | None:
    """The trajectory, if it had ended before."""
    return self._found.get(key)

  def keep(self, key: Hashable, trajectory: types.Trajectory):
    """Writes it; a later kill of the process cannot lose it."""
    pickle.dump((key, trajectory), self._file, protocol=5)
    self._file.flush()

  def close(self):
    """Closes the file."""
    self._file.close()


class Spool:
  """The rollouts of one run, one folder each under `<workdir>/rollouts`."""

  def __init__(self, workdir: str | os.PathLike):
    self._folder = pathlib.Path(workdir) / 'rollouts'

  def rollout(self, draw: int) -> Rollout:
    """Of one draw of tasks."""
    return Rollout(self._folder / str(draw))

  def forget(self, before: int):
    """Deletes the rollouts of the draws before `before`: no checkpoint needs them."""
    for path in self._folder.glob('*'):
      if int(path.name) < before:
        shutil.rmtree(path, ignore_errors=True)


def _read(path: pathlib.Path) -> Iterator[tuple[Any, types.Trajectory]]:
  """What is whole in a file; a kill can cut its end off."""
  with path.open('rb') as file:
    while True:
      try:
        yield pickle.load(file)
      except (EOFError, pickle.UnpicklingError):
        return
