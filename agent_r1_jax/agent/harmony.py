"""Harmony, gpt-oss's format of thoughts, calls and answers: messages in channels.

A reply is one or several messages:

  <|channel|>analysis<|message|>a thought<|end|><|start|>assistant
  <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

  <|channel|>final<|message|>the answer<|return|>

without the line breaks. The recipient of a call may also come before its channel. A call
ends the reply, so there is at most one.

The published chat template takes thoughts and calls in separate fields, one call per
message, and rejects a tool's answer without a call before it. `write` makes messages in
that form. Published template: openai/gpt-oss-20b; the format:
https://cookbook.openai.com/articles/openai-harmony.
"""

from collections.abc import Sequence
import dataclasses
import json
import re
from typing import NamedTuple

from agent_r1_jax import types
from agent_r1_jax.agent import calls

_BEGIN = re.compile(r'<\|channel\|>([^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>')
_END = re.compile(r'<\|(?:end|call|return|start|channel)\|>')
_RECIPIENT = re.compile(r'\bto=(?:functions\.)?([^\s<]+)')
# The maximum length of the header before a channel: the role, and perhaps a recipient.
_HEADER = 200
# The argument of an invented call; its value is the text of the reply that had no call.
_SAID = 'said'


class Part(NamedTuple):
  """A message of a reply; `recipient` is '' if it is not a call."""

  channel: str
  recipient: str
  text: str
  begin: int
  end: int


def split(reply: str) -> list[Part]:
  """Splits a reply into its messages; returns [] for a reply without channels."""
  parts, position = [], 0
  while begin := _BEGIN.search(reply, position):
    end = _END.search(reply, begin.end())
    position = end.start() if end else len(reply)
    before = reply[max(0, begin.start() - _HEADER) : begin.start()]
    header = before.rpartition('|>')[2] + ' ' + begin[1]
    recipient = _RECIPIENT.search(header)
    channel = begin[1].split()[0] if begin[1].split() else ''
    text = reply[begin.end() : position]
    name = recipient[1] if recipient else ''
    parts.append(Part(channel, name, text, begin.start(), position))
  return parts


def parse(reply: str, schemas: calls.Schemas = ()) -> list[calls.Call]:
  """Parses the calls of a reply; see calls.Parse."""
  found, malformed = [], 0
  for part in split(reply):
    if part.recipient in ('', 'assistant') or malformed == calls.MAX_MALFORMED:
      continue
    call = _parse_call(part.recipient, part.text, schemas)
    malformed += isinstance(call, calls.CallError)
    found.append(dataclasses.replace(call, begin=part.begin, end=part.end))
  return found


def _parse_call(name: str, text: str, schemas: calls.Schemas) -> calls.Call:
  try:
    value = json.loads(text) if text.strip() else {}
    arguments = calls.to_arguments(value, name, schemas, 'the message of a call')
    calls.check_json(name, arguments)
  except (ValueError, RecursionError) as error:
    return calls.make_error(error, text)
  return calls.ToolCall(name, arguments)


def render(call: calls.ToolCall) -> str:
  """Writes a call as the model does, without its end token."""
  arguments = json.dumps(call.arguments, ensure_ascii=False)
  header = f'commentary to=functions.{call.name} <|constrain|>json'
  return f'<|channel|>{header}<|message|>{arguments}'


def frame(text: str) -> str:
  """Puts a text into the final channel, unless it has channels."""
  return text if split(text) else f'<|channel|>final<|message|>{text}'


def write(messages: Sequence[types.Message]) -> list[types.Message]:
  """Converts messages to the form that the published template takes."""
  written: list[types.Message] = []
  for message in messages:
    if message['role'] == 'assistant':
      written += _write_reply(message)
    elif message['role'] == 'tool':
      _place_answer(written, message)
    else:
      written.append(message)
  return written


def _write_reply(message: types.Message) -> list[types.Message]:
  """Moves the thoughts and calls of a reply to the fields that the template reads."""
  text, thoughts = message.get('content') or '', message.get('reasoning_content') or ''
  made = [*(message.get('tool_calls') or ())]
  if parts := split(text):
    said = lambda channel: '\n'.join(
      part.text for part in parts if part.channel == channel and not part.recipient
    )
    thoughts = '\n'.join(filter(None, [thoughts, said('analysis'), said('commentary')]))
    made += [_make_call(x) for x in parse(text) if isinstance(x, calls.ToolCall)]
    text = said('final')
  if not made:
    return [{'role': 'assistant', 'content': text} | _think(thoughts)]
  # A message with a call can have one text, its thought.
  beside = _think('\n'.join(filter(None, [thoughts, text])))
  replies = [{'role': 'assistant', 'content': '', 'tool_calls': [call]} for call in made]
  return [replies[0] | beside, *replies[1:]]


def _think(thoughts: str) -> types.Message:
  return {'thinking': thoughts} if thoughts else {}


def _make_call(call: calls.ToolCall) -> types.Message:
  function = {'name': call.name, 'arguments': call.arguments}
  return {'type': 'function', 'function': function}


def _place_answer(written: list[types.Message], answer: types.Message) -> None:
  """Inserts an answer after its call: by id, by name, or after the first unanswered."""
  begin = len(written)
  while begin and (written[begin - 1]['role'] == 'tool' or _get_call(written[begin - 1])):
    begin -= 1
  waiting = [
    i
    for i in range(begin, len(written))
    if _get_call(written[i])
    and (i + 1 == len(written) or written[i + 1]['role'] != 'tool')
  ]
  if waiting:
    fits = lambda i: (
      (_get_call(written[i]).get('id') or '') == answer.get('tool_call_id'),
      _get_call(written[i])['function']['name'] == answer.get('name'),
    )
    written.insert(max(waiting, key=lambda i: (*fits(i), -i)) + 1, answer)
    return
  if written and written[-1]['role'] == 'assistant':
    # The template needs a call to name the answer's tool, and its call is unknown.
    said = {_SAID: written.pop()['content']}
    call = _make_call(calls.ToolCall(answer.get('name') or 'tool', said))
    written.append({'role': 'assistant', 'content': '', 'tool_calls': [call]})
  written.append(answer)


def _get_call(message: types.Message) -> types.Message:
  """Returns the call of a message that `_write_reply` made; {} if there is none."""
  return (message.get('tool_calls') or [{}])[0]
