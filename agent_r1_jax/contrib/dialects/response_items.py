"""OpenAI's Responses: the items of a conversation, read and written.

A reply of the policy becomes up to three kinds of items: thoughts, a message, and tool
calls. Reading joins them to one reply again.
"""

from collections.abc import Iterable
from typing import Any

from agent_r1_jax.contrib.dialects import thinking
from agent_r1_jax.serve import call_arguments, replies


def _read_part(part: Any) -> dict[str, Any]:
  match part:
    case {'type': 'input_text' | 'output_text' | 'text', 'text': str(text)}:
      return {'type': 'text', 'text': text}
    case {'type': 'input_image', 'image_url': str(url)}:
      return {'type': 'image_url', 'image_url': {'url': url}}
  raise ValueError(
    'only texts and pictures in base64 are supported: {"type": "input_text", "text": '
    '...} or {"type": "input_image", "image_url": "data:image/png;base64,..."}'
  )


def _read_content(content: Any) -> str | list[dict[str, Any]]:
  if isinstance(content, str):
    return content
  if isinstance(content, list):
    return [_read_part(part) for part in content]
  raise ValueError('content must be a text or a list of parts')


def read_item(item: dict[str, Any]) -> dict[str, Any]:
  """Converts an item to a message of chat completions, or to a part of one ('more')."""
  match item:
    case {'role': 'assistant', 'content': content}:
      texts = _read_content(content)
      if not isinstance(texts, str):
        texts = '\n'.join(part.get('text', '') for part in texts)
      return {'role': 'assistant', 'content': texts, 'more': 'text'}
    case {'role': 'user' | 'system' | 'developer' as role, 'content': content}:
      return {'role': role, 'content': _read_content(content)}
    case {'type': 'function_call', 'name': str(name), 'arguments': str(arguments)}:
      function = {'name': name, 'arguments': arguments}
      call = {'id': item.get('call_id'), 'function': function}
      return {'role': 'assistant', 'content': '', 'tool_calls': [call], 'more': 'call'}
    case {'type': 'function_call_output', 'call_id': str(id_), 'output': output}:
      return {'role': 'tool', 'tool_call_id': id_, 'content': _read_content(output)}
    case {'type': 'reasoning', 'content': [*parts]}:
      texts = [part.get('text') for part in parts if isinstance(part, dict)]
      text = ''.join(text for text in texts if isinstance(text, str))
      text = thinking.join(text, item.get('status') != 'incomplete')
      return {'role': 'assistant', 'content': text, 'more': 'thinking'}
  raise ValueError(
    'only messages, calls of functions with their outputs, and reasoning with its '
    'content are supported'
  )


def join_replies(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
  """Joins the parts of each reply: thoughts, then a text, then calls.

  Changes the messages, which come from `read_item`.
  """
  result: list[dict[str, Any]] = []
  order = {'thinking': 0, 'text': 1, 'call': 2}
  last = None  # The kind of the previous part, if its reply may continue.
  for message in messages:
    kind = message.pop('more', None)
    if last and kind and (order[kind] > order[last] or kind == last == 'call'):
      result[-1]['content'] += message['content']
      result[-1].setdefault('tool_calls', []).extend(message.get('tool_calls', ()))
    else:
      result.append(message)
    last = kind
  return result


def start(kind: str) -> dict[str, Any]:
  """Writes the beginning of the policy's thoughts ('thinking') or answer ('text')."""
  if kind == 'thinking':
    content = [{'type': 'reasoning_text', 'text': ''}]
    return _start('reasoning', 'rs', 'in_progress') | {'summary': [], 'content': content}
  part = {'type': 'output_text', 'text': '', 'annotations': [], 'logprobs': []}
  item = _start('message', 'msg', 'in_progress')
  return item | {'role': 'assistant', 'content': [part]}


def write_call(name: str, arguments: Any) -> dict[str, Any]:
  """Writes a tool call."""
  fields = _start('function_call', 'fc', 'completed')
  return fields | {
    'call_id': f'call_{next(replies.numbers)}',
    'name': name,
    'arguments': call_arguments.write(arguments),
  }


def _start(kind: str, name: str, status: str) -> dict[str, Any]:
  return {'type': kind, 'id': f'{name}_{next(replies.numbers)}', 'status': status}
