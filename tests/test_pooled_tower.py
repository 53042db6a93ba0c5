"""Gemma 4's tower and pictures; golden/make_gemma4_vision_golden.py has the numbers."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest
import safetensors.numpy

from agent_r1_jax import types
from agent_r1_jax.agent import picture_files, pictures
from agent_r1_jax.models import attention, decoder, sharding
from agent_r1_jax.models import rows as rows_lib
from agent_r1_jax.models.files import hf_config, tensor_layout, weights
from agent_r1_jax.models.pictures import picture_tokens

_GOLDEN = pathlib.Path(__file__).parent / 'golden'
_MODEL = _GOLDEN / 'decoder' / 'gemma4'


@functools.cache
def _model(name='gemma4'):
  return weights.load(_MODEL.with_name(name), dtype='float32')


@pytest.mark.parametrize('name', ['gemma4', 'gemma4_ahead'])
def test_gradients_of_the_tower_are_those_of_transformers(name):
  config, params = _model(name)
  folder = _MODEL.with_name(name)
  with np.load(folder / 'pictures.npz') as file:
    tokens = file['tokens_0'].astype(np.int32)
    shown = [picture_tokens.cut(file[f'pixels_{i}'], config.vision) for i in range(2)]
  batch, _ = picture_tokens.pack(shown, config.vision, rows=1, patches=9 * 48)
  index = np.full(len(tokens), -1, np.int32)
  index[tokens == config.vision.image_token_id] = np.arange(45)
  places = np.arange(len(tokens), dtype=np.int32)[None]
  seen = types.Pictures(np.repeat(places[..., None], 3, 2), index[None], patches=batch)
  sees = types.Segments(np.ones_like(places))
  rows = jax.tree.map(jnp.asarray, types.Rows(tokens[None], places, sees, seen))

  @jax.jit
  @jax.grad
  def differentiate(tower, params):
    x = decoder.hidden(params | {'vision': tower}, config, rows)
    return jax.nn.log_softmax(decoder.logits(params, config, x))[0, :, 5].mean()

  found, count = {'vision': differentiate(params['vision'], params)}, 0
  with np.load(folder / 'gradients.npz') as expected:
    for leaf in tensor_layout.list_leaves(config, False):
      if not leaf.path.startswith('vision/'):
        continue
      x = functools.reduce(lambda tree, key: tree[key], leaf.path.split('/'), found)
      for index, name in leaf.tensors.items():
        if (name := config.facts.write_name(name)) in expected:
          want = expected[name]
          want = want.reshape(len(want), -1).T if leaf.transposed else want
          part = np.asarray(x[index] if index else x)
          atol = 1e-4 * np.abs(want).max()
          want = want.reshape(part.shape)
          np.testing.assert_allclose(part, want, rtol=0, atol=atol, err_msg=name)
          count += 1
    assert count == len(expected) == 3 + 2 * 13


@pytest.mark.parametrize('number', range(3))
def test_patches_are_those_of_transformers(number):
  config = _model()[0].vision
  with np.load(_GOLDEN / 'gemma4_pictures.npz') as file:
    pixels, expected, places, most = (
      file[f'{name}_{number}'] for name in ('pixels', 'patches', 'positions', 'most')
    )
  reader = pictures.Reader(12, 0, int(most) * 144)
  shown = reader.resize(Image.fromarray(pixels))
  (columns, rows), size = places.max(0) + 1, config.patch_size
  assert shown.shape == (rows * size, columns * size, 3)
  cut = shown.reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4)
  np.testing.assert_array_equal(cut.reshape(len(expected), -1), expected)
  assert picture_files.fill(*pixels.shape[:2], 12, int(most) * 144) == (
    rows // 3,
    columns // 3,
  )


def test_a_long_picture_has_one_row_of_tokens():
  assert picture_files.fill(10, 1000, 48, 80 * 48**2) == (1, 80)
  assert picture_files.fill(1000, 10, 48, 70 * 48**2) == (70, 1)
  with pytest.raises(ValueError, match='one side 201 times the other'):
    picture_files.fill(10, 2010, 48, 280 * 48**2)


def test_a_picture_of_more_patches_than_have_embeddings_is_refused():
  config = _model()[0].vision
  with pytest.raises(ValueError, match='has 21 patches .* position_embedding_size is 20'):
    picture_tokens.cut(np.zeros((12, 84, 3), np.uint8), config)


@pytest.mark.parametrize('name', ['gemma4', 'gemma4_ahead'])
def test_an_export_has_the_names_of_transformers(tmp_path, name):
  source = _MODEL.with_name(name)
  config, params = weights.load(source)
  weights.save(tmp_path, config, params)
  want, found = (
    safetensors.numpy.load_file(folder / 'model.safetensors')
    for folder in (source, tmp_path)
  )
  assert want.keys() == found.keys()
  for name, x in want.items():
    np.testing.assert_array_equal(x, found[name], err_msg=name)
  assert hf_config.read(tmp_path) == config
  raw = json.loads((tmp_path / 'config.json').read_text())
  assert raw['text_config']['pad_token_id'] == 0  # There is no tokenizer.


def test_without_a_tower_the_language_model_is_read(tmp_path):
  raw = json.loads((_MODEL / 'config.json').read_text())
  (tmp_path / 'config.json').write_text(json.dumps(raw | {'vision_config': None}))
  config = hf_config.read(tmp_path)
  assert (config.family, config.vision) == ('gemma4_text', None)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'hidden_activation': 'gelu'}, "hidden_activation is 'gelu'; only 'gelu_py"),
    ({'head_dim': 16}, 'head_dim is 16; by the others it is 8'),
    ({'num_key_value_heads': 1}, 'num_key_value_heads is 1; by the others it is 2'),
    ({'rope_parameters': {'rope_theta': 1e4}}, 'rope_theta is 10000.0; only 100.0'),
    ({'pooling_kernel_size': 0}, 'pooling_kernel_size is 0; a positive int'),
  ],
)
def test_what_the_tower_does_not_compute_is_refused(tmp_path, changes, message):
  raw = json.loads((_MODEL / 'config.json').read_text())
  raw['vision_config'] |= changes
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  with pytest.raises(ValueError, match=message):
    hf_config.read(tmp_path)


def test_tokens_see_later_ones_of_their_picture_on_all_platforms(monkeypatch):
  """By blocks on a CPU, and by XLA's masks elsewhere, where pictures end blocks."""
  rng, T = np.random.default_rng(0), 256
  q, k, v = jnp.asarray(rng.normal(size=(3, 2, T, 2, 8)), jnp.float32)
  index = np.full((2, T), -1, np.int32)
  index[0, 50:120], index[0, 126:130], index[1, 3:250] = 0, 0, 0
  ids = np.ones((2, T), np.int32)
  ids[0, 128:] = 2  # What begins another text is another picture.
  places = np.tile(np.arange(T, dtype=np.int32), (2, 1))
  places[0, 128:] -= 128
  seen = types.Pictures(np.zeros((2, T, 3), np.int32), jnp.asarray(index))
  ahead = rows_lib.find_ahead(types.Rows(places, places, None, seen))
  local = attention.Local(jnp.asarray(True), jnp.asarray(places), ahead)

  def attend():
    rules = attention.Rules(window=9)
    sees = types.Segments(jnp.asarray(ids))
    return np.asarray(jax.jit(lambda q: attention.packed(q, k, v, sees, local, rules))(q))

  found = attend()
  # There without cuDNN, which takes 16 bits.
  monkeypatch.setattr(sharding, 'platform', lambda: 'gpu')
  np.testing.assert_allclose(attend(), found, rtol=0, atol=1e-5)
  row, t = np.divmod(np.arange(2 * T), T)
  shown = (index >= 0)[row, t][:, None] & (index >= 0)[row]
  run = np.cumsum(index < 0, axis=1)
  later = shown & (run[row, t][:, None] == run[row])
  near = (np.arange(T) <= t[:, None]) & (t[:, None] - np.arange(T) < 9)
  mask = (near | (later & (np.arange(T) > t[:, None]))) & (
    ids[row, t][:, None] == ids[row]
  )
  scores = np.einsum('bthd,bshd->bths', q, k).reshape(2 * T, 2, T) / 8**0.5
  weights = np.where(mask[:, None], np.exp(scores), 0.0)
  weights /= weights.sum(-1, keepdims=True)
  want = np.einsum('bths,bshd->bthd', weights.reshape(2, T, 2, T), v)
  np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)


def test_features_of_text_train_no_embedding_of_a_layer():
  """Tokens of pictures have the numbers of token 0, which they do not train."""
  config, params = _model()
  tokens = np.array([[3, 4, 5]], np.int32)
  index, features = np.array([[-1, 0, -1]]), np.ones((1, 24), np.float32)
  places = np.zeros((1, 3, 3), np.int32)
  rows = types.Rows(
    tokens,
    np.arange(3, dtype=np.int32)[None],
    types.Segments(np.ones_like(tokens)),
    types.Pictures(places, index, features),
  )
  rows = jax.tree.map(jnp.asarray, rows)

  @jax.jit
  @jax.grad
  def differentiate(inputs, params):
    return decoder.hidden(params | {'layer_inputs': inputs}, config, rows).sum()

  table = differentiate(params['layer_inputs'], params)['embed']['embedding']
  assert np.flatnonzero(np.abs(table).sum(1)).tolist() == [3, 5]
