"""The tables of parameters that the families of families.py combine.

A letter is a dimension: L layers, D embed, F feed-forward, N query heads, K key-value
heads, H head dim, V vocabulary, E experts, I feed-forward of an expert, S feed-forward of
the expert that all tokens share; d and e are embed and experts that no mesh splits. P is
H, or 2 H if queries have a gate. A layer with a state has G key heads of X numbers, U
value heads of Y numbers, and convolutions over Z tokens. In models with sliding layers,
full-attention layers may have k key-value heads of c numbers, and the last layers a
feed-forward of f. Per-layer inputs have i numbers per token and layer, l = L i per token.
vision_config.py has the parameters of a vision tower.
"""

from agent_r1_jax.models.family import Parameter
from agent_r1_jax.models.pictures import vision_config


def _layer(path: str, tensor: str, dims: str) -> Parameter:
  return Parameter(f'layers/{path}', f'model.layers.{{}}.{tensor}', f'L{dims}')


def _convolution(path: str, tensor: str, dims: str) -> Parameter:
  return _layer(path, tensor, dims)._replace(convolves=True)


EMBEDDING = (Parameter('embed/embedding', 'model.embed_tokens.weight', 'VD'),)
NORMS = (
  _layer('attn_norm/scale', 'input_layernorm.weight', 'd'),
  _layer('mlp_norm/scale', 'post_attention_layernorm.weight', 'd'),
)
# Norms of the outputs of attention and the feed-forward.
NORMS_AFTER = (
  _layer('attn_out_norm/scale', 'post_attention_layernorm.weight', 'd'),
  _layer('mlp_out_norm/scale', 'post_feedforward_layernorm.weight', 'd'),
)
NORMS_AROUND = (
  NORMS[0],
  *NORMS_AFTER,
  _layer('mlp_norm/scale', 'pre_feedforward_layernorm.weight', 'd'),
)
ATTENTION = (
  _layer('attn/q/kernel', 'self_attn.q_proj.weight', 'D>NH'),
  _layer('attn/k/kernel', 'self_attn.k_proj.weight', 'D>KH'),
  _layer('attn/v/kernel', 'self_attn.v_proj.weight', 'D>KH'),
  _layer('attn/o/kernel', 'self_attn.o_proj.weight', 'NH>D'),
)
QKV_BIAS = (
  _layer('attn/q/bias', 'self_attn.q_proj.bias', '>NH'),
  _layer('attn/k/bias', 'self_attn.k_proj.bias', '>KH'),
  _layer('attn/v/bias', 'self_attn.v_proj.bias', '>KH'),
)
# Norms of each head, or of all heads together.
QK_NORM = (
  _layer('attn/q_norm/scale', 'self_attn.q_norm.weight', 'H'),
  _layer('attn/k_norm/scale', 'self_attn.k_norm.weight', 'H'),
)
QK_NORM_OF_ALL = (
  _layer('attn/q_norm_of_all/scale', 'self_attn.q_norm.weight', '>NH'),
  _layer('attn/k_norm_of_all/scale', 'self_attn.k_norm.weight', '>KH'),
)
GATED_ATTENTION = (
  _layer('attn/q/kernel', 'self_attn.q_proj.weight', 'D>NP'),
  *ATTENTION[1:],
)
# A file concatenates q, k and v in one tensor, for projections and for convolutions.
DELTA_NET = (
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
FUSED_DELTA_NET = {
  f'model.layers.{{}}.linear_attn.{fused}.weight': tuple(
    f'model.layers.{{}}.linear_attn.{fused.removesuffix("_qkv")}_{x}.weight'
    for x in 'qkv'
  )
  for fused in ('in_proj_qkv', 'conv1d')
}
MLP = (
  _layer('mlp/gate/kernel', 'mlp.gate_proj.weight', 'D>F'),
  _layer('mlp/up/kernel', 'mlp.up_proj.weight', 'D>F'),
  _layer('mlp/down/kernel', 'mlp.down_proj.weight', 'F>D'),
)
O_BIAS = (_layer('attn/o/bias', 'self_attn.o_proj.bias', '>d'),)
SINKS = (_layer('attn/sinks', 'self_attn.sinks', 'N'),)
# A file has a tensor per expert; parameters are stacked over the experts.
EXPERTS = (
  _layer('moe/router/kernel', 'mlp.gate.weight', 'D>e'),
  _layer('moe/gate/kernel', 'mlp.experts.{}.gate_proj.weight', 'ED>I'),
  _layer('moe/up/kernel', 'mlp.experts.{}.up_proj.weight', 'ED>I'),
  _layer('moe/down/kernel', 'mlp.experts.{}.down_proj.weight', 'EI>D'),
)
SHARED_EXPERT = (
  _layer('shared/gate/kernel', 'mlp.shared_expert.gate_proj.weight', 'D>S'),
  _layer('shared/up/kernel', 'mlp.shared_expert.up_proj.weight', 'D>S'),
  _layer('shared/down/kernel', 'mlp.shared_expert.down_proj.weight', 'S>D'),
  _layer('shared_weight/kernel', 'mlp.shared_expert_gate.weight', 'D>1'),
)
# A file has one tensor for all experts, inputs first.
EXPERTS_WITH_BIAS = (
  _layer('moe/router/kernel', 'mlp.router.weight', 'D>e'),
  _layer('moe/router/bias', 'mlp.router.bias', '>e'),
  _layer('moe/gate/kernel', 'mlp.experts.gate_proj', 'EDI'),
  _layer('moe/gate/bias', 'mlp.experts.gate_proj_bias', 'EI'),
  _layer('moe/up/kernel', 'mlp.experts.up_proj', 'EDI'),
  _layer('moe/up/bias', 'mlp.experts.up_proj_bias', 'EI'),
  _layer('moe/down/kernel', 'mlp.experts.down_proj', 'EID'),
  _layer('moe/down/bias', 'mlp.experts.down_proj_bias', 'Ed'),
)
INTERLEAVED = {
  f'model.layers.{{}}.mlp.experts.gate_up_proj{kind}': (
    f'model.layers.{{}}.mlp.experts.gate_proj{kind}',
    f'model.layers.{{}}.mlp.experts.up_proj{kind}',
  )
  for kind in ('', '_bias', '_blocks', '_scales')
}
STACKED, STACKED_BESIDE = (
  {
    f'model.layers.{{}}.{place}.{stack}': tuple(
      f'model.layers.{{}}.{place}.{{}}.{part}_proj.weight' for part in parts
    )
    for stack, parts in {'gate_up_proj': ('gate', 'up'), 'down_proj': ('down',)}.items()
  }
  for place in ('mlp.experts', 'experts')
)
FUSED = {
  f'model.layers.{{}}.{fused}.weight': tuple(
    f'model.layers.{{}}.{part}.weight' for part in parts
  )
  for fused, parts in {
    'self_attn.qkv_proj': ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'),
    'mlp.gate_up_proj': ('mlp.gate_proj', 'mlp.up_proj'),
  }.items()
}
FULL_ATTENTION = (
  _layer('full/q/kernel', 'self_attn.q_proj.weight', 'D>Nc'),
  _layer('full/k/kernel', 'self_attn.k_proj.weight', 'D>kc'),
  _layer('full/v/kernel', 'self_attn.v_proj.weight', 'D>kc'),
  _layer('full/o/kernel', 'self_attn.o_proj.weight', 'Nc>D'),
  _layer('full/q_norm/scale', 'self_attn.q_norm.weight', 'c'),
  _layer('full/k_norm/scale', 'self_attn.k_norm.weight', 'c'),
)
WIDE_MLP = (
  _layer('wide_mlp/gate/kernel', 'mlp.gate_proj.weight', 'D>f'),
  _layer('wide_mlp/up/kernel', 'mlp.up_proj.weight', 'D>f'),
  _layer('wide_mlp/down/kernel', 'mlp.down_proj.weight', 'f>D'),
)
LAYER_INPUTS = (
  Parameter('layer_inputs/embed/embedding', 'model.embed_tokens_per_layer.weight', 'Vl'),
  Parameter(
    'layer_inputs/projection/kernel', 'model.per_layer_model_projection.weight', 'd>l'
  ),
  Parameter('layer_inputs/out_norm/scale', 'model.per_layer_projection_norm.weight', 'i'),
  _layer('input/gate/kernel', 'per_layer_input_gate.weight', 'D>i'),
  _layer('input/out/kernel', 'per_layer_projection.weight', 'i>D'),
  _layer('input/out_norm/scale', 'post_per_layer_input_norm.weight', 'd'),
)
# Experts in addition to the feed-forward, each of the two with its own norms.
EXPERTS_BESIDE = (
  _layer('mlp_part_norm/scale', 'post_feedforward_layernorm_1.weight', 'd'),
  _layer('moe_norm/scale', 'pre_feedforward_layernorm_2.weight', 'd'),
  _layer('moe_part_norm/scale', 'post_feedforward_layernorm_2.weight', 'd'),
  _layer('moe/router_norm/scale', 'router.scale', 'd'),
  _layer('moe/router/kernel', 'router.proj.weight', 'D>e'),
  _layer('moe/router_out/scale', 'router.per_expert_scale', 'e'),
  _layer('moe/gate/kernel', 'experts.{}.gate_proj.weight', 'ED>I'),
  _layer('moe/up/kernel', 'experts.{}.up_proj.weight', 'ED>I'),
  _layer('moe/down/kernel', 'experts.{}.down_proj.weight', 'EI>D'),
)
HEAD = (
  Parameter('final_norm/scale', 'model.norm.weight', 'd'),
  Parameter('lm_head/kernel', 'lm_head.weight', 'D>V'),
)
LAYERS = (*ATTENTION, *MLP)
MIXTURE = (*EMBEDDING, *NORMS, *ATTENTION, *HEAD)
LLAMA = (*EMBEDDING, *NORMS, *LAYERS, *HEAD)
OLMO = (*EMBEDDING, *NORMS_AFTER, *LAYERS, *QK_NORM_OF_ALL, *HEAD)
GEMMA2 = (*EMBEDDING, *NORMS_AROUND, *LAYERS, *HEAD)
GEMMA4 = (
  *GEMMA2[: -len(HEAD)],
  *QK_NORM,
  *FULL_ATTENTION,
  *WIDE_MLP,
  _layer('out/scale', 'layer_scalar', '1'),
)
VISION = tuple(Parameter(*row) for row in vision_config.PARAMETERS)
DEEP_VISION = tuple(Parameter(*row) for row in vision_config.DEEP_PARAMETERS)
POOLED_VISION = tuple(Parameter(*row) for row in vision_config.POOLED_PARAMETERS)
# Critics of every family have it too.
VALUE_HEAD = (
  Parameter('value_head/kernel', 'value_head.weight', 'd>1'),
  Parameter('value_head/bias', 'value_head.bias', '>1'),
)
