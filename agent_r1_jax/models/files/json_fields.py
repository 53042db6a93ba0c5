"""Reads the JSON files of models, and checks the numbers in them."""

import json
import pathlib
from typing import Any

# Several times the sizes of the largest models. Without maxima, a damaged file could make
# us build a list of a billion layers before its tensors are checked.
_MAXIMA = {
  'num_hidden_layers': 1_000,
  'hidden_size': 131_072,
  'intermediate_size': 1_048_576,
  'num_attention_heads': 1_024,
  'num_key_value_heads': 1_024,
  'head_dim': 4_096,
  'num_experts': 65_536,
  'num_local_experts': 65_536,
  'vocab_size': 4_194_304,
  'max_position_embeddings': 1 << 30,
  'depth': 1_000,
  'num_heads': 1_024,
  'patch_size': 1_024,
  'temporal_patch_size': 64,
  'spatial_merge_size': 64,
  'window_size': 65_536,
  'pooling_kernel_size': 64,
  'position_embedding_size': 1 << 20,
}


def read_json(path: pathlib.Path, kind: type = dict) -> Any:
  """Reads a JSON object, or another `kind`; a ValueError names the broken file."""
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


def read_number(
  raw: dict[str, Any], key: str, kind: type = int, default: Any = None
) -> Any:
  """Reads a positive number from config.json; a ValueError names the field."""
  value = raw.get(key)
  value = default if value is None else value
  allowed = (int, float) if kind is float else int
  if isinstance(value, bool) or not isinstance(value, allowed) or value <= 0:
    raise ValueError(f'{key} is {value!r}; a positive {kind.__name__} is needed')
  maximum = _MAXIMA.get(key, 1e30)
  if not value <= maximum:  # also true for NaN
    raise ValueError(
      f'{key} is {str(value):.20}; no known model has more than {maximum:,}'
    )
  return kind(value)
