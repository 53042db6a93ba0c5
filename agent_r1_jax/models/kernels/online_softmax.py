"""A softmax that a kernel for TPUs joins from one block of keys to the next.

As in FlashAttention (arXiv 2205.14135): of all blocks before, a kernel keeps the weighted
sum of the values, the sum of the weights and the largest score.

Arrays of scores have keys in rows and queries in columns. What there is of a query, such
as the sum of its weights, is then a row of numbers that lie side by side, where a column
of them would take 128 times its memory.

Letters: S keys of a block, Q queries of a block, H head dim.
"""

from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float

HIDDEN = float(jnp.finfo(jnp.float32).min)  # The score of a key that is not seen.
# The axis of each of two matrices over which their product sums: x · yᵀ, x · y, xᵀ · y.
ROWS_BY_ROWS, ROWS_BY_COLUMNS, COLUMNS_BY_COLUMNS = (
  (((x,), (y,)), ((), ())) for x, y in ((1, 1), (1, 0), (0, 0))
)


def dot(x: Array, y: Array, axes: Any) -> Array:
  """Multiplies matrices, and sums in float32."""
  return jax.lax.dot_general(x, y, axes, preferred_element_type=jnp.float32)


class Sums(NamedTuple):
  """What a kernel keeps of the blocks before, as references to float32 arrays."""

  values: Any  # [H, Q]
  weights: Any  # [1, Q]
  most: Any  # [1, Q]

  @staticmethod
  def shapes(H: int, Q: int) -> list[tuple[int, int]]:
    """Returns the shapes of the arrays."""
    return [(H, Q), (1, Q), (1, Q)]

  def begin(self):
    """Begins a block of queries."""
    self.values[...] = jnp.zeros_like(self.values)
    self.weights[...] = jnp.zeros_like(self.weights)
    self.most[...] = jnp.full_like(self.most, HIDDEN)

  def add(self, scores_SQ: Float[Array, 'S Q'], v_SH: Float[Array, 'S H']):
    """Adds a block of keys."""
    most_1Q = jnp.maximum(self.most[...], scores_SQ.max(0, keepdims=True))
    p_SQ, before_1Q = jnp.exp(scores_SQ - most_1Q), jnp.exp(self.most[...] - most_1Q)
    out_HQ = dot(v_SH, p_SQ.astype(v_SH.dtype), COLUMNS_BY_COLUMNS)
    self.values[...] = self.values[...] * before_1Q + out_HQ
    self.weights[...] = self.weights[...] * before_1Q + p_SQ.sum(0, keepdims=True)
    self.most[...] = most_1Q

  def mean(self) -> Float[Array, 'H Q']:
    """Computes the weighted mean of the values; each query has seen a key."""
    return self.values[...] / self.weights[...]
