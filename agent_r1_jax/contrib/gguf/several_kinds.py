"""Reads GGUF metadata of models whose layers differ: Gemma 4 and Qwen3.5.

llama.cpp has arrays, or two keys, for numbers that differ between sliding and other
layers. These functions put the sliding layers' numbers under the usual keys, and return
the fields of config.json that follow from the rest.
"""

from collections.abc import Collection
from typing import Any

import numpy as np

# A file's metadata, without the architecture in its keys.
Facts = dict[str, Any]


def read_gemma4(
  facts: Facts, tensors: Collection[str], rope_factors: np.ndarray | None
) -> tuple[Facts, dict[str, Any]]:
  """Reads the fields that differ between the layers of Gemma 4.

  Args:
    facts: Key -> value; arrays of numbers are tuples.
    tensors: The names of the file's tensors. Full-attention layers without a tensor of
      values use their keys as values.
    rope_factors: The divisor of each frequency of full-attention layers: 1, or a large
      number for pairs that do not rotate.

  Raises:
    ValueError: Something is missing, or differs between layers of one kind.
  """
  facts, pattern = dict(facts), facts.get('attention.sliding_window_pattern')
  if not isinstance(pattern, tuple) or not pattern:
    raise ValueError('attention.sliding_window_pattern is missing; fetch it again')
  full = {key: facts.get(f'attention.{key}_length') for key in ('key', 'value')}
  if len({*full.values()}) != 1:
    raise ValueError('keys and values have different lengths, which is not supported')
  for key in ('attention.key_length', 'attention.value_length', 'rope.dimension_count'):
    facts[key] = facts.pop(f'{key}_swa', None)
  heads = _spread(facts, 'attention.head_count_kv', len(pattern))
  kinds = {slides: _take(heads, pattern, slides) for slides in {*pattern}}
  shared = _take_count(facts, 'attention.shared_kv_layers', 0)
  mlp = _spread(facts, 'feed_forward_length', len(pattern))
  facts['attention.head_count_kv'] = kinds.get(True, heads[0])
  facts['feed_forward_length'] = mlp[0]
  wide = bool(shared) and mlp[-1] == 2 * mlp[0]
  if mlp != [mlp[0] * (1 + (wide and i >= len(mlp) - shared)) for i in range(len(mlp))]:
    raise ValueError(f'feed_forward_length is {mlp!r:.80}, which is not supported')
  seeing = [layer for layer, slides in enumerate(pattern) if not slides]
  alike = bool(seeing) and f'blk.{seeing[0]}.attn_v.weight' not in tensors
  if rope_factors is None:
    raise ValueError('rope_freqs.weight is missing; fetch it again')
  local = facts.pop('rope.freq_base_swa', None)
  theta, experts = facts.get('rope.freq_base'), facts.get('expert_count', 0)
  taken = facts.pop('expert_used_count', None)
  turned = int((rope_factors == 1).sum())
  if not ((rope_factors == 1) | (rope_factors > 1e20)).all():
    raise ValueError('rope_freqs.weight is no rotation of Gemma 4; fetch it again')
  return facts, {
    'global_head_dim': full['key'],
    'num_global_key_value_heads': kinds.get(False, heads[0]),
    'attention_k_eq_v': alike,
    'num_kv_shared_layers': shared,
    'use_double_wide_mlp': wide,
    'enable_moe_block': bool(experts),
    'top_k_experts': taken if experts else None,
    'rope_parameters': {
      'full_attention': {
        'rope_type': 'proportional',
        'rope_theta': theta,
        'partial_rotary_factor': turned / len(rope_factors),
      },
      'sliding_attention': {'rope_type': 'default', 'rope_theta': local},
    },
  }


def read_qwen35(
  facts: Facts, tensors: Collection[str], rope_factors: np.ndarray | None
) -> tuple[Facts, dict[str, Any]]:
  """Reads the fields of layers with a state, and omits layers that draft tokens.

  The arguments are as in `read_gemma4`.
  """
  del tensors, rope_factors
  facts = dict(facts)
  facts.pop('rope.dimension_sections', None)  # Text has equal coordinates.
  layers, drafts = (
    _take_count(facts, key, 0) for key in ('block_count', 'nextn_predict_layers')
  )
  facts['block_count'] = layers - drafts
  heads, numbers = (
    _take_count(facts, key, 0) for key in ('ssm.time_step_rank', 'ssm.inner_size')
  )
  facts['ssm.time_step_rank'] = heads
  if not heads or numbers % heads:
    raise ValueError(
      f'ssm.inner_size is {numbers}, ssm.time_step_rank {heads}: fetch it again'
    )
  every = _take_count(facts, 'full_attention_interval', 4)
  return facts, {
    'linear_value_head_dim': numbers // heads,
    'full_attention_interval': every,
  }


def _spread(facts: Facts, key: str, layers: int) -> list[Any]:
  """Returns a list with a number per layer."""
  value = facts.get(key)
  found = list(value) if isinstance(value, tuple) else [value] * layers
  if len(found) != layers:
    raise ValueError(f'{key} has {len(found)} of {layers} layers; fetch it again')
  if not all(type(x) is int and x > 0 for x in found):
    raise ValueError(
      f'{key} is {value!r:.80}; positive numbers are needed: fetch it again'
    )
  return found


def _take_count(facts: Facts, key: str, default: int) -> int:
  """Removes a nonnegative integer from the facts and returns it."""
  value = facts.pop(key, default)
  if type(value) is not int or value < 0:
    raise ValueError(f'{key} is {value!r}; a whole number is needed: fetch it again')
  return value


def _take(values: list[Any], pattern: tuple[bool, ...], slides: bool) -> Any:
  """Returns the value that all layers of a kind share."""
  found = {x for x, own in zip(values, pattern, strict=True) if own == slides}
  if len(found) != 1:
    raise ValueError(
      f'attention.head_count_kv is {values!r:.80}: layers of one kind differ, which is '
      'not supported'
    )
  return found.pop()
