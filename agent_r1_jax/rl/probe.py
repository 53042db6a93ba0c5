"""Probing: what an algorithm reads is found by asking it, before a run is spent on it.

An option that nothing reads would change nothing, and nobody would be told.
"""

from collections.abc import Iterable, Sequence
import dataclasses

import numpy as np

from agent_r1_jax.rl import algorithms, episodes
from agent_r1_jax.rl import kl as kl_lib


def check(
  algorithm: algorithms.Algorithm,
  samples: int,
  *,
  epochs: int = 1,
  minibatches: int = 1,
) -> None:
  """Refuses fields that do not go together.

  Args:
    algorithm: Of a run.
    samples: Episodes of a group.
    epochs: Over each rollout.
    minibatches: Optimizer steps an epoch.

  Raises:
    ValueError: Names the field and the mend.
  """
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
  # gdpo's, by the names of the parts of this run's reward.
  named = getattr(algorithm.advantages, 'keywords', {}).get('weights') or ()
  played = _episodes(samples, named)
  try:
    credits = algorithm.advantages(played)
  except ValueError:
    # It asks for what only the environment can give, such as named parts of the reward.
    return
  if samples == 1 and not any(np.any(credit.advantages) for credit in credits):
    raise ValueError(
      'samples is 1: these advantages compare the episodes of a group, and would all be '
      '0; make it 2 or more.'
    )
  if algorithm.needs_critic and credits[0].returns is None:
    raise ValueError(
      'value_loss: these advantages give a critic nothing to learn; leave it out.'
    )
  changes = algorithm.rewards or isinstance(algorithm.kl, kl_lib.InReward)
  if changes and not _reads(algorithm, played, 'rewards'):
    raise ValueError(
      'rewards, or a KL in the reward: these advantages read no reward; leave them out.'
    )
  if algorithm.greedy_baseline and not _reads(algorithm, played, 'baseline'):
    raise ValueError('greedy_baseline: these advantages read no baseline; leave it out.')


def _reads(algorithm, played: Sequence[episodes.Episode], name: str) -> bool:
  """Whether other numbers in one field of the episodes give other advantages."""
  other = [
    dataclasses.replace(e, **{name: np.cos(7.0 * i + getattr(e, name))})
    for i, e in enumerate(played)
  ]
  pairs = zip(algorithm.advantages(played), algorithm.advantages(other), strict=True)
  return any(not np.allclose(a.advantages, b.advantages) for a, b in pairs)


def _episodes(samples: int, named: Iterable[str]) -> list[episodes.Episode]:
  """Two groups of two turns each, with all that an estimator may read.

  Args:
    samples: Episodes of a group.
    named: Further parts of the reward.
  """
  rng = np.random.default_rng(0)
  found = []
  for group in range(2):
    for _ in range(samples):
      rewards = np.zeros(5)
      rewards[[1, 4]] = rng.uniform(0.5, 2.0, 2)
      found.append(
        episodes.Episode(
          group,
          np.array([0, 0, 1, 1, 1]),
          rewards,
          -rng.uniform(0.1, 2.0, 5),
          [b'a', b'b'],
          {'first': rewards[1], 'last': rewards[4]} | {x: rng.normal() for x in named},
          ref_logprobs=-rng.uniform(0.1, 2.0, 5),
          values=rng.normal(size=5),
          baseline=rng.normal(),
        )
      )
  return found
