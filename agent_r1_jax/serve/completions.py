"""OpenAI's chat completions and completions: how their answers are written."""

from collections.abc import Callable, Sequence
import dataclasses
import time
from typing import Any

from agent_r1_jax.serve import call_arguments, replies, requests
from agent_r1_jax.serve import dialect as dialect_lib
from agent_r1_jax.web import http


@dataclasses.dataclass(frozen=True)
class _Completions(dialect_lib.Dialect):
  """One of the two.

  Attributes:
    path: See dialect.Dialect.
    model: What the body of a request is read as.
    name: What the kind is called in answers.
    choice: (text, calls, log-probs) -> the fields of a complete choice.
    delta: The same of a part of one that is streamed.
  """

  path: str
  model: type[requests.ApiRequest]
  name: str
  choice: Callable[..., dict[str, Any]]
  delta: Callable[..., dict[str, Any]]

  def read(self, fields, memory, counts=False):
    """The body is the request."""
    request = http.check_fields(self.model, fields)
    return dialect_lib.Asked(request, request)

  def write(self, head: dialect_lib.Head, parts: Sequence[Any], sampled: int):
    """Writes all choices."""
    choices = [self._number(part, self.choice, part.reply.text) for part in parts]
    return self.frame(head, choices, self.name, usage=_count_usage(head, sampled))

  def stream(self, head: dialect_lib.Head) -> dialect_lib.Stream:
    """Begins a stream of choices' parts."""
    return _Stream(self, head)

  def frame(self, head: dialect_lib.Head, choices: list, kind: str, **more: Any):
    """Surrounds choices with the fields of an answer, or of a part of one."""
    fields = {'id': f'reply-{head.number}', 'object': kind, 'created': int(time.time())}
    return fields | {'model': head.model, 'choices': choices} | more

  def _number(self, part: dialect_lib.Part, write: Callable, text: str) -> dict[str, Any]:
    reply = part.reply
    written = write(text, reply.calls if reply else (), part.logprobs)
    reason = {'finish_reason': reply.reason if reply else None}
    return {'index': part.index} | written | reason


class _Stream(dialect_lib.Stream):
  def __init__(self, dialect: _Completions, head: dialect_lib.Head):
    self.dialect, self.head = dialect, head
    self._begun: set[int] = set()

  def add(self, part: dialect_lib.Part):
    choice = self.dialect._number(part, self.dialect.delta, part.text)
    if part.index in self._begun:  # Clients join the parts, and would join the roles.
      choice.get('delta', {}).pop('role', None)
    self._begun.add(part.index)
    return [self._frame([choice])]

  def finish(self, sampled: int):
    events = [dialect_lib.Event(None, '[DONE]')]
    if self.head.asked.request.usage:
      events.insert(0, self._frame([], usage=_count_usage(self.head, sampled)))
    return events

  def fail(self, error: http.RefusedError):
    return [
      dialect_lib.Event(None, self.dialect.describe(error)),
      dialect_lib.Event(None, '[DONE]'),
    ]

  def _frame(self, choices: list, **more: Any) -> dialect_lib.Event:
    kind = f'{self.dialect.name}.chunk'
    return dialect_lib.Event(None, self.dialect.frame(self.head, choices, kind, **more))


def _count_usage(head: dialect_lib.Head, sampled: int) -> dict[str, int]:
  prompt = head.prompt_tokens
  counts = {'prompt_tokens': prompt, 'completion_tokens': sampled}
  return counts | {'total_tokens': prompt + sampled}


def _write_calls(tool_calls: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
  """Writes tool calls, with an id for each."""
  return [
    {
      'id': f'call_{next(replies.numbers)}',
      'type': 'function',
      'function': {'name': name, 'arguments': call_arguments.write(arguments)},
    }
    for name, arguments in tool_calls
  ]


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
    # Nothing tells what the first token of a prompt may be.
    named = lambda tops: tops and {_name_token(top): top['logprob'] for top in tops}
    tops = [
      None if item['logprob'] is None else named(item['top_logprobs'])
      for item in logprobs
    ]
    columns = {
      'tokens': [_name_token(item) for item in logprobs],
      'token_logprobs': [item['logprob'] for item in logprobs],
      'top_logprobs': tops,
    }
  return {'text': text, 'logprobs': columns}


CHAT = _Completions(
  '/v1/chat/completions',
  requests.ChatRequest,
  'chat.completion',
  _write_chat_choice,
  _write_chat_delta,
)
TEXT = _Completions(
  '/v1/completions',
  requests.TextRequest,
  'text_completion',
  _write_text_choice,
  _write_text_choice,
)
