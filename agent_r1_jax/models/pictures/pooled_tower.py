"""The vision tower of Gemma 4.

Its blocks are those of Gemma's decoder with bidirectional attention. A patch gets an
embedding of its column and one of its row, and each of them rotates half of a head. The
features of a token are the mean of its patches, projected to the decoder's width.

Letters as in vision.py, H numbers of a head, and V = merge_size² patches of a token.
"""

import math
from typing import Any

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float

from agent_r1_jax.models import rope
from agent_r1_jax.models.decoder_config import DecoderConfig
from agent_r1_jax.models.layers import (
  Projection,
  RMSNorm,
  apply_flat,
  normalise,
  scan_layers,
)
from agent_r1_jax.models.pictures import patch_layers

_THETA = 100.0
# The largest float16: clips nothing until a checkpoint is loaded.
_BOUND = 65504.0


class FlatPatches(nn.Module):
  """A linear embedding of a patch's pixels, with colours last."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, patches_BPC):
    """From colours [B, P, 3 X] to [B, P, W]."""
    c: Any = self.config.vision
    shape = (c.patch_size, c.patch_size, c.channels, c.embed_dim)
    kernel_XXCW = self.param('kernel', nn.initializers.normal(0.02), shape)
    kernel_CXXW = jnp.moveaxis(kernel_XXCW.astype(self.config.dtype), 2, 0)
    x_BPCX = patch_layers.normalise(patches_BPC, c).astype(self.config.dtype)
    x_BPX = x_BPCX.reshape(*patches_BPC.shape)
    return x_BPX @ kernel_CXXW.reshape(-1, c.embed_dim)


class AxisPlaces(nn.Module):
  """Embeddings of the columns and of the rows of patches."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, coordinates_BP2):
    """From rows and columns [B, P, 2] to [B, P, W]."""
    c: Any = self.config.vision
    shape = (2, c.axis_places, c.embed_dim)
    table_2SW = self.param('embedding', nn.initializers.normal(0.02), shape)
    columns_SW, rows_SW = table_2SW.astype(self.config.dtype)
    return columns_SW[coordinates_BP2[..., 1]] + rows_SW[coordinates_BP2[..., 0]]


class ClippedProjection(nn.Module):
  """A projection that clips inputs and outputs to bounds, if the checkpoint has any.

  The bounds are not trained.
  """

  config: DecoderConfig
  outputs: tuple[int, ...]
  input_axes: int = 1

  @nn.compact
  def __call__(self, x):
    """From [*M, *inputs] to [*M, *outputs]."""
    dtype = self.config.dtype
    project = Projection(self.outputs, dtype, self.input_axes, name='linear')
    return self._cut_off('output', project(self._cut_off('input', x)))

  @nn.nowrap
  def _cut_off(self, side: str, x: Array) -> Array:
    c: Any = self.config.vision
    if not c.clips:
      return x
    bounds = []
    for name, bound in (('min', -_BOUND), ('max', _BOUND)):
      found = self.param(f'{side}_{name}', nn.initializers.constant(bound), ())
      bounds.append(jax.lax.stop_gradient(found).astype(x.dtype))
    return jax.lax.clamp(bounds[0], x, bounds[1])


