"""config.json of a Hugging Face directory <-> DecoderConfig."""

import json
import os
import pathlib
from typing import Any

import jax.numpy as jnp

from agent_r1_jax.models import decoder, families, gguf_files

# Several times what the largest models have: a damaged file must not make us build lists
# of a billion layers before the tensors are compared with it.
_MAXIMA = {
  'num_hidden_layers': 1_000,
  'hidden_size': 131_072,
  'intermediate_size': 1_048_576,
  'num_attention_heads': 1_024,
  'num_key_value_heads': 1_024,
  'head_dim': 4_096,
  'vocab_size': 4_194_304,
  'max_position_embeddings': 1 << 30,
}
_LLAMA3_KEYS = (
  'factor',
  'low_freq_factor',
  'high_freq_factor',
  'original_max_position_embeddings',
)


def read(directory: str | os.PathLike) -> decoder.DecoderConfig:
  """Reads a directory's config.json, or a file like it, as transformers 4 or 5 wrote it.

  A GGUF file, or a directory that holds one in place of safetensors, has its own.

  Raises:
    ValueError: The file is missing or broken, or asks for what the decoder does not
      compute; the message names the field.
  """
  path, raw = read_raw(directory)
  try:
    return _parse(raw)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error
  except TypeError as error:
    raise ValueError(
      f'{path}: a field has a wrong type ({error}); fetch it again'
    ) from error


def read_raw(directory: str | os.PathLike) -> tuple[pathlib.Path, dict[str, Any]]:
  """Returns the file that `read` reads, and the fields of config.json in it."""
  path = pathlib.Path(directory)
  if file := gguf_files.find_file(path):
    return file, gguf_files.read_config(file)
  path = path if path.suffix == '.json' else path / 'config.json'
  return path, read_json(path)


def make(config: decoder.DecoderConfig, dtype: Any) -> dict[str, Any]:
  """Makes the content of config.json, as transformers 4 writes it and 5 reads it."""
  family, rope = config.facts, config.rope_scaling
  return {
    'architectures': [family.architecture],
    'model_type': config.family,
    **{key: getattr(config, field) for field, key in families.SIZES.values()},
    family.norm_eps: config.norm_eps,
    'rope_theta': config.rope_theta,
    'rope_scaling': rope and {'rope_type': 'llama3', **rope},
    'tie_word_embeddings': config.tie_embeddings,
    'max_position_embeddings': config.max_positions,
    'torch_dtype': jnp.dtype(dtype).name,
    **{key: x[0] for key, x in family.fixed.items() if x[0] is not None},
    **family.written,
  }


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
    read_json(directory / name) if (directory / name).is_file() else {} for name in names
  )
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


def read_json(path: pathlib.Path, kind: type = dict) -> Any:
  """Reads the object in a JSON file; a ValueError names a missing or broken file."""
  if path.parent.is_file():
    raise ValueError(f'{path.parent}: is a file; give the directory that holds it.')
  if not path.parent.is_dir():
    raise ValueError(
      f'{path.parent}: no such directory; give one with a model in HF layout. Names of '
      'the Hub are not looked up.'
    )
  if not path.is_file() and (path.parent / 'adapter_config.json').is_file():
    raise ValueError(
      f'{path.parent}: holds adapters only; give the merged model, which a run writes to '
      'WORKDIR/model, or merge them (peft: merge_and_unload, then save_pretrained).'
    )
  if not path.is_file():
    raise ValueError(f'{path}: missing; a model in HF layout has it')
  try:
    value = json.loads(path.read_text('utf-8'))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path}: not JSON ({error}); fetch it again') from error
  if not isinstance(value, kind):
    name = 'array' if kind is list else 'object'
    raise ValueError(f'{path}: holds no JSON {name}; fetch it again')
  return value


