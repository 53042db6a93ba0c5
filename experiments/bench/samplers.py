r"""Measures samplers that come and go, on a cluster of Ray on this machine.

  python -m experiments.bench.samplers kills [--runs=20]
  python -m experiments.bench.samplers waits

`kills` trains a small policy again and again while a machine is killed, a sampler is
killed or stopped, or the learner is killed and started again, at random moments; a
machine is added each time. It prints one line per run, and whether its parameters and its
numbers are those of a run that nobody disturbs, bit for bit.

`waits` plays episodes of one call of a tool, which takes .2, 1 and 5 seconds, with 1, 2
and 4 samplers of two rows each, and prints their episodes per second.
"""

import asyncio
import functools
import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from absl import app, flags
import jax
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, train, types
from agent_r1_jax.agent import scoring
from agent_r1_jax.contrib import ray
from agent_r1_jax.rl import algorithms
from agent_r1_jax.rollout import sockets
from agent_r1_jax.train import metrics
from experiments.bench import local_cluster

_RUNS = flags.DEFINE_integer('runs', 20, 'How many runs are disturbed.')
_MODEL = pathlib.Path(__file__).parents[1] / 'miniwiki' / 'model'
_STEPS, _GROUPS, _SAMPLES = 4, 2, 4
_EPISODES = _STEPS * _GROUPS * _SAMPLES
_KINDS = ('machine', 'sampler', 'silent', 'learner')
_WAITS = (0.2, 1.0, 5.0)


class Waits:
  """After each reply, a tool takes as long as the number of the policy's step says."""

  def __init__(self, waits: tuple[float, ...], turns: int):
    self._waits, self._most = waits, turns

  async def reset(self, task):
    """Begins with the task's messages."""
    self._turns = 0
    return task.messages

  async def step(self, reply):
    """Waits, and asks once more if it was not the last turn."""
    self._turns += 1
    wait = self._waits[min(scoring.policy_step.get(), len(self._waits) - 1)]
    await asyncio.sleep(wait)
    again = [{'role': 'user', 'content': 'and then?'}]
    return types.Step(again, len(reply) % 3 / 3, self._turns == self._most)

  async def finish(self, status, unfinished):
    """Waits as long for a reply that ran out of tokens."""
    return await self.step(unfinished or '')


def make_config(**changes) -> config_lib.Config:
  """Returns a small run with fixed shapes."""
  engine = {'rows': 4, 'slots': 192, 'bucket': 192, 'decode_steps': 8, 'narrow': False}
  engine |= {'prefill_rows': 4, 'prefill_tokens': 32, 'replicas': 1}
  given = {f'engine.{name}': value for name, value in engine.items()}
  given |= {'model.path': str(_MODEL), 'batch.microbatch': 4, 'batch.row_tokens': 192}
  given |= {'schedule.steps': _STEPS, 'schedule.tasks': _GROUPS}
  given |= {'schedule.samples': _SAMPLES, 'schedule.eval_every': 0}
  given |= {'limits.max_turns': 2, 'limits.max_turn_tokens': 40, 'checkpoint.every': 1}
  given |= {'checkpoint.keep_rollouts': True, 'max_error_rate': 0.0}
  return fields.replace(config_lib.Config(), given | changes)


class Acts(sockets.Watcher):
  """Calls functions when the first episode and the one of this number have ended."""

  def __init__(self, at: int, act, first=lambda: None):
    self._at, self._act, self._first, self._ended = at, act, first, 0

  def print_line(self, line):
    """Prints nothing."""

  def set_phase(self, name, done=None, total=None):
    """Counts the episodes of rollouts."""
    if name != 'rollout' or done is None:
      return
    self._ended += 1
    if self._ended == 1:
      self._first()
    if self._ended == self._at:
      self._act()


def run(workdir, *, waits=(0.02,), turns=2, watcher, samplers=None, **changes):
  """Trains, and returns the parameters."""
  tasks = [
    types.Task(f't{i}', [{'role': 'user', 'content': f'Tell me about {i}.'}])
    for i in range(16)
  ]
  return train.run(
    make_config(**changes),
    str(workdir),
    tasks=tasks,
    make_env=lambda: Waits(waits, turns),
    algorithm=algorithms.grpo(kl_coef=0.0),
    watcher=watcher,
    samplers=samplers,
  )


def make_samplers(address: str, maximum: int):
  """Returns samplers, each of which takes a node."""
  place = {local_cluster.PLACE: 1}
  options = {'num_cpus': 0, 'resources': place, 'silence_seconds': 6}
  return ray.samplers(1, maximum, address=address, **options)


def digest(params) -> str:
  """Returns a digest of parameters."""
  arrays = [np.asarray(x) for x in jax.tree.leaves(params)]
  return hashlib.sha256(b''.join(x.tobytes() for x in arrays)).hexdigest()[:12]


