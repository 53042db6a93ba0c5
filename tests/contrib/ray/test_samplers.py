"""Runs whose samplers come and go, on a cluster of Ray, equal a run without them."""

import coded
import pytest
import runs
import sampled
import waiting

from agent_r1_jax.contrib.ray import pool as pool_lib
from agent_r1_jax.rollout import sockets
from agent_r1_jax.train import metrics

pytestmark = pytest.mark.usefixtures('no_curves', 'traced_once')
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


def test_a_sampler_with_other_code_is_refused(cluster, model, tmp_path, monkeypatch):
  cluster.keep(1)
  samplers, complain = sampled.make_samplers(cluster.address), pool_lib.Pool._complain

  def complain_and_give_up(pool, text):
    complain(pool, text)
    if 'refused' in text:
      sampled.give_up(samplers)

  monkeypatch.setattr(pool_lib.Pool, '_complain', complain_and_give_up)
  with pytest.raises(sockets.SamplersLostError, match='refused: .* tools: .*the same co'):
    options = {'make_env': coded.make_env, 'samplers': samplers}
    runs.run(sampled.config(model), tmp_path, watcher=sockets.PLAIN, **options)
