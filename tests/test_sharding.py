"""sharding.py: where arrays lie, and that it changes nothing but that."""

import os

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
import optax
import pytest
import script
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax.models import decoder, engine_params, families, lora, sharding
from agent_r1_jax.rl import learner, optimizers


def shapes(family):
  """Of a TrainState whose policy has a value head."""

  def make():
    params = decoder.init(tiny.config(family), jax.random.key(0))
    params = decoder.add_value_head(params)
    return learner.init(params, optax.adamw(1e-3))

  return jax.eval_shape(make)


@pytest.mark.parametrize('family', families.FAMILIES)
def test_every_leaf_has_a_rule_and_moments_lie_with_their_parameter(family):
  state = shapes(family)
  found = sharding.make_shardings(state, sharding.make_mesh(devices=jax.devices()[:1]))
  adam = found.opt_state[0]
  for moments in (adam.mu, adam.nu):
    assert jax.tree.leaves(moments) == jax.tree.leaves(found.params)
  assert adam.count.spec == found.step.spec == P()
  attn = found.params['layers']['attn']
  assert attn['q']['kernel'].spec == P(None, ('fsdp', 'context'), 'tensor')
  assert attn['o']['kernel'].spec == P(None, 'tensor', None, ('fsdp', 'context'))
  unstack = lambda params: engine_params.unstack(params, tiny.config(family))
  engine = jax.eval_shape(unstack, state.params)
  one = sharding.make_mesh(devices=jax.devices()[:1])
  attn = sharding.make_shardings(engine, one)['layers'][1]['attn']
  assert attn['q']['kernel'].spec == P(('fsdp', 'context'), 'tensor')
  assert attn['o']['kernel'].spec == P('tensor', None, ('fsdp', 'context'))


@pytest.mark.parametrize('kind', list(optimizers.KINDS))
def test_adapters_and_every_optimizer_have_rules(kind):
  def make():
    params = decoder.add_value_head(decoder.init(tiny.config('qwen3'), jax.random.key(0)))
    optimizer = optimizers.make(config_lib.Optimizer(kind=kind), 1e-3)
    states = [learner.init(params, optimizer)]
    adapted = lora.add(params, 2, tuple(families.TARGETS), 4.0, jax.random.key(0))
    return [*states, learner.init(adapted, optimizer)]

  plain, adapted = jax.eval_shape(make)
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  found = [sharding.make_shardings(state, mesh) for state in (plain, adapted)]
  for state, where in zip((plain, adapted), found):
    for leaf, at in zip(jax.tree.leaves(state), jax.tree.leaves(where)):
      at.shard_shape(leaf.shape)  # Refuses more axes than the leaf has.
  q, o = (found[1].params['layers']['attn'][name] for name in 'qo')
  assert q['lora_a'].spec == P(None, ('fsdp', 'context')) and q['lora_scale'].spec == P()
  assert o['lora_a'].spec == P(None, 'tensor')
  if kind == 'adamw8':
    held = found[0].opt_state[1][0].mu
    assert held.codes['layers']['attn']['q']['kernel'].spec == P(
      None, ('fsdp', 'context'), 'tensor'
    )


def test_a_leaf_without_a_rule_is_refused():
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  with pytest.raises(ValueError, match='layers/new/kernel: no parameter'):
    sharding.make_shardings({'layers': {'new': {'kernel': jax.numpy.ones((2, 2))}}}, mesh)


def test_a_mesh_of_more_devices_than_there_are_is_refused():
  with pytest.raises(ValueError, match='2 x 1 x 1 x 1, yet there are 1 devices'):
    sharding.make_mesh(data=2, devices=jax.devices()[:1])


