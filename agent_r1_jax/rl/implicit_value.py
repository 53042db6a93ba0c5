"""An implicit value: log π_φ/π of what was said is the log-odds of success so far.

A scalar head must learn from outcomes alone to compare a reply with what was read. A
language model that is fitted in its place begins with the policy, which can do that. It
is fitted so that

  log-odds of success = b + β Σ_t log π_φ(a_t | s_t) / π(a_t | s_t)

over the tokens that the policy chose (Yuan et al. 2024, arXiv 2412.01981). Each part of
the sum is what a turn, or a token, adds to the value, which is Q(s, a) - V(s).
"""

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np
import optax

from agent_r1_jax import types
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import learner, losses, packing
from agent_r1_jax.rl import table as table_lib


def log_ratios(
  params: decoder.Params,
  table: table_lib.TokenTable,
  *,
  config: decoder.DecoderConfig,
  shape: packing.MicrobatchShape,
) -> np.ndarray:
  """Computes log π_φ/π of each of the table's tokens; 0 where π did not choose it."""
  batches, layout = packing.pack_microbatches(table, shape)
  found = [learner.logprobs(params, batch, config=config) for batch in batches]
  ratios = layout.extract(np.concatenate(found)) - table.old_logprobs
  return np.where(table.action_mask, ratios, 0.0)


def fit(
  params: decoder.Params,
  played: Sequence[types.Trajectory],
  *,
  config: decoder.DecoderConfig,
  optimizer: optax.GradientTransformation,
  shape: packing.MicrobatchShape,
  steps: int,
  episodes: int,
  beta: float = 0.3,
  seed: int = 0,
  on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
) -> decoder.Params:
  """Fits π_φ to episodes of π by the cross-entropy of their success (reward above 0.5).

  Args:
    params: The parameters of π, to start from; donated.
    played: Episodes that π sampled.
    config: The model's shape.
    optimizer: The optimizer.
    shape: The shape of the micro-batches; it does not change the gradient.
    steps: Number of optimizer steps.
    episodes: Episodes of each step.
    beta: β above.
    seed: The seed of the episodes' order.
    on_step: Called with the number of finished steps and the last one's loss.

  Returns:
    The parameters of π_φ.

  Raises:
    ValueError: All episodes succeed, or none.
  """
  state, rng = learner.init(params, optimizer), np.random.default_rng(seed)
  rate = np.mean([t.reward > 0.5 for t in played])
  if rate in (0, 1):
    raise ValueError('played: all succeed or all fail; a value is fitted to both.')
  prior = np.log(rate / (1 - rate))
  for step in range(1, steps + 1):
    chosen = rng.choice(len(played), episodes, replace=False)
    table = table_lib.build([played[i] for i in chosen])
    ratios = log_ratios(state.params, table, config=config, shape=shape)
    sums = np.bincount(table.trajectory, ratios, episodes)
    odds = prior + beta * sums
    success = np.array([played[i].reward > 0.5 for i in chosen])
    loss = np.mean(np.logaddexp(0, odds) - success * odds)
    # The gradient by a token's log-prob, which is fixed in the update.
    gradient = beta * (np.exp(-np.logaddexp(0, -odds)) - success) / episodes
    columns = {
      'advantages': gradient[table.trajectory],
      'weights': table.action_mask.astype(float),
    }
    table = dataclasses.replace(table, **columns)
    batches, _ = packing.pack_microbatches(table, shape)
    state, _ = learner.update(
      state, batches, config=config, loss=_weigh_logprobs, optimizer=optimizer
    )
    on_step(step, {'loss': float(loss)})
  return state.params


def _weigh_logprobs(stats: losses.TokenStats, batch: types.Batch):
  return losses.weighted(batch.advantages * stats.logprobs, batch.weights), {}
