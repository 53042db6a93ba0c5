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

from agent_r1_jax.host import runtime
from agent_r1_jax.models import decoder, families
from agent_r1_jax.models.files import hf_config, tensor_files, weights

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
_PARTICULARS = {
  'qwen2_moe': {**_MIXTURE, 'shared_dim': 14},
  'qwen3_moe': {**_MIXTURE, 'normalize_experts': True},
  'llama': {'rope_scaling': _LLAMA3},
  'qwen2_5_vl': {
    'vision': dataclasses.replace(tiny.VISION, out_dim=12),
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


def _config(family, tie_embeddings=False, **fields):
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


def _params(config, dtype='float32', value_head=False):
  """Random host arrays in the tree that init makes."""
  rng = np.random.default_rng(0)
  tree = jax.eval_shape(
    lambda key: (decoder.add_value_head if value_head else dict)(
      decoder.init(config, key)
    ),
    jax.random.key(0),
  )

  def make(x):
    return rng.standard_normal(x.shape, np.float32).astype(jnp.dtype(dtype))

  return jax.tree.map(make, tree)


def _tensors(directory):
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
  config = _config('llama')
  weights.save(directory, config, _params(config))
  tensors = safetensors.numpy.load_file(directory / 'model.safetensors')
  tensors |= {name.replace('__', '.'): x for name, x in changes.items()}
  tensors = {name: x for name, x in tensors.items() if x is not None}
  safetensors.numpy.save_file(tensors, directory / 'model.safetensors')
  return directory


def _edit(file, **fields):
  file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


# Import and export are each other's inverse.


@pytest.mark.parametrize('family', _FAMILIES)
def test_import_then_export_gives_the_tensors_of_transformers_back(tmp_path, family):
  config, params = weights.load(_GOLDEN / family)
  weights.save(tmp_path / 'model', config, params)
  assert _tensors(tmp_path / 'model') == _tensors(_GOLDEN / family)
  assert hf_config.read(tmp_path / 'model') == config


@pytest.mark.parametrize('family', _FAMILIES)
@pytest.mark.parametrize(
  ('tied', 'dtype', 'max_shard_bytes'),
  [(False, 'float32', 10**9), (True, 'bfloat16', 3000)],
)
def test_export_then_import_is_the_identity(
  tmp_path, family, tied, dtype, max_shard_bytes
):
  config = _config(family, tied)
  params = _params(config, dtype)
  first, second = tmp_path / 'first', tmp_path / 'second'
  weights.save(first, config, params, max_shard_bytes=max_shard_bytes)
  read_config, read = weights.load(first)
  assert read_config == config
  _assert_same(read, params)
  files = len(list(first.glob('*.safetensors')))
  assert files == 1 if max_shard_bytes == 10**9 else files > 3
  weights.save(second, read_config, read, max_shard_bytes=10**4)
  assert _tensors(first) == _tensors(second)


def test_a_critic_keeps_its_value_head(tmp_path):
  config = _config('qwen2', tie_embeddings=True)
  params = _params(config, value_head=True)
  weights.save(tmp_path, config, params)
  _assert_same(weights.load(tmp_path)[1], params)
  assert _tensors(tmp_path)['value_head.weight'][1] == (1, config.embed_dim)
  assert json.loads((tmp_path / 'config.json').read_text())['value_head'] is True


def test_dtype_converts_on_both_ways(tmp_path):
  config = _config('llama')
  params = _params(config)
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
  config = _config('qwen3', vocab_size=39, embed_dim=13)  # odd numbers of 16 bits
  params = _params(config, half)
  params['final_norm']['scale'] = params['final_norm']['scale'].astype(np.float32)
  params['layers']['mlp'] = jax.tree.map(
    lambda x: x.astype(np.float32), params['layers']['mlp']
  )
  weights.save(tmp_path / 'model', config, params)
  _assert_same(weights.load(tmp_path / 'model')[1], params)
  assert len(_tensors(tmp_path / 'model')) == 36


def test_place_gets_the_path_and_array_of_each_leaf(tmp_path):
  config = _config('qwen2')
  params = _params(config)
  weights.save(tmp_path / 'model', config, params)
  seen = {}

  def place(path, array):
    seen[path] = array
    return path

  _, paths = weights.load(tmp_path / 'model', place=place)
  assert paths['layers']['attn']['q']['bias'] == 'layers/attn/q/bias'
  assert len(seen) == len(jax.tree.leaves(params)) == len(jax.tree.leaves(paths))
  _assert_same(seen['layers/mlp/down/kernel'], params['layers']['mlp']['down']['kernel'])


def test_peak_memory_is_the_parameters_and_two_tensors(tmp_path):
  sizes = {'vocab_size': 512, 'embed_dim': 128, 'mlp_dim': 512, 'num_layers': 6}
  config = _config('llama', head_dim=16, **sizes)
  params = _params(config)
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
  config = _config(family, tie_embeddings=True, **fields)
  weights.save(tmp_path, config, _params(config, 'bfloat16'))
  whole = transformers.AutoConfig.from_pretrained(tmp_path)
  assert whole.model_type == family
  assert whole.tie_word_embeddings is True
  theirs = whole.text_config if config.vision else whole
  assert str(theirs.dtype).removeprefix('torch.') == 'bfloat16'
  # Qwen2.5-VL has no field for it in its text_config.
  head_dim = getattr(theirs, 'head_dim', 6)
  assert (head_dim, theirs.num_key_value_heads) == (6, 2)
  assert (theirs.rms_norm_eps, theirs.max_position_embeddings) == (1e-4, 512)
  assert theirs.eos_token_id is None  # and not Llama 2's
  rope = {'rope_theta': 777.0, 'rope_type': 'default'}
  rope |= _LLAMA3 if family == 'llama' else {}
  rope |= {'partial_rotary_factor': 0.75} if family == 'phi3' else {}
  if config.vision:
    rope |= {'type': 'mrope', 'mrope_section': [1, 1, 1]}
  rotations = theirs.rope_parameters
  assert rotations.get('full_attention', rotations) == rope
  if config.facts.local_rope:
    assert rotations['sliding_attention']['rope_theta'] == config.local_rope_theta
  if config.facts.mixes_types:
    kinds = [kind == 'sliding_attention' for kind in theirs.layer_types]
    assert kinds == list(config.sliding or (False,) * 3)
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


# Saving.


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda p: p['final_norm'].clear(), 'params: no final_norm/scale, which config'),
    (lambda p: p.update(extra={'x': np.ones(3)}), 'params: extra/x has no place'),
    (lambda p: p['lm_head'].update(kernel=np.ones((40, 12), 'f4')), r'is \(12, 40\)'),
    (lambda p: p['lm_head'].update(kernel=np.ones((12, 40))), 'dtype is float64'),
  ],
)
def test_wrong_params_are_named_and_nothing_is_written(tmp_path, change, message):
  config = _config('llama')
  params = _params(config)
  change(params)
  with pytest.raises(ValueError, match=message):
    weights.save(tmp_path / 'model', config, params)
  assert not list(tmp_path.iterdir())


