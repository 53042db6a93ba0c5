"""Pictures as tokens: cut into patches, and found again in texts.

All of it runs on the host. Patches are bytes, in the order of the vision tower's windows;
the tower normalises them.

A model with M-RoPE turns each token by three numbers, (time, row, column). Those of a
text token are equal, one more than the largest before it. A picture of 2 x 3 tokens,
after two tokens of text and before one:

  position     0      1      2       3       4       5       6       7      8
  coordinates  0 0 0  1 1 1  2 2 2   2 2 3   2 2 4   2 3 2   2 3 3   2 3 4  5 5 5

So a token after it is turned as one at position 8 - 3: the picture has 6 tokens, and its
longer side only 3.

Letters: B rows of patches, P patches of a row, F = P / merge_size² tokens of a row, H and
W pixels of a picture, T tokens of a text.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtyping import Int, UInt8
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.models.pictures.vision_config import VisionConfig


class Picture(NamedTuple):
  """A picture as the vision tower takes it."""

  # The colours of each patch, [patches, 3 · frames · patch_size²], first red, then green,
  # then blue. Windows are neighbours, and in a window the patches of a token are.
  patches: UInt8[np.ndarray, 'P C']
  grid: tuple[int, int]  # Its rows and columns of tokens.

  @property
  def tokens(self) -> int:
    """The number of tokens that stand for it in a text."""
    return self.grid[0] * self.grid[1]


class PatchBatch(NamedTuple):
  """Rows of patches for vision.features; patches of several pictures share a row."""

  patches: UInt8[Any, 'B P C']
  coordinates: Int[Any, 'B P 2']  # Row and column of each patch in its picture.
  # The number of each patch's picture, from 1 on in a row of patches, and of its window;
  # 0 is padding.
  pictures: Int[Any, 'B P']
  windows: Int[Any, 'B P']
  # The place, in the order of windows, of each token in the order of the text, which goes
  # through a picture row by row.
  order: Int[Any, 'B F']


def cut(pixels: UInt8[np.ndarray, 'H W C'], config: VisionConfig) -> Picture:
  """Cuts a picture, whose sides are multiples of a token's, into its patches.

  Two frames of a film that are one picture lie behind each other, [H, W, 6].

  Raises:
    ValueError: It has more rows or columns of patches than the tower has embeddings for.
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
  """Rounds up to a few sizes, as each is compiled: windows times a power of 2."""
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
    The tokens' numbers, row by row, in the order of windows; and the window of each, from
    0 on. A grid of 3 x 3 in windows of 2 x 2 gives 0 1 3 4, 2 5, 6 7, 8.
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

  Each picture is put in the first row that has room for it. One that has fewer `channels`
  than the others repeats its frame; by default they are the most that one has.

  Returns:
    The batch, and the row of vision.features in which each picture's tokens begin; they
    are in the order of the text.

  Raises:
    ValueError: There is no room for a picture, or no row of whole windows has so many
      patches.
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
  """Writes a picture into a row of the batch, from patch `first` on."""
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


def list_places(named: Mapping[int, np.ndarray], side: int) -> dict[int, Grid]:
  """Lists the places of named pictures whose features follow each other."""
  places, first = {}, 0
  for first_id, pixels in named.items():
    place = Grid(first, pixels.shape[0] // side, pixels.shape[1] // side)
    places[first_id], first = place, first + place.count
  return places


def find(tokens: Int[np.ndarray, 'T'], places: Iterable[int]) -> np.ndarray:
  """Finds the columns in which pictures of these names begin."""
  return np.flatnonzero(np.isin(tokens, [*places]))


def locate(
  tokens: Int[np.ndarray, 'T'],
  positions: Int[np.ndarray, 'T'],
  ends: Int[np.ndarray, 'T'],
  places: Mapping[int, Grid],
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
