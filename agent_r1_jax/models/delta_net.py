"""Gated DeltaNet: a recurrent layer, with a state instead of keys and values.

As in arXiv 2412.06464, a head's state S is a matrix that maps keys to values. Each token
decays it by α = exp(g), and then corrects by a factor β the value that S gives for k:

  S' = α S,  S = S' + k β (v - S'ᵀ k)ᵀ,  o = Sᵀ q

k and q have length 1, and q is divided by √X; q, k and v pass a convolution over the last
Z tokens. Decoding computes one token after the other; rows of many tokens are cut into
chunks, which are computed by matrix products alone.

A sequence begins at position 0: there the state is zero, and convolutions do not see
earlier tokens. States are computed in float32, with exact products.

Letters as in decoder.py, and: G key heads, U value heads, R = U / G, X numbers of a key,
Y of a value, Z tokens of a convolution; n chunks of C tokens each.
"""

import functools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from agent_r1_jax import types
from agent_r1_jax.models import kv_cache, sharding
from agent_r1_jax.models.decoder_config import DecoderConfig
from agent_r1_jax.models.layers import Projection, RMSNorm, apply_flat

_CHUNK = 64
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Inputs(NamedTuple):
  """The float32 inputs of the recurrence."""

  q: Float[Array, 'B T G X']
  k: Float[Array, 'B T G X']
  v: Float[Array, 'B T U Y']
  g: Float[Array, 'B T U']  # ln α, below 0.
  beta: Float[Array, 'B T U']
  begins: Bool[Array, 'B T']  # Whether the token is the first of its sequence.


class DeltaNet(nn.Module):
  """The part of a layer that mixes tokens. `cache` is None in training."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x_BTD, rows, cache: kv_cache.StateCache | None):
    """Mixes each token with earlier tokens of its sequence; also returns the cache."""
    if isinstance(rows.sees, types.Tree):
      raise ValueError(
        f'rows: a {self.config.family} has layers with a state, which follows one text '
        'and no tree; give whole texts (batch.trees=False, MicrobatchShape(trees=False)).'
      )
    c = self.config
    project = functools.partial(Projection, dtype=c.dtype)
    key, value = (
      (c.linear_key_heads, c.linear_key_dim),
      (c.linear_value_heads, c.linear_value_dim),
    )
    written_BT, mixed, windows = rows.positions < kv_cache.NOWHERE, [], []
    for name, heads in (('q', key), ('k', key), ('v', value)):
      x = apply_flat(project(heads, name=name), x_BTD)
      before = None if cache is None else cache.windows[len(mixed)][:, :, 0]
      convolve = Convolution(c.conv_width, heads, name=f'{name}_conv')
      x, window = convolve(x, rows.positions, before, written_BT.sum(1))
      mixed.append(x.astype(jnp.float32))
      windows.append(window)
    q, k = (x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in mixed[:2])
    b, a, z = (
      apply_flat(project(heads, name=name), x_BTD).astype(jnp.float32)
      for name, heads in (('b', value[:1]), ('a', value[:1]), ('z', value))
    )
    g = Decay(name='decay')(a)
    # Tokens that are not written must leave the state unchanged.
    g, beta = (jnp.where(written_BT[..., None], y, 0) for y in (g, nn.sigmoid(b)))
    inputs = Inputs(q * key[1] ** -0.5, k, mixed[2], g, beta, rows.positions == 0)
    if self.is_initializing():
      out_BTUY = mixed[2]
    elif cache is None:
      out_BTUY, _ = _compute_on_mesh(inputs, None)
    else:
      out_BTUY, state = _compute_on_mesh(inputs, cache.states[:, :, 0])
      put = lambda x, y: x.at[:, :, 0].set(y)
      windows = jax.tree.map(put, cache.windows, tuple(windows))
      cache = cache._replace(states=put(cache.states, state), windows=windows)
    out_BTUY = RMSNorm(c.norm_eps, name='out_norm')(out_BTUY) * nn.silu(z)
    init = nn.initializers.variance_scaling(1 / (2 * c.num_layers), 'fan_in', 'normal')
    out = Projection((c.embed_dim,), c.dtype, 2, kernel_init=init, name='o')
    return apply_flat(out, out_BTUY), cache


class Convolution(nn.Module):
  """A causal depthwise convolution over a sequence's last Z tokens, then SiLU."""

  width: int
  heads: tuple[int, int]

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B T G X'],
    positions_BT: Int[Array, 'B T'],
    before: Float[Array, 'B G W X'] | None,
    count_B: Int[Array, 'B'],
  ) -> tuple[Array, Array]:
    """Returns the outputs, and each row's last inputs after `count_B` tokens."""
    Z, T = self.width, x.shape[1]
    init = nn.initializers.variance_scaling(1.0, 'fan_in', 'uniform', in_axis=(0, 1))
    flat = lambda key, shape: init(key, (*shape[:2], shape[2] * shape[3])).reshape(shape)
    kernel = self.param('kernel', flat, (1, Z, *self.heads))[0].astype(x.dtype)
    if before is None:
      before = jnp.zeros((len(x), self.heads[0], Z - 1, self.heads[1]), x.dtype)
    all_BSGX = jnp.concatenate([jnp.swapaxes(before, 1, 2).astype(x.dtype), x], axis=1)
    total = jnp.zeros(x.shape, jnp.float32)
    for tap in range(Z):
      known_BT = positions_BT >= Z - 1 - tap
      term = all_BSGX[:, tap : tap + T].astype(jnp.float32) * kernel[tap][None, None]
      total += jnp.where(known_BT[..., None, None], term, 0)
    last_BZ = count_B[:, None] + jnp.arange(Z - 1)[None]
    window = jnp.take_along_axis(all_BSGX, last_BZ[..., None, None], axis=1)
    return nn.silu(total).astype(x.dtype), jnp.swapaxes(window, 1, 2)


