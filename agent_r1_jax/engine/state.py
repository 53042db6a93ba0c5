"""DecodeState and its pure functions: reset, feed, decode, fork.

A row's text is what was fed to it and sampled in it, in order. The cache stays one token
behind the text: `last` is known but not yet computed, so a reply, a tool's answer and a
prompt all continue a row in the same way, and the logits of a fed text are never wanted.

Letters: B rows, M of them in one call, T tokens of one feed, S slots, V vocabulary.
"""

import functools
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, UInt32

from agent_r1_jax.engine import grammar as grammar_lib
from agent_r1_jax.engine import sampling as sampling_lib
from agent_r1_jax.engine import stop as stop_lib
from agent_r1_jax.models import decoder


class DecodeState(NamedTuple):
  """B rows of text in the making.

  Attributes:
    cache: One (k, v) a layer, each [B, K, S, H].
    length: Tokens in the cache; the text is one longer, unless it is empty.
    last: The text's last token; -1 where the text is empty.
    keys: Each row's own randomness.
    stop: The stop automaton's state inside the reply under way.
    grammar: The grammar's, likewise.
  """

  cache: decoder.Cache
  length: Int[Array, 'B']
  last: Int[Array, 'B']
  keys: UInt32[Array, 'B 2']
  stop: Int[Array, 'B']
  grammar: Int[Array, 'B']


class Decoded(NamedTuple):
  """What one segment sampled; place m's tokens are tokens[m, :count[m]]."""

  tokens: Int[Array, 'M steps']
  logprobs: Float[Array, 'M steps']
  count: Int[Array, 'M']
  stopped: Bool[Array, 'M']


def empty(config: decoder.DecoderConfig, rows: int, slots: int) -> DecodeState:
  """A state without text: `rows` rows of at most `slots` tokens."""
  zeros = jnp.zeros(rows, jnp.int32)
  keys = jnp.zeros((rows, 2), jnp.uint32)
  return DecodeState(
    cache=decoder.empty_cache(config, rows, slots),
    length=zeros,
    last=zeros - 1,
    keys=keys,
    stop=zeros.copy(),
    grammar=zeros.copy(),
  )


@functools.partial(jax.jit, donate_argnames='state')
def reset(
  state: DecodeState, fresh: Bool[Array, 'B'], keys: UInt32[Array, 'B 2']
) -> DecodeState:
  """Empties the rows where `fresh` and gives them new keys."""
  return state._replace(
    length=jnp.where(fresh, 0, state.length),
    last=jnp.where(fresh, -1, state.last),
    keys=jnp.where(fresh[:, None], keys, state.keys),
  )


@functools.partial(jax.jit, static_argnames=('config', 'bucket'), donate_argnames='state')
def feed(
  params: decoder.Params,
  state: DecodeState,
  rows: Int[Array, 'M'],
  tokens: Int[Array, 'M T'],
  count: Int[Array, 'M'],
  *,
  config: decoder.DecoderConfig,
  bucket: int,
) -> DecodeState:
  """Appends tokens[m, :count[m]] to the text of row rows[m].

  Args:
    params: Of the policy, by decoder.unstacked.
    state: Donated.
    rows: Distinct; B or more marks an unused place.
    tokens: Padded at the end.
    count: At least 1 in a used place.
    config: Of the policy.
    bucket: Slots that are read and written; at least the texts' new lengths.
  """
  view = _view(state, rows, bucket)
  begun = view.last >= 0
  # The text is one token ahead: its old last token goes in first, its new one waits.
  shifted = jnp.concatenate([view.last[:, None], tokens[:, :-1]], axis=1)
  inputs = jnp.where(begun[:, None], shifted, tokens)
  written = count - jnp.where(begun, 0, 1)
  steps_T = jnp.arange(tokens.shape[1])[None]
  positions = jnp.where(
    steps_T < written[:, None], view.length[:, None] + steps_T, bucket
  )
  _, cache = decoder.extend(params, config, inputs, positions, view.cache)
  view = DecodeState(
    cache=cache,
    length=view.length + written,
    last=jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)[:, 0],
    keys=view.keys,
    stop=jnp.zeros_like(view.stop),
    grammar=jnp.zeros_like(view.grammar),
  )
  return _put(state, rows, view)


@functools.partial(jax.jit, static_argnames='bucket', donate_argnames='state')
def fork(
  state: DecodeState,
  source: Int[Array, 'M'],
  rows: Int[Array, 'M'],
  count: Int[Array, 'M'],
  last: Int[Array, 'M'],
  *,
  bucket: int,
) -> DecodeState:
  """Gives row rows[m] the first count[m] tokens of row source[m]'s text.

  Args:
    state: Donated.
    source: Rows whose text begins with the shared tokens.
    rows: Distinct; B or more marks an unused place. Their keys stay their own.
    count: At least 1.
    last: The last of the shared tokens.
    bucket: Slots that are copied; at least count - 1.
  """
  return state._replace(
    cache=jax.tree.map(
      lambda x: x.at[rows, :, :bucket].set(x[source, :, :bucket], mode='drop'),
      state.cache,
    ),
    length=state.length.at[rows].set(count - 1, mode='drop'),
    last=state.last.at[rows].set(last, mode='drop'),
    stop=state.stop.at[rows].set(0, mode='drop'),
    grammar=state.grammar.at[rows].set(0, mode='drop'),
  )


