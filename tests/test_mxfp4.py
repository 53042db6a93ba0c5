"""Experts of 4 bits, as gpt-oss is published."""

import numpy as np
import packed_model
import pytest

from agent_r1_jax.models.files import weights


def _decode(byte, exponent):
  """The format's definition (OCP microscaling v1.0, section 5.3.3), bit by bit."""
  numbers = []
  for code in (byte & 15, byte >> 4):
    sign, e, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    size = 2.0 ** (e - 1) * (1 + mantissa / 2) if e else mantissa / 2
    numbers.append(sign * size * 2.0 ** (exponent - 127))
  return numbers


@pytest.fixture
def model(tmp_path):
  """A model of one layer with experts of 4 bits; its tensors, too."""
  return tmp_path, packed_model.make(tmp_path)


def test_numbers_of_4_bits_are_read_exactly(model):
  directory, tensors = model
  _, params = weights.load(directory, dtype='float32')
  moe = {name: x['kernel'][0] for name, x in params['layers']['moe'].items()}
  both = np.stack([moe['gate'], moe['up']], axis=-1)
  read = {'gate_up_proj': both.reshape(*both.shape[:2], -1), 'down_proj': moe['down']}
  for name, values in read.items():
    place = f'model.layers.0.mlp.experts.{name}'
    blocks, scales = tensors[f'{place}_blocks'], tensors[f'{place}_scales']
    for e, o, g in np.ndindex(scales.shape):
      bytes_ = blocks[e, o, g].tolist()
      expected = [x for byte in bytes_ for x in _decode(byte, int(scales[e, o, g]))]
      np.testing.assert_array_equal(values[e, 32 * g : 32 * g + 32, o], expected)


def test_what_is_read_is_exported_in_bfloat16(model, tmp_path):
  config, params = weights.load(model[0])
  assert params['layers']['moe']['up']['kernel'].dtype == 'bfloat16'
  weights.save(tmp_path / 'out', config, params, dtype='bfloat16')
  assert 'quantization' not in (tmp_path / 'out' / 'config.json').read_text()
  _, again = weights.load(tmp_path / 'out')
  for name in ('gate', 'up', 'down'):
    np.testing.assert_array_equal(
      again['layers']['moe'][name]['kernel'], params['layers']['moe'][name]['kernel']
    )


@pytest.mark.parametrize('missing', ['_blocks', '_scales'])
def test_half_of_a_pair_is_refused(model, missing):
  directory, tensors = model
  name = f'model.layers.0.mlp.experts.down_proj{missing}'
  packed_model.write(directory, {k: x for k, x in tensors.items() if k != name})
  with pytest.raises(ValueError, match='no tensor .*down_proj'):
    weights.load(directory)


def test_a_pair_of_other_shapes_is_refused(model):
  directory, tensors = model
  name = 'model.layers.0.mlp.experts.down_proj_scales'
  tensors[name] = tensors[name][:, :1]
  packed_model.write(directory, tensors)
  with pytest.raises(ValueError, match='no numbers of 4 bits'):
    weights.load(directory)
