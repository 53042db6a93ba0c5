"""Requests of OpenAI's API, as pydantic models.

Unknown fields are ignored, since clients send many; null means that a field is left out.
A known field that cannot be honoured is an error, never silently ignored.
"""

from collections.abc import Sequence
import functools
import os
from typing import Annotated, Any, ClassVar, NotRequired

import numpy as np
import pydantic
from pydantic import AfterValidator, AliasChoices, AliasPath, BeforeValidator, Field
from typing_extensions import TypedDict  # Not typing's: pydantic requires it below 3.12.

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import automata, calls, template_forms
from agent_r1_jax.engine import programs, request
from agent_r1_jax.serve import call_arguments

_MAX = 2**31 - 1  # The engine counts in int32.
_MAX_PROMPTS = 128  # Of one request for completions.
SESSION_HEADER = 'X-Session-ID'  # As verifiers sends it.


def _refuse(value: Any) -> Any:
  if value:
    raise ValueError('it is not supported; leave it out')


def _join_parts(content: Any) -> Any:
  """Joins parts that are all texts into one text; with pictures they stay parts."""
  if not isinstance(content, list):
    return '' if content is None else content
  parts = [_read_part(part) for part in content]
  texts = [part['text'] for part in parts if 'text' in part]
  return '\n'.join(texts) if len(texts) == len(parts) else parts


def _read_part(part: Any) -> dict[str, Any]:
  match part:
    case {'text': str(text)}:
      return {'type': 'text', 'text': text}
    case {'image_url': {'url': str(url)}}:
      return {'type': 'image_url', 'image_url': {'url': url}}
  raise ValueError(
    'only texts, and parts that are texts or pictures, are supported: {"type": "text", '
    '"text": ...} or {"type": "image_url", "image_url": {"url": "data:image/png;base64,'
    '..."}}'
  )


def _read_prompts(prompt: Any) -> list[str | list[int]]:
  """Makes a list of prompts, each a text or a list of token ids."""
  is_tokens = lambda x: isinstance(x, list) and all(type(i) is int for i in x)
  prompts = [prompt] if isinstance(prompt, str) or is_tokens(prompt) else prompt
  if not isinstance(prompts, list) or not 0 < len(prompts) <= _MAX_PROMPTS:
    raise ValueError(f'give one prompt, or a list of 1 to {_MAX_PROMPTS}')
  if not all(p and (isinstance(p, str) or is_tokens(p)) for p in prompts):
    raise ValueError('a prompt is a text or a list of tokens, and is not empty')
  return prompts


def _has_types(schema: Any) -> bool:
  """Whether a schema's `type` is valid JSON Schema."""
  if not isinstance(schema, dict):
    return isinstance(schema, bool)
  names, others = schema.get('type', []), schema.get('anyOf', [])
  names = [names] if isinstance(names, str) else names
  return (
    isinstance(names, list)
    and all(isinstance(name, str) for name in names)
    and isinstance(others, list)
    and all(map(_has_types, others))
  )


def _has_readable_parameters(function: dict[str, Any]) -> bool:
  """Checks the parts of a schema that call parsers read.

  Checking all of a large schema would take seconds.
  """
  parameters = {} if (given := function.get('parameters')) is None else given
  if not isinstance(parameters, dict):
    return False
  arguments, required = parameters.get('properties', {}), parameters.get('required') or []
  return (
    isinstance(arguments, dict)
    and all(map(_has_types, arguments.values()))
    and isinstance(required, list)
    and all(isinstance(name, str) for name in required)
  )


def _check_tool(tool: Any) -> dict[str, Any]:
  match tool:
    case {'function': {'name': str(), **function}} if _has_readable_parameters(function):
      stated = {key: x for key, x in tool['function'].items() if x is not None}
      return tool | {'function': stated}
  raise ValueError(
    'give {"type": "function", "function": {"name": ..., "parameters": {a JSON schema}}}'
  )


def _read_schema(form: Any) -> dict[str, Any] | None:
  match {'type': None} | (form if isinstance(form, dict) else {'type': form}):
    case {'type': None | 'text'}:
      return None
    case {'type': 'json_object'}:
      return {'type': 'object'}
    case {'type': 'json_schema', 'json_schema': {'schema': dict(schema)}}:
      return schema
  raise ValueError(
    "its type must be 'text', 'json_object', or 'json_schema' with "
    '"json_schema": {"schema": {...}}'
  )


Unsupported = Annotated[Any, AfterValidator(_refuse)]
_Schema = Annotated[dict[str, Any] | None, BeforeValidator(_read_schema)]


# Stop at a long list's first wrong item: each error would take memory and time.
_Items = functools.partial(Field, fail_fast=True)


# Dictionaries: models of 30,000 messages and calls take 8 times as long to make.
class _Function(TypedDict):
  name: str
  arguments: NotRequired[str | None]


