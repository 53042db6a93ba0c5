"""Algorithms: an advantage estimator, a loss, and their options.

Like optax.GradientTransformation, an Algorithm is two pure functions: `advantages` (on
the host, float64, from a rollout's table) and `loss` (on the device, one number per
token). The other fields are independent options:
`algorithms.ppo()._replace(advantage_mask=False)`. `check` raises ValueError for
combinations in which an option would have no effect.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

from agent_r1_jax.rl import advantages as advantages_lib
from agent_r1_jax.rl import kl as kl_lib
from agent_r1_jax.rl import losses
from agent_r1_jax.rl.table import TokenTable

# The values that `Algorithm.reads` may contain.
READABLE = ('rewards', 'parts', 'group', 'values', 'ref_logprobs', 'baselines')


class ValueTargets(NamedTuple):
  """The critic's regression targets: an estimator's returns and their discount."""

  estimator: str  # The estimator's name, with its bound arguments.
  gamma: float  # The discount per step.
  lam: float  # GAE's trace decay.
  # The step that gamma discounts, 'token' or 'turn'. A turn's tokens have their own
  # returns as targets, or all of them the return of the turn.
  step: str


class Algorithm(NamedTuple):
  """An advantage estimator, a loss, and their options."""

  # Takes a table of visible tokens (see advantage_mask), and returns it with the column
  # `advantages`, and with `returns` if there is a critic.
  advantages: Callable[[TokenTable], TokenTable]
  # (TokenStats, Batch) -> the loss and the metrics of each token.
  loss: losses.Surrogate
  # Takes the token counts of a mini-batch's trajectories, and returns the weight of each
  # trajectory's tokens. None uses the loss's own aggregation, also after `loss` is
  # replaced: seq_mean_token_mean for GSPO and SAPO, otherwise token_mean.
  aggregate: losses.Aggregate | None = None
  # The names from READABLE that `advantages` reads. With 'ref_logprobs' the reference
  # policy scores the tokens, with 'baselines' a greedy episode of each task is played;
  # 'group' means that the episodes of a group are compared. `check` raises ValueError for
  # options that would have no effect on them.
  reads: tuple[str, ...] = ('rewards', 'group')
  # Transforms of the rewards, applied first and in order (rl/advantages.py).
  rewards: tuple[advantages_lib.Transform, ...] = ()
  # (values, Batch) -> the critic's loss of each token; None without a critic.
  value_loss: losses.ValueLoss | None = None
  # What the critic learns to predict; saved with the critic (train/fingerprint.py).
  value_targets: ValueTargets | None = None
  # The weight of the value loss if the critic is a second head of the policy.
  value_coef: float = 1.0
  entropy_coef: float = 0.0  # The weight of the entropy bonus.
  # The KL to the reference policy, in the reward or in the loss.
  kl: kl_lib.InReward | kl_lib.InLoss | None = None
  # Takes the table of the action tokens, and returns their importance weights in the loss
  # (rl/losses.py). None: the tokens were sampled from the policy to update.
  correction: losses.Correction | None = None
  # Whether only action tokens have a loss. If False, the environment's tokens do too.
  loss_mask: bool = True
  # Whether advantages are estimated over action tokens only, and are 0 elsewhere. If
  # False, they include the environment's tokens (see TokenTable.find_visible).
  advantage_mask: bool = True
  # Whether to leave out episodes that ran out of budget. If False, they are scored by
  # their rewards, like episodes that the environment ended.
  mask_truncated: bool = False

  @property
  def aggregation(self) -> losses.Aggregate:
    """The effective aggregation: `aggregate`, or else the loss's own."""
    if self.aggregate is not None:
      return self.aggregate
    by_sequence = getattr(self.loss, 'sequence_mean', False)
    return losses.seq_mean_token_mean if by_sequence else losses.token_mean

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
    """Whether there is a critic, whose values are read and learned."""
    return self.value_loss is not None

  def needs_all_trajectories(self, *, shared_critic: bool) -> bool:
    """Whether trajectories with zero advantages still have a gradient.

    If not, they are left out of the policy's mini-batches. The entropy, a KL in the loss,
    the value loss of a shared critic, and losses without the annotation
    `zero_without_advantage` (losses.AnnotatedLoss) give them a gradient.
    """
    zero = getattr(self.loss, 'zero_without_advantage', False)
    others = self.entropy_coef or isinstance(self.kl, kl_lib.InLoss) or shared_critic
    return bool(others or not zero)


