"""Anthropic's Messages and OpenAI's Responses say what chat completions say."""

import asyncio
import contextlib
import functools
import itertools
import json
import re

import answers
import anthropic
import dialect_clients
import httpx2
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

SEARCH = serving.search_tool()
TOOLS = [SEARCH.schema]
USER = {'role': 'user', 'content': 'Who is it?'}
_MANY = serving.replace(serving.LIMITS, max_turns=20)
ALL = {
  'chat': dialect_clients.Chat,
  'messages': dialect_clients.Messages,
  'responses': dialect_clients.Responses,
}
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "%s"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "search", "arguments": {"query": }}\n</tool_call>'


class Scripted(sources.Source):
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
    text = request_lib.Text(None, request.tokens)
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


_run_programs = functools.partial(serving.run_programs, dialects=dialects.ALL)
_serve = functools.partial(serving.serve, dialects=dialects.ALL)


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


@pytest.fixture(scope='module')
def url():
  with _serve() as url:
    yield url


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
@pytest.mark.parametrize('name', [*ALL])
def test_what_a_client_sends_back_is_the_reply(scripted, name, stream):
  """Of each kind of reply, whatever the dialect makes of it."""
  source, url = scripted
  shown = {'messages': ('end_turn', 'tool_use', 'max_tokens')}
  shown |= {'chat': ('stop', 'tool_calls', 'length')}
  shown |= {'responses': ('completed', 'completed', 'max_output_tokens')}

  async def run():
    agent = ALL[name](url, stream)
    async with agent.client:
      for kind, text in REPLIES.items():
        # Their client raises an error at the end of such a stream.
        if not (kind.startswith('cut') and name == 'chat' and stream):
          await check(agent, kind, text)

  async def check(agent, kind, text):
    source.text, source.is_cut = text, kind.startswith('cut')
    more = {} if name == 'chat' else {'thinks': True}
    answer = await agent.ask([USER], TOOLS, most=2048, **more)
    results = [(id_, 'found') for id_, _, _ in answer.calls]
    results = agent.results(results) if results else [USER]
    await agent.ask([USER, *answer.items, *results], TOOLS, most=2048, **more)
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
    for make, stream in itertools.product(ALL.values(), (False, True)):
      agent = make(url, stream)
      async with agent.client:
        for text in MALFORMED[tool_format]:
          await check(source, agent, text)

  async def check(source, agent, text):
    source.text = f'I ask.\n{text}'
    answer = await agent.ask([USER], TOOLS, most=2048)
    found = agent.results([(id_, 'found') for id_, _, _ in answer.calls])
    await agent.ask([USER, *answer.items, *found], TOOLS, most=2048)
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
      return await agent.ask([USER], most=99)

  for name in ALL:
    answer = asyncio.run(run(ALL[name](url)))
    assert (answer.text, answer.thoughts) == (source.text, '')


async def _play_script(agent, task):
  """Calls a tool, forks, changes the past, and begins texts of its own."""
  ask = functools.partial(agent.ask, tools=TOOLS)
  items, forks = [*task.messages], []
  for _ in range(3):
    answer = await ask(items)
    items = [*items, *answer.items]
    forks.append(items)
    found = [
      (id_, await SEARCH.fn(arguments.get('query', '')))
      for id_, _, arguments in answer.calls
      if isinstance(arguments, dict)
    ]
    if not found:
      break
    items = [*items, *agent.results(found)]
  for side in ('left', 'right'):
    await ask([*forks[0], {'role': 'user', 'content': side}])
  changed = {'role': 'assistant', 'content': 'No'}
  await ask([*task.messages, changed, USER])
  system = {'role': 'system', 'content': 'Be brief.'}
  alone = [system, USER]
  answer = await agent.ask(alone)
  await agent.ask([*alone, *answer.items, {'role': 'user', 'content': 'And then?'}])


@functools.cache
def _play(name, stream=False, remembers=False):
  """The trajectories of some tasks."""
  make = functools.partial(ALL[name], stream=stream)
  make = functools.partial(make, remembers=True) if remembers else make

  async def run(task, url):
    agent = make(url)
    async with agent.client:
      await _play_script(agent, task)

  return _run_programs(run, serving.tasks()[2:3], limits=_MANY)


