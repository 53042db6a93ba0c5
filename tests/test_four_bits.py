"""four_bits.py: experts that keep the 4 bits of their files, in learner and engine."""

import dataclasses
import functools
import json
from typing import Any

import clients
import jax
from jax.extend import core as extend_core
import jax.numpy as jnp
import numpy as np
import packed_model
import pytest
import runs
from safetensors import numpy as safetensors_numpy
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax.models import (
  costs,
  decoder,
  engine_params,
  experts,
  four_bits,
  kv_cache,
  lora,
)
from agent_r1_jax.models.files import weights
from agent_r1_jax.rl import algorithms
from agent_r1_jax.train import metrics, preflight
from agent_r1_jax.train.plan import footprint, setup

_TARGETS, _EXPERTS = ('q', 'k', 'v', 'o'), ('gate', 'up', 'down')


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  """A model of two layers in files of 4 bits."""
  path = tmp_path_factory.mktemp('packed')
  packed_model.make(path, layers=2)
  return path


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  """The same of one layer, which is compiled in half the time."""
  path = tmp_path_factory.mktemp('small')
  packed_model.make(path)
  return path


def _load(directory):
  """The shape; the parameters in 4 bits, and dequantised as they are read."""
  shape, packed = weights.load(directory, dtype='float32', packed=True)
  return shape, packed, weights.load(directory, dtype='float32')[1]


@pytest.fixture(scope='module')
def models(directory):
  return _load(directory)


@pytest.fixture(scope='module')
def small_models(small):
  return _load(small)


def _adapt(params):
  """Adds adapters that change what is computed."""
  return tiny.add_adapters(params, 3, _TARGETS, 6.0, b=0.3)


@functools.partial(jax.jit, static_argnums=1)
def _unpack(leaf, dtype):
  return four_bits.unpack(four_bits.Packed(leaf['kernel'], leaf[four_bits.SCALE]), dtype)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_numbers_of_4_bits_are_those_that_are_read(models, dtype):
  _, packed, plain = models
  for name in ('gate', 'up', 'down'):
    leaf = packed['layers']['moe'][name]
    assert {leaf['kernel'].dtype, leaf[four_bits.SCALE].dtype} == {jnp.dtype('uint8')}
    expected = plain['layers']['moe'][name]['kernel']
    assert leaf['kernel'].nbytes * 8 == expected.nbytes
    found = _unpack(leaf, dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected.astype(dtype))
    np.testing.assert_array_equal(jnp.signbit(found), jnp.signbit(expected))


def test_every_code_and_exponent_is_exact():
  """By the format's definition; numbers below the least normal one may become 0."""
  codes = np.tile(np.arange(16, dtype=np.uint8)[:, None], (1, 8))
  exponents = np.array([[0, 1, 4, 100, 127, 128, 200, 252]], np.uint8)
  packed = four_bits.Packed(jnp.asarray(codes), jnp.asarray(exponents))
  unpack = jax.jit(four_bits.unpack, static_argnums=1)
  found = np.asarray(unpack(packed, 'float32'), np.float64)
  sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
  numbers = np.concatenate([sizes, -sizes])[:, None]
  expected = numbers * 2.0 ** (np.float64(exponents) - 127)
  np.testing.assert_array_equal(found[:16, 2:], expected[:, 2:])
  np.testing.assert_allclose(found[:16], expected, rtol=0, atol=6 * 2.0**-127)
  assert not found[16:].any()  # The high halves of the bytes.


@functools.partial(jax.jit, static_argnums=1)
def _extend(params, shape):
  """Computes with the engine's copy of parameters."""
  copy = engine_params.unstack(params, shape)
  rows, cache = tiny.rows(jnp.arange(9)[None]), kv_cache.empty(shape, 1, 16)
  x, _ = decoder.extend(copy, shape, rows, cache)
  return decoder.logits(copy, shape, x)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_logits_have_the_bits_of_dequantised_experts(models, dtype):
  shape, packed, plain = models
  shape = dataclasses.replace(shape, dtype=dtype)

  @jax.jit
  def learner(params):
    x = decoder.hidden(params, shape, tiny.rows(jnp.arange(9)[None]))
    return decoder.logits(params, shape, x)

  found, expected = learner(packed), learner(plain)
  np.testing.assert_array_equal(found, expected)
  assert np.ptp(expected) > 1
  np.testing.assert_array_equal(_extend(packed, shape), _extend(plain, shape))


def _gradient(shape):
  """Returns the function from parameters to the gradients of their adapters."""

  def loss(learned, kept):
    params = lora.join(learned, kept)
    x = decoder.hidden(params, shape, tiny.rows(jnp.arange(9)[None]))
    return (x.astype(jnp.float32) ** 2 * jnp.arange(32.0)[None, None]).sum()

  return lambda params: jax.grad(loss)(*lora.split(params))


