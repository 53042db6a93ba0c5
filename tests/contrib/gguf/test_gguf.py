"""Models in GGUF files are those that were converted; gguf_maker.py converts them."""

import dataclasses
import json
import pathlib
import tracemalloc

from flax import traverse_util
import gguf
from gguf import quants
import gguf_maker
import jax
import jax.numpy as jnp
import numpy as np
import packed_model
import pytest
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields
from agent_r1_jax.agent import tokenizer
from agent_r1_jax.contrib.gguf import metadata as metadata_lib
from agent_r1_jax.models import decoder, families, four_bits
from agent_r1_jax.models.files import tensor_files, weights
from agent_r1_jax.train import fingerprint
from agent_r1_jax.train.plan import setup, sizes
from experiments import model_formats, train_tokenizer

_GOLDEN = pathlib.Path(__file__).parents[2] / 'golden' / 'decoder'
_PUBLISHED = json.loads((_GOLDEN.parent / 'published_configs.json').read_text())
# Directories of _GOLDEN, which have the names of families but for one.
_FAMILIES = sorted(name for name, x in families.FAMILIES.items() if not x.sees)
_FAMILIES += ['gemma4_experts']
# What the converter does not write, with what is read in its place. Of these, published
# models have another value in the window of Mistral alone.
_LOST = {
  'mistral': {'family': 'llama', 'sliding': (), 'window': 0},
  'smollm3': {'nope': ()},
  'phi3': {'rope_fraction': 4 / 6},  # 4 of 6 numbers turn, as with 3 / 4, rounded down.
  'gemma4_unified_text': {'family': 'gemma4_text', 'normalize_experts': True},
  'gemma': {'rope_theta': 10_000.0},
  'gemma2': {'rope_theta': 10_000.0, 'query_scale': 8},
  'gemma3_text': {'sliding': (True, True), 'query_scale': 8},
}


def _flat(params):
  flat = traverse_util.flatten_dict(params, sep='/')
  return {path: np.asarray(x) for path, x in flat.items()}


def _read(file):
  return {name: tensor_files.read(t) for name, t in gguf_maker.find(file).items()}


@pytest.mark.parametrize('family', _FAMILIES)
def test_a_file_gives_the_model_back(tmp_path, family):
  expected_config, expected = gguf_maker.load(_GOLDEN / family, dtype='float32')
  expected = _flat(expected)
  for kind, dtype in {'F16': 'float16', 'BF16': 'bfloat16', 'F32': 'float32'}.items():
    file = gguf_maker.convert(_GOLDEN / family, tmp_path / 'model.gguf', kind)
    config, params = gguf_maker.load(file)
    assert config == dataclasses.replace(expected_config, **_LOST.get(family, {}))
    actual = _flat(params)
    assert actual.keys() == expected.keys()
    for path, x in expected.items():
      wide = path.endswith(('scale', 'bias', 'sinks', 'log')) or 'conv' in path
      wide = wide or 'router' in path or 'shared_w' in path
      wide = wide and not path.startswith('layers/moe/') or 'router' in path
      x = x if wide else x.astype(jnp.dtype(dtype))
      assert (actual[path].dtype, actual[path].shape) == (x.dtype, x.shape)
      # 1 + x has fewer bits than x, and the logarithm of exp(x) is rounded twice.
      shifted = path.endswith('scale') and family.startswith(('gemma', 'qwen3_5'))
      rounded = shifted or path.endswith('/log')
      np.testing.assert_allclose(actual[path], x, rtol=0, atol=rounded and 4.8e-7)
  with np.load(_GOLDEN / family / 'logits.npz') as golden:
    tokens, logits = golden['tokens_0'], golden['logits_0']
  y = _compute_logits(params, expected_config, tokens)
  np.testing.assert_allclose(y, logits, rtol=0, atol=1e-5 * np.abs(logits).max())


def _compute_logits(params, config, tokens):
  tokens = jnp.asarray(tokens, jnp.int32)[None]
  positions = jnp.arange(tokens.size, dtype=jnp.int32)[None]

  def compute(params):
    x = decoder.hidden(params, config, tiny.rows(tokens, positions))
    return decoder.logits(params, config, x)[0]

  # Most of the test's time is the compiler's.
  quick = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
  return np.asarray(jax.jit(compute).lower(params).compile(quick)(params))


