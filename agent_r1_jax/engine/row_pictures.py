"""Pictures in the engine: their features and coordinates for prefills.

A picture's features are computed once per policy and then cached for all sequences that
show it, such as a group's. The host copies the features of each prefill's tokens to the
device: 2 or 4 bytes per number of an embedding.

Letters: M entries of a call, T tokens of one prefill, D embed.
"""

import collections
from collections.abc import Sequence
import functools
from typing import Any
import weakref

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.engine import rows as rows_lib
from agent_r1_jax.models import decoder, kv_cache, sharding
from agent_r1_jax.models.pictures import picture_tokens, vision

_KEPT = 1 << 26  # Maximum size of cached features, in numbers: 256 MiB in float32.


class RowPictures:
  """The pictures of a replica's sequences."""

  def __init__(self, config: decoder.DecoderConfig, mesh: Mesh | None):
    """Starts without pictures; the policy's parameters are on `mesh`."""
    assert config.vision is not None
    self._config, self._mesh, self._side = config, mesh, config.vision.token_size
    # (version of the policy, first id of a picture) -> [n, D], least recently used first.
    self._features = collections.OrderedDict[tuple[Any, int], np.ndarray]()
    self._numbers = 0
    # The pictures of each sequence, by their first ids.
    self._shown = weakref.WeakKeyDictionary[request_lib.Sequence, dict[int, np.ndarray]]()

  def list_ids(self, prompt: types.Prompt) -> np.ndarray:
    """Lists the token ids that stand for a prompt's pictures."""
    ids = [types.make_picture_ids(x, self._side) for x in prompt.pictures]
    return np.concatenate([np.zeros(0, np.int32), *ids])

  def check(self, request: request_lib.Request, prefill_tokens: int) -> None:
    """Raises ValueError if the tokens end in a picture, which a decode cannot compute.

    Also if a picture's tokens see each other and are too many for one prefill.
    """
    parent, ends = request.parent, [request.prompt.tokens]
    if isinstance(parent, request_lib.Fork):
      ends.append(parent.sequence.tokens[: parent.length])
    if any(len(x) and x[-1] >= types.FIRST_PICTURE_ID for x in ends):
      raise ValueError(
        'the tokens, or those of the fork, end in a picture: a decode, which computes '
        'the last token, sees none; add the token after it.'
      )
    if self._config.sees_ahead:
      self._check_sizes(request.prompt, prefill_tokens)

  def _check_sizes(self, prompt: types.Prompt, most: int) -> None:
    """Raises ValueError for a picture whose tokens do not fit one prefill."""
    text = np.flatnonzero(prompt.tokens < types.FIRST_PICTURE_ID)
    between = np.diff(np.concatenate([[-1], text, [len(prompt)]])) - 1
    if (longest := int(between.max())) > most:
      raise ValueError(
        f'engine.prefill_tokens is {most}, and a picture has {longest} tokens, which see '
        f'each other and are prefilled together: make it at least {longest}, or '
        'max_soft_tokens smaller.'
      )

  def add(self, sequence: request_lib.Sequence, request: request_lib.Request) -> None:
    """Records the pictures of a sequence after a request's tokens were appended to it."""
    parent = request.parent
    before = parent.sequence if isinstance(parent, request_lib.Fork) else sequence
    new = picture_tokens.name(request.prompt.pictures, self._side)
    self._shown[sequence] = self._shown.get(before, {}) | new
    places = self._list_places(sequence)
    begins = picture_tokens.find(sequence.tokens, places)
    sequence.saved = sum(places[name].saved for name in sequence.tokens[begins].tolist())

  def _list_places(
    self, sequence: request_lib.Sequence
  ) -> dict[int, picture_tokens.Grid]:
    return picture_tokens.list_places(self._shown[sequence], self._side)

  def look(
    self,
    params: decoder.Params,
    version: Any,
    cached: Sequence[rows_lib.Row],
    rows: types.Rows,
  ) -> types.Rows:
    """Adds the features and coordinates of pictures to the rows of a prefill.

    Args:
      params: The policy's parameters, as decoder.extend takes them.
      version: The policy's version.
      cached: The cache rows of the first entries.
      rows: The next tokens, from active_request.make_prefill_batch.
    """
    positions_MT = np.asarray(rows.positions)
    M, T = positions_MT.shape
    index = np.full((M, T), -1, np.int32)
    coordinates = np.repeat(positions_MT[..., None], 3, axis=2)
    dtype = jnp.dtype(self._config.dtype)
    assert self._config.vision is not None
    features = np.zeros((M * T, self._config.vision.feature_dim), dtype)
    for m, row in enumerate(cached):
      if not (sequence := row.sequence) or not self._shown[sequence]:
        continue
      n, positions = len(sequence), np.arange(len(sequence))
      places = self._list_places(sequence)
      found = picture_tokens.locate(sequence.tokens, positions, np.full(n, n), places)
      part = positions_MT[m, positions_MT[m] < kv_cache.NOWHERE]
      into = slice(len(part))
      source, coordinates[m, into] = found[0][part], found[1][part]
      seen = np.flatnonzero(source >= 0)
      if len(seen):
        index[m, seen] = places_F = m * T + seen
        features[places_F] = self._compute(params, version, sequence)[source[seen]]
    arrays: Any = coordinates, index, features  # jit takes numpy arrays too.
    return rows._replace(pictures=types.Pictures(*arrays))

  def _compute(self, params, version, sequence: request_lib.Sequence) -> np.ndarray:
    """Returns the features of all pictures of a sequence, [n, D], cached or computed."""
    kept, shown = self._features, self._shown[sequence]
    names = [(version, name) for name in shown]
    for name, pixels in zip(names, shown.values(), strict=True):
      if name not in kept:
        kept[name] = self._see(params, pixels)
        self._numbers += kept[name].size
      kept.move_to_end(name)
    found = np.concatenate([kept[name] for name in names])
    while self._numbers > _KEPT and len(kept) > len(names):
      self._numbers -= kept.popitem(last=False)[1].size
    return found

  def _see(self, params, pixels: np.ndarray) -> np.ndarray:
    """Computes the features of one picture, [n, D]."""
    config: Any = self._config.vision
    cut = picture_tokens.cut(pixels, config)
    room = picture_tokens.round_up(len(cut.patches), config)
    batch, _ = picture_tokens.pack([cut], config, rows=1, patches=room)
    with sharding.use_mesh(self._mesh):
      return np.asarray(_features(params, batch, config=self._config))[: cut.tokens]


@functools.partial(jax.jit, static_argnames='config')
def _features(params, batch, *, config):
  return vision.features(params, config, batch)
