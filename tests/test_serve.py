"""The server, asked by OpenAI's client: what it answers, refuses, counts and survives."""

import asyncio
from concurrent import futures
import contextlib
import functools
import json
import pathlib
import signal

import httpx2
import numpy as np
import openai
import pydantic
import pytest
import script
import served
import serving
import test_automata
import test_request_grammars
import tiny
import waiting

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import request
from agent_r1_jax.serve import answer as answer_lib
from agent_r1_jax.serve import replies

url, client = served.url, served.client


def test_a_tool_whose_parameters_are_null_has_none(client):
  function = {'name': 'now', 'description': None, 'parameters': None}
  prompts = [
    client.chat.completions.create(
      **served.GREEDY, tools=[{'type': 'function', 'function': given}], max_tokens=1
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
  asked = {**served.GREEDY, 'tools': served.TOOLS, 'max_tokens': 40}
  whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
  (choice,) = whole.choices
  model, _, chat = serving.policy()
  ids = chat.encode_prompt(served.ASKED['messages'], served.TOOLS)

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
  texts = lambda **more: [
    c.message.content for c in create(**served.ASKED, **more).choices
  ]
  three = texts(seed=7, n=3)
  assert texts(seed=7, n=3) == three and len(set(three)) > 1
  parts = [*create(**served.ASKED, seed=7, n=3, stream=True)]
  for i, text in enumerate(three):
    mine = [p for p in parts if p.choices[0].index == i]
    assert _join(mine)[0] == text
  (whole,) = texts(temperature=0)
  stop = whole[len(whole) // 2 :][:3]
  asked = {**served.GREEDY, 'stop': ['§', stop]}
  for streamed in (False, True):
    cut = create(**asked, stream=streamed)
    text = _join(cut)[0] if streamed else cut.choices[0].message.content
    assert text == whole[: whole.index(stop)]
  short = create(**served.GREEDY, max_tokens=3)
  assert short.choices[0].finish_reason == 'length'
  assert short.usage.completion_tokens == 3


def test_schemas_and_required_calls_restrict(client):
  class Answer(pydantic.BaseModel):
    year: int
    certain: bool

  parsed = client.chat.completions.parse(**served.ASKED, response_format=Answer, seed=0)
  assert isinstance(parsed.choices[0].message.parsed, Answer)
  named = {'type': 'function', 'function': {'name': 'search'}}
  for choice in ('required', named):
    reply = client.chat.completions.create(
      **{**served.ASKED, 'messages': [{'role': 'user', 'content': 'Hello'}]},
      tools=served.TOOLS,
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
  # What trains elsewhere needs the ids of tokens, and not their text.
  named = client.completions.create(
    model='policy',
    prompt=prompt,
    max_tokens=6,
    temperature=0,
    logprobs=0,
    extra_body={'return_tokens_as_token_ids': True},
  )
  written = named.choices[0].logprobs
  sampled = [int(name.removeprefix('token_id:')) for name in written.tokens]
  assert serving.policy()[2].decode(sampled) == whole.choices[0].text
  assert written.token_logprobs == whole.choices[0].logprobs.token_logprobs
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
  before = [served.metric(url, name) for name in names]
  reply = client.chat.completions.create(**served.GREEDY, n=3, max_tokens=4)
  assert len(reply.choices) == 3
  assert [served.metric(url, name) for name in names] == [count + 1 for count in before]


@pytest.mark.parametrize('stream', [False, True])
def test_long_log_probs_of_a_prompt_are_written_once_and_in_a_thread(
  client, monkeypatch, stream
):
  written, write = [], replies._write_columns

  def look(chat, as_ids, tokens, *columns):
    written.append((len(tokens), asyncio._get_running_loop() is not None))
    return write(chat, as_ids, tokens, *columns)

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


def test_sigterm_lets_replies_end_while_a_grammar_takes_too_long():
  model = serving.ROOT / 'experiments/miniwiki/model'
  command = ['-m', 'experiments.serve', '--port=0', f'--config.model.path={model}']
  sizes = {'rows': 8, 'slots': serving.SLOTS, 'bucket': serving.SLOTS, 'replicas': 1}
  sizes |= {'decode_steps': 16, 'prefill_rows': 4, 'prefill_tokens': 64, 'narrow': False}
  command += [f'--config.engine.{name}={size}' for name, size in sizes.items()]
  keys, header = {'AGENT_R1_API_KEYS': 'other, right '}, {'Authorization': 'Bearer right'}
  with script.Process(*command, **keys) as process, futures.ThreadPoolExecutor() as pool:
    url = next(line for line in process.stdout if line.startswith('http')).strip()
    endless = test_request_grammars.with_schema(test_request_grammars.ENDLESS)
    path = f'{url}/v1/chat/completions'
    ask = lambda: httpx2.post(path, json=endless, headers=header, timeout=120)
    asked = [pool.submit(ask) for _ in range(2)]
    children = functools.partial(test_automata._children, process.pid)
    waiting.until(children, 'that a grammar is made')
    with openai.OpenAI(base_url=f'{url}/v1', api_key='right', max_retries=0) as client:
      stream = client.completions.create(
        model='policy', prompt=[40] * 20, max_tokens=280, stream=True, seed=0
      )
      first, left = next(iter(stream)), children()
      process.send_signal(signal.SIGTERM)
      reasons = [part.choices[0].finish_reason for part in (first, *stream)]
    assert reasons[-1] in ('stop', 'length') and process.wait(90) == 0
    for future in asked:
      # Its time to end may be over before the grammar is refused.
      with contextlib.suppress(httpx2.TransportError):
        assert future.result().status_code == 400
    with pytest.raises(httpx2.ConnectError):
      httpx2.get(f'{url}/health')
  gone = lambda: not any(pathlib.Path('/proc', pid).exists() for pid in left)
  waiting.until(gone, 'the end of its processes')
