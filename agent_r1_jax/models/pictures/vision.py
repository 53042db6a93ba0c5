"""The vision towers of Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL (arXiv 2511.21631).

It turns patches into embeddings of tokens:

  batch, starts = picture_tokens.pack(pictures, config.vision, rows=1, patches=4096)
  features_FD = vision.features(params, config, batch)

Sampler and learner run the same differentiable program. Rows of patches hold several
pictures, and a patch attends only to its picture, in most layers of Qwen2.5-VL only to
its window. The patches of a window are contiguous, so these layers are linear in P. A
layer with full attention computes P² scores per head and row, unless a GPU kernel avoids
storing them: 1 GiB of float32 for 4,096 patches (1,024 tokens) and 16 heads.

A family's table of parameters says what its tower has: biases of norms, a gated
feed-forward, position embeddings. With DeepStack, a token's features are those of the
last layer, followed by those of earlier layers. Gemma 4's tower is in pooled_tower.py.

Letters: B rows of patches, P patches of a row, W embed of the tower, M its heads, H their
dim, F tokens of all rows, D embed of the decoder, U patches of a window, n depths of
DeepStack, X pixels of a patch.
"""

import itertools
import math
from typing import Any

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float

from agent_r1_jax.models import rope, sharded_params
from agent_r1_jax.models.decoder_config import DecoderConfig
from agent_r1_jax.models.layers import Projection, RMSNorm, apply_flat, scan_layers
from agent_r1_jax.models.pictures import patch_layers, picture_tokens, pooled_tower
from agent_r1_jax.models.pictures.picture_tokens import PatchBatch

_EPS = 1e-6
_THETA = 10_000.0


def _make_norm(config: DecoderConfig, name: str, place: str) -> nn.Module:
  """Makes a norm, with a bias if the family has one at this place in the tower."""
  if config.facts.has(f'{place}/{name}/bias', 'vision'):
    return nn.LayerNorm(_EPS, config.dtype, use_fast_variance=False, name=name)
  return RMSNorm(_EPS, name=name)


