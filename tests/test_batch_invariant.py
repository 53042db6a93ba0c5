"""models/batch_invariant.py: the same bits in the sampler and in the learner."""

import dataclasses
import functools
import re
from typing import Any

import clients
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.models import attention, batch_invariant, engine_params, kv_cache, ops
from agent_r1_jax.rl import algorithms, learner, packing, table

_TEMPERATURE = 0.7


def _config(dtype: str = 'float32', family: str = 'qwen2', layers: int = 1):
  shape = tiny.config(family, layers)
  return dataclasses.replace(shape, dtype=dtype, ops=batch_invariant.INVARIANT)


async def _play(engine, number: int) -> list:
  """Plays three turns, and two forks in the midst of them."""
  request = functools.partial(
    clients.request, automata=(), sampling=config_lib.Sampling(temperature=_TEMPERATURE)
  )
  parts, forks = [], []
  text: Any = None
  given = np.concatenate([clients.tokens(0, 20), clients.tokens(number, number)])
  for turn in range(3):
    generation = engine.submit(request(given, text, 24, number))
    reply, text = await generation, generation.sequence
    parts += [(given,), reply[:3]]
    given = clients.tokens(number + turn, 1 + 5 * turn)
  for branch in range(2):
    given, start = clients.tokens(branch, 3), 30 + number
    generation = engine.submit(
      request(given, request_lib.Fork(text, start), 12, (number, branch))
    )
    reply = await generation
    before = generation.sequence.tokens[:start]
    forks.append(clients.segment([(before,), (given,), reply[:3]]))
    generation.sequence.close()
  text.close()
  return [clients.segment(parts), *forks]


def _sample(config, params) -> list[types.Segment]:
  """Texts that share rows, prefixes and forks; some are longer than a block of keys."""
  # Chunks of 7 tokens, and more texts than rows.
  sizes = {'rows': 4, 'slots': 150, 'prefill_rows': 4, 'prefill_tokens': 7}
  sizes |= {'bucket': 150, 'narrow': False}
  engine = tiny.engine(params, shape=config, **sizes)
  played = tiny.within(engine.run, [_play(engine, number) for number in range(6)])
  segments = [segment for texts in played for segment in texts]
  assert max(len(segment.tokens) for segment in segments) > 64 + 16
  return segments


def _pack(segments, *, trees: bool):
  whole = table.from_segments(segments)
  weights = whole.action_mask / whole.action_mask.sum()
  advantages = np.random.default_rng(0).normal(size=len(weights))
  whole = dataclasses.replace(whole, weights=weights, advantages=advantages)
  shape = packing.MicrobatchShape(2, 192, trees=trees)
  return packing.pack_microbatches(whole, shape)[0]


def _assert_same_bits(batches, found):
  for batch, logprobs in zip(batches, found, strict=True):
    counts = batch.weights != 0
    assert counts.any()
    np.testing.assert_array_equal(logprobs[counts], batch.old_logprobs[counts])


def _score_by_calls(config, params, texts) -> list[types.Segment]:
  """Computes log-probs through a cache: chunks of 7 tokens, then one of each text."""
  params = jax.jit(engine_params.unstack, static_argnums=1)(params, config)

  @jax.jit
  def call(params, cache, tokens, positions):
    rows = types.Rows(tokens, positions)
    x, cache = batch_invariant.extend(params, config, rows, cache)
    scaled = batch_invariant.logits(params, config, x) / jnp.full((1, 1, 1), _TEMPERATURE)
    found = batch_invariant.log_softmax(scaled.reshape(-1, tiny.VOCAB))
    return found.reshape(scaled.shape), cache

  longest = max(map(len, texts))
  padded = np.stack([np.pad(text, (0, longest - len(text))) for text in texts])
  cache, begin, found = kv_cache.empty(config, len(texts), longest), 0, []
  while begin < longest:
    end = begin + (7 if begin < 35 else 1)
    places = np.tile(np.arange(begin, end), (len(texts), 1))
    logprobs, cache = call(params, cache, padded[:, begin:end], places)
    found.append(np.asarray(logprobs))
    begin = end
  segments = []
  for text, logprobs in zip(texts, np.concatenate(found, axis=1), strict=True):
    chosen = logprobs[np.arange(len(text) - 1), text[1:]]
    segments.append(clients.segment([(text[:1],), (text[1:], chosen)]))
  return segments


def test_a_gradient_in_packed_rows_has_the_bits_of_calls_through_a_cache():
  # The last tokens see no key of the first block.
  window = {'window': 9, 'sliding': (True,)}
  config = dataclasses.replace(_config('float32', 'gemma3_text'), **window)
  params = tiny.params(config)
  texts = [clients.tokens(length, length) for length in (90, 71, 40)]
  segments = _score_by_calls(config, params, texts)
  batches, found = _pack(segments, trees=False), []
  loss = learner.objective(algorithms.grpo(kl_coef=0.0))
  options = {'config': config, 'temperature': _TEMPERATURE, 'logprobs': found}
  gradients = learner.forward_backward(params, batches, loss=loss, **options)
  _assert_same_bits(batches, found)
  # Exactly 0, and so the ratio exactly 1.
  assert gradients.sums['behaviour_kl'] == 0.0
  plain = dataclasses.replace(config, ops=None)
  ordinary = learner.logprobs(params, batches[0], config=plain, temperature=_TEMPERATURE)
  counts = batches[0].weights != 0
  np.testing.assert_allclose(found[0][counts], ordinary[counts], atol=2e-5)
  norms = [np.abs(x).max() for x in jax.tree.leaves(jax.device_get(gradients.learned))]
  assert np.isfinite(norms).all() and min(norms) > 0


