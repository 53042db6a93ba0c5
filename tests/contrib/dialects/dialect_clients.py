"""The three dialects as their official clients speak them.

Each of them asks with its own items, which it gets back from `ask` as it will send them.
"""

import json
from typing import Any, NamedTuple

import openai
import serving

SEARCH = serving.search_tool()
TOOLS = [SEARCH.schema]
USER = {'role': 'user', 'content': 'Who is it?'}


class Answer(NamedTuple):
  """What a client makes of a reply."""

  items: list[Any]  # To append to the conversation.
  calls: list[tuple[str, str, Any]]  # Id, name and arguments.
  text: str
  thoughts: str
  reason: str


def _split(items: list[Any]) -> tuple[str | None, list[Any]]:
  """The system's text, if a conversation begins with one, and the rest."""
  first = items[0]
  has = isinstance(first, dict) and first.get('role') == 'system'
  return (first['content'], items[1:]) if has else (None, items)


class Chat:
  """Chat completions."""

  def __init__(self, url: str, stream: bool = False):
    self.client = openai.AsyncOpenAI(base_url=url, api_key='none', max_retries=0)
    self._stream = stream

  def results(self, results: list[tuple[str, str]]) -> list[Any]:
    return [{'role': 'tool', 'tool_call_id': i, 'content': x} for i, x in results]

  async def ask(self, items, tools=(), most=32, **more) -> Answer:
    more |= {'tools': tools} if tools else {}
    asked = {'model': 'policy', 'messages': items, 'max_tokens': most, **more}
    create = self.client.chat.completions
    if self._stream:
      async with create.stream(**asked) as stream:
        choice = (await stream.get_final_completion()).choices[0]
    else:
      choice = (await create.create(**asked)).choices[0]
    message = choice.message
    calls = [
      (call.id, call.function.name, _parse(call.function.arguments))
      for call in message.tool_calls or ()
    ]
    item = message.model_dump(exclude_none=True, exclude={'parsed'})
    for call in item.get('tool_calls', ()):
      call['function'].pop('parsed_arguments', None)
    return Answer([item], calls, message.content or '', '', choice.finish_reason)


class Messages:
  """Anthropic's Messages."""

  def __init__(self, url: str, stream: bool = False):
    import anthropic  # It has 3,000 modules.

    self.client = anthropic.AsyncAnthropic(
      base_url=url.removesuffix('/v1'), api_key='none', max_retries=0
    )
    self._stream = stream

  def results(self, results: list[tuple[str, str]]) -> list[Any]:
    named = [{'tool_use_id': i, 'content': x} for i, x in results]
    return [{'role': 'user', 'content': [{'type': 'tool_result'} | x for x in named]}]

  async def ask(self, items, tools=(), most=32, thinks=False, **more) -> Answer:
    system, messages = _split(items)
    more |= {'system': system} if system else {}
    more |= {'tools': [self.tool(tool) for tool in tools]} if tools else {}
    more |= {'thinking': {'type': 'adaptive'}} if thinks else {}
    asked = {'model': 'policy', 'messages': messages, 'max_tokens': most, **more}
    if self._stream:
      async with self.client.messages.stream(**asked) as stream:
        message = await stream.get_final_message()
    else:
      message = await self.client.messages.create(**asked)
    of = lambda kind: [block for block in message.content if block.type == kind]
    return Answer(
      [{'role': 'assistant', 'content': message.content}],
      [(block.id, block.name, block.input) for block in of('tool_use')],
      ''.join(block.text for block in of('text')),
      ''.join(block.thinking for block in of('thinking')),
      message.stop_reason,
    )

  @staticmethod
  def tool(tool):
    function = dict(tool['function'])
    return {'input_schema': function.pop('parameters')} | function


class Responses:
  """OpenAI's Responses; with `remembers`, only new items are sent."""

  def __init__(self, url: str, stream: bool = False, remembers: bool = False):
    self.client = openai.AsyncOpenAI(base_url=url, api_key='none', max_retries=0)
    self._stream, self._remembers = stream, remembers
    self._named: list[tuple[list[Any], str]] = []

  def results(self, results: list[tuple[str, str]]) -> list[Any]:
    named = [{'call_id': i, 'output': x} for i, x in results]
    return [{'type': 'function_call_output'} | x for x in named]

  async def ask(self, items, tools=(), most=32, thinks=False, **more) -> Answer:
    instructions, given = _split(items)
    more |= {'instructions': instructions} if instructions else {}
    more |= {'tools': [self.tool(tool) for tool in tools]} if tools else {}
    more |= {'reasoning': {'effort': 'low'}} if thinks else {}
    new = given
    for known, name in self._named if self._remembers else ():
      if given[: len(known)] == known and len(given) - len(known) < len(new):
        new = given[len(known) :]
        more['previous_response_id'] = name
    asked = {'model': 'policy', 'input': new, 'max_output_tokens': most, **more}
    if self._stream:
      async with self.client.responses.stream(**asked) as stream:
        events = [event async for event in stream]
      assert [e.sequence_number for e in events] == [*range(len(events))]
      response = events[-1].response
    else:
      response = await self.client.responses.create(**asked)
    output = [_dump(item) for item in response.output]
    self._named.append(([*given, *output], response.id))
    of = lambda kind: [item for item in response.output if item.type == kind]
    thoughts = [part.text for item in of('reasoning') for part in item.content]
    cut = response.incomplete_details
    return Answer(
      output,
      [(x.call_id, x.name, _parse(x.arguments)) for x in of('function_call')],
      response.output_text,
      ''.join(thoughts),
      cut.reason if cut else response.status,
    )

  @staticmethod
  def tool(tool):
    return {'type': 'function'} | tool['function']


def _dump(item) -> dict[str, Any]:
  """What a client sends of an item: without what the library has added."""
  item = item.model_dump(exclude_none=True)
  item.pop('parsed_arguments', None)
  for part in item.get('content', ()):
    part.pop('parsed', None)
  return item


def _parse(arguments: str) -> Any:
  try:
    return json.loads(arguments)
  except ValueError:
    return arguments


ALL = {'chat': Chat, 'messages': Messages, 'responses': Responses}
