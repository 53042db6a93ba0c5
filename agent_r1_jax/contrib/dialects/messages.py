"""Anthropic's Messages: how requests are read and answers written."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from agent_r1_jax.contrib.dialects import thinking
from agent_r1_jax.serve import call_arguments, replies, requests
from agent_r1_jax.serve import dialect as dialect_lib
from agent_r1_jax.web import http

_KINDS = {
  401: 'authentication_error',
  404: 'not_found_error',
  410: 'not_found_error',
  413: 'request_too_large',
  429: 'rate_limit_error',
  503: 'overloaded_error',
  504: 'timeout_error',
}
_REASONS = {'stop': 'end_turn', 'tool_calls': 'tool_use', 'length': 'max_tokens'}
# The signature of a thinking block whose end was not sampled.
_CUT = 'cut'


def _read_part(block: Any) -> dict[str, Any]:
  match block:
    case {'type': 'text', 'text': str(text)}:
      return {'type': 'text', 'text': text}
    case {
      'type': 'image',
      'source': {'type': 'base64', 'media_type': str(kind), 'data': str(data)},
    }:
      url = f'data:{kind};base64,{data}'
      return {'type': 'image_url', 'image_url': {'url': url}}
  raise ValueError(
    'only texts and pictures in base64 are supported here: {"type": "text", "text": ...} '
    'or {"type": "image", "source": {"type": "base64", "media_type": ..., "data": ...}}'
  )


def _read_content(content: Any) -> str | list[dict[str, Any]]:
  if content is None or isinstance(content, str):
    return content or ''
  if isinstance(content, list):
    return [_read_part(block) for block in content]
  raise ValueError('content must be a text or a list of blocks')


def _read_user(content: Any) -> list[dict[str, Any]]:
  """Reads a user message; each tool result becomes a message of its own."""
  if not isinstance(content, list):
    return [{'role': 'user', 'content': _read_content(content)}]
  result: list[dict[str, Any]] = []
  for block in content:
    match block:
      case {'type': 'tool_result', 'tool_use_id': str(id_)}:
        said = _read_content(block.get('content'))
        result.append({'role': 'tool', 'tool_call_id': id_, 'content': said})
      case _:
        if not result or result[-1]['role'] != 'user':
          result.append({'role': 'user', 'content': []})
        result[-1]['content'].append(_read_part(block))
  return result


def _read_assistant(content: Any) -> dict[str, Any]:
  if not isinstance(content, list):
    return {'role': 'assistant', 'content': _read_content(content)}
  thoughts, texts, calls = '', [], []
  for block in content:
    match block:
      case {'type': 'text', 'text': str(text)}:
        texts.append(text)
      case {'type': 'thinking', 'thinking': str(text)}:
        thoughts += thinking.join(text, block.get('signature') != _CUT)
      case {'type': 'tool_use', 'name': str(name), 'input': dict(given)}:
        function = {'name': name, 'arguments': json.dumps(given)}
        calls.append({'id': block.get('id'), 'function': function})
      case _:
        raise ValueError(
          'only blocks of the types text, thinking and tool_use (with name and input) '
          'are supported in a reply'
        )
  text = thoughts + '\n'.join(texts)
  return {'role': 'assistant', 'content': text, 'tool_calls': calls}


def _read_message(message: dict[str, Any]) -> list[dict[str, Any]]:
  """Converts a message to messages of chat completions."""
  match message:
    case {'role': 'user', 'content': content}:
      return _read_user(content)
    case {'role': 'assistant', 'content': content}:
      return [_read_assistant(content)]
    case {'role': 'system', 'content': content}:
      return [{'role': 'system', 'content': _read_content(content)}]
  raise ValueError('give {"role": "user" or "assistant", "content": ...}')


def _read_tool(tool: dict[str, Any]) -> dict[str, Any]:
  match tool:
    case {'name': str(name), 'input_schema': dict(schema)} if (
      tool.get('type') or 'custom'
    ) == 'custom':
      about = {'description': tool['description']} if tool.get('description') else {}
      function = {'name': name} | about | {'parameters': schema}
      return {'type': 'function', 'function': function}
  raise ValueError(
    'only tools of the client are supported: '
    '{"name": ..., "description": ..., "input_schema": {a JSON schema}}'
  )


def _read_tool_choice(choice: dict[str, Any]) -> dict[str, Any]:
  """Converts tool_choice to fields of chat completions."""
  match choice:
    case {'type': 'auto' | 'none' as kind}:
      named = kind
    case {'type': 'any'}:
      named = 'required'
    case {'type': 'tool', 'name': str(name)}:
      named = {'type': 'function', 'function': {'name': name}}
    case _:
      raise ValueError(
        'give {"type": "auto"}, {"type": "any"}, {"type": "none"} or '
        '{"type": "tool", "name": ...}'
      )
  parallel = not choice.get('disable_parallel_tool_use')
  return {'tool_choice': named, 'parallel_tool_calls': parallel}


def _read_thinking(config: dict[str, Any]) -> bool:
  match config:
    case {'type': 'enabled' | 'adaptive' | 'disabled' as kind}:
      tokens = config.get('budget_tokens', 1)
      if type(tokens) is not int or tokens < 1:
        raise ValueError(f'budget_tokens is {tokens!r:.80}; it must be at least 1')
      return kind != 'disabled'
  raise ValueError('its type must be enabled, adaptive or disabled')


def _read_output(config: dict[str, Any]) -> dict[str, Any] | None:
  match config.get('format'):
    case None:
      return None
    case {'type': 'json_schema', 'schema': dict(schema)}:
      return {'type': 'json_schema', 'json_schema': {'schema': schema}}
  raise ValueError('its format must be {"type": "json_schema", "schema": {...}}')


_Object = dict[str, Any]


class _MessagesBody(requests.Body):
  """The fields of Messages that chat completions lack; the others are shared.

  Each message has become a list of messages of chat completions.
  """

  max_tokens: int
  messages: Annotated[
    list[Annotated[_Object, AfterValidator(_read_message)]],
    Field(min_length=1, fail_fast=True),
  ]
  system: Annotated[str | list[Any] | None, AfterValidator(_read_content)] = None
  tools: Annotated[
    list[Annotated[_Object, AfterValidator(_read_tool)]], Field(fail_fast=True)
  ] = []
  tool_choice: Annotated[_Object, AfterValidator(_read_tool_choice)] = {}
  stop_sequences: list[str] = Field([], max_length=16)
  thinking: Annotated[_Object, AfterValidator(_read_thinking)] | None = None
  output_config: Annotated[_Object, AfterValidator(_read_output)] | None = None
  container: requests.Unsupported = None
  mcp_servers: requests.Unsupported = None
  context_management: requests.Unsupported = None
  n: requests.Unsupported = None


# The shared fields.
_SAME = 'model', 'max_tokens', 'temperature', 'top_k', 'top_p', 'min_p', 'seed', 'stream'


class _Messages(dialect_lib.Dialect):
  path = '/v1/messages'
  count_path = '/v1/messages/count_tokens'

  def read(self, fields, memory, counts=False):
    """Reads a request, and converts it to chat completions."""
    body = http.check_fields(
      _MessagesBody, fields | ({'max_tokens': 1} if counts else {})
    )
    messages: list[Any] = [message for some in body.messages for message in some]
    if body.system:
      messages.insert(0, {'role': 'system', 'content': body.system})
    chat = {name: fields[name] for name in _SAME if name in fields}
    chat |= {'messages': messages, 'tools': body.tools, 'stop': body.stop_sequences}
    chat |= body.tool_choice
    last: Any = body.messages[-1]
    chat['continue_final_message'] = bool(last) and last[-1]['role'] == 'assistant'
    if body.output_config is not None:
      chat['response_format'] = body.output_config
    return dialect_lib.Asked(http.check_fields(requests.ChatRequest, chat), body)

  def stream(self, head: dialect_lib.Head) -> dialect_lib.EventStream:
    """Begins a stream of blocks."""
    return _MessagesStream(head)

  def describe(self, error: http.RefusedError) -> dict[str, Any]:
    """Writes an error in the form of Anthropic's API."""
    other = 'api_error' if error.status >= 500 else 'invalid_request_error'
    kind = _KINDS.get(error.status, other)
    return {'type': 'error', 'error': {'type': kind, 'message': str(error)}}

  def write_count(self, tokens: int) -> dict[str, Any]:
    """Writes the token count of a request."""
    return {'input_tokens': tokens}


