"""Corrections: importance weights where another policy sampled than the one to update.

Where trajectories are stale, or were sampled by other code than the learner's, or from a
distribution that guides or truncation had changed, let r = π_old/π_behaviour of each
action token, π_old being the policy before the update. A correction takes the table of
all action tokens (rl/table.py), whose columns `old_logprobs` and `behaviour_logprobs`
are log π_old and log π_behaviour, and returns a weight for each token, float64. The
weights multiply the policy loss and take no gradient.

A token of weight 0 still counts in the loss's denominators. That is AReaL's convention;
verl takes what it rejects out of the mask, and so out of the denominators too.
"""

from collections.abc import Callable

from jaxtyping import Float
import numpy as np

from agent_r1_jax.rl.table import TokenTable

Correction = Callable[[TokenTable], Float[np.ndarray, 'n']]
# Log-ratios beyond this are clipped before exp, as in verl.
_MAX_LOG_RATIO = 20.0


def token_truncated(*, cap: float = 2.0) -> Correction:
  """w = min(r, cap): truncated importance sampling of each token (verl)."""
  if not cap > 0:
    raise ValueError(f'cap is {cap}; it must be above 0.')
  return lambda table: np.minimum(_ratio(table), cap)


def statistics(table: TokenTable) -> dict[str, float]:
  """Measures how far the two policies are apart on the tokens of a batch.

  Returns:
    Nothing if there are no tokens, else:
    kl: The mean of -log r, which estimates KL(π_behaviour ‖ π_old).
    ratio_mean: The mean of r; 1 on average if the tokens are the behaviour policy's.
    ratio_max: The greatest r.
    ratio_outside: The share of the tokens whose r is outside [1/2, 2].
    effective_sample: (Σ r)² / (n Σ r²), the share of the tokens that r's variance leaves.
  """
  if not len(table):
    return {}
  ratio = _ratio(table)
  return {
    'kl': float((table.behaviour_logprobs - table.old_logprobs).mean()),
    'ratio_mean': float(ratio.mean()),
    'ratio_max': float(ratio.max()),
    'ratio_outside': float(np.mean((ratio < 0.5) | (ratio > 2.0))),
    'effective_sample': float(ratio.mean() ** 2 / np.mean(ratio**2)),
  }


def _ratio(table: TokenTable) -> Float[np.ndarray, 'n']:
  x = table.old_logprobs - table.behaviour_logprobs
  return np.exp(np.clip(x, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
