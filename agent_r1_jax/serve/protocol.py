"""Requests of OpenAI's API as the server understands them, and what it answers.

Fields that are not known are ignored, as clients send many. What is known and cannot be
done is refused, and never left out without a word.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import json
import os
import re
import time
from typing import Any, NamedTuple

import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import automata, calls
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.engine import programs, request
from agent_r1_jax.host import http

_MOST_CHOICES, _MOST_STOPS = 16, 16
_MAX_INTEGER = 2**31 - 1  # The engine counts in int32.
# Replies and calls have names that this process gives once.
numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class ApiRequest:
  """What a client asks for.

  Attributes:
    messages: The conversation, in the form of `read_messages`; None of a completion.
    prompt: The text or the tokens to go on from; None of a conversation.
    tools: The schemas of the tools that may be called.
    required: Whether the reply must call one of them.
    schema: What the reply must be, as a JSON schema.
    max_tokens: The most tokens of the reply, if the client says.
    sampling: How tokens are chosen.
    stop: Strings that end the reply, and are no part of its text.
    seed: Equal seeds give equal replies; None is random.
    n: The number of replies.
    stream: Whether the reply is sent as it is sampled.
    usage: Whether the stream ends with the numbers of tokens.
    top_logprobs: The likeliest tokens to report with each one; None reports no log-probs.
  """

  messages: list[types.Message] | None
  prompt: str | list[int] | None
  tools: list[dict[str, Any]]
  required: bool
  schema: dict[str, Any] | None
  max_tokens: int | None
  sampling: config_lib.Sampling
  stop: tuple[str, ...]
  seed: int | None
  n: int
  stream: bool
  usage: bool
  top_logprobs: int | None

  def make_key(self, index: int) -> np.ndarray:
    """Makes the randomness of the reply with this number."""
    seed = self.seed if self.seed is not None else os.urandom(16).hex()
    return request.make_key('seed', seed, index)


def read_chat(body: dict[str, Any]) -> ApiRequest:
  """Reads a request for chat completions."""
  tools, required = _read_tools(body)
  schema = _read_schema(body.get('response_format'))
  if required and schema is not None:
    text = 'a reply cannot be a required call and of a response_format; leave one out'
    raise http.RefusedError(400, text)
  top_logprobs = _read_number(body, 'top_logprobs', 0, int, 0, programs.TOP)
  with_logprobs = bool(body.get('logprobs'))
  if top_logprobs and not with_logprobs:
    raise http.RefusedError(400, 'top_logprobs needs logprobs: true')
  most = _read_number(body, 'max_tokens', None, int, 1)
  return _read(
    body,
    messages=read_messages(body.get('messages')),
    prompt=None,
    tools=tools,
    required=required,
    schema=schema,
    max_tokens=_read_number(body, 'max_completion_tokens', most, int, 1),
    top_logprobs=top_logprobs if with_logprobs else None,
  )


def read_completion(body: dict[str, Any]) -> ApiRequest:
  """Reads a request for completions; names of control tokens in it are control tokens."""
  prompt = body.get('prompt')
  if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
    prompt = prompt[0]
  tokens = isinstance(prompt, list) and all(type(i) is int for i in prompt)
  if not prompt or not (isinstance(prompt, str) or tokens):
    raise http.RefusedError(400, 'prompt must be one text, or one list of tokens')
  if body.get('echo') or body.get('suffix'):
    raise http.RefusedError(400, 'echo and suffix are not supported')
  return _read(
    body,
    messages=None,
    prompt=prompt,
    tools=[],
    required=False,
    schema=_read_schema(body.get('response_format')),
    max_tokens=_read_number(body, 'max_tokens', 16, int, 1),
    top_logprobs=_read_number(body, 'logprobs', None, int, 0, programs.TOP),
  )


def _read(body: dict[str, Any], **fields: Any) -> ApiRequest:
  """Reads what both kinds of requests have."""
  for name in ('presence_penalty', 'frequency_penalty', 'logit_bias'):
    if body.get(name):
      raise http.RefusedError(400, f'{name} is not supported; leave it out')
  stop = body.get('stop') or []
  stop = [stop] if isinstance(stop, str) else stop
  if not (isinstance(stop, list) and all(isinstance(s, str) and s for s in stop)):
    raise http.RefusedError(400, 'stop must be a text or a list of texts')
  if len(stop) > _MOST_STOPS:
    raise http.RefusedError(400, f'stop has {len(stop)} texts; {_MOST_STOPS} are allowed')
  automata.check_stop_strings(stop)
  options = body.get('stream_options') or {}
  return ApiRequest(
    sampling=config_lib.Sampling(
      temperature=_read_number(body, 'temperature', 1.0, float, 0, 100),
      top_k=_read_number(body, 'top_k', 0, int, 0),
      top_p=_read_number(body, 'top_p', 1.0, float, 1e-6, 1),
      min_p=_read_number(body, 'min_p', 0.0, float, 0, 1),
    ),
    stop=tuple(stop),
    seed=_read_number(body, 'seed', None, int, maximum=None),
    n=_read_number(body, 'n', 1, int, 1, _MOST_CHOICES),
    stream=bool(body.get('stream')),
    usage=bool(isinstance(options, dict) and options.get('include_usage')),
    **fields,
  )


def _read_number(
  body, name, default, kind, minimum=None, maximum: float | None = _MAX_INTEGER
) -> Any:
  """Reads a number; null stands for the default."""
  value = body.get(name)
  if value is None:
    return default
  is_integer = isinstance(value, int) and not isinstance(value, bool)
  right = is_integer or (kind is float and isinstance(value, float))
  right = right and (minimum is None or value >= minimum)
  if not right or (maximum is not None and not value <= maximum):
    expected = 'an integer' if kind is int else 'a number'
    expected += '' if minimum is None else f' from {minimum}'
    expected += f' to {maximum}' if maximum else ''
    raise http.RefusedError(400, f'{name} is {value!r:.80}; it must be {expected}')
  return kind(value)


def _read_tools(body: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
  """Returns the schemas of the tools, and whether one of them must be called."""
  tools, choice = body.get('tools') or [], body.get('tool_choice') or 'auto'
  if not isinstance(tools, list):
    raise http.RefusedError(400, f'tools is {tools!r:.80}; it must be a list')
  for tool in tools:
    if not isinstance(_read_function_name(tool), str):
      raise http.RefusedError(400, f'{tool!r:.80} is no tool of type function')
    if not isinstance(tool['function'].get('parameters', {}), dict):
      raise http.RefusedError(400, f'{tool!r:.80} has parameters that are no JSON schema')
  if isinstance(choice, dict):
    name = _read_function_name(choice)
    tools = [tool for tool in tools if tool['function']['name'] == name]
    if not tools:
      raise http.RefusedError(400, f'tool_choice names {name!r}, which is no tool')
    return tools, True
  if choice not in ('auto', 'none', 'required'):
    raise http.RefusedError(400, f'tool_choice is {choice!r:.80}')
  if choice == 'required' and not tools:
    raise http.RefusedError(400, 'tool_choice is required, and there are no tools')
  return ([] if choice == 'none' else tools), choice == 'required'


def _read_function_name(value: Any) -> Any:
  """Returns the name in {'function': {'name': ...}}, or None if it is no such object."""
  function = value.get('function') if isinstance(value, dict) else None
  return function.get('name') if isinstance(function, dict) else None


def _read_schema(form: Any) -> dict[str, Any] | None:
  kind = form.get('type') if isinstance(form, dict) else form
  if kind in (None, 'text'):
    return None
  if kind == 'json_object':
    return {'type': 'object'}
  schema = form.get('json_schema') if isinstance(form, dict) else None
  schema = schema.get('schema') if isinstance(schema, dict) else None
  if kind != 'json_schema' or not isinstance(schema, dict):
    raise http.RefusedError(
      400, f'response_format of the type {kind!r:.80} has no schema'
    )
  return schema


def read_messages(messages: Any) -> list[types.Message]:
  """Reads a conversation into a form that can be compared.

  All messages have a role and a text as content. Those of the assistant have its calls
  under 'calls', as pairs of name and arguments, and those of tools the name of the tool.
  The arguments of a malformed call are a text.
  """
  if not isinstance(messages, list) or not messages:
    raise http.RefusedError(400, 'messages must be a list with at least one message')
  result, names = [], {}
  for number, message in enumerate(messages):
    where = f'messages[{number}]'
    if not isinstance(message, dict) or not isinstance(message.get('role'), str):
      raise http.RefusedError(400, f'{where} has no role')
    role = {'developer': 'system'}.get(message['role'], message['role'])
    parsed: types.Message = {'role': role, 'content': _read_text(message, where)}
    if role == 'assistant':
      parsed['calls'] = []
      try:
        for call in message.get('tool_calls') or []:
          name, arguments = call['function']['name'], call['function']['arguments']
          parsed['calls'].append((_read_name(name, where), _read_arguments(arguments)))
          names[call.get('id')] = name
      except (TypeError, KeyError) as error:
        text = f'{where} has a tool call that cannot be read: {error!r}'
        raise http.RefusedError(400, text) from None
    elif name := _read_name(message.get('name'), where):
      parsed['name'] = name
    elif name := names.get(_read_name(message.get('tool_call_id'), where)):
      parsed['name'] = name
    result.append(parsed)
  return result


def _read_name(name: Any, where: str) -> str | None:
  if not isinstance(name, str | None):
    raise http.RefusedError(400, f'{where} has the name {name!r:.80}; it must be a text')
  return name


def _read_arguments(text: str) -> dict[str, Any] | str:
  try:
    value = http.parse_json(text or '{}')
  except ValueError:
    value = None
  return value if isinstance(value, dict) else text


def _read_text(message: dict[str, Any], where: str) -> str:
  content = message.get('content')
  if isinstance(content, list):
    try:
      content = '\n'.join(part['text'] for part in content)
    except (TypeError, KeyError):
      text = f'{where} has a part that is no text; only text is supported'
      raise http.RefusedError(400, text) from None
  if not isinstance(content, str | None):
    raise http.RefusedError(400, f'{where} has a content of {type(content).__name__}')
  return content or ''


def to_chat(
  messages: Sequence[types.Message], call_format: calls.CallFormat
) -> list[types.Message]:
  """Makes messages that a chat encodes: calls are written as the model writes them."""
  written = []
  for message in messages:
    message = dict(message)
    texts = [
      call_format.render(calls.ToolCall(*call)) if isinstance(call[1], dict) else call[1]
      for call in message.pop('calls', ())
    ]
    if texts:
      message['content'] = '\n'.join([message['content'], *texts]).lstrip('\n')
    written.append(message)
  return written


def make_comparable(message: types.Message) -> types.Message:
  """What of a message must be equal for it to be the same one.

  Clients strip the text of replies. A tool's name may be missing.
  """
  if message['role'] == 'assistant':
    return {**message, 'content': message['content'].strip()}
  return {'role': message['role'], 'content': message['content']}


class Reply(NamedTuple):
  """A reply that is complete.

  Attributes:
    text: What the client is shown of it, besides its calls.
    calls: The calls in it, pairs of name and arguments; the arguments of a call that
      could not be parsed are its text.
    reason: Why it ended: 'stop', 'tool_calls' or 'length'.
  """

  text: str
  calls: list[tuple[str, dict[str, Any] | str]]
  reason: str

  def as_message(self) -> types.Message:
    """Returns the message in the form of `read_messages`."""
    return {'role': 'assistant', 'content': self.text, 'calls': self.calls}


class Choice:
  """One of the replies to a request, while it is sampled.

  Attributes:
    index: Its number.
    generation: What the engine samples.
    tokens: The tokens so far.
  """

  def __init__(
    self,
    index: int,
    generation: request.Generation,
    api_request: ApiRequest,
    chat: chat_lib.Chat,
  ):
    """Begins with the generation."""
    self.index, self.generation, self.tokens = index, generation, []
    self._api_request, self._chat, self._sent = api_request, chat, 0
    openings = chat.format.openings if api_request.tools else ()
    self._openings, self._held_back = openings, (*api_request.stop, *openings)

  def add(self, chunk: request.Chunk) -> str:
    """Adds tokens; returns further text that is surely part of the reply's."""
    self.tokens += chunk.tokens.tolist()
    text = self._chat.decode(self.tokens).rstrip('\ufffd')
    if starts := [i for s in self._held_back if (i := text.find(s)) >= 0]:
      text = text[: min(starts)]
    # What may be the beginning of a stop string or of a call is held back.
    cuts = [n for s in self._held_back for n in range(1, len(s)) if text.endswith(s[:n])]
    return self._show(text[: len(text) - max(cuts, default=0)])

  def finish(self) -> tuple[Reply, str]:
    """Returns the reply, and what of its text `add` has not returned."""
    text, stopped = (
      str(self._chat.decode(self.tokens)),
      self.generation.chunks[-1].stopped,
    )
    ends = [i for s in self._api_request.stop if (i := text.find(s)) >= 0]
    text = text[: min(ends)] if ends else text
    tool_calls = []
    if self._api_request.tools and stopped:
      tool_calls = self._chat.format.parse(text, self._api_request.tools)
    if tool_calls:
      begin = text.rfind('</think>') + 1
      starts = [i for s in self._openings if (i := text.find(s, begin)) >= 0]
      text = text[: min(starts, default=None)]
    reason = 'length' if not stopped else 'tool_calls' if tool_calls else 'stop'
    reply = Reply(text, [_name_call(call) for call in tool_calls], reason)
    return reply, self._show(text)

  def _show(self, text: str) -> str:
    unsent, self._sent = text[self._sent :], max(self._sent, len(text))
    return unsent


