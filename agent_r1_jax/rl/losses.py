"""Per-token losses on the device.

A surrogate takes what the learner says of the tokens and what the batch says of them, and
returns the loss of each token and numbers of each token to watch; the factories here make
surrogates. `weighted` sums either with the batch's weights. The weights carry the
aggregation with global denominators, so that the sum over micro-batches and devices is
the whole batch's loss however it was split or packed.

Letters: B rows, T tokens. A advantage, ρ = π/π_old, sg stops the gradient.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agent_r1_jax import types

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


Watched = dict[str, Float[Array, 'B T']]
Surrogate = Callable[[TokenStats, types.Batch], tuple[Float[Array, 'B T'], Watched]]
# (values, Batch) -> the critic's loss of each token.
ValueLoss = Callable[[Float[Array, 'B T'], types.Batch], Float[Array, 'B T']]


@dataclasses.dataclass(frozen=True, eq=False)
class AnnotatedLoss:
  """A surrogate with what an algorithm must know of it; it is called as the surrogate is.

  A plain function is a surrogate too, and both attributes are False of it.

  Attributes:
    surrogate: The function.
    sequence_mean: Its authors average over the tokens of each sequence before they
      average over sequences. An algorithm does so unless it names another aggregation.
    exactly_on_policy: Its gradient is the policy gradient only under the policy that
      sampled, so that a rollout is good for one optimizer step.
  """

  surrogate: Surrogate
  sequence_mean: bool = False
  exactly_on_policy: bool = False

  def __call__(
    self, stats: TokenStats, batch: types.Batch
  ) -> tuple[Float[Array, 'B T'], Watched]:
    """The surrogate's loss of each token, and its numbers to watch."""
    return self.surrogate(stats, batch)