def _parse(raw: dict[str, Any]) -> decoder.DecoderConfig:
  name = raw.get('model_type')
  if name not in families.FAMILIES:
    known = ', '.join(families.FAMILIES)
    hint = '' if name else '. The model of a run is in WORKDIR/model.'
    raise ValueError(f'model_type is {name!r}; supported are {known}{hint}')
  family = families.FAMILIES[name]
  raw = raw | {key: x for key, x in family.defaults.items() if raw.get(key) is None}
  _check_supported(raw, family)
  theta, scaling = _parse_rope(raw)
  heads = read_number(raw, 'num_attention_heads')
  defaults = {'K': heads, 'H': read_number(raw, 'hidden_size') // heads}
  config = decoder.DecoderConfig(
    family=name,
    **{
      field: read_number(raw, key, default=defaults.get(letter))
      for letter, (field, key) in families.SIZES.items()
    },
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=read_number(raw, family.norm_eps, float),
    tie_embeddings=bool(raw.get('tie_word_embeddings', False)),
    max_positions=read_number(raw, 'max_position_embeddings'),
  )
  if config.num_heads % config.num_kv_heads:
    raise ValueError(
      f'num_key_value_heads {config.num_kv_heads} does not divide num_attention_heads '
      f'{config.num_heads}'
    )
  return config


def read_number(
  raw: dict[str, Any], key: str, kind: type = int, default: Any = None
) -> Any:
  """Reads a positive number of config.json; a ValueError names the field."""
  value = raw.get(key)
  value = default if value is None else value
  allowed = (int, float) if kind is float else int
  if isinstance(value, bool) or not isinstance(value, allowed) or value <= 0:
    raise ValueError(f'{key} is {value!r}; a positive {kind.__name__} is needed')
  maximum = _MAXIMA.get(key, 1e30)
  if not value <= maximum:  # nor is NaN
    raise ValueError(
      f'{key} is {str(value):.20}; no known model has more than {maximum:,}'
    )
  return kind(value)


def _check_supported(raw: dict[str, Any], family: families.Family) -> None:
  for key, supported in family.fixed.items():
    if raw.get(key, supported[0]) not in supported:
      raise ValueError(f'{key} is {raw[key]!r}; only {supported[0]!r} is supported')
  kinds, window = raw.get('layer_types'), raw.get('sliding_window', 4096)
  if kinds is None and raw.get('use_sliding_window', False) and window is not None:
    # Files of transformers 4: the layers from max_window_layers on use the window.
    if raw.get('max_window_layers', 28) < read_number(raw, 'num_hidden_layers'):
      kinds = ['sliding_attention']
  if other := sorted(set(kinds or ()) - {'full_attention'}):
    raise ValueError(
      f'layer_types: {other[0]} is in use; only full attention is supported'
    )


def _parse_rope(raw: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
  """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
  present = [name for name in ('rope_scaling', 'rope_parameters') if raw.get(name)]
  parsed = [_parse_rotation(raw, name, _flat_rope(raw, name)) for name in present]
  if not parsed:
    return _parse_rotation(raw, 'rope_scaling', {})
  if parsed[0] != parsed[-1]:
    raise ValueError(
      'rope_scaling and rope_parameters differ; leave one of them, that of the training'
    )
  return parsed[0]


def _flat_rope(raw: dict[str, Any], name: str) -> dict[str, Any]:
  """Finds the rotation of full attention; transformers 5 may nest one a kind of layer."""
  rope = raw[name]
  if not isinstance(rope, dict):
    raise ValueError(f'{name} is {rope!r}; an object is needed')
  nested = set(rope) & {'full_attention', 'sliding_attention', 'chunked_attention'}
  if not nested:
    return rope
  # _check_supported has seen that every layer has full attention.
  if set(rope) != nested or not isinstance(rope.get('full_attention'), dict):
    raise ValueError(
      f'{name} has {sorted(rope)}; by kinds of layers, it needs an object for '
      "'full_attention' and nothing beside kinds of layers"
    )
  return rope['full_attention']


def _parse_rotation(
  raw: dict[str, Any], name: str, rope: dict[str, Any]
) -> tuple[float, dict[str, Any] | None]:
  """Reads θ and the scaling from `rope`, or else from the file's own fields."""
  kinds = [rope[key] for key in ('rope_type', 'type') if rope.get(key) is not None]
  if kinds and kinds[0] != kinds[-1]:
    raise ValueError(f'{name} has two types, {kinds}; leave one of them')
  kind = kinds[0] if kinds else 'default'
  if kind not in ('default', 'llama3'):
    raise ValueError(f"rope type is {kind!r}; supported are 'default' and 'llama3'")
  rope = {'rope_theta': raw.get('rope_theta')} | rope
  theta = read_number(rope, 'rope_theta', float)
  fraction = rope.get('partial_rotary_factor', raw.get('partial_rotary_factor'))
  if fraction not in (None, 1):
    raise ValueError(f'partial_rotary_factor is {fraction!r}; only 1 is supported')
  read = {'rope_theta', 'rope_type', 'type', 'partial_rotary_factor'}
  read |= set(_LLAMA3_KEYS if kind == 'llama3' else ())
  for key in sorted(set(rope) - read):
    if rope[key] is not None:
      raise ValueError(
        f'{name}.{key} is {rope[key]!r}, which rope type {kind!r} does not read; name '
        'the type that the model was trained with, or leave it out'
      )
  if kind == 'default':
    return theta, None
  types = {'original_max_position_embeddings': int}
  return theta, {
    key: read_number(rope, key, types.get(key, float)) for key in _LLAMA3_KEYS
  }
