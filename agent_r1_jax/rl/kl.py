"""KL to the reference policy: its estimators, where it is applied, and its coefficient.

An estimator takes log π and log π_ref of tokens that π sampled, and returns one number
per token. For NumPy arrays it returns NumPy arrays, so that the host computes in float64.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from agent_r1_jax.rl.table import TokenTable

Numbers = Float[Array | np.ndarray, '*n']
Estimator = Callable[[Any, Any], Any]
# (coefficient, mean KL, number of trajectories) -> the next coefficient.
Control = Callable[[float, float, int], float]


def k1(logprobs: Numbers, ref_logprobs: Numbers) -> Numbers:
  """log π - log π_ref: unbiased, of either sign; Schulman's k1 (2020, a blog post)."""
  return logprobs - ref_logprobs


def k2(logprobs: Numbers, ref_logprobs: Numbers) -> Numbers:
  """½ (log π - log π_ref)²: biased, Schulman's k2; its gradient is unbiased on-policy."""
  return 0.5 * (logprobs - ref_logprobs) ** 2


def k3(logprobs: Numbers, ref_logprobs: Numbers) -> Numbers:
  """r - 1 - log r with r = π_ref/π: unbiased and never negative, Schulman's k3.

  Clipped as in verl: log r to ±20, the result to ±10 (its gradient is 0 beyond). TRL
  clips neither.
  """
  xp = _array_module(logprobs, ref_logprobs)
  x = xp.clip(ref_logprobs - logprobs, -20.0, 20.0)
  return xp.clip(xp.expm1(x) - x, -10.0, 10.0)


def straight_through(estimator: Estimator) -> Estimator:
  """The estimator's value with k2's gradient; verl's names end in '+'.

  In a loss, the gradient of k1 has mean 0, the gradient of k3 is that of another
  divergence, KL(π_ref ‖ π), and the gradient of k2 is that of KL(π ‖ π_ref).
  """

  def combined(logprobs: Numbers, ref_logprobs: Numbers) -> Numbers:
    value = estimator(logprobs, ref_logprobs)
    if isinstance(value, np.ndarray):  # The host needs no gradient.
      return value
    slope = k2(logprobs, ref_logprobs)
    return jax.lax.stop_gradient(value) + (slope - jax.lax.stop_gradient(slope))

  return combined


def fixed(coef: float, kl: float, n: int) -> float:
  """Keeps the coefficient."""
  del kl, n
  return coef


def adaptive(*, target: float = 0.1, horizon: float = 10_000) -> Control:
  """β ← β (1 + clip(KL/target - 1, ±0.2) n / horizon).

  Ziegler et al. 2019 (arXiv 1909.08593), with verl's defaults. The target is in nats, and
  n counts trajectories.
  """
  if not (target > 0 and horizon > 0):
    raise ValueError(f'target ({target}) and horizon ({horizon}) must be above 0.')

  def control(coef: float, kl: float, n: int) -> float:
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * n / horizon)

  return control


@dataclasses.dataclass(frozen=True)
class _Penalty:
  coef: float = 0.001  # The initial β.
  estimator: Estimator = k1  # Estimates the KL.
  control: Control = fixed  # Computes the next β after each rollout.

  def __post_init__(self):
    if not self.coef >= 0:
      raise ValueError(f'coef is {self.coef}; it must be 0 or more.')


@dataclasses.dataclass(frozen=True)
class InReward(_Penalty):
  """Subtracts the KL from each token's reward: r - β KL."""


@dataclasses.dataclass(frozen=True)
class InLoss(_Penalty):
  """Adds β KL to each token's loss."""

  estimator: Estimator = k3


def less_kl(
  table: TokenTable,
  *,
  coef: float,
  estimator: Estimator,
) -> TokenTable:
  """r'_t = r_t - β kl(log π_t, log π_ref,t) at every action token.

  The KL in the reward (arXiv 1909.08593), as in verl. β is `coef`. It runs after the
  other reward transforms, which use the environment's rewards.
  """
  actions, rewards = table.action_mask, table.rewards.copy()
  kl = estimator(table.old_logprobs[actions], table.column('ref_logprobs')[actions])
  rewards[actions] -= coef * np.asarray(kl)
  return dataclasses.replace(table, rewards=rewards)


def _array_module(x: Numbers, y: Numbers) -> Any:
  """Returns numpy if both arrays are NumPy's, else jax.numpy."""
  return np if isinstance(x, np.ndarray) and isinstance(y, np.ndarray) else jnp
