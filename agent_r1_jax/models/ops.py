"""The functions that compute a policy: PLAIN, or DecoderConfig.ops.

The sampler and the learner use the same functions, so that their log-probs agree.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax

from agent_r1_jax.models import decoder
from agent_r1_jax.models.decoder_config import DecoderConfig


class Ops(NamedTuple):
  """Functions of (params, config, ...) with the arguments of the decoder's functions.

  Attributes:
    hidden_and_loads: As decoder.hidden_and_loads.
    extend: As decoder.extend.
    logits: As decoder.logits.
    logprobs: As decoder.logprobs.
    log_softmax: As jax.nn.log_softmax, of [M, V].
    differentiate: (f, config) -> a function of parameters that computes
      f(params, config=config) and can be differentiated.
    check: (config, params, **options of an engine); raises ValueError if unsupported.
    rings: Whether the cache of a sliding layer may be a ring.
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


def choose(config: DecoderConfig) -> Ops:
  """Returns the functions that compute a policy of this shape."""
  return config.ops or PLAIN
