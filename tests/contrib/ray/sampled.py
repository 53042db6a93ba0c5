"""Runs with samplers on a cluster of Ray, for the tests of what becomes of them."""

import runs

from agent_r1_jax import report
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.contrib import ray


class Moments(report.Watcher):
  """Acts once when so many episodes of rollouts have ended."""

  def __init__(self, *moments):
    super().__init__()
    self._acts, self._ended = dict(moments), 0

  def set_phase(self, name, done=None, total=None):
    super().set_phase(name, done, total)
    if name == 'rollout' and done:
      self._ended += 1
      self._acts.pop(self._ended, lambda: None)()


def make_samplers(address, **options):
  place = {'num_cpus': 0, 'resources': {'place': 1}, 'address': address}
  return ray.samplers(maximum=3, **place | options)


def config(model):
  return runs.config(model, keep_rollouts=True)


class Env(env_lib.ToolEnv):
  """A class of the script itself, in the process that is killed."""

  async def reset(self, task):
    return await super().reset(task)


def make_env():
  return Env([runs.look], runs.reward, parse=runs.parse)


def assert_same(params, workdir, whole):
  """The parameters and the numbers of a run without samplers, bit for bit."""
  runs.assert_equal(params, whole[0])
  numbers = [
    {k: v for k, v in line.items() if not k.startswith('samplers/')}
    for line in runs.read_numbers(workdir)
  ]
  assert numbers == runs.read_numbers(whole[1])


def give_up(samplers):
  """Has the run wait no longer for samplers."""
  pool = samplers._pool
  pool._options = pool._options._replace(wait_seconds=0.0)
