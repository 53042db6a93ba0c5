"""Parses the tool calls in a reply; `ToolEnv(parse=...)` takes any such function."""

import dataclasses
import json
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A well-formed call; the tool may not exist, and the arguments may not fit it."""

  name: str
  arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class CallError:
  """A call that cannot be parsed.

  Attributes:
    message: What is wrong, for the model.
    text: The text of the call.
  """

  message: str
  text: str


_TAG = re.compile(r'<think>|</think>|<tool_call>\s*')
_CLOSE = re.compile(r'\s*(?:</tool_call>|\Z)')
_BREAK = re.compile(r'</?tool_call>|</think>')
_DECODER = json.JSONDecoder()


def parse_hermes(reply: str) -> list[ToolCall | CallError]:
  """Parses each `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, in order.

  The JSON is scanned, so that '</tool_call>' inside a string does no harm. The closing
  tag may be missing at the end of the reply. A call in a closed thinking block does not
  count, even if the prompt opened the block; a call in an open block does, because
  generation may stop at a call. Never raises.
  """
  found: list[ToolCall | CallError] = []
  position = block = 0  # `block` is the number of calls before the thinking block.
  while tag := _TAG.search(reply, position):
    position = tag.end()
    if tag[0] == '<think>':
      block = len(found)
    elif tag[0] == '</think>':
      del found[block:]
    else:
      call, position = _parse_call(reply, position)
      found.append(call)
  return found


def _parse_call(reply: str, start: int) -> tuple[ToolCall | CallError, int]:
  """Parses the call whose JSON begins at `start`; also returns where the call ends."""
  try:
    value, end = _DECODER.raw_decode(reply, start)
    close = _CLOSE.match(reply, end)
    if not close:
      raise ValueError('expected </tool_call> after the JSON object')
    return _check_call(value), close.end()
  except (ValueError, RecursionError) as error:
    stop = _BREAK.search(reply, start)
    end = stop.start() if stop else len(reply)
    reason = getattr(error, 'msg', error)
    return CallError(f'invalid tool call: {reason}', reply[start:end]), end


def _check_call(value: Any) -> ToolCall:
  if not isinstance(value, dict):
    raise ValueError('expected a JSON object with "name" and "arguments"')
  name, arguments = value.get('name'), value.get('arguments', {})
  if not isinstance(name, str) or not name:
    raise ValueError('"name" must be the name of a tool')
  if not isinstance(arguments, dict):
    raise ValueError('"arguments" must be a JSON object')
  return ToolCall(name, arguments)
