"""Maps the tensors of a GGUF file to parameters, and undoes the converter's changes.

The package gguf knows llama.cpp's names of modules. `find_undo` undoes the changes: the
order of rows in Llama's q and k, where rows that RoPE rotates together are adjacent; the
1 added to scales of norms; the order of Qwen3.5's value heads, which alternate between
key heads; -exp of its decays; and the order of dimensions of gpt-oss's experts, outputs
before inputs.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import numpy as np

from agent_r1_jax.contrib.gguf import metadata
from agent_r1_jax.models import families

_ROTATED = ('layers/attn/q/kernel', 'layers/attn/k/kernel')
# Suffixes of names in HF layout -> gguf's name of the module, and its tensor's suffix.
_ENDS = {
  '.linear_attn.A_log': ('.linear_attn.A_log', ''),
  '.linear_attn.dt_bias': ('.linear_attn.dt_proj', '.bias'),
  '.router.scale': ('.router.proj', '.scale'),
  '.router.per_expert_scale': ('.experts.down_proj', '.scale'),
}
# The value heads of Qwen3.5: suffix of a name -> their axis, whether they come after
# queries and keys, and whether each has several numbers.
_VALUES = {
  'linear_attn.in_proj_qkv.weight': (0, True, True),
  'linear_attn.conv1d.weight': (0, True, True),
  'linear_attn.in_proj_z.weight': (0, False, True),
  'linear_attn.in_proj_a.weight': (0, False, False),
  'linear_attn.in_proj_b.weight': (0, False, False),
  'linear_attn.A_log': (0, False, False),
  'linear_attn.dt_bias': (0, False, False),
  'linear_attn.out_proj.weight': (1, False, True),
}


class Place(NamedTuple):
  """The parameter and the HF name of a tensor in a file."""

  name: str  # Its name in HF layout; '{}' stands for the expert.
  path: str  # A parameter that it is part of.
  # The tensors that are concatenated in an expert's part; () if it is only one.
  parts: tuple[str, ...] = ()
  turned: bool = False  # Whether an expert's outputs come before its inputs.


def list_places(architecture: str, layers: int) -> dict[str, Place]:
  """Returns the place of each tensor that a file may have, by its name in the file."""
  import gguf

  family = families.FAMILIES[metadata.ARCHITECTURES[architecture].family]
  kind = next(x for x, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
  table = gguf.get_tensor_name_map(kind, layers)
  places = {}

  def add(place: Place):
    stem, ending = _split(place.name.replace('.{}', ''))
    if module := table.get_name(stem):
      places[module + ending] = place

  for pattern, parts in family.stacked.items():
    for layer in range(layers):
      every = tuple(part.format(layer, '{}') for part in parts)
      add(Place(pattern.format(layer), 'layers/moe/kernel', every))
  fused = {part: whole for whole, parts in family.fused.items() for part in parts}
  for parameter in family.parameters:
    pattern = fused.get(parameter.tensor, parameter.tensor)
    turned = family.packs_experts and 'E' in parameter.inputs
    turned = turned and parameter.path.endswith('/kernel')
    for layer in range(layers if '{}' in pattern else 1):
      name = pattern.replace('{}', str(layer), 1)
      add(Place(name, parameter.path, turned=turned))
  return places


def _split(name: str) -> tuple[str, str]:
  """Splits a name into gguf's name of the module, and the tensor's suffix in a file."""
  for end, (module, ending) in _ENDS.items():
    if name.endswith(end):
      return name.removesuffix(end) + module, ending
  for end, ending in {'.weight': '.weight', '.bias': '.bias', '_bias': '.bias'}.items():
    if name.endswith(end):
      return name.removesuffix(end), ending
  return name, '.weight'


def find_undo(
  raw: dict[str, Any], architecture: str, place: Place
) -> list[Callable[[np.ndarray], np.ndarray]]:
  """Returns the steps that undo the converter's changes to a tensor, in order."""
  row, undo = metadata.ARCHITECTURES[architecture], []
  family = families.FAMILIES[raw['model_type']]
  shifted = place.path.endswith('/scale') and not place.path.startswith('layers/linear/')
  if family.norm_offset and shifted:
    undo.append(lambda x: x - x.dtype.type(family.norm_offset))
  if row.pairs and place.path in _ROTATED:
    undo.append(functools.partial(_separate, pairs=raw['head_dim'] // 2))
  if place.turned:
    undo.append(lambda x: x.swapaxes(-1, -2))
  if place.name.endswith('.A_log'):
    undo.append(lambda x: np.log(-x))
  values = next((x for end, x in _VALUES.items() if place.name.endswith(end)), None)
  if family.is_recurrent and values:
    undo.append(functools.partial(_group_values, raw=raw, values=values))
  return undo


def _separate(x: np.ndarray, pairs: int) -> np.ndarray:
  """Reorders a head's rows from r0 r4 r1 r5 r2 r6 r3 r7 in the file to r0 ... r7."""
  return x.reshape(-1, pairs, 2, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)


def _group_values(
  x: np.ndarray, raw: dict[str, Any], values: tuple[int, bool, bool]
) -> np.ndarray:
  """Makes the value heads of a key head adjacent.

  With two key heads and four value heads, the file has the order 0 2 1 3.
  """
  axis, follows, wide = values
  keys, heads, width, own = (
    raw[f'linear_{name}']
    for name in ('num_key_heads', 'num_value_heads', 'key_head_dim', 'value_head_dim')
  )
  first = 2 * keys * width if follows else 0
  x = np.moveaxis(x, axis, 0)
  rest = x[first:].reshape(heads // keys, keys, own if wide else 1, -1)
  rest = rest.swapaxes(0, 1).reshape(x[first:].shape)
  return np.moveaxis(np.concatenate([x[:first], rest]), 0, axis)
