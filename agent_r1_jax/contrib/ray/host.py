"""An actor that holds environments, each for one episode of another machine.

Users' functions run as in a rollout (host/workers.py): plain functions in threads,
coroutines on their own event loop, so this actor always answers. It has no time limits:
the caller cancels a call that takes too long.
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

# Maximum number of plain functions at once; Ray's own resources limit the work per
# machine.
_THREADS = 1024
_OPTIONAL = 'finish', 'set_seed', 'least_limits'
_COMPARED = 'environment', 'tools'


class Call(NamedTuple):
  """A call of an environment's method.

  Attributes:
    method: Its name.
    args: Its arguments.
    policy_step: See agent/scoring.py.
    turn: The position in the episode, for the log.
  """

  method: str
  args: tuple
  policy_step: int
  turn: str


class Made(NamedTuple):
  """A created environment.

  Attributes:
    methods: The optional methods that it has.
    schemas: Its tools' schemas.
    call_grammar: See env.BaseEnv.
  """

  methods: list[str]
  schemas: list[dict[str, Any]]
  call_grammar: Any


class Answer(NamedTuple):
  """The result of a method.

  Attributes:
    value: The return value.
    schemas: The schemas of the environment's tools, if they have changed.
  """

  value: Any
  schemas: list[dict[str, Any]] | None


class Fault(NamedTuple):
  """An exception of a user's function.

  Attributes:
    name: The name of its type.
    text: Its message, and where it was raised.
    lost: Whether a failure elsewhere caused it, so that the episode can be replayed.
  """

  name: str
  text: str
  lost: bool


@dataclasses.dataclass
class _Held:
  """An environment, its event loop, and the schemas that the other side knows."""

  env: Any
  chat_format: call_formats.CallFormat
  home: workers.Home
  schemas: list[dict[str, Any]]


class EnvironmentHost:
  """Holds environments by numbers that the other side assigns."""

  def __init__(self):
    """Loads nothing yet."""
    self._held: dict[int, _Held] = {}

  async def ping(self) -> None:
    """Answers."""

  async def open(self, packed: bytes) -> dict[str, Any]:
    """Unpickles make_env, and makes an environment to describe.

    Returns:
      Where this process is, and its versions and code.
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
    """Makes an environment; replies have calls in this format."""
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
    """Closes and forgets an environment."""
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
