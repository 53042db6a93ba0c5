"""Losses on the device: the peers' numbers in float64 (golden/), hand-made cases."""

import episodes
import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.rl import losses, packing, table

pytestmark = pytest.mark.usefixtures('float64')
SURROGATES = {
  'ppo_clip': losses.ppo_clip(),
  'gspo': losses.gspo(clip_low=0.1, clip_high=0.1),
  'cispo': losses.cispo(),
  'sapo': losses.sapo(),
  'reinforce': losses.reinforce(),
  'likelihood': losses.likelihood(),
  'dppo_tv': losses.dppo_tv(),
}


def _golden(*keys, dtype=None):
  return [jnp.asarray(episodes.golden()[key], dtype) for key in keys]


def _weights(aggregate=losses.token_mean, mask=None, dtype=None):
  mask = episodes.golden_mask() if mask is None else mask
  return jnp.asarray(mask * aggregate(mask.sum(axis=1))[:, None], dtype)


def make_stats(logprobs, values=None):
  return losses.TokenStats(logprobs, jnp.zeros_like(logprobs), values)


def make_batch(logprobs, advantages, weights=None, segment_ids=None, **numbers):
  """Makes a batch; by default a segment a row, and all weights 1."""
  B, T = logprobs.shape
  numbers.update(old_logprobs=logprobs, advantages=advantages)
  return types.Batch(
    rows=tiny.rows(jnp.zeros((B, T), jnp.int32)),
    segment_ids=jnp.ones((B, T), jnp.int32) if segment_ids is None else segment_ids,
    action_mask=jnp.ones((B, T), bool),
    weights=jnp.ones((B, T)) if weights is None else weights,
    **numbers,
  )


def _loss(surrogate, batch):
  def loss(logprobs):
    return losses.weighted(surrogate(make_stats(logprobs), batch)[0], batch.weights)

  return loss


def _vjp(surrogate, batch):
  """The loss of each token, and its derivative by its own log-prob."""

  @jax.jit
  def both(logprobs):
    per_token, back = jax.vjp(lambda x: surrogate(make_stats(x), batch)[0], logprobs)
    return per_token, back(jnp.ones_like(logprobs))[0]

  return both


# The dtypes of the computation, and their tolerances against the peers' float64.
_TOLERANCES = {np.float64: 1e-9, np.float32: 1e-5}


def _check(make, key):
  """In each dtype, value and gradient of the function that is made are the peer's.

  make(dtype) returns the function and its argument; one program computes all of them.
  """
  fns, arguments = zip(*map(make, _TOLERANCES), strict=True)
  every = lambda *xs: [jax.value_and_grad(f)(x) for f, x in zip(fns, xs, strict=True)]
  expected_loss, expected_grad = _golden(f'{key}/loss', f'{key}/grad')
  found = zip(jax.jit(every)(*arguments), _TOLERANCES.items(), strict=True)
  for (loss, grad), (dtype, tolerance) in found:
    assert loss.dtype == grad.dtype == dtype
    np.testing.assert_allclose(loss, expected_loss, rtol=tolerance)
    np.testing.assert_allclose(grad, expected_grad, rtol=tolerance, atol=tolerance / 1000)


# Surrogates against the peers.

# The options are the oracle's: verl's defaults but where the key says otherwise; of GSPO,
# 3e-4 and 4e-4, and 0.2 for 'wide'; of DPPO, 0.2.
MEAN, SUM = losses.token_mean, losses.seq_mean_token_sum
SEQUENCES = losses.seq_mean_token_mean


def _verls_sequences(counts):
  """verl adds 1e-8 to the count of a sequence's tokens; the shortest has 4."""
  return SEQUENCES(counts) * counts / (counts + 1e-8)


