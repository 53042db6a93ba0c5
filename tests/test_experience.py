"""Experience: every number is read at its token and put there; weights are as stated."""

import dataclasses
import itertools

import episodes
import jax
import numpy as np
import plain
import pytest
import test_learner

from agent_r1_jax import types
from agent_r1_jax.rl import advantages, algorithms, correction, experience, packing
from agent_r1_jax.rl import episodes as episodes_lib
from agent_r1_jax.rl import kl as kl_lib

_PPO = algorithms.ppo(gamma=0.9, lam=0.8, kl_coef=0.05)
quick_compiler = test_learner.quick_compiler


def _counting(taken):
  """Estimator that keeps the episodes, and gives every token numbers of its own."""
  counter = itertools.count(1)

  def advantages(eps):
    taken.extend(eps)
    numbers = lambda e: np.array([next(counter) for _ in e.turn], float)
    return [episodes_lib.Credit(numbers(e), numbers(e)) for e in eps]

  return advantages


def _gathered(trajectory, per_segment, masked=True):
  return packing.gather(episodes_lib.seen(trajectory, masked), per_segment)


def _cut(n=14):
  """Trajectories, every other one cut by a budget."""
  statuses = itertools.cycle(['done', 'truncated', 'done', 'max_turns'])
  ts = episodes.varied(n)
  return [dataclasses.replace(t, status=s) for t, s in zip(ts, statuses)]


def _unpacked(batches, segments, shape=plain.SHAPE):
  """Batch whose fields are lists, one array a segment."""
  lengths = [len(s.tokens) for s in segments]
  where = packing.layout(lengths, row_tokens=shape.row_tokens, row_multiple=shape.rows)
  assert {b.tokens.shape for b in batches} == {tuple(shape)}
  fields = plain.whole(batches)
  return types.Batch(*(x if x is None else where.extract(x) for x in fields))


# Credit.


@pytest.mark.parametrize('masked', [True, False])
@pytest.mark.parametrize('own_critic', [True, False])
def test_credit_reads_reference_and_critic_at_the_tokens(own_critic, masked):
  taken, ts = [], _cut()
  algorithm = _PPO._replace(
    advantages=_counting(taken), advantage_mask=masked, kl=None, reads_reference=True
  )
  which = plain.models(own_critic=own_critic)
  scored = plain.credit(ts, algorithm, which, baselines=range(14))
  segments = plain.segments_of(ts)
  of_reference, of_critic = (
    plain.said(p, segments) for p in (which.reference, which.critic)
  )
  expected = {
    'ref_logprobs': plain.regrouped(ts, of_reference.logprobs),
    'values': plain.regrouped(ts, of_critic.values),
  }
  after = plain.regrouped(ts, of_critic.after)
  for i, (e, t) in enumerate(zip(taken, ts, strict=True)):
    for name, x in expected.items():
      at = _gathered(t, x[i], masked)
      np.testing.assert_allclose(getattr(e, name), at, rtol=0, atol=2e-5)
      for a, b in zip(scored.numbers[name][i], x[i], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)
    # After the last token, whoever wrote it.
    np.testing.assert_allclose(e.final_value, after[i][-1][-1], rtol=0, atol=2e-5)
    assert e.baseline == i and e.truncated == (t.status != 'done')


def test_an_episode_that_ran_out_has_ended():
  """γ = λ = 1: the return of the first token is all that comes."""
  ts = _cut()
  scored = plain.credit(ts, algorithms.ppo(kl_coef=0.0))
  for t, returns in zip(ts, scored.numbers['returns'], strict=True):
    first = _gathered(t, returns)[0]
    np.testing.assert_allclose(first, t.reward, rtol=1e-5, atol=2e-5)


