"""The jitted programs: prefill, decode, and copies of prefixes between rows.

The device holds the key-value cache and nothing else. The host knows each row's text and
how much of it is in the cache, and passes both in every call. The cache stays one token
behind the text: the last token is known but not yet computed, so that a reply, a tool's
answer and a prompt all continue a row in the same way. A prefill computes logits only for
requests that ask for the log-probs of their own tokens (prompt_scores.py).

Letters: B rows of the cache, M entries of one call (each names its row), T tokens of one
prefill, or those that a decode computes at once: the last one and a draft of k = T - 1, W
last tokens of a text, S slots, V tokens of the vocabulary, G guides, n likeliest tokens.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, UInt32

from agent_r1_jax import types
from agent_r1_jax.engine import drafts, prompt_scores
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import sampling as sampling_lib
from agent_r1_jax.models import decoder, kv_cache, lora
from agent_r1_jax.models import ops as ops_lib
from agent_r1_jax.models import rows as rows_lib

# The number of likeliest tokens whose log-probs a request can ask for.
TOP = 20


class PrefillBatch(NamedTuple):
  """The next tokens of texts; entry m is the text of row index[m]."""

  index: Int[Array, 'M']  # Distinct rows; B or more marks an unused entry.
  rows: types.Rows
  targets: prompt_scores.Targets | None = None  # What is scored, if anything is.
  states: kv_cache.Slots | None = None  # What becomes of those of layers that have some.


class DecodeBatch(NamedTuple):
  """The requests of one decode; entry m continues the text in row rows[m]."""

  rows: Int[Array, 'M']  # Distinct rows; B or more marks an unused entry.
  length: Int[Array, 'M']  # Tokens in the cache; the text is one token longer.
  ends: Int[Array, 'M W']  # The text's last tokens; drafts.NONE stands before its first.
  budget: Int[Array, 'M']  # The most tokens to sample; an entry with 0 does not run.
  keys: UInt32[Array, 'M 2']  # The randomness of each request.
  temperature: Float[Array, 'M']  # The temperature of sampling; 0 is greedy.
  top: Bool[Array, 'M']  # Whether log-probs of the likeliest tokens are wanted.
  replay: Bool[Array, 'M']  # Whether the experts of the text are wanted at its end.
  guide_mask: Bool[Array, 'G M']  # Whether guide g changes the logits of entry m.
  guide_states: tuple[guide_lib.State, ...]  # The state of each guide, arrays [M, ...].
  # How far a text's coordinates are behind its positions, if the policy sees.
  saved: Int[Array, 'M'] | None = None
  states: kv_cache.Slots | None = None
  adapters: lora.Adapters | None = None  # The one of each entry, if the engine has any.


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
  calls: Int[Array, 'M']  # The number of calls of the policy that sampled them.
  stopped: Bool[Array, 'M']  # Whether a guide ended the reply.
  top_tokens: Int[Array, 'M steps n']  # The likeliest tokens, where they were asked for.
  top_logprobs: Float[Array, 'M steps n']  # Their log-probs.
  # Of the entries with `replay` whose reply has ended: the experts that computed their
  # text, [tokens, L, k]. Device.decode adds them.
  routes: Mapping[int, Any] = {}


@functools.partial(jax.jit, static_argnames=('config', 'bucket'), donate_argnames='cache')
def prefill(
  params: decoder.Params,
  cache: kv_cache.Cache,
  batch: PrefillBatch,
  *,
  config: decoder.DecoderConfig,
  bucket: int,
) -> tuple[kv_cache.Cache, prompt_scores.Scored | None]:
  """Writes the next tokens of texts to the cache; those before them are in it already.

  The first `bucket` slots of each row are read and written: all positions are below it,
  but for NOWHERE. The cache is donated; the params come from engine_params.unstack. With
  targets, which is another program, their scores are returned too.
  """
  index, rows, targets, states = batch
  view = _gather_rows(cache, index, bucket)
  view = kv_cache.resume(view, states)
  x, view = ops_lib.choose(config).extend(params, config, rows, view)
  view = kv_cache.save(view, states and states.save)
  scored = None
  if targets is not None:
    top = min(TOP, config.vocab_size)
    scored = prompt_scores.score(params, config, x, targets, top)
  return _scatter_rows(cache, index, view), scored


@functools.partial(jax.jit, static_argnames='bucket', donate_argnames='cache')
def copy(
  cache: kv_cache.Cache, source: Int[Array, 'M'], rows: Int[Array, 'M'], *, bucket: int
) -> kv_cache.Cache:
  """Copies the first `bucket` slots of row source[m] to row rows[m]."""
  return jax.tree.map(
    lambda x: x.at[rows, :, :bucket].set(x[source, :, :bucket], mode='drop'), cache
  )


@functools.partial(jax.jit, static_argnames='bucket')
def read_routes(
  cache: kv_cache.Cache, row: Int[Array, ''], *, bucket: int
) -> Int[Array, 'bucket L k']:
  """Reads which experts computed the first `bucket` slots of a row."""
  experts = (
    layer.experts[row, :, :bucket] for layer in cache if layer.experts is not None
  )
  routes_LkS = jnp.stack([*experts])
  return jnp.moveaxis(routes_LkS, 2, 0)


@functools.partial(
  jax.jit,
  static_argnames=('config', 'guides', 'steps', 'bucket', 'in_place', 'k'),
  donate_argnames='cache',
)
def decode(
  params: decoder.Params,
  cache: kv_cache.Cache,
  batch: DecodeBatch,
  guide_params: tuple,
  places: drafts.Places | None = None,
  *,
  config: decoder.DecoderConfig,
  guides: tuple[guide_lib.Guide, ...],
  steps: int,
  bucket: int,
  in_place: bool = False,
  k: int = 0,
) -> tuple[kv_cache.Cache, tuple[guide_lib.State, ...], Decoded]:
  """Samples until every entry has stopped, but calls the policy at most `steps` times.

  A token's randomness is (key, position): neither the other rows nor the way a reply is
  cut into decodes can change it, nor what was drafted. Of a draft, those tokens stay that
  are sampled where they stand; their keys and values are in the cache already, and those
  of the others are overwritten before anything reads them.

  Args:
    params: The policy's parameters, from engine_params.unstack.
    cache: The cache of all rows; donated.
    batch: The requests.
    guide_params: The parameters of each guide.
    places: Where drafts are found; None with k = 0.
    config: The policy's shape.
    guides: All guides of the engine (G).
    steps: The most calls of the policy.
    bucket: How many slots of each row are read and written, at least length +
      drafts.count_most(steps, k).
    in_place: Whether entry m is row m for all rows, with all their slots. The cache is
      then not copied, so that no second one needs memory.
    k: How many tokens of each entry are drafted for a call.

  Returns:
    The cache, the guides' states after the last token of each entry, and the tokens.
  """
  B = len(jax.tree.leaves(cache)[0])
  # Rows are copied once a decode; attention then reads `bucket` slots in each call.
  view = cache if in_place else _gather_rows(cache, batch.rows, bucket)
  view = kv_cache.resume(view, batch.states)
  sizes = len(batch.rows), drafts.count_most(steps, k), min(TOP, config.vocab_size)
  alive = (batch.rows < B) & (batch.budget > 0)
  replies = _Replies(batch.ends, batch.guide_states, _no_tokens(*sizes), alive)
  policy = _Policy(params, config, guides, guide_params)

  def call(loop):
    now, replies = loop
    return _extend_replies(policy, batch, now, replies, places, k=k)

  goes_on = lambda x: x[1].alive.any() & (x[1].out.calls.max() < steps)
  now, replies = jax.lax.while_loop(goes_on, call, (kv_cache.take_now(view), replies))
  view = kv_cache.put_now(view, now)
  cache = view if in_place else _scatter_rows(cache, batch.rows, view)
  return cache, replies.states, replies.out


def describe(args: Any) -> Any:
  """Describes the arrays of a call as jax.jit sees them, to compile it ahead of time."""

  def describe(x):
    place = x.sharding if getattr(x, 'committed', False) else None
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=place)

  return jax.tree.map(describe, args)


class _Policy(NamedTuple):
  """What chooses tokens; see `decode`."""

  params: decoder.Params
  config: decoder.DecoderConfig
  guides: tuple[guide_lib.Guide, ...]
  guide_params: tuple


class _Replies(NamedTuple):
  """The replies of a decode so far."""

  ends: Int[Array, 'M W']  # The last tokens of each text.
  states: tuple[guide_lib.State, ...]
  out: Decoded
  alive: Bool[Array, 'M']  # Whether the reply goes on.


def _no_tokens(M: int, steps: int, n: int) -> Decoded:
  numbers = jnp.zeros((M, steps), jnp.float32)
  return Decoded(
    tokens=jnp.zeros((M, steps), jnp.int32),
    logprobs=numbers,
    behaviour_logprobs=numbers,
    values=numbers,
    count=jnp.zeros(M, jnp.int32),
    calls=jnp.zeros(M, jnp.int32),
    stopped=jnp.zeros(M, bool),
    top_tokens=jnp.zeros((M, steps, n), jnp.int32),
    top_logprobs=jnp.zeros((M, steps, n), jnp.float32),
  )


def _extend_replies(
  policy: _Policy, batch: DecodeBatch, view, replies: _Replies, places, *, k
) -> tuple[kv_cache.Cache, _Replies]:
  """Computes each text's last token and a draft; samples 1 to k + 1 tokens of each."""
  out, alive = replies.out, replies.alive
  tokens_MT = replies.ends[:, -1:]
  if k:
    draft_Mk = drafts.propose(places, replies.ends, k)
    tokens_MT = jnp.concatenate([tokens_MT, draft_Mk], axis=1)
  # A reply that has stopped goes on computing, and nothing of that is written, as of what
  # a draft has beyond the most tokens that can be sampled.
  steps_1T = jnp.arange(k + 1)[None]
  left_M1 = jnp.minimum(batch.budget, out.tokens.shape[1])[:, None] - out.count[:, None]
  runs_MT = alive[:, None] & (steps_1T < left_M1) & (tokens_MT != drafts.NONE)
  length_M1 = (batch.length + out.count)[:, None]
  positions_MT = jnp.where(runs_MT, length_M1 + steps_1T, kv_cache.NOWHERE)
  # What a draft copies may be no token of the vocabulary either.
  known_MT = jnp.clip(tokens_MT, 0, policy.config.vocab_size - 1)
  rows = rows_lib.continue_text(known_MT, positions_MT, batch.saved)
  rows = rows._replace(adapters=batch.adapters)
  ops = ops_lib.choose(policy.config)
  x_MTD, view = ops.extend(policy.params, policy.config, rows, view)
  logits_MTV = ops.logits(policy.params, policy.config, x_MTD)
  replies = replies._replace(out=out._replace(calls=out.calls + alive))

  def sample(t, running_M, replies):
    """Samples after token t; returns which entries have drafted what was sampled."""
    x_MD, logits_MV = x_MTD[:, t], logits_MTV[:, t]
    replies = _add_token(policy, batch, replies, running_M, x_MD, logits_MV)
    drafted_M = tokens_MT[:, jnp.minimum(t + 1, k)]
    return running_M & replies.alive & (replies.ends[:, -1] == drafted_M), replies

  running_M, replies = sample(0, alive, replies)
  if k:
    _, _, replies = jax.lax.while_loop(
      lambda x: (x[0] <= k) & x[1].any(),
      lambda x: (x[0] + 1, *sample(*x)),
      (1, running_M, replies),
    )
  return view, replies


