"""Checks, cuts and joins messages before a chat template renders them."""

from collections.abc import Callable, Mapping, Sequence
import itertools
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent import calls as calls_lib
from agent_r1_jax.agent import pictures

_ROLES = 'system', 'developer', 'user', 'assistant', 'tool'
CUT = '\n[output cut]'


def check(message: types.Message) -> types.Message:
  """Returns the message, or raises ValueError for a wrong role or content.

  An assistant message with calls or thoughts may lack content, which becomes ''. The
  arguments of its calls become objects if they are JSON strings.
  """
  if not isinstance(message, Mapping) or not isinstance(message.get('role'), str):
    raise ValueError(
      f"{message!r:.200} is no message: give {{'role': 'user', 'content': 'the text'}}."
    )
  if message['role'] not in _ROLES:
    raise ValueError(
      f'{message!r:.200} has the role {message["role"]!r:.40}; give one of {_ROLES}.'
    )
  content, is_reply = message.get('content'), message['role'] == 'assistant'
  calls = message.get('tool_calls') or () if is_reply else ()
  calls = calls if isinstance(calls, list | tuple) else [calls]
  thoughts, problem = message.get('reasoning_content') if is_reply else None, ''
  has_more = calls or thoughts
  if not isinstance(content, str | list) and (content is not None or not has_more):
    problem = 'no content' if content is None else f'a content of {type(content)}'
  elif not isinstance(thoughts, str | None):
    problem = f'a reasoning_content of {type(thoughts)}'
  if problem:
    raise ValueError(
      f'a message of role {message["role"]!r} has {problem}; it must be a string: '
      f'{dict(message)!r:.200}'
    )
  if not has_more:
    return message
  read = {'tool_calls': [*map(_read_call, calls)]} if calls else {}
  return {**message, 'content': content or '', **read}


def write_text(
  message: types.Message,
  cut: Callable[[str], str] = lambda text: text,
  form: pictures.Form = pictures.QWEN,
) -> types.Message:
  """Checks a message and converts its content to text; `cut` shortens tools' answers.

  `form` says what stands for pictures.

  Raises:
    ValueError: See `check`; or a part of the content is neither text nor a picture.
  """
  message = check(message)
  if message['role'] != 'tool':
    return pictures.write_places(message, form=form)
  content = message['content']
  if not isinstance(content, str) and not pictures.find_addresses(message):
    raise ValueError(
      f"a tool message's content must be a string or have pictures: {content!r:.80}."
    )
  return pictures.write_places(message, cut, form)


def last_reply(messages: Sequence[types.Message]) -> str:
  """Returns the agent's last message; '' without one."""
  replies = (m['content'] for m in reversed(messages) if m['role'] == 'assistant')
  return next(replies, '')


def _read_call(call: Any) -> types.Message:
  try:
    function = call['function']
    name, arguments = function['name'], function.get('arguments') or {}
    if not isinstance(name, str):
      raise ValueError('its name is no text')
    arguments = calls_lib.to_arguments(arguments, name, (), '"arguments"')
    calls_lib.check_json(name, arguments)
  except (LookupError, TypeError, AttributeError, ValueError) as error:
    raise ValueError(
      f'{call!r:.200} is no call of a tool ({error}): give {{"type": "function", '
      '"function": {"name": ..., "arguments": {an object, or its JSON}}}.'
    ) from None
  return {**call, 'function': {**function, 'arguments': arguments}}


def write_calls(
  text: str, calls: Sequence[types.Message], call_format: calls_lib.CallFormat
) -> str:
  """Adds calls to the text of a reply, as a model writes them in a format."""
  functions = [call['function'] for call in calls]
  written = [
    call_format.render(calls_lib.ToolCall(f['name'], f['arguments'])) for f in functions
  ]
  return '\n'.join([text, *written]).lstrip('\n') if written else text


class ToolOutputLimit:
  """Cuts tools' answers to their first tokens."""

  def __init__(
    self,
    max_tokens: int,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
  ):
    """Takes an answer's maximum tokens, and a tokenizer's functions for plain text."""
    self._max_tokens, self._encode, self._decode = max_tokens, encode, decode
    self._max_head_tokens = max_tokens - len(encode(CUT))
    if self._max_head_tokens < 1:
      raise ValueError(f'max_tool_tokens={max_tokens} has no room for {CUT!r}.')

  def cut(self, text: str) -> str:
    """Cuts a text.

    Encodes only the first 32 characters per allowed token, so that 10 MB cost no more
    than 10 kB.
    """
    head = text[: 32 * self._max_tokens]
    ids = self._encode(head)
    if len(head) == len(text) and len(ids) <= self._max_tokens:
      return text
    head = self._decode(ids[: self._max_head_tokens])
    # An incomplete character at the end decodes to the replacement character.
    return head.rstrip('\ufffd') + CUT


def join_answers(
  messages: Sequence[types.Message], form: types.ControlText
) -> list[types.Message]:
  """Joins consecutive answers of tools in one user message."""
  joined = []
  for is_answer, some in itertools.groupby(messages, lambda m: m['role'] == 'tool'):
    if is_answer:
      texts = [form.format(message['content']) for message in some]
      lines = types.ControlText('\n'.join(['{}'] * len(texts)))
      some = [{'role': 'user', 'content': lines.format(*texts)}]
    joined += some
  return joined
