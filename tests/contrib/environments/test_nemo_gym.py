"""NeMo Gym's protocol, spoken by a small server."""

import asyncio
import contextlib
import json
import math

import answers
import pytest
from starlette import applications, responses, routing

from agent_r1_jax import testing, types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.contrib.environments import nemo_gym

TOOL = {
  'type': 'function',
  'name': 'increment',
  'description': 'Counts on.',
  'parameters': {
    'type': 'object',
    'properties': {'count': {'type': 'integer'}},
    'required': ['count'],
    'additionalProperties': False,
  },
  'strict': True,
}
FAIL = {'type': 'function', 'name': 'fail', 'parameters': None, 'strict': False}
ROW = {
  'responses_create_params': {
    'instructions': 'Count.',
    'input': [
      {'role': 'developer', 'content': 'Be brief.'},
      {'role': 'user', 'content': [{'type': 'input_text', 'text': 'Add 1 and 2.'}]},
    ],
    'tools': [TOOL, FAIL],
  },
  'initial_count': 3,
  'expected_count': 6,
}

SLOW = 7  # The server adds it later than what is asked just after it.


def call(name, **arguments):
  text = json.dumps({'name': name, 'arguments': arguments})
  return f'<tool_call>{text}</tool_call>'


REPLIES = [
  'First. ' + call('increment', count=1),
  call('increment', count=2) + call('fail') + call('increment', count='x'),
  'It is 6.',
]


def write(tmp_path, *rows):
  path = tmp_path / 'train.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  return path


class Sessions:
  """What a resources server remembers, and what it was asked to verify."""

  def __init__(self):
    self.counts, self.verified, self.verdict = {}, [], {}

  def make_app(self):
    routes = [
      routing.Route(f'/{name}', getattr(self, name), methods=['POST'])
      for name in ('seed_session', 'increment', 'fail', 'verify')
    ]
    return applications.Starlette(routes=routes)

  async def seed_session(self, request):
    number = str(len(self.counts))
    if 'initial_count' not in (body := await request.json()):
      return responses.JSONResponse({'detail': 'no initial_count'}, status_code=422)
    self.counts[number] = body['initial_count']
    answer = responses.JSONResponse({})
    answer.set_cookie('session', number)
    return answer

  async def increment(self, request):
    number, count = request.cookies['session'], (await request.json())['count']
    if count == SLOW:
      await asyncio.sleep(0.2)
    self.counts[number] += count
    return responses.JSONResponse({'count': self.counts[number]})

  async def fail(self, request):
    return responses.JSONResponse({'detail': 'never'}, status_code=422)

  async def verify(self, request):
    body = await request.json()
    self.verified.append(body.pop('response'))
    right = self.counts[request.cookies['session']] == body['expected_count']
    return responses.JSONResponse(body | {'reward': float(right), 'n': 2} | self.verdict)


@pytest.fixture
def sessions():
  return Sessions()


@pytest.fixture
def url(sessions):
  with answers.run(sessions.make_app()) as (port, _):
    yield f'http://127.0.0.1:{port}'


async def test_a_session_is_played_and_verified(tmp_path, url, sessions):
  (task,) = nemo_gym.load_tasks(write(tmp_path, ROW))
  assert task.messages == [
    {'role': 'system', 'content': 'Count.'},
    {'role': 'system', 'content': 'Be brief.'},
    {'role': 'user', 'content': 'Add 1 and 2.'},
  ]
  steps = await testing.check_env(lambda: nemo_gym.ServedEnv(url), task, REPLIES)
  texts = [message['content'] for message in steps[1].messages]
  assert steps[0].messages[0]['content'] == '{"count":4}' and texts[0] == '{"count":6}'
  assert 'never' in texts[1] and "'x' is not of type" in texts[2]
  assert [step.reward for step in steps] == [0.0, 0.0, 1.0]
  assert steps[1].metrics['tool_calls'] == 3.0 and steps[1].metrics['tool_errors'] == 2.0
  numbers = steps[-1].metrics
  assert numbers['n'] == 2.0 and 'expected_count' not in numbers
  output = sessions.verified[0]['output']
  kinds = [item['type'] for item in output]
  pair = ['function_call', 'function_call_output']
  assert kinds == ['message', *pair * 4, 'message']
  assert output[0]['content'][0]['text'] == 'First. '
  assert output[1]['name'] == 'increment' and output[1]['arguments'] == '{"count": 1}'
  assert output[2] == {
    'type': 'function_call_output',
    'call_id': output[1]['call_id'],
    'output': '{"count":4}',
  }
  ids = [item['call_id'] for item in output if item['type'] == 'function_call']
  assert len({*ids}) == 4


