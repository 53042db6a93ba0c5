"""config.json of a Hugging Face directory <-> DecoderConfig.

Published files of models that see have the decoder's fields beside `vision_config`;
transformers 5 writes them in an object `text_config`. agent/pictures.py reads
preprocessor_config.json.
"""

from collections.abc import Sequence
import os
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp

from agent_r1_jax.models import decoder, families
from agent_r1_jax.models.family import Family
from agent_r1_jax.models.files import hf_rope, json_fields, tensor_files
from agent_r1_jax.models.pictures import vision_config
from agent_r1_jax.models.pictures.vision_config import VisionConfig

# The types of layers.
_FULL, _SLIDING, _LINEAR = 'full_attention', 'sliding_attention', 'linear_attention'
# The `model_type` of models that see -> that of the language model, which alone is read.
_TEXT_OF = {x.part_of: name for name, x in families.FAMILIES.items() if x.part_of}
# Fields of VisionConfig -> those of `vision_config`.
_TOWER = {
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
_PICTURE_TOKENS = {
  'image_token_id': 'image_token_id',
  'video_token_id': 'video_token_id',
  'start_token_id': 'vision_start_token_id',
  'end_token_id': 'vision_end_token_id',
}


class _Tower(NamedTuple):
  """What `vision_config` has that differs from family to family."""

  activation: str
  sizes: dict[str, str]  # Further fields of VisionConfig -> those of `vision_config`.
  # The one that lists layers: its field, its name there, and what transformers takes
  # where it is absent.
  layers: tuple[str, str, list[int]]
  given: dict[str, Any] = {}  # Fields of VisionConfig that no file says.
  defaults: dict[str, Any] = {}  # Those that are not VisionConfig's.


_TOWERS = {
  'qwen2_5_vl': _Tower(
    'silu',
    {'window_size': 'window_size', 'tokens_per_second': 'tokens_per_second'},
    ('full_attention', 'fullatt_block_indexes', [7, 15, 23, 31]),
  ),
  'qwen3_vl': _Tower(
    'gelu_pytorch_tanh',
    {'num_places': 'num_position_embeddings'},
    ('deepstack', 'deepstack_visual_indexes', [8, 16, 24]),
    {'colours': vision_config.SIGNED, 'films': True},
    {'patch_size': 16, 'num_places': 2304},
  ),
}
_TOWER_ROPE = {'rope_type': 'axial', 'rope_theta': 10_000.0}


def read(
  directory: str | os.PathLike, formats: Sequence[tensor_files.Format] = ()
) -> decoder.DecoderConfig:
  """Reads a directory's config.json, or a file like it, as transformers 4 or 5 wrote it.

  What has one of `formats` is read as that says.

  Raises:
    ValueError: The file is missing or broken, or asks for what the decoder does not
      compute; the message names the field.
  """
  path, raw = read_raw(directory, formats)
  try:
    return _parse(raw)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error
  except TypeError as error:
    raise ValueError(
      f'{path}: a field has a wrong type ({error}); fetch it again'
    ) from error


def read_raw(
  directory: str | os.PathLike, formats: Sequence[tensor_files.Format] = ()
) -> tuple[pathlib.Path, dict[str, Any]]:
  """Returns the file that `read` reads, and the fields of config.json in it."""
  path = pathlib.Path(directory)
  if found := tensor_files.find_file(path, formats):
    format_, file = found
    return file, format_.read_config(file)
  if path.suffix == '.gguf' or (
    not (path / 'config.json').is_file() and any(path.glob('*.gguf'))
  ):
    raise ValueError(
      f'{path}: a GGUF file is read with formats=[gguf.FORMAT] of agent_r1_jax.contrib: '
      'in a run config.model.formats, else an argument of weights.load'
    )
  path = path if path.suffix == '.json' else path / 'config.json'
  return path, json_fields.read_json(path)


def make(config: decoder.DecoderConfig, dtype: Any) -> dict[str, Any]:
  """Makes the content of config.json, as transformers 4 writes it and 5 reads it."""
  family = config.facts
  names = {'architectures': [family.architecture], 'model_type': config.family}
  raw = {
    **{key: getattr(config, field) for field, key in family.sizes.values()},
    family.norm_eps: config.norm_eps,
    **hf_rope.make(config),
    'tie_word_embeddings': config.tie_embeddings,
    'max_position_embeddings': config.max_positions,
    'torch_dtype': jnp.dtype(dtype).name,
    **{key: x[0] for key, x in family.fixed.items() if x[0] is not None},
    **family.written,
    **{key: getattr(config, field) for field, (key, _) in family.numbers.items()},
    **{key: bool(getattr(config, field)) for field, key in family.flags.items()},
    **_make_layer_types(config),
    **({'norm_topk_prob': config.normalize_experts} if config.num_experts else {}),
  }
  if family.text_type:
    tied = {'tie_word_embeddings': config.tie_embeddings}
    raw = {'text_config': {'model_type': family.text_type} | raw, **tied}
  return names | raw | (_make_vision(config) if config.vision else {})


def token_ids(
  directory: pathlib.Path, vocab_size: int
) -> dict[str, int | list[int] | None]:
  """Finds the ids that generation stops at and pads with, for config.json.

  They are those of the directory's own config.json, else of its tokenizer's special
  tokens, else None: transformers takes Llama 2's ids for a Llama without any.

  Raises:
    ValueError: The tokenizer has more ids than the model.
  """
  names = ('tokenizer.json', 'tokenizer_config.json', 'config.json')
  tokenizer, named, known = (
    json_fields.read_json(directory / name) if (directory / name).is_file() else {}
    for name in names
  )
  known = _flatten(known)
  ids = {token['content']: token['id'] for token in tokenizer.get('added_tokens', ())}
  vocab = tokenizer.get('model', {}).get('vocab', ())
  largest = max([len(vocab) - 1, *ids.values()])
  if largest >= vocab_size:
    raise ValueError(
      f'{directory}: its tokenizer has ids up to {largest}, yet config.vocab_size is '
      f'{vocab_size}; take the tokenizer that the model was trained with'
    )
  result = {}
  for kind in ('bos', 'eos', 'pad'):
    token = named.get(f'{kind}_token')
    token = token['content'] if isinstance(token, dict) else token
    token_id = known.get(f'{kind}_token_id')
    result[f'{kind}_token_id'] = ids.get(token) if token_id is None else token_id
  return result


def _parse(raw: dict[str, Any]) -> decoder.DecoderConfig:
  name = raw.get('model_type')
  if isinstance(name, str) and (whole := _TEXT_OF.get(name)):
    name, raw = whole, _flatten(raw)
  if name not in families.FAMILIES:
    known = ', '.join(families.FAMILIES)
    hint = '' if name else '. The model of a run is in WORKDIR/model.'
    raise ValueError(f'model_type is {name!r}; supported are {known}{hint}')
  family = families.FAMILIES[name]
  raw = _flatten(raw) if family.sees else raw
  # A cap that is null is none, and not the default.
  caps = {key for key, _ in family.numbers.values()}
  absent = lambda key: key not in raw or (raw[key] is None and key not in caps)
  raw = raw | {key: x for key, x in family.defaults.items() if absent(key)}
  raw = family.complete(raw) if family.complete else raw
  for key, supported in family.fixed.items():
    if raw.get(key, supported[0]) not in supported:
      raise ValueError(f'{key} is {raw[key]!r}; only {supported[0]!r} is supported')
  heads = json_fields.read_number(raw, 'num_attention_heads')
  head_dim = json_fields.read_number(raw, 'hidden_size') // heads
  # transformers 5 has another name for the number of experts.
  defaults = {'K': heads, 'H': head_dim, 'E': raw.get('num_local_experts')}
  layers = _parse_layers(raw, family)
  numbers = {field: bool(raw.get(key)) for field, key in family.flags.items()}
  numbers |= {
    field: json_fields.read_number(raw, key, default=defaults.get(letter))
    if raw.get(key) or letter not in family.optional
    else 0
    for letter, (field, key) in family.sizes.items()
  }
  numbers |= {
    field: json_fields.read_number(raw, key, kind)
    for field, (key, kind) in family.numbers.items()
    if raw.get(key) is not None
  }
  config = decoder.DecoderConfig(
    family=name,
    **numbers,
    **layers,
    **hf_rope.parse(raw, family, any(layers['sliding'])),
    norm_eps=json_fields.read_number(raw, family.norm_eps, float),
    normalize_experts=bool(raw.get('norm_topk_prob', False)),
    tie_embeddings=bool(raw.get('tie_word_embeddings', False)),
    max_positions=json_fields.read_number(raw, 'max_position_embeddings'),
    vision=_parse_vision(raw, _TOWERS[name]) if family.sees else None,
  )
  for heads in (config.num_kv_heads, config.full_kv_heads):
    if heads and config.num_heads % heads:
      raise ValueError(
        f'num_key_value_heads {heads} does not divide num_attention_heads '
        f'{config.num_heads}'
      )
  return config


def _parse_layers(raw: dict[str, Any], family: Family) -> dict[str, Any]:
  """Finds what differs from layer to layer; a window of the whole context is none."""
  L = json_fields.read_number(raw, 'num_hidden_layers')
  sliding = _parse_layer_types(raw, family, L)
  recurrent, sliding = (sliding, ()) if family.is_recurrent else ((), sliding)
  window = json_fields.read_number(raw, 'sliding_window') if any(sliding) else 0
  whole = window >= json_fields.read_number(raw, 'max_position_embeddings')
  if not any(sliding) or (whole and not family.has_full):
    sliding, window = (), 0
  nope = ()
  if family.skips_rope:
    every = json_fields.read_number(raw, 'no_rope_layer_interval')
    rope = raw.get('no_rope_layers') or [(i + 1) % every != 0 for i in range(L)]
    if not isinstance(rope, list) or len(rope) < L:
      raise ValueError(f'no_rope_layers is {rope!r:.40}; a list of {L} numbers is needed')
    nope = tuple(not x for x in rope[:L])
  found = {'sliding': sliding, 'window': window, 'nope': nope if any(nope) else ()}
  return found | {'recurrent': recurrent}


def _parse_layer_types(raw: dict[str, Any], family: Family, L: int) -> tuple[bool, ...]:
  """Finds the layers that do not attend to all tokens: that slide, or have a state."""
  kinds, other_kind = raw.get('layer_types'), _LINEAR if family.is_recurrent else _SLIDING
  if kinds is None:
    found = family.is_recurrent or family.is_sliding
    return tuple(found(raw, i) for i in range(L)) if found else ()
  mixes = family.mixes_types or family.is_recurrent
  known = [_FULL, other_kind] if mixes else [_FULL]
  if not isinstance(kinds, list) or len(kinds) != L:
    raise ValueError(f'layer_types is {kinds!r:.40}; a list of {L} types is needed')
  if other := [kind for kind in kinds if kind not in known]:
    raise ValueError(
      f'layer_types: {other[0]} is in use; supported are {" and ".join(known)}'
    )
  if _SLIDING in kinds and raw.get('use_sliding_window') is False:
    raise ValueError(
      f'layer_types: {_SLIDING} is in use, though use_sliding_window is false; take '
      'the config.json that came with the model'
    )
  return tuple(kind == other_kind for kind in kinds)


def _make_layer_types(config: decoder.DecoderConfig) -> dict[str, Any]:
  """Makes the fields that `_parse_layers` reads."""
  family, L, raw = config.facts, config.num_layers, {}
  if family.is_sliding:
    raw['sliding_window'] = config.window or None
  if family.mixes_types:
    sliding = config.sliding or (False,) * L
    raw['layer_types'] = [_SLIDING if x else _FULL for x in sliding]
  if config.recurrent:
    raw['layer_types'] = [_LINEAR if x else _FULL for x in config.recurrent]
  if 'use_sliding_window' in family.written:
    raw['use_sliding_window'] = any(config.sliding)
  if family.skips_rope:
    raw['no_rope_layers'] = [int(not x) for x in config.nope or (False,) * L]
  return raw


def _flatten(raw: dict[str, Any]) -> dict[str, Any]:
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


def _parse_vision(raw: dict[str, Any], tower: _Tower) -> VisionConfig:
  """Reads the tower's shape and the tokens of pictures."""
  found = raw.get('vision_config')
  if not isinstance(found, dict):
    raise ValueError(f'vision_config is {found!r:.40}; an object is needed')
  if (kind := found.get('hidden_act', tower.activation)) != tower.activation:
    raise ValueError(
      f'vision_config: hidden_act is {kind!r}; only {tower.activation!r} is supported'
    )
  rotation = found.get('rope_parameters') or {}
  for key, x in rotation.items():
    if x != _TOWER_ROPE.get(key):
      raise ValueError(
        f'vision_config: {key} is {x!r}; only {_TOWER_ROPE.get(key)!r} is read'
      )
  field, key, default = tower.layers
  layers = found.get(key, default)
  if not isinstance(layers, list) or not all(type(x) is int for x in layers):
    raise ValueError(f'vision_config: {key} is {layers!r:.40}; give a list')
  # The defaults of transformers are those of VisionConfig, but published files have the
  # number of channels as `in_chans`.
  found = {'in_channels': found.get('in_chans', 3)} | found
  absent = lambda name: tower.defaults.get(name, getattr(VisionConfig, name, None))
  sizes = {
    name: json_fields.read_number(found, key, default=absent(name))
    for name, key in (_TOWER | tower.sizes).items()
  }
  tokens = {
    field: json_fields.read_number(raw, key)
    for field, key in _PICTURE_TOKENS.items()
    if key in raw
  }
  made: dict[str, Any] = {field: tuple(layers), **sizes, **tokens, **tower.given}
  if 'window_size' not in tower.sizes:  # Patches lie in windows that no layer sees.
    made['window_size'] = 4 * sizes['patch_size'] * sizes['merge_size']
    made['full_attention'] = tuple(range(sizes['num_layers']))
  return VisionConfig(**made)


def _make_vision(config: decoder.DecoderConfig) -> dict[str, Any]:
  """Makes the fields that `_parse_vision` reads, in the published form."""
  vision: Any = config.vision
  tower = _TOWERS[config.family]
  field, key, _ = tower.layers
  return {
    'vision_config': {
      'model_type': config.family,
      'hidden_act': tower.activation,
      **{key: getattr(vision, name) for name, key in (_TOWER | tower.sizes).items()},
      'in_chans': vision.channels,
      key: list(getattr(vision, field)),
    },
    **{key: getattr(vision, field) for field, key in _PICTURE_TOKENS.items()},
  }
