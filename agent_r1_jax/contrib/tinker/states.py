"""Saved states: `tinker://RUN/weights/NAME` and `tinker://RUN/sampler_weights/NAME`.

A state is a folder of the workdir: an adapter in PEFT's layout, state.json, for a run's
state also Adam's moments (optimizer.safetensors), and the checksums of these files. The
folder has a random name, and RUN/KIND/NAME is a link to it that is created or changed
when everything is on disk. So a state exists completely or not at all, even if the
process is killed.
"""

from collections.abc import Mapping
import datetime
import json
import os
import pathlib
import re
import shutil
from typing import Any
import uuid

import numpy as np
from safetensors import numpy as safetensors_numpy

from agent_r1_jax.contrib.tinker import learning
from agent_r1_jax.host import checksums, disk
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.models import decoder
from agent_r1_jax.models.files import peft_files, tensor_files
from agent_r1_jax.web import http

SCHEME, _DATA = 'tinker://', '.data'
KINDS = {'weights': 'training', 'sampler_weights': 'sampler'}
_NAME = '[A-Za-z0-9][A-Za-z0-9._:-]{0,127}'
_PATH = re.compile(f'{SCHEME}({_NAME})/({"|".join(KINDS)})/({_NAME})')
_MOST_STATES = 1000  # Per run.
_OPTIMIZER, _STATE = 'optimizer.safetensors', 'state.json'


def check_name(name: str, what: str) -> str:
  """Returns a name that is valid for a folder; rejects others."""
  if not re.fullmatch(_NAME, name):
    text = (
      f'{what} is {name!r:.80}; give 1 to 128 letters, digits and . _ : -, of which the '
      'first is a letter or digit'
    )
    raise http.RefusedError(400, text)
  return name


