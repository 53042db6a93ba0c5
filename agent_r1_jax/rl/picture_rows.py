"""Adds pictures to packed rows.

Each packed row gets a row of patches with every picture of its sequences once: the
members of a group, which share a row, also share the pictures of their prompt.

Letters: R packed rows, T tokens of each, P patches of each.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.models.pictures import picture_tokens
from agent_r1_jax.models.pictures.vision_config import VisionConfig


def add(
  rows: types.Rows, pictures: Sequence[np.ndarray], config: VisionConfig | None
) -> types.Rows:
  """Returns the rows with the pictures that their tokens show, if there are any.

  Raises:
    ValueError: There are pictures, but no `config` of a vision tower.
  """
  if not pictures:
    return rows
  if config is None:
    raise ValueError(
      'the texts have pictures, and the batches are made without the shape of a vision '
      'tower: give MicrobatchShape(vision=model.vision).'
    )
  # NumPy arrays until the learner puts them on the mesh.
  sees: Any = rows.sees
  ends = sees.ends if isinstance(sees, types.Tree) else _find_ends(sees.ids)
  text: Any = rows.tokens, rows.positions, ends
  named = picture_tokens.name(pictures, config.token_size)
  shown_by_row = [_list_shown(tokens, named) for tokens in text[0]]
  made = {x: picture_tokens.cut(pixels, config) for x, pixels in named.items()}
  room = picture_tokens.round_up(
    max(sum(len(made[x].patches) for x in row) for row in shown_by_row), config
  )
  channels = max(pixels.shape[2] for pixels in pictures)  # 6 for films: two frames.
  patches, index, coordinates = [], [], []
  for tokens, positions, ends, shown in zip(*text, shown_by_row, strict=True):
    packed, starts = picture_tokens.pack(
      [made[x] for x in shown], config, rows=1, patches=room, channels=channels
    )
    places = {
      x: picture_tokens.Grid(start, *made[x].grid)
      for x, start in zip(shown, starts, strict=True)
    }
    found = picture_tokens.locate(tokens, positions, ends, places)
    patches.append(packed)
    index.append(found[0])
    coordinates.append(found[1])
  arrays: Any = np.stack(coordinates), np.stack(index)
  joined = jax.tree.map(lambda *x: np.concatenate(x), *patches)
  return rows._replace(pictures=types.Pictures(*arrays, patches=joined))


def _list_shown(tokens: np.ndarray, named: Mapping[int, np.ndarray]) -> list[int]:
  """Lists the pictures that a row shows, each once."""
  return [*dict.fromkeys(tokens[picture_tokens.find(tokens, named)].tolist())]


def _find_ends(segment_ids: np.ndarray) -> np.ndarray:
  """Finds the column after the end of each token's segment, [R, T]."""
  R, T = segment_ids.shape
  last = np.ones((R, T), bool)
  last[:, :-1] = segment_ids[:, 1:] != segment_ids[:, :-1]
  # From the right: the first end at the token or after it.
  ends = np.where(last, np.arange(1, T + 1), T)
  return np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
