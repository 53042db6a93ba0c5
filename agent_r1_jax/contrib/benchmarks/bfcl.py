"""BFCL's multi-turn tasks: a user makes several requests in turn, of in-memory APIs.

  tasks = bfcl.load('multi_turn_base')
  train.run(..., tasks=tasks, make_env=bfcl.MultiTurnEnv)

The package bfcl-eval (github.com/ShishirPatil/gorilla, Apache 2.0) has the tasks, the
APIs and the checks of a turn: the APIs' state, and the results of calls. Its runner
evaluates a call's text as Python; here a method of the task's classes is called by name,
with arguments that fit its schema. guide.md lists the differences.
"""

import ast
from collections.abc import Callable, Sequence
import contextlib
import copy
import decimal
import functools
import importlib
import inspect
import json
import os
import pathlib
import threading
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, calls, env
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.host import workers

CATEGORIES = (
  'multi_turn_base',
  'multi_turn_miss_func',
  'multi_turn_miss_param',
  'multi_turn_long_context',
)
# The reference calls violate their schemas: close_ticket gets text for a number, and a
# file is read by a function that is offered two turns later.
NOT_OFFERED = (
  *(f'{category}_173' for category in CATEGORIES),
  'multi_turn_miss_func_49',
)
# As in BFCL: the maximum number of replies to one user request.
MAX_REPLIES = 20
_INSTALL = (
  'bfcl-eval is not installed: pip install --no-deps bfcl-eval==2026.3.23 '
  '(contrib/benchmarks/guide.md says why without its requirements).'
)
_CHECKER = 'bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker'
# A larger number, or one that makes Python compute as many digits, would block the
# interpreter.
_LARGEST = 10**18
_LARGEST_OF = {'precision': 1000, 'exponent': 1000, 'decimal_places': 1000}
# Copies of directories share their entries, so a few calls can make more paths than can
# be walked; above this many the file system counts as full.
_MOST_FILES = 20_000
# For a turn's check, and for new APIs, including the wait for a thread and the lock.
_SECONDS = 60.0
# The APIs set mpmath's precision for the entire process.
_LOCK = threading.Lock()


def load(
  category: str = CATEGORIES[0], folder: str | os.PathLike = ''
) -> list[types.Task]:
  """Reads a category's tasks, except those in NOT_OFFERED.

  A task's messages are the user's first request, and its answer has the calls of each
  turn as [name, arguments].

  Args:
    category: One of CATEGORIES.
    folder: The folder of BFCL's data; the installed package's by default.

  Raises:
    ModuleNotFoundError: The package is not installed; says how to install it.
    FileNotFoundError: The folder has no such tasks.
    ValueError: There is no such category.
  """
  if category not in CATEGORIES:
    raise ValueError(f'category is {category!r}; give one of {", ".join(CATEGORIES)}.')
  folder = pathlib.Path(folder or _package_folder() / 'data')
  name = f'BFCL_v4_{category}.json'
  if not (folder / name).is_file():
    raise FileNotFoundError(f'{folder} has no {name}: give a folder of the data of BFCL.')
  answers = {row['id']: row for row in _read(folder / 'possible_answer' / name)}
  return [
    _make_task(row, answers[row['id']]['ground_truth'])
    for row in _read(folder / name)
    if row['id'] not in NOT_OFFERED
  ]


def solve(task: types.Task) -> list[str]:
  """Returns replies that solve a task: its own calls of each turn, then a text."""
  render = call_formats.HERMES.render
  replies = []
  for turn in task.answer:
    if turn:
      replies.append(''.join(render(calls.ToolCall(*call)) for call in turn))
    replies.append('Done.')
  return replies


