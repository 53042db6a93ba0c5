"""Python values as JSON, between the judge of programs and the sandbox that runs them.

Values of the built-in types travel, of `collections`, numbers and arrays of numpy,
fractions, decimals, dates and times, exceptions, and what iterators give. An instance of
another subclass becomes one of the type itself; anything else becomes a handle: a number
that stands for the object where it lives. So nothing that untrusted code returns can
bring methods along, such as an `__eq__` that is always true.

What can be changed has a number by which both sides know it: what a function does to an
argument is done to the original.

The sandbox runs this file's own text in each session. It imports nothing of the package.
"""

import builtins
import collections
from typing import Any

# Name -> (type, how it is written as JSON, how it is read).
_SCALARS = {
  'int': (int, hex, lambda text: int(text, 16)),
  'float': (float, float.hex, float.fromhex),
  'complex': (
    complex,
    lambda value: [value.real.hex(), value.imag.hex()],
    lambda parts: complex(*map(float.fromhex, parts)),
  ),
  'bytes': (bytes, bytes.hex, bytes.fromhex),
}
_ITERABLES = {
  'tuple': (tuple, tuple),
  'frozenset': (frozenset, frozenset),
  'dict_keys': (type({}.keys()), lambda items: dict.fromkeys(items).keys()),
  'dict_values': (type({}.values()), lambda items: dict(enumerate(items)).values()),
  'dict_items': (type({}.items()), lambda items: dict(items).items()),
}
# What can be changed; subclasses come first.
_CHANGEABLE: dict[str, Any] = {
  'Counter': collections.Counter,
  'OrderedDict': collections.OrderedDict,
  'deque': collections.deque,
  **{kind.__name__: kind for kind in (dict, list, set, bytearray)},
}
TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
# Types of modules, made anew from their text or numbers. The module is imported where one
# comes.
_FROM_TEXT = {
  ('fractions', 'Fraction'): 'Fraction',
  ('decimal', 'Decimal'): 'Decimal',
  ('datetime', 'datetime'): 'datetime.fromisoformat',
  ('datetime', 'date'): 'date.fromisoformat',
  ('datetime', 'time'): 'time.fromisoformat',
  ('datetime', 'timedelta'): 'timedelta',
}
# An iterator may never end: so many of its items travel.
_MOST_ITEMS = 10_000
# Fraction would also read '1e999999999', whose digits fill the memory.
_FRACTION_CHARS = {*'-/0123456789'}


class Handle:
  """Stands for an object on the other side; equal to itself alone."""

  def __init__(self, number):
    vars(self)['_number'] = number


def encode(value, objects, shared=None):
  """Makes JSON of a value.

  Args:
    value: The value.
    objects: A list, to which is added what has no form in JSON.
    shared: The objects that can be changed and that both sides know; new ones are added.
  """
  shared = [] if shared is None else shared
  numbers = {id(item): number for number, item in enumerate(shared)}

  def write(value):
    if not isinstance(value, (*_CHANGEABLE.values(),)):
      return _write(value, write, objects)
    if id(value) not in numbers:
      numbers[id(value)] = len(shared)
      shared.append(value)
    return {'shared': numbers[id(value)]}

  # The contents of one may add others.
  return {'value': write(value), 'shared': [_write_content(x, write) for x in shared]}


def _write_content(value, write):
  kind = next(name for name, kind in _CHANGEABLE.items() if isinstance(value, kind))
  items = value.items() if isinstance(value, dict) else value
  return [kind, [write(item) for item in items]]


def _write(value, write, objects):
  if value is None or isinstance(value, bool):
    return value
  paths = [(kind.__module__, kind.__name__) for kind in type.mro(type(value))]
  if {('numpy', 'generic'), ('numpy', 'ndarray')}.intersection(paths):
    numbers = [write(number) for number in value.ravel().tolist()]
    return {'numpy': [value.dtype.str, [*value.shape], numbers]}
  if isinstance(value, str):
    return str.__str__(value)
  for name, (kind, to_json, _) in _SCALARS.items():
    if isinstance(value, kind):
      return {name: to_json(value)}
  for name, (kind, _) in _ITERABLES.items():
    if isinstance(value, kind):
      return {name: [write(item) for item in value]}
  if isinstance(value, range):
    return {'range': [write(n) for n in (value.start, value.stop, value.step)]}
  if isinstance(value, type) and TYPES.get(value.__name__) is value:
    return {'type': value.__name__}
  if isinstance(value, BaseException):
    return {'error': [[name for _, name in paths], write(value.args)]}
  if isinstance(value, Handle):
    return {'object': vars(value)['_number']}
  for path in paths:
    if path in _FROM_TEXT:
      is_delta = path[1] == 'timedelta'
      data = [value.days, value.seconds, value.microseconds] if is_delta else str(value)
      return {'.'.join(path): data}
  if hasattr(type(value), '__next__'):
    pairs = zip(range(_MOST_ITEMS + 1), value)  # noqa: B905  # type: ignore
    return {'iterator': [write(item) for _, item in pairs]}
  objects.append(value)
  return {'handle': len(objects) - 1}


