"""Gemma 4's tool calls, which have their own quoting, and its chat template's turns.

  <|channel>thought
  a thought<channel|><|tool_call>call:NAME{key:<|"|>a text<|"|>,n:3}<tool_call|>
  <|tool_response>response:NAME{value:<|"|>what it answered<|"|>}<tool_response|>

without the line breaks between them. A call and its answer are in one turn: the model
ends a reply with the token that begins an answer, or with the end of its turn. Strings
are quoted by a token and have no escapes; keys have no quotes.

The published template takes calls and answers in OpenAI's form, and drops a tool's answer
without a call before it. `write` makes messages in that form. The format:
https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4.
"""

from collections.abc import Sequence
import json
import re
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent import calls

QUOTE, CLOSE = '<|"|>', '<tool_call|>'
ANSWER = '<|tool_response>'
_BEGIN = re.compile(
  calls.THINK + r'<\|channel>thought|<channel\|>|<\|tool_call>(?:call:([^\s{<]*))?'
)
_STOP = re.compile(r'<\|?tool_call\|?>|</think>|<channel\|>')
_KEY = re.compile(r'\s*(?:<\|"\|>(.*?)<\|"\|>|([^\s:{}\[\],<]+))\s*:\s*', re.DOTALL)
_TEXT = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
_NUMBER = re.compile(r'-?\d+(\.\d+)?([eE][+-]?\d+)?(?![\w.])')
_WORDS = {'true': True, 'false': False, 'null': None}
_WORDS |= {'True': True, 'False': False, 'None': None}
_WORD = re.compile('|'.join(rf'{word}\b' for word in _WORDS))
_SPACE = re.compile(r'\s*')
_THOUGHT = re.compile(r'<\|channel>thought\n?(.*?)(?:<channel\|>|\Z)', re.DOTALL)


def parse(reply: str, schemas: calls.Schemas = ()) -> list[calls.Call]:
  """Parses the calls of a reply; see calls.Parse."""

  def read(tag: re.Match[str]) -> tuple[calls.Call, int]:
    try:
      if not tag[1]:
        raise ValueError('expected call:, the name of a tool and its arguments')
      arguments, end = _read_object(reply, tag.end(), 1)
    except ValueError as error:
      stop = _STOP.search(reply, tag.end())
      end = stop.start() if stop else len(reply)
      after = stop.end() if stop and stop[0] == CLOSE else end
      return calls.make_error(error, reply[tag.start() : end]), after
    close = reply.startswith(CLOSE, end)
    return calls.ToolCall(tag[1], arguments), end + len(CLOSE) * close

  return calls.scan(reply, _BEGIN, read)


def _read_value(text: str, at: int, depth: int) -> tuple[Any, int]:
  """Reads a value; returns it and where it ends."""
  if found := _TEXT.match(text, at):
    return found[1], found.end()
  if found := _NUMBER.match(text, at):
    number = json.loads(found[0]) if len(found[0]) < 400 else found[0]
    return number, found.end()
  if found := _WORD.match(text, at):
    return _WORDS[found[0]], found.end()
  if text.startswith('{', at):
    return _read_object(text, at, depth)
  if not text.startswith('[', at):
    raise ValueError(
      f'expected a value at {text[at : at + 20]!r}; quote texts by {QUOTE}'
    )
  values, at = [], _skip(text, _enter(at, depth))
  while not text.startswith(']', at):
    value, at = _read_value(text, at, depth + 1)
    values.append(value)
    at = _read_comma(text, at, ']')
  return values, at + 1


def _read_object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
  if not text.startswith('{', at):
    raise ValueError('expected { before the arguments')
  values, at = {}, _skip(text, _enter(at, depth))
  while not text.startswith('}', at):
    key = _KEY.match(text, at)
    if not key:
      raise ValueError(f'expected a name and : at {text[at : at + 20]!r}')
    name = key[2] if key[1] is None else key[1]
    values[name], at = _read_value(text, key.end(), depth + 1)
    at = _read_comma(text, at, '}')
  return values, at + 1


