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
  'gpt_oss': 'gpt-oss',
  'qwen3_5_text': 'qwen35',
  'qwen3_5_moe_text': 'qwen35moe',
  'gemma4': 'gemma4',
  'gemma4_text': 'gemma4',
  'gemma4_unified_text': 'gemma4',
}
_PAIRED = ('llama', 'mistral', 'smollm3')
# Those whose config.json has a head_dim.
_WITH_HEAD_DIM = ('llama', 'mistral', 'gemma', 'gemma2', 'gemma3_text', 'qwen3')
_WITH_HEAD_DIM += ('qwen3_moe', 'gpt_oss', 'qwen3_5_text', 'qwen3_5_moe_text')
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
  'mlp.router': 'ffn_gate_inp',
  'self_attn.sinks': 'attn_sinks',
  'linear_attn.in_proj_qkv': 'attn_qkv',
  'linear_attn.in_proj_z': 'attn_gate',
  'linear_attn.in_proj_a': 'ssm_alpha',
  'linear_attn.in_proj_b': 'ssm_beta',
  'linear_attn.conv1d': 'ssm_conv1d',
  'linear_attn.norm': 'ssm_norm',
  'linear_attn.out_proj': 'ssm_out',
  'linear_attn.A_log': 'ssm_a',
  'linear_attn.dt_bias': 'ssm_dt',
  'model.embed_tokens_per_layer': 'per_layer_token_embd',
  'model.per_layer_model_projection': 'per_layer_model_proj',
  'model.per_layer_projection_norm': 'per_layer_proj_norm',
  'per_layer_input_gate': 'inp_gate',
  'per_layer_projection': 'proj',
  'post_per_layer_input_norm': 'post_norm',
  'layer_scalar': 'layer_output_scale',
  'pre_feedforward_layernorm_2': 'pre_ffw_norm_2',
  'post_feedforward_layernorm_1': 'post_ffw_norm_1',
  'post_feedforward_layernorm_2': 'post_ffw_norm_2',
  'router.proj': 'ffn_gate_inp',
  'experts.gate_up_proj': 'ffn_gate_up_exps',
  'experts.down_proj': 'ffn_down_exps',
}
# Of the families that have norms after attention and the feed-forward.
_NORMS_AFTER = {
  'post_attention_layernorm': 'post_attention_norm',
  'pre_feedforward_layernorm': 'ffn_norm',
  'post_feedforward_layernorm': 'post_ffw_norm',
}
# Of the experts of Gemma 4.
_SCALES = {
  'router.scale': 'ffn_gate_inp.scale',
  'router.per_expert_scale': 'ffn_down_exps.scale',
}
# Bytes of a block of 256 numbers, and those of its scales, which are float16.
BLOCKS = {'Q4_K': (144, (0, 2)), 'Q6_K': (210, (208,))}


def _rename(name, family):
  after = family in ('olmo2', 'olmo3', 'gemma2', 'gemma3_text') or 'gemma4' in family
  names = _NAMES | (_NORMS_AFTER if after else {})
  if family == 'gpt_oss' or '3_5' in family:
    names = names | {'post_attention_layernorm': 'post_attention_norm'}
  start = 'blk.{}.'.format(name.split('.')[2]) if name.startswith('model.layers.') else ''
  stem = name.split('.', 3)[3] if start else name
  ends = {'.weight': '.weight', '.bias': '.bias', 'dt_bias': '', '_bias': '.bias'}
  end = next((end for end in ends if stem.endswith(end)), '')
  kind = ends[end] if end else '.weight'
  if stem.endswith('A_log'):
    kind = ''
  elif end == 'dt_bias':
    end, kind = '', '.bias'
  if stem in ('router.scale', 'router.per_expert_scale'):
    return start + _SCALES[stem]
  return f'{start}{names[stem.removesuffix(end)]}{kind}'


def rope_factors(config):
  """What divides each frequency, by the branches of Llama 3's code; or of Gemma 4."""
  scaling, factors = config.rope_scaling, []
  if scaling['rope_type'] == 'proportional':
    turned = int(config.full_head_dim * scaling['partial_rotary_factor'] / 2)
    rest = config.full_head_dim // 2 - turned
    return np.array([1.0] * turned + [1e30] * rest, np.float32)
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
  if family == 'gpt_oss':
    facts['attention.sliding_window'] = config.window
    facts['feed_forward_length'] = config.expert_dim
  if '3_5' in family:
    facts |= _describe_states(config)
  if 'gemma4' in family:
    facts |= _describe_kinds(config)
  return {
    'general.architecture': name,
    'general.type': 'model',
    'general.name': family,
    **{f'{name}.{key}': value for key, value in facts.items() if value is not None},
    'tokenizer.ggml.tokens': [f'<{i}>' for i in range(config.vocab_size)],
    'tokenizer.ggml.token_type': [1] * config.vocab_size,
  }


