"""Algorithms: what a trajectory's tokens are worth, and the loss that follows from it.

As an optax.GradientTransformation is two pure functions, so is an Algorithm: `advantages`
(host, float64, over whole trajectories) and `loss` (device, one number a token). What
else people vary are its other fields, independent of one another:
`algorithms.ppo()._replace(advantage_mask=False)`. `check` refuses what does not go
together.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

import numpy as np

from agent_r1_jax.rl import advantages as advantages_lib
from agent_r1_jax.rl import correction as correction_lib
from agent_r1_jax.rl import kl as kl_lib
from agent_r1_jax.rl import losses
from agent_r1_jax.rl import rewards as rewards_lib
from agent_r1_jax.rl.table import TokenTable

Aggregate = Callable[[np.ndarray], np.ndarray]
# What `Algorithm.reads` may name.
READABLE = ('rewards', 'parts', 'group', 'values', 'ref_logprobs', 'baselines')


class Algorithm(NamedTuple):
  """Two pure functions, and what they need.

  Attributes:
    advantages: The rows that are shown (see advantage_mask) -> the same table with the
      column `advantages`, and with `returns` where there is a critic.
    loss: (TokenStats, Batch) -> the loss of each token, and numbers to watch. It is 0
      where the advantage is, so that such tokens need not be computed.
    aggregate: Token counts of a mini-batch's trajectories -> the weight of each
      trajectory's tokens. None is the loss's own, so that a loss that is replaced brings
      its aggregation along: seq_mean_token_mean of GSPO and SAPO, else token_mean.
    reads: What `advantages` reads, of READABLE. 'ref_logprobs' lets the reference policy
      score the tokens, 'baselines' lets a greedy episode of each task be played; 'group'
      says that the episodes of a group are compared. Options that would have no effect
      on what is read are refused (`check`).
    rewards: Changes of the rewards before all else, in order (rl/rewards.py).
    value_loss: (values, Batch) -> the critic's loss of each token; None without a critic.
    value_coef: Its weight where the critic is a second head of the policy.
    entropy_coef: The weight of the entropy bonus.
    kl: The KL to the reference policy, in the reward or in the loss.
    correction: The table of the action tokens -> their importance weights in the loss
      (rl/correction.py); None: the policy that is updated sampled them.
    loss_mask: Only action tokens have a loss. Off, so has what the environment wrote.
    advantage_mask: Advantages are estimated over the action tokens alone, and are 0
      elsewhere. Off, what the environment wrote takes part (see TokenTable.visible_rows).
    mask_truncated: Leave out episodes that a budget ended. Otherwise they are scored by
      the rewards that they got, as episodes that have ended.
  """

  advantages: Callable[[TokenTable], TokenTable]
  loss: losses.Surrogate
  aggregate: Aggregate | None = None
  reads: tuple[str, ...] = ('rewards', 'group')
  rewards: tuple[rewards_lib.Transform, ...] = ()
  value_loss: losses.ValueLoss | None = None
  value_coef: float = 1.0
  entropy_coef: float = 0.0
  kl: kl_lib.InReward | kl_lib.InLoss | None = None
  correction: correction_lib.Correction | None = None
  loss_mask: bool = True
  advantage_mask: bool = True
  mask_truncated: bool = False

  @property
  def aggregation(self) -> Aggregate:
    """What is aggregated by: `aggregate`, or the loss's own."""
    if self.aggregate is not None:
      return self.aggregate
    by_sequence = getattr(self.loss, 'sequence_mean', False)
    return seq_mean_token_mean if by_sequence else token_mean

  @property
  def reads_reference(self) -> bool:
    """Whether `advantages` reads the reference policy's log-probs."""
    return 'ref_logprobs' in self.reads

  @property
  def needs_reference(self) -> bool:
    """Whether anything reads a reference policy's log-probs."""
    return self.reads_reference or self.kl is not None

  @property
  def greedy_baseline(self) -> bool:
    """Whether `advantages` reads the reward of a greedy episode of each task."""
    return 'baselines' in self.reads

  @property
  def needs_critic(self) -> bool:
    """Whether values are read and learned."""
    return self.value_loss is not None


