"""The facts of each model family, in one table.

A new family is a row of FAMILIES and a directory of tests/golden/decoder, which
tests/golden/make_decoder_golden.py writes. models/files/hf_config.py reads its
config.json, and refuses what no family has. If its layers compute something new, that is
code in models/decoder.py which depends on a field of the row. Checkpoints, sharding,
LoRA and the tests of all families follow the table.

A dimension is a letter: L layers, D embed, F feed-forward, N query heads, K key-value
heads, H head dim, V vocabulary, E experts, I feed-forward of an expert, S that of the
expert that all tokens share; d and e are embed and experts where no mesh splits them. P
is H, or twice as many where a query has a gate. A layer with a state has G key heads and
U value heads of X and Y numbers, and convolutions over Z tokens.
vision_config.py has those of a vision tower.
"""

from collections.abc import Callable
from typing import Any

from agent_r1_jax.models.family import Family, Parameter
from agent_r1_jax.models.pictures import vision_config


def _layer(path: str, tensor: str, dims: str) -> Parameter:
  return Parameter(f'layers/{path}', f'model.layers.{{}}.{tensor}', f'L{dims}')


def _convolution(path: str, tensor: str, dims: str) -> Parameter:
  return _layer(path, tensor, dims)._replace(convolves=True)


_EMBEDDING = (Parameter('embed/embedding', 'model.embed_tokens.weight', 'VD'),)
_NORMS = (
  _layer('attn_norm/scale', 'input_layernorm.weight', 'd'),
  _layer('mlp_norm/scale', 'post_attention_layernorm.weight', 'd'),
)
# Of what attention and the feed-forward return.
_NORMS_AFTER = (
  _layer('attn_out_norm/scale', 'post_attention_layernorm.weight', 'd'),
  _layer('mlp_out_norm/scale', 'post_feedforward_layernorm.weight', 'd'),
)
_NORMS_AROUND = (
  _NORMS[0],
  *_NORMS_AFTER,
  _layer('mlp_norm/scale', 'pre_feedforward_layernorm.weight', 'd'),
)
_ATTENTION = (
  _layer('attn/q/kernel', 'self_attn.q_proj.weight', 'D>NH'),
  _layer('attn/k/kernel', 'self_attn.k_proj.weight', 'D>KH'),
  _layer('attn/v/kernel', 'self_attn.v_proj.weight', 'D>KH'),
  _layer('attn/o/kernel', 'self_attn.o_proj.weight', 'NH>D'),
)
_QKV_BIAS = (
  _layer('attn/q/bias', 'self_attn.q_proj.bias', '>NH'),
  _layer('attn/k/bias', 'self_attn.k_proj.bias', '>KH'),
  _layer('attn/v/bias', 'self_attn.v_proj.bias', '>KH'),
)
# Of each head, or of all heads together.
_QK_NORM = (
  _layer('attn/q_norm/scale', 'self_attn.q_norm.weight', 'H'),
  _layer('attn/k_norm/scale', 'self_attn.k_norm.weight', 'H'),
)
_QK_NORM_OF_ALL = (
  _layer('attn/q_norm_of_all/scale', 'self_attn.q_norm.weight', '>NH'),
  _layer('attn/k_norm_of_all/scale', 'self_attn.k_norm.weight', '>KH'),
)
_GATED_ATTENTION = (
  _layer('attn/q/kernel', 'self_attn.q_proj.weight', 'D>NP'),
  *_ATTENTION[1:],
)
# A tensor of a file holds those of q, k and v one after the other; so do convolutions.
_DELTA_NET = (
  _layer('linear/q/kernel', 'linear_attn.in_proj_q.weight', 'D>GX'),
  _layer('linear/k/kernel', 'linear_attn.in_proj_k.weight', 'D>GX'),
  _layer('linear/v/kernel', 'linear_attn.in_proj_v.weight', 'D>UY'),
  _convolution('linear/q_conv/kernel', 'linear_attn.conv1d_q.weight', '1Z>GX'),
  _convolution('linear/k_conv/kernel', 'linear_attn.conv1d_k.weight', '1Z>GX'),
  _convolution('linear/v_conv/kernel', 'linear_attn.conv1d_v.weight', '1Z>UY'),
  _layer('linear/z/kernel', 'linear_attn.in_proj_z.weight', 'D>UY'),
  _layer('linear/b/kernel', 'linear_attn.in_proj_b.weight', 'D>U'),
  _layer('linear/a/kernel', 'linear_attn.in_proj_a.weight', 'D>U'),
  _layer('linear/decay/log', 'linear_attn.A_log', 'U'),
  _layer('linear/decay/bias', 'linear_attn.dt_bias', 'U'),
  _layer('linear/out_norm/scale', 'linear_attn.norm.weight', 'Y'),
  _layer('linear/o/kernel', 'linear_attn.out_proj.weight', 'UY>D'),
)
_FUSED_DELTA_NET = {
  f'model.layers.{{}}.linear_attn.{fused}.weight': tuple(
    f'model.layers.{{}}.linear_attn.{fused.removesuffix("_qkv")}_{x}.weight'
    for x in 'qkv'
  )
  for fused in ('in_proj_qkv', 'conv1d')
}
_MLP = (
  _layer('mlp/gate/kernel', 'mlp.gate_proj.weight', 'D>F'),
  _layer('mlp/up/kernel', 'mlp.up_proj.weight', 'D>F'),
  _layer('mlp/down/kernel', 'mlp.down_proj.weight', 'F>D'),
)
_O_BIAS = (_layer('attn/o/bias', 'self_attn.o_proj.bias', '>d'),)
_SINKS = (_layer('attn/sinks', 'self_attn.sinks', 'N'),)
# Those of an expert are stacked over the experts.
_EXPERTS = (
  _layer('moe/router/kernel', 'mlp.gate.weight', 'D>e'),
  _layer('moe/gate/kernel', 'mlp.experts.{}.gate_proj.weight', 'ED>I'),
  _layer('moe/up/kernel', 'mlp.experts.{}.up_proj.weight', 'ED>I'),
  _layer('moe/down/kernel', 'mlp.experts.{}.down_proj.weight', 'EI>D'),
)
_SHARED_EXPERT = (
  _layer('shared/gate/kernel', 'mlp.shared_expert.gate_proj.weight', 'D>S'),
  _layer('shared/up/kernel', 'mlp.shared_expert.up_proj.weight', 'D>S'),
  _layer('shared/down/kernel', 'mlp.shared_expert.down_proj.weight', 'S>D'),
  _layer('shared_weight/kernel', 'mlp.shared_expert_gate.weight', 'D>1'),
)
# One tensor for all experts, its inputs first.
_EXPERTS_WITH_BIAS = (
  _layer('moe/router/kernel', 'mlp.router.weight', 'D>e'),
  _layer('moe/router/bias', 'mlp.router.bias', '>e'),
  _layer('moe/gate/kernel', 'mlp.experts.gate_proj', 'EDI'),
  _layer('moe/gate/bias', 'mlp.experts.gate_proj_bias', 'EI'),
  _layer('moe/up/kernel', 'mlp.experts.up_proj', 'EDI'),
  _layer('moe/up/bias', 'mlp.experts.up_proj_bias', 'EI'),
  _layer('moe/down/kernel', 'mlp.experts.down_proj', 'EID'),
  _layer('moe/down/bias', 'mlp.experts.down_proj_bias', 'Ed'),
)
_INTERLEAVED = {
  f'model.layers.{{}}.mlp.experts.gate_up_proj{kind}': (
    f'model.layers.{{}}.mlp.experts.gate_proj{kind}',
    f'model.layers.{{}}.mlp.experts.up_proj{kind}',
  )
  for kind in ('', '_bias')
}
_STACKED = {
  f'model.layers.{{}}.mlp.experts.{stack}': tuple(
    f'model.layers.{{}}.mlp.experts.{{}}.{part}_proj.weight' for part in parts
  )
  for stack, parts in {'gate_up_proj': ('gate', 'up'), 'down_proj': ('down',)}.items()
}
_FUSED = {
  f'model.layers.{{}}.{fused}.weight': tuple(
    f'model.layers.{{}}.{part}.weight' for part in parts
  )
  for fused, parts in {
    'self_attn.qkv_proj': ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'),
    'mlp.gate_up_proj': ('mlp.gate_proj', 'mlp.up_proj'),
  }.items()
}
_HEAD = (
  Parameter('final_norm/scale', 'model.norm.weight', 'd'),
  Parameter('lm_head/kernel', 'lm_head.weight', 'D>V'),
)
_LAYERS = (*_ATTENTION, *_MLP)
_MIXTURE = (*_EMBEDDING, *_NORMS, *_ATTENTION, *_HEAD)
_LLAMA = (*_EMBEDDING, *_NORMS, *_LAYERS, *_HEAD)
_OLMO = (*_EMBEDDING, *_NORMS_AFTER, *_LAYERS, *_QK_NORM_OF_ALL, *_HEAD)
_GEMMA2 = (*_EMBEDDING, *_NORMS_AROUND, *_LAYERS, *_HEAD)
_VISION = tuple(Parameter(*row) for row in vision_config.PARAMETERS)
# A critic has it too, whatever its family.
VALUE_HEAD = (
  Parameter('value_head/kernel', 'value_head.weight', 'd>1'),
  Parameter('value_head/bias', 'value_head.bias', '>1'),
)


