"""Advantages on the action tokens, computed on the host in float64.

Every estimator sees a trajectory as its action tokens alone, in order over turns and
segments: what the environment wrote is not there, so no return can be cut or decayed by
it and no reward can fall on a token that is not trained. Group statistics count
trajectories.

Letters: n action tokens of a trajectory.
"""

from collections.abc import Sequence
import dataclasses

from jaxtyping import Float, Int
import numpy as np

from agent_r1_jax import types


@dataclasses.dataclass
class Actions:
  """The action tokens of one trajectory.

  Attributes:
    group: Trajectories of one group answered the same task.
    turn: The turn of each token.
    rewards: The turn's reward on its last token, else 0.
    logprobs: Of the behaviour policy.
    ref_logprobs: Of the reference policy, where it is needed.
    values: The critic's value of the state before each token, where there is one.
  """

  group: int
  turn: Int[np.ndarray, 'n']
  rewards: Float[np.ndarray, 'n']
  logprobs: Float[np.ndarray, 'n']
  ref_logprobs: Float[np.ndarray, 'n'] | None = None
  values: Float[np.ndarray, 'n'] | None = None

  @property
  def score(self) -> float:
    """The trajectory's undiscounted reward."""
    return float(self.rewards.sum())


def actions(trajectory: types.Trajectory) -> Actions:
  """A trajectory's action tokens.

  Raises:
    ValueError: A turn has no tokens, or some that are not actions: its reward would be
      lost. Or the turns do not hold every action token once and in order.
  """
  segments = trajectory.segments
  # Where each segment begins in the trajectory's tokens.
  begins = np.cumsum([0, *(len(s.tokens) for s in segments)])
  held, turn, rewards, logprobs = [], [], [], []
  for number, t in enumerate(trajectory.turns):
    segment = segments[t.segment]
    span, n = slice(t.start, t.stop), t.stop - t.start
    if not 0 < n == segment.action_mask[span].sum():
      raise ValueError(
        f'Turn {number} of task {trajectory.task.id!r} spans tokens {t.start}:{t.stop}, '
        'which are not all action tokens; its reward would be lost.'
      )
    held.append(begins[t.segment] + np.arange(t.start, t.stop))
    turn.append(np.full(n, number))
    rewards.append(np.zeros(n))
    rewards[-1][-1] = t.reward
    logprobs.append(segment.logprobs[span].astype(np.float64))
  acted = np.flatnonzero(_joined([s.action_mask for s in segments], bool))
  if not np.array_equal(_joined(held, int), acted):
    raise ValueError(
      f'The turns of task {trajectory.task.id!r} do not hold its {len(acted)} action '
      'tokens, each once and in order.'
    )
  return Actions(
    trajectory.group,
    _joined(turn, int),
    _joined(rewards, np.float64),
    _joined(logprobs, np.float64),
  )


def tied(scores: Float[np.ndarray, 'n']) -> bool:
  """Whether scores are equal, but for the rounding of the sums that they are."""
  return bool(np.ptp(scores) <= 1e-12 * np.abs(scores).max())


def group_relative(
  episodes: Sequence[Actions], *, divide_by_std: bool = True, eps: float = 1e-6
) -> list[Float[np.ndarray, '_']]:
  """A = (R - mean_g R) / (std_g R + ε), the same on every action token (GRPO).

  Shao et al. 2024 (arXiv 2402.03300); std with Bessel's correction as verl and TRL take
  it. Without the division it is Dr.GRPO's (arXiv 2503.20783). A group whose rewards are
  all equal, a single trajectory included, gets exactly 0: its std is rounding noise.

  Args:
    episodes: Of all groups.
    divide_by_std: Divide by the group's standard deviation.
    eps: Added to it.
  """
  scores = np.array([e.score for e in episodes])
  groups = np.array([e.group for e in episodes])
  advantages = np.zeros_like(scores)
  for group in np.unique(groups):
    member = groups == group
    s = scores[member]
    if tied(s):
      continue
    scale = s.std(ddof=1) + eps if divide_by_std else 1.0
    advantages[member] = (s - s.mean()) / scale
  return [np.full(len(e.rewards), a) for e, a in zip(episodes, advantages, strict=True)]


def gae(
  rewards: Float[np.ndarray, 'n'],
  values: Float[np.ndarray, 'n'],
  *,
  gamma: float = 1.0,
  lam: float = 1.0,
) -> tuple[Float[np.ndarray, 'n'], Float[np.ndarray, 'n']]:
  """δ_t = r_t + γ V_{t+1} - V_t;  A_t = δ_t + γλ A_{t+1};  returns = A + V.

  Schulman et al. 2015 (arXiv 1506.02438), stepping from action to action (the paper's
  aligned advantages): γ and λ count the policy's tokens only. V after the last is 0.

  Args:
    rewards: Of the action tokens of one trajectory.
    values: Of the states before them.
    gamma: Discount a token.
    lam: Trace decay a token.

  Returns:
    Advantages and returns.
  """
  advantages = np.zeros_like(rewards)
  following, next_value = 0.0, 0.0
  for t in reversed(range(len(rewards))):
    delta = rewards[t] + gamma * next_value - values[t]
    following = delta + gamma * lam * following
    next_value = values[t]
    advantages[t] = following
  return advantages, advantages + values


def whiten(
  arrays: Sequence[Float[np.ndarray, '_']], *, eps: float = 1e-8
) -> list[Float[np.ndarray, '_']]:
  """(x - mean) / √(var + ε) over all action tokens, with Bessel's correction (verl)."""
  flat = _joined(arrays, np.float64)
  if len(flat) < 2:
    return [np.zeros_like(a) for a in arrays]
  mean, scale = flat.mean(), np.sqrt(flat.var(ddof=1) + eps)
  return [(a - mean) / scale for a in arrays]


def _joined(parts: Sequence[np.ndarray], dtype) -> np.ndarray:
  return np.concatenate([np.zeros(0, dtype), *parts])
