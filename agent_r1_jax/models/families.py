"""The facts of each model family, in one table.

To add a family, add a row to FAMILIES and a directory to tests/golden/decoder, which
tests/golden/make_decoder_golden.py writes. models/files/hf_config.py reads its
config.json, and rejects what no family has. Layers that compute something new depend on a
field of the row, which models/block.py mostly reads as `c.facts`. Checkpoints, sharding,
LoRA and the tests of all families follow the table.
"""

from collections.abc import Callable
from typing import Any

from agent_r1_jax.models import parameters as p
from agent_r1_jax.models.family import Family


def _slides_late(raw: dict[str, Any], layer: int) -> bool:
  """Qwen's rule: layers from max_window_layers on slide, if the window is in use."""
  used = raw.get('use_sliding_window', False) and raw.get('sliding_window') is not None
  return used and layer >= raw.get('max_window_layers', 28)


def _slides_everywhere(raw: dict[str, Any], _: int) -> bool:
  return raw.get('sliding_window') is not None


def _slides_but_every(n: int) -> Callable[[dict[str, Any], int], bool]:
  """Makes the rule that all layers slide except every n-th; config.json may set n."""
  return lambda raw, layer: (layer + 1) % raw.get('sliding_window_pattern', n) != 0


_FULL = 'full_attention'
_GEMMA4_ROPE = {
  _FULL: {
    'rope_type': 'proportional',
    'rope_theta': 1e6,
    'partial_rotary_factor': 0.25,
  },
  'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4},
}


def _complete_gemma4(raw: dict[str, Any]) -> dict[str, Any]:
  """Adds the sizes of full-attention layers, and drops sizes of absent parts."""
  kinds, vocab = raw.get('layer_types'), raw.get('vocab_size')
  if isinstance(kinds, list) and kinds:  # As transformers does.
    raw = raw | {'layer_types': [*kinds[:-1], _FULL]}
  if raw.get('vocab_size_per_layer_input', vocab) != vocab:
    raise ValueError(
      'vocab_size_per_layer_input is not vocab_size; no such model is read'
    )
  heads = raw.get('num_global_key_value_heads') if raw.get('attention_k_eq_v') else None
  full = {'num_key_value_heads': heads or raw.get('num_key_value_heads')}
  full |= {'head_dim': raw['global_head_dim']}
  # transformers 5.17 writes these two fields per layer.
  parts = raw.get('per_layer_config') or {}
  if parts:
    found, *others = parts.values()
    if any(x != found for x in others) or not found.keys() <= full.keys():
      raise ValueError(f'per_layer_config is {parts!r:.80}; layers of two kinds are read')
    full |= found
  absent = [] if raw.get('num_kv_shared_layers') else ['num_kv_shared_layers']
  if not raw.get('enable_moe_block'):
    absent += ['num_experts', 'moe_intermediate_size', 'top_k_experts']
  return (
    raw
    | dict.fromkeys(absent)
    | {
      'global_head_dim': full['head_dim'],
      'num_global_key_value_heads': full['num_key_value_heads'],
    }
  )


