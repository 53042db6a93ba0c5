"""An implicit value: a language model whose log-probs of the replies predict success.

A scalar head must learn from outcomes alone to compare a reply with what the agent read.
A language model starts from the policy, which can already do that. It is fitted so that

  log-odds of success = b + β Σ_t (log π_φ(a_t | s_t) - c)

over the tokens a_t that the policy chose, in all segments of an episode together, since
success belongs to the episode. The value of a state is the sum over the replies so far,
so a model trained on outcomes alone also says what each turn was worth.

Yuan et al. 2024 (arXiv 2412.01981) have the policy's log π(a_t | s_t) in place of c, its
mean over all tokens. With c, the fit starts from what the policy's own log-probs know
about success, instead of a constant; and short replies have no advantage.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import os
import pathlib
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
import numpy as np
import optax

from agent_r1_jax import types
from agent_r1_jax.models import decoder, sharding
from agent_r1_jax.models.files import weights
from agent_r1_jax.rl import learner, losses, packing
from agent_r1_jax.rl import table as table_lib
from agent_r1_jax.train import fingerprint

# The file next to the model with b and β, and the policy whose episodes were fitted.
FILE = 'implicit_value.json'


class Odds(NamedTuple):
  """The log-odds of success, as a function of Σ (log π_φ - c).

  Attributes:
    prior: b above.
    beta: β above.
    typical: c above.
  """

  prior: float
  beta: float
  typical: float = 0.0

  def of(self, logprobs: np.ndarray, mask: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Returns each trajectory's log-odds; only tokens in the mask count.

    `owner` has the index of each token's trajectory.
    """
    terms = np.where(mask, logprobs - self.typical, 0.0)
    return self.prior + self.beta * np.bincount(owner, terms)


def succeeds(played: Sequence[types.Trajectory]) -> np.ndarray:
  """Whether each episode succeeds: its reward is above 0.5."""
  return np.array([t.reward > 0.5 for t in played], bool)


def logprobs(
  params: decoder.Params,
  table: table_lib.TokenTable,
  *,
  config: decoder.DecoderConfig,
  shape: packing.MicrobatchShape,
) -> np.ndarray:
  """Computes log π_φ of the table's tokens; 0 where the policy did not choose."""
  batches, layout = packing.pack_microbatches(table, shape)
  found = [learner.logprobs(params, batch, config=config) for batch in batches]
  return np.where(table.action_mask, layout.extract(np.concatenate(found)), 0.0)


def log_odds(
  params: decoder.Params,
  table: table_lib.TokenTable,
  odds: Odds,
  *,
  config: decoder.DecoderConfig,
  shape: packing.MicrobatchShape,
) -> np.ndarray:
  """Computes each trajectory's log-odds of success, float [n]."""
  found = logprobs(params, table, config=config, shape=shape)
  return odds.of(found, table.action_mask, table.trajectory)


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
) -> tuple[decoder.Params, Odds]:
  """Fits π_φ to episodes of π by the cross-entropy of their success (see `succeeds`).

  `params`, the parameters of π, are donated. Each step takes a number of `episodes` from
  shuffled epochs; `on_step` gets the number of finished steps and the last step's loss.
  The `shape` of the micro-batches does not change the gradient.

  Returns:
    The parameters of π_φ, and b, β and c.

  Raises:
    ValueError: All episodes succeed, or none does.
  """
  # Episodes whose prompt is too long have no reply, and no log-probs.
  played = [t for t in played if t.turns]
  rate = succeeds(played).mean()
  if rate in (0, 1):
    raise ValueError('played: all succeed or all fail; a value is fitted to both.')
  # Initially, an average episode has the log-odds of the success rate.
  table = table_lib.build(played)
  typical = table.old_logprobs[table.action_mask].mean()
  odds = Odds(float(np.log(rate / (1 - rate))), beta, float(typical))
  state, loss = learner.init(params, optimizer), _make_loss(odds)
  rng, waiting = np.random.default_rng(seed), np.zeros(0, int)
  for step in range(1, steps + 1):
    while len(waiting) < episodes:
      waiting = np.append(waiting, rng.permutation(len(played)))
    chosen, waiting = waiting[:episodes], waiting[episodes:]
    batches = _pack(state.params, [played[i] for i in chosen], odds, config, shape)
    gradients = learner.forward_backward(state.params, batches, config=config, loss=loss)
    state, metrics = learner.optim_step(state, gradients, optimizer=optimizer)
    on_step(step, {'loss': metrics['loss']})
  return state.params, odds


