"""What a reply may say: tool calls that fit their schemas, as an automaton over tokens.

Letters: Q automaton states, V vocabulary, C classes of tokens, K kinds of states, W words
of 32 bits, B rows.
"""

from collections.abc import Mapping, Sequence
import json
import re
from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Int, UInt32
import numpy as np

from agent_r1_jax.engine import stop as stop_lib


class Grammar(NamedTuple):
  """Which tokens may follow, and where they lead; a reply begins in state 0.

  Attributes:
    classes: Tokens of one class lead from each state to the same one.
    table: table[state, classes[token]] is the next state, -1 where the token is
      forbidden.
    kinds: States that allow the same tokens are of one kind.
    masks: Bit i of masks[kind, w] says whether token 32 w + i may follow.
  """

  classes: Int[Array, 'V']
  table: Int[Array, 'Q C']
  kinds: Int[Array, 'Q']
  masks: UInt32[Array, 'K W']


def tool_calls(
  schemas: Sequence[Mapping[str, Any]],
  token_bytes: Sequence[bytes],
  vocab_size: int,
  *,
  required: bool = False,
  opening: str = '<tool_call>',
  closing: str = '</tool_call>',
) -> Grammar:
  r"""Lets a reply call tools in Hermes format, and only as their schemas want it.

  Text is free until `opening` has been said, however it is cut into tokens. Then follows
  '\n{"name": ..., "arguments": {...}}\n' and `closing`, spaced as json.dumps does, with
  the arguments in the schema's order. The text is free again after it. A call is not
  interrupted: control tokens, stop tokens too, are forbidden in it.

  What agent/tool.py checks holds. What nothing says of an argument (any value, any list)
  is a scalar, or a list or an object of scalars. Of bounds, the library keeps those of
  the lengths of strings and arrays, and no others.

  Args:
    schemas: Of the tools, in the OpenAI form.
    token_bytes: The bytes of each of the tokenizer's tokens, b'' for control tokens.
    vocab_size: Of the model (V); tokens beyond the tokenizer's count as control tokens.
    required: The reply must begin with a call.
    opening: What a call begins with.
    closing: What it ends with.

  Raises:
    ValueError: No tools, a schema that has no such form, or a vocabulary without bytes.
  """
  if not schemas:
    raise ValueError('schemas is empty: give at least one tool, or no grammar.')
  if len(token_bytes) > vocab_size:
    raise ValueError(
      f'token_bytes has {len(token_bytes)} tokens, the model {vocab_size}: they do not '
      'belong together.'
    )
  call = f'{re.escape(opening)}\n({_calls(schemas)})\n{re.escape(closing)}'
  step, silent = _with_free_text(*_byte_automaton(call), opening.encode(), required)
  padded = [*token_bytes, *[b''] * (vocab_size - len(token_bytes))]
  return _over_tokens(step, silent, padded)