class Decay(nn.Module):
  """g = -exp(log) · softplus(a + bias)."""

  @nn.compact
  def __call__(self, a: Float[Array, 'B T U']) -> Array:
    """Computes ln α for each head."""
    log = lambda key, shape: jnp.log(
      jax.random.uniform(key, shape, minval=0.01, maxval=16)
    )
    leaf = lambda name, init: self.param(name, init, a.shape[-1:]).astype(jnp.float32)
    bias, log_U = leaf('bias', nn.initializers.ones), leaf('log', log)
    return -jnp.exp(log_U)[None, None] * nn.softplus(a + bias[None, None])


def _compute_on_mesh(inputs: Inputs, state: Array | None) -> tuple[Array, Array]:
  """Runs `compute`; on a mesh, each chip computes some heads of complete rows."""
  B, _, G, X = inputs.q.shape
  U, Y = inputs.v.shape[2:]
  if state is None:
    state = jnp.zeros((B, U, X, Y), jnp.float32)
  mesh = sharding.active_mesh()
  if mesh is None:
    return compute(inputs, state)
  # If `tensor` does not divide the heads, each of its chips computes all of them.
  split = 'tensor' if G % mesh.shape['tensor'] == 0 else None
  heads = PartitionSpec(sharding.ROW_AXES, None, split)
  states = PartitionSpec(sharding.ROW_AXES, split)
  specs: Any = (heads,) * 5 + (PartitionSpec(sharding.ROW_AXES),)
  specs = Inputs(*specs)
  return jax.shard_map(
    compute,
    in_specs=(specs, states),
    out_specs=(heads, states),
    check_vma=False,
  )(inputs, state)


def compute(
  inputs: Inputs, state: Float[Array, 'B U X Y']
) -> tuple[Float[Array, 'B T U Y'], Float[Array, 'B U X Y']]:
  """Computes each token's o, and the state after the last token.

  `state` is the state before the first token; tokens of a new sequence do not see it.
  """
  one = inputs.q.shape[1] == 1
  return _compute_token(inputs, state) if one else _compute_chunks(inputs, state)


def _compute_token(inputs: Inputs, state: Array) -> tuple[Array, Array]:
  repeats = inputs.v.shape[2] // inputs.q.shape[2]
  q, k = (jnp.repeat(x[:, 0], repeats, axis=1) for x in (inputs.q, inputs.k))
  v, g, beta = (x[:, 0] for x in (inputs.v, inputs.g, inputs.beta))
  state = jnp.where(inputs.begins[:, :1, None, None], 0.0, state)
  state = state * jnp.exp(g)[..., None, None]
  change = (v - _einsum('buxy,bux->buy', state, k)) * beta[..., None]
  state += k[..., None] * change[:, :, None]
  return _einsum('buxy,bux->buy', state, q)[:, None], state


