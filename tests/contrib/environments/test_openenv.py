"""A real OpenEnv server, in a process, and the environment that plays on it."""

import pathlib
import sys

import answers
import pytest

from agent_r1_jax import testing, types
from agent_r1_jax.contrib.environments import openenv

pytest.importorskip('openenv', reason='the extra `environments` is not installed')

SERVER = pathlib.Path(__file__).with_name('openenv_server.py')


@pytest.fixture(scope='module')
def url():
  with answers.run_script(sys.executable, SERVER) as url:
    yield url


def act(*actions):
  return [f'<action>{action}</action>' for action in actions]


async def test_a_server_is_played(url):
  task = types.Task('t', [{'role': 'system', 'content': 'Talk.'}], info={'reset': {}})
  make = lambda: openenv.ServedEnv(url, field='word')
  replies = ['well', *act('{"words": 3}', 'hello', '{"word": "you"}')]
  steps = await testing.check_env(make, task, replies)
  assert [step.reward for step in steps] == [0, 0, 5, 3]
  assert [step.metrics['invalid_action'] for step in steps] == [1, 1, 0, 0]
  assert 'Invalid message' in steps[1].messages[0]['content']
  assert steps[2].messages == [{'role': 'user', 'content': 'You said hello.'}]
  task.info['reset']['seed'] = 1
  await testing.check_env(make, task, act('bye'))


async def test_what_fails_is_an_error(url):
  env = openenv.ServedEnv(url, field='word')
  assert (await env.reset(types.Task('t', [])))[0]['content'] == 'Say something.'
  with pytest.raises(RuntimeError, match='it crashed'):
    await env.step(*act('crash'))
  await env.close()
  nowhere = openenv.ServedEnv('http://127.0.0.1:1')
  with pytest.raises(ConnectionError, match='Failed to connect'):
    await nowhere.reset(types.Task('t', []))


def test_an_action_that_is_nested_too_deeply_is_none():
  for depth in (100, 985, 5000):
    deep = f'{{"word": {"[" * depth}{"]" * depth}}}'
    assert openenv.ServedEnv('http://127.0.0.1:1')._read_action(deep) is None


def test_observations_are_written():
  assert openenv.show_observation({'text': 'a', 'metadata': {}, 'error': None}) == 'a'
  assert openenv.show_observation({'a': 'ä', 'b': [1]}) == '{"a": "ä", "b": [1]}'