@pytest.mark.parametrize(
  ('key', 'surrogate', 'aggregate'),
  [
    ('verl/ppo_vanilla/token-mean', losses.ppo_clip(), MEAN),
    ('verl/ppo_vanilla/seq-mean-token-sum', losses.ppo_clip(), SUM),
    (
      'verl/ppo_vanilla/seq-mean-token-sum-norm',
      losses.ppo_clip(),
      losses.seq_mean_token_sum_norm(24),
    ),
    # Agent-R1's is not the mean over the sequences but their sum.
    (
      'agentr1/ppo_vanilla/seq-mean-token-sum-norm',
      losses.ppo_clip(),
      lambda counts: np.full(len(counts), 1 / 24),
    ),
    ('verl/ppo_vanilla/clip_higher_0.2_0.28', losses.ppo_clip(clip_high=0.28), MEAN),
    ('verl/ppo_vanilla/dual_clip_c1.5', losses.ppo_clip(dual_clip=1.5), MEAN),
    ('searchr1/ppo_0.2', losses.ppo_clip(dual_clip=None), MEAN),
    ('areal/ppo/cNone', losses.ppo_clip(dual_clip=None), MEAN),
    ('areal/ppo/c3.0', losses.ppo_clip(dual_clip=3.0), MEAN),
    ('verl/cispo', losses.cispo(), MEAN),
    ('verl/cispo_10_0.2', losses.cispo(clip_low=10.0), MEAN),
    ('verl/dppo_tv', losses.dppo_tv(low=0.2, high=0.2), MEAN),
    ('verl/reinforce', losses.reinforce(), SUM),
    ('verl/ppo_vanilla/seq-mean-token-mean', losses.ppo_clip(), _verls_sequences),
    ('verl/gspo', losses.gspo(), _verls_sequences),
    ('verl/gspo_wide', losses.gspo(clip_low=0.2, clip_high=0.2), _verls_sequences),
    ('verl/sapo', losses.sapo(), _verls_sequences),
    ('trl/grpo', losses.ppo_clip(dual_clip=None), SEQUENCES),
    ('trl/dapo', losses.ppo_clip(clip_high=0.28, dual_clip=None), MEAN),
    (
      'trl/dr_grpo',
      losses.ppo_clip(dual_clip=None),
      losses.seq_mean_token_sum_norm(24),
    ),
    ('trl/gspo', losses.gspo(), SEQUENCES),
    ('trl/cispo_epsmax5', losses.cispo(clip_low=1.0, clip_high=4.0), MEAN),
    # TRL makes its temperatures float32.
    ('trl/sapo', losses.sapo(tau_negative=float(np.float32(1.05))), SEQUENCES),
  ],
)
def test_surrogate_and_gradient_equal_the_peers(key, surrogate, aggregate):
  def make(dtype):
    names = ('in/logp', 'in/old_logp', 'in/adv', 'in/trl_completion_mask', 'in/trl_adv')
    new, old, adv, completion, of_trl = _golden(*names, dtype=dtype)
    mask = episodes.golden_mask()
    if key.startswith('trl/'):
      mask = mask & (np.asarray(completion) > 0)
      adv = jnp.broadcast_to(of_trl[:, None], mask.shape)
    return _loss(surrogate, make_batch(old, adv, _weights(aggregate, mask, dtype))), new

  _check(make, key)


def test_gspo_does_not_depend_on_the_layout():
  rng = np.random.default_rng(0)
  masks = [np.append(rng.random(n - 1) < 0.6, True) for n in (7, 5, 9, 3, 1)]
  numbers = [rng.normal(size=(3, len(mask))) for mask in masks]
  pieces = [types.Segment(np.zeros(len(m), np.int32), m, np.zeros(len(m))) for m in masks]

  @jax.jit
  def run(logprobs, batch):
    loss = _loss(SURROGATES['gspo'], batch)
    return SURROGATES['gspo'](make_stats(logprobs), batch)[0], jax.grad(loss)(logprobs)

  def per_segment(order, row_tokens, row_multiple):
    where = packing.plan_layout(
      [len(masks[i]) for i in order], row_tokens=row_tokens, row_multiple=row_multiple
    )
    place = lambda parts: where.place(np.concatenate(parts), np.float64)
    new, old, adv = (place([numbers[i][k] for i in order]) for k in range(3))
    weights = place([masks[i] * 0.1 for i in order])
    batch = packing.pack(table.from_segments([pieces[i] for i in order]), where)
    batch = batch._replace(old_logprobs=old, advantages=adv, weights=weights)
    edges = np.cumsum(where.lengths)[:-1]
    columns = (where.extract(np.asarray(y)) for y in run(new, batch))
    parts = [np.split(column, edges) for column in columns]
    shared = len(order) - len({row for row, _ in where.starts})
    return shared, {i: [p[n] for p in parts] for n, i in enumerate(order)}

  for order, row_tokens, row_multiple, sharing in (
    ((0, 1, 2, 3, 4), 9, 1, 2),
    ((4, 2, 0, 3, 1), 12, 4, 2),
    ((3, 4, 1, 0, 2), 30, 2, 4),
  ):
    shared, out = per_segment(order, row_tokens, row_multiple)
    assert shared == sharing
    for i, (loss, grad) in out.items():
      # By hand; the mean is over the tokens that weigh.
      mask = masks[i]
      new, old, A = numbers[i][:, mask]
      s = np.exp(np.mean(new - old))
      plain, clipped = -A * s, -A * np.clip(s, 0.9, 1.1)
      np.testing.assert_allclose(loss[mask], np.maximum(plain, clipped), rtol=1e-12)
      np.testing.assert_allclose(
        grad[mask], 0.1 * np.where(plain >= clipped, plain, 0.0), rtol=1e-12
      )
      assert (grad[~mask] == 0).all()


