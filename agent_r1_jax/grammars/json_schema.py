"""JSON schemas as regular expressions, which match only valid values.

Each keyword that jsonschema checks is either expressed or rejected by name. Some valid
JSON cannot be written: keys have the schema's order, an object with `properties` has no
other keys, and recursive schemas end after some rounds.
"""

from collections.abc import Mapping, Sequence
import itertools
import math
import re
from typing import Any
import urllib.parse

from agent_r1_jax.agent import tool_schema
from agent_r1_jax.grammars import json_texts

# The keywords of a schema's alternatives, by the type that they restrict.
_KEYWORDS = {
  'string': ('pattern', 'minLength', 'maxLength', 'format'),
  'number': ('minimum', 'maximum', 'exclusiveMinimum', 'exclusiveMaximum'),
  'array': ('items', 'prefixItems', 'minItems', 'maxItems'),
  'object': (
    *('properties', 'required', 'additionalProperties'),
    *('propertyNames', 'minProperties', 'maxProperties'),
  ),
}
_TYPES = 'string', 'number', 'integer', 'boolean', 'null', 'array', 'object'
_PLAIN = {'type', *itertools.chain(*_KEYWORDS.values())}
_KNOWN = {*_PLAIN, '$ref', 'allOf', 'anyOf', 'oneOf', 'enum', 'const'}
_SCALARS = [{'type': name} for name in ('string', 'number', 'boolean', 'null')]
_ANY = {
  'anyOf': [
    *_SCALARS,
    {'type': 'array', 'items': {'anyOf': _SCALARS}},
    {'type': 'object', 'additionalProperties': {'anyOf': _SCALARS}},
  ]
}
_NO_SET = 'uniqueItems', False
_ROUNDS = 3  # How often a schema may contain itself.
_Schema = Mapping[str, Any] | bool
_Refs = tuple[str, ...]  # The references that contain a schema.


