"""For TPUs: the attention kernel, and programs compiled for chips that are not here."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_r1_jax.models import attention

ROOT = pathlib.Path(__file__).parents[1]


def test_the_kernel_for_tpus_is_the_plain_attention():
  """Forward and backward, grouped queries, two segments and padding."""
  B, T, N, K, H = 1, 256, 2, 1, 128
  rng = np.random.default_rng(0)
  make = lambda heads: jnp.asarray(rng.normal(size=(B, T, heads, H)), jnp.float32)
  q, k, v, slope = make(N), make(K), make(K), make(N)
  ids = jnp.asarray(np.searchsorted([100, 240], np.arange(T), 'right') + 1)[None]
  ids = jnp.where(ids == 3, 0, ids)

  def both(attend):
    def total(q, k, v):
      out = attend(q, k, v, ids)
      return jnp.vdot(out, slope), out

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))

  interpreted = lambda *args: attention._splash(*args, interpret=True)
  mine = both(interpreted)(q, k, v)
  for x, y in zip(
    jax.tree.leaves(mine), jax.tree.leaves(both(attention.packed)(q, k, v))
  ):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
  not importlib.util.find_spec('libtpu'), reason="no libtpu: pip install 'jax[tpu]'"
)
def test_training_and_sampling_compile_for_v5e_16():
  command = [sys.executable, '-m', 'experiments.tpu_memory', '--topology=v5e:4x4']
  command += ['--model=tiny', '--tokens=128', '--slots=256', '--texts=4']
  # Elsewhere on this machine somebody may do the same.
  settings = {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}
  env = {**os.environ, **settings, 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
  assert done.returncode == 0, done.stderr[-4000:]
  lines = [json.loads(line) for line in done.stdout.splitlines()]
  assert [line['program'] for line in lines] == ['gradient', 'apply', 'feed', 'decode']
  assert all(line['fits'] and line['operations'] > 0 for line in lines)
  # The attention kernel: forward, forward again, and two of its gradient.
  assert lines[0]['kernels'] > 0
