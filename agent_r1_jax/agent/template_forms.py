"""Finds which parts of tool use a chat template supports, and writes the rest as text.

Published templates differ. Some silently drop a reply's calls or tools' answers (Phi-4,
Gemma, OLMo 2); some take one call at a time (Llama 3.1), or need ids of nine letters and
digits (Mistral). Each template is tested once, with marked messages. What it does not
write becomes text: calls in the chat's format, answers in a user message.
"""

from collections.abc import Callable, Sequence
import re

from agent_r1_jax import types
from agent_r1_jax.agent import messages as messages_lib
from agent_r1_jax.agent.calls import CallFormat, ToolCall

ANSWER = types.ControlText('<tool_response>\n{}\n</tool_response>')
# OLMo 3's template calls the role 'environment'.
_ROLES = 'tool', 'environment'
_FIRST, _SECOND = 'qzfirstqz', 'qzsecondqz'
USER = {'role': 'user', 'content': 'x'}
_REPLY = {'role': 'assistant', 'content': 'x'}
SEEN = ToolCall('look', {'at': 'it'})
_SHORT_ID = re.compile('[a-zA-Z0-9]{9}')


def make_call(number: int = 0) -> types.Message:
  """Makes a call for a template to write."""
  function = {'name': SEEN.name, 'arguments': {**SEEN.arguments}}
  return {'id': make_id(number), 'type': 'function', 'function': function}


def make_answer(text: str, number: int = 0, role: str = 'tool') -> types.Message:
  """Makes the answer to the call with this number."""
  call = {'name': SEEN.name, 'tool_call_id': make_id(number)}
  return {'role': role, **call, 'content': text}


def make_id(number: int) -> str:
  """Makes the id of the call with this number in its reply."""
  return f'call{number:05}'


class TemplateForms:
  """Converts messages to the forms that one template writes.

  Attributes:
    answer_role: The role in which the template writes answers; None if they go into a
      user message.
  """

  def __init__(
    self, apply: Callable[[list[types.Message]], str], call_format: CallFormat
  ):
    """Tests a template; `apply` renders messages, or raises ValueError."""

    def try_(*messages) -> str:
      try:
        return apply([USER, *messages])
      except ValueError:
        return ''

    said = _FIRST, _SECOND
    tell = lambda role: try_(
      _REPLY, *(make_answer(x, i, role) for i, x in enumerate(said))
    )
    roles = [role for role in _ROLES if all(word in tell(role) for word in said)]
    self._format = call_format
    self.answer_role = roles[0] if roles and not call_format.answer else None
    if call_format.write:
      self.answer_role = 'tool'
    self._needs_ids = not try_(_REPLY, {'role': 'tool', 'content': 'x'})
    self._joins_users = not try_(USER)
    call = lambda count, text: {
      'role': 'assistant',
      'content': text,
      'tool_calls': [*map(make_call, range(count))],
    }
    found = [call_format.parse(try_(call(n, ''))).count(SEEN) for n in (1, 2)]
    self._max_calls = 0 if found[0] != 1 else 1 if found[1] != 2 else float('inf')
    self._keeps_text = _FIRST in try_(call(1, _FIRST))
    self._keeps_thoughts = _FIRST in try_({**_REPLY, 'reasoning_content': _FIRST})

  def write(self, messages: Sequence[types.Message]) -> list[types.Message]:
    """Converts messages to a form that the template writes; all contents are text."""
    if self._format.write:
      return self._format.write(messages)
    messages = [self.write_reply(m) if m['role'] == 'assistant' else m for m in messages]
    if self.answer_role is None:
      messages = messages_lib.join_answers(messages, self._format.answer or ANSWER)
    elif self._needs_ids or self.answer_role != 'tool':
      messages = self._name_answers(messages)
    if not self._joins_users:
      return messages
    joined: list[types.Message] = []
    for message in messages:
      if joined and message['role'] == 'user' == joined[-1]['role']:
        text = f'{joined.pop()["content"]}\n\n{message["content"]}'
        message = {**message, 'content': text}
      joined.append(message)
    return joined

  def write_reply(self, message: types.Message, as_text: bool = False) -> types.Message:
    """Writes as text what the template would drop from a reply, or everything."""
    message = dict(message)
    calls, text = message.pop('tool_calls', None) or [], message.get('content') or ''
    if as_text or not self._keeps_thoughts:
      thoughts = message.pop('reasoning_content', None)
      text = f'<think>\n{thoughts}\n</think>\n\n{text}' if thoughts else text
    fits = len(calls) <= self._max_calls and (self._keeps_text or not text)
    if calls and fits and not as_text:
      message['tool_calls'] = calls
    else:
      text = messages_lib.write_calls(text, calls, self._format)
    return {**message, 'content': text}

  def _name_answers(self, messages: Sequence[types.Message]) -> list[types.Message]:
    """Gives answers their role and their call's id, of nine characters."""
    named, ids, by_name, count = [], [], {}, 0
    for message in messages:
      if message['role'] == 'assistant':
        calls = message.get('tool_calls') or ()
        given, count = [str(call.get('id') or '') for call in calls], 0
        ids = [x if _SHORT_ID.fullmatch(x) else make_id(i) for i, x in enumerate(given)]
        by_name = {x: i for x, i in zip(given, ids, strict=True) if x}
        if calls:
          calls = [{**call, 'id': i} for call, i in zip(calls, ids, strict=True)]
          message = {**message, 'tool_calls': calls}
      elif message['role'] == 'tool':
        given = str(message.get('tool_call_id') or '')
        next_ = [given] if _SHORT_ID.fullmatch(given) else ids[count:]
        id_ = by_name.get(given) or (next_ or [make_id(count)])[0]
        name = {'role': self.answer_role, 'tool_call_id': id_}
        message, count = message | name, count + 1
      named.append(message)
    return named
