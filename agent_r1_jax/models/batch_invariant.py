"""The forward pass whose bits for a token depend on the text before it alone.

How a product of matrices adds its numbers, and how XLA fuses what is around it, depends
on the shapes of a program: a decode, a prefill and an update compute the same token to
other last bits. Here all of them compute it by the same code: a block of U tokens at a
time, whichever texts they are of, in the body of a loop that has one shape in every
program. Each token attends by itself to the keys of its text, in blocks that are counted
from the text's first token. XLA compiles the body of a loop by itself, if it does not
know the number of steps, and the rows of a product of one shape do not depend on each
other; so a token's bits depend neither on the batch, the chunk of a prefill and the
bucket of the cache, nor on packing and shared prefixes. tests/test_batch_invariant.py
compares them.

Inside a layer numbers are float32. Where config.dtype is bfloat16, kernels, keys, values
and what goes from layer to layer have its values; they are rounded by reduce_precision,
which XLA never leaves out.

Letters as in decoder.py, and: M tokens of all rows, U tokens of a block, C keys of one.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agent_r1_jax import types
from agent_r1_jax.models import (
  attention,
  decoder,
  engine_params,
  head,
  kv_cache,
  lora,
  ops,
  sharding,
)
from agent_r1_jax.models import (
  block as block_lib,
)

# Tokens of a block, and keys of one.
_TOKENS, _KEYS = 16, 64
_HIDDEN = float(jnp.finfo(jnp.float32).min)
# (numbers of tokens [U], positions in their texts [C]) -> keys and values, [U, C, K, H].
Read = Callable[[Array, Array], tuple[Array, Array]]
# (number of a layer, its keys and values [M, K, H]) -> how they are read.
Store = Callable[[int, Array, Array], Read]


def check(
  config: decoder.DecoderConfig,
  params: decoder.Params,
  *,
  chips: int = 1,
  adapters: int = 0,
  weights: str = 'model',
  cache: str = 'model',
) -> None:
  """Refuses what has not been shown to have equal bits.

  Args:
    config: The policy's shape.
    params: Its parameters.
    chips: The devices of the mesh.
    adapters: The named adapters that an engine has room for.
    weights: The format of the engine's kernels.
    cache: The numbers of its cache.

  Raises:
    ValueError: The message names it.
  """
  unknown = {
    f'on a {sharding.platform()}': sharding.platform() != 'cpu',
    f'on {chips} chips': chips > 1,
    'with experts': config.num_experts > 0,
    'with pictures': config.vision is not None,
    'with layers that have a state': any(config.recurrent),
    'with heads of two kinds': config.facts.has_full,
    'with LoRA adapters (model.lora_rank)': lora.is_in(params),
    'with named adapters': adapters > 0,
    f'with kernels of 8 bits (engine.weights={weights!r})': weights != 'model',
    f'with a cache of 8 bits (engine.cache={cache!r})': cache != 'model',
  }
  if found := [what for what, is_so in unknown.items() if is_so]:
    raise ValueError(
      f'model.batch_invariant: equal bits are not known {" and ".join(found)}, only on '
      'one CPU with the kernels of the model; leave it out.'
    )


def hidden_and_loads(
  params: decoder.Params, config: decoder.DecoderConfig, rows: types.Rows
) -> tuple[Float[Array, 'B T D'], None]:
  """Computes decoder.hidden_and_loads of packed rows; there are no experts.

  Positions alone tell where the tokens of a text are, in segments and along paths. The
  params are the learner's; there is no gradient.
  """
  B, T = rows.tokens.shape
  path_MT = _find_paths(rows.positions)

  def store(layer, k_MKH, v_MKH):
    def read(token_U, places_C):
      path_UC = path_MT[token_U[:, None], jnp.minimum(places_C, T - 1)[None]]
      return k_MKH[path_UC], v_MKH[path_UC]

    return read

  params = engine_params.unstack(params, config)
  text = rows.tokens.reshape(-1), rows.positions.reshape(-1)
  return _run(params, config, *text, store).reshape(B, T, -1), None


def extend(
  params: decoder.Params,
  config: decoder.DecoderConfig,
  rows: types.Rows,
  cache: tuple[kv_cache.LayerCache, ...],
) -> tuple[Float[Array, 'B T D'], kv_cache.Cache]:
  """Computes decoder.extend."""
  B, T = rows.tokens.shape
  slots = cache[0].keys.shape[2]
  # Of a token that is not written, no more blocks are read than there are.
  positions = jnp.minimum(rows.positions, slots)
  new_cache: list[Any] = []

  def store(layer, k_MKH, v_MKH):
    k_BTKH, v_BTKH = (x.reshape(B, T, *x.shape[1:]) for x in (k_MKH, v_MKH))
    written = kv_cache.write(cache[layer], k_BTKH, v_BTKH, positions)
    new_cache.append(written)

    def read(token_U, places_C):
      where = (token_U // T)[:, None], slice(None), jnp.minimum(places_C, slots - 1)[None]
      k_UCKH, v_UCKH = (x_BKSH[where] for x_BKSH in (written.keys, written.values))
      return k_UCKH, v_UCKH

    return read

  x_MD = _run(params, config, rows.tokens.reshape(-1), positions.reshape(-1), store)
  return x_MD.reshape(B, T, -1), tuple(new_cache)


def _run(params, config, tokens_M, positions_M, store: Store) -> Float[Array, 'M D']:
  """Computes all layers of tokens and their positions, and the last norm."""
  exact = dataclasses.replace(config, dtype='float32', ops=None)
  embedding = params['embed']['embedding']
  x_MD = _by_blocks(
    lambda token_U: decoder.scale_embeddings(embedding[token_U], config), tokens_M
  )
  number_M = jnp.arange(len(tokens_M))
  kinds = decoder.layer_kinds(config) or [None] * config.num_layers
  for number, (layer, kind) in enumerate(zip(params['layers'], kinds, strict=True)):
    apply = functools.partial(_apply_layer, exact, _widen(layer, config), kind)
    window = config.window if kind and kind.slides else 0
    rules = attention.Rules(window, config.attention_cap)

    def project(x_UD, position_U, apply=apply):
      return _round(apply(x_UD, position_U)[1:], config)

    read = store(number, *_by_blocks(project, x_MD, positions_M))

    def add_layer(x_UD, position_U, number_U, apply=apply, read=read, rules=rules):
      of_block = functools.partial(read, number_U)
      attend = lambda q_UNH: _attend(q_UNH, position_U, of_block, rules)
      return _round(apply(x_UD, position_U, attend)[0], config)

    x_MD = _by_blocks(add_layer, x_MD, positions_M, number_M)
  variables = {'params': params['final_norm']}
  norm = block_lib.make_norm(config)
  normalise = lambda x_UD: norm.apply(variables, x_UD.astype(jnp.float32))
  return _by_blocks(lambda x_UD: _round(normalise(x_UD), config), x_MD)


def _apply_layer(
  exact, layer, kind, x_UD, position_U, attend=None
) -> tuple[Array, Array, Array]:
  """Applies a layer to a block of tokens; returns its keys and values, [U, K, H], too.

  Without `attend`, only these have a meaning: XLA leaves out what nobody reads.
  """
  keys_and_values: list[Array] = []

  def attend_block(q_1UNH, k_1UKH, v_1UKH):
    keys_and_values.extend((k_1UKH[0], v_1UKH[0]))
    return attend(q_1UNH[0])[None] if attend else q_1UNH

  position_1U = position_U[None]
  rows = types.Rows(jnp.zeros_like(position_1U), position_1U)  # A layer reads no tokens.
  angles = decoder.compute_angles(rows, exact)
  block: Any = block_lib.Block(exact, attend_block)
  x_1U = x_UD[None].astype(jnp.float32)
  x_1UD, _ = block.apply({'params': layer}, x_1U, rows, angles, kind)
  k_UKH, v_UKH = keys_and_values
  return x_1UD[0], k_UKH, v_UKH


def _attend(q_UNH, position_U, read, rules: attention.Rules) -> Float[Array, 'U N H']:
  """Attends from each token to the keys of its text, in blocks from its first one on."""
  U, N, H = q_UNH.shape
  K = jax.eval_shape(read, jax.ShapeDtypeStruct((_KEYS,), jnp.int32))[0].shape[2]
  q_UKGH = (q_UNH * H**-0.5).reshape(U, K, N // K, H)

  def add_keys(j, carry):
    most_UKG, sum_UKG, out_UKGH = carry
    place_C = j * _KEYS + jnp.arange(_KEYS)
    k_UCKH, v_UCKH = jax.lax.optimization_barrier(read(place_C))
    k_UCKH, v_UCKH = k_UCKH.astype(jnp.float32), v_UCKH.astype(jnp.float32)
    after_UC = position_U[:, None] - place_C[None]
    sees_UC = after_UC >= 0
    if rules.window:
      sees_UC &= after_UC < rules.window
    scores_UKGC = jnp.einsum('ukgh,uckh->ukgc', q_UKGH, k_UCKH)
    scores_UKGC = attention.cap_scores(scores_UKGC, rules.cap)
    scores_UKGC = jnp.where(sees_UC[:, None, None], scores_UKGC, _HIDDEN)
    new_UKG = jnp.maximum(most_UKG, scores_UKGC.max(-1))
    # A block of which no key is seen changes nothing: its weights are 0 and `before` is
    # 1; or, if it is before the window, `before` is 0 at the first key that is seen.
    p_UKGC = jnp.exp(scores_UKGC - new_UKG[..., None])
    before_UKG = jnp.exp(most_UKG - new_UKG)
    out_UKGH *= before_UKG[..., None]
    out_UKGH += jnp.einsum('ukgc,uckh->ukgh', p_UKGC, v_UCKH)
    return new_UKG, sum_UKG * before_UKG + p_UKGC.sum(-1), out_UKGH

  zeros_UKG = jnp.zeros(q_UKGH.shape[:-1])
  begin = zeros_UKG + _HIDDEN, zeros_UKG, jnp.zeros(q_UKGH.shape)
  count = position_U.max() // _KEYS + 1
  _, sum_UKG, out_UKGH = jax.lax.fori_loop(0, count, add_keys, begin)
  return (out_UKGH / sum_UKG[..., None]).reshape(U, N, H)


def _find_paths(positions_BT: Int[Array, 'B T']) -> Int[Array, 'M T']:
  """Finds where a token's text has its position 0, 1, ...: the numbers of those tokens.

  It is the last token before it of that position, since paths are in depth-first order.
  What stands at a later position than the token's own has no meaning.
  """
  B, T = positions_BT.shape

  def step(last_BT, t):
    here_BT = positions_BT[:, t, None] == jnp.arange(T)[None]
    last_BT = jnp.where(here_BT, t + T * jnp.arange(B)[:, None], last_BT)
    return last_BT, last_BT

  _, last_TBT = jax.lax.scan(step, jnp.zeros((B, T), jnp.int32), jnp.arange(T))
  return jnp.swapaxes(last_TBT, 0, 1).reshape(B * T, T)


def logits(
  params: decoder.Params, config: decoder.DecoderConfig, x: Float[Array, '*B D']
) -> Float[Array, '*B V']:
  """Computes decoder.logits."""
  score = _make_head(params, config)
  return _by_blocks(score, x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def log_softmax(logits: Float[Array, 'M V']) -> Float[Array, 'M V']:
  """Computes jax.nn.log_softmax."""
  return _by_blocks(jax.nn.log_softmax, logits)


def logprobs(
  params: decoder.Params,
  config: decoder.DecoderConfig,
  x: Float[Array, 'B T D'],
  tokens: Int[Array, 'B T'],
  wanted: Bool[Array, 'B T'],
  temperature: float,
) -> tuple[Float[Array, 'B T'], Float[Array, 'B T']]:
  """Computes decoder.logprobs, from the learner's params; there is no gradient."""
  score = _make_head(params, config)
  order_M = jnp.argsort(~wanted.reshape(-1), stable=True)
  x_MD, tokens_M = x.reshape(-1, x.shape[-1])[order_M], tokens.reshape(-1)[order_M]
  temperature_M = jnp.full(len(x_MD), temperature, jnp.float32)

  def describe(x_CD, token_C, temperature_C):
    # The loops that the engine has, and between them nothing but the division.
    logits_CV = _by_blocks(score, x_CD) / temperature_C[:, None]
    logp_CV = log_softmax(logits_CV)
    chosen_C = jnp.take_along_axis(logp_CV, token_C[:, None], axis=1)[:, 0]
    return chosen_C, -jnp.sum(jnp.exp(logp_CV) * logp_CV, axis=-1)

  size = min(head.block_tokens(config.vocab_size), len(x_MD))
  arrays = x_MD, tokens_M, temperature_M
  out: Any = _by_blocks(describe, *arrays, count=wanted.sum(), size=size)
  restore = lambda y_M: jnp.zeros_like(y_M).at[order_M].set(y_M).reshape(tokens.shape)
  return restore(out[0]), restore(out[1])