def save(
  directory: str | os.PathLike,
  config: decoder.DecoderConfig,
  params: decoder.Params,
  policy: str | os.PathLike,
  odds: Odds,
  **measured: float,
) -> None:
  """Writes a fitted model, and in FILE the policy that it values.

  `measured` has the `auc` on held-out tasks, and `row_tokens`, the longest sequence in
  tokens; without them it cannot be a reward model (guided/reward_model.py).
  """
  path = pathlib.Path(directory) / FILE
  path.unlink(missing_ok=True)  # Never leave FILE next to a partly overwritten model.
  weights.save(directory, config, params, tokenizer_from=policy)
  of = {
    'policy': fingerprint.model_digest(policy),
    'tokenizer': fingerprint.tokenizer_digest(policy),
  }
  found = odds._asdict() | measured | of
  path.write_text(json.dumps(found))


def read(directory: str | os.PathLike) -> dict[str, Any]:
  """Reads FILE as written by `save`.

  Raises:
    ValueError: There is no such file.
  """
  path = pathlib.Path(directory) / FILE
  if not path.exists():
    raise ValueError(
      f'{directory} has no {FILE}: take a model that experiments/train_reward_model.py '
      'wrote.'
    )
  return json.loads(path.read_text())


def load(
  directory: str | os.PathLike, policy: str | os.PathLike, *, mesh: Mesh | None = None
) -> tuple[decoder.Params, Odds]:
  """Loads what `save` wrote: the parameters, float32, with b, β and c.

  Raises:
    ValueError: It was fitted to another policy's episodes.
  """
  found = read(directory)
  if found['policy'] != fingerprint.model_digest(policy):
    raise ValueError(
      f'policy: {directory} has the values of another policy than {policy}; fit one to '
      'its episodes.'
    )
  place = sharding.make_placer(mesh)
  params = weights.load(directory, dtype='float32', place=place)[1]
  return params, make_odds(found)


def make_odds(found: dict[str, Any]) -> Odds:
  """Makes Odds of b, β and c as `read` returns them."""
  return Odds(**{name: found[name] for name in Odds._fields if name in found})


def _pack(
  params: decoder.Params,
  played: Sequence[types.Trajectory],
  odds: Odds,
  config: decoder.DecoderConfig,
  shape: packing.MicrobatchShape,
) -> list[types.Batch]:
  """Packs episodes, with the inputs of the loss in existing columns of a batch.

  advantages: The success of the episode.
  values: Σ log π_φ of the episode's other segments, which may be in other micro-batches,
    less c for each action token of the episode.
  returns: The number of the episode's action tokens divided by the segment's.
  """
  table = table_lib.build(played)
  success = succeeds(played).astype(float)
  broadcast_sum = lambda by, x: np.bincount(by, x)[by]
  counts = broadcast_sum(table.trajectory, table.action_mask)
  own_counts = broadcast_sum(table.segment, table.action_mask)
  others = np.zeros(len(table))
  if (own_counts != counts).any():
    found = logprobs(params, table, config=config, shape=shape)
    others = broadcast_sum(table.trajectory, found) - broadcast_sum(table.segment, found)
  columns = {
    'advantages': success[table.trajectory],
    # An episode's tokens share its weight; each of them has the episode's loss.
    'weights': table.action_mask / (len(played) * counts),
    'values': others - odds.typical * counts,
    'returns': counts / np.maximum(own_counts, 1),
  }
  return packing.pack_microbatches(dataclasses.replace(table, **columns), shape)[0]


def _make_loss(odds: Odds) -> learner.Loss:
  """Makes the cross-entropy of the episodes' success, for batches of `_pack`."""

  def loss(stats: losses.TokenStats, batch: types.Batch):
    others: Any = batch.values
    scale: Any = batch.returns
    own = losses.segment_sum(stats.logprobs, batch.segment_ids)
    log_odds = odds.prior + odds.beta * (own + others)
    entropy = jax.nn.softplus(log_odds) - batch.advantages * log_odds
    # A segment's tokens have only a share of the weight, but its log-probs need the full
    # gradient: d entropy / d own does not depend on the length of the others.
    value = jax.lax.stop_gradient(entropy)
    return losses.weighted(value + (entropy - value) * scale, batch.weights), {}

  return loss
