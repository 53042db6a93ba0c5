"""An actor that holds environments, each for one episode of another machine.

Users' functions run as in a rollout (host/workers.py): plain ones in threads, coroutines
on an event loop of their own, so that this actor answers whatever they do. It has no time
limits: whoever waits for an answer cancels the call.
"""

import asyncio
import dataclasses
import os
import socket
from typing import Any, NamedTuple

from agent_r1_jax import config as config_lib
from agent_r1_jax.agent import call_formats, scoring
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.contrib.ray import actors
from agent_r1_jax.host import thread_pool, workers
from agent_r1_jax.rollout import sockets
from agent_r1_jax.train import fingerprint, preflight

# The most plain functions that run at a time; Ray's own resources say how much a machine
# is to do.
_THREADS = 1024
_OPTIONAL = 'finish', 'set_seed', 'least_limits'
_COMPARED = 'environment', 'tools'


class Call(NamedTuple):
  """A call of an environment's method.

  Attributes:
    method: Its name.
    args: Its arguments.
    policy_step: See agent/scoring.py.
    turn: Where the episode is, for the log.
  """

  method: str
  args: tuple
  policy_step: int
  turn: str


class Made(NamedTuple):
  """An environment that was made.

  Attributes:
    methods: The optional methods that it has.
    schemas: Those of its tools.
    call_grammar: See env.BaseEnv.
  """

  methods: list[str]
  schemas: list[dict[str, Any]]
  call_grammar: Any


class Answer(NamedTuple):
  """What a method returned.

  Attributes:
    value: The value.
    schemas: Those of the environment's tools, if they have changed.
  """

  value: Any
  schemas: list[dict[str, Any]] | None


class Fault(NamedTuple):
  """What a user's function raised.

  Attributes:
    name: The name of its type.
    text: What it says, and where it was raised.
    lost: Whether it was caught in what happened to others, and can be played again.
  """

  name: str
  text: str
  lost: bool


@dataclasses.dataclass
class _Held:
  """An environment, its event loop, and what the other side knows of its tools."""

  env: Any
  chat_format: call_formats.CallFormat
  home: workers.Home
  schemas: list[dict[str, Any]]


class EnvironmentHost:
  """Holds environments by the numbers that the other side gives them."""

  def __init__(self):
    """Loads nothing yet."""
    self._held: dict[int, _Held] = {}

  async def ping(self) -> None:
    """Answers."""

  async def open(self, packed: bytes) -> dict[str, Any]:
    """Takes make_env, packed, and makes an environment to look at.

    Returns:
      Where this process is, and what versions and code it has.
    """
    return await asyncio.to_thread(self._open, packed)

  def _open(self, packed: bytes) -> dict[str, Any]:
    self._make_env = actors.unpack(packed)
    thread_pool.POOL.grow(_THREADS)
    with preflight.open_environment(self._make_env, config_lib.Limits()) as env:
      if isinstance(env, sockets.Player):
        raise ValueError(
          'make_env gave a program, which plays where the engine is: have its own '
          'sandbox be elsewhere.'
        )
      made_of = fingerprint.describe_run(None, env, [])
    return {
      'where': f'process {os.getpid()} on {socket.gethostname()}',
      'versions': fingerprint.describe_versions(),
      'made_of': {name: made_of[name] for name in _COMPARED},
    }

  async def make(self, number: int, chat_format: call_formats.CallFormat) -> Made | Fault:
    """Makes an environment, whose replies have calls in this format."""
    env = await _call(self._make_env, 'make_env')
    if isinstance(env, Fault):
      return env
    held = _Held(env, chat_format, workers.Home(), _list_schemas(env))
    self._held[number] = held
    methods = [name for name in _OPTIONAL if env_lib.find_method(env, name)]
    return Made(methods, held.schemas, getattr(env, 'call_grammar', None))

  async def call(self, number: int, call: Call) -> Answer | Fault:
    """Calls a method of an environment."""
    held = self._held[number]
    workers.home.set(held.home)
    call_formats.chat_format.set(held.chat_format)
    scoring.policy_step.set(call.policy_step)
    thread_pool.current_turn.set(call.turn)
    value = await _call(getattr(held.env, call.method), call.method, *call.args)
    if isinstance(value, Fault):
      return value
    schemas = _list_schemas(held.env)
    changed = schemas != held.schemas
    held.schemas = schemas
    return Answer(value, schemas if changed else None)

  async def close(self, number: int) -> None | Fault:
    """Closes an environment, and forgets it."""
    held = self._held.pop(number)
    workers.home.set(held.home)
    if method := env_lib.find_method(held.env, 'close'):
      answer = await _call(method, 'close')
      return answer if isinstance(answer, Fault) else None
    return None


async def _call(fn: Any, name: str, *args: Any) -> Any:
  """Calls a user's function; returns a Fault if it raises."""
  try:
    return await workers.call_on_user_loop(fn, *args, name=name)
  except Exception as error:
    inner = error.__cause__ if isinstance(error, workers.BaseExceptionError) else error
    return Fault(
      type(inner or error).__name__,
      workers.describe_error(error) + workers.locate_error(error),
      isinstance(error, workers.LostCallError),
    )


def _list_schemas(env: Any) -> list[dict[str, Any]]:
  return [tool.schema for tool in getattr(env, 'tools', ())]
