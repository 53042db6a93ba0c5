"""quantization.py: kernels of 8 bits, and engines and runs that sample with them."""

import os
from typing import Any

import clients
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import script
import test_train
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax.models import (
  layers,
  lora,
  quantization,
  sampling_params,
  weights,
)
from agent_r1_jax.rl import algorithms, correction
from agent_r1_jax.train import footprint, metrics, preflight

_FORMATS = [*quantization.FORMATS]
model = test_train.model


def _round_kernels(params, format_name):
  """The learner's parameters, with the numbers that an engine of 8 bits samples with."""

  def rounded(path, x):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if name not in quantization.KERNELS:
      return x
    inputs = len(quantization.KERNELS[name].inputs)
    parts = [quantization.quantize(layer, inputs, format_name) for layer in x]
    return jnp.stack([quantization.dequantize(*part) for part in parts])

  return jax.tree_util.tree_map_with_path(rounded, params)


@pytest.fixture(scope='module')
def kernel():
  """Channels of many sizes, one of them 0; of two axes of inputs and two of outputs."""
  noise = np.random.default_rng(0).normal(size=(6, 5, 3, 4)).astype(np.float32)
  noise *= np.float32(10.0) ** np.arange(-6, 6).reshape(3, 4)
  noise[..., 1, 2] = 0
  return noise


def test_int8_is_the_nearest_of_255_numbers(kernel):
  values, scale = quantization.quantize(jnp.asarray(kernel), 2, 'int8')
  expected = np.abs(kernel).max((0, 1)) / np.float32(127)
  expected[1, 2] = 1
  np.testing.assert_allclose(scale, expected, rtol=1e-6)
  assert values.dtype == jnp.int8 and values.shape == kernel.shape
  largest = np.abs(np.int32(values)).max((0, 1))
  np.testing.assert_array_equal(largest, np.where(kernel.any((0, 1)), 127, 0))
  difference = np.abs(quantization.dequantize(values, scale) - kernel)
  assert (difference <= 0.5001 * expected).all() and difference.max() > 0


