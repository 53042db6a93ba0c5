"""config.json: what is read, what is written, what is refused."""

import copy
import itertools
import json
import math
import pathlib

import pytest

from agent_r1_jax.models import decoder, families
from agent_r1_jax.models.files import hf_config
from agent_r1_jax.models.pictures import vision_config

_GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'decoder'
_LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 32.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}
# As published, but for the fields that neither we nor transformers look at.
_PUBLISHED = json.loads((_GOLDEN.parent / 'published_configs.json').read_text())
_YARN = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32768}
_OLMO_YARN = {
  'rope_type': 'yarn',
  'factor': 8.0,
  'original_max_position_embeddings': 8192,
  'beta_fast': 32.0,
  'beta_slow': 1.0,
  'attention_factor': 1.2079441541679836,
  'truncate': True,
}
_GEMMA2_CAPS = {'query_scale': 256, 'attention_cap': 50.0, 'logit_cap': 30.0}


def _tower(out_dim):
  """That of Qwen2.5-VL."""
  return vision_config.VisionConfig(
    num_layers=32,
    embed_dim=1280,
    num_heads=16,
    mlp_dim=3420,
    out_dim=out_dim,
    full_attention=(7, 15, 23, 31),
    tokens_per_second=2,
  )


def _deep_tower(out_dim, large):
  """One of the two towers of Qwen3-VL."""
  layers, embed, mlp = (27, 1152, 4304) if large else (24, 1024, 4096)
  return vision_config.VisionConfig(
    num_layers=layers,
    embed_dim=embed,
    num_heads=16,
    mlp_dim=mlp,
    out_dim=out_dim,
    patch_size=16,
    window_size=128,
    full_attention=tuple(range(layers)),
    num_places=48**2,
    deepstack=(8, 16, 24) if large else (5, 11, 17),
    colours=vision_config.SIGNED,
    films=True,
  )


def _pooled_tower(out_dim, large=False):
  """One of the two towers of Gemma 4."""
  layers, embed, mlp, heads = (27, 1152, 4304, 16) if large else (16, 768, 3072, 12)
  return vision_config.VisionConfig(
    num_layers=layers,
    embed_dim=embed,
    num_heads=heads,
    mlp_dim=mlp,
    out_dim=out_dim,
    patch_size=16,
    temporal_patch_size=1,
    merge_size=3,
    window_size=48,
    full_attention=tuple(range(layers)),
    axis_places=10_240,
    clips=not large,
    standardizes=large,
    colours=vision_config.SIGNED,
    image_token_id=258_880,
    video_token_id=258_884,
    start_token_id=255_999,
    end_token_id=258_882,
  )


_POOLED_TOWERS = {'E2B': _pooled_tower(1536), 'E4B': _pooled_tower(2560)}
_POOLED_TOWERS |= {'26B-A4B': _pooled_tower(2816, True), '31B': _pooled_tower(5376, True)}
# The fields of DecoderConfig that not all models have.
_PARTICULARS = {
  'Llama-3.2-1B': {'rope_scaling': _LLAMA3},
  'SmolLM3-3B': {'nope': (False, False, False, True) * 9},
  'OLMo-3-7B': {
    'rope_scaling': _OLMO_YARN,
    'local_rope_theta': 500000.0,
    'window': 4096,
    'sliding': (True, True, True, False) * 8,
  },
  'Qwen3-30B-A3B': {
    'mlp_dim': 0,
    'num_experts': 128,
    'experts_per_token': 8,
    'expert_dim': 768,
    'normalize_experts': True,
  },
  'Qwen1.5-MoE-A2.7B': {
    'mlp_dim': 0,
    'num_experts': 60,
    'experts_per_token': 4,
    'expert_dim': 1408,
    'shared_dim': 5632,
  },
  'Qwen2.5-VL-3B': {'mrope_section': (16, 24, 24), 'vision': _tower(2048)},
  'Qwen2.5-VL-7B': {'mrope_section': (16, 24, 24), 'vision': _tower(3584)},
  **{
    f'Qwen3-VL-{size}': {
      'mrope_section': (24, 20, 20),
      'vision': _deep_tower(out_dim, size in ('8B', '32B')),
    }
    for size, out_dim in {'2B': 2048, '4B': 2560, '8B': 4096, '32B': 5120}.items()
  },
  'gemma-2-2b': {'window': 4096, 'sliding': (True, False) * 13, **_GEMMA2_CAPS},
  'gemma-3-1b': {
    'window': 512,
    'sliding': ((True,) * 5 + (False,)) * 4 + (True, True),
    'local_rope_theta': 10000.0,
    'query_scale': 256,
  },
}

