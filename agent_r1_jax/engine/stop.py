"""When a reply ends: stop ids, and stop strings as an automaton over the vocabulary.

Letters: Q automaton states, V vocabulary.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Int
import numpy as np


class Stop(NamedTuple):
  """What ends a reply.

  Attributes:
    ids: Tokens that end it.
    table: table[state, token] is the next state; the last state means that a stop string
      has been completed. State 0 is the start; it also follows a token beyond the table,
      which has no text. None where there are no stop strings.
  """

  ids: Int[Array, 'n']
  table: Int[Array, 'Q V'] | None = None


def stop(
  ids: Sequence[int], strings: Sequence[str] = (), token_bytes: Sequence[bytes] = ()
) -> Stop:
  """Compiles stop ids and stop strings.

  A stop string is found wherever it is completed, also across token boundaries and
  inside one token (the reply then ends with that whole token). A control token, which has
  no bytes, lies between what it separates.

  Args:
    ids: Stop tokens.
    strings: Stop strings.
    token_bytes: The bytes of each of the V tokens, b'' for control tokens; needed with
      strings.
  """
  table = _table([s.encode() for s in strings], token_bytes) if strings else None
  return Stop(
    jnp.asarray(list(ids), jnp.int32), None if table is None else jnp.asarray(table)
  )


def advance(
  stop: Stop, state: Int[Array, 'B'], tokens: Int[Array, 'B']
) -> tuple[Int[Array, 'B'], Bool[Array, 'B']]:
  """The automaton's state after one token a row, and whether it ends the reply."""
  ended = (tokens[:, None] == stop.ids[None]).any(-1)
  if stop.table is None:
    return state, ended
  # A model's vocabulary may be larger than its tokenizer's.
  state = stop.table.at[state, tokens].get(mode='fill', fill_value=0)
  return state, ended | (state == stop.table.shape[0] - 1)


def _table(strings: Sequence[bytes], token_bytes: Sequence[bytes]) -> np.ndarray:
  if not all(strings):
    raise ValueError('A stop string is empty: it would end every reply at once. Drop it.')
  if not token_bytes:
    raise ValueError('Stop strings need token_bytes: the bytes of every token.')
  classes, columns = read_tokens(search(strings), token_bytes)
  silent = np.array([not data for data in token_bytes])
  return np.where(silent, 0, columns[:, classes]).astype(np.int32)


def search(strings: Sequence[bytes]) -> np.ndarray:
  """Aho-Corasick: a state is the longest suffix read that begins one of the strings.

  int32 [Q, 256]; every completed string is the one last state, which is never left.
  """
  prefixes = sorted({s[:i] for s in strings for i in range(len(s))}, key=len)
  number = {prefix: i for i, prefix in enumerate(prefixes)}
  found = len(prefixes)
  step = np.full((found + 1, 256), found, np.int32)
  for prefix, i in number.items():
    for byte in range(256):
      text = prefix + bytes([byte])
      if not text.endswith(tuple(strings)):
        while text not in number:
          text = text[1:]
        step[i, byte] = number[text]
  return step


def read_tokens(
  step: np.ndarray, token_bytes: Sequence[bytes]
) -> tuple[np.ndarray, np.ndarray]:
  """Lets every state of an automaton over bytes read every token.

  Tokens that lead from each state to the same one are a class: of 150,000 tokens there
  are some hundreds.

  Args:
    step: step[state, byte] is the next state: int [Q, 256].
    token_bytes: Of V tokens; b'' leads nowhere.

  Returns:
    classes, int32 [V], and columns, int32 [Q, C]: columns[state, classes[token]] is the
    state after the token.
  """
  lengths = np.array([len(data) for data in token_bytes])
  padded = np.zeros((len(token_bytes), max(lengths.max(), 1)), np.uint8)
  for row, data in zip(padded, token_bytes, strict=True):
    row[: len(data)] = np.frombuffer(data, np.uint8)
  columns = [np.arange(len(step), dtype=np.int32)]
  number = {columns[0].tobytes(): 0}

  @functools.cache
  def after(pair: int) -> int:
    column = step[columns[pair // 256], pair % 256].astype(np.int32)
    key = column.tobytes()
    if key not in number:
      number[key] = len(columns)
      columns.append(column)
    return number[key]

  # All tokens side by side, one byte a pass; each pair of class and byte is met once.
  classes = np.zeros(len(token_bytes), np.int64)
  for i in range(padded.shape[1]):
    going = np.flatnonzero(lengths > i)
    pairs, where = np.unique(classes[going] * 256 + padded[going, i], return_inverse=True)
    classes[going] = np.array([after(pair) for pair in pairs.tolist()], np.int64)[where]
  used, classes = np.unique(classes, return_inverse=True)
  return classes.astype(np.int32), np.stack([columns[c] for c in used], axis=1)
