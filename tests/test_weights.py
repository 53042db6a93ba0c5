"""Import and export of Hugging Face directories."""

import dataclasses
import gc
import json
import pathlib
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import tiny

from agent_r1_jax.host import memory
from agent_r1_jax.models import decoder, families
from agent_r1_jax.models.files import hf_config, weights

_GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'decoder'
_FAMILIES = tuple(families.FAMILIES)
_LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 32.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}

_CAPS = {'query_scale': 5, 'attention_cap': 20.0, 'logit_cap': 9.0}
_SLIDES = {'sliding': (True, False, True), 'window': 16}
# What a family's config.json can say besides the sizes.
_MIXTURE = {'num_experts': 4, 'experts_per_token': 2, 'expert_dim': 10, 'mlp_dim': 0}
_STATES = {'linear_key_heads': 2, 'linear_value_heads': 4, 'conv_width': 3}
_STATES |= {'linear_key_dim': 5, 'linear_value_dim': 3, 'recurrent': (True, False, True)}
_GEMMA4 = {
  'sliding': (True, True, False),
  'window': 16,
  'full_kv_heads': 1,
  'full_head_dim': 10,
  'local_rope_theta': 77.0,
  'logit_cap': 9.0,
  'rope_scaling': {'rope_type': 'proportional', 'partial_rotary_factor': 0.4},
}
_PARTICULARS = {
  'qwen2_moe': {**_MIXTURE, 'shared_dim': 14},
  'qwen3_moe': {**_MIXTURE, 'normalize_experts': True},
  'gpt_oss': {
    **_MIXTURE,
    **_SLIDES,
    'normalize_experts': True,
    'rope_scaling': tiny.YARN,
  },
  'qwen3_5_text': {**_STATES, 'rope_fraction': 0.75},
  'qwen3_5_moe_text': {
    **_MIXTURE,
    **_STATES,
    'shared_dim': 14,
    'normalize_experts': True,
    'rope_fraction': 0.75,
  },
  'gemma4_text': {
    **_GEMMA4,
    **_MIXTURE,
    'full_kv_heads': 2,
    'mlp_dim': 20,
    'num_layers': 4,
    'sliding': (True, False) * 2,
    'shared_layers': 2,
    'wide_mlp': True,
    'input_dim': 5,
    'normalize_experts': True,
  },
  'gemma4': {
    **_GEMMA4,
    'full_kv_heads': 2,
    'input_dim': 5,
    'normalize_experts': True,
    'vision': dataclasses.replace(tiny.POOLED_VISION, out_dim=12),
  },
  'gemma4_unified_text': {**_GEMMA4, 'keys_are_values': True},
  'llama': {'rope_scaling': _LLAMA3},
  'qwen2_5_vl': {
    'vision': dataclasses.replace(tiny.VISION, out_dim=12),
    'mrope_section': (1, 1, 1),
  },
  'qwen3_vl': {
    'vision': dataclasses.replace(tiny.DEEP_VISION, out_dim=12, window_size=32),
    'mrope_section': (1, 1, 1),
  },
  'qwen3': _SLIDES,
  'mistral': {'sliding': (True,) * 3, 'window': 16},
  'smollm3': {**_SLIDES, 'nope': (False, True, False)},
  'phi3': {'rope_fraction': 0.75},
  'olmo3': {**_SLIDES, 'local_rope_theta': 10_000.0},
  'gemma2': {**_SLIDES, **_CAPS},
  'gemma3_text': {**_SLIDES, **_CAPS, 'local_rope_theta': 77.0},
}


def make_config(family, tie_embeddings=False, **fields):
  fields = {
    'vocab_size': 40,
    'embed_dim': 12,
    'num_layers': 3,
    'num_heads': 4,
    'num_kv_heads': 2,
    'head_dim': 6,
    'mlp_dim': 20,
    'max_positions': 512,
    **_PARTICULARS.get(family, {}),
    **fields,
  }
  return decoder.DecoderConfig(family, tie_embeddings=tie_embeddings, **fields)


def make_params(config, dtype='float32', value_head=False):
  """Random host arrays in the tree that init makes; it is traced once a family."""
  rng = np.random.default_rng(0)
  tree = dict(tiny.init_shapes(dataclasses.replace(config, tie_embeddings=False)))
  if config.tie_embeddings:
    del tree['lm_head']
  if value_head:
    tree = jax.eval_shape(decoder.add_value_head, tree)

  def make(x):
    return rng.standard_normal(x.shape, np.float32).astype(jnp.dtype(dtype))

  return jax.tree.map(make, tree)


