"""An OpenEnv server for test_openenv.py, in a process of its own."""

import sys

from openenv.core import env_server
from openenv.core.env_server import http_server
import uvicorn


class Say(env_server.Action):
  word: str


class Heard(env_server.Observation):
  text: str


class Parrot(env_server.Environment):
  SUPPORTS_CONCURRENT_SESSIONS = True

  def reset(self, seed=None, **_):
    self.state_, self.left = env_server.State(step_count=0), seed or 2
    return Heard(text='Say something.')

  def step(self, action, **_):
    if action.word == 'crash':
      raise OSError('it crashed')
    self.left -= 1
    done = not self.left
    return Heard(text=f'You said {action.word}.', reward=len(action.word), done=done)

  @property
  def state(self):
    return self.state_


app = http_server.create_fastapi_app(Parrot, Say, Heard, max_concurrent_envs=8)
uvicorn.run(app, fd=int(sys.argv[1]), log_level='critical')
