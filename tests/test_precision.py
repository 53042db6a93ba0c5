"""experiments/bench/precision.py: log-probs computed in several ways, and their gaps."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import script
import tiny

from agent_r1_jax.models import decoder, kv_cache, sampling_params
from experiments.bench import gaps


@pytest.fixture(scope='module')
def model():
  """A policy, and texts that two rows sampled in pieces."""
  params = tiny.params(tiny.config('qwen2'))
  engine = tiny.engine(params, shape=tiny.config('qwen2'), rows=2)
  sizes = {'turns': 3, 'prompt': 9, 'reply': 10, 'answer': 5, 'group': 2}
  played = engine.run([gaps.play(engine, tiny.VOCAB, n, **sizes) for n in range(5)])
  return gaps.Model(tiny.config('qwen2'), params, played, row_tokens=128)


def test_texts_have_replies_between_random_answers(model):
  texts = [text.segment for text in model.played]
  mask = np.r_[[False] * 9, [True] * 10, ([False] * 5 + [True] * 10) * 2]
  for text, likeliest in model.played:
    np.testing.assert_array_equal(text.action_mask, mask)
    np.testing.assert_array_equal(likeliest >= 0, mask)
    np.testing.assert_array_equal(text.behaviour_logprobs < 0, mask)
  same = lambda a, b, part: np.array_equal(texts[a].tokens[part], texts[b].tokens[part])
  assert same(0, 1, slice(9)) and not same(1, 2, slice(9))  # A group of two.
  assert not same(0, 1, slice(19, 24)) and not same(0, 1, slice(9, 19))


def test_every_way_computes_the_same_log_probs(model):
  """To the rounding of float32; the reference is one text in a row of its own."""
  ways = dict(gaps.list_scores(model, rows=2))
  assert list(ways) == [
    *('engine', 'decoded', 'prefilled', 'packed', 'blocks', 'head', 'learner')
  ]

  @jax.jit
  def score(params, tokens):
    places = jnp.arange(len(tokens))[None]
    text = tokens[None], places, jnp.ones_like(places)
    x_TD = decoder.hidden(params, model.config, *text)[0]
    return jax.nn.log_softmax(decoder.logits(params, model.config, x_TD))[:-1]

  for b, tokens in enumerate(model.tokens):
    T, expected = len(tokens), score(model.params, tokens)
    chosen = np.take_along_axis(np.asarray(expected), tokens[1:, None], axis=1)[:, 0]
    for name, (logprobs, likeliest) in ways.items():
      where = model.played[b].segment.action_mask if name == 'engine' else slice(1, None)
      at = np.arange(T)[where]
      np.testing.assert_allclose(logprobs[b, at], chosen[at - 1], atol=2e-5, err_msg=name)
      np.testing.assert_array_equal(
        likeliest[b, at], np.argmax(expected, axis=-1)[at - 1], err_msg=name
      )


def test_float32_attention_computes_the_same_with_float32_weights():
  text = jax.random.randint(jax.random.key(0), (2, 40), 0, tiny.VOCAB)
  places = jnp.tile(jnp.arange(40), (2, 1))

  def compute(dtype):
    config = dataclasses.replace(tiny.config(), dtype=dtype)
    params = tiny.params(config)

    def both(params, copy):
      packed = decoder.hidden(params, config, text, places, jnp.ones_like(places))
      cache = kv_cache.empty(config, 2, 48)
      return packed, decoder.extend(copy, config, text, places, cache)[0]

    return jax.jit(both)(params, sampling_params.unstack(params, config))

  before = {dtype: compute(dtype) for dtype in ('float32', 'bfloat16')}
  with gaps.float32_attention():
    for dtype, plain in before.items():
      for x, y in zip(compute(dtype), plain, strict=True):
        far = np.abs(np.asarray(x - y, np.float32)).max()
        assert far < 1e-4 if dtype == 'float32' else 1e-4 < far < 0.5, dtype


def test_differences_are_described():
  found = gaps.describe(np.log(np.array([1.0, 1.0, 0.5, 2.0], np.float32)))
  assert found['tokens'] == 4 and found['equal'] == 0.5
  assert found['mean_difference'] == pytest.approx(np.log(2) / 2)
  assert found['max_difference'] == pytest.approx(np.log(2))
  assert found['mean_ratio_deviation'] == pytest.approx((0.5 + 1) / 4)
  assert found['kl_k1'] == pytest.approx(0, abs=1e-7)
  assert found['kl_k3'] == pytest.approx(((0.5 - 1 + np.log(2)) + (1 - np.log(2))) / 4)


def test_the_script_says_what_bfloat16_changes_and_by_which_cause(tmp_path):
  sizes = ['--texts=5', '--rows=2', '--turns=2', '--prompt=9', '--reply=8', '--answer=5']
  policy = tiny.save(tmp_path / 'model')
  what = [f'--policy={policy}', '--row_tokens=128']
  done = script.run('-m', 'experiments.bench.precision', *what, *sizes)
  assert done.returncode == 0, done.stderr
  lines = [json.loads(line) for line in done.stdout.splitlines()]
  assert [line['dtype'] for line in lines] == ['bfloat16'] * 8 + ['float32'] * 7
  assert {line['tokens'] for line in lines} == {5 * 2 * 8}
  for of_dtype in (lines[:7], lines[8:]):
    *causes, together = of_dtype
    assert together['cause'] == 'together'
    # Signed gaps add up.
    total = sum(line['kl_k1'] for line in causes)
    assert together['kl_k1'] == pytest.approx(total, abs=1e-6)
  bfloat16, instead, float32 = lines[6], lines[7], lines[-1]
  assert float32['max_difference'] < 2e-5
  for line in (bfloat16, instead):
    assert 100 * float32['mean_difference'] < line['mean_difference'] < 0.02
  table = done.stderr[done.stderr.index('| cause') :].splitlines()
  assert len(table) == 2 + len(lines) and all(x.count('|') == 9 for x in table)
