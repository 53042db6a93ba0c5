"""Anthropic's Messages and OpenAI's Responses say what chat completions say."""

import asyncio
import contextlib
import itertools
import json

import answers
import dialect_clients
import numpy as np
import openai
import pytest
import serving

from agent_r1_jax.agent import call_formats
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.contrib import dialects
from agent_r1_jax.contrib.dialects import kept_responses, thinking
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.serve import call_arguments, requests, sources
from agent_r1_jax.serve import server as server_lib
from agent_r1_jax.web import http

_USER = dialect_clients.USER
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "%s"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "search", "arguments": {"query": }}\n</tool_call>'


class Scripted(sources.ReplySource):
  """A source of given replies: the server, its dialects and the clients are real."""

  def __init__(self):
    super().__init__(1 << 12)
    self.text, self.is_cut = '', False
    self.asked, self.replies = [], []

  async def submit(self, api_request, automata):
    self.asked.append(api_request)
    ids = serving.policy()[2].encode_reply(self.text)
    ids = ids[:-1] if self.is_cut else ids
    request = request_lib.Request(np.int32([1]), max_tokens=max(len(ids), 1))
    text = request_lib.Sequence(None, request.tokens)
    generation = request_lib.Generation(request, text, 0, lambda: None)
    for i in range(0, len(ids), 3):
      some = np.int32(ids[i : i + 3])
      numbers, tops = np.float32(some) * 0 - 1, np.zeros((len(some), 0), np.int32)
      stopped = not self.is_cut and i + 3 >= len(ids)
      columns = some, numbers, some, stopped, tops, np.float32(tops), numbers, numbers
      generation.add(request_lib.Chunk(*columns))
    return [generation]

  async def count(self, api_request):
    return 17

  def accept(self, generation, reply):
    self.replies.append(reply)


@pytest.fixture(scope='module')
def scripted():
  """The source, and the address of its server."""
  with _serve_scripted(serving.policy()[2]) as found:
    yield found


@contextlib.contextmanager
def _serve_scripted(chat):
  from starlette import applications

  source, (shape, _, _) = Scripted(), serving.policy()
  options = {'name': 'policy', 'max_replies': 9, 'seconds': 60, 'restrict': False}
  options |= {'dialects': dialects.ALL}
  server = server_lib.Server(lambda *who: source, chat, shape.vocab_size, **options)
  app = applications.Starlette(routes=server.make_routes())
  with answers.run(app) as (port, _):
    yield source, f'http://127.0.0.1:{port}/v1'


REPLIES = {
  'text': 'It is é漢😀, and so on.',
  'nothing': '',
  'thoughts': '<think>\nSo, so. </think>\n\nIt is so.',
  'blank': '  <think></think>It is.',
  'inside': 'No <think>thoughts</think> first.',
  'calls': f'I ask. {CALL % "a"}\n{CALL % "b"}',
  'thinks and calls': f'<think>Hm <b></think>{CALL % "a"}',
  'broken': BROKEN,
  'cut text': 'It is not',
  'cut thoughts': '<think>It is not',
  'cut call': CALL[:30],
}


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('name', [*dialect_clients.ALL])
def test_what_a_client_sends_back_is_the_reply(scripted, name, stream):
  """Of each kind of reply, whatever the dialect makes of it."""
  source, url = scripted
  shown = {'messages': ('end_turn', 'tool_use', 'max_tokens')}
  shown |= {'chat': ('stop', 'tool_calls', 'length')}
  shown |= {'responses': ('completed', 'completed', 'max_output_tokens')}

  async def run():
    agent = dialect_clients.ALL[name](url, stream)
    async with agent.client:
      for kind, text in REPLIES.items():
        # Their client raises an error at the end of such a stream.
        if not (kind.startswith('cut') and name == 'chat' and stream):
          await check(agent, kind, text)

  async def check(agent, kind, text):
    source.text, source.is_cut = text, kind.startswith('cut')
    more = {} if name == 'chat' else {'thinks': True}
    answer = await agent.ask([_USER], dialect_clients.TOOLS, most=2048, **more)
    results = [(id_, 'found') for id_, _, _ in answer.calls]
    results = agent.results(results) if results else [_USER]
    await agent.ask(
      [_USER, *answer.items, *results], dialect_clients.TOOLS, most=2048, **more
    )
    reply, given = source.replies[-2], source.asked[-1].messages
    expected = requests.make_comparable(reply.as_message())
    assert requests.make_comparable(given[1]) == expected, kind
    roles = ['tool'] * len(answer.calls) or ['user']
    assert [message['role'] for message in given[2:]] == roles
    assert [(n, a) for _, n, a in answer.calls] == [
      (n, {'malformed_arguments': a} if name == 'messages' and a == str(a) else a)
      for n, a in reply.calls
    ], kind
    reasons = dict(zip(('stop', 'tool_calls', 'length'), shown[name], strict=True))
    assert answer.reason == reasons[reply.reason], kind
    thinks = name != 'chat' and text.lstrip().startswith('<think>')
    assert bool(answer.thoughts.strip()) == (thinks and kind != 'blank')
    if thinks:
      thoughts, _, rest = text.lstrip().removeprefix('<think>').partition('</think>')
      assert answer.thoughts == thoughts
      assert answer.text == rest.partition('<tool_call>')[0]

  asyncio.run(run())


