"""The server, asked by OpenAI's client: what it answers, refuses, counts and survives."""

import asyncio
from concurrent import futures
import contextlib
import json
import signal
import threading
from unittest import mock

import httpx2
import numpy as np
import openai
import pydantic
import pytest
import script
import serving
import tiny
import waiting

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import request
from agent_r1_jax.serve import answer as answer_lib
from agent_r1_jax.serve import replies, requests, server, sources
from agent_r1_jax.web import http

TOOLS = [serving.search_tool().schema]
ASKED = {'model': 'policy', 'messages': serving.tasks()[0].messages}
GREEDY = {**ASKED, 'temperature': 0}


@pytest.fixture(scope='module')
def url():
  with serving.serve() as url:
    yield url


@pytest.fixture
def client(url):
  with openai.OpenAI(base_url=f'{url}/v1', api_key='none', max_retries=0) as client:
    yield client


def test_a_tool_whose_parameters_are_null_has_none(client):
  function = {'name': 'now', 'description': None, 'parameters': None}
  prompts = [
    client.chat.completions.create(
      **GREEDY, tools=[{'type': 'function', 'function': given}], max_tokens=1
    ).usage.prompt_tokens
    for given in (function, {'name': 'now'})
  ]
  assert prompts[0] == prompts[1]


def test_a_model_is_asked_for_by_its_name(client):
  assert client.models.retrieve('policy') == client.models.list().data[0]
  with pytest.raises(openai.NotFoundError, match="no model 'a/b'; there are: policy"):
    client.models.retrieve('a/b')


@pytest.mark.parametrize(
  ('method', 'path', 'status'),
  [
    ('GET', '/', 404),
    ('POST', '/v1/embeddings', 404),
    ('GET', '/v1/chat/completions', 405),
    ('DELETE', '/v1/models/policy', 405),
    ('POST', '/health', 405),
  ],
)
def test_other_paths_and_methods_have_the_form_of_errors(url, method, path, status):
  answer = httpx2.request(method, url + path)
  assert answer.status_code == status
  error = answer.json()['error']
  assert method in error['message'] and path in error['message']
  assert {*error} >= {'message', 'type', 'code'}
  assert ('allow' in answer.headers) == (status == 405)


def test_a_page_of_another_origin_may_ask(url):
  """A browser asks before it sends JSON or a key, and without them."""
  origin = {'Origin': 'http://localhost:3000'}
  asked = {
    'Access-Control-Request-Method': 'POST',
    'Access-Control-Request-Headers': 'authorization,content-type,x-api-key',
  }
  before = httpx2.options(f'{url}/v1/chat/completions', headers=origin | asked)
  assert before.status_code == 200
  assert before.headers['access-control-allow-origin'] == '*'
  assert 'POST' in before.headers['access-control-allow-methods']
  allowed = before.headers['access-control-allow-headers'].lower()
  assert all(name in allowed for name in ('authorization', 'content-type', 'x-api-key'))
  for path in ('/v1/models', '/v1/nothing'):
    answer = httpx2.get(url + path, headers=origin)
    assert answer.headers['access-control-allow-origin'] == '*'


def _schema(schema):
  return {'type': 'json_schema', 'json_schema': {'name': 'answer', 'schema': schema}}


def _tool(parameters):
  return {'tools': [{'function': {'name': 'f', 'parameters': parameters}}]}


def _call(name):
  return {'id': 'a', 'function': {'name': name, 'arguments': ''}}


def _metric(url, name):
  text = httpx2.get(f'{url}/metrics').text
  return sum(float(s.split()[-1]) for s in text.split('\n') if s.startswith(name))


def _join(parts):
  """The message and the end of a stream, and the number of its parts."""
  text, calls, reason = '', [], None
  for part in parts:
    for choice in part.choices:
      text += choice.delta.content or ''
      calls += choice.delta.tool_calls or []
      reason = choice.finish_reason or reason
  return text, [(call.function.name, call.function.arguments) for call in calls], reason


