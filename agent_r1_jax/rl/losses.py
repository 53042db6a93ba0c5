"""The loss of each token, and its weight.

Surrogates, on the device: a surrogate takes the learner's TokenStats and the batch, and
returns the loss and the metrics of each token. `weighted` sums either with the batch's
weights. The weights contain the aggregation with global denominators, so that the sum
over micro-batches and devices is the loss of the batch, however it is split or packed.

Aggregations, on the host: an aggregation takes the token counts of a mini-batch's
trajectories, int [N], and returns the weight of each token of each trajectory, float64
[N].

Corrections, on the host: importance weights for tokens that were not sampled from the
policy to update, because trajectories are stale, or were sampled by code other than the
learner's, or with guides or truncation. A correction takes the table of all action tokens
(rl/table.py) and returns a weight for each token, float64, from r = π_old/π_behaviour.
π_old is the policy before the update; the columns `old_logprobs` and `behaviour_logprobs`
are log π_old and log π_behaviour. The weights multiply the policy loss and take no
gradient. A token of weight 0 still counts in the loss's denominators. That is AReaL's
convention; verl also removes rejected tokens from the denominators.

Letters: B packed rows, T tokens per row; n tokens of a table. A is the advantage, ρ =
π/π_old, sg stops the gradient; ε_l and ε_h are the options clip_low and clip_high.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.rl.table import TokenTable

# Log-ratios beyond this are clipped before exp, as in verl.
_MAX_LOG_RATIO = 20.0


class TokenStats(NamedTuple):
  """The results of the learner's forward pass; position t describes token t."""

  logprobs: Float[Array, 'B T']  # log π of the token, given the tokens before it.
  # The entropy in nats of the policy's distribution for the token.
  entropy: Float[Array, 'B T']
  # The critic's value of the state before it, if there is a critic.
  values: Float[Array, 'B T'] | None = None


TokenMetrics = dict[str, Float[Array, 'B T']]
Surrogate = Callable[[TokenStats, types.Batch], tuple[Float[Array, 'B T'], TokenMetrics]]
# (values, Batch) -> the critic's loss of each token.
ValueLoss = Callable[[Float[Array, 'B T'], types.Batch], Float[Array, 'B T']]
# Token counts [N] -> the weight of each token of each trajectory [N].
Aggregate = Callable[[np.ndarray], np.ndarray]
# The table of all action tokens -> the importance weight of each token.
Correction = Callable[[TokenTable], Float[np.ndarray, 'n']]


@dataclasses.dataclass(frozen=True, eq=False)
class AnnotatedLoss:
  """A callable surrogate with properties that algorithms read.

  A plain function is a surrogate too, with all properties False.
  """

  surrogate: Surrogate  # The function.
  # Averages over the tokens of each sequence before averaging over sequences, as its
  # authors do, unless the algorithm names another aggregation.
  sequence_mean: bool = False
  # Its gradient is the policy gradient only at the sampling policy, so that a rollout
  # allows only one optimizer step.
  exactly_on_policy: bool = False
  # Its value and gradient are 0 at tokens with advantage 0, so that trajectories whose
  # advantages are all 0 may be left out of the batch.
  zero_without_advantage: bool = False

  def __call__(
    self, stats: TokenStats, batch: types.Batch
  ) -> tuple[Float[Array, 'B T'], TokenMetrics]:
    """Returns the loss and the metrics of each token."""
    return self.surrogate(stats, batch)


def weighted(x: Float[Array, 'B T'], weights: Float[Array, 'B T']) -> Float[Array, '']:
  """Σ w x over the tokens with w ≠ 0; NaNs at other tokens have no effect."""
  return jnp.sum(jnp.where(weights != 0, x, 0.0) * weights)


