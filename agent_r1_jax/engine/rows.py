"""The host's record of the cache: which sequence each row holds, and how much of it.

It assigns rows to sequences, and finds prefixes that can be copied from other rows
instead of being computed again. Nothing here touches the device.

Recurrent layers (models/delta_net.py) cannot rewind. So a row also keeps checkpoints of
their states after a few earlier tokens, at the end of a prompt and where two sequences
diverged. Other sequences continue from a checkpoint and compute the rest.

Letters: B rows, S slots of a row.
"""

from collections.abc import Hashable, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from agent_r1_jax.engine import request as request_lib

# Shorter prefixes are recomputed, which is cheaper than waiting for them and copying.
MIN_SHARED = 16
# The version of rows that several policies have computed; nothing is copied from them.
MIXED = -1
# Marks a missing state.
LOST = -1


@dataclasses.dataclass(eq=False)
class Row:
  """One row of the cache."""

  index: int  # Its index in the cache.
  tokens: np.ndarray  # The sequence's tokens, int32 [S], padded with -1.
  # The sequence whose keys and values it holds, or held last.
  sequence: request_lib.Sequence | None = None
  cached: int = 0  # How many of its first tokens have keys and values in the row.
  # How many slots were ever written. If the row held 900 tokens, and now holds a sequence
  # that shares the first 500, cached is 500 and written 900; a sliding layer with 768
  # slots has lost the first 132 tokens.
  written: int = 0
  # The number of tokens that each state of recurrent layers has seen, or LOST; the first
  # is the current state. Empty without recurrent layers.
  states: list[int] = dataclasses.field(default_factory=list)
  # The token at which the sequence diverges from another one: a checkpoint goes there.
  branch: int = 0
  ended: int = 0  # How many tokens were cached when the last reply, or chunk, ended.
  # The version of the policy and adapter that computed the keys and values.
  version: Hashable = MIXED
  origin: int = 0  # The adapter: its older versions' keys and values may be continued.
  # The active generation in the row.
  generation: request_lib.Generation | None = None
  # Whether its prefill has started; False while it waits to copy from another row.
  prefill_started: bool = False
  last_request: int = -1  # The number of the last request that used it.

  @property
  def size(self) -> int:
    """The length of the sequence in tokens."""
    return 0 if self.sequence is None else len(self.sequence)

  @property
  def missing(self) -> np.ndarray:
    """The tokens to prefill next: up to the branch, or all but the last token.

    The decode computes the last token.
    """
    end = self.branch if self.cached < self.branch < self.size else self.size - 1
    return self.tokens[self.cached : end]

  @property
  def prefilled(self) -> bool:
    """Whether a decode can continue the sequence."""
    return self.cached == self.size - 1

  @property
  def begin(self) -> int:
    """The index of the state that the next call continues from; 0 if there is none."""
    return self.states.index(self.cached) if self.cached in self.states else 0

  def plan_states(self, tokens: int) -> 'StatePlan':
    """Plans which states a prefill of so many tokens reads and saves.

    It saves the states at the end of the last reply, of the prompt, and at a branch. A
    new checkpoint replaces the second-shortest; a group's prompts share the shortest.
    """
    states, keep, save = [*self.states], len(self.states), len(self.states)
    end = self.cached + tokens

    def find():
      kept = states[1:]
      oldest = LOST if LOST in kept else sorted(kept)[:2][-1]
      return 1 + kept.index(oldest)

    if len(states) > 1:
      if 0 < self.cached == self.ended and self.cached not in states[1:]:
        keep = find()
        states[keep] = self.cached
      if end in (self.branch, self.size - 1):
        save = find()
        states[save] = end
    states[:1] = [end] * len(states[:1])
    return StatePlan(self.begin, keep, save, states)

  def note_policy(self, version: Hashable):
    """Records the version of the policy that computes the tokens from here on."""
    if self.version != version:
      # Sequences of one policy may not copy keys and values that several have computed.
      self.version = version if self.cached == 0 else MIXED

  def note_write(self, tokens: int):
    """Records that a call writes at most so many tokens after the cached ones."""
    written = min(self.cached + tokens, len(self.tokens))
    self.written = max(self.written, written)
    # Unknown until the call returns how many tokens it sampled.
    self.states[:1] = [LOST] * len(self.states[:1])

  def prefill(self, tokens: int):
    """Records that a prefill computes the next tokens."""
    states = self.plan_states(tokens).states
    self.note_write(tokens)
    self.cached += tokens
    self.states = states

  def extend(self, tokens: np.ndarray):
    """Records that a decode appended tokens and cached all but the last."""
    assert self.sequence is not None
    self.tokens[self.size : self.size + len(tokens)] = tokens
    self.sequence.append(tokens)
    self.cached += len(tokens)
    self.ended = self.cached
    self.states[:1] = [self.cached] * len(self.states[:1])

  def copy(self, prefix: 'Prefix'):
    """Records that a prefix was copied from another row."""
    self.cached, self.written = prefix.length, prefix.written
    self.states = [*prefix.states]
    self.forget_states()

  def forget_states(self):
    """Forgets states that have seen more tokens than are cached."""
    self.states = [n if n <= self.cached else LOST for n in self.states]


