"""A resources server of nemo_gym's own code is played: `make test-with-nemo-gym`."""

import pathlib

import answers
import numpy as np
import pytest
import serving
from test_nemo_gym import REPLIES, ROW, write
import tiny
import with_package

from agent_r1_jax import testing
from agent_r1_jax.contrib.environments import nemo_gym

pytestmark = pytest.mark.skipif(
  not with_package.has('nemo_gym'),
  reason='`make test-with-nemo-gym` installs nemo-gym, for Python 3.12',
)

SERVER = pathlib.Path(__file__).with_name('nemo_gym_server.py')


@pytest.fixture(scope='module')
def url():
  with answers.run_script(str(with_package.PYTHON), SERVER) as url:
    yield url


async def test_its_session_tools_and_verdict(tmp_path, url):
  (task,) = nemo_gym.load_tasks(write(tmp_path, ROW))
  steps = await testing.check_env(lambda: nemo_gym.ServedEnv(url), task, REPLIES)
  texts = [message['content'] for message in steps[1].messages]
  assert texts[0] == '{"count":6}' and 'this never works' in texts[1]
  assert steps[-1].reward == 1.0 and steps[-1].metrics['calls'] == 4.0
  wrong = await testing.check_env(lambda: nemo_gym.ServedEnv(url), task, REPLIES[1:])
  assert wrong[-1].reward == 0.0


def test_a_policy_plays_it(tmp_path, url):
  row = ROW | {'expected_count': 3}
  tasks = nemo_gym.load_tasks(write(tmp_path, row, row))
  model, params, _ = serving.policy()
  played = serving.collect(lambda: nemo_gym.ServedEnv(url), tasks, samples=32)
  assert len(played) == 64
  assert {t.error for t in played} == {None} and {t.reward for t in played} == {1.0}
  assert all(np.isfinite(t.metrics['calls']) for t in played)
  tiny.assert_on_policy(params, [s for t in played[:4] for s in t.segments], shape=model)
