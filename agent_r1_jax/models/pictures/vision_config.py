"""The shape of a vision tower, its parameters, and the control tokens of pictures."""

import dataclasses
import math
from typing import Any

# Means, then standard deviations, that normalise red, green and blue from 0 to 1: CLIP's,
# and those that map to -1 to 1.
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIGNED = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


@dataclasses.dataclass(frozen=True)
class VisionConfig:
  """The shape of a tower that turns patches of pictures into embeddings of tokens.

  A patch is a square with sides of `patch_size` pixels. A square with sides of
  `merge_size` patches becomes one token of the decoder.
  """

  num_layers: int
  embed_dim: int
  num_heads: int
  mlp_dim: int
  out_dim: int  # The decoder's embed_dim.
  patch_size: int = 14
  # The frames that a patch spans in a film; a picture is repeated to fill them.
  temporal_patch_size: int = 2
  films: bool = False  # True if prompts may have films, as pictures of several frames.
  channels: int = 3
  merge_size: int = 2
  window_size: int = 112  # The side of a window, in pixels.
  # The layers in which a patch attends to its complete picture instead of its window.
  full_attention: tuple[int, ...] = ()
  # Position embeddings, a square grid stretched over each picture; 0 for none.
  num_places: int = 0
  # If a token is the mean of its patches (pooled_tower.py): the number of columns, and of
  # rows, with embeddings; whether projections clip; whether features are standardized.
  axis_places: int = 0
  clips: bool = False
  standardizes: bool = False
  norm_eps: float = 1e-6
  # Layers whose outputs are features too; the decoder's first layers add them, one each
  # (DeepStack, arXiv 2406.04334).
  deepstack: tuple[int, ...] = ()
  colours: tuple[tuple[float, ...], tuple[float, ...]] = CLIP
  tokens_per_second: int = 4  # For exports: films of Qwen2.5-VL are not supported.
  # Control tokens: one per token of a picture or a film, then its start and its end.
  image_token_id: int = 151655
  video_token_id: int = 151656
  start_token_id: int = 151652
  end_token_id: int = 151653

  def __post_init__(self):
    if self.embed_dim % self.num_heads or self.head_dim % 4:
      raise ValueError(
        f'vision_config: hidden_size {self.embed_dim} over num_heads {self.num_heads} is '
        'no multiple of 4, which rows and columns need.'
      )
    if self.channels != 3:
      raise ValueError(f'vision_config: in_channels is {self.channels}; only 3 is read.')
    if self.window_tokens < 1:
      raise ValueError(
        f'vision_config: window_size {self.window_size} is less than a token of '
        f'{self.token_size} pixels.'
      )
    if any(not 0 <= layer < self.num_layers for layer in self.full_attention):
      raise ValueError(
        f'vision_config: fullatt_block_indexes {self.full_attention} are not all among '
        f'the {self.num_layers} layers.'
      )
    deep = self.deepstack
    if list(deep) != sorted({*deep} & {*range(self.num_layers)}):
      raise ValueError(
        f'vision_config: deepstack_visual_indexes {deep} must rise, and be among the '
        f'{self.num_layers} layers.'
      )
    if math.isqrt(self.num_places) ** 2 != self.num_places:
      raise ValueError(
        f'vision_config: num_position_embeddings is {self.num_places}, no square.'
      )

  @property
  def head_dim(self) -> int:
    """The size of a head."""
    return self.embed_dim // self.num_heads

  @property
  def pools(self) -> bool:
    """Whether a token is the mean of its patches."""
    return self.axis_places > 0

  @property
  def clip_count(self) -> int:
    """How many layers have clipping bounds."""
    return self.num_layers if self.clips else 0

  @property
  def standard_dim(self) -> int:
    """The size of the bias and scale that standardize features."""
    return self.embed_dim if self.standardizes else 0

  @property
  def feature_dim(self) -> int:
    """The size of a token's features, of all depths together."""
    return self.out_dim * (1 + len(self.deepstack))

  @property
  def deep_count(self) -> int:
    """How many layers of the decoder add features."""
    return len(self.deepstack)

  @property
  def merged_dim(self) -> int:
    """The size of a token's patches together."""
    return self.embed_dim * self.merge_size**2

  @property
  def token_size(self) -> int:
    """The side of a token, in pixels."""
    return self.patch_size * self.merge_size

  @property
  def window_tokens(self) -> int:
    """The side of a window, in tokens."""
    return self.window_size // self.token_size

  @property
  def window_patches(self) -> int:
    """The number of patches in a window."""
    return (self.window_tokens * self.merge_size) ** 2