def _write_end(reply: replies.Reply) -> dict[str, Any]:
  reason = _REASONS[reply.reason]
  if reply.stop is not None and reason == 'end_turn':
    reason = 'stop_sequence'
  stop = reply.stop if reason == 'stop_sequence' else None
  return {'stop_reason': reason, 'stop_sequence': stop}


class _MessagesStream(dialect_lib.EventStream):
  """The events of one message."""

  def __init__(self, head: dialect_lib.Head):
    self._head = head
    self._split = thinking.Split(bool(head.asked.body.thinking))
    # The blocks so far; the kind of the last one while it is open.
    self._content: list[dict[str, Any]] = []
    self._open: str | None = None
    self._end: dict[str, Any] = {'stop_reason': None, 'stop_sequence': None}

  def begin(self):
    return [_event('message_start', message=self.write(0))]

  def add(self, part: dialect_lib.ReplyPart):
    events = []
    for kind, text in self._split.add(part.text, part.reply is not None):
      if kind != self._open:
        signed = {'signature': ''} if kind == 'thinking' else {}
        events += [*self._close(), self._start(kind, {kind: ''} | signed)]
      if text:
        self._content[-1][kind] += text
        events.append(self._delta(f'{kind}_delta', {kind: text}))
    if part.reply:
      events += self._close()
      self._end = _write_end(part.reply)
      for name, arguments in part.reply.calls:
        id_, given = (
          f'toolu_{next(replies.numbers)}',
          call_arguments.make_object(arguments),
        )
        events.append(self._start('tool_use', {'id': id_, 'name': name, 'input': {}}))
        self._content[-1]['input'] = given
        text = {'partial_json': json.dumps(given)}
        events += [self._delta('input_json_delta', text), *self._close()]
    return events

  def finish(self, sampled: int):
    usage = {'output_tokens': sampled}
    return [
      _event('message_delta', delta=self._end, usage=usage),
      _event('message_stop'),
    ]

  def fail(self, error: http.RefusedError):
    return [dialect_lib.Event('error', MESSAGES.describe(error))]

  def write(self, sampled: int) -> dict[str, Any]:
    head = self._head
    usage = {'input_tokens': head.prompt_tokens, 'output_tokens': sampled}
    fields = {'id': f'msg_{head.number}', 'type': 'message', 'role': 'assistant'}
    fields |= {'model': head.model, 'content': [*self._content], 'usage': usage}
    return fields | self._end

  def _start(self, kind: str, fields: dict[str, Any]) -> dialect_lib.Event:
    block = {'type': kind} | fields
    self._open = kind
    self._content.append(block)
    return self._block('start', content_block=dict(block))  # It will be changed.

  def _close(self) -> list[dialect_lib.Event]:
    """Ends the open block, if there is one."""
    events = []
    if self._open == 'thinking':
      signed = {'signature': 'complete' if self._split.is_closed else _CUT}
      self._content[-1] |= signed
      events.append(self._delta('signature_delta', signed))
    if self._open:
      events.append(self._block('stop'))
    self._open = None
    return events

  def _delta(self, kind: str, fields: dict[str, Any]) -> dialect_lib.Event:
    return self._block('delta', delta={'type': kind} | fields)

  def _block(self, kind: str, **fields: Any) -> dialect_lib.Event:
    return _event(f'content_block_{kind}', index=len(self._content) - 1, **fields)


def _event(kind: str, **fields: Any) -> dialect_lib.Event:
  return dialect_lib.Event(kind, {'type': kind} | fields)


MESSAGES = _Messages()
