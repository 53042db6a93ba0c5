"""Checks the shapes in signatures while the tests run (see conftest.py)."""

from collections.abc import Callable
import dataclasses
import functools
import inspect
import types
from typing import Any, get_args, get_type_hints

from beartype import BeartypeConf, door
import jaxtyping

# An int is a float, as for every other checker (PEP 484).
_CONF = BeartypeConf(is_pep484_tower=True)
_remember = jaxtyping.jaxtyped


def install(rooms: list[str]):
  """Checks what is imported from these rooms from now on.

  pyright reads the types that have no shape: to check them too, at every call, would
  take a third of the time of the tests.
  """
  jaxtyping.jaxtyped = lambda typechecker: check  # The hook decorates with it.
  jaxtyping.install_import_hook(rooms, None)


def check(made: Any) -> Any:
  """What raises TypeError where an array is not as its annotation says."""
  if isinstance(made, type):
    if dataclasses.is_dataclass(made) and '__init__' in vars(made):
      made.__init__ = check(vars(made)['__init__'])
    return made
  hints = {k: x for k, x in made.__annotations__.items() if _is_shape(x)}
  return _check_calls(made, hints) if hints else made


def _check_calls(function: Callable[..., Any], hints: dict[str, Any]) -> Any:
  names = [*inspect.signature(function).parameters]
  waits = inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function)

  @functools.cache
  def resolve() -> tuple[list[tuple[int, str, Any]], Any]:
    """Not before the first call: a class may be named before it is there."""
    stub = types.SimpleNamespace(__annotations__=hints)
    resolved = get_type_hints(stub, function.__globals__)
    returned = None if waits else resolved.pop('return', None)
    return [(names.index(k), k, x) for k, x in resolved.items() if k in names], returned

  @functools.wraps(function)
  def checked(*args, **kwargs):
    with _remember('context'):  # One letter has one size in a call.
      given, returned = resolve()
      for place, name, hint in given:
        if place < len(args):
          _compare(function, name, args[place], hint)
        elif name in kwargs:
          _compare(function, name, kwargs[name], hint)
      result = function(*args, **kwargs)
      if returned is not None:
        _compare(function, 'return', result, returned)
      return result

  return checked


def _compare(function: Callable[..., Any], name: str, found: Any, hint: Any):
  if not door.is_bearable(found, hint, conf=_CONF):
    raise TypeError(f'{function.__qualname__}, {name}: {found!r} is no {hint}')


def _is_shape(annotation: Any) -> bool:
  if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
    return True
  return any(map(_is_shape, get_args(annotation)))
