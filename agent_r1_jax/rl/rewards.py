"""Changes of the rewards, before advantages are estimated from them.

Each transform takes the rows that estimators are shown (rl/table.py) and returns the
table with another column `rewards`. One that changes the unit of the rewards
(`by_reward_to_go`) changes that of their named `parts` with it, so that the
parts still add up to what they did; one that adds to the rewards leaves the parts alone.
They compose; `less_kl` comes last, because the others measure what the environment gave.
"""

from collections.abc import Callable
import dataclasses

from jaxtyping import Float
import numpy as np

from agent_r1_jax.rl.table import TokenTable, discounted_sum, ends

Transform = Callable[[TokenTable], TokenTable]


def by_reward_to_go(table: TokenTable, *, eps: float = 1e-6) -> TokenTable:
  """r' = r / (max over the batch of |Σ_{u≥t} r_u| + ε): no return is beyond ±1.

  How Agent-R1's paper-era code (arXiv 2511.14460) normalises process rewards.

  Args:
    table: The whole batch.
    eps: Added to the divisor.
  """
  to_go = discounted_sum(table.trajectory, table.rewards, 1.0)
  largest = np.abs(to_go).max(initial=0.0)
  return _divided(table, np.full(len(table.group), largest + eps))


def overlong(
  table: TokenTable,
  *,
  limit: int,
  buffer: int,
  factor: float = 1.0,
  floor: float | None = None,
) -> TokenTable:
  """r' = r + min(-(len - (limit - buffer)) / buffer · factor, 0) at the last action.

  DAPO's soft punishment of length (arXiv 2503.14476) with verl's convention: it goes on
  falling beyond the limit. The paper's and TRL's is floor = -1. The length of an episode
  is the number of its action tokens: what the tools wrote is not the policy's fault.

  Args:
    table: Any.
    limit: The length that is punished with `factor`.
    buffer: How long before it the punishment begins.
    factor: The punishment at the limit.
    floor: The punishment falls no deeper.

  Raises:
    ValueError: The buffer is not in 1 ... limit.
  """
  if not 0 < buffer <= limit:
    raise ValueError(f'buffer={buffer} must be positive and no more than limit={limit}.')
  actions = np.flatnonzero(table.action_mask)
  last = actions[ends(table.trajectory[actions])]
  lengths = np.bincount(table.trajectory[actions], minlength=len(table.group))
  penalty = np.minimum((limit - buffer - lengths) / buffer * factor, 0.0)
  penalty = penalty if floor is None else np.maximum(penalty, floor)
  rewards = table.rewards.copy()
  rewards[last] += penalty[table.trajectory[last]]
  return dataclasses.replace(table, rewards=rewards)


def less_kl(
  table: TokenTable,
  *,
  coef: float,
  estimator: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> TokenTable:
  """r'_t = r_t - β kl(log π_t, log π_ref,t) at every action token.

  The KL in the reward of PPO's RLHF (arXiv 1909.08593), as in verl. A token that the
  policy did not choose has none.

  Args:
    table: With ref_logprobs.
    coef: β.
    estimator: One of rl/kl.py: (logprobs, ref_logprobs) -> the KL of each token.

  Raises:
    ValueError: The table has no ref_logprobs.
  """
  actions, rewards = table.action_mask, table.rewards.copy()
  kl = estimator(table.logprobs[actions], table.column('ref_logprobs')[actions])
  rewards[actions] -= coef * np.asarray(kl)
  return dataclasses.replace(table, rewards=rewards)


def _divided(table: TokenTable, scale: Float[np.ndarray, 'N']) -> TokenTable:
  """The table with its rewards and their named parts in another unit."""
  parts = {name: part / scale for name, part in table.parts.items()}
  rewards = table.rewards / scale[table.trajectory]
  return dataclasses.replace(table, rewards=rewards, parts=parts)
