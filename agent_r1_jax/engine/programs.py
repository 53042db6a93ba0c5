"""The jitted programs: prefill, decode, and copies of prefixes between rows.

The only state on the device is the key-value cache. The host knows each row's sequence
and how much of it is cached, and passes both in every call. The cache stays one token
behind the sequence: the last token is known but not yet computed, so that replies, tool
outputs and prompts all continue a row in the same way. A prefill computes logits only for
requests that ask for their prompt's log-probs (prompt_scores.py).

Letters: B rows of the cache, M entries of one call (each names its row), T tokens per
entry of a prefill or of one decode step (the last token and a draft of k = T - 1), W last
tokens of a sequence, S slots, V vocabulary, G guides, n likeliest tokens.
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
  """The next tokens of sequences; entry m is the sequence of row index[m]."""

  index: Int[Array, 'M']  # Distinct rows; B or more marks an unused entry.
  rows: types.Rows
  targets: prompt_scores.Targets | None = None  # The tokens to score; None scores none.
  states: kv_cache.Slots | None = None  # Which recurrent states to read and to save.


class DecodeBatch(NamedTuple):
  """The requests of one decode; entry m continues the sequence in row rows[m]."""

  rows: Int[Array, 'M']  # Distinct rows; B or more marks an unused entry.
  length: Int[Array, 'M']  # Tokens in the cache; the sequence is one token longer.
  ends: Int[Array, 'M W']  # The last tokens; short sequences are padded with drafts.NONE.
  budget: Int[Array, 'M']  # Maximum number of tokens to sample; 0 does not run.
  keys: UInt32[Array, 'M 2']  # The random key of each request.
  temperature: Float[Array, 'M']  # The sampling temperature; 0 is greedy.
  top: Bool[Array, 'M']  # Whether to report log-probs of the likeliest tokens.
  replay: Bool[Array, 'M']  # Whether to report the sequence's experts at its end.
  guide_mask: Bool[Array, 'G M']  # Whether guide g changes the logits of entry m.
  guide_states: tuple[guide_lib.State, ...]  # The state of each guide, arrays [M, ...].
  # How far coordinates lag positions, if the policy takes pictures.
  saved: Int[Array, 'M'] | None = None
  states: kv_cache.Slots | None = None
  adapters: lora.Adapters | None = None  # Each entry's adapter, if the engine has any.


class Decoded(NamedTuple):
  """The result of one decode; entry m sampled tokens[m, :count[m]]."""

  tokens: Int[Array, 'M steps']  # The sampled tokens.
  # Their log-probs under the policy's temperature-scaled full softmax.
  logprobs: Float[Array, 'M steps']
  # Their log-probs under the sampling distribution, after guides and truncation; equal to
  # `logprobs` without them.
  behaviour_logprobs: Float[Array, 'M steps']
  # The value of the state before each token; 0 if the policy has no value head.
  values: Float[Array, 'M steps']
  count: Int[Array, 'M']  # The number of sampled tokens.
  calls: Int[Array, 'M']  # The number of policy calls that sampled them.
  stopped: Bool[Array, 'M']  # Whether a guide ended the reply.
  top_tokens: Int[Array, 'M steps n']  # The likeliest tokens, if requested.
  top_logprobs: Float[Array, 'M steps n']  # Their log-probs.
  # The experts that computed each sequence, [tokens, L, k], for the entries with `replay`
  # whose reply has ended. Device.decode adds them.
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
  """Writes the next tokens of sequences to the cache, after those already cached.

  Reads and writes the first `bucket` slots of each row; all positions except NOWHERE must
  be below it. The cache is donated; `params` come from engine_params.unstack. With
  targets, a separately compiled program also returns their scores.
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
  """Samples until every entry has stopped, with at most `steps` calls of the policy.

  A token's randomness depends on (key, position) only, so that other rows, the split of a
  reply into decodes, and drafts do not change it. A drafted token is accepted if sampling
  chooses the same token there. The keys and values of accepted tokens are already in the
  cache; those of rejected tokens are overwritten before anything reads them.

  Args:
    params: The policy's parameters, from engine_params.unstack.
    cache: The cache of all rows; donated.
    batch: The requests.
    guide_params: The parameters of each guide.
    places: The index of drafts; None with k = 0.
    config: The policy's shape.
    guides: All guides of the engine (G).
    steps: Maximum number of calls of the policy.
    bucket: How many slots of each row are read and written, at least length +
      drafts.count_most(steps, k).
    in_place: Whether entry m is row m, for all rows and slots. The cache is then updated
      in place and not copied.
    k: Number of drafted tokens per entry and call.

  Returns:
    The cache, the guides' states after each entry's last token, and the tokens.
  """
  B = len(jax.tree.leaves(cache)[0])
  # Rows are copied once per decode; attention then reads `bucket` slots in each call.
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
  """The policy and its guides; see `decode`."""

  params: decoder.Params
  config: decoder.DecoderConfig
  guides: tuple[guide_lib.Guide, ...]
  guide_params: tuple


