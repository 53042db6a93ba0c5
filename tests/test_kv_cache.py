"""kv_cache.py: a cache of 8 bits, and engines and runs that sample with it."""

import dataclasses
import functools

import clients
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.models import attention, decoder, engine_params, kv_cache
from agent_r1_jax.train.plan import footprint, setup

_SHAPE = tiny.config('qwen2', 1)
_S = clients.SLOTS


def _dequantise(layer: kv_cache.LayerCache) -> tuple[np.ndarray, np.ndarray]:
  """The numbers that keys and values of 8 bits stand for."""
  assert layer.scales
  slots = zip((layer.keys, layer.values), layer.scales, strict=True)
  keys, values = (
    np.asarray(x, np.float32) * np.asarray(scale)[..., None] for x, scale in slots
  )
  return keys, values


def _fill(B: int, T: int, K: int, S: int, H: int):
  """Random keys and values of many sizes, written from slot 0 and slot 1 on."""
  shape = dataclasses.replace(_SHAPE, num_kv_heads=K, head_dim=H)
  rng = np.random.default_rng(0)
  sizes = np.float32(10.0) ** rng.integers(-3, 3, (2, B, T, K, 1))
  numbers = (sizes * rng.normal(size=(2, B, T, K, H))).astype(np.float32)
  numbers[0, 0, 1, 0] = 0
  k, v = numbers
  positions = np.arange(T)[None] + np.arange(B)[:, None]
  layer = kv_cache.empty(shape, B, S, 'int8')[0]
  return jax.jit(kv_cache.write)(layer, k, v, positions), k, v, positions


def test_each_slot_of_a_head_is_rounded_to_255_numbers():
  layer, k, v, positions = _fill(B=2, T=7, K=3, S=8, H=5)
  assert layer.keys.dtype == layer.values.dtype == jnp.int8
  assert layer.scales and {x.dtype.name for x in layer.scales} == {'float32'}
  assert {x.shape for x in layer.scales} == {(2, 3, 8)}  # A TPU pads no last axis of 3.
  for found, scale, x in zip(_dequantise(layer), layer.scales, (k, v), strict=True):
    at = lambda y, b: np.moveaxis(np.asarray(y)[b], 0, 1)[positions[b]]
    for b in range(2):
      most = np.abs(x[b]).max(-1)
      expected = np.where(most > 0, most / np.float32(127), 1)
      np.testing.assert_allclose(at(scale, b), expected, rtol=1e-6)
      assert (np.abs(at(found, b) - x[b]) <= 0.5001 * expected[..., None]).all()
      assert np.abs(at(found, b) - x[b]).max() > 0
  # What is past the last slot is not written.
  more = jax.jit(kv_cache.write)(layer, k[:, :1], v[:, :1], np.full((2, 1), 8))
  jax.tree.map(np.testing.assert_array_equal, more, layer)


@pytest.mark.parametrize(
  ('dtype', 'rules'),
  [
    ('float32', attention.Rules()),
    ('float32', attention.Rules(window=4, cap=2.0)),
    ('bfloat16', attention.Rules()),
  ],
)
def test_attention_is_that_over_dequantised_keys_and_values(dtype, rules):
  layer, *_ = _fill(B=2, T=20, K=3, S=24, H=16)
  assert layer.scales
  k_scale, v_scale = layer.scales
  # Keys of ordinary sizes, or the largest alone would be seen; values differ as they do.
  k_scale = np.full(k_scale.shape, 0.02, np.float32)
  layer = layer._replace(scales=(k_scale, v_scale))
  q = np.random.default_rng(0).normal(size=(2, 3, 6, 16)).astype(jnp.dtype(dtype))
  positions = np.array([[0, 1, 2], [17, 18, 19]])
  attend = jax.jit(attention.cached, static_argnums=4)
  found = attend(q, layer.keys, layer.values, positions, rules, layer.scales)
  plain = attend(q.astype(np.float32), *_dequantise(layer), positions, rules)
  assert found.dtype == dtype
  plain = np.asarray(plain)
  far = np.abs(np.float32(found) - plain).max(-1) / np.abs(plain).max(-1)
  assert far.max() < (1e-5 if dtype == 'float32' else 0.02)