def log_ratio(
  logprobs: Float[Array, 'B T'], old_logprobs: Float[Array, 'B T']
) -> Float[Array, 'B T']:
  """log π/π_old clipped to ±20."""
  return jnp.clip(logprobs - old_logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def ppo_clip(
  *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 3.0
) -> Surrogate:
  """max(-A ρ, -A clip(ρ, 1-ε_l, 1+ε_h)), for A < 0 at most -A c.

  Schulman et al. 2017 (arXiv 1707.06347); ε_h > ε_l is DAPO's clip-higher (arXiv
  2503.14476); c is `dual_clip` (Ye et al. 2020, arXiv 1912.09729), as in verl. TRL and
  Search-R1 have no dual clip.
  """
  _check_positive(clip_low=clip_low, clip_high=clip_high)
  if dual_clip is not None and not dual_clip > 1:
    raise ValueError(f'dual_clip is {dual_clip}; it must be above 1, or None.')

  def surrogate(stats: TokenStats, batch: types.Batch):
    log, A = log_ratio(stats.logprobs, batch.old_logprobs), batch.advantages
    loss, clipped = _clipped(jnp.exp(log), A, clip_low, clip_high)
    if dual_clip is not None:
      loss = jnp.where(A < 0, jnp.minimum(loss, -A * dual_clip), loss)
    return loss, _token_metrics(log, clipped)

  return AnnotatedLoss(surrogate, zero_without_advantage=True)


def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Surrogate:
  """max(-A s, -A clip(s)): PPO's clip of the sequence's ratio s = exp(mean log ρ).

  Zheng et al. 2025 (arXiv 2507.18071). Each token's s is sg(s) π/sg(π), with the value of
  s and the gradient of the token's own log π (the paper's GSPO-token, as in verl). A
  sequence is a segment: the mean is over its tokens with a nonzero weight. TRL uses the
  gradient of s itself, which is the same if A is constant over a sequence. As in the
  paper and verl, it averages over each sequence first (AnnotatedLoss.sequence_mean); the
  bounds are the paper's.
  """
  _check_positive(clip_low=clip_low, clip_high=clip_high)

  def surrogate(stats: TokenStats, batch: types.Batch):
    log = stats.logprobs - batch.old_logprobs
    mean = _segment_mean(log, batch.segment_ids, batch.weights != 0)
    own = stats.logprobs - jax.lax.stop_gradient(stats.logprobs)
    # Bounded by e¹⁰, as in verl, so that the ratio of a long segment cannot overflow.
    ratio = jnp.exp(jnp.minimum(own + jax.lax.stop_gradient(mean), 10.0))
    loss, clipped = _clipped(ratio, batch.advantages, clip_low, clip_high)
    return loss, _token_metrics(log_ratio(stats.logprobs, batch.old_logprobs), clipped)

  return AnnotatedLoss(surrogate, sequence_mean=True, zero_without_advantage=True)


def cispo(*, clip_low: float = 0.2, clip_high: float = 0.2) -> Surrogate:
  """-sg(clip(ρ, 1-ε_l, 1+ε_h)) A log π: clipped tokens keep a gradient.

  MiniMax 2025 (arXiv 2506.13585). The bounds are relative to 1, as there and in verl. TRL
  has no lower bound and measures from 0: its ε_max = 5 is clip_low = 1, clip_high = 4
  here.
  """
  _check_positive(clip_low=clip_low, clip_high=clip_high)
  return _weighted_likelihood(lambda ratio: jnp.clip(ratio, 1 - clip_low, 1 + clip_high))


def sapo(*, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Surrogate:
  """-A σ(τ (ρ - 1)) 4/τ: a soft gate in place of the clip, as steep as ρ at ρ = 1.

  Soft adaptive policy optimization (arXiv 2511.20347). τ is tau_positive where A > 0 and
  tau_negative elsewhere; with a greater τ, tokens fade out sooner. As in verl and TRL, it
  averages over each sequence first (AnnotatedLoss.sequence_mean).
  """
  _check_positive(tau_positive=tau_positive, tau_negative=tau_negative)

  def surrogate(stats: TokenStats, batch: types.Batch):
    log, A = log_ratio(stats.logprobs, batch.old_logprobs), batch.advantages
    tau = jnp.where(A > 0, tau_positive, tau_negative)
    gate = jax.nn.sigmoid(tau * (jnp.exp(log) - 1.0)) * 4.0 / tau
    return -A * gate, _token_metrics(log)

  return AnnotatedLoss(surrogate, sequence_mean=True, zero_without_advantage=True)


def reinforce() -> Surrogate:
  """-A log π: has no ratio, so it is exact only on-policy. Williams 1992."""
  return AnnotatedLoss(_likelihood, exactly_on_policy=True, zero_without_advantage=True)


def likelihood() -> Surrogate:
  """-A log π, where A ≥ 0 is the weight of a token to imitate.

  The formula is `reinforce`'s. Here A weighs data from any source, so that any number of
  optimizer steps may fit them.
  """
  return AnnotatedLoss(_likelihood, zero_without_advantage=True)


def dppo_tv(*, low: float = 0.15, high: float = 0.15, cap: float = 20.0) -> Surrogate:
  """-A sg(min(ρ, c)) log π where p - p_old ≤ δ_h (A > 0) or p_old - p ≤ δ_l; else 0.

  Divergence PPO (arXiv 2602.04879): the trust region bounds not the ratio, but the total
  variation between the binary distributions "this token or another". A token beyond it in
  the direction that A pushes has no loss. The defaults are TRL's; verl uses those of its
  PPO clip. δ_l, δ_h and c are the options low, high and cap.
  """
  _check_positive(low=low, high=high, cap=cap)

  def inside(logprobs, old, positive):
    change = jnp.exp(logprobs) - jnp.exp(old)
    return jnp.where(positive, change <= high, change >= -low)

  return _weighted_likelihood(lambda ratio: jnp.minimum(ratio, cap), inside)


def value_clip(*, clip: float | None = 0.5) -> ValueLoss:
  """½ max((V - R)², (clip(V, V_old ± c) - R)²), PPO's value loss.

  c is the option `clip`, 0.5 in verl, 0.2 in SkyRL; None gives ½ (V - R)².
  """
  if clip is not None:
    _check_positive(clip=clip)

  def loss(values, batch):
    error = jnp.square(values - batch.returns)
    if clip is not None:
      near = batch.values + jnp.clip(values - batch.values, -clip, clip)
      error = jnp.maximum(error, jnp.square(near - batch.returns))
    return 0.5 * error

  return loss


def token_mean(counts: np.ndarray) -> np.ndarray:
  """Weighs all tokens of the batch equally, 1 / Σ counts (DAPO, verl's default)."""
  return np.full(len(counts), 1.0 / max(counts.sum(), 1))


def seq_mean_token_mean(counts: np.ndarray) -> np.ndarray:
  """Weighs all trajectories equally, and the tokens within each (GRPO's paper).

  As in verl, trajectories without action tokens are not counted.
  """
  return 1.0 / (max((counts > 0).sum(), 1) * np.maximum(counts, 1))


def seq_mean_token_sum(counts: np.ndarray) -> np.ndarray:
  """Sums over tokens and averages over trajectories: 1 / #{counts > 0}."""
  return np.full(len(counts), 1.0 / max((counts > 0).sum(), 1))


def seq_mean_token_sum_norm(length: float) -> Aggregate:
  """Dr.GRPO's norm (arXiv 2503.20783): divides a trajectory's sum by a constant.

  The constant `length` may be the maximum number of action tokens per trajectory.
  """
  if not length > 0:
    raise ValueError(f'length is {length}; it must be above 0.')
  return lambda counts: seq_mean_token_sum(counts) / length


def token_truncated(*, cap: float = 2.0) -> Correction:
  """w = min(r, cap): truncated importance sampling of each token (verl)."""
  if not cap > 0:
    raise ValueError(f'cap is {cap}; it must be above 0.')
  return lambda table: np.minimum(_ratio(table), cap)


def measure_correction(table: TokenTable) -> dict[str, float]:
  """Measures how far π_old and π_behaviour are apart on the tokens of a batch.

  Returns:
    An empty dict without tokens, else:
    kl: The mean of -log r, which estimates KL(π_behaviour ‖ π_old).
    ratio_mean: The mean of r; its expectation is 1 over the behaviour policy's tokens.
    ratio_max: The greatest r.
    ratio_outside: The share of tokens with r outside [1/2, 2].
    effective_sample: (Σ r)² / (n Σ r²), the effective sample size as a share of n.
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


def _clipped(ratio, advantages, low: float, high: float) -> tuple[Array, Array]:
  """max(-A r, -A clip(r, 1-ε_l, 1+ε_h)), and where the clip is active."""
  plain = -advantages * ratio
  clipped = -advantages * jnp.clip(ratio, 1 - low, 1 + high)
  return jnp.maximum(plain, clipped), clipped > plain


def _likelihood(stats: TokenStats, batch: types.Batch):
  return -batch.advantages * stats.logprobs, {}


def _weighted_likelihood(bound: Callable, inside: Callable | None = None) -> Surrogate:
  """-sg(bound(ρ)) A log π where inside(log π, log π_old, A > 0), else 0.

  The metric 'clip_fraction' marks the tokens that are not inside or, without `inside`,
  those whose ratio `bound` changes.
  """

  def surrogate(stats: TokenStats, batch: types.Batch):
    log = log_ratio(stats.logprobs, batch.old_logprobs)
    ratio = jnp.exp(log)
    weight = bound(ratio)
    clipped = weight != ratio
    if inside is not None:
      clipped = ~inside(stats.logprobs, batch.old_logprobs, batch.advantages > 0)
      weight = jnp.where(clipped, 0.0, weight)
    loss = -jax.lax.stop_gradient(weight) * batch.advantages * stats.logprobs
    return loss, _token_metrics(log, clipped)

  return AnnotatedLoss(surrogate, zero_without_advantage=True)


def segment_sum(
  x: Float[Array, 'B T'], segment_ids: Int[Array, 'B T']
) -> Float[Array, 'B T']:
  """Sums x over the segment of each token."""
  # The segments of a packed row are 1, 2, ..., at most one for each token; 0 is padding.
  add = lambda y, i: jax.ops.segment_sum(y, i, x.shape[1] + 1)[i]
  return jax.vmap(add)(x, segment_ids)


def _segment_mean(
  x: Float[Array, 'B T'], segment_ids: Int[Array, 'B T'], counted: Bool[Array, 'B T']
) -> Float[Array, 'B T']:
  """Averages x over the counted tokens of each token's segment; 0 if there are none."""
  total = segment_sum(jnp.where(counted, x, 0.0), segment_ids)
  count = segment_sum(counted.astype(x.dtype), segment_ids)
  return total / jnp.maximum(count, 1.0)


def _token_metrics(log: Array, clipped: Array | None = None) -> TokenMetrics:
  """Returns -log ρ, whose mean estimates KL(π_old ‖ π), and which tokens are clipped."""
  metrics = {'behaviour_kl': -log}
  if clipped is not None:
    metrics['clip_fraction'] = clipped.astype(log.dtype)
  return metrics


def _check_positive(**options: float) -> None:
  for name, value in options.items():
    if not value > 0:
      raise ValueError(f'{name} is {value}; it must be above 0.')
