"""Experience: trajectories, what their tokens are worth, and the mini-batches of both."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import advantages as advantages_lib
from agent_r1_jax.rl import algorithms, learner, packing


class Experience(NamedTuple):
  """Trajectories with what the update needs to know of their action tokens."""

  trajectories: list[types.Trajectory]
  ref_logprobs: list[np.ndarray] | None
  values: list[np.ndarray] | None
  credits: list[algorithms.Credit]


def credit(
  trajectories: Sequence[types.Trajectory],
  algorithm: algorithms.Algorithm,
  *,
  params: dict[str, decoder.Params],
  ref_params: decoder.Params | None,
  config: decoder.DecoderConfig,
  temperature: float,
  row_tokens: int,
  rows: int,
) -> Experience:
  """Scores a batch of trajectories and computes what their tokens are worth.

  Args:
    trajectories: None with status 'error'.
    algorithm: Whose advantages.
    params: As in TrainState; the critic is read if the algorithm needs it.
    ref_params: The reference policy's, if the algorithm needs it.
    config: Of the policy.
    temperature: That the tokens were sampled at.
    row_tokens: T of the packed rows.
    rows: B of a micro-batch.
  """
  segments = [s for t in trajectories for s in t.segments]
  lengths = [len(s.tokens) for s in segments]
  where = packing.layout(lengths, row_tokens=row_tokens, row_multiple=rows)
  batches = list(packing.microbatches(packing.pack(segments, where), rows))

  def scored(params, field):
    kwargs = {'config': config, 'temperature': temperature}
    parts = [getattr(learner.score(params, batch, **kwargs), field) for batch in batches]
    whole = np.concatenate([np.asarray(part, np.float64) for part in parts])
    return packing.gather(trajectories, where.extract(whole))

  episodes = [advantages_lib.actions(t) for t in trajectories]
  ref_logprobs = values = None
  if algorithm.needs_reference:
    ref_logprobs = scored({'policy': ref_params}, 'logprobs')
    for episode, x in zip(episodes, ref_logprobs, strict=True):
      episode.ref_logprobs = x
  if algorithm.needs_critic:
    values = scored(params, 'values')
    for episode, x in zip(episodes, values, strict=True):
      episode.values = x
  return Experience(
    list(trajectories), ref_logprobs, values, algorithm.advantages(episodes)
  )


def minibatch(
  experience: Experience,
  members: Sequence[int],
  algorithm: algorithms.Algorithm,
  *,
  row_tokens: int,
  rows: int,
) -> list[types.Batch]:
  """The micro-batches of one optimizer step on some of the trajectories.

  Args:
    experience: Of the whole batch.
    members: Which trajectories.
    algorithm: Whose aggregation.
    row_tokens: T.
    rows: B of a micro-batch.
  """
  trajectories = [experience.trajectories[i] for i in members]
  segments = [s for t in trajectories for s in t.segments]
  lengths = [len(s.tokens) for s in segments]
  where = packing.layout(lengths, row_tokens=row_tokens, row_multiple=rows)

  def placed(per_trajectory):
    arrays = packing.scatter(trajectories, [per_trajectory[i] for i in members])
    return where.place(arrays, np.float32)

  counts = np.array(
    [sum(int(s.action_mask.sum()) for s in t.segments) for t in trajectories]
  )
  weights = np.zeros(len(experience.trajectories))
  weights[list(members)] = algorithm.aggregate(counts)
  credits = experience.credits
  spread = [np.full(len(c.advantages), w) for c, w in zip(credits, weights, strict=True)]
  has_returns = credits[members[0]].returns is not None
  batch = packing.pack(segments, where)._replace(
    advantages=placed([c.advantages for c in credits]),
    weights=placed(spread),
    ref_logprobs=placed(experience.ref_logprobs) if experience.ref_logprobs else None,
    values=placed(experience.values) if experience.values else None,
    returns=placed([c.returns for c in credits]) if has_returns else None,
  )
  return list(packing.microbatches(batch, rows))


def summary(experience: Experience) -> dict[str, float]:
  """Numbers to log: the share of groups without variance, and advantages' spread."""
  scores: dict[int, list[float]] = {}
  for t in experience.trajectories:
    scores.setdefault(t.group, []).append(t.reward)
  flat = np.concatenate([c.advantages for c in experience.credits])
  return {
    'dead_groups': float(
      np.mean([advantages_lib.tied(np.array(s)) for s in scores.values()])
    ),
    'advantage_std': float(flat.std()) if len(flat) else 0.0,
  }