def check(
  algorithm: Algorithm, samples: int, *, epochs: int = 1, minibatches: int = 1
) -> None:
  """Refuses fields that do not go together, by what the algorithm says that it reads.

  Args:
    algorithm: The run's.
    samples: Episodes of a group.
    epochs: How often a rollout is gone through.
    minibatches: Optimizer steps an epoch.

  Raises:
    ValueError: Names the field and the mend.
  """
  reads = algorithm.reads
  if unknown := set(reads) - set(READABLE):
    raise ValueError(f'reads: there is no {sorted(unknown)}; name some of {READABLE}.')
  for name, times in (('epochs', epochs), ('minibatches', minibatches)):
    if times > 1 and getattr(algorithm.loss, 'exactly_on_policy', False):
      raise ValueError(
        f'{name} is {times}: the loss of this algorithm has no ratio to the policy that '
        'sampled, so that only the first optimizer step of a rollout is right. Make it '
        '1, or give a loss that has one: algorithm._replace(loss=losses.ppo_clip()).'
      )
  if algorithm.value_coef != 1.0 and not algorithm.needs_critic:
    raise ValueError('value_coef: there is no critic to weigh; leave it out.')
  if algorithm.greedy_baseline and algorithm.rewards:
    raise ValueError(
      'rewards: the greedy episodes of the baseline are scored as they are; leave them '
      'out.'
    )
  if samples == 1 and 'group' in reads:
    raise ValueError(
      'samples is 1: these advantages compare the episodes of a group, and would all be '
      "0; make it 2 or more. (If they do not, take 'group' out of reads.)"
    )
  if algorithm.needs_critic and 'values' not in reads:
    raise ValueError(
      "value_loss: these advantages read no critic's values; leave it out. (If they do, "
      "add 'values' to reads.)"
    )
  if 'values' in reads and not algorithm.needs_critic:
    raise ValueError(
      "value_loss: these advantages read a critic's values, and there is no critic; give "
      'one, such as losses.value_clip().'
    )
  changes = algorithm.rewards or isinstance(algorithm.kl, kl_lib.InReward)
  if changes and 'rewards' not in reads:
    raise ValueError(
      'rewards, or a KL in the reward: these advantages read no reward; leave them out. '
      "(If they do, add 'rewards' to reads.)"
    )


# Aggregations.


def token_mean(counts: np.ndarray) -> np.ndarray:
  """Every token of the batch weighs the same: 1 / Σ counts (DAPO, verl's default)."""
  return np.full(len(counts), 1.0 / max(counts.sum(), 1))


def seq_mean_token_mean(counts: np.ndarray) -> np.ndarray:
  """Every trajectory weighs the same, and so do the tokens inside it (GRPO's paper).

  As in verl, a trajectory without an action token is not counted.
  """
  return 1.0 / (max((counts > 0).sum(), 1) * np.maximum(counts, 1))


def seq_mean_token_sum(counts: np.ndarray) -> np.ndarray:
  """The tokens of a trajectory are summed, trajectories averaged: 1 / #{counts > 0}."""
  return np.full(len(counts), 1.0 / max((counts > 0).sum(), 1))


def seq_mean_token_sum_norm(length: float) -> Aggregate:
  """Dr.GRPO's norm (arXiv 2503.20783): the sum of a trajectory's tokens over a constant.

  Args:
    length: That constant; the most action tokens that a trajectory can have.
  """
  if not length > 0:
    raise ValueError(f'length is {length}; it must be above 0.')
  return lambda counts: seq_mean_token_sum(counts) / length


# Algorithms by name. Each takes Algorithm's other fields by name too.


