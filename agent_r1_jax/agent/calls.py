"""Tool-call formats: a format is a function from a reply to the calls in it.

`ToolEnv(parse=...)` takes any such function.
"""

import dataclasses
import json
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A well-formed request; the tool may not exist, the arguments may not suit it."""

  name: str
  arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class CallError:
  """A request that cannot be read.

  Attributes:
    message: What is wrong, for the model to read.
    text: What the model wrote.
  """

  message: str
  text: str


_TAG = re.compile(r'<think>|</think>|<tool_call>\s*')
_CLOSE = re.compile(r'\s*(?:</tool_call>|\Z)')
_BREAK = re.compile(r'</?tool_call>|</think>')
_DECODER = json.JSONDecoder()


def parse_hermes(reply: str) -> list[ToolCall | CallError]:
  """Reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, in order.

  The JSON is scanned, so a literal '</tool_call>' inside a string does no harm. The
  closing tag may be missing at the reply's very end. What stands in a thinking block that
  was closed is a thought and no call, also where the prompt opened the block; in an
  unclosed block (generation may stop at a call) it counts. Never raises.
  """
  found: list[ToolCall | CallError] = []
  position = block = 0  # `block`: how many calls came before the thinking began.
  while tag := _TAG.search(reply, position):
    position = tag.end()
    if tag[0] == '<think>':
      block = len(found)
    elif tag[0] == '</think>':
      del found[block:]
    else:
      call, position = _read(reply, position)
      found.append(call)
  return found


def _read(reply: str, start: int) -> tuple[ToolCall | CallError, int]:
  """Reads the call whose JSON begins at `start`; also says where the call ends."""
  try:
    value, end = _DECODER.raw_decode(reply, start)
    close = _CLOSE.match(reply, end)
    if not close:
      raise ValueError('expected </tool_call> after the JSON object')
    return _call(value), close.end()
  except (ValueError, RecursionError) as error:
    stop = _BREAK.search(reply, start)
    end = stop.start() if stop else len(reply)
    reason = getattr(error, 'msg', error)
    return CallError(f'invalid tool call: {reason}', reply[start:end]), end


def _call(value: Any) -> ToolCall:
  if not isinstance(value, dict):
    raise ValueError('expected a JSON object with "name" and "arguments"')
  name, arguments = value.get('name'), value.get('arguments', {})
  if not isinstance(name, str) or not name:
    raise ValueError('"name" must be the name of a tool')
  if not isinstance(arguments, dict):
    raise ValueError('"arguments" must be a JSON object')
  return ToolCall(name, arguments)