class States:
  """The saved states in a workdir.

  Attributes:
    base: The clients' name for the base model.
  """

  def __init__(
    self, workdir: str | os.PathLike, base: str, config: decoder.DecoderConfig
  ):
    """Opens the workdir, and removes files that a killed server did not finish.

    Args:
      workdir: Created if missing. One server at a time may use it (workdir_lib.lock).
      base: The clients' name for the base model.
      config: The base model's shape.
    """
    self.directory = workdir_lib.make_writable(pathlib.Path(workdir)) / 'states'
    self.base, self._config = base, config
    used = {os.readlink(link) for link in self._list_links('*')}
    for path in self.directory.glob(f'*/{_DATA}/*'):
      if path.is_symlink():
        path.unlink()
      elif f'../{_DATA}/{path.name}' not in used:
        shutil.rmtree(path)

  def save(
    self,
    path: str,
    shape: learning.Shape,
    adapter: decoder.Params,
    moments: Mapping[str, Any] | None,
    info: Mapping[str, Any],
    *,
    overwrite: bool = False,
  ):
    """Saves a state.

    Args:
      path: The state's path.
      shape: The adapter's shape.
      adapter: The adapter, of that shape's rank and targets, on the host.
      moments: The result of Learning.get_moments, or None.
      info: Further fields of state.json; JSON.
      overwrite: Whether to replace a state at the path.

    Raises:
      ValueError: The path exists, or the run has too many states.
      OSError: The disk is full, or cannot be written to.
    """
    link = self._get_link(path)
    run = link.parents[1]
    if link.is_symlink() and not overwrite:
      raise ValueError(
        f'{link.name} exists already: give another name, or overwrite=True'
      )
    if len(self._list_links(run.name)) >= _MOST_STATES:
      raise ValueError(f'the run has {_MOST_STATES} states; delete some')
    folder = run / _DATA / uuid.uuid4().hex
    time = datetime.datetime.now(datetime.UTC).isoformat()
    record = {**info, **shape._asdict(), 'base_model': self.base, 'time': time}
    try:
      with disk.explain_write_errors(folder, 'The state'):
        self._write(folder, adapter, moments, record)
        _point(link, folder)
    except BaseException:
      shutil.rmtree(folder, ignore_errors=True)
      raise

  def _write(self, folder: pathlib.Path, adapter, moments, record: dict[str, Any]):
    folder.mkdir(parents=True)
    peft_files.save(folder, adapter, self.base, self._config)
    if moments is not None:
      arrays = {
        f'{name}/{path}': x
        for name in ('mu', 'nu')
        for path, x in workdir_lib.flatten_fields(moments[name]).items()
      }
      tensor_files.save(folder / _OPTIMIZER, arrays)
      record['count'] = moments['count']
    (folder / _STATE).write_text(json.dumps(record))
    checksums.write(folder)
    for path in folder.iterdir():
      _sync(path)
    _sync(folder)

  def load(
    self, path: str, *, optimizer: bool
  ) -> tuple[learning.Shape, decoder.Params, dict[str, Any] | None]:
    """Loads a state: the adapter's shape, the adapter, and the moments if requested.

    Raises:
      RefusedError: There is no such state, it is damaged, or it has no moments.
    """
    folder, record = self._find(path)
    if damage := checksums.find_mismatch(folder):
      raise http.RefusedError(400, f'{path}: {damage}; take another state')
    adapter = peft_files.load(folder, self._config)
    shape = learning.Shape(record['rank'], record['seed'], tuple(record['targets']))
    # From alpha and rank, since PEFT's file may round it.
    scale = np.float32(learning.ALPHA / shape.rank)
    for kernels in adapter['layers'].values():
      for leaves in kernels.values():
        leaves['lora_scale'] = np.full(leaves['lora_scale'].shape, scale)
    if not optimizer:
      return shape, adapter, None
    if not (folder / _OPTIMIZER).is_file():
      text = f'{path} has no state of an optimizer: save_state saves it'
      raise http.RefusedError(400, text)
    moments: dict[str, Any] = {name: {'layers': {}} for name in ('mu', 'nu')}
    for name, x in safetensors_numpy.load_file(folder / _OPTIMIZER).items():
      moment, _, leaf_path = name.partition('/')
      layers, place, target, leaf = leaf_path.split('.')
      leaves = moments[moment][layers].setdefault(place, {}).setdefault(target, {})
      leaves[leaf] = x
    moments['count'] = record['count']
    return shape, adapter, moments

  def describe(self, path: str) -> dict[str, Any]:
    """Returns the content of state.json; raises RefusedError if there is none."""
    return self._find(path)[1]

  def describe_all(self, run_id: str | None = None) -> list[dict[str, Any]]:
    """Lists states, the newest first, as the client reads them."""
    runs = '*' if run_id is None else check_name(run_id, 'the training run')
    found = [self._list_one(link) for link in self._list_links(runs)]
    return sorted(filter(None, found), key=lambda state: state['time'], reverse=True)

  def delete(self, path: str):
    """Deletes a state; raises RefusedError if it does not exist."""
    folder, _ = self._find(path)
    self._get_link(path).unlink()
    shutil.rmtree(folder, ignore_errors=True)

  def _list_links(self, runs: str) -> list[pathlib.Path]:
    links = [self.directory.glob(f'{runs}/{kind}/*') for kind in KINDS]
    return [link for some in links for link in some if link.is_symlink()]

  def _list_one(self, link: pathlib.Path) -> dict[str, Any] | None:
    run_id, kind, name = link.parts[-3:]
    path = f'{SCHEME}{run_id}/{kind}/{name}'
    try:
      folder, record = self._find(path)
      size = sum(file.stat().st_size for file in folder.iterdir())
    except (http.RefusedError, FileNotFoundError):
      return None  # It has expired, or has been deleted meanwhile.
    return {
      'checkpoint_id': f'{kind}/{name}',
      'checkpoint_type': KINDS[kind],
      'time': record['time'],
      'tinker_path': path,
      'lora_rank': record['rank'],
      'size_bytes': size,
      'user_metadata': record.get('user_metadata'),
      'expires_at': record.get('expires_at'),
    }

  def _get_link(self, path: str) -> pathlib.Path:
    if not (found := _PATH.fullmatch(path)):
      text = f'{path!r:.200} is no path of a state; tinker://RUN/weights/NAME is one'
      raise http.RefusedError(400, text)
    return self.directory.joinpath(*found.groups())

  def _find(self, path: str) -> tuple[pathlib.Path, dict[str, Any]]:
    link = self._get_link(path)
    missing = http.RefusedError(404, f'there is no state {path}')
    try:
      record = json.loads((link / _STATE).read_text())
    except OSError:
      raise missing from None
    except ValueError:
      raise http.RefusedError(400, f'{path}: its {_STATE} is damaged') from None
    now = datetime.datetime.now(datetime.UTC).isoformat()
    folder = link.resolve()
    if (record.get('expires_at') or now) < now:
      link.unlink(missing_ok=True)
      shutil.rmtree(folder, ignore_errors=True)
      raise missing
    return folder, record


def _point(link: pathlib.Path, folder: pathlib.Path):
  """Atomically creates or changes a link, and removes its previous target."""
  old = link.resolve() if link.is_symlink() else None
  link.parent.mkdir(parents=True, exist_ok=True)
  new = folder.with_name(f'{folder.name}.link')
  new.symlink_to(f'../{_DATA}/{folder.name}')
  new.replace(link)
  _sync(link.parent)
  if old:
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: pathlib.Path):
  """Waits until a file or folder is on disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