def read_tensors(directory):
  """Name -> (dtype, shape, bytes) of all files, read by the format's own library."""
  tensors = {}
  for file in sorted(directory.glob('*.safetensors')):
    with safetensors.safe_open(file, 'np') as opened:
      for name in opened.keys():
        x = opened.get_tensor(name)
        tensors[name] = (x.dtype, x.shape, x.tobytes())
  return tensors


def _assert_same(tree, other):
  def check(x, y):
    x, y = np.asarray(x), np.asarray(y)
    assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())

  jax.tree.map(check, tree, other)


def _write(directory, **changes):
  """A small untied llama model, with tensors added, changed or (None) left out."""
  config = make_config('llama')
  weights.save(directory, config, make_params(config))
  tensors = safetensors.numpy.load_file(directory / 'model.safetensors')
  tensors |= {name.replace('__', '.'): x for name, x in changes.items()}
  tensors = {name: x for name, x in tensors.items() if x is not None}
  safetensors.numpy.save_file(tensors, directory / 'model.safetensors')
  return directory


# Import and export are each other's inverse.


@pytest.mark.parametrize('family', (*_FAMILIES, 'gemma4_experts'))
def test_import_then_export_gives_the_tensors_of_transformers_back(tmp_path, family):
  config, params = weights.load(_GOLDEN / family)
  weights.save(tmp_path / 'model', config, jax.device_get(params))
  assert read_tensors(tmp_path / 'model') == read_tensors(_GOLDEN / family)
  assert hf_config.read(tmp_path / 'model') == config


@pytest.mark.parametrize('family', _FAMILIES)
@pytest.mark.parametrize(
  ('tied', 'dtype', 'max_shard_bytes'),
  [(False, 'float32', 10**9), (True, 'bfloat16', 3000)],
)
def test_export_then_import_is_the_identity(
  tmp_path, family, tied, dtype, max_shard_bytes
):
  config = make_config(family, tied)
  params = make_params(config, dtype)
  first, second = tmp_path / 'first', tmp_path / 'second'
  weights.save(first, config, params, max_shard_bytes=max_shard_bytes)
  read_config, read = weights.load(first)
  assert read_config == config
  _assert_same(read, params)
  files = len(list(first.glob('*.safetensors')))
  assert files == 1 if max_shard_bytes == 10**9 else files > 3
  weights.save(second, read_config, jax.device_get(read), max_shard_bytes=10**4)
  assert read_tensors(first) == read_tensors(second)


@pytest.mark.parametrize('family', ['qwen3_5_text', 'qwen3_5_moe_text'])
def test_the_language_model_is_read_from_a_model_that_sees(tmp_path, family, caplog):
  """In the published form: other names, and one tensor for all experts."""
  expected = weights.load(_GOLDEN / family)
  raw = json.loads((_GOLDEN / family / 'config.json').read_text())
  whole = {'model_type': family.removesuffix('_text'), 'text_config': raw}
  (tmp_path / 'config.json').write_text(json.dumps(whole))
  tensors = safetensors.numpy.load_file(_GOLDEN / family / 'model.safetensors')
  for layer in range(expected[0].num_layers if expected[0].num_experts else 0):
    root = f'model.layers.{layer}.mlp.experts'
    take = lambda part, root=root: np.stack(
      [tensors.pop(f'{root}.{e}.{part}_proj.weight') for e in range(6)]
    )
    tensors[f'{root}.down_proj'] = take('down')
    tensors[f'{root}.gate_up_proj'] = np.concatenate([take('gate'), take('up')], axis=1)
  tensors = {
    name.replace('model.', 'model.language_model.'): x for name, x in tensors.items()
  }
  tensors |= {'mtp.norm.weight': np.ones(2), 'model.visual.bias': np.ones(2)}
  tensors = {name: x.astype(np.float32) for name, x in tensors.items()}
  safetensors.numpy.save_file(tensors, tmp_path / 'model.safetensors')
  config, params = weights.load(tmp_path)
  assert config == expected[0]
  _assert_same(params, expected[1])
  assert 'mtp.' in caplog.text and 'model.visual.' in caplog.text


def test_a_critic_keeps_its_value_head(tmp_path):
  config = make_config('qwen2', tie_embeddings=True)
  params = make_params(config, value_head=True)
  weights.save(tmp_path, config, params)
  _assert_same(weights.load(tmp_path)[1], params)
  assert read_tensors(tmp_path)['value_head.weight'][1] == (1, config.embed_dim)
  assert json.loads((tmp_path / 'config.json').read_text())['value_head'] is True


