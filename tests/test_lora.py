"""Adapters: nothing at first, then the dense gradient's share, merged at the end."""

import dataclasses
import functools
import itertools
import json
import re
from typing import Any
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain
import pytest
from safetensors import numpy as safetensors_numpy
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.models import decoder, engine_params, families, lora, quantization
from agent_r1_jax.models import layers as layers_lib
from agent_r1_jax.models.files import peft_files, weights
from agent_r1_jax.rl import algorithms, learner, minibatch, optimizers, scoring
from agent_r1_jax.rl import train_state as train_state_lib

_ALL = tuple(families.TARGETS)


def _adapted(params, *, targets=_ALL, rank=3):
  return tiny.add_adapters(params, rank, targets, 6.0, b=0.1)


@functools.cache
def _batches():
  scored = plain.credit(plain.trajectories(4), plain.GRPO, _models(plain.policy()))
  members = [0, 1, 2, 3]
  return minibatch.make_policy(scored.table, members, plain.GRPO, shape=plain.SHAPE)[0]


def _models(policy):
  return scoring.Models(policy, plain.CONFIG, policy, None, plain.CONFIG)


def _logprobs(params):
  batch = _batches()[0]
  kwargs = {'config': plain.CONFIG, 'temperature': plain.TEMPERATURE}
  return learner.logprobs(params, batch, **kwargs)


def _sampled(engine):
  """Samples four replies; returns them as segments."""

  async def play(number):
    prompt = np.arange(30 + number, 40 + number, dtype=np.int32)
    key = request_lib.make_key('test', number)
    reply = await engine.submit(request_lib.Request(prompt, max_tokens=12, key=key))
    tokens = np.concatenate([prompt, reply.tokens])
    said = np.arange(len(tokens)) >= len(prompt)
    logprobs = np.concatenate([np.zeros(len(prompt), np.float32), reply.logprobs])
    return types.Segment(tokens, said, logprobs)

  return tiny.within(engine.run, [play(number) for number in range(4)])


def test_new_adapters_change_no_log_prob():
  params = plain.policy()

  @jax.jit
  def add(params):
    # Another choice of targets, in another order: the same A where there is one.
    choices, key = (_ALL, ('down', 'q')), jax.random.key(7)
    return [lora.take(lora.add(params, 3, some, 6.0, key)) for some in choices]

  new, few = (lora.join(adapters, params) for adapters in add(params))
  plain.equal(_logprobs(new), _logprobs(params))
  plain.equal(lora.merge(new), params)
  assert lora.merge(new)['embed']['embedding'] is params['embed']['embedding']
  q, o = (new['layers']['attn'][name] for name in 'qo')
  assert q['lora_a'].shape == (1, 16, 3) and q['lora_b'].shape == (1, 3, 2, 8)
  assert o['lora_a'].shape == (1, 2, 8, 3) and o['lora_b'].shape == (1, 3, 16)
  np.testing.assert_array_equal(q['lora_scale'], [2.0])
  assert 0.7 < np.std(np.asarray(q['lora_a'])) * 16**0.5 < 1.3
  few = few['layers']
  for place, name in (('attn', 'q'), ('mlp', 'down')):
    both = (tree[place][name]['lora_a'] for tree in (few, new['layers']))
    np.testing.assert_array_equal(*both)
  assert not lora.is_in(few['attn']['k']) and lora.is_in(few['mlp'])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_merged_policy_is_the_adapted_one_to_the_last_bit(dtype):
  """Which is what the engine samples with, and what is exported."""
  params = tiny.params(tiny.config(layers=1))
  adapted = _adapted(params)
  shape = dataclasses.replace(tiny.config(layers=1), dtype=dtype)
  text = jnp.arange(20).reshape(1, 20) * 7 % tiny.VOCAB
  places = jnp.arange(20).reshape(1, 20)

  @jax.jit
  def hidden(params):
    return decoder.hidden(params, shape, tiny.rows(text, places))

  plain.equal(hidden(lora.merge(adapted)), hidden(adapted))
  assert not np.array_equal(hidden(adapted), hidden(params))


