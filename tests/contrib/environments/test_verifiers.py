"""Environments written for verifiers 0.4, as their packages would be installed."""

import asyncio
import collections
import contextlib
import json

import answers
import numpy as np
import pytest
import serving
from starlette import applications, responses, routing
import tiny

from agent_r1_jax.contrib.environments import verifiers

pytest.importorskip('verifiers', reason='the extra `verifiers` is not installed')

# What its author would publish: a task with a rubric of rewards and a metric, and a tool.
_PACKAGE = """
import verifiers.v1 as vf

class Data(vf.TaskData):
  answer: str

class Task(vf.Task[Data]):
  @vf.reward
  async def right(self, task, trace) -> float:
    return float(task.answer in trace.last_reply)

  @vf.reward(weight=0.5)
  async def short(self, trace) -> float:
    return float(len(trace.last_reply) < 20)

  @vf.metric
  async def turns(self, trace) -> float:
    return float(trace.num_turns)

class Taskset(vf.Taskset[Task, vf.TasksetConfig]):
  def load(self):
    for n in range(3):
      data = Data(prompt=f'What is {n} + 1?', system_prompt='Add.', answer=str(n + 1))
      yield Task(data, self.config.task)

__all__ = ['Taskset']
"""
_TOOLS = """
import verifiers.v1 as vf

class Adder(vf.Toolset[vf.ToolsetConfig]):
  TOOL_PREFIX = 'adder'

  @vf.tool
  async def add(self, a: int, b: int) -> int:
    'Adds two numbers.'
    return a + b

if __name__ == '__main__':
  Adder.run()
"""
# An environment of its own shape: the agent is asked twice.
_TWICE = """
import verifiers.v1 as vf
from adding_env import Taskset
from adding_tools import Adder

class Config(vf.EnvConfig):
  agent: vf.AgentConfig = vf.AgentConfig()

class Twice(vf.Env[Config]):
  async def run(self, task, agents):
    async with agents.agent.interaction(task) as talk:
      await talk.turn()
      await talk.turn('Are you sure?')

class Tools(Taskset):
  @classmethod
  def toolsets(cls, config):
    return [Adder(vf.ToolsetConfig())]

__all__ = ['Tools', 'Twice']
"""

# An agent's own program, which asks for a stream.
_STREAM = """
import httpx
import verifiers.v1 as vf

class StreamConfig(vf.HarnessConfig):
  pass

class Stream(vf.Harness[StreamConfig]):
  APPENDS_SYSTEM_PROMPT = True
  EXECUTES_CODE = NEEDS_CONTAINER = False

  async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
    _, prompt = self.resolve_prompt(data)
    messages = [{'role': 'user', 'content': prompt}]
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
      answer = await client.post(
        f'{endpoint}/chat/completions',
        json={'model': 'policy', 'stream': True, 'messages': messages},
        headers={'Authorization': f'Bearer {secret}'},
      )
    assert answer.text.count('data:') > 1
    return vf.ProgramResult(0, '', '')

__all__ = ['Stream']
"""
# Two agents that ask at the same time.
_PAIR = """
import asyncio
import verifiers.v1 as vf
from adding_env import Taskset
from adding_stream import Stream, StreamConfig

class Config(vf.EnvConfig):
  first: vf.AgentConfig = vf.AgentConfig()
  second: vf.AgentConfig = vf.AgentConfig(
    harness=StreamConfig(id='adding_stream'), runtime=vf.SubprocessConfig()
  )

class Pair(vf.Env[Config]):
  async def run(self, task, agents):
    await asyncio.gather(agents.first.run(task), agents.second.run(task))

__all__ = ['Taskset', 'Pair']
"""


@pytest.fixture(autouse=True)
def packages(tmp_path, monkeypatch):
  sources = {'env': _PACKAGE, 'tools': _TOOLS, 'twice': _TWICE}
  sources |= {'stream': _STREAM, 'pair': _PAIR}
  for name, text in sources.items():
    (tmp_path / f'adding_{name}.py').write_text(text)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))


async def _play(make_env, task, replies):
  """Plays against an endpoint that gives replies, and then refuses as a budget does.

  Returns:
    The requests, and the report of the reward.
  """
  requests, reports, replies = [], [], iter(replies)

  async def answer(request):
    requests.append(await request.json())
    message = next(replies, None)
    if message is None:
      return responses.JSONResponse({'error': {'message': 'no'}}, status_code=400)
    return _complete(message)

  async def report(request):
    reports.append(await request.json())
    return responses.JSONResponse({})

  with _serve(answer, report) as url:
    await make_env().run(task, url)
  return requests, _add_up(reports)


def _add_up(reports):
  """The rewards of all runs together, and the metrics."""
  *rewarded, last = reports
  rewards = collections.Counter()
  for report in rewarded:
    rewards.update(report['reward'])
  return {'reward': dict(rewards), **last}


@contextlib.contextmanager
def _serve(answer, report):
  """The address of an endpoint, open meanwhile."""
  routes = [
    routing.Route('/v1/chat/completions', answer, methods=['POST']),
    routing.Route('/v1/reward', report, methods=['POST']),
  ]
  with answers.run(applications.Starlette(routes=routes)) as (port, _):
    yield f'http://127.0.0.1:{port}/v1'


