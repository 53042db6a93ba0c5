"""Experience: trajectories, what their tokens are worth, and the mini-batches of both.

Numbers of tokens are kept a trajectory and a segment, as long as the segment's tokens.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import algorithms, correction, episodes, learner, packing
from agent_r1_jax.rl import kl as kl_lib
from agent_r1_jax.rl import rewards as rewards_lib

# Of each trajectory, of each of its segments, a number a token.
PerToken = list[list[np.ndarray]]


class Models(NamedTuple):
  """What scores trajectories before an update.

  Attributes:
    policy: The parameters that will be updated.
    config: Of the policy and of the critic.
    critic: The critic's; the policy's own where it has a value head; None without.
    reference: The reference policy's or the teacher's, where there is one.
    reference_config: Its shape.
  """

  policy: decoder.Params
  config: decoder.DecoderConfig
  critic: decoder.Params | None = None
  reference: decoder.Params | None = None
  reference_config: decoder.DecoderConfig | None = None


class Rows(NamedTuple):
  """Shape of the packed micro-batches: B rows of T tokens."""

  rows: int
  row_tokens: int


@dataclasses.dataclass
class Experience:
  """Trajectories with what the updates need to know of their tokens.

  Attributes:
    trajectories: None with status 'error'.
    algorithm: Whose credit it is.
    numbers: Fields of Batch by name: advantages, logprobs and what else there is.
    prefixes: Of each trajectory, tokens that only the critic sees.
    metrics: To log.
  """

  trajectories: list[types.Trajectory]
  algorithm: algorithms.Algorithm
  numbers: dict[str, PerToken]
  prefixes: list[np.ndarray]
  metrics: dict[str, float]


def credit(
  trajectories: Sequence[types.Trajectory],
  algorithm: algorithms.Algorithm,
  models: Models,
  *,
  shape: Rows,
  temperature: float = 1.0,
  kl_coef: float = 0.0,
  baselines: Sequence[float] | None = None,
  prefixes: Sequence[np.ndarray] | None = None,
) -> Experience:
  """Scores a batch of trajectories and computes what their tokens are worth.

  Args:
    trajectories: None with status 'error'.
    algorithm: Whose advantages.
    models: That the algorithm needs.
    shape: Of the packed batches.
    temperature: That the tokens were sampled at.
    kl_coef: The present coefficient of algorithm.kl.
    baselines: Of each trajectory, the reward of its task's greedy episode.
    prefixes: Of each trajectory, tokens that only the critic sees, before the text.
  """
  trajectories = list(trajectories)
  prefixes = list(prefixes or [np.zeros(0, np.int32)] * len(trajectories))
  scores = _scores(trajectories, algorithm, models, shape, temperature, prefixes)
  seen = [episodes.seen(t, algorithm.advantage_mask) for t in trajectories]
  eps = [episodes.episode(t, masked=algorithm.advantage_mask) for t in trajectories]
  old = _logprobs(trajectories, scores, algorithm)
  for i, episode in enumerate(eps):
    at = {name: packing.gather(seen[i], x[i]) for name, x in scores.items()}
    # A KL is of the policy that is updated, whichever policy sampled (verl's too).
    chosen = ~np.isnan(episode.logprobs)
    episode.logprobs = np.where(chosen, packing.gather(seen[i], old[i]), np.nan)
    episode.ref_logprobs, episode.values = at.get('ref_logprobs'), at.get('values')
    episode.baseline = baselines[i] if baselines is not None else None
    if 'after' in scores:
      episode.final_value = float(scores['after'][i][-1][-1])
  metrics: dict[str, float] = {}
  for transform in algorithm.rewards:
    eps = transform(eps)
  if algorithm.reads_reference:
    metrics['kl'] = _mean_kl(eps, kl_lib.k1)
  if isinstance(algorithm.kl, kl_lib.InReward):
    estimator = algorithm.kl.estimator
    metrics['kl'] = _mean_kl(eps, estimator)
    eps = rewards_lib.less_kl(eps, coef=kl_coef, estimator=estimator)
  credits = algorithm.advantages(eps)
  numbers = {'logprobs': old}
  numbers |= {k: v for k, v in scores.items() if k in ('ref_logprobs', 'values')}
  numbers['advantages'] = [
    packing.scatter(s, c.advantages) for s, c in zip(seen, credits, strict=True)
  ]
  if algorithm.needs_critic:
    numbers['returns'] = [
      packing.scatter(s, np.asarray(c.returns))
      for s, c in zip(seen, credits, strict=True)
    ]
  if algorithm.correction:
    numbers['correction'], more = _correct(trajectories, scores, algorithm)
    metrics |= more
  flat = np.concatenate([c.advantages for c in credits])
  metrics['advantage_std'] = float(flat.std()) if len(flat) else 0.0
  return Experience(trajectories, algorithm, numbers, prefixes, metrics)


def minibatch(
  experience: Experience,
  members: Sequence[int],
  *,
  shape: Rows,
  kl_coef: float = 0.0,
  dense: bool = False,
) -> list[types.Batch]:
  """The micro-batches of one optimizer step of the policy on some of the trajectories.

  Trajectories without an advantage are not computed where they add nothing to the loss;
  they count in its denominators all the same.

  Args:
    experience: Of the whole batch.
    members: Which trajectories.
    shape: Of the packed batches.
    kl_coef: The present coefficient of the KL in the loss.
    dense: Every token adds to the loss: the critic is a second head of the policy.
  """
  algorithm, numbers = experience.algorithm, experience.numbers
  in_loss = isinstance(algorithm.kl, kl_lib.InLoss)
  weights = _weights(experience, members, algorithm.loss_mask)
  if not (dense or in_loss or algorithm.entropy_coef):
    live = lambda i: any(np.any(a) for a in numbers['advantages'][i])
    members = [i for i in members if live(i)] or members[:1]
  fields: dict[str, PerToken] = {
    name: [x[i] for i in members] for name, x in numbers.items()
  }
  fields['weights'] = [weights[i] for i in members]
  if in_loss:
    fields['kl_weights'] = [[kl_coef * w for w in weights[i]] for i in members]
  if not dense:
    fields = {k: v for k, v in fields.items() if k not in ('values', 'returns')}
  segments = [experience.trajectories[i].segments for i in members]
  return _packed(segments, fields, shape)


def critic_minibatch(
  experience: Experience, members: Sequence[int], *, shape: Rows
) -> list[types.Batch]:
  """As `minibatch`, for a critic that is a model of its own: it sees the prefixes."""
  weights = _weights(experience, members, experience.algorithm.advantage_mask)
  numbers: dict[str, Any] = {k: experience.numbers[k] for k in ('values', 'returns')}
  numbers['weights'] = weights
  fields, segments = {name: [] for name in numbers}, []
  for i in members:
    prefix = experience.prefixes[i]
    segments.append(_prefixed(experience.trajectories[i].segments, prefix))
    for name, x in numbers.items():
      fields[name].append([np.pad(a, (len(prefix), 0)) for a in x[i]])
  return _packed(segments, fields, shape)


def _scores(trajectories, algorithm, models, shape, temperature, prefixes):
  """What the models say of every token: ref_logprobs, values, after, old logprobs."""
  segments = [t.segments for t in trajectories]
  heat: dict[str, Any] = {'temperature': temperature}
  scores: dict[str, PerToken] = {}
  if algorithm.needs_reference:
    scores['ref_logprobs'] = _scored(
      segments,
      lambda b: learner.logprobs(
        models.reference, b, config=models.reference_config, **heat
      ),
      shape,
    )
  if algorithm.correction or not algorithm.loss_mask:
    scores['old'] = _scored(
      segments,
      lambda b: learner.logprobs(models.policy, b, config=models.config, **heat),
      shape,
    )
  if algorithm.needs_critic:
    views = [_prefixed(s, p) for s, p in zip(segments, prefixes, strict=True)]
    _check_views(views, prefixes, shape)
    score = lambda b: learner.values(models.critic, b, config=models.config)
    after = _scored(views, score, shape)
    # The value before a token is the one after the token before it.
    cut = [[a[len(p) :] for a in x] for x, p in zip(after, prefixes, strict=True)]
    before = [
      [np.append(0.0, a)[len(p) : -1] for a in x]
      for x, p in zip(after, prefixes, strict=True)
    ]
    scores |= {'after': cut, 'values': before}
  return scores


def _scored(segments, score: Callable[[types.Batch], Any], shape) -> PerToken:
  """A number of every token, by a function of packed batches."""
  flat, where = _layout(segments, shape)
  batches = packing.microbatches(packing.pack(flat, where), shape.rows)
  whole = np.concatenate([np.asarray(score(b), np.float64) for b in batches])
  parts = iter(where.extract(whole))
  return [[next(parts) for _ in some] for some in segments]


def _logprobs(trajectories, scores, algorithm) -> PerToken:
  """log π_old: the sampler's, but where that is stale or the token was not sampled."""
  sampled = [[s.logprobs for s in t.segments] for t in trajectories]
  if 'old' not in scores or algorithm.correction:
    return scores.get('old', sampled)
  return [
    [
      np.where(s.action_mask, s.logprobs, old)
      for s, old in zip(t.segments, x, strict=True)
    ]
    for t, x in zip(trajectories, scores['old'], strict=True)
  ]


