"""A forward pass in which a token's bits depend only on the sequence up to it.

The order of sums in a matmul, and XLA's fusions around it, depend on a program's shapes:
a decode, a prefill and an update give the same token different last bits. Here all of
them run the same code: a block of U tokens at a time, from any sequences, in the body of
a loop that has the same shapes in every program. Each token attends on its own to the
keys of its sequence, in blocks counted from the sequence's first token. XLA compiles a
loop's body separately if it does not know the number of steps, and the rows of a matmul
of fixed shape do not depend on each other. So a token's bits are independent of batch,
prefill chunk, cache bucket, packing and shared prefixes. tests/test_batch_invariant.py
compares them.

Layers compute in float32. If config.dtype is bfloat16, kernels, keys, values and the
layers' outputs are rounded to it by reduce_precision, which XLA never removes.

Letters as in decoder.py, and: M tokens of all rows, U tokens or C keys of a block.
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

# The tokens of a block, and the keys of a block.
_TOKENS, _KEYS = 16, 64
_HIDDEN = float(jnp.finfo(jnp.float32).min)
# (tokens' indices [U], positions in their sequences [C]) -> keys and values [U, C, K, H].
Read = Callable[[Array, Array], tuple[Array, Array]]
# (a layer's index, its keys and values [M, K, H]) -> a function that reads them.
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
  """Raises ValueError for options that have not been shown to give equal bits.

  Args:
    config: The policy's shape.
    params: The policy's parameters.
    chips: Number of devices of the mesh.
    adapters: Number of named adapters that the engine has room for.
    weights: The format of the engine's kernels.
    cache: The format of the engine's cache.

  Raises:
    ValueError: Names the unsupported option.
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
  """Computes decoder.hidden_and_loads of packed rows, without experts or gradient.

  Positions alone identify the tokens of a sequence, in segments and along paths. The
  params are the learner's.
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
  # A token that is not written must not read past the last block.
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
  """Applies all layers and the final norm to tokens at their positions."""
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
  """Applies a layer to a block of tokens; also returns their keys and values [U, K, H].

  Without `attend`, only keys and values are valid; XLA drops the rest as unused.
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
  """Attends from each token to its sequence's keys, in blocks from the first key on."""
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
    # A block with no visible key changes nothing: its weights are 0 and `before` is 1; a
    # block before the window is erased by `before` = 0 at the first visible key.
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
  """Finds for each token the indices of its sequence's tokens at positions 0, 1, ...

  Paths are in depth-first order, so each is the last earlier token with that position.
  Entries past the token's own position are meaningless.
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
  """Computes decoder.logprobs from the learner's params, without a gradient."""
  score = _make_head(params, config)
  order_M = jnp.argsort(~wanted.reshape(-1), stable=True)
  x_MD, tokens_M = x.reshape(-1, x.shape[-1])[order_M], tokens.reshape(-1)[order_M]
  temperature_M = jnp.full(len(x_MD), temperature, jnp.float32)

  def describe(x_CD, token_C, temperature_C):
    # The same loops as in the engine, with only the division between them.
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
  """Makes a function of parameters with the gradient of the plain configuration.

  Both compute the same up to rounding; gradients need no equal bits.
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
  # XLA would transpose tied embeddings in some programs only.
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
  """Applies a function of blocks [size, ...] to the first `count` (or M) of [M, ...]."""
  M = len(arrays[0])
  count = jnp.asarray(M) if count is None else count
  # With a single block XLA would drop the slices and compile other products.
  blocks = max(2, -(-M // size))
  pad = lambda x: jnp.pad(x, [(0, blocks * size - M)] + [(0, 0)] * (x.ndim - 1))
  arrays = tuple(map(pad, arrays))
  take = lambda x, i: jax.lax.dynamic_slice_in_dim(x, i * size, size)

  def add_block(i, out):
    # The barriers keep operations around the block out of its fusions.
    block = jax.lax.optimization_barrier([take(x, i) for x in arrays])
    new = jax.lax.optimization_barrier(fn(*block))
    put = jax.lax.dynamic_update_slice_in_dim
    return jax.tree.map(lambda x, y: put(x, y, i * size, 0), out, new)

  shapes = jax.eval_shape(fn, *[take(x, 0) for x in arrays])
  shape = lambda x: (blocks * size, *x.shape[1:])
  out = jax.tree.map(lambda x: jnp.zeros(shape(x), x.dtype), shapes)
  # XLA would not compile the body separately if it knew the number of steps.
  steps = jax.lax.optimization_barrier((count + size - 1) // size)
  out = jax.lax.fori_loop(0, steps, add_block, out)
  return jax.tree.map(lambda x: x[:M], out)


def _round(x: Any, config) -> Any:
  return jax.tree.map(lambda x: engine_params.round_leaf(x, config.dtype), x)


def _widen(layer, config) -> decoder.Params:
  """Casts a layer to float32, and splits the heads' axis of the query kernel again."""
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
  rings=False,  # Blocks of keys begin at a sequence's first token.
)