@pytest.mark.parametrize(
  ('name', 'fields'),
  [
    ('messages', {}),
    ('messages', {'stream': True}),
    ('responses', {}),
    ('responses', {'remembers': True}),
  ],
)
def test_an_episode_is_that_of_chat_completions(name, fields):
  """To the last bit: the same tokens, masks and log-probs, forks and rewritten pasts."""
  expected, played = _play('chat'), _play(name, **fields)
  assert any(t.metrics['tool_calls'] for t in expected)
  for one, other in zip(played, expected, strict=True):
    assert one.error is None and other.error is None
    assert one.metrics == other.metrics and one.metrics['rewritten'] == 1
    assert one.metrics['forks'] >= 1 and len(one.segments) == one.metrics['forks'] + 3
    for s, t in zip(one.segments, other.segments, strict=True):
      for column in ('tokens', 'action_mask', 'behaviour_logprobs', 'policy_steps'):
        np.testing.assert_array_equal(getattr(s, column), getattr(t, column))
    assert one.turns == other.turns and one.messages == other.messages


def test_sub_agents_at_the_same_time():
  """In each dialect at once, beside each other in one episode."""

  async def run(task, url):
    async def play(name):
      agent = ALL[name](url)
      async with agent.client:
        opening = [{'role': 'system', 'content': name}, USER]
        answer = await agent.ask(opening)
        await agent.ask([*opening, *answer.items, USER])

    await asyncio.gather(*map(play, ALL))

  (one,) = _run_programs(run, serving.tasks()[:1], limits=_MANY)
  assert one.error is None and len(one.segments) == 3
  assert [turn.segment for turn in one.turns].count(0) == 2


def test_an_episode_keeps_its_own_responses(monkeypatch):
  monkeypatch.setattr(kept_responses, '_MOST_KEPT', 1)
  both, names = asyncio.Barrier(2), set()

  async def run(task, url):
    async with openai.AsyncOpenAI(base_url=url, api_key='none', max_retries=0) as client:
      create = functools.partial(client.responses.create, model='policy', input='a')
      own = (await create()).id
      names.add(own)
      await both.wait()
      (other,) = names - {own}
      with pytest.raises(openai.BadRequestError, match='there is no response'):
        await create(previous_response_id=other)
      assert await create(previous_response_id=own)

  played = _run_programs(run, serving.tasks()[:1], samples=2)
  assert [(t.error, len(t.turns)) for t in played] == [(None, 2)] * 2


@contextlib.contextmanager
def _clients(url, key='none'):
  with (
    anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as messages,
    openai.OpenAI(base_url=f'{url}/v1', api_key=key, max_retries=0) as responses,
  ):
    yield messages, responses