def test_a_cut_episode_can_go_on_with_the_value_after_its_last_token():
  ts = _cut()
  scored = plain.credit(ts, algorithms.ppo(kl_coef=0.0, bootstrap_truncated=True))
  after = plain.regrouped(ts, plain.said(plain.shared(), plain.segments_of(ts)).after)
  for t, returns, x in zip(ts, scored.numbers['returns'], after, strict=True):
    goes_on = 0.0 if t.status == 'done' else x[-1][-1]
    # γ = λ = 1: the return of the first token is all that comes.
    first = _gathered(t, returns)[0]
    np.testing.assert_allclose(first, t.reward + goes_on, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize('masked', [True, False])
def test_credit_is_put_at_its_tokens(masked):
  taken, ts = [], plain.trajectories()
  algorithm = _PPO._replace(advantages=_counting(taken), advantage_mask=masked, kl=None)
  scored = plain.credit(ts, algorithm)
  assert scored.numbers.keys() == {'logprobs', 'values', 'advantages', 'returns'}
  counter = itertools.count(1)
  for i, t in enumerate(ts):
    for name in ('advantages', 'returns'):
      arrays = scored.numbers[name][i]
      flat = _gathered(t, arrays, masked)
      np.testing.assert_array_equal(flat, [next(counter) for _ in flat])
      assert sum(np.count_nonzero(a) for a in arrays) == len(flat)
      assert [len(a) for a in arrays] == [len(s.tokens) for s in t.segments]
  flat = [a for some in scored.numbers['advantages'] for x in some for a in x if a]
  np.testing.assert_allclose(scored.metrics['advantage_std'], np.std(flat))


@pytest.mark.parametrize('masked', [True, False])
def test_kl_is_taken_off_the_rewards_of_actions_alone(masked):
  """After the algorithm's own transforms, with the present coefficient."""
  taken, ts = [], plain.trajectories()

  def doubled(eps):
    return [dataclasses.replace(e, rewards=2 * e.rewards) for e in eps]

  algorithm = _PPO._replace(
    advantages=_counting(taken),
    advantage_mask=masked,
    rewards=(doubled,),
    kl=kl_lib.InReward(coef=99.0, estimator=kl_lib.k2),
  )
  scored = plain.credit(ts, algorithm, kl_coef=0.3)
  said = plain.said(plain.reference(), plain.segments_of(ts)).logprobs
  means = []
  for t, e, ref in zip(ts, taken, plain.regrouped(ts, said), strict=True):
    before = episodes_lib.episode(t, masked=masked)
    acted = np.isfinite(before.logprobs)
    kl = 0.5 * (before.logprobs - _gathered(t, ref, masked)) ** 2
    expected = 2 * before.rewards - 0.3 * np.where(acted, kl, 0.0)
    np.testing.assert_allclose(e.rewards, expected, rtol=1e-5, atol=1e-4)
    assert acted.all() == masked or len(t.turns) == 1
    means.append(kl[acted].mean())
  np.testing.assert_allclose(scored.metrics['kl'], np.mean(means), rtol=1e-5)


def test_the_mean_kl_is_verls():
  # verl adds 1e-8 to the count of an episode's tokens.
  estimator = lambda p, q: kl_lib.k1(p, q) * len(p) / (len(p) + 1e-8)
  expected = episodes.golden()['verl/kl_in_reward/current_kl']
  for masked in (True, False):
    batch = episodes.golden_actions('rewards_outcome', masked=masked)
    out = experience._mean_kl(batch, estimator)
    np.testing.assert_allclose(out, expected, rtol=1e-9)


def test_a_segment_that_fits_no_row_is_refused():
  with pytest.raises(ValueError, match='does not fit a row of 16'):
    plain.credit(plain.trajectories(), _PPO, shape=experience.Rows(2, 16))


# Masks.


@pytest.mark.parametrize('advantage_mask', [True, False])
@pytest.mark.parametrize('loss_mask', [True, False])
@pytest.mark.parametrize('kind', ['grpo', 'ppo', 'shared'])
def test_every_cell_of_the_masks(kind, loss_mask, advantage_mask):
  """The ablation of the paper's Table 4, the cell that it lacks included."""
  ts, segments = plain.trajectories(), plain.segments_of(plain.trajectories())
  algorithm = (plain.GRPO if kind == 'grpo' else _PPO)._replace(
    loss_mask=loss_mask, advantage_mask=advantage_mask
  )
  scored = plain.credit(ts, algorithm, plain.models(own_critic=kind == 'ppo'))
  dense = kind == 'shared'
  batches = experience.minibatch(scored, range(14), shape=plain.SHAPE, dense=dense)
  batch = _unpacked(batches, segments)
  acted = [s.action_mask for s in segments]
  every = [np.logical_or.accumulate(mask) for mask in acted]
  assert sum(map(np.sum, every)) > sum(map(np.sum, acted))
  weighed, valued = (acted if on else every for on in (loss_mask, advantage_mask))

  def is_even(weights, masks):
    share = 1 / sum(mask.sum() for mask in masks)
    for w, mask in zip(weights, masks, strict=True):
      np.testing.assert_allclose(w, mask * share, rtol=1e-6)

  is_even(batch.weights, weighed)
  for worth, mask in zip(batch.advantages, valued, strict=True):
    np.testing.assert_array_equal(worth != 0, mask)
  said = plain.said(plain.policy(), segments).logprobs
  for s, old, new, mask in zip(segments, batch.logprobs, said, weighed, strict=True):
    np.testing.assert_array_equal(old[s.action_mask], s.logprobs[s.action_mask])
    # Nobody sampled what the environment wrote: its ratio starts at 1.
    given = mask & ~s.action_mask
    np.testing.assert_allclose(old[given], new[given], rtol=0, atol=2e-5)
  if kind == 'ppo':
    assert batch.values is None and batch.returns is None
    whole = experience.critic_minibatch(scored, range(14), shape=plain.SHAPE)
    batch = _unpacked(whole, segments)
    is_even(batch.weights, valued)
  if kind != 'grpo':
    for returns, mask, action in zip(batch.returns, valued, acted, strict=True):
      # The last thing that the environment wrote is worth nothing.
      assert not returns[~mask].any() and returns[action].all()
      if not advantage_mask and action.any():
        assert returns[mask & ~action][:-1].all()


def test_with_both_masks_nothing_of_the_environment_is_read():
  """Only what it wrote, as the text before the actions."""
  ts = plain.trajectories()
  broken = [
    dataclasses.replace(t, segments=[dataclasses.replace(s) for s in t.segments])
    for t in ts
  ]
  for s in plain.segments_of(broken):
    s.logprobs = np.where(s.action_mask, s.logprobs, np.float32(np.nan))
  # And no forward pass is spent on log-probs that are known.
  nothing = experience.Models(None, plain.CONFIG)

  def outcome(some, algorithm, which):
    scored = plain.credit(some, algorithm, which)
    return scored, experience.minibatch(scored, range(14), shape=plain.SHAPE)

  _, batches = outcome(ts, plain.GRPO, nothing)
  _, others = outcome(broken, plain.GRPO, nothing)
  assert any(np.isnan(b.logprobs).any() for b in others)
  gradients = (
    plain.gradient(plain.policy(), b, plain.GRPO_OBJECTIVE) for b in (others, batches)
  )
  plain.equal(*gradients)
  for some in (ts, broken):
    scored, _ = outcome(some, _PPO, plain.models())
    if some is ts:
      expected = scored
    for name in ('advantages', 'returns'):
      plain.equal(scored.numbers[name], expected.numbers[name])


# Corrections.


def test_corrections_weigh_their_actions():
  ts, segments = plain.trajectories(), plain.segments_of(plain.trajectories())
  given, counter = [], itertools.count(2)

  def correct(old, behaviour):
    given.extend(zip(old, behaviour, strict=True))
    return [np.array([next(counter) for _ in x], float) for x in old]

  algorithm = plain.GRPO._replace(correction=correct)
  scored = plain.credit(ts, algorithm)
  said = plain.said(plain.policy(), segments).logprobs
  for t, new, (old, behaviour) in zip(ts, plain.regrouped(ts, said), given, strict=True):
    np.testing.assert_allclose(old, _gathered(t, new), rtol=0, atol=2e-5)
    sampled = _gathered(t, [s.logprobs for s in t.segments])
    np.testing.assert_array_equal(behaviour, sampled)
  batches = experience.minibatch(scored, range(14), shape=plain.SHAPE)
  batch = _unpacked(batches, segments)
  counter = itertools.count(2)
  for s, w, old, new in zip(
    segments, batch.correction, batch.logprobs, said, strict=True
  ):
    np.testing.assert_array_equal(w, [next(counter) if a else 1 for a in s.action_mask])
    # The ratio starts from the policy that is updated.
    np.testing.assert_allclose(old, new, rtol=0, atol=2e-5)
  statistics = correction.statistics(*zip(*given, strict=True))
  for name, value in statistics.items():
    assert scored.metrics[f'stale_{name}'] == value


@pytest.mark.parametrize('masked', [True, False])
@pytest.mark.parametrize('kind', ['in the reward', 'reverse'])
def test_a_kl_is_of_the_policy_before_the_update_whichever_sampled(kind, masked):
  """verl's: the sampler's log-probs are for the correction alone."""
  taken, ts = [], plain.trajectories()
  algorithm = _PPO._replace(advantage_mask=masked, correction=correction.token_band())
  if kind == 'reverse':
    algorithm = algorithms.distillation(
      advantage_mask=masked, correction=correction.token_band()
    )
  else:
    algorithm = algorithm._replace(
      advantages=_counting(taken), kl=kl_lib.InReward(estimator=kl_lib.k2)
    )
  scored = plain.credit(ts, algorithm, kl_coef=0.3)
  segments = plain.segments_of(ts)
  new, ref = (
    plain.regrouped(ts, plain.said(params, segments).logprobs)
    for params in (plain.policy(), plain.reference())
  )
  kls = []
  for i, t in enumerate(ts):
    e = episodes_lib.episode(t, masked=masked)
    acted = np.isfinite(e.logprobs)
    old, other = _gathered(t, new[i], masked), _gathered(t, ref[i], masked)
    assert np.abs(old - e.logprobs)[acted].max() > 0.1, 'another policy sampled'
    if kind == 'reverse':
      expected = np.where(acted, other - old, 0.0)
      found = _gathered(t, scored.numbers['advantages'][i], masked)
      kls.append((old - other)[acted].mean())
    else:
      kl = np.where(acted, 0.5 * (old - other) ** 2, 0.0)
      expected, found = e.rewards - 0.3 * kl, taken[i].rewards
      kls.append(kl[acted].mean())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(scored.metrics['kl'], np.mean(kls), rtol=1e-4)


# What the critic alone sees.


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
  scored = plain.credit(ts, algorithm, which, prefixes=prefixes)
  said = plain.said(plain.critic(), views)
  values, after = (plain.regrouped(ts, x) for x in (said.values, said.after))
  for i, (t, prefix) in enumerate(zip(ts, prefixes)):
    expected = [x[len(prefix) :] for x in values[i]]
    for a, b in zip(scored.numbers['values'][i], expected, strict=True):
      np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)
      # With a prefix there is a state before the first token.
      assert (a[0] != 0) == (len(prefix) > 0)
    np.testing.assert_allclose(taken[i].values, _gathered(t, expected), atol=2e-5)
    np.testing.assert_allclose(taken[i].final_value, after[i][-1][-1], atol=2e-5)
  batches = experience.critic_minibatch(scored, range(14), shape=plain.SHAPE)
  batch = _unpacked(batches, views)
  flat = iter(zip(*(batch.tokens, batch.weights, batch.values, batch.returns)))
  actions = sum(s.action_mask.sum() for s in plain.segments_of(ts))
  for i, (t, prefix) in enumerate(zip(ts, prefixes)):
    for number, s in enumerate(t.segments):
      n, (tokens, weights, values, returns) = len(prefix), next(flat)
      np.testing.assert_array_equal(tokens, [*prefix, *s.tokens])
      np.testing.assert_allclose(weights[n:], s.action_mask / actions, rtol=1e-6)
      for name, x in (('values', values), ('returns', returns)):
        np.testing.assert_allclose(x[n:], scored.numbers[name][i][number], rtol=1e-6)
      assert not (weights[:n].any() or values[:n].any() or returns[:n].any())
  # The policy never sees it.
  batches = experience.minibatch(scored, range(14), shape=plain.SHAPE)
  for tokens, s in zip(
    _unpacked(batches, plain.segments_of(ts)).tokens, plain.segments_of(ts), strict=True
  ):
    np.testing.assert_array_equal(tokens, s.tokens)


