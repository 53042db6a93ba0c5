"""Where pictures are in texts: the feature of each of their tokens, and its coordinates.

A model with M-RoPE turns each token by three numbers, (time, row, column). Those of a
text token are equal, one more than the largest before it. A picture of 2 x 3 tokens,
after two tokens of text and before one:

  position     0      1      2       3       4       5       6       7      8
  coordinates  0 0 0  1 1 1  2 2 2   2 2 3   2 2 4   2 3 2   2 3 3   2 3 4  5 5 5

So a token after it is turned as one at position 8 - 3: the picture has 6 tokens, and its
longer side only 3. All of this is computed on the host.

Letters: T tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxtyping import Int
import numpy as np

from agent_r1_jax import types


class Place(NamedTuple):
  """Where the features of a picture are, and its size in tokens."""

  first: int  # The row of its first token's feature.
  rows: int
  columns: int

  @property
  def count(self) -> int:
    """The number of its tokens."""
    return self.rows * self.columns

  @property
  def saved(self) -> int:
    """How much less than its tokens the coordinates grow."""
    return self.count - max(self.rows, self.columns)


def name(pictures: Sequence[np.ndarray], side: int) -> dict[int, np.ndarray]:
  """Names pictures, uint8 [H, W, 3] each, by the first of their ids."""
  return {int(types.make_picture_ids(x, side)[0]): x for x in pictures}


def list_places(named: Mapping[int, np.ndarray], side: int) -> dict[int, Place]:
  """Lists the places of named pictures whose features follow each other."""
  places, first = {}, 0
  for first_id, pixels in named.items():
    place = Place(first, pixels.shape[0] // side, pixels.shape[1] // side)
    places[first_id], first = place, first + place.count
  return places


def find(tokens: Int[np.ndarray, 'T'], places: Iterable[int]) -> np.ndarray:
  """Finds the columns in which pictures of these names begin."""
  return np.flatnonzero(np.isin(tokens, [*places]))


def locate(
  tokens: Int[np.ndarray, 'T'],
  positions: Int[np.ndarray, 'T'],
  ends: Int[np.ndarray, 'T'],
  places: Mapping[int, Place],
) -> tuple[Int[np.ndarray, 'T'], Int[np.ndarray, 'T 3']]:
  """Locates the pictures of a packed row, or of any text.

  Args:
    tokens: The tokens of the row. Those of a picture are neighbours.
    positions: The position of each in its text.
    ends: The column after the last token that sees it, as in types.Tree.
    places: The pictures that may be in it, by their first ids.

  Returns:
    The row of each token's feature, -1 for text; and the coordinates of each token.
  """
  index = np.full(len(tokens), -1, np.int32)
  turned = positions.astype(np.int32)
  begins = find(tokens, places).tolist()
  for begin in begins:
    place = places[int(tokens[begin])]
    last = begin + place.count - 1
    index[begin : last + 1] = place.first + np.arange(place.count)
    turned[last + 1 : ends[last]] -= place.saved
  coordinates = np.repeat(turned[:, None], 3, axis=1)
  for begin in begins:
    _, rows, columns = place = places[int(tokens[begin])]
    inside = coordinates[begin : begin + place.count]
    inside[:] = turned[begin]
    inside[:, 1] += np.repeat(np.arange(rows), columns)
    inside[:, 2] += np.tile(np.arange(columns), rows)
  return index, coordinates
