"""Automata over bytes, and their conversion to automata over tokens.

Letters: V tokens of the vocabulary, Q automaton states, C classes of tokens.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import numpy as np

# Limits of one automaton, so that its tables take at most some 100 MB in the engine: its
# states, states times classes of tokens, and the sets of tokens that states allow. A text
# of 3,000 characters, 150 tools, or a choice of 200 phrases is within them.
MAX_STATES, _MAX_CELLS, _MAX_SETS = 1 << 15, 1 << 24, 1 << 11
HOW_TO_SIMPLIFY = 'give shorter lengths, fewer alternatives or fewer tools.'


class ByteAutomaton(NamedTuple):
  """An automaton over bytes; it begins in state 0, and -1 forbids the transition.

  Attributes:
    goto: int [Q, 256]; goto[state, byte] is the next state.
    control: int [Q]; the next state after a token without text.
    stop: int [Q]; the next state after a stop id.
    ends: bool [Q]; whether a reply ends in the state.
  """

  goto: np.ndarray
  control: np.ndarray
  stop: np.ndarray
  ends: np.ndarray


def build_string_search(strings: Sequence[bytes]) -> np.ndarray:
  """Makes the Aho-Corasick automaton of the strings over bytes, int32 [Q, 256].

  A state is the longest suffix of the input that is a prefix of a string. The last state
  means that a string is complete, and is never left.
  """
  # For each state its text, a prefix of a string, and the state of its longest suffix.
  texts, suffixes, rows = [b''], [0], []
  for text, suffix in zip(texts, suffixes, strict=True):
    # A byte has the same transition as after the suffix, unless it continues a string.
    row = rows[suffix].copy() if text else np.zeros(256, np.int32)
    for byte in dict.fromkeys(s[len(text)] for s in strings if s.startswith(text)):
      longer = text + bytes([byte])
      if row[byte] < 0 or longer in strings:
        row[byte] = -1
        continue
      suffixes.append(int(row[byte]))
      row[byte] = len(texts)
      texts.append(longer)
    rows.append(row)
  goto = np.stack([*rows, np.full(256, -1, np.int32)])
  return np.where(goto < 0, len(texts), goto).astype(np.int32)


def find_any(strings: Sequence[str]) -> ByteAutomaton:
  """Makes an automaton that ends a reply when one of the strings is complete.

  Strings do not match across tokens without text.
  """
  goto = build_string_search([string.encode() for string in strings])
  end = np.full(len(goto), len(goto) - 1)
  return ByteAutomaton(
    goto, np.where(end == np.arange(len(goto)), end, 0), end, np.arange(len(goto)) == end
  )


def group_tokens(
  goto: np.ndarray, token_bytes: Sequence[bytes]
) -> tuple[np.ndarray, np.ndarray]:
  """Computes the next state after each token in every state of an automaton over bytes.

  Tokens with the same transitions in all states form a class; 150,000 tokens have some
  hundred classes.

  Args:
    goto: int [Q, 256]; goto[state, byte] is the next state.
    token_bytes: The bytes of V tokens; b'' does not change the state.

  Returns:
    classes, int32 [V], and columns, int32 [Q, C]: columns[state, classes[token]] is the
    state after the token.

  Raises:
    ValueError: There are too many states and classes.
  """
  lengths = np.array([len(data) for data in token_bytes])
  padded = np.zeros((len(token_bytes), max(lengths.max(), 1)), np.uint8)
  is_text = np.arange(padded.shape[1])[None] < lengths[:, None]
  padded[is_text] = np.frombuffer(b''.join(token_bytes), np.uint8)
  # Example: for the stop string 'ab' the states are 0 (nothing read), 1 ('a' read), and 2
  # (found). The tokens 'xa' and 'ya' have the same column [1, 1, 2], so they are in one
  # class. The column of 'b' is [0, 2, 2].
  columns = [np.arange(len(goto), dtype=np.int32)]
  number = {columns[0].tobytes(): 0}

  @functools.cache
  def after(pair: int) -> int:
    column = goto[columns[pair // 256], pair % 256].astype(np.int32)
    key = column.tobytes()
    if key not in number:
      number[key] = len(columns)
      columns.append(column)
      check_size(len(columns) * len(goto), _MAX_CELLS, 'states times classes of tokens')
    return number[key]

  # Each pass reads one byte of all tokens, and computes each pair of class and byte once.
  classes = np.zeros(len(token_bytes), np.int64)
  for i in range(padded.shape[1]):
    going = np.flatnonzero(lengths > i)
    pairs, where = np.unique(classes[going] * 256 + padded[going, i], return_inverse=True)
    classes[going] = np.array([after(pair) for pair in pairs.tolist()], np.int64)[where]
  # Drop classes that contain only prefixes of tokens.
  used, classes = np.unique(classes, return_inverse=True)
  return classes.astype(np.int32), np.stack([columns[c] for c in used], axis=1)


def lift_to_tokens(
  automaton: ByteAutomaton,
  stop_ids: Sequence[int],
  token_bytes: Sequence[bytes],
  vocab_size: int,
) -> dict[str, Any]:
  """Converts an automaton over bytes to one over tokens, as fields of types.Automaton.

  It must not import JAX: a subprocess calls it.

  Args:
    automaton: The automaton over bytes.
    stop_ids: Tokens that end a reply.
    token_bytes: The bytes of each of the tokenizer's tokens, b'' for control tokens.
    vocab_size: Tokens of the model (V); tokens beyond the tokenizer's have no text.

  Raises:
    ValueError: The vocabulary lacks a byte that the automaton needs, or is larger than
      the model's; a stop id is out of range; or there are too many states and classes.
  """
  if len(token_bytes) > vocab_size:
    raise ValueError(
      f'token_bytes has {len(token_bytes)} tokens, the model {vocab_size}: they do not '
      'belong together.'
    )
  if outside := [i for i in stop_ids if not 0 <= i < vocab_size]:
    raise ValueError(f'the stop id {outside[0]} is not one of {vocab_size} tokens.')
  goto, forbidden = automaton.goto, len(automaton.goto)
  if (goto < 0).any():
    _check_bytes(np.flatnonzero((goto >= 0).any(0)), token_bytes)
  padded = [*token_bytes, *[b''] * (vocab_size - len(token_bytes))]
  goto = np.concatenate([goto, np.full((1, 256), -1)])
  classes, columns = group_tokens(np.where(goto < 0, forbidden, goto), padded)
  # Two additional classes: tokens without text, and stop ids.
  table = np.where(columns == forbidden, -1, columns)[:-1]
  table = np.concatenate(
    [table, automaton.control[:, None], automaton.stop[:, None]], axis=1
  )
  classes[[not data for data in padded]] = table.shape[1] - 2
  classes[list(stop_ids)] = table.shape[1] - 1
  used, classes = np.unique(classes, return_inverse=True)
  table = table[:, used].astype(np.int16 if len(table) < 1 << 15 else np.int32)
  sets = {row.tobytes() for row in np.packbits(table >= 0, axis=1)}
  check_size(len(sets), _MAX_SETS, 'sets of tokens that may follow')
  return {'classes': classes.astype(np.int32), 'table': table, 'ends': automaton.ends}


def _check_bytes(used: np.ndarray, token_bytes: Sequence[bytes]):
  missing = {bytes([byte]) for byte in used.tolist()} - {*token_bytes}
  if missing:
    # Single-byte tokens guarantee that no state is a dead end.
    raise ValueError(
      f'the vocabulary has no tokens for the single bytes {sorted(missing)[:5]} ...; a '
      'grammar needs a byte-level tokenizer (Qwen2, Qwen3, Llama 3).'
    )


def check_size(size: int, limit: int, name: str):
  """Raises ValueError if an automaton exceeds a limit."""
  if size > limit:
    raise ValueError(
      f'the grammar has {size:,} {name}, and {limit:,} are allowed; {HOW_TO_SIMPLIFY}'
    )
