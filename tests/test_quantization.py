"""quantization.py: kernels of 8 bits, and engines and runs that sample with them."""

import dataclasses
import functools
from typing import Any

import clients
import jax
from jax.extend import core as extend_core
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import runs
from safetensors import numpy as safetensors_numpy
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax.models import (
  decoder,
  engine_params,
  families,
  layers,
  lora,
  quantization,
)
from agent_r1_jax.models.files import weights
from agent_r1_jax.rl import algorithms, losses
from agent_r1_jax.train import metrics, preflight
from agent_r1_jax.train.plan import footprint

_FORMATS = [*quantization.FORMATS]
model = runs.model


@functools.partial(jax.jit, static_argnums=1)
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
  expected = np.abs(kernel).max((0, 1), keepdims=True) / np.float32(127)
  expected[..., 1, 2] = 1
  np.testing.assert_allclose(scale, expected, rtol=1e-6)
  assert values.dtype == jnp.int8 and values.shape == kernel.shape
  largest = np.abs(np.int32(values)).max((0, 1))
  np.testing.assert_array_equal(largest, np.where(kernel.any((0, 1)), 127, 0))
  difference = np.abs(quantization.dequantize(values, scale) - kernel)
  assert (difference <= 0.5001 * expected).all() and difference.max() > 0


def test_fp8_keeps_three_bits_after_the_first(kernel):
  values, scale = quantization.quantize(jnp.asarray(kernel), 2, 'fp8')
  expected = np.abs(kernel).max((0, 1), keepdims=True) / np.float32(448)
  expected[..., 1, 2] = 1
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
@pytest.mark.parametrize('size', [1e-30, 1e-36, 1e-38, 1e-44])
def test_a_channel_of_very_small_numbers_stays_finite(format_name, size):
  kernel = jnp.asarray([[0.0, 1.0], [size, 1.0], [size / 2, 0.5]])
  values, scale = quantization.quantize(kernel, 1, format_name)
  found = quantization.dequantize(values, scale)
  assert (np.abs(found[:, 0]) <= 1.1 * size).all()  # NaN is not.
  np.testing.assert_allclose(found[:, 1], kernel[:, 1], rtol=0.07)


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


def test_the_engine_samples_with_the_rounded_kernels():
  """What it says of its tokens is what the learner says of rounded kernels."""
  shape = tiny.config('qwen2', 1)
  params = tiny.params(shape)
  engine = tiny.engine(params, shape=shape, weights='int8', **clients.EXACT)
  segments = [*clients.run(engine, range(4)).values()]
  tiny.assert_on_policy(_round_kernels(params, 'int8'), segments, shape=shape)
  with pytest.raises(AssertionError):
    tiny.assert_on_policy(params, segments, shape=shape)
  # New weights compile no program, and are rounded as well.
  others = tiny.params(shape, likely={100: 0.5})
  with tiny.compilations() as compiled:
    engine.sync_weights(others, 1)
    after = [*clients.run(engine, range(4)).values()]
  assert not compiled
  tiny.assert_on_policy(_round_kernels(others, 'int8'), after, shape=shape)


def test_adapters_are_merged_before_they_are_rounded():
  shape, params = tiny.config('qwen2', 2), tiny.params(tiny.config('qwen2', 2))
  adapted = tiny.add_adapters(params, 3, ('q', 'o', 'down'), 6.0, b=0.2)
  found = engine_params.unstack(adapted, shape, 'int8')
  expected = engine_params.unstack(lora.merge(adapted), shape, 'int8')
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  q = found['layers'][0]['attn']['q']
  assert (q['kernel'].dtype, q['kernel'].shape) == (jnp.int8, (16, 32))
  assert (q['kernel_scale'].dtype, q['kernel_scale'].shape) == (jnp.float32, (1, 32))


def test_experts_and_unknown_formats_are_refused():
  shape = tiny.config('qwen3_moe')
  with pytest.raises(ValueError, match="weights is 'int8', but the kernels of experts"):
    tiny.engine(tiny.params(shape), shape=shape, weights='int8')
  with pytest.raises(ValueError, match="weights is 'int4'; give one of int8, fp8"):
    clients.engine(weights='int4')
  with pytest.raises(
    ValueError, match="engine.weights is 'int4'.*'model', 'unpacked', 'int8', 'fp8'"
  ):
    config_lib.Config(engine=config_lib.Engine(weights='int4')).check()


