"""Credit: every number is read at its token and put there; weights are as stated."""

import dataclasses
import itertools

import episodes
import numpy as np
import plain
import pytest

from agent_r1_jax import types
from agent_r1_jax.rl import (
  advantages,
  algorithms,
  credit,
  losses,
  minibatch,
  packing,
  scoring,
  spans,
)
from agent_r1_jax.rl import kl as kl_lib
from agent_r1_jax.rl import table as table_lib

_PPO = algorithms.ppo(gamma=0.9, lam=0.8, kl_coef=0.05)


def _counting(taken):
  """Makes an estimator that records its table and numbers the tokens."""

  def advantages(table):
    taken.append(table)
    numbers = np.arange(1.0, len(table) + 1)
    return dataclasses.replace(table, advantages=numbers, returns=numbers)

  return advantages


def _close(actual, expected, tolerance=2e-5):
  np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def _cut(n=14):
  """Trajectories, every other one cut by a budget."""
  statuses = itertools.cycle(['done', 'truncated', 'done', 'max_turns'])
  ts = episodes.make_varied(n)
  return [dataclasses.replace(t, status=s) for t, s in zip(ts, statuses)]


def _score(params, trajectories):
  """Scores trajectories; the fields are columns [n]."""
  said = plain.score(params, plain.segments_of(trajectories))
  return plain.Scores(*map(np.concatenate, said))


@pytest.mark.parametrize('masked', [True, False])
@pytest.mark.parametrize('own_critic', [True, False])
def test_credit_reads_and_writes_each_number_at_its_token(own_critic, masked):
  taken, ts = [], _cut()
  algorithm = _PPO._replace(
    advantages=_counting(taken),
    advantage_mask=masked,
    kl=None,
    reads=('values', 'ref_logprobs', 'baselines'),
  )
  which = plain.models(own_critic=own_critic)
  table, metrics = plain.credit(ts, algorithm, which, baselines=range(14))
  (shown,) = taken
  rows, of_critic = table.find_visible(masked), _score(which.critic, ts)
  expected = {
    'ref_logprobs': _score(which.reference, ts).logprobs,
    'values': of_critic.values,
  }
  for name, column in expected.items():
    _close(getattr(table, name), column)
    _close(getattr(shown, name), column[rows])
  # After the last token, whoever wrote it.
  _close(shown.final_values, of_critic.after[spans.ends(table.trajectory)])
  assert shown.baselines.tolist() == list(range(14))
  assert shown.truncated.tolist() == [t.status != 'done' for t in ts]
  assert table.correction is table.weights is None
  for column in (table.advantages, table.returns):
    np.testing.assert_array_equal(column[rows], np.arange(1, len(shown) + 1))
    assert not column[~rows].any()
  np.testing.assert_allclose(metrics['advantage_std'], np.arange(len(shown)).std())


def _doubled(table):
  return dataclasses.replace(table, rewards=2 * table.rewards)


@pytest.mark.parametrize('masked', [True, False])
@pytest.mark.parametrize('corrected', [True, False])
def test_kl_is_taken_off_the_rewards_of_actions_alone(corrected, masked):
  """After the algorithm's own transforms, with the present coefficient.

  With a correction, it is of the policy before the update, whichever sampled (verl's).
  """
  taken, ts = [], plain.trajectories()
  algorithm = _PPO._replace(
    advantages=_counting(taken),
    advantage_mask=masked,
    rewards=(_doubled,),
    kl=kl_lib.InReward(coef=99.0, estimator=kl_lib.k2),
    correction=losses.token_truncated() if corrected else None,
  )
  table, metrics = plain.credit(ts, algorithm, kl_coef=0.3)
  (shown,) = taken
  before = table_lib.build(ts)
  old = _score(plain.policy(), ts).logprobs if corrected else before.old_logprobs
  kl = 0.5 * (old - _score(plain.reference(), ts).logprobs) ** 2
  kl = np.where(before.action_mask, kl, 0.0)
  rows = before.find_visible(masked)
  expected = (2 * before.rewards - 0.3 * kl)[rows]
  np.testing.assert_allclose(shown.rewards, expected, rtol=1e-5, atol=1e-4)
  assert before.action_mask[rows].all() == masked
  sums = np.bincount(before.trajectory, kl)
  counts = np.bincount(before.trajectory, before.action_mask)
  np.testing.assert_allclose(metrics['kl'], np.mean(sums / counts), rtol=1e-5)
  # The environment's rewards are still in the table.
  np.testing.assert_array_equal(table.rewards, before.rewards)


