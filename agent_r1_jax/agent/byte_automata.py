"""Automata over bytes, and what becomes of them over the tokens of a vocabulary.

Letters: V tokens of the vocabulary, Q automaton states, C classes of tokens.
"""

from collections.abc import Sequence
import functools
import itertools
from typing import Any, NamedTuple

import numpy as np

# Limits of one automaton, so that its tables take some 100 MB of the engine at most: its
# states, states times classes of tokens, and the sets of tokens that states allow. A text
# of 3,000 characters, 150 tools or a choice of 200 phrases are below them.
_MAX_STATES, _MAX_CELLS, _MAX_SETS = 1 << 15, 1 << 24, 1 << 11
HOW_TO_SIMPLIFY = 'give shorter lengths, fewer alternatives or fewer tools.'


class ByteAutomaton(NamedTuple):
  """An automaton over bytes; it begins in state 0, and -1 means that the text ends there.

  Attributes:
    goto: int [Q, 256]; goto[state, byte] is the next state.
    control: int [Q]; the state that a token without text leads to.
    stop: int [Q]; the state that a stop id leads to.
    ends: bool [Q]; whether a reply ends in the state.
  """

  goto: np.ndarray
  control: np.ndarray
  stop: np.ndarray
  ends: np.ndarray


# Of an automaton: goto, int [Q, 256], and whether a text matches in a state, bool [Q].
Acceptor = tuple[np.ndarray, np.ndarray]


def build_string_search(strings: Sequence[bytes]) -> np.ndarray:
  """Makes the Aho-Corasick automaton of the strings over bytes, int32 [Q, 256].

  A state is the longest suffix of the input that begins one of the strings. The last
  state means that a string is complete, and is never left.
  """
  # Of each state its text, which begins a string, and the state of its longest suffix.
  texts, suffixes, rows = [b''], [0], []
  for text, suffix in zip(texts, suffixes, strict=True):
    # A byte leads where it leads after the suffix, unless it goes on with a string.
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


# The tokens of the library's automaton: all bytes, 256 for the end of the text, and from
# 257 on each byte after BEGIN.
_BEGIN, _END = b'\x01', 0
_TOKENS = {bytes([b]): [b] for b in range(256)}
_TOKENS |= {_BEGIN + bytes([b]): [257 + b] for b in range(256)}


def compile_regex(pattern: str) -> tuple[np.ndarray, np.ndarray]:
  """Compiles a regular expression to an automaton over bytes; no text has a byte 0.

  By itself, the library also compiles a search for the expression anywhere in a text,
  which takes 2**n states for a string of up to n characters, and it goes on after no
  alternative that has matched. In '(?:BEGIN(?:...)END|)', the search ends with the empty
  text that it finds at once, and each alternative waits for END, the byte 0.

  Returns:
    goto, int32 [Q, 256], which begins in state 0, and is -1 where the text cannot match;
    and whether the text matches, bool [Q].

  Raises:
    ValueError: The expression is malformed, matches no text or has too many states.
  """
  import outlines_core

  vocabulary = outlines_core.Vocabulary(256, _TOKENS)
  # This refuses what is malformed, such as 'a)|(b': only its empty text is compiled.
  outlines_core.Index(f'|{pattern}', vocabulary)
  index = outlines_core.Index(f'(?:\\x01(?:{pattern})\\x00|)', vocabulary)
  edges = index.get_transitions()
  # With END there are at most twice as many states as without it.
  _check_size(len(edges), 2 * _MAX_STATES, 'states')
  # The library's numbers of states are not consecutive.
  states, rows = np.array(sorted(edges)), [edges[state] for state in sorted(edges)]
  table = np.full((len(states), 257 + 256), -1, np.int32)
  sources = np.repeat(np.arange(len(states)), [len(row) for row in rows])
  tokens = np.fromiter(itertools.chain(*rows), np.int64)
  targets = np.fromiter(itertools.chain(*(row.values() for row in rows)), np.int64)
  table[sources, tokens] = np.searchsorted(states, targets)
  start = int(np.searchsorted(states, index.get_initial_state()))
  goto = table[:, :256].copy()
  # The library leaves out what BEGIN alone leads to.
  goto[start] = table[start, 257:]
  finals = np.isin(np.append(states, -1), [*index.get_final_states()])
  matches = finals[goto[:, _END]]
  goto[:, _END] = -1
  if not matches.any():
    raise ValueError('the regular expression matches no text; check it.')
  goto, matches = keep_reachable(goto, start, matches)
  _check_size(len(goto), _MAX_STATES, 'states')
  return goto, matches


