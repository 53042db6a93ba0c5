"""Transforms of rewards: by hand, the peers' numbers, and what no transform may do."""

import copy
import dataclasses
import functools
import json
import pathlib

import episodes
import numpy as np
import pytest

from agent_r1_jax.rl import episodes as episodes_lib
from agent_r1_jax.rl import rewards

_GOLDEN = json.loads(
  (pathlib.Path(__file__).parent / 'golden' / 'reward_refs.json').read_text()
)
_k1 = lambda logprobs, ref_logprobs: logprobs - ref_logprobs
_ALL = {
  'by_reward_to_go': rewards.by_reward_to_go,
  'by_group': rewards.by_group,
  'overlong': functools.partial(rewards.overlong, limit=4, buffer=2),
  'less_kl': functools.partial(rewards.less_kl, coef=0.1, estimator=_k1),
}


def _close(actual, expected, tolerance=1e-12):
  np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def _episode(*pictures, masked=True, **kwargs):
  t = episodes.trajectory(*pictures, **kwargs)
  return episodes_lib.episode(t, masked=masked)


def _batch(masked):
  batch = [episodes_lib.episode(t, masked=masked) for t in episodes.varied(12)]
  batch.insert(3, _episode('....', group=1))
  for e in batch:
    e.ref_logprobs = np.linspace(-2, -1, len(e.rewards))
    e.parts = {'all': e.score}
  return batch


@pytest.mark.parametrize('masked', [True, False])
@pytest.mark.parametrize('name', _ALL)
def test_only_rewards_of_actions_change_and_only_in_what_is_returned(name, masked):
  batch = _batch(masked)
  before = copy.deepcopy(batch)
  out = _ALL[name](batch)
  changed = False
  for new, e, b in zip(out, batch, before, strict=True):
    for field in dataclasses.fields(e):
      old = getattr(b, field.name)
      np.testing.assert_array_equal(getattr(e, field.name), old)
      if field.name not in ('rewards', 'parts'):
        np.testing.assert_array_equal(getattr(new, field.name), old)
    if name.startswith('by_'):  # Another unit, for the parts as well.
      _close(new.parts['all'], new.score)
    else:
      assert new.parts == b.parts
    assert np.isfinite(new.rewards).all() and new.rewards.shape == e.rewards.shape
    assert (new.rewards[np.isnan(e.logprobs)] == 0).all()
    changed = changed or not np.array_equal(new.rewards, e.rewards)
  assert changed


@pytest.mark.parametrize('name', _ALL)
def test_the_order_of_episodes_does_not_matter(name):
  batch = _batch(True)
  order = np.random.default_rng(0).permutation(len(batch))
  expected, out = _ALL[name](batch), _ALL[name]([batch[i] for i in order])
  for e, i in zip(out, order):
    _close(e.rewards, expected[i].rewards)


@pytest.mark.parametrize('name', _ALL)
def test_without_a_token_there_is_nothing(name):
  e = _episode('....')
  e.ref_logprobs = np.zeros(0)
  assert [len(x.rewards) for x in _ALL[name]([e])] == [0]
  assert _ALL[name]([]) == []


def test_by_reward_to_go_by_hand():
  """What follows, over the batch: 1 - 3 = -2, -3, -3; 2, 2. The largest |.| is 3."""
  one = _episode('..00...1', '.2', rewards=[1.0, 0.0, -3.0])
  other = _episode('..00', rewards=[2.0], group=1)
  a, b = rewards.by_reward_to_go([one, other], eps=1.0)
  np.testing.assert_array_equal(a.rewards, [0, 0.25, 0, -0.75])
  np.testing.assert_array_equal(b.rewards, [0, 0.5])
  # Alone, the return of the second is within ±1 by its own size.
  (b,) = rewards.by_reward_to_go([other], eps=0.0)
  np.testing.assert_array_equal(b.rewards, [0, 1])


def test_by_reward_to_go_of_nothing_is_nothing():
  (out,) = rewards.by_reward_to_go([_episode('..00.1', rewards=[0.0, 0.0])])
  assert (out.rewards == 0).all()


