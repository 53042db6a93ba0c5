"""Mini-batches: every token's numbers, its weight, and what is left out."""

import dataclasses

import episodes
import jax
import numpy as np
import plain
import pytest

from agent_r1_jax.rl import (
  algorithms,
  losses,
  minibatch,
  packing,
)
from agent_r1_jax.rl import kl as kl_lib
from agent_r1_jax.rl import table as table_lib

_PPO = algorithms.ppo(gamma=0.9, lam=0.8, kl_coef=0.05)


def _made_up(trajectories):
  """A table with different numbers for every token."""
  names = (
    'old_logprobs',
    'advantages',
    'ref_logprobs',
    'correction',
    'values',
    'returns',
  )
  table = table_lib.build(trajectories)
  numbers = {
    name: np.arange(1.0, len(table) + 1) + 1000 * i for i, name in enumerate(names)
  }
  return dataclasses.replace(table, **numbers), names


_AGGREGATES = [
  losses.token_mean,
  losses.seq_mean_token_mean,
  losses.seq_mean_token_sum_norm(20),
]


@pytest.mark.parametrize('members', [range(14), [5, 0, 2], [1]])
@pytest.mark.parametrize('aggregate', _AGGREGATES)
def test_minibatch_has_every_number_at_its_token(members, aggregate):
  algorithm = _PPO._replace(aggregate=aggregate, kl=kl_lib.InLoss())
  (table, names), shape = (
    _made_up(plain.trajectories()),
    packing.MicrobatchShape(3, 40, False),
  )
  options = {'shape': shape, 'kl_coef': 0.3, 'shared_critic': True}
  batches, _ = minibatch.make_policy(table, members, algorithm, **options)
  chosen = [plain.trajectories()[i] for i in members]
  segments = plain.segments_of(chosen)
  batch = plain.unpacked(batches, segments, shape)
  rows = np.concatenate([np.flatnonzero(table.trajectory == i) for i in members])
  np.testing.assert_array_equal(batch.rows.tokens, table.tokens[rows])
  for name in ('action_mask', *names):
    np.testing.assert_array_equal(getattr(batch, name), getattr(table, name)[rows])
  # The denominators are those of these members.
  counts = np.array([sum(s.action_mask.sum() for s in t.segments) for t in chosen])
  lengths = [sum(len(s.tokens) for s in t.segments) for t in chosen]
  weights = np.repeat(aggregate(counts), lengths) * table.action_mask[rows]
  np.testing.assert_allclose(batch.weights, weights, rtol=1e-6)
  np.testing.assert_allclose(batch.kl_weights, 0.3 * batch.weights, rtol=1e-6)


def _with_dead_groups():
  """The second and the fourth group have nothing to learn from."""
  ts = episodes.make_varied(14)
  for i in (2, 3, 6, 7):
    ts[i] = dataclasses.replace(
      ts[i], turns=[dataclasses.replace(u) for u in ts[i].turns]
    )
    for turn in ts[i].turns:
      turn.reward = 0.0
  return ts


@pytest.mark.parametrize('aggregate', _AGGREGATES)
def test_trajectories_without_advantage_are_left_out_and_keep_the_denominators(aggregate):
  ts = _with_dead_groups()
  algorithm = plain.GRPO._replace(aggregate=aggregate)
  table, _ = plain.credit(ts, algorithm)
  whole = {'members': range(14), 'algorithm': algorithm, 'shape': plain.SHAPE}
  sparse, _ = minibatch.make_policy(table, **whole)
  dense, _ = minibatch.make_policy(table, **whole, shared_critic=True)
  kept = [i for i in range(14) if i not in (2, 3, 6, 7)]
  few = plain.unpacked(sparse, plain.segments_of([ts[i] for i in kept]))
  every = plain.unpacked(dense, plain.segments_of(ts))
  live = np.isin(table.trajectory, kept)
  np.testing.assert_array_equal(few.weights, every.weights[live])
  # To rounding: the rows are others.
  if aggregate is losses.token_mean:
    run = lambda x: plain.chained_gradient(plain.policy(), x, plain.GRPO_OBJECTIVE)
    (grads, sums), (expected, whole) = run(sparse), run(dense)
    plain.close(grads, expected)
    np.testing.assert_allclose(sums['loss'], whole['loss'], rtol=1e-5)


def test_minibatch_without_any_advantage_is_one_trajectory_without_a_gradient():
  ts = _with_dead_groups()
  table, _ = plain.credit(ts, plain.GRPO)
  (batch,), _ = minibatch.make_policy(table, [2, 3, 6, 7], plain.GRPO, shape=plain.SHAPE)
  grads, sums = plain.chained_gradient(plain.policy(), [batch], plain.GRPO_OBJECTIVE)
  assert not any(map(np.any, jax.tree.leaves(grads))) and sums['loss'] == 0


@pytest.mark.parametrize(
  'change',
  [
    {'entropy_coef': 0.1},
    {'kl': kl_lib.InLoss()},
    {'loss': lambda stats, batch: (stats.logprobs**2, {})},
  ],
  ids=['entropy', 'kl', 'own loss'],
)
def test_where_every_token_adds_to_the_loss_none_is_left_out(change):
  ts, algorithm = _with_dead_groups(), plain.GRPO._replace(**change)
  table, _ = plain.credit(ts, algorithm)
  batches, _ = minibatch.make_policy(table, range(14), algorithm, shape=plain.SHAPE)
  assert sum((b.segment_ids > 0).sum() for b in batches) == len(table)