@functools.partial(
  jax.jit,
  static_argnames=('config', 'sampling', 'steps', 'bucket'),
  donate_argnames='state',
)
def decode(
  params: decoder.Params,
  state: DecodeState,
  rows: Int[Array, 'M'],
  budget: Int[Array, 'M'],
  stop: stop_lib.Stop,
  grammar: grammar_lib.Grammar | None = None,
  *,
  config: decoder.DecoderConfig,
  sampling: sampling_lib.Sampling,
  steps: int,
  bucket: int,
) -> tuple[DecodeState, Decoded]:
  """Samples one segment: until every running row has stopped, or for `steps` tokens.

  A token's randomness is (row key, position): neither the other rows nor the way a reply
  is cut into segments can change it.

  Args:
    params: Of the policy, by decoder.unstacked.
    state: Donated.
    rows: Distinct; B or more marks an unused place.
    budget: Most tokens for row rows[m]; with budget 0 it does not run.
    stop: What ends a reply.
    grammar: What a reply may say; None allows all.
    config: Of the policy.
    sampling: How to choose.
    steps: Most tokens of this segment.
    bucket: Slots that are read and written; at least length + steps of every running row.
  """
  if grammar is not None and grammar.classes.shape[0] != config.vocab_size:
    raise ValueError(
      f'the grammar is for {grammar.classes.shape[0]} tokens, the policy has '
      f'{config.vocab_size}: make it with vocab_size={config.vocab_size}.'
    )
  # The view is copied once a segment; attention then reads `bucket` slots at every token.
  view = _view(state, rows, bucket)
  M, B = rows.shape[0], state.length.shape[0]
  out = Decoded(
    tokens=jnp.zeros((M, steps), jnp.int32),
    logprobs=jnp.zeros((M, steps), jnp.float32),
    count=jnp.zeros(M, jnp.int32),
    stopped=jnp.zeros(M, bool),
  )

  def running(carry):
    i, _, _, alive = carry
    return (i < steps) & alive.any()

  def step(carry):
    i, s, out, alive = carry
    positions = jnp.where(alive, s.length, bucket)
    x, cache = decoder.extend(
      params, config, s.last[:, None], positions[:, None], s.cache
    )
    u = sampling_lib.uniforms(s.keys, s.length + 1)
    logits = decoder.logits(params, config, x[:, 0])
    allowed = None
    if grammar is not None:
      allowed = functools.partial(grammar_lib.allowed, grammar, s.grammar)
    token, logprob = sampling_lib.sample(logits, u, sampling, allowed)
    stop_state, ended = stop_lib.advance(stop, s.stop, token)
    said = s.grammar
    if grammar is not None:
      said = grammar_lib.advance(grammar, said, token)
    s = DecodeState(
      cache=cache,
      length=s.length + alive,
      last=jnp.where(alive, token, s.last),
      keys=s.keys,
      stop=jnp.where(alive, stop_state, s.stop),
      grammar=jnp.where(alive, said, s.grammar),
    )
    out = Decoded(
      tokens=out.tokens.at[:, i].set(jnp.where(alive, token, 0)),
      logprobs=out.logprobs.at[:, i].set(jnp.where(alive, logprob, 0.0)),
      count=out.count + alive,
      stopped=out.stopped | (alive & ended),
    )
    return i + 1, s, out, alive & ~ended & (out.count < budget)

  alive = (rows < B) & (budget > 0) & (view.last >= 0)
  _, end, out, _ = jax.lax.while_loop(running, step, (0, view, out, alive))
  return _put(state, rows, end), out


def _view(state: DecodeState, rows: Int[Array, 'M'], bucket: int) -> DecodeState:
  """M rows alone, with the first `bucket` slots of their cache."""
  cache = jax.tree.map(lambda x: x[rows, :, :bucket], state.cache)
  return DecodeState(cache, *(x[rows] for x in state[1:]))


def _put(state: DecodeState, rows: Int[Array, 'M'], view: DecodeState) -> DecodeState:
  """Writes a view back."""
  bucket = view.cache[0][0].shape[2]
  cache = jax.tree.map(
    lambda x, v: x.at[rows, :, :bucket].set(v, mode='drop'), state.cache, view.cache
  )
  rest = zip(state[1:], view[1:], strict=True)
  return DecodeState(cache, *(x.at[rows].set(v, mode='drop') for x, v in rest))
