"""Advantages equal the peers' own numbers (golden/make_ref_algos.py)."""

import dataclasses
import functools

import episodes
import numpy as np
import pytest

from agent_r1_jax.rl import advantages, algorithms, spans

_REWARDS = pytest.mark.parametrize('rewards', ['rewards_outcome', 'rewards_process'])
_GAE = {
  'g1.0_l1.0': (1.0, 1.0),
  'g0.99_l0.95': (0.99, 0.95),
  'g1.0_l0.95': (1.0, 0.95),
  'g0.9_l0.0': (0.9, 0.0),
}


def _close(actual, expected, tolerance=1e-9):
  # verl's means have 1e-8 in the denominator; so few are further off than 1e-10.
  np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def _equal(table, key, *, joined=False, returns=True, tolerance=1e-9):
  """The peer's advantages, and its returns if it has some of its own."""
  fields = [('adv', table.advantages), *([('ret', table.returns)] if returns else [])]
  for name, ours in fields:
    expected = episodes.golden_at_actions(f'{key}/{name}', joined=joined)
    _close(ours, expected, tolerance)


def _singleton_as_verls(table, key):
  """The last episode is alone in its group: ours is 0, verl keeps the raw score."""
  alone, verls = table.trajectory == 11, episodes.golden_at_actions(key)
  assert (table.advantages[alone] == 0).all() and (verls[alone] != 0).all()
  return dataclasses.replace(table, advantages=np.where(alone, verls, table.advantages))


def _gae(variant):
  gamma, lam = _GAE[variant]
  return functools.partial(advantages.gae, gamma=gamma, lam=lam)


def _remax(table):
  baselines = episodes.golden()['in/remax_baseline']
  return advantages.greedy_baseline(dataclasses.replace(table, baselines=baselines))


_GRPO, _WHITEN = advantages.group_relative, advantages.whiten
_DR_GRPO = functools.partial(_GRPO, divide_by_std=False)


@_REWARDS
@pytest.mark.parametrize(
  ('key', 'estimate', 'singleton', 'finish'),
  [
    # The peer's key, our estimator, verl's key if its singleton differs, what comes last.
    *((f'verl/gae/{{}}/{variant}', _gae(variant), None, _WHITEN) for variant in _GAE),
    ('verl/reinforce_pp/{}/g1.0', advantages.returns_to_go, None, _WHITEN),
    (
      'verl/reinforce_pp/{}/g0.97',
      functools.partial(advantages.returns_to_go, gamma=0.97),
      None,
      _WHITEN,
    ),
    ('verl/remax/{}', _remax, None, None),
    ('verl/grpo/{}/std1', _GRPO, 'verl/grpo/{}/std1', None),
    ('verl/grpo/{}/std0', _DR_GRPO, 'verl/grpo/{}/std0', None),
    # In verl's vectorised form the singleton has no advantage either.
    ('verl/rloo_vectorized/{}', advantages.leave_one_out, None, None),
    ('verl/rloo/{}', advantages.leave_one_out, 'verl/rloo/{}', None),
    ('verl/reinforce_pp_baseline/{}', _DR_GRPO, 'verl/grpo/{}/std0', _WHITEN),
    ('verl/gdpo_single/{}', _GRPO, 'verl/grpo/{}/std1', _WHITEN),
    # Agent-R1's steps are our segments.
    ('agentr1/token_gae/{}/g1.0_l1.0', _gae('g1.0_l1.0'), None, _WHITEN),
    ('agentr1/token_gae/{}/g0.99_l0.95', _gae('g0.99_l0.95'), None, _WHITEN),
    ('agentr1/grpo/{}/std1', _GRPO, None, None),
    ('agentr1/grpo/{}/std0', _DR_GRPO, None, None),
  ],
)
def test_estimators_are_the_peers(key, estimate, singleton, finish, rewards):
  joined = key.startswith('agentr1')
  out = estimate(episodes.golden_actions(rewards, joined=joined))
  if singleton:
    out = _singleton_as_verls(out, f'{singleton.format(rewards)}/adv')
  out = finish(out) if finish else out
  _equal(out, key.format(rewards), joined=joined, returns=out.returns is not None)


@_REWARDS
def test_gdpo_of_one_part_is_whitened_grpo(rewards):
  batch = episodes.golden_actions(rewards)
  batch = dataclasses.replace(batch, parts={'score': batch.scores})
  expected = _WHITEN(_GRPO(batch)).advantages
  np.testing.assert_array_equal(advantages.gdpo(batch).advantages, expected)


@_REWARDS
@pytest.mark.parametrize('variant', ['g1.0_l1.0', 'g0.99_l0.95'])
def test_gae_without_the_mask_is_search_r1s(rewards, variant):
  out = _gae(variant)(episodes.golden_actions(rewards, masked=False))
  g = episodes.golden()
  expected = g[f'searchr1/gae_unmasked/{rewards}/{variant}/ret']
  _close(out.returns.reshape(12, 24), expected)
  # Its advantages are whitened; the returns are made of them before that.
  _close(out.advantages.reshape(12, 24), expected - g['in/values'])