def test_a_reply_is_the_engines_and_its_stream_is_the_same(client):
  asked = {**GREEDY, 'tools': TOOLS, 'max_tokens': 40}
  whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
  (choice,) = whole.choices
  model, _, chat = serving.policy()
  ids = chat.encode_prompt(ASKED['messages'], TOOLS)

  async def sample():
    return await serving.engine().submit(
      request.Request(
        ids,
        max_tokens=40,
        sampling=config_lib.GREEDY,
        automata=[chat.stop_automaton(model.vocab_size)],
      )
    )

  (reply,) = serving.engine().start([sample()]).result(60)
  assert choice.finish_reason == 'tool_calls' and choice.message.content is None
  (call,) = chat.format.parse(chat.decode(reply.tokens.tolist()))
  function = choice.message.tool_calls[0].function
  assert (function.name, json.loads(function.arguments)) == (call.name, call.arguments)
  found = choice.logprobs.content
  assert [item.logprob for item in found] == pytest.approx(reply.logprobs.tolist())
  assert found[0].top_logprobs[0].logprob == found[0].logprob
  assert whole.usage.prompt_tokens == len(ids)
  assert whole.usage.completion_tokens == len(reply.tokens) == len(found)

  parts = [
    *client.chat.completions.create(
      **asked, stream=True, stream_options={'include_usage': True}
    )
  ]
  assert parts.pop().usage == whole.usage
  assert _join(parts) == ('', [(function.name, function.arguments)], 'tool_calls')
  # Without tools, the same reply is a text; it streams in several parts.
  del asked['tools']
  whole = client.chat.completions.create(**asked).choices[0]
  parts = [*client.chat.completions.create(**asked, stream=True)]
  assert _join(parts) == (whole.message.content, [], whole.finish_reason)


