"""What a family of models is: its parameters, and the fields of its config.json.

The families are in families.py.
"""

from collections.abc import Callable
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
  'E': ('num_experts', 'num_experts'),
  'I': ('expert_dim', 'moe_intermediate_size'),
  'S': ('shared_dim', 'shared_expert_intermediate_size'),
  'G': ('linear_key_heads', 'linear_num_key_heads'),
  'U': ('linear_value_heads', 'linear_num_value_heads'),
  'X': ('linear_key_dim', 'linear_key_head_dim'),
  'Y': ('linear_value_dim', 'linear_value_head_dim'),
  'Z': ('conv_width', 'linear_conv_kernel_dim'),
  'k': ('full_kv_heads', 'num_global_key_value_heads'),
  'c': ('full_head_dim', 'global_head_dim'),
  'i': ('input_dim', 'hidden_size_per_layer_input'),
}


class Parameter(NamedTuple):
  """A parameter of the model; a layer's parameter is stacked over all layers."""

  path: str  # Path among the parameters, joined by '/'.
  # Name of its tensor in a checkpoint; '{}' stands for the layer. Each '{}' is a
  # dimension of the parameter, in front of those of a tensor.
  tensor: str
  # A letter for each dimension. '>' divides inputs from outputs: the checkpoint holds
  # [outputs, inputs], each as one dimension, and a bias, which has no inputs, as
  # [outputs]. A parameter without '>' is stored as it is.
  dims: str
  # Whether each input has a dimension of its own in the checkpoint (a convolution).
  convolves: bool = False

  @property
  def letters(self) -> str:
    """The dimensions without '>'."""
    return self.dims.replace('>', '')

  @property
  def place(self) -> str:
    """The part of a layer that has it, such as 'attn' or 'mlp'."""
    return self.path.split('/')[1]

  @property
  def target(self) -> str:
    """The name of the kernel in that part, such as 'q' or 'down'."""
    return self.path.split('/')[-2]

  @property
  def inputs(self) -> str:
    """The dimensions of a layer's kernel that its product contracts."""
    return self.dims.split('>')[0].removeprefix('L')


class Family(NamedTuple):
  """A family of models, which config.json names by its `model_type`.

  What a layer has is what `parameters` lists: a norm before attention or after it, biases
  of the projections, norms of queries and keys, one feed-forward or experts.
  """

  architecture: str  # The class in transformers.
  parameters: tuple[Parameter, ...]  # All parameters, without those of a value head.
  # Fields of config.json that have one of these values or are absent: the decoder
  # computes nothing else. An export writes the first, unless it is None.
  fixed: dict[str, tuple]
  written: dict[str, Any] = {}  # Fields that an export writes besides `fixed`.
  # Letters of SIZES whose field of config.json has another name.
  size_names: dict[str, str] = {}
  # Letters of SIZES that may be 0: the model then lacks the parameters that have them.
  optional: str = ''
  # What transformers takes for fields that are absent from config.json.
  defaults: dict[str, Any] = {}
  # Finds fields of config.json that follow from others.
  complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None
  norm_eps: str = 'rms_norm_eps'  # The field of config.json with the ε of the norms.
  activation: str = 'silu'  # That of the feed-forward.
  norm_offset: float = 0.0  # What is added to the scale of each norm.
  # Whether embeddings are multiplied by sqrt(hidden_size).
  scaled_embeddings: bool = False
  # Further fields of DecoderConfig -> those of config.json, and their types.
  numbers: dict[str, tuple[str, type]] = {}
  # And those that are true or false there; a number is true if it is not 0.
  flags: dict[str, str] = {}
  # Scores are divided by its root, if config.json does not say by what; None: head_dim's.
  query_scale: int | None = None
  normalizes_values: bool = False  # Whether values have a norm, without a scale.
  # Which layers attend to a sliding window where `layer_types` does not say it, by the
  # fields of config.json and a layer's index; None if no layer can.
  is_sliding: Callable[[dict[str, Any], int], bool] | None = None
  # Whether `layer_types` is written. In other families all layers are of one type.
  mixes_types: bool = False
  # Whether sliding layers have a rotation of their own, never stretched; and the field
  # with its θ, without which it is that of the others; '' if
  # `rope_parameters` alone has it.
  local_rope: bool = False
  local_theta: str = 'rope_theta'
  # Whether `no_rope_layers` says which layers turn queries and keys.
  skips_rope: bool = False
  partial_rope: bool = False  # Whether it may turn a part of a head's numbers only.
  # Which layers have a state (delta_net.py) in place of keys and values where
  # `layer_types` does not say it, by their index; None if none has.
  is_recurrent: Callable[[dict[str, Any], int], bool] | None = None
  # Whether each query has a gate beside it, by which what it attends to is multiplied.
  gates: bool = False
  # The rotations it may have: plain, or stretched.
  scalings: tuple[str, ...] = ('default', 'linear', 'llama3', 'yarn')
  # Tensors of a checkpoint in which those of several parameters lie one after the other.
  fused: dict[str, tuple[str, ...]] = {}
  # And those in which their last dimensions alternate: a b a b.
  interleaved: dict[str, tuple[str, str]] = {}
  # Tensors that a checkpoint may have in place of one for each expert: in each expert's
  # part, those of several parameters lie one after the other.
  stacked: dict[str, tuple[str, ...]] = {}
  writes_stacked: bool = False  # Whether an export has them.
  # Whether files may hold the kernels of its experts in 4 bits (four_bits.py).
  packs_experts: bool = False
  sees: bool = False  # Whether it has a vision tower.
  # Whether it turns queries and keys by three numbers (M-RoPE); and whether pairs that
  # turn by one of them alternate with the others'.
  turns_by_axes: bool = False
  alternates_axes: bool = False
  # Beginnings of the names of transformers' modules, and of the tensors that some of its
  # versions write -> ours; and whether an export writes them.
  renamed: dict[str, str] = {}
  writes_renamed: bool = False
  # The `model_type` of the object in which an export has the decoder's fields; '' for
  # none.
  text_type: str = ''
  # The `model_type` of a model that sees, of which this is the language model; and the
  # beginnings of the names of tensors that are not read -> what they are.
  part_of: str = ''
  ignored: dict[str, str] = {}

  @property
  def sizes(self) -> dict[str, tuple[str, str]]:
    """The part of SIZES that its parameters have."""
    used = {letter for parameter in self.parameters for letter in parameter.letters}
    return {
      letter: (field, self.size_names.get(letter, key))
      for letter, (field, key) in SIZES.items()
      if letter in used
    }

  def read_name(self, name: str) -> str:
    """Returns the name in this table of a tensor in a file."""
    if self.part_of and name.startswith('model.language_model.'):
      return name.replace('language_model.', '', 1)
    old = next((old for old in self.renamed if name.startswith(old)), '')
    return self.renamed.get(old, '') + name.removeprefix(old)

  def write_name(self, name: str) -> str:
    """Returns transformers' name of a module, of which `read_name` is the inverse."""
    new = next((x for x, own in self.renamed.items() if name.startswith(own)), '')
    return new + name.removeprefix(self.renamed.get(new, ''))

  def has(self, path: str, place: str = 'layers') -> bool:
    """Whether each layer has a parameter of this path, for example 'attn/q/bias'.

    `place` may be another, such as 'vision'.
    """
    return any(p.path == f'{place}/{path}' for p in self.parameters)

  @property
  def has_full(self) -> bool:
    """Whether layers that attend to all tokens have heads of their own."""
    return self.has('full/q/kernel')