def decode(
  data, objects=(), longest_range=None, shared=None, sent=(), types=TYPES, handle=Handle
) -> Any:
  """The inverse of `encode`; handles of `objects` are the objects themselves.

  Args:
    data: What `encode` has made.
    objects: What the other side's handles stand for.
    longest_range: The most items of a range; None is any number.
    shared: As in `encode`; what is there already gets the items that `data` gives it.
    sent: The content that each of these had when it was sent.
    types: Name -> type, those of exceptions included.
    handle: Makes a handle of its number.

  Raises:
    ValueError, TypeError, KeyError, IndexError, ArithmeticError, AttributeError: `data`
      is not what `encode` makes, or a range is longer.
  """
  known: Any = [] if shared is None else shared

  def read(data):
    if data is None or type(data) in (bool, str):
      return data
    ((kind, content),) = data.items()
    if kind in _SCALARS:
      return _SCALARS[kind][2](content)
    if kind in _ITERABLES:
      return _ITERABLES[kind][1](map(read, content))
    if kind == 'shared':
      return known[content]
    if kind == 'range':
      return _make_range(longest_range, *map(read, content))
    if kind == 'iterator':
      return _iterate([read(item) for item in content])
    if kind == 'numpy':
      dtype, shape, numbers = content
      array = __import__('numpy').array([*map(read, numbers)], dtype)
      return array.reshape(shape)[()]
    if kind == 'type':
      return types[content]
    if kind == 'error':
      return _make_error(types, content[0], read(content[1]))
    if kind == 'handle':
      return handle(int(content))
    if kind == 'object':
      return objects[content]
    return _from_text(kind, content)

  known += [_CHANGEABLE[kind]() for kind, _ in data['shared'][len(known) :]]
  for number, (item, content) in enumerate(zip(known, data['shared'], strict=True)):
    if [content] != [*sent[number : number + 1]]:
      _fill(item, [read(x) for x in content[1]])
  return read(data['value'])


def _fill(item, items):
  item.clear()
  if isinstance(item, dict):
    for key, value in items:
      item[key] = value
  else:
    (item.update if isinstance(item, set) else item.extend)(items)


def call(function, data, objects):
  """Calls a function with (arguments, named arguments), in the sandbox.

  Returns:
    What `encode` makes of (whether it raised, what it returned or raised).
  """
  args, kwargs = decode(data, objects, shared=(shared := []))
  try:
    outcome = False, function(*args, **kwargs)
  except MemoryError:
    raise
  except (Exception, SystemExit) as error:
    outcome = True, error
  return encode(outcome, objects, shared)


def list_names(scope, before):
  """Lists the new names of a program, with the types of each that is an exception's."""
  is_error = lambda value: isinstance(value, type) and issubclass(value, BaseException)
  return {
    name: [kind.__name__ for kind in type.mro(value)] if is_error(value) else []
    for name, value in scope.items()
    if name not in before
  }


def _make_error(types, names, args):
  """Makes an exception of the first type that is known here and takes the arguments."""
  for kind in (types.get(name) for name in names):
    if isinstance(kind, type) and issubclass(kind, BaseException):
      try:
        return kind(*args)
      except TypeError:
        pass
  raise ValueError(f'{names!r:.100} are no exceptions')


def _make_range(longest, start, stop, step):
  value = range(start, stop, step)
  if longest is not None and value[longest:]:  # `len` does not know large ones.
    raise ValueError(f'the range has more than {longest} items')
  return value


def _from_text(kind, text):
  if kind == 'fractions.Fraction' and not _FRACTION_CHARS.issuperset(text):
    raise ValueError(f'{text!r:.100} is no fraction')
  module, _, name = kind.partition('.')
  path = _FROM_TEXT[module, name]
  value = __import__(module)
  for part in path.split('.'):
    value = getattr(value, part)
  return value(*text) if isinstance(text, list) else value(str(text))


def _iterate(items):
  yield from items[:_MOST_ITEMS]
  if len(items) > _MOST_ITEMS:
    raise ValueError('the iterator has more items than can be sent')
