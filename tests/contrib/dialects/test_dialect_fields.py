"""The fields of Anthropic's Messages and OpenAI's Responses: done, or refused."""

import contextlib
import functools
import json
import re

import dialect_clients
import httpx2
import openai
import pytest
import serving

from agent_r1_jax.contrib import dialects

_USER = dialect_clients.USER
_serve = functools.partial(serving.serve, dialects=dialects.ALL)


@pytest.fixture(scope='module')
def url():
  with _serve() as url:
    yield url


@pytest.fixture(scope='module')
def anthropic():
  """Has 3,000 modules: not each worker that reads this file imports them."""
  import anthropic

  return anthropic


@contextlib.contextmanager
def _clients(url, key='none'):
  import anthropic

  with (
    anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as messages,
    openai.OpenAI(base_url=f'{url}/v1', api_key=key, max_retries=0) as responses,
  ):
    yield messages, responses


_SCHEMA = {
  'type': 'object',
  'properties': {'year': {'type': 'integer', 'minimum': 1, 'maximum': 9999}},
  'required': ['year'],
  'additionalProperties': False,
}


def test_fields_of_messages(url):
  with _clients(url) as (client, _):
    sampling = {'extra_body': {'temperature': 0, 'top_p': 0.9, 'top_k': 5}}
    ask = functools.partial(
      client.messages.create, model='policy', messages=[_USER], max_tokens=40, **sampling
    )
    whole = ask(metadata={'user_id': 'a'})
    assert whole.stop_reason in ('end_turn', 'max_tokens') and whole.stop_sequence is None
    text = whole.content[0].text
    stop = text[len(text) // 2 :][:2]
    cut = ask(stop_sequences=['§', stop])
    assert (cut.stop_reason, cut.stop_sequence) == ('stop_sequence', stop)
    assert cut.content[0].text == text[: text.index(stop)]
    count = client.messages.count_tokens(model='policy', messages=[_USER]).input_tokens
    chat = serving.policy()[2]
    assert whole.usage.input_tokens == count == len(chat.encode_prompt([_USER], []))
    # The log-probs of what was sampled count its tokens.
    assert ask(max_tokens=3).usage.output_tokens == 3
    tools = [dialect_clients.Messages.tool(tool) for tool in dialect_clients.TOOLS]
    named = {'type': 'tool', 'name': 'search'}
    for choice in ({'type': 'any'}, named):
      called = ask(tools=tools, tool_choice=choice, max_tokens=200)
      assert called.stop_reason == 'tool_use'
    none = ask(tools=tools, tool_choice={'type': 'none'})
    assert none.content == whole.content
    form = {'format': {'type': 'json_schema', 'schema': _SCHEMA}}
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
      input=[_USER], max_output_tokens=40, include=['message.output_text.logprobs']
    )
    part = again.output[0].content[0]
    assert again.output_text == whole.output_text
    assert len(part.logprobs) == again.usage.output_tokens
    counted = client.responses.input_tokens.count(model='policy', input=[_USER])
    assert counted.input_tokens == whole.usage.input_tokens
    tools = [dialect_clients.Responses.tool(tool) for tool in dialect_clients.TOOLS]
    for choice in ('required', {'type': 'function', 'name': 'search'}):
      called = ask(tools=tools, tool_choice=choice, max_output_tokens=200)
      assert called.output[-1].type == 'function_call'
    form = {'format': {'type': 'json_schema', 'name': 'x', 'schema': _SCHEMA}}
    made = ask(text=form, max_output_tokens=100)
    assert isinstance(json.loads(made.output_text)['year'], int)


def test_a_reply_that_may_have_one_call_ends_with_it(url):
  """In each dialect; where it may have several it goes on, here to its stop token."""
  required = {
    'tools': dialect_clients.TOOLS,
    'tool_choice': 'required',
    'messages': [_USER],
  }
  as_messages = required | {
    'tools': [dialect_clients.Messages.tool(dialect_clients.SEARCH.schema)]
  }
  as_responses = required | {
    'tools': [dialect_clients.Responses.tool(dialect_clients.SEARCH.schema)]
  }

  def count(path, **fields):
    body = {'temperature': 0, 'max_tokens': 200, 'input': [_USER], **fields}
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
    json={**asked, 'messages': [_USER, *_said(text)], **more},
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