def test_adapters_have_the_gradient_that_dequantised_experts_give(small_models):
  shape, *params = small_models
  found, expected = (jax.jit(_gradient(shape))(_adapt(x)) for x in params)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-6 * np.abs(y).max())
    assert np.abs(y).max() > 0


@pytest.mark.parametrize('platform', ['cpu', 'gpu', 'tpu'])
def test_each_way_to_compute_experts_dequantises_them(models, platform, monkeypatch):
  """By blocks, in rounds, and by the ragged product; results and gradients."""
  monkeypatch.setattr(experts.sharding, 'platform', lambda: platform)
  biases = [jnp.asarray(models[2]['layers']['moe'][n]['bias'][0]) for n in _EXPERTS]
  noise = jax.random.normal(jax.random.key(0), (2, 15, 32))
  expert = jax.random.randint(jax.random.key(1), (2, 15, 2), 0, 8)
  weight, gradient = jnp.full(expert.shape, 0.5), noise[::-1]
  activate = lambda gate, up: jax.nn.silu(gate) * up

  def compute(x, kernels):
    kernels = experts.Kernels(*kernels, biases=tuple(biases))
    return experts.mix(x, weight, expert, kernels, activate)

  def differentiate(kernels) -> tuple[Any, ...]:
    y, pull = jax.vjp(lambda x: compute(x, kernels), noise)
    return y, *pull(gradient)

  leaves = [models[1]['layers']['moe'][name] for name in _EXPERTS]
  packed = [four_bits.Packed(x['kernel'][0], x[four_bits.SCALE][0]) for x in leaves]
  plain = [models[2]['layers']['moe'][name]['kernel'][0] for name in _EXPERTS]
  found, expected = (jax.jit(differentiate)(kernels) for kernels in (packed, plain))
  for x, y in zip(found, expected, strict=True):
    most = float(np.abs(np.asarray(y)).max())
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-6 * most)
    assert most > 0


