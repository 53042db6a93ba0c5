"""Types that describe a family of models: its parameters, and its config.json.

The families are in families.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

# Letter of a dimension -> the fields of DecoderConfig and of config.json with its size.
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
  # Name of its tensors in a checkpoint. The first '{}' stands for the layer; each '{}' is
  # a leading dimension of the parameter, before the tensor's dimensions.
  tensor: str
  # A letter per dimension. '>' separates inputs from outputs: the checkpoint has
  # [outputs, inputs], each as one dimension, and for a bias, without inputs, [outputs].
  # A parameter without '>' has the same shape in the checkpoint.
  dims: str
  # Whether the checkpoint keeps the dimensions of inputs apart (a convolution).
  convolves: bool = False

  @property
  def letters(self) -> str:
    """The letters of its dimensions, without '>'."""
    return self.dims.replace('>', '')

  @property
  def place(self) -> str:
    """The part of a layer that it belongs to, such as 'attn' or 'mlp'."""
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

  `parameters` decides what a layer has: a norm before attention or after it, biases of
  projections, norms of queries and keys, one feed-forward or experts.
  """

  architecture: str  # The class in transformers.
  parameters: tuple[Parameter, ...]  # All parameters, without a value head's.
  # Fields of config.json -> the values that the decoder supports, unless they are absent.
  # An export writes the first value, unless it is None.
  fixed: dict[str, tuple]
  written: dict[str, Any] = {}  # Fields that an export writes besides `fixed`.
  # Letters of SIZES -> names in config.json that differ from SIZES.
  size_names: dict[str, str] = {}
  # Letters of SIZES that may be 0: the model then has no parameters with them.
  optional: str = ''
  # transformers' defaults for fields that are absent from config.json.
  defaults: dict[str, Any] = {}
  # Adds the fields of config.json that follow from others.
  complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None
  norm_eps: str = 'rms_norm_eps'  # The field of config.json with the ε of the norms.
  activation: str = 'silu'  # The activation function of the feed-forward.
  norm_offset: float = 0.0  # Added to the scale of each norm.
  # Whether embeddings are multiplied by sqrt(hidden_size).
  scaled_embeddings: bool = False
  # More fields of DecoderConfig -> the field of config.json, and its type.
  numbers: dict[str, tuple[str, type]] = {}
  # The same for fields that become bool: a number is true if it is not 0.
  flags: dict[str, str] = {}
  # Scores are divided by its root, unless config.json has a scale; None: by head_dim's.
  query_scale: int | None = None
  normalizes_values: bool = False  # Whether values have a norm, without a scale.
  # (fields of config.json, layer) -> whether the layer has a sliding window, if
  # `layer_types` is absent; None if no layer can.
  is_sliding: Callable[[dict[str, Any], int], bool] | None = None
  # Whether `layer_types` is written. In other families all layers are of one type.
  mixes_types: bool = False
  # Whether sliding layers have their own rotation, never scaled; and the field with its
  # θ, by default that of the other layers, or '' if only `rope_parameters` has it.
  local_rope: bool = False
  local_theta: str = 'rope_theta'
  # Whether `no_rope_layers` says which layers rotate queries and keys.
  skips_rope: bool = False
  partial_rope: bool = False  # Whether it may rotate only a part of each head.
  # (fields of config.json, layer) -> whether the layer has a state (delta_net.py) instead
  # of keys and values, if `layer_types` is absent; None if no layer has.
  is_recurrent: Callable[[dict[str, Any], int], bool] | None = None
  # Whether the output of attention is multiplied by a gate, which q's kernel computes.
  gates: bool = False
  # The RoPE scalings it may have; 'default' is none.
  scalings: tuple[str, ...] = ('default', 'linear', 'llama3', 'yarn')
  # Tensors of a checkpoint -> the tensors that are concatenated in them.
  fused: dict[str, tuple[str, ...]] = {}
  # Tensors of a checkpoint -> the two tensors whose last dimensions alternate: a b a b.
  interleaved: dict[str, tuple[str, str]] = {}
  # Tensors that stack all experts of a layer -> the tensors of each expert, concatenated.
  # A checkpoint may have either form.
  stacked: dict[str, tuple[str, ...]] = {}
  writes_stacked: bool = False  # Whether an export has the stacked form.
  # Whether files may have the kernels of experts in 4 bits (four_bits.py).
  packs_experts: bool = False
  sees: bool = False  # Whether it has a vision tower.
  # Whether it rotates by three coordinates (M-RoPE); and whether the pairs of a head for
  # the three alternate.
  turns_by_axes: bool = False
  alternates_axes: bool = False
  # Prefixes of transformers' names of modules, and of tensors in some of its versions ->
  # our prefixes; and whether an export writes theirs.
  renamed: dict[str, str] = {}
  writes_renamed: bool = False
  # The `model_type` of the object with the decoder's fields in an export; '' for none.
  text_type: str = ''
  # The `model_type` of the vision-language model whose language model this is; and
  # prefixes of tensors that are not read -> what they are.
  part_of: str = ''
  ignored: dict[str, str] = {}

  @property
  def sizes(self) -> dict[str, tuple[str, str]]:
    """The part of SIZES that its parameters use."""
    used = {letter for parameter in self.parameters for letter in parameter.letters}
    return {
      letter: (field, self.size_names.get(letter, key))
      for letter, (field, key) in SIZES.items()
      if letter in used
    }

  def read_name(self, name: str) -> str:
    """Returns our name for a file's tensor name."""
    if self.part_of and name.startswith('model.language_model.'):
      return name.replace('language_model.', '', 1)
    old = next((old for old in self.renamed if name.startswith(old)), '')
    return self.renamed.get(old, '') + name.removeprefix(old)

  def write_name(self, name: str) -> str:
    """Returns transformers' name for one of ours; `read_name` is the inverse."""
    new = next((x for x, own in self.renamed.items() if name.startswith(own)), '')
    return new + name.removeprefix(self.renamed.get(new, ''))

  def has(self, path: str, place: str = 'layers') -> bool:
    """Whether the family has a parameter with this path, for example 'attn/q/bias'.

    `place` is the first part of the path, such as 'vision'.
    """
    return any(p.path == f'{place}/{path}' for p in self.parameters)

  @property
  def has_full(self) -> bool:
    """Whether heads of full-attention layers differ from those of sliding layers."""
    return self.has('full/q/kernel')
