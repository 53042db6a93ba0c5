"""Per-layer inputs: what each layer gets besides the residual stream (Gemma 4).

They are computed from the token and its embedding, for all layers at once:

  inputs = (norm(W embedding / sqrt(D)) + sqrt(i) table[token]) / sqrt(2)

A layer multiplies its input with a gate computed from the residual stream, projects the
product back and adds it.

Letters as in decoder.py, and: i input features per token and layer, l = L i for all.
"""

from typing import Any

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agent_r1_jax.models import sharded_params, sharding
from agent_r1_jax.models.decoder_config import DecoderConfig
from agent_r1_jax.models.layers import Projection, RMSNorm, apply_flat


class LayerInputs(nn.Module):
  """Computes the inputs of all layers from tokens and their embeddings."""

  config: DecoderConfig

  @nn.compact
  def __call__(
    self,
    tokens_BT: Int[Array, 'B T'],
    x_BTD: Float[Array, 'B T D'],
    seen_BT: Bool[Array, 'B T'] | None = None,
  ) -> Float[Array, 'L B T i']:
    """[B, T] and [B, T, D] to [L, B, T, i].

    Tokens of pictures, `seen_BT`, have the numbers of token 0 and do not train them.
    """
    c = self.config
    L, i = c.num_layers, c.input_dim
    init = nn.initializers.normal(0.02)
    table = nn.Embed(
      c.vocab_size, L * i, dtype=c.dtype, embedding_init=init, name='embed'
    )
    if self.is_initializing() or sharding.active_mesh() is None:
      own_BTl = table(tokens_BT)
    else:
      own_BTl = sharded_params.look_up(table.embedding.astype(c.dtype), tokens_BT)
    if seen_BT is not None:
      frozen_BTl = jax.lax.stop_gradient(own_BTl)
      own_BTl = jnp.where(seen_BT[..., None], frozen_BTl, own_BTl)
    own_BTl *= jnp.asarray(i**0.5, own_BTl.dtype)
    project = Projection((L * i,), c.dtype, name='projection')
    made_BTl = apply_flat(project, x_BTD) * jnp.asarray(c.embed_dim**-0.5, c.dtype)
    split = lambda x_BTl: x_BTl.reshape(*tokens_BT.shape, L, i)
    made_BTLi = RMSNorm(c.norm_eps, name='out_norm')(split(made_BTl))
    both_BTLi = (made_BTLi + split(own_BTl)) * jnp.asarray(0.5**0.5, c.dtype)
    return jnp.moveaxis(both_BTLi, 2, 0)


class Input(nn.Module):
  """Computes what a layer adds to its residual stream from its inputs."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x_BTD: Float[Array, 'B T D'], inputs_BTi: Any) -> Array:
    """[B, T, D] and [B, T, i] to [B, T, D]; without inputs, only makes parameters."""
    c = self.config
    gate_BTi = nn.gelu(
      apply_flat(Projection((c.input_dim,), c.dtype, name='gate'), x_BTD)
    )
    given_BTi = gate_BTi if inputs_BTi is None else gate_BTi * inputs_BTi
    out = apply_flat(Projection((c.embed_dim,), c.dtype, name='out'), given_BTi)
    return RMSNorm(c.norm_eps, name='out_norm')(out)
