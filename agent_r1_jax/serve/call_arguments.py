"""The arguments of calls as clients get them and send them back.

Those of a malformed call are its text, as it was sampled.
"""

import json
from typing import Any

from agent_r1_jax.web import http

# Where arguments must be an object, a text is the value of this key.
MALFORMED = 'malformed_arguments'


def read(text: str) -> dict[str, Any] | str:
  """Undoes `write`; no text is two kinds of arguments."""
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
  """Writes the arguments of a call as chat completions have them, a text."""
  if isinstance(arguments, str) and arguments and _read_object(arguments) is None:
    return arguments
  return json.dumps(make_object(arguments))


def make_object(arguments: dict[str, Any] | str) -> dict[str, Any]:
  """Makes an object of the arguments of a call, from which they can be read again."""
  if isinstance(arguments, dict) and [*arguments] != [MALFORMED]:
    return arguments
  return {MALFORMED: arguments}
