"""The JSON schemas of tools: makes them from functions, and checks calls against them."""

from collections.abc import Callable, Mapping
import functools
import inspect
import os
from typing import Any

from agent_r1_jax.host import workers

# Schemas that are known to be valid, as text: environments make the same tools for every
# episode, and a check takes milliseconds.
_VALID: set[str] = set()
_MOST_VALID = 10_000


def describe(fn: Callable, name: str) -> dict[str, Any]:
  """Describes a function by its signature and docstring, in the OpenAI form.

  Raises:
    ValueError: transformers' `get_json_schema` rejects it, or it takes *args or **kwargs.
  """
  # Set before the import, which otherwise warns that PyTorch is missing.
  os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
  from transformers.utils.chat_template_utils import get_json_schema

  for parameter in inspect.signature(fn).parameters.values():
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
      raise ValueError(f'tool {name}: *args and **kwargs have no schema; name them.')
  try:
    function = get_json_schema(fn)['function']
  except Exception as error:
    raise ValueError(
      f'tool {name}: {error}; fix its signature or docstring, or give Tool a schema of '
      'your own.'
    ) from error
  function = {key: value for key, value in function.items() if key != 'return'}
  return {'type': 'function', 'function': function | {'name': name}}


def find_problem(parameters: dict[str, Any], arguments: Mapping[str, Any]) -> str | None:
  """Describes what is wrong with a call's arguments; None if they fit the schema."""
  from jsonschema import exceptions

  properties = parameters.get('properties', {})
  unknown = [key for key in arguments if key not in properties]
  if unknown and parameters.get('additionalProperties', False) is False:
    return f'unknown argument {unknown[0]!r}; it takes {", ".join(properties) or "none"}'
  try:
    error = exceptions.best_match(make_validator(parameters).iter_errors(dict(arguments)))
  except Exception as failure:  # For example, a $ref that leads nowhere.
    return workers.describe_error(failure)
  if error is None:
    return None
  path = error.json_path.removeprefix('$').removeprefix('.')
  where = f'argument {path!r}: ' if path else ''
  # The message begins with the value, which may be long.
  return where + error.message[-300:]


def check(schema: Any, name: str):
  """Raises ValueError with the location if a value is not a valid JSON schema."""
  text = repr(schema)
  if text in _VALID:
    return
  import jsonschema

  try:
    _make_validator().check_schema(schema)
  except jsonschema.SchemaError as error:
    raise ValueError(
      f'schema, at {error.json_path} of {name}: {error.message[-300:]}; write it as JSON '
      'Schema says (draft 2020-12).'
    ) from None
  if len(_VALID) < _MOST_VALID:
    _VALID.add(text)


def make_validator(schema: Any) -> Any:
  """Makes a jsonschema validator for a schema; see `_make_validator`."""
  import referencing

  # An empty registry keeps the library from downloading a $ref.
  return _make_validator()(schema, registry=referencing.Registry())


@functools.cache
def list_keywords() -> set[str]:
  """Lists the keywords that jsonschema checks."""
  from jsonschema import validators

  drafts = validators.Draft7Validator, validators.Draft202012Validator
  return {name for draft in drafts for name in draft.VALIDATORS}


@functools.cache
def _make_validator() -> Any:
  """Returns a validator class of JSON Schema, with two differences.

  None is valid if a schema is `nullable`, as `get_json_schema` writes it. 3.0 is not an
  integer, because a function that expects an int would get a float.
  """
  from jsonschema import validators

  plain = validators.Draft202012Validator

  def unless_null(check):
    def checked(validator, value, instance, schema):
      if instance is not None or not schema.get('nullable'):
        yield from check(validator, value, instance, schema) or ()

    return checked

  return validators.extend(
    plain,
    {keyword: unless_null(check) for keyword, check in plain.VALIDATORS.items()},
    type_checker=plain.TYPE_CHECKER.redefine('integer', lambda _, x: type(x) is int),
  )
