"""The vision tower of config.json <-> VisionConfig.

agent/pictures.py reads preprocessor_config.json.
"""

from typing import Any, NamedTuple

from agent_r1_jax.models import decoder
from agent_r1_jax.models.files import json_fields
from agent_r1_jax.models.pictures import vision_config
from agent_r1_jax.models.pictures.vision_config import VisionConfig

# Fields of VisionConfig -> those of `vision_config`, in Qwen's towers.
_QWEN = {
  'num_layers': 'depth',
  'embed_dim': 'hidden_size',
  'num_heads': 'num_heads',
  'mlp_dim': 'intermediate_size',
  'out_dim': 'out_hidden_size',
  'patch_size': 'patch_size',
  'temporal_patch_size': 'temporal_patch_size',
  'channels': 'in_channels',
  'merge_size': 'spatial_merge_size',
}
# And those beside `vision_config`.
_QWEN_TOKENS = {
  'image_token_id': 'image_token_id',
  'video_token_id': 'video_token_id',
  'start_token_id': 'vision_start_token_id',
  'end_token_id': 'vision_end_token_id',
}


class _Tower(NamedTuple):
  """What `vision_config` has that differs from family to family."""

  activation: tuple[str, str]  # Its field, and the only value.
  theta: float  # That of its rotation.
  sizes: dict[str, str]  # Fields of VisionConfig -> those of `vision_config`.
  tokens: dict[str, str] = _QWEN_TOKENS
  # The field that lists layers: that of VisionConfig, its name there, and what
  # transformers takes where it is absent.
  layers: tuple[str, str, list[int]] | None = None
  flags: dict[str, str] = {}  # Those that are true or false.
  given: dict[str, Any] = {}  # Fields of VisionConfig that no file says.
  defaults: dict[str, Any] = {}  # Those that are not VisionConfig's.
  # Fields that must follow from others -> the field of VisionConfig with their value.
  same: dict[str, str] = {}
  kind: str = ''  # Its `model_type`, where that is not the model's.


_TOWERS = {
  'qwen2_5_vl': _Tower(
    ('hidden_act', 'silu'),
    10_000.0,
    _QWEN | {'window_size': 'window_size', 'tokens_per_second': 'tokens_per_second'},
    layers=('full_attention', 'fullatt_block_indexes', [7, 15, 23, 31]),
  ),
  'qwen3_vl': _Tower(
    ('hidden_act', 'gelu_pytorch_tanh'),
    10_000.0,
    _QWEN | {'num_places': 'num_position_embeddings'},
    layers=('deepstack', 'deepstack_visual_indexes', [8, 16, 24]),
    given={'colours': vision_config.SIGNED, 'films': True},
    defaults={'patch_size': 16, 'num_places': 2304},
  ),
  'gemma4': _Tower(
    ('hidden_activation', 'gelu_pytorch_tanh'),
    100.0,
    {
      'num_layers': 'num_hidden_layers',
      'embed_dim': 'hidden_size',
      'num_heads': 'num_attention_heads',
      'mlp_dim': 'intermediate_size',
      'patch_size': 'patch_size',
      'merge_size': 'pooling_kernel_size',
      'axis_places': 'position_embedding_size',
      'norm_eps': 'rms_norm_eps',
    },
    tokens={
      'image_token_id': 'image_token_id',
      'video_token_id': 'video_token_id',
      'start_token_id': 'boi_token_id',
      'end_token_id': 'eoi_token_id',
    },
    flags={'clips': 'use_clipped_linears', 'standardizes': 'standardize'},
    given={'colours': vision_config.SIGNED, 'temporal_patch_size': 1}
    | {'image_token_id': 258_880, 'video_token_id': 258_884}
    | {'start_token_id': 255_999, 'end_token_id': 258_882},
    defaults={'num_layers': 16, 'embed_dim': 768, 'num_heads': 12, 'mlp_dim': 3072}
    | {'patch_size': 16, 'merge_size': 3, 'axis_places': 10_240, 'norm_eps': 1e-6},
    same={'head_dim': 'head_dim', 'num_key_value_heads': 'num_heads'},
    kind='gemma4_vision',
  ),
}