_USE = {'type': 'tool_use', 'name': 'f', 'input': {}}
# Of each field, values that cannot be.
_MESSAGES = {
  'max_tokens': [None, 0],
  'messages': [
    *([], [5], [{'role': 'tool', 'content': 'x'}]),
    [_USER, {'role': 'assistant', 'content': [_USE]}],
    *([{'role': 'user', 'content': content}] for content in (5, [[]], [{'type': 'x'}])),
    [{'role': 'assistant', 'content': [{'type': 'redacted_thinking'}]}],
  ],
  'thinking': [
    *({'type': 'enabled', 'budget_tokens': tokens} for tokens in (-1, '9')),
    {'type': 'always'},
  ],
  'temperature': [101],
  'system': [5],
  'tools': [[{'type': 'bash_20250124', 'name': 'bash'}]],
  'tool_choice': [{'type': 'x'}, {'type': 'tool', 'name': 'g'}],
  'stop_sequences': [[5], ['a'] * 17],
  'output_config': [{'format': {'type': 'xml'}}],
  'mcp_servers': [[{}]],
  'container': ['x'],
}
_RESPONSES = {
  'input': [
    *(None, [], [5], [{'type': 'item_reference'}], [{'role': 'user', 'content': 5}]),
    [{'role': 'user', 'content': [{'type': 'input_file'}]}],
    [{'type': 'reasoning', 'summary': []}],
  ],
  'max_output_tokens': [0],
  'top_p': [0],
  'tools': [[{'type': 'web_search'}]],
  'tool_choice': [{'type': 'allowed_tools'}, 'required'],
  'text': [{'format': {'type': 'grammar'}}],
  'include': [['web_search_call.results']],
  'top_logprobs': [21],
  'parallel_tool_calls': ['no'],
  'truncation': ['auto'],
  'metadata': [{'a': 5}, {'a': 'x' * 513}],
  'background': [True],
  'conversation': ['x'],
  'prompt': [{'id': 'x'}],
  'max_tool_calls': [3],
  'store': ['yes'],
}
# Refusals that name no field.
_MORE = {
  'prefill': ('messages', {'messages': [{'role': 'assistant', 'content': 'It'}]}),
  'reply may have 5000': ('messages', {'max_tokens': 5000}),
  '402 messages, parts': (
    'messages',
    {'messages': [{**_USER, 'content': [{'type': 'text', 'text': ''}] * 400}]},
  ),
  'may have 5000': ('responses', {'max_output_tokens': 5000}),
  '400 messages, parts': ('responses', {'input': [_USER] * 400}),
  "response 'resp_1'": ('responses', {'previous_response_id': 'resp_1'}),
}


@pytest.mark.parametrize(
  ('dialect', 'named', 'fields'),
  [
    *(('messages', name, {name: x}) for name, some in _MESSAGES.items() for x in some),
    *(('responses', name, {name: x}) for name, some in _RESPONSES.items() for x in some),
    *((dialect, named, fields) for named, (dialect, fields) in _MORE.items()),
  ],
)
def test_what_cannot_be_done_is_refused(refused, url, anthropic, dialect, named, fields):
  body = {'model': 'policy', **fields}
  with _clients(url) as (messages, responses):
    if dialect == 'responses':
      with refused(named, openai.BadRequestError):
        responses.post('/responses', body={'input': [_USER], **body}, cast_to=object)
      return
    tools = [{'name': 'f', 'input_schema': {}}]
    body = {'messages': [_USER], 'tools': tools, 'max_tokens': 8, **body}
    with refused(named, anthropic.BadRequestError) as error:
      messages.post('/v1/messages', body=body, cast_to=object)
  assert error.value.body['type'] == 'error'
  assert error.value.body['error']['type'] == 'invalid_request_error'


def test_hostile_bodies_keys_and_the_form_of_errors(url, anthropic):
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
      path, f'{{"temperature": NaN, "max_tokens": 5, {said}: [{json.dumps(_USER)}]}}'
    )
    assert nan.status_code == 400 and 'temperature is nan' in nan.text
  assert post('messages', '{').json()['error']['type'] == 'invalid_request_error'
  large = post('messages', b' ' * (1 << 23)).json()
  assert large['type'] == 'error' and large['error']['type'] == 'request_too_large'
  with _serve(keys=['right'], max_waiting=-serving.engine().sizes.rows) as guarded:
    with _clients(guarded, 'wrong') as (messages, responses):
      with pytest.raises(anthropic.AuthenticationError, match='authentication_error'):
        messages.messages.create(model='policy', messages=[_USER], max_tokens=5)
      with pytest.raises(openai.AuthenticationError):
        responses.responses.create(model='policy', input='a')
    with _clients(guarded, 'right') as (messages, responses):
      with pytest.raises(anthropic.RateLimitError, match='rate_limit_error') as refused:
        messages.messages.create(model='policy', messages=[_USER], max_tokens=5)
      assert refused.value.response.headers['Retry-After'] == '1'
  with _serve(seconds=1e-6) as late, _clients(late) as (messages, responses):
    with pytest.raises(anthropic.APIStatusError, match='timeout_error'):
      messages.messages.create(model='policy', messages=[_USER], max_tokens=5)
    with pytest.raises(anthropic.APIStatusError, match='no reply within'):
      with messages.messages.stream(model='policy', messages=[_USER], max_tokens=5) as s:
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
