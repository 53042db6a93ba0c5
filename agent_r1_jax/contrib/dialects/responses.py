"""OpenAI's Responses: how requests are read and answers written.

A response is stored for `previous_response_id`, unless the client says `store: false`.
The source of its replies stores it, so an episode's responses end with the episode
(kept_responses.py).
"""

import secrets
import time
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from agent_r1_jax.contrib.dialects import kept_responses, response_items, thinking
from agent_r1_jax.serve import dialect as dialect_lib
from agent_r1_jax.serve import requests
from agent_r1_jax.web import http

_LOGPROBS = 'message.output_text.logprobs'
# Allowed values of `include`; no content is ever encrypted.
_INCLUDES = _LOGPROBS, 'reasoning.encrypted_content'
# The names of an item's content in events.
_CONTENT = {'thinking': 'reasoning_text', 'text': 'output_text'}


def _read_input(given: Any) -> Any:
  return [{'role': 'user', 'content': given}] if isinstance(given, str) else given


def _read_tool(tool: dict[str, Any]) -> dict[str, Any]:
  names = 'name', 'description', 'parameters'
  match tool:
    case {'type': 'function', 'name': str()} if isinstance(
      tool.get('parameters') or {}, dict
    ):
      return {
        'type': 'function',
        'function': {name: tool[name] for name in names if tool.get(name)},
      }
  raise ValueError(
    'only functions are supported: {"type": "function", "name": ..., "description": ..., '
    '"parameters": {a JSON schema}}'
  )


def _read_tool_choice(choice: Any) -> Any:
  match choice:
    case 'auto' | 'none' | 'required':
      return choice
    case {'type': 'function', 'name': str(name)}:
      return {'type': 'function', 'function': {'name': name}}
  raise ValueError('give "auto", "none", "required" or {"type": "function", "name": ...}')


def _read_text(text: dict[str, Any]) -> Any:
  match text.get('format'):
    case None | {'type': 'text'}:
      return None
    case {'type': 'json_object'}:
      return {'type': 'json_object'}
    case {'type': 'json_schema', 'schema': dict(schema)}:
      return {'type': 'json_schema', 'json_schema': {'schema': schema}}
  raise ValueError(
    "its format's type must be 'text', 'json_object', or 'json_schema' with "
    '"schema": {...}'
  )


def _check_includes(names: list[str]) -> list[str]:
  if unknown := [name for name in names if name not in _INCLUDES]:
    raise ValueError(f'{unknown[0]!r:.80} is not supported; there is {_LOGPROBS!r}')
  return names


def _check_truncation(kind: str) -> str:
  if kind != 'disabled':
    raise ValueError("only 'disabled' is supported; leave it out")
  return kind


_Object = dict[str, Any]
# Returned with each event that has the response; the limits are the API's.
_Metadata = Annotated[
  dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
  Field(max_length=16),
]


class _ResponsesBody(requests.Body):
  """The fields of Responses that chat completions lack; the others are shared."""

  input: Annotated[
    list[_Object], Field(min_length=1, fail_fast=True), BeforeValidator(_read_input)
  ]
  instructions: str | None = None
  max_output_tokens: int | None = Field(None, ge=1)
  tools: Annotated[
    list[Annotated[_Object, AfterValidator(_read_tool)]], Field(fail_fast=True)
  ] = []
  tool_choice: Annotated[Any, AfterValidator(_read_tool_choice)] = 'auto'
  text: Annotated[_Object, AfterValidator(_read_text)] | None = None
  reasoning: _Object | None = None
  metadata: _Metadata | None = None
  include: Annotated[list[str], AfterValidator(_check_includes)] = []
  top_logprobs: int = 0
  parallel_tool_calls: bool = True
  truncation: Annotated[str, AfterValidator(_check_truncation)] = 'disabled'
  previous_response_id: str | None = None
  store: bool = True
  background: requests.Unsupported = None
  conversation: requests.Unsupported = None
  prompt: requests.Unsupported = None
  max_tool_calls: requests.Unsupported = None
  context_management: requests.Unsupported = None
  n: requests.Unsupported = None


# The shared fields.
_SAME = 'model', 'temperature', 'top_k', 'top_p', 'min_p', 'seed', 'stream'