def test_few_key_value_heads_lie_on_every_chip():
  """2 heads cannot be split over tensor = 4, though 4 query heads can."""
  params = jax.eval_shape(lambda: decoder.init(tiny.config('qwen2'), jax.random.key(0)))
  where = lambda tensor: sharding.make_shardings(
    params, AbstractMesh((1, 1, tensor, 1), sharding.AXES)
  )['layers']['attn']
  assert where(2)['k']['kernel'].spec == P(None, ('fsdp', 'context'), 'tensor')
  assert where(4)['k']['kernel'].spec == P(None, ('fsdp', 'context'))
  assert where(4)['v']['bias'].spec == P()
  assert where(4)['q']['bias'].spec == P(None, 'tensor')
  with pytest.raises(ValueError, match='attn/k/bias: a dimension of 2 .* tensor = 3'):
    where(3)


def test_axes_that_split_a_dimension_together_are_named_together():
  params = {'embed': {'embedding': jax.ShapeDtypeStruct((300, 16), 'float32')}}
  mesh = AbstractMesh((1, 4, 1, 8), sharding.AXES)
  with pytest.raises(ValueError, match='16 in .* over fsdp x context = 32'):
    sharding.make_shardings(params, mesh)


_MIXED = """
import dataclasses
import jax, numpy as np
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
import tiny
from agent_r1_jax import types
from agent_r1_jax.models import decoder, kv_cache, engine_params, sharding
from agent_r1_jax.rl import algorithms, learner, packing
from agent_r1_jax.rl import table as table_lib

rng = np.random.default_rng(0)
B, T = 8, 32
texts = [rng.integers(0, 3, n).astype(np.int32) for n in rng.integers(2, 24, 48)]
tokens = table_lib.from_segments(
  [types.Segment(t, t > 0, np.zeros(len(t), np.float32)) for t in texts]
)
normal = lambda n: rng.normal(size=n).astype(np.float32)
columns = ('old_logprobs', 'advantages', 'values', 'returns')
columns = {x: normal(len(tokens)) * tokens.action_mask for x in columns}
columns['weights'] = tokens.action_mask / len(tokens)
tokens = dataclasses.replace(tokens, **columns)
rows, trees = (
  packing.pack_microbatches(tokens, packing.MicrobatchShape(2 * B, T, of_trees))[0][0]
  for of_trees in (False, True)
)
assert isinstance(trees.rows.sees, types.Tree)
assert isinstance(rows.rows.sees, types.Segments)
loss = learner.objective(algorithms.grpo())

def check(family, batch, sizes, **fields):
  config = dataclasses.replace(tiny.config(family, layers=2), num_heads=8, **fields)
  params = jax.device_get(tiny.params(config))
  options = dict(config=config, loss=loss, temperature=0.7)
  if config.num_experts:  # Replayed, where the first is known.
    shape = *batch.rows.tokens.shape, config.num_layers, 2
    routes = rng.integers(-1, config.num_experts, shape).astype(np.int8)
    routes = np.where(routes[..., :1] < 0, np.int8(-1), routes)
    batch = batch._replace(rows=batch.rows._replace(routes=routes))
  want, sums = jax.device_get(learner._gradient(params, batch, **options))
  mesh = sharding.make_mesh(**sizes)
  where = sharding.make_shardings(params, mesh)
  with jax.set_mesh(mesh):
    here = jax.device_put(batch, sharding.batch_sharding(mesh))
    found, found_sums = learner._gradient(jax.device_put(params, where), here, **options)
  np.testing.assert_allclose(found_sums['loss'], sums['loss'], rtol=1e-6)
  for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(want),
                          jax.tree.leaves(found), strict=True):
    atol = 1e-5 * np.abs(x).max()
    np.testing.assert_allclose(y, x, rtol=0, atol=atol, err_msg=f'{family} {path}')
  for x, at in zip(jax.tree.leaves(found), jax.tree.leaves(where), strict=True):
    assert x.addressable_shards[0].data.shape == at.shard_shape(x.shape)
  # The engine's replica: experts and heads on two chips.
  layers = engine_params.unstack(jax.device_put(params), config)
  text = np.arange(12, dtype=np.int32).reshape(2, 6), np.tile(np.arange(6), (2, 1))
  extend = jax.jit(lambda p, c: decoder.extend(p, config, types.Rows(*text), c)[0])
  # A number between two integers may be rounded to the other one on two chips.
  numbers, atol = ('int8', 5e-3) if family == 'gemma2' else ('model', 1e-4)
  want = extend(layers, kv_cache.empty(config, 2, 16, numbers))
  pair = sharding.make_mesh(tensor=2, devices=jax.devices()[:2])
  with jax.set_mesh(pair):
    cache = sharding.shard_cache(kv_cache.empty(config, 2, 16, numbers), pair)
    layers = jax.device_put(layers, sharding.make_shardings(layers, pair))
    np.testing.assert_allclose(extend(layers, cache), want, rtol=0, atol=atol)

half, deep, long = (
  dict(data=2, fsdp=2, tensor=2), dict(fsdp=2, tensor=4), dict(fsdp=4, context=2)
)
slides = dict(sliding=(True, False), window=5, vocab_size=304)
check('qwen3_moe', rows, long, vocab_size=304)
check('qwen2_moe', trees, deep, vocab_size=304)
check('gemma2', rows, long, attention_cap=2.0, logit_cap=3.0, **slides)
check('olmo3', trees, half, local_rope_theta=50.0, nope=(True, False), **slides)

import clients, test_prompt_scores as scores
pairs = sharding.make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
engine = tiny.engine(sharding.shard_params(clients.params(), pairs), mesh=pairs)
prompts = [scores.SHARED[:n] for n in (9, 33)]
asked = [scores.ask(engine, prompt, top_logprobs=1) for prompt in prompts]
scores.assert_learners(tiny.within(engine.run, asked))
"""


