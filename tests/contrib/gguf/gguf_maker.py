"""Makes GGUF files of a directory in HF layout, as llama.cpp's converter does.

gguf cannot quantise to K types, so their blocks are random.
"""

import functools
import math
import re

import gguf
from gguf import quants
import jax
import numpy as np

from agent_r1_jax.contrib import gguf as gguf_lib
from agent_r1_jax.models import decoder
from agent_r1_jax.models.files import hf_config, tensor_files, weights

FORMATS = (gguf_lib.FORMAT,)
load = functools.partial(weights.load, formats=FORMATS)
read_config = functools.partial(hf_config.read, formats=FORMATS)
find = functools.partial(tensor_files.find, formats=FORMATS)

# The architecture of a family, where it has another name.
_ARCHITECTURES = {
  'mistral': 'llama',
  'olmo3': 'olmo2',
  'gemma3_text': 'gemma3',
  'qwen2_moe': 'qwen2moe',
  'qwen3_moe': 'qwen3moe',
}
_PAIRED = ('llama', 'mistral', 'smollm3')
# Those whose config.json has a head_dim.
_WITH_HEAD_DIM = ('llama', 'mistral', 'gemma', 'gemma2', 'gemma3_text', 'qwen3')
_WITH_HEAD_DIM += ('qwen3_moe',)
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
  'self_attn.qkv_proj': 'attn_qkv',
  'mlp.gate_proj': 'ffn_gate',
  'mlp.up_proj': 'ffn_up',
  'mlp.gate_up_proj': 'ffn_up',
  'mlp.down_proj': 'ffn_down',
  'mlp.gate': 'ffn_gate_inp',
  'mlp.experts.gate_proj': 'ffn_gate_exps',
  'mlp.experts.up_proj': 'ffn_up_exps',
  'mlp.experts.down_proj': 'ffn_down_exps',
  'mlp.shared_expert.gate_proj': 'ffn_gate_shexp',
  'mlp.shared_expert.up_proj': 'ffn_up_shexp',
  'mlp.shared_expert.down_proj': 'ffn_down_shexp',
  'mlp.shared_expert_gate': 'ffn_gate_inp_shexp',
}
# Of the families that have norms after attention and the feed-forward.
_NORMS_AFTER = {
  'post_attention_layernorm': 'post_attention_norm',
  'pre_feedforward_layernorm': 'ffn_norm',
  'post_feedforward_layernorm': 'post_ffw_norm',
}
# Bytes of a block of 256 numbers, and those of its scales, which are float16.
BLOCKS = {'Q4_K': (144, (0, 2)), 'Q6_K': (210, (208,))}


def _rename(name, family):
  after = family in ('olmo2', 'olmo3', 'gemma2', 'gemma3_text')
  names = _NAMES | (_NORMS_AFTER if after else {})
  stem, kind = name.rsplit('.', 1)
  if stem.startswith('model.layers.'):
    _, _, layer, stem = stem.split('.', 3)
    return f'blk.{layer}.{names[stem]}.{kind}'
  return f'{names[stem]}.{kind}'


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
  family, name = config.family, architecture(config.family)
  facts = {
    'block_count': config.num_layers,
    'context_length': config.max_positions,
    'embedding_length': config.embed_dim,
    'feed_forward_length': config.mlp_dim or 40,
    'attention.head_count': config.num_heads,
    'attention.head_count_kv': config.num_kv_heads,
    'attention.layer_norm_rms_epsilon': config.norm_eps,
    # All published models of Gemma 1 and 2 have 10,000.
    'rope.freq_base': None if family in ('gemma', 'gemma2') else config.rope_theta,
    **_make_scaling(config),
    'attn_logit_softcapping': config.attention_cap,
    'final_logit_softcapping': config.logit_cap,
    'expert_count': config.num_experts or None,
    'expert_used_count': config.experts_per_token or None,
    'expert_feed_forward_length': config.expert_dim or None,
    'expert_shared_feed_forward_length': config.shared_dim or None,
    'rope.freq_base_swa': config.local_rope_theta,
  }
  if family in _WITH_HEAD_DIM:
    facts['attention.key_length'] = config.head_dim
    facts['attention.value_length'] = config.head_dim
  if family in _PAIRED:
    facts['vocab_size'] = config.vocab_size
    facts['rope.dimension_count'] = config.head_dim
  if family == 'phi3':
    width = int(config.rope_fraction * config.embed_dim)
    facts['rope.dimension_count'] = width // config.num_heads
    facts['rope.scaling.original_context_length'] = config.max_positions
  if family in ('phi3', 'olmo3', 'gemma2', 'gemma3_text'):
    facts['attention.sliding_window'] = config.window
  if family == 'olmo3':
    facts['attention.sliding_window_pattern'] = list(config.sliding)
  return {
    'general.architecture': name,
    'general.type': 'model',
    'general.name': family,
    **{f'{name}.{key}': value for key, value in facts.items() if value is not None},
    'tokenizer.ggml.tokens': [f'<{i}>' for i in range(config.vocab_size)],
    'tokenizer.ggml.token_type': [1] * config.vocab_size,
  }