def test_an_algorithm_without_a_correction_gets_one():
  plain, given = (
    algorithms.grpo(),
    algorithms.grpo(correction=losses.token_truncated()),
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
  cache = config_lib.Config(engine=config_lib.Engine(cache='int8'))
  assert preflight.correct_rounding(cache, plain).correction
  assert preflight.correct_rounding(cache, given) is given


@pytest.mark.usefixtures('no_curves')
def test_a_run_is_corrected_and_learns_in_full_precision(model, tmp_path):
  numbers = {'weights': 'int8', 'cache': 'int8'}
  config = runs.config(model, steps=1, eval_every=0, **numbers)
  params = runs.run(config, tmp_path)
  lines = [line for line in metrics.read(tmp_path) if line['step']]
  # The learner's policy is another one than the sampler's.
  assert all(1e-5 < abs(x['train/correction_ratio_max'] - 1) < 0.5 for x in lines)
  # The learner's parameters are no multiples of a scale.
  runs.assert_equal(weights.load(tmp_path / 'model')[1], params)
  up = lambda tree: tree['layers']['mlp']['up']['kernel']
  assert not np.array_equal(up(_round_kernels(params, 'int8')), up(params))


def test_the_engines_copy_is_counted_in_bytes():
  shape = tiny.config('qwen2', 2)
  models = footprint.ModelShapes(shape)
  machine = footprint.Machine('gpu', 1e9, chips=2)
  config = lambda name: config_lib.Config(engine=config_lib.Engine(weights=name))
  copies = [
    footprint.Footprint(config(name), models, machine).parts['copy']
    for name in ('model', 'int8')
  ]
  kernels = [
    leaf
    for layer in engine_params.unstack(tiny.params(shape), shape, 'int8')['layers']
    for leaf in jax.tree.leaves(layer)
    if leaf.dtype == jnp.int8
  ]
  assert len(kernels) == 7 * shape.num_layers
  scales = shape.num_layers * 4 * (32 + 16 + 16 + 16 + 24 + 24 + 16)
  assert copies[0] - copies[1] == 3 * sum(k.size for k in kernels) - scales


def test_frozen_kernels_are_counted_in_bytes():
  shape = dataclasses.replace(tiny.config('qwen2', 2), dtype='bfloat16')
  config = tiny.run_config(lora_rank=3, frozen='int8', dtype='bfloat16')
  models = footprint.ModelShapes(shape, algorithms.grpo())
  parts = footprint.Footprint(config, models, footprint.Machine('gpu', 1e9)).parts
  frozen = _freeze(shape)
  size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
  assert parts['parameters, int8'] == size(frozen)
  # Embeddings and the head are shared; kernels stay as they are.
  copy = engine_params.unstack(frozen, shape)
  assert parts['copy'] == size(copy['layers'])
  assert copy['embed']['embedding'] is frozen['embed']['embedding']
  up = copy['layers'][1]['mlp']['up']
  kinds = {name: x.dtype.name for name, x in up.items()}
  assert kinds.pop('kernel') == 'int8' and {*kinds.values()} == {'float32'}


def _freeze(shape, format_name='int8', targets=tuple(families.TARGETS)):
  """Frozen kernels of 8 bits, with adapters that change what is computed."""

  freeze = jax.jit(quantization.freeze, static_argnums=(1, 2))
  frozen = freeze(tiny.params(shape), shape, format_name)
  return tiny.add_adapters(frozen, 3, targets, 6.0, b=0.3)


def test_under_adapters_the_sampler_and_the_learner_compute_the_same():
  shape = tiny.config('qwen2', 1)
  frozen = _freeze(shape, 'fp8', ('q', 'v', 'o', 'up', 'down'))
  engine = tiny.engine(frozen, shape=shape, **clients.EXACT)
  segments = [*clients.run(engine, range(4)).values()]
  tiny.assert_on_policy(frozen, segments, shape=shape)


def _gradient(shape):
  """Returns the function from parameters to the gradients of their adapters."""
  tokens = jnp.arange(9)[None]

  def loss(learned, kept):
    params = lora.join(learned, kept)
    x = decoder.hidden(params, shape, tiny.rows(tokens))
    return (x.astype(jnp.float32) ** 2 * jnp.arange(16.0)[None, None]).sum()

  return lambda params: jax.grad(loss)(*lora.split(params))


@pytest.mark.parametrize(
  ('family', 'tolerance'), [('qwen2', 2e-5), ('qwen3_5_text', 1e-4)]
)
def test_adapters_have_the_gradient_that_dequantised_kernels_give(family, tolerance):
  shape = tiny.config(family, 1)
  kernels = [x for x in lora.list_targets(shape) if x.path in quantization.KERNELS]
  frozen = _freeze(shape, targets=tuple({x.target for x in kernels}))
  plain = jax.tree.map(lambda x: x, frozen)
  for target in kernels:
    leaf = plain['layers'][target.place][target.target]
    scale = leaf.pop('kernel_scale')
    leaf['kernel'] = quantization.dequantize(leaf['kernel'], scale)
  gradient = jax.jit(_gradient(shape))
  found, expected = gradient(frozen), gradient(plain)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max())
    assert np.abs(y).max() > 0
  # So have exports.
  merged = lora.merge(frozen), lora.merge(plain)
  jax.tree.map(np.testing.assert_array_equal, *merged)
  assert jax.tree.structure(merged[0]) == jax.tree.structure(merged[1])