def _hermes(body):
  return f'<tool_call>\n{body}\n</tool_call>'


# Whole calls, of which all or the first are malformed.
MALFORMED = {
  'hermes': [
    *map(
      _hermes,
      [
        '{"name": "search", "arguments": null}',
        '{"name": "search", "arguments": []}',
        '{"name": "search", "arguments": {"query": NaN}}',
        '{"name": "search", "args": {"query": "a"}}',
        '{"arguments": {"query": "a"}}',
        '{"name": "", "arguments": {"query": "a"}}',
        '{"type": "function", "function": {"name": "search", "arguments": {}}}',
        '{"malformed_arguments": "{}"}',
        '{}',
        '',
      ],
    ),
    _hermes('{"name": "search", "arguments": []}') + '\n' + CALL % 'a',
    '<tool_call>{"name": "search", "arguments": 3}',
  ],
  'llama3': [
    '{"name": "search", "parameters": null}',
    '{"name": "search", "parameters": []}',
    '<|python_tag|>{"parameters": {"query": "a"}}',
    '{"name": "search", "parameters": {"query": NaN}}',
  ],
  'search_r1': ['<search>{"query": "a"}<search>b</search>', '<search>{}<answer>'],
}


@pytest.mark.parametrize('tool_format', [*MALFORMED])
def test_a_malformed_call_that_comes_back_is_what_was_sampled(tool_format):
  """In every dialect; nothing is taken for arguments that was none, or written anew."""
  call_format = call_formats.FORMATS[tool_format]
  chat = chat_lib.Chat(serving.policy()[2].tokenizer, tool_format=call_format)

  async def run(source, url):
    for make, stream in itertools.product(dialect_clients.ALL.values(), (False, True)):
      agent = make(url, stream)
      async with agent.client:
        for text in MALFORMED[tool_format]:
          await check(source, agent, text)

  async def check(source, agent, text):
    source.text = f'I ask.\n{text}'
    answer = await agent.ask([_USER], dialect_clients.TOOLS, most=2048)
    found = agent.results([(id_, 'found') for id_, _, _ in answer.calls])
    await agent.ask([_USER, *answer.items, *found], dialect_clients.TOOLS, most=2048)
    reply, given = source.replies[-2], source.asked[-1].messages[1]
    assert isinstance(reply.calls[0][1], str), reply.calls
    expected = requests.make_comparable(reply.as_message())
    assert requests.make_comparable(given) == expected, text
    # Where nobody remembers the reply, as at experiments.serve.
    (written,) = requests.to_chat([given], call_format)
    is_same = lambda *texts: len({''.join(x.split()) for x in texts}) == 1
    assert is_same(written['content'], f'I ask.\n{text}'.removesuffix('<answer>'))

  with _serve_scripted(chat) as (source, url):
    asyncio.run(run(source, url))


