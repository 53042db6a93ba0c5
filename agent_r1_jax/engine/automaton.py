"""Automata as a guide: stop ids, stop strings and grammars, run in the jitted loop.

Letters: M rows, V tokens of the vocabulary, A automata that the engine holds, J of them
that a row can use, Q states, C classes of tokens, K kinds of states, W words of 32 bits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Int, UInt32
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.engine import guide as guide_lib

# How many automata a row can use at a time, such as its stop strings and a grammar.
PER_ROW = 2


class Tables(NamedTuple):
  """The automata that an engine holds, padded to one size; number 0 allows everything.

  Attributes:
    classes: Class of each token in each automaton.
    table: table[a, state, classes[a, token]] is the next state, -1 if it is forbidden.
    ends: Whether a reply ends in this state.
    kinds: States that allow the same tokens are of one kind.
    masks: Bit i of masks[a, kind, w] says whether token 32 w + i may follow.
  """

  classes: Int[Array, 'A V']
  table: Int[Array, 'A Q C']
  ends: Bool[Array, 'A Q']
  kinds: Int[Array, 'A Q']
  masks: UInt32[Array, 'A K W']


def _allowed(tables, state, logits_MV, hidden):
  """Forbids what one of the row's automata forbids."""
  for j in range(PER_ROW):
    a_M, q_M = state['automaton'][:, j], state['state'][:, j]
    words_MW1 = tables.masks[a_M, tables.kinds[a_M, q_M]][:, :, None]
    bits = (words_MW1 >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    fits_MV = bits.astype(bool).reshape(len(a_M), -1)[:, : logits_MV.shape[1]]
    logits_MV = jnp.where(fits_MV, logits_MV, -jnp.inf)
  return logits_MV


def _read_token(tables, state, tokens_M):
  a_MJ, tokens_M1 = state['automaton'], tokens_M[:, None]
  # Where another guide let a forbidden token through, the automaton stays where it is.
  after_MJ = tables.table[a_MJ, state['state'], tables.classes[a_MJ, tokens_M1]]
  after_MJ = jnp.where(after_MJ < 0, state['state'], after_MJ)
  ended_M = tables.ends[a_MJ, after_MJ].any(-1)
  return {'automaton': a_MJ, 'state': after_MJ}, ended_M


# Runs finite automata over tokens: stop ids, stop strings, grammars. Its params are
# Tables, and a row's state says which of them it uses, and where it is in each.
AUTOMATA = guide_lib.Guide(
  off={'automaton': np.zeros(PER_ROW, np.int32), 'state': np.zeros(PER_ROW, np.int32)},
  logits=_allowed,
  advance=_read_token,
)


# The least sizes of the tables: stop ids, and stop strings of a few words, fit them.
_LEAST_STATES, _LEAST_CLASSES, _LEAST_KINDS = 32, 32, 4


class AutomatonPool:
  """The automata that an engine holds on the device.

  Requests bring automata of any size. They are padded to common sizes that only double,
  and one that nobody uses any more gives its place to a new one; so a server that gets
  another schema with every request compiles its programs a few times and not for each.

  Attributes:
    tables: Tables of numpy, on the host; assigned anew when an automaton comes in.
  """

  def __init__(self, vocab_size: int):
    """Makes a pool that holds the automaton that allows everything.

    Args:
      vocab_size: Tokens of the model (V).
    """
    self._vocab_size = vocab_size
    free = types.Automaton(
      np.zeros(vocab_size, np.int32), np.zeros((1, 1), np.int32), np.zeros(1, bool)
    )
    self._held: list[types.Automaton | None] = [free, None, None, None]
    self._uses = [1, 0, 0, 0]
    # The sizes of the tables so far: states, classes, kinds.
    self._sizes = (_LEAST_STATES, _LEAST_CLASSES, _LEAST_KINDS)
    self.tables = self._padded()

  def take(self, automata: Sequence[types.Automaton]) -> guide_lib.State:
    """Returns the state of AUTOMATA for a row that begins with these; see `give_back`.

    Raises:
      ValueError: There are more than PER_ROW of them, or one is of another vocabulary.
    """
    if len(automata) > PER_ROW:
      raise ValueError(
        f'{len(automata)} automata guide one request; it can have {PER_ROW}. Join two of '
        'them, such as stop ids and stop strings.'
      )
    for automaton in automata:
      if len(automaton.classes) != self._vocab_size:
        raise ValueError(
          f'an automaton is for {len(automaton.classes)} tokens, and the policy has '
          f'{self._vocab_size}: make it with vocab_size={self._vocab_size}.'
        )
    numbers = np.zeros(PER_ROW, np.int32)
    for j, automaton in enumerate(automata):
      numbers[j] = self._number(automaton)
      self._uses[numbers[j]] += 1
    return {'automaton': numbers, 'state': np.zeros(PER_ROW, np.int32)}

  def give_back(self, state: guide_lib.State):
    """Says that a row of `take` is done with its automata."""
    for number in state['automaton']:
      self._uses[number] -= 1 if number else 0

  def _number(self, automaton: types.Automaton) -> int:
    for number, held in enumerate(self._held):
      if held is automaton:
        return number
    unused = [i for i, uses in enumerate(self._uses) if not uses]
    if not unused:
      unused = [len(self._held)]
      self._held += [None] * len(self._held)
      self._uses += [0] * len(self._uses)
    empty = [i for i in unused if self._held[i] is None]
    number = (empty or unused)[0]
    self._held[number] = automaton
    self.tables = self._padded()
    return number

  def _padded(self) -> Tables:
    """Lays the held automata side by side, in sizes that are powers of two."""
    free = self._held[0]
    held = [(a, *_kinds(a)) for a in (x or free for x in self._held) if a]
    needed = zip(*((*a.table.shape, len(masks)) for a, _, masks in held), strict=True)
    # They never shrink: for the sizes of a large one that is gone all is compiled.
    self._sizes = Q, C, K = tuple(
      1 << (max(size, *numbers) - 1).bit_length()
      for size, numbers in zip(self._sizes, needed, strict=True)
    )
    A, V = len(held), self._vocab_size
    small = np.int16 if Q < 2**15 else np.int32
    zeros: Any = np.zeros  # They become JAX's arrays in the call.
    tables = Tables(
      classes=zeros((A, V), np.int32),
      table=zeros((A, Q, C), small),
      ends=zeros((A, Q), bool),
      kinds=zeros((A, Q), np.int32),
      masks=zeros((A, K, -(-V // 32)), np.uint32),
    )
    for i, (a, kinds, masks) in enumerate(held):
      q, c = a.table.shape
      tables.classes[i], tables.table[i, :q, :c] = a.classes, a.table
      tables.ends[i, :q], tables.kinds[i, :q] = a.ends, kinds
      tables.masks[i, : len(masks)] = masks
    return tables


def _kinds(automaton: types.Automaton) -> tuple[np.ndarray, np.ndarray]:
  """The kind of each state, int32 [Q], and what each kind allows, uint32 [K, W]."""
  fits, kinds = np.unique(automaton.table >= 0, axis=0, return_inverse=True)
  fits = fits[:, automaton.classes]
  padded = np.pad(fits, ((0, 0), (0, -fits.shape[1] % 32)))
  # The words' bytes are in the order of the bits, whatever the machine's own order is.
  packed = np.ascontiguousarray(np.packbits(padded, axis=1, bitorder='little'))
  return kinds.reshape(-1).astype(np.int32), packed.view('<u4').astype(np.uint32)