# The parameters of a tower, as rows of the tables in parameters.py. Letters: A layers, W
# embed, M heads, h head dim, J feed-forward, Q embed of all patches of a token, C
# channels, t frames and p pixels of a patch, d embed of the decoder; w and q are W and Q
# that no mesh splits; a layers of DeepStack, o positions, g positions on an axis; x
# layers with bounds, and y is w if features are standardized, else 0.
#
# Letter -> the field of VisionConfig with its size.
SIZES = {
  'A': 'num_layers',
  'W': 'embed_dim',
  'w': 'embed_dim',
  'M': 'num_heads',
  'h': 'head_dim',
  'J': 'mlp_dim',
  'Q': 'merged_dim',
  'q': 'merged_dim',
  'C': 'channels',
  't': 'temporal_patch_size',
  'p': 'patch_size',
  'a': 'deep_count',
  'o': 'num_places',
  'g': 'axis_places',
  'x': 'clip_count',
  'y': 'standard_dim',
}
_ATTENTION = (
  ('attn/qkv/kernel', 'attn.qkv.weight', 'W>3Mh'),
  ('attn/qkv/bias', 'attn.qkv.bias', '>3Mh'),
  ('attn/out/kernel', 'attn.proj.weight', 'Mh>W'),
  ('attn/out/bias', 'attn.proj.bias', 'w'),
)
_BLOCK = (
  ('attn_norm/scale', 'norm1.weight', 'w'),
  *_ATTENTION,
  ('mlp_norm/scale', 'norm2.weight', 'w'),
  ('gate/kernel', 'mlp.gate_proj.weight', 'W>J'),
  ('gate/bias', 'mlp.gate_proj.bias', 'J'),
  ('up/kernel', 'mlp.up_proj.weight', 'W>J'),
  ('up/bias', 'mlp.up_proj.bias', 'J'),
  ('down/kernel', 'mlp.down_proj.weight', 'J>W'),
  ('down/bias', 'mlp.down_proj.bias', 'w'),
)
_MERGER = (
  ('in_norm/scale', 'ln_q.weight', 'w'),
  ('in/kernel', 'mlp.0.weight', 'Q>q'),
  ('in/bias', 'mlp.0.bias', 'q'),
  ('out/kernel', 'mlp.2.weight', 'Q>d'),
  ('out/bias', 'mlp.2.bias', 'd'),
)
# A block of Qwen3-VL: norms with a bias, and a feed-forward without a gate.
_PLAIN_BLOCK = (
  ('attn_norm/scale', 'norm1.weight', 'w'),
  ('attn_norm/bias', 'norm1.bias', 'w'),
  *_ATTENTION,
  ('mlp_norm/scale', 'norm2.weight', 'w'),
  ('mlp_norm/bias', 'norm2.bias', 'w'),
  ('up/kernel', 'mlp.linear_fc1.weight', 'W>J'),
  ('up/bias', 'mlp.linear_fc1.bias', 'J'),
  ('down/kernel', 'mlp.linear_fc2.weight', 'J>W'),
  ('down/bias', 'mlp.linear_fc2.bias', 'w'),
)


