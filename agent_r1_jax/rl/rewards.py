"""Rewards as estimators shall see them: from episodes to new episodes.

Each transform gives new episodes and leaves its argument as it was. One that changes the
unit of the rewards (`by_reward_to_go`, `by_group`) changes that of their named `parts`
with it, so that the parts still add up to what they did; one that adds to the rewards
leaves the parts alone. They compose; `less_kl` comes last, because the others measure
what the environment gave.
"""

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from agent_r1_jax.rl.episodes import Episode

Transform = Callable[[Sequence[Episode]], list[Episode]]


def by_reward_to_go(episodes: Sequence[Episode], *, eps: float = 1e-6) -> list[Episode]:
  """r' = r / (max over the batch of |Σ_{u≥t} r_u| + ε): no return is beyond ±1.

  How Agent-R1's paper-era code (arXiv 2511.14460) normalises process rewards.

  Args:
    episodes: The whole batch.
    eps: Added to the divisor.
  """
  to_go = [np.abs(np.cumsum(e.rewards[::-1])) for e in episodes]
  scale = np.concatenate([np.zeros(1), *to_go]).max() + eps
  return [_divided(e, scale) for e in episodes]


def by_group(episodes: Sequence[Episode], *, eps: float = 1e-6) -> list[Episode]:
  """r' = r / (√(mean over the turns of the group of R_k²) + ε), R_k a turn's reward.

  Makes the process rewards of easy and hard tasks alike in size. GRPO's process
  supervision (arXiv 2402.03300, 4.1.3) takes (R_k - mean) / std instead. Without the
  mean, a turn without a reward stays without one, and a further turn is no reward in
  itself. And where the mean stays, the std is no measure: 0.99 and 1 would become 140.
  So a group whose turns all get the same is no special case: it becomes ±1, or stays 0.
  What is measured is the size of a turn's reward, so turns are counted here, not
  trajectories.

  Args:
    episodes: Of all groups.
    eps: Added to the divisor.
  """
  turns: dict[int, list[np.ndarray]] = {}
  for e in episodes:
    turns.setdefault(e.group, []).append(e.turn_rewards)
  scales = {}
  for group, rewards in turns.items():
    squares = np.concatenate(rewards) ** 2
    scales[group] = np.sqrt(squares.sum() / max(len(squares), 1)) + eps
  return [_divided(e, scales[e.group]) for e in episodes]


def overlong(
  episodes: Sequence[Episode],
  *,
  limit: int,
  buffer: int,
  factor: float = 1.0,
  floor: float | None = None,
) -> list[Episode]:
  """r' = r + min(-(len - (limit - buffer)) / buffer · factor, 0) at the last action.

  DAPO's soft punishment of length (arXiv 2503.14476) with verl's convention: it goes on
  falling beyond the limit. The paper's and TRL's is floor = -1. The length of an episode
  is the number of its action tokens: what the tools wrote is not the policy's fault.

  Args:
    episodes: Any.
    limit: The length that is punished with `factor`.
    buffer: How long before it the punishment begins.
    factor: Of the punishment.
    floor: The punishment falls no deeper.

  Raises:
    ValueError: The buffer is not in 1 ... limit.
  """
  if not 0 < buffer <= limit:
    raise ValueError(f'buffer={buffer} must be positive and no more than limit={limit}.')
  out = []
  for e in episodes:
    actions = np.flatnonzero(~np.isnan(e.logprobs))
    penalty = min((limit - buffer - len(actions)) / buffer * factor, 0.0)
    rewards = e.rewards.copy()
    rewards[actions[-1:]] += penalty if floor is None else max(penalty, floor)
    out.append(dataclasses.replace(e, rewards=rewards))
  return out


def less_kl(
  episodes: Sequence[Episode],
  *,
  coef: float,
  estimator: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> list[Episode]:
  """r'_t = r_t - β kl(log π_t, log π_ref,t) at every action token.

  The KL in the reward of PPO's RLHF (arXiv 1909.08593), as in verl. A token that the
  policy did not choose has none.

  Args:
    episodes: With ref_logprobs.
    coef: β.
    estimator: Of rl/kl.py: (logprobs, ref_logprobs) -> KL a token.

  Raises:
    ValueError: An episode has no ref_logprobs.
  """
  out = []
  for e in episodes:
    if e.ref_logprobs is None:
      raise ValueError(
        'less_kl needs Episode.ref_logprobs: set kl of the algorithm, so that the '
        'reference policy scores the tokens.'
      )
    actions, rewards = ~np.isnan(e.logprobs), e.rewards.copy()
    kl = estimator(e.logprobs[actions], e.ref_logprobs[actions])
    rewards[actions] -= coef * np.asarray(kl)
    out.append(dataclasses.replace(e, rewards=rewards))
  return out


def _divided(episode: Episode, scale: float) -> Episode:
  """The episode with its rewards and their named parts in another unit."""
  parts = {name: value / scale for name, value in episode.parts.items()}
  return dataclasses.replace(episode, rewards=episode.rewards / scale, parts=parts)
