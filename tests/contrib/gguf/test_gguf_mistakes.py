"""The metadata of GGUF files, and each mistake in a file once."""

import math
import pathlib
import shutil
import struct
import sys

import gguf
import gguf_maker
import jax
import numpy as np
import pytest

from agent_r1_jax.contrib.gguf import files
from agent_r1_jax.contrib.gguf import metadata as metadata_lib
from agent_r1_jax.models import decoder
from agent_r1_jax.models.files import weights

_GOLDEN = pathlib.Path(__file__).parents[2] / 'golden' / 'decoder'

# The metadata.


def _parse(config, factors=None, **facts):
  name = gguf_maker.architecture(config.family)
  metadata = gguf_maker.read_metadata(config)
  metadata |= {f'{name}.{key}': value for key, value in facts.items()}
  metadata = {key: value for key, value in metadata.items() if value is not None}
  return metadata_lib.parse(metadata, vocab_size=40, tied=True, rope_factors=factors)


def _llama3(head_dim=64, theta=500_000.0, **scaling):
  scaling = {
    'rope_type': 'llama3',
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
  } | scaling
  return decoder.DecoderConfig(
    'llama', 40, 256, 2, 4, 2, head_dim, 256, rope_theta=theta, rope_scaling=scaling
  )


@pytest.mark.parametrize('config', [_llama3(128), _llama3(64, factor=32.0)])
def test_the_scaling_of_llama_3_is_found(config):
  rope = _parse(config, gguf_maker.rope_factors(config))['rope_parameters']
  assert rope.pop('partial_rotary_factor') == 1
  assert rope == {'rope_theta': config.rope_theta, **config.rope_scaling}


def test_factors_of_1_scale_nothing():
  rope = _parse(_llama3(), np.ones(32, np.float32))['rope_parameters']
  assert rope['rope_type'] == 'default'


@pytest.mark.parametrize(
  'factors',
  [
    gguf_maker.rope_factors(_llama3(high_freq_factor=5.0)),
    np.full(32, 8, np.float32),
    np.linspace(1, 8, 32, dtype=np.float32),
    np.ones(31, np.float32),
    np.zeros(32, np.float32),
    np.full(32, np.nan, np.float32),
    np.ones(32, np.float16),
  ],
)
def test_other_factors_are_refused(refused, factors):
  with refused('rope_freqs.weight'):
    _parse(_llama3(), factors)


def test_what_the_converter_leaves_out_has_the_values_of_llama_cpp():
  absent = ('attention.key_length', 'attention.value_length', 'rope.freq_base')
  absent += ('attention.head_count_kv', 'rope.dimension_count', 'vocab_size')
  raw = _parse(_llama3(), **dict.fromkeys(absent))
  assert raw['head_dim'] == 64 and raw['num_key_value_heads'] == 4
  assert raw['rope_parameters']['rope_theta'] == 10_000
  for family, theta in {'gemma3_text': 10_000, 'olmo3': 100}.items():
    raw = _parse(gguf_maker.read_config(_GOLDEN / family), **{'rope.freq_base_swa': None})
    assert raw['rope_parameters']['sliding_attention']['rope_theta'] == theta


@pytest.mark.parametrize(
  ('family', 'facts', 'expected'),
  [
    ('gemma2', {'attention.sliding_window': None}, {'sliding_window': 4096}),
    ('gemma3_text', {'attention.sliding_window': None}, {'sliding_window_pattern': 1}),
    ('gemma3_text', {'attention.sliding_window_pattern': 2}, {'sliding_window': 5}),
    ('phi3', {'attention.sliding_window': 2047}, {'sliding_window': 2047}),
    (
      'olmo3',
      {'attention.sliding_window': 0, 'rope.freq_base_swa': None},
      {'model_type': 'olmo2'},
    ),
  ],
)
def test_windows_that_the_converter_writes_and_leaves_out(family, facts, expected):
  raw = _parse(gguf_maker.read_config(_GOLDEN / family), **facts)
  assert raw | expected == raw


@pytest.mark.parametrize(
  ('family', 'facts', 'message'),
  [
    ('qwen3_5_text', {'block_count': None}, 'block_count is 0'),
    ('qwen3_5_text', {'ssm.inner_size': 7}, 'ssm.inner_size is 7'),
    ('qwen3_5_text', {'nextn_predict_layers': 'two'}, "nextn_predict_layers is 'two'"),
    ('gemma4_text', {'attention.sliding_window_pattern': None}, 'pattern is missing'),
    ('gemma4_text', {'feed_forward_length': (8, 9, 8, 9)}, 'feed_forward_length'),
    ('gemma4_text', {'feed_forward_length': None}, 'feed_forward_length is None'),
    ('gemma4_text', {'attention.head_count_kv': (1, 2)}, 'head_count_kv has 2 of'),
    ('gemma4_text', {'attention.value_length': 4}, 'keys and values have different'),
    ('gemma4_text', {'altup.num_inputs': 4}, 'altup.num_inputs is 4'),
    ('gpt_oss', {'expert_feed_forward_length': None}, 'expert_feed_forward_length is'),
  ],
)
def test_layers_that_contradict_each_other_are_refused(family, facts, message):
  config = gguf_maker.read_config(_GOLDEN / family)
  factors = gguf_maker.rope_factors(config) if family == 'gemma4_text' else None
  with pytest.raises(ValueError, match=message):
    _parse(config, factors, **facts)


