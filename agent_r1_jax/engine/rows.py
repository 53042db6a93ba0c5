"""The rows of the cache, as the host knows them: which text each holds, and how much.

Everything here is bookkeeping on the host, in numpy. It decides which row a text gets,
and which prefixes it can copy from other rows instead of computing them.

Letters: B rows, S slots of a row.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from agent_r1_jax.engine import request as request_lib

# Shorter prefixes are computed again, which is cheaper than waiting for them and copying.
MIN_SHARED = 16
# The version of rows from which nothing may be copied.
MIXED = -1


@dataclasses.dataclass(eq=False)
class Row:
  """One row of the cache.

  Attributes:
    index: Its number in the cache.
    tokens: The text's tokens, int32 [S], padded with -1.
    text: The text whose keys and values it holds, or held last.
    cached: The number of slots that hold the text's tokens, from the first on.
    version: The version of the policy that computed them; MIXED if several did, or none.
    running: The generation that is under way in it.
    begun: Whether its text is being prefilled, and does not wait for another row's.
    used: The number of the last request for it.
  """

  index: int
  tokens: np.ndarray
  text: request_lib.Text | None = None
  cached: int = 0
  version: int = MIXED
  running: request_lib.Generation | None = None
  begun: bool = False
  used: int = -1

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


@dataclasses.dataclass(frozen=True)
class Source:
  """A row from which a prefix of a text can be copied.

  Attributes:
    row: The row that holds the prefix, or will hold it.
    length: The number of tokens of the prefix.
    ready: Whether they have been computed.
  """

  row: Row
  length: int
  ready: bool


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
      if row.running is None or row.running.done:
        row.version = MIXED

  def assign(self, generation: request_lib.Generation, version: int) -> Row | None:
    """Gives a generation's text a row; None if requests run in all of them.

    The text keeps what the row holds already of its first tokens.

    Args:
      generation: The reply to be sampled.
      version: The version of the policy that samples it.
    """
    text = generation.text
    row = self.find(text)
    if row is not None:
      row.begun = True
    else:
      idle = [row for row in self.rows if row.running is None]
      if not idle:
        return None
      closed = lambda row: row.text is None or row.text.closed
      row = min(idle, key=lambda row: (not closed(row), row.used))
      shared = _count_shared(row.tokens[None], text.tokens)[0]
      row.cached = min(row.cached, int(shared)) if row.version == version else 0
      row.version, row.begun = version, False
      if row.text is not None:
        del self._row_of[row.text]
      row.text, self._row_of[text] = text, row
    row.running, row.used = generation, generation.number
    row.tokens[: len(text)], row.tokens[len(text) :] = text.tokens, -1
    # The decode computes the last token, to sample what follows it.
    row.cached = min(row.cached, len(text) - 1)
    return row

  def find_sources(
    self, rows: Sequence[Row], most: int
  ) -> tuple[list[tuple[Source, Row]], set[Row]]:
    """Finds what rows can copy from others now, and which wait for another's prefill.

    A row whose text shares more with one that is being prefilled than with any other
    waits for that one, and then copies it.

    Args:
      rows: Rows whose texts are not prefilled yet, in the order of their requests.
      most: The most copies at a time.

    Returns:
      The copies, pairs of source and row, and the rows that wait.
    """
    copies, waiting = [], set()
    filling = {row.index for row in rows if row.begun}
    # Equal texts, such as the prompts of a group, are compared with the rows once.
    known: dict[bytes, Source | None] = {}
    for row in rows:
      if row.begun:
        continue
      content = row.tokens[: row.size].tobytes()
      if content not in known:
        source = self._find_source(row, filling)
        complete = source and source.ready and source.length == row.size - 1
        # An equal text waits for this row, unless it can copy all that it needs now.
        known[content] = source if complete else None
      elif (source := known[content]) is None:
        waiting.add(row)
        continue
      if source is not None and (len(copies) == most or not source.ready):
        waiting.add(row)
        continue
      row.begun = True
      filling.add(row.index)
      if source is not None:
        copies.append((source, row))
    return copies, waiting

  def _find_source(self, row: Row, filling: set[int]) -> Source | None:
    """Finds the longest prefix of a row's text that is worth waiting for or copying.

    Args:
      row: A row whose text is not prefilled yet.
      filling: Indices of rows that are being prefilled, and will hold all of their text.

    Returns:
      None where no other row has at least MIN_SHARED tokens more than the row itself.
    """
    shared = _count_shared(self._tokens, row.tokens[: row.size])
    held, promised = np.zeros((2, len(self.rows)), int)
    for other in self.rows:
      if other is row or other.version != row.version or row.version == MIXED:
        continue
      held[other.index] = other.cached
      if other.index in filling:
        promised[other.index] = other.size - 1
    # All tokens but the last can be copied.
    most = np.minimum(shared, row.size - 1)
    now, later = np.minimum(most, held), np.minimum(most, promised)
    here = int(now.argmax())
    # Among the rows that will share the most, the one that has computed most of it.
    there = int(np.lexsort((now, later))[-1])
    # The row that is waited for is left out: otherwise the wait would end when it has
    # computed nearly all, and not all, of the prefix.
    others = np.where(np.arange(len(now)) == there, 0, now).max()
    if now[there] < later[there] >= max(others, row.cached) + MIN_SHARED:
      return Source(self.rows[there], int(later[there]), ready=False)
    if now[here] >= row.cached + MIN_SHARED:
      return Source(self.rows[here], int(now[here]), ready=True)
    return None


def _count_shared(texts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
  """Counts how many of the first tokens each row of texts [B, S] shares, int [B]."""
  equal = texts[:, : len(tokens)] == tokens
  return np.where(equal.all(1), len(tokens), equal.argmin(1))