def test_an_unknown_family_is_refused():
  with pytest.raises(ValueError, match="family is 'gpt2'; give one of qwen2, qwen3, "):
    _config('gpt2')


@pytest.fixture
def earlier(tmp_path):
  """A model that was saved: its config, its parameters and its tensors."""
  config = _config('qwen3')
  params = _params(config)
  weights.save(tmp_path / 'model', config, params)
  return config, params, _tensors(tmp_path / 'model')


def test_a_crash_while_writing_keeps_the_earlier_model(tmp_path, monkeypatch, earlier):
  (config, params, before), target = earlier, tmp_path / 'model'
  worse = jax.tree.map(np.zeros_like, params)
  write_file, calls = tensor_files._write_file, []

  def fails_at_the_third(*args):
    calls.append(args)
    if len(calls) == 3:
      raise OSError('the disk went away')
    write_file(*args)

  with monkeypatch.context() as patch:
    patch.setattr(tensor_files, '_write_file', fails_at_the_third)
    with pytest.raises(OSError, match='the disk went away'):
      weights.save(target, config, worse, max_shard_bytes=2000)
  assert len(calls) == 3
  assert [path.name for path in tmp_path.iterdir()] == ['model']
  assert _tensors(target) == before
  weights.save(target, config, worse, max_shard_bytes=2000)
  assert not any(np.any(x) for x in jax.tree.leaves(weights.load(target)[1]))
  assert not (target / 'model.safetensors').exists()  # the earlier one's
  assert [path.name for path in tmp_path.iterdir()] == ['model']


