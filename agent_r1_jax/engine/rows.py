"""The rows of the cache, as the host knows them: which text each holds, and how much.

Everything here is bookkeeping on the host, in numpy. It decides which row a text gets,
and which prefixes it can copy from other rows instead of computing them.

Letters: B rows, S slots of a row.
"""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from agent_r1_jax.engine import request as request_lib

# Shorter prefixes are computed again, which is cheaper than waiting for them and copying.
MIN_SHARED = 16
# The version of rows from which nothing may be copied.
MIXED = -1


@dataclasses.dataclass(eq=False)
class Row:
  """One row of the cache."""

  index: int  # Its number in the cache.
  tokens: np.ndarray  # The text's tokens, int32 [S], padded with -1.
  # The text whose keys and values it holds, or held last.
  text: request_lib.Text | None = None
  cached: int = 0  # The number of slots that hold the text's tokens, from the first on.
  # The version of the policy that computed them; MIXED: nothing may be copied from it.
  version: int = MIXED
  generation: request_lib.Generation | None = (
    None  # The generation that is under way in it.
  )
  # Whether its prefill has begun; False while it waits to copy from another row.
  begun: bool = False
  last_request: int = -1  # The number of the last request for it.

  @property
  def size(self) -> int:
    """The number of tokens of the text."""
    return 0 if self.text is None else len(self.text)

  @property
  def missing(self) -> np.ndarray:
    """The tokens still to be prefilled: all but the last, which the decode computes."""
    return self.tokens[self.cached : self.size - 1]

  @property
  def prefilled(self) -> bool:
    """Whether a decode can continue the text."""
    return self.cached == self.size - 1

  def note_policy(self, version: int):
    """Notes the policy that computes the tokens from here on."""
    if self.version != version:
      # Texts of one policy may not copy what several policies have computed.
      self.version = version if self.cached == 0 else MIXED

  def extend(self, tokens: np.ndarray):
    """Notes that a decode appended tokens to the text, and cached all but the last."""
    assert self.text is not None
    self.tokens[self.size : self.size + len(tokens)] = tokens
    self.text.append(tokens)
    self.cached += len(tokens)


class Source(NamedTuple):
  """A prefix of `length` tokens that can be copied from a row."""

  row: Row
  length: int


class _Offer(NamedTuple):
  """Tokens of a text that a row has, or will have once it is prefilled."""

  row: Row  # The row.
  now: int  # The number of the text's first tokens whose keys and values it holds.
  later: int  # The number that it will hold; 0 if it is not being prefilled.


# The answer of `_find_source` that a row which is being prefilled will have more.
_WAIT = 'wait'


