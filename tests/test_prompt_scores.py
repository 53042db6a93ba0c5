"""The log-probs of a request's own tokens are the learner's, whatever the cache holds."""

import clients
import numpy as np
import pytest
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import programs

# One token, all of one prefill and its neighbours, several prefills, equal beginnings.
_LENGTHS = 1, 2, 8, 9, 10, 33, 60
SHARED = clients.tokens(0, 60)


def ask(engine, prompt, **fields):
  async def submit():
    generation = engine.submit(
      clients.request(prompt, most=5, score_prompt=True, **fields)
    )
    reply = await generation
    return prompt, generation.prompt, reply

  return submit()


def assert_learners(asked, temperature=1.0, params=None, shape=None):
  whole = [
    types.Segment(p, np.ones(len(p), bool), np.zeros(len(p), np.float32))
    for p, _, _ in asked
  ]
  params = clients.params() if params is None else params
  learned = tiny.learned(params, whole, shape=shape, temperature=temperature)
  for (prompt, scores, _), expected in zip(asked, learned, strict=True):
    assert scores.logprobs.shape == prompt.shape and np.isnan(scores.logprobs[0])
    np.testing.assert_allclose(scores.logprobs[1:], expected[1:], atol=2e-5)


@pytest.mark.parametrize('temperature', [1.0, 0.7, 0.0])
def test_they_are_the_learners(temperature):
  engine = clients.engine()
  prompts = [SHARED[:n] for n in _LENGTHS]
  sampling = config_lib.Sampling(temperature)
  all_of = lambda some: [ask(engine, prompt, sampling=sampling) for prompt in some]
  first = tiny.within(engine.run, all_of(prompts))
  with engine.open():  # The rows hold all of it now.
    alone, again = (engine.start(all_of(x)).result(600) for x in (prompts[5:6], prompts))
  for asked in (first, alone, again):
    assert_learners(asked, temperature or 1.0)
  for (_, _, reply), (_, _, expected) in zip(again, first, strict=True):
    np.testing.assert_array_equal(reply.tokens, expected.tokens)


def test_who_asks_for_none_computes_and_shares_as_ever():
  """Beside such requests, the others' replies stay, and their program is another."""
  engine, both = clients.engine(), []
  for number in range(8):
    both += [clients.play(engine, number), ask(engine, clients.prompt(number // 4))]
  done = tiny.within(engine.run, both)
  clients.assert_reference(dict(enumerate(done[::2])))
  assert_learners(done[1::2])
  before = programs.prefill._cache_size()
  clients.assert_plays(clients.engine(), range(4))
  assert programs.prefill._cache_size() == before


def test_the_likeliest_tokens_of_each_place():
  engine = clients.engine()
  one = lambda **fields: ask(engine, SHARED[:33], **fields)
  (_, some, reply), (_, none, same) = tiny.within(
    engine.run, [one(top_logprobs=3), one()]
  )
  assert some.top_tokens.shape == (33, 3) and none.top_tokens.shape == (33, 0)
  assert np.isnan(some.top_logprobs[0]).all()
  assert (np.diff(some.top_logprobs[1:]) <= 0).all()
  np.testing.assert_array_equal(reply.tokens, same.tokens)
  # The learner gives each of them the same.
  for n in (1, 20, 32):
    others = [np.append(SHARED[:n], token) for token in some.top_tokens[n]]
    segments = [types.Segment(x, x > -1, np.float32(0 * x)) for x in others]
    learned = [x[-1] for x in tiny.learned(clients.params(), segments)]
    np.testing.assert_allclose(some.top_logprobs[n], learned, atol=2e-5)
    # Nothing is likelier.
    assert some.logprobs[n] <= some.top_logprobs[n, 0]


def test_a_text_that_goes_on_has_no_scores():
  engine = clients.engine()

  async def play():
    generation = engine.submit(clients.request(SHARED[:9]))
    await generation
    assert generation.prompt is None
    with pytest.raises(ValueError, match='score_prompt scores a whole sequence'):
      engine.submit(clients.request(SHARED[:3], generation.sequence, score_prompt=True))

  tiny.within(engine.run, [play()])