def _walk(jaxpr):
  """Yields the equations of a program and of those inside it."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in extend_core.jaxprs_in_params(eqn.params):
      yield from _walk(inner)


def test_no_more_than_an_expert_is_dequantised_at_a_time(models):
  """On a CPU, where blocks of one expert are computed; nothing is kept of a layer."""
  shape = dataclasses.replace(models[0], dtype='bfloat16')
  jaxpr = jax.make_jaxpr(_gradient(shape))(_adapt(models[1]))
  made = [x.aval for eqn in _walk(jaxpr.jaxpr) for x in eqn.outvars]
  sizes = {x.size for x in made if x.dtype in (jnp.bfloat16, jnp.float32)}
  expert = 32 * 64
  assert expert in sizes
  assert not {n * expert for n in (shape.num_experts, 2 * shape.num_experts)} & sizes


def test_what_is_read_is_exported(directory, tmp_path):
  shape, packed = weights.load(directory, packed=True)
  weights.save(tmp_path / 'out', shape, _adapt(packed), dtype='bfloat16')
  files = (path / 'model.safetensors' for path in (directory, tmp_path / 'out'))
  before, after = (safetensors_numpy.load_file(file) for file in files)
  assert before.keys() == after.keys()
  names = [name for name in before if name.endswith(('_blocks', '_scales'))]
  assert len(names) == 2 * 2 * 2
  for name in names:
    np.testing.assert_array_equal(before[name], after[name])
  raw = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert raw['quantization_config']['quant_method'] == 'mxfp4'
  # Adapters are merged, and whoever reads it gets bfloat16.
  _, again = weights.load(tmp_path / 'out')
  q = lora.merge(_adapt(packed))['layers']['attn']['q']['kernel']
  np.testing.assert_array_equal(
    again['layers']['attn']['q']['kernel'], q.astype('bfloat16')
  )
  gate = again['layers']['moe']['gate']['kernel']
  np.testing.assert_array_equal(
    gate, _unpack(packed['layers']['moe']['gate'], 'bfloat16')
  )


def test_the_sampler_and_the_learner_compute_the_same(small_models):
  shape, packed, _ = small_models
  params = _adapt(packed)
  engine = tiny.engine(params, shape=shape, **clients.EXACT)
  segments = [*clients.run(engine, range(4)).values()]
  tiny.assert_on_policy(params, segments, shape=shape)


def test_a_policy_that_plays_keeps_4_bits_too(directory):
  config = config_lib.Model(str(directory), dtype='bfloat16', frozen='mxfp4')
  shape, params, _ = setup.load(config, config_lib.Chat())
  assert four_bits.is_in(params)
  assert params['embed']['embedding'].dtype == jnp.bfloat16
  copy = engine_params.unstack(params, shape)
  assert copy['layers'][1]['moe']['down']['kernel'].dtype == jnp.uint8
  assert copy['layers'][1]['attn']['q']['kernel'].dtype == jnp.bfloat16


def test_bytes_and_operations_are_counted(models):
  shape, packed, plain = models
  assert costs.count_parameters(packed, shape) == costs.count_parameters(plain, shape)
  config = tiny.run_config(lora_rank=3, lora_targets='q,v', frozen='mxfp4')
  machine = footprint.Machine('gpu', 1e9)
  count = lambda algorithm: (
    footprint.Footprint(config, footprint.ModelShapes(shape, algorithm), machine).parts
  )
  size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
  adapted = tiny.add_adapters(packed, 3, ('q', 'v'), 6.0)
  assert count(algorithms.grpo())['parameters, mxfp4'] == size(adapted)
  assert count(None)['parameters, mxfp4'] == size(packed)
  assert count(None)['copy'] == size(engine_params.unstack(packed, shape)['layers'])
  config.engine.weights = four_bits.UNPACKED
  assert count(None)['copy'] == size(engine_params.unstack(plain, shape)['layers'])


@pytest.mark.usefixtures('no_curves')
def test_a_run_trains_adapters_over_them(small, tmp_path):
  options = {'lora_rank': 2, 'lora_targets': 'q,k,v,o', 'frozen': 'mxfp4'}
  config = runs.config(small, steps=1, eval_every=0, **options)
  params = runs.run(config, tmp_path)
  lines = [line for line in metrics.read(tmp_path) if line['step']]
  assert all(abs(line['train/behaviour_kl']) < 1e-6 for line in lines)
  base = weights.load(small, dtype='float32', packed=True)[1]
  runs.assert_equal(params['layers']['moe'], base['layers']['moe'])
  assert (
    params['layers']['attn']['q']['kernel'] != base['layers']['attn']['q']['kernel']
  ).any()
  _, exported = weights.load(tmp_path / 'model', packed=True)
  runs.assert_equal(exported, params)


def test_files_without_4_bits_are_refused(models, tmp_path):
  shape, _, plain = models
  weights.save(tmp_path, shape, plain, tokenizer_from=tiny.tokenizer_dir())
  with pytest.raises(ValueError, match="frozen is 'mxfp4', yet no tensor .* has 4 bits"):
    weights.load(tmp_path, packed=True)


def test_exponents_of_no_finite_number_are_refused(tmp_path):
  tensors = packed_model.make(tmp_path)
  name = 'model.layers.0.mlp.experts.down_proj_scales'
  tensors[name][1, 2, 0] = 253
  packed_model.write(tmp_path, tensors)
  for packed in (True, False):
    with pytest.raises(ValueError, match='down.* not finite'):
      weights.load(tmp_path, packed=packed)


def test_they_are_refused_where_nothing_is_frozen_or_in_4_bits():
  check = functools.partial(preflight.check_config, algorithm=algorithms.grpo())
  with pytest.raises(ValueError, match="frozen is 'mxfp4', but without model.lora_rank"):
    check(tiny.run_config(frozen='mxfp4'))
  options = {'lora_rank': 2, 'frozen': 'mxfp4'}
  with pytest.raises(ValueError, match="engine.weights: with model.frozen='mxfp4'"):
    check(tiny.run_config(weights='int8', **options))
  models = footprint.ModelShapes(tiny.config('qwen3_moe'), algorithms.grpo())
  with pytest.raises(ValueError, match='files of gpt-oss have.* is a qwen3_moe'):
    footprint.Footprint(tiny.run_config(**options), models, footprint.Machine('gpu', 1e9))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_an_engine_can_unpack_its_copy(models, dtype):
  """Leaf for leaf it is the copy of a model that was read in 16 or 32 bits."""
  shape, *params = models
  shape = dataclasses.replace(shape, dtype=dtype)
  found = engine_params.unstack(_adapt(params[0]), shape, four_bits.UNPACKED)
  expected = engine_params.unstack(_adapt(params[1]), shape)
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  assert found['layers'][1]['moe']['up']['kernel'].dtype == dtype


def test_a_run_unpacks_experts_of_4_bits_alone():
  config = config_lib.Config(engine=config_lib.Engine(weights=four_bits.UNPACKED))
  with pytest.raises(ValueError, match=r'^engine.weights is .*model.frozen is .float32'):
    preflight.check_config(config, algorithms.grpo())
  config.model.frozen, config.model.lora_rank = four_bits.FORMAT, 4
  preflight.check_config(config, algorithms.grpo())
  assert not config.engine.rounds
