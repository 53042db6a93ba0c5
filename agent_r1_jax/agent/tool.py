"""Tools: plain Python functions that a model may call.

A tool reports what happened. What goes wrong in it (it raises, hangs, is called wrongly,
returns something odd) is text for the model, never an exception for us.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import inspect
import json
import math
import re
import time
import types
import typing
from typing import Any

from agent_r1_jax.agent import workers

# A result's characters beyond these are dropped at once: a trajectory keeps its messages.
MAX_CHARS = 200_000


@dataclasses.dataclass(frozen=True)
class Tool:
  """A function and what the model is told of it.

  Attributes:
    name: What the model calls it.
    schema: In the OpenAI form: {'type': 'function', 'function': {'name', 'description',
      'parameters'}}, for the chat template; calls are checked against it.
    fn: Sync or async. A sync function runs in a thread (see workers), where it may block;
      an async one must not.
    timeout: Seconds until a call is given up, the wait for a free thread included. A
      thread cannot be killed: a hung function keeps its thread, which does not keep the
      interpreter from exiting.
  """

  name: str
  schema: dict[str, Any]
  fn: Callable[..., Any]
  timeout: float = 30.0

  def __post_init__(self):
    if self.schema.get('function', {}).get('name') != self.name:
      raise ValueError(
        f"tool {self.name}: schema must be {{'type': 'function', 'function': {{'name': "
        f"{self.name!r}, 'description': ..., 'parameters': ...}}}}, not {self.schema}."
      )
    if not self.timeout > 0:
      raise ValueError(f'tool {self.name}: timeout={self.timeout} must be above 0.')

  def __call__(self, *args, **kwargs):
    """Calls the plain function: what it raises, it raises."""
    return self.fn(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Report:
  """What a function returns that can tell a reward, too: `Report('you won', reward=1)`.

  Attributes:
    value: For the model: whatever a function may return.
    reward: What happened is worth this; the environment decides what that means.
  """

  value: Any
  reward: float = 0.0

  def __post_init__(self):
    if not math.isfinite(self.reward):
      raise ValueError(f'the reported reward is {self.reward}; make it finite.')


@dataclasses.dataclass(frozen=True)
class ToolResult:
  """What a call came to.

  Attributes:
    text: For the model.
    ok: Whether it worked.
    seconds: How long it took.
    reward: What the tool reported.
    late: Whether it failed because it took longer than the tool's timeout.
  """

  text: str
  ok: bool
  seconds: float = 0.0
  reward: float = 0.0
  late: bool = False


def tool(
  fn: Callable | None = None, /, *, name: str | None = None, timeout: float = 30.0
):
  """Makes a Tool of a function: `@tool` or `@tool(timeout=5)`.

  Name, types, defaults and the Google docstring become the schema, in the form of
  transformers' `get_json_schema`. Types: str, int, float, bool, list[T], dict[str, T],
  Literal, Any, unions and None of these.

  Raises:
    ValueError: No docstring, or a parameter without a usable type.
  """
  if fn is None:
    return lambda fn: tool(fn, name=name, timeout=timeout)
  name = name or fn.__name__
  return Tool(name, schema(fn, name), fn, timeout)


def schema(fn: Callable, name: str) -> dict[str, Any]:
  """The schema of a function, from its signature and docstring."""
  description, notes = _docstring(fn)
  if not description:
    raise ValueError(f'tool {name}: no docstring; say in one what the tool does.')
  try:
    hints = typing.get_type_hints(fn)
  except NameError as error:
    raise ValueError(f'tool {name}: {error}; import its types in its module.') from None
  properties, required = {}, []
  for key, parameter in inspect.signature(fn).parameters.items():
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
      raise ValueError(f'tool {name}: *args and **kwargs have no schema; name them.')
    if key not in hints:
      raise ValueError(f'tool {name}: parameter {key!r} has no type; write {key}: str.')
    try:
      properties[key] = _type_schema(hints[key])
    except TypeError as error:
      raise ValueError(f'tool {name}: parameter {key!r}: {error}') from None
    if key in notes:
      properties[key]['description'] = notes[key]
    if parameter.default is parameter.empty:
      required.append(key)
  parameters = {'type': 'object', 'properties': properties}
  if required:
    parameters['required'] = required
  function = {'name': name, 'description': description, 'parameters': parameters}
  return {'type': 'function', 'function': function}


async def call(tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
  """Calls a tool within its time. Never raises, whatever the tool does."""
  start = time.monotonic()
  result = await _attempt(tool, arguments)
  text = result.text
  if len(text) > MAX_CHARS:
    text = f'{text[:MAX_CHARS]}\n[cut: {len(text):,} characters in all]'
  return dataclasses.replace(result, text=text, seconds=time.monotonic() - start)


async def _attempt(tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
  problem = _problem_of_call(tool, arguments)
  if problem:
    return ToolResult(f'Error: {tool.name}: {problem}', ok=False)

  # The result becomes text where the function ran: that may take its time, too.
  def run():
    return _result(tool.fn(**arguments))

  async def run_async():
    return _result(await tool.fn(**arguments))

  fn = run_async if workers.is_async(tool.fn) else run
  try:
    return await workers.call(fn, name=tool.name, seconds=tool.timeout)
  except workers.LateError as error:
    return ToolResult(f'Error: {error}', ok=False, late=True)
  except workers.RaisedError as error:
    return ToolResult(f'Error: {tool.name}: {error}', ok=False)
  except Exception as error:
    return ToolResult(f'Error: {tool.name}: {workers.told(error)}', ok=False)


def _result(value: Any) -> ToolResult:
  if isinstance(value, Report):
    return ToolResult(_to_text(value.value), ok=True, reward=float(value.reward))
  return ToolResult(_to_text(value), ok=True)


def _to_text(value: Any) -> str:
  if isinstance(value, bytes | bytearray | memoryview):
    return bytes(value).decode('utf-8', errors='replace')
  if inspect.isawaitable(value):
    raise TypeError('the function returned an awaitable; define it with async def')
  if not isinstance(value, str):
    try:
      value = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
      kind, value = type(value).__name__, str(value)
      # What Python shows of objects that have no words of their own.
      if re.search(r' at 0x[0-9a-f]+>', value):
        raise TypeError(
          f'the function returned a {kind}, which is no text; return a str, a number, '
          'or a list or dict of these'
        ) from None
  return str.__str__(value)  # A subclass of str may lie.


def _docstring(fn: Callable) -> tuple[str, dict[str, str]]:
  """Splits a Google docstring into its description and the notes on its arguments."""
  text = inspect.getdoc(fn) or ''
  description, *sections = re.split(r'^(Args|Returns|Yields|Raises):\n', text, flags=re.M)
  named = dict(zip(sections[::2], sections[1::2], strict=True))
  notes, key = {}, None
  lines = inspect.cleandoc('\n' + named.get('Args', '')).splitlines()
  for line in lines:
    # A note may go on in deeper lines.
    if match := re.match(r'(\w+)(?: \(.*?\))?:\s*(.*)', line):
      key, notes[match[1]] = match[1], match[2]
    elif key:
      notes[key] = f'{notes[key]} {line.strip()}'.strip()
  return description.strip(), notes


_SCALARS = {str: 'string', int: 'integer', float: 'number', bool: 'boolean'}
_NAMES = _SCALARS | {list: 'array', dict: 'object', type(None): 'null'}
_KINDS = {name: kind for kind, name in _NAMES.items()}


def _type_schema(hint: Any) -> dict[str, Any]:
  """The JSON schema of a type annotation."""
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if hint is Any:
    return {}
  if hint in _NAMES:
    return {'type': _NAMES[hint]}
  if origin is list:
    return {'type': 'array', 'items': _type_schema(args[0])}
  if origin is dict and args[0] is str:
    return {'type': 'object', 'additionalProperties': _type_schema(args[1])}
  if origin is typing.Literal and all(type(arg) in _SCALARS for arg in args):
    names = list(dict.fromkeys(_SCALARS[type(arg)] for arg in args))
    return {'type': names[0] if len(names) == 1 else names, 'enum': list(args)}
  if origin in (typing.Union, types.UnionType):
    options = [_type_schema(arg) for arg in args if arg is not type(None)]
    if len(options) == 1:
      result = options[0]
    elif all(option.keys() == {'type'} for option in options):
      result = {'type': sorted(option['type'] for option in options)}
    else:
      result = {'anyOf': options}
    return result | ({'nullable': True} if type(None) in args else {})
  raise TypeError(
    f'{hint} has no JSON form; use str, int, float, bool, list[T], dict[str, T], Literal '
    'or a union of these, or give Tool a schema of your own.'
  )


def _problem_of_call(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
  """Says what is wrong with a call's arguments, or None."""
  parameters = tool.schema['function'].get('parameters', {})
  known = parameters.get('properties', {})
  unknown = [key for key in arguments if key not in known]
  if unknown and not parameters.get('additionalProperties'):
    return f'unknown argument {unknown[0]!r}; it takes {", ".join(known) or "none"}'
  return _problem(dict(arguments), parameters, '')