def _name_call(call: calls.Call) -> tuple[str, dict[str, Any] | str]:
  """Returns name and arguments of a call; a client sees for itself what is malformed."""
  if isinstance(call, calls.ToolCall):
    return call.name, call.arguments
  name = re.search(r'"name"\s*:\s*"([\w.-]+)"', call.text)
  return name[1] if name else 'malformed', call.text


def write_logprobs(chunk: request.Chunk, chat: chat_lib.Chat) -> list[dict[str, Any]]:
  """Writes the log-probs of tokens, as chat completions have them.

  The bytes of tokens that make up one character together are that character's.
  """

  def one(token, logprob):
    text = chat.decode_exactly([token])
    piece = [*chat.get_bytes(int(token))]
    return {'token': text, 'logprob': float(logprob), 'bytes': piece}

  columns = (chunk.tokens, chunk.logprobs, chunk.top_tokens, chunk.top_logprobs)
  return [
    one(token, logprob)
    | {'top_logprobs': [one(*pair) for pair in zip(tops, values, strict=True)]}
    for token, logprob, tops, values in zip(*columns, strict=True)
  ]


def _write_calls(tool_calls: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
  """Writes tool calls, with an id for each."""
  return [
    {
      'id': f'call_{next(numbers)}',
      'type': 'function',
      'function': {
        'name': name,
        'arguments': arguments if isinstance(arguments, str) else json.dumps(arguments),
      },
    }
    for name, arguments in tool_calls
  ]


class Form(NamedTuple):
  """How one of the two kinds of requests is read, and its answers are written.

  Attributes:
    read: Reads the body of a request.
    name: What the kind is called in answers.
    choice: (text, calls, log-probs) -> the fields of a complete choice.
    delta: The same of a part of one that is streamed.
  """

  read: Callable[[dict[str, Any]], ApiRequest]
  name: str
  choice: Callable[..., dict[str, Any]]
  delta: Callable[..., dict[str, Any]]

  def frame(self, model: str, number: str, choices: list, **more: Any) -> dict[str, Any]:
    """Returns an answer, or a part of one, with what surrounds its choices."""
    kind = self.name + ('.chunk' if more.pop('part', False) else '')
    head = {'id': number, 'object': kind, 'created': int(time.time()), 'model': model}
    return head | {'choices': choices} | more


def _write_chat_logprobs(logprobs: list | None) -> dict[str, Any] | None:
  return None if logprobs is None else {'content': logprobs, 'refusal': None}


def _write_chat_choice(
  text: str, tool_calls: Sequence, logprobs: list | None
) -> dict[str, Any]:
  message = {'role': 'assistant', 'content': text or (None if tool_calls else '')}
  message |= {'tool_calls': _write_calls(tool_calls)} if tool_calls else {}
  return {'message': message, 'logprobs': _write_chat_logprobs(logprobs)}


def _write_chat_delta(
  text: str, tool_calls: Sequence, logprobs: list | None
) -> dict[str, Any]:
  delta = {'role': 'assistant', 'content': text}
  numbered = [{'index': i} | call for i, call in enumerate(_write_calls(tool_calls))]
  delta |= {'tool_calls': numbered} if tool_calls else {}
  return {'delta': delta, 'logprobs': _write_chat_logprobs(logprobs)}


def _name_token(item: dict[str, Any]) -> str:
  r"""Names a token of a text completion: a part of a character is 'bytes:\xc3'."""
  try:
    bytes(item['bytes']).decode()
  except UnicodeDecodeError:
    return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in item['bytes'])
  return item['token']


def _write_text_choice(
  text: str, tool_calls: Sequence, logprobs: list | None
) -> dict[str, Any]:
  columns = None
  if logprobs is not None:
    named = lambda tops: {_name_token(top): top['logprob'] for top in tops}
    columns = {
      'tokens': [_name_token(item) for item in logprobs],
      'token_logprobs': [item['logprob'] for item in logprobs],
      'top_logprobs': [named(item['top_logprobs']) for item in logprobs],
    }
  return {'text': text, 'logprobs': columns}


CHAT = Form(read_chat, 'chat.completion', _write_chat_choice, _write_chat_delta)
TEXT = Form(read_completion, 'text_completion', _write_text_choice, _write_text_choice)
