"""The RoPE fields of config.json <-> the RoPE fields of DecoderConfig.

transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`,
which may hold an object for each type of layer.
"""

import math
from typing import Any

from agent_r1_jax.models import rope
from agent_r1_jax.models.family import Family
from agent_r1_jax.models.files import json_fields

# Defaults of YaRN (arXiv 2309.00071, section 4.1).
_YARN = {'beta_fast': 32.0, 'beta_slow': 1.0, 'truncate': True}
# Give YaRN's attention factor if the file does not have it.
_MSCALES = ('mscale', 'mscale_all_dim')
_TYPES = {'full_attention', 'sliding_attention', 'chunked_attention'}


def parse(raw: dict[str, Any], family: Family, slides: bool) -> dict[str, Any]:
  """Returns fields of DecoderConfig; `slides` says whether any layer has a window.

  Raises:
    ValueError: The decoder does not support the rotation, or two fields contradict each
      other.
  """
  present = [name for name in ('rope_scaling', 'rope_parameters') if raw.get(name)]
  names = present or ['rope_scaling']
  parsed = [_parse_field(raw, name, family, slides) for name in names]
  if parsed[0] != parsed[-1]:
    raise ValueError(
      'rope_scaling and rope_parameters differ; leave one of them, that of the training'
    )
  return parsed[0]


def make(config: Any) -> dict[str, Any]:
  """Makes the fields as transformers 4 writes them, and transformers 5 reads them."""
  raw = {'rope_theta': config.rope_theta, 'rope_scaling': config.rope_scaling}
  alone = config.facts.local_theta == ''
  if config.mrope_section:
    sections: dict[str, Any] = {'mrope_section': list(config.mrope_section)}
    plain = {'type': 'mrope'}
    if config.facts.alternates_axes:
      plain, sections['mrope_interleaved'] = {'rope_type': 'default'}, True
    raw['rope_scaling'] = (config.rope_scaling or plain) | sections
  if config.rope_fraction != 1:
    raw['partial_rotary_factor'] = config.rope_fraction
  if config.local_rope_theta is None and not alone:
    return raw
  if config.facts.local_theta not in ('rope_theta', ''):
    return raw | {config.facts.local_theta: config.local_rope_theta}
  # With rope_theta alone, transformers 5 uses its default for OLMo 3's sliding layers.
  full = {'rope_type': 'default'} | (config.rope_scaling or {})
  local = {'rope_type': 'default', 'rope_theta': config.local_rope_theta or 1e4}
  full |= {'rope_theta': config.rope_theta}
  nested = {'full_attention': full, 'sliding_attention': local}
  return ({} if alone else raw) | {'rope_parameters': nested}


def _parse_field(
  raw: dict[str, Any], name: str, family: Family, slides: bool
) -> dict[str, Any]:
  """Reads a field, if present; transformers 5 may nest one object per layer type."""
  value = raw.get(name) or {}
  if not isinstance(value, dict):
    raise ValueError(f'{name} is {value!r}; an object is needed')
  nested, local = set(value) & _TYPES, {}
  if not nested:
    value = {'full_attention': value}
  elif set(value) != nested or not isinstance(value.get('full_attention'), dict):
    raise ValueError(
      f'{name} has {sorted(value)}; by kinds of layers, it needs an object for '
      "'full_attention' and nothing beside kinds of layers"
    )
  else:
    local = value.get('sliding_attention') or {}
  if slides and local and not family.local_rope:
    raise ValueError(
      f'{name} has a rotation for sliding_attention, which no {family.architecture} has'
    )
  full = _parse_rotation(raw, name, value['full_attention'], family)
  return full | (_parse_local(raw, local, family) if slides else {})


def _parse_local(
  raw: dict[str, Any], local: dict[str, Any], family: Family
) -> dict[str, Any]:
  """Reads the rotation of the sliding layers from its object, or from a field."""
  if not family.local_rope:
    return {}
  kind = local.get('rope_type') or 'default'
  if kind != 'default':
    raise ValueError(
      f"rope type of sliding_attention is {kind!r}; supported is 'default'"
    )
  theta = local if local.get('rope_theta') is not None else raw
  key = 'rope_theta' if theta is local else family.local_theta
  found = json_fields.read_number(theta, key, float)
  if family.local_theta == 'rope_theta' and found != raw.get('rope_theta', found):
    raise ValueError(f"rope_theta of sliding_attention is {found}, unlike the others'")
  return {'local_rope_theta': found}


