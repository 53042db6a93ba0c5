"""Guides: how a request changes the choice of its tokens, inside the jitted loop.

A guide has a state for each request, and is a pair of pure functions of it: one changes
the logits, the other advances the state by a token. Stop strings, a grammar of tool
calls, top-k and top-p, and a value function are all guides. The guides of a request
compose: logits pass through one after the other, and any of them may end the reply. The
states are arguments of the jitted loop, so other requests and guides compile nothing.

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

# Nested arrays: those of one request in Guide.off and Request.guides, and those of all
# entries, [M, ...], in the functions.
State = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Guide:
  """One guide; an engine is made with all guides that its requests may use.

  Attributes:
    off: The state of a request that does not use the guide, numpy scalars or arrays; it
      also fixes the shapes and dtypes of the state.
    logits: (params, state, logits [M, V], hidden [M, D]) -> logits [M, V]. The logits are
      scaled by the temperature, and hidden is the policy's last hidden state. The result
      is only used in the entries that use the guide. None: the guide changes no logits.
    advance: (params, state, tokens [M]) -> (state, ended [M]): the state after one more
      token, and whether the reply ends with it. It must not end an entry whose state is
      `off`. None: the guide has a constant state and ends no reply.
  """

  off: State
  logits: Callable[[Any, State, Array, Array], Array] | None = None
  advance: Callable[[Any, State, Array], tuple[State, Array]] | None = None

  @property
  def needs_correction(self) -> bool:
    """Whether training on its tokens needs the algorithm's correction.

    A guide with `logits` samples from a distribution other than the trained policy's;
    importance weights (rl/losses.py) correct the difference. A guide that only ends
    replies needs none.
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

  The order is AUTOMATA, TRUNCATION, then the others as the engine was given them.
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
  """Advances all states by one token an entry.

  Returns:
    The new states, and whether a guide ends the reply of each entry.
  """
  ended, new_states = jnp.zeros(tokens.shape, bool), []
  for guide, guide_params, state in zip(guides, params, states, strict=True):
    if guide.advance is not None:
      state, ended_here = guide.advance(guide_params, state, tokens)
      ended |= ended_here
    new_states.append(state)
  return tuple(new_states), ended


def _truncate(params, state, logits_MV, hidden):
  """Applies top-k, then top-p to the rest, then min-p; ties are kept or cut together."""
  p_MV = jax.nn.softmax(logits_MV)
  sorted_MV = -jnp.sort(-p_MV, axis=-1)
  ranks_V = jnp.arange(p_MV.shape[1])
  k_M = jnp.where(state['top_k'] > 0, state['top_k'], p_MV.shape[1])
  top_MV = jnp.where(ranks_V[None] < k_M[:, None], sorted_MV, 0.0)
  # A token stays if the mass before it is still below top_p of what top-k left.
  before_MV = jnp.cumsum(top_MV, axis=-1) - top_MV
  limit_M = jnp.where(state['top_p'] < 1, state['top_p'] * top_MV.sum(-1), jnp.inf)
  stays_MV = (top_MV > 0) & (before_MV < limit_M[:, None])
  least_M = jnp.min(jnp.where(stays_MV, sorted_MV, jnp.inf), axis=-1)
  least_M = jnp.maximum(least_M, state['min_p'] * sorted_MV[:, 0])
  return jnp.where(p_MV >= least_M[:, None], logits_MV, -jnp.inf)


# Sampling's top_k, top_p and min_p as a guide, so that other decodes need not sort.
TRUNCATION = Guide(
  off={'top_k': np.int32(0), 'top_p': np.float32(1), 'min_p': np.float32(0)},
  logits=_truncate,
)


def truncation_state(sampling: config_lib.Sampling) -> dict[str, np.generic]:
  """Returns the state of TRUNCATION for one request."""
  off = TRUNCATION.off
  return {name: off[name].dtype.type(getattr(sampling, name)) for name in off}


# The most tokens of a reply that FORCED can force.
FORCED_TOKENS = 1024


def _force(params, state, logits_MV, hidden):
  position_M1 = jnp.minimum(state['position'], FORCED_TOKENS - 1)[:, None]
  token_M1 = jnp.take_along_axis(state['tokens'], position_M1, axis=1)
  return jnp.where(jnp.arange(logits_MV.shape[1])[None] == token_M1, logits_MV, -jnp.inf)


# Forces the reply to be the tokens in its state. The reply then has their log-probs under
# the request's policy, and their values.
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
    ValueError: There are more than FORCED_TOKENS.
  """
  if len(tokens) > FORCED_TOKENS:
    raise ValueError(
      f'a reply of {len(tokens)} tokens cannot be valued, only {FORCED_TOKENS}: lower '
      'limits.max_turn_tokens.'
    )
  padded = np.zeros(FORCED_TOKENS, np.int32)
  padded[: len(tokens)] = tokens
  return {'tokens': padded, 'position': np.int32(0)}
