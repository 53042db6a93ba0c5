"""Tool calls, the definition of a call format, and functions that formats share.

The formats are in call_formats.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import json
import math
import re
from typing import Any, Protocol

from agent_r1_jax import types


@dataclasses.dataclass(frozen=True)
class _Found:
  """Where a parser found a call: reply[begin:end], including its tags."""

  begin: int = dataclasses.field(default=0, kw_only=True, compare=False, repr=False)
  end: int = dataclasses.field(default=0, kw_only=True, compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class ToolCall(_Found):
  """A well-formed call; its tool may not exist, and its arguments may not fit."""

  name: str
  arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class CallError(_Found):
  """A call that cannot be parsed.

  Attributes:
    message: What is wrong, for the model.
    text: The text of the call.
  """

  message: str
  text: str


Call = ToolCall | CallError
# The maximum nesting of JSON objects and arrays in a call's arguments: users may walk
# them recursively, and Python's recursion limit is about 1,000.
MAX_DEPTH = 64
_SURROGATE = re.compile('[\ud800-\udfff]')
# The schemas of tools, in the OpenAI form.
Schemas = Sequence[Mapping[str, Any]]


class Parse(Protocol):
  """Returns the calls of a reply, in order; never raises.

  The tools' schemas are optional. They give the argument that a bare text means, and the
  types of arguments that are written as text.
  """

  def __call__(self, reply: str, schemas: Schemas = ()) -> list[Call]:
    """See the class."""
    ...


@dataclasses.dataclass(frozen=True)
class CallFormat:
  """How a model writes tool calls, and how tools are described to it.

  Attributes:
    name: Its name in the configuration (chat.tool_format).
    parse: Finds the calls in a reply.
    render: Writes one call in the form that `parse` reads.
    openings: Every call begins with one of these texts; other text may as well.
    closing: The text that ends each call, or None.
    description: Describes the tools to a model, if the chat template does not. {schemas}
      is replaced by one line of JSON per tool.
    answer: Writes a tool's answer in a user message; None if answers are messages of the
      role 'tool', which the chat template writes.
    stop_strings: Strings that end a reply, because a call ends with them.
    only_tool: The only tool that can be called; None if calls name their tool.
    write: Converts messages to the form that the template takes. None tests what the
      template supports instead (template_forms.py).
    ends: The control tokens that end a reply, if not the template's end of turn.
    within: The control tokens inside calls, which do not end a reply.
    answer_begin: The control token that begins an answer, if it may end a reply.
    frame: Writes a reply of plain text as the model does.
  """

  name: str
  parse: Parse
  render: Callable[[ToolCall], str]
  openings: tuple[str, ...]
  closing: str | None
  description: types.ControlText
  answer: types.ControlText | None = None
  stop_strings: tuple[str, ...] = ()
  only_tool: str | None = None
  write: Callable[[Sequence[types.Message]], list[types.Message]] | None = None
  ends: tuple[str, ...] = ()
  within: tuple[str, ...] = ()
  answer_begin: str = ''
  frame: Callable[[str], str] = lambda text: text

  def describe(self, schemas: Schemas) -> types.ControlText:
    """Describes tools to a model.

    Raises:
      ValueError: The format cannot call one of the tools.
    """
    names = list_names(schemas)
    if self.only_tool and names != [self.only_tool]:
      raise ValueError(
        f'calls in the format {self.name} go to a tool {self.only_tool!r}, and the '
        f'tools are {", ".join(names)}: give that tool alone, or choose another '
        'chat.tool_format.'
      )
    lines = '\n'.join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return self.description.format(schemas=lines)


# A thought in Harmony (harmony.py), up to the next message or the end of the text.
_ANALYSIS = re.compile(
  r'<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>(?:<\|start\|>assistant)?|\Z)',
  re.DOTALL,
)
# The tags around thoughts, of most models and of Gemma 4.
_OPEN, _CLOSE = ('<think>', '<|channel>thought'), ('</think>', '<channel|>')
_THOUGHT_TAGS = re.compile(f'({"|".join(map(re.escape, _OPEN + _CLOSE))})')
# The pattern of `scan` begins with it.
THINK = '<think>|</think>|'
# The maximum number of malformed calls that are read in a reply: finding that a call is
# malformed may read the entire rest of the reply, which is then searched again.
MAX_MALFORMED = 16


def scan(
  reply: str,
  pattern: re.Pattern[str],
  read: Callable[[re.Match], tuple[Call | None, int]],
) -> list[Call]:
  """Reads the calls of a reply, in order.

  Calls in a closed thinking block do not count, even if the prompt opened the block.
  Calls in an open block do, because generation may stop at a call. Text after
  MAX_MALFORMED malformed calls, including those in thinking blocks, is not read.

  Args:
    reply: The reply.
    pattern: THINK, and the start of a call; a comma only directly after another call.
    read: Returns the call that begins with a match, and where it ends. None instead of a
      call means the agent's final answer, after which calls do not count.
  """
  calls: list[Call | None] = []
  thoughts, position, malformed = _Thoughts(calls), 0, 0
  while malformed < MAX_MALFORMED and (tag := pattern.search(reply, position)):
    position = tag.end()
    follows = calls and calls[-1] and calls[-1].end == tag.start()
    if thoughts.note(tag[0]) or (tag[0].startswith(',') and not follows):
      continue
    call, position = read(tag)
    begin = tag.start() + len(tag[0]) - len(tag[0].lstrip())
    if isinstance(call, ToolCall):
      try:
        check_json(call.name, call.arguments)
      except ValueError as error:
        call = make_error(error, reply[begin:position])
    malformed += isinstance(call, CallError)
    calls.append(call and dataclasses.replace(call, begin=begin, end=position))
  return list(itertools.takewhile(lambda call: call is not None, calls))  # pyright: ignore


class _Thoughts:
  """Drops the findings in closed thinking blocks, even if the prompt opened the block."""

  def __init__(self, found: list):
    """Takes the list of findings, which it will modify."""
    self._found, self._begin, self._is_open = found, 0, False

  def note(self, tag: str) -> bool:
    """Processes a tag; returns whether it opens or closes a thought."""
    opens, closes = tag in _OPEN, tag in _CLOSE
    if opens and not self._is_open:
      self._begin, self._is_open = len(self._found), True
    elif closes:
      del self._found[self._begin :]
      self._is_open = False
    return opens or closes


def remove_thoughts(text: str) -> str:
  """Removes the closed thinking blocks of a reply, as `scan` does."""
  text = _ANALYSIS.sub('', text)
  found: list[str] = []
  thoughts = _Thoughts(found)
  for piece in _THOUGHT_TAGS.split(text):
    if not thoughts.note(piece):
      found.append(piece)
  return ''.join(found)


def make_error(error: Exception | str, text: str) -> CallError:
  """Makes the error of a call that cannot be parsed."""
  return CallError(f'invalid tool call: {getattr(error, "msg", error)}', text)


def check_json(*values: Any) -> None:
  """Raises ValueError if a value has no portable JSON; does not recurse.

  Not portable are NaN, infinite numbers, half of a surrogate pair, and values that are
  nested more than MAX_DEPTH deep.
  """
  for level in walk(*values):
    if any(isinstance(x, float) and not math.isfinite(x) for x in level):
      raise ValueError('a number is not finite: JSON has no NaN and no Infinity')
    if any(isinstance(x, str) and _SURROGATE.search(x) for x in level):
      raise ValueError('a text has half of a surrogate pair, which is no character')


def walk(*values: Any) -> Iterator[list[Any]]:
  """Yields the levels of JSON, including keys; raises ValueError below MAX_DEPTH."""
  level = [*values]
  for _ in range(MAX_DEPTH + 1):
    yield level
    level = [x for x in level if isinstance(x, dict | list)]
    if not level:
      return
    inner = ([*x, *x.values()] if isinstance(x, dict) else x for x in level)
    level = [*itertools.chain.from_iterable(inner)]
  raise ValueError(f'objects and arrays are nested more than {MAX_DEPTH} deep')


def list_names(schemas: Schemas) -> list[str]:
  """Returns the names of tools."""
  return [schema['function'].get('name', '') for schema in schemas]


def find_parameters(name: str, schemas: Schemas) -> Mapping[str, Any]:
  """Returns the schema of a tool's arguments; {} if there is no such tool."""
  functions = dict(zip(list_names(schemas), schemas, strict=True))
  function = functions[name]['function'] if name in functions else {}
  return function.get('parameters') or {}


