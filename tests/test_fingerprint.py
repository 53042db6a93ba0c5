"""A run's description: another reward, tool or algorithm is seen, and nothing else."""

import json
import os
import subprocess
import sys

import pytest
import script

from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.host import processes, workdir
from agent_r1_jax.rl import algorithms, losses
from agent_r1_jax.tasks import context
from agent_r1_jax.train import fingerprint

_SCRIPT = '''
import dataclasses, functools, json, re, time
import jax
from agent_r1_jax import types
from agent_r1_jax.train import fingerprint
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.rl import algorithms

WORDS = {'river', 'city', 'lake', 'sea'}
started = time.time()

@dataclasses.dataclass
class Judge:
  scale: float
  cache: object = dataclasses.field(default_factory=object)
  def __call__(self, task, messages):
    return self.scale * score(messages)

def score(messages):
  """Counts."""
  found = messages[-1]['content'] in {'river', 'city', 'lake', 'sea'}
  return 1.0 if found and len(messages) > 1 else 0.0

def make_reward(bonus):
  parts = {'again': None}
  def again(messages):
    return reward(None, messages)
  def reward(task, messages):
    parts['again'] = again
    return bonus + score(messages)
  return reward

def make_tool(port):
  client = object()
  @tool_lib.tool
  def look(at: str) -> str:
    """Looks.

    Args:
      at: What.
    """
    return f'{client} {port} {at}'
  return look

rewards = {
  'closure': make_reward(0.1),
  'object': Judge(2.0),
  'lambda': lambda task, messages: score(messages),
  'partial': functools.partial(lambda x, task, messages: x, 0.5),
  'jitted': jax.jit(lambda task, messages: 0.0),
  'method': Judge(1.0).__call__,
}
env = env_lib.ToolEnv([make_tool(int(started))], rewards['closure'])
tasks = [types.Task(f't{i}', []) for i in range(5)]
algorithm = algorithms.dapo(overlong={'limit': 3, 'buffer': 1})
found = fingerprint.describe_run(algorithm, env, tasks)
found['rewards'] = {name: fingerprint.describe(r) for name, r in rewards.items()}
print(json.dumps(found))
'''
# Prints the digest of tasks with a set and an object.
_DIGEST = """
import dataclasses, json, numpy as np
from agent_r1_jax import types
from agent_r1_jax.train import fingerprint
class Other: pass
info = {'set': {'a', 'b', 'c', 'd', 'e'}, 'other': Other(), 'array': np.arange(3)}
tasks = [types.Task(str(i), [], answer={(i, 'x'): frozenset('abcd')}, info=info)
         for i in range(300)]
print(json.dumps(fingerprint.tasks_digest({'': tasks})))
"""

# Runs each of some scripts as `python script` would.
_RUN = """
import runpy, sys
for path in sys.argv[1:]:
  runpy.run_path(path, None, '__main__')
"""
# (text of the script, what is there instead, names of what differs then; with '...' among
# others).
_CHANGES = [
  # A reward's own number, its arguments, and the user's function that it calls.
  ('make_reward(0.1)', 'make_reward(0.2)', ['environment.reward.bonus', '...']),
  ("'lake', 'sea'}\n  ret", "'lake', 'bay'}\n  ret", ['environment.reward.code', '...']),
  ('1.0 if found', '1.5 if found', ['environment.reward.code', '...']),
  ('Judge(2.0)', 'Judge(3.0)', ['rewards.object.scale']),
  ('messages: x, 0.5)', 'messages: x, 0.6)', ['rewards.partial.0']),
  # A tool: what the model is told, and what it does.
  ('Looks.', 'Finds.', ['tools.look.schema']),
  ("{port} {at}'", "{port}, {at}'", ['tools.look.fn.code']),
  ('@tool_lib.tool\n', "@tool_lib.tool(name='find')\n", ['tools.find.schema', '...']),
  # The algorithm.
  ('dapo(', 'dapo(clip_high=0.3, ', ['algorithm.loss.surrogate.clip_high']),
  ("'limit': 3", "'limit': 4", ['algorithm.rewards.0.limit']),
  ('range(5)', 'range(6)', ['tasks.count', 'tasks.ids']),
  ("f't{i}'", "f'u{i}'", ['tasks.ids']),
]


def _write(folder, *scripts):
  folder.mkdir(parents=True)
  paths = [folder / f'script_{i}.py' for i in range(len(scripts))]
  for path, text in zip(paths, scripts):
    path.write_text(text)
  return map(str, paths)


def _read(done):
  """Returns what each of the scripts printed."""
  assert done.returncode == 0, done.stderr
  return [json.loads(line) for line in done.stdout.splitlines()]


def _different(a, b):
  a, b = (workdir.flatten_fields(x) for x in (a, b))
  return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


@pytest.fixture(scope='module')
def described(tmp_path_factory):
  """Descriptions of the script and of it with each of the changes, then digests."""
  assert all(_SCRIPT.count(old) == 1 for old, _, _ in _CHANGES)
  changed = [_SCRIPT.replace(old, new) for old, new, _ in _CHANGES]
  digests = _DIGEST, _DIGEST.replace('np.arange(3)', 'np.arange(4)')
  digests += (_DIGEST.replace('(i,', '(-i,'),)
  paths = _write(tmp_path_factory.mktemp('script') / 'here', _SCRIPT, *changed, *digests)
  return _read(script.run('-c', _RUN, *paths))


