"""Converts the metadata of a GGUF file to the fields of config.json.

The keys are those of llama.cpp's converter. It omits what follows from the architecture,
rounds numbers to 32 bits, and writes Llama 3's RoPE scaling only as a divisor of each
frequency.
"""

from collections.abc import Callable, Collection
import math
from typing import Any, NamedTuple

import numpy as np

from agent_r1_jax.contrib.gguf import several_kinds
from agent_r1_jax.models import families
from agent_r1_jax.models.family import Family


class Architecture(NamedTuple):
  """An architecture of llama.cpp: its family, and what GGUF files do not say."""

  family: str  # A key of families.FAMILIES.
  # The family if the file has a sliding window; None if it cannot have one.
  sliding: str | None = None
  window: int = 0  # The default window.
  # Whether rows of q and k that RoPE rotates together are adjacent in the file.
  pairs: bool = False
  # The layers of Gemma's 27B, which divides scores by the root of hidden_size / heads;
  # other models divide by the root of head_dim. No key says so.
  wide_layers: int = 0
  constants: dict[str, Any] = {}  # Fields of config.json without a key.
  rotation: dict[str, Any] = {}  # Fields of its RoPE scaling without a key.
  keys: dict[str, str] = {}  # Fields whose keys differ from _KEYS.
  # Reads the fields that differ between layers; see several_kinds.py.
  read: Callable[..., tuple[dict[str, Any], dict[str, Any]]] | None = None


# Before adding an architecture, find out what the converter changes. The table of
# families has the other facts that llama.cpp hard-codes: which layers slide if the file
# has no pattern, and that every fourth layer of SmolLM3 is not rotated.
ARCHITECTURES = {
  'qwen2': Architecture('qwen2'),
  'qwen3': Architecture('qwen3'),
  'qwen2moe': Architecture('qwen2_moe', constants={'norm_topk_prob': False}),
  'qwen3moe': Architecture('qwen3_moe', constants={'norm_topk_prob': True}),
  # Mistral too. The converter does not write the window of Mistral 7B v0.1.
  'llama': Architecture('llama', pairs=True),
  'smollm3': Architecture('smollm3', pairs=True),
  'phi3': Architecture('phi3', sliding='phi3'),
  'olmo2': Architecture('olmo2', sliding='olmo3'),
  'gemma': Architecture('gemma'),
  'gemma2': Architecture('gemma2', sliding='gemma2', window=4096, wide_layers=46),
  'gemma3': Architecture('gemma3_text', sliding='gemma3_text', wide_layers=62),
  # The 12B too, which has another name in transformers but computes the same.
  'gemma4': Architecture(
    'gemma4_text', sliding='gemma4_text', read=several_kinds.read_gemma4
  ),
  'gpt-oss': Architecture(
    'gpt_oss',
    sliding='gpt_oss',
    rotation={'truncate': False},
    keys={'num_local_experts': 'expert_count'}
    | {'intermediate_size': 'expert_feed_forward_length'},
  ),
  'qwen35': Architecture('qwen3_5_text', read=several_kinds.read_qwen35),
  'qwen35moe': Architecture('qwen3_5_moe_text', read=several_kinds.read_qwen35),
}
# Field of config.json -> key, without the architecture. Each family has some of them.
_KEYS = {
  'num_hidden_layers': 'block_count',
  'max_position_embeddings': 'context_length',
  'hidden_size': 'embedding_length',
  'intermediate_size': 'feed_forward_length',
  'num_attention_heads': 'attention.head_count',
  'rms_norm_eps': 'attention.layer_norm_rms_epsilon',
  'num_experts': 'expert_count',
  'num_experts_per_tok': 'expert_used_count',
  'moe_intermediate_size': 'expert_feed_forward_length',
  'shared_expert_intermediate_size': 'expert_shared_feed_forward_length',
  'attn_logit_softcapping': 'attn_logit_softcapping',
  'final_logit_softcapping': 'final_logit_softcapping',
  'linear_conv_kernel_dim': 'ssm.conv_kernel',
  'linear_key_head_dim': 'ssm.state_size',
  'linear_num_key_heads': 'ssm.group_count',
  'linear_num_value_heads': 'ssm.time_step_rank',
  'hidden_size_per_layer_input': 'embedding_length_per_layer_input',
}
_CAPS = ('attn_logit_softcapping', 'final_logit_softcapping')  # May be absent.
# Keys of any architecture that are read separately, or are redundant.
_OPTIONAL = {
  'attention.causal',
  'attention.head_count_kv',
  'attention.key_length',
  'attention.value_length',
  'rope.dimension_count',
  'rope.freq_base',
  'rope.scaling.type',
  # Without a scaling, it equals the context. LongRoPE has tensors, which raise an error.
  'rope.scaling.original_context_length',
  # The tensors say these. A mixture's feed-forward_length is not used.
  'tensor_data_layout',
  'vocab_size',
  'feed_forward_length',
}
_WINDOW, _PATTERN = 'attention.sliding_window', 'attention.sliding_window_pattern'
_LOCAL_THETA = 'rope.freq_base_swa'
# Type of scaling -> key -> field of `rope_parameters`.
_SCALINGS = {
  'linear': {'rope.scaling.factor': 'factor'},
  'yarn': {
    'rope.scaling.factor': 'factor',
    'rope.scaling.original_context_length': 'original_max_position_embeddings',
    'rope.scaling.yarn_beta_fast': 'beta_fast',
    'rope.scaling.yarn_beta_slow': 'beta_slow',
    'rope.scaling.yarn_attn_factor': 'attention_factor',
    # OLMo 3's, as the converter wrote it in 2025.
    'rope.scaling.attn_factor': 'attention_factor',
  },
}
# All published models of Llama 3.1 to 3.3 have these.
_LOW, _HIGH = 1.0, 4.0