def _correct(trajectories, scores, algorithm):
  """Importance weights from what the policy says now and what the sampler said."""
  masks = [episodes.seen(t, True) for t in trajectories]
  behaviour = [
    packing.gather(m, [s.logprobs for s in t.segments])
    for m, t in zip(masks, trajectories, strict=True)
  ]
  old = [packing.gather(m, x) for m, x in zip(masks, scores['old'], strict=True)]
  weights = algorithm.correction(old, behaviour)
  # What was not sampled needs no correction.
  spread = [
    [np.where(m, x, 1.0) for m, x in zip(mask, packing.scatter(mask, w), strict=True)]
    for mask, w in zip(masks, weights, strict=True)
  ]
  watched = correction.statistics(old, behaviour)
  return spread, {f'stale_{name}': value for name, value in watched.items()}


def _weights(experience, members, masked) -> dict[int, list[np.ndarray]]:
  """Of some trajectories, the weight of each token: that of the aggregation."""
  masks = [episodes.seen(experience.trajectories[i], masked) for i in members]
  counts = np.array([sum(int(m.sum()) for m in some) for some in masks])
  each = experience.algorithm.aggregation(counts)
  return {
    i: [weight * m for m in some]
    for i, some, weight in zip(members, masks, each, strict=True)
  }


