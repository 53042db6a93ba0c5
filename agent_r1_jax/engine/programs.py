"""The jitted programs: prefill, decode, and copies of prefixes between rows.

The device holds the key-value cache and nothing else. The host knows each row's text and
how much of it is in the cache, and passes both in every call. The cache stays one token
behind the text: the last token is known but not yet computed, so that a reply, a tool's
answer and a prompt all continue a row in the same way, and no prefill computes logits.

Letters: B rows of the cache, M entries of one call (each names its row), T tokens of one
prefill, S slots, V tokens of the vocabulary, G guides, n likeliest tokens.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, UInt32

from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import sampling as sampling_lib
from agent_r1_jax.models import decoder

# The number of likeliest tokens whose log-probs a request can ask for.
TOP = 20


class DecodeBatch(NamedTuple):
  """The requests of one decode; entry m continues the text in row rows[m]."""

  rows: Int[Array, 'M']  # Distinct rows; B or more marks an unused entry.
  length: Int[Array, 'M']  # Tokens in the cache; the text is one token longer.
  last: Int[Array, 'M']  # The text's last token.
  budget: Int[Array, 'M']  # The most tokens to sample; an entry with 0 does not run.
  keys: UInt32[Array, 'M 2']  # The randomness of each request.
  temperature: Float[Array, 'M']  # The temperature of sampling; 0 is greedy.
  top: Bool[Array, 'M']  # Whether log-probs of the likeliest tokens are wanted.
  guide_mask: Bool[Array, 'G M']  # Whether guide g changes the logits of entry m.
  guide_states: tuple[guide_lib.State, ...]  # The state of each guide, arrays [M, ...].


class Decoded(NamedTuple):
  """The tokens of one decode; those of entry m are tokens[m, :count[m]]."""

  tokens: Int[Array, 'M steps']  # The sampled tokens.
  # Their log-probs under the policy's temperature-scaled full softmax.
  logprobs: Float[Array, 'M steps']
  # Their log-probs under the distribution that they were sampled from: with guides or
  # truncation it differs from the policy's, else the numbers are the same.
  behaviour_logprobs: Float[Array, 'M steps']
  # The value of the state in which each was chosen; 0 if the policy has no value head.
  values: Float[Array, 'M steps']
  count: Int[Array, 'M']  # The number of tokens that were sampled.
  stopped: Bool[Array, 'M']  # Whether a guide ended the reply.
  top_tokens: Int[Array, 'M steps n']  # The likeliest tokens, where they were asked for.
  top_logprobs: Float[Array, 'M steps n']  # Their log-probs.


@functools.partial(jax.jit, static_argnames=('config', 'bucket'), donate_argnames='cache')
def prefill(
  params: decoder.Params,
  cache: decoder.Cache,
  rows: Int[Array, 'M'],
  start: Int[Array, 'M'],
  tokens: Int[Array, 'M T'],
  count: Int[Array, 'M'],
  *,
  config: decoder.DecoderConfig,
  bucket: int,
) -> decoder.Cache:
  """Writes tokens[m, :count[m]] to the slots of row rows[m] from start[m] on.

  Rows are distinct; B or more marks an unused entry. start[m] tokens are in the cache
  already. The first `bucket` slots of each row are read and written: at least start +
  count. The cache is donated; the params come from sampling_params.unstack.
  """
  view = _gather_rows(cache, rows, bucket)
  steps_1T = jnp.arange(tokens.shape[1])[None]
  positions = jnp.where(steps_1T < count[:, None], start[:, None] + steps_1T, bucket)
  _, view = decoder.extend(params, config, tokens, positions, view)
  return _scatter_rows(cache, rows, view)


@functools.partial(jax.jit, static_argnames='bucket', donate_argnames='cache')
def copy(
  cache: decoder.Cache, source: Int[Array, 'M'], rows: Int[Array, 'M'], *, bucket: int
) -> decoder.Cache:
  """Copies the first `bucket` slots of row source[m] to row rows[m]."""
  return jax.tree.map(
    lambda x: x.at[rows, :, :bucket].set(x[source, :, :bucket], mode='drop'), cache
  )


@functools.partial(
  jax.jit,
  static_argnames=('config', 'guides', 'steps', 'bucket', 'in_place'),
  donate_argnames='cache',
)
def decode(
  params: decoder.Params,
  cache: decoder.Cache,
  batch: DecodeBatch,
  guide_params: tuple,
  *,
  config: decoder.DecoderConfig,
  guides: tuple[guide_lib.Guide, ...],
  steps: int,
  bucket: int,
  in_place: bool = False,
) -> tuple[decoder.Cache, tuple[guide_lib.State, ...], Decoded]:
  """Samples until every entry has stopped, but at most `steps` tokens of each.

  A token's randomness is (key, position): neither the other rows nor the way a reply is
  cut into decodes can change it.

  Args:
    params: The policy's parameters, from sampling_params.unstack.
    cache: The cache of all rows; donated.
    batch: The requests.
    guide_params: The parameters of each guide.
    config: The policy's shape.
    guides: All guides of the engine (G).
    steps: The most tokens of each entry.
    bucket: How many slots of each row are read and written, at least length + steps.
    in_place: Whether entry m is row m for all rows, with all their slots. The cache is
      then not copied, so that no second one needs memory.

  Returns:
    The cache, the guides' states after the last token of each entry, and the tokens.
  """
  B = cache[0][0].shape[0]
  next_token = functools.partial(
    _decode_token,
    params=params,
    batch=batch,
    guide_params=guide_params,
    config=config,
    guides=guides,
    bucket=bucket,
  )
  begin = _Loop(
    i=jnp.zeros((), jnp.int32),
    # Rows are copied once a decode; attention then reads `bucket` slots at each token.
    view=cache if in_place else _gather_rows(cache, batch.rows, bucket),
    last=batch.last,
    states=batch.guide_states,
    out=_no_tokens(len(batch.rows), steps, min(TOP, config.vocab_size)),
    alive=(batch.rows < B) & (batch.budget > 0),
  )
  end = jax.lax.while_loop(lambda x: (x.i < steps) & x.alive.any(), next_token, begin)
  cache = end.view if in_place else _scatter_rows(cache, batch.rows, end.view)
  return cache, end.states, end.out


class _Loop(NamedTuple):
  """The carry of `decode`'s loop over tokens; i counts the tokens."""

  i: Int[Array, '']
  view: decoder.Cache
  last: Int[Array, 'M']
  states: tuple[guide_lib.State, ...]
  out: Decoded
  alive: Bool[Array, 'M']