class MultiTurnEnv(env.ToolEnv):
  """A reply without a call gets the user's next request; the last one ends the episode.

  Each turn is checked as in BFCL, and the first failure ends the episode. The reward is
  1.0 if all turns passed; the metric 'turns_passed' is the share that passed. An episode
  that a budget ended has no reward.
  """

  def __init__(self):
    """Creates the environment; the tools come with a task."""
    super().__init__(
      (), self._score, metrics=self._measure, max_parallel_calls=64, in_order=True
    )

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins with the first request, and fresh APIs."""
    make = lambda: (_Apis(task), _Apis(task))
    # Runs in a thread, since it may take long or wait for the lock.
    self._apis, self._truth = await workers.call(make, name='reset', seconds=_SECONDS)
    self._turn = self._replies = self._calls = 0
    self._offer(task)
    return await super().reset(task)

  async def answer_text(self) -> list[types.Message]:
    """Checks the turn; returns the next request, or none after a failure or the last."""
    right, check = self.task.answer[self._turn], self._check_turn
    passed = await workers.call(check, right, name='check', seconds=_SECONDS)
    self._turn += passed
    if not passed or self._turn == len(self.task.answer):
      return []
    self._replies = self._calls = 0
    more = self._offer(self.task)
    return [*self._describe(more), *self.task.info['requests'][self._turn]]

  async def step(self, reply: str) -> types.Step:
    """Answers a reply, as ToolEnv does."""
    self._replies += 1
    return await super().step(reply)

  def _check_turn(self, right: Sequence[Any]) -> bool:
    """Whether state and results match those of the task's own calls."""
    checker = _import(_CHECKER)
    results = [self._truth.call(name, arguments) for name, arguments in right]
    if self._replies > MAX_REPLIES + 1 or (right and not self._calls):
      return False
    if not right:
      return True
    try:
      state = checker.state_checker(self._apis.instances, self._truth.instances)
    except RecursionError:  # Calls have put directories into each other.
      return False
    said = checker.response_checker(self._apis.results, results, self._turn)
    return bool(state['valid'] and said['valid'])

  def _offer(self, task: types.Task) -> list[dict[str, Any]]:
    """Sets the tools of the turn; returns the schemas of new tools."""
    late = {
      n for t, names in task.info['late'].items() if int(t) > self._turn for n in names
    }
    known = [s for name in self._apis.instances for s in _documents(name).values()]
    schemas = [schema for schema in known if schema['name'] not in late]
    before = {tool.name for tool in self.tools}
    self.set_tools([self._make_tool(schema) for schema in schemas])
    return [schema for schema in schemas if schema['name'] not in before]

  def _describe(self, schemas: Sequence[dict[str, Any]]) -> list[types.Message]:
    """Announces functions that were withheld, as BFCL does for models with prompts."""
    if not schemas:
      return []
    prompts = _import('bfcl_eval.constants.default_prompts')
    template = prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING
    text = template.format(functions=json.dumps(schemas))
    return [{'role': 'user', 'content': text}]

  def _make_tool(self, schema: dict[str, Any]) -> tool_lib.Tool:
    name = schema['name']

    def run(**arguments: Any) -> str:
      if problem := _find_excess(arguments) or self._apis.find_excess():
        raise ValueError(problem)
      self._calls += 1
      return self._apis.call(name, arguments)

    described = {'type': 'function', 'function': schema}
    return tool_lib.Tool(name, described, run, timeout=10.0)

  def _score(self, task: types.Task, messages: Sequence[types.Message]) -> float:
    return float(self._turn == len(task.answer))

  def _measure(
    self, task: types.Task, messages: Sequence[types.Message]
  ) -> dict[str, float]:
    passed = self._turn / len(task.answer)
    return {'passed': float(passed == 1.0), 'turns_passed': passed}


class _Apis:
  """The APIs of a task, in their current state.

  Attributes:
    instances: The instances by class name.
    results: The results of calls, as texts.
  """

  def __init__(self, task: types.Task):
    self.instances, self.results = {}, []
    for name in task.info['classes']:
      self.instances[name] = instance = _class(name)()
      if hasattr(instance, '_load_scenario'):
        scenario = copy.deepcopy(task.info['config'].get(name, {}))
        instance._load_scenario(scenario, long_context=task.info['long'])

  def call(self, name: str, arguments: dict[str, Any]) -> str:
    """Calls a method of one of the classes; an exception becomes its result.

    Args:
      name: A name in `_documents`.
      arguments: They fit the schema.
    """
    (api,) = (x for c, x in self.instances.items() if name in _documents(c))
    import mpmath

    # Calls change the precision of decimals and mpmath, and leave it so.
    with _LOCK, decimal.localcontext(), mpmath.workdps(15):
      try:
        # An API may store a list that it is given, and change it later.
        result = _write_result(getattr(api, name)(**copy.deepcopy(arguments)))
      except Exception as error:
        result = f'Error during execution: {error}'
    self.results.append(result)
    return result

  def find_excess(self) -> str | None:
    """Returns an error if the file system is full."""
    files = self.instances.get('GorillaFileSystem')
    left = [files.root, files._current_dir] if files else []
    for _ in range(_MOST_FILES):
      if not left:
        return None
      left += getattr(left.pop(), 'contents', {}).values()
    return f'the file system is full: it has more than {_MOST_FILES} entries'


