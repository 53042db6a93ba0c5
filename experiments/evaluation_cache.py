"""A cache of evaluation results in a file of JSON lines.

A line has a key, which contains everything that the numbers depend on, and the numbers.
If the file has a line with the key of an evaluation, its numbers are returned; otherwise
the episodes are played and a line is appended. No line is overwritten, so that going back
to earlier settings plays nothing.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
import sys
from typing import Any
import warnings

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, report, train, types
from agent_r1_jax.host import processes, runtime
from agent_r1_jax.train import identity, rollout

# Fields of the configuration that change no reply of an evaluation: fields of training,
# and those that change the speed only. The model is part of the key by its files.
_OTHER_FIELDS = re.compile(
  r'(sampling|schedule|curriculum|batch|optimizer|mesh|checkpoint|alarms)[.]'
  r'|engine[.](?!slots)|model[.](?!dtype)'
  r'|(max_error_rate|log_episodes|sinks|profile)$'
)


def evaluate_or_read(
  path: str | os.PathLike,
  config: config_lib.Config,
  model: str | os.PathLike,
  methods: Mapping[str, rollout.Method],
  *,
  summarize: Callable[[Mapping[str, Sequence[types.Trajectory]]], Any],
  depends_on: Mapping[str, Any],
) -> dict[str, Any]:
  """Returns the numbers of each method, read from `path` or else measured.

  A method is played again when the model's files, the tasks, the fields of the
  configuration that a reply may depend on, the code, or `depends_on` differ.

  Args:
    path: The file of results; made if missing.
    config: The configuration of engine and episodes.
    model: The policy's directory.
    methods: The tasks and the environment of each method, by name; see rollout.Method.
    summarize: Maps trajectories by set to the method's numbers, in JSON's types.
    depends_on: What else the numbers depend on, such as the corpus that the environment's
      tool searches.

  Returns:
    Method -> numbers, as JSON gives them back, in the order of `methods`.
  """
  runtime.initialize()
  keys = {}
  if processes.is_first():
    shared_key = {
      'model': identity.model_digest(model),
      'code': _code_digest(),
      'config': {
        name: fields.get(config, name)
        for name in fields.names(type(config))
        if not _OTHER_FIELDS.match(name)
      },
      **depends_on,
    }
    keys = {
      method: {
        'method': method,
        'depends_on': shared_key | {'tasks': identity.tasks_digest(sets)},
      }
      for method, (sets, _) in methods.items()
    }
  # Every process must play the same methods, so only the first one reads the file.
  results = processes.gather({m: find(path, key) for m, key in keys.items()})[0]
  for method in (method for method in keys if results[method]):
    print(f'{method}: as in {path}; nothing that it depends on has changed.')
  missing = {name: method for name, method in methods.items() if not results[name]}
  if missing:
    for method, sets in train.play(
      config, model, missing, watcher=report.Watcher()
    ).items():
      results[method] = _as_json({'numbers': summarize(sets)})
      if processes.is_first():
        add(path, keys[method] | results[method])
  return {method: results[method]['numbers'] for method in methods}


def find(path: str | os.PathLike, key: Mapping[str, Any]) -> dict[str, Any] | None:
  """Returns the last line of the file that has all fields of `key`; None if none has."""
  key = _as_json(key)
  for line in reversed(read(path)):
    if all(name in line and line[name] == value for name, value in key.items()):
      return line
  return None


def add(path: str | os.PathLike, line: Mapping[str, Any]) -> None:
  """Appends one line and syncs it to the disk. Processes may share the file."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open('ab+') as file:
    # Some network file systems have no locks; one line is one write in any case.
    with contextlib.suppress(OSError):
      fcntl.flock(file, fcntl.LOCK_EX)
    size = file.seek(0, os.SEEK_END)
    torn = False
    if size:
      file.seek(size - 1)
      torn = file.read(1) != b'\n'
    # A kill may have truncated the last line: the new one must not be joined to it.
    file.write(b'\n' * torn + json.dumps(line).encode() + b'\n')
    file.flush()
    os.fsync(file.fileno())


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads the lines of a file, oldest first; skips lines that are no JSON."""
  path, results = pathlib.Path(path), []
  lines = path.read_text(encoding='utf-8').splitlines() if path.exists() else []
  for number, line in enumerate(lines, 1):
    try:
      results.append(json.loads(line))
    except (ValueError, RecursionError):
      if line:
        warnings.warn(
          f'{path}: line {number} is no JSON and is left out: the process that wrote it '
          'was probably killed. What it held is measured again.',
          stacklevel=2,
        )
  return results


def _code_digest() -> str:
  """Hashes the code of the package and of the script, in which rewards may be defined."""
  files = {*pathlib.Path(__file__).parents[1].rglob('*.py'), *_find_script_files()}
  return identity.digest(
    sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
  )


def _find_script_files() -> set[pathlib.Path]:
  """Finds the loaded modules that lie in the script's folder, or in its package.

  For `python -m experiments.miniwiki.search` these are the modules of experiments/.
  """
  main = sys.modules['__main__']
  script = getattr(main, '__file__', None)
  if script is None:
    return set()
  dots = main.__spec__.name.count('.') if main.__spec__ else 0
  # For a module a.b.c this is the folder of the package a.
  folder = pathlib.Path(script).resolve().parents[max(dots - 1, 0)]
  loaded = [getattr(module, '__file__', None) for module in [*sys.modules.values()]]
  paths = {pathlib.Path(path).resolve() for path in loaded if path}
  # The folder may hold the environment, too.
  own = lambda path: path.suffix == '.py' and 'site-packages' not in path.parts
  return {path for path in paths if path.is_relative_to(folder) and own(path)}


def _as_json(value: Any) -> Any:
  """Returns the value as a JSON file would give it back."""
  return json.loads(json.dumps(value))
