"""The shape of a decoder and of each of its layers."""

import dataclasses
from typing import Any, NamedTuple

from agent_r1_jax.models import families
from agent_r1_jax.models.family import Family
from agent_r1_jax.models.pictures.vision_config import VisionConfig

# Which activations of a layer are recomputed in the backward pass; see `remat`.
REMATS = ('none', 'full', 'dots')


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """The shape of a decoder."""

  family: str  # A key of families.FAMILIES; the `model_type` in config.json.
  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int = 0  # 0 if every layer has experts.
  num_experts: int = 0
  experts_per_token: int = 0
  expert_dim: int = 0  # The feed-forward of an expert.
  shared_dim: int = 0  # The feed-forward of the expert that all tokens share, if any.
  # True if the weights of a token's experts sum to 1.
  normalize_experts: bool = False
  rope_theta: float = 10_000.0
  # How RoPE is scaled: {'rope_type', ...} with the fields of rope.SCALINGS.
  rope_scaling: dict[str, Any] | None = dataclasses.field(default=None, hash=False)
  rope_fraction: float = 1.0  # The fraction of a head's dimensions that is rotated.
  local_rope_theta: float | None = None  # θ of sliding layers; None: rope_theta.
  # How many pairs of a head rotate by a token's time, row and column (M-RoPE); () if all
  # rotate by its position.
  mrope_section: tuple[int, ...] = ()
  # One bool per layer, or () for none. Sliding layers: a token attends only to `window`
  # tokens, itself included. NoPE layers: queries and keys are not rotated.
  sliding: tuple[bool, ...] = ()
  window: int = 0
  nope: tuple[bool, ...] = ()
  # Layers with a state instead of keys and values (delta_net.py), one bool per layer or
  # () for none; then their heads, head dims, and the tokens that a convolution spans.
  recurrent: tuple[bool, ...] = ()
  linear_key_heads: int = 0
  linear_value_heads: int = 0
  linear_key_dim: int = 0
  linear_value_dim: int = 0
  conv_width: int = 0
  # Full-attention layers, if their heads differ from those of sliding layers: key-value
  # heads, head dim, and whether values are the keys without the rotation.
  full_kv_heads: int = 0
  full_head_dim: int = 0
  keys_are_values: bool = False
  # How many of the last layers attend to the keys and values of an earlier layer, and
  # whether their feed-forward is twice as wide.
  shared_layers: int = 0
  wide_mlp: bool = False
  input_dim: int = 0  # Size of a token's per-layer input (layer_inputs.py); 0 for none.
  # Scores are divided by its root; None: the root of head_dim, or the family's scale.
  query_scale: int | None = None
  # A cap c turns attention scores, or logits, x into c · tanh(x / c).
  attention_cap: float | None = None
  logit_cap: float | None = None
  norm_eps: float = 1e-6
  tie_embeddings: bool = False
  max_positions: int = 32_768  # The longest context that the model supports.
  # The dtype of activations and cache; parameters are cast on use.
  dtype: str = 'float32'
  # What the backward pass recomputes of a layer: 'none'; 'full', all but its input;
  # 'dots', all but the outputs of projections. docs/memory.md has the costs.
  remat: str = 'none'
  # An ops.Ops, whose functions compute the decoder; None for ops.PLAIN.
  ops: Any = None
  vision: VisionConfig | None = None  # The vision tower, if there is one.
  # True if, in sliding layers, a picture's tokens also attend to its later tokens.
  sees_ahead: bool = False

  def __post_init__(self):
    if self.family not in families.FAMILIES:
      raise ValueError(
        f'family is {self.family!r}; give one of {", ".join(families.FAMILIES)}.'
      )
    if self.remat not in REMATS:
      raise ValueError(f'remat is {self.remat!r}; give one of {REMATS}.')
    if (self.window > 0) != any(self.sliding):
      raise ValueError(f'window is {self.window}, and sliding {self.sliding}.')
    for letter, (name, _) in self.facts.sizes.items():
      if getattr(self, name) < 1 and letter not in self.facts.optional:
        raise ValueError(f'{name} is {getattr(self, name)}; a {self.family} has some.')
    if (self.facts.is_recurrent is not None) != (len(set(self.recurrent)) == 2):
      raise ValueError(
        f'recurrent is {self.recurrent}; a {self.family} has layers of '
        f'{"both kinds" if self.facts.is_recurrent else "one kind"}.'
      )
    for name in ('sliding', 'nope', 'recurrent'):
      if len(getattr(self, name)) not in (0, self.num_layers):
        raise ValueError(
          f'{name} is of {len(getattr(self, name))} layers, not num_layers.'
        )
    first = self.num_layers - self.shared_layers
    shapes = self.layer_shapes
    if not {x.sees_all for x in shapes} <= {x.sees_all for x in shapes[: max(first, 0)]}:
      raise ValueError(
        f'shared_layers is {self.shared_layers}: before them there must be a layer of '
        'each kind, whose keys and values they attend to.'
      )
    self._check_pictures()

  def _check_pictures(self):
    section, pairs = self.mrope_section, int(self.head_dim * self.rope_fraction) // 2
    if section and (len(section) != 3 or sum(section) != pairs):
      raise ValueError(
        f'mrope_section is {section}; it needs three numbers whose sum is the {pairs} '
        'pairs of a head.'
      )
    if (self.vision is not None) != self.facts.sees:
      raise ValueError(f'vision is {self.vision}, and family {self.family}.')
    if self.vision and self.vision.out_dim != self.embed_dim:
      raise ValueError(
        f'vision_config: out_hidden_size is {self.vision.out_dim}, yet hidden_size of '
        f'the decoder is {self.embed_dim}.'
      )
    if self.vision and self.vision.deep_count > self.num_layers:
      raise ValueError(
        f'vision_config: {self.vision.deep_count} layers are to add features of '
        f'deepstack_visual_indexes, and the decoder has {self.num_layers}.'
      )

  @property
  def facts(self) -> Family:
    """The properties of the family."""
    return families.FAMILIES[self.family]

  @property
  def query_dim(self) -> int:
    """The outputs of the query projection for one head: queries, and gates if any."""
    return self.head_dim * (2 if self.facts.gates else 1)

  @property
  def sizes(self) -> dict[str, int]:
    """The size of each letter of the family's parameters."""
    sizes = {x: getattr(self, field) for x, (field, _) in self.facts.sizes.items()}
    inputs, wide = self.num_layers * self.input_dim, 2 * self.mlp_dim
    sizes |= {'d': sizes['D'], 'e': sizes.get('E', 0), 'P': self.query_dim}
    return sizes | {'f': wide, 'l': inputs}

  @property
  def layer_shapes(self) -> list['LayerShape']:
    """Which parameters each layer has."""
    none, first = (False,) * self.num_layers, self.num_layers - self.shared_layers
    kinds = zip(self.recurrent or none, self.sliding or none, strict=True)
    has_full, widens = self.facts.has_full, self.wide_mlp
    return [
      LayerShape(recurs, has_full and not slides, i >= first, widens and i >= first)
      for i, (recurs, slides) in enumerate(kinds)
    ]

  def get_heads(self, sees_all: bool = False) -> tuple[int, int]:
    """Returns a layer's number of key-value heads, and its head dim."""
    if sees_all:
      return self.full_kv_heads, self.full_head_dim
    return self.num_kv_heads, self.head_dim

  def list_layers(self, path: str) -> list[int]:
    """Lists the layers that have a parameter, which is stacked over them.

    Args:
      path: The parameter's path, such as 'layers/attn/q/kernel'.
    """
    place, name = path.split('/')[1:3]
    absent = {
      'full': name == 'v' and self.keys_are_values,
      'input': not self.input_dim,
      **dict.fromkeys(('moe', 'moe_norm'), not self.num_experts),
      **dict.fromkeys(('mlp_part_norm', 'moe_part_norm'), not self.num_experts),
    }
    if absent.get(place):
      return []
    shapes = self.layer_shapes
    return [i for i in range(self.num_layers) if shapes[i].has(place, name)]

  def find_source(self, layer: int) -> int:
    """Finds the layer whose keys and values a sharing layer attends to."""
    shapes, first = self.layer_shapes, self.num_layers - self.shared_layers
    return max(i for i in range(first) if shapes[i].sees_all == shapes[layer].sees_all)


