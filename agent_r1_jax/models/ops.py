"""How a policy is computed: PLAIN, or INVARIANT (batch_invariant.py).

The sampler and the learner compute by the same ones, so that their log-probs agree.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax

from agent_r1_jax.models import batch_invariant, decoder
from agent_r1_jax.models.decoder_config import DecoderConfig


class Ops(NamedTuple):
  """Functions of (params, config, ...) with the arguments of the decoder's.

  Attributes:
    hidden_and_loads: As decoder.hidden_and_loads.
    extend: As decoder.extend.
    logits: As decoder.logits.
    logprobs: As decoder.logprobs.
    log_softmax: As jax.nn.log_softmax, of [M, V].
    differentiate: (f, config) -> a function of parameters that computes
      f(params, config=config) and can be differentiated.
    check: Refuses what cannot be computed so; see batch_invariant.check.
    rings: Whether the cache of a layer that slides may be a ring.
  """

  hidden_and_loads: Callable[..., Any]
  extend: Callable[..., Any]
  logits: Callable[..., Any]
  logprobs: Callable[..., Any]
  log_softmax: Callable[..., Any]
  differentiate: Callable[..., Any]
  check: Callable[..., None]
  rings: bool


PLAIN = Ops(
  hidden_and_loads=decoder.hidden_and_loads,
  extend=decoder.extend,
  logits=decoder.logits,
  logprobs=decoder.logprobs,
  log_softmax=jax.nn.log_softmax,
  differentiate=lambda compute, config: functools.partial(compute, config=config),
  check=lambda config, params, **others: None,
  rings=True,
)
INVARIANT = Ops(
  hidden_and_loads=batch_invariant.hidden_and_loads,
  extend=batch_invariant.extend,
  logits=batch_invariant.logits,
  logprobs=batch_invariant.logprobs,
  log_softmax=batch_invariant.log_softmax,
  differentiate=batch_invariant.with_plain_gradient,
  check=batch_invariant.check,
  rings=False,  # Its blocks of keys begin at a text's first token.
)


def choose(config: DecoderConfig) -> Ops:
  """Returns the functions that compute a policy of this shape."""
  return INVARIANT if config.batch_invariant else PLAIN
