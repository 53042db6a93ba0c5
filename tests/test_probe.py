"""probe.py: every algorithm is what it says, and what would change nothing is refused.

What train.run says of it is in test_train_options.py.
"""

import functools

import pytest

from agent_r1_jax.rl import advantages, algorithms, kl, losses, probe, rewards

_SHAPED = {'rewards': (rewards.by_reward_to_go,)}
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
  'ppo': algorithms.ppo(value_coef=0.5, **_SHAPED),
  'step ppo': algorithms.ppo(estimator=advantages.step_gae),
  'bi-level ppo': algorithms.ppo(estimator=advantages.bi_level_gae),
  'distillation': algorithms.distillation(),
  'rejection': algorithms.rejection(),
}
# A group of one is all that these need.
_ALONE = {'reinforce', 'reinforce_plus_plus', 'remax', 'ppo', 'step ppo', 'bi-level ppo'}
_ALONE |= {'distillation', 'rejection'}


@pytest.mark.parametrize('name', ALL)
def test_what_goes_together_is_taken(name):
  probe.check(ALL[name], 4)
  if name in _ALONE:
    probe.check(ALL[name], 1)
  else:
    with pytest.raises(ValueError, match='samples is 1'):
      probe.check(ALL[name], 1)


@pytest.mark.parametrize(
  ('algorithm', 'message'),
  [
    (algorithms.grpo(value_coef=0.5), 'value_coef'),
    (algorithms.grpo(value_loss=losses.value_clip()), 'value_loss'),
    (algorithms.grpo(greedy_baseline=True), 'greedy_baseline'),
    (algorithms.remax(**_SHAPED), 'rewards: the greedy'),
    (algorithms.gdpo(weights={'first': 1.0}, **_SHAPED), 'read no reward'),
    (algorithms.gdpo(weights={'first': 1.0}, kl=kl.InReward(0.1)), 'read no reward'),
    (algorithms.gdpo(weights={'answer': 1.0}, kl=kl.InReward(0.1)), 'read no reward'),
    (algorithms.distillation(**_SHAPED), 'read no reward'),
  ],
)
def test_what_would_change_nothing_is_refused(algorithm, message):
  with pytest.raises(ValueError, match=message):
    probe.check(algorithm, 4)


@pytest.mark.parametrize('field', ['epochs', 'minibatches'])
@pytest.mark.parametrize('name', ALL)
def test_without_a_ratio_a_rollout_is_good_for_one_optimizer_step(name, field):
  probe.check(ALL[name], 4, **{field: 1})
  if name in ('reinforce', 'remax', 'distillation'):
    with pytest.raises(ValueError, match=f'{field} is 2: .* Make it 1.*ppo_clip'):
      probe.check(ALL[name], 4, **{field: 2})
    # The mend that it names.
    mended = ALL[name]._replace(loss=losses.ppo_clip())
    probe.check(mended, 4, **{field: 2})
  else:
    probe.check(ALL[name], 4, **{field: 2})


def test_what_only_the_environment_knows_is_left_to_it():
  named = functools.partial(advantages.gdpo, weights={'of the environment': 1.0})
  probe.check(algorithms.grpo()._replace(advantages=named), 4)