def parse(
  metadata: dict[str, Any],
  *,
  vocab_size: int,
  tied: bool,
  rope_factors: np.ndarray | None,
  tensors: Collection[str] = (),
) -> dict[str, Any]:
  """Makes the fields of config.json.

  Args:
    metadata: Key -> value; a tuple for an array of bools or of few integers, a string
      for other arrays.
    vocab_size: Rows of the embedding.
    tied: Whether the file has no separate output head.
    rope_factors: [H/2], the divisor of each RoPE frequency; None if the file has none.
    tensors: The names of the file's tensors.

  Raises:
    ValueError: A value is missing or wrong, or the decoder does not support it; the
      message names the key.
  """
  name, kind = (metadata.get(f'general.{x}', 'model') for x in ('architecture', 'type'))
  if name not in ARCHITECTURES or kind != 'model':
    known = ', '.join(ARCHITECTURES)
    raise ValueError(f'holds a {kind} of architecture {name!r}; give a model of {known}')
  row, start = ARCHITECTURES[name], f'{name}.'
  facts = {k.removeprefix(start): x for k, x in metadata.items() if k.startswith(start)}
  found: dict[str, Any] = {}
  if row.read:
    facts, found = row.read(facts, tensors, rope_factors)
  window = facts.get(_WINDOW, row.window)
  model_type = row.sliding if row.sliding and window else row.family
  family = families.FAMILIES[model_type]
  keys = _list_keys(family) | row.keys
  optional = {*_CAPS, *(family.sizes[letter][1] for letter in family.optional)}
  _check_supported(facts, row, family, {*keys.values()})
  raw = {
    field: _number(facts, key) if facts.get(key) or field not in optional else 0
    for field, key in keys.items()
    if key in facts or field not in _CAPS
  }
  heads = raw['num_attention_heads']
  share = raw['hidden_size'] // heads
  width = _number(facts, 'attention.key_length', share)
  if _number(facts, 'attention.value_length', width) != width:
    raise ValueError('keys and values have different lengths, which is not supported')
  if 'query_scale' in family.numbers:
    wide = raw['num_hidden_layers'] == row.wide_layers
    raw['query_pre_attn_scalar'] = share if wide else width
  if 'rope_parameters' not in found:
    rotations = _find_rotations(facts, family, width, rope_factors, row.rotation)
    found['rope_parameters'] = rotations
  return {
    **raw,
    **row.constants,
    **found,
    **_find_window(facts, window, raw['num_hidden_layers']),
    'model_type': model_type,
    'num_key_value_heads': _number(facts, 'attention.head_count_kv', heads),
    'head_dim': width,
    'vocab_size': vocab_size,
    'tie_word_embeddings': tied,
  }


def _list_keys(family: Family) -> dict[str, str]:
  """Returns the part of _KEYS that the family uses."""
  fields = {field for _, field in family.sizes.values()}
  fields |= {field for field, _ in family.numbers.values()}
  fields |= {'max_position_embeddings', family.norm_eps}
  return {field: key for field, key in _KEYS.items() if field in fields}


