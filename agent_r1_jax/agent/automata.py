"""Makes automata over tokens: stop strings, regular expressions, schemas, tool calls.

The engine runs them in its jitted loop (engine/automaton_guide.py).

Letters: V tokens of the vocabulary, Q automaton states, C classes of tokens.
"""

from collections.abc import Mapping, Sequence
import functools
import json
from typing import Any

import numpy as np

from agent_r1_jax import types

# The most bytes of a reply's stop strings, and so the most states of their automaton.
MAX_STOP_BYTES = 1024
_CALL_OPENING = '<tool_call>'


def stop(
  ids: Sequence[int],
  vocab_size: int,
  strings: Sequence[str] = (),
  token_bytes: Sequence[bytes] = (),
) -> types.Automaton:
  """Makes an automaton that ends a reply at stop ids and stop strings.

  A stop string is found wherever it is completed, across token boundaries and also inside
  a token; the reply then ends with that token. A stop string does not match across a
  control token, which has no bytes.

  Args:
    ids: Tokens that end a reply.
    vocab_size: Tokens of the model (V); those beyond the tokenizer's have no text.
    strings: Strings that end a reply.
    token_bytes: The bytes of each of the tokenizer's tokens, b'' for control tokens;
      needed with strings.

  Raises:
    ValueError: A string is empty, the strings are too long, token_bytes are missing, or
      an id is beyond the vocabulary.
  """
  check_stop_strings(strings)
  if strings and not token_bytes:
    raise ValueError('Stop strings need token_bytes: the bytes of every token.')
  if outside := [i for i in ids if not 0 <= i < vocab_size]:
    raise ValueError(f'the stop id {outside[0]} is not one of {vocab_size} tokens.')
  if strings:
    padded = [*token_bytes, *[b''] * (vocab_size - len(token_bytes))]
    classes, columns = group_tokens(
      build_string_search([s.encode() for s in strings]), padded
    )
    silent = np.array([not data for data in padded])
  else:
    # Two states, before and after a stop id.
    classes, columns = np.zeros(vocab_size, np.int32), np.array([[0], [1]], np.int32)
    silent = np.ones(vocab_size, bool)
  end = len(columns) - 1
  # Two further classes: tokens without text lead to the start, stop ids to the end.
  to_start, to_end = np.zeros(end + 1, np.int32), np.full(end + 1, end, np.int32)
  table = np.concatenate([columns, to_start[:, None], to_end[:, None]], axis=1)
  classes = np.where(silent, columns.shape[1], classes).astype(np.int32)
  classes[list(ids)] = columns.shape[1] + 1
  return types.Automaton(classes, table, np.arange(end + 1) == end)


def check_stop_strings(strings: Sequence[str]):
  """Raises a ValueError if no automaton is made of these stop strings."""
  if not all(strings):
    raise ValueError('A stop string is empty: it would end every reply at once. Drop it.')
  size = sum(len(string.encode()) for string in strings)
  if size > MAX_STOP_BYTES:
    raise ValueError(
      f'stop: {len(strings)} stop strings have {size:,} bytes, and {MAX_STOP_BYTES:,} are '
      'allowed; give fewer or shorter ones (chat.stop_strings, or stop of a request).'
    )


def regex(
  pattern: str, stop_ids: Sequence[int], token_bytes: Sequence[bytes], vocab_size: int
) -> types.Automaton:
  """Makes an automaton that constrains a whole reply to a regular expression.

  A stop id can end the reply only where the expression matches; no other control token is
  allowed.

  Args:
    pattern: A regular expression as outlines_core reads it (the syntax of Rust's regex).
    stop_ids: Tokens that end a reply.
    token_bytes: The bytes of each of the tokenizer's tokens, b'' for control tokens.
    vocab_size: Tokens of the model (V).

  Raises:
    ValueError: The vocabulary lacks a byte that the expression needs.
  """
  goto, start, finals = compile_regex(pattern)
  # The automaton must begin in state 0, so swap it with the start.
  order = np.arange(len(goto))
  order[[0, start]] = [start, 0]
  goto, finals = order[goto[order]], {int(order[state]) for state in finals}
  forbidden = len(goto) - 1
  lifted = lift_to_tokens(goto, np.full(len(goto), forbidden), token_bytes, vocab_size)
  # Stop ids become a further class of tokens, and lead to a further state.
  column = np.full((len(lifted.table), 1), -1)
  column[sorted(finals)] = len(lifted.table)
  table = np.concatenate([lifted.table, column], axis=1)
  table = np.concatenate([table, np.full((1, table.shape[1]), len(lifted.table))])
  classes = lifted.classes.copy()
  classes[list(stop_ids)] = table.shape[1] - 1
  return types.Automaton(classes, table, np.arange(len(table)) == len(table) - 1)