def _list_merger(normed: str) -> tuple[tuple[str, str, str], ...]:
  """Lists parameters of a merger whose norm is over patches (w) or over tokens (q)."""
  return (
    ('in_norm/scale', 'norm.weight', normed),
    ('in_norm/bias', 'norm.bias', normed),
    ('in/kernel', 'linear_fc1.weight', 'Q>q'),
    ('in/bias', 'linear_fc1.bias', 'q'),
    ('out/kernel', 'linear_fc2.weight', 'Q>d'),
    ('out/bias', 'linear_fc2.bias', 'd'),
  )


# Path, tensor and dimensions of each parameter. The first one is a convolution's.
_PATCH = ('vision/patch/kernel', 'visual.patch_embed.proj.weight', 'Ctpp>W', True)
PARAMETERS: tuple[Any, ...] = (
  _PATCH,
  *((f'vision/blocks/{x}', f'visual.blocks.{{}}.{y}', f'A{z}') for x, y, z in _BLOCK),
  *((f'vision/merger/{x}', f'visual.merger.{y}', z) for x, y, z in _MERGER),
)
DEEP_PARAMETERS: tuple[Any, ...] = (
  _PATCH,
  ('vision/patch/bias', 'visual.patch_embed.proj.bias', 'w'),
  ('vision/places/embedding', 'visual.pos_embed.weight', 'ow'),
  *(
    (f'vision/blocks/{x}', f'visual.blocks.{{}}.{y}', f'A{z}') for x, y, z in _PLAIN_BLOCK
  ),
  *((f'vision/merger/{x}', f'visual.merger.{y}', z) for x, y, z in _list_merger('w')),
  *(
    (f'vision/deep_mergers/{x}', f'visual.deepstack_merger_list.{{}}.{y}', f'a{z}')
    for x, y, z in _list_merger('q')
  ),
)
# Gemma 4's norms and projections, with their names in files.
_POOLED_NORMS = {
  'attn_norm': 'input_layernorm',
  'attn_out_norm': 'post_attention_layernorm',
  'mlp_norm': 'pre_feedforward_layernorm',
  'mlp_out_norm': 'post_feedforward_layernorm',
}
_POOLED_PROJECTIONS = (
  *((f'attn/{x}', f'self_attn.{x}_proj', 'W>Mh') for x in 'qkv'),
  ('attn/out', 'self_attn.o_proj', 'Mh>W'),
  ('gate', 'mlp.gate_proj', 'W>J'),
  ('up', 'mlp.up_proj', 'W>J'),
  ('down', 'mlp.down_proj', 'J>W'),
)
_POOLED_BLOCK = (
  *((f'{x}/scale', f'{y}.weight', 'Aw') for x, y in _POOLED_NORMS.items()),
  *((f'attn/{x}/scale', f'self_attn.{x}.weight', 'Ah') for x in ('q_norm', 'k_norm')),
  *(
    (f'{x}/linear/kernel', f'{y}.linear.weight', f'A{z}')
    for x, y, z in _POOLED_PROJECTIONS
  ),
  *(
    (f'{x}/{side}_{bound}', f'{y}.{side}_{bound}', 'x')
    for x, y, _ in _POOLED_PROJECTIONS
    for side in ('input', 'output')
    for bound in ('min', 'max')
  ),
)
_EMBEDDER = 'vision_tower.patch_embedder'
POOLED_PARAMETERS: tuple[Any, ...] = (
  ('vision/flat_patch/kernel', f'{_EMBEDDER}.input_proj.weight', 'ppC>W'),
  ('vision/axis_places/embedding', f'{_EMBEDDER}.position_embedding_table', '2gw'),
  *(
    (f'vision/blocks/{x}', f'vision_tower.encoder.layers.{{}}.{y}', z)
    for x, y, z in _POOLED_BLOCK
  ),
  ('vision/standard_norm/bias', 'vision_tower.std_bias', 'y'),
  ('vision/standard_norm/scale', 'vision_tower.std_scale', 'y'),
  ('vision/projection/kernel', 'embed_vision.embedding_projection.weight', 'W>d'),
)
