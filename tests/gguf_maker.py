"""Makes GGUF files of a directory in HF layout, as llama.cpp's converter does.

gguf cannot quantise to K types, so their blocks are random.
"""

import math

import gguf
from gguf import quants
import jax
import numpy as np

from agent_r1_jax.models import decoder, hf_config, tensor_files, weights

_NAMES = {
  'model.embed_tokens': 'token_embd',
  'model.norm': 'output_norm',
  'lm_head': 'output',
  'input_layernorm': 'attn_norm',
  'post_attention_layernorm': 'ffn_norm',
  'self_attn.q_proj': 'attn_q',
  'self_attn.k_proj': 'attn_k',
  'self_attn.v_proj': 'attn_v',
  'self_attn.o_proj': 'attn_output',
  'self_attn.q_norm': 'attn_q_norm',
  'self_attn.k_norm': 'attn_k_norm',
  'mlp.gate_proj': 'ffn_gate',
  'mlp.up_proj': 'ffn_up',
  'mlp.down_proj': 'ffn_down',
}
# Bytes of a block of 256 numbers, and those of its scales, which are float16.
BLOCKS = {'Q4_K': (144, (0, 2)), 'Q6_K': (210, (208,))}


def _rename(name):
  stem, kind = name.rsplit('.', 1)
  if stem.startswith('model.layers.'):
    _, _, layer, stem = stem.split('.', 3)
    return f'blk.{layer}.{_NAMES[stem]}.{kind}'
  return f'{_NAMES[stem]}.{kind}'


def rope_factors(config):
  """What divides each frequency, by the branches of Llama 3's code."""
  scaling, factors = config.rope_scaling, []
  low, high = scaling['low_freq_factor'], scaling['high_freq_factor']
  context = scaling['original_max_position_embeddings']
  for i in range(0, config.head_dim, 2):
    wavelength = 2 * math.pi * config.rope_theta ** (i / config.head_dim)
    smooth = (context / wavelength - low) / (high - low)
    if wavelength < context / high:
      factors.append(1.0)
    elif wavelength > context / low:
      factors.append(scaling['factor'])
    else:
      factors.append(1 / ((1 - smooth) / scaling['factor'] + smooth))
  return np.array(factors, np.float32)


def make_metadata(config):
  facts = {
    'block_count': config.num_layers,
    'context_length': config.max_positions,
    'embedding_length': config.embed_dim,
    'feed_forward_length': config.mlp_dim,
    'attention.head_count': config.num_heads,
    'attention.head_count_kv': config.num_kv_heads,
    'attention.layer_norm_rms_epsilon': config.norm_eps,
    # The converter leaves it out for Gemma, of which all published models have 10,000.
    'rope.freq_base': config.rope_theta,
  }
  if config.family != 'qwen2':
    facts['attention.key_length'] = config.head_dim
    facts['attention.value_length'] = config.head_dim
  if config.family == 'llama':
    facts['vocab_size'] = config.vocab_size
    facts['rope.dimension_count'] = config.head_dim
  return {
    'general.type': 'model',
    'general.name': config.family,
    **{f'{config.family}.{key}': value for key, value in facts.items()},
    'tokenizer.ggml.tokens': [f'<{i}>' for i in range(config.vocab_size)],
    'tokenizer.ggml.token_type': [1] * config.vocab_size,
  }


def _tensors(directory, config, kind):
  """Yields (name, array, type) in the file, and the array before that in HF layout."""
  if config.rope_scaling:
    yield 'rope_freqs.weight', rope_factors(config), 'F32', None
  for name, tensor in tensor_files.find(directory).items():
    x = tensor_files.read(tensor).astype(np.float32)
    stored, rows = x, config.head_dim // 2
    if name.endswith('norm.weight') and config.family == 'gemma':
      stored = x + 1
    if name.endswith(('q_proj.weight', 'k_proj.weight')) and config.family == 'llama':
      heads = x.reshape(-1, 2, rows, x.shape[1])
      stored = heads.transpose(0, 2, 1, 3).reshape(x.shape)
    yield _rename(name), stored, kind if x.ndim > 1 else 'F32', x


def quantise(x, kind):
  """The bytes of the numbers; for K types, of random numbers in their place."""
  if kind not in BLOCKS:
    return quants.quantize(x, gguf.GGMLQuantizationType[kind])
  size, scales = BLOCKS[kind]
  rng = np.random.default_rng(x.size)
  blocks = rng.integers(0, 256, (x.size // 256, size), np.uint8)
  for start in scales:
    values = rng.uniform(0.001, 0.01, (len(blocks), 1)).astype(np.float16)
    blocks[:, start : start + 2] = values.view(np.uint8)
  return blocks.reshape(len(x), -1)


def convert(directory, file, kind='F32', metadata=None, tensors=None):
  """Writes a GGUF file; `metadata` and `tensors` change it, None leaves an entry out."""
  config = hf_config.read(directory)
  made = {n: (x, kind) for n, x, kind, _ in _tensors(directory, config, kind)}
  facts = make_metadata(config) | (metadata or {})
  file.parent.mkdir(exist_ok=True)
  writer = gguf.GGUFWriter(file, facts.pop('general.architecture', config.family))
  adders = {
    bool: writer.add_bool,
    int: writer.add_uint32,
    float: writer.add_float32,
    str: writer.add_string,
    list: writer.add_array,
  }
  for key, value in facts.items():
    if value is not None:
      adders[type(value)](key, value)
  for name, entry in (made | (tensors or {})).items():
    if entry is not None:
      x, kind = entry
      number = gguf.GGMLQuantizationType[kind]
      data = x if kind == 'I32' else quantise(x, kind)
      writer.add_tensor(name, data, raw_dtype=None if kind == 'I32' else number)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return file


def make_model(directory, width=256, family='llama', **fields):
  """A random model in HF layout whose rows can be quantised."""
  fields = {'vocab_size': 40, 'head_dim': 64} | fields
  config = decoder.DecoderConfig(
    family,
    embed_dim=width,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=width,
    **fields,
  )
  params = decoder.init(config, jax.random.key(0))
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  leaves = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves)]
  weights.save(directory, config, jax.tree.unflatten(tree, leaves))
  return directory