def allowed(grammar: Grammar, state: Int[Array, 'B']) -> Bool[Array, 'B V']:
  """Which tokens may follow in each row."""
  words_BW1 = grammar.masks[grammar.kinds[state]][:, :, None]
  bits = (words_BW1 >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
  flat = bits.astype(bool).reshape(state.shape[0], -1)
  return flat[:, : grammar.classes.shape[0]]


def advance(
  grammar: Grammar, state: Int[Array, 'B'], tokens: Int[Array, 'B']
) -> Int[Array, 'B']:
  """The state after one allowed token a row."""
  return grammar.table[state, grammar.classes[tokens]].astype(jnp.int32)


# Stands for the blanks that the library writes everywhere; no schema contains it.
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
  """A regular expression for the JSON of a call of any of the tools."""
  from outlines_core import json_schema

  patterns = []
  for schema in schemas:
    function = schema['function']
    parameters = {'type': 'object', 'properties': {}, **function.get('parameters', {})}
    try:
      known = {'name': {'const': function['name']}, 'arguments': _plain(parameters)}
      call = {'type': 'object', 'properties': known, 'required': [*known]}
      pattern = json_schema.build_regex_from_schema(json.dumps(call), _BLANK)
    except Exception as error:  # The library's own kinds differ from case to case.
      raise ValueError(
        f'tool {function["name"]}: its parameters have no grammar ({error}); simplify '
        'them or play without a grammar.'
      ) from error
    # As json.dumps writes: one blank after a colon or a comma, none elsewhere.
    pattern = pattern.replace(f'{_BLANK}:{_BLANK}', ': ')
    patterns.append(pattern.replace(f',{_BLANK}', ', ').replace(_BLANK, ''))
  return '|'.join(patterns)


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
  """The schema in the library's words, and closed where it leaves everything open."""
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


def _byte_automaton(pattern: str) -> tuple[np.ndarray, int, int]:
  """A regular expression, as bytes: int32 [Q + 1, 256], its start and its only end.

  The last state means that the text does not fit; it is never left.
  """
  import outlines_core

  # The end-of-text token is the library's; all others are the single bytes.
  vocabulary = outlines_core.Vocabulary(256, {bytes([b]): [b] for b in range(256)})
  index = outlines_core.Index(pattern, vocabulary)
  transitions = index.get_transitions()
  number = {state: i for i, state in enumerate(sorted(transitions))}
  step = np.full((len(number) + 1, 256), len(number), np.int32)
  for state, edges in transitions.items():
    for byte, after in edges.items():
      if byte < 256:
        step[number[state], byte] = number[after]
  (end,) = index.get_final_states()
  return step, number[index.get_initial_state()], number[end]


def _with_free_text(
  call: np.ndarray, begin: int, end: int, opening: bytes, required: bool
) -> tuple[np.ndarray, np.ndarray]:
  """Free text around the calls: the whole automaton, int32 [Q + 1, 256].

  Returns:
    The automaton, which begins in state 0 and whose last state is the forbidden one; and
    for each of its states the one that a control token leads to.
  """
  opened = begin
  for byte in opening:
    opened = call[opened, byte]
  text = stop_lib.search([opening])
  found = len(text) - 1
  forbidden = found + len(call) - 1
  # The end of a call is free text again, of which nothing has been read.
  moved = np.where(np.arange(len(call)) == end, 0, np.arange(len(call)) + found)
  step = np.concatenate([np.where(text == found, moved[opened], text)[:-1], moved[call]])
  silent = np.where(np.arange(len(step)) < found, 0, forbidden)
  # Only what can be reached, from the start on.
  order = [int(moved[begin]) if required else 0]
  seen = {*order, forbidden}
  for state in order:
    new = sorted({*step[state].tolist(), int(silent[state])} - seen)
    order += new
    seen |= {*new}
  order.append(forbidden)
  number = np.zeros(len(step), np.int32)
  number[order] = np.arange(len(order))
  return number[step[order]], number[silent[order]]


def _over_tokens(
  step: np.ndarray, silent: np.ndarray, token_bytes: Sequence[bytes]
) -> Grammar:
  """The automaton over tokens, of one over bytes."""
  forbidden = len(step) - 1
  bytes_used = np.flatnonzero((step[:-1] != forbidden).any(0))
  missing = {bytes([byte]) for byte in bytes_used.tolist()} - {*token_bytes}
  if missing:
    # With them every state can reach the end: there are no dead ends to be cut off.
    raise ValueError(
      f'the vocabulary has no tokens for the single bytes {sorted(missing)[:5]} ...; a '
      'grammar needs a byte-level tokenizer (Qwen2, Qwen3, Llama 3).'
    )
  classes, columns = stop_lib.read_tokens(step, token_bytes)
  columns = np.concatenate([columns, silent[:, None]], axis=1)
  classes[[not data for data in token_bytes]] = columns.shape[1] - 1
  used, classes = np.unique(classes, return_inverse=True)
  table = np.where(columns == forbidden, -1, columns)[:-1, used]
  fits, kinds = np.unique(table >= 0, axis=0, return_inverse=True)
  small = np.int16 if len(table) < 2**15 else np.int32
  return Grammar(
    classes=jnp.asarray(classes.astype(np.int32)),
    table=jnp.asarray(table.astype(small)),
    kinds=jnp.asarray(kinds.astype(np.int32)),
    masks=jnp.asarray(_pack(fits[:, classes])),
  )


def _pack(fits: np.ndarray) -> np.ndarray:
  """Booleans [K, V] as the bits of Grammar.masks."""
  padded = np.pad(fits, ((0, 0), (0, -fits.shape[1] % 32)))
  # The words' bytes are in the order of the bits, whatever the machine's own order is.
  packed = np.ascontiguousarray(np.packbits(padded, axis=1, bitorder='little'))
  return packed.view('<u4').astype(np.uint32)