def _write_result(value: Any) -> str:
  """Writes a method's result, as BFCL does before comparing."""
  if isinstance(value, dict):
    with contextlib.suppress(TypeError, ValueError):
      return json.dumps(value)
  return str(value)


def _find_excess(arguments: dict[str, Any]) -> str | None:
  """Returns an error that names a number too large to compute with."""
  for name, value in arguments.items():
    most = _LARGEST_OF.get(name, _LARGEST)
    for x in value if isinstance(value, list) else [value]:
      if isinstance(x, int | float) and abs(x) > most:
        return f'argument {name!r} must be a number of at most {most:.0e}'
  return None


def _make_task(row: dict[str, Any], ground_truth: list[list[str]]) -> types.Task:
  """Makes a task from a row of BFCL and its answer."""
  requests, classes = row['question'], row['involved_classes']
  info = {
    'classes': classes,
    'config': row['initial_config'],
    'requests': requests,
    'late': row.get('missed_function', {}),
    'long': 'long_context' in row['id'],
  }
  answer = [[_parse_call(text, classes) for text in turn] for turn in ground_truth]
  return types.Task(row['id'], requests[0], answer, info)


def _parse_call(text: str, classes: Sequence[str]) -> list[Any]:
  """Parses 'f(1, b=2)' as ['f', {'a': 1, 'b': 2}], without evaluating it."""
  call = ast.parse(text, mode='eval').body
  if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
    raise ValueError(f'{text!r:.100} is no call.')
  name = call.func.id
  (owner,) = (c for c in classes if name in _documents(c))
  names = [*inspect.signature(getattr(_class(owner), name)).parameters][1:]
  given = [*zip(names, call.args, strict=False)]
  given += [(str(k.arg), k.value) for k in call.keywords]
  return [name, {key: ast.literal_eval(value) for key, value in given}]


@functools.cache
def _documents(name: str) -> dict[str, dict[str, Any]]:
  """Returns BFCL's schemas of a class's functions by name, with JSON Schema's types."""
  files = _import('bfcl_eval.constants.executable_backend_config')
  file = files.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]
  kinds = _import('bfcl_eval.constants.type_mappings').GORILLA_TO_OPENAPI

  def read_type(fields: dict[str, Any]) -> dict[str, Any]:
    # A parameter may be called "type"; its value is then a schema, not a text.
    kind = fields.get('type')
    return fields | {'type': kinds[kind]} if isinstance(kind, str) else fields

  rows = _read(_package_folder() / 'data' / 'multi_turn_func_doc' / file, read_type)
  wanted = ('name', 'description', 'parameters')
  return {row['name']: {key: row[key] for key in wanted} for row in rows}


def _class(name: str) -> Any:
  files = _import('bfcl_eval.constants.executable_backend_config')
  return getattr(_import(files.CLASS_FILE_PATH_MAPPING[name]), name)


def _package_folder() -> pathlib.Path:
  return pathlib.Path(_import('bfcl_eval').__file__).parent


def _import(name: str) -> Any:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name != 'bfcl_eval':
      raise
    raise ModuleNotFoundError(_INSTALL, name=error.name) from None


def _read(
  path: pathlib.Path, hook: Callable[[dict[str, Any]], Any] | None = None
) -> list[dict[str, Any]]:
  with path.open(encoding='utf-8') as lines:
    return [json.loads(line, object_hook=hook) for line in lines]
