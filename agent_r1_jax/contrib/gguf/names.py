"""Which parameter a tensor of a GGUF file is, and what its converter did to it.

The package gguf knows llama.cpp's names of modules. What the converter changed is undone
by `find_undo`: the order of the rows of Llama's q and k, where it puts beside each other
what RoPE rotates together; the 1 that it adds to scales of norms; the order of Qwen3.5's
value heads, which it lays out so that those of all key heads alternate; exp of its
decays; and the outputs of gpt-oss's experts, which it puts before their inputs.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import numpy as np

from agent_r1_jax.contrib.gguf import metadata
from agent_r1_jax.models import families

_ROTATED = ('layers/attn/q/kernel', 'layers/attn/k/kernel')
# Ends of names in HF layout -> the module that gguf knows, and the end of its tensor.
_ENDS = {
  '.linear_attn.A_log': ('.linear_attn.A_log', ''),
  '.linear_attn.dt_bias': ('.linear_attn.dt_proj', '.bias'),
  '.router.scale': ('.router.proj', '.scale'),
  '.router.per_expert_scale': ('.experts.down_proj', '.scale'),
}
# The value heads of Qwen3.5: end of a name -> the axis that they are on, whether they
# come after queries and keys, and whether each has several numbers.
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
  """Where a tensor of a file belongs."""

  name: str  # In HF layout; '{}' stands for the expert.
  path: str  # A parameter that is made of it.
  # The tensors that lie one after the other in an expert's part of it; () if one does.
  parts: tuple[str, ...] = ()
  turned: bool = False  # Whether an expert's outputs come before its inputs.


def list_places(architecture: str, layers: int) -> dict[str, Place]:
  """Returns the place of each tensor that a file may have, by its name there."""
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
  """Splits a name into that of a module, and the end of its tensor in a file."""
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
  """Finds what makes a tensor of a file what it was before, one after the other."""
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
  """A head's rows are r0 r4 r1 r5 r2 r6 r3 r7 in the file, and then r0 ... r7."""
  return x.reshape(-1, pairs, 2, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)


def _group_values(
  x: np.ndarray, raw: dict[str, Any], values: tuple[int, bool, bool]
) -> np.ndarray:
  """Puts the value heads of a key head side by side.

  With two key heads and four value heads, a file has them in the order 0 2 1 3.
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
