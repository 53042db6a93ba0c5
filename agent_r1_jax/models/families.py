"""The facts of each model family, in one table.

A new family is a row of FAMILIES and a directory of tests/golden/decoder, which
tests/golden/make_decoder_golden.py writes. models/hf_config.py reads its config.json, and
refuses what no family has. If its layers compute something new, that is code in
models/decoder.py which depends on a field of the row. Checkpoints, sharding, adapters and
the tests of all families follow the table.

A dimension is a letter: L layers, D embed, F feed-forward, N query heads, K key-value
heads, H head dim, V vocabulary; d is embed where no mesh splits it.
"""

from typing import Any, NamedTuple

# Letter -> the field of DecoderConfig with its size, and that of config.json.
SIZES = {
  'V': ('vocab_size', 'vocab_size'),
  'D': ('embed_dim', 'hidden_size'),
  'F': ('mlp_dim', 'intermediate_size'),
  'L': ('num_layers', 'num_hidden_layers'),
  'N': ('num_heads', 'num_attention_heads'),
  'K': ('num_kv_heads', 'num_key_value_heads'),
  'H': ('head_dim', 'head_dim'),
}


class Parameter(NamedTuple):
  """A parameter of the model; a layer's parameter is stacked over all layers."""

  path: str  # Path in the parameter tree, joined by '/'.
  # Name of its tensor in a checkpoint; '{}' stands for the layer. Each '{}' is a
  # dimension of the parameter, in front of those of a tensor.
  tensor: str
  # A letter for each dimension. '>' divides inputs from outputs: the checkpoint holds
  # [outputs, inputs], each as one dimension, and a bias, which has no inputs, as
  # [outputs]. A parameter without '>' is stored as it is.
  dims: str

  @property
  def letters(self) -> str:
    """The dimensions without '>'."""
    return self.dims.replace('>', '')

  @property
  def inputs(self) -> str:
    """The dimensions of a layer's kernel that its product contracts."""
    return self.dims.split('>')[0].removeprefix('L')


class Family(NamedTuple):
  """A family of models, which config.json names by its `model_type`."""

  architecture: str  # The class in transformers.
  parameters: tuple[Parameter, ...]  # All parameters, without those of a value head.
  # Fields of config.json that have one of these values or are absent: the decoder
  # computes nothing else. An export writes the first, unless it is None.
  fixed: dict[str, tuple]
  written: dict[str, Any] = {}  # Fields that an export writes besides `fixed`.
  # What transformers takes for fields that are absent from config.json.
  defaults: dict[str, Any] = {}
  norm_eps: str = 'rms_norm_eps'  # The field of config.json with the ε of the norms.
  # Whether the projections to queries, keys and values have biases.
  qkv_bias: bool = False
  qk_norm: bool = False  # Whether queries and keys are normalised.
  norm_offset: float = 0.0  # What is added to the scale of each norm.
  # Whether embeddings are multiplied by sqrt(hidden_size).
  scaled_embeddings: bool = False

  @property
  def activation(self) -> str:
    """The name of the feed-forward's activation, as config.json has it."""
    return self.fixed['hidden_act'][0]


def _layer(path: str, tensor: str, dims: str) -> Parameter:
  return Parameter(f'layers/{path}', f'model.layers.{{}}.{tensor}', f'L{dims}')


_EMBEDDING = (Parameter('embed/embedding', 'model.embed_tokens.weight', 'VD'),)
_NORMS = (
  _layer('attn_norm/scale', 'input_layernorm.weight', 'd'),
  _layer('mlp_norm/scale', 'post_attention_layernorm.weight', 'd'),
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
_QK_NORM = (
  _layer('attn/q_norm/scale', 'self_attn.q_norm.weight', 'H'),
  _layer('attn/k_norm/scale', 'self_attn.k_norm.weight', 'H'),
)
_MLP = (
  _layer('mlp/gate/kernel', 'mlp.gate_proj.weight', 'D>F'),
  _layer('mlp/up/kernel', 'mlp.up_proj.weight', 'D>F'),
  _layer('mlp/down/kernel', 'mlp.down_proj.weight', 'F>D'),
)
_HEAD = (
  Parameter('final_norm/scale', 'model.norm.weight', 'd'),
  Parameter('lm_head/kernel', 'lm_head.weight', 'D>V'),
)
_LLAMA = (*_EMBEDDING, *_NORMS, *_ATTENTION, *_MLP, *_HEAD)
# A critic has it too, whatever its family.
VALUE_HEAD = (
  Parameter('value_head/kernel', 'value_head.weight', 'd>1'),
  Parameter('value_head/bias', 'value_head.bias', '>1'),
)

_SILU = {'hidden_act': ('silu',), 'quantization_config': (None,)}
_NO_BIAS = {**_SILU, 'attention_bias': (False,)}
_NO_WINDOW = {'use_sliding_window': False}
FAMILIES = {
  'qwen2': Family(
    'Qwen2ForCausalLM', (*_LLAMA, *_QKV_BIAS), _SILU, _NO_WINDOW, qkv_bias=True
  ),
  'qwen3': Family(
    'Qwen3ForCausalLM',
    (*_LLAMA, *_QK_NORM),
    _NO_BIAS,
    _NO_WINDOW,
    defaults={'head_dim': 128},
    qk_norm=True,
  ),
  'llama': Family('LlamaForCausalLM', _LLAMA, {**_NO_BIAS, 'mlp_bias': (False,)}),
  'gemma': Family(
    'GemmaForCausalLM',
    _LLAMA,
    # The first files say 'gelu' and mean the approximation by tanh.
    {
      **_NO_BIAS,
      'hidden_act': ('gelu_pytorch_tanh', 'gelu'),
      'use_bidirectional_attention': (None, False),
    },
    defaults={'head_dim': 256, 'tie_word_embeddings': True},
    norm_offset=1.0,
    scaled_embeddings=True,
  ),
}
_EVERY = {p.path: p for family in FAMILIES.values() for p in family.parameters}
# The kernels that may have an adapter: name -> parameter. A new one comes last, for the
# random numbers of an adapter depend on its place.
TARGETS = {kernel.path.split('/')[-2]: kernel for kernel in (*_ATTENTION, *_MLP)}


def _list_dims() -> dict[str, str]:
  dims = {p.path: p.letters for p in (*_EVERY.values(), *VALUE_HEAD)}
  for target in TARGETS.values():
    place, outputs = target.path.removesuffix('kernel'), target.dims.split('>')[1]
    # R is an adapter's rank.
    dims[place + 'lora_a'] = f'L{target.inputs}R'
    dims[place + 'lora_b'] = f'LR{outputs}'
    dims[place + 'lora_scale'] = 'L'
  return dims


# The letters of each parameter's dimensions, by path; adapters' leaves included.
DIMS = _list_dims()