def test_seed_n_stop_and_length(client):
  create = client.chat.completions.create
  texts = lambda **more: [c.message.content for c in create(**ASKED, **more).choices]
  three = texts(seed=7, n=3)
  assert texts(seed=7, n=3) == three and len(set(three)) > 1
  parts = [*create(**ASKED, seed=7, n=3, stream=True)]
  for i, text in enumerate(three):
    mine = [p for p in parts if p.choices[0].index == i]
    assert _join(mine)[0] == text
  (whole,) = texts(temperature=0)
  stop = whole[len(whole) // 2 :][:3]
  asked = {**GREEDY, 'stop': ['§', stop]}
  for streamed in (False, True):
    cut = create(**asked, stream=streamed)
    text = _join(cut)[0] if streamed else cut.choices[0].message.content
    assert text == whole[: whole.index(stop)]
  short = create(**GREEDY, max_tokens=3)
  assert short.choices[0].finish_reason == 'length'
  assert short.usage.completion_tokens == 3


def test_schemas_and_required_calls_restrict(client):
  class Answer(pydantic.BaseModel):
    year: int
    certain: bool

  parsed = client.chat.completions.parse(**ASKED, response_format=Answer, seed=0)
  assert isinstance(parsed.choices[0].message.parsed, Answer)
  named = {'type': 'function', 'function': {'name': 'search'}}
  for choice in ('required', named):
    reply = client.chat.completions.create(
      **{**ASKED, 'messages': [{'role': 'user', 'content': 'Hello'}]},
      tools=TOOLS,
      tool_choice=choice,
      seed=0,
    )
    assert reply.choices[0].finish_reason in ('tool_calls', 'length')


def test_completions_and_models(client):
  prompt = '<|im_start|>user\nWho'
  whole = client.completions.create(
    model='policy', prompt=prompt, max_tokens=6, temperature=0, logprobs=1
  )
  ids = serving.policy()[2].encode_text(prompt).tolist()
  assert whole.usage.prompt_tokens == len(ids)
  assert len(whole.choices[0].logprobs.token_logprobs) == 6
  same = client.completions.create(
    model='policy', prompt=ids, max_tokens=6, temperature=0
  )
  assert same.choices[0].text == whole.choices[0].text
  assert [model.id for model in client.models.list().data] == ['policy']


def test_prompts_are_echoed_with_the_learners_log_probs(client):
  shape, params, chat = serving.policy()
  prompts = [chat.encode_text(text).tolist() for text in ('Who is it? ' * 9, 'Who')]
  ask = lambda **more: client.completions.create(
    model='policy', prompt=prompts, echo=True, temperature=0, **more
  )
  scored = ask(max_tokens=1, logprobs=1)
  segments = [types.Segment(x, x > -1, np.float32(0 * x)) for x in map(np.int32, prompts)]
  learned = tiny.learned(params, segments, shape=shape)
  for i, (ids, expected) in enumerate(zip(prompts, learned, strict=True)):
    choice = scored.choices[i]
    first, *others = choice.logprobs.token_logprobs
    assert choice.index == i and first is None and choice.logprobs.top_logprobs[0] is None
    assert others[: len(ids) - 1] == pytest.approx(expected[1:].tolist(), abs=2e-5)
    # The reply is greedy: each of its tokens is the likeliest.
    assert others[len(ids) - 1 :] == [*choice.logprobs.top_logprobs[-1].values()]
    assert choice.text.startswith(chat.decode_exactly(ids))
  assert scored.usage.prompt_tokens == sum(map(len, prompts))
  alone = ask(max_tokens=0, logprobs=0, n=2, stream=True)
  texts = [part.choices[0].text for part in alone if part.choices[0].text]
  assert texts == [chat.decode_exactly(ids) for ids in prompts for _ in range(2)]
  for more, message in (
    ({'max_tokens': 0, 'echo': False}, 'for echo: true alone'),
    ({'prompt': []}, 'a prompt is a text'),
    ({'prompt': [[5], []]}, 'is not empty'),
    ({'prompt': [[5]] * 129}, '1 to 128'),
    ({'prompt': [[5.5]]}, 'a prompt is a text'),
    ({'prompt': [[5], [10**6]], 'max_tokens': 200}, 'outside the vocabulary'),
  ):
    with pytest.raises(openai.BadRequestError, match=message):
      client.completions.create(
        **{'model': 'policy', 'prompt': 'a', 'echo': True, 'max_tokens': 1} | more
      )
  assert not any(replica.load for replica in serving.engine().replicas)


def test_only_the_first_choice_is_timed(client, url):
  names = 'endpoint_first_token_seconds_count', 'endpoint_token_seconds_count'
  before = [_metric(url, name) for name in names]
  reply = client.chat.completions.create(**GREEDY, n=3, max_tokens=4)
  assert len(reply.choices) == 3
  assert [_metric(url, name) for name in names] == [count + 1 for count in before]


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'messages': []}, 'messages is .*at least 1 item'),
    ({'messages': [{'content': 'x'}]}, r'messages\[0\].role is missing'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]}, 'only text'),
    ({'messages': [{'role': 'assistant', 'tool_calls': [{}]}]}, 'function is missing'),
    ({'messages': [{'role': 'assistant', 'tool_calls': 5}]}, 'tool_calls is 5'),
    ({'messages': [{'role': 'assistant', 'tool_calls': [_call(5)]}]}, r'\.name is 5; it'),
    ({'messages': [{'role': 'tool', 'tool_call_id': ['a']}]}, r"_id is \['a'\]"),
    ({'messages': [{'role': 'user', 'name': {'a': 1}}]}, 'name is .*valid string'),
    ({'messages': [{'role': 'user', 'content': 'word ' * 400}]}, 'there is room for'),
    ({'max_tokens': 5000}, 'there is room for 320'),
    ({'max_completion_tokens': 0}, 'max_completion_tokens is 0; .* equal to 1'),
    ({'temperature': -1}, 'temperature is -1; .* equal to 0'),
    ({'top_p': 0}, 'top_p is 0'),
    ({'top_k': 10**12}, 'top_k is 1000000000000; it should be less than'),
    ({'n': 1.5}, 'n is 1.5; it should be a valid integer'),
    ({'n': 17}, 'n is 17; it should be less than or equal to 16'),
    ({'top_logprobs': 2}, 'top_logprobs needs logprobs'),
    ({'logit_bias': {'5': 1}}, "logit_bias is {'5': 1}; it is not supported"),
    ({'stop': ['']}, 'stop is .* empty'),
    ({'stop': ['a'] * 17}, 'stop is .*at most 16 items'),
    ({'stop': [5] * 300_000}, r'stop\[0\] is 5; it should be a valid string'),
    ({'tools': TOOLS * 400}, 'tools; there is room for 320'),
    ({'tools': 5}, 'tools is 5; it should be a valid list'),
    ({'tools': [{'type': 'function'}]}, r'tools\[0\] is .*; give {"type": "function"'),
    (_tool(5), 'a JSON schema'),
    (_tool({'properties': None}), 'a JSON schema'),
    (_tool({'properties': {'a': {'type': None}}}), 'a JSON schema'),
    (_tool({'properties': {'a': {'anyOf': [{'type': [5]}]}}}), 'a JSON schema'),
    (_tool({'required': [None]}), 'a JSON schema'),
    ({'tool_choice': 'required'}, "tool_choice is 'required', and tools has no such"),
    ({'tools': TOOLS, 'tool_choice': {'function': 'f'}}, "give 'auto', 'none'"),
    ({'tools': TOOLS, 'tool_choice': {'function': {'name': 'f'}}}, 'has no such tool'),
    ({'response_format': {'type': 'xml'}}, 'response_format is .* its type must be'),
    ({'response_format': _schema({'$ref': '#/x'})}, 'no grammar'),
    ({'response_format': {'type': 'json_schema', 'json_schema': 'x'}}, 'its type'),
    (
      {'tools': TOOLS, 'tool_choice': 'required', 'response_format': 'json_object'},
      'a required call and of a response_format',
    ),
  ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(client, url, fields, message):
  refused = lambda: _metric(url, 'endpoint_answers_total{status="400"}')
  before = refused()
  with pytest.raises(openai.BadRequestError, match=message):
    client.chat.completions.create(**ASKED, extra_body=fields)
  assert refused() == before + 1


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
  served = serving.serve(keys=['right', 'other'], **limits)
  with served as guarded, contextlib.ExitStack() as stack:
    fields = {'base_url': f'{guarded}/v1', 'max_retries': 0}
    make = lambda key: stack.enter_context(openai.OpenAI(api_key=key, **fields))
    for ask in (lambda c: c.chat.completions.create(**ASKED), lambda c: c.models.list()):
      with pytest.raises(openai.AuthenticationError):
        ask(make('wrong'))
      assert ask(make('other'))
    with pytest.raises(openai.RateLimitError) as refused:
      make('right').chat.completions.create(**ASKED, n=2)
    assert refused.value.response.headers['Retry-After'] == '1'
    assert make('right').chat.completions.create(**ASKED)


