"""The quickstart's base policy and its tool, for the tests of serve/ and of programs."""

import contextlib
import dataclasses
import functools
import pathlib
from typing import Any

import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.rollout import rollout
from agent_r1_jax.serve import program, server
from agent_r1_jax.tools import search
from agent_r1_jax.train.plan import setup
from agent_r1_jax.web import http
from experiments.miniwiki import shapes
from experiments.miniwiki import tasks as miniwiki

LIMITS = config_lib.Limits(max_turns=5, max_turn_tokens=48, episode_seconds=120)
SLOTS = 320


@functools.cache
def policy():
  """The shape, the parameters and the chat."""
  return setup.load(shapes.CONFIG.model, shapes.CONFIG.chat)


@functools.cache
def engine() -> engine_lib.Engine:
  """One program for each step, so that log-probs repeat to the last bit."""
  model, params, _ = policy()
  sizes = {
    'rows': 8,
    'slots': SLOTS,
    'bucket': SLOTS,
    'decode_steps': 16,
    'prefill_rows': 4,
  }
  return engine_lib.Engine(model, params, **sizes, narrow=False)


@functools.cache
def search_tool():
  passages = miniwiki.corpus(0, 'train')  # of which `tasks` ask
  return search.search_tool(miniwiki.make_index(passages), k=1)


@functools.cache
def tasks() -> list[types.Task]:
  return miniwiki.train_tasks(0, 6)


def collect(make_env: rollout.MakeEnv, played: Any = None, **options: Any):
  """Plays tasks, by default `tasks`, with the policy, one sample each."""
  options = {'limits': LIMITS, 'samples': 1, 'seed': 3} | options
  played = tasks() if played is None else played
  given = engine(), policy()[2], played, make_env
  return tiny.within(rollout.collect, *given, **options)


def run_programs(run: Any, played: Any = None, dialects: Any = (), **options: Any):
  """The same, by a program that asks an endpoint."""
  make_env = lambda: program.Program(run, dialects=dialects)
  return collect(make_env, played, **options)


@contextlib.contextmanager
def serve(served: engine_lib.Engine | None = None, chat: Any = None, **options: Any):
  """The address of a server of an engine, by default `engine`, open meanwhile."""
  served = served or engine()
  with run(served, server.make_app(served, chat or policy()[2], **options)) as url:
    yield url


@contextlib.contextmanager
def run(served: engine_lib.Engine, app: Any):
  """The address of an application in an engine's event loop, open meanwhile."""
  running = http.make_server(app, 5)
  with served.open(), http.listen('127.0.0.1', 0) as listener:
    future = served.start([running.serve([listener])])
    try:
      yield f'http://127.0.0.1:{listener.getsockname()[1]}'
    finally:
      running.should_exit = True
      future.result(60)


def replace(limits: config_lib.Limits, **changes: Any) -> config_lib.Limits:
  return dataclasses.replace(limits, **changes)


ROOT = pathlib.Path(__file__).parents[1]