def check(
  algorithm: Algorithm, samples: int, *, epochs: int = 1, minibatches: int = 1
) -> None:
  """Checks that all fields have an effect and do not contradict each other.

  Raises:
    ValueError: The message names the field and the remedy.
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
  changes = algorithm.rewards or isinstance(algorithm.kl, kl_lib.InReward)
  critic, valued = algorithm.needs_critic, 'values' in reads
  if algorithm.value_coef != 1.0 and not critic:
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
  if critic and not valued:
    raise ValueError(
      "value_loss: these advantages read no critic's values; leave it out. (If they do, "
      "add 'values' to reads.)"
    )
  if valued and not critic:
    raise ValueError(
      "value_loss: these advantages read a critic's values, and there is no critic; give "
      'one, such as losses.value_clip().'
    )
  if changes and 'rewards' not in reads:
    raise ValueError(
      'rewards, or a KL in the reward: these advantages read no reward; leave them out. '
      "(If they do, add 'rewards' to reads.)"
    )


# The algorithms by name. Their common options:
#
# gamma, lam: The discount and the trace decay of the estimator (rl/advantages.py).
# clip_low, clip_high, dual_clip: As in losses.ppo_clip; `clip` sets both bounds.
# kl_coef: The weight of the KL to the reference policy; 0 needs no reference. The KL is
# k3   in the loss for grpo and its variants, k1 in the reward for the others.
# options: Options of grpo, except those that the algorithm sets itself.
# fields: Other fields of Algorithm. To replace the loss: grpo()._replace(loss=...).


def grpo(
  *,
  divide_by_std: bool = True,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = 3.0,
  kl_coef: float = 0.001,
  aggregate: losses.Aggregate | None = None,
  **fields: Any,
) -> Algorithm:
  """Group-relative policy optimisation (arXiv 2402.03300), with verl's defaults."""
  fields.setdefault('kl', kl_lib.InLoss(kl_coef) if kl_coef else None)
  return Algorithm(
    functools.partial(advantages_lib.group_relative, divide_by_std=divide_by_std),
    losses.ppo_clip(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
    aggregate,
    **fields,
  )


def dr_grpo(*, length: float, **options: Any) -> Algorithm:
  """GRPO done right (arXiv 2503.20783): no std, no length bias, no KL.

  `length` is the constant that replaces the length of a trajectory.
  """
  aggregate = losses.seq_mean_token_sum_norm(length)
  options = {'kl_coef': 0.0, **options}
  return grpo(divide_by_std=False, aggregate=aggregate, **options)


def dapo(*, overlong: Mapping[str, float] | None = None, **options: Any) -> Algorithm:
  """DAPO (arXiv 2503.14476): clip-higher, token mean, no KL, over-long punishment.

  For its dynamic sampling set `config.Schedule.max_refills`. `overlong` holds the options
  of advantages.overlong (limit, buffer, factor, floor).
  """
  options = dict[str, Any](clip_high=0.28, dual_clip=None, kl_coef=0.0) | options
  if overlong is not None:
    penalty = functools.partial(advantages_lib.overlong, **overlong)
    options['rewards'] = (*options.get('rewards', ()), penalty)
  return grpo(**options)


def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4, **options: Any) -> Algorithm:
  """Group sequence policy optimisation (arXiv 2507.18071): one ratio per sequence.

  It clips the geometric mean of a sequence's ratios, by default with the paper's bounds.
  """
  options = {'kl_coef': 0.0, **options}
  return grpo(dual_clip=None, **options)._replace(
    loss=losses.gspo(clip_low=clip_low, clip_high=clip_high)
  )


def rloo(*, clip: float = 0.2, kl_coef: float = 0.001, **fields: Any) -> Algorithm:
  """REINFORCE leave-one-out (arXiv 2402.14740), with the clip that verl adds.

  The clip takes effect from the second optimizer step of a rollout on.
  """
  return _clipped(advantages_lib.leave_one_out, clip, kl_coef, fields)


def reinforce(*, gamma: float = 1.0, kl_coef: float = 0.0, **fields: Any) -> Algorithm:
  """REINFORCE: -G_t log π, the return to go without a baseline.

  Without a ratio it is exact only for the first optimizer step of a rollout.
  """
  fields = _kl_in_reward(kl_coef) | {'reads': ('rewards',)} | fields
  returns = functools.partial(advantages_lib.returns_to_go, gamma=gamma)
  return Algorithm(returns, losses.reinforce(), **fields)


