"""Runs whose samplers come and go, on a cluster of Ray, equal a run without them.

Run as a script, it trains with samplers until it is killed (see `main`).
"""

import os
import signal
import sys

import coded
import pytest
import runs
import script
import waiting

from agent_r1_jax import report
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.contrib import ray
from agent_r1_jax.contrib.ray import pool as pool_lib
from agent_r1_jax.rollout import sockets
from agent_r1_jax.train import metrics

pytestmark = pytest.mark.usefixtures('no_curves', 'traced_once')
model, whole = runs.model, runs.whole


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


def test_a_machine_is_lost_and_another_one_joins(whole, cluster, model, tmp_path):
  first, second = cluster.add(), cluster.add()
  samplers = make_samplers(cluster.address)
  wait_for = lambda number: waiting.until(lambda: samplers.size == number, 'joining')

  def replace():
    cluster.kill(second)
    wait_for(1)
    cluster.add()
    wait_for(2)

  moments = Moments((3, lambda: wait_for(2)), (13, replace))
  params = runs.run(config(model), tmp_path, samplers=samplers, watcher=moments)
  assert_same(params, tmp_path, whole)
  lines = metrics.read(tmp_path)[1:]
  total = lambda name: sum(line[f'samplers/{name}'] for line in lines)
  assert (total('joined'), total('lost'), total('refused')) == (3, 1, 0)
  size = sum(x.nbytes for x in runs.leaves(params))
  assert [line['samplers/bytes'] for line in lines] == [size] * 5
  waiting.until(lambda: not cluster.list_samplers(first), 'the end of the samplers')


def give_up(samplers):
  """Has the run wait no longer for samplers."""
  pool = samplers._pool
  pool._options = pool._options._replace(wait_seconds=0.0)


def test_the_learner_is_killed_and_then_has_no_samplers(whole, cluster, model, tmp_path):
  """It resumes twice: where it was killed, and where no sampler was left."""
  cluster.keep(1)
  (node,) = cluster.nodes
  command = __file__, tmp_path, model, cluster.address
  with script.Process(*command, PYTHONPATH=cluster.path) as process:
    assert process.wait(600) == -signal.SIGKILL
  waiting.until(lambda: not cluster.list_samplers(node), 'the end of the sampler')
  samplers = make_samplers(cluster.address)
  lose = lambda: (cluster.kill(node), give_up(samplers))
  with pytest.raises(sockets.SamplersLostError, match='than minimum=1; there are 0'):
    options = {'samplers': samplers, 'make_env': make_env}
    runs.run(config(model), tmp_path, watcher=Moments((12, lose)), **options)
  assert metrics.read(tmp_path)[-1]['step'] < 5
  cluster.add()
  options['samplers'] = make_samplers(cluster.address)
  params = runs.run(config(model), tmp_path, watcher=Moments(), **options)
  assert_same(params, tmp_path, whole)


def test_a_sampler_with_other_code_is_refused(cluster, model, tmp_path, monkeypatch):
  cluster.keep(1)
  samplers, complain = make_samplers(cluster.address), pool_lib.Pool._complain

  def complain_and_give_up(pool, text):
    complain(pool, text)
    if 'refused' in text:
      give_up(samplers)

  monkeypatch.setattr(pool_lib.Pool, '_complain', complain_and_give_up)
  with pytest.raises(sockets.SamplersLostError, match='refused: .* tools: .*the same co'):
    options = {'make_env': coded.make_env, 'samplers': samplers}
    runs.run(config(model), tmp_path, watcher=sockets.PLAIN, **options)


def main(workdir, model, address):
  """Trains until the 20th episode, and kills itself."""
  die = lambda: os.kill(os.getpid(), signal.SIGKILL)
  options = {'samplers': make_samplers(address), 'make_env': make_env}
  runs.run_here(config(model), workdir, watcher=Moments((20, die)), **options)


if __name__ == '__main__':
  main(*sys.argv[1:])
