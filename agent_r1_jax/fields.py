"""Nested dataclasses as configurations: dotted names, flags, and checks of values.

The dotted name 'engine.rows', as in flags, is the field `rows` of the field `engine`.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import copy
import dataclasses
import difflib
import functools
import inspect
import json
import math
import re
import sys
from typing import Any, NamedTuple, TypeVar

_T = TypeVar('_T')
# What other trainers call a field -> the last part of its name.
_ELSEWHERE = {
  'lr': 'learning_rate',
  'batch_size': 'tasks',
  'group_size': 'samples',
  'num_generations': 'samples',
  'max_steps': 'steps',
  'max_new_tokens': 'max_turn_tokens',
}


def names(kind: Any, within: 'Range | None' = None) -> Iterator[str]:
  """Yields the dotted names of a dataclass's fields, or of fields with one Range."""
  for field in dataclasses.fields(kind):
    if dataclasses.is_dataclass(field.type):
      yield from (f'{field.name}.{name}' for name in names(field.type, within))
    elif within in (None, field.metadata.get('range')):
      yield field.name


def get(config: Any, name: str) -> Any:
  """Returns the value of the field with this dotted name."""
  return functools.reduce(getattr, name.split('.'), config)


def replace(config: _T, changes: Mapping[str, Any]) -> _T:
  """Returns a copy of a configuration with changed values.

  Raises:
    ValueError: There is no field with a given name.
  """
  config = copy.deepcopy(config)
  known = set(names(config))
  for name, value in changes.items():
    if name not in known:
      raise ValueError(f'there is no field {name!r}{suggest(type(config), name)}')
    *rooms, field = name.split('.')
    setattr(functools.reduce(getattr, rooms, config), field, value)
  return config


def suggest(kind: Any, name: str) -> str:
  """Returns the end of an error about a wrong name: the field that was probably meant."""
  known = list(names(kind))
  if inner := [field for field in known if field.startswith(f'{name}.')]:
    return f'; name one of {", ".join(inner)}.'
  outer = [field.name for field in dataclasses.fields(kind)]
  # A user's likely input -> the field.
  typed = {field: field for field in outer} | {n.split('.')[-1]: n for n in known}
  typed |= {field.replace('.', '_'): field for field in known}
  typed |= {word: typed[field] for word, field in _ELSEWHERE.items() if field in typed}
  room, _, last = name.rpartition('.')
  near = {n.split('.')[-1]: n for n in known if room and n.startswith(f'{room}.')}
  if last not in typed and (close := difflib.get_close_matches(last, near, n=1)):
    return f'; did you mean {near[close[0]]}?'
  for part in reversed(name.split('.')):
    if close := difflib.get_close_matches(part, typed, n=1, cutoff=0.5):
      return f'; did you mean {typed[close[0]]}?'
  return f'; there are {", ".join(outer)}.'


def define_flags(default: Any, name: str = 'config', **options: Any):
  """Defines the absl flags --config.<field> of a configuration, and --help_config.

  `options` are passed to ml_collections.config_flags.DEFINE_config_dataclass.

  If the class has FIRST_TRY, values by dotted names, the flag --first_try makes them the
  defaults; fields on the command line still win.

  Returns:
    The holder of the flag, whose `value` is the configuration.

  Raises:
    SystemExit: The command line names a field that does not exist; the message suggests
      the field that was probably meant.
  """
  from absl import flags
  from ml_collections import config_flags

  from agent_r1_jax.host import terminal

  terminal.install()
  for argument in sys.argv[1:]:
    if re.match(rf'(workdir|{name}\.[\w.]+)=', argument):
      sys.exit(f'{argument}: a flag begins with two hyphens: --{argument}')
    match = re.match(rf'--?{name}\.([\w.]+)', argument)
    if match and match[1] not in names(default):
      hint = suggest(type(default), match[1])
      sys.exit(f'--{name}.{match[1]}: there is no such field{hint}')
  flags.disclaim_key_flags()  # So that --help of the calling script shows the flag.
  values = options.get('flag_values', flags.FLAGS)
  if preset := getattr(default, 'FIRST_TRY', None):
    sizes = ', '.join(f'{field}={value}' for field, value in preset.items())
    # Parsed separately, because absl parses flags only after the configuration's flags
    # are defined; absl then reports errors in the command line.
    alone = flags.FlagValues()
    alone.set_gnu_getopt(True)
    for holder in (values, alone):
      flags.DEFINE_bool('first_try', False, f'Try it small: {sizes}.', holder)
    with contextlib.suppress(flags.Error):
      alone(sys.argv, known_only=True)
    if alone['first_try'].value:
      default = replace(default, preset)
  text = f'Each field is a flag, such as --{name}.{next(names(default))}=...'
  holder = config_flags.DEFINE_config_dataclass(name, default, text, **options)
  values[name].default_as_str = ''

  flags.DEFINE_flag(_make_help(default, name), values)
  return holder