class PooledAttention(nn.Module):
  """Attention within each picture, with norms of queries, keys and values."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x_BPW, angles, batch):
    """[B, P, W] to the same."""
    c: Any = self.config.vision
    heads = (c.num_heads, c.head_dim)
    q_BPMH, k_BPMH, v_BPMH = (
      apply_flat(ClippedProjection(self.config, heads, name=name), x_BPW)
      for name in ('q', 'k', 'v')
    )
    q_BPMH = _turn(RMSNorm(c.norm_eps, name='q_norm')(q_BPMH), angles)
    k_BPMH = _turn(RMSNorm(c.norm_eps, name='k_norm')(k_BPMH), angles)
    v_BPMH = normalise(v_BPMH, c.norm_eps)
    # Undoes the division of scores by the root of H, which Gemma 4 omits.
    q_BPMH *= math.sqrt(c.head_dim)
    ids_BP = batch.pictures
    out_BPMH = patch_layers.attend(q_BPMH, k_BPMH, v_BPMH, ids_BP, ids_BP)
    project = ClippedProjection(self.config, (c.embed_dim,), 2, name='out')
    return apply_flat(project, out_BPMH)


def _turn(x_BPMH: Array, angles: tuple[Array, Array]) -> Array:
  """Rotates the two halves of a head by different angles, [B, P, 1, 2, H / 4]."""
  halves = x_BPMH.reshape(*x_BPMH.shape[:-1], 2, -1)
  return rope.rotate(halves, angles).reshape(x_BPMH.shape)


class PooledBlock(nn.Module):
  """One layer of the tower."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x_BPW, angles, batch):
    """Adds attention, then the feed-forward, to the residual stream."""
    c: Any = self.config.vision
    norm = lambda name: RMSNorm(c.norm_eps, name=name)
    normed = norm('attn_norm')(x_BPW)
    out = PooledAttention(self.config, name='attn')(normed, angles, batch)
    x_BPW += norm('attn_out_norm')(out)
    normed = norm('mlp_norm')(x_BPW)
    gate, up = (
      ClippedProjection(self.config, (c.mlp_dim,), name=name) for name in ('gate', 'up')
    )
    down = ClippedProjection(self.config, (c.embed_dim,), name='down')
    out = apply_flat(lambda x_MW: down(nn.gelu(gate(x_MW)) * up(x_MW)), normed)
    return x_BPW + norm('mlp_out_norm')(out), None


class Standard(nn.Module):
  """Standardizes features: (x - bias) scale; neither is trained."""

  @nn.compact
  def __call__(self, x_BFW):
    """[B, F, W] to the same."""
    names = (('bias', nn.initializers.zeros), ('scale', nn.initializers.ones))
    made = [self.param(name, init, x_BFW.shape[-1:]) for name, init in names]
    bias_W, scale_W = (jax.lax.stop_gradient(x).astype(jnp.float32) for x in made)
    return (x_BFW - bias_W[None, None]) * scale_W[None, None]


class Tower(nn.Module):
  """The complete tower; `init` makes its parameters."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, batch) -> Float[Array, 'B F D']:
    """Features [B, P / V, D], in the order of the patches."""
    c: Any = self.config.vision
    dtype, all_get = self.config.dtype, nn.broadcast
    x_BPW = FlatPatches(self.config, name='flat_patch')(batch.patches)
    x_BPW += AxisPlaces(self.config, name='axis_places')(batch.coordinates)
    angles = _compute_angles(batch.coordinates, c.head_dim)
    blocks = scan_layers(PooledBlock, self.config.remat, c.num_layers, all_get, all_get)
    x_BPW, _ = blocks(self.config, name='blocks')(x_BPW, angles, batch)
    x_BFVW = x_BPW.astype(jnp.float32).reshape(
      x_BPW.shape[0], -1, c.merge_size**2, c.embed_dim
    )
    x_BFW = x_BFVW.mean(axis=2).astype(dtype).astype(jnp.float32) * c.embed_dim**0.5
    if c.standardizes:
      x_BFW = Standard(name='standard_norm')(x_BFW)
    x_BFW = normalise(x_BFW.astype(dtype), c.norm_eps)
    return apply_flat(Projection((c.out_dim,), dtype, name='projection'), x_BFW)


def _compute_angles(coordinates_BP2: Array, head_dim: int) -> tuple[Array, Array]:
  """Sin and cos [B, P, 1, 2, H / 4]: columns first, then rows."""
  freq_X = rope.frequencies(_THETA, head_dim // 2).reshape(1, 1, 1, 1, -1)
  turned_BP12 = coordinates_BP2[..., None, ::-1].astype(jnp.float32)
  angles = turned_BP12[..., None] * freq_X
  return jnp.sin(angles), jnp.cos(angles)