def test_a_prefix_that_fits_no_row_is_refused():
  t = episodes.trajectory('....000')
  room = [np.zeros(25, np.int32)]
  plain.credit([t], _PPO, plain.models(own_critic=True), prefixes=room)
  message = 'segment of 7 tokens and the 26 before it.*critic sees do not fit a row of 32'
  with pytest.raises(ValueError, match=message):
    plain.credit([t], _PPO, prefixes=[np.zeros(26, np.int32)])


# Mini-batches.


def _made_up(trajectories, algorithm):
  """Experience with different numbers for every token."""
  names = ('logprobs', 'advantages', 'ref_logprobs', 'correction', 'values', 'returns')
  counter = itertools.count(1)
  numbers = {
    name: [
      [np.array([next(counter) for _ in s.tokens], float) for s in t.segments]
      for t in trajectories
    ]
    for name in names
  }
  prefixes = [np.zeros(0, np.int32)] * len(trajectories)
  return experience.Experience(list(trajectories), algorithm, numbers, prefixes, {})


_AGGREGATES = [
  algorithms.token_mean,
  algorithms.seq_mean_token_mean,
  algorithms.seq_mean_token_sum_norm(20),
]


@pytest.mark.parametrize('members', [range(14), [5, 0, 2], [1]])
@pytest.mark.parametrize('aggregate', _AGGREGATES)
def test_minibatch_puts_every_number_at_its_token(members, aggregate):
  algorithm = _PPO._replace(aggregate=aggregate, kl=kl_lib.InLoss())
  made_up, shape = _made_up(plain.trajectories(), algorithm), experience.Rows(3, 40)
  batches = experience.minibatch(made_up, members, shape=shape, kl_coef=0.3, dense=True)
  chosen = [made_up.trajectories[i] for i in members]
  segments = plain.segments_of(chosen)
  batch = _unpacked(batches, segments, shape)
  for name, x in made_up.numbers.items():
    expected = [a for i in members for a in x[i]]
    plain.equal(getattr(batch, name), [a.astype(np.float32) for a in expected])
  for name in ('tokens', 'action_mask'):
    plain.equal(getattr(batch, name), [getattr(s, name) for s in segments])
  # The denominators are those of these members.
  counts = np.array([sum(s.action_mask.sum() for s in t.segments) for t in chosen])
  each = np.repeat(aggregate(counts), [len(t.segments) for t in chosen])
  for w, kl, weight, s in zip(batch.weights, batch.kl_weights, each, segments):
    np.testing.assert_allclose(w, weight * s.action_mask, rtol=1e-6)
    np.testing.assert_allclose(kl, 0.3 * w, rtol=1e-6)