_SILU = {'hidden_act': ('silu',), 'quantization_config': (None,)}
_NO_BIAS = {**_SILU, 'attention_bias': (False,)}
_NO_BIASES = {**_NO_BIAS, 'mlp_bias': (False,)}
_CAUSAL = {'use_bidirectional_attention': (None, False)}
# The first files of Gemma say 'gelu', but mean the tanh approximation.
_GELU = {**_NO_BIAS, 'hidden_act': ('gelu_pytorch_tanh', 'gelu'), **_CAUSAL}
_NO_WINDOW = {'use_sliding_window': False}
# Every layer has experts.
_ALL_SPARSE = {
  'decoder_sparse_step': (1,),
  'mlp_only_layers': ([], None),
  'use_sliding_window': (False,),
}
_PER_TOKEN = {'experts_per_token': ('num_experts_per_tok', int)}
_WIDE_HEADS = {'head_dim': 256, 'tie_word_embeddings': True}
_CAPS = {
  'query_scale': ('query_pre_attn_scalar', int),
  'attention_cap': ('attn_logit_softcapping', float),
  'logit_cap': ('final_logit_softcapping', float),
}
_QWEN2 = Family(
  'Qwen2ForCausalLM',
  (*p.LLAMA, *p.QKV_BIAS),
  _SILU,
  _NO_WINDOW,
  is_sliding=_slides_late,
  mixes_types=True,
)
_GEMMA = Family(
  'GemmaForCausalLM',
  p.LLAMA,
  _GELU,
  defaults=_WIDE_HEADS,
  activation='gelu_pytorch_tanh',
  norm_offset=1.0,
  scaled_embeddings=True,
)
FAMILIES = {
  'qwen2': _QWEN2,
  'qwen3': _QWEN2._replace(
    architecture='Qwen3ForCausalLM',
    parameters=(*p.LLAMA, *p.QK_NORM),
    fixed=_NO_BIAS,
    defaults={'head_dim': 128},
  ),
  'qwen2_moe': _QWEN2._replace(
    architecture='Qwen2MoeForCausalLM',
    parameters=(*p.MIXTURE, *p.QKV_BIAS, *p.EXPERTS, *p.SHARED_EXPERT),
    fixed=_SILU | _ALL_SPARSE | {'qkv_bias': (True,)},
    numbers=_PER_TOKEN,
    is_sliding=None,
    mixes_types=False,
  ),
  'qwen3_moe': _QWEN2._replace(
    architecture='Qwen3MoeForCausalLM',
    parameters=(*p.MIXTURE, *p.QK_NORM, *p.EXPERTS),
    fixed=_NO_BIAS | _ALL_SPARSE,
    defaults={'head_dim': 128},
    numbers=_PER_TOKEN,
    is_sliding=None,
    mixes_types=False,
  ),
  'llama': Family('LlamaForCausalLM', p.LLAMA, _NO_BIASES),
  'mistral': Family(
    'MistralForCausalLM',
    p.LLAMA,
    {**_SILU, 'layer_types': (None,)},
    is_sliding=_slides_everywhere,
  ),
  'smollm3': Family(
    'SmolLM3ForCausalLM',
    p.LLAMA,
    _NO_BIASES,
    _NO_WINDOW,
    defaults={'no_rope_layer_interval': 4, 'tie_word_embeddings': True},
    is_sliding=lambda raw, layer: False,
    mixes_types=True,
    skips_rope=True,
  ),
  'phi3': Family(
    'Phi3ForCausalLM',
    p.LLAMA,
    {**_NO_BIAS, 'layer_types': (None,)},
    is_sliding=_slides_everywhere,
    partial_rope=True,
    scalings=('default',),
    fused=p.FUSED,
  ),
  'olmo2': Family('Olmo2ForCausalLM', p.OLMO, _NO_BIAS),
  'olmo3': Family(
    'Olmo3ForCausalLM',
    p.OLMO,
    _NO_BIAS,
    is_sliding=_slides_but_every(4),
    mixes_types=True,
    local_rope=True,
  ),
  'gemma': _GEMMA,
  'gemma2': _GEMMA._replace(
    architecture='Gemma2ForCausalLM',
    parameters=p.GEMMA2,
    fixed={**_GELU, 'hidden_activation': ('gelu_pytorch_tanh',)},
    defaults=_WIDE_HEADS
    | {'sliding_window': 4096, 'query_pre_attn_scalar': 256}
    | {'attn_logit_softcapping': 50.0, 'final_logit_softcapping': 30.0},
    numbers=_CAPS,
    is_sliding=_slides_but_every(2),
    mixes_types=True,
  ),
  'gemma3_text': _GEMMA._replace(
    architecture='Gemma3ForCausalLM',
    parameters=(*p.GEMMA2, *p.QK_NORM),
    fixed={**_GELU, 'hidden_activation': ('gelu_pytorch_tanh',)},
    defaults=_WIDE_HEADS
    | {'sliding_window': 4096, 'query_pre_attn_scalar': 256, 'rope_theta': 1e6}
    | {'rope_local_base_freq': 1e4},
    numbers=_CAPS,
    is_sliding=_slides_but_every(6),
    mixes_types=True,
    local_rope=True,
    local_theta='rope_local_base_freq',
  ),
}
FAMILIES['qwen2_5_vl'] = _QWEN2._replace(
  architecture='Qwen2_5_VLForConditionalGeneration',
  parameters=(*p.LLAMA, *p.QKV_BIAS, *p.VISION),
  fixed=_SILU | {'use_sliding_window': (False, None)},
  is_sliding=None,
  mixes_types=False,
  sees=True,
  turns_by_axes=True,
  renamed={'model.language_model.': 'model.', 'model.visual.': 'visual.'},
)
FAMILIES['qwen3_vl'] = FAMILIES['qwen2_5_vl']._replace(
  architecture='Qwen3VLForConditionalGeneration',
  parameters=(*p.LLAMA, *p.QK_NORM, *p.DEEP_VISION),
  fixed=_NO_BIAS,
  written={},
  defaults={'head_dim': 128, 'rope_theta': 5e5},
  alternates_axes=True,
  writes_renamed=True,
  text_type='qwen3_vl_text',
)
FAMILIES['gpt_oss'] = Family(
  'GptOssForCausalLM',
  (*p.MIXTURE, *p.QKV_BIAS, *p.O_BIAS, *p.SINKS, *p.EXPERTS_WITH_BIAS),
  {'hidden_act': ('silu',), 'attention_bias': (True,)}
  | {'swiglu_alpha': (1.702,), 'swiglu_limit': (7.0,)},
  size_names={'E': 'num_local_experts', 'I': 'intermediate_size'},
  defaults={'norm_topk_prob': True},
  activation='clamped_swiglu',
  numbers=_PER_TOKEN,
  is_sliding=_slides_but_every(2),
  mixes_types=True,
  scalings=('yarn',),  # transformers' default for this family.
  interleaved=p.INTERLEAVED,
  packs_experts=True,
)
_QWEN35 = Family(
  'Qwen3_5ForCausalLM',
  (*p.EMBEDDING, *p.NORMS, *p.GATED_ATTENTION, *p.QK_NORM, *p.DELTA_NET, *p.MLP, *p.HEAD),
  _NO_BIAS | {'attn_output_gate': (True,)},
  defaults={'head_dim': 256, 'partial_rotary_factor': 0.25, 'linear_conv_kernel_dim': 4}
  | {'linear_key_head_dim': 128, 'linear_value_head_dim': 128}
  | {'linear_num_key_heads': 16, 'linear_num_value_heads': 32},
  norm_offset=1.0,
  partial_rope=True,
  is_recurrent=lambda raw, layer: (
    (layer + 1) % raw.get('full_attention_interval', 4) != 0
  ),
  gates=True,
  fused=p.FUSED_DELTA_NET,
  part_of='qwen3_5',
  ignored={
    'mtp.': 'layers that draft further tokens',
    'model.visual.': 'the vision tower: the policy reads text',
  },
)
FAMILIES['qwen3_5_text'] = _QWEN35
FAMILIES['qwen3_5_moe_text'] = _QWEN35._replace(
  architecture='Qwen3_5MoeForCausalLM',
  parameters=tuple(x for x in _QWEN35.parameters if x not in p.MLP)
  + (*p.EXPERTS, *p.SHARED_EXPERT),
  defaults=_QWEN35.defaults | {'norm_topk_prob': True},
  numbers=_PER_TOKEN,
  stacked=p.STACKED,
  part_of='qwen3_5_moe',
)
_GEMMA4 = Family(
  'Gemma4ForCausalLM',
  (*p.GEMMA4, *p.LAYER_INPUTS, *p.EXPERTS_BESIDE, *p.HEAD),
  _NO_BIAS
  | {'hidden_activation': ('gelu_pytorch_tanh',)}
  # Attention within pictures may be bidirectional; text is causal.
  | {'use_bidirectional_attention': (None, False, 'vision')},
  optional='EIi',
  flags={'keys_are_values': 'attention_k_eq_v', 'wide_mlp': 'use_double_wide_mlp'}
  | {'num_experts': 'enable_moe_block'},
  defaults={'head_dim': 256, 'global_head_dim': 512, 'tie_word_embeddings': True}
  | {'sliding_window': 512, 'hidden_size_per_layer_input': 256, 'norm_topk_prob': True}
  | {'rope_parameters': _GEMMA4_ROPE},
  complete=_complete_gemma4,
  activation='gelu_pytorch_tanh',
  query_scale=1,
  normalizes_values=True,
  scaled_embeddings=True,
  numbers={'logit_cap': ('final_logit_softcapping', float)}
  | {'shared_layers': ('num_kv_shared_layers', int)}
  | {'experts_per_token': ('top_k_experts', int)}
  | {'vocab_size': ('vocab_size_per_layer_input', int)},
  is_sliding=_slides_but_every(6),
  mixes_types=True,
  local_rope=True,
  local_theta='',
  scalings=('default', 'proportional'),
  stacked=p.STACKED_BESIDE,
  writes_stacked=True,
  part_of='gemma4',
  ignored={
    **dict.fromkeys(('model.vision_tower.', 'model.embed_vision.'), 'what sees pictures'),
    **dict.fromkeys(('model.audio_tower.', 'model.embed_audio.'), 'what hears'),
  },
)
FAMILIES['gemma4_text'] = _GEMMA4
FAMILIES['gemma4'] = _GEMMA4._replace(
  architecture='Gemma4ForConditionalGeneration',
  parameters=(*_GEMMA4.parameters, *p.POOLED_VISION),
  # A picture's tokens get the per-layer inputs of this token.
  fixed=_GEMMA4.fixed | {'pad_token_id': (0, None)},
  sees=True,
  renamed={
    'model.vision_tower.': 'vision_tower.',
    'model.embed_vision.': 'embed_vision.',
    'model.language_model.': 'model.',
  },
  writes_renamed=True,
  text_type='gemma4_text',
  part_of='',
  ignored={x: y for x, y in _GEMMA4.ignored.items() if y == 'what hears'},
)
# The 12B, without experts and per-layer inputs.
FAMILIES['gemma4_unified_text'] = _GEMMA4._replace(
  architecture='Gemma4UnifiedForCausalLM',
  parameters=(*p.GEMMA4, *p.HEAD),
  optional='',
  flags={k: x for k, x in _GEMMA4.flags.items() if k != 'num_experts'},
  defaults=_GEMMA4.defaults | {'sliding_window': 1024, 'norm_topk_prob': False},
  numbers={k: _GEMMA4.numbers[k] for k in ('logit_cap', 'shared_layers')},
  stacked={},
  part_of='gemma4_unified',
)
_NAMES = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')
# The kernels of layers that LoRA can adapt, by path. Add new kernels at the end, because
# their random numbers depend on their place.
KERNELS = {
  x.path: x
  for part in (p.ATTENTION, p.MLP, p.FULL_ATTENTION, p.WIDE_MLP, p.DELTA_NET)
  for x in part
  if x.target in (*_NAMES, 'z', 'a', 'b') and x.path.endswith('/kernel')
}
# Names of adapter targets in every dense model -> the first kernel of this name. Gemma 4
# and Qwen3.5 have several, in layers of different kinds.
TARGETS = {name: next(x for x in KERNELS.values() if x.target == name) for name in _NAMES}


def _list_dims() -> dict[str, str]:
  every = [x for family in FAMILIES.values() for x in family.parameters]
  dims = {x.path: x.letters for x in (*every, *p.VALUE_HEAD)}
  for target in KERNELS.values():
    place, outputs = target.path.removesuffix('kernel'), target.dims.split('>')[1]
    # R is LoRA's rank.
    dims[place + 'lora_a'] = f'L{target.inputs}R'
    dims[place + 'lora_b'] = f'LR{outputs}'
    dims[place + 'lora_scale'] = 'L'
    # An 8-bit kernel's scale has size 1 in the dimensions that the product contracts.
    dims[place + 'kernel_scale'] = f'L{"1" * len(target.inputs)}{outputs}'
  for name in ('gate', 'up', 'down'):
    place = f'layers/moe/{name}/'
    # The exponents of 4-bit kernels: too few for `fsdp` to split inputs or outputs.
    dims[place + 'block_scale'] = dims[place + 'kernel'].replace('D', 'd')
  return dims


# The letters of each parameter's dimensions, by path, including leaves of LoRA and of
# 8-bit and 4-bit kernels.
DIMS = _list_dims()