def read_numbers(workdir):
  """Returns the metrics that do not depend on who sampled."""
  others = ('time/', 'machine/', 'samplers/')
  lines = metrics.read(workdir)
  return [{k: v for k, v in x.items() if not k.startswith(others)} for x in lines]


def until(condition):
  """Waits for a condition, two minutes at most."""
  end = time.monotonic() + 120
  while not condition():
    if time.monotonic() > end:
      raise TimeoutError('a sampler did not join, or did not end')
    time.sleep(0.05)


def wait_for(samplers, number: int):
  """Waits until so many samplers have joined."""
  until(lambda: samplers.size == number)


def disturb(kind: str, cluster: local_cluster.LocalCluster, rng: random.Random):
  """Ends one of two samplers, and adds a machine."""
  node = rng.choice(cluster.nodes)
  pids = cluster.list_samplers(node)
  if kind == 'machine' or not pids:
    cluster.kill(node)
    cluster.add()
  else:
    for pid in pids:
      os.kill(pid, signal.SIGKILL if kind == 'sampler' else signal.SIGSTOP)


def measure_kills(folder: pathlib.Path):
  """Disturbs runs, and compares them with one that nobody disturbs."""
  params = run(folder / 'whole', watcher=Acts(-1, None))
  expected, numbers = digest(params), read_numbers(folder / 'whole')
  print(f'undisturbed, without samplers: {expected}', flush=True)
  equal = 0
  with local_cluster.LocalCluster() as cluster:
    for number in range(_RUNS.value):
      rng, kind = random.Random(number), _KINDS[number % len(_KINDS)]
      cluster.keep(2)
      at, workdir = rng.randrange(1, _EPISODES), folder / f'run{number}'
      act = lambda kind=kind, rng=rng: disturb(kind, cluster, rng)
      began = time.perf_counter()
      if kind == 'learner':
        command = [sys.executable, '-m', 'experiments.bench.samplers', 'learner']
        command += [str(workdir), cluster.address, str(at)]
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
        at = -1
      samplers = make_samplers(cluster.address, 2)
      watcher = Acts(at, act, functools.partial(wait_for, samplers, 2))
      found = digest(run(workdir, watcher=watcher, samplers=samplers))
      same = found == expected and read_numbers(workdir) == numbers
      equal += same
      lines = metrics.read(workdir)
      names = ('joined', 'lost', 'replayed', 'twice')
      counts = {n: int(sum(x.get(f'samplers/{n}', 0) for x in lines)) for n in names}
      seconds = time.perf_counter() - began
      result = {'run': number, 'kind': kind, 'at': at, **counts, 'equal': same}
      print(json.dumps(result | {'seconds': round(seconds, 1)}), flush=True)
      until(lambda: not any(cluster.list_samplers(node) for node in cluster.nodes))
  left = [pid for pid in cluster.pids if pathlib.Path(f'/proc/{pid}').exists()]
  print(f'{equal} of {_RUNS.value} are equal; {len(left)} processes are left')


def run_learner(workdir: str, address: str, at: int):
  """Trains until it kills itself."""
  die = lambda: os.kill(os.getpid(), signal.SIGKILL)
  run(workdir, watcher=Acts(at, die), samplers=make_samplers(address, 2))


def measure_waits(folder: pathlib.Path):
  """Plays episodes with slow tools by 1, 2 and 4 samplers."""
  # Each wait in two steps; the first of them is not counted.
  waits = [x for wait in _WAITS for x in (wait, wait)]
  sizes = {'schedule.steps': len(waits), 'schedule.tasks': 4, 'engine.rows': 2}
  sizes |= {'engine.prefill_rows': 2, 'checkpoint.every': 10}
  speeds = {}
  with local_cluster.LocalCluster() as cluster:
    for count in (1, 2, 4):
      cluster.keep(count)
      samplers, workdir = make_samplers(cluster.address, count), folder / str(count)
      join = functools.partial(wait_for, samplers, count)
      run(
        workdir,
        waits=tuple(waits),
        turns=1,
        watcher=Acts(1, join),
        samplers=samplers,
        **sizes,
      )
      seconds = [line['time/rollout'] for line in metrics.read(workdir)][1::2]
      speeds[count] = [16 / x for x in seconds]
      for wait, speed, one in zip(_WAITS, speeds[count], speeds[1], strict=True):
        share = speed / one / count
        print(f'wait {wait:g} s, {count} samplers: {speed:.2f} episodes/s, {share:.2f}')


def main(arguments: list[str]):
  """Runs a measurement."""
  command, *rest = arguments[1:]
  if command == 'learner':
    run_learner(rest[0], rest[1], int(rest[2]))
    return
  with tempfile.TemporaryDirectory() as folder:
    measure = {'kills': measure_kills, 'waits': measure_waits}[command]
    measure(pathlib.Path(folder))


if __name__ == '__main__':
  app.run(main)
