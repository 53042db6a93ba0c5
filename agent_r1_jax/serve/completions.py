"""OpenAI's chat completions and completions: how answers are written."""

from collections.abc import Callable, Sequence
import dataclasses
import time
from typing import Any

from agent_r1_jax.serve import call_arguments, replies, requests
from agent_r1_jax.serve import dialect as dialect_lib
from agent_r1_jax.web import http


@dataclasses.dataclass(frozen=True)
class _Completions(dialect_lib.Dialect):
  """Chat completions, or completions.

  Attributes:
    path: See dialect.Dialect.
    model: The pydantic model of a request's body.
    name: The name of the API in answers.
    choice: (text, calls, log-probs, whether it is part of a streamed choice) -> the
      fields of a choice.
  """

  path: str
  model: type[requests.ApiRequest]
  name: str
  choice: Callable[..., dict[str, Any]]

  def read(self, fields, memory, counts=False):
    """Reads the body, which is the request itself."""
    request = http.check_fields(self.model, fields)
    return dialect_lib.Asked(request, request)

  def write(self, head: dialect_lib.Head, parts: Sequence[Any], sampled: int):
    """Writes all choices."""
    choices = [self._number(part) for part in parts]
    return self.frame(head, choices, self.name, usage=_count_usage(head, sampled))

  def stream(self, head: dialect_lib.Head) -> dialect_lib.EventStream:
    """Begins a stream of parts of choices."""
    return _ChatStream(self, head)

  def frame(self, head: dialect_lib.Head, choices: list, kind: str, **more: Any):
    """Wraps choices in the fields of an answer, or of a part of one."""
    fields = {'id': f'reply-{head.number}', 'object': kind, 'created': int(time.time())}
    return fields | {'model': head.model, 'choices': choices} | more

  def _number(self, part: dialect_lib.ReplyPart, is_part: bool = False) -> dict[str, Any]:
    reply = part.reply
    calls = reply.calls if reply else ()
    written = self.choice(part.text, calls, part.logprobs, is_part)
    reason = {'finish_reason': reply.reason if reply else None}
    return {'index': part.index} | written | reason


class _ChatStream(dialect_lib.EventStream):
  def __init__(self, dialect: _Completions, head: dialect_lib.Head):
    self.dialect, self.head = dialect, head
    self._begun: set[int] = set()

  def add(self, part: dialect_lib.ReplyPart):
    choice = self.dialect._number(part, is_part=True)
    if part.index in self._begun:  # Clients concatenate the parts, roles included.
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
  """Writes tool calls, each with an id."""
  return [
    {
      'id': f'call_{next(replies.numbers)}',
      'type': 'function',
      'function': {'name': name, 'arguments': call_arguments.write(arguments)},
    }
    for name, arguments in tool_calls
  ]


def _write_chat_choice(
  text: str, tool_calls: Sequence, logprobs: list | None, is_part: bool = False
) -> dict[str, Any]:
  message: dict[str, Any] = {'role': 'assistant', 'content': text}
  if tool_calls:
    message['content'] = text if is_part else text or None
    calls = _write_calls(tool_calls)
    numbered = [{'index': i} | call for i, call in enumerate(calls)]
    message['tool_calls'] = numbered if is_part else calls
  columns = None if logprobs is None else {'content': logprobs, 'refusal': None}
  return {'delta' if is_part else 'message': message, 'logprobs': columns}


def _name_token(item: dict[str, Any]) -> str:
  r"""Names a token of a text completion; a partial character is 'bytes:\xc3'."""
  try:
    bytes(item['bytes']).decode()
  except UnicodeDecodeError:
    return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in item['bytes'])
  return item['token']


def _write_text_choice(
  text: str, tool_calls: Sequence, logprobs: list | None, is_part: bool = False
) -> dict[str, Any]:
  columns = None
  if logprobs is not None:
    # The first token of a prompt has no prediction.
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
)
TEXT = _Completions(
  '/v1/completions',
  requests.TextRequest,
  'text_completion',
  _write_text_choice,
)
