"""What the server refuses, bounds and survives."""

import asyncio
from concurrent import futures
import contextlib
import threading
from unittest import mock

import httpx2
import openai
import pytest
import served
import serving
import waiting

from agent_r1_jax.serve import requests, server, sources
from agent_r1_jax.web import http

url, client = served.url, served.client


def _tool(parameters):
  return {'function': {'name': 'f', 'parameters': parameters}}


_TYPE_OF_A_LIST = {'a': {'anyOf': [{'type': [5]}]}}
# Of each field, values that cannot be; `search` is a tool in all of them.
_WRONG = {
  'messages': [
    *([], [{'content': 'x'}]),
    *([{'role': 'assistant', 'tool_calls': x}] for x in ([{}], 5, [served.call(5)])),
    [{'role': 'user', 'content': [{'type': 'image_url'}]}],
    [{'role': 'tool', 'tool_call_id': ['a']}],
    [{'role': 'user', 'name': {'a': 1}}],
  ],
  'max_completion_tokens': [0],
  'temperature': [-1],
  'top_p': [0],
  'top_k': [10**12],
  'n': [1.5, 17],
  'top_logprobs': [2],
  'logit_bias': [{'5': 1}],
  'stop': [[''], ['a'] * 17, [5] * 300_000],
  'tools': [
    *(5, [{'type': 'function'}], [_tool(5)], [_tool({'properties': None})]),
    *([_tool({'properties': {'a': {'type': None}}})], [_tool({'required': [None]})]),
    [_tool({'properties': _TYPE_OF_A_LIST})],
  ],
  'tool_choice': [{'function': 'f'}, {'function': {'name': 'f'}}],
  'response_format': [{'type': 'xml'}, {'type': 'json_schema', 'json_schema': 'x'}],
}
_NOWHERE = {'name': 'a', 'schema': {'$ref': '#/x'}}
# What is wrong with several fields, or with none by itself.
_MORE = {
  'tool_choice is': {'tool_choice': 'required', 'tools': []},
  'response_format': {'tool_choice': 'required', 'response_format': 'json_object'},
  '$ref': {'response_format': {'type': 'json_schema', 'json_schema': _NOWHERE}},
  'tokens': {'messages': [{'role': 'user', 'content': 'word ' * 400}]},
  'reply may have 5000': {'max_tokens': 5000},
  'calls and tools': {'tools': served.TOOLS * 400},
}


@pytest.mark.parametrize(
  ('named', 'fields'),
  [
    *((name, {name: value}) for name, some in _WRONG.items() for value in some),
    *_MORE.items(),
  ],
)
def test_what_cannot_be_done_is_refused(refused, client, url, named, fields):
  count = lambda: served.metric(url, 'endpoint_answers_total{status="400"}')
  before, fields = count(), {'tools': served.TOOLS, **fields}
  with refused(named, openai.BadRequestError):
    client.chat.completions.create(**served.ASKED, extra_body=fields)
  assert count() == before + 1


@pytest.mark.parametrize('depth', [100, 500, 980, 5000])
@pytest.mark.parametrize(
  'fields',
  [
    '"tools": [{"function": {"name": "f", "parameters": {"a": -}}}]',
    '"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": -}}}',
    '"messages": [{"role": "user", "content": -}]',
    '"messages": [{"role": "user", "content": "x", "tool_calls": -}]',
    '"stop": -',
    '"n": -',
    '"unknown": -',
  ],
)
def test_what_is_nested_too_deep_is_refused(url, fields, depth):
  deep = fields.replace('-', '[' * depth + ']' * depth)
  body = f'{{"messages": [{{"role": "user", "content": "x"}}], {deep}}}'
  answer = httpx2.post(f'{url}/v1/chat/completions', content=body)
  assert (
    answer.status_code == 400 and 'nested deeper' in answer.json()['error']['message']
  )


def test_arguments_that_are_nested_too_deep_stay_a_text():
  """As other arguments that cannot be read."""
  call = {'id': 'a', 'function': {'name': 'f', 'arguments': '{"a":' * 300 + '}' * 300}}
  said = {'role': 'assistant', 'tool_calls': [call]}
  (message,) = http.check_fields(requests.ChatRequest, {'messages': [said]}).messages
  assert message['calls'] == [('f', call['function']['arguments'])]


def test_keys_are_separated_by_commas_and_blanks():
  assert server.read_keys('a, b ,,c') == ['a', 'b', 'c'] and server.read_keys('') == []
  for text in (',', ' ', ' , ,\n'):
    with pytest.raises(ValueError, match='has no key; give keys separated by commas'):
      server.read_keys(text)


def test_bodies_keys_and_back_pressure(url):
  post = lambda content, **more: httpx2.post(
    f'{url}/v1/chat/completions', content=content, **more
  )
  assert post('{').status_code == 400 and post(b' ' * (1 << 23)).status_code == 413
  assert httpx2.get(f'{url}/health').json()['status'] == 'ok'
  # One reply may be under way.
  limits = {'max_waiting': 1 - serving.engine().sizes.rows}
  running = serving.serve(keys=['right', 'other'], **limits)
  with running as guarded, contextlib.ExitStack() as stack:
    fields = {'base_url': f'{guarded}/v1', 'max_retries': 0}
    make = lambda key: stack.enter_context(openai.OpenAI(api_key=key, **fields))
    for ask in (
      lambda c: c.chat.completions.create(**served.ASKED),
      lambda c: c.models.list(),
    ):
      with pytest.raises(openai.AuthenticationError):
        ask(make('wrong'))
      assert ask(make('other'))
    with pytest.raises(openai.RateLimitError) as refused:
      make('right').chat.completions.create(**served.ASKED, n=2)
    assert refused.value.response.headers['Retry-After'] == '1'
    assert make('right').chat.completions.create(**served.ASKED)