class Writer:
  """Writes the expressions of a schema and of the schemas it refers to."""

  def __init__(self, root: _Schema, blank: str, holes: list[Any]):
    """Begins.

    Args:
      root: The schema that `$ref` refers into.
      blank: The expression for space after colons and commas.
      holes: Gets the parts that no expression describes; see regex_automata.fill.
    """
    self._root, self._holes = root, holes
    self._comma, self._colon = f',{blank}', f':{blank}'
    self._validator = tool_schema.make_validator(root)

  def write(self, schema: _Schema, refs: _Refs = ()) -> str | None:
    """Writes an expression; None if no value can be written.

    Raises:
      ValueError: A keyword is not supported; names it.
    """
    texts = [self._write_one(*found) for found in self._expand(schema, refs)]
    texts = dict.fromkeys(text for text in texts if text is not None)
    return f'(?:{"|".join(texts)})' if texts else None

  def _expand(self, schema: _Schema, refs: _Refs) -> list[tuple[dict[str, Any], _Refs]]:
    """Resolves a schema to alternatives without combined schemas."""
    if isinstance(schema, bool):
      return [({}, refs)] if schema else []
    null = [({'enum': [None]}, refs)] if schema.get('nullable') else []
    if 'enum' in schema or 'const' in schema:
      found = [({'enum': schema.get('enum', [schema.get('const')])}, refs), *null]
    else:
      _refuse_unknown(schema)
      plain = {name: schema[name] for name in schema if name in _PLAIN}
      for name in ('type', 'pattern', 'format'):
        if isinstance(plain.get(name), str):
          plain[name] = [plain[name]]
      found = [(plain, refs)]
      parts = [self._resolve(schema['$ref'], refs)] if '$ref' in schema else []
      parts += [self._expand(part, refs) for part in schema.get('allOf', ())]
      options = []
      for name in ('anyOf', 'oneOf'):
        if name in schema:
          options = [self._expand(part, refs) for part in schema[name]]
          parts.append([*itertools.chain(*options)])
      for part in parts:
        pairs = itertools.product(found, part)
        found = [(_merge(a, b), x + y) for (a, x), (b, y) in pairs]
      found += null
      for one, other in itertools.combinations(options if 'oneOf' in schema else (), 2):
        if not all(self._differ(a, b, x) for a, x in one for b, _ in other):
          raise ValueError(
            'oneOf: a value may fit two of its options; use anyOf, or require a property '
            'that has another "const" in each'
          )
    # Keywords next to an enumeration are checked, whatever they are.
    checked = {*schema} & tool_schema.list_keywords()
    if len(checked) > 1 or checked & {'allOf', 'oneOf'}:
      for one, _ in found:
        if 'enum' in one:
          one['enum'] = [x for x in one['enum'] if self._is_valid(x, schema)]
    return found

  def _is_valid(self, value: Any, schema: _Schema) -> bool:
    return self._validator.evolve(schema=schema).is_valid(value)

  def _resolve(self, ref: str, refs: _Refs) -> list[tuple[dict[str, Any], _Refs]]:
    if not re.match('#(/|$)', ref):
      raise ValueError(f'$ref: {ref!r:.80} is not in the schema; use "#/$defs/a name"')
    found: Any = self._root
    for part in urllib.parse.unquote(ref).split('/')[1:]:
      part = part.replace('~1', '/').replace('~0', '~')
      try:
        found = found[int(part) if isinstance(found, list) else part]
      except (LookupError, TypeError, ValueError):
        raise ValueError(f'$ref: there is no {ref!r:.80} in the schema') from None
    return self._expand(found, (*refs, ref)) if refs.count(ref) < _ROUNDS else []

  def _differ(self, a: dict[str, Any], b: dict[str, Any], refs: _Refs) -> bool:
    """Whether two alternatives certainly share no written value.

    Determined by their types, or by a property that both require, such as a constant.
    """
    if 'enum' in a and 'enum' in b:
      return not any(value in b['enum'] for value in a['enum'])
    common = set()
    for one, other in ((a, b), (b, a)):
      fits = self._list_types(other) if {'type', 'enum'} & {*other} else _TYPES
      common |= {*self._list_types(one)} & {*fits}
    expand = lambda x, key: [y for y, _ in self._expand(_get_property(x, key), refs)]
    return not common or (
      common == {'object'}
      and any(
        all(self._differ(x, y, refs) for x in expand(a, key) for y in expand(b, key))
        for key in {*a.get('required', ())} & {*b.get('required', ())}
      )
    )

  def _list_types(self, schema: dict[str, Any]) -> list[str]:
    if 'enum' in schema:
      is_type = self._validator.is_type
      return [t for t in _TYPES if any(is_type(x, t) for x in schema['enum'])]
    return _list_types(schema)

  def _write_one(self, schema: dict[str, Any], refs: _Refs) -> str | None:
    """Writes one alternative of `_expand`."""
    if 'enum' in schema:
      return '|'.join(map(json_texts.write_value, schema['enum'])) or None
    if not schema:
      return self.write(_ANY)
    write = {
      'string': lambda: json_texts.write_string(schema, self._holes),
      'number': lambda: json_texts.write_number(schema, False),
      'integer': lambda: json_texts.write_number(schema, True),
      'boolean': lambda: 'true|false',
      'null': lambda: 'null',
      'array': lambda: self._write_array(schema, refs),
      'object': lambda: self._write_object(schema, refs),
    }
    names = _list_types(schema)
    names = [name for name in names if name != 'integer' or 'number' not in names]
    texts = [text for name in names if (text := write[name]()) is not None]
    return '|'.join(texts) if texts else None

  def _write_array(self, schema: dict[str, Any], refs: _Refs) -> str | None:
    least, most = schema.get('minItems', 0), schema.get('maxItems', math.inf)
    first = [self.write(item, refs) for item in schema.get('prefixItems', ())]
    first = list(itertools.takewhile(lambda text: text is not None, first))
    other = None
    if len(first) == len(schema.get('prefixItems', ())):
      other = self.write(schema.get('items', True), refs)
    return self._write_list('[]', first, other, least, most)

  def _write_list(
    self, brackets: str, first: Sequence[Any], other: str | None, least: int, most: float
  ) -> str | None:
    """Writes a list: some items of given forms, then others of the same form."""
    most = most if other else min(most, len(first))
    if most < least:
      return None
    first = [*first][: int(min(most, len(first)))] or [other] * (most > 0)
    text, count = '', len(first)
    if most > count:
      more = json_texts.repeat(least - count, most - count)
      text = f'(?:{self._comma}{other}){more}'
    for i in reversed(range(count)):
      text = f'{self._comma if i else ""}{first[i]}{text}'
      text = text if i < least else f'(?:{text})?'
    return f'\\{brackets[0]}{text}\\{brackets[1]}'

  def _write_object(self, schema: dict[str, Any], refs: _Refs) -> str | None:
    required = schema.get('required', ())
    least, most = schema.get('minProperties', 0), schema.get('maxProperties', math.inf)
    names = schema.get('propertyNames', True)
    if not required and 'properties' not in schema:
      key = self.write({'allOf': [{'type': 'string'}, names]}, refs)
      value = self.write(_get_property(schema, None), refs)
      if least > 1:
        raise ValueError('minProperties: a key may occur twice; give properties')
      pair = f'{key}{self._colon}{value}' if key and value else None
      return self._write_list('{}', [], pair, least, most)
    pairs: list[tuple[str, bool]] = []
    for key in dict.fromkeys([*schema.get('properties', ()), *required]):
      value = _get_property(schema, key) if self._is_valid(key, names) else False
      text = self.write(value, refs)
      if text is not None:
        name = json_texts.write_value(key)
        pairs.append((f'{name}{self._colon}{text}', key in required))
      elif key in required:
        return None
    if least > sum(is_required for _, is_required in pairs):
      raise ValueError('minProperties: make so many properties required')
    if most < len(pairs):
      raise ValueError('maxProperties: give no more properties')
    return f'\\{{{self._write_pairs(pairs)}\\}}'

  def _write_pairs(self, pairs: list[tuple[str, bool]]) -> str:
    before = [
      f'(?:{text}{self._comma})' + '?' * (not required) for text, required in pairs
    ]
    after = [f'(?:{self._comma}{text})?' for text, _ in pairs]
    last = max((i for i, (_, required) in enumerate(pairs) if required), default=None)
    if last is not None:
      return ''.join([*before[:last], pairs[last][0], *after[last + 1 :]])
    # Grouped by the last property present, which shares the most states.
    texts = [''.join(before[:i]) + text for i, (text, _) in enumerate(pairs)]
    return f'(?:{"|".join(texts)})?'


