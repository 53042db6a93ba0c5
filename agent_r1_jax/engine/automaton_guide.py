"""Automata as a guide: stop ids, stop strings and grammars, run in the jitted loop.

Letters: M entries of a decode, V vocabulary, A automata of the engine, J automata per
request, Q states, C token classes, K kinds of states, W words of 32 bits.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Int, UInt32
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.engine import guide as guide_lib

# The maximum number of automata per request, such as its stop strings and a grammar.
PER_REQUEST = 2


class Tables(NamedTuple):
  """The automata of a pool, padded to one size; number 0 allows everything."""

  classes: Int[Array, 'A V']  # Class of each token in each automaton.
  # table[a, state, classes[a, token]] is the next state, -1 if the token is forbidden.
  table: Int[Array, 'A Q C']
  ends: Bool[Array, 'A Q']  # Whether a reply ends in this state.
  kinds: Int[Array, 'A Q']  # States that allow the same tokens have the same kind.
  # Bit i of masks[a, kind, w] says whether token 32 w + i may follow.
  masks: UInt32[Array, 'A K W']


def _mask_logits(tables, state, logits_MV, hidden):
  """Sets the logits to -inf where one of an entry's automata forbids the token."""
  for j in range(PER_REQUEST):
    a_M, q_M = state['automaton'][:, j], state['state'][:, j]
    # 40 tokens take 2 words; the last 24 bits of the second are padding.
    words_MW1 = tables.masks[a_M, tables.kinds[a_M, q_M]][:, :, None]
    bits = (words_MW1 >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    allowed_MV = bits.astype(bool).reshape(len(a_M), -1)[:, : logits_MV.shape[1]]
    logits_MV = jnp.where(allowed_MV, logits_MV, -jnp.inf)
  return logits_MV


def _advance(tables, state, tokens_M):
  a_MJ, q_MJ = state['automaton'], state['state']
  next_MJ = tables.table[a_MJ, q_MJ, tables.classes[a_MJ, tokens_M[:, None]]]
  # If another guide let a forbidden token through, the automaton stays in its state.
  next_MJ = jnp.where(next_MJ < 0, q_MJ, next_MJ)
  ended_M = tables.ends[a_MJ, next_MJ].any(-1)
  return {'automaton': a_MJ, 'state': next_MJ}, ended_M


# Runs finite automata over tokens: stop ids, stop strings, grammars. Its params are
# Tables; a request's state holds the numbers of its automata and their current states.
AUTOMATA = guide_lib.Guide(
  off={
    'automaton': np.zeros(PER_REQUEST, np.int32),
    'state': np.zeros(PER_REQUEST, np.int32),
  },
  logits=_mask_logits,
  advance=_advance,
)


# The minimum numbers of states, classes and kinds of a table: enough for stop ids and
# short stop strings.
_LEAST_SIZES = (32, 32, 4)


class AutomatonPool:
  """The automata that the requests of a replica use, by number.

  Unused numbers are given to new automata, so that a server that gets a different schema
  with every request needs few numbers.

  Attributes:
    entries: The automata by number; number 0 and unassigned numbers allow everything.
      Adding an automaton replaces the tuple.
  """

  def __init__(self, vocab_size: int):
    """Makes a pool for a vocabulary (V), with the automaton that allows everything."""
    self._vocab_size = vocab_size
    self._allow_all = types.Automaton(
      np.zeros(vocab_size, np.int32), np.zeros((1, 1), np.int32), np.zeros(1, bool)
    )
    self.entries = (self._allow_all,) * 4
    self._users = [1, 0, 0, 0]

  def acquire(self, automata: Collection[types.Automaton]) -> guide_lib.State:
    """Adds a user to each automaton; returns the request's initial state of AUTOMATA.

    Pass the state to `release` when the request ends.

    Raises:
      ValueError: There are more than PER_REQUEST automata, or the vocabularies differ.
    """
    if len(automata) > PER_REQUEST:
      raise ValueError(
        f'{len(automata)} automata guide one request; it can have {PER_REQUEST}. Join '
        'two of them, such as stop ids and stop strings.'
      )
    for automaton in automata:
      if len(automaton.classes) != self._vocab_size:
        raise ValueError(
          f'an automaton is for {len(automaton.classes)} tokens, and the policy has '
          f'{self._vocab_size}: make it with vocab_size={self._vocab_size}.'
        )
    numbers = np.zeros(PER_REQUEST, np.int32)
    for j, automaton in enumerate(automata):
      numbers[j] = self._find_number(automaton)
      self._users[numbers[j]] += 1
    return {'automaton': numbers, 'state': np.zeros(PER_REQUEST, np.int32)}

  def release(self, state: guide_lib.State):
    """Removes the users that `acquire` added."""
    for number in state['automaton']:
      # Number 0, which allows everything, is never reused.
      self._users[number] -= 1 if number else 0

  def _find_number(self, automaton: types.Automaton) -> int:
    """Finds the number of an automaton, or assigns one."""
    for number, entry in enumerate(self.entries):
      if entry is automaton:
        return number
    if all(self._users):
      self.entries += (self._allow_all,) * len(self.entries)
      self._users += [0] * len(self._users)
    free = [number for number, users in enumerate(self._users) if users == 0]
    # Prefer unassigned numbers: an unused automaton may be acquired again.
    number = min(free, key=lambda number: self.entries[number] is not self._allow_all)
    entries = [*self.entries]
    entries[number] = automaton
    self.entries = tuple(entries)
    return number


def fits(automaton: types.Automaton, tables: Tables) -> bool:
  """Whether tables of this size have room for an automaton."""
  (q, c), (_, Q, C) = automaton.table.shape, tables.table.shape
  return q <= Q and c <= C and len(automaton.kinds[1]) <= tables.masks.shape[1]


def make_tables(
  entries: Sequence[types.Automaton], before: Tables | None = None
) -> Tables:
  """Stacks automata, padded to sizes that are powers of two, in numpy.

  The sizes are at least those of `before`, for which programs are already compiled. For
  16 automata over 50,000 tokens this takes some milliseconds whenever an automaton is
  added, so it runs in the decode thread and not in the event loop.
  """
  needed = [(*entry.table.shape, len(entry.kinds[1])) for entry in entries]
  least = (*before.table.shape[1:], before.masks.shape[1]) if before else _LEAST_SIZES
  Q, C, K = (
    1 << (max(sizes) - 1).bit_length() for sizes in zip(least, *needed, strict=True)
  )
  A, V = len(entries), len(entries[0].classes)
  zeros: Any = np.zeros  # They become JAX's arrays in the call.
  tables = Tables(
    classes=zeros((A, V), np.int32),
    table=zeros((A, Q, C), np.int16 if Q < 2**15 else np.int32),
    ends=zeros((A, Q), bool),
    kinds=zeros((A, Q), np.int32),
    masks=zeros((A, K, -(-V // 32)), np.uint32),
  )
  for number, automaton in enumerate(entries):
    q, c = automaton.table.shape
    tables.classes[number] = automaton.classes
    tables.table[number, :q, :c] = automaton.table
    tables.ends[number, :q] = automaton.ends
    kinds, masks = automaton.kinds
    tables.kinds[number, :q] = kinds
    tables.masks[number, : len(masks)] = masks
  return tables