class StatePlan(NamedTuple):
  """The indices of the states that a prefill reads and writes; the length means none."""

  begin: int  # The state to continue from.
  keep: int  # Where to copy that state.
  save: int  # Where to copy the final state.
  states: list[int]  # How many tokens each state has seen afterwards.


class Prefix(NamedTuple):
  """A prefix of `length` tokens that can be copied from a row in its present state."""

  row: Row
  length: int
  written: int
  states: tuple[int, ...]


class _Offer(NamedTuple):
  """How many of a sequence's first tokens another row can provide."""

  row: Row
  cached: int  # Tokens whose keys and values it holds now.
  # Tokens that it will hold once prefilled; 0 if it is not being prefilled.
  expected: int


# The result of `_find_source` if a row that is being prefilled will soon hold more.
_WAIT = 'wait'


class CacheRows:
  """All rows of a replica."""

  def __init__(
    self, rows: int, slots: int, max_rewind: int | None = None, states: int = 0
  ):
    """Makes empty rows.

    Args:
      rows: Number of rows (B).
      slots: Maximum length of a sequence in tokens (S).
      max_rewind: How many tokens before the last written slot a sequence may continue,
        if layers keep only a window; unlimited by default.
      states: Number of states per row of recurrent layers; 0 without such layers.
    """
    self._max_rewind = slots if max_rewind is None else max_rewind
    # One array for all rows, so that one comparison finds all shared prefixes.
    self._tokens = np.full((rows, slots), -1, np.int32)
    self.rows = [Row(i, tokens) for i, tokens in enumerate(self._tokens)]
    for row in self.rows:
      row.states = [LOST] * states
    self._row_of: dict[request_lib.Sequence, Row] = {}

  def find(self, sequence: request_lib.Sequence) -> Row | None:
    """Returns the row that holds a sequence, or None."""
    return self._row_of.get(sequence)

  def stop_sharing(self):
    """Marks the idle rows, so that no sequence copies from them."""
    for row in self.rows:
      # Other threads call this, so a done request may not have released its row yet.
      if row.generation is None or row.generation.done:
        row.version = MIXED

  def assign(
    self, generation: request_lib.Generation, version: Hashable, origin: int = 0
  ) -> Row | None:
    """Assigns a row to a generation's sequence; returns None if all rows are busy.

    The shared prefix that the row already holds is reused, unless its origin differs.
    """
    sequence = generation.sequence
    row = self.find(sequence)
    if row is not None:
      row.prefill_started = row.origin == origin
      row.cached = row.cached if row.origin == origin else 0
    else:
      idle = [row for row in self.rows if row.generation is None]
      if not idle:
        return None
      closed = lambda row: row.sequence is None or row.sequence.closed
      # Rows of closed sequences first, then the least recently used.
      row = min(idle, key=lambda row: (not closed(row), row.last_request))
      shared = _count_shared(row.tokens[None], sequence.tokens)[0]
      row.cached = min(row.cached, int(shared)) if row.version == version else 0
      row.version, row.prefill_started = version, False
      if row.sequence is not None:
        del self._row_of[row.sequence]
      row.sequence, self._row_of[sequence] = sequence, row
    row.generation, row.last_request = generation, generation.number
    row.origin = origin
    row.tokens[: len(sequence)], row.tokens[len(sequence) :] = sequence.tokens, -1
    # The decode computes the last token, to sample the next one.
    row.cached = self._find_usable(row, min(row.cached, len(sequence) - 1))
    if generation.request.score_prompt:
      # Only computed tokens get log-probs.
      row.cached, row.prefill_started = 0, True
    row.written = row.written if row.cached else 0
    row.branch = 0
    row.forget_states()
    return row

  def _find_usable(self, row: Row, count: int) -> int:
    """Returns how many of a row's first `count` tokens a sequence can continue from.

    Sliding layers must still have the window before the next token: it is all or none.
    Recurrent layers can continue from a saved state only.
    """
    if row.states:
      return max((n for n in row.states if 0 < n <= count), default=0)
    return count if count + self._max_rewind >= row.written else 0

  def find_sources(
    self, rows: Sequence[Row], most: int
  ) -> tuple[list[tuple[Prefix, Row]], set[Row]]:
    """Finds what rows can copy from others now, and which wait for another's prefill.

    Example: while A = system + task 1 is being prefilled, B and C = system + task 2
    arrive. B waits until A has computed the system prompt, copies it, and starts to
    prefill its task. C is equal to B: it waits until B has all tokens but the last, and
    copies these. Without waiting, B and C would compute the system prompt again.

    Args:
      rows: Rows that are not prefilled yet, in the order of their requests.
      most: Maximum number of copies per call.

    Returns:
      The copies, pairs of source and row, and the rows that wait.
    """
    copies, waiting = [], set()
    prefilling = {row.index for row in rows if row.prefill_started}
    # Equal sequences, such as the prompts of a group, are compared with the rows only
    # twice: the first may start its prefill, and all later ones share one result.
    sources_of: dict[tuple[Hashable, int, bytes], list[Prefix | str | None]] = {}
    for row in rows:
      if row.prefill_started:
        continue
      key = row.version, row.cached, row.tokens[: row.size].tobytes()
      sources = sources_of.setdefault(key, [])
      if len(sources) < 2:
        sources.append(self._find_source(row, prefilling))
      source = sources[-1]
      if source == _WAIT or (source and len(copies) == most):
        waiting.add(row)
        continue
      row.prefill_started = True
      prefilling.add(row.index)
      row.branch = self._find_branch(row)
      if isinstance(source, Prefix):
        copies.append((source, row))
    return copies, waiting

  def _find_source(self, row: Row, prefilling: set[int]) -> Prefix | str | None:
    """Finds the row that has the longest prefix of a sequence to copy.

    Args:
      row: A row that is not prefilled yet.
      prefilling: Indices of rows that are being prefilled to their end.

    Returns:
      The source; _WAIT if a row that is being prefilled will hold a longer prefix; None
      if no other row has, or will have, at least MIN_SHARED tokens more than the row
      itself.
    """
    offers = self._list_offers(row, prefilling)
    if not offers:
      return None
    future = max(offers, key=lambda offer: (offer.expected, offer.cached))
    # Compare `future` with other rows only: its own cached tokens grow with each prefill,
    # and would end the wait up to MIN_SHARED tokens too early.
    others = [offer.cached for offer in offers if offer is not future]
    if future.cached < future.expected >= max(row.cached, *others, 0) + MIN_SHARED:
      return _WAIT
    present = max(offers, key=lambda offer: offer.cached)
    if present.cached >= row.cached + MIN_SHARED:
      source = present.row
      return Prefix(source, present.cached, source.written, tuple(source.states))
    return None

  def _find_branch(self, row: Row) -> int:
    """Finds the token at which a sequence diverges from another; 0 if it keeps no states.

    Where two have diverged, a third may: the next of many tasks with one system prompt.
    """
    if not row.states or row.version == MIXED:
      return 0
    shared = _count_shared(self._tokens, row.tokens[: row.size])
    same = [x.version == row.version and x is not row for x in self.rows]
    return int(max(shared[same], default=0))

  def _list_offers(self, row: Row, prefilling: set[int]) -> list[_Offer]:
    """Lists the prefixes that other rows of the same policy share with a row."""
    if row.version == MIXED:
      return []
    shared = _count_shared(self._tokens, row.tokens[: row.size])
    # The last token cannot be copied: the decode computes it.
    shared = np.minimum(shared, row.size - 1).tolist()
    offers = []
    for other, count in zip(self.rows, shared, strict=True):
      if other is not row and other.version == row.version:
        expected = self._find_expected(other, count) if other.index in prefilling else 0
        # Tokens that the prefill has passed are available now or lost: do not wait.
        expected = expected if other.cached < expected else 0
        cached = self._find_usable(other, min(count, other.cached))
        offers.append(_Offer(other, cached, expected))
    return offers

  def _find_expected(self, other: Row, count: int) -> int:
    """Returns how many of `count` tokens a row can provide once it is prefilled."""
    if not other.states:
      return min(count, other.size - 1)
    ends = other.size - 1, other.branch if other.cached < other.branch else 0
    return max((end for end in ends if end <= count), default=0)


def _count_shared(rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
  """Returns the length of the prefix that each of rows [B, S] shares, int [B]."""
  equal = rows[:, : len(tokens)] == tokens
  return np.where(equal.all(1), len(tokens), equal.argmin(1))