def _add_token(
  policy: _Policy, batch: DecodeBatch, replies: _Replies, running, x_MD, logits_MV
) -> _Replies:
  """Samples a token of the replies that are running from hidden states and logits."""
  params, config, guides, guide_params = policy
  out, states = replies.out, replies.states
  apply_guides = functools.partial(
    guide_lib.apply, guides, guide_params, states, batch.guide_mask, hidden=x_MD
  )
  position = batch.length + out.count + 1
  logits_MV = sampling_lib.scale_logits(logits_MV, batch.temperature)
  logprobs_MV = ops_lib.choose(config).log_softmax(logits_MV)
  apply_guides = functools.partial(apply_guides, logits=logits_MV)
  token, behaviour = _choose(logprobs_MV, batch, position, apply_guides)
  new_states, ended = guide_lib.advance(guides, guide_params, states, token)
  value = jnp.zeros(len(token))
  if 'value_head' in params:
    value = decoder.values(params, x_MD)
  out = _write(out, running, token, behaviour, logprobs_MV, value, ended, batch.top)
  most = jnp.minimum(batch.budget, out.tokens.shape[1])
  keep_new = functools.partial(_where, running)
  ends = jnp.concatenate([replies.ends[:, 1:], token[:, None]], axis=1)
  return _Replies(
    ends=keep_new(ends, replies.ends),
    states=jax.tree.map(keep_new, new_states, states),
    out=out,
    alive=keep_new(~ended & (out.count < most), replies.alive),
  )


