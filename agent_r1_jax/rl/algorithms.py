"""Algorithms: what a trajectory's tokens are worth, and the loss that follows from it.

As an optax.GradientTransformation is two pure functions, so is an Algorithm: `advantages`
(host, float64, over whole trajectories) and `loss` (device, over packed tokens).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.rl import advantages as advantages_lib
from agent_r1_jax.rl import losses


class Credit(NamedTuple):
  """Of one trajectory's n action tokens: advantages, and the critic's targets if any."""

  advantages: Float[np.ndarray, 'n']
  returns: Float[np.ndarray, 'n'] | None = None


class Algorithm(NamedTuple):
  """Two pure functions, and what they need.

  Attributes:
    advantages: Action tokens of every trajectory of the batch -> their credit.
    loss: (TokenStats, Batch) -> (scalar, metrics): this micro-batch's share of the loss
      and of each metric, weighted by batch.weights; the shares add up to the whole. The
      stats are 0, and take no gradient, where the weights are 0.
    aggregate: Action-token counts of a mini-batch's trajectories -> the weight of each
      trajectory's tokens.
    needs_reference: `advantages` or `loss` read the reference policy's log-probs.
    needs_critic: They read values.
  """

  advantages: Callable[[Sequence[advantages_lib.Actions]], list[Credit]]
  loss: Callable[[losses.TokenStats, types.Batch], tuple[Array, dict[str, Array]]]
  aggregate: Callable[[np.ndarray], np.ndarray]
  needs_reference: bool = False
  needs_critic: bool = False


def token_mean(counts: np.ndarray) -> np.ndarray:
  """Every action token of the batch weighs the same: 1 / Σ counts."""
  return np.full(len(counts), 1.0 / max(counts.sum(), 1))


def seq_mean_token_mean(counts: np.ndarray) -> np.ndarray:
  """Every trajectory weighs the same, and so do the tokens inside it (GRPO's paper).

  As in verl, a trajectory without an action token is not counted.
  """
  return 1.0 / (max((counts > 0).sum(), 1) * np.maximum(counts, 1))


def grpo(
  *,
  divide_by_std: bool = True,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = 3.0,
  kl_coef: float = 0.001,
  entropy_coef: float = 0.0,
  aggregate: Callable[[np.ndarray], np.ndarray] = token_mean,
) -> Algorithm:
  """Group-relative policy optimisation (arXiv 2402.03300), with verl's defaults.

  Args:
    divide_by_std: False is Dr.GRPO's advantage.
    clip_low: ε_l of the PPO clip.
    clip_high: ε_h of the PPO clip.
    dual_clip: c of the dual clip, or None.
    kl_coef: Of the k3 KL to the reference in the loss; 0 needs no reference.
    entropy_coef: Of the entropy bonus.
    aggregate: How tokens and trajectories are weighed.
  """

  def advantages(episodes):
    per_token = advantages_lib.group_relative(episodes, divide_by_std=divide_by_std)
    return [Credit(a) for a in per_token]

  def loss(stats, batch):
    total, metrics = _policy_loss(stats, batch, clip_low, clip_high, dual_clip)
    metrics['entropy'] = losses.weighted(stats.entropy, batch.weights)
    if kl_coef:
      kl = losses.weighted(losses.k3(stats.logprobs, batch.ref_logprobs), batch.weights)
      total, metrics['kl'] = total + kl_coef * kl, kl
    return total - entropy_coef * metrics['entropy'], metrics

  return Algorithm(advantages, loss, aggregate, needs_reference=kl_coef != 0)


def ppo(
  *,
  gamma: float = 1.0,
  lam: float = 1.0,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = 3.0,
  value_clip: float = 0.5,
  value_coef: float = 1.0,
  kl_coef: float = 0.001,
  entropy_coef: float = 0.0,
  aggregate: Callable[[np.ndarray], np.ndarray] = token_mean,
) -> Algorithm:
  """Proximal policy optimisation (arXiv 1707.06347) with GAE over action positions.

  Args:
    gamma: Discount a token.
    lam: GAE's trace decay a token.
    clip_low: ε_l of the policy's clip.
    clip_high: ε_h of the policy's clip.
    dual_clip: c of the dual clip, or None.
    value_clip: c of the clipped value loss.
    value_coef: Weight of the value loss; it matters where the critic shares the trunk.
    kl_coef: Of the k1 KL taken off each token's reward; 0 needs no reference.
    entropy_coef: Of the entropy bonus.
    aggregate: How tokens and trajectories are weighed.
  """

  def advantages(episodes):
    pairs = []
    for e in episodes:
      rewards = e.rewards
      if kl_coef:
        rewards = rewards - kl_coef * losses.k1(e.logprobs, e.ref_logprobs)
      pairs.append(advantages_lib.gae(rewards, e.values, gamma=gamma, lam=lam))
    white = advantages_lib.whiten([a for a, _ in pairs])
    return [Credit(a, returns) for a, (_, returns) in zip(white, pairs, strict=True)]

  def loss(stats, batch):
    total, metrics = _policy_loss(stats, batch, clip_low, clip_high, dual_clip)
    per_token = losses.value_clip(
      stats.values, batch.values, batch.returns, clip=value_clip
    )
    metrics['value_loss'] = losses.weighted(per_token, batch.weights)
    metrics['entropy'] = losses.weighted(stats.entropy, batch.weights)
    total += value_coef * metrics['value_loss'] - entropy_coef * metrics['entropy']
    return total, metrics

  return Algorithm(
    advantages, loss, aggregate, needs_reference=kl_coef != 0, needs_critic=True
  )


def likelihood(
  stats: losses.TokenStats, batch: types.Batch
) -> tuple[Array, dict[str, Array]]:
  """-A log π with given A: supervised fine-tuning, where A is a token's weight."""
  total = losses.weighted(-batch.advantages * stats.logprobs, batch.weights)
  return total, {'loss': total}


def _policy_loss(stats, batch, clip_low, clip_high, dual_clip):
  log_ratio = losses.log_ratio(stats.logprobs, batch.logprobs)
  per_token, clipped = losses.ppo_clip(
    log_ratio,
    batch.advantages,
    clip_low=clip_low,
    clip_high=clip_high,
    dual_clip=dual_clip,
  )
  total = losses.weighted(per_token, batch.weights)
  metrics = {
    'policy_loss': total,
    'clip_fraction': losses.weighted(clipped.astype(jnp.float32), batch.weights),
    'behaviour_kl': losses.weighted(-log_ratio, batch.weights),
  }
  return total, metrics