def _no_tokens(M: int, steps: int, n: int) -> Decoded:
  numbers = jnp.zeros((M, steps), jnp.float32)
  return Decoded(
    tokens=jnp.zeros((M, steps), jnp.int32),
    logprobs=numbers,
    behaviour_logprobs=numbers,
    values=numbers,
    count=jnp.zeros(M, jnp.int32),
    stopped=jnp.zeros(M, bool),
    top_tokens=jnp.zeros((M, steps, n), jnp.int32),
    top_logprobs=jnp.zeros((M, steps, n), jnp.float32),
  )


def _decode_token(
  loop: _Loop, *, params, batch: DecodeBatch, guide_params, config, guides, bucket
) -> _Loop:
  """Computes the last token of each entry that is alive, and chooses the next one."""
  # An entry that has stopped goes on computing; its writes are past the bucket.
  length = batch.length + loop.out.count
  positions = jnp.where(loop.alive, length, bucket)[:, None]
  x, view = decoder.extend(params, config, loop.last[:, None], positions, loop.view)
  x_MD = x[:, 0]
  apply_guides = functools.partial(
    guide_lib.apply, guides, guide_params, loop.states, batch.guide_mask, hidden=x_MD
  )
  logits_MV = decoder.logits(params, config, x_MD)
  token, behaviour, logprobs_MV = _choose(logits_MV, batch, length + 1, apply_guides)
  states, ended = guide_lib.advance(guides, guide_params, loop.states, token)
  value = jnp.zeros(len(token))
  if 'value_head' in params:
    value = decoder.values(params, x_MD)
  out = _write(
    loop.out, loop.i, loop.alive, token, behaviour, logprobs_MV, value, ended, batch.top
  )
  return _Loop(
    i=loop.i + 1,
    view=view,
    last=jnp.where(loop.alive, token, loop.last),
    states=jax.tree.map(functools.partial(_where, loop.alive), states, loop.states),
    out=out,
    alive=loop.alive & ~ended & (out.count < batch.budget),
  )


