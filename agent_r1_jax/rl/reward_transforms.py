"""Transforms of rewards, applied before advantages are estimated.

A transform takes the visible tokens of a table (rl/table.py) and returns the table with
another column `rewards`. One that changes the unit of the rewards (`by_reward_to_go`)
changes that of their named `parts` too; one that adds to the rewards does not change the
parts. `less_kl` comes last, because the others measure the environment's rewards.
"""

from collections.abc import Callable
import dataclasses

import numpy as np

from agent_r1_jax.rl import spans
from agent_r1_jax.rl.table import TokenTable

Transform = Callable[[TokenTable], TokenTable]


def by_reward_to_go(table: TokenTable, *, eps: float = 1e-6) -> TokenTable:
  """r' = r / (max over the batch of |Σ_{u≥t} r_u| + ε): no return is beyond ±1.

  The normalisation of process rewards in Agent-R1's paper-era code (arXiv 2511.14460).
  """
  to_go = spans.discounted_sum(table.trajectory, table.rewards, 1.0)
  scale = np.abs(to_go).max(initial=0.0) + eps
  parts = {name: part / scale for name, part in table.parts.items()}
  return dataclasses.replace(table, rewards=table.rewards / scale, parts=parts)


def overlong(
  table: TokenTable,
  *,
  limit: int,
  buffer: int,
  factor: float = 1.0,
  floor: float | None = None,
) -> TokenTable:
  """r' = r + min(-(len - (limit - buffer)) / buffer · factor, 0) at the last action.

  DAPO's soft over-long penalty (arXiv 2503.14476). As in verl it has no lower bound; the
  paper's and TRL's is floor = -1. The length of an episode is the number of its action
  tokens, because the policy does not control the length of what tools write.

  `limit` and `buffer` are numbers of tokens, `factor` is the penalty at the limit, and
  `floor` its lower bound.

  Raises:
    ValueError: The buffer is not in 1 ... limit.
  """
  if not 0 < buffer <= limit:
    raise ValueError(f'buffer={buffer} must be positive and no more than limit={limit}.')
  actions = np.flatnonzero(table.action_mask)
  last = actions[spans.ends(table.trajectory[actions])]
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

  The KL in the reward (arXiv 1909.08593), as in verl. β is `coef`, and the estimator one
  of rl/kl.py: (logprobs, ref_logprobs) -> the KL of each token.
  """
  actions, rewards = table.action_mask, table.rewards.copy()
  kl = estimator(table.old_logprobs[actions], table.column('ref_logprobs')[actions])
  rewards[actions] -= coef * np.asarray(kl)
  return dataclasses.replace(table, rewards=rewards)