_YARN = {
  'rope_type': 'yarn',
  'factor': 32.0,
  'original_max_position_embeddings': 4096,
  'beta_fast': 32.0,
  'beta_slow': 1.0,
  'attention_factor': 0.1 * math.log(32.0) + 1.0,
  'truncate': False,
}
for _name, _layers, _experts in (('gpt-oss-20b', 24, 32), ('gpt-oss-120b', 36, 128)):
  _PARTICULARS[_name] = {
    'mlp_dim': 0,
    'num_experts': _experts,
    'experts_per_token': 4,
    'expert_dim': 2880,
    'normalize_experts': True,
    'sliding': (True, False) * (_layers // 2),
    'window': 128,
    'rope_scaling': _YARN,
  }


for _name, _layers, _heads in (
  *(('Qwen3.5-0.8B', 24, 16), ('Qwen3.5-2B', 24, 16)),
  *(('Qwen3.5-4B', 32, 32), ('Qwen3.5-9B', 32, 32), ('Qwen3.5-27B', 64, 48)),
):
  _PARTICULARS[_name] = {
    'recurrent': (True, True, True, False) * (_layers // 4),
    'linear_key_heads': 16,
    'linear_value_heads': _heads,
    'linear_key_dim': 128,
    'linear_value_dim': 128,
    'conv_width': 4,
    'rope_fraction': 0.25,
  }
for _name, _layers, _heads, *_experts in (
  ('Qwen3.5-35B-A3B', 40, 32, 256, 8, 512),
  ('Qwen3.5-122B-A10B', 48, 64, 256, 8, 1024),
  ('Qwen3.5-397B-A17B', 60, 64, 512, 10, 1024),
):
  _sizes = ('num_experts', 'experts_per_token', 'expert_dim', 'shared_dim')
  _PARTICULARS[_name] = {
    **_PARTICULARS['Qwen3.5-9B'],
    'recurrent': (True, True, True, False) * (_layers // 4),
    'linear_value_heads': _heads,
    'mlp_dim': 0,
    'normalize_experts': True,
    **dict(zip(_sizes, [*_experts, _experts[-1]], strict=True)),
  }
for _name, _layers, _every, *_own in (
  ('E2B', 35, 5, {'full_kv_heads': 1, 'shared_layers': 20, 'wide_mlp': True}),
  ('E4B', 42, 6, {'full_kv_heads': 2, 'shared_layers': 18}),
  ('12B', 48, 6, {'full_kv_heads': 1}),
  ('26B-A4B', 30, 6, {'full_kv_heads': 2, 'num_experts': 128, 'expert_dim': 704}),
  ('31B', 60, 6, {'full_kv_heads': 4}),
):
  _small = _name.startswith('E')
  _PARTICULARS[f'gemma-4-{_name}'] = {
    'sliding': ((True,) * (_every - 1) + (False,)) * (_layers // _every),
    'window': 512 if _small else 1024,
    'full_head_dim': 512,
    'keys_are_values': not _small,
    'input_dim': 256 if _small else 0,
    'experts_per_token': 8 if 'A4B' in _name else 0,
    'normalize_experts': _name != '12B',
    'rope_theta': 1e6,
    'rope_scaling': {'rope_type': 'proportional', 'partial_rotary_factor': 0.25},
    'local_rope_theta': 1e4,
    'logit_cap': 30.0,
    'vision': _POOLED_TOWERS.get(_name),
    'sees_ahead': _name in ('26B-A4B', '31B'),
    **_own[0],
  }


def _read(directory, raw):
  (directory / 'config.json').write_text(json.dumps(raw))
  return hf_config.read(directory)


def _get_text(raw):
  """The fields of the language model, of which Qwen3.5 has an object."""
  text = raw | raw.get('text_config', {})
  if raw['model_type'] in families.FAMILIES:
    text['model_type'] = raw['model_type']
  return text | text.get('rope_parameters', {})


def test_every_family_has_a_published_config():
  """What a new family needs; docs/models.md says what else."""
  published = {_get_text(config)['model_type'] for config in _PUBLISHED.values()}
  published.add('gemma4_text')  # All that are published see.
  assert published == families.FAMILIES.keys(), 'see golden/published_configs.json'


@pytest.mark.parametrize('name', _PUBLISHED)
def test_published_config_is_read_and_written_back(tmp_path, name):
  raw = _get_text(_PUBLISHED[name])
  config = _read(tmp_path, _PUBLISHED[name])
  expected = decoder.DecoderConfig(
    raw['model_type'],
    raw['vocab_size'],
    raw['hidden_size'],
    raw['num_hidden_layers'],
    raw['num_attention_heads'],
    raw['num_key_value_heads'],
    raw.get('head_dim', 128),
    norm_eps=raw['rms_norm_eps'],
    tie_embeddings=raw.get('tie_word_embeddings', 'gemma' in name),
    max_positions=raw['max_position_embeddings'],
    **{'mlp_dim': raw.get('intermediate_size'), 'rope_theta': raw.get('rope_theta')}
    | _PARTICULARS.get(name, {}),
  )
  assert config == expected
  assert _read(tmp_path, hf_config.make(config, 'float32')) == config


def test_keys_of_transformers_5_are_read():
  config = hf_config.read(_GOLDEN / 'llama')
  assert (config.rope_theta, config.rope_scaling['factor']) == (100.0, 8.0)
  assert config.rope_scaling['original_max_position_embeddings'] == 32
  config = hf_config.read(_GOLDEN / 'qwen2')
  assert (config.rope_theta, config.rope_scaling) == (1000.0, None)
  assert (config.head_dim, config.norm_eps) == (6, 1e-3)


@pytest.mark.parametrize(
  ('name', 'changes', 'message'),
  [
    ('Qwen2.5-3B', {'model_type': 'gemma3'}, "model_type is 'gemma3'"),
    ('Qwen2.5-3B', {'hidden_act': 'gelu'}, "hidden_act is 'gelu'; only 'silu'"),
    ('Qwen2.5-3B', {'hidden_size': None}, 'hidden_size is None; a positive int'),
    ('Qwen2.5-3B', {'num_hidden_layers': '36'}, "num_hidden_layers is '36'"),
    ('Qwen2.5-3B', {'num_attention_heads': True}, 'num_attention_heads is True'),
    ('Qwen2.5-3B', {'num_key_value_heads': 3}, 'num_key_value_heads 3 does not divide'),
    ('Qwen2.5-3B', {'rope_theta': None}, 'rope_theta is None; a positive float'),
    ('Qwen2.5-3B', {'rope_scaling': {'type': 'yarn'}}, 'factor is None; a positive flo'),
    ('Phi-4', {'rope_scaling': {'type': 'longrope'}}, "type is 'longrope'; supported ar"),
    ('Phi-4', {'rope_scaling': {'type': 'yarn'}}, "rope type is 'yarn'; supported"),
    (
      'Qwen2.5-3B',
      {'use_sliding_window': True, 'max_window_layers': 21, 'sliding_window': 0},
      'sliding_window is 0; a positive int',
    ),
    (
      'Qwen2.5-3B',
      {'layer_types': ['sliding_attention'] * 36, 'use_sliding_window': False},
      'sliding_attention is in use, though use_sliding_window is false',
    ),
    ('Llama-3.2-1B', {'layer_types': ['sliding_attention'] * 16}, 'supported are full_'),
    ('Mistral-7B', {'layer_types': ['full_attention'] * 32}, 'layer_types is .* only No'),
    ('gemma-2-2b', {'layer_types': ['full_attention']}, 'a list of 26 types is needed'),
    ('SmolLM3-3B', {'no_rope_layers': [1, 0]}, 'no_rope_layers is .* a list of 36 numbe'),
    ('Qwen3-8B', {'layer_types': ['linear_attention'] * 36}, 'linear_att'),
    ('Qwen3-8B', {'attention_bias': True}, 'attention_bias is True; only False'),
    ('Qwen3-8B', {'quantization_config': {'quant_method': 'fp8'}}, 'quantization_con'),
    ('Llama-3.2-1B', {'mlp_bias': True}, 'mlp_bias is True; only False'),
    ('Llama-3.2-1B', {'partial_rotary_factor': 0.5}, 'partial_rotary_factor is 0.5'),
    ('Phi-4', {'partial_rotary_factor': 1.5}, 'partial_rotary_factor is 1.5; it is abo'),
    ('Llama-3.2-1B', {'rope_scaling': {'rope_type': 'llama3'}}, 'factor is None'),
    ('Llama-3.2-1B', {'rope_parameters': {'rope_type': 'dynamic'}}, "type is 'dynamic'"),
    # Fields of a wrong type.
    ('Qwen2.5-3B', {'model_type': []}, 'a field has a wrong type'),
    ('Qwen2.5-3B', {'layer_types': 5}, 'layer_types is 5'),
    (
      'Qwen2.5-3B',
      {'use_sliding_window': True, 'max_window_layers': 'all'},
      'a field has a wrong type',
    ),
  ],
)
def test_an_unsupported_config_is_named(tmp_path, name, changes, message):
  with pytest.raises(ValueError, match=message) as error:
    _read(tmp_path, {**_PUBLISHED[name], **changes})
  assert str(tmp_path / 'config.json') in str(error.value)


_LONG = {'rope_type': 'longrope', 'factor': 4.0}
_NESTED = {
  'full_attention': {'rope_type': 'default', 'rope_theta': 5e5},
  'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4},
}


@pytest.mark.parametrize('key', ['rope_parameters', 'rope_scaling'])
@pytest.mark.parametrize(
  ('rope', 'message'),
  [
    (
      _LONG,
      "rope type is 'longrope'; supported are 'default', 'linear', 'llama3', 'yarn'",
    ),
    ({'full_attention': _LONG}, "rope type is 'longrope'"),
    ({**_NESTED, 'full_attention': _LONG}, "rope type is 'longrope'"),
    ({**_NESTED, 'full_attention': None}, "an object for 'full_attention'"),
    ({'sliding_attention': _YARN}, "an object for 'full_attention'"),
    ({**_NESTED, **_YARN}, 'nothing beside kinds of layers'),
    ({'main': _YARN}, "main is {'rope_type': 'yarn'.*'default' does not read"),
    ({'rope_type': 'default', 'type': 'yarn'}, r"two types, \['default', 'yarn'\]"),
    ({'factor': 4.0}, "factor is 4.0, which rope type 'default' does not read"),
    ({**_LLAMA3, 'mscale': 0.7}, 'mscale is 0.7'),
    ({**_YARN, 'short_factor': [1.0]}, r'short_factor is \[1.0\]'),
    ({'rope_type': 'default', 'partial_rotary_factor': 0}, 'partial_rotary_factor'),
    ({'rope_type': ['yarn']}, r"rope type is \['yarn'\]"),
    ([4.0], r'is \[4.0\]; an object is needed'),
    ('yarn', "is 'yarn'; an object is needed"),
  ],
)
def test_unsupported_rotation_is_refused(tmp_path, key, rope, message):
  """Beside a top-level rope_theta, which alone would be a rotation."""
  raw = {**_PUBLISHED['Qwen2.5-3B'], key: rope}
  with pytest.raises(ValueError, match=message):
    _read(tmp_path, raw)


def test_two_rotations_that_differ_are_refused(tmp_path):
  raw = {**_PUBLISHED['Llama-3.2-1B'], 'rope_parameters': {'rope_theta': 500000.0}}
  with pytest.raises(ValueError, match='rope_scaling and rope_parameters differ'):
    _read(tmp_path, raw)
  raw['rope_parameters'] = {'rope_theta': 500000.0, **raw['rope_scaling']}
  assert _read(tmp_path, raw).rope_scaling == _LLAMA3


@pytest.mark.parametrize('key', ['rope_parameters', 'rope_scaling'])
@pytest.mark.parametrize('beside', [{}, {'rope_theta': 1e6}])
@pytest.mark.parametrize(
  'rope',
  [
    {'rope_type': 'default', 'rope_theta': 5e5},
    {'rope_theta': 5e5},
    {'rope_theta': 5e5, **_LLAMA3},
    {'type': 'llama3', 'rope_theta': 5e5, **_LLAMA3},
    {'full_attention': {'rope_theta': 5e5, **_LLAMA3}},
    {'full_attention': _LLAMA3},
    {'rope_type': 'linear', 'rope_theta': 5e5, 'factor': 8.0},
    _NESTED,
    {},
  ],
)
def test_rotations_are_those_that_transformers_reads(tmp_path, key, beside, rope):
  """By its own classes of configurations, nested and flat, θ inside and beside."""
  from transformers import Qwen3Config

  raw = {k: v for k, v in _PUBLISHED['Qwen3-8B'].items() if k != 'rope_theta'}
  raw = raw | beside | {key: copy.deepcopy(rope)}
  raw.pop('rope_scaling' if key == 'rope_parameters' else 'rope_parameters', None)
  if not beside and 'rope_theta' not in str(rope):
    # Where θ is nowhere, transformers takes 10000.
    with pytest.raises(ValueError, match='rope_theta is None'):
      _read(tmp_path, raw)
    return
  found = _read(tmp_path, raw)
  theirs = Qwen3Config.from_pretrained(tmp_path).rope_parameters
  theirs = theirs.get('full_attention', theirs)
  assert found.rope_theta == theirs['rope_theta']
  assert theirs['rope_type'] == (found.rope_scaling or {}).get('rope_type', 'default')
  for name, value in (found.rope_scaling or {}).items():
    assert theirs[name] == value


def test_the_numbers_of_yarn_that_a_file_leaves_out(tmp_path):
  """Those that transformers takes; the sines' factor is 0.1 ln(factor) + 1."""
  raw = _PUBLISHED['Qwen3-8B'] | {'rope_scaling': {'type': 'yarn', 'factor': 4.0}}
  scaling = _read(tmp_path, raw).rope_scaling
  assert scaling == {
    'rope_type': 'yarn',
    'factor': 4.0,
    'original_max_position_embeddings': 40960,
    'beta_fast': 32.0,
    'beta_slow': 1.0,
    'attention_factor': pytest.approx(1.138629436, abs=1e-9),
    'truncate': True,
  }
  raw['rope_scaling'] |= {'mscale': 0.5, 'mscale_all_dim': 2.0}
  factor = (0.05 * 1.386294361 + 1) / (0.2 * 1.386294361 + 1)
  found = _read(tmp_path, raw).rope_scaling['attention_factor']
  assert found == pytest.approx(factor, abs=1e-9)


def test_qwens_last_layers_slide_if_the_window_is_in_use(tmp_path):
  raw = _PUBLISHED['Qwen2.5-3B'] | {'use_sliding_window': True, 'max_window_layers': 21}
  config = _read(tmp_path, raw | {'sliding_window': 4096})
  assert config.sliding == (False,) * 21 + (True,) * 15
  assert config.window == 4096
  assert _read(tmp_path, hf_config.make(config, 'float32')) == config


@pytest.mark.parametrize('unused', [{'max_window_layers': 36}, {'sliding_window': None}])
def test_sliding_window_that_no_layer_uses_is_accepted(tmp_path, unused):
  raw = {**_PUBLISHED['Qwen2.5-3B'], 'use_sliding_window': True, **unused}
  assert _read(tmp_path, raw).num_layers == 36


@pytest.mark.parametrize(
  ('name', 'head_dim'),
  [('Qwen2.5-3B', 128), ('Qwen3-8B', 128), ('Llama-3.2-1B', 80), ('gemma-2b', 256)],
)
@pytest.mark.parametrize('absent', [{}, {'head_dim': None}])
def test_missing_head_dim_is_that_of_transformers(tmp_path, name, head_dim, absent):
  raw = {k: v for k, v in _PUBLISHED[name].items() if k != 'head_dim'} | absent
  if name != 'Qwen2.5-3B':
    raw |= {'hidden_size': 2560, 'num_attention_heads': 32}
  assert _read(tmp_path, raw).head_dim == head_dim


@pytest.mark.parametrize(
  ('key', 'value'),
  [
    *itertools.product(
      ('num_hidden_layers', 'vocab_size', 'head_dim'), (10**9, 10**400, float('inf'))
    ),
    *itertools.product(
      ('rms_norm_eps', 'rope_theta'), (10**400, float('inf'), float('nan'), 1e300)
    ),
  ],
)
def test_numbers_that_no_model_has_are_refused(tmp_path, key, value):
  raw = _PUBLISHED['Qwen3-8B'] | {key: value}
  with pytest.raises(ValueError, match=f'config.json: {key} is '):
    _read(tmp_path, raw)


def test_too_deep_json_is_refused(tmp_path):
  (tmp_path / 'config.json').write_text('{"a":' * 100_000 + '1' + '}' * 100_000)
  with pytest.raises(ValueError, match=r'config\.json: not JSON .*fetch it again'):
    hf_config.read(tmp_path)
