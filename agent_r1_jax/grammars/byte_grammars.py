"""Grammars as automata over bytes: regular expressions, schemas, tool calls.

A grammar may be untrusted, and a short one may take hours and all memory. So compiler.py
calls `make_encoded` in a separate process.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
import io
import os
from typing import Any
import zlib

import numpy as np

from agent_r1_jax.agent import byte_automata, tool_schema
from agent_r1_jax.agent.byte_automata import ByteAutomaton
from agent_r1_jax.grammars import json_schema as schema_lib
from agent_r1_jax.grammars import json_texts, regex_automata
from agent_r1_jax.host import isolated

# CPU-seconds for finding a grammar's states, after which their number can be limited; a
# string of 3,000 characters takes one.
PROCESSOR_SECONDS = 3
# Imported before a process's time limit begins.
IMPORTS = ('jsonschema', 'outlines_core', 'referencing')
_CALL_OPENING = '<tool_call>'


def make_encoded(
  make: Callable[..., ByteAutomaton],
  args: Sequence,
  vocabulary: Sequence,
  processor_seconds: float,
) -> str:
  """Makes an automaton over tokens in a process that ends if it takes too long.

  `make` is a function below or byte_automata.find_any, and may take `processor_seconds`;
  `vocabulary` has the further arguments of byte_automata.lift_to_tokens.

  Returns:
    The automaton, to be read by `decode`.
  """
  # Below the priority of the engine and its event loop.
  os.setpriority(os.PRIO_PROCESS, 0, 10)
  with isolated.limit_processor(processor_seconds):
    automaton = make(*args)
  file = io.BytesIO()
  np.savez(file, **byte_automata.lift_to_tokens(automaton, *vocabulary))
  return base64.b64encode(zlib.compress(file.getvalue(), 1)).decode()


def decode(text: str) -> dict[str, np.ndarray]:
  """Returns the fields of the types.Automaton that `make_encoded` made."""
  return dict(np.load(io.BytesIO(zlib.decompress(base64.b64decode(text)))))


def regex(pattern: str, holes: Sequence[tuple[str, ...]] = ()) -> ByteAutomaton:
  """Constrains a complete reply to a regular expression, in the syntax of Rust's regex.

  A stop id can end the reply only where the expression matches; other control tokens and
  byte 0 are never allowed. `holes` come from json_texts.

  Raises:
    ValueError: The expression matches no text, or needs too many states.
  """
  goto, matches = _compile(pattern, holes)
  # A stop id leads to a further state.
  end = len(goto)
  goto = np.concatenate([goto, np.full((1, 256), end)])
  stop = np.append(np.where(matches, end, -1), end)
  return ByteAutomaton(
    goto, np.append(np.full(end, -1), end), stop, np.arange(end + 1) == end
  )


def _compile(pattern: str, holes: Sequence[tuple[str, ...]]) -> regex_automata.Acceptor:
  filling = [*map(json_texts.compile_string, holes)]
  return regex_automata.fill(regex_automata.compile_regex(pattern), filling)


def json_schema(schema: Mapping[str, Any]) -> ByteAutomaton:
  """Like `regex`, for a schema's JSON; a blank after a colon or comma is optional.

  Raises:
    ValueError: A keyword is not supported, or no value can be written.
  """
  tool_schema.check(schema, 'response_format')
  holes = []
  pattern = schema_lib.Writer(schema, ' ?', holes).write(schema)
  if pattern is None:
    raise ValueError('nothing can be written that fits response_format; check it.')
  return regex(pattern, holes)


def tool_calls(schemas: Sequence[Mapping[str, Any]], required: bool) -> ByteAutomaton:
  """See compiler.tool_calls."""
  if not schemas:
    raise ValueError('schemas is empty: give at least one tool, or no grammar.')
  holes = []
  calls = '|'.join(_match_call(schema['function'], holes) for schema in schemas)
  goto, matches = _compile(f'{_CALL_OPENING}\n(?:{calls})\n</tool_call>', holes)
  (end,) = np.flatnonzero(matches)
  return _add_free_text(goto, int(end), _CALL_OPENING.encode(), required)


def _match_call(function: Mapping[str, Any], holes: list[Any]) -> str:
  """Returns a regular expression for a tool call's JSON, as json.dumps writes it."""
  given = function.get('parameters') or {}
  parameters = {'type': 'object', 'properties': {}, **given}
  try:
    tool_schema.check(parameters, 'parameters')
    arguments = schema_lib.Writer(parameters, ' ', holes).write(parameters)
    if arguments is None:
      raise ValueError('no arguments fit them')
    name = json_texts.write_value(function['name'])
    return rf'\{{"name": {name}, "arguments": {arguments}\}}'
  except Exception as error:  # The library raises various exception types.
    raise ValueError(
      f'tool {function["name"]}: its parameters have no grammar ({error}); simplify '
      'them or play without a grammar.'
    ) from error


def _add_free_text(
  call: np.ndarray, end: int, opening: bytes, required: bool
) -> ByteAutomaton:
  """Adds free text around a call's automaton, whose state `end` completes the call."""
  opened = 0
  for byte in opening:
    opened = call[opened, byte]
  text = byte_automata.build_string_search([opening])[:-1]
  # After a call the text is free again, with no part of `opening` read. The last number
  # is for -1.
  moved = np.append(np.arange(len(call)) + len(text), -1)
  moved[end] = 0
  text = np.where(text == len(text), moved[opened], text)
  goto = np.concatenate([text, moved[call]])
  control = np.where(np.arange(len(goto)) < len(text), 0, -1)
  table, ends = regex_automata.keep_reachable(
    np.column_stack([goto, control]),
    int(moved[0]) if required else 0,
    np.zeros(len(goto), bool),
  )
  return ByteAutomaton(table[:, :256], table[:, 256], table[:, 256], ends)