def with_plain_gradient(
  compute: Callable[..., Any], config: decoder.DecoderConfig
) -> Callable[[Any], Any]:
  """Makes a function of parameters whose gradient is that of the plain configuration.

  Both compute the same but for rounding; the gradient needs no bits of its own.
  """
  exact = functools.partial(compute, config=config)
  plain_config = dataclasses.replace(config, ops=None)
  plain = functools.partial(compute, config=plain_config)

  @jax.custom_vjp
  def differentiable(params):
    return exact(params)

  def forward(params):
    return exact(params), params

  def backward(params, cotangents):
    return jax.vjp(plain, params)[1](cotangents)

  differentiable.defvjp(forward, backward)
  return differentiable


def _make_head(params, config) -> Callable[[Array], Array]:
  tied = config.tie_embeddings
  # XLA would transpose tied embeddings in one program and not in another.
  form = 'ud,vd->uv' if tied else 'ud,dv->uv'
  kernel = params['embed']['embedding'] if tied else params['lm_head']['kernel']
  kernel = _round(kernel, config).astype(jnp.float32)

  def score(x_UD):
    logits_UV = jnp.einsum(form, x_UD.astype(jnp.float32), kernel)
    return attention.cap_scores(logits_UV, config.logit_cap)

  return score


def _by_blocks(
  fn: Callable[..., Any],
  *arrays: Array,
  count: Array | None = None,
  size: int = _TOKENS,
) -> Any:
  """Applies a function of blocks [size, ...] to arrays [M, ...], or to their `count`."""
  M = len(arrays[0])
  count = jnp.asarray(M) if count is None else count
  # Of one block XLA would make no slices, and then other products.
  blocks = max(2, -(-M // size))
  pad = lambda x: jnp.pad(x, [(0, blocks * size - M)] + [(0, 0)] * (x.ndim - 1))
  arrays = tuple(map(pad, arrays))
  take = lambda x, i: jax.lax.dynamic_slice_in_dim(x, i * size, size)

  def add_block(i, out):
    # The barriers keep what is around the block out of its fusions.
    block = jax.lax.optimization_barrier([take(x, i) for x in arrays])
    new = jax.lax.optimization_barrier(fn(*block))
    put = jax.lax.dynamic_update_slice_in_dim
    return jax.tree.map(lambda x, y: put(x, y, i * size, 0), out, new)

  shapes = jax.eval_shape(fn, *[take(x, 0) for x in arrays])
  shape = lambda x: (blocks * size, *x.shape[1:])
  out = jax.tree.map(lambda x: jnp.zeros(shape(x), x.dtype), shapes)
  # A loop of one step, or of a known number of them, would not be compiled by itself.
  steps = jax.lax.optimization_barrier((count + size - 1) // size)
  out = jax.lax.fori_loop(0, steps, add_block, out)
  return jax.tree.map(lambda x: x[:M], out)


def _round(x: Any, config) -> Any:
  return jax.tree.map(lambda x: engine_params.round_leaf(x, config.dtype), x)


def _widen(layer, config) -> decoder.Params:
  """Casts a layer to float32; the kernel of the queries gets an axis for heads again."""
  layer = jax.tree.map(lambda x: x.astype(jnp.float32), layer)
  split = lambda x: x.reshape(*x.shape[:-1], config.num_heads, config.head_dim)
  return layer | {'attn': layer['attn'] | {'q': jax.tree.map(split, layer['attn']['q'])}}


INVARIANT = ops.Ops(
  hidden_and_loads=hidden_and_loads,
  extend=extend,
  logits=logits,
  logprobs=logprobs,
  log_softmax=log_softmax,
  differentiate=with_plain_gradient,
  check=check,
  rings=False,  # Its blocks of keys begin at a text's first token.
)
