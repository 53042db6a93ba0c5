"""Models that see, against transformers; golden/make_vision_golden.py has the numbers."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.agent import pictures
from agent_r1_jax.models import decoder, engine_params, kv_cache
from agent_r1_jax.models.files import weights
from agent_r1_jax.models.pictures import patch_layers, picture_tokens, vision

_GOLDEN = pathlib.Path(__file__).parent / 'golden'
_FAMILIES = ('qwen2_5_vl', 'qwen3_vl', 'gemma4')
# Where tokens of a picture see its later ones.
_ALL = (*_FAMILIES, 'gemma4_ahead')
# The grids of the pictures in each row; the last two of Qwen3-VL are of a film.
_GRIDS = {
  'qwen2_5_vl': (((3, 5), (6, 5)), ((2, 3),)),
  'qwen3_vl': (((3, 5), (6, 5)), ((2, 3), (2, 4), (2, 4))),
  **dict.fromkeys(('gemma4', 'gemma4_ahead'), (((3, 5), (6, 5)), ((2, 3),))),
}
_READER = pictures.Reader(8, 64, 10**6)
_T = 96


@functools.cache
def _model(family='qwen2_5_vl'):
  return weights.load(_GOLDEN / 'decoder' / family, dtype='float32')


@functools.cache
def _golden(family='qwen2_5_vl'):
  with np.load(_GOLDEN / 'decoder' / family / 'pictures.npz') as file:
    return dict(file)


@functools.cache
def _pictures(family='qwen2_5_vl'):
  config, golden = _model(family)[0], _golden(family)
  count = sum(map(len, _GRIDS[family]))
  shown = (golden[f'pixels_{i}'] for i in range(count))
  return [picture_tokens.cut(pixels, config.vision) for pixels in shown]


@functools.cache
def _features(family='qwen2_5_vl', rows=1, patches=0):
  """The features of the golden pictures, and where they begin."""
  config, params = _model(family)
  patches = patches or _count_patches(family)
  batch, starts = picture_tokens.pack(
    _pictures(family), config.vision, rows=rows, patches=patches
  )
  return _compute_features(params, config, batch), starts


def _count_patches(family):
  return 80 * _model(family)[0].vision.merge_size ** 2


_compute_features = jax.jit(vision.features, static_argnums=1)


def _row(number, family):
  """Tokens, coordinates, logits and index of a golden row."""
  vision, golden = _model(family)[0].vision, _golden(family)
  tokens = golden[f'tokens_{number}']
  grids, first = _GRIDS[family][number], (0, 2)[number]
  is_picture = np.isin(tokens, [vision.image_token_id, vision.video_token_id])
  starts = _features(family)[1][first : first + len(grids)]
  # Names of the pictures; tokens of pictures are not looked up.
  names = 10**6 + 1000 * np.arange(len(grids))
  ids = [name + np.arange(a * b) for name, (a, b) in zip(names, grids, strict=True)]
  tokens = tokens.astype(np.int32)
  tokens[is_picture] = np.concatenate(ids)
  places = {
    name: picture_tokens.Grid(start, *grid)
    for name, start, grid in zip(names.tolist(), starts, grids, strict=True)
  }
  n = len(tokens)
  index, where = picture_tokens.locate(tokens, np.arange(n), np.full(n, n), places)
  return tokens, where, golden[f'logits_{number}'], index


# The golden numbers of Gemma 4 are of float64.
_TOLERANCES = dict.fromkeys(('gemma4', 'gemma4_ahead'), 2e-5)


def _assert_close(actual, expected, tolerance=1e-5):
  scale = np.abs(expected).max()
  np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)


def _pack_rows(*numbers, family='qwen2_5_vl'):
  """Packs golden rows one after the other in a row of _T tokens; -1 is a text."""
  tokens, positions, ids = np.zeros((3, 1, _T), np.int32)
  places, index = np.zeros((1, _T, 3), np.int32), np.full((1, _T), -1, np.int32)
  start, expected = 0, []
  for i, number in enumerate(numbers, start=1):
    if number < 0:
      with np.load(_GOLDEN / 'decoder' / family / 'logits.npz') as file:
        row, logits = file['tokens_1'], file['logits_1']
      coordinates = np.tile(np.arange(len(row))[:, None], (1, 3))
      parts = row, coordinates, logits, np.full(len(row), -1)
    else:
      parts = _row(number, family)
    stop = start + len(parts[0])
    tokens[0, start:stop], places[0, start:stop], logits, index[0, start:stop] = parts
    positions[0, start:stop], ids[0, start:stop] = np.arange(stop - start), i
    expected.append(logits)
    start = stop
  return (tokens, positions, ids), (places, index), np.concatenate(expected)


@functools.partial(jax.jit, static_argnums=1)
def _logits(params, config, text, places, index, features):
  pictures = types.Pictures(places, index, features)
  x = decoder.hidden(params, config, tiny.rows(*text)._replace(pictures=pictures))
  return decoder.logits(params, config, x)


# Pictures become patches as in transformers.


@pytest.mark.parametrize('number', range(3))
def test_patches_are_those_of_transformers(number):
  config = tiny.VISION
  config = dataclasses.replace(config, patch_size=14, window_size=112)
  with np.load(_GOLDEN / 'pictures.npz') as file:
    pixels, expected, grid, bounds = (
      file[f'{name}_{number}'] for name in ('pixels', 'patches', 'grid', 'bounds')
    )
  reader = pictures.Reader(28, *map(int, bounds))
  picture = picture_tokens.cut(reader.resize(Image.fromarray(pixels)), config)
  assert picture.grid == (grid[1] // 2, grid[2] // 2)
  assert len(picture.patches) == len(expected) == 4 * picture.tokens
  batch, _ = picture_tokens.pack([picture], config, rows=1, patches=128)
  order = batch.order[0, : picture.tokens]
  found = np.asarray(patch_layers.normalise(jnp.asarray(batch.patches), config))[0]
  found = found.reshape(-1, 4, 3, 1, 196)[order].reshape(-1, 3, 1, 196)
  found = np.repeat(found, 2, axis=2).reshape(len(expected), -1)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_windows_are_neighbours():
  """3 x 5 tokens in windows of 2 x 2."""
  picture = _pictures()[0]
  batch, _ = picture_tokens.pack([picture] * 2, tiny.VISION, rows=1, patches=128)
  tokens = batch.coordinates[0, :60:4] // 2
  assert [tuple(x) for x in tokens.tolist()] == [
    *((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3), (0, 4), (1, 4)),
    *((2, 0), (2, 1), (2, 2), (2, 3), (2, 4)),
  ]
  sizes = np.bincount(batch.windows[0])
  assert sizes.tolist() == [8, *[16, 16, 8, 8, 8, 4] * 2]
  assert np.bincount(batch.pictures[0]).tolist() == [8, 60, 60]
  for row in (0, 1, 2):
    for column in range(5):
      assert tokens[batch.order[0, row * 5 + column]].tolist() == [row, column]


def test_what_does_not_fit_is_refused():
  first = _pictures()[0]
  with pytest.raises(ValueError, match='picture 1 has 60 patches, and no row of 64'):
    picture_tokens.pack([first] * 2, tiny.VISION, rows=1, patches=64)
  with pytest.raises(ValueError, match='patches is 100; give a multiple of the 16'):
    picture_tokens.pack([], tiny.VISION, rows=1, patches=100)


# Coordinates.


@pytest.mark.parametrize('family', _FAMILIES[:2])
@pytest.mark.parametrize('number', range(2))
def test_coordinates_are_those_of_transformers(family, number):
  _, found, _, index = _row(number, family)
  np.testing.assert_array_equal(found, _golden(family)[f'coordinates_{number}'])
  shown = np.isin(_golden(family)[f'tokens_{number}'], [93, 94])
  np.testing.assert_array_equal(index >= 0, shown)


def test_pictures_side_by_side_and_in_a_tree():
  """A text of two pictures; a branch that begins between them; another text."""
  places = {
    100: picture_tokens.Grid(0, 1, 2),
    200: picture_tokens.Grid(2, 3, 1),
  }
  tokens = np.array([100, 101, 200, 201, 202, 7, 8, 9, 7])
  positions = np.array([0, 1, 2, 3, 4, 5, 2, 3, 0])
  ends = np.array([8, 8, 6, 6, 6, 6, 8, 8, 9])
  index, found = picture_tokens.locate(tokens, positions, ends, places)
  assert index.tolist() == [0, 1, 2, 3, 4, -1, -1, -1, -1]
  assert found[:, 0].tolist() == [0, 0, 2, 2, 2, 5, 2, 3, 0]
  assert found[:, 1].tolist() == [0, 0, 2, 3, 4, 5, 2, 3, 0]
  assert found[:, 2].tolist() == [0, 1, 2, 2, 2, 5, 2, 3, 0]
  assert places[100].saved == 0 and picture_tokens.Grid(0, 2, 3).saved == 3


# The tower and the decoder compute what transformers does.


@pytest.mark.parametrize(
  ('family', 'rows', 'patches'),
  [
    ('qwen2_5_vl', 1, 320),
    ('qwen2_5_vl', 2, 128),
    ('qwen3_vl', 2, 256),
    ('gemma4', 2, 405),
  ],
)
def test_features_are_those_of_transformers(family, rows, patches):
  found, starts = _features(family, rows, patches)
  counts = [a * b for grids in _GRIDS[family] for a, b in grids]
  expected = np.split(_golden(family)['features'], np.cumsum(counts)[:-1])
  for start, part in zip(starts, expected, strict=True):
    _assert_close(found[start : start + len(part)], part)
  assert np.isfinite(found).all()  # padding too


def test_other_pictures_and_padding_change_nothing():
  config, params = _model()
  batch, _ = picture_tokens.pack(_pictures(), config.vision, rows=1, patches=320)
  padding = batch.pictures[0] == 0
  assert padding.sum() > 30
  batch.patches[0, padding] = 255
  batch.coordinates[0, padding] = 77
  batch.patches[0, batch.pictures[0] == 2] = 9
  found = np.asarray(_compute_features(params, config, batch))
  expected, (first, second, third) = _features()
  np.testing.assert_array_equal(found[first:second], expected[first:second])
  last = slice(third, third + 6)
  np.testing.assert_array_equal(found[last], expected[last])
  assert (found[second:third] != expected[second:third]).any()


def test_windows_by_blocks_are_windows_by_one_mask():
  rng = np.random.default_rng(0)
  q, k, v = rng.normal(size=(3, 2, 96, 2, 8)).astype(np.float32)
  ids = np.sort(rng.integers(1, 12, (2, 96)), axis=1)
  ids = np.where(np.arange(96)[None] < 90, ids, 0).astype(np.int32)
  size = int(max(np.bincount(row).max() for row in ids))
  size = next(n for n in (16, 32, 48) if n >= size)
  blocks = jax.jit(patch_layers.attend_windows, static_argnums=4)(q, k, v, ids, size)
  masked = jax.jit(patch_layers.attend)(q, k, v, ids, ids)
  np.testing.assert_allclose(blocks, masked, atol=1e-6)


@pytest.mark.parametrize('family', _ALL)
@pytest.mark.parametrize('rows', [(0,), (1, -1), (-1, 0)])
def test_logits_are_those_of_transformers(family, rows):
  config, params = _model(family)
  text, where, expected = _pack_rows(*rows, family=family)
  found = _logits(params, config, text, *where, _features(family)[0])[0]
  _assert_close(found[: len(expected)], expected, _TOLERANCES.get(family, 1e-5))
  assert np.isfinite(found).all()


@pytest.mark.parametrize(
  ('family', 'chunk'), [*((family, 8) for family in _FAMILIES), ('gemma4_ahead', 64)]
)
def test_the_cache_gives_the_logits_of_transformers(family, chunk):
  """In chunks of 8, which cut pictures; the last tokens are decoded one by one."""
  config, params = _model(family)
  unstack = jax.jit(engine_params.unstack, static_argnums=1)
  layers, features = unstack(params, config), _features(family)[0]
  rows = [_row(0, family), _row(1, family)]
  slots, cache = 80, kv_cache.empty(config, 2, 80)
  lengths = [len(row[0]) for row in rows]
  tokens, places = np.zeros((2, slots), np.int32), np.zeros((2, slots, 3), np.int32)
  index = np.full((2, slots), -1, np.int32)
  positions = np.full((2, slots), kv_cache.NOWHERE)
  for b, (length, row) in enumerate(zip(lengths, rows, strict=True)):
    tokens[b, :length], places[b, :length], _, index[b, :length] = row
    positions[b, :length] = np.arange(length)
  positions = positions.astype(np.int32)

  @jax.jit
  def extend(rows, cache):
    x, cache = decoder.extend(layers, config, rows, cache)
    return decoder.logits(layers, config, x), cache

  found, first = [], 64
  assert (index[:, first:] < 0).all() and first % 8 == 0
  for start in [*range(0, first, chunk), *range(first, lengths[0])]:
    part = slice(start, start + (chunk if start < first else 1))
    where = types.Pictures(places[:, part], index[:, part], features)
    if start >= first:  # A decode has coordinates only.
      where = types.Pictures(places[:, part])
    text = types.Rows(tokens[:, part], positions[:, part], pictures=where)
    out, cache = extend(text, cache)
    found.append(out)
  found = np.concatenate(found, axis=1)
  for logits, length, row in zip(found, lengths, rows, strict=True):
    _assert_close(logits[:length], row[2], _TOLERANCES.get(family, 1e-5))


# test_pooled_tower.py has those of Gemma 4.
@pytest.mark.parametrize('family', _FAMILIES[:2])
def test_gradients_reach_the_tower_and_the_decoder(family):
  config, params = _model(family)
  config = dataclasses.replace(config, remat='full')
  text, where, _ = _pack_rows(0, family=family)
  batch, _ = picture_tokens.pack(
    _pictures(family), config.vision, rows=1, patches=_count_patches(family)
  )

  @jax.jit
  def gradient(params):
    def loss(params):
      logits = _logits(
        params, config, text, *where, vision.features(params, config, batch)
      )
      return jnp.mean(jax.nn.log_softmax(logits)[0, :60, 5])

    return jax.grad(loss)(params)

  found = gradient(params)
  for path, x in jax.tree_util.tree_leaves_with_path(found):
    assert np.isfinite(x).all(), path
    # A bias of keys adds the same to all scores of a query; that of M-RoPE's is turned.
    if 'qkv' not in jax.tree_util.keystr(path):
      assert np.abs(x).max() > 1e-7, path
  # The embeddings of pictures' tokens are not read, and token 0 stands in none of them.
  assert not np.asarray(found['embed']['embedding'][0]).any() or (text[0] == 0).any()


@pytest.mark.parametrize(
  ('family', 'of'), [*zip(_FAMILIES, ('qwen2', 'qwen3', 'gemma4_text'), strict=True)]
)
def test_text_is_that_of(family, of):
  """Without pictures, and with coordinates that are the positions."""
  config, params = _model(family)
  plain = dataclasses.replace(config, family=of, vision=None, mrope_section=())
  text, (places, _), _ = _pack_rows(-1, -1, family=family)
  hidden = jax.jit(decoder.hidden, static_argnums=1)
  rows = tiny.rows(*text)
  expected = hidden(params, plain, rows)
  np.testing.assert_array_equal(hidden(params, config, rows), expected)
  found = hidden(params, config, rows._replace(pictures=types.Pictures(places)))
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize('family', _FAMILIES)
def test_bfloat16_is_close_and_the_sampler_has_the_learners_features(family):
  config, params = _model(family)
  half = dataclasses.replace(config, dtype='bfloat16')
  batch, _ = picture_tokens.pack(
    _pictures(family), config.vision, rows=1, patches=_count_patches(family)
  )
  learner = _compute_features(params, half, batch)
  unstack = jax.jit(engine_params.unstack, static_argnums=1)
  sampler = _compute_features(unstack(params, half), half, batch)
  assert learner.dtype == jnp.bfloat16
  np.testing.assert_array_equal(learner, sampler)
  _assert_close(np.asarray(learner, np.float32), _features(family)[0], 5e-2)