def list_types(schema: Any) -> set[str]:
  """Returns the JSON types that a schema names; empty if it names none."""
  if not isinstance(schema, Mapping):
    return set()
  names = schema.get('type', ())
  type_names = {names} if isinstance(names, str) else set(names)
  type_names = type_names.union(*map(list_types, schema.get('anyOf', ())))
  return type_names | {'null'} if type_names and schema.get('nullable') else type_names


def find_text_argument(name: str, schemas: Schemas) -> str | None:
  """Returns the argument that a bare text means, or None.

  It is a string, and the tool's only required argument, or its only argument.
  """
  parameters = find_parameters(name, schemas)
  arguments = parameters.get('properties', {})
  names = parameters.get('required') or [*arguments]
  if len(names) == 1 and 'string' in list_types(arguments.get(names[0])):
    return names[0]
  return None


def to_arguments(value: Any, name: str, schemas: Schemas, label: str) -> dict[str, Any]:
  """Converts the arguments of a call to an object; errors call them `label`.

  An object may be encoded twice. A bare string is the argument of `find_text_argument`.

  Raises:
    ValueError: The value is neither.
  """
  if isinstance(value, str):
    try:
      inner = json.loads(value)
    except (ValueError, RecursionError):
      inner = None
    argument = find_text_argument(name, schemas)
    if isinstance(inner, dict):
      return inner
    if argument is not None:
      return {argument: value}
  if not isinstance(value, dict):
    raise ValueError(f'{label} must be a JSON object, with the arguments by their names')
  return value
