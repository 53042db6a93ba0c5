"""The learner: layouts do not matter, and tokens without a weight do not."""

import dataclasses
import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import algorithms, learner, losses, minibatch, packing
from agent_r1_jax.rl import kl as kl_lib
from agent_r1_jax.rl import table as table_lib

_PPO = algorithms.ppo(
  gamma=0.9,
  lam=0.8,
  value_coef=0.5,
  entropy_coef=0.01,
  kl=kl_lib.InLoss(),
  correction=losses.token_truncated(),
  aggregate=losses.seq_mean_token_mean,
)
# Every field of a batch that is a number of a token.
_NUMBERS = tuple(x for x in types.Batch._fields[3:-1] if x != 'weights')
_SURROGATES = {
  name: make()
  for name, make in inspect.getmembers(losses, inspect.isfunction)
  if make.__annotations__.get('return') == losses.Surrogate and name[0] != '_'
}


@pytest.fixture
def bare(monkeypatch):
  """Replaces the model: its token stats are the parameters themselves."""
  compute = lambda params, *_, **__: (losses.TokenStats(**params), None)
  monkeypatch.setattr(learner, '_stats_and_loads', compute)


_OBJECTIVE = learner.objective(_PPO, shared_critic=True)


def _loss(stats, batch):
  """All terms of a loss; huge if a number of a token without weight reaches it."""
  total, watched = _OBJECTIVE(stats, batch)
  given = (*stats, *(getattr(batch, name) for name in _NUMBERS))
  stray = sum(jnp.sum(jnp.abs(x) * (batch.weights == 0)) for x in given)
  return total + 1e6 * stray, watched


@functools.cache
def _table():
  table = plain.credit(plain.trajectories(), _PPO).table
  # As after a few updates: some tokens are clipped, others not.
  noise = 0.3 * np.random.default_rng(0).normal(size=len(table))
  return dataclasses.replace(table, old_logprobs=table.old_logprobs + noise)


def _batches():
  return minibatch.make_policy(
    _table(), range(14), _PPO, shape=plain.SHAPE, kl_coef=0.1, shared_critic=True
  )[0]


def _gradient(batches, params=None, loss=_loss):
  return plain.gradient(params or plain.shared(), batches, loss)


@functools.cache
def _expected():
  return _gradient(_batches())


def _packed():
  segments = plain.segments_of(plain.trajectories())
  where = packing.plan_layout(
    [len(s.tokens) for s in segments], row_tokens=32, row_multiple=2
  )
  return where, packing.pack(table_lib.from_segments(segments), where)


def test_token_stats_equal_the_plain_computation():
  where, batch = _packed()
  assert batch.segment_ids.max() > 1, 'segments share a row'
  kwargs = {'config': plain.CONFIG, 'temperature': plain.TEMPERATURE}

  def everywhere(fn, *args, **kwargs):
    parts = [fn(*args, b, **kwargs) for b in packing.split_microbatches(batch, 2)]
    return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)

  whole = jax.jit(functools.partial(learner.token_stats, **kwargs))
  stats = everywhere(whole, plain.shared())
  segments = plain.segments_of(plain.trajectories())
  said = plain.score(plain.shared(), segments)
  extract = lambda packed: plain.by_segment(segments, where.extract(packed))
  for actual, expected in zip(stats, said[:3], strict=True):
    for a, e in zip(extract(actual), expected, strict=True):
      np.testing.assert_allclose(a, e, rtol=0, atol=2e-5)
      assert a[0] == 0 and (a[1:] != 0).all()
    assert (actual[batch.segment_ids == 0] == 0).all()
  alone = everywhere(learner.logprobs, plain.policy(), **kwargs)
  np.testing.assert_allclose(alone, stats.logprobs, rtol=0, atol=2e-6)
  # Of the state after each token, the last one included.
  after = everywhere(learner.values, plain.shared(), config=plain.CONFIG)
  for a, e in zip(extract(after), said.after, strict=True):
    np.testing.assert_allclose(a, e, rtol=0, atol=2e-5)
  assert jax.eval_shape(whole, plain.policy(), batch).values is None