def test_only_what_is_read_is_in_a_minibatch():
  made_up = _made_up(plain.trajectories(), _PPO)
  for batch in experience.minibatch(made_up, range(14), shape=plain.SHAPE, kl_coef=0.3):
    # The KL is in the reward, and the critic is another model.
    assert batch.kl_weights is batch.values is batch.returns is None


def _with_dead_groups():
  """The second and the fourth group have nothing to learn from."""
  ts = episodes.varied(14)
  for i in (2, 3, 6, 7):
    ts[i] = dataclasses.replace(
      ts[i], turns=[dataclasses.replace(u) for u in ts[i].turns]
    )
    for turn in ts[i].turns:
      turn.reward = 0.0
  return ts


@pytest.mark.parametrize('aggregate', _AGGREGATES)
def test_what_has_no_advantage_is_left_out_but_counts(aggregate):
  ts = _with_dead_groups()
  scored = plain.credit(ts, plain.GRPO._replace(aggregate=aggregate))
  sparse = experience.minibatch(scored, range(14), shape=plain.SHAPE)
  dense = experience.minibatch(scored, range(14), shape=plain.SHAPE, dense=True)
  kept = [i for i in range(14) if i not in (2, 3, 6, 7)]
  few = _unpacked(sparse, plain.segments_of([ts[i] for i in kept]))
  every = _unpacked(dense, plain.segments_of(ts))
  weights = plain.regrouped(ts, every.weights)
  plain.equal(few.weights, [w for i in kept for w in weights[i]])
  # To rounding: the rows are others.
  if aggregate is algorithms.token_mean:
    run = lambda batches: plain.gradient(plain.policy(), batches, plain.GRPO_OBJECTIVE)
    (grads, sums), (expected, whole) = run(sparse), run(dense)
    plain.close(grads, expected)
    np.testing.assert_allclose(sums['loss'], whole['loss'], rtol=1e-5)


