"""A learner that is killed goes on with new samplers: `make test-with-ray`.

It takes a minute and a half of two cores, too long for the suite. Run as a script, this
trains with samplers until it is killed (see `main`).
"""

import os
import signal
import sys

import pytest
import runs
import sampled
import script
import waiting

from agent_r1_jax.rollout import sockets
from agent_r1_jax.train import metrics

pytestmark = [
  pytest.mark.usefixtures('no_curves', 'traced_once'),
  pytest.mark.skipif(
    'PACKAGE_PYTHON' not in os.environ, reason='`make test-with-ray` runs it'
  ),
]
model, whole = runs.model, runs.whole


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


def main(workdir, model, address):
  """Trains until the 20th episode, and kills itself."""
  die = lambda: os.kill(os.getpid(), signal.SIGKILL)
  options = {'samplers': sampled.make_samplers(address), 'make_env': sampled.make_env}
  runs.run_here(
    sampled.config(model), workdir, watcher=sampled.Moments((20, die)), **options
  )


if __name__ == '__main__':
  main(*sys.argv[1:])