def _packed(segments, fields: dict[str, PerToken], shape) -> list[types.Batch]:
  flat, where = _layout(segments, shape)
  placed: dict[str, Any] = {
    name: where.place([a for some in x for a in some], np.float32)
    for name, x in fields.items()
  }
  batch = packing.pack(flat, where)._replace(**placed)
  return list(packing.microbatches(batch, shape.rows))


def _layout(segments, shape) -> tuple[list[types.Segment], packing.Layout]:
  flat = [s for some in segments for s in some]
  lengths = [len(s.tokens) for s in flat]
  where = packing.layout(lengths, row_tokens=shape.row_tokens, row_multiple=shape.rows)
  return flat, where


def _prefixed(segments, prefix) -> list[types.Segment]:
  if not len(prefix):
    return segments
  pad = lambda x: np.pad(x, (len(prefix), 0))
  return [
    types.Segment(
      np.concatenate([prefix, s.tokens]).astype(np.int32),
      pad(s.action_mask),
      pad(s.logprobs),
    )
    for s in segments
  ]


def _check_views(views, prefixes, shape) -> None:
  """Raises ValueError where the text fits a row and the critic's view of it does not."""
  for segments, prefix in zip(views, prefixes, strict=True):
    size = max(len(s.tokens) for s in segments)
    if len(prefix) and size > shape.row_tokens:
      raise ValueError(
        f'A segment of {size - len(prefix)} tokens and the {len(prefix)} before it that '
        f'only the critic sees do not fit a row of {shape.row_tokens}: raise row_tokens, '
        'or tell the critic less.'
      )


def _mean_kl(eps, estimator) -> float:
  """The mean over episodes of the mean over their action tokens (verl's)."""
  means = []
  for e in eps:
    acted = np.isfinite(e.logprobs)
    means.append(estimator(e.logprobs[acted], e.ref_logprobs[acted]).mean())
  return float(np.mean(means))