def test_layers_of_several_kinds_and_experts_on_eight_chips():
  """And an engine that scores prompts on two pairs of chips."""
  paths = os.pathsep.join(map(str, (script.ROOT / 'tests', script.ROOT)))
  done = script.run('-c', _MIXED, PYTHONPATH=paths)
  assert done.returncode == 0, done.stderr


_EIGHT = """
import dataclasses, math, re
import jax, numpy as np, optax
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
import pytest, tiny
from jax.experimental.pallas import tpu as pltpu
from agent_r1_jax import types
from agent_r1_jax.guided import reward_training as reward_model
from agent_r1_jax import sft
from agent_r1_jax.models import attention, families, lora, sharding
from agent_r1_jax.models.kernels import attention_kernels
from agent_r1_jax.rl import algorithms, learner, packing
from agent_r1_jax.rl import table as table_lib

# Heads, feed-forward and vocabulary can be split in 8, the 2 key-value heads cannot.
config = tiny.config('qwen2', layers=1)
config = dataclasses.replace(config, num_heads=8, vocab_size=304)
rng = np.random.default_rng(0)
B, T = 8, 32  # No dimension of a parameter is 32.
normal = lambda *shape: rng.normal(size=shape or (B, T)).astype(np.float32)
# Some chips have many wanted tokens, others hardly one; a segment is on several chips.
action = rng.random((B, T)) < np.linspace(0.1, 0.9, B)[:, None]
text = rng.integers(0, config.vocab_size, (B, T)).astype(np.int32)
positions = np.tile(np.arange(T, dtype=np.int32) % 21, (B, 1))
ids = np.tile(1 + np.arange(T, dtype=np.int32) // 21, (B, 1))
batch = types.Batch(
  rows=types.Rows(text, positions, types.Segments(ids)),
  segment_ids=ids,
  action_mask=action,
  old_logprobs=normal() * action - 5,
  advantages=normal() * action,
  weights=(action / action.sum()).astype(np.float32),
  values=normal(),
  returns=normal(),
)
# Prefix trees: texts of few tokens, so that most begin as another.
texts = [rng.integers(0, 3, n).astype(np.int32) for n in rng.integers(2, 24, 48)]
tokens = table_lib.from_segments(
  [types.Segment(t, t > 0, np.zeros(len(t), np.float32)) for t in texts]
)
columns = ('old_logprobs', 'advantages', 'values', 'returns')
columns = {x: normal(len(tokens)) * tokens.action_mask for x in columns}
columns['weights'] = tokens.action_mask / len(tokens)
tokens = dataclasses.replace(tokens, **columns)
made, layout = packing.pack_microbatches(tokens, packing.MicrobatchShape(B, T))
trees = made[0]
assert isinstance(trees.rows.sees, types.Tree) and layout.computed < len(tokens)
params = jax.device_get(tiny.params(config))
params['value_head'] = {'kernel': normal(config.embed_dim, 1), 'bias': normal(1)}
# A large eps: else Adam's first step is the gradient's sign, and noise where that is 0.
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-2))
loss = learner.objective(algorithms.ppo(), shared_critic=True)
options = dict(config=config, loss=loss, temperature=0.7)

def gradient(params, batch):
  program = learner._gradient.lower(params, batch, **options).compile()
  return program(params, batch), program.as_text()

def update(state, batch):
  gradients = learner.forward_backward(state.params, [batch, batch], **options)
  return learner.optim_step(state, gradients, optimizer=optimizer)

def same(found, want, why):
  # To 1e-5 of the largest number of a leaf.
  for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(want),
                          jax.tree.leaves(found), strict=True):
    atol = 1e-5 * np.abs(x).max()
    np.testing.assert_allclose(y, x, rtol=0, atol=atol, err_msg=f'{why} {path}')

def lies(tree, where, why):
  named = jax.tree_util.tree_leaves_with_path(tree)
  for (path, leaf), spec in zip(named, jax.tree.leaves(where), strict=True):
    shape = leaf.addressable_shards[0].data.shape
    assert shape == spec.shard_shape(leaf.shape), (why, path, shape, spec)

adapted = lora.add(params, 2, tuple(families.TARGETS), 4.0, jax.random.key(0))
adapted = jax.tree_util.tree_map_with_path(
  lambda path, x: 0.1 * normal(*x.shape) if 'lora_b' in str(path) else x,
  jax.device_get(adapted),
)
start = lambda: learner.init(jax.tree.map(jax.numpy.array, params), optimizer)
stepped = jax.device_get(update(start(), batch))
want_of_trees = jax.device_get(gradient(params, trees)[0])
want = None
for params, sizes in (
  *((params, s) for s in ((2, 2, 2, 1), (1, 1, 8, 1), (1, 1, 1, 8), (2, 1, 2, 2))),
  (adapted, (1, 2, 2, 2)),
):
  if want is None or params is adapted:
    (want, want_sums), _ = jax.device_get(gradient(params, batch))
  mesh = sharding.make_mesh(**dict(zip(sharding.AXES, sizes)))
  where = sharding.make_shardings(start(), mesh)
  with jax.set_mesh(mesh):
    rows = jax.device_put(batch, sharding.batch_sharding(mesh))
    (grads, sums), text = gradient(jax.device_put(params, where.params), rows)
    if sizes == (2, 2, 2, 1):
      after = update(jax.device_put(start(), where), rows)
      same(after, stepped, sizes)
      lies(after[0], where, sizes)
  np.testing.assert_allclose(sums['loss'], want_sums['loss'], rtol=1e-6)
  same(grads, want, sizes)
  lies(grads, lora.split(where.params)[0], sizes)
  # Parameters are gathered, activations [B·T, ...] or [B, T, ...] never.
  data, fsdp, tensor, context = sizes
  gathered = re.findall(r'= (f32\\S*) all-gather', text)
  assert gathered or fsdp * context == 1, sizes
  whole = (f'f32[{B * T},', f'f32[{B},{T},', f'f32[{B // data // fsdp},{T},')
  assert not [x for x in gathered if x.startswith(whole)], sizes
  if sizes == (2, 2, 2, 1):
    with jax.set_mesh(mesh):
      rows = jax.device_put(trees, sharding.batch_sharding(mesh))
      found, text = gradient(jax.device_put(params, where.params), rows)
    same(found, want_of_trees, sizes)
    gathered = re.findall(r'= (\\S*) all-gather', text)
    assert not [x for x in gathered if re.match(rf'\\w+.{B},({T}|{2 * T})\\b', x)], sizes
# Supervised fine-tuning is on the same learner.
update_config = sft.Config(steps=3, rows=B, row_tokens=T, learning_rate=1e-2, warmup=1)
texts = [
  types.Segment(tokens[:n], np.arange(n) > 2, np.zeros(n, np.float32))
  for tokens in batch.rows.tokens
  for n in (9, 14, 20)
]
losses, scores = [], []
outcomes = np.arange(len(texts)) % 3
for mesh in (None, sharding.make_mesh(data=2, fsdp=2, context=2)):
  copy = lambda: jax.tree.map(jax.numpy.array, params)
  place = lambda: sharding.shard_params(copy(), mesh)
  with sharding.use_mesh(mesh):
    on_step = lambda step, numbers, params: losses.append(numbers['loss'])
    sft.run(config, place(), texts * 4, update_config, on_step=on_step)
    # And so are reward models.
    reward_model.fit(
      place(),
      [text.tokens for text in texts], 1.0 * outcomes, outcomes * 0,
      config=config, loss=reward_model.bradley_terry, optimizer=optax.sgd(1e-2),
      shape=packing.MicrobatchShape(B, T), steps=2, groups_per_step=1,
      on_step=lambda step, numbers: scores.append(numbers['loss']),
    )
assert len(losses) == 6
np.testing.assert_allclose(losses[3:], losses[:3], rtol=1e-5)
assert len(scores) == 4 and scores[0] != scores[1]
np.testing.assert_allclose(scores[2:], scores[:2], rtol=1e-5)
# Decodes and prefills on TPUs: key-value heads on a chip each, and both on all four.
slots, first = normal(2, B, 2, 256, 128), np.arange(0, 128, 16, dtype=np.int32)
for T, sizes in (1, {'tensor': 4}), (1, {'data': 2, 'tensor': 2}), (128, {'tensor': 4}):
  q, at = normal(B, T, 8, 128), first[:, None] + np.arange(T)[None]
  plain = attention.cached(q, *slots, at)
  mesh = sharding.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
  with jax.set_mesh(mesh), pltpu.force_tpu_interpret_mode():
    paged = jax.jit(attention_kernels.over_used_slots)(q, *slots, at)
  # The kernel multiplies as a TPU does, in bfloat16.
  np.testing.assert_allclose(paged, plain, atol=0.03, err_msg=str(sizes))
with pytest.raises(ValueError, match='embedding: a dimension of 300 .* tensor = 8'):
  small = jax.eval_shape(lambda: tiny.params(tiny.config()))
  sharding.make_shardings(small, sharding.make_mesh(tensor=8))
print('equal')
"""


@pytest.mark.parametrize(
  ('heads', 'tensor', 'spec'),
  [(8, 4, P(None, 'tensor')), (2, 4, P()), (2, 1, P(None, 'tensor'))],
)
def test_heads_of_the_cache_are_split_or_replicated(heads, tensor, spec):
  mesh = AbstractMesh((1, 1, tensor, 1), sharding.AXES)
  assert sharding.cache_sharding(heads, mesh).spec == spec


def test_eight_chips_compute_what_one_does():
  """In pure and mixed meshes; and parameters, moments, gradients are split."""
  paths = os.pathsep.join(map(str, (script.ROOT / 'tests', script.ROOT)))
  done = script.run('-c', _EIGHT, PYTHONPATH=paths)
  assert done.returncode == 0 and done.stdout == 'equal\n', done.stderr[-4000:]
