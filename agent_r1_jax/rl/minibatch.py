"""Makes the micro-batches of a mini-batch: computes token weights, and packs tokens.

batches, metrics = minibatch.make_policy(table, members, algorithm, shape=shape)
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.rl import algorithms, packing, prefix_trees
from agent_r1_jax.rl import kl as kl_lib
from agent_r1_jax.rl.table import TokenTable


def make_policy(
  table: TokenTable,
  members: Sequence[int],
  algorithm: algorithms.Algorithm,
  *,
  shape: packing.MicrobatchShape,
  kl_coef: float = 0.0,
  shared_critic: bool = False,
) -> tuple[list[types.Batch], dict[str, float]]:
  """Makes the policy's micro-batches from some trajectories.

  Trajectories whose advantages are all 0 are left out, unless the algorithm
  `needs_all_trajectories`; the weights of the others stay the same.

  Args:
    table: The table from `credit.estimate`.
    members: The indices of the trajectories.
    algorithm: The algorithm, for its masks, aggregation, KL and entropy.
    shape: The shape of the packed micro-batches.
    kl_coef: The current coefficient of the KL in the loss.
    shared_critic: Whether the critic is a second head of the policy, so that every token
      has a value loss.

  Returns:
    The micro-batches, and metrics: 'trained/distinct', the number of computed tokens per
    distinct token; tokens are equal if they have equal prefixes too.
  """
  kl_in_loss = isinstance(algorithm.kl, kl_lib.InLoss)
  minibatch = _select(table, members, algorithm, algorithm.loss_mask)
  if kl_in_loss:
    kl_weights = kl_coef * minibatch.column('weights')
    minibatch = dataclasses.replace(minibatch, kl_weights=kl_weights)
  if not shared_critic:
    minibatch = dataclasses.replace(minibatch, values=None, returns=None)
  if not algorithm.needs_all_trajectories(shared_critic=shared_critic):
    nonzero = np.unique(minibatch.trajectory[minibatch.advantages != 0])
    # Keep at least one trajectory, so that there is a batch to compute.
    kept = np.zeros(len(table.group), bool)
    kept[nonzero if len(nonzero) else members[:1]] = True
    if not kept[members].all():
      minibatch = minibatch.take(kept[minibatch.trajectory])
  return _pack(minibatch, shape)


def make_critic(
  table: TokenTable,
  members: Sequence[int],
  algorithm: algorithms.Algorithm,
  *,
  shape: packing.MicrobatchShape,
  prefixes: Sequence[np.ndarray] | None = None,
) -> tuple[list[types.Batch], dict[str, float]]:
  """Makes the micro-batches of a separate critic, and metrics.

  Like `make_policy`, with `prefixes` before the segments.
  """
  minibatch = _select(table, members, algorithm, algorithm.advantage_mask)
  # The value loss does not read these columns.
  unused = dict.fromkeys(('advantages', 'ref_logprobs', 'correction'))
  minibatch = dataclasses.replace(minibatch.for_other_model(), **unused)
  if prefixes is not None:
    minibatch, _ = minibatch.add_prefixes(prefixes)
  return _pack(minibatch, shape)


def _pack(
  minibatch: TokenTable, shape: packing.MicrobatchShape
) -> tuple[list[types.Batch], dict[str, float]]:
  batches, layout = packing.pack_microbatches(minibatch, shape)
  distinct = prefix_trees.count_distinct(minibatch)
  return batches, {'trained/distinct': layout.computed / max(distinct, 1)}


def _select(table, members, algorithm, action_mask: bool) -> TokenTable:
  """Selects trajectories, and adds the weights of their tokens in the loss.

  Args:
    table: The table of all trajectories.
    members: The indices of the mini-batch's trajectories.
    algorithm: Its aggregation is applied to the mini-batch.
    action_mask: Whether only action tokens have a weight; see TokenTable.find_visible.
  """
  weighed, members = table.find_visible(action_mask), list(members)
  counts = np.bincount(table.trajectory[weighed], minlength=len(table.group))
  weight_of = np.zeros(len(table.group))
  weight_of[members] = algorithm.aggregation(counts[members])
  table = dataclasses.replace(table, weights=weight_of[table.trajectory] * weighed)
  if members == [*range(len(table.group))]:
    return table  # Copying all tokens would need more memory than anything else here.
  return table.take(table.find_tokens(members))
