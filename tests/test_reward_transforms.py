"""Transforms of rewards: by hand, the peers' numbers, and invariants."""

import copy
import dataclasses
import functools
import json
import pathlib

import episodes
import numpy as np
import pytest

from agent_r1_jax.rl import advantages
from agent_r1_jax.rl import kl as kl_lib

_GOLDEN = json.loads(
  (pathlib.Path(__file__).parent / 'golden' / 'reward_refs.json').read_text()
)
_k1 = lambda logprobs, ref_logprobs: logprobs - ref_logprobs
_ALL = {
  'by_reward_to_go': advantages.by_reward_to_go,
  'overlong': functools.partial(advantages.overlong, limit=4, buffer=2),
  'less_kl': functools.partial(kl_lib.less_kl, coef=0.1, estimator=_k1),
}


_trajectory, _table = episodes.trajectory, episodes.visible_table
_close = episodes.assert_close


def _batch(masked):
  ts = episodes.make_varied(12)
  ts.insert(3, _trajectory('....', group=1))
  table = _table(*ts, masked=masked)
  ref_logprobs = np.linspace(-2, -1, len(table))
  return dataclasses.replace(
    table, ref_logprobs=ref_logprobs, parts={'all': table.scores}
  )


@pytest.mark.parametrize('masked', [True, False])
@pytest.mark.parametrize('name', _ALL)
def test_only_rewards_of_actions_change_and_only_in_what_is_returned(name, masked):
  table = _batch(masked)
  before = copy.deepcopy(table)
  out = _ALL[name](table)
  for field in dataclasses.fields(table):
    was = getattr(before, field.name)
    np.testing.assert_equal(getattr(table, field.name), was)
    if field.name not in ('rewards', 'parts'):
      np.testing.assert_equal(getattr(out, field.name), was)
  if name == 'by_reward_to_go':  # Another unit, for the parts as well.
    _close(out.parts['all'], out.scores)
  else:
    np.testing.assert_equal(out.parts, before.parts)
  assert np.isfinite(out.rewards).all() and out.rewards.shape == table.rewards.shape
  assert (out.rewards[~table.action_mask] == 0).all()
  assert not np.array_equal(out.rewards, table.rewards)


@pytest.mark.parametrize('name', _ALL)
def test_the_order_of_trajectories_does_not_matter(name):
  table = _batch(True)
  order = np.random.default_rng(0).permutation(13)
  expected = episodes.reorder(_ALL[name](table), order)
  out = _ALL[name](episodes.reorder(table, order))
  _close(out.rewards, expected.rewards)
  _close(out.parts['all'], expected.parts['all'])


@pytest.mark.parametrize('name', _ALL)
def test_without_a_token_there_is_nothing(name):
  for ts in ([_trajectory('....')], []):
    assert len(_ALL[name](_table(*ts, ref_logprobs=[])).rewards) == 0


def test_by_reward_to_go_by_hand():
  """The rewards to go over the batch: 1 - 3 = -2, -3, -3; 2, 2. The largest |.| is 3."""
  one = _trajectory('..00...1', '.2', rewards=[1.0, 0.0, -3.0])
  other = _trajectory('..00', rewards=[2.0], group=1)
  out = advantages.by_reward_to_go(_table(one, other), eps=1.0)
  np.testing.assert_array_equal(out.rewards, [0, 0.25, 0, -0.75, 0, 0.5])
  # Alone, the return of the second is within ±1 by its own size.
  out = advantages.by_reward_to_go(_table(other), eps=0.0)
  np.testing.assert_array_equal(out.rewards, [0, 1])


def test_by_reward_to_go_of_nothing_is_nothing():
  out = advantages.by_reward_to_go(_table(_trajectory('..00.1', rewards=[0.0, 0.0])))
  assert (out.rewards == 0).all()


def _long(n, **kwargs):
  """n action tokens in two turns, with an answer of the environment between them."""
  return _trajectory(
    '...' + '0' * (n - n // 2) + '.' * 50 + '1' * (n // 2) + '..', **kwargs
  )


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
  table = _table(*(_long(n) for n in lengths), masked=masked)
  first = np.full(len(table), 0.5)
  table = dataclasses.replace(table, rewards=first)
  out = advantages.overlong(table, limit=100, buffer=20, floor=floor)
  changes = episodes.split_by_trajectory(table, out.rewards - first)
  for added, mask, penalty in zip(
    changes, episodes.split_by_trajectory(table, table.action_mask), expected, strict=True
  ):
    where = np.zeros(len(added))
    where[np.flatnonzero(mask)[-1]] = penalty
    _close(added, where)


def test_overlong_by_hand():
  """Limit 6, buffer 4: from 2 on a quarter of the factor 2 a token."""
  table = _table(*(_long(n, rewards=[1.0, 2.0]) for n in (2, 3, 6, 7)))
  last = np.cumsum(table.lengths) - 1
  out = advantages.overlong(table, limit=6, buffer=4, factor=2.0)
  assert out.rewards[last].tolist() == [2, 1.5, 0, -0.5]
  out = advantages.overlong(table, limit=6, buffer=4, factor=2.0, floor=-1.25)
  assert out.rewards[last].tolist() == [2, 1.5, 0.75, 0.75]
  assert (out.scores == 3 - 2 + out.rewards[last]).all()


@pytest.mark.parametrize('buffer', [0, -1, 7])
def test_a_buffer_that_is_none_is_refused(buffer):
  with pytest.raises(ValueError, match=f'buffer={buffer} .*limit=6'):
    advantages.overlong(_table(), limit=6, buffer=buffer)


def test_less_kl_is_verls():
  """On the outcome's rewards; at the action tokens."""
  batch = episodes.golden_actions('rewards_outcome')
  out = kl_lib.less_kl(batch, coef=0.05, estimator=_k1)
  expected = episodes.golden_at_actions('verl/kl_in_reward/beta0.05_kl')
  _close(out.rewards, expected, 1e-9)


def test_less_kl_by_hand():
  table = _table(
    _trajectory('..0..1.', rewards=[1.0, 2.0]),
    masked=False,
    old_logprobs=[-1.0, np.nan, np.nan, -2.0, np.nan],
    ref_logprobs=[-3.0, -9.0, -9.0, -1.0, -9.0],
  )
  out = kl_lib.less_kl(table, coef=0.5, estimator=_k1)
  np.testing.assert_array_equal(out.rewards, [0, 0, 0, 2.5, 0])
  squared = lambda logprobs, ref_logprobs: (logprobs - ref_logprobs) ** 2
  out = kl_lib.less_kl(table, coef=0.5, estimator=squared)
  np.testing.assert_array_equal(out.rewards, [-1, 0, 0, 1.5, 0])


def test_less_kl_without_a_reference_is_refused():
  with pytest.raises(ValueError, match='ref_logprobs: set kl of the algorithm'):
    kl_lib.less_kl(_table(_trajectory('..0')), coef=0.1, estimator=_k1)
