"""The sizes of the programs that an engine compiles."""

import bisect
from typing import NamedTuple


class Sizes(NamedTuple):
  """The sizes of everything that is compiled; see Engine for what each costs.

  Lists are ascending: a program of the smallest size that is large enough is run.

  Attributes:
    rows: Texts in the cache (B).
    slots: The most tokens of a text (S).
    steps: Tokens of one decode segment.
    prefill_tokens: Tokens of a row in one prefill (T).
    prefill_rows: Rows of one prefill.
    decode_rows: Rows of one decode.
    buckets: Slots that a prefill or a copy reads of each row.
    decode_buckets: Slots that a decode reads of each row.
  """

  rows: int
  slots: int
  steps: int
  prefill_tokens: int
  prefill_rows: list[int]
  decode_rows: list[int]
  buckets: list[int]
  decode_buckets: list[int]

  @property
  def programs(self) -> int:
    """How many programs there are."""
    decodes = len(self.decode_buckets) * len(self.decode_rows)
    return len(self.buckets) * (1 + len(self.prefill_rows)) + decodes

  def decodes_in_place(self, rows: int, bucket: int) -> bool:
    """Whether a decode is of all rows and slots, so that none need to be copied."""
    return rows == self.rows and bucket == self.slots


def round_up(sizes: list[int], n: int) -> int:
  """Returns the smallest of ascending sizes that is at least n, or else the largest."""
  return sizes[min(bisect.bisect_left(sizes, n), len(sizes) - 1)]