async def test_calls_of_a_reply_run_one_after_another(tmp_path, url):
  (task,) = nemo_gym.load_tasks(write(tmp_path, ROW))
  with contextlib.closing(nemo_gym.ServedEnv(url)) as env:
    env.reset(task)
    step = await env.step(call('increment', count=SLOW) + call('increment', count=1))
  assert [m['content'] for m in step.messages] == ['{"count":10}', '{"count":11}']


async def test_an_unfinished_reply_is_verified_too(tmp_path, url, sessions):
  (task,) = nemo_gym.load_tasks(write(tmp_path, ROW))
  for status, reply in (('truncated', 'It is'), ('max_turns', None)):
    env = nemo_gym.ServedEnv(url)
    env.reset(task)
    await env.step(REPLIES[0])
    step = await env.finish(status, reply)
    env.close()
    texts = [item['content'][0]['text'] for item in sessions.verified[-1]['output'][3:]]
    assert step.reward == 0.0 and texts == ([reply] if reply else [])


async def test_what_a_server_does_wrong_is_an_error(tmp_path, url, sessions):
  (task,) = nemo_gym.load_tasks(write(tmp_path, ROW))
  for reward in (math.nan, 'much', None):
    sessions.verdict = {'reward': reward}
    env = nemo_gym.ServedEnv(url)
    env.reset(task)
    with pytest.raises((ValueError, ConnectionError)):
      await env.step('It is 6.')
    env.close()
  other = types.Task('x', [], info={'row': {'responses_create_params': {'input': ''}}})
  with contextlib.closing(nemo_gym.ServedEnv(url)) as env:
    with pytest.raises(
      ConnectionError, match='seed_session: status 422: .*no initial_count'
    ):
      env.reset(other)
  with contextlib.closing(nemo_gym.ServedEnv(f'{url}/other')) as env:
    with pytest.raises(ConnectionError, match='other/seed_session: status 404'):
      env.reset(task)
  with contextlib.closing(nemo_gym.ServedEnv('http://127.0.0.1:1')) as env:
    with pytest.raises(ConnectionError, match='127.0.0.1:1/seed_session'):
      env.reset(task)
  with pytest.raises(ValueError, match='begin with http'):
    nemo_gym.ServedEnv('127.0.0.1:1')


@pytest.mark.parametrize(
  ('params', 'said'),
  [
    ({}, "KeyError('input')"),
    ({'input': [{'type': 'function_call', 'name': 'x'}]}, "KeyError('content')"),
    (
      {'input': 'x', 'tools': [{'type': 'web_search'}]},
      "type 'web_search' is not played",
    ),
    ({'input': 'x', 'tools': [TOOL | {'parameters': 7}]}, 'increment: schema'),
    (7, 'TypeError'),
  ],
)
def test_a_line_that_cannot_be_played_is_named(tmp_path, params, said):
  path = write(tmp_path, ROW, {'responses_create_params': params})
  with pytest.raises(ValueError, match='line 2 is no task') as error:
    nemo_gym.load_tasks(path)
  assert said in str(error.value)


def test_a_file_without_tasks_is_named(tmp_path):
  with pytest.raises(ValueError, match='has no task'):
    nemo_gym.load_tasks(write(tmp_path))


def test_texts_of_a_task_are_messages(tmp_path):
  row = {'responses_create_params': {'input': 'Hello'}}
  (task,) = nemo_gym.load_tasks(write(tmp_path, row))
  assert task.messages == [{'role': 'user', 'content': 'Hello'}]
  assert isinstance(task, types.Task) and isinstance(
    nemo_gym.ServedEnv('http://x'), env_lib.ToolEnv
  )
