"""The sizes of the programs that an engine compiles."""

import bisect
from typing import NamedTuple


class Sizes(NamedTuple):
  """The sizes of everything that is compiled; see Engine for what each costs.

  Attributes:
    rows: Texts in the cache (B).
    slots: The most tokens of a text (S).
    steps: Tokens of one decode segment.
    prefill_tokens: Tokens of a row in one prefill (T).
    prefill_rows: Rows of one prefill, ascending: the least that holds enough is taken.
    decode_rows: Rows of one decode, likewise.
    buckets: Slots that a cache read covers, likewise.
    in_place: Whether a decode is of all rows and slots, and copies none of them.
  """

  rows: int
  slots: int
  steps: int
  prefill_tokens: int
  prefill_rows: list[int]
  decode_rows: list[int]
  buckets: list[int]
  in_place: bool = False

  @property
  def decode_buckets(self) -> list[int]:
    """The buckets that decodes are compiled for."""
    return [self.slots] if self.in_place else self.buckets

  @property
  def programs(self) -> int:
    """How many programs there are."""
    decodes = len(self.decode_buckets) * len(self.decode_rows)
    return len(self.buckets) * (1 + len(self.prefill_rows)) + decodes

  def bucket(self, length: int) -> int:
    """The least bucket that holds `length` slots, for a prefill or a copy."""
    return least(self.buckets, min(length, self.slots))

  def decode_bucket(self, length: int) -> int:
    """The least bucket that holds `length` slots, for a decode."""
    return least(self.decode_buckets, min(length, self.slots))


def least(sizes: list[int], n: int) -> int:
  """The least of ascending sizes that holds n."""
  return sizes[bisect.bisect_left(sizes, n)]