def test_fields_of_messages(url):
  with _clients(url) as (client, _):
    sampling = {'extra_body': {'temperature': 0, 'top_p': 0.9, 'top_k': 5}}
    ask = functools.partial(
      client.messages.create, model='policy', messages=[USER], max_tokens=40, **sampling
    )
    whole = ask(metadata={'user_id': 'a'})
    assert whole.stop_reason in ('end_turn', 'max_tokens') and whole.stop_sequence is None
    text = whole.content[0].text
    stop = text[len(text) // 2 :][:2]
    cut = ask(stop_sequences=['§', stop])
    assert (cut.stop_reason, cut.stop_sequence) == ('stop_sequence', stop)
    assert cut.content[0].text == text[: text.index(stop)]
    count = client.messages.count_tokens(model='policy', messages=[USER]).input_tokens
    chat = serving.policy()[2]
    assert whole.usage.input_tokens == count == len(chat.encode_prompt([USER], []))
    # The log-probs of what was sampled count its tokens.
    assert ask(max_tokens=3).usage.output_tokens == 3
    tools = [dialect_clients.Messages.tool(tool) for tool in TOOLS]
    named = {'type': 'tool', 'name': 'search'}
    for choice in ({'type': 'any'}, named):
      called = ask(tools=tools, tool_choice=choice, max_tokens=200)
      assert called.stop_reason == 'tool_use'
    none = ask(tools=tools, tool_choice={'type': 'none'})
    assert none.content == whole.content
    schema = {
      'type': 'object',
      'properties': {'year': {'type': 'integer', 'minimum': 1, 'maximum': 9999}},
    }
    schema |= {'required': ['year'], 'additionalProperties': False}
    form = {'format': {'type': 'json_schema', 'schema': schema}}
    made = ask(output_config=form, max_tokens=100)
    assert isinstance(json.loads(made.content[0].text)['year'], int)


def test_fields_of_responses(url):
  with _clients(url) as (_, client):
    ask = functools.partial(
      client.responses.create, model='policy', input='Who is it?', temperature=0
    )
    whole = ask(max_output_tokens=40, metadata={'a': 'b'})
    assert whole.metadata == {'a': 'b'} and whole.usage.total_tokens > 2
    again = ask(
      input=[USER], max_output_tokens=40, include=['message.output_text.logprobs']
    )
    part = again.output[0].content[0]
    assert again.output_text == whole.output_text
    assert len(part.logprobs) == again.usage.output_tokens
    counted = client.responses.input_tokens.count(model='policy', input=[USER])
    assert counted.input_tokens == whole.usage.input_tokens
    tools = [dialect_clients.Responses.tool(tool) for tool in TOOLS]
    for choice in ('required', {'type': 'function', 'name': 'search'}):
      called = ask(tools=tools, tool_choice=choice, max_output_tokens=200)
      assert called.output[-1].type == 'function_call'
    schema = {
      'type': 'object',
      'properties': {'year': {'type': 'integer', 'minimum': 1, 'maximum': 9999}},
    }
    schema |= {'required': ['year'], 'additionalProperties': False}
    form = {'format': {'type': 'json_schema', 'name': 'x', 'schema': schema}}
    made = ask(text=form, max_output_tokens=100)
    assert isinstance(json.loads(made.output_text)['year'], int)


def test_a_reply_that_may_have_one_call_ends_with_it(url):
  """In each dialect; where it may have several it goes on, here to its stop token."""
  required = {'tools': TOOLS, 'tool_choice': 'required', 'messages': [USER]}
  as_messages = required | {'tools': [dialect_clients.Messages.tool(SEARCH.schema)]}
  as_responses = required | {'tools': [dialect_clients.Responses.tool(SEARCH.schema)]}

  def count(path, **fields):
    body = {'temperature': 0, 'max_tokens': 200, 'input': [USER], **fields}
    usage = httpx2.post(f'{url}/v1/{path}', json=body, timeout=120).json()['usage']
    return usage.get('completion_tokens') or usage['output_tokens']

  found = [
    (
      count('chat/completions', **required, parallel_tool_calls=parallel),
      count(
        'messages',
        **as_messages
        | {'tool_choice': {'type': 'any', 'disable_parallel_tool_use': not parallel}},
      ),
      count('responses', **as_responses, parallel_tool_calls=parallel),
    )
    for parallel in (True, False)
  ]
  assert len({*found[0]}) == 1 and found[1] == tuple(n - 1 for n in found[0])


def test_a_reply_goes_on_from_a_given_beginning(url):
  asked = {'temperature': 0, 'max_tokens': 40}
  ask = lambda path, text, **more: httpx2.post(
    f'{url}/v1/{path}',
    json={**asked, 'messages': [USER, *_said(text)], **more},
    timeout=120,
  ).json()
  whole = ask('messages', '')['content'][0]['text']
  begun = whole[: whole.index(' ', 10)]
  goes_on = ask('messages', begun)
  assert goes_on['content'][0]['text'] == whole.removeprefix(begun)
  chat = ask('chat/completions', begun, continue_final_message=True)
  assert chat['choices'][0]['message']['content'] == whole.removeprefix(begun)
  counted = ask('messages/count_tokens', begun)['input_tokens']
  assert counted == goes_on['usage']['input_tokens']
  long = ask('messages', 'x' * 100_000)['error']['message']
  assert 'more than 320 tokens' in long


def _said(text):
  return [{'role': 'assistant', 'content': text}] * bool(text)


def test_an_episode_has_replies_of_one_call_and_none_that_is_begun():
  """The turn is ended by the template, which is no action."""

  async def run(task, url):
    async with openai.AsyncOpenAI(base_url=url, api_key='none', max_retries=0) as client:
      create = functools.partial(client.chat.completions.create, model='policy')
      asked = {'tools': TOOLS, 'parallel_tool_calls': False}
      reply = await create(messages=task.messages, **asked)
      message = reply.choices[0].message
      (call,) = message.tool_calls
      said = message.model_dump(exclude_none=True)
      found = {'role': 'tool', 'tool_call_id': call.id, 'content': 'Nothing.'}
      await create(messages=[*task.messages, said, found], **asked)
      begun = [*task.messages, *_said('It is')]
      with pytest.raises(openai.BadRequestError, match='prefill'):
        await create(messages=begun, extra_body={'continue_final_message': True})

  chat = serving.policy()[2]
  (one,) = _run_programs(run, serving.tasks()[2:3])
  (segment,), (first, second) = one.segments, one.turns
  assert one.error is None and segment.tokens[first.stop] == chat.stop_ids[0]
  assert not segment.action_mask[first.stop : second.start].any()
  text = chat.decode_exactly(segment.tokens[first.start : first.stop])
  assert text.endswith('</tool_call>') and text.count('</tool_call>') == 1


def test_a_count_that_is_refused_does_not_end_the_episode():
  """An agent asks for it to see that its conversation has to become shorter."""

  async def run(task, url):
    async with (
      openai.AsyncOpenAI(base_url=url, api_key='none') as client,
      httpx2.AsyncClient(timeout=60) as http_client,
    ):
      for content, count in (('x' * 4_000_000, 1), ('x', 1000)):
        messages = [{**USER, 'content': content}] * count
        answer = await http_client.post(
          f'{url}/responses/input_tokens', json={'input': messages}
        )
        assert answer.json()['error']['code'] == 'context_length_exceeded'
        answer = await http_client.post(
          f'{url}/messages/count_tokens', json={'messages': messages}
        )
        assert answer.status_code == 400
      tools = [serving.search_tool().schema]
      create = client.chat.completions.create
      await create(model='policy', messages=task.messages, tools=tools)

  (played,) = _run_programs(run, serving.tasks()[:1])
  assert (played.status, played.error, len(played.turns)) == ('done', None, 1)


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


_TOOL, _BLOCK = {'name': 'f', 'input_schema': {}}, {'type': 'text', 'text': ''}
_USE = {'type': 'tool_use', 'name': 'f', 'input': {}}


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'max_tokens': None}, 'max_tokens is missing'),
    ({'max_tokens': 0}, 'max_tokens is 0'),
    ({'max_tokens': 5000}, 'there is room for 320'),
    ({'thinking': {'type': 'enabled', 'budget_tokens': -1}}, 'budget_tokens is -1'),
    ({'thinking': {'type': 'enabled', 'budget_tokens': '9'}}, 'budget_tokens is'),
    ({'temperature': 101}, 'temperature is 101'),
    ({'messages': []}, 'at least 1 item'),
    ({'messages': [5]}, r'messages\[0\] is 5'),
    ({'messages': [{'role': 'tool', 'content': 'x'}]}, '"role": "user" or "assistant"'),
    ({'messages': [{'role': 'assistant', 'content': 'It'}]}, 'prefill'),
    ({'messages': [USER, {'role': 'assistant', 'content': [_USE]}]}, 'neither calls'),
    ({'messages': [{'role': 'user', 'content': 5}]}, 'a text or a list of blocks'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'document'}]}]}, 'only texts'),
    ({'messages': [{'role': 'user', 'content': [[]]}]}, 'only texts'),
    (
      {'messages': [{'role': 'assistant', 'content': [{'type': 'redacted_thinking'}]}]},
      'text, thinking and tool_use',
    ),
    ({'messages': [{**USER, 'content': [_BLOCK] * 400}]}, 'room for'),
    ({'system': 5}, 'system is 5'),
    ({'tools': [{'type': 'bash_20250124', 'name': 'bash'}]}, 'tools of the client'),
    ({'tools': [_TOOL], 'tool_choice': {'type': 'x'}}, r'give {"type": "auto"}'),
    ({'tools': [_TOOL], 'tool_choice': {'type': 'tool', 'name': 'g'}}, 'no such tool'),
    ({'stop_sequences': [5]}, r'stop_sequences\[0\] is 5'),
    ({'stop_sequences': ['a'] * 17}, 'at most 16'),
    ({'thinking': {'type': 'always'}}, 'enabled, adaptive or disabled'),
    ({'output_config': {'format': {'type': 'xml'}}}, 'json_schema'),
    ({'mcp_servers': [{}]}, 'mcp_servers is .* it is not supported'),
    ({'container': 'x'}, 'container is .* it is not supported'),
  ],
)  # fmt: skip
def test_what_messages_cannot_do_is_refused(url, fields, message):
  body = {'model': 'policy', 'messages': [USER], 'max_tokens': 8, **fields}
  with _clients(url) as (client, _):
    with pytest.raises(anthropic.BadRequestError, match=message) as error:
      client.post('/v1/messages', body=body, cast_to=object)
  assert error.value.body['type'] == 'error'
  assert error.value.body['error']['type'] == 'invalid_request_error'


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'input': None}, 'input is missing'),
    ({'input': []}, 'at least 1 item'),
    ({'input': [5]}, r'input\[0\] is 5'),
    ({'input': [{'type': 'item_reference'}]}, r'input\[0\] is .*only messages'),
    ({'input': [{'role': 'user', 'content': 5}]}, 'a text or a list of parts'),
    ({'input': [{'role': 'user', 'content': [{'type': 'input_file'}]}]}, 'only texts'),
    ({'input': [{'type': 'reasoning', 'summary': []}]}, 'reasoning with its content'),
    ({'input': [USER] * 400}, 'there is room for 320'),
    ({'max_output_tokens': 0}, 'max_output_tokens is 0'),
    ({'max_output_tokens': 5000}, 'there is room for 320'),
    ({'top_p': 0}, 'top_p is 0'),
    ({'tools': [{'type': 'web_search'}]}, 'only functions'),
    ({'tool_choice': {'type': 'allowed_tools'}}, 'give "auto"'),
    ({'tool_choice': 'required'}, 'no such tool'),
    ({'text': {'format': {'type': 'grammar'}}}, "'json_object'"),
    ({'include': ['web_search_call.results']}, 'is not supported'),
    ({'top_logprobs': 21}, 'top_logprobs is 21'),
    ({'parallel_tool_calls': 'no'}, "parallel_tool_calls is 'no'"),
    ({'truncation': 'auto'}, "only 'disabled'"),
    ({'metadata': {'a': 5}}, 'metadata.a is 5'),
    ({'metadata': {'a': 'x' * 513}}, 'at most 512 characters'),
    ({'background': True}, 'background is True; it is not supported'),
    ({'conversation': 'x'}, 'conversation is .* it is not supported'),
    ({'prompt': {'id': 'x'}}, 'prompt is .* it is not supported'),
    ({'max_tool_calls': 3}, 'max_tool_calls is 3; it is not supported'),
    ({'previous_response_id': 'resp_1'}, 'there is no response'),
    ({'store': 'yes'}, "store is 'yes'"),
  ],
)  # fmt: skip
def test_what_responses_cannot_do_is_refused(url, fields, message):
  body = {'model': 'policy', 'input': [USER], **fields}
  with _clients(url) as (_, client):
    with pytest.raises(openai.BadRequestError, match=message):
      client.post('/responses', body=body, cast_to=object)