def json_schema(
  schema: Mapping[str, Any],
  stop_ids: Sequence[int],
  token_bytes: Sequence[bytes],
  vocab_size: int,
) -> types.Automaton:
  """Makes an automaton like `regex`, for JSON of a schema."""
  from outlines_core import json_schema as library

  pattern = library.build_regex_from_schema(json.dumps(schema))
  return regex(pattern, stop_ids, token_bytes, vocab_size)


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
  call = f'{_CALL_OPENING}\n({_match_calls(schemas)})\n</tool_call>'
  goto, begin, (end,) = compile_regex(call)
  goto, silent = _add_free_text(goto, begin, end, _CALL_OPENING.encode(), required)
  return lift_to_tokens(goto, silent, token_bytes, vocab_size)


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
    parameters = {'type': 'object', 'properties': {}, **function.get('parameters', {})}
    try:
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
  text = build_string_search([opening])
  text_states = len(text) - 1
  forbidden = text_states + len(call) - 1
  # After a call, the text is free again, and no part of `opening` has been read.
  moved = np.where(np.arange(len(call)) == end, 0, np.arange(len(call)) + text_states)
  goto = np.concatenate(
    [np.where(text == text_states, moved[opened], text)[:-1], moved[call]]
  )
  silent = np.where(np.arange(len(goto)) < text_states, 0, forbidden)
  # Keep the states that can be reached from the start, in that order.
  order = [int(moved[begin]) if required else 0]
  numbered = {*order, forbidden}
  for state in order:
    successors = sorted({*goto[state].tolist(), int(silent[state])} - numbered)
    order += successors
    numbered |= {*successors}
  order.append(forbidden)
  number = np.zeros(len(goto), np.int32)
  number[order] = np.arange(len(order))
  return number[goto[order]], number[silent[order]]


def build_string_search(strings: Sequence[bytes]) -> np.ndarray:
  """Makes the Aho-Corasick automaton of the strings over bytes, int32 [Q, 256].

  A state is the longest suffix of the input that begins one of the strings. The last
  state means that a string is complete, and is never left.
  """
  # A trie of the strings, in which `ended` are the nodes where one is complete.
  children: list[dict[int, int]] = [{}]
  ended = set()
  for string in strings:
    node = 0
    for byte in string:
      if byte not in children[node]:
        children[node][byte] = len(children)
        children.append({})
      node = children[node][byte]
    ended.add(node)
  # Breadth first, so that a node's longest suffix in the trie, which is shorter, knows
  # already where each byte leads.
  goto = np.zeros((len(children), 256), np.int32)
  suffix, order = [0] * len(children), [0]
  for node in order:
    goto[node] = goto[suffix[node]]
    for byte, child in children[node].items():
      suffix[child] = int(goto[node, byte]) if node else 0
      goto[node, byte] = child
      if suffix[child] in ended:
        ended.add(child)
      if child not in ended:
        order.append(child)
  number = np.full(len(children), len(order), np.int32)
  number[order] = np.arange(len(order))
  complete = np.full((1, 256), len(order), np.int32)
  return np.concatenate([number[goto[order]], complete])