def test_a_minibatch_of_nothing_but_dead_groups_is_one_row_without_a_gradient():
  ts = _with_dead_groups()
  scored = plain.credit(ts, plain.GRPO)
  (batch,) = experience.minibatch(scored, [2, 3, 6, 7], shape=plain.SHAPE)
  grads, sums = plain.gradient(plain.policy(), [batch], plain.GRPO_OBJECTIVE)
  assert not any(map(np.any, jax.tree.leaves(grads))) and sums['loss'] == 0


@pytest.mark.parametrize(
  'change', [{'entropy_coef': 0.1}, {'kl': kl_lib.InLoss()}], ids=['entropy', 'kl']
)
def test_where_every_token_adds_to_the_loss_none_is_left_out(change):
  ts = _with_dead_groups()
  scored = plain.credit(ts, plain.GRPO._replace(**change))
  batches = experience.minibatch(scored, range(14), shape=plain.SHAPE)
  assert len(_unpacked(batches, plain.segments_of(ts)).tokens) == len(
    plain.segments_of(ts)
  )


# Steps.


def _as_steps(t):
  """The same episode, each turn a segment whose prompt is all that came before it."""
  (whole,), segments, turns = t.segments, [], []
  for number, turn in enumerate(t.turns):
    stop = turn.stop if number < len(t.turns) - 1 else len(whole.tokens)
    acted = np.arange(stop) >= turn.start
    acted &= whole.action_mask[:stop]
    logprobs = np.where(acted, whole.logprobs[:stop], 0)
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