@pytest.mark.parametrize('family', ['gemma2', 'qwen3_moe'])
def test_logits_are_those_of_dequantised_keys_and_values(monkeypatch, family):
  """Through the decoder, in two calls; windows, caps and experts are as ever."""
  shape = tiny.config(family, 1)
  if family == 'gemma2':
    shape = dataclasses.replace(shape, sliding=(True,), window=5, attention_cap=1.0)
  unstack = jax.jit(engine_params.unstack, static_argnums=1)
  params = unstack(tiny.params(shape), shape)
  tokens = jnp.asarray(clients.tokens(0, 24)).reshape(2, 12)
  positions = jnp.tile(jnp.arange(12), (2, 1))

  def compute(cache):
    found = []
    for part in (slice(0, 9), slice(9, 12)):
      rows = types.Rows(tokens[:, part], positions[:, part])
      x, cache = decoder.extend(params, shape, rows, cache)
      found.append(decoder.logits(params, shape, x))
    return jnp.concatenate(found, axis=1), cache

  found, cache = jax.jit(compute)(kv_cache.empty(shape, 2, 16, 'int8'))
  write = kv_cache.write

  def write_dequantised(layer, keys, values, *where):
    rounded = map(kv_cache.round_heads, (keys, values))
    return write(layer, *(x * scale[..., None] for x, scale in rounded), *where)

  monkeypatch.setattr(kv_cache, 'write', write_dequantised)
  expected, plain = jax.jit(lambda x: compute(x))(kv_cache.empty(shape, 2, 16))
  np.testing.assert_allclose(found, expected, atol=2e-5)
  jax.tree.map(np.testing.assert_array_equal, cache[0].experts, plain[0].experts)
  for x, y in zip(_dequantise(cache[0]), plain[0][:2], strict=True):
    np.testing.assert_allclose(x, y, atol=1e-6)


@functools.cache
def _engine():
  return tiny.engine(tiny.params(_SHAPE), shape=_SHAPE, cache='int8', **clients.EXACT)


@functools.partial(jax.jit, static_argnames='numbers')
def _score(params, tokens, numbers='int8'):
  """The log-probs of a text that one call computes, [S]; what follows it is dropped."""
  params, at = engine_params.unstack(params, _SHAPE), jnp.arange(_S)[None]
  cache = kv_cache.empty(_SHAPE, 1, _S, numbers)
  x, _ = decoder.extend(params, _SHAPE, types.Rows(tokens[None], at), cache)
  every = jax.nn.log_softmax(decoder.logits(params, _SHAPE, x))[0, :-1]
  return jnp.take_along_axis(every, tokens[1:, None], axis=1)[:, 0]


def _assert_scored(tokens, logprobs, where):
  """They are those of one fresh prefill, and not those of the learner's numbers."""
  params = tiny.params(_SHAPE)
  padded = jnp.asarray(np.pad(tokens, (0, _S - len(tokens))))
  far = lambda x: np.abs(np.asarray(x)[: len(tokens) - 1] - logprobs[1:])[where[1:]]
  # A number between two integers may be rounded to the other one by another program.
  off = far(_score(params, padded))
  assert np.median(off) < 2e-6 and off.max() < 1e-3, off
  assert np.median(far(_score(params, padded, 'model'))) > 1e-4


def test_turns_shared_prefixes_and_forks_are_one_fresh_prefill():
  """Texts of several calls and copies say what one call says."""
  played = clients.run(_engine(), range(8, 12))  # They share a prompt of 19 tokens.
  for text in played.values():
    _assert_scored(text.tokens, text.behaviour_logprobs, text.action_mask)
  prompt = clients.tokens(7, 40)

  async def fork():
    ask = lambda *args, **fields: _engine().submit(clients.request(*args, **fields))
    first = ask(prompt, **clients.ENDLESS)
    await first
    other = ask(
      prompt[:3], request_lib.Fork(first.sequence, 30), key=1, score_prompt=False
    )
    reply = await other
    scored = ask(prompt, score_prompt=True)
    await scored
    return other.sequence.tokens, reply.logprobs, scored.prompt.logprobs

  with tiny.compilations() as compiled:
    tokens, logprobs, scored = tiny.within(_engine().run, [fork()])[0]
  assert len(compiled) <= 1  # The prefill that scores.
  n = len(tokens) - len(logprobs)
  assert n == 33
  said = np.arange(len(tokens)) >= n
  _assert_scored(tokens, np.pad(logprobs, (n, 0)), said)
  _assert_scored(prompt, scored, np.arange(40) > 0)


def test_a_runs_engine_has_it():
  config = tiny.run_config(rows=2, slots=16, prefill_rows=2, prefill_tokens=8, bucket=16)
  config = tiny.run_config(config, cache='int8')
  engine = setup.make_engine(config, _SHAPE, tiny.params(_SHAPE))
  assert engine.replicas[0].device.cache[0].keys.dtype == jnp.int8


def test_unknown_numbers_are_refused():
  with pytest.raises(ValueError, match="cache is 'fp8'; give one of model, int8"):
    clients.engine(cache='fp8')
  with pytest.raises(ValueError, match="engine.cache is 'fp8'.*'model', 'int8'"):
    config_lib.Config(engine=config_lib.Engine(cache='fp8')).check()


@pytest.mark.parametrize(
  ('family', 'tensor', 'heads'),
  [('qwen2', 1, 2), ('qwen3', 2, 1), ('qwen3', 4, 2), ('qwen3', 3, 2)],
)
def test_the_cache_is_counted_in_bytes(family, tensor, heads):
  """Two heads are split over the chips that they can be split over."""
  shape = dataclasses.replace(tiny.config(family, 3), dtype='bfloat16')
  count = lambda numbers: footprint._count_cache(
    tiny.run_config(rows=4, slots=32, cache=numbers).engine, tensor, shape
  )
  slots = 3 * 4 * 32 * heads
  assert count('model') == slots * 2 * 2 * 8
  assert count('int8') == slots * 2 * (8 + 4)
