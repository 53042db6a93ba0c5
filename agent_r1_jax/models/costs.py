"""Counts the operations that a model needs, for MFU (report/progress.py).

A multiplication is one operation, an addition another: a product of [M, K] and [K, N] has
2 M K N. As in PaLM (arXiv 2204.02311, appendix B), only products with kernels and of
attention count, without recomputation; norms, biases, scales, rotations and softmax do
not. A layer with a state has three products with it per token. Only the experts that a
token uses count. The vision tower does not.
"""

from typing import Any, NamedTuple

import jax
from jaxtyping import Int
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.models import four_bits, lora
from agent_r1_jax.models.decoder_config import DecoderConfig

# Names of the parameters that are matrices.
_MATRICES = ('kernel', 'lora_a', 'lora_b')


class Parameters(NamedTuple):
  """How many parameters a model has in matrices.

  Attributes:
    layers: Parameters of layers that every token uses, with LoRA, without the head.
    head: Parameters of the kernel that computes the logits.
    experts: Parameters of all experts together.
    share: The fraction of the experts that a token uses.
  """

  layers: int
  head: int
  experts: int
  share: float

  @property
  def taken(self) -> float:
    """How many parameters one token's logits use."""
    return self.layers + self.head + self.share * self.experts


def count_parameters(params: Any, config: DecoderConfig) -> Parameters:
  """Counts the numbers in the kernels of a learner's parameters, or of their shapes."""
  leaves = jax.tree.leaves_with_path
  count = four_bits.count_numbers
  size = lambda part: sum(count(x) for at, x in leaves(part) if at[-1].key in _MATRICES)
  rest = {k: v for k, v in params.items() if k not in ('embed', 'lm_head', 'vision')}
  # The router counts among the layers.
  moe = rest['layers'].get('moe', {})
  experts = size({k: v for k, v in moe.items() if k != 'router'})
  head = config.vocab_size * config.embed_dim
  share = config.experts_per_token / config.num_experts if experts else 0.0
  return Parameters(size(rest) - experts, head, experts, share)


def count_forward(
  size: Parameters,
  config: DecoderConfig,
  positions: Int[np.ndarray, 'n'],
  logits: int,
  *,
  products: int = 1,
  attention: int = 1,
) -> float:
  """Counts the operations of n tokens at their positions in causal sequences.

  Args:
    size: How many parameters the model has.
    config: The model's shape.
    positions: The position of each token, from 0: it attends to all tokens before it, or
      in a sliding layer to its window.
    logits: For how many tokens logits are computed.
    products: How often each product with parameters counts.
    attention: How often each product of attention counts.
  """
  seen, sliding = positions.astype(np.int64) + 1, sum(config.sliding)
  recurrent = sum(config.recurrent)
  pairs = (config.num_layers - sliding - recurrent) * int(seen.sum())
  pairs = pairs * (config.full_head_dim or config.head_dim)
  if sliding:
    pairs += sliding * config.head_dim * int(np.minimum(seen, config.window).sum())
  passed = (size.taken - size.head) * len(positions) + size.head * logits
  state = config.linear_value_heads * config.linear_key_dim * config.linear_value_dim
  mixed = 4 * config.num_heads * pairs + 6 * state * recurrent * len(positions)
  return products * 2 * passed + attention * mixed


def count_gradient(
  params: Any, config: DecoderConfig, batch: types.Batch, *, has_logits: bool = True
) -> float:
  """Counts the operations of a micro-batch's loss and its gradient, on the host.

  Backward, each product needs two more, or one more if its kernel is frozen. The loss of
  a separate critic has no logits.
  """
  positions, sees = np.asarray(batch.rows.positions), batch.rows.sees
  T = positions.shape[1]
  row, column = np.nonzero(batch.weights)
  if isinstance(sees, types.Tree):
    column = np.asarray(batch.columns)[row, column]
    # Padding is its own parent and has no descendant.
    computed = (sees.parents != np.arange(T)) | (sees.ends != np.arange(1, T + 1))
  else:
    computed = batch.segment_ids > 0
  # Entries of one token share its logits.
  places = np.unique(row * T + column)
  logits = int((positions.reshape(-1)[places] > 0).sum())
  return count_forward(
    count_parameters(params, config),
    config,
    positions[computed],
    logits if has_logits else 0,
    products=2 if lora.is_in(params) else 3,
    attention=3,
  )