def _check_supported(
  facts: dict[str, Any], row: Architecture, family: Family, keys: set[str]
) -> None:
  if not facts.get('attention.causal', True):
    raise ValueError('attention.causal is False; only causal models are supported')
  keys = keys | _OPTIONAL | _SCALINGS.get(facts.get('rope.scaling.type', ''), {}).keys()
  keys |= {_WINDOW, _PATTERN} if row.sliding else set()
  keys |= {_LOCAL_THETA} if family.local_rope else set()
  for key in sorted(facts.keys() - keys):
    if facts[key]:  # 0 and False mean that the model does not use it.
      raise ValueError(
        f'{key} is {facts[key]!r}, which is not supported; take a model without it'
      )


def _number(facts: dict[str, Any], key: str, default: Any = None) -> Any:
  """Reads a positive number; a float becomes the shortest decimal with its 32 bits."""
  value = facts.get(key, default)
  if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
    raise ValueError(f'{key} is {value!r}; a positive number is needed: fetch it again')
  return float(str(np.float32(value))) if isinstance(value, float) else value


def _find_window(facts: dict[str, Any], window: Any, layers: int) -> dict[str, Any]:
  """Finds the window, and the layers that have it, if the file lists them."""
  if not window:
    # With a period of 1, no layer has a window.
    return {'sliding_window': None, 'sliding_window_pattern': 1}
  found: dict[str, Any] = {'sliding_window': _number(facts, _WINDOW, window)}
  pattern = facts.get(_PATTERN)
  if isinstance(pattern, tuple):
    if len(pattern) != layers:
      raise ValueError(
        f'{_PATTERN} has {len(pattern)} of {layers} layers; fetch it again'
      )
    names = ('full_attention', 'sliding_attention')
    found['layer_types'] = [names[slides] for slides in pattern]
  elif pattern is not None:
    found['sliding_window_pattern'] = _number(facts, _PATTERN)
  return found


def _find_rotations(
  facts: dict[str, Any],
  family: Family,
  width: int,
  rope_factors: np.ndarray | None,
  constants: dict[str, Any],
) -> dict[str, Any]:
  """Finds `rope_parameters`, by layer type if the family has two rotations."""
  theta = _number(facts, 'rope.freq_base', 10_000.0)
  kind = facts.get('rope.scaling.type', 'none')
  turned = _number(facts, 'rope.dimension_count', width)
  fraction = turned / width
  if int(width * fraction) < turned:  # By rounding, for example 30 of 44.
    fraction = math.nextafter(fraction, 1.0)
  rope = {
    'rope_theta': theta,
    'rope_type': 'default' if kind == 'none' else kind,
    'partial_rotary_factor': fraction,
  }
  for key, field in _SCALINGS.get(kind, {}).items():
    if key in facts:
      rope[field] = _number(facts, key)
  rope |= constants if kind != 'none' else {}
  if rope_factors is not None:
    rope |= _find_scaling(rope_factors, theta, width)
  if not family.local_rope:
    return rope
  default = family.defaults.get(family.local_theta, theta)
  local = {'rope_theta': _number(facts, _LOCAL_THETA, default), 'rope_type': 'default'}
  return {'full_attention': rope, 'sliding_attention': local}


def _find_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
  """Finds the fields of `rope_parameters` that reproduce these factors."""
  fits = factors.shape == (head_dim // 2,) and factors.dtype == np.float32
  if fits and (factors == 1).all():
    return {}
  if fits and factors.max() > 1:
    factor = float(str(factors.max()))
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    with np.errstate(all='ignore'):
      # 1 keeps a frequency, 0 divides it by the factor.
      keep = (1 / factors.astype(float) - 1 / factor) / (1 - 1 / factor)
    mixed = (keep > 1e-3) & (keep < 1 - 1e-3)
    if mixed.any():
      contexts = wavelengths[mixed] * (_LOW + keep[mixed] * (_HIGH - _LOW))
      context = round(float(np.median(contexts)))
      expected = np.clip((context / wavelengths - _LOW) / (_HIGH - _LOW), 0, 1)
      if np.abs(keep - expected).max() < 1e-4:
        return {
          'rope_type': 'llama3',
          'factor': factor,
          'low_freq_factor': _LOW,
          'high_freq_factor': _HIGH,
          'original_max_position_embeddings': context,
        }
  raise ValueError(
    'rope_freqs.weight is not a scaling of Llama 3 with the low and high factors '
    f'{_LOW:g} and {_HIGH:g}; take the model in HF layout, whose config.json names them'
  )