@pytest.mark.parametrize(
  ('name', 'fields'),
  [
    *((name, {}) for name in _PUBLISHED if 'VL' not in name),
    # Gemma 2 and 3 of 27B, whose queries have another scale.
    (
      'gemma-2-2b',
      {'num_hidden_layers': 46, 'hidden_size': 4608, 'num_attention_heads': 32}
      | {'head_dim': 128, 'query_pre_attn_scalar': 144},
    ),
    (
      'gemma-3-1b',
      {'num_hidden_layers': 62, 'hidden_size': 5376, 'num_attention_heads': 32}
      | {'head_dim': 128, 'query_pre_attn_scalar': 168}
      | {'rope_scaling': {'rope_type': 'linear', 'factor': 8.0}},
    ),
  ],
)
def test_the_config_of_a_published_model_comes_back(tmp_path, name, fields):
  file = tmp_path / 'config.json'
  file.write_text(json.dumps(_PUBLISHED[name] | fields))
  config = gguf_maker.read_config(file)
  kind = (config.rope_scaling or {}).get('rope_type')
  has_factors = kind in ('llama3', 'proportional')
  raw = metadata_lib.parse(
    gguf_maker.read_metadata(config),
    vocab_size=config.vocab_size,
    tied=config.tie_embeddings,
    rope_factors=gguf_maker.rope_factors(config) if has_factors else None,
    tensors=gguf_maker.list_values(config),
  )
  file.write_text(json.dumps(raw))
  alike = {'mistral': 'llama', 'gemma4_unified_text': 'gemma4_text'}
  alike |= {'gemma4': 'gemma4_text'}  # Its tower is in another file.
  lost = {'family': alike.get(config.family, config.family), 'vision': None}
  if 'gemma4' in config.family:
    lost |= {'normalize_experts': True, 'sees_ahead': False}
  assert gguf_maker.read_config(file) == dataclasses.replace(config, **lost)


def test_the_norms_of_a_gemma_in_bfloat16_are_exact(tmp_path):
  config, params = gguf_maker.load(_GOLDEN / 'gemma')
  weights.save(tmp_path / 'half', config, params, dtype='bfloat16')
  file = gguf_maker.convert(tmp_path / 'half', tmp_path / 'model.gguf', 'BF16')
  read, expected = _read(file), _read(tmp_path / 'half')
  assert read.keys() == expected.keys()
  for name, x in expected.items():
    np.testing.assert_array_equal(read[name].astype(jnp.bfloat16), x)


def test_older_files_leave_out_dimensions_of_size_1(tmp_path):
  expected = _read(_GOLDEN / 'qwen2_moe')
  gate = expected['model.layers.0.mlp.shared_expert_gate.weight'][0]
  file = gguf_maker.convert(
    _GOLDEN / 'qwen2_moe',
    tmp_path / 'model.gguf',
    tensors={'blk.0.ffn_gate_inp_shexp.weight': (gate, 'F32')},
  )
  jax.tree.map(np.testing.assert_array_equal, _read(file), expected)


_MIXTURE = {'num_experts': 3, 'experts_per_token': 2, 'expert_dim': 256}
_MIXTURE |= {'family': 'qwen2_moe', 'shared_dim': 256, 'mlp_dim': 0}


