"""The log-probs of a request's own tokens: a prefill that computes logits as well.

It is a program apart from `programs.prefill`, and compiled when a request first asks.
Letters: as in programs.py.
"""

import functools
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agent_r1_jax.engine import programs
from agent_r1_jax.engine import sampling as sampling_lib
from agent_r1_jax.models import decoder, head, lora


class Targets(NamedTuple):
  """What a prefill scores."""

  tokens: Int[Array, 'M T']  # The token after each that is prefilled.
  temperature: Float[Array, 'M']  # Of each request; 0 is scored as 1.
  top: Bool[Array, 'M']  # Whether log-probs of the likeliest tokens are wanted.


class Scored(NamedTuple):
  """The scores of a prefill's targets."""

  logprobs: Float[Array, 'M T']  # Under the policy's temperature-scaled full softmax.
  top_tokens: Int[Array, 'M T n']  # The likeliest tokens, where they were asked for.
  top_logprobs: Float[Array, 'M T n']  # Their log-probs.


@functools.partial(jax.jit, static_argnames=('config', 'bucket'), donate_argnames='cache')
def prefill(
  params: decoder.Params,
  cache: decoder.Cache,
  rows: Int[Array, 'M'],
  start: Int[Array, 'M'],
  tokens: Int[Array, 'M T'],
  count: Int[Array, 'M'],
  targets: Targets,
  adapters: lora.Adapters | None = None,
  pictures: decoder.Pictures | None = None,
  *,
  config: decoder.DecoderConfig,
  bucket: int,
) -> tuple[decoder.Cache, Scored]:
  """Writes tokens to rows as `programs.prefill` does, and scores the one after each.

  The logits are computed in blocks of tokens, as the learner's head does.
  """
  batch = rows, start, tokens, count
  x_MTD, cache = programs.extend_rows(
    params, cache, *batch, adapters, pictures, config, bucket
  )
  M, T = tokens.shape
  n = min(programs.TOP, config.vocab_size)
  none = jnp.zeros(n, jnp.float32), jnp.zeros(n, jnp.int32)

  def score(x_D, target, temperature):
    logits_1V = decoder.logits(params, config, x_D[None])
    scaled_1V = sampling_lib.scale_logits(logits_1V, temperature[None])
    logprobs_V = jax.nn.log_softmax(scaled_1V[0])
    likeliest = lambda: tuple(jax.lax.top_k(logprobs_V, n))
    # top_k takes time, and is skipped where no entry asks for it.
    return logprobs_V[target], *jax.lax.cond(targets.top.any(), likeliest, lambda: none)

  each = x_MTD.reshape(M * T, -1), targets.tokens.reshape(-1)
  each = *each, jnp.repeat(targets.temperature, T)
  block = min(head.block_tokens(config.vocab_size), M * T)
  scored = jax.lax.map(lambda token: score(*token), each, batch_size=block)
  logprobs, top_logprobs, top_tokens = (x.reshape(M, T, *x.shape[1:]) for x in scored)
  return cache, Scored(logprobs, top_tokens, top_logprobs)
