"""One functional decoder for all families of families.py.

Parameters are a plain dict whose layer leaves are stacked over L; the cache is an
argument and a result. The same Block computes training (packed rows, layers scanned) and
generation (cached rows, layers unrolled, because a scanned cache would be copied at every
layer).

Letters: B rows (packed, or of the cache), T query tokens, S key slots, L layers, D embed,
F feed-forward, N query heads, K key-value heads, G = N / K, H head dim, V vocabulary.
"""

from typing import Any

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agent_r1_jax import types
from agent_r1_jax.models import (
  attention,
  head,
  kv_cache,
  layer_inputs,
  mixed_layers,
  rope,
  sharded_params,
  sharding,
)
from agent_r1_jax.models import rows as rows_lib
from agent_r1_jax.models.block import Block, make_norm
from agent_r1_jax.models.decoder_config import DecoderConfig, layer_kinds
from agent_r1_jax.models.layers import scan_layers
from agent_r1_jax.models.pictures import vision

Params = dict[str, Any]


def compute_angles(rows: types.Rows, c: DecoderConfig) -> tuple[Array, Array]:
  """Computes sin and cos [R, B, T, 1, P] of every rotation that some layer uses."""
  size = int(c.head_dim * c.rope_fraction)
  factor = (c.rope_scaling or {}).get('attention_factor', 1.0)
  full = c.full_head_dim or size
  rotations = [(rope.frequencies(c.rope_theta, full, c.rope_scaling), factor)]
  if c.local_rope_theta is not None:
    rotations.append((rope.frequencies(c.local_rope_theta, size), 1.0))
  if any(c.nope):
    rotations.append((jnp.zeros(size // 2), 1.0))
  coordinates_BT3 = rows_lib.get_coordinates(rows)
  if coordinates_BT3 is None or not c.mrope_section:
    return rope.compute_angles(rows.positions, rotations)
  axes_P = rope.list_axes(c.mrope_section, c.facts.alternates_axes)
  return rope.compute_angles(coordinates_BT3[..., axes_P], rotations)


def scale_embeddings(x_BTD: Array, config: DecoderConfig) -> Array:
  """Multiplies embeddings by sqrt(D) in families that do; rounds as transformers does."""
  scale = jnp.asarray(config.embed_dim**0.5, x_BTD.dtype)
  return x_BTD * scale if config.facts.scaled_embeddings else x_BTD


class Decoder(nn.Module):
  """The model over packed rows; `init` creates its parameters."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, rows):
    """Returns the final hidden states [B, T, D] and the experts' loads [L, E], if any."""
    c = self.config
    init = nn.initializers.normal(0.02)
    embed = nn.Embed(
      c.vocab_size, c.embed_dim, dtype=c.dtype, embedding_init=init, name='embed'
    )
    angles, tokens_BT = compute_angles(rows, c), rows_lib.find_vocabulary_ids(rows)
    if self.is_initializing() or sharding.active_mesh() is None:
      x_BTD = embed(tokens_BT)
    else:
      x_BTD = sharded_params.look_up(embed.embedding.astype(c.dtype), tokens_BT)
    x_BTD = rows_lib.put_features(scale_embeddings(x_BTD, c), rows)
    route_LBTk = None if rows.routes is None else jnp.moveaxis(rows.routes, 2, 0)
    inputs_LBTi = None
    if c.input_dim:
      make = layer_inputs.LayerInputs(c, name='layer_inputs')
      inputs_LBTi = make(tokens_BT, x_BTD, rows_lib.find_seen(rows))
    given = x_BTD, rows_lib.leave_to_layers(rows, c), angles
    if c.facts.has_full or c.recurrent:
      layers = mixed_layers.Layers(c, name='layers')
      x_BTD, loads_LE = layers(*given, inputs_LBTi, route_LBTk)
    else:
      # All layers get the same arguments, except their kinds and routes.
      all_get = nn.broadcast
      layers = scan_layers(Block, c.remat, c.num_layers, all_get, all_get, 0, 0)
      kinds = layer_kinds(c)
      kinds = kinds and jax.tree.map(lambda *x: jnp.asarray(x), *kinds)
      x_BTD, loads_LE = layers(c, name='layers')(*given, kinds, route_LBTk)
    x_BTD = make_norm(c, 'final_norm')(x_BTD)
    if self.is_initializing() and not c.tie_embeddings:
      nn.Dense(c.vocab_size, use_bias=False, kernel_init=init, name='lm_head')(x_BTD)
    return x_BTD, loads_LE


def init(config: DecoderConfig, key: Array) -> Params:
  """Initialises random float32 parameters."""
  one = jnp.zeros((1, 1), jnp.int32)
  rows = types.Rows(one, one, types.Segments(one))
  params = dict(Decoder(config).init(key, rows)['params'])
  if config.vision:
    params['vision'] = vision.init(config, jax.random.fold_in(key, 1))
  return params


def add_value_head(params: Params) -> Params:
  """Adds a critic's value head of zeros (V = 0 everywhere), on the active mesh."""
  dim = params['embed']['embedding'].shape[1]
  leaves = lambda: {'kernel': jnp.zeros((dim, 1)), 'bias': jnp.zeros(1)}
  return params | sharding.init_sharded(lambda: {'value_head': leaves()})


def hidden(
  params: Params, config: DecoderConfig, rows: types.Rows
) -> Float[Array, 'B T D']:
  """Computes final hidden states of packed rows, causal within each segment.

  In rows of shared prefixes (types.Tree) a token sees the tokens on its path.
  """
  return hidden_and_loads(params, config, rows)[0]


def hidden_and_loads(
  params: Params, config: DecoderConfig, rows: types.Rows
) -> tuple[Float[Array, 'B T D'], Float[Array, 'L E'] | None]:
  """Computes `hidden`, and how many tokens of the rows each expert computed."""
  rows = rows_lib.look(params, config, rows)
  params = sharded_params.constrain_params(params)
  out: Any = Decoder(config).apply({'params': params}, rows)
  return out


def extend(
  params: Params, config: DecoderConfig, rows: types.Rows, cache: kv_cache.Cache
) -> tuple[Float[Array, 'B T D'], kv_cache.Cache]:
  """Writes tokens at their positions and returns their final hidden states.

  Tokens at kv_cache.NOWHERE, or past the last slot, are computed but not written. Sliding
  layers write the latter, in a ring.
  """
  tokens = rows_lib.find_vocabulary_ids(rows)
  x: Any = params['embed']['embedding'].astype(config.dtype)[tokens]
  x = rows_lib.put_features(scale_embeddings(x, config), rows)
  angles = compute_angles(rows, config)
  kinds = layer_kinds(config) or [None] * config.num_layers
  if config.input_dim:
    make = layer_inputs.LayerInputs(config)
    inputs: Any = make.apply({'params': params['layer_inputs']}, tokens, x)
    kinds = [
      kind and kind._replace(inputs=y) for kind, y in zip(kinds, inputs, strict=True)
    ]
  new_cache: list[Any] = []
  for i, (layer, kind, shape) in enumerate(
    zip(params['layers'], kinds, config.layer_shapes, strict=True)
  ):
    variables = {'params': layer}
    if rows.adapters is not None:
      variables['adapters'] = rows.adapters.get_layer(i)
    if kind and shape.shares:
      kind = kind._replace(shared=new_cache[config.find_source(i)])
    block = Block(config, shape=shape)
    x, layer_cache = block.apply(variables, x, rows, angles, kind, None, cache[i])
    new_cache.append(layer_cache)
  x = make_norm(config).apply({'params': params['final_norm']}, x)
  return x, tuple(new_cache)


def head_kernel(params: Params, config: DecoderConfig) -> Float[Array, 'D V']:
  """Returns the output kernel in config.dtype; if tied, the transposed embeddings."""
  if config.tie_embeddings:
    return params['embed']['embedding'].T.astype(config.dtype)
  return params['lm_head']['kernel'].astype(config.dtype)


@jax.named_scope('head')
def logits(params: Params, config: DecoderConfig, x: Float[Array, '*B D']) -> Array:
  """Computes next-token logits, float32 [*B, V]."""
  kernel_DV = head_kernel(params, config)
  logits = jnp.matmul(x, kernel_DV, preferred_element_type=jnp.float32)
  return attention.cap_scores(logits, config.logit_cap)


def logprobs(
  params: Params,
  config: DecoderConfig,
  x: Float[Array, 'B T D'],
  tokens: Int[Array, 'B T'],
  wanted: Bool[Array, 'B T'],
  temperature: float,
) -> tuple[Float[Array, 'B T'], Float[Array, 'B T']]:
  """Computes tokens' log-probs and entropies from the hidden states before each token.

  Both are 0 where a token is not `wanted`; see head.logprobs.
  """
  block = head.block_tokens(config.vocab_size)
  options = tokens, wanted, temperature, block, config.logit_cap
  return head.logprobs(x, head_kernel(params, config), *options)


def values(params: Params, x: Float[Array, '*B D']) -> Float[Array, '*B']:
  """Computes the critic's value of the state after each position, float32."""
  leaves = params['value_head']
  kernel, bias = leaves['kernel'][:, 0], leaves['bias'][0]
  return jnp.matmul(x.astype(jnp.float32), kernel.astype(jnp.float32)) + bias