class _Replies(NamedTuple):
  """The replies of a decode so far."""

  ends: Int[Array, 'M W']  # The last tokens of each sequence.
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
  """Computes each sequence's last token and draft; samples 1 to k + 1 tokens of each."""
  out, alive = replies.out, replies.alive
  tokens_MT = replies.ends[:, -1:]
  if k:
    draft_Mk = drafts.propose(places, replies.ends, k)
    tokens_MT = jnp.concatenate([tokens_MT, draft_Mk], axis=1)
  # Stopped replies are still computed but written NOWHERE, as are drafted tokens beyond
  # the budget.
  steps_1T = jnp.arange(k + 1)[None]
  left_M1 = jnp.minimum(batch.budget, out.tokens.shape[1])[:, None] - out.count[:, None]
  runs_MT = alive[:, None] & (steps_1T < left_M1) & (tokens_MT != drafts.NONE)
  length_M1 = (batch.length + out.count)[:, None]
  positions_MT = jnp.where(runs_MT, length_M1 + steps_1T, kv_cache.NOWHERE)
  # Drafts may copy ids outside the vocabulary, such as those of pictures.
  known_MT = jnp.clip(tokens_MT, 0, policy.config.vocab_size - 1)
  rows = rows_lib.continue_text(known_MT, positions_MT, batch.saved)
  rows = rows._replace(adapters=batch.adapters)
  ops = ops_lib.choose(policy.config)
  x_MTD, view = ops.extend(policy.params, policy.config, rows, view)
  logits_MTV = ops.logits(policy.params, policy.config, x_MTD)
  replies = replies._replace(out=out._replace(calls=out.calls + alive))

  def sample(t, running_M, replies):
    """Samples the token after token t; returns which entries drafted the same one."""
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
  """Samples one token of each running reply, from hidden states and logits."""
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
  """Chooses each entry's token at `position`; returns it and its behaviour log-prob.

  `logprobs_MV` are the policy's; `apply_guides` returns logits.
  """
  u_M = sampling_lib.make_uniforms(batch.keys, position)

  def choose(logprobs_MV):
    token_M = sampling_lib.choose_tokens(logprobs_MV, u_M, batch.temperature == 0)
    return token_M, _take(logprobs_MV, token_M)

  # Without guides, the second softmax over the vocabulary is skipped.
  token_M, behaviour_M = jax.lax.cond(
    batch.guide_mask.any(),
    lambda: choose(jax.nn.log_softmax(apply_guides())),
    lambda: choose(logprobs_MV),
  )
  # The second softmax may round differently, so entries without a guide use the first:
  # the guides of other entries must not change their numbers.
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
  # top_k is slow, and skipped if no entry asks for it.
  values_Mn, tokens_Mn = jax.lax.cond(
    top_wanted.any(), lambda: tuple(jax.lax.top_k(logprobs_MV, n)), lambda: none
  )
  # A select instead of a scatter, which XLA runs serially on a CPU.
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
  """Selects `new` in the entries that are alive, broadcast over the other axes."""
  return jnp.where(alive.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _gather_rows(
  cache: kv_cache.Cache, rows: Int[Array, 'M'], bucket: int
) -> kv_cache.Cache:
  """Copies the first `bucket` slots of M rows out of the cache (rings have fewer)."""
  return jax.tree.map(lambda x: x[rows, :, :bucket], cache)


def _scatter_rows(
  cache: kv_cache.Cache, rows: Int[Array, 'M'], view: kv_cache.Cache
) -> kv_cache.Cache:
  """Writes rows from `_gather_rows` back into the cache; drops unused entries."""
  return jax.tree.map(
    lambda x, v: x.at[rows, :, : v.shape[2]].set(v, mode='drop'), cache, view
  )