def _choose(
  logprobs_MV, batch: DecodeBatch, position, apply_guides: Callable
) -> tuple[Array, Array]:
  """Chooses each entry's token at `position`; returns it, and its behaviour log-prob.

  `logprobs_MV` are the policy's, and `apply_guides` returns logits.
  """
  u_M = sampling_lib.make_uniforms(batch.keys, position)

  def choose(logprobs_MV):
    token_M = sampling_lib.choose_tokens(logprobs_MV, u_M, batch.temperature == 0)
    return token_M, _take(logprobs_MV, token_M)

  # Without a guide, the second softmax over the vocabulary is left out.
  token_M, behaviour_M = jax.lax.cond(
    batch.guide_mask.any(),
    lambda: choose(jax.nn.log_softmax(apply_guides())),
    lambda: choose(logprobs_MV),
  )
  # The second softmax may round differently: an entry without a guide keeps the first
  # one's number, whatever the other entries use.
  guided_M = batch.guide_mask.any(0)
  behaviour_M = jnp.where(guided_M, behaviour_M, _take(logprobs_MV, token_M))
  return token_M, behaviour_M


def _take(x_MV: Array, token_M: Array) -> Array:
  return jnp.take_along_axis(x_MV, token_M[:, None], axis=1)[:, 0]