@pytest.fixture(scope='module')
def described_again(tmp_path_factory):
  """Elsewhere, later, with other addresses and hashes, comments and lines."""
  text = '# A comment.\n\n' + _SCRIPT.replace('  found =', '  # why\n  found =', 1)
  text = text.replace('"""Counts."""', '"""Counts what is there."""')
  paths = _write(tmp_path_factory.mktemp('again') / 'deep' / 'er', text, _DIGEST)
  # No fork: it would have the hashes of the process that it comes from.
  command = [sys.executable, '-c', _RUN, *paths]
  environment = os.environ | {'PYTHONPATH': str(script.ROOT), 'PYTHONHASHSEED': '2'}
  return _read(subprocess.run(command, env=environment, capture_output=True, text=True))


def test_the_same_script_is_the_same_at_every_start(described, described_again):
  assert described_again[0] == described[0]


@pytest.mark.parametrize('number', range(len(_CHANGES)))
def test_what_differs_is_named(described, number):
  expected = _CHANGES[number][2]
  found = _different(described[0], described[1 + number])
  assert found == expected or (expected[-1] == '...' and expected[0] in found)


@pytest.mark.parametrize(
  ('other', 'expected'),
  [
    (algorithms.grpo(clip_low=0.1), ['algorithm.loss.surrogate.clip_low']),
    (algorithms.grpo(kl_coef=0.1), ['algorithm.kl.coef']),
    (algorithms.grpo(divide_by_std=False), ['algorithm.advantages.divide_by_std']),
    (algorithms.grpo()._replace(mask_truncated=True), ['algorithm.mask_truncated']),
    (
      algorithms.grpo()._replace(aggregate=losses.seq_mean_token_sum),
      ['algorithm.aggregate'],
    ),
    (algorithms.grpo()._replace(loss=losses.reinforce()), None),
    (algorithms.grpo(correction=losses.token_truncated()), None),
  ],
)
def test_an_algorithms_options_are_named(other, expected):
  found = _different(
    {'algorithm': fingerprint.describe(algorithms.grpo())},
    {'algorithm': fingerprint.describe(other)},
  )
  assert found and (expected is None or found == expected)


def _reward_a(task, messages):
  return 1.0


def _reward_b(task, messages):
  return 2.0


class _Own:
  """An environment of one's own, whose step calls its other methods."""

  async def reset(self, task):
    return task.messages

  async def step(self, reply):
    return self.judge(reply)

  def judge(self, reply):
    return float(len(reply))


class _Halved(_Own):
  def judge(self, reply):
    return float(len(reply)) / 2


class _Shouting(env_lib.ToolEnv):
  async def answer_text(self, text):
    return text.upper()


class _Wrapper:
  def __init__(self, inner):
    self.inner = inner

  async def reset(self, task):
    return await self.inner.reset(task)

  async def step(self, reply):
    return await self.inner.step(reply)


def _tool_env(reward=_reward_a):
  return env_lib.ToolEnv([], reward)


@pytest.mark.parametrize(
  ('env', 'other', 'expected'),
  [
    (_tool_env(), _tool_env(_reward_b), 'environment.reward.code'),
    (_Own(), _Halved(), 'environment.judge.code'),
    (_tool_env(), _Shouting([], _reward_a), 'environment.answer_text.code'),
    (_Wrapper(_Own()), _Wrapper(_Halved()), 'environment.inner.judge.code'),
    (
      context.SlidingWindow(_tool_env(), turns=2),
      context.SlidingWindow(_tool_env(_reward_b), turns=2),
      'environment.env.reward.code',
    ),
    *(
      (kind(_tool_env(), turns=2), kind(_tool_env(), turns=3), f'environment.{name}')
      for kind, name in (
        (context.SlidingWindow, 'most_turns'),
        (context.Summary, 'every'),
      )
    ),
    (
      context.Rebuilt(context.Summary(_tool_env(), turns=2), len),
      context.Rebuilt(context.Summary(_tool_env(_reward_b), turns=2), len),
      'environment.env.env.reward.code',
    ),
  ],
)
def test_an_environment_is_its_code_and_what_it_wraps(env, other, expected):
  before, again, after = (
    fingerprint.describe_run(None, e, []) for e in (env, env, other)
  )
  assert before == again and expected in _different(before, after)


def test_tasks_whose_answers_json_lacks_have_a_digest():
  sets = [{'a': [types.Task('0', [], answer={(0, 1): x})]} for x in 'yyz']
  one, same, other = map(fingerprint.tasks_digest, sets)
  assert one == same != other


def test_a_digest_is_the_same_in_every_process(described, described_again):
  """A set has another order there, and an object another address."""
  digest, *others = described[1 + len(_CHANGES) :]
  assert len({digest, *others}) == 3 and described_again[1] == digest


def test_what_processes_do_not_share_is_named():
  shares = [{'config.seed': 0, 'same': [1]}, {'config.seed': 1, 'same': [1]}]
  assert not processes.list_disagreements(shares[:1] * 3)
  assert processes.list_disagreements([*shares, {'config.seed': 0, 'more': 'x'}]) == [
    '\n  config.seed: 0 in process 0, 2; 1 in process 1',
    '\n  more: absent in process 0, 1; "x" in process 2',
    '\n  same: [1] in process 0, 1; absent in process 2',
  ]
  long = [{'made_of': 'x' * 200 + end} for end in ('1', '2')]
  (line,) = processes.list_disagreements(long)
  assert 'x1" in process 0; ...xxx' in line and 'x2" in process 1' in line