def test_mean_kl_equals_verls():
  # verl adds 1e-8 to the count of an episode's tokens.
  expected = episodes.golden()['verl/kl_in_reward/current_kl']
  for masked in (True, False):
    batch = episodes.golden_actions('rewards_outcome', masked=masked)
    counts = np.bincount(batch.trajectory, batch.action_mask)
    share = (counts / (counts + 1e-8))[batch.trajectory[batch.action_mask]]
    out = credit._mean_kl(batch, lambda p, q, share=share: kl_lib.k1(p, q) * share)
    np.testing.assert_allclose(out, expected, rtol=1e-9)


@pytest.mark.parametrize('advantage_mask', [True, False])
@pytest.mark.parametrize('loss_mask', [True, False])
@pytest.mark.parametrize('kind', ['grpo', 'ppo', 'shared'])
def test_each_pair_of_masks_gives_its_weights_advantages_and_returns(
  kind, loss_mask, advantage_mask
):
  """The ablation of the paper's Table 4, the cell that it lacks included."""
  ts, segments = plain.trajectories(), plain.segments_of(plain.trajectories())
  algorithm = (plain.GRPO if kind == 'grpo' else _PPO)._replace(
    loss_mask=loss_mask, advantage_mask=advantage_mask
  )
  table, _ = plain.credit(ts, algorithm, plain.models(own_critic=kind == 'ppo'))
  options = {'shape': plain.SHAPE, 'shared_critic': kind == 'shared'}
  batches, _ = minibatch.make_policy(table, range(14), algorithm, **options)
  batch = plain.unpacked(batches, segments)
  acted = np.concatenate([s.action_mask for s in segments])
  every = [np.logical_or.accumulate(s.action_mask) for s in segments]
  every = np.concatenate(every)
  assert every.sum() > acted.sum()
  weighed, valued = (acted if on else every for on in (loss_mask, advantage_mask))
  np.testing.assert_allclose(batch.weights, weighed / weighed.sum(), rtol=1e-6)
  np.testing.assert_array_equal(batch.advantages != 0, valued)
  sampled = np.concatenate([s.behaviour_logprobs for s in segments])
  np.testing.assert_array_equal(batch.old_logprobs[acted], sampled[acted])
  # Nobody sampled the environment's tokens: their ratio starts at 1.
  given = weighed & ~acted
  _close(batch.old_logprobs[given], _score(plain.policy(), ts).logprobs[given])
  assert batch.kl_weights is None, 'the KL, if any, is in the reward'
  if kind == 'ppo':
    assert batch.values is None and batch.returns is None, 'the critic is another model'
    whole, _ = minibatch.make_critic(table, range(14), algorithm, shape=plain.SHAPE)
    batch = plain.unpacked(whole, segments)
    np.testing.assert_allclose(batch.weights, valued / valued.sum(), rtol=1e-6)
  if kind != 'grpo':
    assert not batch.returns[~valued].any() and batch.returns[acted].all()
    for returns, mask, s in zip(
      plain.by_segment(segments, batch.returns),
      plain.by_segment(segments, valued),
      segments,
    ):
      # The last thing that the environment wrote is worth nothing.
      if not advantage_mask and s.action_mask.any():
        assert returns[mask & ~s.action_mask][:-1].all()


def test_with_both_masks_nothing_of_the_environment_is_read():
  """Its tokens are read as text only."""
  ts = plain.trajectories()
  broken = [
    dataclasses.replace(t, segments=[dataclasses.replace(s) for s in t.segments])
    for t in ts
  ]
  for s in plain.segments_of(broken):
    s.behaviour_logprobs = np.where(
      s.action_mask, s.behaviour_logprobs, np.float32(np.nan)
    )
  # And no forward pass is spent on log-probs that are known.
  nothing = scoring.Models(None, plain.CONFIG)

  def outcome(some, algorithm, which):
    table, _ = plain.credit(some, algorithm, which)
    batches, _ = minibatch.make_policy(table, range(14), algorithm, shape=plain.SHAPE)
    return table, batches

  _, batches = outcome(ts, plain.GRPO, nothing)
  _, others = outcome(broken, plain.GRPO, nothing)
  assert any(np.isnan(b.old_logprobs).any() for b in others)
  gradients = (
    plain.chained_gradient(plain.policy(), b, plain.GRPO_OBJECTIVE)
    for b in (others, batches)
  )
  plain.equal(*gradients)
  (expected, _), (table, _) = (outcome(x, _PPO, plain.models()) for x in (ts, broken))
  np.testing.assert_array_equal(table.advantages, expected.advantages)
  np.testing.assert_array_equal(table.returns, expected.returns)


# Corrections.