@pytest.mark.parametrize('factors', [None, np.linspace(1, 8, 6, dtype=np.float32)])
def test_other_rotations_of_gemma_4_are_refused(factors):
  with pytest.raises(ValueError, match='rope_freqs.weight is'):
    _parse(gguf_maker.read_config(_GOLDEN / 'gemma4_text'), factors)


@pytest.mark.parametrize('key', ['attn_factor', 'yarn_attn_factor'])
def test_the_factor_of_yarn_has_two_keys(key):
  raw = _parse(gguf_maker.read_config(_GOLDEN / 'olmo3'), **{f'rope.scaling.{key}': 1.25})
  assert raw['rope_parameters']['full_attention']['attention_factor'] == 1.25


@pytest.mark.parametrize(
  ('family', 'key', 'value'),
  [
    ('qwen3_moe', 'expert_used_count', None),
    ('qwen3_moe', 'expert_weights_scale', 2.5),
    ('phi3', 'rope.scaling.attn_factor', 1.19),
    ('gemma2', 'rope.freq_base_swa', 50.0),
    ('gemma3_text', 'attention.sliding_window_pattern', 'an array'),
    ('olmo3', 'block_count', 3),
  ],
)
def test_metadata_of_a_family_that_are_wrong_or_not_supported(
  refused, family, key, value
):
  with refused('sliding_window_pattern' if family == 'olmo3' else key):
    _parse(gguf_maker.read_config(_GOLDEN / family), **{key: value})


def test_numbers_are_the_decimals_that_were_rounded_to_32_bits():
  assert (
    _parse(_llama3(), **{'rope.freq_base': float(np.float32(1e-5))})['rope_parameters'][
      'rope_theta'
    ]
    == 1e-5
  )


# A mistake in a file, each once.


# Metadata, and what is named if not its key.
_WRONG = [
  ('general.architecture', 'bert'),
  ('general.type', 'adapter', 'holds a adapter'),
  *(('llama.block_count', value) for value in (None, 'two')),
  ('llama.block_count', 4_000_000_000, 'num_hidden_layers'),
  ('llama.block_count', 3, 'model.layers.2'),
  ('llama.block_count', 1, 'blk.1.attn_norm.weight'),
  *(('llama.attention.head_count', value) for value in ([4, 2], False)),
  ('llama.attention.value_length', 32, 'keys and values'),
  ('llama.attention.causal', False),
  ('llama.attention.sliding_window', 9),
  ('llama.rope.scaling.type', 'longrope', 'rope type'),
  ('llama.rope.scaling.factor', 2.0),
  ('llama.rope.dimension_count', 32, 'partial_rotary_factor'),
  ('llama.rope.freq_base', math.nan),
  ('llama.embedding_length', 64, 'embed_tokens.weight has shape [40, 32]'),
]


@pytest.mark.parametrize('row', range(len(_WRONG)))
def test_metadata_that_is_wrong_or_not_supported(refused, tmp_path, row):
  key, value, *others = _WRONG[row]
  file = tmp_path / 'model.gguf'
  gguf_maker.convert(
    gguf_maker.make_model(tmp_path / 'model', width=32), file, metadata={key: value}
  )
  with refused(*others or [key.partition('.')[2]]) as error:
    gguf_maker.load(file)
  assert str(tmp_path) in str(error.value)


def test_metadata_that_says_that_the_model_does_without(tmp_path):
  file, zero = tmp_path / 'model.gguf', {'llama.expert_count': 0}
  gguf_maker.convert(
    gguf_maker.make_model(tmp_path / 'model', width=32), file, metadata=zero
  )
  gguf_maker.load(file)


@pytest.mark.parametrize(
  ('tensor', 'array', 'kind', 'named'),
  [
    ('token_embd.weight', None, '', 'token_embd.weight'),
    ('output_norm.weight', None, '', 'model.norm.weight'),
    ('blk.0.attn_q.bias', np.zeros(32, np.float32), 'F32', 'blk.0.attn_q.bias'),
    ('blk.0.ffn_norm.weight', np.zeros(31, np.float32), 'F32', 'has shape [31]'),
    ('blk.0.ffn_norm.weight', np.zeros(32, np.int32), 'I32', 'ffn_norm.weight is I32'),
  ],
)
def test_tensors_that_are_wrong_or_missing(refused, tmp_path, tensor, array, kind, named):
  file, entry = tmp_path / 'model.gguf', None if array is None else (array, kind)
  gguf_maker.convert(
    gguf_maker.make_model(tmp_path / 'model', width=32), file, tensors={tensor: entry}
  )
  with refused(named) as error:
    gguf_maker.load(file)
  assert str(file) in str(error.value)