def _compute_chunks(inputs: Inputs, state: Array) -> tuple[Array, Array]:
  B, T, G, X = inputs.q.shape
  U, Y = inputs.v.shape[2:]
  C = min(_CHUNK, T)
  # Another sequence may have left infinities, which a product with 0 turns to NaN.
  state = jnp.where(inputs.begins[:, :1, None, None], 0.0, state)

  def cut(x, *heads):
    """Cuts tokens into chunks, [B, T, ...] -> [n, B, heads, C, ...], padded with 0."""
    x = jnp.pad(x, ((0, 0), (0, -T % C), *[(0, 0)] * (x.ndim - 2)))
    x = x.reshape(B, -1, C, *heads, *x.shape[3:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 2 + len(heads))

  q, k = (cut(x, G) for x in inputs[:2])
  v, g, beta = (cut(x, G, U // G) for x in inputs[2:5])
  chunks = _prepare(q, k, v, g, beta, cut(inputs.begins))

  def step(state, chunk):
    """Computes a chunk from the state before it; states are [B, G, R, X, Y]."""
    values, reads, queries, within, keys, left = chunk
    values -= _einsum('bgrcx,bgrxy->bgrcy', reads, state)
    out = _einsum('bgrcx,bgrxy->bgrcy', queries, state)
    out += _einsum('bgrcd,bgrdy->bgrcy', within, values)
    state = state * left[..., None, None] + _einsum('bgrcx,bgrcy->bgrxy', keys, values)
    return state, out

  state, out = jax.lax.scan(step, state.reshape(B, G, U // G, X, Y), chunks)
  out = jnp.transpose(out, (1, 0, 4, 2, 3, 5)).reshape(B, -1, U, Y)[:, :T]
  return out, state.reshape(B, U, X, Y)


def _prepare(q, k, v, g, beta, begins) -> tuple[Array, ...]:
  """Computes the parts of all chunks that do not depend on the states.

  The values that a chunk writes solve a triangular system, since each token corrects the
  writes of the tokens before it. They are linear in the state before the chunk.

  Returns:
    For each chunk and head: the values written from a zero state [C, Y]; the keys that
    read the state for their correction [C, X]; the queries that read the state [C, X];
    the weights between the chunk's tokens [C, C]; the keys that write the next state
    [C, X]; and the decay of the state over the chunk.
  """
  C = q.shape[-2]
  # Sequences in a chunk are numbered; the state before the chunk belongs to number 0.
  text = jnp.cumsum(begins, -1)[:, :, None, None]  # [n, B, 1, 1, C]
  total = jnp.cumsum(
    g, -1
  )  # [n, B, G, R, C], the ln of the decay since the start of the chunk.
  seen = (text[..., :, None] == text[..., None, :]) & jnp.tri(C, dtype=bool)[
    None, None, None, None
  ]
  since = jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf))
  like, within = (_einsum('nbgcx,nbgdx->nbgcd', x, k)[:, :, :, None] for x in (k, q))
  system = beta[..., None] * like * since
  first = jnp.where(text == 0, jnp.exp(total), 0.0)[..., None]
  k, q = k[:, :, :, None], q[:, :, :, None]
  both = jnp.concatenate([v, k * first], -1) * beta[..., None]
  solved = _solve(system, both)
  values, reads = jnp.split(solved, [v.shape[-1]], axis=-1)
  last = jnp.where(text == text[..., -1:], jnp.exp(total[..., -1:] - total), 0.0)
  left = first[..., -1, 0]
  return values, reads, q * first, within * since, k * last[..., None], left


@jax.custom_vjp
def _solve(system: Array, right: Array) -> Array:
  """Solves (I + L) y = right, where L is `system` [*, C, C] below its diagonal.

  Uses products alone, because jaxlib's triangular solve deadlocks on CPUs: two at once on
  two cores never end (jaxlib 0.10.2, lapack_strsm_ffi).
  """
  return _solve_forward(system, right)[0]


def _solve_forward(system: Array, right: Array) -> tuple[Array, tuple[Array, Array]]:
  inverse = _invert(system)
  solved = _einsum('...cd,...dx->...cx', inverse, right)
  return solved, (inverse, solved)


def _solve_backward(saved: tuple[Array, Array], slope: Array) -> tuple[Array, Array]:
  inverse, solved = saved
  slope = _einsum('...dc,...dx->...cx', inverse, slope)
  return -jnp.tril(_einsum('...cx,...dx->...cd', slope, solved), -1), slope


_solve.defvjp(_solve_forward, _solve_backward)


def _invert(system: Array) -> Array:
  """Inverts I + L by diagonal blocks, each made of two blocks of half its size.

  The inverse of [[A, 0], [B, D]] is [[A', 0], [-D' B A', D']], where ' is the inverse.
  """
  C = system.shape[-1]
  size = 1 << (C - 1).bit_length()
  system = jnp.pad(system, [(0, 0)] * (system.ndim - 2) + [(0, size - C)] * 2)
  outer = system.shape[:-2]
  inverse = jnp.ones((*outer, size, 1, 1), system.dtype)
  while (b := inverse.shape[-1]) < size:
    n = size // (2 * b)
    pairs = system.reshape(*outer, n, 2, b, n, 2, b)[..., 1, :, :, 0, :]
    pairs = jnp.moveaxis(jnp.diagonal(pairs, axis1=-4, axis2=-2), -1, -3)
    first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
    corner = -_einsum('...cd,...de,...ef->...cf', second, pairs, first)
    upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    inverse = jnp.concatenate([upper, jnp.concatenate([corner, second], -1)], -2)
  return inverse[..., 0, :C, :C]
