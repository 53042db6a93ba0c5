"""The vocabulary head: log-probs of tokens without the logits of all tokens at once.

Letters: M tokens, D embed, V vocabulary, C tokens of one block.
"""

import functools
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from agent_r1_jax.models import sharding

# Logits per block: about 512 MiB on an accelerator, so that reading the kernel costs
# little.
BLOCK_LOGITS = 2**27


def block_tokens(vocab_size: int) -> int:
  """Returns the tokens per block on the current platform, a power of 2.

  A power of 2 fits a kernel's tiles and divides the tokens of a row.
  """
  if sharding.platform() == 'cpu':
    return 256
  return max(256, 1 << round(math.log2(BLOCK_LOGITS / vocab_size)))


@jax.named_scope('head')
def logprobs(
  x: Float[Array, '*M D'],
  kernel_DV: Float[Array, 'D V'],
  tokens: Int[Array, '*M'],
  wanted: Bool[Array, '*M'],
  temperature: float,
  block: int,
  cap: float | None = None,
) -> tuple[Float[Array, '*M'], Float[Array, '*M']]:
  """log π(token) and the entropy of π = softmax(logits / temperature), both float32.

  The logits are z = x · kernel, or with a cap c (Gemma 2) c · tanh(z / c).

  Logits are computed in blocks, discarded, and recomputed in the backward pass. Only the
  blocks that the wanted tokens fill are computed.

  Args:
    x: Hidden states before each token; [B, T, D] if a mesh is set.
    kernel_DV: The head's kernel, in x's dtype.
    tokens: The tokens whose log-probs are computed.
    wanted: Where False, both results and their gradients are 0.
    temperature: The temperature at which the tokens were sampled.
    block: Number of tokens in a block (C).
    cap: The cap of the logits, or None.
  """

  def flat(x, kernel_DV, tokens, wanted):
    x_MD = x.reshape(-1, x.shape[-1])
    args = (x_MD, kernel_DV, tokens.reshape(-1), wanted.reshape(-1), temperature)
    out: Any = _logprobs(*args, min(block, x_MD.shape[0]), cap)
    return tuple(y_M.reshape(tokens.shape) for y_M in out)

  def shard(x, kernel_DV, tokens, wanted):
    # The kernel is gathered once; the transpose reduce-scatters its gradient.
    kernel_DV = jax.lax.all_gather(kernel_DV, sharding.PARAM_AXES, axis=0, tiled=True)
    return flat(x, kernel_DV, tokens, wanted)

  mesh = sharding.active_mesh()
  if mesh is None or mesh.size == mesh.shape['tensor']:
    return flat(x, kernel_DV, tokens, wanted)
  # Each chip sorts its own tokens; a global sort would gather all tokens on every chip.
  split = PartitionSpec(sharding.PARAM_AXES)
  return jax.shard_map(
    shard,
    in_specs=(sharding.TOKEN_SPEC, split, sharding.TOKEN_SPEC, sharding.TOKEN_SPEC),
    out_specs=(sharding.TOKEN_SPEC, sharding.TOKEN_SPEC),
    axis_names={*sharding.ROW_AXES, 'context'},
    check_vma=False,
  )(x, kernel_DV, tokens, wanted)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _logprobs(x_MD, kernel_DV, tokens_M, wanted_M, temperature, block, cap):
  return _forward(x_MD, kernel_DV, tokens_M, wanted_M, temperature, block, cap)[0]


def _forward(x_MD, kernel_DV, tokens_M, wanted_M, temperature, block, cap):
  order, blocks = _order(wanted_M, block)

  def body(i, out):
    at_C = jax.lax.dynamic_slice_in_dim(order, i * block, block)
    logits_CV, _ = _logits(x_MD, kernel_DV, at_C, temperature, cap)
    lse_C = jax.nn.logsumexp(logits_CV, axis=-1)
    logp_CV = logits_CV - lse_C[:, None]
    chosen_C = jnp.take_along_axis(logp_CV, tokens_M[at_C][:, None], axis=1)[:, 0]
    new = (chosen_C, -jnp.sum(jnp.exp(logp_CV) * logp_CV, axis=-1), lse_C)
    return tuple(o.at[at_C].set(n, mode='drop') for o, n in zip(out, new, strict=True))

  zeros = jnp.zeros(x_MD.shape[0], jnp.float32)
  logprobs_M, entropy_M, lse_M = jax.lax.fori_loop(0, blocks, body, (zeros,) * 3)
  out = (jnp.where(wanted_M, logprobs_M, 0.0), jnp.where(wanted_M, entropy_M, 0.0))
  return out, (x_MD, kernel_DV, tokens_M, wanted_M, entropy_M, lse_M)