def test_no_gradient_has_all_kernels_in_another_type():
  """Kernels are cast a layer at a time, also where activations are kept."""
  shape = dataclasses.replace(tiny.config('qwen2', 3), dtype='bfloat16')
  params = _freeze(shape)
  kernels = {params['layers']['mlp'][x]['kernel'].shape for x in ('up', 'down')}
  jaxpr = jax.make_jaxpr(_gradient(shape))(params)
  made = [x.aval for eqn in _walk(jaxpr.jaxpr) for x in eqn.outvars]
  cast = {x.shape for x in made if x.dtype == jnp.bfloat16}
  assert {shape[1:] for shape in kernels} <= cast and not kernels & cast


def _walk(jaxpr):
  """Yields the equations of a program and of those inside it."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in extend_core.jaxprs_in_params(eqn.params):
      yield from _walk(inner)


@pytest.mark.usefixtures('no_curves')
def test_a_run_trains_adapters_over_frozen_kernels(model, tmp_path):
  config = runs.config(model, steps=1, eval_every=0, lora_rank=2, frozen='int8')
  params = runs.run(config, tmp_path)
  # Loaded from its checkpoint, it is the same to the last bit.
  runs.assert_equal(runs.run(config, tmp_path), params)
  leaf, shape = params['layers']['mlp']['up'], tiny.config(layers=1)
  assert leaf['kernel'].dtype == jnp.int8 and np.abs(leaf['lora_b']).max() > 0
  base = weights.load(model)[1]
  expected = quantization.freeze(base, shape, 'int8')['layers']['mlp']['up']
  for name in ('kernel', 'kernel_scale'):
    np.testing.assert_array_equal(leaf[name], expected[name])
  # Sampler and learner agree, without a correction.
  lines = [line for line in metrics.read(tmp_path) if line['step']]
  assert all(abs(line['train/behaviour_kl']) < 1e-6 for line in lines)
  # The model is what was trained, in float32; the adapter is that of rounded kernels.
  _, exported = weights.load(tmp_path / 'model')
  runs.assert_equal(exported, lora.merge(params))
  assert exported['layers']['mlp']['up']['kernel'].dtype == jnp.float32
  stored = safetensors_numpy.load_file(tmp_path / 'adapter' / 'adapter_model.safetensors')
  up = 'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
  np.testing.assert_array_equal(stored[up], leaf['lora_a'][0].T)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'frozen': 'int8'}, "frozen is 'int8', but without model.lora_rank"),
    (
      {'frozen': 'int8', 'lora_rank': 2, 'weights': 'fp8'},
      "engine.weights: with model.frozen='int8'",
    ),
    ({'frozen': 'int4', 'lora_rank': 2}, "model.frozen is 'int4'"),
  ],
)
def test_frozen_kernels_without_a_purpose_are_refused(fields, message):
  config = tiny.run_config(**fields)
  with pytest.raises(ValueError, match=message):
    preflight.check_config(config, algorithms.grpo())