class _FunctionCall(TypedDict):
  function: _Function
  id: NotRequired[str | None]


class _Message(TypedDict):
  role: str
  content: NotRequired[Annotated[str | list[Any], BeforeValidator(_join_parts)]]
  name: NotRequired[str | None]
  tool_calls: NotRequired[Annotated[list[_FunctionCall] | None, _Items()]]
  tool_call_id: NotRequired[str | None]
  reasoning_content: NotRequired[str | None]


class Body(pydantic.BaseModel):
  """The body of a request; null means that a field is left out."""

  model_config = pydantic.ConfigDict(strict=True)

  @pydantic.model_validator(mode='before')
  @classmethod
  def _leave_out_null(cls, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


class _SampledRequest(Body):
  """The fields that both kinds of requests share.

  Attributes:
    model: The name of the policy or of an adapter, if given.
    max_tokens: The maximum number of tokens in the reply, if given.
    stop: Strings that end the reply and are not part of its text.
    seed: Equal seeds give equal replies; None is random.
    n: The number of replies.
    stream: Whether to stream the reply.
    usage: Whether the stream ends with token counts.
    json_schema: The JSON schema that the reply must match.
    session: The client's conversation that the request belongs to, by X-Session-ID.
    tokens_as_ids: Whether log-probs name tokens by id, for programs that train on them:
      'token_id:9' (vLLM's field).
  """

  model: str | None = None
  max_tokens: int | None = Field(None, ge=1, le=_MAX)
  temperature: float = Field(1.0, ge=0, le=100)
  top_k: int = Field(0, ge=0, le=_MAX)
  top_p: float = Field(1.0, ge=1e-6, le=1)
  min_p: float = Field(0.0, ge=0, le=1)
  stop: Annotated[
    list[str],
    _Items(max_length=16),
    BeforeValidator(lambda stop: [stop] * bool(stop) if isinstance(stop, str) else stop),
    AfterValidator(lambda stop: automata.check_stop_strings(stop) or stop),
  ] = []
  seed: int | None = None
  n: int = Field(1, ge=1, le=16)
  stream: bool = False
  usage: bool | None = Field(
    False, validation_alias=AliasPath('stream_options', 'include_usage')
  )
  json_schema: _Schema = Field(None, validation_alias='response_format')
  session: str = Field('', validation_alias=SESSION_HEADER)
  tokens_as_ids: bool = Field(False, validation_alias='return_tokens_as_token_ids')
  presence_penalty: Unsupported = None
  frequency_penalty: Unsupported = None
  logit_bias: Unsupported = None

  @property
  def sampling(self) -> config_lib.Sampling:
    """The sampling settings."""
    return config_lib.Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

  def make_key(self, index: int) -> np.ndarray:
    """Makes the random key of the reply with this index."""
    seed = self.seed if self.seed is not None else os.urandom(16).hex()
    return request.make_key('seed', seed, index)


class ChatRequest(_SampledRequest):
  """A request for chat completions.

  Attributes:
    tools: The schemas of the tools that may be called.
    tool_choice: Which tools may or must be called, in OpenAI's form.
    parallel_tool_calls: Whether a reply may have several calls.
    continue_final_message: Whether the last message is the beginning of the reply.
    top_logprobs: The number of top tokens to report for each token; None reports no
      log-probs.
  """

  prompts: ClassVar[None] = None
  echo: ClassVar[bool] = False
  given: list[_Message] = _Items(min_length=1, validation_alias='messages')
  tools: list[Annotated[Any, AfterValidator(_check_tool)]] = _Items([])
  tool_choice: Any = 'auto'
  parallel_tool_calls: bool = True
  continue_final_message: bool = False
  max_tokens: int | None = Field(
    None,
    ge=1,
    le=_MAX,
    validation_alias=AliasChoices('max_completion_tokens', 'max_tokens'),
  )
  logprobs: bool = False
  top_logprobs: int | None = Field(0, ge=0, le=programs.TOP)

  @pydantic.model_validator(mode='after')
  def _check(self) -> 'ChatRequest':
    if self.top_logprobs and not self.logprobs:
      raise ValueError('top_logprobs needs logprobs: true')
    self.top_logprobs = self.top_logprobs if self.logprobs else None
    match self.tool_choice:
      case 'auto' | 'required':
        pass
      case 'none':
        self.tools = []
      case {'function': {'name': name}}:
        self.tools = [tool for tool in self.tools if tool['function']['name'] == name]
      case other:
        raise ValueError(
          f"tool_choice is {other!r:.80}; give 'auto', 'none', 'required' or "
          '{"type": "function", "function": {"name": ...}}'
        )
    if self.required and not self.tools:
      text = f'tool_choice is {self.tool_choice!r:.80}, and tools has no such tool'
      raise ValueError(text)
    if self.required and self.json_schema is not None:
      raise ValueError(
        'a reply cannot be a required call and of a response_format; leave one out'
      )
    if any(
      given['role'] == 'assistant' and isinstance(given.get('content'), list)
      for given in self.given
    ):
      raise ValueError('a message of the assistant has a picture; a policy writes none')
    if self.continue_final_message:
      self._check_beginning()
    return self

  def _check_beginning(self):
    last, restricted = self.given[-1], self.required or self.json_schema is not None
    is_text = last['role'] == 'assistant' and isinstance(last.get('content', ''), str)
    if not is_text or last.get('tool_calls') or len(self.given) == 1 or restricted:
      raise ValueError(
        'the last message is the beginning of the reply (prefill): it must be a text of '
        'the assistant after other messages, with neither calls in it, nor a required '
        'call, nor a response_format'
      )

  @property
  def count(self) -> int:
    """The number of replies."""
    return self.n

  @property
  def required(self) -> bool:
    """Whether the reply must call one of the tools."""
    return self.tool_choice not in ('auto', 'none')

  @functools.cached_property
  def messages(self) -> list[types.Message]:
    """The conversation in a form that can be compared.

    Every message has a role and content: a text, or parts with pictures. Assistant
    messages have their calls under 'calls', as pairs of name and arguments; tool messages
    have the tool's name, and the call's id as its index in the reply. The arguments of a
    malformed call are a text.
    """
    result, names = [], {}
    for given in self.given:
      role = 'system' if given['role'] == 'developer' else given['role']
      message: types.Message = {'role': role, 'content': given.get('content', '')}
      if role == 'assistant':
        if thoughts := given.get('reasoning_content'):
          message['reasoning_content'] = thoughts
        message['calls'] = []
        for i, call in enumerate(given.get('tool_calls') or ()):
          name, text = call['function']['name'], call['function'].get('arguments') or ''
          message['calls'].append((name, call_arguments.read(text)))
          name_and_id = {'name': name, 'tool_call_id': template_forms.make_id(i)}
          names[call.get('id')] = name_and_id
      else:
        message |= names.get(given.get('tool_call_id'), {})
        message |= {'name': name} if (name := given.get('name')) else {}
      result.append(message)
    return result


class TextRequest(_SampledRequest):
  """A request for completions; names of control tokens in it are control tokens.

  Attributes:
    prompts: The texts or tokens to continue; each gets `n` replies.
    echo: Whether answers include the prompt, with its log-probs if log-probs are on.
    top_logprobs: The number of top tokens to report for each token; None reports no
      log-probs.
  """

  messages: ClassVar[None] = None
  tools: ClassVar[Sequence[dict[str, Any]]] = ()
  required: ClassVar[bool] = False
  parallel_tool_calls: ClassVar[bool] = True
  continue_final_message: ClassVar[bool] = False
  prompts: Annotated[Any, AfterValidator(_read_prompts)] = Field(
    validation_alias='prompt'
  )
  max_tokens: int | None = Field(16, ge=0, le=_MAX)
  top_logprobs: int | None = Field(
    None, ge=0, le=programs.TOP, validation_alias='logprobs'
  )
  echo: bool = False
  suffix: Unsupported = None

  @pydantic.model_validator(mode='after')
  def _check(self) -> 'TextRequest':
    if self.max_tokens == 0 and not self.echo:
      raise ValueError('max_tokens is 0, which is for echo: true alone; give at least 1')
    return self

  @property
  def count(self) -> int:
    """The number of replies."""
    return self.n * len(self.prompts)


ApiRequest = ChatRequest | TextRequest


def to_chat(
  messages: Sequence[types.Message], call_format: calls.CallFormat
) -> list[types.Message]:
  """Makes messages for a chat to encode; if a call is malformed, all are text."""
  written = []
  for message in messages:
    message = dict(message)
    called = message.pop('calls', ())
    texts = [
      call_format.render(calls.ToolCall(*call)) if isinstance(call[1], dict) else call[1]
      for call in called
    ]
    if texts and all(isinstance(arguments, dict) for _, arguments in called):
      message['tool_calls'] = [
        {'type': 'function', 'function': {'name': name, 'arguments': arguments}}
        for name, arguments in called
      ]
    elif texts:
      message['content'] = '\n'.join([message['content'], *texts]).lstrip('\n')
    written.append(message)
  return written


def make_comparable(message: types.Message) -> types.Message:
  """Returns the parts of a message that must be equal for it to be the same message.

  Clients strip the text of replies, and may leave out a tool's name.
  """
  if message['role'] == 'assistant':
    return {**message, 'content': message['content'].strip()}
  return {'role': message['role'], 'content': message['content']}