def test_a_client_that_goes_leaves_nothing_behind(client, url):
  before = served.metric(url, 'endpoint_vanished_total')
  asked = {**served.ASKED, 'max_tokens': 250, 'seed': 1}
  stream = client.chat.completions.create(**asked, stream=True)
  next(iter(stream))
  stream.close()
  with pytest.raises(openai.APITimeoutError):
    client.with_options(timeout=0.001).chat.completions.create(**asked, n=16)
  gone = lambda: served.metric(url, 'endpoint_replies ') == 0
  waiting.until(gone, 'the end of all replies')
  rows = lambda: not any(replica.load for replica in serving.engine().replicas)
  waiting.until(rows, 'that all rows are free')
  assert served.metric(url, 'endpoint_vanished_total') >= before
  assert client.chat.completions.create(**served.GREEDY).choices[0].message.content


@contextlib.contextmanager
def _encoding(monkeypatch, encode=lambda plain, text: plain(text)):
  """Counts the characters that are encoded; `encode` is called in the encoder's place."""
  chat = serving.policy()[2]
  plain, lengths = chat._control._encode_plain, []

  def counted(text):
    lengths.append(len(text))
    return encode(plain, text)

  with monkeypatch.context() as patch:
    patch.setattr(chat._control, '_encode_plain', counted)
    yield lengths


_CALLS = {'role': 'assistant', 'tool_calls': [served.call('f')] * 50_000}


@pytest.mark.parametrize(
  ('fields', 'rendered'),
  [
    ({'messages': [{'role': 'user', 'content': 'x' * 4_000_000}]}, 1),
    ({'messages': [{'role': 'user', 'content': 'x'}] * 60_000}, 0),
    ({'messages': [{'role': 'user', 'content': 'x'}, _CALLS]}, 0),
    ({'prompt': 'x' * 4_000_000}, 0),
  ],
)
def test_what_fits_no_row_is_refused_before_it_is_encoded(
  url, fields, rendered, monkeypatch
):
  path = 'completions' if 'prompt' in fields else 'chat/completions'
  chat, render = serving.policy()[2], mock.Mock(wraps=serving.policy()[2]._render)
  monkeypatch.setattr(chat, '_render', render)
  with _encoding(monkeypatch) as lengths:
    refused = httpx2.post(f'{url}/v1/{path}', json=fields, timeout=60)
  assert refused.status_code == 400, refused.text
  error = refused.json()['error']
  assert error['code'] == 'context_length_exceeded' and '320' in error['message']
  # A request of an earlier test, whose client has gone, may be read late.
  mine = [call for call in render.mock_calls if 'x' == call.args[0][0]['content'][:1]]
  assert max(lengths, default=0) < 1000 and len(mine) == rendered


def test_a_long_text_is_encoded_while_others_are_answered(client, url, monkeypatch):
  entered, gate = threading.Semaphore(0), threading.Event()
  long = {**served.GREEDY, 'messages': [{'role': 'user', 'content': 'Who is it? ' * 20}]}
  expected = client.chat.completions.create(**long).choices[0].message.content

  def wait(plain, text):
    if len(text) > 200:
      entered.release()
      assert gate.wait(60)
    return plain(text)

  monkeypatch.setattr(sources, '_MAX_CHARACTERS', 200)
  with _encoding(monkeypatch, wait), futures.ThreadPoolExecutor() as pool:
    ask = lambda: client.chat.completions.create(**long).choices[0].message.content
    asked = [pool.submit(ask) for _ in range(3)]
    try:
      for _ in range(2):
        assert entered.acquire(timeout=60)
      reply = client.completions.create(model='policy', prompt='Who', max_tokens=4)
      assert reply.choices
      # The third waits for a thread; all count as replies that are under way.
      waiting.until(
        lambda: served.metric(url, 'endpoint_replies ') == 3, 'three requests'
      )
      assert not entered.acquire(blocking=False)
    finally:
      gate.set()
    assert [future.result(60) for future in asked] == [expected] * 3
  gone = lambda: served.metric(url, 'endpoint_replies ') == 0
  waiting.until(gone, 'the end of all replies')


def test_the_prompts_of_a_request_are_long_together(client, monkeypatch):
  on_loop = []

  def look(plain, text):
    on_loop.append(asyncio._get_running_loop() is not None)
    return plain(text)

  monkeypatch.setattr(sources, '_MAX_CHARACTERS', 200)
  with _encoding(monkeypatch, look):
    for count in (1, 20):
      prompt = ['Who is it? ' * 5] * count
      made = client.completions.create(model='policy', prompt=prompt, max_tokens=1)
      assert len(made.choices) == count
  assert on_loop == [True] + [False] * 20


def test_a_text_that_is_not_encoded_in_time_is_refused(client, monkeypatch):
  gate = threading.Event()
  monkeypatch.setattr(sources, '_MAX_CHARACTERS', 0)
  monkeypatch.setattr(http, '_THREAD_SECONDS', 0.01)
  with _encoding(monkeypatch, lambda plain, text: gate.wait(60) and plain(text)):
    try:
      with pytest.raises(openai.InternalServerError, match=r'within 0.01 s') as refused:
        client.chat.completions.create(**served.ASKED)
    finally:
      gate.set()
  assert refused.value.status_code == 503


def test_a_late_reply():
  with (
    serving.serve(seconds=1e-6) as url,
    openai.OpenAI(base_url=f'{url}/v1', api_key='none', max_retries=0) as client,
  ):
    with pytest.raises(openai.InternalServerError, match='no reply within'):
      client.chat.completions.create(**served.ASKED)
    with pytest.raises(openai.APIError, match='no reply within'):
      [*client.chat.completions.create(**served.ASKED, stream=True)]