def test_by_group_by_hand():
  """Group 0: turns 3, 0, 4, 0, so √(25/4) = 5/2. Group 1: √((1 + 49)/2) = 5."""
  batch = [
    _episode('..00...1', rewards=[3.0, 0.0]),
    _episode('.0', '.1', rewards=[4.0, 0.0]),
    _episode('..00', rewards=[-1.0], group=1),
    _episode('..00', rewards=[7.0], group=1),
  ]
  out = rewards.by_group(batch, eps=0.0)
  _close(np.concatenate([e.rewards for e in out]), [0, 1.2, 0, 1.6, 0, 0, -0.2, 0, 1.4])
  out = rewards.by_group(batch, eps=5.0)
  _close(out[3].rewards, [0, 0.7])


def test_by_group_where_all_turns_get_the_same():
  """0.1 and 0.1 + rounding are 1 each, not the spike that a std would make of them."""
  tied = [_episode('.0.1', rewards=[0.1, 0.3 - 0.2]) for _ in range(3)]
  none = [_episode('.0.1', rewards=[0.0, 0.0], group=1)]
  *ones, zero = rewards.by_group([*tied, *none], eps=1e-15)
  _close(np.concatenate([e.rewards for e in ones]), np.ones(6))
  assert (zero.rewards == 0).all()


def _long(n, **kwargs):
  """n action tokens in two turns, with an answer of the environment between them."""
  return _episode('...' + '0' * (n - n // 2) + '.' * 50 + '1' * (n // 2) + '..', **kwargs)


@pytest.mark.parametrize(
  ('key', 'floor'),
  [
    ('overlong_verl(max=100,buf=20,factor=1.0)', None),
    ('overlong_trl(max=100,cache=20)', -1.0),
  ],
)
@pytest.mark.parametrize('masked', [True, False])
def test_overlong_is_verls_and_trls(key, floor, masked):
  """In the length of the policy's own tokens, on the last of them."""
  lengths, expected = zip(*_GOLDEN[key])
  batch = [_long(n, masked=masked) for n in lengths]
  for e, penalty in zip(batch, expected):
    e.rewards[0] = 0.5
    (out,) = rewards.overlong([e], limit=100, buffer=20, floor=floor)
    last = np.flatnonzero(~np.isnan(e.logprobs))[-1]
    where = np.zeros(len(e.rewards))
    where[last] = penalty
    _close(out.rewards, e.rewards + where)


def test_overlong_by_hand():
  """Limit 6, buffer 4: from 2 on a quarter of the factor 2 a token."""
  batch = [_long(n, rewards=[1.0, 2.0]) for n in (2, 3, 6, 7)]
  out = rewards.overlong(batch, limit=6, buffer=4, factor=2.0)
  assert [e.rewards[-1] for e in out] == [2, 1.5, 0, -0.5]
  out = rewards.overlong(batch, limit=6, buffer=4, factor=2.0, floor=-1.25)
  assert [e.rewards[-1] for e in out] == [2, 1.5, 0.75, 0.75]
  assert all(e.score == 3 - 2 + e.rewards[-1] for e in out)


@pytest.mark.parametrize('buffer', [0, -1, 7])
def test_a_buffer_that_is_none_is_refused(buffer):
  with pytest.raises(ValueError, match=f'buffer={buffer} .*limit=6'):
    rewards.overlong([], limit=6, buffer=buffer)


def test_less_kl_is_verls():
  """On the outcome's rewards; at the action tokens."""
  batch = episodes.golden_actions('rewards_outcome')
  out = rewards.less_kl(batch, coef=0.05, estimator=_k1)
  expected = episodes.golden_at_actions('verl/kl_in_reward/beta0.05_kl')
  _close(np.concatenate([e.rewards for e in out]), expected, 1e-9)


def test_less_kl_by_hand():
  e = _episode('..0..1.', rewards=[1.0, 2.0], masked=False)
  e.logprobs = np.array([-1.0, np.nan, np.nan, -2.0, np.nan])
  e.ref_logprobs = np.array([-3.0, -9.0, -9.0, -1.0, -9.0])
  (out,) = rewards.less_kl([e], coef=0.5, estimator=_k1)
  np.testing.assert_array_equal(out.rewards, [0, 0, 0, 2.5, 0])
  squared = lambda logprobs, ref_logprobs: (logprobs - ref_logprobs) ** 2
  (out,) = rewards.less_kl([e], coef=0.5, estimator=squared)
  np.testing.assert_array_equal(out.rewards, [-1, 0, 0, 1.5, 0])


def test_less_kl_without_a_reference_is_refused():
  with pytest.raises(ValueError, match='ref_logprobs.*set kl of the algorithm'):
    rewards.less_kl([_episode('..0')], coef=0.1, estimator=_k1)
