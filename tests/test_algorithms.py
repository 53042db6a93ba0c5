"""Algorithms: their parts, and their losses against the peers' (golden/)."""

import dataclasses
import functools
import inspect

import episodes
import jax
import numpy as np
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.rl import advantages, algorithms, kl, learner, losses, spans

pytestmark = pytest.mark.usefixtures('float64')
# Every constructor, with the options that it must have.
_MUST = {'dr_grpo': {'length': 24}}
_MAKERS = {
  name: functools.partial(make, **_MUST.get(name, {}))
  for name, make in inspect.getmembers(algorithms, inspect.isfunction)
  if make.__annotations__.get('return') is algorithms.Algorithm and name[0] != '_'
}
_every = pytest.mark.parametrize('name', _MAKERS)


@functools.cache
def _inputs():
  """The peers' episodes, one a row, as TokenStats and Batch of float64 numpy arrays."""
  g, mask = episodes.golden(), episodes.golden_mask()
  counts = np.arange(24) * np.ones((12, 1), np.int32)
  batch = types.Batch(
    rows=tiny.rows(counts, counts),
    segment_ids=np.ones((12, 24), np.int32),
    action_mask=mask,
    old_logprobs=g['in/old_logp'],
    advantages=g['in/adv'],
    weights=mask / mask.sum(),
    ref_logprobs=g['in/ref_logp'],
    values=g['in/values'],
    returns=g['in/rewards_process'],
  )
  entropy = g['verl/entropy_from_logits']
  return losses.TokenStats(g['in/logp'], entropy, g['in/vpreds']), batch


def _actions(rewards='rewards_process'):
  """The peers' episodes with all that an estimator may read."""
  actions = episodes.golden_actions(rewards)
  numbers = np.arange(12)
  return dataclasses.replace(
    actions,
    baselines=0.1 * numbers,
    final_values=np.full(12, 0.5),
    truncated=numbers % 3 == 0,
    parts={'answer': numbers % 2.0, 'format': actions.scores},
  )


@_every
def test_the_kl_can_be_left_out_or_put_in(name):
  make = _MAKERS[name]
  if name in _WITHOUT_KL:
    with pytest.raises(TypeError):
      make(kl_coef=0.5)
  else:
    assert _takes(make, kl_coef=0.5), f'{name}: take kl_coef, or be in _WITHOUT_KL'
    where = kl.InReward if name in _KL_IN_REWARD else kl.InLoss
    assert make(kl_coef=0.5).kl == where(0.5) and make(kl_coef=0.5).needs_reference
    assert make(kl_coef=0.0).kl is None and not make(kl_coef=0.0).needs_reference
  other = kl.InReward(0.3, kl.k2, kl.adaptive())
  assert make(kl=other).kl is other


def _takes(make, **options):
  try:
    make(**options)
  except TypeError:
    return False
  return True


_WITHOUT_KL = ('distillation', 'rejection')
_KL_IN_REWARD = ['rloo', 'reinforce', 'reinforce_plus_plus', 'remax', 'ppo']
_KL_IN_REWARD += ['reinforce_plus_plus_baseline']


@_every
def test_other_fields_are_passed_on_and_unknown_options_are_refused(name):
  fields = {
    'reads': ('parts',),
    'value_coef': 0.3,
    'entropy_coef': 0.01,
    'correction': print,
    'loss_mask': False,
    'advantage_mask': False,
    'mask_truncated': True,
  }
  made = _MAKERS[name](**fields)
  assert {field: getattr(made, field) for field in fields} == fields
  default = _MAKERS[name]()
  assert all(getattr(default, field) != value for field, value in fields.items())
  for unknown in ({'clipp': 0.1}, {'advantages': print}, {'loss': print}):
    with pytest.raises(TypeError):
      _MAKERS[name](**unknown)


@functools.cache
def _loss(loss):
  # One program, where single operations would each be compiled.
  return jax.jit(lambda *xs: loss(*xs)[0])


def _effects(algorithm, needs_loss):
  """Computes the result of each part of an algorithm."""
  stats, batch = _inputs()
  shaped = actions = _actions()
  for transform in algorithm.rewards:
    shaped = transform(shaped)
  effects = {
    'advantages': algorithm.advantages(actions).advantages,
    'aggregate': algorithm.aggregation(np.array([1, 3, 0, 4])),
    'rewards': shaped.rewards,
  }
  if needs_loss:
    effects['loss'] = np.asarray(_loss(algorithm.loss)(stats, batch))
    if algorithm.value_loss:
      loss = algorithm.value_loss(*jax.tree.map(np.asarray, (stats.values, batch)))
      effects['value_loss'] = np.asarray(loss)
  return {k: x[batch.action_mask] if x.ndim == 2 else x for k, x in effects.items()}


