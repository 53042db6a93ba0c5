"""Cuts pictures into patches, and finds their tokens in sequences.

Everything here runs on the host. Patches are uint8, in the order of the vision tower's
windows; the tower normalises them.

M-RoPE rotates each token by three coordinates: time, row, column. A text token's are all
equal, one more than the largest before it. A picture of 2 x 3 tokens, after two tokens of
text and before one:

  position     0      1      2       3       4       5       6       7      8
  coordinates  0 0 0  1 1 1  2 2 2   2 2 3   2 2 4   2 3 2   2 3 3   2 3 4  5 5 5

The token after the picture rotates as if at position 8 - 3: the picture has 6 tokens, but
its longer side only 3.

Letters: B rows of patches, P patches of a row, F = P / merge_size² tokens of a row, H and
W pixels of a picture, T tokens of a sequence.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtyping import Int, UInt8
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.models.pictures.vision_config import VisionConfig


class Picture(NamedTuple):
  """A picture in the form that the vision tower reads."""

  # The colours of each patch, [patches, 3 · frames · patch_size²]: all red, then green,
  # then blue. The patches of a window are contiguous, and so are a token's in a window.
  patches: UInt8[np.ndarray, 'P C']
  grid: tuple[int, int]  # Its rows and columns of tokens.

  @property
  def tokens(self) -> int:
    """The number of its tokens in a sequence."""
    return self.grid[0] * self.grid[1]


class PatchBatch(NamedTuple):
  """Rows of patches for vision.features; patches of several pictures share a row."""

  patches: UInt8[Any, 'B P C']
  coordinates: Int[Any, 'B P 2']  # Row and column of each patch in its picture.
  # The number of each patch's picture and window, counted from 1 in each row; 0 is
  # padding.
  pictures: Int[Any, 'B P']
  windows: Int[Any, 'B P']
  # For each token in sequence order (row by row in a picture), its index in the order of
  # windows.
  order: Int[Any, 'B F']


def cut(pixels: UInt8[np.ndarray, 'H W C'], config: VisionConfig) -> Picture:
  """Cuts a picture, whose sides are multiples of a token's side, into patches.

  Two frames of a film are one picture, [H, W, 6].

  Raises:
    ValueError: It has more rows or columns of patches than the tower has embeddings.
  """
  size = config.token_size
  grid = pixels.shape[0] // size, pixels.shape[1] // size
  if config.pools and max(grid) * config.merge_size > config.axis_places:
    raise ValueError(
      f'a picture has {max(grid) * config.merge_size} patches in one direction, and '
      f'position_embedding_size is {config.axis_places}; send it smaller.'
    )
  return Picture(_cut(pixels, config), grid)


def round_up(patches: int, config: VisionConfig) -> int:
  """Rounds up to windows times a power of 2, because each size is compiled."""
  windows = max(1, -(-patches // config.window_patches))
  return config.window_patches << (windows - 1).bit_length()


def _cut(pixels: np.ndarray, config: VisionConfig) -> np.ndarray:
  """Cuts pixels [height, width, frames · 3] into patches, in the order of windows."""
  p, m = config.patch_size, config.merge_size
  height, width, _ = pixels.shape
  rows, columns = height // (p * m), width // (p * m)
  cut = pixels.reshape(rows, m, p, columns, m, p, -1, config.channels)
  # Token row and column, patch row and column, colour, frame, pixel row and column.
  cut = cut.transpose(0, 3, 1, 4, 7, 6, 2, 5).reshape(rows * columns, m * m, -1)
  order, _ = _windows((rows, columns), config)
  return cut[order].reshape(rows * columns * m * m, -1)


def _windows(grid: tuple[int, int], config: VisionConfig) -> tuple[Any, Any]:
  """Sorts a picture's tokens by windows.

  Returns:
    The tokens, numbered row by row, in the order of windows; and the window of each,
    counted from 0. A grid of 3 x 3 in windows of 2 x 2 gives 0 1 3 4, 2 5, 6 7, 8.
  """
  row, column = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
  side = config.window_tokens
  window = row // side * -(-grid[1] // side) + column // side
  order = np.argsort(window, kind='stable')
  return order, window[order]


def pack(
  pictures: Sequence[Picture],
  config: VisionConfig,
  *,
  rows: int,
  patches: int,
  channels: int = 0,
) -> tuple[PatchBatch, list[int]]:
  """Packs pictures into `rows` rows of `patches` patches, which fixes all shapes.

  Each picture goes to the first row with room for it. A picture with fewer channels than
  `channels` repeats its frame; the default is the most channels of any picture.

  Returns:
    The batch, and the row of vision.features in which each picture's tokens begin, in the
    order of the sequence.

  Raises:
    ValueError: A picture does not fit, or `patches` is not a multiple of a window's.
  """
  if patches % config.window_patches:
    raise ValueError(
      f'patches is {patches}; give a multiple of the {config.window_patches} of a window.'
    )
  per_token = config.merge_size**2
  size = max(channels, config.channels) * config.patch_size**2
  size = max([size, *(picture.patches.shape[1] for picture in pictures)])
  batch = PatchBatch(
    np.zeros((rows, patches, size), np.uint8),
    np.zeros((rows, patches, 2), np.int32),
    np.zeros((rows, patches), np.int32),
    np.zeros((rows, patches), np.int32),
    np.tile(np.arange(patches // per_token, dtype=np.int32), (rows, 1)),
  )
  used, starts = [0] * rows, []
  for number, picture in enumerate(pictures):
    count = len(picture.patches)
    row = next((r for r in range(rows) if used[r] + count <= patches), None)
    if row is None:
      raise ValueError(
        f'picture {number} has {count} patches, and no row of {patches} has room for it; '
        'give more patches or rows, or a smaller max_pixels.'
      )
    _write(batch, row, used[row], picture, config)
    starts.append((row * patches + used[row]) // per_token)
    used[row] += count
  return batch, starts


def _write(
  batch: PatchBatch, row: int, first: int, picture: Picture, config: VisionConfig
) -> None:
  """Writes a picture to a row of the batch, starting at patch `first`."""
  order, window = _windows(picture.grid, config)
  p, m, before = config.patch_size, config.merge_size, max(first - 1, 0)
  token_row, token_column = np.divmod(order, picture.grid[1])
  patch_row, patch_column = np.divmod(np.arange(m * m), m)
  place = slice(first, first + len(picture.patches))
  own = picture.patches.reshape(len(picture.patches), config.channels, -1, p * p)
  frames = batch.patches.shape[2] // picture.patches.shape[1]
  batch.patches[row, place] = np.repeat(own, frames, axis=2).reshape(len(own), -1)
  for axis, token, patch in ((0, token_row, patch_row), (1, token_column, patch_column)):
    batch.coordinates[row, place, axis] = (token[:, None] * m + patch).reshape(-1)
  batch.pictures[row, place] = batch.pictures[row, before] + 1
  batch.windows[row, place] = batch.windows[row, before] + 1 + np.repeat(window, m * m)
  begin = first // (m * m)
  batch.order[row, begin : begin + len(order)] = begin + np.argsort(order)


class Grid(NamedTuple):
  """The size of a picture in tokens, and the place of its features."""

  first: int  # The row of its first token's features.
  rows: int
  columns: int

  @property
  def count(self) -> int:
    """The number of its tokens."""
    return self.rows * self.columns

  @property
  def saved(self) -> int:
    """How many positions fewer than its tokens the picture takes (see above)."""
    return self.count - max(self.rows, self.columns)


def name(pictures: Sequence[np.ndarray], side: int) -> dict[int, np.ndarray]:
  """Maps the first token id of each picture to the picture, uint8 [H, W, 3]."""
  return {int(types.make_picture_ids(x, side)[0]): x for x in pictures}


def list_places(named: Mapping[int, np.ndarray], side: int) -> dict[int, Grid]:
  """Lists the places of named pictures whose features are concatenated."""
  places, first = {}, 0
  for first_id, pixels in named.items():
    place = Grid(first, pixels.shape[0] // side, pixels.shape[1] // side)
    places[first_id], first = place, first + place.count
  return places


def find(tokens: Int[np.ndarray, 'T'], places: Iterable[int]) -> np.ndarray:
  """Finds the columns in which pictures with these first ids begin."""
  return np.flatnonzero(np.isin(tokens, [*places]))


def locate(
  tokens: Int[np.ndarray, 'T'],
  positions: Int[np.ndarray, 'T'],
  ends: Int[np.ndarray, 'T'],
  places: Mapping[int, Grid],
) -> tuple[Int[np.ndarray, 'T'], Int[np.ndarray, 'T 3']]:
  """Locates the pictures in a packed row, or in a single sequence.

  Args:
    tokens: The tokens of the row. A picture's tokens are contiguous.
    positions: The position of each token in its sequence.
    ends: The column after the last token that sees it, as in types.Tree.
    places: The pictures that may occur, by their first ids.

  Returns:
    The row of each token's features, -1 for text; and the coordinates of each token.
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