class PatchEmbedding(nn.Module):
  """A linear embedding of a patch's pixels."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, patches_BPC):
    """From colours [B, P, 3 X] to [B, P, W]."""
    c: Any = self.config.vision
    shape = (c.channels, c.temporal_patch_size, c.patch_size, c.patch_size, c.embed_dim)
    init = nn.initializers.normal(0.02)
    kernel_CTXXW = self.param('kernel', init, shape)
    kernel_XW = kernel_CTXXW.astype(self.config.dtype).reshape(-1, c.embed_dim)
    x_BPCX = patch_layers.normalise(patches_BPC, c).astype(self.config.dtype)
    x_BPCTX = x_BPCX.reshape(*x_BPCX.shape[:3], -1, c.patch_size**2)
    # A picture's frames are equal, so it has one; a batch with films has all of them.
    x_BPCTX = jnp.repeat(x_BPCTX, c.temporal_patch_size // x_BPCTX.shape[3], axis=3)
    x_BPW = x_BPCTX.reshape(*patches_BPC.shape[:2], -1) @ kernel_XW
    if self.config.facts.has('patch/bias', 'vision'):
      bias_W = self.param('bias', nn.initializers.zeros, (c.embed_dim,))
      x_BPW += bias_W.astype(self.config.dtype)[None, None]
    return x_BPW


class Places(nn.Module):
  """Position embeddings on a square grid, which is stretched over each picture."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, batch):
    """Interpolates the four grid points around each patch, [B, P, W]."""
    c: Any = self.config.vision
    side = math.isqrt(c.num_places)
    init = nn.initializers.normal(0.02)
    table_SW = self.param('embedding', init, (c.num_places, c.embed_dim))
    table_SW = table_SW.astype(self.config.dtype)
    # The last row and column of the patch's picture.
    count = batch.pictures.shape[1]
    find = lambda x_P2, ids_P: jax.ops.segment_max(x_P2, ids_P, count + 1)[ids_P]
    last_BP2 = jnp.maximum(jax.vmap(find)(batch.coordinates, batch.pictures), 1)
    # Patch 2 of 0 to 5 lies at 2 · 3 / 5 = 1 1/5 on a grid of 4 x 4.
    scaled_BP2 = batch.coordinates * (side - 1)
    near_BP2 = jnp.minimum(scaled_BP2 // last_BP2, side - 1)
    part_BP2 = (scaled_BP2 % last_BP2).astype(jnp.float32) / last_BP2
    total: Any = 0.0
    for row, column in itertools.product((0, 1), repeat=2):
      further = jnp.asarray([[[row, column]]])
      place_BP2 = jnp.minimum(near_BP2 + further, side - 1)
      weight_BP = jnp.prod(jnp.where(further == 1, part_BP2, 1.0 - part_BP2), axis=-1)
      found_BPW = table_SW[place_BP2[..., 0] * side + place_BP2[..., 1]]
      total += found_BPW * weight_BP[..., None]
    return total.astype(self.config.dtype)


def _project(config: DecoderConfig, outputs: tuple[int, ...], name: str, axes: int = 1):
  return Projection(outputs, config.dtype, axes, use_bias=True, name=name)


class PatchAttention(nn.Module):
  """Bidirectional attention, in windows or in complete pictures."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x_BPW, angles, batch, full):
    """Attends to the complete picture if `full`, else to the window."""
    c: Any = self.config.vision
    heads = (3, c.num_heads, c.head_dim)
    qkv_BP3MH = apply_flat(_project(self.config, heads, 'qkv'), x_BPW)
    q_BPMH, k_BPMH, v_BPMH = (qkv_BP3MH[:, :, i] for i in range(3))
    q_BPMH, k_BPMH = rope.rotate(q_BPMH, angles), rope.rotate(k_BPMH, angles)
    whole = lambda q, k, v: patch_layers.attend(q, k, v, batch.pictures, batch.pictures)
    if len(c.full_attention) == c.num_layers:
      out_BPMH = whole(q_BPMH, k_BPMH, v_BPMH)
    else:
      out_BPMH = jax.lax.cond(
        full,
        whole,
        lambda q, k, v: patch_layers.attend_windows(
          q, k, v, batch.windows, c.window_patches
        ),
        *(q_BPMH, k_BPMH, v_BPMH),
      )
    return apply_flat(_project(self.config, (c.embed_dim,), 'out', 2), out_BPMH)


class PatchBlock(nn.Module):
  """One layer of the tower."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x_BPW, angles, batch, full):
    """Adds attention, then the feed-forward, to the residual stream."""
    c: Any = self.config.vision
    normed = _make_norm(self.config, 'attn_norm', 'blocks')(x_BPW)
    x_BPW += PatchAttention(self.config, name='attn')(normed, angles, batch, full)
    normed = _make_norm(self.config, 'mlp_norm', 'blocks')(x_BPW)
    gates = self.config.facts.has('blocks/gate/kernel', 'vision')
    names = ('gate', 'up') if gates else ('up',)
    inner = [_project(self.config, (c.mlp_dim,), name) for name in names]
    down = _project(self.config, (c.embed_dim,), 'down')

    def feed_forward(x_MW):
      first, *second = (project(x_MW) for project in inner)
      return down(nn.silu(first) * second[0] if second else nn.gelu(first))

    x_BPW += apply_flat(feed_forward, normed)
    return x_BPW, x_BPW if c.deepstack else None


class Merger(nn.Module):
  """Merges a token's patches, which are contiguous, into the decoder's embedding.

  DeepStack's mergers normalise a token's patches together.
  """

  config: DecoderConfig
  together: bool = False

  @nn.compact
  def __call__(self, x_BPW):
    """From [B, P, W] to [B, P / merge_size², D]."""
    c: Any = self.config.vision
    norm = _make_norm(self.config, 'in_norm', 'merger')
    merge = lambda x_BPW: x_BPW.reshape(x_BPW.shape[0], -1, c.merged_dim)
    merged = norm(merge(x_BPW)) if self.together else merge(norm(x_BPW))
    hidden = nn.gelu(
      apply_flat(_project(self.config, (c.merged_dim,), 'in'), merged), False
    )
    return apply_flat(_project(self.config, (c.out_dim,), 'out'), hidden)


class Tower(nn.Module):
  """The complete tower; `init` makes its parameters."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, batch):
    """Features [B, P / merge_size², (1 + n) D], in the order of windows."""
    c: Any = self.config.vision
    all_get, remat = nn.broadcast, self.config.remat
    blocks = scan_layers(PatchBlock, remat, c.num_layers, all_get, all_get, 0)
    x_BPW = PatchEmbedding(self.config, name='patch')(batch.patches)
    full_L = jnp.asarray([i in c.full_attention for i in range(c.num_layers)])
    angles = _compute_angles(batch.coordinates, c.head_dim)
    if c.num_places:
      x_BPW += Places(self.config, name='places')(batch)
    x_BPW, every_ABPW = blocks(self.config, name='blocks')(x_BPW, angles, batch, full_L)
    last_BFD = Merger(self.config, name='merger')(x_BPW)
    if not c.deepstack:
      return last_BFD
    axes: Any = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}}
    mergers = nn.vmap(Merger, **axes)(self.config, True, name='deep_mergers')
    deep_nBFD = mergers(every_ABPW[jnp.asarray(c.deepstack)])
    both_nBFD = jnp.concatenate([last_BFD[None], deep_nBFD])
    return jnp.moveaxis(both_nBFD, 0, 2).reshape(*last_BFD.shape[:2], -1)


def _compute_angles(coordinates_BP2: Array, head_dim: int) -> tuple[Array, Array]:
  """Sin and cos [B, P, 1, H / 2]: half of a head rotates by row, half by column."""
  freq_X = rope.frequencies(_THETA, head_dim // 2).reshape(1, 1, 1, -1)
  angles = coordinates_BP2[..., None].astype(jnp.float32) * freq_X
  angles = angles.reshape(*coordinates_BP2.shape[:2], 1, -1)
  return jnp.sin(angles), jnp.cos(angles)


def init(config: DecoderConfig, key: Array) -> dict[str, Any]:
  """Makes a tower's random float32 parameters, `params['vision']`."""
  c: Any = config.vision
  batch: Any = picture_tokens.pack([], c, rows=1, patches=c.window_patches)[0]
  batch = jax.tree.map(jnp.asarray, batch)
  return dict(_make_tower(config).init(key, batch)['params'])


def _make_tower(config: DecoderConfig) -> nn.Module:
  assert config.vision is not None
  return pooled_tower.Tower(config) if config.vision.pools else Tower(config)


def features(
  params: dict[str, Any], config: DecoderConfig, batch: PatchBatch
) -> Float[Array, 'F nD']:
  """Computes the features of all tokens in a batch of pictures, row after row.

  A picture's features begin at the row that picture_tokens.pack returned, in the order of
  the sequence. Padding has finite features, which nothing else depends on.

  Args:
    params: The model's parameters; only 'vision' is read.
    config: The model's shape.
    batch: From picture_tokens.pack.
  """
  batch = jax.tree.map(jnp.asarray, batch)
  tower = sharded_params.constrain_params({'vision': params['vision']})['vision']
  windows_BFD: Any = _make_tower(config).apply({'params': tower}, batch)
  text_BFD = jnp.take_along_axis(windows_BFD, batch.order[..., None], axis=1)
  return text_BFD.reshape(-1, text_BFD.shape[-1])