def _enter(at: int, depth: int) -> int:
  if depth > calls.MAX_DEPTH:
    raise ValueError(f'objects and arrays are nested more than {calls.MAX_DEPTH} deep')
  return at + 1


def _skip(text: str, at: int) -> int:
  found = _SPACE.match(text, at)
  return found.end() if found else at


def _read_comma(text: str, at: int, close: str) -> int:
  at = _skip(text, at)
  if text.startswith(',', at):
    return _skip(text, at + 1)
  if not text.startswith(close, at):
    raise ValueError(f'expected , or {close} at {text[at : at + 20]!r}')
  return at


def render(call: calls.ToolCall) -> str:
  """Writes a call as the template does."""
  return f'<|tool_call>call:{call.name}{_write(call.arguments)}{CLOSE}'


def _write(value: Any) -> str:
  if isinstance(value, str):
    return f'{QUOTE}{value}{QUOTE}'
  if isinstance(value, bool):
    return 'true' if value else 'false'
  if isinstance(value, dict):
    ordered = sorted(value.items(), key=lambda item: item[0].lower())
    return '{' + ','.join(f'{key}:{_write(x)}' for key, x in ordered) + '}'
  if isinstance(value, list | tuple):
    return '[' + ','.join(map(_write, value)) + ']'
  return str(value)


def write(messages: Sequence[types.Message]) -> list[types.Message]:
  """Converts messages to the form that the published template takes."""
  written: list[types.Message] = []
  for message in messages:
    if message['role'] == 'assistant':
      message = _write_reply(message)
    elif message['role'] == 'tool':
      message = _name_call(written, message)
    written.append(message)
  return written


def _write_reply(message: types.Message) -> types.Message:
  """Moves the thoughts and calls of a reply to the fields that the template reads."""
  text, made = message.get('content') or '', [*(message.get('tool_calls') or ())]
  thoughts = [message.get('reasoning_content') or '', *_THOUGHT.findall(text)]
  found = parse(text)
  if found and all(isinstance(call, calls.ToolCall) for call in found):
    for call in reversed(found):
      text = text[: call.begin] + text[call.end :]
    made += [_make_call(x.name, x.arguments) for x in found]  # pyright: ignore
  made = [{**call, 'id': call.get('id') or f'call{i}'} for i, call in enumerate(made)]
  text = _THOUGHT.sub('', text).strip()
  if made:  # The template would write the text after the answers.
    thoughts, text = [*thoughts, text], ''
  thought = '\n'.join(filter(None, map(str.strip, thoughts)))
  reply = {**message, 'content': text, 'tool_calls': made}
  return reply | {'reasoning_content': thought}


def _make_call(name: str, arguments: Any) -> types.Message:
  return {'type': 'function', 'function': {'name': name, 'arguments': arguments}}


def _name_call(written: list[types.Message], answer: types.Message) -> types.Message:
  """Gives an answer the id and name of its call, found by id, else by position."""
  begin = len(written)
  while begin and written[begin - 1]['role'] == 'tool':
    begin -= 1
  if not begin or written[begin - 1]['role'] != 'assistant':
    return answer
  made: Any = written[begin - 1].get('tool_calls')
  if not made:
    # The template needs a call to name the answer's tool, and its call is unknown.
    name, said = answer.get('name') or 'tool', written[begin - 1]['content']
    call = _make_call(name, said) | {'id': 'call0'}
    written[begin - 1] = {**written[begin - 1], 'content': '', 'tool_calls': [call]}
    made = [call]
  number = len(written) - begin
  fits = lambda call: call['id'] == answer.get('tool_call_id')
  call = next(filter(fits, made), made[min(number, len(made) - 1)])
  return {**answer, 'tool_call_id': call['id'], 'name': call['function']['name']}
