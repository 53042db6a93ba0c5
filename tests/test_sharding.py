"""sharding.py: where arrays lie, and that it changes nothing but that."""

import os
import pathlib
import subprocess
import sys

import jax
from jax.sharding import PartitionSpec as P
import optax
import pytest
import tiny

from agent_r1_jax import sharding
from agent_r1_jax.models import decoder, lora
from agent_r1_jax.rl import learner, optimizers


def shapes(family):
  """Of a TrainState whose policy has a value head."""

  def make():
    params = decoder.init(tiny.config(family), jax.random.key(0), value_head=True)
    return learner.init(params, optax.adamw(1e-3))

  return jax.eval_shape(make)


@pytest.mark.parametrize('family', ['llama', 'qwen2', 'qwen3'])
def test_every_leaf_has_a_rule_and_moments_lie_with_their_parameter(family):
  state = shapes(family)
  found = sharding.shardings(state, sharding.mesh(devices=jax.devices()[:1]))
  adam = found.opt_state[0]
  for moments in (adam.mu, adam.nu):
    assert jax.tree.leaves(moments) == jax.tree.leaves(found.params)
  assert adam.count.spec == found.step.spec == P()
  attn = found.params['layers']['attn']
  assert attn['q']['kernel'].spec == P(None, 'fsdp', 'tensor')
  assert attn['o']['kernel'].spec == P(None, 'tensor', None, 'fsdp')


@pytest.mark.parametrize('kind', list(optimizers.KINDS))
def test_adapters_and_every_optimizer_have_rules(kind):
  def make():
    params = decoder.init(tiny.config('qwen3'), jax.random.key(0), value_head=True)
    optimizer = optimizers.make(kind, 1e-3, warmup=0, clip_norm=1.0, weight_decay=0.0)
    states = [learner.init(params, optimizer)]
    adapted = lora.add(params, 2, tuple(lora.TARGETS), 4.0, jax.random.key(0))
    return [*states, learner.init(adapted, optimizer)]

  plain, adapted = jax.eval_shape(make)
  mesh = sharding.mesh(devices=jax.devices()[:1])
  found = [sharding.shardings(state, mesh) for state in (plain, adapted)]
  for state, where in zip((plain, adapted), found):
    for leaf, at in zip(jax.tree.leaves(state), jax.tree.leaves(where)):
      at.shard_shape(leaf.shape)  # Refuses more axes than the leaf has.
  q, o = (found[1].params['layers']['attn'][name] for name in 'qo')
  assert q['lora_a'].spec == P(None, 'fsdp') and q['lora_scale'].spec == P()
  assert o['lora_a'].spec == P(None, 'tensor')
  if kind == 'adamw8':
    held = found[0].opt_state[1][0].mu
    assert held.codes['layers']['attn']['q']['kernel'].spec == P(None, 'fsdp', 'tensor')


def test_a_leaf_without_a_rule_is_refused():
  mesh = sharding.mesh(devices=jax.devices()[:1])
  with pytest.raises(ValueError, match='layers/new/kernel: no rule'):
    sharding.shardings({'layers': {'new': {'kernel': jax.numpy.ones((2, 2))}}}, mesh)


def test_axes_must_be_the_devices():
  with pytest.raises(ValueError, match='2 x 1 x 1, yet there are 1 devices'):
    sharding.mesh(data=2, devices=jax.devices()[:1])