def _describe_states(config):
  return {
    'rope.dimension_count': int(config.head_dim * config.rope_fraction),
    'rope.dimension_sections': [11, 11, 10, 0],
    'full_attention_interval': config.recurrent.index(False) + 1,
    'ssm.conv_kernel': config.conv_width,
    'ssm.state_size': config.linear_key_dim,
    'ssm.group_count': config.linear_key_heads,
    'ssm.time_step_rank': config.linear_value_heads,
    'ssm.inner_size': config.linear_value_heads * config.linear_value_dim,
  }


def _describe_kinds(config):
  first = config.num_layers - config.shared_layers
  heads = [config.num_kv_heads if x else config.full_kv_heads for x in config.sliding]
  wide = [config.mlp_dim * (1 + (i >= first)) for i in range(config.num_layers)]
  return {
    'attention.sliding_window': config.window,
    'attention.sliding_window_pattern': list(config.sliding),
    'attention.head_count_kv': heads if config.keys_are_values else config.num_kv_heads,
    'attention.key_length': config.full_head_dim,
    'attention.value_length': config.full_head_dim,
    'attention.key_length_swa': config.head_dim,
    'attention.value_length_swa': config.head_dim,
    'rope.dimension_count': config.full_head_dim,
    'rope.dimension_count_swa': config.head_dim,
    'rope.scaling.type': None,
    'attention.shared_kv_layers': config.shared_layers,
    'embedding_length_per_layer_input': config.input_dim,
    'feed_forward_length': wide if config.wide_mlp else config.mlp_dim,
  }


def list_values(config):
  """The names of the tensors of values, of layers that have their own."""
  own = [not (config.keys_are_values and not x) for x in config.sliding]
  return {f'blk.{i}.attn_v.weight' for i, has in enumerate(own) if has}


def read_metadata(config):
  """The metadata as they are read: numbers of 32 bits, and arrays of bools."""
  convert = {float: lambda x: float(np.float32(x)), list: tuple}
  return {k: convert.get(type(x), type(x))(x) for k, x in make_metadata(config).items()}


def architecture(family):
  return _ARCHITECTURES.get(family, family)


def _make_scaling(config):
  """That of Llama 3 is a tensor. The factor of YaRN's sines is the default here."""
  scaling = config.rope_scaling or {'rope_type': 'llama3'}
  if scaling['rope_type'] == 'proportional':
    return {}
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
  if (config.rope_scaling or {}).get('rope_type') in ('llama3', 'proportional'):
    yield 'rope_freqs.weight', rope_factors(config), 'F32'
  for name, x in _list_converted(directory, config):
    small = x.ndim == 1 or 'ffn_gate_inp' in name or 'conv1d' in name
    yield name, x, 'F32' if small else kind


def _list_converted(directory, config):
  """Yields (name, array) in the file."""
  family = config.family
  for name, x in _stack_experts(directory):
    shifts = family.startswith(('gemma', 'qwen3_5')) and 'gemma4' not in family
    if name.endswith('norm.weight') and shifts and 'linear_attn' not in name:
      x = x + 1
    if name.endswith(('q_proj.weight', 'k_proj.weight')) and family in _PAIRED:
      heads = x.reshape(-1, 2, config.head_dim // 2, x.shape[1])
      x = heads.transpose(0, 2, 1, 3).reshape(x.shape)
    if family == 'gpt_oss' and '.experts.' in name:
      yield from _split_gates(name, x)
      continue
    if '3_5' in family and name.endswith('experts.gate_up_proj'):
      for part, half in zip(('gate', 'up'), np.split(x, 2, axis=1), strict=True):
        yield _rename(f'{name[:-12]}{part}_proj.weight', family), half
      continue
    if 'linear_attn' in name:
      x = _convert_states(name, x, config)
    yield _rename(name, family), x


def _split_gates(name, x):
  """The experts of gpt-oss: gate and up alternate, and inputs are before outputs."""
  if not name.endswith('_bias'):
    x = x.swapaxes(1, 2)
  if 'gate_up' not in name:
    yield _rename(name, 'gpt_oss'), x
    return
  for i, part in enumerate(('gate', 'up')):
    yield _rename(name.replace('gate_up', part), 'gpt_oss'), x[:, i::2]


def _convert_states(name, x, config):
  """The value heads of all key heads alternate; decays are no logarithms."""
  end, per_key = name.rpartition('linear_attn.')[2], config.linear_key_heads
  if end == 'A_log':
    x = -np.exp(x)
  if end == 'conv1d.weight':
    x = x[:, 0]
  if end == 'norm.weight':
    return x
  axis, wide = int(end == 'out_proj.weight'), config.linear_value_dim
  wide = (
    1 if end in ('A_log', 'dt_bias', 'in_proj_a.weight', 'in_proj_b.weight') else wide
  )
  keys = end in ('in_proj_qkv.weight', 'conv1d.weight')
  first = 2 * per_key * config.linear_key_dim if keys else 0
  order = np.arange(config.linear_value_heads).reshape(per_key, -1).T.reshape(-1)
  rows = (order[:, None] * wide + np.arange(wide)).reshape(-1)
  return np.take(x, [*range(first), *(first + rows)], axis)


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