def _make_help(default: Any, name: str) -> Any:
  """Makes the flag that lists the fields, one line each, and ends the program."""
  from absl import flags

  class Help(flags.BooleanFlag):
    def parse(self, argument: Any):
      if self._parse(argument):
        print(*(f'--{name}.{line}' for line in explain(default)), sep='\n')
        sys.exit(0)

  return Help(f'help_{name}', False, f'List the fields of --{name}, a line each.')


def explain(config: Any) -> Iterator[str]:
  """Yields a line for each field: its dotted name, value and description.

  The description is the first sentence of the field's entry in its dataclass's docstring.
  """
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      yield from (f'{field.name}.{line}' for line in explain(value))
    else:
      entry = rf'^  {field.name}: ((?:.|\n    )*?\.)(?=\s|$)'
      found = re.search(entry, inspect.getdoc(type(config)) or '', re.MULTILINE)
      meaning = re.sub(r'\s+', ' ', found[1]) if found else ''
      yield f'{field.name}={value!r}: {meaning}'


class Range(NamedTuple):
  """A range of numbers. Called with a default, it makes a field of a dataclass."""

  contains: Callable[[Any], bool]
  text: str  # The range's description in errors.

  def __call__(self, default: float) -> Any:
    """Makes a field for which `check` raises outside the range."""
    return dataclasses.field(default=default, metadata={'range': self})


at_least_0 = Range(lambda x: 0 <= x < math.inf, ', at least 0')
at_least_1 = Range(lambda x: 1 <= x < math.inf, ', at least 1')
above_0 = Range(lambda x: x > 0, ' above 0')
from_0_below_1 = Range(lambda x: 0 <= x < 1, ' from 0 to below 1')
from_0_to_1 = Range(lambda x: 0 <= x <= 1, ', from 0 to 1')
above_0_to_1 = Range(lambda x: 0 < x <= 1, ' above 0, at most 1')
chosen_if_0 = Range(lambda x: x >= 0, ', and 0 chooses it')


def one_of(*choices: str, default: str | None = None) -> Any:
  """Makes a field with one of some strings, by default `default` or the first choice."""
  default = choices[0] if default is None else default
  return dataclasses.field(default=default, metadata={'choices': choices})


class Checked:
  """A part of a configuration that checks its fields."""

  def check(self, name: str = '') -> None:
    """Raises ValueError for a wrong value; the message names the field.

    `name` is the part's dotted name in the run's configuration; by default, the class's.
    """
    check(self, name or type(self).__name__.lower())


def check(config: Any, name: str = '') -> None:
  """Raises ValueError for a field of a wrong type or out of its range.

  Args:
    config: A dataclass. Numbers without a Range must be at least 0.
    name: The dataclass's dotted name in the run's configuration; empty for the outermost.

  Raises:
    ValueError: Names the field, the value and the allowed values.
  """
  for field in dataclasses.fields(config):
    value, choices = getattr(config, field.name), field.metadata.get('choices')
    if choices is None:
      problem = _problem(field.type, value, field.metadata.get('range', at_least_0))
    else:
      listed = ', '.join(map(repr, choices))
      problem = None if value in (*choices, field.default) else f'give one of {listed}.'
    if problem:
      dotted = f'{name}.{field.name}' if name else field.name
      raise ValueError(f'{dotted} is {value!r}; {problem}')


def check_takes(name: str, function: Any, *arguments: str) -> None:
  """Raises ValueError unless a function takes these positional arguments.

  A function without a Python signature passes.

  Raises:
    ValueError: Shows the function's parameters and how it is called.
  """
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):
    return
  try:
    signature.bind(*arguments)
  except TypeError as error:
    raise ValueError(
      f'{name} is called as {name}({", ".join(arguments)}), but it has the parameters '
      f'{str(signature):.200}: {error}.'
    ) from None


def parse_json(name: str, text: str, kind: type) -> Any:
  """Parses a field that contains JSON.

  `kind` is `list` for a list of strings, or `dict`.

  Raises:
    ValueError: The text is not JSON of this kind.
  """
  example = {list: '\'["a", "b"]\'', dict: '\'{"a": true}\''}[kind]
  try:
    value = json.loads(text)
  except (TypeError, ValueError, RecursionError):
    value = None
  if value is None or type(value) is not kind or any(type(x) is not str for x in value):
    raise ValueError(f'{name} is {text!r}; it must be JSON such as {example}.')
  return value


def _problem(kind: Any, value: Any, allowed: Range) -> str | None:
  """Returns what a wrong value must be; None if the value is right."""
  if kind in (bool, str):
    named = {bool: 'True or False', str: 'a text'}
    return None if isinstance(value, kind) else f'it must be {named[kind]}.'
  if kind not in (int, float):
    return None if isinstance(value, kind) else f'it must be of {kind}.'
  sort = 'a whole number' if kind is int else 'a number'
  numbers = int if kind is int else int | float
  if isinstance(value, bool) or not isinstance(value, numbers) or math.isnan(value):
    return f'it must be {sort}.'
  return None if allowed.contains(value) else f'it must be {sort}{allowed.text}.'
