"""Parses and writes the tool calls of each format in call_formats.FORMATS.

In a format with tags, sampling stops at the end tag of a call, so a call cannot contain
that tag.
"""

from collections.abc import Sequence
import json
import re
from typing import Any

from agent_r1_jax.agent import calls
from agent_r1_jax.agent.calls import Schemas, ToolCall

_DECODER = json.JSONDecoder()


class JsonParser:
  """Parses calls that are JSON objects, with a tool's name and its arguments."""

  def __init__(
    self,
    begin: str,
    close: str,
    keys: Sequence[str],
    *,
    end_tag: str = '',
    ignored: str = '',
  ):
    """Compiles the patterns.

    Args:
      begin: Matches the start of a call, up to the JSON or including its brace.
      close: Must match after the JSON.
      keys: Keys that may hold the arguments; the first is the documented one.
      end_tag: The name of the text that `close` matches, for errors.
      ignored: An additional key that is allowed and not read.
    """
    self._begin = re.compile(calls.THINK + begin)
    self._close = re.compile(close)
    # A malformed call ends with the thought that it is in, or where another call begins.
    self._stop = re.compile('|'.join(filter(None, ['</think>', begin, end_tag])))
    self._keys, self._end_tag, self._ignored = keys, end_tag, ignored

  def parse(self, reply: str, schemas: Schemas = ()) -> list[calls.Call]:
    """See calls.Parse."""
    return calls.scan(reply, self._begin, lambda tag: self._read(tag, schemas))

  def _read(self, tag: re.Match[str], schemas: Schemas) -> tuple[calls.Call, int]:
    reply, start = tag.string, tag.end() - (tag[0] == '{')
    try:
      value, end = _DECODER.raw_decode(reply, start)
      closed = self._close.match(reply, end)
      if not closed:
        raise ValueError(f'expected {self._end_tag} after the JSON object')
      return self._make_call(value, schemas), closed.end()
    except (ValueError, RecursionError) as error:
      text, end = _end_malformed(self._stop, reply, start, tag.end())
      return calls.make_error(error, text), end

  def _make_call(self, value: Any, schemas: Schemas) -> ToolCall:
    if not isinstance(value, dict):
      raise ValueError(f'expected a JSON object with "name" and "{self._keys[0]}"')
    name = value.get('name')
    if not isinstance(name, str) or not name:
      raise ValueError('"name" must be the name of a tool')
    key = next((key for key in self._keys if key in value), self._keys[0])
    unknown = [x for x in value if x not in ('name', key, self._ignored)]
    if unknown and value.get('type') == 'function':
      unknown.remove('type')  # OpenAI's form has it.
    if unknown:
      raise ValueError(
        f'unknown key {json.dumps(unknown[0])}; a call has "name" and "{self._keys[0]}"'
      )
    arguments = calls.to_arguments(value.get(key, {}), name, schemas, f'"{key}"')
    return ToolCall(name, arguments)


def write_json(call: ToolCall, key: str) -> str:
  """Writes a call as JSON, with its arguments under `key`."""
  return json.dumps({'name': call.name, key: call.arguments}, ensure_ascii=False)


def _end_malformed(
  stop: re.Pattern[str], reply: str, start: int, position: int
) -> tuple[str, int]:
  """Returns the text of a malformed call without its tags, and where the call ends.

  The call ends at the first match of `stop` after `position`, end tag included.
  """
  stopped = stop.search(reply, position)
  if not stopped:
    return reply[start:], len(reply)
  is_end_tag = stopped[0] == '</tool_call>'
  return reply[start : stopped.start()], stopped.end() if is_end_tag else stopped.start()


# The JSON is decoded, so '</tool_call>' may occur inside a string. The closing tag may be
# missing at the end of the reply.
HERMES = JsonParser(
  r'<tool_call>\s*',
  r'\s*(?:</tool_call>|\Z)',
  ('arguments', 'parameters'),
  end_tag='</tool_call>',
)
# Text may come before and between calls; JSON without a call's keys is an answer. A call
# may begin with '<|python_tag|>' and end with a semicolon.
LLAMA3 = JsonParser(
  r'<\|python_tag\|>\s*'
  r'|\{(?=\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,'
  r'\s*"(?:parameters|arguments)"\s*:)',
  r'\s*;?',
  ('parameters', 'arguments'),
)
# A list of calls, or its next call. A single object needs no list, and a call may have an
# "id".
MISTRAL = JsonParser(
  r'\[TOOL_CALLS\]\s*(?:\[\s*)?|(?<=\}),\s*(?=\{)',
  r'\s*\]?',
  ('arguments', 'parameters'),
  ignored='id',
)