@_REWARDS
@pytest.mark.parametrize('variant', ['g1.0_l1.0', 'g0.99_l0.95'])
def test_step_gae_is_agent_r1s(rewards, variant):
  gamma, lam = _GAE[variant]
  batch = episodes.golden_actions(rewards, joined=True)
  # Its steps are rows, here segments, of several turns; and here a step is a turn.
  starts = spans.starts(batch.segment)
  batch = dataclasses.replace(
    batch,
    turn=batch.segment,
    turn_trajectory=batch.trajectory[starts],
    states=np.zeros(12, int),
  )
  out = advantages.step_gae(batch, gamma=gamma, lam=lam)
  _equal(out, f'agentr1/step_gae/{rewards}/{variant}', joined=True)


@_REWARDS
@pytest.mark.parametrize('variant', _GAE)
def test_gae_of_episodes_that_ran_out_is_verls(rewards, variant):
  """verl has 0 after the last token, however an episode ended."""
  gamma, lam = _GAE[variant]
  batch = episodes.golden_actions(rewards)
  numbers = np.arange(12)
  batch = dataclasses.replace(
    batch, truncated=numbers % 2 == 0, final_values=5.0 + numbers
  )
  out = algorithms.ppo(gamma=gamma, lam=lam).advantages(batch)
  _equal(out, f'verl/gae/{rewards}/{variant}')


def test_bi_level_gae_is_ragens():
  """Where no turn's reward is 0, so that it sees every turn. It computes in float32."""
  batch = episodes.golden_actions('rewards_process')
  # Random numbers, of several turns: so they are of any seed.
  assert batch.turn_rewards.all()
  assert max(np.bincount(batch.turn_trajectory)) > 1
  out = advantages.bi_level_gae(batch, high_gamma=0.95)
  _equal(advantages.whiten(out), 'ragen/bi_level_gae/g1_l1_hg0.95', tolerance=1e-6)


@pytest.mark.parametrize('scale', ['group', 'none'])
def test_group_relative_is_trls(scale):
  """Four rows a group, the outcome's rewards; its ε is larger."""
  batch = episodes.golden_actions('rewards_outcome')
  batch = dataclasses.replace(batch, group=np.arange(12) // 4)
  out = advantages.group_relative(batch, divide_by_std=scale == 'group', eps=1e-4)
  first = spans.starts(out.trajectory)
  _close(out.advantages[first], episodes.golden()[f'trl/adv/{scale}'])


def _authors_steps(rewards):
  """GiGPO's batch, and the row of each of its turns: a step of `traj` from `obs`."""
  g, mask = episodes.golden(), episodes.golden_mask()
  rows = [np.flatnonzero(g['in/traj'] == traj) for traj in np.unique(g['in/traj'])]
  order = np.concatenate(rows)
  batch = episodes.make_table(
    [mask[mine].sum(axis=1).tolist() for mine in rows],
    group=[int(g['in/uid'][mine[0]][1:]) for mine in rows],
    rewards=np.concatenate([g[f'in/{rewards}'][row][mask[row]] for row in order]),
    states=np.unique(g['in/obs'][order], return_inverse=True)[1],
  )
  return batch, order


@_REWARDS
@pytest.mark.parametrize('variant', ['mean_norm', 'mean_std_norm'])
def test_gigpo_is_the_authors_but_for_how_often_an_episode_counts(rewards, variant):
  g, mask = episodes.golden(), episodes.golden_mask()
  batch, order = _authors_steps(rewards)
  scores = np.zeros(12)
  scores[order] = batch.scores[batch.turn_trajectory]
  _close(scores, g[f'gigpo/{rewards}/episode_reward'])
  returns = spans.discounted_sum(batch.turn_trajectory, batch.turn_rewards, 0.95)
  _close(returns, g[f'gigpo/{rewards}/step_returns_g0.95'][order], 1e-6)
  divide = variant == 'mean_std_norm'
  ours = advantages.gigpo(batch, divide_by_std=divide)
  # A_E of theirs counts an episode once a step.
  whole = np.zeros(12)
  for uid in ('p0', 'p1'):
    s = scores[g['in/uid'] == uid]
    scale = s.std(ddof=1) + 1e-6 if divide else 1.0
    whole[g['in/uid'] == uid] = (s - s.mean()) / scale
  steps = g[f'gigpo/{rewards}/{variant}/adv'] - whole[:, None]
  part = advantages.group_relative(batch, divide_by_std=divide)
  expected = np.concatenate([steps[row][mask[row]] for row in order])
  # As above, its returns of the steps are float32.
  _close(ours.advantages, part.advantages + expected, 1e-6)


def test_whiten_is_verls():
  mask = episodes.golden_mask()
  values = episodes.golden()['in/values'][mask]
  table = episodes.make_table([[n] for n in mask.sum(axis=1)], advantages=values)
  out = advantages.whiten(table)
  _close(out.advantages, episodes.golden_at_actions('verl/masked_whiten'))
