"""Algorithms read the columns that they declare, and options without effect are refused.

test_train_options.py tests the same through train.run.
"""

import dataclasses
import functools
import inspect
import pathlib
import re

import episodes
import numpy as np
import pytest

from agent_r1_jax.rl import advantages, algorithms, kl, losses

_SHAPED = {'rewards': (advantages.by_reward_to_go,)}
ALL = {
  'grpo': algorithms.grpo(),
  'dr_grpo': algorithms.dr_grpo(length=64),
  'dapo': algorithms.dapo(overlong={'limit': 64, 'buffer': 16}),
  'gspo': algorithms.gspo(),
  'rloo': algorithms.rloo(**_SHAPED),
  'reinforce': algorithms.reinforce(**_SHAPED),
  'reinforce_plus_plus': algorithms.reinforce_plus_plus(),
  'reinforce_plus_plus_baseline': algorithms.reinforce_plus_plus_baseline(),
  'remax': algorithms.remax(kl_coef=0.1),
  'gigpo': algorithms.gigpo(**_SHAPED),
  'gdpo': algorithms.gdpo(**_SHAPED),
  'weighted gdpo': algorithms.gdpo(weights={'a': 2.0}),
  'ppo': algorithms.ppo(value_coef=0.5, **_SHAPED),
  'step ppo': algorithms.ppo(estimator=advantages.step_gae),
  'bi-level ppo': algorithms.ppo(estimator=advantages.bi_level_gae),
  'distillation': algorithms.distillation(),
  'rejection': algorithms.rejection(),
}
# These need no more than one trajectory a group.
_ALONE = {'reinforce', 'reinforce_plus_plus', 'remax', 'ppo', 'step ppo', 'bi-level ppo'}
_ALONE |= {'distillation', 'rejection'}


def _batch():
  """Two groups of four, two turns each, with all that an estimator may read."""
  rng = np.random.default_rng(0)
  table = episodes.make_table([[2, 3]] * 8, group=np.arange(8) // 4)
  rewards_, values, ref_logprobs, logprobs = rng.normal(size=(4, 40))
  return dataclasses.replace(
    table,
    rewards=np.where(np.arange(40) % 5 == 4, rewards_, 0.0),
    values=values,
    old_logprobs=logprobs,
    ref_logprobs=ref_logprobs,
    baselines=rng.normal(size=8),
    final_values=rng.normal(size=8),
    parts={'a': rng.normal(size=8), 'b': rng.normal(size=8)},
    states=rng.integers(0, 2, 16),
  )


def _other(table, name):
  """Changes the numbers of one readable column."""
  if name == 'parts':
    parts = {key: np.cos(7.0 * part) for key, part in table.parts.items()}
    return dataclasses.replace(table, parts=parts)
  if name == 'group':
    return dataclasses.replace(table, group=np.arange(8) % 2)
  return dataclasses.replace(table, **{name: np.cos(7.0 * getattr(table, name))})


def test_every_algorithm_is_tried_here_and_named_in_the_documentation():
  """What a new one needs; CONTRIBUTING.md says where the rest goes."""
  text = (pathlib.Path(__file__).parents[1] / 'docs' / 'algorithms.md').read_text()
  for name, make in inspect.getmembers(algorithms, inspect.isfunction):
    if make.__annotations__.get('return') is algorithms.Algorithm and name[0] != '_':
      assert name in ALL, f'{name}: give ALL one'
      assert f'| `{name}`' in text, f'{name}: give the table of docs/algorithms.md a row'


@pytest.mark.parametrize('column', algorithms.READABLE)
@pytest.mark.parametrize('name', ALL)
def test_every_algorithm_reads_what_it_says(name, column):
  algorithm, table = ALL[name], _batch()
  expected = algorithm.advantages(table).advantages
  changed = algorithm.advantages(_other(table, column)).advantages
  reads = not np.array_equal(expected, changed)
  assert reads == (column in algorithm.reads), column


@pytest.mark.parametrize('name', ALL)
def test_algorithms_that_compare_groups_refuse_one_sample(name):
  algorithms.check(ALL[name], 4)
  if name in _ALONE:
    algorithms.check(ALL[name], 1)
  else:
    with pytest.raises(ValueError, match='samples is 1'):
      algorithms.check(ALL[name], 1)


@pytest.mark.parametrize(
  ('algorithm', 'message'),
  [
    (algorithms.grpo(value_coef=0.5), 'value_coef'),
    (algorithms.grpo(value_loss=losses.value_clip()), 'value_loss'),
    (algorithms.grpo(reads=('rewards', 'values')), 'value_loss: .*give one'),
    (algorithms.grpo(reads=('reward',)), r"no \['reward'\]; name some of .*'rewards'"),
    (algorithms.remax(**_SHAPED), 'rewards: the greedy'),
    (algorithms.gdpo(weights={'first': 1.0}, **_SHAPED), 'read no reward'),
    (algorithms.gdpo(weights={'first': 1.0}, kl=kl.InReward(0.1)), 'read no reward'),
    (algorithms.gdpo(weights={'answer': 1.0}, kl=kl.InReward(0.1)), 'read no reward'),
    (algorithms.distillation(**_SHAPED), 'read no reward'),
  ],
)
def test_an_option_that_changes_nothing_is_refused(algorithm, message):
  with pytest.raises(ValueError, match=message):
    algorithms.check(algorithm, 4)


@pytest.mark.parametrize('field', ['epochs', 'minibatches'])
@pytest.mark.parametrize('name', ALL)
def test_without_a_ratio_a_rollout_is_good_for_one_optimizer_step(name, field):
  algorithms.check(ALL[name], 4, **{field: 1})
  if name in ('reinforce', 'remax', 'distillation'):
    with pytest.raises(ValueError, match=f'{field} is 2: .* Make it 1.*ppo_clip'):
      algorithms.check(ALL[name], 4, **{field: 2})
    # The remedy that it names.
    corrected = ALL[name]._replace(loss=losses.ppo_clip())
    algorithms.check(corrected, 4, **{field: 2})
  else:
    algorithms.check(ALL[name], 4, **{field: 2})


def test_what_only_the_environment_knows_is_left_to_it():
  named = functools.partial(advantages.gdpo, weights={'of the environment': 1.0})
  algorithms.check(algorithms.grpo()._replace(advantages=named), 4)


def test_an_estimator_of_ones_own_says_what_it_reads():
  alone = algorithms.Algorithm(
    advantages.returns_to_go, losses.ppo_clip(), reads=('rewards',)
  )
  algorithms.check(alone, 1)
  # By default an algorithm compares groups.
  with pytest.raises(ValueError, match="samples is 1.*take 'group' out of reads"):
    algorithms.check(
      alone._replace(reads=algorithms.Algorithm._field_defaults['reads']), 1
    )


def test_the_estimators_of_the_documentation_run():
  text = (pathlib.Path(__file__).parents[1] / 'docs' / 'algorithms.md').read_text()
  names: dict = {}
  for block in re.findall(r'```python\n(.*?)```', text, re.S):
    exec(block, names)
  table = _batch()
  out = names['algorithm'].advantages(table).advantages
  medians = [np.median(table.scores[table.group == g]) for g in (0, 1)]
  expected = np.repeat(table.scores - np.repeat(medians, 4), 5)
  np.testing.assert_allclose(out, expected, rtol=1e-12)
  algorithms.check(names['algorithm'], 4)