def test_correction_weighs_actions_and_leaves_other_tokens_at_one():
  ts, segments = plain.trajectories(), plain.segments_of(plain.trajectories())
  given = []

  def correct(acted):
    given.append(acted)
    return np.arange(2.0, len(acted) + 2)

  algorithm = plain.GRPO._replace(correction=correct)
  table, metrics = plain.credit(ts, algorithm)
  new, mask = _score(plain.policy(), ts).logprobs, table.action_mask
  (acted,) = given
  _close(acted.old_logprobs, new[mask])
  sampled = np.concatenate([s.behaviour_logprobs for s in segments])
  np.testing.assert_array_equal(acted.behaviour_logprobs, sampled[mask])
  whole, _ = minibatch.make_policy(table, range(14), algorithm, shape=plain.SHAPE)
  batch = plain.unpacked(whole, segments)
  np.testing.assert_array_equal(batch.correction[mask], np.arange(2, mask.sum() + 2))
  assert (batch.correction[~mask] == 1).all()
  # The ratio starts from the policy that is updated.
  _close(batch.old_logprobs, new)
  for name, value in losses.measure_correction(acted).items():
    assert metrics[f'correction_{name}'] == value


@pytest.mark.parametrize('masked', [True, False])
def test_distillation_is_of_the_policy_before_the_update_whichever_sampled(masked):
  """The sampler's log-probs are for the correction alone."""
  ts = plain.trajectories()
  algorithm = algorithms.distillation(
    advantage_mask=masked, correction=losses.token_truncated()
  )
  table, metrics = plain.credit(ts, algorithm)
  old, teacher = (_score(p, ts).logprobs for p in (plain.policy(), plain.reference()))
  before = table_lib.build(ts)
  mask = before.action_mask
  assert np.abs(old - before.old_logprobs)[mask].max() > 0.1, 'another policy sampled'
  kl = np.where(mask, old - teacher, 0.0)
  np.testing.assert_allclose(table.advantages, -kl, rtol=1e-4, atol=1e-4)
  means = np.bincount(before.trajectory, kl) / np.bincount(before.trajectory, mask)
  np.testing.assert_allclose(metrics['kl'], means.mean(), rtol=1e-4)


# Prefixes that only the critic sees.


def _with_prefixes():
  """Trajectories, prefixes of 0 to 5 tokens, and the texts that the critic sees."""
  ts, rng = plain.trajectories(), np.random.default_rng(3)
  prefixes = [rng.integers(0, 64, i % 6).astype(np.int32) for i in range(14)]
  views = []
  for t, prefix in zip(ts, prefixes):
    for s in t.segments:
      none = np.zeros(len(prefix) + len(s.tokens))
      tokens = np.concatenate([prefix, s.tokens])
      views.append(types.Segment(tokens, none > 0, none))
  return ts, prefixes, views


def test_the_critic_sees_the_prefix_before_every_segment():
  ts, prefixes, views = _with_prefixes()
  taken = []
  algorithm = _PPO._replace(advantages=_counting(taken), kl=None)
  which = plain.models(own_critic=True)
  table, _ = plain.credit(ts, algorithm, which, prefixes=prefixes)
  assert table.ref_logprobs is None, 'nothing reads them'
  said = plain.score(plain.critic(), views)
  before = [prefixes[i] for i, t in enumerate(ts) for _ in t.segments]
  cut = lambda x: np.concatenate([a[len(p) :] for a, p in zip(x, before)])
  values, after = cut(said.values), cut(said.after)
  _close(table.values, values)
  # With a prefix there is a state before the first token.
  first = spans.starts(table.segment)
  assert ((table.values[first] != 0) == [len(p) > 0 for p in before]).all()
  (shown,) = taken
  _close(shown.values, values[table.action_mask])
  _close(shown.final_values, after[spans.ends(table.trajectory)])
  options = {'shape': plain.SHAPE, 'prefixes': prefixes}
  batches, _ = minibatch.make_critic(table, range(14), algorithm, **options)
  batch = plain.unpacked(batches, views)
  np.testing.assert_array_equal(
    batch.rows.tokens, np.concatenate([v.tokens for v in views])
  )
  weights = table.action_mask / table.action_mask.sum()
  for column, expected in (
    (batch.weights, weights),
    (batch.values, table.values),
    (batch.returns, table.returns),
  ):
    split = plain.by_segment(views, column)
    np.testing.assert_allclose(cut(split), expected, rtol=1e-6)
    assert not any(a[: len(p)].any() for a, p in zip(split, before))
  # The policy never sees it.
  batches, _ = minibatch.make_policy(table, range(14), algorithm, shape=plain.SHAPE)
  tokens = plain.unpacked(batches, plain.segments_of(ts)).rows.tokens
  np.testing.assert_array_equal(tokens, table.tokens)