# Every surrogate.


def _random(shape=(3, 8), seed=0):
  """(new, old, advantages, weights); some tokens have no weight."""
  rng = np.random.default_rng(seed)
  old = -rng.uniform(0.05, 3, shape)
  new = np.minimum(old + rng.normal(size=shape) * 0.4, -1e-3)
  weights = rng.uniform(0.5, 1, shape) * (rng.random(shape) < 0.6)
  adv = rng.normal(size=shape)
  return [jnp.asarray(x) for x in (new, old, adv, weights)]


@pytest.mark.parametrize('name', SURROGATES)
def test_without_an_advantage_loss_and_gradient_are_zero_as_annotated(name):
  assert SURROGATES[name].zero_without_advantage
  new, old, adv, _ = _random()
  batch = make_batch(old, jnp.zeros_like(adv))
  loss, grad = _vjp(SURROGATES[name], batch)(new)
  assert (loss == 0).all() and (grad == 0).all()


@pytest.mark.parametrize('name', SURROGATES)
def test_on_policy_every_gradient_is_the_policy_gradient(name):
  _, old, adv, weights = _random()
  batch = make_batch(old, adv, weights)
  grad = jax.jit(jax.grad(_loss(SURROGATES[name], batch)))(old)
  np.testing.assert_allclose(grad, -adv * weights, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize('name', SURROGATES)
def test_surrogates_are_finite_far_from_the_old_policy(name):
  old = jnp.array([[-1e-6, -300.0, -300.0, -1e-6]])
  new = jnp.array([[-300.0, -1e-6, -1e-6, -300.0]])
  batch = make_batch(old, jnp.array([[1.0, 1.0, -1.0, -1.0]]))
  out = jax.jit(jax.value_and_grad(_loss(SURROGATES[name], batch)))(new)
  assert all(np.isfinite(x).all() for x in out)


@pytest.mark.parametrize(
  'make',
  [
    lambda: losses.ppo_clip(clip_low=-0.2),
    lambda: losses.ppo_clip(clip_high=0.0),
    lambda: losses.ppo_clip(dual_clip=1.0),
    lambda: losses.gspo(clip_low=float('nan')),
    lambda: losses.cispo(clip_high=-1.0),
    lambda: losses.sapo(tau_negative=0.0),
    lambda: losses.dppo_tv(cap=0.0),
    lambda: losses.dppo_tv(low=-0.1),
    lambda: losses.value_clip(clip=0.0),
  ],
)
def test_option_out_of_range_is_refused(make):
  with pytest.raises(ValueError, match='must be above'):
    make()


def test_log_ratio_is_clipped():
  new = jnp.array([[-1.0, -50.0, 0.0, -20.0]])
  old = jnp.array([[-3.0, -1.0, -30.0, -1.0]])
  out, back = jax.vjp(lambda x: losses.log_ratio(x, old), new)
  np.testing.assert_array_equal(out, [[2, -20, 20, -19]])
  np.testing.assert_array_equal(back(jnp.ones((1, 4)))[0], [[1, 0, 0, 1]])


# Values.


def make_value_loss(clip, old, returns, weights):
  batch = make_batch(old, old, weights, values=old, returns=returns)
  value_loss = losses.value_clip(clip=clip)
  return lambda values: losses.weighted(value_loss(values, batch), weights)


@pytest.mark.parametrize('clip', [0.5, 0.2])
def test_value_clip_equals_verls(clip):
  def make(dtype):
    # The oracle's targets are the process rewards.
    names = ('in/vpreds', 'in/values', 'in/rewards_process')
    new, old, returns = _golden(*names, dtype=dtype)
    return make_value_loss(clip, old, returns, _weights(dtype=dtype)), new

  _check(make, f'verl/value_loss/clip{clip}')


# Aggregation.

_LENGTH_24 = losses.seq_mean_token_sum_norm(24)
_WEIGHTED = jax.jit(losses.weighted)


@pytest.mark.parametrize(
  ('key', 'aggregate'),
  [
    ('agg_loss/token-mean', MEAN),
    ('agg_loss/seq-mean-token-sum', SUM),
    ('agg_loss/seq-mean-token-mean', _verls_sequences),
    ('agg_loss/seq-mean-token-sum-norm', _LENGTH_24),
    (
      'agg_loss/seq-mean-token-sum-norm/scale512',
      losses.seq_mean_token_sum_norm(512),
    ),
    # One episode has no action token; verl counts it in no mean either.
    ('agg_loss_emptyrow/token-mean', MEAN),
    ('agg_loss_emptyrow/seq-mean-token-sum', SUM),
    ('agg_loss_emptyrow/seq-mean-token-mean', _verls_sequences),
    ('agg_loss_emptyrow/seq-mean-token-sum-norm', _LENGTH_24),
  ],
)
def test_aggregation_equals_verls(key, aggregate):
  mask = episodes.golden_mask().copy()
  if 'emptyrow' in key:
    mask[2] = False
  for dtype, tolerance in _TOLERANCES.items():
    per_token, expected = _golden('in/values', f'verl/{key}', dtype=dtype)
    out = _WEIGHTED(per_token, _weights(aggregate, mask, dtype))
    assert out.dtype == dtype
    np.testing.assert_allclose(out, expected, rtol=tolerance)


def test_sequence_weights_equal_skyrls():
  """It multiplies the advantages by them."""
  adv, expected = _golden('in/adv', 'skyrl/reduction/sequence_mean')
  np.testing.assert_allclose(adv * _weights(SEQUENCES), expected, rtol=1e-12)


def test_weighted_reads_nothing_where_nothing_weighs():
  x = jnp.array([[1.0, np.nan, 3.0, np.inf, -np.inf]])
  w = jnp.array([[0.5, 0.0, -1.0, 0.0, 0.0]])
  out, grad = jax.value_and_grad(losses.weighted)(x, w)
  assert out == 0.5 - 3.0
  np.testing.assert_array_equal(grad, w)


# Gradients.


def test_gradients_equal_numerical_derivatives():
  rng = np.random.default_rng(0)
  x, y, z = (jnp.asarray(rng.normal(size=(2, 5))) for _ in range(3))
  # Each branch of the clips, and no point near a kink.
  ratio = jnp.log(jnp.array([[0.5, 0.9, 1.1, 1.6, 5.0], [0.5, 0.9, 1.1, 1.6, 5.0]]))
  batch = make_batch(-jnp.ones((2, 5)), jnp.array([[1.0] * 5, [-1.0] * 5]))
  batch = batch._replace(values=y, returns=z)

  @jax.jit
  def every(ratio, x, y):
    stats = make_stats(batch.old_logprobs + ratio)
    return (
      losses.ppo_clip()(stats, batch)[0],
      losses.sapo()(stats, batch)[0],
      losses.reinforce()(stats, batch)[0],
      losses.log_ratio(x, y),
      losses.weighted(x, y),
      losses.value_clip()(x, batch),
      losses.value_clip(clip=None)(x, batch),
    )

  check_grads(every, (ratio, x, y), order=1)