class _Responses(dialect_lib.Dialect):
  path = '/v1/responses'
  count_path = '/v1/responses/input_tokens'
  conversation = 'input'

  def read(self, fields, memory, counts=False):
    """Reads a request, and converts it to chat completions."""
    kept = memory.setdefault(self.path, kept_responses.KeptResponses())
    body = http.check_fields(_ResponsesBody, fields)
    if body.previous_response_id is not None:
      body.input = [*kept.recall(body.previous_response_id), *body.input]
    messages = []
    for i, item in enumerate(body.input):
      try:
        messages.append(response_items.read_item(item))
      except ValueError as error:
        text = f'input[{i}] is {item!r:.80}; {error}'
        raise http.RefusedError(400, text) from None
    messages = response_items.join_replies(messages)
    if body.instructions:
      messages.insert(0, {'role': 'system', 'content': body.instructions})
    chat = {name: fields[name] for name in _SAME if name in fields}
    chat |= {'messages': messages, 'tools': body.tools, 'tool_choice': body.tool_choice}
    chat['parallel_tool_calls'] = body.parallel_tool_calls
    if body.max_output_tokens is not None:
      chat['max_tokens'] = body.max_output_tokens
    if body.text is not None:
      chat['response_format'] = body.text
    if body.top_logprobs or _LOGPROBS in body.include:
      chat |= {'logprobs': True, 'top_logprobs': body.top_logprobs}
    request = http.check_fields(requests.ChatRequest, chat)
    # With the store for the answer, if later requests may continue it.
    return dialect_lib.Asked(request, (body, kept if body.store else None))

  def stream(self, head: dialect_lib.Head) -> dialect_lib.EventStream:
    """Begins a stream of items."""
    return _ResponsesStream(head)

  def write_count(self, tokens: int) -> dict[str, Any]:
    """Writes the token count of a request."""
    return {'object': 'response.input_tokens', 'input_tokens': tokens}


