"""Makes an automaton that constrains tool calls in Hermes format to their schemas.

Letters: V tokens of the vocabulary, Q automaton states.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.agent import automata

_OPENING = '<tool_call>'


def tool_calls(
  schemas: Sequence[Mapping[str, Any]],
  token_bytes: Sequence[bytes],
  vocab_size: int,
  *,
  required: bool = False,
) -> types.Automaton:
  r"""Constrains the tool calls of a reply to Hermes format and to their schemas.

  Text is free until '<tool_call>' is complete, however it is split into tokens. Then
  follows '\n{"name": ..., "arguments": {...}}\n</tool_call>', spaced as json.dumps does,
  with the arguments in the schema's order. Text is free again after it. Control tokens,
  which include stop tokens, are forbidden in a call.

  A call fulfils what agent/tool.py checks. An argument whose schema allows any value is a
  scalar, or a list or an object of scalars. The library enforces bounds on the lengths of
  strings and arrays, and no others.

  Args:
    schemas: The tools' schemas, in the OpenAI form.
    token_bytes: The bytes of each of the tokenizer's tokens, b'' for control tokens.
    vocab_size: Tokens of the model (V); those beyond the tokenizer's count as control
      tokens.
    required: The reply must begin with a call.

  Raises:
    ValueError: There are no tools, a schema has no grammar, or the vocabulary lacks
      single bytes.
  """
  if not schemas:
    raise ValueError('schemas is empty: give at least one tool, or no grammar.')
  call = f'{_OPENING}\n({_calls(schemas)})\n</tool_call>'
  goto, begin, (end,) = automata.compile_regex(call)
  goto, silent = _with_free_text(goto, begin, end, _OPENING.encode(), required)
  return automata.lift_to_tokens(goto, silent, token_bytes, vocab_size)


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


def _calls(schemas: Sequence[Mapping[str, Any]]) -> str:
  """Returns a regular expression for the JSON of a call of any of the tools."""
  from outlines_core import json_schema

  patterns = []
  for schema in schemas:
    function = schema['function']
    parameters = {'type': 'object', 'properties': {}, **function.get('parameters', {})}
    try:
      known = {'name': {'const': function['name']}, 'arguments': _plain(parameters)}
      call = {'type': 'object', 'properties': known, 'required': [*known]}
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


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
  """Rewrites a schema as the library needs it, with _ANY where it allows any value."""
  schema = dict(schema)
  if schema.pop('nullable', False):
    return {'anyOf': [_plain(schema), {'type': 'null'}]}
  if options := schema.get('anyOf'):
    return {'anyOf': [_plain(option) for option in options]}
  if 'enum' in schema:
    return {'enum': schema['enum']}
  names = schema.get('type')
  if isinstance(names, list):
    return {'anyOf': [_plain({**schema, 'type': name}) for name in names]}
  if names == 'array':
    schema['items'] = _plain(schema['items']) if schema.get('items') else _ANY
  if names == 'object' and 'properties' in schema:
    odd = [key for key in schema['properties'] if json.dumps(key) != f'"{key}"']
    if odd:
      raise ValueError(f'argument {odd[0]!r}: a name in a grammar is of plain ASCII.')
    properties = {key: _plain(value) for key, value in schema['properties'].items()}
    schema = {**schema, 'properties': properties}
  elif names == 'object':
    other = schema.get('additionalProperties')
    schema['additionalProperties'] = _plain(other) if isinstance(other, dict) else _ANY
  constrained = set(schema) - {'description', 'title', 'default', 'examples'}
  return schema if constrained else _ANY


def _with_free_text(
  call: np.ndarray, begin: int, end: int, opening: bytes, required: bool
) -> tuple[np.ndarray, np.ndarray]:
  """Adds free text around the automaton of a call.

  Returns:
    The automaton, int32 [Q + 1, 256], which begins in state 0 and whose last state is the
    forbidden one; and for each state, the state that a control token leads to.
  """
  opened = begin
  for byte in opening:
    opened = call[opened, byte]
  text = automata.build_string_search([opening])
  found = len(text) - 1
  forbidden = found + len(call) - 1
  # After a call, the text is free again, and no part of `opening` has been read.
  moved = np.where(np.arange(len(call)) == end, 0, np.arange(len(call)) + found)
  goto = np.concatenate([np.where(text == found, moved[opened], text)[:-1], moved[call]])
  silent = np.where(np.arange(len(goto)) < found, 0, forbidden)
  # Keep the states that can be reached from the start, in that order.
  order = [int(moved[begin]) if required else 0]
  seen = {*order, forbidden}
  for state in order:
    new = sorted({*goto[state].tolist(), int(silent[state])} - seen)
    order += new
    seen |= {*new}
  order.append(forbidden)
  number = np.zeros(len(goto), np.int32)
  number[order] = np.arange(len(order))
  return number[goto[order]], number[silent[order]]
