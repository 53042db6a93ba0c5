"""Training runs of a tiny policy with a tool, all of one size, and what they write."""

import asyncio
import functools
import pathlib

import jax
import numpy as np
import pytest
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import report, train, types
from agent_r1_jax.agent import calls
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import algorithms, losses, table
from agent_r1_jax.train import loop, metrics

GRPO = algorithms.grpo(kl_coef=0.01)
PPO = algorithms.ppo(kl_coef=0.0)
STALE = algorithms.grpo(kl_coef=0.0, correction=losses.token_truncated())
_WORDS = (' the', ' city', ' capital', ' is')


class Talks:
  """Asks twice, and scores the length of the replies."""

  async def reset(self, task):
    self.turns = 0
    return task.messages

  async def step(self, reply):
    self.turns += 1
    again = [{'role': 'user', 'content': 'name'}]
    return types.Step(again, len(reply) % 3 / 3, self.turns == 2)


def config(model, **kwargs) -> config_lib.Config:
  small = {
    'steps': 5,
    'tasks': 2,
    'samples': 4,
    'max_turns': 3,
    'max_turn_tokens': 6,
    'learning_rate': 3e-3,
    'rows': 4,
    'slots': 96,
    'decode_steps': 4,
    'prefill_rows': 4,
    'prefill_tokens': 32,
    'bucket': 96,
    'narrow': False,  # for the sake of the last bit
    'microbatch': 2,
    'checkpoint_every': 2,
    'eval_every': 2,
  }
  return tiny.run_config(model=str(model), **small | kwargs)


def likely() -> dict[int, float]:
  """Returns the biases of a policy that says one of four words and ends its reply."""
  tokenizer = tiny.chat().tokenizer
  ids = [tokenizer.encode(word, add_special_tokens=False) for word in _WORDS]
  assert all(len(i) == 1 for i in ids)
  return {i: 2.5 for (i,) in ids} | {tiny.chat().stop_ids[0]: 2.7}


@functools.cache
def _save(root):
  return tiny.save(root / 'tiny', likely())


@pytest.fixture(scope='session')
def model(tmp_path_factory):
  """The directory of the policy, made once for all files."""
  return _save(tmp_path_factory.getbasetemp())


def tasks(n=3) -> list[types.Task]:
  return [
    types.Task(f't{i}', [{'role': 'user', 'content': f'{"x" * i} name'}])
    for i in range(n)
  ]


@tool_lib.tool
async def look(seconds: float) -> str:
  """Looks something up.

  Args:
    seconds: How long it takes.
  """
  await asyncio.sleep(seconds)
  return 'it is'


def parse(reply):
  return (
    [calls.ToolCall('look', {'seconds': 0.001 * len(reply)})]
    if 'capital' in reply
    else []
  )


def reward(task, messages):
  return {'city': float(' city' in messages[-1]['content']), 'length': -0.01}


def make_env(tools=(look,), reward=reward):
  return env_lib.ToolEnv(tools, reward, parse=parse)


def run(config, workdir, **kwargs) -> decoder.Params:
  """Trains in a thread of its own, which no signal reaches; fails if it hangs."""
  return tiny.within(run_here, config, workdir, **kwargs)


def run_here(config, workdir, algorithm=GRPO, make_env=make_env, **kwargs):
  kwargs = {'tasks': tasks(), 'evals': {'dev': tasks(2)}} | kwargs
  kwargs.setdefault('watcher', report.Watcher())
  return train.run(
    config,
    str(workdir),
    make_env=make_env,
    algorithm=algorithm,
    **kwargs,
  )


@functools.cache
def _uninterrupted(model, root):
  return run(config(model), root / 'whole'), root / 'whole'


@pytest.fixture
def whole(model, tmp_path_factory):
  """The parameters and the workdir of a run that nothing interrupts, made once."""
  return _uninterrupted(model, tmp_path_factory.getbasetemp())


@pytest.fixture
def learned_from(monkeypatch):
  """Runs learn nothing, so that no gradient is compiled.

  Gives the trajectories and the keyword arguments of each call of updates.learn.
  """
  calls, learn = [], loop.updates.learn

  def learn_nothing(train_state, trajectories, update_config, **kwargs):
    calls.append((trajectories, kwargs))
    train_state, metrics, _ = learn(train_state, [], update_config)
    return train_state, metrics, table.build(trajectories, kwargs['baselines'])

  monkeypatch.setattr(loop.updates, 'learn', learn_nothing)
  return calls


def read_numbers(workdir: pathlib.Path) -> list[dict[str, float]]:
  """Returns all metrics but the times, a dict a line."""
  return [
    {k: v for k, v in line.items() if not k.startswith(('time/', 'machine/'))}
    for line in metrics.read(workdir)
  ]


def leaves(tree) -> list:
  """Returns the arrays of a tree."""
  return jax.tree.leaves(tree)


def assert_equal(a, b):
  """Asserts that trees are equal bit for bit."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)
