"""JSON's numbers and strings with bounds, lengths, patterns and formats, as grammars.

Expressions are in the syntax of Rust's regex, and match JSON, quotes included.
"""

from collections.abc import Iterable, Mapping
import fractions
import functools
import importlib
import json
import math
import re
from typing import Any
import warnings

import numpy as np

from agent_r1_jax.grammars import regex_automata

INTEGER = '-?(?:0|[1-9][0-9]*)'
NUMBER = rf'{INTEGER}(?:\.[0-9]+)?(?:[eE][+-][0-9]{{1,2}})?'
# Excludes control characters, except those with a one-letter escape.
_TEXT = r'[^\x00-\x07\x0b\x0e-\x1f\x7f-\x9f]'
_CHARACTER = r'(?:[^"\\\x00-\x1f\x7f-\x9f]|\\["\\/bfnrt])'
_BEGIN, _END = '\x02', '\x03'  # Delimit a text whose quotes are not yet written.
_DATE = (
  r'[1-9]\d{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])'
  r'|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))'
)
_CLOCK = r'(?:[01]\d|2[0-3]):[0-5]\d'
_TIME = rf'{_CLOCK}:[0-5]\d(?:\.\d{{1,6}})?(?:Z|[+-]{_CLOCK})'
_HOST = r'(?:[a-z0-9]+(?:-[a-z0-9]+)*\.)+[a-z]{2,9}'
_FORMATS = {
  'date': _DATE,
  'time': _TIME,
  'date-time': f'{_DATE}T{_TIME}',
  'uuid': '[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}',
  'hostname': _HOST,
  'email': rf'[a-z0-9]+(?:[._+-][a-z0-9]+)*@{_HOST}',
  'uri': rf'https?://{_HOST}(?:/[\w.~-]+)*/?(?:\?[\w.~=&-]+)?',
}


def write_value(value: Any) -> str:
  """Writes the JSON of a value."""
  text = json.dumps(value, ensure_ascii=False, allow_nan=False)
  return re.escape(text)


def repeat(least: float, most: float) -> str:
  """Writes a quantifier of a regular expression."""
  return f'{{{max(int(least), 0)},{"" if most == math.inf else int(most)}}}'


def write_string(schema: Mapping[str, Any], holes: list[Any]) -> str | None:
  """Writes strings with a length, patterns and a format; None if there are none.

  Anything beyond a length is an automaton, added to `holes`; see regex_automata.fill.

  Raises:
    ValueError: A pattern or a format is not supported.
  """
  least, most = schema.get('minLength', 0), schema.get('maxLength', math.inf)
  if most < least:
    return None
  length = repeat(least, most)
  patterns = [*schema.get('pattern', ())]
  for name in schema.get('format', ()):
    if name not in _FORMATS:
      raise ValueError(f'format: {name!r:.80} is not one of {", ".join(_FORMATS)}')
    patterns.append(f'^(?:{_FORMATS[name]})$')
  if not patterns:
    return f'"{_CHARACTER}{length}"'
  texts = tuple(map(translate, patterns))
  key = (f'{_BEGIN}{_TEXT}{length}{_END}', *texts)
  if key not in holes:
    holes.append(key)
  return regex_automata.mark_hole(holes.index(key))


def compile_string(expressions: tuple[str, ...]) -> regex_automata.Acceptor:
  """Compiles a hole: JSON strings that match all expressions of `write_string`."""
  automata = map(regex_automata.compile_regex, expressions)
  goto, matches = functools.reduce(regex_automata.intersect, automata)
  # Each state has a second one, after a backslash.
  count, quote = len(goto), ord('"')
  quoted = np.full((2 * count, 256), -1, np.int32)
  quoted[:count, 0x20:] = goto[:, 0x20:]
  quoted[:count, quote] = np.maximum(goto[:, ord(_BEGIN)], goto[:, ord(_END)])
  quoted[:count, ord('\\')] = np.arange(count) + count
  for character, escape in zip('"\\/\b\f\n\r\t', '"\\/bfnrt', strict=True):
    quoted[count:, ord(escape)] = goto[:, ord(character)]
  return regex_automata.trim(quoted, np.append(matches, np.zeros(count, bool)))


def translate(pattern: str) -> str:
  """Translates a pattern of JSON Schema, which may match anywhere, to an expression.

  The result, between _BEGIN and _END, matches only by both ECMAScript's and Python's
  rules, which differ in what counts as a digit, letter or blank.

  Raises:
    ValueError: The pattern is malformed, or no automaton can match it.
  """
  parser = importlib.import_module('re._parser')
  try:
    with warnings.catch_warnings(action='ignore'):
      tree = parser.parse(pattern)
    if tree.state.flags & ~re.UNICODE:
      raise ValueError('flags are not supported')
    return f'[^\\x00]*(?:{_write_nodes(tree)})[^\\x00]*'
  except (re.error, RecursionError, OverflowError, ValueError) as error:
    raise ValueError(f'pattern: {pattern!r:.80}: {error}') from None


def _write_nodes(nodes: Iterable[Any]) -> str:
  return ''.join(_write_node(str(op), given) for op, given in nodes)


