"""Drafts: the tokens that may come next, found where the same tokens stood before.

A text that ends with the same few tokens as an earlier one often continues as that did: a
reply quotes a tool's answer, or says what a sibling said. A decode computes these tokens
together with the last one, and keeps those that sampling chooses anyway, so that drafts
change how many calls a reply takes, and no token.

The host keeps an index of what was said (Index); a decode reads a copy of it (Places),
since a draft depends on tokens that the same decode has just sampled.

Letters: M entries of a decode, C tokens of the index, H places of its table, k tokens of
a draft.
"""

from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp
from jaxtyping import Int
import numpy as np

# A place is looked up by the last tokens of a text, these many; the most count first.
LENGTHS = (8, 6, 4, 3, 2)
WIDTH = LENGTHS[0]
# Tokens of the index, after which the oldest are overwritten, and log2 of its places.
_TOKENS, _LOG_PLACES = 1 << 16, 18
# Odd random numbers, with which ends are hashed.
_FACTORS = np.random.default_rng(0).integers(2**32, size=WIDTH, dtype=np.uint32) | 1
# What stands for a token that a text is too short to have.
NONE = -1
# Where calls with drafts sample fewer tokens than this on average, decodes go on without;
# after so many of those, one with drafts is tried again.
_LEAST_TOKENS, _TRY_AFTER = 1.25, 32


class Places(NamedTuple):
  """Where tokens stood: the arrays of an Index, as a decode reads them."""

  tokens: Int[Array, 'C']  # What was said, the pieces one after the other.
  table: Int[Array, 'H']  # The place after the last tokens with this hash; 0 is none.


def _hash_ends(tokens: Any) -> Any:
  """Hashes the ends of texts [M, n] to indices of Places.table [M].

  The arrays are numpy's or JAX's, whose 32-bit products overflow alike.
  """
  module, n = np if isinstance(tokens, np.ndarray) else jnp, tokens.shape[1]
  products_Mn = (tokens.astype(module.uint32) + np.uint32(n)) * _FACTORS[None, :n]
  # The top bits of a product are mixed best.
  mixed_M1 = products_Mn.sum(-1, dtype=module.uint32, keepdims=True) * _FACTORS[None, :1]
  return (mixed_M1 >> np.uint32(32 - _LOG_PLACES))[:, 0].astype(module.int32)


def propose(places: Places, ends: Int[Array, 'M W'], k: int) -> Int[Array, 'M k']:
  """Drafts the tokens that follow texts, of which `ends` holds the last WIDTH.

  They are those that followed the longest of the text's endings that the index has, at
  its latest place; NONE where it has none.
  """
  found_M = jnp.zeros(len(ends), jnp.int32)
  for length in LENGTHS:
    end_Mn = ends[:, WIDTH - length :]
    place_M = places.table[_hash_ends(end_Mn)]
    # Other tokens may have the same hash.
    before_Mn = places.tokens[place_M[:, None] - length + jnp.arange(length)[None]]
    same_M = (place_M > 0) & (before_Mn == end_Mn).all(-1)
    found_M = jnp.where((found_M == 0) & same_M, place_M, found_M)
  next_Mk = found_M[:, None] + jnp.arange(k)[None]
  draft_Mk = places.tokens.at[next_Mk].get(mode='fill', fill_value=NONE)
  return jnp.where(found_M[:, None] > 0, draft_Mk, NONE)


def count_most(calls: int, k: int) -> int:
  """Returns the most tokens of an entry of a decode that calls the policy `calls` times.

  With drafts they are twice the calls: entries whose drafts stay need not wait for those
  whose drafts do not, and each call reads but few slots more.
  """
  return 2 * calls if k else calls


class Index:
  """What was said lately, and whether drafts from it save time."""

  def __init__(self):
    """Makes an empty index."""
    self._tokens = np.full(_TOKENS, NONE, np.int32)
    self._table = np.zeros(1 << _LOG_PLACES, np.int32)
    self._end = WIDTH  # The place of the next token; 0 is no place.
    # The mean of the tokens that calls with drafts sampled, the last ones counting most;
    # and how many decodes go on without drafts.
    self._tokens_a_call, self._without = 2.0, 0

  def offer(self) -> Places | None:
    """Copies the index for a decode; None where drafts would not save time."""
    if self._without:
      self._without -= 1
      return None
    copies: Any = self._tokens.copy(), self._table.copy()
    return Places(*copies)

  def note(self, tokens: int, calls: int):
    """Records how many tokens the calls of a decode with drafts sampled."""
    self._tokens_a_call += 0.1 * (tokens / max(calls, 1) - self._tokens_a_call)
    if self._tokens_a_call < _LEAST_TOKENS:
      # One that drafts well is then enough to go on with drafts.
      self._tokens_a_call, self._without = _LEAST_TOKENS, _TRY_AFTER

  def add(self, tokens: np.ndarray, new: int):
    """Adds the last `new` tokens of a text; those before them are their context."""
    piece = np.asarray(tokens[-min(new + WIDTH, _TOKENS // 2) :], np.int32)
    if self._has(piece):
      return
    if self._end + len(piece) > _TOKENS:
      self._end = WIDTH
    place = self._end
    self._tokens[place : place + len(piece)] = piece
    self._end = place + len(piece)
    for length in LENGTHS:
      if len(piece) > length:
        # The last token is no end yet: what follows it comes with the next piece.
        ends = np.lib.stride_tricks.sliding_window_view(piece[:-1], length)
        # Of equal ends the last one stays: numpy assigns in order.
        self._table[_hash_ends(ends)] = place + length + np.arange(len(ends))

  def _has(self, piece: np.ndarray) -> bool:
    """Whether a draft would find the piece anyway, as it does siblings' prompts."""
    if len(piece) <= WIDTH:
      return False
    last = int(self._table[_hash_ends(piece[None, -WIDTH - 1 : -1])[0]])
    return np.array_equal(self._tokens[last + 1 - len(piece) : last + 1], piece)