def grpo(
  *,
  divide_by_std: bool = True,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = 3.0,
  kl_coef: float = 0.001,
  aggregate: Aggregate | None = None,
  **fields: Any,
) -> Algorithm:
  """Group-relative policy optimisation (arXiv 2402.03300), with verl's defaults.

  Args:
    divide_by_std: Whether advantages are divided by the std of the group's rewards.
    clip_low: ε_l of the PPO clip.
    clip_high: ε_h of the PPO clip.
    dual_clip: c of the dual clip, or None.
    kl_coef: The weight of the k3 KL to the reference in the loss; 0 needs no reference.
    aggregate: How tokens and trajectories are weighed; None is by the loss's own.
    **fields: Other fields of Algorithm.
  """
  fields.setdefault('kl', kl_lib.InLoss(kl_coef) if kl_coef else None)
  return Algorithm(
    functools.partial(advantages_lib.group_relative, divide_by_std=divide_by_std),
    losses.ppo_clip(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
    aggregate,
    **fields,
  )


def dr_grpo(*, length: float, **options: Any) -> Algorithm:
  """GRPO done right (arXiv 2503.20783): no std, no length bias, no KL.

  Args:
    length: The constant that takes a trajectory's length's place.
    **options: Options of `grpo`.
  """
  options = dict[str, Any](kl_coef=0.0) | options
  aggregate = seq_mean_token_sum_norm(length)
  return grpo(divide_by_std=False, aggregate=aggregate, **options)


def dapo(*, overlong: Mapping[str, float] | None = None, **options: Any) -> Algorithm:
  """DAPO (arXiv 2503.14476): clip-higher, token mean, no KL, over-long punishment.

  Its dynamic sampling is `config.Schedule.max_refills`.

  Args:
    overlong: Options of rewards.overlong (limit, buffer, factor, floor); None is none.
    **options: Options of `grpo`.
  """
  options = dict[str, Any](clip_high=0.28, dual_clip=None, kl_coef=0.0) | options
  if overlong is not None:
    punished = functools.partial(rewards_lib.overlong, **overlong)
    options['rewards'] = (*options.get('rewards', ()), punished)
  return grpo(**options)


def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4, **options: Any) -> Algorithm:
  """Group sequence policy optimisation (arXiv 2507.18071): one ratio a sequence.

  Args:
    clip_low: ε_l of the sequence's geometric mean ratio; the default is the paper's.
    clip_high: ε_h of it; the default is the paper's.
    **options: Options of `grpo`, but for its clip.
  """
  options = dict[str, Any](kl_coef=0.0) | options
  return grpo(dual_clip=None, **options)._replace(
    loss=losses.gspo(clip_low=clip_low, clip_high=clip_high)
  )


def rloo(*, clip: float = 0.2, kl_coef: float = 0.001, **fields: Any) -> Algorithm:
  """REINFORCE leave-one-out (arXiv 2402.14740), with the clip of verl's runs of it.

  Args:
    clip: ε of the PPO clip; it is active with several updates a rollout only.
    kl_coef: The weight of the k1 KL in the reward.
    **fields: Other fields of Algorithm.
  """
  return _clipped(advantages_lib.leave_one_out, clip, kl_coef, fields)


def reinforce(*, gamma: float = 1.0, kl_coef: float = 0.0, **fields: Any) -> Algorithm:
  """REINFORCE: -G_t log π, the return to go without a baseline.

  Without a ratio it is exact on-policy only: one optimizer step a rollout.

  Args:
    gamma: Discount an action token.
    kl_coef: The weight of the k1 KL in the reward.
    **fields: Other fields of Algorithm.
  """
  fields = _kl_in_reward(kl_coef) | {'reads': ('rewards',)} | fields
  returns = functools.partial(advantages_lib.returns_to_go, gamma=gamma)
  return Algorithm(returns, losses.reinforce(), **fields)


def reinforce_plus_plus(
  *, gamma: float = 1.0, clip: float = 0.2, kl_coef: float = 0.001, **fields: Any
) -> Algorithm:
  """REINFORCE++ (arXiv 2501.03262): whitened returns to go, k1 in the reward, clip.

  The return is carried past observations and across segments.

  Args:
    gamma: Discount an action token.
    clip: ε of the PPO clip.
    kl_coef: The weight of the k1 KL in the reward.
    **fields: Other fields of Algorithm.
  """

  def advantages(table):
    return advantages_lib.whiten(advantages_lib.returns_to_go(table, gamma=gamma))

  return _clipped(advantages, clip, kl_coef, {'reads': ('rewards',)} | fields)


def reinforce_plus_plus_baseline(
  *, clip: float = 0.2, kl_coef: float = 0.001, **fields: Any
) -> Algorithm:
  """REINFORCE++-baseline (arXiv 2501.03262): R - mean_g R, whitened over the batch.

  A group of equal rewards gets the whitening's common shift, which is not 0.

  Args:
    clip: ε of the PPO clip.
    kl_coef: The weight of the k1 KL in the reward.
    **fields: Other fields of Algorithm.
  """

  def advantages(table):
    centred = advantages_lib.group_relative(table, divide_by_std=False)
    return advantages_lib.whiten(centred)

  return _clipped(advantages, clip, kl_coef, fields)


def remax(*, gamma: float = 1.0, kl_coef: float = 0.0, **fields: Any) -> Algorithm:
  """ReMax (arXiv 2310.10505): the baseline is a greedy episode's reward, tools included.

  As `reinforce`, it is good for one optimizer step a rollout.

  Args:
    gamma: Discount an action token.
    kl_coef: The weight of the k1 KL in the reward.
    **fields: Other fields of Algorithm.
  """
  fields = {'reads': ('rewards', 'baselines')} | fields
  return reinforce(gamma=gamma, kl_coef=kl_coef, **fields)._replace(
    advantages=functools.partial(advantages_lib.greedy_baseline, gamma=gamma)
  )


