"""Describes the Python objects of a run, so that two starts of the run can be compared.

Algorithms, rewards and tools are Python objects. Their descriptions are JSON of names,
numbers and digests, and omit everything that differs between two starts of one script,
such as addresses, the order of a set, the script's path or its comments.
`describe_critic` describes how a critic was trained, for its config.json.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import pathlib
import sys
import sysconfig
import types as python_types
from typing import Any

import jax
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.host import model_paths, processes
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.rl import algorithms, kl
from agent_r1_jax.rollout import sockets

_PACKAGE = __name__.partition('.')[0]
_LIBRARIES = tuple(
  {sysconfig.get_path(name) for name in ('stdlib', 'purelib', 'platlib')}
)
_DEPTH = 8
# A container with more items is described only by its type.
_MOST_ITEMS = 100
# The most tasks to read from a data set that may be on disk.
_MOST_TASKS = 1000


def describe_run(
  algorithm: Any,
  env: Any,
  tasks: Sequence[types.Task],
  privileged: Callable | None = None,
  guides: Iterable[Any] = (),
) -> dict[str, Any]:
  """Describes a run's algorithm, environments, rewards, tools, tasks and guides.

  The arguments are those of train.run; `env` is an environment before its first episode.
  """
  tools = {
    tool.name: {'schema': digest(tool.schema), 'fn': describe(tool.fn, values=False)}
    for tool in getattr(env, 'tools', ())
  }
  made_of = {
    'algorithm': describe(algorithm),
    'environment': _describe_environment(env),
    'tools': tools,
    'tasks': _describe_tasks(tasks),
    'privileged': describe(privileged),
  }
  described = [describe(guide) for guide in guides]
  return made_of | ({'guides': described} if described else {})


def _describe_environment(env: Any, depth: int = 0) -> dict[str, Any]:
  """Describes an environment's code, and the environments that it wraps.

  The code is all methods of the user's classes, and the functions in attributes, such as
  a ToolEnv's reward. For a wrapper of this package, the description includes attributes
  that are numbers or strings.
  """
  if made_of := getattr(env, 'made_of', None):
    return made_of  # From another machine (contrib/ray), which has described it.
  parts = {}
  if not isinstance(env, env_lib.ToolEnv | sockets.Player):
    parts['step'] = describe(type(env).step)
  for kind in reversed(type(env).__mro__):
    if not _installed(kind):
      methods = {name: _function(method) for name, method in vars(kind).items()}
      # As with tools, values in a closure may differ at the next start.
      parts |= {name: describe(m, values=False) for name, m in methods.items() if m}
  attributes = {
    name.strip('_'): value
    for name, value in getattr(env, '__dict__', {}).items()
    if not inspect.isclass(value)
  }
  # At most _DEPTH deep: two environments may refer to each other.
  wrapped = {
    name
    for name, x in attributes.items()
    if depth < _DEPTH and hasattr(x, 'reset') and hasattr(x, 'step')
  }
  ours = type(env).__module__.partition('.')[0] == _PACKAGE
  options = (int, float, str) if wrapped and ours else ()
  for name, value in attributes.items():
    if name in wrapped:
      parts[name] = _describe_environment(value, depth + 1)
    elif callable(value) or isinstance(value, options):
      parts[name] = describe(value)
  return parts


def describe(value: Any, *, values: bool = True, depth: int = 0) -> Any:
  """Describes a value.

  A function of this or an installed package is described by its name; a user's function
  also by a digest of its code and of the user's functions that it calls. Arguments of a
  functools.partial and variables of a closure are described too.

  Args:
    value: Any object. An object other than a function, container, dataclass or array is
      described by its class.
    values: Whether numbers and strings are described by their values. Values in a tool's
      closure, such as the port of a server, may differ at the next start.
    depth: The number of containers around the value; from _DEPTH on, a value is described
      by its class.
  """
  if value is None:
    return None
  if isinstance(value, bool | int | str | float):
    return repr(value) if values else type(value).__name__
  if depth > _DEPTH or (isinstance(value, Sized) and len(value) > _MOST_ITEMS):
    return _name(type(value))
  inner = functools.partial(describe, values=values, depth=depth + 1)
  fields = _fields(value)
  if fields is not None:
    return {name: inner(field) for name, field in fields.items()}
  if isinstance(value, set | frozenset):
    return sorted((inner(x) for x in value), key=repr)
  if function := _function(value):
    return _describe_function(function, inner)
  if isinstance(value, np.ndarray | np.generic):
    return f'{value.dtype}{list(value.shape)} {digest(value.tobytes().hex())}'
  # Other objects are described by their class and the code of __call__, because their
  # attributes may contain anything.
  name = _name(value if isinstance(value, type) else type(value))
  call = None if isinstance(value, type) else _function(type(value).__call__)
  return {'type': name, 'call': inner(call)} if call else name


def describe_critic(
  algorithm: algorithms.Algorithm, model: str | os.PathLike, *, privileged: bool
) -> dict[str, Any] | None:
  """Describes how an algorithm trains its critic, for JSON; None if it has none.

  The fields are those of algorithms.ValueTargets (None if the algorithm does not set
  them) and

    rewards: The names of the reward's transforms, in order.
    kl_coef: The coefficient of the KL in the reward.
    privileged: Whether the critic reads information that the policy does not.
    tokenizer: The sha256 of tokenizer.json.

  Args:
    algorithm: The algorithm that trains the critic.
    model: The directory of the policy, whose tokenizer it reads.
    privileged: Whether the run has a function `privileged`.
  """
  if not algorithm.needs_critic:
    return None
  unknown = dict.fromkeys(algorithms.ValueTargets._fields)
  targets = algorithm.value_targets
  return {
    **(targets._asdict() if targets else unknown),
    'rewards': [_transform_name(transform) for transform in algorithm.rewards],
    'kl_coef': algorithm.kl.coef if isinstance(algorithm.kl, kl.InReward) else 0.0,
    'privileged': privileged,
    'tokenizer': tokenizer_digest(model),
  }


def tokenizer_digest(directory: str | os.PathLike) -> str:
  """Returns the sha256 of a model's tokenizer.json."""
  file = model_paths.get_directory(directory) / 'tokenizer.json'
  return hashlib.sha256(file.read_bytes()).hexdigest()