def test_hostile_bodies_keys_and_the_form_of_errors(url):
  post = lambda path, content: httpx2.post(f'{url}/v1/{path}', content=content)
  deep = '[' * 500 + ']' * 500
  for path, said in (
    ('messages', '"max_tokens": 5, "messages"'),
    ('responses', '"input"'),
  ):
    for body in (
      '{',
      f'{{{said}: {deep}}}',
      '[]',
      f'{{{said}: [{{"content": {deep}}}]}}',
    ):
      assert post(path, body).status_code == 400
    assert post(path, b' ' * (1 << 23)).status_code == 413
    nan = post(
      path, f'{{"temperature": NaN, "max_tokens": 5, {said}: [{json.dumps(USER)}]}}'
    )
    assert nan.status_code == 400 and 'temperature is nan' in nan.text
  assert post('messages', '{').json()['error']['type'] == 'invalid_request_error'
  large = post('messages', b' ' * (1 << 23)).json()
  assert large['type'] == 'error' and large['error']['type'] == 'request_too_large'
  with _serve(keys=['right'], max_waiting=-serving.engine().sizes.rows) as guarded:
    with _clients(guarded, 'wrong') as (messages, responses):
      with pytest.raises(anthropic.AuthenticationError, match='authentication_error'):
        messages.messages.create(model='policy', messages=[USER], max_tokens=5)
      with pytest.raises(openai.AuthenticationError):
        responses.responses.create(model='policy', input='a')
    with _clients(guarded, 'right') as (messages, responses):
      with pytest.raises(anthropic.RateLimitError, match='rate_limit_error') as refused:
        messages.messages.create(model='policy', messages=[USER], max_tokens=5)
      assert refused.value.response.headers['Retry-After'] == '1'
  with _serve(seconds=1e-6) as late, _clients(late) as (messages, responses):
    with pytest.raises(anthropic.APIStatusError, match='timeout_error'):
      messages.messages.create(model='policy', messages=[USER], max_tokens=5)
    with pytest.raises(anthropic.APIStatusError, match='no reply within'):
      with messages.messages.stream(model='policy', messages=[USER], max_tokens=5) as s:
        s.get_final_message()
    with responses.responses.create(model='policy', input='a', stream=True) as stream:
      assert [*stream][-1].response.error.message.startswith('no reply within')


def test_the_scripts_of_the_page_run(url):
  text = (serving.ROOT / 'agent_r1_jax/contrib/dialects/guide.md').read_text()
  blocks = re.findall(r'^```python\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
  assert len(blocks) == 2
  for block in blocks:
    names = {}
    exec(block.replace('http://127.0.0.1:8000', url), names)
    assert names['reply'].model == 'policy'
    names['client'].close()