def _problem(value: Any, schema: Mapping[str, Any], path: str) -> str | None:
  """Checks a JSON value against the parts of JSON Schema that tools use."""
  if value is None and schema.get('nullable'):
    return None
  if options := schema.get('anyOf'):
    problems = [_problem(value, option, path) for option in options]
    return None if None in problems else problems[0]
  names = schema.get('type', [])
  names = [names] if isinstance(names, str) else names
  if names and not any(_is_a(value, name) for name in names):
    return f'argument {path!r} must be of type {" or ".join(names)}'
  if 'enum' in schema and value not in schema['enum']:
    return f'argument {path!r} must be one of {json.dumps(schema["enum"])}'
  if isinstance(value, list):
    children = [(f'{path}[{i}]', v, schema.get('items')) for i, v in enumerate(value)]
  elif isinstance(value, dict):
    prefix = path and f'{path}.'
    for key in schema.get('required', ()):
      if key not in value:
        return f'argument {prefix + key!r} is missing'
    known, other = schema.get('properties', {}), schema.get('additionalProperties')
    children = [(prefix + k, v, known.get(k, other)) for k, v in value.items()]
  else:
    return None
  return _first_problem(children)


def _first_problem(children: Sequence[tuple[str, Any, Any]]) -> str | None:
  for path, value, schema in children:
    if isinstance(schema, dict) and (problem := _problem(value, schema, path)):
      return problem
  return None


def _is_a(value: Any, name: str) -> bool:
  if name == 'number':
    return isinstance(value, int | float) and not isinstance(value, bool)
  if name == 'string':
    return isinstance(value, str)  # A reply is of a subclass, see Chat.decode.
  return type(value) is _KINDS[name] if name in _KINDS else True