@pytest.mark.parametrize(
  'arguments',
  [
    {'malformed_arguments': 'x'},
    {'malformed_arguments': {'malformed_arguments': '{}'}},
    {'malformed_arguments': 3},
    '{"malformed_arguments": "x"}',
    '{"a": 1}',
    '[1]',
    '',
    {},
    {'a': 'é\n'},
  ],
)
def test_no_two_kinds_of_arguments_are_sent_alike(arguments):
  """What was sent tells what it was, in a text and as an object."""
  for sent in (
    call_arguments.write(arguments),
    json.dumps(call_arguments.make_object(arguments)),
  ):
    asked = {'messages': [{'role': 'assistant', 'tool_calls': [_function(sent)]}]}
    (message,) = http.check_fields(requests.ChatRequest, asked).messages
    assert message['calls'] == [('f', arguments)]


def _function(arguments):
  return {'id': 'c', 'function': {'name': 'f', 'arguments': arguments}}


@pytest.mark.parametrize('size', [1, 2, 100])
@pytest.mark.parametrize(
  'text', [*REPLIES.values(), '<think>a </thin </think>b', '<thin']
)
def test_thoughts_are_split_wherever_a_stream_is_cut(text, size):
  split, found = thinking.Split(True), {'thinking': [], 'text': []}
  pieces = [text[i : i + size] for i in range(0, len(text), size)]
  for i, piece in enumerate(pieces or ['']):
    for kind, more in split.add(piece, i >= len(pieces) - 1):
      found[kind].append(more)
  thoughts, rest = ''.join(found['thinking']), ''.join(found['text'])
  joined = thinking.join(thoughts, split.is_closed) if found['thinking'] else ''
  assert joined + rest == (text.lstrip() if joined else text)
  assert bool(joined) == text.lstrip().startswith('<think>')
  if joined:
    within = text.lstrip().removeprefix('<think>').partition('</think>')
    assert (thoughts, rest) == (within[0], within[2])


def test_thoughts_stay_in_the_text_unless_they_are_asked_for(scripted):
  source, url = scripted
  source.text, source.is_cut = REPLIES['thoughts'], False

  async def run(agent):
    async with agent.client:
      return await agent.ask([_USER], most=99)

  for name in dialect_clients.ALL:
    answer = asyncio.run(run(dialect_clients.ALL[name](url)))
    assert (answer.text, answer.thoughts) == (source.text, '')


def test_few_responses_are_kept(scripted, monkeypatch):
  source, url = scripted
  source.text, source.is_cut = 'So.', False
  monkeypatch.setattr(kept_responses, '_MOST_KEPT', 2)
  with openai.OpenAI(base_url=url, api_key='none', max_retries=0) as client:
    ask = lambda **more: client.responses.create(model='policy', input='a', **more)
    first, second, third = (ask().id for _ in range(3))
    unkept = ask(store=False).id
    for name in (first, unkept):
      with pytest.raises(openai.BadRequestError, match='not kept any longer') as error:
        ask(previous_response_id=name)
      assert error.value.code == 'previous_response_not_found'
    # What is gone on from is kept longer than what is not.
    fourth = ask(previous_response_id=second)
    assert fourth.previous_response_id == second
    assert [m['content'] for m in source.asked[-1].messages] == ['a', 'So.', 'a']
    assert ask(previous_response_id=second)
    with pytest.raises(openai.BadRequestError):
      ask(previous_response_id=third)
    # So many characters are too many at once.
    monkeypatch.setattr(kept_responses, '_MOST_CHARACTERS', 10)
    with pytest.raises(openai.BadRequestError):
      ask(previous_response_id=ask().id)