def test_a_client_that_goes_leaves_nothing_behind(client, url):
  before = _metric(url, 'endpoint_vanished_total')
  asked = {**ASKED, 'max_tokens': 250, 'seed': 1}
  stream = client.chat.completions.create(**asked, stream=True)
  next(iter(stream))
  stream.close()
  with pytest.raises(openai.APITimeoutError):
    client.with_options(timeout=0.001).chat.completions.create(**asked, n=16)
  gone = lambda: _metric(url, 'endpoint_replies ') == 0
  waiting.until(gone, 'the end of all replies')
  rows = lambda: not any(replica.load for replica in serving.engine().replicas)
  waiting.until(rows, 'that all rows are free')
  assert _metric(url, 'endpoint_vanished_total') >= before
  assert client.chat.completions.create(**GREEDY).choices[0].message.content


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


_CALLS = {'role': 'assistant', 'tool_calls': [_call('f')] * 50_000}


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
  long = {**GREEDY, 'messages': [{'role': 'user', 'content': 'Who is it? ' * 20}]}
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
      waiting.until(lambda: _metric(url, 'endpoint_replies ') == 3, 'three requests')
      assert not entered.acquire(blocking=False)
    finally:
      gate.set()
    assert [future.result(60) for future in asked] == [expected] * 3
  gone = lambda: _metric(url, 'endpoint_replies ') == 0
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


