"""Guides: pure functions that change how a request's tokens are sampled, inside jit.

A guide keeps a state for each request and is a pair of pure functions: one changes the
logits, the other advances the state by a token. Stop strings, a grammar of tool calls,
top-k and top-p, and a value function are all guides. The guides of a request compose:
logits pass through one after the other, and any guide may end the reply. States are
arguments of the jitted loop, so that new requests and guide states recompile nothing.

A user-defined guide:

  def soften(params, state, logits, hidden):
    return logits / (1 + state['count'])[:, None]

  def count(params, state, tokens):
    return {'count': state['count'] + 1}, jnp.zeros(tokens.shape, bool)

  SOFTEN = Guide(off={'count': np.int32(0)}, logits=soften, advance=count)
  engine = Engine(config, params, guides={SOFTEN: None})
  request = Request(tokens, guides={SOFTEN: {'count': np.int32(0)}})

Letters: M entries of a decode, V vocabulary, D numbers of a hidden state, G guides.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

from agent_r1_jax import config as config_lib

# A pytree of arrays: of one request in Guide.off and Request.guides; of all entries,
# [M, ...], in the functions.
State = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Guide:
  """One guide; the engine's constructor takes all guides that requests may use.

  Attributes:
    off: The state of requests that do not use the guide, as numpy scalars or arrays. It
      fixes the shapes and dtypes of the state.
    logits: (params, state, logits [M, V], hidden [M, D]) -> logits [M, V]. The input is
      already scaled by the temperature; hidden is the policy's last hidden state. The
      result is used only in entries that use the guide. None: changes no logits.
    advance: (params, state, tokens [M]) -> (state, ended [M]): the state after one more
      token, and whether the reply ends with it. It must not end entries whose state is
      `off`. None: the state is constant and ends no reply.
  """

  off: State
  logits: Callable[[Any, State, Array, Array], Array] | None = None
  advance: Callable[[Any, State, Array], tuple[State, Array]] | None = None

  @property
  def needs_correction(self) -> bool:
    """Whether training on its tokens needs the algorithm's importance correction.

    With `logits`, tokens are not sampled from the trained policy's distribution;
    importance weights (rl/losses.py) correct for that. A guide that only ends replies
    needs no correction.
    """
    return self.logits is not None


@jax.named_scope('guides')
def apply(
  guides: Sequence[Guide],
  params: Sequence[Any],
  states: Sequence[State],
  used: Bool[Array, 'G M'],
  logits: Float[Array, 'M V'],
  hidden: Float[Array, 'M D'],
) -> Float[Array, 'M V']:
  """Passes scaled logits through the guides, each in the entries that use it.

  The order is AUTOMATA, TRUNCATION, then the engine's `guides` in order.
  """
  for g, guide in enumerate(guides):
    if guide.logits is None:
      continue

    def change_entries(logits, g=g, change=guide.logits):
      changed = change(params[g], states[g], logits, hidden)
      return jnp.where(used[g][:, None], changed, logits)

    # Skipped if no entry uses the guide.
    logits = jax.lax.cond(used[g].any(), change_entries, lambda x: x, logits)
  return logits


@jax.named_scope('guides')
def advance(
  guides: Sequence[Guide],
  params: Sequence[Any],
  states: Sequence[State],
  tokens: Int[Array, 'M'],
) -> tuple[tuple[State, ...], Bool[Array, 'M']]:
  """Advances all states by one token per entry.

  Returns:
    The new states, and whether any guide ends each entry's reply.
  """
  ended, new_states = jnp.zeros(tokens.shape, bool), []
  for guide, guide_params, state in zip(guides, params, states, strict=True):
    if guide.advance is not None:
      state, ended_here = guide.advance(guide_params, state, tokens)
      ended |= ended_here
    new_states.append(state)
  return tuple(new_states), ended


def _truncate(params, state, logits_MV, hidden):
  """Applies top-k, then top-p to the rest, then min-p; ties stay or go together."""
  p_MV = jax.nn.softmax(logits_MV)
  sorted_MV = -jnp.sort(-p_MV, axis=-1)
  ranks_V = jnp.arange(p_MV.shape[1])
  k_M = jnp.where(state['top_k'] > 0, state['top_k'], p_MV.shape[1])
  top_MV = jnp.where(ranks_V[None] < k_M[:, None], sorted_MV, 0.0)
  # A token stays if the mass before it is below top_p of the mass that top-k left.
  before_MV = jnp.cumsum(top_MV, axis=-1) - top_MV
  limit_M = jnp.where(state['top_p'] < 1, state['top_p'] * top_MV.sum(-1), jnp.inf)
  stays_MV = (top_MV > 0) & (before_MV < limit_M[:, None])
  least_M = jnp.min(jnp.where(stays_MV, sorted_MV, jnp.inf), axis=-1)
  least_M = jnp.maximum(least_M, state['min_p'] * sorted_MV[:, 0])
  return jnp.where(p_MV >= least_M[:, None], logits_MV, -jnp.inf)


# Sampling's top_k, top_p and min_p, as a guide: decodes that do not use it need not sort.
TRUNCATION = Guide(
  off={'top_k': np.int32(0), 'top_p': np.float32(1), 'min_p': np.float32(0)},
  logits=_truncate,
)


def truncation_state(sampling: config_lib.Sampling) -> dict[str, np.generic]:
  """Returns the state of TRUNCATION for one request."""
  off = TRUNCATION.off
  return {name: off[name].dtype.type(getattr(sampling, name)) for name in off}


# The maximum length in tokens of a reply that FORCED can force.
FORCED_TOKENS = 1024


def _force(params, state, logits_MV, hidden):
  position_M1 = jnp.minimum(state['position'], FORCED_TOKENS - 1)[:, None]
  token_M1 = jnp.take_along_axis(state['tokens'], position_M1, axis=1)
  return jnp.where(jnp.arange(logits_MV.shape[1])[None] == token_M1, logits_MV, -jnp.inf)


# Forces the reply to be the tokens in its state, to get their log-probs and values under
# the request's policy.
FORCED = Guide(
  off={'tokens': np.zeros(FORCED_TOKENS, np.int32), 'position': np.int32(0)},
  logits=_force,
  advance=lambda params, state, tokens: (
    state | {'position': state['position'] + 1},
    jnp.zeros(tokens.shape, bool),
  ),
)


def forced_state(tokens: np.ndarray) -> dict[str, np.generic | np.ndarray]:
  """Returns the state of FORCED that forces these tokens.

  Raises:
    ValueError: There are more than FORCED_TOKENS tokens.
  """
  if len(tokens) > FORCED_TOKENS:
    raise ValueError(
      f'a reply of {len(tokens)} tokens cannot be valued, only {FORCED_TOKENS}: lower '
      'limits.max_turn_tokens.'
    )
  padded = np.zeros(FORCED_TOKENS, np.int32)
  padded[: len(tokens)] = tokens
  return {'tokens': padded, 'position': np.int32(0)}