def group_tokens(
  goto: np.ndarray, token_bytes: Sequence[bytes]
) -> tuple[np.ndarray, np.ndarray]:
  """Computes where every token leads from every state of an automaton over bytes.

  Tokens that lead from each state to the same one form a class; 150,000 tokens have some
  hundred classes.

  Args:
    goto: int [Q, 256]; goto[state, byte] is the next state.
    token_bytes: The bytes of V tokens; b'' changes no state.

  Returns:
    classes, int32 [V], and columns, int32 [Q, C]: columns[state, classes[token]] is the
    state after the token.
  """
  lengths = np.array([len(data) for data in token_bytes])
  padded = np.zeros((len(token_bytes), max(lengths.max(), 1)), np.uint8)
  for row, data in zip(padded, token_bytes, strict=True):
    row[: len(data)] = np.frombuffer(data, np.uint8)
  # For example, with the stop string 'ab' the states are 0 (nothing of it was read), 1
  # ('a' was), and 2 (it was found). The column of the token 'xa' is [1, 1, 2], and so is
  # that of 'ya': both are of one class. The column of 'b' is [0, 2, 2].
  columns = [np.arange(len(goto), dtype=np.int32)]
  number = {columns[0].tobytes(): 0}

  @functools.cache
  def after(pair: int) -> int:
    column = goto[columns[pair // 256], pair % 256].astype(np.int32)
    key = column.tobytes()
    if key not in number:
      number[key] = len(columns)
      columns.append(column)
    return number[key]

  # Each pass reads one byte of all tokens, and each pair of class and byte once.
  classes = np.zeros(len(token_bytes), np.int64)
  for i in range(padded.shape[1]):
    going = np.flatnonzero(lengths > i)
    pairs, where = np.unique(classes[going] * 256 + padded[going, i], return_inverse=True)
    classes[going] = np.array([after(pair) for pair in pairs.tolist()], np.int64)[where]
  # Classes that only beginnings of tokens are in are dropped.
  used, classes = np.unique(classes, return_inverse=True)
  return classes.astype(np.int32), np.stack([columns[c] for c in used], axis=1)


def compile_regex(pattern: str) -> tuple[np.ndarray, int, list[int]]:
  """Compiles a regular expression to an automaton over bytes.

  Returns:
    goto, int32 [Q + 1, 256], whose last state means that the text cannot match and is
    never left; the start state; and the states in which the text matches.
  """
  import outlines_core

  # Token 256 is the library's end of text; the others are the single bytes.
  vocabulary = outlines_core.Vocabulary(256, {bytes([b]): [b] for b in range(256)})
  index = outlines_core.Index(pattern, vocabulary)
  transitions, finals = index.get_transitions(), index.get_final_states()
  states = sorted({*transitions, *finals, index.get_initial_state()})
  number = {state: i for i, state in enumerate(states)}
  goto = np.full((len(number) + 1, 256), len(number), np.int32)
  for state, edges in transitions.items():
    for byte, after in edges.items():
      if byte < 256:
        goto[number[state], byte] = number[after]
  return goto, number[index.get_initial_state()], sorted(number[f] for f in finals)


def lift_to_tokens(
  goto: np.ndarray, silent: np.ndarray, token_bytes: Sequence[bytes], vocab_size: int
) -> types.Automaton:
  """Converts an automaton over bytes to one over tokens.

  Args:
    goto: int [Q + 1, 256]; it begins in state 0, and its last state is the forbidden one.
    silent: int [Q + 1]; the state that a token without text leads to from each state.
    token_bytes: The bytes of each of the tokenizer's tokens, b'' for control tokens.
    vocab_size: Tokens of the model (V); those beyond the tokenizer's have no text.

  Raises:
    ValueError: The vocabulary lacks a byte that the automaton needs, or is larger than
      the model's.
  """
  if len(token_bytes) > vocab_size:
    raise ValueError(
      f'token_bytes has {len(token_bytes)} tokens, the model {vocab_size}: they do not '
      'belong together.'
    )
  forbidden = len(goto) - 1
  bytes_used = np.flatnonzero((goto[:-1] != forbidden).any(0))
  missing = {bytes([byte]) for byte in bytes_used.tolist()} - {*token_bytes}
  if missing:
    # With all single bytes, every state can reach the end, so there are no dead ends.
    raise ValueError(
      f'the vocabulary has no tokens for the single bytes {sorted(missing)[:5]} ...; a '
      'grammar needs a byte-level tokenizer (Qwen2, Qwen3, Llama 3).'
    )
  padded = [*token_bytes, *[b''] * (vocab_size - len(token_bytes))]
  classes, columns = group_tokens(goto, padded)
  columns = np.concatenate([columns, silent[:, None]], axis=1)
  classes[[not data for data in padded]] = columns.shape[1] - 1
  used, classes = np.unique(classes, return_inverse=True)
  table = np.where(columns == forbidden, -1, columns)[:-1, used]
  return types.Automaton(
    classes.astype(np.int32), table.astype(np.int32), np.zeros(len(table), bool)
  )