@pytest.mark.parametrize('frozen', ['model', 'int8'])
def test_adapters_of_a_bfloat16_policy_have_gradients_on_a_cpu(frozen):
  """XLA's CPU back end cannot run some products of bfloat16 with a float32 result."""
  shape = dataclasses.replace(tiny.config(layers=1), dtype='bfloat16')
  params = tiny.params(shape)
  if frozen != 'model':
    params = quantization.freeze(params, shape, frozen)
  adapted = _adapted(params, rank=4)
  text = jnp.arange(256)[None] * 7 % tiny.VOCAB

  @jax.jit
  @jax.grad
  def differentiate(learned):
    params = lora.join(learned, lora.split(adapted)[1])
    hidden = decoder.hidden(params, shape, tiny.rows(text))
    return hidden.astype(jnp.float32).sum()

  found = jax.tree.leaves(jax.device_get(differentiate(lora.split(adapted)[0])))
  assert all(np.isfinite(x).all() and np.any(x) for x in found)


def test_gradients_are_the_dense_gradient_contracted():
  """dA = s dW Bᵀ and dB = s Aᵀ dW, where dW is of the merged kernel."""
  adapted = _adapted(plain.policy())
  grads = plain.gradient(adapted, _batches(), plain.GRPO_OBJECTIVE)[0]
  merged = lora.merge(adapted)
  dense, _ = plain.chained_gradient(merged, _batches(), plain.GRPO_OBJECTIVE)
  assert jax.tree.structure(grads) == jax.tree.structure(lora.split(adapted)[0])
  for name, target in families.TARGETS.items():
    place, inputs = target.path.split('/')[1], len(target.inputs)
    node, dw = adapted['layers'][place][name], dense['layers'][place][name]['kernel']
    found = grads['layers'][place][name]
    I, R = int(np.prod(dw.shape[1 : inputs + 1])), 3
    dw = dw.reshape(I, -1)
    a, b = (np.asarray(node[leaf]) for leaf in ('lora_a', 'lora_b'))
    da, db = 2.0 * dw @ b.reshape(R, -1).T, 2.0 * a.reshape(I, R).T @ dw
    plain.close(found['lora_a'], da.reshape(a.shape))
    plain.close(found['lora_b'], db.reshape(b.shape))


def test_full_remat_keeps_less_than_dots_which_keeps_less_than_none():
  """Rows of eight.py compare their gradients."""
  configs = (dataclasses.replace(plain.CONFIG, remat=x) for x in ('none', 'dots', 'full'))
  both = _adapted(plain.policy()), plain.policy()
  kept = [[_residuals(params, config) for params in both] for config in configs]
  assert (np.diff(kept, axis=0) < 0).all()


def _residuals(params, config):
  """Numbers that the decoder's forward pass keeps for its backward pass."""
  learned, frozen = lora.split(params)
  text = jnp.zeros((1, 16), jnp.int32)

  def hidden(learned):
    return decoder.hidden(
      lora.join(learned, frozen), config, tiny.rows(text, text, text + 1)
    )

  _, backward = jax.eval_shape(lambda p: jax.vjp(hidden, p), learned)
  return sum(x.size for x in jax.tree.leaves(backward))


def test_a_gradient_copies_no_frozen_kernels():
  """With layers in a loop, which stacks what it saves for the backward pass."""
  layers = layers_lib.UNROLLED_LAYERS + 1
  sizes = {'num_layers': layers, 'embed_dim': 256, 'mlp_dim': 1024}
  shape = dataclasses.replace(plain.CONFIG, **sizes)
  params = jax.eval_shape(lambda: _adapted(decoder.init(shape, jax.random.key(0))))
  options = {'loss': plain.GRPO_OBJECTIVE, 'temperature': plain.TEMPERATURE}
  batch = jax.tree.map(lambda x: x[:1, :8], _batches()[0])
  program: Any = learner._gradient.lower(params, batch, config=shape, **options).compile()
  kernels = sum(x['kernel'].size for x in params['layers']['mlp'].values())
  assert program.memory_analysis().temp_size_in_bytes < 4 * kernels / 2


def test_only_adapters_learn_and_only_they_have_moments():
  params = _adapted(plain.copy_tree(plain.policy()))
  before = jax.device_get(params)
  adam = optax.adam(1e-2)
  state = learner.init(params, adam)
  assert jax.tree.structure(state.opt_state[0].mu) == jax.tree.structure(
    lora.split(params)[0]
  )
  options = {'loss': plain.GRPO_OBJECTIVE, 'temperature': plain.TEMPERATURE}
  gradients = learner.forward_backward(
    state.params, _batches(), config=plain.CONFIG, **options
  )
  state, _ = learner.optim_step(state, gradients, optimizer=adam)
  named = jax.tree_util.tree_leaves_with_path(before)
  for (path, old), new in zip(named, jax.tree.leaves(state.params)):
    learned = path[-1].key in ('lora_a', 'lora_b')
    assert np.array_equal(old, new) != learned, path
  # Frozen arrays are the same ones: a reference or a critic may share them.
  scale = state.params['final_norm']['scale']
  assert scale is params['final_norm']['scale'] and not scale.is_deleted()


