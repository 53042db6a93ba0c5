"""Guides: what a request may do to the choice of its tokens, inside the jitted loop.

A guide is a pair of pure functions over the state that a row has of it: what it does to
the logits, and how a token advances its state. Stop strings, a grammar of tool calls, a
truncation of the distribution and a value function are of one kind. The guides of a row
compose: logits pass through one after the other, and a reply ends where one of them says
so. Each row's state goes through the loop as an argument, so that which rows use a guide,
and with which state, compiles nothing.

Someone's own guide:

  def soften(params, state, logits, hidden):
    return logits / (1 + state['used'])[:, None]

  def count(params, state, tokens):
    return {'used': state['used'] + 1}, jnp.zeros(tokens.shape, bool)

  SOFTEN = Guide(off={'used': np.int32(0)}, logits=soften, advance=count)
  engine = Engine(config, params, guides={SOFTEN: None})
  request = Request(tokens, guides={SOFTEN: {'used': np.int32(0)}})

Letters: M rows, V tokens of the vocabulary, D numbers of a hidden state, G guides.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

from agent_r1_jax.engine import sampling as sampling_lib

# A tree of arrays; in `Guide.off` of one row, in the functions of all rows [M, ...].
State = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Guide:
  """One kind of guide; the engine is told at its making of the kinds that it will meet.

  Attributes:
    off: The state of a row that does not use the guide, numpy scalars or arrays.
    logits: (params, state, logits [M, V], hidden [M, D]) -> logits [M, V]; the logits are
      scaled by the temperature, and hidden is the policy's last hidden state. Its result
      counts in the rows that use the guide. None leaves all logits as they are.
    advance: (params, state, tokens [M]) -> (state, ended [M]): what one more token makes
      of the state, and whether the reply ends with it. It must not end a row whose state
      is `off`. None keeps the state.
  """

  off: State
  logits: Callable[[Any, State, Array, Array], Array] | None = None
  advance: Callable[[Any, State, Array], tuple[State, Array]] | None = None


def guided(
  guides: Sequence[Guide],
  params: Sequence[Any],
  states: Sequence[State],
  used: Bool[Array, 'G M'],
  logits: Float[Array, 'M V'],
  hidden: Float[Array, 'M D'],
) -> Float[Array, 'M V']:
  """Passes scaled logits through the guides, each in the rows that use it."""
  for g, guide in enumerate(guides):
    if guide.logits is None:
      continue

    def apply(logits, g=g, change=guide.logits):
      changed = change(params[g], states[g], logits, hidden)
      return jnp.where(used[g][:, None], changed, logits)

    logits = jax.lax.cond(used[g].any(), apply, lambda x: x, logits)
  return logits


def advance(
  guides: Sequence[Guide],
  params: Sequence[Any],
  states: Sequence[State],
  tokens: Int[Array, 'M'],
) -> tuple[tuple[State, ...], Bool[Array, 'M']]:
  """Advances all states by one token a row; says which replies it ends."""
  ended, new = jnp.zeros(tokens.shape, bool), []
  for guide, its_params, state in zip(guides, params, states, strict=True):
    if guide.advance is not None:
      state, by_this = guide.advance(its_params, state, tokens)
      ended |= by_this
    new.append(state)
  return tuple(new), ended


def _truncate(params, state, logits_MV, hidden):
  """Applies top-k, top-p of what it leaves, then min-p; ties stay together."""
  p_MV = jax.nn.softmax(logits_MV)
  sorted_MV = -jnp.sort(-p_MV, axis=-1)
  ranks_V = jnp.arange(p_MV.shape[1])
  k_M = jnp.where(state['top_k'] > 0, state['top_k'], p_MV.shape[1])
  kept_MV = jnp.where(ranks_V[None] < k_M[:, None], sorted_MV, 0.0)
  # A token stays if the mass before it is still below top_p of what top-k left.
  before_MV = jnp.cumsum(kept_MV, axis=-1) - kept_MV
  limit_M = jnp.where(state['top_p'] < 1, state['top_p'] * kept_MV.sum(-1), jnp.inf)
  stays_MV = (kept_MV > 0) & (before_MV < limit_M[:, None])
  least_M = jnp.min(jnp.where(stays_MV, sorted_MV, jnp.inf), axis=-1)
  least_M = jnp.maximum(least_M, state['min_p'] * sorted_MV[:, 0])
  return jnp.where(p_MV >= least_M[:, None], logits_MV, -jnp.inf)


# What Sampling's top_k, top_p and min_p are: only the rows that use them pay for them.
TRUNCATION = Guide(
  off={'top_k': np.int32(0), 'top_p': np.float32(1), 'min_p': np.float32(0)},
  logits=_truncate,
)


def truncation(sampling: sampling_lib.Sampling) -> dict[str, np.generic]:
  """The state of TRUNCATION for one row."""
  return {
    'top_k': np.int32(sampling.top_k),
    'top_p': np.float32(sampling.top_p),
    'min_p': np.float32(sampling.min_p),
  }