def _backward(temperature, block, cap, saved, cotangents):
  x_MD, kernel_DV, tokens_M, wanted_M, entropy_M, lse_M = saved
  dlogprob_M, dentropy_M = (jnp.where(wanted_M, d, 0.0) for d in cotangents)
  order, blocks = _order(wanted_M, block)

  def body(i, carry):
    dx_MD, dkernel_DV = carry
    at_C = jax.lax.dynamic_slice_in_dim(order, i * block, block)
    # Padding has index M, which plain indexing would clip to the last token. If the
    # logsumexp there is below -88, exp(0 - logsumexp) is infinite, and 0 · inf is NaN.
    of_C1 = lambda y_M: y_M.at[at_C].get(mode='fill', fill_value=0)[:, None]
    logits_CV, slope_CV = _logits(x_MD, kernel_DV, at_C, temperature, cap)
    logp_CV = logits_CV - of_C1(lse_M)
    # With respect to the logits, d log π(t) = 1[t] - π and dH = -π (log π + H).
    dlogprob_C1, dentropy_C1 = of_C1(dlogprob_M), of_C1(dentropy_M)
    both_CV = dlogprob_C1 + dentropy_C1 * (logp_CV + of_C1(entropy_M))
    chosen_CV = tokens_M[at_C][:, None] == jnp.arange(kernel_DV.shape[1])[None]
    dlogits_CV = jnp.where(chosen_CV, dlogprob_C1, 0.0) - jnp.exp(logp_CV) * both_CV
    dlogits_CV = (dlogits_CV * slope_CV / temperature).astype(x_MD.dtype)
    dx_CD = jnp.matmul(dlogits_CV, kernel_DV.T)
    x_CD = x_MD.at[at_C].get(mode='fill', fill_value=0)
    part_DV = jnp.matmul(x_CD.T, dlogits_CV, preferred_element_type=jnp.float32)
    return dx_MD.at[at_C].set(dx_CD, mode='drop'), dkernel_DV + part_DV

  start = (jnp.zeros_like(x_MD), jnp.zeros(kernel_DV.shape, jnp.float32))
  dx_MD, dkernel_DV = jax.lax.fori_loop(0, blocks, body, start)
  return dx_MD, dkernel_DV.astype(kernel_DV.dtype), None, None


_logprobs.defvjp(_forward, _backward)


def _order(wanted_M: Array, block: int) -> tuple[Array, Array]:
  """Returns the wanted tokens' indices, padded with M, and how many blocks they fill.

  With wanted = 0 1 0 1 1 and blocks of 2: 1 3 4 5 5 5, and 2 blocks. Writes at index M
  are dropped.
  """
  M = wanted_M.shape[0]
  order = jnp.argsort(~wanted_M, stable=True).astype(jnp.int32)
  count = wanted_M.sum()
  order = jnp.where(jnp.arange(M) < count, order, M)
  return jnp.pad(order, (0, -M % block), constant_values=M), -(-count // block)


def _logits(x_MD, kernel_DV, at_C, temperature, cap):
  """Returns a block's logits divided by the temperature, and the cap's slope (or 1)."""
  x_CD = x_MD.at[at_C].get(mode='fill', fill_value=0)
  logits_CV = jnp.matmul(x_CD, kernel_DV, preferred_element_type=jnp.float32)
  if cap is None:
    return logits_CV / temperature, 1.0
  tanh_CV = jnp.tanh(logits_CV / cap)
  return cap * tanh_CV / temperature, 1.0 - jnp.square(tanh_CV)
