"""Grammars as automata over bytes: stop strings, regular expressions, schemas, calls.

A grammar may come from a stranger, and a short one may take hours and all memory. So
automata.py calls `make_encoded` in a process of its own.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
import io
import json
import os
import signal
from typing import Any
import zlib

import numpy as np

from agent_r1_jax.agent import byte_automata, tool_schema
from agent_r1_jax.agent.byte_automata import ByteAutomaton, TokenAutomaton

# Seconds of a processor until the states of a grammar are known, and can be limited; a
# string of 3,000 characters takes one.
PROCESSOR_SECONDS = 3
# What the functions here import, so that a process has it before its time begins.
IMPORTS = ('jsonschema', 'outlines_core', 'referencing')
_CALL_OPENING = '<tool_call>'


def make_encoded(
  make: Callable[..., ByteAutomaton],
  args: Sequence,
  vocabulary: Sequence,
  processor_seconds: float,
) -> str:
  """Makes an automaton over tokens in a process that ends if it takes too long.

  `make` is one of the functions below, for which there are so many seconds of a
  processor; `vocabulary` has the further arguments of byte_automata.lift_to_tokens.

  Returns:
    The automaton for `decode`.
  """
  # The engine and its event loop come first.
  os.setpriority(os.PRIO_PROCESS, 0, 10)
  signal.setitimer(signal.ITIMER_PROF, processor_seconds)  # Its signal ends the process.
  try:
    automaton = make(*args)
  finally:
    signal.setitimer(signal.ITIMER_PROF, 0)
  file = io.BytesIO()
  np.savez(file, **byte_automata.lift_to_tokens(automaton, *vocabulary)._asdict())
  return base64.b64encode(zlib.compress(file.getvalue(), 1)).decode()


def decode(text: str) -> TokenAutomaton:
  """Returns what `make_encoded` has made."""
  return TokenAutomaton(**np.load(io.BytesIO(zlib.decompress(base64.b64decode(text)))))


def stop(strings: Sequence[str]) -> ByteAutomaton:
  """See automata.stop; strings are separated by tokens without text."""
  goto = byte_automata.build_string_search([string.encode() for string in strings])
  end = np.full(len(goto), len(goto) - 1)
  return ByteAutomaton(
    goto, np.where(end == np.arange(len(goto)), end, 0), end, np.arange(len(goto)) == end
  )


def regex(pattern: str) -> ByteAutomaton:
  """Constrains a whole reply to a regular expression, in the syntax of Rust's regex.

  A stop id can end the reply only where the expression matches; no other control token is
  allowed, and no byte 0.

  Raises:
    ValueError: It matches no text, or needs too many states.
  """
  goto, matches = byte_automata.compile_regex(pattern)
  # A stop id leads to a further state.
  end = len(goto)
  goto = np.concatenate([goto, np.full((1, 256), end)])
  stop = np.append(np.where(matches, end, -1), end)
  return ByteAutomaton(
    goto, np.append(np.full(end, -1), end), stop, np.arange(end + 1) == end
  )


def json_schema(schema: Mapping[str, Any]) -> ByteAutomaton:
  """Like `regex`, for JSON of a schema."""
  from outlines_core import json_schema as library

  tool_schema.check(schema, 'response_format')
  return regex(library.build_regex_from_schema(json.dumps(schema)))


def tool_calls(schemas: Sequence[Mapping[str, Any]], required: bool) -> ByteAutomaton:
  """See automata.tool_calls."""
  if not schemas:
    raise ValueError('schemas is empty: give at least one tool, or no grammar.')
  call = f'{_CALL_OPENING}\n({_match_calls(schemas)})\n</tool_call>'
  goto, matches = byte_automata.compile_regex(call)
  (end,) = np.flatnonzero(matches)
  return _add_free_text(goto, int(end), _CALL_OPENING.encode(), required)


# Takes the place of the library's optional blanks; no schema contains it.
_BLANK = '\ue000'
_SCALARS = [{'type': name} for name in ('string', 'number', 'boolean', 'null')]
_ANY = {
  'anyOf': [
    *_SCALARS,
    {'type': 'array', 'items': {'anyOf': _SCALARS}},
    {'type': 'object', 'additionalProperties': {'anyOf': _SCALARS}},
  ]
}


def _match_calls(schemas: Sequence[Mapping[str, Any]]) -> str:
  """Returns a regular expression for the JSON of a call of any of the tools."""
  from outlines_core import json_schema

  patterns = []
  for schema in schemas:
    function = schema['function']
    parameters = {
      'type': 'object',
      'properties': {},
      **(function.get('parameters') or {}),
    }
    try:
      tool_schema.check(parameters, 'parameters')
      properties = {
        'name': {'const': function['name']},
        'arguments': _rewrite_schema(parameters),
      }
      call = {'type': 'object', 'properties': properties, 'required': [*properties]}
      pattern = json_schema.build_regex_from_schema(json.dumps(call), _BLANK)
    except Exception as error:  # The library raises various types.
      raise ValueError(
        f'tool {function["name"]}: its parameters have no grammar ({error}); simplify '
        'them or play without a grammar.'
      ) from error
    # As json.dumps writes: one blank after a colon or a comma, none elsewhere.
    pattern = pattern.replace(f'{_BLANK}:{_BLANK}', ': ')
    patterns.append(pattern.replace(f',{_BLANK}', ', ').replace(_BLANK, ''))
  return '|'.join(patterns)


def _rewrite_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
  """Rewrites a schema as the library needs it, with _ANY where it allows any value."""
  schema = dict(schema)
  if schema.pop('nullable', False):
    return {'anyOf': [_rewrite_schema(schema), {'type': 'null'}]}
  if options := schema.get('anyOf'):
    return {'anyOf': [_rewrite_schema(option) for option in options]}
  if 'enum' in schema:
    return {'enum': schema['enum']}
  names = schema.get('type')
  if isinstance(names, list):
    return {'anyOf': [_rewrite_schema({**schema, 'type': name}) for name in names]}
  if names == 'array':
    schema['items'] = _rewrite_schema(schema['items']) if schema.get('items') else _ANY
  if names == 'object' and 'properties' in schema:
    not_ascii = [key for key in schema['properties'] if json.dumps(key) != f'"{key}"']
    if not_ascii:
      raise ValueError(
        f'argument {not_ascii[0]!r}: a name in a grammar is of plain ASCII.'
      )
    properties = {
      key: _rewrite_schema(value) for key, value in schema['properties'].items()
    }
    schema = {**schema, 'properties': properties}
  elif names == 'object':
    other = schema.get('additionalProperties')
    schema['additionalProperties'] = (
      _rewrite_schema(other) if isinstance(other, dict) else _ANY
    )
  constrained = set(schema) - {'description', 'title', 'default', 'examples'}
  return schema if constrained else _ANY


def _add_free_text(
  call: np.ndarray, end: int, opening: bytes, required: bool
) -> ByteAutomaton:
  """Adds free text around the automaton of a call, whose state `end` completes it."""
  opened = 0
  for byte in opening:
    opened = call[opened, byte]
  text = byte_automata.build_string_search([opening])[:-1]
  # After a call, the text is free again, and no part of `opening` has been read. The last
  # number is that of -1.
  moved = np.append(np.arange(len(call)) + len(text), -1)
  moved[end] = 0
  text = np.where(text == len(text), moved[opened], text)
  goto = np.concatenate([text, moved[call]])
  control = np.where(np.arange(len(goto)) < len(text), 0, -1)
  order = byte_automata.find_reachable(goto, int(moved[0]) if required else 0)
  goto, control = (byte_automata.renumber(x, order)[order] for x in (goto, control))
  return ByteAutomaton(goto, control, control, np.zeros(len(goto), bool))