def test_critic_reference_and_sampler_share_frozen_arrays():
  make = lambda kind: optimizers.make(config_lib.Optimizer(kind=kind), 1e-3)
  update_config = train_state_lib.UpdateConfig(
    plain.CONFIG,
    algorithms.ppo(kl_coef=0.1),
    plain.SHAPE,
    {'policy': make('adamw'), 'critic': make('adamw8')},
    config_lib.Schedule(sync_every=2, reference_every=1),
    offload=True,
  )
  train_state = train_state_lib.init(_adapted(plain.policy()), update_config)
  policy, critic = (train_state.states[name].params for name in ('policy', 'critic'))
  for other in (critic, train_state.reference, train_state.sampler):
    mine, its = (tree['layers']['mlp']['up'] for tree in (policy, other))
    assert its['kernel'] is mine['kernel'] and its['lora_a'] is not mine['lora_a']
    plain.equal(its, mine)
  assert 'value_head' in lora.split(critic)[0]
  memory = {
    x.sharding.memory_kind for x in jax.tree.leaves(train_state.states['critic'][1])
  }
  assert memory == {'pinned_host'}
  # Nor is it in a checkpoint, and what is comes back beside it.
  arrays = train_state.checkpoint_arrays(update_config)
  trees = [arrays['policy'].params, arrays['reference'], arrays['sampler']]
  for tree in trees:
    assert tree.keys() == {'layers'}
    assert tree['layers']['attn']['q'].keys() == {'lora_a', 'lora_b'}
  again = train_state.restore(plain.copy_tree(arrays), train_state.checkpoint_numbers())
  plain.equal(again.states, train_state.states)
  plain.equal(
    (again.reference, again.sampler), (train_state.reference, train_state.sampler)
  )


def test_the_sampler_and_the_learner_agree():
  params = _adapted(tiny.params(tiny.config()))
  tiny.assert_on_policy(params, _sampled(tiny.engine(lora.merge(params))))


@pytest.mark.parametrize('dtype', [None, 'bfloat16'])
def test_an_export_with_adapters_is_that_of_the_merged_policy(tmp_path, dtype):
  shape = tiny.config('qwen2', 2)
  adapted = _adapted(tiny.params(shape), targets=('q', 'o', 'down'))
  weights.save(tmp_path / 'here', shape, adapted, dtype=dtype)
  weights.save(tmp_path / 'there', shape, lora.merge(adapted), dtype=dtype)
  here, there = (
    (tmp_path / name / 'model.safetensors').read_bytes() for name in ('here', 'there')
  )
  assert here == there


def test_the_engines_copy_never_merges_two_kernels_at_a_time(monkeypatch):
  shape = tiny.config('qwen2', 2)
  adapted, merged, alive = _adapted(tiny.params(shape)), [], []
  merge = lora.merge

  def watched(node):
    alive.append(sum(reference() is not None for reference in merged))
    merged.append(weakref.ref((node := merge(node))['kernel']))
    return node

  monkeypatch.setattr(lora, 'merge', watched)
  engine_params.unstack(adapted, shape)
  assert alive == [0] * len(_ALL)