# Some models write Python's words instead of JSON's.
_PYTHON_WORDS = {'True': 'true', 'False': 'false', 'None': 'null'}
_TYPES: dict[type, set[str]] = {
  str: {'string'},
  bool: {'boolean'},
  int: {'integer', 'number'},
  float: {'number'},
  list: {'array'},
  dict: {'object'},
  type(None): {'null'},
}


def _convert(text: str, schema: Any) -> Any:
  """Converts an argument's text to the type that its schema names.

  If the schema allows strings, the text is kept unless it is JSON of another allowed
  type. Text that is not JSON is kept too: the tool will report it if it needs another
  type.
  """
  allowed = calls.list_types(schema)
  word = text.strip()
  try:
    value = json.loads(_PYTHON_WORDS.get(word, word))
    list(calls.walk([value]))  # JSON that is nested too deeply is kept as text too.
  except (ValueError, RecursionError):
    return text
  as_text = isinstance(value, str) or not _TYPES[type(value)] & allowed
  return text if 'string' in allowed and as_text else value


_QWEN = re.compile(calls.THINK + r'(?:<tool_call>\s*)?<function=([^<>\n]*)>|<tool_call>')
_PARAMETER = re.compile(r'\s*<parameter=([^<>\n]*)>\n?')
# An unclosed parameter ends at the next parameter, at the end of the call, or at the end
# of the thought that it is in, so that it does not swallow the next call.
_VALUE_END = re.compile(
  r'\n?</parameter>(?=\s*(?:<parameter=|</function>|</?tool_call>|\Z))'
  r'|\n(?=<parameter=[^<>\n]*>)'
  r'|\n?(?=</function>\s*(?:</?tool_call>|<function=|\Z))'
  r'|\n?(?=</tool_call>\s*(?:<tool_call>|\Z))'
  r'|\n?(?=</think>|\Z)'
)
_QWEN_CLOSE = re.compile(
  r'\s*(?:</function>(?:\s*</tool_call>)?|</tool_call>|(?=<tool_call>)|\Z)'
)
_QWEN_STOP = re.compile(r'</?tool_call>|<function=[^<>\n]*>|</think>')


def parse_qwen3_coder(reply: str, schemas: Schemas = ()) -> list[calls.Call]:
  """Parses each `<function=NAME><parameter=NAME>value</parameter></function>`.

  The newlines around a value are not part of it. End tags and '<tool_call>' may be
  missing. A value may contain end tags, except in the positions that end a call.
  """

  def fail(tag, why, position):
    text, end = _end_malformed(_QWEN_STOP, reply, tag.start(), position)
    return calls.make_error(why, text), end

  def read(tag):
    if not tag[1]:
      return fail(tag, 'expected <function=the name> after <tool_call>', tag.end())
    properties = calls.find_parameters(tag[1], schemas).get('properties', {})
    arguments, position = {}, tag.end()
    while parameter := _PARAMETER.match(reply, position):
      end = _VALUE_END.search(reply, parameter.end())
      assert end  # It matches at least the end of the text.
      text = reply[parameter.end() : end.start()]
      arguments[parameter[1]] = _convert(text, properties.get(parameter[1]))
      position = end.end()
    close = _QWEN_CLOSE.match(reply, position)
    if not close:
      return fail(tag, 'expected <parameter=a name> or </function>', position)
    return ToolCall(tag[1], arguments), close.end()

  return calls.scan(reply, _QWEN, read)


def render_qwen3_coder(call: ToolCall) -> str:
  """Writes a call in the form that `parse_qwen3_coder` reads."""
  text = lambda value: (
    value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
  )
  lines = [
    f'<parameter={name}>\n{text(value)}\n</parameter>\n'
    for name, value in call.arguments.items()
  ]
  return f'<tool_call>\n<function={call.name}>\n{"".join(lines)}</function>\n</tool_call>'