class Rows:
  """All rows of a replica."""

  def __init__(self, rows: int, slots: int):
    """Makes empty rows."""
    # One array of all texts, so that one comparison finds all shared prefixes.
    self._tokens = np.full((rows, slots), -1, np.int32)
    self.rows = [Row(i, tokens) for i, tokens in enumerate(self._tokens)]
    self._row_of: dict[request_lib.Text, Row] = {}

  def find(self, text: request_lib.Text) -> Row | None:
    """Returns the row that holds a text, or None."""
    return self._row_of.get(text)

  def stop_sharing(self):
    """Lets no text copy from the rows that are idle now."""
    for row in self.rows:
      # Other threads call this, and a request may have ended without leaving its row yet.
      if row.generation is None or row.generation.done:
        row.version = MIXED

  def assign(self, generation: request_lib.Generation, version: int) -> Row | None:
    """Gives a generation's text a row; None if requests run in all of them.

    The text keeps what the row holds already of its first tokens.
    """
    text = generation.text
    row = self.find(text)
    if row is not None:
      row.begun = True
    else:
      idle = [row for row in self.rows if row.generation is None]
      if not idle:
        return None
      closed = lambda row: row.text is None or row.text.closed
      # First what no request will continue, then what was asked for longest ago.
      row = min(idle, key=lambda row: (not closed(row), row.last_request))
      shared = _count_shared(row.tokens[None], text.tokens)[0]
      row.cached = min(row.cached, int(shared)) if row.version == version else 0
      row.version, row.begun = version, False
      if row.text is not None:
        del self._row_of[row.text]
      row.text, self._row_of[text] = text, row
    row.generation, row.last_request = generation, generation.number
    row.tokens[: len(text)], row.tokens[len(text) :] = text.tokens, -1
    # The decode computes the last token, to sample what follows it.
    row.cached = min(row.cached, len(text) - 1)
    return row

  def find_sources(
    self, rows: Sequence[Row], most: int
  ) -> tuple[list[tuple[Source, Row]], set[Row]]:
    """Finds what rows can copy from others now, and which wait for another's prefill.

    An example: A = system + task 1 is being prefilled, B and C = system + task 2 come.
    B waits until A has computed the system's tokens, copies them, and begins to prefill
    its task. C is equal to B and waits until B has all but the last token, which it
    copies. Without the waits, B and C would compute the system's tokens too.

    Args:
      rows: Rows whose texts are not prefilled yet, in the order of their requests.
      most: The most copies at a time.

    Returns:
      The copies, pairs of source and row, and the rows that wait.
    """
    copies, waiting = [], set()
    computing = {row.index for row in rows if row.begun}
    # Equal texts, such as the prompts of a group, are compared with the rows twice: the
    # first may begin, and what the second finds then, all others find, too.
    found: dict[tuple[int, int, bytes], list[Source | str | None]] = {}
    for row in rows:
      if row.begun:
        continue
      text = row.version, row.cached, row.tokens[: row.size].tobytes()
      answers = found.setdefault(text, [])
      if len(answers) < 2:
        answers.append(self._find_source(row, computing))
      source = answers[-1]
      if source == _WAIT or (source and len(copies) == most):
        waiting.add(row)
        continue
      row.begun = True
      computing.add(row.index)
      if isinstance(source, Source):
        copies.append((source, row))
    return copies, waiting

  def _find_source(self, row: Row, computing: set[int]) -> Source | str | None:
    """Finds the row that has most of a text's first tokens, or will have.

    Args:
      row: A row whose text is not prefilled yet.
      computing: Indices of rows that are being prefilled, and will hold all their text.

    Returns:
      What to copy; or _WAIT; or None where no other row has, or will have, at least
      MIN_SHARED tokens more than the row itself.
    """
    offers = self._list_offers(row, computing)
    if not offers:
      return None
    future = max(offers, key=lambda offer: (offer.later, offer.now))
    # Compared only with the other rows: its own tokens grow with each round, and once it
    # is within MIN_SHARED of its end, the wait would be given up.
    others = [offer.now for offer in offers if offer is not future]
    if future.now < future.later >= max(row.cached, *others, 0) + MIN_SHARED:
      return _WAIT
    present = max(offers, key=lambda offer: offer.now)
    if present.now >= row.cached + MIN_SHARED:
      return Source(present.row, present.now)
    return None

  def _list_offers(self, row: Row, computing: set[int]) -> list[_Offer]:
    """Lists what the other rows that the same policy computed share with a text."""
    if row.version == MIXED:
      return []
    shared = _count_shared(self._tokens, row.tokens[: row.size])
    # The last token cannot be copied: the decode computes it.
    shared = np.minimum(shared, row.size - 1).tolist()
    offers = []
    for other, count in zip(self.rows, shared, strict=True):
      if other is not row and other.version == row.version:
        later = min(count, other.size - 1) if other.index in computing else 0
        offers.append(_Offer(other, min(count, other.cached), later))
    return offers


def _count_shared(texts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
  """Counts how many of the first tokens each row of texts [B, S] shares, int [B]."""
  equal = texts[:, : len(tokens)] == tokens
  return np.where(equal.all(1), len(tokens), equal.argmin(1))
