"""sharding.py: where arrays lie, and that it changes nothing but that."""

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
import optax
import pytest
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax.models import decoder, engine_params, families, lora, sharding
from agent_r1_jax.rl import learner, optimizers


def shapes(family):
  """Of a TrainState whose policy has a value head."""

  def make(params):
    params = decoder.add_value_head(params)
    return learner.init(params, optax.adamw(1e-3))

  return jax.eval_shape(make, tiny.init_shapes(tiny.config(family, 2)))


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
  unstack = lambda params: engine_params.unstack(params, tiny.config(family, 2))
  engine = jax.eval_shape(unstack, state.params)
  one = sharding.make_mesh(devices=jax.devices()[:1])
  found = sharding.make_shardings(engine, one)['layers']
  attn = next(layer['attn'] for layer in found if 'attn' in layer)
  assert attn['q']['kernel'].spec == P(('fsdp', 'context'), 'tensor')
  assert attn['o']['kernel'].spec == P('tensor', None, ('fsdp', 'context'))


@pytest.mark.parametrize('kind', list(optimizers.KINDS))
def test_adapters_and_every_optimizer_have_rules(kind):
  def make(params):
    params = decoder.add_value_head(params)
    optimizer = optimizers.make(config_lib.Optimizer(kind=kind), 1e-3)
    states = [learner.init(params, optimizer)]
    adapted = lora.add(params, 2, tuple(families.TARGETS), 4.0, jax.random.key(0))
    return [*states, learner.init(adapted, optimizer)]

  plain, adapted = jax.eval_shape(make, tiny.init_shapes(tiny.config('qwen3', 2)))
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
  params = tiny.init_shapes(tiny.config('qwen2', 2))
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


def test_a_vocabulary_that_the_axis_does_not_divide_is_refused():
  small = tiny.init_shapes(tiny.config())
  with pytest.raises(ValueError, match='embedding: a dimension of 300 .* tensor = 8'):
    sharding.make_shardings(small, AbstractMesh((1, 1, 8, 1), sharding.AXES))


@pytest.mark.parametrize(
  ('heads', 'tensor', 'spec'),
  [(8, 4, P(None, 'tensor')), (2, 4, P()), (2, 1, P(None, 'tensor'))],
)
def test_heads_of_the_cache_are_split_or_replicated(heads, tensor, spec):
  mesh = AbstractMesh((1, 1, tensor, 1), sharding.AXES)
  assert sharding.cache_sharding(heads, mesh).spec == spec