def test_peft_files_hold_the_merged_difference(tmp_path):
  """Names, shapes and numbers as PEFT reads them; W + s · B · A is the merged weight."""
  shape, params = tiny.config('qwen2', 2), tiny.params(tiny.config('qwen2', 2))
  adapted = _adapted(params, targets=('q', 'o', 'down'))
  peft_files.save(tmp_path, adapted, 'base', shape)
  weights.save(tmp_path / 'base', shape, params)
  weights.save(tmp_path / 'merged', shape, lora.merge(adapted))
  settings = json.loads((tmp_path / 'adapter_config.json').read_text())
  assert settings['target_modules'] == ['q_proj', 'o_proj', 'down_proj']
  assert (settings['r'], settings['lora_alpha']) == (3, 6.0)
  found = safetensors_numpy.load_file(tmp_path / 'adapter_model.safetensors')
  # Shapes of [rank, inputs] and [outputs, rank], as PEFT 0.21.2 makes them.
  shapes = {'self_attn.q': (16, 32), 'self_attn.o': (32, 16), 'mlp.down': (24, 16)}
  base, merged = (
    safetensors_numpy.load_file(tmp_path / name / 'model.safetensors')
    for name in ('base', 'merged')
  )
  for layer, (name, (inputs, outputs)) in itertools.product(range(2), shapes.items()):
    module = f'model.layers.{layer}.{name}_proj'
    a, b = (found.pop(f'base_model.model.{module}.lora_{x}.weight') for x in 'AB')
    assert a.shape == (3, inputs) and b.shape == (outputs, 3)
    sum_of_both = base[f'{module}.weight'] + 2.0 * b @ a
    np.testing.assert_allclose(sum_of_both, merged[f'{module}.weight'], atol=1e-6)
  assert not found
  with pytest.raises(ValueError, match='params have no adapters'):
    peft_files.save(tmp_path, params, 'base', shape)


@pytest.mark.parametrize(
  ('family', 'alone'),
  [('qwen2_5_vl', False), ('qwen2_5_vl', True), ('qwen3_vl', True), ('gemma4', True)],
)
def test_the_adapter_of_a_model_that_sees_has_the_names_of_its_modules(
  tmp_path, family, alone
):
  """Those of transformers 5, which PEFT asks for; earlier ones are read, too."""
  shape = tiny.config(family, 2)
  adapted = _adapted(tiny.params(shape), targets=('q', 'down'))
  peft_files.save(tmp_path, lora.take(adapted) if alone else adapted, 'base', shape)
  found = safetensors_numpy.load_file(tmp_path / 'adapter_model.safetensors')
  root = 'base_model.model.model.language_model.layers'
  assert {*found} == {
    f'{root}.{layer}.{module}.lora_{x}.weight'
    for layer in range(2)
    for module in ('self_attn.q_proj', 'mlp.down_proj')
    for x in 'AB'
  }
  # A text is a regular expression, of which all of a module's name must be.
  targets = json.loads((tmp_path / 'adapter_config.json').read_text())['target_modules']
  assert re.fullmatch(targets, 'model.language_model.layers.1.mlp.down_proj')
  for other in ('visual.blocks.1.mlp.down_proj', 'language_model.layers.1.mlp.up_proj'):
    assert not re.fullmatch(targets, f'model.{other}')
  plain.equal(peft_files.load(tmp_path, shape), lora.take(adapted))
  earlier = {name.replace('language_model.', ''): x for name, x in found.items()}
  safetensors_numpy.save_file(earlier, tmp_path / 'adapter_model.safetensors')
  plain.equal(peft_files.load(tmp_path, shape), lora.take(adapted))


@pytest.mark.parametrize('name', families.FAMILIES)
def test_names_are_read_as_they_are_written(name):
  facts = families.FAMILIES[name]
  for parameter in facts.parameters:
    assert facts.read_name(facts.write_name(parameter.tensor)) == parameter.tensor


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'rank': 0}, 'lora_rank is 0'),
    ({'targets': ()}, 'lora_targets is'),
    ({'targets': ('q', 'head')}, 'lora_targets is'),
    ({'alpha': 0.0}, 'lora_alpha is 0.0'),
  ],
)
def test_option_of_adapters_out_of_range_is_refused(change, message):
  given = {'rank': 2, 'targets': ('q',), 'alpha': 1.0, 'key': jax.random.key(0)} | change
  with pytest.raises(ValueError, match=message):
    lora.add(plain.policy(), **given)
  with pytest.raises(ValueError, match='adapters already'):
    lora.add(_adapted(plain.policy()), 2, ('q',), 1.0, jax.random.key(0))


def test_experts_have_no_adapters():
  params = tiny.params(tiny.config('qwen3_moe', 2))
  with pytest.raises(
    ValueError, match='lora_targets has gate, and the layers .* experts'
  ):
    lora.add(params, 2, tuple(families.TARGETS), 4.0, jax.random.key(0))
  adapted = lora.add(params, 2, ('q', 'v'), 4.0, jax.random.key(0))
  learned, _ = lora.split(adapted)
  assert set(learned['layers']) == {'attn'}
  assert set(learned['layers']['attn']) == {'q', 'v'}
