"""The log-probs of a request's prompt tokens, from the hidden states of the prefill.

Letters: as in programs.py.
"""

from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agent_r1_jax.engine import sampling as sampling_lib
from agent_r1_jax.models import decoder, head


class Targets(NamedTuple):
  """The tokens that a prefill scores."""

  tokens: Int[Array, 'M T']  # The token after each prefilled token.
  temperature: Float[Array, 'M']  # The temperature of each request; 0 is scored as 1.
  top: Bool[Array, 'M']  # Whether to report log-probs of the likeliest tokens.


class Scored(NamedTuple):
  """The scores of a prefill's targets."""

  logprobs: Float[Array, 'M T']  # Under the policy's temperature-scaled full softmax.
  top_tokens: Int[Array, 'M T n']  # The likeliest tokens, if requested.
  top_logprobs: Float[Array, 'M T n']  # Their log-probs.


def score(
  params: decoder.Params,
  config: decoder.DecoderConfig,
  x: Float[Array, 'M T D'],
  targets: Targets,
  top: int,
) -> Scored:
  """Scores the targets and the `top` likeliest tokens (n) from hidden states.

  Computes logits in blocks of tokens, like the learner's head.
  """
  M, T = targets.tokens.shape
  none = jnp.zeros(top, jnp.float32), jnp.zeros(top, jnp.int32)

  def score_one(x_D, target, temperature):
    logits_1V = decoder.logits(params, config, x_D[None])
    scaled_1V = sampling_lib.scale_logits(logits_1V, temperature[None])
    logprobs_V = jax.nn.log_softmax(scaled_1V[0])
    likeliest = lambda: tuple(jax.lax.top_k(logprobs_V, top))
    # top_k is slow, and skipped if no entry asks for it.
    return logprobs_V[target], *jax.lax.cond(targets.top.any(), likeliest, lambda: none)

  each = x.reshape(M * T, -1), targets.tokens.reshape(-1)
  each = *each, jnp.repeat(targets.temperature, T)
  block = min(head.block_tokens(config.vocab_size), M * T)
  scored = jax.lax.map(lambda token: score_one(*token), each, batch_size=block)
  logprobs, top_logprobs, top_tokens = (x.reshape(M, T, *x.shape[1:]) for x in scored)
  return Scored(logprobs, top_tokens, top_logprobs)