class _ResponsesStream(dialect_lib.EventStream):
  """The events of one response."""

  def __init__(self, head: dialect_lib.Head):
    self._head, (self._body, self._kept) = head, head.asked.body
    # Whoever knows the name may continue the response.
    self._name, self._created = f'resp_{secrets.token_hex(16)}', time.time()
    self._number = 0
    self._split = thinking.Split(self._body.reasoning is not None)
    # The items so far; the kind, text and log-probs of the last one while it is open.
    self._output: list[dict[str, Any]] = []
    self._open: str | None = None
    self._text, self._logprobs = '', []
    # Log-probs of tokens whose text is still to come.
    self._waiting: list[dict[str, Any]] = []
    self._is_cut = False

  def begin(self):
    """Writes the response, without output."""
    response = self._write('in_progress')
    return [
      self._event('created', response=response),
      self._event('in_progress', response=response),
    ]

  def add(self, part: dialect_lib.ReplyPart):
    """Writes new text; the last part also has the calls."""
    events = []
    self._waiting += part.logprobs or []
    for kind, text in self._split.add(part.text, part.reply is not None):
      events += self._extend(kind, text)
    if part.reply:
      self._is_cut = part.reply.reason == 'length'
      is_empty = not (part.reply.calls or self._output)
      if is_empty or (self._open == 'text' and self._waiting):
        events += self._extend('text', '')
      events += self._close(self._is_cut)
      for call in part.reply.calls:
        events += self._add_call(response_items.write_call(*call))
    return events

  def finish(self, sampled: int):
    """Writes the complete response."""
    response = self.write(sampled)
    return [self._event(response['status'], response=response)]

  def write(self, sampled: int):
    """Writes the complete response, and stores it if it may be continued."""
    if self._kept:
      items = [*self._body.input, *self._output]
      self._kept.keep(self._name, items, self._body.previous_response_id)
    return self._write('incomplete' if self._is_cut else 'completed', sampled)

  def fail(self, error: http.RefusedError):
    """Writes the response so far, with the error."""
    said = {'code': 'server_error', 'message': str(error)}
    return [self._event('failed', response=self._write('failed') | {'error': said})]

  def _extend(self, kind: str, text: str) -> list[dialect_lib.Event]:
    events, logprobs = [], []
    if kind == 'text':  # Its log-probs cover all tokens of the reply.
      logprobs, self._waiting = self._waiting, []
    if kind != self._open:
      events += self._close(False)
      self._open, self._text, self._logprobs = kind, '', []
      item = response_items.start(kind)
      self._output.append(item)
      # The content follows as a part of its own.
      events.append(self._event('output_item.added', item=item | {'content': []}))
      events.append(self._within('content_part.added', part=item['content'][0]))
    self._text += text
    self._logprobs += logprobs
    if text or logprobs:
      more = {'logprobs': logprobs} if kind == 'text' else {}
      events.append(self._within(f'{_CONTENT[kind]}.delta', delta=text, **more))
    return events

  def _close(self, is_cut: bool) -> list[dialect_lib.Event]:
    """Ends the open item, if there is one."""
    if self._open is None:
      return []
    kind, self._open = self._open, None
    is_cut = is_cut if kind == 'text' else not self._split.is_closed
    more = {'logprobs': self._logprobs} if kind == 'text' else {}
    # A new object: events with the old one are not encoded yet.
    item: Any = self._output[-1] | {'status': 'incomplete' if is_cut else 'completed'}
    content = item['content'][0] | {'text': self._text} | more
    self._output[-1] = item = item | {'content': [content]}
    return [
      self._within(f'{_CONTENT[kind]}.done', text=self._text, **more),
      self._within('content_part.done', part=content),
      self._event('output_item.done', item=item),
    ]

  def _add_call(self, item: dict[str, Any]) -> list[dialect_lib.Event]:
    self._output.append(item)
    begun = item | {'arguments': '', 'status': 'in_progress'}
    whole = {'item_id': item['id'], 'arguments': item['arguments'], 'name': item['name']}
    delta = {'item_id': item['id'], 'delta': item['arguments']}
    return [
      self._event('output_item.added', item=begun),
      self._event('function_call_arguments.delta', **delta),
      self._event('function_call_arguments.done', **whole),
      self._event('output_item.done', item=item),
    ]

  def _within(self, kind: str, **fields: Any) -> dialect_lib.Event:
    """Writes an event about the last item's content."""
    place = {'item_id': self._output[-1]['id'], 'content_index': 0}
    return self._event(kind, **place, **fields)

  def _event(self, kind: str, **fields: Any) -> dialect_lib.Event:
    name = f'response.{kind}'
    numbers = {'sequence_number': self._number}
    if 'response' not in fields:
      numbers['output_index'] = len(self._output) - 1
    self._number += 1
    return dialect_lib.Event(name, {'type': name} | numbers | fields)

  def _write(self, status: str, sampled: int | None = None) -> dict[str, Any]:
    body, request = self._body, self._head.asked.request
    usage = None if sampled is None else _count_usage(self._head, sampled)
    cut = {'reason': 'max_output_tokens'} if status == 'incomplete' else None
    fixed = {'type': 'function', 'strict': False}
    return {
      'id': self._name,
      'object': 'response',
      'created_at': self._created,
      'model': self._head.model,
      'status': status,
      'error': None,
      'incomplete_details': cut,
      'output': [*self._output],
      'usage': usage,
      'instructions': body.instructions,
      'metadata': body.metadata or {},
      'parallel_tool_calls': body.parallel_tool_calls,
      'previous_response_id': body.previous_response_id,
      'store': body.store,
      'temperature': request.temperature,
      'top_p': request.top_p,
      'tool_choice': _write_tool_choice(body.tool_choice),
      'tools': [fixed | tool['function'] for tool in body.tools],
      'max_output_tokens': body.max_output_tokens,
      'truncation': body.truncation,
    }


def _write_tool_choice(choice: Any) -> Any:
  if isinstance(choice, str):
    return choice
  return {'type': 'function', 'name': choice['function']['name']}


def _count_usage(head: dialect_lib.Head, sampled: int) -> dict[str, Any]:
  given = head.prompt_tokens
  return {
    'input_tokens': given,
    # Neither is counted.
    'input_tokens_details': {'cached_tokens': 0, 'cache_write_tokens': 0},
    'output_tokens': sampled,
    'output_tokens_details': {'reasoning_tokens': 0},
    'total_tokens': given + sampled,
  }


RESPONSES = _Responses()