@pytest.mark.parametrize(
  ('kind', 'steps', 'fields'),
  [
    ('Q8_0', 127, {}),
    ('Q5_0', 16, _MIXTURE),
    ('Q4_0', 8, {'family': 'smollm3'}),
    ('Q4_1', None, {'family': 'phi3'}),
  ],
)
def test_quantised_tensors_are_near_the_model(tmp_path, kind, steps, fields):
  """As gguf dequantises them, in spite of the order of the rows of q and k."""
  model = gguf_maker.make_model(tmp_path / 'model', **fields)
  read = _read(gguf_maker.convert(model, tmp_path / 'model.gguf', kind))
  number = gguf.GGMLQuantizationType[kind]
  for name, x in _read(model).items():
    if x.ndim == 1 or name.endswith(('mlp.gate.weight', 'expert_gate.weight')):
      np.testing.assert_array_equal(read[name], x)
      continue
    expected = quants.dequantize(quants.quantize(x, number), number)
    np.testing.assert_array_equal(read[name], expected)
    blocks, errors = x.reshape(-1, 32), (read[name] - x).reshape(-1, 32)
    step = np.ptp(blocks, 1) / 15 if steps is None else np.abs(blocks).max(1) / steps
    assert 0 < np.abs(errors).max() and (np.abs(errors).max(1) < 1.02 * step).all()


@pytest.mark.parametrize('kind', gguf_maker.BLOCKS)
def test_k_types_are_as_gguf_dequantises_them(tmp_path, kind):
  model = gguf_maker.make_model(tmp_path / 'model')
  read = _read(gguf_maker.convert(model, tmp_path / 'model.gguf', kind))
  for name, x in _read(model).items():
    if x.ndim > 1:
      number = gguf.GGMLQuantizationType[kind]
      expected = quants.dequantize(gguf_maker.quantise(x, kind), number)
      if name.endswith(('q_proj.weight', 'k_proj.weight')):
        # Rows 0 1 2 3 ... of a head in the file are its rows 0 32 1 33 ...
        order = np.arange(64).reshape(32, 2).T.reshape(-1)
        heads = expected.reshape(-1, 64, x.shape[1])
        expected = heads[:, order].reshape(x.shape)
      np.testing.assert_array_equal(read[name], expected)


def test_experts_of_4_bits_may_keep_them(tmp_path):
  packed_model.make(tmp_path / 'packed')
  config, plain = weights.load(tmp_path / 'packed', dtype='float32')
  weights.save(tmp_path / 'plain', config, plain)
  moe = plain['layers']['moe']
  experts = {
    f'blk.0.ffn_{name}_exps.weight': (
      np.asarray(moe[name]['kernel'][0]).swapaxes(1, 2),
      'MXFP4',
    )
    for name in ('gate', 'up', 'down')
  }
  file = gguf_maker.convert(tmp_path / 'plain', tmp_path / 'model.gguf', tensors=experts)
  read = gguf_maker.load(file, dtype='float32')[1]
  jax.tree.map(np.testing.assert_array_equal, read, plain)
  kept = gguf_maker.load(file, packed=True)[1]['layers']['moe']
  for name in ('gate', 'up', 'down'):
    packed = four_bits.Packed(kept[name]['kernel'], kept[name][four_bits.SCALE])
    found = four_bits.unpack(packed, 'float32')
    np.testing.assert_array_equal(found, moe[name]['kernel'])


def test_layers_that_draft_tokens_are_left_out(tmp_path, caplog):
  model, file = _GOLDEN / 'qwen3_5_text', tmp_path / 'model.gguf'
  expected = gguf_maker.load(gguf_maker.convert(model, file))
  layers = expected[0].num_layers
  facts = {'qwen35.block_count': layers + 1, 'qwen35.nextn_predict_layers': 1}
  more = ('nextn.eh_proj', 'attn_norm')
  tensors = {
    f'blk.{layers}.{x}.weight': (np.ones((4, 4), np.float32), 'F32') for x in more
  }
  gguf_maker.convert(model, file, metadata=facts, tensors=tensors)
  config, params = gguf_maker.load(file)
  assert config == expected[0]
  jax.tree.map(np.testing.assert_array_equal, params, expected[1])
  assert '2 tensors mtp.' in caplog.text


def test_types_may_differ_between_layers(tmp_path):
  """As in Q4_K_M, where some layers have more bits."""
  model = gguf_maker.make_model(tmp_path / 'model')
  x = np.random.default_rng(0).standard_normal((256, 256), np.float32)
  file = tmp_path / 'model.gguf'
  gguf_maker.convert(model, file, 'Q4_K', tensors={'blk.1.ffn_down.weight': (x, 'Q8_0')})
  params = _flat(gguf_maker.load(file)[1])
  assert {x.dtype for x in params.values()} == {np.dtype('float32')}
  assert np.abs(params['layers/mlp/down/kernel'][1] - x.T).max() < 0.05


