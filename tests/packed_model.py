"""A tiny gpt-oss whose files have experts of 4 bits, as it is published."""

import dataclasses
import json
import pathlib
import tempfile

import numpy as np
import safetensors.numpy
import tiny

from agent_r1_jax.models import decoder
from agent_r1_jax.models.files import weights


def shape(layers: int = 1) -> decoder.DecoderConfig:
  """The inputs of each of its products are whole groups of 32."""
  sizes = {'embed_dim': 32, 'expert_dim': 64, 'num_heads': 8}
  return dataclasses.replace(tiny.config('gpt_oss', layers), **sizes)


def load(layers: int = 1) -> decoder.Params:
  """Reads the model's parameters in 4 bits."""
  with tempfile.TemporaryDirectory() as folder:
    make(pathlib.Path(folder), layers)
    return weights.load(folder, dtype='float32', packed=True)[1]


def make(directory: pathlib.Path, layers: int = 1) -> dict[str, np.ndarray]:
  """Writes the model; returns the tensors of its file."""
  config = shape(layers)
  source = tiny.tokenizer_dir()
  weights.save(directory, config, tiny.params(config), tokenizer_from=source)
  tensors = safetensors.numpy.load_file(directory / 'model.safetensors')
  rng, packed = np.random.default_rng(0), {}
  for name in [name for name in tensors if name.endswith('_proj')]:
    if '.experts.' in name:
      experts, inputs, outputs = tensors.pop(name).shape
      groups = (experts, outputs, inputs // 32)
      packed[f'{name}_blocks'] = rng.integers(0, 256, (*groups, 16)).astype(np.uint8)
      packed[f'{name}_scales'] = rng.integers(118, 125, groups).astype(np.uint8)
  write(directory, tensors | packed)
  raw = json.loads((directory / 'config.json').read_text())
  raw['quantization_config'] = {'quant_method': 'mxfp4'}
  (directory / 'config.json').write_text(json.dumps(raw))
  return tensors | packed


def write(directory: pathlib.Path, tensors: dict[str, np.ndarray]):
  """Writes the tensors in place of the model's."""
  file = directory / 'model.safetensors'
  safetensors.numpy.save_file(tensors, file, metadata={'format': 'pt'})