def _parse_rotation(
  raw: dict[str, Any], name: str, found: dict[str, Any], family: Family
) -> dict[str, Any]:
  """Reads θ and the scaling from `found`, or else from the file's top level."""
  sections, found = _take_sections(found, family) if family.turns_by_axes else ({}, found)
  if family.part_of:
    # Time, row and column of a text token are equal.
    found = {key: x for key, x in found.items() if not key.startswith('mrope_')}
  kinds = [found[key] for key in ('rope_type', 'type') if found.get(key) is not None]
  if kinds and kinds[0] != kinds[-1]:
    raise ValueError(f'{name} has two types, {kinds}; leave one of them')
  kind = kinds[0] if kinds else 'default'
  if kind not in family.scalings:
    known = ', '.join(map(repr, family.scalings))
    raise ValueError(f'rope type is {kind!r}; supported are {known}')
  found = {'rope_theta': raw.get('rope_theta')} | found
  fraction = found.get('partial_rotary_factor', raw.get('partial_rotary_factor', 1.0))
  fraction = 1.0 if kind == 'proportional' else fraction
  found = {key: x for key, x in found.items() if x is not None}
  read = {'rope_theta', 'rope_type', 'type', 'partial_rotary_factor'}
  read |= set(rope.SCALINGS.get(kind, ())) | set(_MSCALES if kind == 'yarn' else ())
  for key in sorted(set(found) - read):
    raise ValueError(
      f'{name}.{key} is {found[key]!r}, which rope type {kind!r} does not read; name '
      'the type that the model was trained with, or leave it out'
    )
  fraction = 1.0 if fraction is None else fraction
  if fraction != 1 and not family.partial_rope:
    raise ValueError(f'partial_rotary_factor is {fraction!r}; only 1 is supported')
  if not isinstance(fraction, int | float) or not 0 < fraction <= 1:
    raise ValueError(f'partial_rotary_factor is {fraction!r}; it is above 0, at most 1')
  return {
    'rope_theta': json_fields.read_number(found, 'rope_theta', float),
    'rope_scaling': None if kind == 'default' else _parse_scaling(raw, kind, found),
    'rope_fraction': float(fraction),
    **sections,
  }


def _take_sections(
  found: dict[str, Any], family: Family
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Splits the M-RoPE sections off a rotation; returns them and the remaining fields.

  Published files have the type 'mrope'; transformers calls it 'default' and keeps both
  names.
  """
  section = found.get('mrope_section')
  if not isinstance(section, list) or not all(type(x) is int and x > 0 for x in section):
    raise ValueError(
      f'mrope_section is {section!r:.40}; three positive numbers are needed, in '
      'rope_scaling or rope_parameters'
    )
  if family.alternates_axes and not found.get('mrope_interleaved', True):
    raise ValueError(
      'mrope_interleaved is False; transformers alternates the axes anyway'
    )
  taken = {'mrope_section', *(('mrope_interleaved',) if family.alternates_axes else ())}
  found = {key: x for key, x in found.items() if key not in taken and x != 'mrope'}
  return {'mrope_section': tuple(section)}, found


def _parse_scaling(
  raw: dict[str, Any], kind: str, found: dict[str, Any]
) -> dict[str, Any]:
  """Reads the numbers of a scaling; fills in YaRN's defaults."""
  original = 'original_max_position_embeddings'
  if kind == 'yarn':
    context = raw.get(original) or raw.get('max_position_embeddings')
    found = _YARN | {original: context} | found
    found.setdefault('attention_factor', _compute_yarn_factor(found))
  if kind == 'proportional':
    found = {'partial_rotary_factor': 1.0} | found
  types = {original: int}
  scaling: dict[str, Any] = {'rope_type': kind}
  for key in rope.SCALINGS[kind]:
    scaling[key] = (
      bool(found[key])
      if key == 'truncate'
      else json_fields.read_number(found, key, types.get(key, float))
    )
  return scaling


def _compute_yarn_factor(found: dict[str, Any]) -> float:
  """Returns YaRN's attention factor: 0.1 ln(factor) + 1, or the ratio of two mscales."""
  factor = json_fields.read_number(found, 'factor', float)
  scale = lambda mscale: 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
  over, under = (found.get(key) for key in _MSCALES)
  return scale(over) / scale(under) if over and under else scale(1.0)
