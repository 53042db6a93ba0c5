"""The shape of a decoder, and what differs from layer to layer."""

import dataclasses
from typing import Any, NamedTuple

from agent_r1_jax.models import families
from agent_r1_jax.models.family import Family
from agent_r1_jax.models.pictures.vision_config import VisionConfig

# Which activations of a layer are computed again in the backward pass; see `remat`.
REMATS = ('none', 'full', 'dots')


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """The shape of a decoder."""

  family: str  # A key of families.FAMILIES; what config.json will call it.
  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int = 0  # 0 where each layer has experts.
  num_experts: int = 0
  experts_per_token: int = 0
  expert_dim: int = 0  # The feed-forward of an expert.
  shared_dim: int = 0  # That of an expert that computes all tokens; 0 for none.
  # Whether the weights of a token's experts sum to 1.
  normalize_experts: bool = False
  rope_theta: float = 10_000.0
  # How the rotation is stretched: {'rope_type', ...} with the fields of rope.SCALINGS.
  rope_scaling: dict[str, Any] | None = dataclasses.field(default=None, hash=False)
  rope_fraction: float = 1.0  # The part of a head's numbers that is turned.
  local_rope_theta: float | None = None  # θ of the layers with a window, or the same.
  # The pairs of a head that turn by a token's time, row and column (M-RoPE); () where all
  # turn by its position.
  mrope_section: tuple[int, ...] = ()
  # The layers in which a token attends to `window` tokens only, itself included; and
  # those that do not turn queries and keys. One bool a layer, or () for none.
  sliding: tuple[bool, ...] = ()
  window: int = 0
  nope: tuple[bool, ...] = ()
  # The layers that have a state in place of keys and values (delta_net.py), one bool a
  # layer or () for none; and their heads, the numbers of these, and how many tokens their
  # convolutions see.
  recurrent: tuple[bool, ...] = ()
  linear_key_heads: int = 0
  linear_value_heads: int = 0
  linear_key_dim: int = 0
  linear_value_dim: int = 0
  conv_width: int = 0
  # Where layers that slide have other heads than those that attend to all tokens: the
  # heads of the latter, and whether their values are their keys without a rotation.
  full_kv_heads: int = 0
  full_head_dim: int = 0
  keys_are_values: bool = False
  # How many of the last layers attend to keys and values of an earlier one; and whether
  # their feed-forward is twice as wide.
  shared_layers: int = 0
  wide_mlp: bool = False
  input_dim: int = 0  # What a layer is given of each token beside the residual stream.
  query_scale: int | None = None  # Scores are divided by its root; None: head_dim's.
  # A cap c makes c · tanh(x / c) of attention's scores, or of the logits.
  attention_cap: float | None = None
  logit_cap: float | None = None
  norm_eps: float = 1e-6
  tie_embeddings: bool = False
  max_positions: int = 32_768  # The longest context that the model supports.
  # The dtype of activations and cache; parameters are cast where they are used.
  dtype: str = 'float32'
  # The activations of a layer that are recomputed in the backward pass: 'none'; 'full',
  # all but its input; 'dots', all but its projections' outputs. docs/memory.md has the
  # costs.
  remat: str = 'none'
  # The functions that compute it, an ops.Ops; None for ops.PLAIN.
  ops: Any = None
  vision: VisionConfig | None = None  # The tower that reads pictures, if there is one.
  # Whether tokens of a picture see its later ones, too, in layers that slide.
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
    """The numbers of a head that the queries' kernel computes."""
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
    """What each layer has."""
    none, first = (False,) * self.num_layers, self.num_layers - self.shared_layers
    kinds = zip(self.recurrent or none, self.sliding or none, strict=True)
    has_full, widens = self.facts.has_full, self.wide_mlp
    return [
      LayerShape(recurs, has_full and not slides, i >= first, widens and i >= first)
      for i, (recurs, slides) in enumerate(kinds)
    ]

  def get_heads(self, sees_all: bool = False) -> tuple[int, int]:
    """Returns the key-value heads of a layer, and the numbers of a head."""
    if sees_all:
      return self.full_kv_heads, self.full_head_dim
    return self.num_kv_heads, self.head_dim

  def list_layers(self, path: str) -> list[int]:
    """Lists the layers that have a parameter, over which it is stacked.

    Args:
      path: That of the parameter, such as 'layers/attn/q/kernel'.
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
    """Finds the layer whose keys and values one attends to that shares them."""
    shapes, first = self.layer_shapes, self.num_layers - self.shared_layers
    return max(i for i in range(first) if shapes[i].sees_all == shapes[layer].sees_all)


class LayerShape(NamedTuple):
  """What parameters a layer has; where all are alike, layers can be scanned."""

  recurs: bool = False  # Whether it has a state in place of keys and values.
  # Whether its heads are those of layers that attend to all tokens, if these differ.
  sees_all: bool = False
  shares: bool = False  # Whether it attends to keys and values of an earlier layer.
  widens: bool = False  # Whether its feed-forward is twice as wide.

  def has(self, place: str, name: str) -> bool:
    """Whether the layer has a part, such as 'attn', and 'q' or the like in it."""
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
  """What differs from layer to layer, as numbers, so that layers can be scanned."""

  slides: Any  # Whether a token attends to a window only.
  rotation: Any  # The index of its rotation.
  inputs: Any = None  # [B, T, i] of its own, beside the residual stream.
  # The keys and values that it shares: of packed rows, or an earlier layer's cache.
  shared: Any = None
  number: Any = None  # Its place among all layers, of which the first ones add features.


def layer_kinds(config: DecoderConfig) -> list[LayerKind] | None:
  """Lists the kinds of the layers; None if all are alike and attend to all tokens."""
  none = (False,) * config.num_layers
  sliding, nope = config.sliding or none, config.nope or none
  deep = config.vision is not None and config.vision.deep_count > 0
  if not any(sliding) and not any(nope) and not config.facts.has_full and not deep:
    return None
  local = config.local_rope_theta is not None
  # In the order of decoder.compute_angles: that of all layers, of sliding ones, and none.
  return [
    LayerKind(
      slides, 1 + local if stays else int(slides and local), number=i if deep else None
    )
    for i, (slides, stays) in enumerate(zip(sliding, nope, strict=True))
  ]