_SEARCH = re.compile(calls.THINK + '<search>|<answer>')
_SEARCH_END = re.compile(r'</search>|(?=<search>|<answer>|</?think>)|\Z')


def parse_search_r1(reply: str, schemas: Schemas = ()) -> list[calls.Call]:
  """Parses each `<search>text</search>` before an `<answer>`."""

  def read(tag):
    if tag[0] == '<answer>':
      return None, tag.end()
    end = _SEARCH_END.search(reply, tag.end())
    assert end
    text = reply[tag.end() : end.start()]
    if not end[0] and end.end() < len(reply):
      return calls.make_error('expected </search> after the query', text), end.end()
    argument = calls.find_text_argument('search', schemas) or 'query'
    return ToolCall('search', {argument: text.strip()}), end.end()

  return calls.scan(reply, _SEARCH, read)


_CODE = re.compile(calls.THINK + '<code>|<answer>')
_FENCE = re.compile(r'\s*```[\w+-]*[ \t]*\n')
_FENCED_END = re.compile(r'\n[ \t]*```\s*(?:</code>|\Z)|</code>\s*\Z|(?=</think>)|\Z')
_CODE_END = re.compile(r'</code>|(?=</think>)|\Z')


def parse_retool(reply: str, schemas: Schemas = ()) -> list[calls.Call]:
  """Parses each `<code>...</code>` before an `<answer>`, with or without a fence."""

  def read(tag):
    if tag[0] == '<answer>':
      return None, tag.end()
    fence = _FENCE.match(reply, tag.end())
    start = fence.end() if fence else tag.end()
    end = (_FENCED_END if fence else _CODE_END).search(reply, start)
    assert end
    argument = calls.find_text_argument('python', schemas) or 'code'
    code = reply[start : end.start()].strip('\n').rstrip()
    return ToolCall('python', {argument: code}), end.end()

  return calls.scan(reply, _CODE, read)


_LINE = r'^[ \t]*'
_ACTION = re.compile(
  rf'{calls.THINK}{_LINE}Action[ \t]*:([^\n]*)|{_LINE}Final Answer[ \t]*:', re.MULTILINE
)
_IN_BRACKETS = re.compile(r'([\w.-]+)\[(.*)\]\Z')
_INPUT = re.compile(r'\s*Action Input[ \t]*:')
_INPUT_END = re.compile(
  rf'{_LINE}(?:Thought|Action|Action Input|Observation|Final Answer)[ \t]*:|</think>|\Z',
  re.MULTILINE,
)


def parse_react(reply: str, schemas: Schemas = ()) -> list[calls.Call]:
  """Parses each line `Action: NAME` with its `Action Input:`, or `Action: NAME[text]`.

  `Final Answer:` ends the episode, as does the ReAct paper's action `Finish`, unless
  there is a tool of that name.
  """

  def read(tag):
    if tag[1] is None:
      return None, tag.end()
    name, text, end = tag[1].strip().strip('`"\''), '', tag.end()
    if brackets := _IN_BRACKETS.match(name):
      name, text = brackets.groups()
    elif action_input := _INPUT.match(reply, end):
      stop = _INPUT_END.search(reply, action_input.end())
      assert stop
      text, end = reply[action_input.end() : stop.start()].strip(), stop.start()
    if name.lower() == 'finish' and name not in calls.list_names(schemas):
      return None, end
    try:
      if not name:
        raise ValueError('expected the name of a tool after Action:')
      return ToolCall(name, _read_input(text, name, schemas)), end
    except (ValueError, RecursionError) as error:
      return calls.make_error(error, reply[tag.start() : end].strip()), end

  return calls.scan(reply, _ACTION, read)


def _read_input(text: str, name: str, schemas: Schemas) -> dict[str, Any]:
  """Reads the input of a ReAct action: an object, or text for the only argument."""
  if not text:
    return {}
  try:
    value = json.loads(text)
  except ValueError:
    if text.startswith('{'):
      raise
    value = text
  # Other JSON, such as a number, is kept as the text that was written.
  value = value if isinstance(value, dict | str) else text
  return calls.to_arguments(value, name, schemas, 'Action Input')


def get_only_argument(call: ToolCall) -> Any:
  """Returns the only argument of a call."""
  (value,) = call.arguments.values()
  return value
