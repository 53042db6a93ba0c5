"""The vision tower of config.json <-> VisionConfig.

Published files have the decoder's fields beside `vision_config`; transformers 5 writes
them in an object `text_config`. agent/pictures.py reads preprocessor_config.json.
"""

from typing import Any

from agent_r1_jax.models.files import json_fields
from agent_r1_jax.models.pictures.vision_config import VisionConfig

# Fields of VisionConfig -> those of `vision_config`.
_SIZES = {
  'num_layers': 'depth',
  'embed_dim': 'hidden_size',
  'num_heads': 'num_heads',
  'mlp_dim': 'intermediate_size',
  'out_dim': 'out_hidden_size',
  'patch_size': 'patch_size',
  'temporal_patch_size': 'temporal_patch_size',
  'channels': 'in_channels',
  'merge_size': 'spatial_merge_size',
  'window_size': 'window_size',
  'tokens_per_second': 'tokens_per_second',
}
# And those beside `vision_config`.
_TOKENS = {
  'image_token_id': 'image_token_id',
  'video_token_id': 'video_token_id',
  'start_token_id': 'vision_start_token_id',
  'end_token_id': 'vision_end_token_id',
}
# What transformers takes where a file has no such field.
_DEFAULTS = {
  'patch_size': 14,
  'temporal_patch_size': 2,
  'spatial_merge_size': 2,
  'window_size': 112,
  'tokens_per_second': 4,
}
_FULL = [7, 15, 23, 31]
_ROPE = {'rope_type': 'axial', 'rope_theta': 10_000.0}


def flatten(raw: dict[str, Any]) -> dict[str, Any]:
  """Puts the fields of a `text_config` beside the others."""
  text = raw.get('text_config')
  if text is None:
    return raw
  if not isinstance(text, dict):
    raise ValueError(f'text_config is {text!r:.40}; an object is needed')
  both = {key: x for key, x in text.items() if key != 'model_type'} | {
    key: x for key, x in raw.items() if key != 'text_config'
  }
  # transformers 4 wrote it in text_config, and its default beside it.
  tied = (source.get('tie_word_embeddings', False) for source in (raw, text))
  return both | {'tie_word_embeddings': any(tied)}


def parse(raw: dict[str, Any]) -> VisionConfig:
  """Reads the tower's shape and the tokens of pictures.

  Raises:
    ValueError: A field is missing or wrong, or asks for what the tower does not compute.
  """
  found = raw.get('vision_config')
  if not isinstance(found, dict):
    raise ValueError(f'vision_config is {found!r:.40}; an object is needed')
  if found.get('hidden_act', 'silu') != 'silu':
    raise ValueError(
      f"vision_config: hidden_act is {found['hidden_act']!r}; only 'silu' is supported"
    )
  rotation = found.get('rope_parameters') or {}
  for key, x in rotation.items():
    if x != _ROPE.get(key):
      raise ValueError(f'vision_config: {key} is {x!r}; only {_ROPE.get(key)!r} is read')
  full = found.get('fullatt_block_indexes', _FULL)
  if not isinstance(full, list) or not all(type(x) is int for x in full):
    raise ValueError(f'vision_config: fullatt_block_indexes is {full!r:.40}; give a list')
  # Published files have the number of channels as `in_chans`.
  defaults = _DEFAULTS | {'in_channels': found.get('in_chans', 3)}
  sizes = {
    field: json_fields.read_number(found, key, default=defaults.get(key))
    for field, key in _SIZES.items()
  }
  tokens = {
    field: json_fields.read_number(raw, key)
    for field, key in _TOKENS.items()
    if key in raw
  }
  return VisionConfig(full_attention=tuple(full), **sizes, **tokens)


def make(config: VisionConfig) -> dict[str, Any]:
  """Makes the fields that `parse` reads, in the published form."""
  return {
    'vision_config': {
      'model_type': 'qwen2_5_vl',
      'hidden_act': 'silu',
      **{key: getattr(config, field) for field, key in _SIZES.items()},
      'in_chans': config.channels,
      'fullatt_block_indexes': list(config.full_attention),
    },
    **{key: getattr(config, field) for field, key in _TOKENS.items()},
  }