def test_the_gradient_is_that_of_the_plain_formula():
  """Σ w (max(-A ρ, -A clip(ρ)) + ¼ (V - R)²) over unpacked rows: every number meets its
  token."""
  segments = plain.segments_of(plain.trajectories())
  where, padded = plain.padded(segments)
  rng = np.random.default_rng(0)
  draw = lambda s: rng.normal(size=len(s.tokens)) * s.action_mask
  adv, returns = (np.concatenate([draw(s) for s in segments]) for _ in range(2))
  # Near the policy: some tokens are clipped, others not.
  near = plain.score(plain.shared(), segments).logprobs
  old = [x * s.action_mask + 0.3 * draw(s) for x, s in zip(near, segments)]
  old = np.concatenate(old)

  def formula(params):
    logprobs, _, values, _ = plain.direct(params, jnp.asarray(padded.rows.tokens))
    ratio = jnp.exp(logprobs - where.place(old, np.float32))
    a = where.place(adv, np.float32)
    loss = jnp.maximum(-a * ratio, -a * jnp.clip(ratio, 0.8, 1.2))
    loss += 0.25 * (values - where.place(returns, np.float32)) ** 2
    return 0.01 * jnp.sum(loss * padded.action_mask)

  expected_loss, expected = jax.jit(jax.value_and_grad(formula))(plain.shared())
  packed, batch = _packed()
  batch = batch._replace(
    old_logprobs=packed.place(old, np.float32),
    advantages=packed.place(adv, np.float32),
    returns=packed.place(returns, np.float32),
    weights=batch.action_mask * np.float32(0.01),
  )
  algorithm = algorithms.ppo(dual_clip=None, value_clip=None, value_coef=0.5)
  objective = learner.objective(algorithm, shared_critic=True)
  grads, sums = _gradient(packing.split_microbatches(batch, 2), loss=objective)
  assert 0.1 < sums['clip_fraction'] / sums['weight'] < 0.9
  np.testing.assert_allclose(sums['loss'], expected_loss, rtol=1e-4)
  plain.close(grads, expected)


def test_gradient_does_not_depend_on_the_layout():
  """Each segment has a row of its own, where several shared one."""
  segments = plain.segments_of(plain.trajectories())
  where, _ = plain.padded(segments, rows=len(segments) + len(segments) % 2)
  place = lambda column: where.place(column, column.dtype)
  alone = jax.tree.map(place, plain.unpacked(_batches(), segments))
  batches = list(packing.split_microbatches(alone, 2))
  assert len(batches) > len(_batches())
  plain.close(_gradient(batches), _expected())


def test_nan_off_the_mask_changes_no_gradient():
  """Nor does a NaN there come through the gradient."""

  def broken(batch):
    fields = {name: getattr(batch, name) for name in _NUMBERS}
    assert all(x is not None for x in fields.values())
    off = lambda x: np.where(batch.action_mask, x, np.nan)
    return batch._replace(**jax.tree.map(off, fields))

  plain.equal(_gradient(map(broken, _batches())), _expected())
  # Nor are the model's numbers there.
  assert abs(_expected()[1]['loss']) < 100


def test_no_gradient_comes_from_padding_and_from_what_no_action_follows():
  batches, changed, late = _batches(), [], 0
  for batch in batches:
    # Backwards in each row: is there an action of the same segment later on?
    follows = np.zeros(batch.weights.shape, bool)
    for t in reversed(range(31)):
      same = batch.segment_ids[:, t] == batch.segment_ids[:, t + 1]
      later = batch.action_mask[:, t + 1] | follows[:, t + 1]
      follows[:, t] = same & later & (batch.segment_ids[:, t] > 0)
    free = ~follows & ~batch.action_mask
    late += (free & (batch.segment_ids > 0)).sum()
    tokens = np.where(free, 63 - batch.rows.tokens, batch.rows.tokens)
    changed.append(batch._replace(rows=batch.rows._replace(tokens=tokens)))
  assert late > 3
  plain.equal(_gradient(changed), _expected())


# Losses, without a model.


def _made_up(seed=0):
  """TokenStats as parameters, and a batch with a number in every field."""
  rng = np.random.default_rng(seed)
  draw = lambda: rng.normal(scale=0.5, size=(2, 8)).astype(np.float32)
  params = {'logprobs': draw() - 1, 'entropy': draw(), 'values': draw()}
  ids = np.repeat([[1] * 3 + [2] * 5], 2, 0).astype(np.int32)
  weighs = rng.random((2, 8)) < 0.6
  weights = np.where(weighs, rng.uniform(0.1, 1, (2, 8)), 0).astype(np.float32)
  numbers = {name: draw() for name in _NUMBERS} | {'kl_weights': 0.1 * weights}
  numbers['old_logprobs'] -= 1
  batch = types.Batch(tiny.rows(ids, ids, ids), ids, weighs, weights=weights, **numbers)
  return params, batch


_ESTIMATORS = [kl_lib.k1, kl_lib.k2, kl_lib.k3]
_ESTIMATORS += [kl_lib.straight_through(estimator) for estimator in _ESTIMATORS]
# As many pairs as are needed for each of both to be tried.
_PAIRS = itertools.islice(
  zip(itertools.cycle(_SURROGATES), itertools.cycle(_ESTIMATORS)),
  max(len(_SURROGATES), len(_ESTIMATORS)),
)


