"""What the decoder derives from its input rows (types.Rows).

Letters as in decoder.py; here F is features of pictures' tokens.
"""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agent_r1_jax import types
from agent_r1_jax.models.decoder_config import DecoderConfig
from agent_r1_jax.models.pictures import vision


def continue_text(
  tokens: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
  saved: Int[Array, 'B'] | None,
) -> types.Rows:
  """Makes rows of the next tokens of cached sequences.

  `saved` is how far each sequence's coordinates lag behind its positions; None if no
  sequence can have pictures.
  """
  if saved is None:
    return types.Rows(tokens, positions)
  turned_BT1 = (positions - saved[:, None])[..., None]
  pictures = types.Pictures(jnp.repeat(turned_BT1, 3, axis=2))
  return types.Rows(tokens, positions, pictures=pictures)


def look(params: dict[str, Any], config: DecoderConfig, rows: types.Rows) -> types.Rows:
  """Replaces pictures' patches by their features, computed by the vision tower."""
  if rows.pictures is None or rows.pictures.patches is None:
    return rows
  coordinates, index, _, patches = rows.pictures
  assert index is not None
  features_FD = vision.features(params, config, patches)
  # Each row of patches has the same number of features.
  before_B1 = jnp.arange(len(index))[:, None] * (len(features_FD) // len(index))
  index_BT = jnp.where(index < 0, -1, index + before_B1)
  return rows._replace(pictures=types.Pictures(coordinates, index_BT, features_FD))


def find_vocabulary_ids(rows: types.Rows) -> Int[Array, 'B T']:
  """Replaces pictures' tokens, which lie outside the vocabulary, by token 0."""
  seen_BT = find_seen(rows)
  return rows.tokens if seen_BT is None else jnp.where(seen_BT, 0, rows.tokens)


def find_seen(rows: types.Rows) -> Bool[Array, 'B T'] | None:
  """Finds tokens of pictures; None if there can be none."""
  if rows.pictures is None or rows.pictures.index is None:
    return None
  return rows.pictures.index >= 0


def find_ahead(rows: types.Rows) -> Int[Array, 'B T'] | None:
  """Counts the tokens of pictures that stand behind each one, without a text between."""
  seen_BT = find_seen(rows)
  if seen_BT is None:
    return None
  T = seen_BT.shape[1]
  column_1T = jnp.arange(T)[None]
  text_BT = jnp.where(seen_BT, T, column_1T)
  return jax.lax.cummin(text_BT, axis=1, reverse=True) - column_1T - seen_BT


def put_features(x_BTD: Float[Array, 'B T D'], rows: types.Rows) -> Float[Array, 'B T D']:
  """Replaces the embeddings of pictures' tokens by the pictures' features."""
  pictures = rows.pictures
  if pictures is None or pictures.index is None or pictures.features is None:
    return x_BTD
  first_FD = pictures.features[:, : x_BTD.shape[-1]]
  seen_BTD = first_FD[jnp.maximum(pictures.index, 0)].astype(x_BTD.dtype)
  return jnp.where(pictures.index[..., None] < 0, x_BTD, seen_BTD)


def add_features(
  x_BTD: Float[Array, 'B T D'], rows: types.Rows, layer: Any
) -> Float[Array, 'B T D']:
  """Adds a layer's features of pictures' tokens to the hidden states (DeepStack).

  Only the first layers have such features. `layer` is the layer's number, traced inside a
  scan; None if no layer has any.
  """
  pictures = rows.pictures
  if layer is None or not pictures or pictures.index is None or pictures.features is None:
    return x_BTD
  index_BT, D = pictures.index, x_BTD.shape[-1]
  features_FnD = pictures.features.reshape(len(pictures.features), -1, D)

  def add(x_BTD: Array) -> Array:
    deep_BTD = features_FnD[jnp.maximum(index_BT, 0), layer + 1].astype(x_BTD.dtype)
    return x_BTD + jnp.where(index_BT[..., None] < 0, 0, deep_BTD)

  adds = layer + 1 < features_FnD.shape[1]
  if isinstance(adds, bool):
    return add(x_BTD) if adds else x_BTD
  # Other layers skip the gather, and its scatter in the backward pass.
  return jax.lax.cond(adds, add, lambda x_BTD: x_BTD, x_BTD)


def get_coordinates(rows: types.Rows) -> Int[Array, 'B T 3'] | None:
  """Returns the three M-RoPE coordinates of each token; None if they cannot differ."""
  return rows.pictures.coordinates if rows.pictures else None


def leave_to_layers(rows: types.Rows, config: DecoderConfig) -> types.Rows:
  """Drops the fields that are used before the layers or differ between layers."""
  deep = config.vision is not None and config.vision.deep_count > 0
  pictures = rows.pictures if deep or config.sees_ahead else None
  return types.Rows(rows.tokens, rows.positions, rows.sees, pictures)


def find_text(rows: types.Rows) -> Bool[Array, 'B T']:
  """Marks the tokens of packed rows that are not padding."""
  if isinstance(rows.sees, types.Segments):
    return rows.sees.ids > 0
  assert rows.sees is not None
  ends_BT = rows.sees.ends
  after_BT = ends_BT > jnp.arange(1, ends_BT.shape[1] + 1)[None]
  return after_BT | (rows.positions > 0)


def take_previous(
  x_BTD: Float[Array, 'B T D'], rows: types.Rows
) -> Float[Array, 'B T D']:
  """Gathers for each token the hidden state of the token before it, which predicts it.

  A segment's first token has no predecessor; its entry is meaningless.
  """
  if isinstance(rows.sees, types.Tree):
    return jnp.take_along_axis(x_BTD, rows.sees.parents[:, :, None], axis=1)
  return jnp.pad(x_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))
