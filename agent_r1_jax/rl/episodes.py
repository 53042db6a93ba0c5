"""Episodes: what an estimator of advantages sees of a trajectory, on the host in float64.

With the advantage mask on (the default) these are the action tokens alone, in order over
turns and segments: what the environment wrote is not there, so no return can be cut or
decayed by it and no reward can fall on a token that is not trained. With the mask off
(the paper's ablation) what the environment wrote after the first reply of a segment takes
part as if the policy had chosen it; it belongs to the turn that it answers.

Letters: n tokens that are seen of a trajectory, K turns.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
import numpy as np

from agent_r1_jax import types

# Trajectory.metrics whose names begin so are the named parts of the reward.
_PART = 'reward/'


@dataclasses.dataclass
class Episode:
  """The tokens of one trajectory that advantages are given to.

  Attributes:
    group: Trajectories of one group answered the same task.
    turn: The turn of each token.
    rewards: The turn's reward on its last action token, else 0.
    anchors: Of each turn, what the policy was shown right before it.
    parts: Named parts of the reward, where the environment told them.
    truncated: A budget ended the episode, not the environment.
    logprobs: log π of the policy before the update; nan at a token that was not sampled.
      Without a correction that policy sampled the tokens, and these are the sampler's.
    ref_logprobs: Of the reference policy, where there is one.
    values: The critic's value of the state before each token, where there is one.
    final_value: The critic's value of the state after the last token; read only where
      an estimator is asked to bootstrap.
    baseline: The reward of the greedy episode of the same task, where there is one.
  """

  group: int
  turn: Int[np.ndarray, 'n']
  rewards: Float[np.ndarray, 'n']
  logprobs: Float[np.ndarray, 'n']
  anchors: Sequence[bytes] = ()
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  truncated: bool = False
  ref_logprobs: Float[np.ndarray, 'n'] | None = None
  values: Float[np.ndarray, 'n'] | None = None
  final_value: float = 0.0
  baseline: float | None = None

  @property
  def score(self) -> float:
    """The trajectory's undiscounted reward."""
    return float(self.rewards.sum())

  @property
  def turn_ends(self) -> Int[np.ndarray, 'K']:
    """Of each turn, its last token."""
    return np.flatnonzero(np.diff(self.turn, append=-1))

  @property
  def turn_rewards(self) -> Float[np.ndarray, 'K']:
    """Of each turn, its reward."""
    totals = np.bincount(self.turn, self.rewards, minlength=len(self.anchors))
    return totals.astype(np.float64)  # Without a turn they are integers, weights or not.


class Credit(NamedTuple):
  """Of one episode's n tokens: advantages, and the critic's targets if any."""

  advantages: Float[np.ndarray, 'n']
  returns: Float[np.ndarray, 'n'] | None = None


def seen(trajectory: types.Trajectory, masked: bool) -> list[Bool[np.ndarray, '_']]:
  """Of each segment, the action tokens; or if not masked, all after the first prompt."""
  masks = [segment.action_mask for segment in trajectory.segments]
  return masks if masked else [np.logical_or.accumulate(mask) for mask in masks]


def episode(trajectory: types.Trajectory, *, masked: bool = True) -> Episode:
  """What an estimator sees of a trajectory.

  Args:
    trajectory: Any that has a turn.
    masked: Whether what the environment wrote is left out.

  Raises:
    ValueError: A turn has no tokens, or some that are not actions: its reward would be
      lost. Or the turns do not hold every action token once and in order.
  """
  _check(trajectory)
  segments, turns = trajectory.segments, trajectory.turns
  begins = np.cumsum([0, *(len(s.tokens) for s in segments)])
  size = begins[-1]
  rewards, turn, logprobs = np.zeros(size), np.zeros(size, int), np.full(size, np.nan)
  anchors, shown = [], (-1, 0)
  for number, t in enumerate(turns):
    segment, begin = segments[t.segment], begins[t.segment]
    start = _known(segments, shown, t.segment)
    anchors.append(segment.tokens[start : t.start].tobytes())
    shown = (t.segment, t.stop)
    turn[begin + t.start : begins[t.segment + 1]] = number
    logprobs[begin + t.start : begin + t.stop] = segment.logprobs[t.start : t.stop]
    rewards[begin + t.stop - 1] = t.reward
  chosen = _joined(seen(trajectory, masked), bool)
  return Episode(
    trajectory.group,
    turn[chosen],
    rewards[chosen],
    logprobs[chosen],
    anchors,
    {
      name.removeprefix(_PART): value
      for name, value in trajectory.metrics.items()
      if name.startswith(_PART)
    },
    trajectory.status in types.BUDGETS,
  )


def _known(segments, shown: tuple[int, int], number: int) -> int:
  """Tokens of a segment that a policy had seen, or said, when a turn ended.

  Args:
    segments: Of the trajectory.
    shown: The turn's segment and its end there.
    number: The segment of the next turn: another one may go on from the text of the last,
      as an append-only episode does that is stored as steps.
  """
  before, stop = shown
  if before == number:
    return stop
  same = before >= 0 and np.array_equal(
    segments[before].tokens[:stop], segments[number].tokens[:stop]
  )
  return stop if same else 0


def tied(scores: Float[np.ndarray, 'n']) -> bool:
  """Whether scores are equal, but for the rounding of the sums that they are."""
  return len(scores) < 2 or bool(np.ptp(scores) <= 1e-12 * np.abs(scores).max())


def _check(trajectory) -> None:
  """Raises ValueError unless the turns hold every action token once and in order."""
  begins = np.cumsum([0, *(len(s.tokens) for s in trajectory.segments)])
  held = []
  for number, t in enumerate(trajectory.turns):
    mask = trajectory.segments[t.segment].action_mask
    if not 0 < t.stop - t.start == mask[t.start : t.stop].sum():
      raise ValueError(
        f'Turn {number} of task {trajectory.task.id!r} spans tokens {t.start}:{t.stop}, '
        'which are not all action tokens; its reward would be lost.'
      )
    held.append(begins[t.segment] + np.arange(t.start, t.stop))
  acted = np.flatnonzero(_joined([s.action_mask for s in trajectory.segments], bool))
  if not np.array_equal(_joined(held, int), acted):
    raise ValueError(
      f'The turns of task {trajectory.task.id!r} do not hold its {len(acted)} action '
      'tokens, each once and in order.'
    )


def _joined(parts: Sequence[Any], dtype) -> np.ndarray:
  return np.concatenate([np.zeros(0, dtype), *parts])