def weighted(x: Float[Array, 'B T'], weights: Float[Array, 'B T']) -> Float[Array, '']:
  """Σ w x over the tokens with w ≠ 0; elsewhere nothing is read, not even a NaN."""
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
  2503.14476); c is the dual clip of Ye et al. 2020 (arXiv 1912.09729), as in verl. TRL
  and Search-R1 have no dual clip.

  Args:
    clip_low: ε_l.
    clip_high: ε_h.
    dual_clip: c > 1, or None.
  """
  _positive(clip_low=clip_low, clip_high=clip_high)
  if dual_clip is not None and not dual_clip > 1:
    raise ValueError(f'dual_clip is {dual_clip}; it must be above 1, or None.')

  def surrogate(stats: TokenStats, batch: types.Batch):
    log, A = log_ratio(stats.logprobs, batch.logprobs), batch.advantages
    loss, clipped = _clipped(jnp.exp(log), A, clip_low, clip_high)
    if dual_clip is not None:
      loss = jnp.where(A < 0, jnp.minimum(loss, -A * dual_clip), loss)
    return loss, _watched(log, clipped)

  return surrogate


def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Surrogate:
  """PPO's clip of the sequence's ratio s = exp(mean log ρ); max(-A s, -A clip(s)).

  Zheng et al. 2025 (arXiv 2507.18071). Each token's s is sg(s) π/sg(π), with the value of
  s and the gradient of its own log π (the paper's GSPO-token, as verl has it). A
  sequence is a segment: the mean is over its tokens that have a weight. TRL has the
  gradient of s itself, which is the same where A is equal over a sequence. The paper
  and verl average over each sequence first (AnnotatedLoss.sequence_mean).

  Args:
    clip_low: ε_l; the paper's, as clip_high.
    clip_high: ε_h.
  """
  _positive(clip_low=clip_low, clip_high=clip_high)

  def surrogate(stats: TokenStats, batch: types.Batch):
    log = stats.logprobs - batch.logprobs
    mean = _segment_mean(log, batch.segment_ids, batch.weights != 0)
    own = stats.logprobs - jax.lax.stop_gradient(stats.logprobs)
    ratio = jnp.exp(jnp.minimum(own + jax.lax.stop_gradient(mean), 10.0))
    loss, clipped = _clipped(ratio, batch.advantages, clip_low, clip_high)
    return loss, _watched(log_ratio(stats.logprobs, batch.logprobs), clipped)

  return AnnotatedLoss(surrogate, sequence_mean=True)


def cispo(*, clip_low: float = 0.2, clip_high: float = 0.2) -> Surrogate:
  """-sg(clip(ρ, 1-ε_l, 1+ε_h)) A log π: the weight is clipped, no token is lost.

  MiniMax 2025 (arXiv 2506.13585), in its and verl's convention: the bounds are measured
  from 1. TRL has no lower bound and measures from 0: its ε_max = 5 is clip_low = 1,
  clip_high = 4 here.

  Args:
    clip_low: ε_l.
    clip_high: ε_h.
  """
  _positive(clip_low=clip_low, clip_high=clip_high)
  return _weighted_likelihood(lambda ratio: jnp.clip(ratio, 1 - clip_low, 1 + clip_high))


def sapo(*, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Surrogate:
  """-A σ(τ (ρ - 1)) 4/τ: a soft gate in the clip's place, as steep as ρ at ρ = 1.

  Soft adaptive policy optimization (arXiv 2511.20347). As in verl and TRL, it averages
  over each sequence first (AnnotatedLoss.sequence_mean).

  Args:
    tau_positive: τ where A > 0.
    tau_negative: τ elsewhere; the greater, the sooner a token fades out.
  """
  _positive(tau_positive=tau_positive, tau_negative=tau_negative)

  def surrogate(stats: TokenStats, batch: types.Batch):
    log, A = log_ratio(stats.logprobs, batch.logprobs), batch.advantages
    tau = jnp.where(A > 0, tau_positive, tau_negative)
    gate = jax.nn.sigmoid(tau * (jnp.exp(log) - 1.0)) * 4.0 / tau
    return -A * gate, _watched(log)

  return AnnotatedLoss(surrogate, sequence_mean=True)


def reinforce() -> Surrogate:
  """-A log π: no ratio, so exact on-policy only. Williams 1992."""
  return AnnotatedLoss(likelihood(), exactly_on_policy=True)


def likelihood() -> Surrogate:
  """-A log π where A ≥ 0 is how much a token of given data counts: to be imitated.

  The formula is `reinforce`'s. What differs is what A is: here a weight of data, whoever
  made it, so that any number of optimizer steps may fit it.
  """
  return lambda stats, batch: (-batch.advantages * stats.logprobs, {})


def dppo_tv(*, low: float = 0.15, high: float = 0.15, cap: float = 20.0) -> Surrogate:
  """-A sg(min(ρ, c)) log π where p - p_old ≤ δ_h (A > 0) or p_old - p ≤ δ_l; else 0.

  Divergence PPO (arXiv 2602.04879): the trust region is of the total variation between
  the binary distributions "this token or another", not of the ratio; a token beyond it
  on the side that A pushes to is left out. The defaults are TRL's; verl's are its PPO
  clip's.

  Args:
    low: δ_l.
    high: δ_h.
    cap: c.
  """
  _positive(low=low, high=high, cap=cap)

  def kept(logprobs, old, positive):
    moved = jnp.exp(logprobs) - jnp.exp(old)
    return jnp.where(positive, moved <= high, moved >= -low)

  return _weighted_likelihood(lambda ratio: jnp.minimum(ratio, cap), kept)


def value_clip(*, clip: float | None = 0.5) -> ValueLoss:
  """½ max((V - R)², (clip(V, V_old ± c) - R)²), PPO's value loss.

  c is 0.5 in verl, 0.2 in SkyRL.

  Args:
    clip: c, or None for ½ (V - R)².
  """
  if clip is not None:
    _positive(clip=clip)

  def loss(values, batch):
    error = jnp.square(values - batch.returns)
    if clip is not None:
      near = batch.values + jnp.clip(values - batch.values, -clip, clip)
      error = jnp.maximum(error, jnp.square(near - batch.returns))
    return 0.5 * error

  return loss


def _clipped(ratio, advantages, low: float, high: float) -> tuple[Array, Array]:
  """max(-A r, -A clip(r, 1-ε_l, 1+ε_h)), and where the clip is active."""
  plain = -advantages * ratio
  clipped = -advantages * jnp.clip(ratio, 1 - low, 1 + high)
  return jnp.maximum(plain, clipped), clipped > plain


def _weighted_likelihood(bound: Callable, kept: Callable | None = None) -> Surrogate:
  """-sg(bound(ρ)) A log π, and 0 where (log π, log π_old, A > 0) is not kept.

  'clip_fraction' is of tokens that are not kept, or without `kept`, that are bounded.
  """

  def surrogate(stats: TokenStats, batch: types.Batch):
    log = log_ratio(stats.logprobs, batch.logprobs)
    ratio = jnp.exp(log)
    held = bound(ratio)
    out = held != ratio
    if kept is not None:
      out = ~kept(stats.logprobs, batch.logprobs, batch.advantages > 0)
      held = jnp.where(out, 0.0, held)
    loss = -jax.lax.stop_gradient(held) * batch.advantages * stats.logprobs
    return loss, _watched(log, out)

  return surrogate


def _segment_mean(
  x: Float[Array, 'B T'], segment_ids: Int[Array, 'B T'], counted: Bool[Array, 'B T']
) -> Float[Array, 'B T']:
  """At each token, the mean of x over the counted tokens of its segment; 0 of none."""
  # Segments of a row are 1, 2, ..., at most as many as it has tokens; 0 is padding.
  sums = jax.vmap(lambda y, i: jax.ops.segment_sum(y, i, x.shape[1] + 1)[i])
  total = sums(jnp.where(counted, x, 0.0), segment_ids)
  return total / jnp.maximum(sums(counted.astype(x.dtype), segment_ids), 1.0)


def _watched(log: Array, clipped: Array | None = None) -> Watched:
  """-log ρ, whose mean is the KL from the policy that sampled; where it is clipped."""
  watched = {'behaviour_kl': -log}
  if clipped is not None:
    watched['clip_fraction'] = clipped.astype(log.dtype)
  return watched


def _positive(**options: float) -> None:
  for name, value in options.items():
    if not value > 0:
      raise ValueError(f'{name} is {value}; it must be above 0.')