@functools.cache
def _effects_of_default(name, needs_loss):
  return _effects(_MAKERS[name](), needs_loss)


# Option -> (another value, the part that it changes).
_PARTS = {
  'divide_by_std': (None, 'advantages'),  # The other one than the default.
  'gamma': (0.5, 'advantages'),
  'lam': (0.5, 'advantages'),
  'step_weight': (0.5, 'advantages'),
  'estimator': (advantages.bi_level_gae, 'advantages'),
  'weights': ({'answer': 2.0, 'format': -1.0}, 'advantages'),
  'bootstrap_truncated': (True, 'advantages'),
  'threshold': (0.0, 'advantages'),
  'clip': (0.1, 'loss'),
  'clip_low': (0.05, 'loss'),
  'clip_high': (0.05, 'loss'),
  'dual_clip': (1.1, 'loss'),
  'value_clip': (0.1, 'value_loss'),
  'length': (12, 'aggregate'),
  'aggregate': (losses.seq_mean_token_sum, 'aggregate'),
  'overlong': ({'limit': 8, 'buffer': 4}, 'rewards'),
}


def _options(name):
  """(constructor, option) of a signature, and of grpo's that it passes on."""
  own = inspect.signature(getattr(algorithms, name)).parameters
  options = {n for n, p in own.items() if p.kind == p.KEYWORD_ONLY}
  if 'options' in own:
    options |= {n for kind, n in _options('grpo')} - {'dual_clip', 'divide_by_std'}
  if name == 'dr_grpo':
    options -= {'aggregate'}
  return [(name, option) for option in sorted(options - {'kl_coef'})]


@pytest.mark.parametrize(
  ('name', 'option'), [pair for name in _MAKERS for pair in _options(name)]
)
def test_options_change_their_part_and_no_other(name, option):
  assert option in _PARTS, f'_PARTS: another {option}, and the part that it changes'
  value, part = _PARTS[option]
  if option == 'divide_by_std':
    value = not inspect.signature(getattr(algorithms, name)).parameters[option].default
  if name == 'gspo' and option.startswith('clip'):
    value = 0.3
  before = _effects_of_default(name, part.endswith('loss'))
  after = _effects(_MAKERS[name](**{option: value}), part.endswith('loss'))
  changed = {k for k, x in before.items() if not np.array_equal(x, after[k])}
  assert changed == {part}


# The bounds ε_l and ε_h by default of the algorithms that clip.
_BOUNDS = {
  'grpo': (0.2, 0.2),
  'dr_grpo': (0.2, 0.2),
  'dapo': (0.2, 0.28),  # The paper's (arXiv 2503.14476, section 4.1).
  'gspo': (3e-4, 4e-4),  # The paper's (arXiv 2507.18071, section 5.1).
  'gigpo': (0.2, 0.2),
  'gdpo': (0.2, 0.2),
  'ppo': (0.2, 0.2),
  'rloo': (0.2, 0.2),
  'reinforce_plus_plus': (0.2, 0.2),
  'reinforce_plus_plus_baseline': (0.2, 0.2),
}


def _losses_at(algorithm, ratios, advantages):
  """The losses of sequences of one token, `ratio` times as likely as they were."""
  column = lambda x: np.broadcast_to(np.array(x, float)[..., None], (len(ratios), 1))
  stats = losses.TokenStats(column(np.log(ratios) - 2.0), column(0.0))
  ids = np.ones((len(ratios), 1), np.int32)
  numbers = map(column, (-2.0, advantages, 1.0))
  batch = types.Batch(tiny.rows(ids, ids - 1, ids), ids, ids > 0, *numbers)
  return _loss(algorithm.loss)(stats, batch)[:, 0]