class LayerShape(NamedTuple):
  """Which parameters a layer has; layers of one shape can be scanned."""

  recurs: bool = False  # It has a state instead of keys and values.
  # It attends to all tokens, with heads that differ from those of sliding layers.
  sees_all: bool = False
  shares: bool = False  # It attends to the keys and values of an earlier layer.
  widens: bool = False  # Its feed-forward is twice as wide.

  def has(self, place: str, name: str) -> bool:
    """Whether the layer has parameter `name`, such as 'q', in `place`, such as 'attn'."""
    computes = not (self.shares and name in ('k', 'v', 'k_norm'))
    parts = {
      'linear': self.recurs,
      'attn': computes and not self.recurs and not self.sees_all,
      'full': computes and self.sees_all,
      'mlp': not self.widens,
      'wide_mlp': self.widens,
    }
    return parts.get(place, True)


class LayerKind(NamedTuple):
  """How a layer computes, as arrays, so that layers that differ can be scanned."""

  slides: Any  # Whether a token attends only to a window.
  rotation: Any  # The index of its rotation in decoder.compute_angles.
  inputs: Any = None  # Its per-layer inputs [B, T, i].
  # Keys and values of an earlier layer: of packed rows, or of that layer's cache.
  shared: Any = None
  number: Any = None  # Its index; the first layers add a picture's features (DeepStack).


def layer_kinds(config: DecoderConfig) -> list[LayerKind] | None:
  """Lists the kinds of the layers; None if all are alike and attend to all tokens."""
  none = (False,) * config.num_layers
  sliding, nope = config.sliding or none, config.nope or none
  deep = config.vision is not None and config.vision.deep_count > 0
  if not any(sliding) and not any(nope) and not config.facts.has_full and not deep:
    return None
  local = config.local_rope_theta is not None
  # The order of decoder.compute_angles: rope_theta, then local_rope_theta, then none.
  return [
    LayerKind(
      slides, 1 + local if stays else int(slides and local), number=i if deep else None
    )
    for i, (slides, stays) in enumerate(zip(sliding, nope, strict=True))
  ]
