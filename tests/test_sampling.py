"""Sampling: the distribution of the tokens, and the log-probs reported for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_r1_jax import config as config_lib
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import sampling as sampling_lib

Sampling = config_lib.Sampling
_N = 8_000


@jax.jit
def _choose(logits, u, temperature, truncation):
  """Chooses as a decode does; returns the tokens and their log-probs."""
  scaled = sampling_lib.scale_logits(logits, temperature)
  full = jax.nn.log_softmax(scaled)
  state = {name: jnp.full(len(u), value) for name, value in truncation.items()}
  used = (truncation['top_k'] > 0) | (truncation['top_p'] < 1)
  used |= truncation['min_p'] > 0
  changed = guide_lib.apply(
    [guide_lib.TRUNCATION],
    [None],
    [state],
    jnp.broadcast_to(used, (1, len(u))),
    scaled,
    scaled[:, :1],
  )
  tokens = sampling_lib.choose_tokens(jax.nn.log_softmax(changed), u, temperature == 0)
  return tokens, jnp.take_along_axis(full, tokens[:, None], 1)[:, 0]


def _sample_rows(logits, u, sampling):
  temperature = np.full(len(u), sampling.temperature, np.float32)
  return _choose(
    logits, jnp.asarray(u), temperature, guide_lib.truncation_state(sampling)
  )


def _sample(logits, u, sampling):
  """One set of logits [V] for all of u [n]."""
  return _sample_rows(np.repeat(logits[None], len(u), axis=0), u, sampling)


@functools.cache
def _uniforms(n=_N):
  keys = np.random.default_rng(0).integers(0, 2**32, (n, 2), np.uint32)
  return jax.jit(sampling_lib.make_uniforms)(keys, np.arange(n, dtype=np.int32) % 50)


def _logits(V, seed=1, spread=1.5):
  return (spread * np.random.default_rng(seed).normal(size=V)).astype(np.float32)


def _softmax(logits, temperature=1.0):
  z = logits.astype(np.float64) / temperature
  p = np.exp(z - z.max())
  return p / p.sum()


def _p_value(tokens, p):
  """The p-value of a chi-square test of the counts, rare tokens taken together."""
  from scipy import stats  # It takes a second.

  counts, expected = np.bincount(tokens, minlength=len(p)), p * len(tokens)
  assert counts[p == 0].sum() == 0
  often = expected >= 5
  counts = np.append(counts[often], counts[~often].sum())
  expected = np.append(expected[often], expected[~often].sum())
  counts, expected = counts[expected > 0], expected[expected > 0]
  return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


def _kept(p, sampling):
  """What top-k, then top-p, then min-p leave, renormalised, by the definitions."""
  order = np.argsort(-p)
  kept, mass = [], 0.0
  allowed = order[: sampling.top_k or len(p)]
  for token in allowed:
    enough = p[token] >= sampling.min_p * p.max()
    if enough and mass < sampling.top_p * p[allowed].sum():
      kept.append(token)
    mass += p[token]
  out = np.zeros_like(p)
  out[kept] = p[kept]
  return out / out.sum()


class TestUniforms:
  def test_numbers_of_keys_and_positions_are_uniform(self):
    from scipy import stats  # It takes a second.

    u = np.asarray(_uniforms())
    assert u.min() >= 0 and u.max() < 1
    assert stats.kstest(u, 'uniform').pvalue > 0.01

  def test_a_number_depends_on_key_and_position_alone(self):
    keys = np.array([[1, 2], [1, 2], [1, 3], [2, 2]], np.uint32)
    positions = np.array([7, 8, 7, 7], np.int32)
    make = jax.jit(sampling_lib.make_uniforms)
    u = np.asarray(make(keys, positions))
    assert len(set(u.tolist())) == 4
    order = np.array([2, 0, 3, 1])
    again = make(keys[order], positions[order])
    np.testing.assert_array_equal(again, u[order])
    fewer = make(keys[1:3], positions[1:3])
    np.testing.assert_array_equal(fewer, u[1:3])


class TestLaw:
  def test_a_chi_square_test_tells_a_slightly_different_law(self):
    logits = _logits(300)
    tokens, _ = _sample(logits, _uniforms(), Sampling(1.0))
    assert _p_value(np.asarray(tokens), _softmax(logits)) > 0.01
    assert _p_value(np.asarray(tokens), _softmax(logits, 1.1)) < 1e-6

  @pytest.mark.parametrize(
    'V, temperature', [(3, 1.0), (127, 1.0), (128, 1.0), (300, 0.6), (1024, 1.0)]
  )
  def test_tokens_are_the_inverse_of_the_cumulative_distribution(self, V, temperature):
    logits = _logits(V)
    u = np.linspace(0, 1, _N, endpoint=False).astype(np.float32)
    tokens, _ = _sample(logits, u, Sampling(temperature))
    ends = np.cumsum(_softmax(logits, temperature))
    expected = np.searchsorted(ends, u.astype(np.float64), side='right')
    clear = np.abs(ends[None] - u[:, None]).min(-1) > 1e-5
    assert clear.mean() > 0.8
    np.testing.assert_array_equal(np.asarray(tokens)[clear], expected[clear])

  def test_impossible_tokens_are_never_chosen(self):
    """Also where rounding leaves nothing, or less, inside a block of the vocabulary."""
    rng = np.random.default_rng(0)
    edges = np.float32([0, 1e-38, 1e-8, 0.5, 1 - 2**-24, 1 - 2**-23])
    for i in range(12):
      logits = _logits(700, seed=i, spread=3.0)
      logits[rng.random(700) < 0.7] = -np.inf
      logits[::128] = -np.inf  # every block's first
      if i % 2:
        logits[640:] = -np.inf  # the whole last block
      # Where a block begins, the remainder inside it is nothing but rounding.
      starts = np.cumsum(_softmax(logits))[127::128].astype(np.float32)
      near = (starts[:, None] + np.arange(-40, 41)[None] * np.float32(2**-25)).ravel()
      u = np.concatenate([edges, np.clip(near, 0, 1 - 2**-24).astype(np.float32)])
      u = np.resize(u, 512)
      tokens, logprobs = _sample(logits, u, Sampling())
      assert np.isfinite(logits[np.asarray(tokens)]).all()
      assert np.isfinite(np.asarray(logprobs)).all()

  def test_large_logits_do_not_overflow(self):
    tokens, logprobs = _sample(
      np.float32([1e4, 1e4, -1e4]), np.float32([0.1, 0.6]), Sampling(0.1)
    )
    assert np.asarray(tokens).tolist() == [0, 1]
    np.testing.assert_allclose(logprobs, np.log([0.5, 0.5]), rtol=1e-6)


class TestTruncation:
  @pytest.mark.parametrize(
    'sampling',
    [
      Sampling(top_k=7),
      Sampling(top_k=1000),
      Sampling(0.7, top_p=0.9),
      Sampling(1.3, top_k=20, top_p=0.6),
      Sampling(min_p=0.2),
      Sampling(1.5, top_k=30, top_p=0.9, min_p=0.1),
    ],
  )
  def test_tokens_follow_what_is_kept_and_log_probs_the_whole(self, sampling):
    logits = _logits(300)
    p = _softmax(logits, sampling.temperature)
    tokens, logprobs = _sample(logits, _uniforms(), sampling)
    assert _p_value(np.asarray(tokens), _kept(p, sampling)) > 0.01
    np.testing.assert_allclose(logprobs, np.log(p)[np.asarray(tokens)], atol=2e-6)

  def test_the_set_is_the_smallest_with_the_mass(self):
    for p, kept in (
      ([0.1, 0.51, 0.3, 0.09], {1}),
      ([0.1, 0.49, 0.3, 0.11], {1, 2}),
      ([0.1, 0.2, 0.3, 0.4], {2, 3}),
      ([0.26, 0.25, 0.24, 0.25], {0, 1, 3}),  # ties stay together
    ):
      tokens, _ = _sample(np.log(np.float32(p)), _uniforms(), Sampling(top_p=0.5))
      assert set(np.asarray(tokens).tolist()) == kept

  def test_rows_that_use_none_of_it_keep_their_logits(self):
    """To the last bit, whatever their neighbours do."""
    logits = np.stack([_logits(300, seed) for seed in range(4)])
    truncations = [Sampling(top_k=1), Sampling(), Sampling(min_p=0.9), Sampling()]
    states = [guide_lib.truncation_state(sampling) for sampling in truncations]
    state = {name: jnp.stack([s[name] for s in states]) for name in states[0]}
    used = jnp.array([[sampling.truncated for sampling in truncations]])
    out = jax.jit(
      lambda x: guide_lib.apply([guide_lib.TRUNCATION], [None], [state], used, x, x)
    )(logits)
    np.testing.assert_array_equal(out[1::2], logits[1::2])
    assert np.isinf(out[0]).sum() == 299 and np.isinf(out[2]).any()


def test_on_policy_is_the_plain_softmax_only():
  assert config_lib.Sampling().on_policy and Sampling(0.3).on_policy
  truncated = Sampling(top_k=5), Sampling(top_p=0.9), Sampling(min_p=0.1)
  assert all(other.truncated for other in truncated) and not Sampling(0.0).truncated
  assert not any(other.on_policy for other in (*truncated, Sampling(tool_grammar=True)))


@pytest.mark.parametrize(
  'field, value',
  [
    ('temperature', -0.1),
    ('top_k', -1),
    ('top_p', 0.0),
    ('top_p', 1.1),
    ('min_p', -0.1),
    ('min_p', 1.1),
  ],
)
def test_a_value_out_of_range_is_refused(field, value):
  with pytest.raises(ValueError, match=f'{field} is {value}'):
    Sampling(**{field: value}).check()


@pytest.mark.parametrize('temperature', [0.0, 0.05, 1.0])
def test_what_is_forbidden_is_not_chosen_however_likely_it_is(temperature):
  logits = np.zeros((2, 300), np.float32)
  logits[:, 7], logits[:, 200] = 400, 5

  @jax.jit
  def choose(logits, temperature):
    scaled = sampling_lib.scale_logits(logits, temperature)
    choices = jax.nn.log_softmax(scaled.at[0, 7].set(-jnp.inf))
    return sampling_lib.choose_tokens(choices, jnp.full(2, 0.5), temperature == 0)

  tokens = choose(logits, np.full(2, temperature, np.float32))
  assert tokens.tolist() == [200, 7]


def test_greedy_and_sampled_rows_share_a_call():
  """Greedy ones report log-probs of temperature 1."""
  logits = np.stack([_logits(300, seed) for seed in range(8)])
  u, temperature = np.linspace(0, 0.99, 8).astype(np.float32), np.ones(8, np.float32)
  temperature[::2] = 0
  plain = guide_lib.truncation_state(Sampling())
  tokens, logprobs = _choose(logits, jnp.asarray(u), temperature, plain)
  np.testing.assert_array_equal(tokens[::2], logits.argmax(-1)[::2])
  expected = [np.log(_softmax(row)).max() for row in logits[::2]]
  np.testing.assert_allclose(logprobs[::2], expected, atol=2e-6)
  sampled, _ = _sample_rows(logits, u, Sampling())
  np.testing.assert_array_equal(tokens[1::2], sampled[1::2])
