"""A reward model: one score for a whole trajectory, from a decoder with a value head.

The score is the value of the state after the trajectory's last token: the model reads the
whole trajectory, the tools' answers included, and scores no single token.

Letters: n trajectories, B packed rows, T tokens of each.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np
import optax

from agent_r1_jax import types
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import learner, losses, packing, spans, table

# (scores, rewards, groups), each [n] -> the loss.
Loss = Callable[[Array, Array, Array], Array]


def bradley_terry(
  scores: Float[Array, 'n'], rewards: Float[Array, 'n'], groups: Int[Array, 'n']
) -> Float[Array, '']:
  """Mean of -log σ(sᵢ - sⱼ) over the pairs of one group with rᵢ > rⱼ; 0 without pairs.

  Bradley and Terry 1952, as Ouyang et al. 2022 (arXiv 2203.02155, eq. 1) train reward
  models. They average over each prompt's pairs first; here every pair weighs the same.
  """
  better = (groups[:, None] == groups[None]) & (rewards[:, None] > rewards[None])
  pair_losses = jax.nn.softplus(scores[None] - scores[:, None])
  return jnp.where(better, pair_losses, 0.0).sum() / jnp.maximum(better.sum(), 1)


def cross_entropy(limit: float) -> Loss:
  """Mean of -y log σ(s) - (1 - y) log(1 - σ(s)), with y = 1 where r > limit, else 0.

  Cobbe et al. 2021 (arXiv 2110.14168) train verifiers so; σ(s) is then the probability of
  success.

  Args:
    limit: The greatest reward that is no success.
  """

  def loss(scores: Array, rewards: Array, groups: Array) -> Array:
    success = (rewards > limit).astype(scores.dtype)
    return jnp.mean(jax.nn.softplus(scores) - success * scores)

  return loss


def score(
  params: decoder.Params,
  texts: Sequence[Int[np.ndarray, '_']],
  *,
  config: decoder.DecoderConfig,
  shape: packing.MicrobatchShape,
) -> Float[np.ndarray, 'n']:
  """Computes the score of each text.

  Each has a packed row of its own in a batch of one shape, so that the other texts of the
  batch cannot change its score.

  Raises:
    ValueError: A text is longer than a packed row.
  """
  scores = [np.zeros(0)]
  for start in range(0, len(texts), shape.rows):
    batch_texts = texts[start : start + shape.rows]
    lengths = [len(tokens) for tokens in batch_texts]
    packing.check_lengths(lengths, shape.row_tokens)
    starts = tuple((row, 0) for row in range(len(lengths)))
    layout = packing.Layout(tuple(lengths), starts, shape.rows, shape.row_tokens)
    batch = packing.pack(table.from_segments(list(map(_segment, batch_texts))), layout)
    values = learner.values(params, batch, config=config)
    scores.append(values[np.arange(len(lengths)), np.array(lengths) - 1])
  return np.concatenate(scores).astype(float)


def fit(
  params: decoder.Params,
  texts: Sequence[Int[np.ndarray, '_']],
  rewards: Float[np.ndarray, 'n'],
  groups: Int[np.ndarray, 'n'],
  *,
  config: decoder.DecoderConfig,
  loss: Loss,
  optimizer: optax.GradientTransformation,
  shape: packing.MicrobatchShape,
  steps: int,
  groups_per_step: int,
  seed: int = 0,
  on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
) -> decoder.Params:
  """Fits the scores to rewards; on several chips as sft.run.

  Each step takes whole groups, in shuffled epochs.

  `params`, with a value head, are donated. A text is shorter than a packed row by one
  token at least; the members of a group answered the same task. `on_step` gets the number
  of finished steps and the last one's metrics. The `shape` of the micro-batches does not
  change the gradient.
  """
  state = learner.init(params, optimizer)
  value_and_grad = jax.jit(jax.value_and_grad(loss))
  epochs = _draw_groups(groups, groups_per_step, np.random.default_rng(seed))
  for step, members in zip(range(1, steps + 1), epochs, strict=False):
    chosen = [texts[i] for i in members]
    batches, metrics = _backward_batches(
      state.params,
      chosen,
      functools.partial(value_and_grad, rewards=rewards[members], groups=groups[members]),
      config,
      shape,
    )
    gradients = learner.forward_backward(
      state.params, batches, config=config, loss=_weighted_values
    )
    state, updated = learner.optim_step(state, gradients, optimizer=optimizer)
    on_step(step, metrics | {'grad_norm': updated['grad_norm']})
  return state.params


def _backward_batches(params, texts, value_and_grad, config, shape):
  """Makes micro-batches whose values, weighted, have the gradient of the loss.

  The loss L couples all scores of a step, which need not be in one micro-batch. A forward
  pass gives the scores and so gᵢ = ∂L/∂sᵢ; the gradient of Σ gᵢ sᵢ with these gᵢ fixed is
  L's own (Gao et al. 2021, arXiv 2101.06983).
  """
  # A gradient's values are those of the states before each token. So each text gets one
  # more token, which nothing reads: its value is that of the state after the last one.
  tokens = table.from_segments([_segment(np.append(t, t[-1])) for t in texts])
  ends = spans.ends(tokens.segment)
  batches, layout = packing.pack_microbatches(tokens, shape)
  values = [learner.values(params, batch, config=config) for batch in batches]
  scores = layout.extract(np.concatenate(values))[ends - 1]
  loss, gradient = jax.device_get(value_and_grad(scores))
  columns = {'advantages': np.zeros(len(tokens)), 'weights': np.zeros(len(tokens))}
  columns['advantages'][ends], columns['weights'][ends] = gradient, 1.0
  batches, _ = packing.pack_microbatches(dataclasses.replace(tokens, **columns), shape)
  return batches, {'loss': float(loss), 'score_std': float(scores.std())}


def _weighted_values(stats: losses.TokenStats, batch: types.Batch):
  values: Any = stats.values
  return losses.weighted(batch.advantages * values, batch.weights), {}


def _draw_groups(groups, count: int, rng) -> Iterator[np.ndarray]:
  """Yields the members of `count` different groups, in shuffled epochs, for ever."""
  names = np.unique(groups)
  waiting, count = names[:0], min(count, len(names))
  while True:
    if len(waiting) < count:
      epoch = rng.permutation(names)
      # A group that still waits from the last epoch must not come twice in one step.
      repeated = np.isin(epoch, waiting)
      waiting = np.concatenate([waiting, epoch[~repeated], epoch[repeated]])
    yield np.flatnonzero(np.isin(groups, waiting[:count]))
    waiting = waiting[count:]


def _segment(tokens) -> types.Segment:
  zeros = np.zeros(len(tokens), np.float32)
  return types.Segment(np.asarray(tokens, np.int32), zeros > 0, zeros)