def _slides_late(raw: dict[str, Any], layer: int) -> bool:
  """Qwen's rule: the layers from max_window_layers on, if the window is in use."""
  used = raw.get('use_sliding_window', False) and raw.get('sliding_window') is not None
  return used and layer >= raw.get('max_window_layers', 28)


def _slides_everywhere(raw: dict[str, Any], _: int) -> bool:
  return raw.get('sliding_window') is not None


def _slides_but_every(n: int) -> Callable[[dict[str, Any], int], bool]:
  """All layers but every n-th; config.json may say another n."""
  return lambda raw, layer: (layer + 1) % raw.get('sliding_window_pattern', n) != 0


_SILU = {'hidden_act': ('silu',), 'quantization_config': (None,)}
_NO_BIAS = {**_SILU, 'attention_bias': (False,)}
_NO_BIASES = {**_NO_BIAS, 'mlp_bias': (False,)}
_CAUSAL = {'use_bidirectional_attention': (None, False)}
# The first files of Gemma say 'gelu' and mean the approximation by tanh.
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
  (*_LLAMA, *_QKV_BIAS),
  _SILU,
  _NO_WINDOW,
  is_sliding=_slides_late,
  mixes_types=True,
)
_GEMMA = Family(
  'GemmaForCausalLM',
  _LLAMA,
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
    parameters=(*_LLAMA, *_QK_NORM),
    fixed=_NO_BIAS,
    defaults={'head_dim': 128},
  ),
  'qwen2_moe': _QWEN2._replace(
    architecture='Qwen2MoeForCausalLM',
    parameters=(*_MIXTURE, *_QKV_BIAS, *_EXPERTS, *_SHARED_EXPERT),
    fixed=_SILU | _ALL_SPARSE | {'qkv_bias': (True,)},
    numbers=_PER_TOKEN,
    is_sliding=None,
    mixes_types=False,
  ),
  'qwen3_moe': _QWEN2._replace(
    architecture='Qwen3MoeForCausalLM',
    parameters=(*_MIXTURE, *_QK_NORM, *_EXPERTS),
    fixed=_NO_BIAS | _ALL_SPARSE,
    defaults={'head_dim': 128},
    numbers=_PER_TOKEN,
    is_sliding=None,
    mixes_types=False,
  ),
  'llama': Family('LlamaForCausalLM', _LLAMA, _NO_BIASES),
  'mistral': Family(
    'MistralForCausalLM',
    _LLAMA,
    {**_SILU, 'layer_types': (None,)},
    is_sliding=_slides_everywhere,
  ),
  'smollm3': Family(
    'SmolLM3ForCausalLM',
    _LLAMA,
    _NO_BIASES,
    _NO_WINDOW,
    defaults={'no_rope_layer_interval': 4, 'tie_word_embeddings': True},
    is_sliding=lambda raw, layer: False,
    mixes_types=True,
    skips_rope=True,
  ),
  'phi3': Family(
    'Phi3ForCausalLM',
    _LLAMA,
    {**_NO_BIAS, 'layer_types': (None,)},
    is_sliding=_slides_everywhere,
    partial_rope=True,
    scalings=('default',),
    fused=_FUSED,
  ),
  'olmo2': Family('Olmo2ForCausalLM', _OLMO, _NO_BIAS),
  'olmo3': Family(
    'Olmo3ForCausalLM',
    _OLMO,
    _NO_BIAS,
    is_sliding=_slides_but_every(4),
    mixes_types=True,
    local_rope=True,
  ),
  'gemma': _GEMMA,
  'gemma2': _GEMMA._replace(
    architecture='Gemma2ForCausalLM',
    parameters=_GEMMA2,
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
    parameters=(*_GEMMA2, *_QK_NORM),
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
  parameters=(*_LLAMA, *_QKV_BIAS, *_VISION),
  fixed=_SILU | {'use_sliding_window': (False, None)},
  is_sliding=None,
  mixes_types=False,
  sees=True,
  renamed={'model.language_model.': 'model.', 'model.visual.': 'visual.'},
)
FAMILIES['gpt_oss'] = Family(
  'GptOssForCausalLM',
  (*_MIXTURE, *_QKV_BIAS, *_O_BIAS, *_SINKS, *_EXPERTS_WITH_BIAS),
  {'hidden_act': ('silu',), 'attention_bias': (True,)}
  | {'swiglu_alpha': (1.702,), 'swiglu_limit': (7.0,)},
  size_names={'E': 'num_local_experts', 'I': 'intermediate_size'},
  defaults={'norm_topk_prob': True},
  activation='clamped_swiglu',
  numbers=_PER_TOKEN,
  is_sliding=_slides_but_every(2),
  mixes_types=True,
  scalings=('yarn',),  # Where a file names none, transformers takes this one.
  interleaved=_INTERLEAVED,
)
_QWEN35 = Family(
  'Qwen3_5ForCausalLM',
  (*_EMBEDDING, *_NORMS, *_GATED_ATTENTION, *_QK_NORM, *_DELTA_NET, *_MLP, *_HEAD),
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
  fused=_FUSED_DELTA_NET,
  part_of='qwen3_5',
  ignored={
    'mtp.': 'layers that draft further tokens',
    'model.visual.': 'the vision tower: the policy reads text',
  },
)
FAMILIES['qwen3_5_text'] = _QWEN35
FAMILIES['qwen3_5_moe_text'] = _QWEN35._replace(
  architecture='Qwen3_5MoeForCausalLM',
  parameters=tuple(x for x in _QWEN35.parameters if x not in _MLP)
  + (*_EXPERTS, *_SHARED_EXPERT),
  defaults=_QWEN35.defaults | {'norm_topk_prob': True},
  numbers=_PER_TOKEN,
  stacked=_STACKED,
  part_of='qwen3_5_moe',
)
_EVERY = {p.path: p for family in FAMILIES.values() for p in family.parameters}
# The kernels to which LoRA may be added: name -> parameter. A new one comes last, for its
# random numbers depend on its place.
TARGETS = {kernel.path.split('/')[-2]: kernel for kernel in (*_ATTENTION, *_MLP)}


def _list_dims() -> dict[str, str]:
  dims = {p.path: p.letters for p in (*_EVERY.values(), *VALUE_HEAD)}
  for target in TARGETS.values():
    place, outputs = target.path.removesuffix('kernel'), target.dims.split('>')[1]
    # R is LoRA's rank.
    dims[place + 'lora_a'] = f'L{target.inputs}R'
    dims[place + 'lora_b'] = f'LR{outputs}'
    dims[place + 'lora_scale'] = 'L'
    # That of a kernel of 8 bits has size 1 where its product contracts.
    dims[place + 'kernel_scale'] = f'L{"1" * len(target.inputs)}{outputs}'
  return dims


# The letters of each parameter's dimensions, by path; leaves of LoRA, and of kernels of
# 8 bits, included.
DIMS = _list_dims()
