"""Python values as JSON, between the judge of programs and the sandbox that runs them.

Only values of the built-in types travel, fractions, decimals, dates and times, and what
iterators give. An instance of a subclass, such as a Counter, becomes one of the type
itself; anything else becomes a handle: a number that stands for the object where it
lives. So nothing that untrusted code returns can bring methods along, such as an `__eq__`
that is always true.

The sandbox runs this file's own text in each session. It imports nothing of the package.
"""

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
_ITERABLES = {'list': list, 'tuple': tuple, 'set': set, 'frozenset': frozenset}
_TYPES = {
  kind.__name__: kind
  for kind in (bool, int, float, complex, str, bytes, list, tuple, set, dict)
}
# Types of modules, made anew from their text. The module is imported where one comes.
_FROM_TEXT = {
  ('fractions', 'Fraction'): 'Fraction',
  ('decimal', 'Decimal'): 'Decimal',
  ('datetime', 'datetime'): 'datetime.fromisoformat',
  ('datetime', 'date'): 'date.fromisoformat',
  ('datetime', 'time'): 'time.fromisoformat',
}
# An iterator may never end: so many of its items travel.
_MOST_ITEMS = 10_000
# Fraction would also read '1e999999999', whose digits fill the memory.
_FRACTION_CHARS = {*'-/0123456789'}


class Handle:
  """Stands for an object on the other side; equal to itself alone."""

  def __init__(self, number):
    self.number = number


def encode(value, objects):
  """Makes JSON of a value; what has no form in it is put into the list `objects`."""
  if value is None or isinstance(value, bool):
    return value
  if isinstance(value, str):
    return str.__str__(value)
  for name, (kind, write, _) in _SCALARS.items():
    if isinstance(value, kind):
      return {name: write(value)}
  for name, kind in _ITERABLES.items():
    if isinstance(value, kind):
      return {name: [encode(item, objects) for item in value]}
  if isinstance(value, range):
    return {'range': [encode(n, objects) for n in (value.start, value.stop, value.step)]}
  if isinstance(value, dict):
    pairs = [(encode(k, objects), encode(v, objects)) for k, v in value.items()]
    return {'dict': pairs}
  if isinstance(value, type) and _TYPES.get(value.__name__) is value:
    return {'type': value.__name__}
  if isinstance(value, Handle):
    return {'object': value.number}
  for kind in type.mro(type(value)):
    if (kind.__module__, kind.__name__) in _FROM_TEXT:
      return {f'{kind.__module__}.{kind.__name__}': str(value)}
  if hasattr(type(value), '__next__'):
    pairs = zip(range(_MOST_ITEMS + 1), value)  # noqa: B905  # type: ignore
    return {'iterator': [encode(item, objects) for _, item in pairs]}
  objects.append(value)
  return {'handle': len(objects) - 1}


def decode(data, objects=(), longest_range=None):
  """The inverse of `encode`; handles of `objects` are the objects themselves.

  Args:
    data: What `encode` has made.
    objects: What the other side's handles stand for.
    longest_range: The most items of a range; None is any number.

  Raises:
    ValueError, TypeError, KeyError, IndexError, ArithmeticError: `data` is not what
      `encode` makes, or a range is longer.
  """

  def read(data):
    if data is None or type(data) in (bool, str):
      return data
    ((kind, content),) = data.items()
    if kind in _SCALARS:
      return _SCALARS[kind][2](content)
    if kind == 'range':
      return _make_range(longest_range, *map(read, content))
    if kind == 'iterator':
      return _iterate([read(item) for item in content])
    if '.' in kind:
      return _from_text(kind, content)
    if kind == 'dict':
      return {read(key): read(value) for key, value in content}
    if kind == 'type':
      return _TYPES[content]
    if kind == 'handle':
      return Handle(int(content))
    if kind == 'object':
      return objects[content]
    return _ITERABLES[kind](map(read, content))

  return read(data)


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
  return value(str(text))


def _iterate(items):
  yield from items[:_MOST_ITEMS]
  if len(items) > _MOST_ITEMS:
    raise ValueError('the iterator has more items than can be sent')
