"""Takes one of several episodes of a question; how well values tell them apart."""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.guided import implicit_value
from agent_r1_jax.tasks import qa
from experiments import scores as scores_lib


def sampled_tokens(episodes: Sequence[types.Trajectory]) -> float:
  """The tokens that were sampled for these episodes, candidates included."""
  own = lambda t: sum(turn.stop - turn.start for turn in t.turns)
  return sum(t.metrics.get('sampled_tokens', own(t)) for t in episodes)


def answer(episode: types.Trajectory) -> str | None:
  """The normalised answer, or None."""
  found = qa.extract_answer(episode.messages[-1]['content']) if episode.turns else None
  return found and qa.normalize_answer(found)


def mean_logprob(episode: types.Trajectory) -> float:
  """The mean log π of the episode's tokens."""
  sampled = [s.behaviour_logprobs[s.action_mask] for s in episode.segments]
  return float(np.concatenate(sampled).mean()) if sampled else -math.inf


def select_episodes(
  groups: Sequence[Sequence[types.Trajectory]],
  weights: Mapping[str, Mapping[int, float]],
  is_solved: Callable[[types.Trajectory], float],
  answer: Callable[[types.Trajectory], str | None] = answer,
) -> dict[str, list[types.Trajectory]]:
  """Takes one of the K episodes of each question, in several ways.

  Args:
    groups: The episodes of each question.
    weights: By the name of a way to judge episodes, the weight of each, by its id(). The
      episode of the highest weight is taken, or one with the answer whose episodes have
      the highest sum of weights.
    is_solved: Returns 1 where the question is answered.
    answer: Finds what an episode answers, or None.
  """

  def vote(group, weigh):
    sums: dict[str, float] = {}
    for t in group:
      if (said := answer(t)) is not None:
        sums[said] = sums.get(said, 0.0) + weigh(t)
    winner = max(sums, key=lambda said: sums[said], default=None)
    return next((t for t in group if answer(t) == winner), group[0])

  taken = {
    'episodes, random': [group[0] for group in groups],
    'episodes, majority': [vote(group, lambda t: 1.0) for group in groups],
    'episodes, best (oracle)': [max(group, key=is_solved) for group in groups],
  }
  for name, of in weights.items():
    weigh = lambda t, of=of: of.get(id(t), 0.0)
    taken[f'episodes, highest {name}'] = [max(group, key=weigh) for group in groups]
    taken[f'episodes, vote by {name}'] = [vote(group, weigh) for group in groups]
  return taken


def fit_odds(sums: np.ndarray, success: np.ndarray) -> implicit_value.Odds:
  """Fits b and β to Σ log π_φ by logistic regression (Platt scaling)."""
  from scipy import optimize

  def loss(weights):
    odds = weights[0] + weights[1] * sums
    return np.sum(np.logaddexp(0, odds) - success * odds) + 1e-3 * weights @ weights

  return implicit_value.Odds(*map(float, optimize.minimize(loss, np.zeros(2)).x))


def calibrate(episodes, sums, scales, odds, is_solved) -> dict[str, Any]:
  """Compares probabilities at the ends of turns with what the episodes came to."""
  found: dict[str, tuple[list, list]] = {}
  for t, of in zip(episodes, sums, strict=True):
    for k, x in enumerate(of):
      last = k + 1 == len(of)
      b, beta = odds if last else scales[k]
      for name in (f'turn {k + 1}', 'last turn' if last else 'turns before'):
        said, seen = found.setdefault(name, ([], []))
        said.append(1 / (1 + np.exp(-b - beta * x)))
        seen.append(is_solved(t))
  result = {}
  for name, columns in found.items():
    said, seen = map(np.array, columns)
    error, bins = scores_lib.calibration(said, seen > 0.5)
    result[name] = {'bins': bins, 'ece': error, 'count': len(said)}
    result[name]['auc'] = scores_lib.auc(said, seen > 0.5)
    print(f'{name}: AUC {result[name]["auc"]:.3f}, calibration error {error:.3f}')
  return result