def test_numbers_that_are_not_finite(refused, tmp_path):
  file, x = tmp_path / 'model.gguf', np.full((256, 256), np.nan, np.float32)
  model = gguf_maker.make_model(tmp_path / 'model')
  gguf_maker.convert(model, file, 'Q8_0', tensors={'blk.1.attn_q.weight': (x, 'F32')})
  with refused('65536 of 131072'):
    gguf_maker.load(file)


def test_a_file_that_is_none_is_truncated_or_damaged(tmp_path):
  model = gguf_maker.make_model(tmp_path / 'model', width=32)
  file = gguf_maker.convert(
    model, tmp_path / 'model.gguf', tensors={'output.weight': None}
  )
  content = file.read_bytes()
  tied = gguf_maker.load(file)
  assert len(content) > 30_000

  def fails(changed, message):
    file.write_bytes(changed)
    with pytest.raises(ValueError, match=message) as error:
      gguf_maker.load(file)
    assert str(file) in str(error.value) and 'etch it again' in str(error.value)

  fails(b'version https://git-lfs.github.com/spec/v1', 'GGUF magic invalid')
  fails(b'', 'cannot read it')
  fails(content[:4] + b'\x09' + content[5:], 'version 9 which we cannot handle')
  for end in (5, 20, 100, 500, 2000, 10_000, len(content) - 64):
    fails(content[:end], 'cannot read it')
  file.write_bytes(content)
  jax.tree.map(np.testing.assert_array_equal, gguf_maker.load(file)[1], tied[1])


def test_a_file_for_big_endian_machines(refused, tmp_path):
  file = tmp_path / 'model.gguf'
  writer = gguf.GGUFWriter(file, 'llama', endianess=gguf.GGUFEndian.BIG)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  with refused('the numbers are'):
    gguf_maker.load(file)


def test_any_byte_of_the_header_may_be_wrong(tmp_path):
  """It is refused, or read: nothing else is raised, and no memory or time is lost."""
  model = gguf_maker.make_model(tmp_path / 'model', width=32)
  content = gguf_maker.convert(model, tmp_path / 'model.gguf').read_bytes()
  header = content.index(b'output_norm.weight')
  rng, refused = np.random.default_rng(0), 0
  file = tmp_path / 'changed.gguf'
  for place in rng.integers(0, header, 300):
    changed = bytearray(content)
    changed[place] = rng.integers(0, 256)
    file.write_bytes(changed)
    try:
      gguf_maker.read_config(file)
      gguf_maker.find(file)
    except ValueError as error:
      assert str(file) in str(error)
      refused += 1
  assert 50 < refused < 300


def test_several_files_parts_of_one_and_none(refused, tmp_path):
  model = gguf_maker.convert(
    gguf_maker.make_model(tmp_path / 'model', width=32), tmp_path / 'in' / 'a.gguf'
  )
  shutil.copy(model, model.with_name('b.gguf'))
  with refused('a.gguf'):
    gguf_maker.load(model.parent)
  assert gguf_maker.load(model)[0].embed_dim == 32
  with refused('c.gguf'):
    gguf_maker.load(model.with_name('c.gguf'))
  model.rename(model.with_name('a-00001-of-00002.gguf'))
  merge = r'--merge a-00001-of-00002.gguf a.gguf\) and give the merged file'
  for path in (model.parent, model.with_name('a-00002-of-00002.gguf')):
    with pytest.raises(ValueError, match=f'is one part of a split file.*{merge}'):
      gguf_maker.load(path)


def test_without_the_format(refused, tmp_path):
  model = gguf_maker.make_model(tmp_path / 'model', width=32)
  file = gguf_maker.convert(model, tmp_path / 'in' / 'model.gguf')
  for path in (file, file.parent, tmp_path / 'nowhere.gguf'):
    with refused('gguf.FORMAT') as error:
      weights.load(path)
    assert str(path) in str(error.value)


def test_without_the_package(refused, tmp_path, monkeypatch):
  file = gguf_maker.convert(
    gguf_maker.make_model(tmp_path / 'model', width=32), tmp_path / 'model.gguf'
  )
  monkeypatch.setitem(sys.modules, 'gguf', None)
  with refused('agent_r1_jax[gguf]'):
    gguf_maker.load(file)


@pytest.mark.parametrize('tensors, fields', [(10**6, 0), (0, 1 << 60), (1, 1)])
def test_counts_that_no_model_has_are_refused_at_once(refused, tmp_path, tensors, fields):
  """Of tensors, of fields, and of the texts of an array."""
  texts = struct.pack('<Q1sIIQ', 1, b'a', 9, 8, 1 << 40)
  head = b'GGUF' + struct.pack('<IQQ', 3, tensors, fields)
  (tmp_path / 'a.gguf').write_bytes(head + texts + bytes(1 << 16))
  with refused('it claims'):
    files.read_config(tmp_path / 'a.gguf')