def _choose(
  logits_MV, batch: DecodeBatch, position, apply_guides: Callable
) -> tuple[Array, Array, Array]:
  """Chooses each entry's token at `position`.

  Returns:
    The tokens [M]; their behaviour log-probs [M]; and the policy's log-probs of all
    tokens [M, V].
  """
  logits_MV = sampling_lib.scale_logits(logits_MV, batch.temperature)
  logprobs_MV = jax.nn.log_softmax(logits_MV)
  u_M = sampling_lib.make_uniforms(batch.keys, position)

  def choose(logprobs_MV):
    token_M = sampling_lib.choose_tokens(logprobs_MV, u_M, batch.temperature == 0)
    return token_M, _take(logprobs_MV, token_M)

  # Without a guide, the second softmax over the vocabulary is left out.
  token_M, behaviour_M = jax.lax.cond(
    batch.guide_mask.any(),
    lambda: choose(jax.nn.log_softmax(apply_guides(logits=logits_MV))),
    lambda: choose(logprobs_MV),
  )
  # The second softmax may round differently: an entry without a guide keeps the first
  # one's number, whatever the other entries use.
  guided_M = batch.guide_mask.any(0)
  behaviour_M = jnp.where(guided_M, behaviour_M, _take(logprobs_MV, token_M))
  return token_M, behaviour_M, logprobs_MV


def _take(x_MV: Array, token_M: Array) -> Array:
  return jnp.take_along_axis(x_MV, token_M[:, None], axis=1)[:, 0]


def _write(
  out: Decoded, i, alive, token, behaviour, logprobs_MV, value, ended, top_wanted
) -> Decoded:
  """Adds the i-th token of the entries that are alive."""
  n = out.top_tokens.shape[2]
  none = jnp.zeros_like(logprobs_MV[:, :n]), jnp.zeros((len(token), n), jnp.int32)
  # top_k takes time, and is skipped where no entry asks for it.
  values_Mn, tokens_Mn = jax.lax.cond(
    top_wanted.any(), lambda: tuple(jax.lax.top_k(logprobs_MV, n)), lambda: none
  )
  put = lambda column, x: column.at[:, i].set(jnp.where(alive, x, 0))
  return Decoded(
    tokens=put(out.tokens, token),
    logprobs=put(out.logprobs, _take(logprobs_MV, token)),
    behaviour_logprobs=put(out.behaviour_logprobs, behaviour),
    values=put(out.values, value),
    count=out.count + alive,
    stopped=out.stopped | (alive & ended),
    top_tokens=out.top_tokens.at[:, i].set(tokens_Mn),
    top_logprobs=out.top_logprobs.at[:, i].set(values_Mn),
  )


def _where(alive: Bool[Array, 'M'], new: Array, old: Array) -> Array:
  """Selects `new` in the entries that are alive, whatever the arrays' other axes are."""
  return jnp.where(alive.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _gather_rows(
  cache: decoder.Cache, rows: Int[Array, 'M'], bucket: int
) -> decoder.Cache:
  """Copies the first `bucket` slots of M rows out of the cache."""
  return jax.tree.map(lambda x: x[rows, :, :bucket], cache)


def _scatter_rows(
  cache: decoder.Cache, rows: Int[Array, 'M'], view: decoder.Cache
) -> decoder.Cache:
  """Writes what `_gather_rows` copied back into the cache; drops unused entries."""
  bucket = view[0][0].shape[2]
  return jax.tree.map(
    lambda x, v: x.at[rows, :, :bucket].set(v, mode='drop'), cache, view
  )