def test_a_segment_or_its_prefix_that_fits_no_packed_row_is_refused():
  with pytest.raises(ValueError, match='does not fit a row of 16'):
    plain.credit(plain.trajectories(), _PPO, shape=packing.MicrobatchShape(2, 16))
  t = episodes.trajectory('....000')
  room = [np.zeros(25, np.int32)]
  plain.credit([t], _PPO, plain.models(own_critic=True), prefixes=room)
  message = 'segment of 7 tokens and the 26 before it.*critic sees do not fit a row of 32'
  with pytest.raises(ValueError, match=message):
    plain.credit([t], _PPO, prefixes=[np.zeros(26, np.int32)])


def _as_steps(t):
  """The same episode, each turn a segment whose prompt is all that came before it."""
  (whole,), segments, turns = t.segments, [], []
  for number, turn in enumerate(t.turns):
    stop = turn.stop if number < len(t.turns) - 1 else len(whole.tokens)
    acted = np.arange(stop) >= turn.start
    acted &= whole.action_mask[:stop]
    logprobs = np.where(acted, whole.behaviour_logprobs[:stop], 0)
    segments.append(types.Segment(whole.tokens[:stop], acted, logprobs))
    turns.append(dataclasses.replace(turn, segment=number))
  return dataclasses.replace(t, segments=segments, turns=turns)


def _appended():
  """Append-only episodes of one to four turns, done and cut, each in one segment."""
  pictures = ('..00...111...', '...0', '.0.1..22..333....', '....00000.1', '..0..111..2')
  pictures += ('.......0.......1.......22',)
  out = []
  for i, picture in enumerate(pictures):
    turns = len(set(picture) - {'.'})
    rewards = np.random.default_rng(i).normal(size=turns).tolist()
    t = episodes.trajectory(picture, rewards=rewards, group=i // 2, seed=i)
    out.append(dataclasses.replace(t, status='truncated' if i % 3 == 2 else 'done'))
  return out


def test_episode_stored_as_steps_has_the_states_of_the_concatenated_one():
  """GiGPO compares turns by what was shown before them."""
  whole = episodes.visible_table(*_appended())
  steps = episodes.visible_table(*map(_as_steps, _appended()))
  np.testing.assert_array_equal(steps.states, whole.states)
  assert max(np.bincount(whole.turn_trajectory)) > 3
  np.testing.assert_array_equal(
    advantages.gigpo(steps).advantages, advantages.gigpo(whole).advantages
  )


@pytest.mark.parametrize('kind', ['grpo', 'shared', 'own'])
def test_episode_stored_as_steps_learns_as_the_concatenated_one(kind):
  """The same log-probs, values and credit at 2e-5, the same loss and gradient at 5e-5."""
  algorithm = {
    'grpo': algorithms.grpo(kl_coef=0.1, entropy_coef=0.01),
    'shared': _PPO._replace(value_coef=0.5),
    'own': _PPO._replace(kl=None, loss=plain.GRPO.loss),
  }[kind]
  own, dense = kind == 'own', kind == 'shared'
  objective = plain.objective(plain.GRPO if own else algorithm, shared_critic=dense)
  which, ts = plain.models(own_critic=own), _appended()
  runs = []
  for some in (ts, [_as_steps(t) for t in ts]):
    table, _ = plain.credit(some, algorithm, which, kl_coef=0.1)
    recomputed = algorithm._replace(correction=losses.token_truncated())
    old, _ = plain.credit(some, recomputed, which)
    acted = table.take(table.action_mask)
    names = ('old_logprobs', 'advantages', 'ref_logprobs', 'values', 'returns')
    flat = {name: getattr(acted, name) for name in names}
    flat |= {
      f'old {x}': getattr(old, x)[old.action_mask] for x in ('old_logprobs', 'correction')
    }
    flat = {name: column for name, column in flat.items() if column is not None}
    options = {'algorithm': algorithm, 'shape': plain.SHAPE}
    members = range(len(ts))
    batches, _ = minibatch.make_policy(
      table, members, **options, kl_coef=0.1, shared_critic=dense
    )
    learned = [plain.chained_gradient(which.policy, batches, objective)]
    if own:
      batches, _ = minibatch.make_critic(table, members, **options)
      of_critic = plain.critic_objective(_PPO)
      learned.append(plain.chained_gradient(which.critic, batches, of_critic))
    runs.append((flat, learned, len(plain.segments_of(some))))
  (flat, learned, size), (expected, expected_learned, more) = runs
  assert more > 2 * size - 1 and len(flat) >= 5
  plain.close(flat, expected)
  plain.close(learned, expected_learned, 5e-5)