def test_dtype_converts_on_both_ways(tmp_path):
  config = make_config('llama')
  params = make_params(config)
  weights.save(tmp_path / 'model', config, params, dtype='bfloat16')
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  _assert_same(weights.load(tmp_path / 'model')[1], half)
  full = jax.tree.map(lambda x: x.astype(np.float32), half)
  _assert_same(weights.load(tmp_path / 'model', dtype=np.float32)[1], full)
  raw = json.loads((tmp_path / 'model' / 'config.json').read_text())
  assert raw['torch_dtype'] == 'bfloat16'
  with pytest.raises(ValueError, match='dtype is int32; give float32'):
    weights.load(tmp_path / 'model', dtype='int32')


@pytest.mark.parametrize('half', ['bfloat16', 'float16'])
def test_leaves_of_several_dtypes_share_a_file(tmp_path, half):
  config = make_config('qwen3', vocab_size=39, embed_dim=13)  # odd numbers of 16 bits
  params = make_params(config, half)
  params['final_norm']['scale'] = params['final_norm']['scale'].astype(np.float32)
  params['layers']['mlp'] = jax.tree.map(
    lambda x: x.astype(np.float32), params['layers']['mlp']
  )
  weights.save(tmp_path / 'model', config, params)
  _assert_same(weights.load(tmp_path / 'model')[1], params)
  assert len(read_tensors(tmp_path / 'model')) == 36


def test_place_gets_the_path_and_array_of_each_leaf(tmp_path):
  config = make_config('qwen2')
  params = make_params(config)
  weights.save(tmp_path / 'model', config, params)
  seen = {}

  def place(path, array):
    seen[path] = array
    return path

  _, paths = weights.load(tmp_path / 'model', place=place)
  assert paths['layers']['attn']['q']['bias'] == 'layers/attn/q/bias'
  assert len(seen) == len(jax.tree.leaves(params)) == len(jax.tree.leaves(paths))
  _assert_same(seen['layers/mlp/down/kernel'], params['layers']['mlp']['down']['kernel'])


def test_peak_memory_is_the_parameters_and_two_read_tensors(tmp_path):
  sizes = {'vocab_size': 512, 'embed_dim': 128, 'mlp_dim': 512, 'num_layers': 6}
  config = make_config('llama', head_dim=16, **sizes)
  params = make_params(config)
  total = sum(x.nbytes for x in jax.tree.leaves(params))
  tensor = max(config.vocab_size, config.mlp_dim) * config.embed_dim * 4
  tracemalloc.start()
  try:
    weights.save(tmp_path / 'model', config, params)
    saving = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    weights.load(tmp_path / 'model', place=lambda path, array: array)
    loading = tracemalloc.get_traced_memory()[1] - before
  finally:
    tracemalloc.stop()
  assert total > 20 * tensor
  assert saving < 2 * tensor
  assert loading < total + 2 * tensor


@pytest.mark.parametrize('family', _FAMILIES)
def test_transformers_reads_our_config(tmp_path, family):
  import transformers

  fields = {'rope_theta': 777.0, 'norm_eps': 1e-4}
  if family == 'olmo3':  # Its layers have one θ.
    fields['local_rope_theta'] = 777.0
  config = make_config(family, tie_embeddings=True, **fields)
  weights.save(tmp_path, config, make_params(config, 'bfloat16'))
  whole = transformers.AutoConfig.from_pretrained(tmp_path)
  assert whole.model_type == family
  assert whole.tie_word_embeddings is True
  theirs = whole.text_config if config.vision else whole
  assert str(theirs.dtype).removeprefix('torch.') == 'bfloat16'
  # Qwen2.5-VL has no field for it in its text_config.
  raw = theirs.to_dict()
  assert (raw.get('head_dim', 6), raw['num_key_value_heads']) == (6, 2)
  assert (theirs.rms_norm_eps, theirs.max_position_embeddings) == (1e-4, 512)
  assert theirs.eos_token_id is None  # and not Llama 2's
  rope = {'rope_theta': 777.0, 'rope_type': 'default'}
  rope |= config.rope_scaling or {}
  if config.rope_fraction != 1:
    rope |= {'partial_rotary_factor': config.rope_fraction}
  if config.mrope_section:
    rope |= {'mrope_section': [1, 1, 1]}
    rope |= {'mrope_interleaved': True} if config.vision.deepstack else {'type': 'mrope'}
  rotations = theirs.rope_parameters
  assert rotations.get('full_attention', rotations) == rope
  if config.facts.local_rope:
    assert rotations['sliding_attention']['rope_theta'] == config.local_rope_theta
  if config.facts.mixes_types:
    kinds = [kind == 'sliding_attention' for kind in theirs.layer_types]
    assert kinds == list(config.sliding or (False,) * config.num_layers)
  if config.recurrent:
    kinds = [kind == 'linear_attention' for kind in theirs.layer_types]
    assert kinds == list(config.recurrent)
  assert (getattr(theirs, 'sliding_window', None) or 0) == config.window
  whole.save_pretrained(tmp_path)
  assert hf_config.read(tmp_path) == config