def model_digest(model: str | os.PathLike) -> str:
  """Returns the sha256, in hex, of the names and contents of a model's files.

  Args:
    model: A directory, or a file in it; then other files with its suffix are left out.
  """
  total, model = hashlib.sha256(), pathlib.Path(model)
  directory = model_paths.get_directory(model)
  for path in sorted(p for p in directory.rglob('*') if p.is_file()):
    if path != model != directory and path.suffix == model.suffix:
      continue
    total.update(str(path.relative_to(directory)).encode() + b'\0')
    with path.open('rb') as file:
      total.update(hashlib.file_digest(file, 'sha256').digest())
  return total.hexdigest()


def _transform_name(function: Callable) -> str:
  if isinstance(function, functools.partial):
    given = ', '.join(f'{k}={v}' for k, v in function.keywords.items())
    return f'{_transform_name(function.func)}({given})'
  return getattr(function, '__name__', type(function).__name__)


def tasks_digest(sets: Mapping[str, Sequence[types.Task]]) -> str:
  """Returns the `digest` of all fields of tasks."""
  rows = {
    name: [[task.id, task.messages, task.answer, task.info] for task in tasks]
    for name, tasks in sets.items()
  }
  return digest(rows)


def check_hosts(
  made_of: Mapping[str, Any], sets: Mapping[str, Sequence[types.Task]]
) -> None:
  """Raises ValueError in all processes of a run if any was started with other objects.

  The error names the processes and the fields of `made_of`, which has the result of
  `describe_run` and the configuration. `sets` has the tasks by the name of their set.
  """
  if jax.process_count() == 1:
    return
  shared = {
    'sets': {
      n: tasks_digest({n: [*dict(sample_tasks(s)).values()]}) for n, s in sets.items()
    },
    'versions': describe_versions(),
  }
  processes.check_same(workdir_lib.flatten_fields({**made_of, **shared}))


def describe_versions() -> dict[str, str]:
  """Returns a digest of this package's code, and the versions of JAX and Python."""
  package = pathlib.Path(__file__).parents[1]
  code = {str(p.relative_to(package)): p.read_text() for p in package.rglob('*.py')}
  python = sys.version.split()[0]
  return {_PACKAGE: digest(code), 'jax': jax.__version__, 'python': python}