def _refuse_unknown(schema: Mapping[str, Any]):
  for name in schema:
    if name in tool_schema.list_keywords() - _KNOWN and (name, schema[name]) != _NO_SET:
      raise ValueError(f'{name} is not supported; leave it out')


def _list_types(schema: Mapping[str, Any]) -> list[str]:
  """Lists a plain alternative's types; without `type`, the types that it restricts."""
  restricted = [t for t, words in _KEYWORDS.items() if any(w in schema for w in words)]
  names = schema.get('type', restricted or _TYPES)
  return [*names, *['integer'] * ('number' in names and 'integer' not in names)]


def _get_property(schema: Mapping[str, Any], key: str | None) -> _Schema:
  other = schema.get('additionalProperties', True)
  return schema.get('properties', {}).get(key, other)


def _merge(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
  """Merges two alternatives that must both hold."""
  for one, other in ((a, b), (b, a)):
    if 'enum' in one:  # Whether its values satisfy the other one is checked later.
      return {'enum': [x for x in one['enum'] if x in other.get('enum', one['enum'])]}
  merged, lists = a | b, ('items', 'prefixItems')
  both = lambda x, y: x if x == y or y is True else {'allOf': [x, y]}
  for name in {*a} & {*b}:
    x, y = a[name], b[name]
    if name == 'type':
      merged[name] = [t for t in _list_types(a) if t in _list_types(b)]
    elif name.startswith(('min', 'exclusiveMin')):
      merged[name] = max(x, y)
    elif name.startswith(('max', 'exclusiveMax')):
      merged[name] = min(x, y)
    elif name in ('required', 'pattern', 'format'):
      merged[name] = list(dict.fromkeys([*x, *y]))
    elif name != 'properties':
      merged[name] = both(x, y)
  keys = {**a.get('properties', {}), **b.get('properties', {})}
  if 'properties' in merged:
    merged['properties'] = {
      k: both(_get_property(a, k), _get_property(b, k)) for k in keys
    }
  if 'prefixItems' in merged and {*a}.intersection(lists) and {*b}.intersection(lists):
    raise ValueError('prefixItems: items of two schemas are merged; write them as one')
  return merged
