"""Samples tokens from logits: temperature, random numbers, inverse CDF or argmax.

Top-k, top-p and min-p are applied by a guide (guide.TRUNCATION).

Letters: M entries of a decode, V tokens of the vocabulary.
"""

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, UInt32

# The width of the blocks that inverse-CDF sampling sums first; it does not affect the
# distribution.
_BLOCK = 128


def make_uniforms(
  keys: UInt32[Array, 'M 2'], positions: Int[Array, 'M']
) -> Float[Array, 'M']:
  """Makes each entry's number in [0, 1) from only its key and the token's position."""

  def one(key, position):
    return jax.random.uniform(jax.random.fold_in(key, position))

  return jax.vmap(one)(jax.random.wrap_key_data(keys, impl='threefry2x32'), positions)


def scale_logits(
  logits: Float[Array, 'M V'], temperature: Float[Array, 'M']
) -> Float[Array, 'M V']:
  """Divides each entry's logits by its temperature, unless that is 0."""
  return logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]


@jax.named_scope('choose')
def choose_tokens(
  logprobs: Float[Array, 'M V'], u: Float[Array, 'M'], greedy: Bool[Array, 'M']
) -> Int[Array, 'M']:
  """Chooses a token for each entry: by argmax in greedy entries, else by inverse CDF.

  Log-probabilities are float32, with -inf for forbidden tokens; u comes from
  `make_uniforms`.
  """
  sampled = _inverse_cdf(jnp.exp(logprobs), u)
  # argmax is slow, and skipped if no entry is greedy.
  return jax.lax.cond(
    greedy.any(),
    lambda: jnp.where(greedy, jnp.argmax(logprobs, axis=-1), sampled).astype(jnp.int32),
    lambda: sampled.astype(jnp.int32),
  )


def _inverse_cdf(p_MV: Array, u_M: Array) -> Array:
  """Finds the first token whose cumulative mass exceeds u of the total.

  Two levels (blocks, then within a block) read the vocabulary once and keep the sums
  short; one uniform per entry costs V times less than Gumbel noise.
  """
  M, V = p_MV.shape
  p_MNW = jnp.pad(p_MV, ((0, 0), (0, -V % _BLOCK))).reshape(M, -1, _BLOCK)
  mass_MN = p_MNW.sum(-1)
  block_M, rest_M = _first_above(mass_MN, u_M * mass_MN.sum(-1))
  p_MW = jnp.take_along_axis(p_MNW, block_M[:, None, None], axis=1)[:, 0]
  inside_M, _ = _first_above(p_MW, rest_M)
  return block_M * _BLOCK + inside_M


def _first_above(mass_MN: Array, target_M: Array) -> tuple[Array, Array]:
  """Finds the first index whose cumulative mass exceeds the target.

  Returns:
    The index, and the target minus the mass before the index; both [M].
  """
  cumulative_MN = jnp.cumsum(mass_MN, axis=-1)
  above_MN = cumulative_MN > target_M[:, None]
  # Rounding may leave no index above the target; then take the likeliest.
  index_M = jnp.where(above_MN.any(-1), jnp.argmax(above_MN, -1), jnp.argmax(mass_MN, -1))
  before_MN = jnp.take_along_axis(cumulative_MN - mass_MN, index_M[:, None], axis=1)
  # A rest that rounding made negative would choose a first token without mass.
  return index_M, jnp.maximum(target_M - before_MN[:, 0], 0.0)
