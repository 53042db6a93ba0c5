"""config.json of a Hugging Face directory <-> DecoderConfig.

Vision-language models have `vision_config`, which hf_vision.py reads. In published files
the decoder's fields are next to it; transformers 5 writes them to `text_config`.
"""

from collections.abc import Sequence
import os
import pathlib
from typing import Any

import jax.numpy as jnp

from agent_r1_jax.models import decoder, families
from agent_r1_jax.models.family import Family
from agent_r1_jax.models.files import hf_rope, hf_vision, json_fields, tensor_files

_FULL, _SLIDING, _LINEAR = 'full_attention', 'sliding_attention', 'linear_attention'
_AHEAD = 'use_bidirectional_attention'
# `model_type` of a vision-language model -> `model_type` of its language model, which
# alone is read if the file has no tower, or no family of the first name exists.
_TEXT_OF = {x.part_of: name for name, x in families.FAMILIES.items() if x.part_of}


def read(
  directory: str | os.PathLike, formats: Sequence[tensor_files.Format] = ()
) -> decoder.DecoderConfig:
  """Reads a config.json, or the one in a directory, as transformers 4 or 5 wrote it.

  A file in one of `formats` is read by that format.

  Raises:
    ValueError: The file is missing or broken, or asks for something that the decoder does
      not support; the message names the field.
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
  """Returns the path of the file that `read` reads, and its config.json fields."""
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
  """Makes config.json as transformers 4 writes it, and transformers 5 reads it."""
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
  if config.sees_ahead:
    raw[_AHEAD] = 'vision'
  if family.text_type:
    tied = {'tie_word_embeddings': config.tie_embeddings}
    raw = {'text_config': {'model_type': family.text_type} | raw, **tied}
  return names | raw | (hf_vision.make(config) if config.vision else {})


def token_ids(
  directory: pathlib.Path, vocab_size: int
) -> dict[str, int | list[int] | None]:
  """Finds the ids of the BOS, EOS and padding tokens, for config.json.

  They come from the directory's config.json, else from its tokenizer's special tokens.
  Without either they are None, because transformers gives a Llama without ids Llama 2's.

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
    raw = _flatten(raw)
    name = name if name in families.FAMILIES and hf_vision.is_read(raw) else whole
  if name not in families.FAMILIES:
    known = ', '.join(families.FAMILIES)
    hint = '' if name else '. The model of a run is in WORKDIR/model.'
    raise ValueError(f'model_type is {name!r}; supported are {known}{hint}')
  family = families.FAMILIES[name]
  raw = _flatten(raw) if family.sees else raw
  # A null cap means no cap, not the default.
  caps = {key for key, _ in family.numbers.values()}
  absent = lambda key: key not in raw or (raw[key] is None and key not in caps)
  raw = raw | {key: x for key, x in family.defaults.items() if absent(key)}
  raw = family.complete(raw) if family.complete else raw
  for key, supported in family.fixed.items():
    if raw.get(key, supported[0]) not in supported:
      raise ValueError(f'{key} is {raw[key]!r}; only {supported[0]!r} is supported')
  heads = json_fields.read_number(raw, 'num_attention_heads')
  head_dim = json_fields.read_number(raw, 'hidden_size') // heads
  # transformers 5 renamed the number of experts.
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
    vision=hf_vision.parse(raw, name) if family.sees else None,
    sees_ahead=family.sees and raw.get(_AHEAD) == 'vision',
  )
  for heads in (config.num_kv_heads, config.full_kv_heads):
    if heads and config.num_heads % heads:
      raise ValueError(
        f'num_key_value_heads {heads} does not divide num_attention_heads '
        f'{config.num_heads}'
      )
  return config


def _parse_layers(raw: dict[str, Any], family: Family) -> dict[str, Any]:
  """Reads the per-layer fields; a window as long as the context counts as none."""
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
  """Finds the layers without full attention: sliding ones, or those with a state."""
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
  """Lifts the fields of `text_config` to the top level."""
  text = raw.get('text_config')
  if text is None:
    return raw
  if not isinstance(text, dict):
    raise ValueError(f'text_config is {text!r:.40}; an object is needed')
  both = {key: x for key, x in text.items() if key != 'model_type'} | {
    key: x for key, x in raw.items() if key != 'text_config'
  }
  # transformers 4 wrote it to text_config, and the default value to the top level.
  tied = (source.get('tie_word_embeddings', False) for source in (raw, text))
  return both | {'tie_word_embeddings': any(tied)}
