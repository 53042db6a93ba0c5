"""Regular expressions as automata over bytes, and combinations of automata.

Letters: Q automaton states.
"""

from collections.abc import Sequence
import itertools

import numpy as np

from agent_r1_jax.agent import byte_automata

# An automaton: goto, int [Q, 256], and whether a text matches in a state, bool [Q].
Acceptor = tuple[np.ndarray, np.ndarray]

# The library's tokens: all bytes, 256 for the end of the text, and from 257 on each byte
# preceded by BEGIN.
_BEGIN, _END = b'\x01', 0
_TOKENS = {bytes([b]): [b] for b in range(256)}
_TOKENS |= {_BEGIN + bytes([b]): [257 + b] for b in range(256)}


def compile_regex(pattern: str) -> tuple[np.ndarray, np.ndarray]:
  """Compiles a regular expression to an automaton over bytes; no text has a byte 0.

  By itself, the library also compiles a search for the expression anywhere in a text,
  which takes 2**n states for a string of up to n characters, and it drops all other
  alternatives once one has matched. In '(?:BEGIN(?:...)END|)', the search ends at once
  with the empty text, and each alternative waits for END, the byte 0.

  Returns:
    goto, int32 [Q, 256], from state 0, with -1 where the text cannot match; and whether
    the text matches, bool [Q].

  Raises:
    ValueError: The expression is malformed, matches no text or has too many states.
  """
  import outlines_core

  vocabulary = outlines_core.Vocabulary(256, _TOKENS)
  # Rejects malformed expressions, such as 'a)|(b', but compiles only the empty text.
  outlines_core.Index(f'|{pattern}', vocabulary)
  index = outlines_core.Index(f'(?:\\x01(?:{pattern})\\x00|)', vocabulary)
  edges = index.get_transitions()
  # END at most doubles the number of states.
  byte_automata.check_size(len(edges), 2 * byte_automata.MAX_STATES, 'states')
  # The library's state numbers are not consecutive.
  states, rows = np.array(sorted(edges)), [edges[state] for state in sorted(edges)]
  table = np.full((len(states), 257 + 256), -1, np.int32)
  sources = np.repeat(np.arange(len(states)), [len(row) for row in rows])
  tokens = np.fromiter(itertools.chain(*rows), np.int64)
  targets = np.fromiter(itertools.chain(*(row.values() for row in rows)), np.int64)
  table[sources, tokens] = np.searchsorted(states, targets)
  start = int(np.searchsorted(states, index.get_initial_state()))
  goto = table[:, :256].copy()
  # The library drops the states that BEGIN alone leads to.
  goto[start] = table[start, 257:]
  finals = np.isin(np.append(states, -1), [*index.get_final_states()])
  matches = finals[goto[:, _END]]
  goto[:, _END] = -1
  if not matches.any():
    raise ValueError('the regular expression matches no text; check it.')
  goto, matches = keep_reachable(goto, start, matches)
  byte_automata.check_size(len(goto), byte_automata.MAX_STATES, 'states')
  return goto, matches


# These bytes are in no text: in an expression, they enclose the number of a hole.
_MARK = '\x02{}\x03'


def mark_hole(number: int) -> str:
  """Returns the placeholder of an automaton in an expression; see `fill`."""
  return _MARK.format(number)


def fill(automaton: Acceptor, holes: Sequence[Acceptor]) -> Acceptor:
  """Replaces the placeholders of `mark_hole` by automata.

  An inner automaton ends where it matches, as a string does at its quote. Automata that
  begin alike are told apart by sets of states.
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
        byte_automata.check_size(size, byte_automata.MAX_STATES, 'states')
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
    byte_automata.check_size(len(found), byte_automata.MAX_STATES, 'states')
    rows.append(np.array([number[new] if new else -1 for new in after])[where.ravel()])
  matches = np.append(matches, np.zeros(size - len(matches), bool))
  return np.stack(rows), np.array([matches[[*states]].any() for states in found])


def intersect(one: Acceptor, other: Acceptor) -> Acceptor:
  """Makes an automaton of the texts that both automata match."""
  (a, a_matches), (b, b_matches) = one, other
  # The number of each reached pair of states.
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
      byte_automata.check_size(count + len(new), byte_automata.MAX_STATES, 'states')
      number[new] = np.arange(len(new)) + count
      found.append(new)
  pairs = np.concatenate(found)
  matches = a_matches[pairs // len(b)] & b_matches[pairs % len(b)]
  return trim(number[np.concatenate(rows)], matches)


def trim(goto: np.ndarray, matches: np.ndarray) -> Acceptor:
  """Drops states from which no text matches; ValueError if the first is among them."""
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
  """Drops states that `start` does not reach; `start` becomes the first state."""
  seen = np.zeros(len(goto) + 1, bool)
  seen[[start, -1]] = True
  found = [np.array([start])]
  while len(found[-1]):
    after = np.unique(goto[found[-1]])
    found.append(after[~seen[after]])
    seen[after] = True
  order = np.concatenate(found)
  number = np.full(len(goto) + 1, -1, np.int32)  # The last one is for -1.
  number[order] = np.arange(len(order))
  return number[goto[order]], matches[order]
