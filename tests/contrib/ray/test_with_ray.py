"""Runs on a cluster of Ray equal a run without samplers: `make test-with-ray`.

Samplers, machines and the learner are lost. Run as a script, this trains with samplers
until it is killed (see `main`).
"""

import os
import signal
import sys

import coded
import many_sandboxes
import pytest
import runs
import sampled
import script
import waiting

from agent_r1_jax.contrib import ray
from agent_r1_jax.contrib.ray import places
from agent_r1_jax.rollout import sockets
from agent_r1_jax.train import metrics

pytestmark = [
  pytest.mark.usefixtures('no_curves', 'traced_once'),
  pytest.mark.skipif(
    'PACKAGE_PYTHON' not in os.environ, reason='`make test-with-ray` runs it'
  ),
]
model, whole = runs.model, runs.whole


def test_a_machine_is_lost_and_another_one_joins(whole, cluster, model, tmp_path):
  first, second = cluster.add(), cluster.add()
  samplers = sampled.make_samplers(cluster.address)
  wait_for = lambda number: waiting.until(lambda: samplers.size == number, 'joining')

  def replace():
    cluster.kill(second)
    wait_for(1)
    cluster.add()
    wait_for(2)

  moments = sampled.Moments((3, lambda: wait_for(2)), (13, replace))
  params = runs.run(sampled.config(model), tmp_path, samplers=samplers, watcher=moments)
  sampled.assert_same(params, tmp_path, whole)
  lines = metrics.read(tmp_path)[1:]
  total = lambda name: sum(line[f'samplers/{name}'] for line in lines)
  assert (total('joined'), total('lost'), total('refused')) == (3, 1, 0)
  size = sum(x.nbytes for x in runs.leaves(params))
  assert [line['samplers/bytes'] for line in lines] == [size] * 5
  waiting.until(lambda: not cluster.list_samplers(first), 'the end of the samplers')


def test_environments_are_lost_with_their_machine(whole, cluster, model, tmp_path):
  cluster.keep(2)
  place = {'num_cpus': 0, 'resources': {'place': 1}, 'address': cluster.address}
  make_env = ray.environments(sampled.make_env, 2, **place)
  joined = lambda: make_env.measure()['joined'] >= 2
  lose = lambda: (waiting.until(joined, 'joining'), cluster.kill(cluster.nodes[0]))
  options = {'watcher': sampled.Moments((13, lose)), 'make_env': make_env}
  params = runs.run(sampled.config(model), tmp_path, **options)
  runs.assert_equal(params, whole[0])
  assert make_env.measure() == {'joined': 2, 'lost': 1, 'refused': 0, 'held': 0}
  make_env.close()


def test_sandboxes_are_lost_with_their_machine(cluster):
  found = many_sandboxes.play(cluster, 60, 20, 2, kills=True)
  assert (found['right'], found['lost'], found['held'][-1]) == (60, 1, 0)
  assert found['replayed'] > 0


def test_the_learner_is_killed_and_then_has_no_samplers(whole, cluster, model, tmp_path):
  """It resumes twice: where it was killed, and where no sampler was left."""
  cluster.keep(1)
  (node,) = cluster.nodes
  command = __file__, tmp_path, model, cluster.address
  with script.Process(*command, PYTHONPATH=cluster.path) as process:
    assert process.wait(600) == -signal.SIGKILL
  waiting.until(lambda: not cluster.list_samplers(node), 'the end of the sampler')
  samplers = sampled.make_samplers(cluster.address)
  lose = lambda: (cluster.kill(node), sampled.give_up(samplers))
  with pytest.raises(sockets.SamplersLostError, match='than minimum=1; there are 0'):
    options = {'samplers': samplers, 'make_env': sampled.make_env}
    runs.run(
      sampled.config(model), tmp_path, watcher=sampled.Moments((12, lose)), **options
    )
  assert metrics.read(tmp_path)[-1]['step'] < 5
  cluster.add()
  options['samplers'] = sampled.make_samplers(cluster.address)
  options['watcher'] = sampled.Moments()
  params = runs.run(sampled.config(model), tmp_path, **options)
  sampled.assert_same(params, tmp_path, whole)


def test_a_sampler_with_other_code_is_refused(cluster, model, tmp_path, monkeypatch):
  cluster.keep(1)
  samplers, complain = sampled.make_samplers(cluster.address), places.Places._complain

  def complain_and_give_up(kept, text):
    complain(kept, text)
    if 'refused' in text:
      sampled.give_up(samplers)

  monkeypatch.setattr(places.Places, '_complain', complain_and_give_up)
  with pytest.raises(sockets.SamplersLostError, match='refused: .* tools: .*the same co'):
    options = {'make_env': coded.make_env, 'samplers': samplers}
    runs.run(sampled.config(model), tmp_path, watcher=sockets.PLAIN, **options)


def main(workdir, model, address):
  """Trains until the 20th episode, and kills itself."""
  die = lambda: os.kill(os.getpid(), signal.SIGKILL)
  options = {'samplers': sampled.make_samplers(address), 'make_env': sampled.make_env}
  runs.run_here(
    sampled.config(model), workdir, watcher=sampled.Moments((20, die)), **options
  )


if __name__ == '__main__':
  main(*sys.argv[1:])