@pytest.mark.parametrize('stream', [False, True])
def test_long_log_probs_of_a_prompt_are_written_once_and_in_a_thread(
  client, monkeypatch, stream
):
  written, write = [], replies._write_columns

  def look(chat, tokens, *columns):
    written.append((len(tokens), asyncio._get_running_loop() is not None))
    return write(chat, tokens, *columns)

  monkeypatch.setattr(replies, '_write_columns', look)
  texts = 'Who is it? ' * 9, 'Who'
  prompts = [serving.policy()[2].encode_text(text).tolist() for text in texts]

  def ask():
    written.clear()
    made = client.completions.create(
      model='policy',
      prompt=prompts,
      echo=True,
      logprobs=5,
      n=3,
      max_tokens=0,
      stream=stream,
    )
    parts = made if stream else [made]
    choices = [choice for part in parts for choice in part.choices if choice.logprobs]
    return [(c.index, c.logprobs.tokens, c.logprobs.token_logprobs) for c in choices]

  at_once = ask()
  assert written == [(len(ids), True) for ids in prompts]
  monkeypatch.setattr(answer_lib, '_MAX_LOGPROBS', 10)
  in_threads = ask()
  assert written == [(len(ids), False) for ids in prompts]
  assert [x[:2] for x in in_threads] == [x[:2] for x in at_once]
  assert len([x for x in in_threads if x[1]]) == 6


def test_a_text_that_is_not_encoded_in_time_is_refused(client, monkeypatch):
  gate = threading.Event()
  monkeypatch.setattr(sources, '_MAX_CHARACTERS', 0)
  monkeypatch.setattr(http, '_THREAD_SECONDS', 0.01)
  with _encoding(monkeypatch, lambda plain, text: gate.wait(60) and plain(text)):
    try:
      with pytest.raises(openai.InternalServerError, match=r'within 0.01 s') as refused:
        client.chat.completions.create(**ASKED)
    finally:
      gate.set()
  assert refused.value.status_code == 503


def test_a_late_reply():
  with (
    serving.serve(seconds=1e-6) as url,
    openai.OpenAI(base_url=f'{url}/v1', api_key='none', max_retries=0) as client,
  ):
    with pytest.raises(openai.InternalServerError, match='no reply within'):
      client.chat.completions.create(**ASKED)
    with pytest.raises(openai.APIError, match='no reply within'):
      [*client.chat.completions.create(**ASKED, stream=True)]


def test_sigterm_lets_replies_end():
  model = serving.ROOT / 'experiments/miniwiki/model'
  command = ['-m', 'experiments.serve', '--port=0', f'--config.model.path={model}']
  sizes = {'rows': 8, 'slots': serving.SLOTS, 'bucket': serving.SLOTS, 'replicas': 1}
  sizes |= {'decode_steps': 16, 'prefill_rows': 4, 'prefill_tokens': 64, 'narrow': False}
  command += [f'--config.engine.{name}={size}' for name, size in sizes.items()]
  with script.Process(*command, AGENT_R1_API_KEYS='other, right ') as process:
    url = next(line for line in process.stdout if line.startswith('http')).strip()
    with openai.OpenAI(base_url=f'{url}/v1', api_key='right', max_retries=0) as client:
      stream = client.completions.create(
        model='policy', prompt=[40] * 20, max_tokens=280, stream=True, seed=0
      )
      first = next(iter(stream))
      process.send_signal(signal.SIGTERM)
      reasons = [part.choices[0].finish_reason for part in (first, *stream)]
    assert reasons[-1] in ('stop', 'length') and process.wait(60) == 0
    with pytest.raises(httpx2.ConnectError):
      httpx2.get(f'{url}/health')
