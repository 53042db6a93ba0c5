"""The sampler itself and what is published to it, in this process and without Ray."""

import contextlib
import dataclasses
import sys
from unittest import mock

import jax
import numpy as np
import pytest
import runs
import tiny

from agent_r1_jax.contrib import ray
from agent_r1_jax.contrib.ray import actors
from agent_r1_jax.contrib.ray import cluster as cluster_lib
from agent_r1_jax.contrib.ray import remote as remote_lib
from agent_r1_jax.contrib.ray import sampler as sampler_lib
from agent_r1_jax.models import engine_params
from agent_r1_jax.rl import algorithms, losses
from agent_r1_jax.train import metrics

pytestmark = pytest.mark.usefixtures('no_curves', 'traced_once')
model = runs.model
_STALE = algorithms.grpo(kl_coef=0.0, correction=losses.token_truncated())


class Here:
  """A remote.Remote in this process; its device runs out of memory at some episode."""

  played = 0

  def __init__(self, fails_at=0):
    self._sampler, self._fails_at = sampler_lib.Sampler(), fails_at

  async def call(self, method, *args):
    try:
      if method == 'play':
        Here.played += 1
        if Here.played == self._fails_at:
          raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of memory')
      return await getattr(self._sampler, method)(*args)
    except Exception as error:
      raise remote_lib.RaisedError(f'{type(error).__name__}: {error}') from error

  def kill(self):
    self._sampler._stack.close()


@contextlib.contextmanager
def in_this_process(fails_at):
  """Has samplers run here, and nothing be stored elsewhere."""
  Here.played = 0
  with (
    mock.patch.object(actors, 'connection', lambda *_: contextlib.nullcontext()),
    mock.patch.object(cluster_lib, '_put', lambda arrays: arrays),
    mock.patch.object(
      cluster_lib.RaySamplers, '_start', lambda self, number: Here(fails_at)
    ),
  ):
    yield


@pytest.mark.parametrize(
  ('options', 'algorithm', 'fails_at'),
  [
    ({'lora_rank': 2, 'lora_targets': 'q,up'}, runs.GRPO, 0),
    ({'weights': 'int8'}, runs.GRPO, 0),
    ({'ahead': 1}, _STALE, 20),
    ({'ahead': 1, 'partial': True}, _STALE, 0),
  ],
)
def test_schedules_and_adapters(model, tmp_path, options, algorithm, fails_at):
  """The same parameters as without samplers; one of them may run out of memory."""
  given = {'algorithm': algorithm, 'evals': {}}
  config = runs.config(model, steps=3, **options)
  plain = runs.run(config, tmp_path / 'plain', **given)
  with in_this_process(fails_at):
    samplers = ray.samplers(maximum=1)
    params = runs.run(config, tmp_path / 'run', samplers=samplers, **given)
  lines = metrics.read(tmp_path / 'run')
  assert sum(line['samplers/lost'] for line in lines) == (fails_at > 0)
  # A policy that is published after the first one: all of it, or its adapters.
  sent = max(line['samplers/bytes'] for line in lines[1:])
  total = sum(x.nbytes for x in runs.leaves(plain))
  expected = {'lora_rank': 0.1, 'weights': 0.97}  # It is mostly embeddings.
  most = min([1.0, *(x for name, x in expected.items() if name in options)])
  assert (0 < sent < most * total) if most < 1 else sent == total, sent / total
  if 'partial' not in options:
    runs.assert_equal(params, plain)
  # Ray does not start in a process whose script has the file None.
  assert getattr(sys.modules['__main__'], '__file__', '') is not None


def test_parameters_cast_to_be_sent_sample_the_same():
  shape = dataclasses.replace(tiny.config('qwen3_moe'), dtype='bfloat16')
  params = tiny.params(shape)
  sent = jax.tree.map(np.asarray, engine_params.cast_params(params, shape))
  assert sum(x.nbytes for x in runs.leaves(sent)) < 0.53 * sum(
    x.nbytes for x in runs.leaves(params)
  )
  found = engine_params.unstack(jax.device_put(sent), shape)
  runs.assert_equal(found, engine_params.unstack(params, shape))
