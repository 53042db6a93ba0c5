"""Python values as JSON, between the judge of programs and the sandbox that runs them.

Values of built-in types are passed, and so are those of `collections`, numpy's numbers
and arrays, fractions, decimals, dates and times, exceptions, and the items of iterators.
An instance of any other subclass becomes an instance of the type itself; anything else
becomes a handle: a number that stands for the object where it lives. So untrusted code
cannot return methods, such as an `__eq__` that is always true.

Mutable values have a number that both sides know: what a function does to an argument is
done to the original.

The sandbox runs the text of this file in each session. It imports nothing of the package.
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
# Mutable types; subclasses come first.
_CHANGEABLE: dict[str, Any] = {
  'Counter': collections.Counter,
  'OrderedDict': collections.OrderedDict,
  'deque': collections.deque,
  **{kind.__name__: kind for kind in (dict, list, set, bytearray)},
}
TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
# Types from modules, made from their text or numbers. The module is imported on first
# use.
_FROM_TEXT = {
  ('fractions', 'Fraction'): 'Fraction',
  ('decimal', 'Decimal'): 'Decimal',
  ('datetime', 'datetime'): 'datetime.fromisoformat',
  ('datetime', 'date'): 'date.fromisoformat',
  ('datetime', 'time'): 'time.fromisoformat',
  ('datetime', 'timedelta'): 'timedelta',
}
# An iterator may never end, so only this many items are passed.
_MOST_ITEMS = 10_000
# Fraction would also accept '1e999999999', whose digits fill the memory.
_FRACTION_CHARS = {*'-/0123456789'}


class Handle:
  """Stands for an object on the other side; equal only to itself."""

  def __init__(self, number):
    vars(self)['_number'] = number


def encode(value, objects, shared=None):
  """Makes JSON of a value.

  Args:
    value: The value.
    objects: A list; objects that have no form in JSON are appended.
    shared: The mutable objects that both sides know; new ones are appended.
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

  # Writing the contents of one may append others.
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
    data: The result of `encode`.
    objects: The objects that the other side's handles stand for.
    longest_range: The maximum number of items of a range; None allows any.
    shared: As in `encode`; objects already there get the items that `data` gives them.
    sent: The content of each shared object when it was sent.
    types: Types by name, exceptions included.
    handle: Makes a handle from its number.

  Raises:
    ValueError, TypeError, KeyError, IndexError, ArithmeticError, AttributeError: `data`
      is not a result of `encode`, or a range is too long.
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
    The result of `encode` for (whether it raised, what it returned or raised).
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
  """Lists a program's new names, with the base types of those that are exceptions."""
  is_error = lambda value: isinstance(value, type) and issubclass(value, BaseException)
  return {
    name: [kind.__name__ for kind in type.mro(value)] if is_error(value) else []
    for name, value in scope.items()
    if name not in before
  }


def _make_error(types, names, args):
  """Makes an exception of the first type that exists here and accepts the arguments."""
  for kind in (types.get(name) for name in names):
    if isinstance(kind, type) and issubclass(kind, BaseException):
      try:
        return kind(*args)
      except TypeError:
        pass
  raise ValueError(f'{names!r:.100} are no exceptions')


def _make_range(longest, start, stop, step):
  value = range(start, stop, step)
  if longest is not None and value[longest:]:  # `len` fails on large ones.
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
