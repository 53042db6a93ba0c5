"""Checkpoints of a run, written in the background; the newest k are kept.

A checkpoint, `<workdir>/checkpoints/<step>/`, holds the arrays (parameters, optimiser
state, keys) and the host's state (counters and data cursors as plain JSON) of one step.
It is written completely or not at all. Only this module imports Orbax.

  with checkpoint.Checkpointer(workdir, every=20, keep=3) as checkpoints:
    restored = checkpoints.restore(like=arrays)
    if restored:
      start, arrays, host_state = restored
    for step in range(start, steps):
      ...
      if checkpoints.should_save(step + 1):
        checkpoints.save(step + 1, arrays, host_state)
"""

from collections.abc import Callable, Collection, Iterator, Mapping
import contextlib
import errno
import fcntl
import json
import logging
import os
import pathlib
import shutil
import socket
from typing import Any
import warnings

from absl import logging as absl_logging
import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from agent_r1_jax.host import checksums, disk, processes


class Checkpointer:
  """Saves and restores the checkpoints of one run.

  Attributes:
    directory: The folder of the checkpoints, which has one folder for each step.
  """

  def __init__(self, workdir: str | os.PathLike, *, every: int, keep: int = 3):
    """Opens `workdir` and removes checkpoints that a killed run did not finish.

    Args:
      workdir: The run's directory; made if missing.
      every: Number of steps between two checkpoints.
      keep: Number of checkpoints to keep; older ones are deleted.

    Raises:
      ValueError: `every` or `keep` is below 1, or `workdir` cannot be written to.
    """
    for name, value in (('every', every), ('keep', keep)):
      if value < 1:
        raise ValueError(f'checkpoint {name}={value}: must be at least 1')
    self.directory = _make_writable(pathlib.Path(workdir)) / 'checkpoints'
    # Orbax logs one failed write dozens of times; `save` and `wait` raise it, once.
    absl_logging.get_absl_logger().addFilter(_without_orbax_tracebacks)
    save_policy: Any = ocp.training.save_decision_policies.FixedIntervalPolicy(every)
    keep_policy: Any = ocp.training.preservation_policies.LatestN(keep)
    self._orbax = ocp.training.Checkpointer(
      str(self.directory),
      # Orbax copies its options deeply, and with a method its object.
      context=_context(lambda: self._add_checksums()),
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
    """Starts to write a checkpoint, once the one before is on disk.

    It returns when the values are copied; the arguments may then be changed or donated.

    Args:
      step: Number of updates after which the values are saved.
      arrays: A pytree of JAX arrays; typed PRNG keys are stored as their data.
      host_state: State that JSON gives back unchanged: string keys, no tuples.

    Returns:
      False if the step has a checkpoint already; nothing is written then.

    Raises:
      ValueError: A leaf is no JAX array, or JSON would change `host_state`.
      OSError: The checkpoint before this one could not be written.
    """
    flat = {name: _to_data(name, leaf) for name, leaf in _flatten(arrays).items()}
    host_state = _copy_json(host_state)
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
      OSError: It could not be written. The earlier checkpoints are intact.
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
      # Orbax's other threads failed in the same way: one clear error is enough.
      with contextlib.suppress(Exception):
        self._orbax.close()
      raise
    try:
      self._orbax.close()
    except Exception as error:
      raise self._recover(error) from None

  def restore(
    self, like: Any, step: int | None = None
  ) -> tuple[int, Any, dict[str, Any]] | None:
    """Reads a checkpoint, by default the newest that is readable.

    A newest checkpoint that was damaged after it had been written is renamed to
    `<step>.unreadable`, with a warning, and the one before it is read. A checkpoint is
    damaged if Orbax cannot read it, or if any file differs from its checksum.

    Args:
      like: A pytree of arrays or `jax.ShapeDtypeStruct`s with the expected structure,
        shapes, dtypes and shardings.
      step: The step to read; None for the newest.

    Returns:
      The step, the arrays in the structure of `like`, and the host's state; None if no
      checkpoint was ever written.

    Raises:
      ValueError: The checkpoint is of another model (the leaves are listed), `step` has
        none, or none is readable.
    """
    self.wait()
    steps = self.steps
    if step is not None and step not in steps:
      raise ValueError(f'{self.directory} has no checkpoint of step {step}, only {steps}')
    for candidate in reversed(steps if step is None else [step]):
      try:
        return candidate, *self._read(candidate, like)
      except _UnreadableError as error:
        # Other processes may have read theirs: only a person can decide for all.
        if step is not None or jax.process_count() > 1:
          raise ValueError(f'{error}. Move it away to go on from {steps[:-1]}') from None
        self._put_aside(candidate, error)
    if aside := sorted(p.name for p in self.directory.glob('*.unreadable')):
      raise ValueError(
        f'no checkpoint in {self.directory} can be read; they are kept there as '
        f'{", ".join(aside)}. Put a sound copy of one there under its number, or give '
        'another workdir to start anew'
      )
    return None

  def _read(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    self._check_checksums(step)
    names = _flatten(like)
    abstract = {name: _describe_data(leaf) for name, leaf in names.items()}
    try:
      saved = self._orbax.checkpointables_metadata(step).metadata['arrays']
      found = {name: (tuple(x.shape), np.dtype(x.dtype)) for name, x in saved.items()}
    except Exception as error:
      raise _UnreadableError(self.directory / str(step), error) from error
    _check_leaves(step, found, abstract)
    try:
      read = self._orbax.load_checkpointables(step, {'arrays': abstract, 'host': None})
    except Exception as error:
      raise _UnreadableError(self.directory / str(step), error) from error
    leaves = [_from_data(read['arrays'][name], leaf) for name, leaf in names.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), read['host']

  def _add_checksums(self) -> None:
    for folder in self.directory.glob(f'{self._writing}.orbax-checkpoint-tmp*'):
      # Orbax writes the time of the commit into this file later.
      checksums.write(folder, exclude=['_CHECKPOINT_METADATA'])

  def _check_checksums(self, step: int) -> None:
    """Raises _UnreadableError in all processes if a file differs from its checksum."""
    folder = self.directory / str(step)
    mine = checksums.find_mismatch(folder, processes.take_share)
    if found := [text for text in processes.gather(mine) if text]:
      raise _UnreadableError(folder, ValueError(found[0]))

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
    # Asked before the failed checkpoint is removed, which makes room.
    reason = disk.describe_failure(self.directory, error)
    self._orbax.reload()
    if jax.process_index() == 0:
      for rest in self.directory.glob('*.orbax-checkpoint-tmp'):
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


@contextlib.contextmanager
def lock_workdir(workdir: str | os.PathLike) -> Iterator[None]:
  """Holds `<workdir>/.lock` inside `with`; the system releases it after a kill.

  Raises:
    ValueError: Another run holds it, or `workdir` cannot be written to.
  """
  path = _make_writable(pathlib.Path(workdir)) / '.lock'
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
      # Some network file systems have no locks; a run without one is better than none.
      warnings.warn(f'{path} cannot be locked ({error.strerror})', stacklevel=3)
    # On a full disk, the error of a second run does not name this process.
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
  name: str = 'config.json',
  mend: str = 'Give another workdir, or the same values',
) -> None:
  """Writes the configuration the first time, and compares it with the file afterwards.

  Args:
    workdir: The run's directory; made if missing.
    config: The run's configuration as nested dicts of JSON values.
    may_change: Dotted names of fields that a continued run may change, such as
      'schedule.steps'; the file then gets the new values.
    name: The file's name in `workdir`.
    mend: What the error tells a user to do where a field differs.

  Raises:
    ValueError: Fields differ from the file (they are listed), the file cannot be read,
      the configuration is no JSON, or `workdir` cannot be written to.
  """
  path = _make_writable(pathlib.Path(workdir)) / name
  try:
    new = json.loads(json.dumps(config))
  except (TypeError, ValueError) as error:
    raise ValueError(f'the configuration cannot be written as JSON: {error}') from None
  if path.exists():
    try:
      old = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
      raise ValueError(f'{path} is no JSON ({error}): delete it if it is yours') from None
    there, here = _flatten_fields(old), _flatten_fields(new)
    for name in may_change:
      there.pop(name, None)
      here.pop(name, None)
    if lines := _list_differences(there, here, json.dumps):
      raise ValueError('\n'.join([f'{path} has another configuration:', *lines, mend]))
    if old == new:
      return
  if jax.process_index() == 0:
    _write_atomically(path, json.dumps(new, indent=2) + '\n')


def _list_differences(
  there: Mapping[str, Any], here: Mapping[str, Any], show: Callable[[Any], str]
) -> list[str]:
  """Returns a line for each name whose value differs, is new, or is gone."""
  absent, lines = object(), []
  for name in sorted(there.keys() | here.keys()):
    if there.get(name, absent) != here.get(name, absent):
      old, new = (show(x[name]) if name in x else 'absent' for x in (there, here))
      lines.append(f'  {name}: {old} there, {new} now')
  return lines


def _flatten_fields(tree: Any, prefix: str = '') -> dict[str, Any]:
  """{'a': {'b': 1}} -> {'a.b': 1}; an empty dict is a value."""
  if not isinstance(tree, dict) or not tree:
    return {prefix: tree}
  fields = {}
  for key, value in tree.items():
    fields |= _flatten_fields(value, f'{prefix}.{key}' if prefix else key)
  return fields


def _write_atomically(path: pathlib.Path, text: str) -> None:
  part = path.with_name(f'{path.name}.{os.getpid()}.part')
  with disk.explain_write_errors(path, 'The configuration'):
    try:
      with part.open('w') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
      part.replace(path)
    finally:
      part.unlink(missing_ok=True)


def _make_writable(workdir: pathlib.Path) -> pathlib.Path:
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


class _UnreadableError(Exception):
  """A checkpoint exists and cannot be read."""

  def __init__(self, path: pathlib.Path, error: Exception):
    # Orbax's own message prints the whole tree; its cause says what was wrong.
    reason = str(error.__cause__ or error).splitlines()[0][:200]
    super().__init__(f'the checkpoint {path} cannot be read ({reason})')


def _context(before_commit: Callable[[], None]) -> ocp.Context:
  registry = ocp.handlers.local_registry()
  # Without it, Orbax would treat a dict of numbers as a tree of arrays.
  registry.add(ocp.handlers.JsonHandler, checkpointable_name='host')
  context = ocp.Context()
  context.checkpointables.registry = registry
  # Called in the first process when all files are written, before the folder is renamed.
  context.asynchronous.post_finalization_callback = before_commit
  return context


def _without_orbax_tracebacks(record: logging.LogRecord) -> bool:
  return not (record.exc_info and 'orbax' in pathlib.Path(record.pathname).parts)


def _flatten(tree: Any) -> dict[str, Any]:
  """Names each leaf by its path, 'params.w', whatever the types of the containers."""
  pairs = jax.tree_util.tree_leaves_with_path(tree)
  flat = {jax.tree_util.keystr(p, simple=True, separator='.'): leaf for p, leaf in pairs}
  if len(flat) < len(pairs):
    raise ValueError('two leaves have the same name: use no dot in keys of dicts')
  return flat


def _is_key(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_data(name: str, leaf: Any) -> jax.Array:
  """Returns the array to save: a typed PRNG key's data, any other leaf as it is."""
  if not isinstance(leaf, jax.Array):
    raise ValueError(
      f'{name} is a {type(leaf).__name__} and no JAX array: numbers and other state of '
      'the host belong into host_state'
    )
  return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _from_data(array: jax.Array, like: Any) -> jax.Array:
  """Inverts `_to_data` for a leaf like `like`."""
  if not _is_key(like):
    return array
  # An abstract key tells its implementation only while it is traced.
  impls = []
  jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), like)
  return jax.random.wrap_key_data(array, impl=impls[0])


def _describe_data(leaf: Any) -> jax.ShapeDtypeStruct:
  """Returns shape, dtype and sharding of what `_to_data` gives for the leaf."""
  if _is_key(leaf):
    data = jax.random.key_data
    leaf = data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(data, leaf)
  sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_leaves(step: int, found, expected: dict[str, jax.ShapeDtypeStruct]) -> None:
  wanted = {name: (x.shape, np.dtype(x.dtype)) for name, x in expected.items()}
  if lines := _list_differences(found, wanted, lambda x: f'{x[1]}{list(x[0])}'):
    title = f'the checkpoint of step {step} is of another model or optimiser:'
    more = [f'  and {len(lines) - 10} more'] if len(lines) > 10 else []
    raise ValueError('\n'.join([title, *lines[:10], *more]))


def _copy_json(host_state: Mapping[str, Any]) -> dict[str, Any]:
  """Copies the state, so that the caller may go on changing its own."""
  try:
    copy = json.loads(json.dumps(host_state, allow_nan=False))
  except (TypeError, ValueError) as error:
    raise ValueError(f'host_state cannot be written as JSON: {error}') from None
  if copy != host_state:
    raise ValueError(
      'JSON would change host_state: use string keys, and lists for tuples'
    )
  return copy