def read_metadata(config):
  """The metadata as they are read: numbers of 32 bits, and arrays of bools."""
  convert = {float: lambda x: float(np.float32(x)), list: tuple}
  return {k: convert.get(type(x), type(x))(x) for k, x in make_metadata(config).items()}


def architecture(family):
  return _ARCHITECTURES.get(family, family)


def _make_scaling(config):
  """That of Llama 3 is a tensor. The factor of YaRN's sines is the default here."""
  scaling = config.rope_scaling or {'rope_type': 'llama3'}
  keys = {
    'rope_type': 'type',
    'factor': 'factor',
    'original_max_position_embeddings': 'original_context_length',
    'beta_fast': 'yarn_beta_fast',
    'beta_slow': 'yarn_beta_slow',
  }
  if scaling['rope_type'] == 'llama3':
    return {}
  return {f'rope.scaling.{y}': scaling[x] for x, y in keys.items() if x in scaling}


def _stack_experts(directory):
  """Yields the tensors in HF layout, those of a layer's experts as one."""
  experts = {}
  for name, tensor in tensor_files.find(directory).items():
    x = tensor_files.read(tensor).astype(np.float32)
    stacked, found = re.subn(r'\.experts\.\d+\.', '.experts.', name)
    if found:
      experts.setdefault(stacked, []).append(x)
    else:
      yield name, x
  for name, tensors in experts.items():
    yield name, np.stack(tensors)


def _tensors(directory, config, kind):
  """Yields (name, array, type) in the file."""
  if (config.rope_scaling or {}).get('rope_type') == 'llama3':
    yield 'rope_freqs.weight', rope_factors(config), 'F32'
  for name, x in _stack_experts(directory):
    if name.endswith('norm.weight') and config.family.startswith('gemma'):
      x = x + 1
    if name.endswith(('q_proj.weight', 'k_proj.weight')) and config.family in _PAIRED:
      heads = x.reshape(-1, 2, config.head_dim // 2, x.shape[1])
      x = heads.transpose(0, 2, 1, 3).reshape(x.shape)
    name = _rename(name, config.family)
    yield name, x, 'F32' if x.ndim == 1 or 'ffn_gate_inp' in name else kind


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
  return blocks.reshape(*x.shape[:-1], -1)


def convert(directory, file, kind='F32', metadata=None, tensors=None):
  """Writes a GGUF file; `metadata` and `tensors` change it, None leaves an entry out."""
  config = hf_config.read(directory)
  made = {name: (x, kind) for name, x, kind in _tensors(directory, config, kind)}
  facts = make_metadata(config) | (metadata or {})
  file.parent.mkdir(exist_ok=True)
  writer = gguf.GGUFWriter(file, facts.pop('general.architecture'))
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
  fields = {'vocab_size': 40, 'head_dim': 64, 'mlp_dim': width} | fields
  config = decoder.DecoderConfig(
    family, embed_dim=width, num_layers=2, num_heads=4, num_kv_heads=2, **fields
  )
  shapes = jax.eval_shape(functools.partial(decoder.init, config), jax.random.key(0))
  rng = np.random.default_rng(1)
  make = lambda x: rng.standard_normal(x.shape, np.float32)
  weights.save(directory, config, jax.tree.map(make, shapes))
  return directory
