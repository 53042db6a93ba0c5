"""The metadata of a GGUF file -> what config.json would hold.

The keys are those that llama.cpp's converter writes. It leaves out what follows from the
architecture, rounds numbers to 32 bits, and writes of Llama 3's RoPE scaling only what
divides each frequency.
"""

from typing import Any

import numpy as np

# Architectures, which are keys of families.FAMILIES. A family is added here, and its
# tensors in gguf_files.py, when it is known what the converter changes of it.
FAMILIES = ('qwen2', 'qwen3', 'llama', 'gemma')
# Key, without the architecture -> field of config.json.
_NEEDED = {
  'block_count': 'num_hidden_layers',
  'context_length': 'max_position_embeddings',
  'embedding_length': 'hidden_size',
  'feed_forward_length': 'intermediate_size',
  'attention.head_count': 'num_attention_heads',
  'attention.layer_norm_rms_epsilon': 'rms_norm_eps',
}
_OPTIONAL = {
  'attention.causal',
  'attention.head_count_kv',
  'attention.key_length',
  'attention.value_length',
  'rope.dimension_count',
  'rope.freq_base',
  'rope.scaling.type',
  # The tensors say these.
  'tensor_data_layout',
  'vocab_size',
}
# All published models of Llama 3.1 to 3.3 have these.
_LOW, _HIGH = 1.0, 4.0


def parse(
  metadata: dict[str, Any],
  *,
  vocab_size: int,
  tied: bool,
  rope_factors: np.ndarray | None,
) -> dict[str, Any]:
  """Makes the fields of config.json.

  Args:
    metadata: Key -> value; text in place of arrays.
    vocab_size: Rows of the embedding.
    tied: Whether the file has no output head of its own.
    rope_factors: [H/2], what divides each frequency of RoPE; None if the file has none.

  Raises:
    ValueError: A value is missing or wrong, or asks for what the decoder does not
      compute; the message names the key.
  """
  name, kind = (metadata.get(f'general.{x}', 'model') for x in ('architecture', 'type'))
  if name not in FAMILIES or kind != 'model':
    raise ValueError(
      f'holds a {kind} of architecture {name!r}; give a model of {", ".join(FAMILIES)}'
    )
  start = f'{name}.'
  facts = {k.removeprefix(start): x for k, x in metadata.items() if k.startswith(start)}
  _check_supported(facts)
  raw = {field: _number(facts, key) for key, field in _NEEDED.items()}
  heads = raw['num_attention_heads']
  width = _number(facts, 'attention.key_length', raw['hidden_size'] // heads)
  if _number(facts, 'attention.value_length', width) != width:
    raise ValueError('keys and values have different lengths, which is not supported')
  theta = _number(facts, 'rope.freq_base', 10_000.0)
  scaling = facts.get('rope.scaling.type', 'none')
  rope = {
    'rope_theta': theta,
    'rope_type': 'default' if scaling == 'none' else scaling,
    'partial_rotary_factor': _number(facts, 'rope.dimension_count', width) / width,
  }
  if rope_factors is not None:
    rope |= _find_scaling(rope_factors, theta, width)
  return raw | {
    'model_type': name,
    'num_key_value_heads': _number(facts, 'attention.head_count_kv', heads),
    'head_dim': width,
    'vocab_size': vocab_size,
    'tie_word_embeddings': tied,
    'rope_parameters': rope,
  }


def _check_supported(facts: dict[str, Any]) -> None:
  if not facts.get('attention.causal', True):
    raise ValueError('attention.causal is False; only causal models are supported')
  for key in sorted(facts.keys() - _NEEDED.keys() - _OPTIONAL):
    if facts[key]:  # 0 and False say that the model does without.
      raise ValueError(
        f'{key} is {facts[key]!r}, which is not supported; take a model without it'
      )


def _number(facts: dict[str, Any], key: str, default: Any = None) -> Any:
  """Reads a positive number; one in 32 bits becomes the decimal that it was made of."""
  value = facts.get(key, default)
  if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
    raise ValueError(f'{key} is {value!r}; a positive number is needed: fetch it again')
  return float(str(np.float32(value))) if isinstance(value, float) else value


def _find_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
  """Finds the fields of `rope_parameters` with which these factors come out again."""
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
