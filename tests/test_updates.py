"""Learning from rollouts: mini-batches, KL, reference, sampler, checkpoints."""

import copy
import dataclasses

import episodes
import jax
import numpy as np
import optax
import plain
import pytest

from agent_r1_jax import config as config_lib
from agent_r1_jax.models import costs
from agent_r1_jax.rl import algorithms, credit, learner, updates
from agent_r1_jax.rl import kl as kl_lib
from agent_r1_jax.rl import train_state as train_state_lib

_SGD = optax.sgd(0.1)
_PPO = algorithms.ppo(
  kl=kl_lib.InReward(0.05, control=kl_lib.adaptive(target=0.5, horizon=10))
)


@pytest.fixture(scope='module', autouse=True)
def few_objectives():
  """Lets plans of one algorithm share compiled programs."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(learner, 'objective', plain.objective)
    patch.setattr(learner, 'critic_objective', plain.critic_objective)
    yield


def _plan(algorithm=plain.GRPO, **options) -> train_state_lib.UpdateConfig:
  optimizers = {'policy': _SGD}
  if algorithm.needs_critic:
    optimizers['critic'] = _SGD
  names = {field.name for field in dataclasses.fields(config_lib.Schedule)}
  schedule = {name: options.pop(name) for name in names & options.keys()}
  options = {'optimizers': optimizers, 'temperature': plain.TEMPERATURE} | options
  options['schedule'] = config_lib.Schedule(**schedule)
  return train_state_lib.UpdateConfig(plain.CONFIG, algorithm, plain.SHAPE, **options)


def _start(update_config, params=None, reference=None) -> updates.TrainState:
  return train_state_lib.init(
    plain.copy_tree(params or plain.policy()), update_config, reference
  )


def _rollout(step=0, n=4):
  """Other tasks in every step."""
  ts = episodes.make_varied(14)
  return [ts[(step + i) % 14] for i in range(n)]


def _copied(train_state):
  """Parameters by name, as they are now."""
  trees = {name: state.params for name, state in train_state.states.items()}
  trees |= {'sampler': train_state.sampler, 'reference': train_state.reference}
  return jax.tree.map(np.array, trees)


def _same(a, b) -> bool:
  return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.fixture
def steps(monkeypatch):
  """Each optimizer step, as (name, batch): it does nothing but give the numbers back."""
  found = []

  def forward_backward(params, batches, **kwargs):
    name = 'critic' if 'value_head' in params else 'policy'
    batch = plain.whole(batches)
    found.append((name, batch))
    kl = {} if batch.kl_weights is None else {'kl': 0.4 + 0.2 * len(found)}
    return {'loss': float(len(found)), 'value_loss': 7.0} | kl

  monkeypatch.setattr(learner, 'forward_backward', forward_backward)
  monkeypatch.setattr(learner, 'optim_step', lambda state, numbers, **_: (state, numbers))
  return found


# Mini-batches.


def _tokens(batches):
  entered = (plain.tokens_of_entries(b)[b.segment_ids > 0] for b in batches)
  return sorted(np.concatenate([*entered]).tolist())


def test_every_epoch_goes_through_all_trajectories(steps):
  ts = [episodes.trajectory('.' + '0' * (1 + i), rewards=[i], seed=i) for i in range(5)]
  for i, t in enumerate(ts):
    t.segments[0].tokens[:] = i
  update_config = _plan(epochs=3, minibatches=2)
  train_state, metrics, _ = updates.learn(_start(update_config), ts, update_config)
  assert train_state.kl_coef == 0 and train_state.reference is None, 'there is no KL'
  assert not {'kl', 'kl_coef'} & metrics.keys()
  assert len(steps) == 6
  every = _tokens([plain.padded(plain.segments_of(ts))[1]])
  orders = []
  for epoch in range(3):
    batches = [batch for _, batch in steps[2 * epoch : 2 * epoch + 2]]
    # A mean reward of 2: the third trajectory has no advantage, and is left out.
    live = [t for t in every if t != 2]
    assert _tokens(batches) == live
    orders.append(tuple(map(tuple, map(_tokens, ([b] for b in batches)))))
  assert len(set(orders)) > 1
  # Numbers of the steps are averaged, but for their operations.
  assert metrics['loss'] == np.mean([1, 2, 3, 4, 5, 6])
  counted = [costs.count_gradient(plain.policy(), plain.CONFIG, b) for _, b in steps]
  assert metrics['operations'] == sum(counted) > 0


def test_order_of_trajectories_depends_on_seed_and_step():
  def orders(step, **options):
    update_config = _plan(epochs=2, minibatches=3, **options)
    return list(updates._split_epochs(10, update_config, step))

  assert orders(4) == orders(4)
  assert orders(4) != orders(5) and orders(4) != orders(4, seed=1)
  sizes = [len(members) for members in orders(0)]
  assert sizes == [4, 3, 3] * 2
  # With fewer trajectories than mini-batches no step is empty.
  sizes = [len(m) for m in updates._split_epochs(2, _plan(minibatches=3), 0)]
  assert sizes == [1, 1]


def test_own_critic_steps_once_for_each_step_of_the_policy(steps):
  update_config = _plan(algorithms.ppo(kl_coef=0.0), epochs=2, minibatches=2)
  _, metrics, _ = updates.learn(_start(update_config), _rollout(), update_config)
  assert [name for name, _ in steps] == ['critic', 'policy'] * 4
  assert all((batch.values is None) == (name == 'policy') for name, batch in steps)
  assert metrics['critic_loss'] == 4 and metrics['loss'] == 5
  assert metrics['value_loss'] == 7


# The critic.


def test_a_critic_starts_as_the_policy_with_a_head_of_zeros():
  train_state = _start(_plan(_PPO))
  params = dict(train_state.states['critic'].params)
  assert not any(map(np.any, jax.tree.leaves(params.pop('value_head'))))
  plain.equal(params, plain.policy())
  # A shared one is the policy's own head.
  update_config = _plan(_PPO, optimizers={'policy': _SGD})
  assert update_config.shared_critic and not _plan().shared_critic
  assert not _plan(_PPO).shared_critic
  assert _start(update_config, plain.shared()).states.keys() == {'policy'}


def test_critic_warmup_trains_the_critic_alone():
  update_config = _plan(_PPO, critic_warmup=2)
  train_state = _start(update_config)
  for step in range(3):
    before = _copied(train_state)
    train_state, metrics, _ = updates.learn(train_state, _rollout(step), update_config)
    after = _copied(train_state)
    assert _same(before['policy'], after['policy']) == (step < 2)
    assert not _same(before['critic'], after['critic'])
    assert ('loss' in metrics) == ('grad_norm' in metrics) == (step == 2)
    assert metrics['value_loss'] > 0 and metrics['critic_grad_norm'] > 0
  watched = {'kl', 'kl_coef', 'entropy', 'behaviour_kl', 'advantage_std'}
  assert watched <= metrics.keys()
  # Bit for bit, up to the last step of the warm-up.
  plain.equal(before['policy'], plain.policy())
  assert (
    int(train_state.states['policy'].step) == 1
    and int(train_state.states['critic'].step) == 3
  )


# The KL and the reference.


def test_the_coefficient_of_the_kl_in_the_reward_is_controlled(monkeypatch):
  used, less_kl = [], credit.kl_lib.less_kl

  def spy(table, *, coef, estimator):
    used.append(coef)
    return less_kl(table, coef=coef, estimator=estimator)

  monkeypatch.setattr(credit.kl_lib, 'less_kl', spy)
  monkeypatch.setattr(learner, 'forward_backward', lambda *args, **_: {})
  monkeypatch.setattr(learner, 'optim_step', lambda state, numbers, **_: (state, numbers))
  update_config = _plan(_PPO, minibatches=2)
  train_state = _start(update_config)
  expected = 0.05
  for step in range(3):
    train_state, metrics, _ = updates.learn(train_state, _rollout(step), update_config)
    assert used[-1] == metrics['kl_coef'] == expected
    # Four trajectories, a target of 0.5, a horizon of 10.
    expected *= 1 + np.clip(metrics['kl'] / 0.5 - 1, -0.2, 0.2) * 4 / 10
    assert train_state.kl_coef == pytest.approx(expected, rel=1e-12) != used[-1]


def test_the_coefficient_of_the_kl_in_the_loss_is_controlled(steps):
  control = kl_lib.adaptive(target=0.5, horizon=10)
  kl = kl_lib.InLoss(0.05, control=control)
  update_config = _plan(plain.GRPO._replace(kl=kl), minibatches=2)
  train_state, expected = _start(update_config), 0.05
  for step in range(2):
    train_state, metrics, _ = updates.learn(train_state, _rollout(step), update_config)
    for _, batch in steps[-2:]:
      np.testing.assert_allclose(batch.kl_weights, expected * batch.weights, rtol=1e-6)
    assert metrics['kl_coef'] == expected
    # The mean over the steps, 0.7 and 1.1: in the second it is too far off.
    assert metrics['kl'] == pytest.approx(0.7 + 0.4 * step)
    expected *= 1 + np.clip(metrics['kl'] / 0.5 - 1, -0.2, 0.2) * 4 / 10
    assert train_state.kl_coef == pytest.approx(expected, rel=1e-12)


def test_the_reference_is_the_start_unless_another_is_given():
  update_config = _plan(_PPO)
  train_state = _start(update_config)
  plain.equal(train_state.reference, plain.policy())
  train_state, *_ = updates.learn(train_state, _rollout(), update_config)
  # It is a copy: the update used the parameters up.
  plain.equal(train_state.reference, plain.policy())
  other = _start(update_config, reference=plain.reference())
  assert other.reference is plain.reference()


def test_reference_becomes_the_policy_every_reference_every_steps():
  update_config = _plan(_PPO, reference_every=2)
  train_state = _start(update_config)
  for step in range(1, 6):
    before = _copied(train_state)
    train_state, *_ = updates.learn(train_state, _rollout(step), update_config)
    after = _copied(train_state)
    expected = after['policy'] if step % 2 == 0 else before['reference']
    plain.equal(after['reference'], expected)
  assert not _same(after['reference'], plain.policy())


# The engine's parameters.


@pytest.mark.parametrize('every', [1, 2, 3])
def test_sampler_becomes_the_policy_every_sync_every_steps(every):
  update_config = _plan(sync_every=every)
  train_state = _start(update_config)
  plain.equal(train_state.sampler, plain.policy())
  for step in range(1, 6):
    before = _copied(train_state)
    used_up = train_state.states['policy'].params
    train_state, *_ = updates.learn(train_state, _rollout(step), update_config)
    assert all(x.is_deleted() for x in jax.tree.leaves(used_up))
    # The sampler's lives: it can be read.
    after = _copied(train_state)
    handed = step % every == 0
    plain.equal(after['sampler'], after['policy'] if handed else before['sampler'])
    assert train_state.sampler_step == step - step % every
    assert not _same(before['policy'], after['policy'])


# No argument is changed.


@pytest.mark.parametrize('options', [{}, {'reference_every': 1, 'sync_every': 2}])
def test_learn_changes_no_argument(options):
  """Except for donated arrays."""
  update_config = _plan(_PPO, minibatches=2, **options)
  train_state, ts = _start(update_config), _rollout()
  fields, states = dict(vars(train_state)), dict(train_state.states)
  before, baselines = copy.deepcopy(ts), [0.5] * 4
  prefixes = [np.arange(3, dtype=np.int32)] * 4
  new, *_ = updates.learn(
    train_state, ts, update_config, baselines=baselines, prefixes=prefixes
  )
  assert all(value is fields[name] for name, value in vars(train_state).items())
  assert {n: id(x) for n, x in train_state.states.items()} == {
    n: id(x) for n, x in states.items()
  }
  assert (train_state.step, new.step) == (0, 1) and new.kl_coef != train_state.kl_coef
  assert baselines == [0.5] * 4 and all(p.tolist() == [0, 1, 2] for p in prefixes)
  for t, b in zip(ts, before):
    assert (t.group, t.turns, t.metrics) == (b.group, b.turns, b.metrics)
    for segment, was in zip(t.segments, b.segments):
      np.testing.assert_equal(vars(segment), vars(was))


# Baselines, prefixes, shape and temperature.


def test_baselines_and_prefixes_reach_the_credit(steps):
  ts = [episodes.trajectory('..0', rewards=[i], seed=i) for i in range(4)]
  update_config = _plan(algorithms.remax())
  updates.learn(_start(update_config), ts, update_config, baselines=[0.5, 0.25, 0.0, 4.0])
  ((_, batch),) = steps
  assert sorted(batch.advantages[batch.action_mask]) == [-1.0, -0.5, 0.75, 2.0]
  update_config = _plan(algorithms.ppo(kl_coef=0.0))
  prefixes = [np.array([60, 61], np.int32)] * 4
  updates.learn(_start(update_config), ts, update_config, prefixes=prefixes)
  (_, of_critic), (_, of_policy) = steps[1:]
  texts = [t.segments[0].tokens.tolist() for t in ts]
  assert _tokens([of_policy]) == sorted(sum(texts, []))
  assert _tokens([of_critic]) == sorted(sum(texts, [60, 61] * 4))


def test_reference_is_scored_with_its_shape_and_the_runs_temperature(steps, monkeypatch):
  asked = []

  def logprobs(params, batch, **kwargs):
    asked.append((params, kwargs))
    return np.zeros(batch.weights.shape)

  monkeypatch.setattr(learner, 'logprobs', logprobs)
  larger = dataclasses.replace(plain.CONFIG, num_layers=3)
  update_config = _plan(algorithms.grpo(), reference_model=larger, temperature=0.5)
  updates.learn(
    _start(update_config, reference=plain.reference()), _rollout(n=1), update_config
  )
  ((params, kwargs),) = asked
  assert params is plain.reference() and kwargs == {'config': larger, 'temperature': 0.5}


# Checkpoints.


@pytest.mark.parametrize('options', [{}, {'reference_every': 2, 'sync_every': 3}])
def test_restored_train_state_goes_on_bit_for_bit(options):
  update_config = _plan(_PPO, minibatches=2, **options)

  def learned(train_state, steps):
    metrics = {}
    for step in steps:
      train_state, metrics, _ = updates.learn(train_state, _rollout(step), update_config)
    return train_state, metrics

  train_state, _ = learned(_start(update_config), range(4))
  arrays, numbers = (
    train_state.checkpoint_arrays(update_config),
    train_state.checkpoint_numbers(),
  )
  extra = {'reference', 'sampler'} if options else set()
  assert arrays.keys() == {'policy', 'critic'} | extra
  saved = plain.copy_tree(arrays)
  restored = _start(update_config).restore(saved, dict(numbers))
  assert restored.step == 4 and restored.kl_coef == train_state.kl_coef != 0.05
  assert restored.sampler_step == (3 if options else 4)
  plain.equal(_copied(restored), _copied(train_state))
  train_state, metrics = learned(train_state, range(4, 7))
  again, same = learned(restored, range(4, 7))
  plain.equal(_copied(again), _copied(train_state))
  plain.equal(again.states, train_state.states)
  assert (
    same == metrics and again.checkpoint_numbers() == train_state.checkpoint_numbers()
  )


def test_an_empty_rollout_changes_nothing_but_the_step():
  update_config = _plan(_PPO)
  train_state = _start(update_config)
  before = _copied(train_state), train_state.kl_coef
  train_state, metrics, _ = updates.learn(train_state, [], update_config)
  assert train_state.step == train_state.sampler_step == 1 and metrics == {
    'kl_coef': 0.05
  }
  plain.equal((_copied(train_state), train_state.kl_coef), before)
  assert int(train_state.states['policy'].step) == 0
