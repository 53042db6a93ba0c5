"""Checkpoints of a run, written in the background; old checkpoints are deleted.

A checkpoint, `<workdir>/checkpoints/<step>/`, contains the arrays (parameters, optimizer
state) and the host's state (counters and data cursors as JSON) of one step. It is written
completely or not at all. `<workdir>/first_checkpoint` records that there has been one, so
that a run whose checkpoints are gone does not start over. Only this module imports Orbax.

  with checkpoint.Checkpointer(workdir, every=20, keep=3) as checkpoints:
    restored = checkpoints.restore(like=arrays)
    if restored:
      start, arrays, host_state = restored
    for step in range(start, steps):
      ...
      if checkpoints.should_save(step + 1):
        checkpoints.save(step + 1, arrays, host_state)
"""

from collections.abc import Callable, Mapping
import contextlib
import errno
import json
import logging
import os
import pathlib
import shutil
from typing import Any
import warnings

from absl import logging as absl_logging
import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from agent_r1_jax.host import checksums, disk, processes
from agent_r1_jax.host import workdir as workdir_lib

# Orbax's suffix of unfinished checkpoints.
_UNFINISHED = '.orbax-checkpoint-tmp*'


class Checkpointer:
  """Saves and restores the checkpoints of one run.

  Attributes:
    directory: The folder of the checkpoints, with one folder per step.
  """

  def __init__(self, workdir: str | os.PathLike, *, every: int, keep: int = 3):
    """Opens `workdir`, made if missing; removes checkpoints that a kill left unfinished.

    A checkpoint is due at each multiple of `every`; the newest `keep` are kept.

    Raises:
      ValueError: `workdir` cannot be written to.
    """
    self.directory = workdir_lib.make_writable(pathlib.Path(workdir)) / 'checkpoints'
    self._record = self.directory.with_name('first_checkpoint')
    if processes.is_first():
      self._correct_record()
    # Orbax logs a failed write dozens of times; `save` or `wait` raises it anyway.
    absl_logging.get_absl_logger().addFilter(_without_orbax_tracebacks)
    save_policy: Any = ocp.training.save_decision_policies.FixedIntervalPolicy(every)
    keep_policy: Any = ocp.training.preservation_policies.LatestN(keep)
    self._orbax = ocp.training.Checkpointer(
      str(self.directory),
      # A lambda: Orbax deep-copies its options, and a bound method's object with it.
      context=_context(lambda: self._prepare_commit()),
      save_decision_policy=save_policy,
      preservation_policy=keep_policy,
      cleanup_tmp_directories=True,
    )
    self._writing: int | None = None
    self._nbytes = 0

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  @property
  def steps(self) -> list[int]:
    """The steps whose checkpoints are complete, in ascending order."""
    return [c.step for c in self._orbax.checkpoints if c.step != self._writing]

  def should_save(self, step: int) -> bool:
    """Whether `step` is a multiple of `every`."""
    return self._orbax.should_save(step)

  def save(self, step: int, arrays: Any, host_state: Mapping[str, Any]) -> bool:
    """Starts to write a checkpoint, once the previous one is on disk.

    Returns when the values are copied; the arguments may then be changed or donated.
    `host_state` must survive JSON unchanged: string keys, no tuples.

    Returns:
      False if the step has a checkpoint already; then nothing is written.

    Raises:
      OSError: The previous checkpoint could not be written.
    """
    flat = _flatten(arrays)
    # A copy: the caller may change it while it is written.
    host_state = json.loads(json.dumps(host_state, allow_nan=False))
    self.wait()
    if step in self.steps:
      return False
    try:
      self._writing, self._nbytes = step, sum(leaf.nbytes for leaf in flat.values())
      self._orbax.save_checkpointables_async(
        step, {'arrays': flat, 'host': host_state}, force=True
      )
    except Exception as error:
      raise self._recover(error) from error
    return True

  def wait(self) -> None:
    """Waits until the last checkpoint is on disk.

    Raises:
      OSError: The checkpoint could not be written. Earlier checkpoints are intact.
    """
    try:
      self._orbax.wait()
    except Exception as error:
      raise self._recover(error) from None
    self._writing = None

  def close(self) -> None:
    """Waits for the last checkpoint, as `wait` does, and ends Orbax's threads."""
    try:
      self.wait()
    except OSError:
      # Orbax's other threads failed in the same way; one clear error is enough.
      with contextlib.suppress(Exception):
        self._orbax.close()
      raise
    try:
      self._orbax.close()
    except Exception as error:
      raise self._recover(error) from None

  def restore(self, like: Any) -> tuple[int, Any, dict[str, Any]] | None:
    """Reads the newest checkpoint that can be read.

    A damaged checkpoint is renamed to `<step>.unreadable`, with a warning, and the
    previous one is read. A checkpoint is damaged if Orbax cannot read it, it has no
    checksums, or a file differs from its checksum.

    Args:
      like: A pytree of arrays or `jax.ShapeDtypeStruct`s with the expected structure,
        shapes, dtypes and shardings.

    Returns:
      The step, the arrays in the structure of `like`, and the host's state; None if no
      checkpoint was ever written.

    Raises:
      ValueError: The checkpoint has other leaves than `like` (they are listed), no
        checkpoint can be read, or all checkpoints are gone.
    """
    self.wait()
    steps, recorded = self.steps, self._read_record()
    newest = recorded[-1] if recorded else '0'
    aside = self.directory / f'{newest}.unreadable'
    if steps and steps[-1] < int(newest) and not aside.exists():
      text = f'the checkpoint of step {newest} is gone from {self.directory}: was it '
      warnings.warn(f'{text}deleted? That of step {steps[-1]} is used', stacklevel=2)
    while steps:
      step = steps.pop()
      try:
        return step, *self._read(step, like)
      except _UnreadableError as error:
        # Other processes may have read this step, and all must use the same.
        if jax.process_count() > 1:
          raise ValueError(f'{error}. Move it away to go on from {steps}') from None
        self._put_aside(step, error)
    if aside := sorted(p.name for p in self.directory.glob('*.unreadable')):
      raise ValueError(
        f'no checkpoint in {self.directory} can be read; they are kept there as '
        f'{", ".join(aside)}. Put a sound copy of one there under its number, or give '
        'another workdir to start anew'
      )
    if recorded:
      step = recorded[0]
      raise ValueError(
        f'the checkpoint of step {step} was completed, and there is no checkpoint in '
        f'{self.directory}: were they deleted? Put them back, or give another workdir to '
        f'start anew. To overwrite what is left of that run, delete {self._record}'
      )
    return None

  def _read(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    self._check_checksums(step)
    names = _flatten(like)
    abstract = {name: _describe(leaf) for name, leaf in names.items()}
    try:
      saved = self._orbax.checkpointables_metadata(step).metadata['arrays']
      leaves_on_disk = {
        name: (tuple(x.shape), np.dtype(x.dtype)) for name, x in saved.items()
      }
    except Exception as error:
      raise _UnreadableError(self.directory / str(step), error) from error
    _check_leaves(step, leaves_on_disk, abstract)
    try:
      read = self._orbax.load_checkpointables(step, {'arrays': abstract, 'host': None})
    except Exception as error:
      raise _UnreadableError(self.directory / str(step), error) from error
    # Popped, so that each array is freed as soon as it is placed.
    arrays = read['arrays']
    leaves = [_place(arrays.pop(name), leaf) for name, leaf in names.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), read['host']

  def _prepare_commit(self) -> None:
    """Writes checksums and the record, before a checkpoint's folder is renamed."""
    for folder in self.directory.glob(f'{self._writing}{_UNFINISHED}'):
      # Orbax later writes the time of the commit to the excluded file.
      checksums.write(folder, exclude=['_CHECKPOINT_METADATA'])
      self._write_record([*self._read_record()[:1], self._writing])

  def _read_record(self) -> list[str]:
    """Returns the steps of the first and the newest checkpoint, if any."""
    return self._record.read_text().split() if self._record.exists() else []

  def _write_record(self, steps: list) -> None:
    text = ''.join(f'{step}\n' for step in steps)
    disk.write_atomically(self._record, text.encode())

  def _correct_record(self) -> None:
    """Reverts the record of a checkpoint that was not completed.

    The record is written before the checkpoint gets its final name. After a kill between
    the two, the unfinished checkpoint is still there, and the run may start over.
    """
    recorded = self._read_record()
    if recorded and any(self.directory.glob(f'{recorded[-1]}{_UNFINISHED}')):
      done = [int(p.name) for p in self.directory.glob('*') if p.name.isdecimal()]
      self._write_record([*recorded[:-1], *sorted(done)[-1:]])

  def _check_checksums(self, step: int) -> None:
    """Raises _UnreadableError in all processes if a file differs from its checksum."""
    folder = self.directory / str(step)
    mine = checksums.find_mismatch(folder, processes.take_share)
    if mismatches := [text for text in processes.gather(mine) if text]:
      raise _UnreadableError(folder, ValueError(mismatches[0]))

  def _put_aside(self, step: int, error: Exception) -> None:
    target = self.directory / f'{step}.unreadable'
    shutil.rmtree(target, ignore_errors=True)
    (self.directory / str(step)).rename(target)
    self._orbax.reload()
    warnings.warn(
      f'{error}. It is now {target.name}; an earlier one is used', stacklevel=3
    )

  def _recover(self, error: Exception) -> OSError:
    """Removes a checkpoint that could not be written, and returns the error to raise."""
    step, self._writing = self._writing, None
    # Described before the failed checkpoint is removed, which frees space.
    reason = disk.describe_failure(self.directory, error)
    self._orbax.reload()
    if processes.is_first():
      self._correct_record()
      for rest in self.directory.glob(f'*{_UNFINISHED}'):
        shutil.rmtree(rest, ignore_errors=True)
    message = f'the checkpoint of step {step} could not be written to {self.directory}'
    intact = f'Intact are the steps {self.steps}.'
    if disk.is_full(error):
      return OSError(
        errno.ENOSPC,
        f'{message}: {reason}, and the checkpoint needs up to {self._nbytes / 1e6:.1f}. '
        f'{intact} Make room or keep fewer, and start the same command again: it goes on '
        'from the last of them',
      )
    return OSError(
      getattr(error, 'errno', None) or errno.EIO, f'{message}: {reason}. {intact}'
    )


class _UnreadableError(Exception):
  """A checkpoint exists and cannot be read."""

  def __init__(self, path: pathlib.Path, error: Exception):
    # Orbax's own message prints the complete tree; its cause says what was wrong.
    reason = str(error.__cause__ or error).splitlines()[0][:200]
    super().__init__(f'the checkpoint {path} cannot be read ({reason})')


def _context(before_commit: Callable[[], None]) -> ocp.Context:
  registry = ocp.handlers.local_registry()
  # Without this handler, Orbax would treat a dict of numbers as a tree of arrays.
  registry.add(ocp.handlers.JsonHandler, checkpointable_name='host')
  context = ocp.Context()
  context.checkpointables.registry = registry
  # Called in the first process when all files are written, before the folder is renamed.
  context.asynchronous.post_finalization_callback = before_commit
  return context


def _without_orbax_tracebacks(record: logging.LogRecord) -> bool:
  return not (record.exc_info and 'orbax' in pathlib.Path(record.pathname).parts)


def _flatten(tree: Any) -> dict[str, Any]:
  """Names each leaf by its path, 'params.w', for all types of containers."""
  pairs = jax.tree_util.tree_leaves_with_path(tree)
  flat = {jax.tree_util.keystr(p, simple=True, separator='.'): leaf for p, leaf in pairs}
  if len(flat) < len(pairs):
    raise ValueError('two leaves have the same name: use no dot in keys of dicts')
  return flat


def _describe(leaf: Any) -> jax.ShapeDtypeStruct:
  """Returns shape, dtype and sharding of a leaf."""
  sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _place(array: jax.Array, like: Any) -> jax.Array:
  """Uncommits an array from its device if `like` is uncommitted; Orbax commits it.

  Functions are recompiled for committed arguments.
  """
  bound = getattr(like, 'committed', True)
  return array if bound else jax.device_put(np.asarray(array))


def _check_leaves(step: int, on_disk, expected: dict[str, jax.ShapeDtypeStruct]) -> None:
  wanted = {name: (x.shape, np.dtype(x.dtype)) for name, x in expected.items()}
  if lines := workdir_lib.list_differences(
    on_disk, wanted, lambda x: f'{x[1]}{list(x[0])}'
  ):
    title = f'the checkpoint of step {step} has another model or optimizer:'
    more = [f'  and {len(lines) - 10} more'] if len(lines) > 10 else []
    raise ValueError('\n'.join([title, *lines[:10], *more]))