def _write_node(op: str, given: Any) -> str:
  """Writes the expression of a node of Python's parser."""
  match op, given:
    case 'AT', _ if str(given).startswith('AT_BEGINNING'):
      return _BEGIN
    case 'AT', _ if str(given).startswith('AT_END'):
      return _END
    case 'BRANCH', (_, nodes):
      return f'(?:{"|".join(map(_write_nodes, nodes))})'
    case 'SUBPATTERN', (_, 0, 0, nodes):
      return f'(?:{_write_nodes(nodes)})'
    case (('MAX_REPEAT' | 'MIN_REPEAT'), (least, most, nodes)):
      most = math.inf if str(most) == 'MAXREPEAT' else most
      return f'(?:{_write_nodes(nodes)}){repeat(least, most)}'
    case 'LITERAL', _:
      return _write_set([(op, given)])
    case 'NOT_LITERAL', _:
      return _write_set([('NEGATE', None), ('LITERAL', given)])
    case 'ANY', _:
      line_ends = [('LITERAL', ord(x)) for x in '\n\r\u2028\u2029']
      return _write_set([('NEGATE', None), *line_ends])
    case 'IN', _:
      return _write_set(given)
  raise ValueError(f'{op} {given}'.lower()[:80] + ' is not supported')


# For each category, without NOT: characters that are certainly, and possibly, in it.
_CATEGORIES = {
  'DIGIT': ('0-9', r'\d'),
  'WORD': ('0-9A-Za-z_', r'\w[^\x00-\x7f]'),
  'SPACE': (r'\t-\r\x20', r'\s'),
}


def _write_set(given: Iterable[Any]) -> str:
  """Writes a set, which matches one character."""
  text, is_negated = '', False
  for kind, x in given:
    match str(kind):
      case 'NEGATE':
        text, is_negated = '^', True
      case 'LITERAL':
        text += f'\\x{{{x:x}}}'
      case 'RANGE':
        text += f'\\x{{{x[0]:x}}}-\\x{{{x[1]:x}}}'
      case 'CATEGORY':
        _, is_not, name = str(x).rpartition('NOT_')
        sure, maybe = _CATEGORIES[name.removeprefix('CATEGORY_')]
        # In a negated set, exclude every character that is possibly in the category.
        inner = maybe if is_negated != bool(is_not) else sure
        text += f'[^{inner}]' if is_not else inner
  return f'[[{text}]&&{_TEXT}]'


def write_number(schema: Mapping[str, Any], is_integer: bool) -> str | None:
  """Writes the numbers between bounds; None if there are none.

  Bounded numbers that are not integers have a fixed number of decimals, so that no
  rounding can cross a bound.
  """
  bounds = [schema[name] for name in (*_LEAST, *_MOST) if name in schema]
  if not bounds:
    return INTEGER if is_integer else NUMBER
  is_exact = is_integer or max(map(abs, bounds)) >= 1 << 30
  texts = []
  for places in range(1 if is_exact else 5):
    low, high = _scale(schema, _LEAST, 1, places), _scale(schema, _MOST, -1, places)
    if low is None or low < 0:
      least = 1 if high is None else max(1, -high)
      found = _list_naturals(least, None if low is None else -low, places)
      texts += [f'-(?:{text})' for text in found]
    if high is None or high >= 0:
      texts += _list_naturals(max(low or 0, 0), high, places)
  return f'(?:{"|".join(texts)})' if texts else None


_LEAST, _MOST = ('minimum', 'exclusiveMinimum'), ('maximum', 'exclusiveMaximum')


def _scale(
  schema: Mapping[str, Any], names: Iterable[str], sign: int, places: int
) -> int | None:
  """Returns an inclusive bound in units of the last decimal; None if there is none."""
  found = []
  for name in names:
    if name in schema:
      exact = sign * fractions.Fraction(repr(schema[name])) * 10**places
      excluded = name.startswith('exclusive') and exact.denominator == 1
      found.append(math.ceil(exact) + excluded)
  return sign * max(found) if found else None


def _list_naturals(low: int, high: int | None, places: int) -> list[str]:
  """Writes the numbers between two, in units of the last decimal, grouped by length."""
  texts, scale = [], 10**places
  show = lambda n: f'{n // scale}.{n % scale:0{places}}' if places else str(n)
  while high is None or low <= high:
    count = len(str(low // scale))
    if high is None and texts:
      more = rf'\.[0-9]{{{places}}}' if places else ''
      return [*texts, f'[1-9][0-9]{{{count - 1},}}{more}']
    top = 10**count * scale - 1
    texts.append(_write_digits(show(low), show(top if high is None else min(top, high))))
    low = top + 1
  return texts


def _write_digits(low: str, high: str) -> str:
  """Writes the numbers between two of equal length, including a decimal point."""
  fill = lambda text, digit: re.sub('[0-9]', digit, text)
  if low == fill(low, '0') and high == fill(high, '9'):
    return fill(low, '[0-9]').replace('.', r'\.')
  a, b = low[0], high[0]
  if a == b:
    return a.replace('.', r'\.') + _write_digits(low[1:], high[1:])
  texts = [a + _write_digits(low[1:], fill(low[1:], '9'))]
  if int(b) - int(a) > 1:
    middle = fill(low[1:], '[0-9]').replace('.', r'\.')
    texts.append(f'[{int(a) + 1}-{int(b) - 1}]{middle}')
  texts.append(b + _write_digits(fill(high[1:], '0'), high[1:]))
  return f'(?:{"|".join(texts)})'