@pytest.mark.parametrize(('name', 'estimator'), list(_PAIRS))
def test_a_nan_without_weight_does_not_leak(bare, name, estimator):
  """From any field of the batch or from the model, for any surrogate and KL."""
  surrogate, kl = _SURROGATES[name], kl_lib.InLoss(estimator=estimator)
  algorithm = _PPO._replace(loss=surrogate, kl=kl)
  objective = learner.objective(algorithm, shared_critic=True)
  params, batch = _made_up()
  expected = _gradient([batch], params, objective)
  for leaf in jax.tree.leaves(expected[0]):
    assert np.isfinite(leaf).all() and ((leaf != 0) <= batch.action_mask).all()
    assert leaf.any()
  off = lambda x: np.where(batch.weights == 0, np.float32(np.nan), x)
  fields = {name: off(getattr(batch, name)) for name in _NUMBERS}
  broken = batch._replace(**fields)
  plain.equal(_gradient([broken], jax.tree.map(off, params), objective), expected)


def test_the_objective_is_the_sum_of_its_terms(bare):
  """Σ w (c ℓ - η H + ν ½(V - R)²) + Σ w_kl k3, each with its sign."""
  params, b = jax.tree.map(jnp.asarray, _made_up())
  _, sums = _gradient([b], params, _OBJECTIVE)
  stats = losses.TokenStats(**params)
  surrogate, kl = jax.jit(
    lambda *xs: (_PPO.loss(*xs)[0], kl_lib.k3(xs[0].logprobs, xs[1].ref_logprobs))
  )(stats, b)
  surrogate, kl, stats, b = jax.device_get((surrogate, kl, stats, b))
  policy = (b.weights * b.correction * surrogate).sum()
  near = b.values + np.clip(stats.values - b.values, -0.5, 0.5)
  error = np.maximum((stats.values - b.returns) ** 2, (near - b.returns) ** 2)
  value, entropy = (b.weights * 0.5 * error).sum(), (b.weights * stats.entropy).sum()
  expected = policy - 0.01 * entropy + 0.5 * value + (b.kl_weights * kl).sum()
  np.testing.assert_allclose(sums['loss'], expected, rtol=1e-5)
  # Metrics are weighted as the loss; the KL has no coefficient.
  watched = {'value_loss': value, 'entropy': entropy, 'kl': (b.weights * kl).sum()}
  for name, number in watched.items():
    np.testing.assert_allclose(sums[name], number, rtol=1e-5)
  np.testing.assert_allclose(sums['weight'], b.weights.sum(), rtol=1e-6)


def test_critic_objective_is_the_value_loss_alone(bare):
  params, b = _made_up()
  grads, sums = _gradient([b], params, learner.critic_objective(_PPO))
  loss = lambda values: losses.weighted(_PPO.value_loss(values, b), b.weights)
  b = jax.tree.map(jnp.asarray, b)
  expected, slope = jax.jit(jax.value_and_grad(loss))(jnp.asarray(params['values']))
  np.testing.assert_allclose(sums['loss'], expected, rtol=1e-6)
  np.testing.assert_allclose(sums['value_loss'], expected, rtol=1e-6)
  np.testing.assert_allclose(grads['values'], slope, rtol=1e-6)
  assert not np.any(grads['logprobs']) and not np.any(grads['entropy'])
  with pytest.raises(ValueError, match='no critic'):
    learner.critic_objective(plain.GRPO)


@pytest.mark.parametrize('advantage_mask', [True, False])
def test_a_shared_critic_learns_only_where_there_are_returns(bare, advantage_mask):
  """Also if every token has a loss: the environment's tokens have no return."""
  params, batch = _made_up()
  batch = batch._replace(weights=np.full((2, 8), 0.1, np.float32))
  algorithm = algorithms.ppo(
    value_clip=None, entropy_coef=1.0, advantage_mask=advantage_mask, loss_mask=False
  )
  objective = learner.objective(algorithm, shared_critic=True)
  grads, _ = _gradient([batch], params, objective)
  taught = batch.action_mask if advantage_mask else np.full((2, 8), True)
  np.testing.assert_array_equal(np.asarray(grads['values']) != 0, taught)
  assert np.asarray(grads['entropy']).all()


# Update.

_SGD = optax.sgd(0.1)


def _state(params=None):
  return learner.init(plain.copy_tree(params or plain.shared()), _SGD)


def _update(state, batches, optimizer=_SGD, loss=_loss):
  options = {'config': plain.CONFIG, 'loss': loss, 'temperature': plain.TEMPERATURE}
  gradients = learner.forward_backward(state.params, batches, **options)
  return learner.optim_step(state, gradients, optimizer=optimizer)


