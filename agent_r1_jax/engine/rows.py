"""The rows of the cache, as the host knows them: whose they are and what they hold.

Everything here is bookkeeping on the host, in numpy. It decides which row a text gets,
and which prefixes it can copy from others instead of computing them.

Letters: B rows, S slots of a row.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from agent_r1_jax.engine import request as request_lib

# Shorter prefixes are computed again: that is cheaper than to wait for them and copy.
MIN_SHARED = 16
# The version of rows that nothing may be copied from.
MIXED = -1


@dataclasses.dataclass(eq=False)
class Row:
  """One row.

  Attributes:
    index: Its number in the cache.
    tokens: int32 [S], the text's tokens, then -1.
    text: The text whose keys and values it holds, or held last.
    cached: How many of its slots hold the text's tokens, from the first on.
    version: The version of the policy that computed them; MIXED where
      several did, or none.
    running: The generation that is under way in it.
    begun: Whether its text is being computed, and waits for no other row's.
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
    """Tokens of the text."""
    return 0 if self.text is None else len(self.text)

  @property
  def missing(self) -> np.ndarray:
    """The tokens that are still to be computed; the last one waits for the decode."""
    return self.tokens[self.cached : self.size - 1]

  @property
  def filled(self) -> bool:
    """Whether a decode can go on from here."""
    return self.cached == self.size - 1

  @property
  def content(self) -> bytes:
    """The text, to find equal ones by."""
    return self.tokens[: self.size].tobytes()

  def note_policy(self, version: int):
    """Notes who computes the tokens from here on."""
    if self.version != version:
      # Nobody may copy what several policies have computed between them.
      self.version = version if self.cached == 0 else MIXED

  def extend(self, tokens: np.ndarray):
    """Notes that a decode appended tokens to the text, and computed all but the last."""
    assert self.text is not None
    self.tokens[self.size : self.size + len(tokens)] = tokens
    self.text.append(tokens)
    self.cached += len(tokens)


@dataclasses.dataclass(frozen=True)
class Source:
  """Where a prefix of a text can be had.

  Attributes:
    row: The row that holds it, or will.
    length: Tokens that are the same.
    ready: Whether they have been computed.
  """

  row: Row
  length: int
  ready: bool


class Rows:
  """All rows of a replica."""

  def __init__(self, rows: int, slots: int):
    """All rows are empty."""
    # The texts side by side, so that one comparison finds whatever they share.
    self._tokens = np.full((rows, slots), -1, np.int32)
    self.rows = [Row(i, tokens) for i, tokens in enumerate(self._tokens)]
    self._row_of: dict[request_lib.Text, Row] = {}

  def of(self, text: request_lib.Text) -> Row | None:
    """The row that holds a text; None if it has none."""
    return self._row_of.get(text)

  def forget(self):
    """Makes nothing of what idle rows hold be shared any more."""
    for row in self.rows:
      # What has ended may not have left its row yet: this is called from other threads.
      if row.running is None or row.running.done:
        row.version = MIXED

  def place(self, generation: request_lib.Generation, version: int) -> Row | None:
    """Gives a generation's text a row; None if all of them are running.

    Of what the row holds already, the text keeps the tokens that are the same.

    Args:
      generation: What is to be sampled.
      version: The version of the policy that samples it.
    """
    text = generation.text
    row = self.of(text)
    if row is not None:
      row.begun = True
    else:
      idle = [row for row in self.rows if row.running is None]
      if not idle:
        return None
      closed = lambda row: row.text is None or row.text.closed
      row = min(idle, key=lambda row: (not closed(row), row.used))
      same = _shared(row.tokens[None], text.tokens)[0]
      row.cached = min(row.cached, int(same)) if row.version == version else 0
      row.version, row.begun = version, False
      if row.text is not None:
        del self._row_of[row.text]
      row.text, self._row_of[text] = text, row
    row.running, row.used = generation, generation.number
    row.tokens[: len(text)], row.tokens[len(text) :] = text.tokens, -1
    # The last token is not computed before a decode wants what follows it.
    row.cached = min(row.cached, len(text) - 1)
    return row

  def find_sources(
    self, rows: Sequence[Row], most: int
  ) -> tuple[list[tuple[Source, Row]], set[Row]]:
    """Finds what rows can copy from others now, and which wait for another's prefill.

    No row is computed that shares more with one that is being computed: that one is
    waited for, and then copied.

    Args:
      rows: Rows of whose texts something is missing; whoever came first comes first.
      most: The most copies at a time.

    Returns:
      What is to be copied to which row, and the rows that wait.
    """
    copies, waiting = [], set()
    filling = {row.index for row in rows if row.begun}
    # Equal texts, such as the prompts of a group, are compared with the rows once.
    known: dict[bytes, Source | None] = {}
    for row in rows:
      if row.begun:
        continue
      content = row.content
      if content not in known:
        source = self._source(row, filling)
        whole = source and source.ready and source.length == row.size - 1
        # An equal text waits for this row, unless it can copy all that this one can.
        known[content] = source if whole else None
      elif (source := known[content]) is None:
        waiting.add(row)
        continue
      full = len(copies) == most
      if source is not None and (full or not source.ready):
        waiting.add(row)
        continue
      row.begun = True
      filling.add(row.index)
      copies += [] if source is None else [(source, row)]
    return copies, waiting

  def _source(self, row: Row, filling: set[int]) -> Source | None:
    """Finds the longest prefix of a row's text that is worth waiting for or copying.

    Args:
      row: A row whose text is still to be computed.
      filling: Indices of rows that are being prefilled: all of their text will be there.

    Returns:
      None where no other row has at least MIN_SHARED tokens more than the row itself.
    """
    target = row.tokens[: row.size]
    same = _shared(self._tokens, target)
    held, promised = np.zeros((2, len(self.rows)), int)
    for other in self.rows:
      if other is row or other.version != row.version or row.version == MIXED:
        continue
      held[other.index] = other.cached
      if other.index in filling:
        promised[other.index] = other.size - 1
    # Of the text itself all but the last token can be copied.
    most = np.minimum(same, row.size - 1)
    now, later = np.minimum(most, held), np.minimum(most, promised)
    here = int(now.argmax())
    # Of rows that will share as much, the one that is furthest.
    there = int(np.lexsort((now, later))[-1])
    # What is compared does not shrink while the row is computed: whoever waits for it
    # waits until it holds all that is wanted.
    others = np.where(np.arange(len(now)) == there, 0, now).max()
    if now[there] < later[there] >= max(others, row.cached) + MIN_SHARED:
      return Source(self.rows[there], int(later[there]), ready=False)
    if now[here] >= row.cached + MIN_SHARED:
      return Source(self.rows[here], int(now[here]), ready=True)
    return None


def _shared(texts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
  """How many of `tokens` each row of texts [B, S] begins with, int [B]."""
  equal = texts[:, : len(tokens)] == tokens
  return np.where(equal.all(1), len(tokens), equal.argmin(1))