def reinforce_plus_plus(
  *, gamma: float = 1.0, clip: float = 0.2, kl_coef: float = 0.001, **fields: Any
) -> Algorithm:
  """REINFORCE++ (arXiv 2501.03262): whitened returns to go, k1 in the reward, clip.

  Returns continue across the environment's tokens and across segments.
  """

  def advantages(table):
    return advantages_lib.whiten(advantages_lib.returns_to_go(table, gamma=gamma))

  return _clipped(advantages, clip, kl_coef, {'reads': ('rewards',)} | fields)


def reinforce_plus_plus_baseline(
  *, clip: float = 0.2, kl_coef: float = 0.001, **fields: Any
) -> Algorithm:
  """REINFORCE++-baseline (arXiv 2501.03262): R - mean_g R, whitened over the batch.

  A group of equal rewards does not get 0, but the shift of the whitening.
  """

  def advantages(table):
    centred = advantages_lib.group_relative(table, divide_by_std=False)
    return advantages_lib.whiten(centred)

  return _clipped(advantages, clip, kl_coef, fields)


def remax(*, gamma: float = 1.0, kl_coef: float = 0.0, **fields: Any) -> Algorithm:
  """ReMax (arXiv 2310.10505): the baseline is a greedy episode's reward, tools included.

  Like `reinforce`, it is exact only for the first optimizer step of a rollout.
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

  The options are those of advantages.gigpo and of `grpo`.
  """
  advantages = functools.partial(
    advantages_lib.gigpo,
    gamma=gamma,
    step_weight=step_weight,
    divide_by_std=divide_by_std,
  )
  return grpo(**options)._replace(advantages=advantages)


def gdpo(*, weights: Mapping[str, float] | None = None, **options: Any) -> Algorithm:
  """GDPO: normalises each named part of the reward in its group, then sums the parts.

  `weights` has the weight of each part, by name. None gives each part weight 1, and adds
  the rest of the reward in its own unit.
  """
  advantages = functools.partial(advantages_lib.gdpo, weights=weights)
  # With weights, only the named parts of the reward count.
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

  The estimator is advantages.gae, step_gae (Agent-R1's newer code) or bi_level_gae
  (RAGEN); `value_clip` is the option of losses.value_clip. `bootstrap_truncated` uses the
  critic's value after the last token of an episode that a budget ended; verl uses 0.
  """
  # If it is off, an estimator with a bound `bootstrap` keeps it.
  bootstrap = {'bootstrap': True} if bootstrap_truncated else {}
  bound = {**getattr(estimator, 'keywords', {}), **bootstrap}
  function: Any = getattr(estimator, 'func', estimator)
  by_turn = function is advantages_lib.step_gae
  name = function.__name__ + ''.join(f' {k}={v}' for k, v in sorted(bound.items()))

  def advantages(table):
    estimated = estimator(table, gamma=gamma, lam=lam, **bootstrap)
    # step_gae has already normalised its advantages over the turns.
    return estimated if by_turn else advantages_lib.whiten(estimated)

  fields = _kl_in_reward(kl_coef) | {'reads': ('rewards', 'values')} | fields
  return Algorithm(
    advantages,
    losses.ppo_clip(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
    value_loss=losses.value_clip(clip=value_clip),
    value_targets=ValueTargets(name, gamma, lam, 'turn' if by_turn else 'token'),
    **fields,
  )


def distillation(**fields: Any) -> Algorithm:
  """On-policy distillation (arXiv 2306.13649): -KL(π ‖ teacher) on the student's tokens.

  The teacher is the reference, `config.Model.reference`. Rewards are not read.
  """
  fields = {'reads': ('ref_logprobs',)} | fields
  return Algorithm(advantages_lib.reverse_kl, losses.reinforce(), **fields)


def rejection(*, threshold: float = 1.0, **fields: Any) -> Algorithm:
  """Rejection-sampling fine-tuning: maximum likelihood of successful trajectories.

  It imitates trajectories with a reward of at least `threshold`.
  """
  accepted = functools.partial(advantages_lib.accepted, threshold=threshold)
  fields = {'reads': ('rewards',)} | fields
  return Algorithm(accepted, losses.likelihood(), **fields)


def _clipped(advantages, clip, kl_coef, fields) -> Algorithm:
  fields = _kl_in_reward(kl_coef) | fields
  return Algorithm(advantages, losses.ppo_clip(clip_low=clip, clip_high=clip), **fields)


def _kl_in_reward(coef) -> dict[str, Any]:
  return {'kl': kl_lib.InReward(coef) if coef else None}