# Bytes of no text: what is between them in an expression is the number of a hole.
_MARK = '\x02{}\x03'


def mark_hole(number: int) -> str:
  """Returns what stands in an expression in the place of an automaton; see `fill`."""
  return _MARK.format(number)


def fill(automaton: Acceptor, holes: Sequence[Acceptor]) -> Acceptor:
  """Puts automata into the places that `mark_hole` has marked in an expression.

  Nothing follows where one of them matches, such as the quote that ends a string. Those
  that begin alike are told apart by sets of states.
  """
  if not holes:
    return automaton
  goto, matches = automaton
  blocks, size = [goto.copy()], len(goto)
  begins: dict[int, list[int]] = {}
  for state in np.flatnonzero(goto[:, ord(_MARK[0])] >= 0).tolist():
    for number, (inner, ends) in enumerate(holes):
      after = state
      for byte in mark_hole(number).encode():
        after = int(goto[after, byte]) if after >= 0 else -1
      if after >= 0:
        block = np.where(ends[inner], after, inner + size)
        blocks.append(np.where(inner < 0, -1, block))
        begins.setdefault(state, []).append(size)
        size += len(inner)
        _check_size(size, _MAX_STATES, 'states')
  goto = np.concatenate(blocks)
  goto[:, ord(_MARK[0])] = -1
  close = lambda states: tuple(
    sorted({*states}.union(*(begins.get(s, ()) for s in states)))
  )
  first = close([0])
  number, rows = {first: 0}, []
  for states in (found := [first]):
    columns, where = np.unique(goto[[*states]], axis=1, return_inverse=True)
    after = [close(set(column[column >= 0].tolist())) for column in columns.T]
    for new in after:
      if new and number.setdefault(new, len(found)) == len(found):
        found.append(new)
    _check_size(len(found), _MAX_STATES, 'states')
    rows.append(np.array([number[new] if new else -1 for new in after])[where.ravel()])
  matches = np.append(matches, np.zeros(size - len(matches), bool))
  return np.stack(rows), np.array([matches[[*states]].any() for states in found])