def is_read(raw: dict[str, Any]) -> bool:
  """Whether a file has a tower, which models of some families may lack."""
  return isinstance(raw.get('vision_config'), dict)


def parse(raw: dict[str, Any], family: str) -> VisionConfig:
  """Reads the tower's shape and the tokens of pictures.

  Raises:
    ValueError: It computes something else; the message names the field.
  """
  tower, found = _TOWERS[family], raw.get('vision_config')
  if not isinstance(found, dict):
    raise ValueError(f'vision_config is {found!r:.40}; an object is needed')
  key, activation = tower.activation
  if (kind := found.get(key, activation)) != activation:
    raise ValueError(
      f'vision_config: {key} is {kind!r}; only {activation!r} is supported'
    )
  _check_rotation(found.get('rope_parameters') or {}, tower.theta)
  # The defaults of transformers are those of VisionConfig, but published files have the
  # number of channels as `in_chans`.
  found = {'in_channels': found.get('in_chans', 3)} | found
  absent = lambda name: tower.defaults.get(name, getattr(VisionConfig, name, None))
  types = {'norm_eps': float}
  sizes = {
    name: json_fields.read_number(found, key, types.get(name, int), absent(name))
    for name, key in tower.sizes.items()
  }
  tokens = {
    field: json_fields.read_number(raw, key)
    for field, key in tower.tokens.items()
    if key in raw
  }
  flags = {name: bool(found.get(key)) for name, key in tower.flags.items()}
  made: dict[str, Any] = {**tower.given, **sizes, **flags, **tokens}
  made.setdefault('out_dim', raw.get('hidden_size'))
  if tower.layers:
    field, key, default = tower.layers
    layers = found.get(key, default)
    if not isinstance(layers, list) or not all(type(x) is int for x in layers):
      raise ValueError(f'vision_config: {key} is {layers!r:.40}; give a list')
    made[field] = tuple(layers)
  if 'window_size' not in tower.sizes:  # Patches lie in windows that no layer sees.
    tokens_of_side = 1 if tower.same else 4
    made['window_size'] = tokens_of_side * sizes['patch_size'] * sizes['merge_size']
    made['full_attention'] = tuple(range(sizes['num_layers']))
  config = VisionConfig(**made)
  for key, field in tower.same.items():
    if (given := found.get(key)) not in (None, size := getattr(config, field)):
      raise ValueError(f'vision_config: {key} is {given!r}; by the others it is {size}')
  return config


def _check_rotation(rotation: dict[str, Any], theta: float) -> None:
  supported = {'rope_type': ('axial', 'default'), 'rope_theta': (theta,)}
  for key, x in rotation.items():
    if x not in supported.get(key, ()):
      only = supported.get(key, (None,))[0]
      raise ValueError(f'vision_config: {key} is {x!r}; only {only!r} is read')


def make(config: decoder.DecoderConfig) -> dict[str, Any]:
  """Makes the fields that `parse` reads, in the published form."""
  vision: Any = config.vision
  tower = _TOWERS[config.family]
  key, activation = tower.activation
  raw: dict[str, Any] = {'model_type': tower.kind or config.family, key: activation}
  raw |= {key: getattr(vision, name) for name, key in tower.sizes.items()}
  raw |= {key: getattr(vision, name) for key, name in tower.same.items()}
  raw |= {key: getattr(vision, name) for name, key in tower.flags.items()}
  if 'channels' in tower.sizes:
    raw['in_chans'] = vision.channels
  if tower.layers:
    field, key, _ = tower.layers
    raw[key] = list(getattr(vision, field))
  tokens = {key: getattr(vision, field) for field, key in tower.tokens.items()}
  return {'vision_config': raw} | tokens