_EIGHT = """
import re
import jax, numpy as np, optax
jax.config.update('jax_disable_most_optimizations', True)  # Most time is compilation.
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
import pytest, tiny
from agent_r1_jax import sharding, types
from agent_r1_jax.models import lora
from agent_r1_jax.rl import algorithms, learner

config = tiny.config('qwen2')
rng = np.random.default_rng(0)
B, T = 8, 16
normal = lambda: rng.normal(size=(B, T)).astype(np.float32)
# Some chips have many wanted tokens, others hardly one.
action = rng.random((B, T)) < np.linspace(0.1, 0.9, B)[:, None]
batch = types.Batch(
  tokens=rng.integers(0, config.vocab_size, (B, T)).astype(np.int32),
  positions=np.tile(np.arange(T, dtype=np.int32) % 8, (B, 1)),
  segment_ids=np.tile(1 + np.arange(T, dtype=np.int32) // 8, (B, 1)),
  action_mask=action,
  logprobs=normal() * action - 5,
  advantages=normal() * action,
  weights=(action / action.sum()).astype(np.float32),
)
params = jax.device_get(tiny.params(config))
# A large eps: else Adam's first step is the gradient's sign, and noise where that is 0.
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-2))
loss = learner.objective(algorithms.grpo(kl_coef=0.0))
options = dict(config=config, loss=loss)

def step(state, batch):
  grads, _ = learner._gradient(state.params, batch, temperature=0.7, **options)
  options_ = options | dict(optimizer=optimizer, temperature=0.7)
  state, metrics = learner.update(state, [batch, batch], **options_)
  return {'grads': grads, 'state': state, 'metrics': metrics}

def draw(path, x):
  return 0.1 * rng.normal(size=x.shape).astype(np.float32) if 'lora_b' in path else x

adapted = lora.add(params, 2, tuple(lora.TARGETS), 4.0, jax.random.key(0))
adapted = jax.tree_util.tree_map_with_path(
  lambda path, x: draw(jax.tree_util.keystr(path), x), jax.device_get(adapted)
)
cases = [(params, sizes) for sizes in ((8, 1, 1), (1, 8, 1), (2, 2, 2))]
for params, sizes in [*cases, (adapted, (2, 2, 2))]:
  start = lambda: learner.init(jax.tree.map(jax.numpy.array, params), optimizer)
  want = jax.device_get(step(start(), batch))
  mesh = sharding.mesh(**dict(zip(sharding.AXES, sizes)))
  where = sharding.shardings(start(), mesh)
  with jax.set_mesh(mesh):
    rows = jax.device_put(batch, sharding.rows(mesh))
    found = step(jax.device_put(start(), where), rows)
    text = learner._gradient.lower(
      found['state'].params, rows, temperature=0.7, **options
    ).compile().as_text()
  named = jax.tree_util.tree_leaves_with_path(want)
  for (path, mine), other in zip(named, jax.tree.leaves(found)):
    np.testing.assert_allclose(
      other, mine, rtol=2e-5, atol=2e-6, err_msg=f'{sizes} {path}'
    )
  trees = ((found['grads'], lora.split(where.params)[0]), (found['state'], where))
  for tree, at in trees:
    named = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), spec in zip(named, jax.tree.leaves(at)):
      shape = leaf.addressable_shards[0].data.shape
      assert shape == spec.shard_shape(leaf.shape), (sizes, path, shape, spec)
  # Parameters are gathered, activations [B·T, ...] or [B, T, ...] never; but for what
  # an embedding gives that is split over both of its dimensions.
  gathered = re.findall(r'= (f32\\S*) all-gather', text)
  assert gathered or sizes[1] == 1, sizes
  whole = (f'f32[{B * T},', f'f32[{B},{T},')
  assert sizes[2] > 1 or not [x for x in gathered if x.startswith(whole)], sizes
with pytest.raises(ValueError, match='embedding: a dimension of 300 .* tensor = 8'):
  sharding.shardings(start(), sharding.mesh(tensor=8))
print('equal')
"""


def test_eight_chips_compute_what_one_does():
  """In data, fsdp and mixed meshes; and parameters, moments, gradients are split."""
  here = pathlib.Path(__file__).parent
  path = f'{here}{os.pathsep}{here.parent}'
  env = {**os.environ, 'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu'}
  command = [sys.executable, '-c', _EIGHT]
  done = subprocess.run(command, capture_output=True, text=True, env=env)
  assert done.returncode == 0 and done.stdout == 'equal\n', done.stderr[-4000:]