def intersect(one: Acceptor, other: Acceptor) -> Acceptor:
  """Makes an automaton of the texts that two of them match."""
  (a, a_matches), (b, b_matches) = one, other
  # The number of each pair of states that is reached.
  number, rows = np.full(len(a) * len(b) + 1, -1, np.int32), []
  number[0], found = 0, [np.zeros(1, np.int64)]
  for pairs in found:
    x, y = a[pairs // len(b)], b[pairs % len(b)]
    after = np.where((x < 0) | (y < 0), -1, x.astype(np.int64) * len(b) + y)
    rows.append(after)
    new = np.unique(after)
    new = new[(new >= 0) & (number[new] < 0)]
    if len(new):
      count = sum(map(len, found))
      _check_size(count + len(new), _MAX_STATES, 'states')
      number[new] = np.arange(len(new)) + count
      found.append(new)
  pairs = np.concatenate(found)
  matches = a_matches[pairs // len(b)] & b_matches[pairs % len(b)]
  return trim(number[np.concatenate(rows)], matches)


def trim(goto: np.ndarray, matches: np.ndarray) -> Acceptor:
  """Drops the states from which no text matches; ValueError if that is the first one."""
  sources, bytes_ = np.nonzero(goto >= 0)
  pairs = np.unique(goto[sources, bytes_].astype(np.int64) * len(goto) + sources)
  targets, sources = np.divmod(pairs, len(goto))
  before = np.split(sources, np.searchsorted(targets, np.arange(1, len(goto))))
  alive, waiting = matches.copy(), np.flatnonzero(matches).tolist()
  for state in waiting:
    new = before[state][~alive[before[state]]]
    alive[new] = True
    waiting += new.tolist()
  if not alive[0]:
    raise ValueError('the regular expression matches no text; check it.')
  return keep_reachable(np.where(alive[goto] & (goto >= 0), goto, -1), 0, matches)


def keep_reachable(goto: np.ndarray, start: int, matches: np.ndarray) -> Acceptor:
  """Drops the states that cannot be reached from `start`, which becomes the first one."""
  seen = np.zeros(len(goto) + 1, bool)
  seen[[start, -1]] = True
  found = [np.array([start])]
  while len(found[-1]):
    after = np.unique(goto[found[-1]])
    found.append(after[~seen[after]])
    seen[after] = True
  order = np.concatenate(found)
  number = np.full(len(goto) + 1, -1, np.int32)  # The last one is that of -1.
  number[order] = np.arange(len(order))
  return number[goto[order]], matches[order]


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

  Raises:
    ValueError: There are too many states and classes.
  """
  lengths = np.array([len(data) for data in token_bytes])
  padded = np.zeros((len(token_bytes), max(lengths.max(), 1)), np.uint8)
  is_text = np.arange(padded.shape[1])[None] < lengths[:, None]
  padded[is_text] = np.frombuffer(b''.join(token_bytes), np.uint8)
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
      _check_size(len(columns) * len(goto), _MAX_CELLS, 'states times classes of tokens')
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


def lift_to_tokens(
  automaton: ByteAutomaton,
  stop_ids: Sequence[int],
  token_bytes: Sequence[bytes],
  vocab_size: int,
) -> dict[str, Any]:
  """Converts an automaton over bytes to one over tokens, as fields of types.Automaton.

  A process calls it that imports no JAX.

  Args:
    automaton: The automaton over bytes.
    stop_ids: Tokens that end a reply.
    token_bytes: The bytes of each of the tokenizer's tokens, b'' for control tokens.
    vocab_size: Tokens of the model (V); those beyond the tokenizer's have no text.

  Raises:
    ValueError: The vocabulary lacks a byte that the automaton needs, or is larger than
      the model's; a stop id is beyond it; or there are too many states and classes.
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
  # Two further classes: tokens without text, and stop ids.
  table = np.where(columns == forbidden, -1, columns)[:-1]
  table = np.concatenate(
    [table, automaton.control[:, None], automaton.stop[:, None]], axis=1
  )
  classes[[not data for data in padded]] = table.shape[1] - 2
  classes[list(stop_ids)] = table.shape[1] - 1
  used, classes = np.unique(classes, return_inverse=True)
  table = table[:, used].astype(np.int16 if len(table) < 1 << 15 else np.int32)
  sets = {row.tobytes() for row in np.packbits(table >= 0, axis=1)}
  _check_size(len(sets), _MAX_SETS, 'sets of tokens that may follow')
  return {'classes': classes.astype(np.int32), 'table': table, 'ends': automaton.ends}


def _check_bytes(used: np.ndarray, token_bytes: Sequence[bytes]):
  missing = {bytes([byte]) for byte in used.tolist()} - {*token_bytes}
  if missing:
    # With all single bytes, every state can reach the end, so there are no dead ends.
    raise ValueError(
      f'the vocabulary has no tokens for the single bytes {sorted(missing)[:5]} ...; a '
      'grammar needs a byte-level tokenizer (Qwen2, Qwen3, Llama 3).'
    )


def _check_size(size: int, limit: int, name: str):
  if size > limit:
    raise ValueError(
      f'the grammar has {size:,} {name}, and {limit:,} are allowed; {HOW_TO_SIMPLIFY}'
    )