def test_the_earlier_model_is_kept_until_the_new_one_has_its_name(
  tmp_path, monkeypatch, earlier
):
  config, params, before = earlier
  rename = pathlib.Path.rename

  def fails_at_the_second(path, target):
    if path.name == '.model.partial':
      assert _tensors(tmp_path / '.model.previous') == before
      raise OSError('no more renames')
    return rename(path, target)

  monkeypatch.setattr(pathlib.Path, 'rename', fails_at_the_second)
  with pytest.raises(OSError, match='no more renames'):
    weights.save(tmp_path / 'model', config, jax.tree.map(np.zeros_like, params))
  assert [path.name for path in tmp_path.iterdir()] == ['model']
  assert _tensors(tmp_path / 'model') == before


def test_a_model_that_a_killed_save_put_aside_comes_back(tmp_path, monkeypatch, earlier):
  config, params, before = earlier
  # Killed between the two renames, in the middle of its clean-up.
  (tmp_path / 'model').rename(tmp_path / '.model.previous')
  (tmp_path / '.model.partial').mkdir()
  free = shutil.disk_usage(tmp_path)._replace(free=0)
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: free)
  with pytest.raises(OSError, match=r'the model needs [\d,]+ bytes, 0 are free') as error:
    weights.save(tmp_path / 'model', config, params)
  assert error.value.filename == str(tmp_path / 'model')
  assert [path.name for path in tmp_path.iterdir()] == ['model']
  assert _tensors(tmp_path / 'model') == before


def test_a_directory_with_other_files_is_not_replaced(tmp_path):
  config = _config('llama')
  (tmp_path / 'notes.txt').write_text('mine')
  with pytest.raises(ValueError, match='holds notes.txt, which is no part of a model'):
    weights.save(tmp_path, config, _params(config))
  with pytest.raises(ValueError, match='notes.txt: is a file; give a directory'):
    weights.save(tmp_path / 'notes.txt', config, _params(config))
  assert (tmp_path / 'notes.txt').read_text() == 'mine'


def _tokenizer(directory, size=40):
  directory.mkdir()
  vocab = {f't{i}': i for i in range(3, size)}
  special = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
  added = [{'id': i, 'content': text} for i, text in enumerate(special)]
  vocab |= {text: i for i, text in enumerate(special)}
  files = {
    'tokenizer.json': {'added_tokens': added, 'model': {'vocab': vocab}},
    'tokenizer_config.json': {
      'eos_token': '<|im_end|>',
      'pad_token': {'content': '<|endoftext|>'},
    },
    'generation_config.json': {'temperature': 0.7},
  }
  for name, content in files.items():
    (directory / name).write_text(json.dumps(content))
  (directory / 'README.md').write_text('no part of a tokenizer')
  return directory


def test_tokenizer_files_are_copied_and_name_the_special_ids(tmp_path):
  config = _config('llama')
  params = _params(config)
  source, target = _tokenizer(tmp_path / 'source'), tmp_path / 'model'
  weights.save(target, config, params, tokenizer_from=source)
  copied = ('tokenizer.json', 'tokenizer_config.json', 'generation_config.json')
  for name in copied:
    assert (target / name).read_bytes() == (source / name).read_bytes()
  assert {path.name for path in target.iterdir()} == {
    *copied,
    'config.json',
    'model.safetensors',
  }
  raw = json.loads((target / 'config.json').read_text())
  assert (raw['eos_token_id'], raw['pad_token_id']) == (2, 0)
  # A model's own config.json knows better than its tokenizer.
  _edit(target / 'config.json', eos_token_id=[2, 0])
  weights.save(target, config, params)
  assert (target / 'tokenizer.json').read_bytes() == (
    source / 'tokenizer.json'
  ).read_bytes()
  assert json.loads((target / 'config.json').read_text())['eos_token_id'] == [2, 0]


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path):
  config = _config('llama')
  with pytest.raises(ValueError, match=r'tokenizer_from: .* has no tokenizer.json'):
    weights.save(tmp_path / 'model', config, _params(config), tokenizer_from=tmp_path)
  source = _tokenizer(tmp_path / 'source', size=41)
  with pytest.raises(ValueError, match='has ids up to 40, yet config.vocab_size is 40'):
    weights.save(tmp_path / 'model', config, _params(config), tokenizer_from=source)
  assert not (tmp_path / 'model').exists()


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
  before = runtime._own_memory()
  array = weights._mapped_zeros((16, 1000, 1000), np.dtype('float32'))
  array[:] = 1.0
  loaded = jax.device_put(array)
  del array
  assert float(loaded.sum()) == 16e6
  assert 0.9 * 64e6 < runtime._own_memory() - before < 1.9 * 64e6
  del loaded
  gc.collect()
  assert runtime._own_memory() - before < 0.9 * 64e6
