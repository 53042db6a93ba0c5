"""Per-token losses and KL estimators on the device.

Each returns one number a token; `weighted` sums them with the batch's weights. The
weights carry the aggregation with global denominators, so that the sum over micro-batches
and devices is the whole batch's loss however it was split or packed.

Letters: B rows, T tokens.
"""

from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float
import numpy as np

# Log-ratios beyond this are clipped before exp, as in verl.
_MAX_LOG_RATIO = 20.0


class TokenStats(NamedTuple):
  """What the learner's forward pass says of each token; position t describes token t.

  Attributes:
    logprobs: Of the token under the policy, given what precedes it.
    entropy: Of the distribution it was drawn from.
    values: The critic's value of the state before it, where there is one.
  """

  logprobs: Float[Array, 'B T']
  entropy: Float[Array, 'B T']
  values: Float[Array, 'B T'] | None = None


def weighted(x: Float[Array, 'B T'], weights: Float[Array, 'B T']) -> Float[Array, '']:
  """Σ w x over the tokens with w ≠ 0; elsewhere nothing is read, not even a NaN."""
  return jnp.sum(jnp.where(weights != 0, x, 0.0) * weights)


def log_ratio(
  logprobs: Float[Array, 'B T'], old_logprobs: Float[Array, 'B T']
) -> Float[Array, 'B T']:
  """log π/π_old clipped to ±20."""
  return jnp.clip(logprobs - old_logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def ppo_clip(
  log_ratio: Float[Array, 'B T'],
  advantages: Float[Array, 'B T'],
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = 3.0,
) -> tuple[Float[Array, 'B T'], Bool[Array, 'B T']]:
  """max(-A ρ, -A clip(ρ, 1-ε_l, 1+ε_h)), for A < 0 at most -A c.

  Schulman et al. 2017 (arXiv 1707.06347); ε_h > ε_l is DAPO's clip-higher (arXiv
  2503.14476); c is the dual clip of Ye et al. 2020 (arXiv 1912.09729), as in verl.

  Args:
    log_ratio: log π/π_old.
    advantages: Constants.
    clip_low: ε_l.
    clip_high: ε_h.
    dual_clip: c > 1, or None.

  Returns:
    The loss of each token, and where the clip is active.
  """
  ratio = jnp.exp(log_ratio)
  plain = -advantages * ratio
  clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  loss = jnp.maximum(plain, clipped)
  if dual_clip is not None:
    loss = jnp.where(advantages < 0, jnp.minimum(loss, -advantages * dual_clip), loss)
  return loss, clipped > plain


def k1(
  logprobs: Float[Array | np.ndarray, '*n'], ref_logprobs: Float[Array | np.ndarray, '*n']
) -> Float[Array | np.ndarray, '*n']:
  """log π - log π_ref: unbiased KL(π ‖ π_ref), Schulman's k1; on host and device."""
  return logprobs - ref_logprobs


def k3(
  logprobs: Float[Array, 'B T'], ref_logprobs: Float[Array, 'B T']
) -> Float[Array, 'B T']:
  """r - 1 - log r with r = π_ref/π: unbiased and never negative, Schulman's k3.

  Clipped as in verl: log r to ±20, the result to ±10 (its gradient is 0 beyond).
  """
  x = log_ratio(ref_logprobs, logprobs)
  return jnp.clip(jnp.exp(x) - x - 1, -10.0, 10.0)


def value_clip(
  values: Float[Array, 'B T'],
  old_values: Float[Array, 'B T'],
  returns: Float[Array, 'B T'],
  *,
  clip: float = 0.5,
) -> Float[Array, 'B T']:
  """½ max((V - R)², (clip(V, V_old ± c) - R)²), PPO's value loss (verl: c = 0.5)."""
  near = old_values + jnp.clip(values - old_values, -clip, clip)
  return 0.5 * jnp.maximum(jnp.square(values - returns), jnp.square(near - returns))


def entropy(logits: Float[Array, '*B V']) -> Float[Array, '*B']:
  """-Σ π log π = logsumexp(z) - Σ softmax(z) z."""
  return jax.nn.logsumexp(logits, -1) - jnp.sum(jax.nn.softmax(logits) * logits, -1)
