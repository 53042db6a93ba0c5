"""The arguments of calls, as clients receive them and send them back.

The arguments of a malformed call are its text as it was sampled.
"""

import json
from typing import Any

from agent_r1_jax.web import http

# The key that holds a malformed call's text where arguments must be an object.
MALFORMED = 'malformed_arguments'


def read(text: str) -> dict[str, Any] | str:
  """Reads what `write` or `make_object` wrote."""
  value = _read_object(text or '{}')
  if value is None:
    return text
  inner = value[MALFORMED] if [*value] == [MALFORMED] else None
  return inner if isinstance(inner, dict | str) else value


def _read_object(text: str) -> dict[str, Any] | None:
  try:
    value = http.parse_json(text)
  except ValueError:
    return None
  return value if isinstance(value, dict) else None


def write(arguments: dict[str, Any] | str) -> str:
  """Writes a call's arguments as a string, as chat completions do."""
  if isinstance(arguments, str) and arguments and _read_object(arguments) is None:
    return arguments
  return json.dumps(make_object(arguments))


def make_object(arguments: dict[str, Any] | str) -> dict[str, Any]:
  """Makes a call's arguments an object; `read` restores malformed ones."""
  if isinstance(arguments, dict) and [*arguments] != [MALFORMED]:
    return arguments
  return {MALFORMED: arguments}
