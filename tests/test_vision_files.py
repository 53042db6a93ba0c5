"""Checkpoints and configurations of models that see."""

import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from agent_r1_jax.models.files import hf_config, weights

_GOLDEN = pathlib.Path(__file__).parent / 'golden'


_MODEL = _GOLDEN / 'decoder' / 'qwen2_5_vl'


@functools.cache
def _model():
  return weights.load(_MODEL, dtype='float32')


def test_names_and_config_of_other_versions_are_read(tmp_path):
  """model.language_model and model.visual; the published config and the nested one."""
  config, params = _model()
  tensors = safetensors.numpy.load_file(_MODEL / 'model.safetensors')
  other = {}
  for name, x in tensors.items():
    new = name.replace('model.', 'model.language_model.', 1)
    new = f'model.{name}' if name.startswith('visual.') else new
    other[name if name == 'lm_head.weight' else new] = x
  assert len(other) == len(tensors) and not other.keys() >= tensors.keys()
  safetensors.numpy.save_file(other, tmp_path / 'model.safetensors')
  shutil.copyfile(_MODEL / 'config.json', tmp_path / 'config.json')
  found_config, found = weights.load(tmp_path, dtype='float32')
  assert found_config == config
  jax.tree.map(np.testing.assert_array_equal, found, params)
  flat = hf_config.make(config, 'float32')
  assert flat['rope_scaling'] == {'type': 'mrope', 'mrope_section': [1, 2, 3]}
  (tmp_path / 'config.json').write_text(json.dumps(flat))
  assert hf_config.read(tmp_path) == config
  hash(config)


def test_an_export_of_qwen3_vl_has_the_names_of_transformers(tmp_path):
  source = _MODEL.parent / 'qwen3_vl'
  config, params = weights.load(source)
  weights.save(tmp_path, config, params)
  want, found = (
    safetensors.numpy.load_file(folder / 'model.safetensors')
    for folder in (source, tmp_path)
  )
  assert want.keys() == found.keys()
  for name, x in want.items():
    np.testing.assert_array_equal(x, found[name], err_msg=name)
  raw = json.loads((tmp_path / 'config.json').read_text())
  assert raw['text_config']['model_type'] == 'qwen3_vl_text'
  raw['text_config']['rope_scaling']['mrope_interleaved'] = False
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  with pytest.raises(ValueError, match='mrope_interleaved is False'):
    hf_config.read(tmp_path)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'hidden_act': 'silu'}, "is 'silu'; only 'gelu_pytorch_tanh' is supported"),
    ({'deepstack_visual_indexes': [2, 1]}, r'\(2, 1\) must rise, and be among the 4'),
    ({'deepstack_visual_indexes': [0, 1, 2, 3]}, '4 layers are to .* decoder has 3'),
    ({'num_position_embeddings': 8}, 'num_position_embeddings is 8, no square'),
  ],
)
def test_what_the_deep_tower_does_not_compute_is_refused(tmp_path, changes, message):
  raw = json.loads((_MODEL.parent / 'qwen3_vl' / 'config.json').read_text())
  raw['vision_config'] |= changes
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  with pytest.raises(ValueError, match=message):
    hf_config.read(tmp_path)


@pytest.mark.parametrize(
  ('part', 'changes', 'message'),
  [
    ('vision_config', {'hidden_act': 'gelu'}, "hidden_act is 'gelu'; only 'silu'"),
    ('vision_config', {'depth': None}, 'depth is None; a positive int'),
    ('vision_config', {'num_heads': 3}, 'over num_heads 3 is no multiple of 4'),
    ('vision_config', {'window_size': 4}, 'window_size 4 is less than a token of 8'),
    ('vision_config', {'fullatt_block_indexes': [9]}, r'\(9,\) are not all among the 4'),
    ('vision_config', {'out_hidden_size': 8}, 'is 8, yet hidden_size of the decoder is'),
    ('vision_config', {'in_channels': 1}, 'in_channels is 1; only 3'),
    ('text_config', {'use_sliding_window': True}, 'use_sliding_window is True; only'),
    ('text_config', {'rope_parameters': {'rope_theta': 9.0}}, 'mrope_section is None'),
    (None, {'vision_config': None}, 'vision_config is None; an object is needed'),
    (None, {'text_config': []}, r'text_config is \[\]; an object'),
  ],
)
def test_what_the_tower_does_not_compute_is_refused(tmp_path, part, changes, message):
  raw = json.loads((_MODEL / 'config.json').read_text())
  raw = raw | {part: raw[part] | changes} if part else raw | changes
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  with pytest.raises(ValueError, match=message):
    hf_config.read(tmp_path)
