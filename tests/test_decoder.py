"""The decoder against transformers: golden/make_decoder_golden.py made the numbers."""

import dataclasses
import functools
import pathlib

import jax
import numpy as np
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.models import decoder, engine_params, families, kv_cache
from agent_r1_jax.models.files import weights

_GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'decoder'
_FAMILIES = (*families.FAMILIES, 'gemma4_experts')


@functools.cache
def _model(family):
  """Config, float32 params, and (tokens, logits) of each golden row."""
  config, params = weights.load(_GOLDEN / family, dtype='float32')
  with np.load(_GOLDEN / family / 'logits.npz') as file:
    rows = [(file[f'tokens_{i}'], file[f'logits_{i}']) for i in range(3)]
  return config, params, rows


@functools.partial(jax.jit, static_argnums=1)
def _jitted(params, config, tokens, positions, segment_ids):
  x = decoder.hidden(params, config, tiny.rows(tokens, positions, segment_ids))
  return decoder.logits(params, config, x)


def _logits(params, config, *rows):
  """Logits [rows, T, V]; a row is a list of token arrays, packed one by one."""
  # Always of one size, so that a config is compiled once.
  tokens, positions, segment_ids = np.zeros((3, 5, 203), np.int32)
  for b, row in enumerate(rows):
    start = 0
    for i, part in enumerate(row, start=1):
      stop = start + len(part)
      tokens[b, start:stop] = part
      positions[b, start:stop] = np.arange(len(part))
      segment_ids[b, start:stop] = i
      start = stop
  logits = _jitted(params, config, tokens, positions, segment_ids)
  assert logits.dtype == np.float32
  return np.asarray(logits[: len(rows)])


def _assert_close(actual, expected):
  scale = np.abs(expected).max()
  np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize('family', _FAMILIES)
def test_logits_are_those_of_transformers(family):
  """Of texts alone in a row, and of several: they do not see each other.

  The longest comes last, so that each text but one begins inside the row; the last row
  has more of them than fit a block of attention.
  """
  config, params, rows = _model(family)
  several = [tokens for tokens, _ in rows[::-1]]
  packed = np.concatenate([logits for _, logits in rows[::-1]])
  alone = [[tokens] for tokens, _ in rows]
  actual = _logits(params, config, *alone, several, several * 3)
  expected = [logits for _, logits in rows] + [packed, np.concatenate([packed] * 3)]
  for found, wanted in zip(actual, expected, strict=True):
    _assert_close(found[: len(wanted)], wanted)
  assert np.isfinite(actual).all()  # padding too


@pytest.mark.parametrize('family', _FAMILIES)
def test_the_cache_gives_the_logits_of_transformers(family):
  """The rows are fed 12 tokens at a time; a shorter row stops writing at its end.

  Layers that slide, by 7 tokens at most, have a ring of 20 slots.
  """
  config, params, rows = _model(family)

  @jax.jit
  def extend(params, rows, cache):
    layers = engine_params.unstack(params, config)
    x, cache = decoder.extend(layers, config, rows, cache)
    return decoder.logits(layers, config, x), cache

  slots, cache, found = 48, kv_cache.empty(config, len(rows), 48, 'model', 20), []
  tokens = np.array([np.resize(tokens, slots) for tokens, _ in rows])
  places = np.array([np.arange(slots)] * len(rows))
  for row, (text, _) in enumerate(rows):
    places[row, len(text) :] = kv_cache.NOWHERE
  for start in range(0, slots, 12):
    chunk = slice(start, start + 12)
    given = types.Rows(tokens[:, chunk], places[:, chunk])
    logits, cache = extend(params, given, cache)
    found.append(logits)
  found = np.concatenate(found, axis=1)
  for logits, (text, expected) in zip(found, rows, strict=True):
    _assert_close(logits[: len(text)], expected)


def test_the_golden_llama_uses_each_branch_of_its_rope_scaling():
  config, params, ((tokens, expected), *_) = _model('llama')
  scaling = config.rope_scaling
  wavelengths = 2 * np.pi * config.rope_theta ** (np.arange(0, 8, 2) / 8)
  original = scaling['original_max_position_embeddings']
  bounds = [original / scaling['high_freq_factor'], original / scaling['low_freq_factor']]
  assert set(np.digitize(wavelengths, bounds)) == {0, 1, 2}
  assert len(tokens) > original
  plain = dataclasses.replace(config, rope_scaling=None)
  unscaled = _logits(params, plain, [tokens])[0]
  assert np.abs(unscaled[:48] - expected).max() > 0.1


@pytest.mark.parametrize('family', _FAMILIES)
def test_init_makes_the_tree_that_load_reads(family):
  config, params, _ = _model(family)
  made = jax.eval_shape(lambda key: decoder.init(config, key), jax.random.key(0))

  def describe(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

  assert describe(made) == describe(params)


def test_config_reaches_the_forward_pass():
  """bfloat16 activations give bfloat16-close logits."""
  config, params, ((tokens, expected), *_) = _model('qwen3')
  half = _logits(params, dataclasses.replace(config, dtype='bfloat16'), [tokens])[0]
  error = np.abs(half[:48] - expected).max() / np.abs(expected).max()
  assert 1e-4 < error < 5e-2


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'window': 5}, r'window is 5, and sliding \(\)'),
    ({'sliding': (True, False)}, 'window is 0, and sliding'),
    ({'sliding': (True,), 'window': 5}, 'sliding is of 1 layers'),
    ({'mlp_dim': 0}, 'mlp_dim is 0; a llama has some'),
    ({'family': 'qwen3_moe'}, 'num_experts is 0; a qwen3_moe has some'),
  ],
)
def test_a_shape_that_contradicts_itself_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_model('llama')[0], **fields)