def test_update_is_one_step_on_the_summed_gradient():
  grads, sums = _expected()
  state, numbers = _update(_state(), _batches())
  assert int(state.step) == 1
  expected = jax.tree.map(lambda p, g: np.asarray(p) - 0.1 * g, plain.shared(), grads)
  plain.close(state.params, expected, 1e-6)
  norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(grads)))
  np.testing.assert_allclose(numbers.pop('grad_norm'), norm, rtol=1e-5)
  np.testing.assert_allclose(numbers.pop('loss'), sums['loss'], rtol=1e-5)
  # The rest are means over the tokens, weighted as in the loss.
  assert numbers.keys() == sums.keys() - {'loss', 'weight'}
  for name, value in numbers.items():
    assert isinstance(value, float)
    mean = sums[name] / sums['weight']
    np.testing.assert_allclose(value, mean, rtol=1e-4, atol=1e-7)


def test_means_do_not_depend_on_the_sum_of_the_weights(bare):
  """As Dr.GRPO's do not add up to 1; the loss does."""
  params, batch = _made_up()
  _, numbers = _update(_state(params), [batch])
  half = batch._replace(weights=batch.weights / 2, kl_weights=batch.kl_weights / 2)
  _, halved = _update(_state(params), [half])
  np.testing.assert_allclose(halved.pop('loss'), numbers.pop('loss') / 2, rtol=1e-5)
  np.testing.assert_allclose(
    halved.pop('grad_norm'), numbers.pop('grad_norm') / 2, rtol=1e-5
  )
  for name, value in numbers.items():
    np.testing.assert_allclose(halved[name], value, rtol=1e-5)
  # Nothing weighs: there is no mean, and nothing to learn.
  nothing = jax.tree.map(np.zeros_like, batch)
  state, numbers = _update(_state(params), [nothing])
  assert set(numbers.values()) == {0.0}
  plain.equal(state.params, params)


def test_gradients_of_several_calls_add_up():
  options = {'config': plain.CONFIG, 'loss': _loss, 'temperature': plain.TEMPERATURE}
  first, *others = _batches()
  at_once = learner.forward_backward(plain.shared(), [first, *others], **options)
  total = None
  for batches in ([first], others):
    total = learner.forward_backward(plain.shared(), batches, earlier=total, **options)
  plain.equal(total, at_once)
  # Without further micro-batches they are what they were.
  plain.equal(
    learner.forward_backward(plain.shared(), [], earlier=total, **options), at_once
  )


def test_update_takes_any_iterable_but_not_an_empty_one(bare):
  params, batch = _made_up()
  state = _state(params)
  with pytest.raises(ValueError, match='no micro-batch'):
    _update(state, iter([]))
  state, _ = _update(state, iter([batch, batch]))
  assert int(state.step) == 1


@pytest.mark.parametrize('where', ['loss', 'gradient'])
def test_non_finite_loss_or_gradient_is_named_and_leaves_the_state(bare, where):
  def root(stats, batch):
    # The root of 0 is 0, but its slope is not finite.
    return losses.weighted(stats.entropy + stats.logprobs**0.5, batch.weights), {}

  params, good = _made_up()
  params = {name: np.abs(x) for name, x in params.items()}
  bad = dict(params)
  if where == 'loss':
    bad['entropy'], match = params['entropy'] * np.inf, 'the loss: not finite'
  else:
    bad['logprobs'] = params['logprobs'] * 0
    match = r"the gradient of \['logprobs'\]: not finite"
  state = _state(bad)
  with pytest.raises(learner.NotFiniteError, match=f'{match}.*at step 0'):
    _update(state, iter([good]), loss=root)
  assert int(state.step) == 0
  plain.equal(state.params, bad)
  state, numbers = _update(_state(params), [good], loss=root)
  assert int(state.step) == 1 and np.isfinite(numbers['grad_norm'])


def test_bfloat16_is_for_activations_only():
  """Parameters, gradients and moments are float32."""
  half = dataclasses.replace(plain.CONFIG, dtype='bfloat16')
  options = {'loss': plain.GRPO_OBJECTIVE, 'temperature': 1.0, 'config': half}
  adam, (batch, *_) = optax.adam(1e-3), _batches()

  def step(params):
    state = learner.init(params, adam)
    grads, _ = learner._gradient(params, batch, **options)
    x = decoder.hidden(params, half, jax.tree.map(jnp.asarray, batch.rows))
    return x, grads, learner._apply(state, grads, optimizer=adam)

  x, grads, state = jax.eval_shape(step, plain.policy())
  assert x.dtype == jnp.bfloat16
  for leaf in jax.tree.leaves((grads, state.params, state.opt_state[0].mu)):
    assert leaf.dtype == jnp.float32