def gigpo(
  *,
  gamma: float = 0.95,
  step_weight: float = 1.0,
  divide_by_std: bool = False,
  **options: Any,
) -> Algorithm:
  """Group-in-group policy optimisation (arXiv 2505.10978): episodes and equal states.

  Args:
    gamma: Discount a turn.
    step_weight: ω of the step part.
    divide_by_std: Whether both parts are divided by their groups' std.
    **options: Options of `grpo`.
  """
  advantages = functools.partial(
    advantages_lib.gigpo,
    gamma=gamma,
    step_weight=step_weight,
    divide_by_std=divide_by_std,
  )
  return grpo(**options)._replace(advantages=advantages)


def gdpo(*, weights: Mapping[str, float] | None = None, **options: Any) -> Algorithm:
  """GDPO: each named part of the reward is normalised in its group, then they are summed.

  Args:
    weights: The parts' weights by name; None is 1 each, and what no part names is added
      in its own unit.
    **options: Options of `grpo`, but for its std.
  """
  advantages = functools.partial(advantages_lib.gdpo, weights=weights)
  # With weights, nothing of the reward counts but its named parts.
  reads = ('parts', 'group') if weights is not None else ('rewards', 'parts', 'group')
  options = {'reads': reads} | options
  return grpo(divide_by_std=True, **options)._replace(advantages=advantages)


def ppo(
  *,
  gamma: float = 1.0,
  lam: float = 1.0,
  estimator: Callable[..., TokenTable] = advantages_lib.gae,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = 3.0,
  value_clip: float | None = 0.5,
  bootstrap_truncated: bool = False,
  kl_coef: float = 0.001,
  **fields: Any,
) -> Algorithm:
  """Proximal policy optimisation (arXiv 1707.06347) with GAE over action positions.

  Args:
    gamma: Discount of the estimator's step: a token, or a turn.
    lam: GAE's trace decay.
    estimator: advantages.gae, step_gae (Agent-R1's newer code) or bi_level_gae (RAGEN).
    clip_low: ε_l of the policy's clip.
    clip_high: ε_h of the policy's clip.
    dual_clip: c of the dual clip, or None.
    value_clip: c of the clipped value loss, or None.
    bootstrap_truncated: An episode that a budget ended goes on with the critic's value
      after its last token. By default it has ended: what follows is worth 0, as in verl.
    kl_coef: The weight of the k1 KL taken off each token's reward; 0 needs no reference.
    **fields: Other fields of Algorithm.
  """
  # Where it is off, an estimator that was made with an option of its own keeps it.
  bootstrap = {'bootstrap': True} if bootstrap_truncated else {}

  def advantages(table):
    estimated = estimator(table, gamma=gamma, lam=lam, **bootstrap)
    # Agent-R1's step advantages are normalised over the turns already.
    if getattr(estimator, 'func', estimator) is advantages_lib.step_gae:
      return estimated
    return advantages_lib.whiten(estimated)

  fields = _kl_in_reward(kl_coef) | {'reads': ('rewards', 'values')} | fields
  return Algorithm(
    advantages,
    losses.ppo_clip(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
    value_loss=losses.value_clip(clip=value_clip),
    **fields,
  )


def distillation(**fields: Any) -> Algorithm:
  """On-policy distillation (arXiv 2306.13649): -KL(π ‖ teacher) on the student's tokens.

  The teacher is the reference: `config.Model.reference`. No reward is read.
  """
  fields = {'reads': ('ref_logprobs',)} | fields
  return Algorithm(advantages_lib.reverse_kl, losses.reinforce(), **fields)


def rejection(*, threshold: float = 1.0, **fields: Any) -> Algorithm:
  """Rejection-sampling fine-tuning: the likelihood of what earned the threshold.

  Args:
    threshold: The least reward that is learned from.
    **fields: Other fields of Algorithm.
  """
  accepted = functools.partial(advantages_lib.accepted, threshold=threshold)
  fields = {'reads': ('rewards',)} | fields
  return Algorithm(accepted, losses.likelihood(), **fields)


def _clipped(advantages, clip, kl_coef, fields) -> Algorithm:
  fields = _kl_in_reward(kl_coef) | fields
  return Algorithm(advantages, losses.ppo_clip(clip_low=clip, clip_high=clip), **fields)


def _kl_in_reward(coef) -> dict[str, Any]:
  return {'kl': kl_lib.InReward(coef) if coef else None}