def test_fp8_keeps_three_bits_after_the_first(kernel):
  values, scale = quantization.quantize(jnp.asarray(kernel), 2, 'fp8')
  expected = np.abs(kernel).max((0, 1)) / np.float32(448)
  expected[1, 2] = 1
  np.testing.assert_allclose(scale, expected, rtol=1e-6)
  assert values.dtype == jnp.float8_e4m3fn
  again = (kernel / np.asarray(scale)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
  np.testing.assert_array_equal(np.asarray(values), again)
  difference = np.abs(quantization.dequantize(values, scale) - kernel)
  # Half of the last bit; below 2^-6 numbers are multiples of 2^-9.
  bound = np.maximum(np.abs(kernel) / 16, expected * 2.0**-10)
  assert (difference <= 1.001 * bound).all()
  assert (difference > np.abs(kernel) / 20).any()


@pytest.mark.parametrize('format_name', _FORMATS)
def test_every_value_is_exact_in_bfloat16(format_name):
  dtype, largest = quantization.FORMATS[format_name]
  every = np.arange(256, dtype=np.uint8).view(np.dtype(dtype))
  every = every[np.isfinite(every.astype(np.float32))]
  assert np.abs(every.astype(np.float32)).max() in (largest, largest + 1)
  cast = np.asarray(jnp.asarray(every).astype(jnp.bfloat16).astype(jnp.float32))
  np.testing.assert_array_equal(cast, every.astype(np.float32))


@pytest.mark.parametrize('format_name', _FORMATS)
@pytest.mark.parametrize(('dtype', 'rtol'), [('float32', 2e-6), ('bfloat16', 2**-8)])
def test_a_projection_multiplies_with_the_dequantised_kernel(
  kernel, format_name, dtype, rtol
):
  values, scale = quantization.quantize(jnp.asarray(kernel), 2, format_name)
  x = np.random.default_rng(1).normal(size=(7, 6, 5)).astype(np.float32)
  x = jnp.asarray(x, dtype).astype(jnp.float32)
  bias = jnp.ones((3, 4))
  exact = np.float64(quantization.dequantize(values, scale))
  expected = np.tensordot(np.float64(x), exact, 2)
  layer = layers.Projection((3, 4), dtype, 2)
  params = {'kernel': values, 'kernel_scale': scale}
  found: Any = layer.apply({'params': params}, x)
  assert found.dtype == dtype
  most = np.abs(expected).max(0)
  difference = np.abs(np.float64(found) - expected)
  assert (difference <= rtol * most).all()
  with_bias = layers.Projection((3, 4), dtype, 2, use_bias=True)
  added: Any = with_bias.apply({'params': params | {'bias': bias}}, x)
  np.testing.assert_array_equal(added, found + bias.astype(dtype)[None])


@pytest.mark.parametrize('format_name', _FORMATS)
@pytest.mark.parametrize('family', ['qwen2', 'qwen3', 'gemma2'])
def test_the_engine_samples_with_the_rounded_kernels(family, format_name):
  """What it says of its tokens is what the learner says of rounded kernels."""
  shape = tiny.config(family)
  params = tiny.params(shape)
  engine = tiny.engine(params, shape=shape, weights=format_name)
  segments = [*clients.run(engine, range(4)).values()]
  rounded = _round_kernels(params, format_name)
  tiny.assert_on_policy(rounded, segments, shape=shape)
  with pytest.raises(AssertionError):
    tiny.assert_on_policy(params, segments, shape=shape)


def test_adapters_are_merged_before_they_are_rounded():
  shape, params = tiny.config('qwen2'), tiny.params(tiny.config('qwen2'))
  adapted = lora.add(params, 3, ('q', 'o', 'down'), 6.0, jax.random.key(0))
  adapted = jax.tree_util.tree_map_with_path(
    lambda path, x: x + 0.2 if 'lora_b' in str(path) else x, adapted
  )
  found = sampling_params.unstack(adapted, shape, 'int8')
  expected = sampling_params.unstack(lora.merge(adapted), shape, 'int8')
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  q = found['layers'][0]['attn']['q']
  assert (q['kernel'].dtype, q['kernel'].shape) == (jnp.int8, (16, 32))
  assert (q['kernel_scale'].dtype, q['kernel_scale'].shape) == (jnp.float32, (32,))


def test_new_weights_compile_nothing_and_replace_all():
  engine = clients.engine(weights='int8')
  engine.warm_up()
  before = clients.run(engine, range(4))
  with tiny.compilations() as compiled:
    engine.sync_weights(clients.other_params(), 1)
    after = clients.run(engine, range(4))
  assert not compiled
  fresh = tiny.engine(clients.other_params(), weights='int8')
  for number, segment in clients.run(fresh, range(4)).items():
    np.testing.assert_array_equal(after[number].tokens, segment.tokens)
    np.testing.assert_array_equal(
      after[number].behaviour_logprobs, segment.behaviour_logprobs
    )
  assert any(not np.array_equal(before[n].tokens, after[n].tokens) for n in before)


def test_experts_and_unknown_formats_are_refused():
  shape = tiny.config('qwen3_moe')
  with pytest.raises(ValueError, match="weights is 'int8', but the kernels of experts"):
    tiny.engine(tiny.params(shape), shape=shape, weights='int8')
  with pytest.raises(ValueError, match="weights is 'int4'; give one of int8, fp8"):
    clients.engine(weights='int4')
  with pytest.raises(
    ValueError, match="engine.weights is 'int4'.*'model', 'int8', 'fp8'"
  ):
    config_lib.Config(engine=config_lib.Engine(weights='int4')).check()


def test_an_algorithm_without_a_correction_gets_one():
  plain, given = (
    algorithms.grpo(),
    algorithms.grpo(correction=correction.token_truncated()),
  )
  config = lambda name: config_lib.Config(engine=config_lib.Engine(weights=name))
  add = lambda name, algorithm: preflight.correct_rounding(config(name), algorithm)
  assert add('model', plain) is plain
  assert add('int8', given) is given
  found = add('fp8', plain)
  assert found.correction and found._replace(correction=None) == plain
  preflight.check_config(
    tiny.run_config(config('int8'), sync_every=2), add('int8', plain)
  )


@pytest.mark.usefixtures('no_curves')
def test_a_run_is_corrected_and_resumes_as_if_uninterrupted(model, tmp_path):
  config = lambda steps: test_train._config(model, steps=steps, weights='int8')
  params = test_train._run(config(4), tmp_path / 'whole')
  test_train._run(config(2), tmp_path / 'parts')
  resumed = test_train._run(config(4), tmp_path / 'parts')
  test_train._assert_equal(resumed, params)
  lines = [line for line in metrics.read(tmp_path / 'whole') if line['step']]
  # The learner's policy is another one than the sampler's.
  assert all(1e-5 < abs(x['train/correction_ratio_max'] - 1) < 0.5 for x in lines)
  # The learner's parameters are no multiples of a scale.
  _, exported = weights.load(tmp_path / 'whole' / 'model')
  test_train._assert_equal(exported, params)
  rounded = _round_kernels(params, 'int8')
  assert not np.array_equal(
    rounded['layers']['mlp']['up']['kernel'], params['layers']['mlp']['up']['kernel']
  )


def test_the_engines_copy_is_counted_in_bytes():
  shape = tiny.config('qwen2')
  models = footprint.Models(shape)
  machine = footprint.Machine('gpu', 1e9, chips=2)
  config = lambda name: config_lib.Config(engine=config_lib.Engine(weights=name))
  copies = [
    footprint.Footprint(config(name), models, machine).parts['copy']
    for name in ('model', 'int8')
  ]
  kernels = [
    leaf
    for layer in sampling_params.unstack(tiny.params(shape), shape, 'int8')['layers']
    for leaf in jax.tree.leaves(layer)
    if leaf.dtype == jnp.int8
  ]
  assert len(kernels) == 7 * shape.num_layers
  scales = shape.num_layers * 4 * (32 + 16 + 16 + 16 + 24 + 24 + 16)
  assert copies[0] - copies[1] == 3 * sum(k.size for k in kernels) - scales


_MESH = """
import jax, numpy as np
jax.config.update('jax_num_cpu_devices', 4)
jax.config.update('jax_numpy_rank_promotion', 'raise')
import clients, tiny
from agent_r1_jax.models import sharding

shape = tiny.config('qwen2')
params = tiny.params(shape)
for name in ('int8', 'fp8'):
  one = clients.run(tiny.engine(params, shape=shape, weights=name), range(4))
  for sizes in (dict(fsdp=2, tensor=2), dict(data=2, tensor=2)):
    mesh = sharding.make_mesh(**sizes)
    placed = sharding.shard_params(jax.device_get(params), None)
    placed = jax.device_put(placed, sharding.make_shardings(placed, mesh))
    engine = tiny.engine(placed, shape=shape, weights=name, mesh=mesh)
    many = clients.run(engine, range(4))
    clients.assert_same(many, one)
    q, o = (engine.replicas[1].policy.copies[1]['layers'][1]['attn'][x] for x in 'qo')
    assert q['kernel'].dtype.itemsize == o['kernel'].dtype.itemsize == 1
    shard = lambda x: x.addressable_shards[0].data.shape
    assert (shard(q['kernel']), shard(q['kernel_scale'])) == ((16, 16), (16,))
    assert (shard(o['kernel']), shard(o['kernel_scale'])) == ((2, 8, 16), (16,))
print('equal')
"""


def test_two_chips_of_a_replica_sample_as_one():
  paths = os.pathsep.join(map(str, (script.ROOT / 'tests', script.ROOT)))
  done = script.run('-c', _MESH, PYTHONPATH=paths)
  assert done.returncode == 0, done.stderr
