"""Drafts for speculative decoding: likely next tokens, looked up in earlier sequences.

Sequences that end with the same few tokens often continue alike: a reply quotes a tool's
answer, or repeats a sibling's reply. A decode computes the drafted tokens together with
the last one, and accepts those that sampling chooses anyway. Drafts thus change the
number of calls per reply, but never a token.

The host keeps an index of recent tokens (Index). A decode reads a copy of it (Places)
on the device, since a draft depends on tokens that the same decode has just sampled.

Letters: M entries of a decode, C tokens of the index, H places of its hash table, k
tokens of a draft.
"""

from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp
from jaxtyping import Int
import numpy as np

# The lengths of the n-grams at the end of a sequence that are looked up, longest first.
LENGTHS = (8, 6, 4, 3, 2)
WIDTH = LENGTHS[0]
# The index's capacity in tokens, a ring buffer, and log2 of the size of its hash table.
_TOKENS, _LOG_PLACES = 1 << 16, 18
# Odd random factors for hashing n-grams.
_FACTORS = np.random.default_rng(0).integers(2**32, size=WIDTH, dtype=np.uint32) | 1
# Pads sequences that are shorter than WIDTH, and marks missing drafts.
NONE = -1
# If calls with drafts sample fewer tokens than this on average, the next decodes run
# without drafts; after this many, drafts are tried again.
_LEAST_TOKENS, _TRY_AFTER = 1.25, 32


class Places(NamedTuple):
  """The arrays of an Index, as a decode reads them."""

  tokens: Int[Array, 'C']  # Recent tokens; the pieces of sequences are concatenated.
  table: Int[Array, 'H']  # The place after the latest n-gram with this hash; 0 is none.


def _hash_ends(tokens: Any) -> Any:
  """Hashes n-grams [M, n] to indices of Places.table [M].

  Takes numpy or JAX arrays; their 32-bit products overflow alike.
  """
  module, n = np if isinstance(tokens, np.ndarray) else jnp, tokens.shape[1]
  products_Mn = (tokens.astype(module.uint32) + np.uint32(n)) * _FACTORS[None, :n]
  # The top bits of a product are the best mixed.
  mixed_M1 = products_Mn.sum(-1, dtype=module.uint32, keepdims=True) * _FACTORS[None, :1]
  return (mixed_M1 >> np.uint32(32 - _LOG_PLACES))[:, 0].astype(module.int32)


def propose(places: Places, ends: Int[Array, 'M W'], k: int) -> Int[Array, 'M k']:
  """Drafts the next k tokens of sequences from their last WIDTH tokens, `ends`.

  It finds the longest n-gram at the end that the index has, and drafts the tokens after
  the n-gram's latest occurrence; NONE if the index has no n-gram.
  """
  found_M = jnp.zeros(len(ends), jnp.int32)
  for length in LENGTHS:
    end_Mn = ends[:, WIDTH - length :]
    place_M = places.table[_hash_ends(end_Mn)]
    # Hashes may collide.
    before_Mn = places.tokens[place_M[:, None] - length + jnp.arange(length)[None]]
    same_M = (place_M > 0) & (before_Mn == end_Mn).all(-1)
    found_M = jnp.where((found_M == 0) & same_M, place_M, found_M)
  next_Mk = found_M[:, None] + jnp.arange(k)[None]
  draft_Mk = places.tokens.at[next_Mk].get(mode='fill', fill_value=NONE)
  return jnp.where(found_M[:, None] > 0, draft_Mk, NONE)


def count_most(calls: int, k: int) -> int:
  """Returns the maximum number of tokens per entry of a decode with `calls` policy calls.

  With drafts it is twice the calls: entries whose drafts are accepted need not wait for
  the others, and each call reads only a few more slots.
  """
  return 2 * calls if k else calls


class Index:
  """An index of recent tokens; also decides whether drafts from it save time."""

  def __init__(self):
    """Makes an empty index."""
    self._tokens = np.full(_TOKENS, NONE, np.int32)
    self._table = np.zeros(1 << _LOG_PLACES, np.int32)
    self._end = WIDTH  # The place of the next token; 0 is no place.
    # The moving average of tokens per call with drafts, and how many of the next decodes
    # run without drafts.
    self._tokens_a_call, self._without = 2.0, 0

  def offer(self) -> Places | None:
    """Copies the index for a decode; None if drafts would not save time."""
    if self._without:
      self._without -= 1
      return None
    copies: Any = self._tokens.copy(), self._table.copy()
    return Places(*copies)

  def note(self, tokens: int, calls: int):
    """Records how many tokens a decode with drafts sampled in how many calls."""
    self._tokens_a_call += 0.1 * (tokens / max(calls, 1) - self._tokens_a_call)
    if self._tokens_a_call < _LEAST_TOKENS:
      # One decode that drafts well is then enough to turn drafts on again.
      self._tokens_a_call, self._without = _LEAST_TOKENS, _TRY_AFTER

  def add(self, tokens: np.ndarray, new: int):
    """Adds the last `new` tokens of a sequence, with the WIDTH before as context."""
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
        # The last token ends no n-gram yet: its successor comes with the next piece.
        ends = np.lib.stride_tricks.sliding_window_view(piece[:-1], length)
        # The latest of equal n-grams wins: numpy assigns in order.
        self._table[_hash_ends(ends)] = place + length + np.arange(len(ends))

  def _has(self, piece: np.ndarray) -> bool:
    """Whether the index already has the piece, as for the prompts of siblings."""
    if len(piece) <= WIDTH:
      return False
    last = int(self._table[_hash_ends(piece[None, -WIDTH - 1 : -1])[0]])
    return np.array_equal(self._tokens[last + 1 - len(piece) : last + 1], piece)