def test_the_states_of_steps_are_those_of_the_concatenated_episode():
  """GiGPO compares turns by what was shown before them."""
  whole = [episodes_lib.episode(t) for t in _appended()]
  steps = [episodes_lib.episode(_as_steps(t)) for t in _appended()]
  assert [e.anchors for e in steps] == [e.anchors for e in whole]
  assert max(len(e.anchors) for e in whole) > 3
  same = advantages.gigpo(whole), advantages.gigpo(steps)
  for a, b in zip(*same, strict=True):
    np.testing.assert_array_equal(a.advantages, b.advantages)


@pytest.mark.parametrize('kind', ['grpo', 'shared', 'own'])
def test_steps_are_the_concatenated_episode(kind):
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
    scored = plain.credit(some, algorithm, which, kl_coef=0.1)
    recomputed = algorithm._replace(correction=correction.token_truncated())
    old = plain.credit(some, recomputed, which).numbers
    numbers = scored.numbers | {'old': old['logprobs'], 'correction': old['correction']}
    flat = {
      name: [_gathered(t, a) for t, a in zip(some, x)] for name, x in numbers.items()
    }
    kwargs = {'shape': plain.SHAPE, 'kl_coef': 0.1, 'dense': dense}
    batches = experience.minibatch(scored, range(len(ts)), **kwargs)
    learned = [plain.gradient(which.policy, batches, objective)]
    if own:
      batches = experience.critic_minibatch(scored, range(len(ts)), shape=plain.SHAPE)
      of_critic = plain.critic_objective(_PPO)
      learned.append(plain.gradient(which.critic, batches, of_critic))
    runs.append((flat, learned, len(plain.segments_of(some))))
  (flat, learned, size), (expected, expected_learned, more) = runs
  assert more > 2 * size - 1 and len(flat) >= 4
  plain.close(flat, expected)
  plain.close(learned, expected_learned, 5e-5)