@_every
def test_clip_low_bounds_below_and_clip_high_above_by_default_as_in_the_papers(name):
  """With ε_l = 0.1, ε_h = 0.3, A = 1 gains up to a ratio of 1.3, A = -1 down to 0.9."""
  options = {option for _, option in _options(name)}
  clips = bool(options & {'clip', 'clip_low'})
  assert clips == (name in _BOUNDS), f'_BOUNDS: the default bounds of {name}, if it clips'
  cases = []
  if name in _BOUNDS:
    low, high = _BOUNDS[name]
    cases += [({}, (1.6, 0.4), (1.0, -1.0), (-1 - high, 1 - low))]
  if 'clip_low' in options:
    given = {'clip_low': 0.1, 'clip_high': 0.3}
    given |= {'dual_clip': None} if 'dual_clip' in options else {}
    signs = (1.0, 1.0, -1.0, -1.0)
    cases += [(given, (1.25, 1.5, 0.95, 0.75), signs, (-1.25, -1.3, 0.95, 0.9))]
  for given, ratios, advantages_, expected in cases:
    found = _losses_at(_MAKERS[name](**given), ratios, advantages_)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_replaced_loss_brings_its_aggregation():
  """Three tokens and one: 1/4 each; or 1/6 and 1/2, where sequences weigh the same."""
  counts = np.array([3, 1])
  by_token, by_sequence = [1 / 4, 1 / 4], [1 / 6, 1 / 2]

  def check(algorithm, expected):
    np.testing.assert_allclose(algorithm.aggregation(counts), expected, rtol=1e-15)

  check(algorithms.grpo(), by_token)
  check(algorithms.gspo(), by_sequence)
  for loss in (losses.gspo(), losses.sapo()):
    check(algorithms.grpo()._replace(loss=loss), by_sequence)
    check(algorithms.ppo()._replace(loss=loss), by_sequence)
  for loss in (losses.ppo_clip(), losses.cispo(), lambda stats, batch: (0.0, {})):
    check(algorithms.gspo()._replace(loss=loss), by_token)
  # An aggregation that is given stays.
  named = algorithms.gspo(aggregate=losses.token_mean)
  check(named, by_token)
  check(named._replace(loss=losses.sapo()), by_token)
  fixed = algorithms.dr_grpo(length=10)._replace(loss=losses.gspo())
  check(fixed, [1 / 20, 1 / 20])


def test_dapo_keeps_rewards_that_are_given():
  def double(table):
    return dataclasses.replace(table, rewards=2 * table.rewards)

  first, second = algorithms.dapo(
    rewards=(double,), overlong={'limit': 8, 'buffer': 4}
  ).rewards
  assert first is double and second.keywords == {'limit': 8, 'buffer': 4}
  assert algorithms.dapo(rewards=(double,)).rewards == (double,)


@pytest.mark.parametrize('length', [0, -1.0, float('nan')])
def test_norm_that_is_not_positive_is_refused(length):
  with pytest.raises(ValueError, match='length'):
    losses.seq_mean_token_sum_norm(length)


def test_ppos_step_advantages_are_not_whitened_twice():
  actions = _actions()
  step = algorithms.ppo(estimator=advantages.step_gae, gamma=0.9).advantages(actions)
  expected = advantages.step_gae(actions, gamma=0.9)
  np.testing.assert_array_equal(step.advantages, expected.advantages)


@_every
def test_groups_of_one_and_of_equal_rewards_make_no_nan(name):
  """And where the group is the baseline, exactly 0."""
  algorithm, actions = _MAKERS[name](), _actions()
  alone = dataclasses.replace(actions, group=np.arange(12))
  # 0.1 + 0.2 and 0.3: equal but for rounding.
  rewards, last = np.zeros(len(actions)), spans.ends(actions.trajectory)
  early = actions.baselines > 0.5
  rewards[last - 1] = np.where(early, 0.1, 0.0)
  rewards[last] = np.where(early, 0.2, 0.3)
  grouped = dataclasses.replace(actions, rewards=rewards, parts={'answer': np.ones(12)})
  assert len({*grouped.scores}) > 1
  for table in (alone, grouped):
    out = algorithm.advantages(table).advantages
    assert np.isfinite(out).all()
    if name in ('grpo', 'dr_grpo', 'dapo', 'gspo', 'rloo', 'gdpo'):
      assert not out.any()
  one = actions.take(actions.trajectory == 0)
  assert np.isfinite(algorithm.advantages(one).advantages).all()


def test_aggregations_by_hand():
  counts = np.array([1, 3, 0, 4])

  def check(aggregate, expected):
    # The weight of a trajectory without a token does not matter.
    actual = aggregate(counts)[counts > 0]
    np.testing.assert_allclose(actual, expected, rtol=1e-15)
    assert np.isfinite(aggregate(counts)).all()
    for nothing in ([], [0, 0]):
      assert np.isfinite(aggregate(np.array(nothing, int))).all()

  check(losses.token_mean, [1 / 8] * 3)
  check(losses.seq_mean_token_mean, [1 / 3, 1 / 9, 1 / 12])
  check(losses.seq_mean_token_sum, [1 / 3] * 3)
  check(losses.seq_mean_token_sum_norm(10), [1 / 30] * 3)