def test_tensors_are_read_one_at_a_time(tmp_path):
  model = gguf_maker.make_model(tmp_path / 'model')
  file = gguf_maker.convert(model, tmp_path / 'model.gguf', 'Q8_0')
  total = sum(x.nbytes for x in jax.tree.leaves(gguf_maker.load(file)[1]))
  tensor = 256 * 256 * 4
  tracemalloc.start()
  try:
    gguf_maker.load(file, place=lambda path, array: None)
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert peak < 4 * tensor < total / 3


def test_a_tied_model_has_no_head(tmp_path):
  model = gguf_maker.make_model(tmp_path / 'model', tie_embeddings=True)
  config, params = gguf_maker.load(gguf_maker.convert(model, tmp_path / 'model.gguf'))
  assert config.tie_embeddings and 'lm_head' not in params
  jax.tree.map(np.testing.assert_array_equal, params, gguf_maker.load(model)[1])


def test_a_run_finds_the_tokenizer_beside_the_file_and_exports_safetensors(tmp_path):
  model = gguf_maker.make_model(tmp_path / 'model', width=32, vocab_size=400)
  file = gguf_maker.convert(model, tmp_path / 'in' / 'model.gguf')
  train_tokenizer.train(['a text'], vocab_size=300, directory=file.parent)
  settings = config_lib.Model(path=str(file))
  settings.formats = gguf_maker.FORMATS
  config, params, chat = setup.load(settings, config_lib.Chat())
  assert chat.tokenizer.get_vocab() == tokenizer.load(file.parent).get_vocab()
  assert sizes.read_models(settings, None).policy == config
  weights.save(tmp_path / 'out', config, params, tokenizer_from=file)
  assert (tmp_path / 'out' / 'model.safetensors').is_file()
  assert tokenizer.load(tmp_path / 'out').get_vocab() == tokenizer.load(file).get_vocab()
  assert fingerprint.tokenizer_digest(file) == fingerprint.tokenizer_digest(
    tmp_path / 'out'
  )
  read_config, read = gguf_maker.load(tmp_path / 'out')
  assert read_config == gguf_maker.load(file)[0]
  jax.tree.map(np.testing.assert_array_equal, read, params)


def test_scripts_read_such_files_and_keep_no_trace_of_it_in_a_configuration():
  config = fields.replace(
    model_formats.add(config_lib.Config()), {'model.path': 'a.gguf'}
  )
  assert [*config.model.formats] == [*gguf_maker.FORMATS]
  assert 'formats' not in dataclasses.asdict(config)['model']


def test_the_digest_of_a_file_is_that_of_its_directory_without_other_files(tmp_path):
  for name in ('model.gguf', 'other.gguf', 'tokenizer.json'):
    (tmp_path / name).write_text(name)
  one, other = (
    fingerprint.model_digest(tmp_path / f'{x}.gguf') for x in ('model', 'other')
  )
  (tmp_path / 'other.gguf').unlink()
  assert one == fingerprint.model_digest(tmp_path) != other
  (tmp_path / 'tokenizer.json').write_text('another')
  assert one != fingerprint.model_digest(tmp_path / 'model.gguf')


def test_a_directory_with_safetensors_is_read_from_them(tmp_path):
  model = gguf_maker.make_model(tmp_path / 'model', width=32)
  (model / 'other.gguf').write_text('not read')
  assert gguf_maker.load(model)[0].embed_dim == 32


def test_a_fraction_of_a_head_turns_as_many_numbers_as_the_file_says():
  """Also where turned / width x width is below it, as for 30 of 44."""
  family, found = families.FAMILIES['phi3'], {}
  for width in range(2, 258, 2):
    for turned in range(2, width + 1, 2):
      facts = {'rope.dimension_count': turned}
      rope = metadata_lib._find_rotations(facts, family, width, None, {})
      found[width, turned] = int(width * rope['partial_rotary_factor'])
  assert [pair for pair, count in found.items() if count != pair[1]] == []