def _write(
  out: Decoded, running, token, behaviour, logprobs_MV, value, ended, top_wanted
) -> Decoded:
  """Adds a token to the entries that are running."""
  M, steps, n = out.top_tokens.shape
  none = jnp.zeros_like(logprobs_MV[:, :n]), jnp.zeros((M, n), jnp.int32)
  # top_k takes time, and is skipped where no entry asks for it.
  values_Mn, tokens_Mn = jax.lax.cond(
    top_wanted.any(), lambda: tuple(jax.lax.top_k(logprobs_MV, n)), lambda: none
  )
  # Compared and not scattered: XLA scatters one number after the other on a CPU.
  here_MS = running[:, None] & (jnp.arange(steps)[None] == out.count[:, None])
  put = lambda column, x: jnp.where(here_MS, x[:, None], column)
  put_top = lambda column, x: jnp.where(here_MS[..., None], x[:, None], column)
  return Decoded(
    tokens=put(out.tokens, token),
    logprobs=put(out.logprobs, _take(logprobs_MV, token)),
    behaviour_logprobs=put(out.behaviour_logprobs, behaviour),
    values=put(out.values, value),
    count=out.count + running,
    calls=out.calls,
    stopped=out.stopped | (running & ended),
    top_tokens=put_top(out.top_tokens, tokens_Mn),
    top_logprobs=put_top(out.top_logprobs, values_Mn),
  )


def _where(alive: Bool[Array, 'M'], new: Array, old: Array) -> Array:
  """Selects `new` in the entries that are alive, whatever the arrays' other axes are."""
  return jnp.where(alive.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _gather_rows(
  cache: kv_cache.Cache, rows: Int[Array, 'M'], bucket: int
) -> kv_cache.Cache:
  """Copies the first `bucket` slots of M rows out of the cache; a ring has fewer."""
  return jax.tree.map(lambda x: x[rows, :, :bucket], cache)


def _scatter_rows(
  cache: kv_cache.Cache, rows: Int[Array, 'M'], view: kv_cache.Cache
) -> kv_cache.Cache:
  """Writes what `_gather_rows` copied back into the cache; drops unused entries."""
  return jax.tree.map(
    lambda x, v: x.at[rows, :, : v.shape[2]].set(v, mode='drop'), cache, view
  )
