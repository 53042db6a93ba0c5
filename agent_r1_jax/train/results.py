"""Results kept in a file of JSON lines: what was measured once is not measured again.

A line is a key (what was measured, and what the numbers depend on) and the numbers. A
measurement whose key is in the file is read from there; with any other key it is made,
and its line is added. Nothing is overwritten: going back to earlier settings is free.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import sys
from typing import Any
import warnings

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, train, types
from agent_r1_jax.host import processes, runtime
from agent_r1_jax.train import rollout

# Fields of the configuration that change what a greedy policy says. The others (rows,
# replicas, chips, ...) change how fast it says it.
_CONFIG = (
  'model.dtype',
  'engine.slots',
  'limits.max_turns',
  'limits.max_turn_tokens',
  'chat.max_tool_tokens',
)


def play(
  path: str | os.PathLike,
  config: config_lib.Config,
  model: str | os.PathLike,
  rows: Mapping[str, tuple[Mapping[str, Sequence[types.Task]], rollout.MakeEnv]],
  *,
  summarize: Callable[[Mapping[str, Sequence[types.Trajectory]]], Any],
  depends_on: Mapping[str, Any],
) -> dict[str, Any]:
  """The numbers of each method: read from `path`, or of greedy episodes played now.

  A method is played again when the model's files, the tasks, the sizes of the
  configuration that an answer depends on, the code, or `depends_on` differ.

  Args:
    path: The file of results; made if missing.
    config: Sizes of the engine and limits of the episodes.
    model: The directory of the policy.
    rows: Method -> (tasks by set, a new environment for each episode).
    summarize: Trajectories by set -> the method's numbers, which JSON can write.
    depends_on: What else the numbers depend on and cannot be seen here, such as the
      corpus that the environment's tool searches.

  Returns:
    Method -> numbers, as JSON gives them back, in the order of `rows`.
  """
  runtime.initialize()
  keys = {}
  if processes.is_first():
    same = {
      'model': model_digest(model),
      'code': _code_digest(),
      'config': {name: fields.get(config, name) for name in _CONFIG},
      **depends_on,
    }
    keys = {
      method: {'method': method, 'depends_on': same | {'tasks': tasks_digest(sets)}}
      for method, (sets, _) in rows.items()
    }
  # Every process must play the same rows: the first one looks, and tells the others.
  known = processes.gather({m: find(path, key) for m, key in keys.items()})[0]
  for method in (method for method in keys if known[method]):
    print(f'{method}: as in {path}; nothing that it depends on has changed.')
  missing = {method: row for method, row in rows.items() if not known[method]}
  if missing:
    for method, sets in train.play(config, model, missing).items():
      known[method] = _as_json({'numbers': summarize(sets)})
      if processes.is_first():
        add(path, keys[method] | known[method])
  return {method: known[method]['numbers'] for method in rows}


def find(path: str | os.PathLike, key: Mapping[str, Any]) -> dict[str, Any] | None:
  """The last line of the file that says what `key` says, field by field; None if none."""
  key = _as_json(key)
  for line in reversed(read(path)):
    if all(name in line and line[name] == value for name, value in key.items()):
      return line
  return None


def add(path: str | os.PathLike, line: Mapping[str, Any]) -> None:
  """Appends one line and waits until it is on the disk. Processes may share the file."""
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
    # A line that a kill cut short must not swallow the one that follows it.
    file.write(b'\n' * torn + json.dumps(line).encode() + b'\n')
    file.flush()
    os.fsync(file.fileno())


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """The lines of a file of results, oldest first, without one that a kill cut short."""
  path, found = pathlib.Path(path), []
  lines = path.read_text(encoding='utf-8').splitlines() if path.exists() else []
  for number, line in enumerate(lines, 1):
    try:
      found.append(json.loads(line))
    except (ValueError, RecursionError):
      if line:
        warnings.warn(
          f'{path}: line {number} is no JSON and is left out: the process that wrote it '
          'was probably killed. What it held is measured again.',
          stacklevel=2,
        )
  return found


def model_digest(directory: str | os.PathLike) -> str:
  """sha256 over the names and contents of the files of a model's directory, in hex."""
  total = hashlib.sha256()
  for path in sorted(p for p in pathlib.Path(directory).rglob('*') if p.is_file()):
    total.update(str(path.relative_to(directory)).encode() + b'\0')
    with path.open('rb') as file:
      total.update(hashlib.file_digest(file, 'sha256').digest())
  return total.hexdigest()


def tasks_digest(sets: Mapping[str, Sequence[types.Task]]) -> str:
  """sha256 over everything that tasks say, prompts and answers included, in hex."""
  rows = {
    name: [[task.id, task.messages, task.answer, task.info] for task in tasks]
    for name, tasks in sets.items()
  }
  return digest(rows)


def digest(value: Any) -> str:
  """sha256 of a value as JSON (what JSON does not know as its repr), in hex."""
  return hashlib.sha256(json.dumps(value, default=repr).encode()).hexdigest()


def _code_digest() -> str:
  """The package's code and the script's: a mended reward must not show old numbers."""
  files = {*pathlib.Path(__file__).parents[1].rglob('*.py'), *_files_of_the_script()}
  return digest(sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in files))


def _files_of_the_script() -> set[pathlib.Path]:
  """What is loaded of the script's folder, or of its package.

  Of `python -m experiments.miniwiki.search` that is what is loaded of experiments/.
  """
  main = sys.modules['__main__']
  script = getattr(main, '__file__', None)
  if script is None:
    return set()
  dots = main.__spec__.name.count('.') if main.__spec__ else 0
  folder = pathlib.Path(script).resolve().parents[max(dots - 1, 0)]
  loaded = [getattr(module, '__file__', None) for module in [*sys.modules.values()]]
  paths = {pathlib.Path(path).resolve() for path in loaded if path}
  # The folder may hold the environment, too.
  own = lambda path: path.suffix == '.py' and 'site-packages' not in path.parts
  return {path for path in paths if path.is_relative_to(folder) and own(path)}


def _as_json(value: Any) -> Any:
  """The value as it comes back from a file."""
  return json.loads(json.dumps(value))