# Broken directories.

_LAYER = 'model__layers__'


def test_missing_files_are_named(tmp_path):
  with pytest.raises(ValueError, match='nowhere: no such directory'):
    weights.load(tmp_path / 'nowhere')
  with pytest.raises(ValueError, match='config.json: missing'):
    weights.load(tmp_path)
  (tmp_path / 'config.json').write_text('{"model_type": ')
  with pytest.raises(ValueError, match='config.json: not JSON'):
    weights.load(tmp_path)
  shutil.copy(_GOLDEN / 'llama' / 'config.json', tmp_path)
  with pytest.raises(ValueError, match=f'{tmp_path}: has neither model.safetensors nor'):
    weights.load(tmp_path)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model__norm__weight': None}, 'no tensor model.norm.weight; fetch the whole'),
    ({'lm_head__weight': None}, 'no tensor lm_head.weight.*"tie_word_embeddings": true'),
    ({'model__layers__1__mlp__up_proj__weight': None}, r'no tensor .*layers\.1\.mlp\.up'),
    ({f'{_LAYER}3__input_layernorm__weight': np.ones(12, np.float32)}, 'has no place'),
    ({f'{_LAYER}0__self_attn__q_proj__bias': np.ones(24, np.float32)}, 'has no place'),
    ({'model__norm__weight': np.ones(13, np.float32)}, r'norm.* \[13\], by .* is \[12\]'),
    ({'model__norm__weight': np.ones(12, np.int32)}, 'tensor model.norm.weight is I32'),
    ({f'{_LAYER}1__input_layernorm__weight': np.ones(12, np.float16)}, 'are F16 and F32'),
  ],
)
def test_a_wrong_tensor_is_named(tmp_path, changes, message):
  placed = []
  with pytest.raises(ValueError, match=message) as error:
    weights.load(_write(tmp_path, **changes), place=lambda *args: placed.append(args))
  assert str(tmp_path) in str(error.value)
  assert not placed


def test_tied_model_with_lm_head_loads_only_if_it_equals_the_embedding(tmp_path):
  shutil.copytree(_GOLDEN / 'qwen2', tmp_path / 'model')
  file = tmp_path / 'model' / 'model.safetensors'
  tensors = safetensors.numpy.load_file(file)
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'].copy()
  safetensors.numpy.save_file(tensors, file)
  _assert_same(weights.load(tmp_path / 'model')[1], weights.load(_GOLDEN / 'qwen2')[1])
  tensors['lm_head.weight'][3, 4] += 1
  safetensors.numpy.save_file(tensors, file)
  with pytest.raises(ValueError, match='lm_head.weight differs from the embedding'):
    weights.load(tmp_path / 'model')


def test_an_unknown_family_is_refused():
  with pytest.raises(ValueError, match="family is 'gpt2'; give one of qwen2, qwen3, "):
    make_config('gpt2')


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_numbers_that_are_not_finite_are_named(tmp_path, dtype):
  shape = tiny.config()
  params = jax.device_get(tiny.params(shape))
  for bad in (np.nan, np.inf):
    params['embed']['embedding'] = np.array(params['embed']['embedding'])
    params['embed']['embedding'][3, 5] = bad
    weights.save(tmp_path / 'm', shape, params, dtype=dtype)
    with pytest.raises(ValueError, match='1 of 4800 .* embed/embedding'):
      weights.load(tmp_path / 'm')
  # Large ones are, though their sum is not.
  params['embed']['embedding'][:] = 3e38
  weights.save(tmp_path / 'm', shape, params)
  weights.load(tmp_path / 'm')


def test_memory_of_parameters_returns_to_the_kernel_with_them():
  """And jax takes it without a copy."""
  before = memory._own_memory()
  array = weights._mapped_zeros((16, 1000, 1000), np.dtype('float32'))
  array[:] = 1.0
  loaded = jax.device_put(array)
  del array
  assert float(loaded.sum()) == 16e6
  assert 0.9 * 64e6 < memory._own_memory() - before < 1.9 * 64e6
  del loaded
  gc.collect()
  assert memory._own_memory() - before < 0.9 * 64e6
