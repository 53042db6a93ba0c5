"""From logits to a token and its behaviour log-probability.

Letters: B rows, V vocabulary.
"""

from collections.abc import Callable
import dataclasses

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, UInt32

# Widths of the blocks that inverse-CDF sampling sums first; any value gives the same law.
_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are chosen.

  Attributes:
    temperature: 0 is greedy.
    top_k: Keep the k likeliest tokens; 0 keeps all.
    top_p: Keep the smallest set of likeliest tokens with at least this mass; 1 keeps all.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0

  def __post_init__(self):
    if self.temperature < 0:
      raise ValueError(f'temperature is {self.temperature}; it must be at least 0.')
    if self.top_k < 0:
      raise ValueError(f'top_k is {self.top_k}; it must be at least 0 (0 keeps all).')
    if not 0 < self.top_p <= 1:
      raise ValueError(f'top_p is {self.top_p}; it must be in (0, 1] (1 keeps all).')

  @property
  def on_policy(self) -> bool:
    """True if the tokens follow the distribution whose log-probs are reported.

    A grammar (engine/grammar.py) ends that, whatever the sampling.
    """
    return self.temperature > 0 and self.top_k == 0 and self.top_p == 1


ON_POLICY = Sampling()


def uniforms(keys: UInt32[Array, 'B 2'], positions: Int[Array, 'B']) -> Float[Array, 'B']:
  """One number in [0, 1) a row, from the row's key and the token's position alone."""

  def one(key, position):
    return jax.random.uniform(jax.random.fold_in(key, position))

  return jax.vmap(one)(jax.random.wrap_key_data(keys, impl='threefry2x32'), positions)


def sample(
  logits: Float[Array, 'B V'],
  u: Float[Array, 'B'],
  sampling: Sampling,
  allowed: Callable[[], Bool[Array, 'B V']] | None = None,
) -> tuple[Int[Array, 'B'], Float[Array, 'B']]:
  """Chooses a token a row.

  The log-prob is of the temperature-scaled full softmax, also where a grammar, top-k or
  top-p cut the choice: it is the number the learner computes. Greedy choices report
  temperature 1.

  Args:
    logits: float32.
    u: From `uniforms`.
    sampling: How to choose.
    allowed: Gives what may be chosen, at least one token a row; None allows all. A
      function, for what is used twice is made twice more cheaply than kept.

  Returns:
    Tokens and their log-probs.
  """
  greedy = sampling.temperature == 0
  logprobs_BV = jax.nn.log_softmax(logits / (1.0 if greedy else sampling.temperature))
  if greedy:
    tokens_B = _likeliest(logits, allowed)
  else:
    p_BV = jnp.exp(logprobs_BV)
    if allowed is not None:
      p_BV = jnp.where(allowed(), p_BV, 0.0)
    tokens_B, mass_B = _inverse_cdf(_truncate(p_BV, sampling), u)
    if allowed is not None:
      # float32 may leave all that is allowed no mass: the likeliest of it then stands in.
      tokens_B = jax.lax.cond(
        (mass_B == 0).any(),
        lambda: jnp.where(mass_B == 0, _likeliest(logits, allowed), tokens_B),
        lambda: tokens_B,
      )
  chosen_B = jnp.take_along_axis(logprobs_BV, tokens_B[:, None], axis=1)[:, 0]
  return tokens_B.astype(jnp.int32), chosen_B


def _likeliest(logits_BV: Array, allowed: Callable[[], Array] | None) -> Array:
  if allowed is not None:
    logits_BV = jnp.where(allowed(), logits_BV, -jnp.inf)
  return jnp.argmax(logits_BV, axis=-1)


def _truncate(p_BV: Array, sampling: Sampling) -> Array:
  if sampling.top_k:
    kth_B1 = jax.lax.top_k(p_BV, min(sampling.top_k, p_BV.shape[1]))[0][:, -1:]
    p_BV = jnp.where(p_BV >= kth_B1, p_BV, 0.0)
  if sampling.top_p < 1:
    sorted_BV = -jnp.sort(-p_BV, axis=-1)
    # A token stays if the mass before it is still below top_p of what top-k left.
    before_BV = jnp.cumsum(sorted_BV, axis=-1) - sorted_BV
    limit_B1 = sampling.top_p * jnp.sum(p_BV, axis=-1, keepdims=True)
    least_B1 = jnp.min(
      jnp.where(before_BV < limit_B1, sorted_BV, jnp.inf), axis=-1, keepdims=True
    )
    p_BV = jnp.where(p_BV >= least_B1, p_BV, 0.0)
  return p_BV


def _inverse_cdf(p_BV: Array, u_B: Array) -> tuple[Array, Array]:
  """The first token whose cumulative mass exceeds u of the total, and its own mass.

  Two levels (blocks, then inside one block) read the vocabulary once and keep the sums
  short; one uniform a row costs V times less than Gumbel noise.
  """
  B, V = p_BV.shape
  p_BNW = jnp.pad(p_BV, ((0, 0), (0, -V % _BLOCK))).reshape(B, -1, _BLOCK)
  mass_BN = p_BNW.sum(-1)
  block_B, rest_B = _first_above(mass_BN, u_B * mass_BN.sum(-1))
  p_BW = jnp.take_along_axis(p_BNW, block_B[:, None, None], axis=1)[:, 0]
  inside_B, _ = _first_above(p_BW, rest_B)
  mass_B = jnp.take_along_axis(p_BW, inside_B[:, None], axis=1)[:, 0]
  return block_B * _BLOCK + inside_B, mass_B


def _first_above(mass_BN: Array, target_B: Array) -> tuple[Array, Array]:
  """First index whose cumulative mass exceeds the target, and what is left inside it."""
  cumulative_BN = jnp.cumsum(mass_BN, axis=-1)
  above_BN = cumulative_BN > target_B[:, None]
  # Rounding can leave nothing above the target; the likeliest index then stands in.
  index_B = jnp.where(above_BN.any(-1), jnp.argmax(above_BN, -1), jnp.argmax(mass_BN, -1))
  upto_BN = jnp.take_along_axis(cumulative_BN - mass_BN, index_B[:, None], axis=1)
  # Nor may it leave less than nothing: a first token without mass would then be chosen.
  return index_B, jnp.maximum(target_B - upto_BN[:, 0], 0.0)