def _fields(value: Any) -> dict[str, Any] | None:
  """Returns the parts of a container, partial or dataclass by name; otherwise None."""
  if isinstance(value, type):
    return None
  kind = {'type': type(value)}
  if isinstance(value, functools.partial):
    arguments = {str(i): x for i, x in enumerate(value.args)}
    return {'partial': value.func} | arguments | value.keywords
  if isinstance(value, Mapping):
    return {str(key): x for key, x in value.items()}
  if hasattr(value, '_asdict'):  # A named tuple.
    return kind | value._asdict()
  if isinstance(value, list | tuple):
    return {str(i): x for i, x in enumerate(value)}
  if dataclasses.is_dataclass(value):
    return kind | {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
  return None


def _describe_function(function: python_types.FunctionType, inner: Callable) -> Any:
  parts: dict[str, Any] = {'function': _name(function)}
  if not _installed(function):
    parts['code'] = digest(sorted(_code_texts(function, set())))
  for name, cell in zip(
    function.__code__.co_freevars, function.__closure__ or (), strict=True
  ):
    content = _content(cell)
    if content is not function:
      parts[name] = inner(content)
  return parts if len(parts) > 1 else parts['function']


def _function(value: Any) -> python_types.FunctionType | None:
  """Returns the Python function inside a method, a wrapper or a jitted function."""
  value = getattr(value, 'fget', value)  # A property's function.
  value = getattr(value, '__func__', value)
  try:
    value = inspect.unwrap(value) if callable(value) else None
  except ValueError:  # It wraps itself.
    return None
  value = getattr(value, '__func__', value)
  return value if isinstance(value, python_types.FunctionType) else None


def _name(value: Any) -> str:
  """Returns the qualified name, with the module if it is installed.

  A script's module may be __main__ at one start and have a name at the next.
  """
  name = value.__qualname__
  return f'{value.__module__}.{name}' if _installed(value) else name


def _installed(value: Any) -> bool:
  """Whether a function or class is part of this package, an installed one, or Python."""
  if str(value.__module__).partition('.')[0] == _PACKAGE:
    return True
  try:
    path = pathlib.Path(inspect.getfile(value))
  except (TypeError, OSError):
    # Built in, unless it is a Python function that was typed into an interpreter.
    return not isinstance(value, python_types.FunctionType)
  return any(path.is_relative_to(library) for library in _LIBRARIES)


def _code_texts(function: python_types.FunctionType, seen: set[int]) -> Iterable[str]:
  """Yields the code of a function and of the user's functions that it names, as text."""
  if id(function.__code__) in seen or _installed(function):
    return
  seen.add(id(function.__code__))
  names: set[str] = set()
  yield _code_text(function.__code__, function.__doc__, names) + repr(
    [describe(function.__defaults__), describe(function.__kwdefaults__)]
  )
  referenced = [function.__globals__.get(name) for name in sorted(names)]
  referenced += [_content(cell) for cell in function.__closure__ or ()]
  for other in filter(None, map(_function, referenced)):
    yield from _code_texts(other, seen)


def _code_text(code: python_types.CodeType, doc: str | None, names: set[str]) -> str:
  """Returns bytecode and constants without line numbers, file names and docstring.

  Adds the global names that the code reads to `names`.
  """
  names.update(code.co_names)
  consts = [
    _code_text(const, None, names)
    if isinstance(const, python_types.CodeType)
    else repr(sorted(const, key=repr) if isinstance(const, frozenset) else const)
    for const in code.co_consts
    if const is None or const != doc
  ]
  return repr([code.co_code.hex(), consts, code.co_names, code.co_varnames])


def _content(cell: Any) -> Any:
  try:
    return cell.cell_contents
  except ValueError:  # It is not set yet.
    return None


def _describe_tasks(tasks: Sequence[types.Task]) -> dict[str, Any]:
  ids = [getattr(tasks[i], 'id', None) for i in _spread_indices(len(tasks))]
  return {'count': len(tasks), 'ids': digest(ids)}


def sample_tasks(tasks: Sequence[types.Task]) -> Iterator[tuple[int, types.Task]]:
  """Yields (index, task): all of a list, or a sample if tasks may be on disk."""
  if isinstance(tasks, list | tuple):
    yield from enumerate(tasks)
  else:
    yield from ((i, tasks[i]) for i in _spread_indices(len(tasks)))


def _spread_indices(n: int) -> list[int]:
  """Returns all indices of n tasks, or _MOST_TASKS evenly spaced ones."""
  return sorted({i * n // _MOST_TASKS for i in range(_MOST_TASKS)}) if n else []


def digest(value: Any) -> str:
  """Returns 16 hex digits of a value as JSON; `describe` stands in for other types."""
  try:
    text = json.dumps(value, sort_keys=True, default=describe)
  except TypeError:  # A dict with keys that JSON does not support or cannot sort.
    parts = _fields(value) or {}
    text = repr(sorted((name, digest(part)) for name, part in parts.items()))
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