# As a user's programs are compiled; see conftest.py.
_optimized = functools.partial(
  jax.jit,
  compiler_options={
    'xla_backend_optimization_level': 3,
    'xla_llvm_disable_expensive_passes': False,
  },
)


@pytest.mark.parametrize('tokens', [1, 16, 40])
def test_a_block_is_the_body_of_a_loop_that_xla_cannot_know(tokens):
  """Else it would compile few tokens into what is around them, as other products."""
  double = lambda x_UD: x_UD @ jnp.ones((8, 8))
  lowered = _optimized(lambda x: batch_invariant._by_blocks(double, x + 1) * 3).lower(
    jax.ShapeDtypeStruct((tokens, 8), 'float32')
  )
  text = lowered.compile().as_text()
  assert ' while(' in text and 'known_trip_count' not in text
  assert 'dynamic-slice' in text and 'dynamic-update-slice' in text
  # XLA drops its barriers at last: around the loop's number, and around the block.
  assert lowered.as_text().count('optimization_barrier') == 3


def test_what_a_block_of_keys_reads_is_kept_out_of_its_products():
  keys = jax.ShapeDtypeStruct((300, 2, 8), 'float32')

  def attend(q_UNH, positions_U, k_SKH):
    read = lambda places_C: (jnp.stack([k_SKH[places_C]] * 16),) * 2
    return batch_invariant._attend(q_UNH, positions_U, read, attention.Rules())

  shapes = (
    jax.ShapeDtypeStruct((16, 4, 8), 'float32'),
    jax.ShapeDtypeStruct((16,), 'int32'),
  )
  text = jax.jit(attend).lower(*shapes, keys).as_text()
  assert text.count('optimization_barrier') == 1 and 'stablehlo.while' in text


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_optimized_programs_score_few_tokens_and_many_alike(dtype):
  """XLA's optimizations, which most tests do without, are what moves bits."""
  shape = {'vocab_size': 1024, 'embed_dim': 128, 'tie_embeddings': True}
  config = dataclasses.replace(_config(dtype), **shape)
  rng = np.random.default_rng(0)
  params = {
    'embed': {'embedding': jnp.asarray(rng.normal(size=(1024, 128)), jnp.float32)}
  }
  rounded = jax.tree.map(lambda x: engine_params.round_leaf(x, dtype), params)
  x_BTD = jnp.asarray(rng.normal(size=(1, 100, 128)), dtype)
  tokens_BT = jnp.asarray(rng.integers(0, 1024, (1, 100)))

  @_optimized
  def sample(params, x_MD):
    logits_MV = batch_invariant.logits(params, config, x_MD)
    return batch_invariant.log_softmax(logits_MV / jnp.full((3, 1), _TEMPERATURE))

  @_optimized
  def learn(params, x_BTD):
    wanted_BT = jnp.ones((1, 100), bool)
    args = tokens_BT, wanted_BT, _TEMPERATURE
    return batch_invariant.logprobs(params, config, x_BTD, *args)[0]

  sampled, learned = sample(rounded, x_BTD[0, 50:53]), learn(params, x_BTD)
  chosen = np.asarray(sampled)[np.arange(3), np.asarray(tokens_BT)[0, 50:53]]
  np.testing.assert_array_equal(chosen, learned[0, 50:53])


def test_the_gradient_is_that_of_the_ordinary_code():
  config = _config('float32')

  def compute(x, config):
    return jnp.floor(x) if config.ops else jnp.sin(x)

  join = ops.choose(config).differentiate(compute, config)
  value, slope = jax.value_and_grad(join)(1.5)
  assert value == 1.0 and slope == pytest.approx(np.cos(1.5))


def test_prefix_trees_have_the_bits_of_the_sampler_in_bfloat16():
  config = _config('bfloat16')
  params = tiny.params(config)
  segments = _sample(config, params)
  batches = _pack(segments, trees=True)
  options = {'config': config, 'temperature': _TEMPERATURE}
  found = [learner.logprobs(params, batch, **options) for batch in batches]
  _assert_same_bits(batches, found)


def test_what_is_not_known_to_have_equal_bits_is_refused():
  shape = dataclasses.replace(tiny.config('qwen3_moe', 2), ops=batch_invariant.INVARIANT)
  with pytest.raises(
    ValueError, match=r'model.batch_invariant: .* with experts, only on'
  ):
    tiny.engine(tiny.params(shape), shape=shape)
  shape = _config()
  params = tiny.params(shape)
  for what, options in {
    'with named adapters': {'adapters': 2},
    "of 8 bits (engine.weights='int8')": {'weights': 'int8'},
    "of 8 bits (engine.cache='int8')": {'cache': 'int8'},
  }.items():
    with pytest.raises(ValueError, match=re.escape(what)):
      tiny.engine(params, shape=shape, **options)
  sees = _config(family='qwen2_5_vl')
  with pytest.raises(ValueError, match='not known with pictures, only on'):
    batch_invariant.check(sees, params)
  with pytest.raises(ValueError, match=r'on 2 chips and with LoRA adapters'):
    batch_invariant.check(shape, {'layers': {'lora_a': 0}}, chips=2)