def _complete(message):
  reason = 'tool_calls' if 'tool_calls' in message else 'stop'
  choice = {'index': 0, 'message': message, 'finish_reason': reason}
  body = {'id': '1', 'object': 'chat.completion', 'created': 0, 'model': 'policy'}
  return responses.JSONResponse(body | {'choices': [choice]})


def _say(content, **call):
  message = {'role': 'assistant', 'content': content}
  if call:
    function = {'name': call['name'], 'arguments': json.dumps(call['arguments'])}
    message['tool_calls'] = [{'id': 'call_0', 'type': 'function', 'function': function}]
  return message


async def test_rewards_and_metrics_of_an_environment_are_reported():
  tasks, make_env = verifiers.load({'taskset': {'id': 'adding_env'}})
  assert len(tasks) == 3 and len({task.id for task in tasks}) == 3
  prompt = [
    {'role': 'system', 'content': 'Add.'},
    {'role': 'user', 'content': 'What is 1 + 1?'},
  ]
  (request,), body = await _play(make_env, tasks[1], [_say('It is 2.')])
  assert request['messages'] == tasks[1].messages == prompt
  assert body == {'reward': {'right': 1.0, 'short': 0.5}, 'metrics': {'turns': 1.0}}


# verifiers calls tenacity so.
@pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated")
async def test_tools_are_called_and_an_episode_out_of_turns_is_scored():
  tasks, make_env = verifiers.load({'taskset': {'id': 'adding_twice'}})
  call = _say('', name='adder_add', arguments={'a': 2, 'b': 1})
  unknown = _say('', name='subtract', arguments={})
  replies = [call, _say('Two.'), unknown]
  requests, body = await _play(make_env, tasks[2], replies)
  assert requests[0]['tools'][0]['function']['description'] == 'Adds two numbers.'
  last = [request['messages'][-1]['content'] for request in requests[1:]]
  assert last == ['3', 'Are you sure?', 'Error: there is no tool "subtract".']
  # The endpoint refused the fourth reply: what was said until then counts.
  assert body == {'reward': {'right': 0.0, 'short': 0.5}, 'metrics': {'turns': 3.0}}


async def test_agents_that_wait_for_each_other_play():
  """None is answered before all have asked."""
  config = {'id': 'best-of-n', 'taskset': {'id': 'adding_env'}, 'n': 3}
  tasks, make_env = verifiers.load(config)
  all_asked, texts, reports = asyncio.Barrier(3), iter(['It is 3.', '3', '4']), []

  async def answer(request):
    await request.json()
    text = next(texts)
    await asyncio.wait_for(all_asked.wait(), 20)
    return _complete(_say(text))

  async def report(request):
    reports.append(await request.json())
    return responses.JSONResponse({})

  with _serve(answer, report) as url:
    await make_env().run(tasks[2], url)
  # Each of the three has its reward; their metrics are means.
  assert sorted(report['reward']['right'] for report in reports[:-1]) == [0.0, 1.0, 1.0]
  body = _add_up(reports)
  assert body['reward'] == {'right': 2.0, 'short': 1.5}
  assert body['metrics']['turns'] == 1.0 and body['metrics']['best'] == pytest.approx(
    2 / 3
  )


async def test_an_agent_that_is_not_trained_has_a_client_of_its_own():
  """A simulated user: verifiers' own environment, with the loop in place of `null`."""
  user = iter([_say('What is it?'), _say('###DONE###')])

  async def answer(request):
    assert (await request.json())['model'] == 'a user'
    return _complete(next(user))

  config = {'id': 'user-sim', 'taskset': {'id': 'adding_env'}}
  with _serve(answer, answer) as url:
    client = {'type': 'eval', 'base_url': url, 'api_key_var': 'NO_KEY'}
    user_config = {'client': client, 'model': 'a user'}
    tasks, make_env = verifiers.load(config | {'user': user_config})
    (request,), body = await _play(make_env, tasks[0], [_say('It is 1.')])
  assert request['messages'][-1] == {'role': 'user', 'content': 'What is it?'}
  assert body['reward'] == {'assistant/right': 1.0, 'assistant/short': 0.5}
  assert body['metrics']['assistant/user_turns'] == 2.0
  tasks, make_env = verifiers.load(config)
  with pytest.raises(RuntimeError, match='does not train its agent user'):
    await _play(make_env, tasks[0], [_say('What?'), _say('1'), _say('###DONE###')])


def test_agents_that_ask_at_once_and_for_a_stream_are_trained():
  tasks, make_env = verifiers.load({'taskset': {'id': 'adding_pair'}})
  played = serving.collect(make_env, tasks)
  for trajectory in played:
    assert trajectory.error is None
    assert len(trajectory.segments) == len(trajectory.turns) == 2
    texts = [m['content'] for m in trajectory.messages if m['role'] == 'assistant']
    right = str(trajectory.task.info['index'] + 1)
    # Each agent has its own reward, in whatever order they ended.
    scores = [float(right in text) + 0.5 * (len(text) < 20) for text in texts]
    assert [turn.reward for turn in trajectory.turns] == scores
    for turn in trajectory.turns:
      segment = trajectory.segments[turn.segment]
      sampled = np.flatnonzero(segment.action_mask)
      assert (sampled == np.arange(turn.start, turn.stop)).all()
  model, params, _ = serving.policy()
  tiny.assert_on_policy(params, [s for t in played for s in t.segments], shape=model)