# The whole loss.


@functools.cache
def _compiled(algorithm):
  """(stats, batch) -> ((loss, watched), gradient of the stats)."""
  objective = learner.objective(algorithm, shared_critic=algorithm.needs_critic)
  return jax.jit(jax.value_and_grad(objective, has_aux=True))


@functools.cache
def _grpo():
  return algorithms.grpo(kl_coef=0.001)


@functools.cache
def _ppo():
  return algorithms.ppo(value_coef=0.7, entropy_coef=0.01)


def _with_kl(batch, coef=0.001):
  return batch._replace(kl_weights=coef * batch.weights)


def test_grpo_loss_and_gradient_equal_verls():
  stats, batch = _inputs()
  (loss, watched), grad = _compiled(_grpo())(stats, _with_kl(batch))
  g = episodes.golden()
  np.testing.assert_allclose(loss, g['verl/ppo_plus_klloss0.001/loss'], rtol=1e-9)
  np.testing.assert_allclose(
    grad.logprobs, g['verl/ppo_plus_klloss0.001/grad'], rtol=1e-9, atol=1e-12
  )
  expected = {
    'clip_fraction': g['verl/ppo_vanilla/metrics/pg_clipfrac'],
    'behaviour_kl': g['verl/ppo_vanilla/metrics/ppo_kl'],
    'kl': (g['verl/kl/low_var_kl/val'] * batch.weights).sum(),
    'entropy': g['verl/entropy_loss'],
  }
  assert watched.keys() == expected.keys()
  for name, value in expected.items():
    # verl's masked means have 1e-8 in the count; of 119 tokens that is less than 1e-10.
    mean = (watched[name] * batch.weights).sum()
    np.testing.assert_allclose(mean, value, rtol=1e-9, err_msg=name)


def test_ppo_loss_and_gradient_equal_the_sum_of_verls():
  stats, batch = _inputs()
  (loss, watched), grad = _compiled(_ppo())(stats, batch)
  g = episodes.golden()
  expected = (
    g['verl/ppo_vanilla/token-mean/loss']
    + 0.7 * g['verl/value_loss/clip0.5/loss']
    - 0.01 * g['verl/entropy_loss']
  )
  np.testing.assert_allclose(loss, expected, rtol=1e-9)
  for part, value in (
    (grad.logprobs, g['verl/ppo_vanilla/token-mean/grad']),
    (grad.values, 0.7 * g['verl/value_loss/clip0.5/grad']),
    (grad.entropy, -0.01 * batch.weights),
  ):
    np.testing.assert_allclose(part, value, rtol=1e-9, atol=1e-12)
  value_loss = (watched['value_loss'] * batch.weights).sum()
  np.testing.assert_allclose(value_loss, g['verl/value_loss/clip0.5/loss'], rtol=1e-9)


def test_a_corrections_weights_multiply_verls_loss():
  """verl's truncated importance sampling; the KL is not corrected."""
  stats, batch = _inputs()
  g = episodes.golden()
  weights = g['verl/rollout_is/token/th2.0/bn0/w']
  corrected = batch._replace(correction=np.where(batch.action_mask, weights, 1.0))
  (loss, _), grad = _compiled(algorithms.grpo(kl_coef=0.0))(stats, corrected)
  key = 'verl/ppo_vanilla/tis_token2.0'
  np.testing.assert_allclose(loss, g[f'{key}/loss'], rtol=1e-9)
  np.testing.assert_allclose(grad.logprobs, g[f'{key}/grad'], rtol=1e-9, atol=1e-12)
  (with_kl, watched), _ = _compiled(_grpo())(stats, _with_kl(corrected))
  kl_term = 0.001 * (watched['kl'] * batch.weights).sum()
  np.testing.assert_allclose(with_kl - loss, kl_term, rtol=1e-9)


def test_entropy_bonus_equals_trls():
  stats, batch = _inputs()
  g = episodes.golden()
  assert (g['in/trl_completion_mask'] >= batch.action_mask).all()
  spread = np.broadcast_to(g['in/trl_adv'][:, None], (12, 24))
  bonus = algorithms.grpo(kl_coef=0.0, dual_clip=None, entropy_coef=0.01)
  (loss, _), grad = _compiled(bonus)(stats, batch._replace(advantages=spread))
  key = 'trl/entropy_bonus_0.01'
  np.testing.assert_allclose(loss, g[f'{key}/loss'], rtol=1e-9)
  np.testing.assert_allclose(grad.logprobs, g[f'{key}/grad'], rtol=1e-9, atol=1e-12)
