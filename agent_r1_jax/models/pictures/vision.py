"""The vision tower of Qwen2.5-VL (arXiv 2502.13923): from patches to tokens' embeddings.

  batch, starts = picture_tokens.pack(pictures, config.vision, rows=1, patches=4096)
  features_FD = vision.features(params, config, batch)

The sampler and the learner compute the same program; it can be differentiated. Pictures
lie in rows of patches and attend to themselves only, in most layers to windows in them.
Windows are neighbours, so that these layers cost in proportion to the patches. A layer
with full attention computes P² scores a head and row: for 4,096 patches (1,024 tokens)
and 16 heads 1 GiB of float32, if no kernel of the GPU does it without.

Letters: B rows of patches, P patches of a row, W embed of the tower, M its heads, H their
dim, F tokens of all rows, D embed of the decoder, U patches of a window.
"""

from typing import Any

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, UInt8

from agent_r1_jax.models import rope, sharded_params, sharding
from agent_r1_jax.models.decoder_config import DecoderConfig
from agent_r1_jax.models.kernels import attention_kernels as kernels
from agent_r1_jax.models.layers import Projection, RMSNorm, apply_flat, scan_layers
from agent_r1_jax.models.pictures import picture_tokens
from agent_r1_jax.models.pictures.picture_tokens import PatchBatch

# Of each colour, from 0 to 1; agent/pictures.py refuses models that have others.
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
_EPS = 1e-6
_THETA = 10_000.0


def normalise(patches: UInt8[Any, 'B P C']) -> Float[Array, 'B P 3 X']:
  """Makes colours of 0 to 255, [B, P, 3 X], numbers of mean 0 and variance 1."""
  colours = patches.reshape(*patches.shape[:2], 3, -1).astype(jnp.float32)
  mean, std = (jnp.asarray(x, jnp.float32).reshape(1, 1, 3, 1) for x in (MEAN, STD))
  return (colours / 255.0 - mean) / std


class PatchEmbedding(nn.Module):
  """One product over the numbers of a patch."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, patches_BPC):
    """From colours [B, P, 3 X] to [B, P, W]."""
    c: Any = self.config.vision
    shape = (c.channels, c.temporal_patch_size, c.patch_size, c.patch_size, c.embed_dim)
    init = nn.initializers.normal(0.02)
    kernel_CTXXW = self.param('kernel', init, shape)
    kernel_XW = kernel_CTXXW.astype(self.config.dtype).reshape(-1, c.embed_dim)
    # All frames of a picture are equal.
    x_BPCTX = normalise(patches_BPC).astype(self.config.dtype)[:, :, :, None]
    x_BPCTX = jnp.repeat(x_BPCTX, c.temporal_patch_size, axis=3)
    return x_BPCTX.reshape(*patches_BPC.shape[:2], -1) @ kernel_XW


def _project(config: DecoderConfig, outputs: tuple[int, ...], name: str, axes: int = 1):
  return Projection(outputs, config.dtype, axes, use_bias=True, name=name)


class PatchAttention(nn.Module):
  """Attention without causality, in windows or whole pictures."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x_BPW, angles, batch, full):
    """Attends; `full` says whether to the whole picture."""
    c: Any = self.config.vision
    heads = (3, c.num_heads, c.head_dim)
    qkv_BP3MH = apply_flat(_project(self.config, heads, 'qkv'), x_BPW)
    q_BPMH, k_BPMH, v_BPMH = (qkv_BP3MH[:, :, i] for i in range(3))
    q_BPMH, k_BPMH = rope.rotate(q_BPMH, angles), rope.rotate(k_BPMH, angles)
    out_BPMH = jax.lax.cond(
      full,
      lambda q, k, v: attend(q, k, v, batch.pictures, batch.pictures),
      lambda q, k, v: attend_windows(q, k, v, batch.windows, c.window_patches),
      *(q_BPMH, k_BPMH, v_BPMH),
    )
    return apply_flat(_project(self.config, (c.embed_dim,), 'out', 2), out_BPMH)


def attend(q_BPMH, k_BSMH, v_BSMH, ids_BP, ids_BS) -> Array:
  """Attends from each patch to those with the same id."""
  mask_BPS = ids_BP[:, :, None] == ids_BS[:, None, :]
  if sharding.platform() == 'gpu' and kernels.has_cudnn(q_BPMH):
    return kernels.cudnn(q_BPMH, k_BSMH, v_BSMH, mask_BPS)
  mask_B1PS = mask_BPS[:, None]
  return jax.nn.dot_product_attention(q_BPMH, k_BSMH, v_BSMH, mask=mask_B1PS)


def attend_windows(q_BPMH, k_BPMH, v_BPMH, ids_BP, size: int) -> Array:
  """Computes `attend` for ids whose patches are neighbours, at most `size` of them.

  A block of `size` patches then needs the keys of its own, the block before and the block
  after it only.
  """
  B, P = ids_BP.shape
  blocks = P // size

  def split(x_BPX):
    return x_BPX.reshape(B * blocks, size, *x_BPX.shape[2:])

  def around(x_BPX, padding):
    x_BGUX = x_BPX.reshape(B, blocks, size, *x_BPX.shape[2:])
    spare = [(0, 0)] * x_BGUX.ndim
    spare[1] = (1, 1)
    padded = jnp.pad(x_BGUX, spare, constant_values=padding)
    three = [padded[:, i : i + blocks] for i in range(3)]
    joined = jnp.concatenate(three, axis=2)
    return joined.reshape(B * blocks, 3 * size, *x_BPX.shape[2:])

  k_BSMH, v_BSMH, ids_BS = around(k_BPMH, 0), around(v_BPMH, 0), around(ids_BP, -1)
  out = attend(split(q_BPMH), k_BSMH, v_BSMH, split(ids_BP), ids_BS)
  return out.reshape(q_BPMH.shape)


class PatchBlock(nn.Module):
  """One layer of the tower."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x_BPW, angles, batch, full):
    """Adds attention, then the feed-forward, to the residual stream."""
    c: Any = self.config.vision
    normed = RMSNorm(_EPS, name='attn_norm')(x_BPW)
    x_BPW += PatchAttention(self.config, name='attn')(normed, angles, batch, full)
    normed = RMSNorm(_EPS, name='mlp_norm')(x_BPW)
    gate, up = (_project(self.config, (c.mlp_dim,), name) for name in ('gate', 'up'))
    down = _project(self.config, (c.embed_dim,), 'down')
    x_BPW += apply_flat(lambda x_MW: down(nn.silu(gate(x_MW)) * up(x_MW)), normed)
    return x_BPW, None


class Merger(nn.Module):
  """Makes the decoder's embedding of a token from its patches, which are neighbours."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x_BPW):
    """From [B, P, W] to [B, P / merge_size², D]."""
    c: Any = self.config.vision
    normed = RMSNorm(_EPS, name='in_norm')(x_BPW)
    merged = normed.reshape(x_BPW.shape[0], -1, c.merged_dim)
    hidden = nn.gelu(
      apply_flat(_project(self.config, (c.merged_dim,), 'in'), merged), False
    )
    return apply_flat(_project(self.config, (c.out_dim,), 'out'), hidden)


class Tower(nn.Module):
  """The whole tower; `init` makes its parameters."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, batch):
    """Embeddings [B, P / merge_size², D], in the order of windows."""
    c: Any = self.config.vision
    all_get, remat = nn.broadcast, self.config.remat
    blocks = scan_layers(PatchBlock, remat, c.num_layers, all_get, all_get, 0)
    x_BPW = PatchEmbedding(self.config, name='patch')(batch.patches)
    full_L = jnp.asarray([i in c.full_attention for i in range(c.num_layers)])
    angles = _compute_angles(batch.coordinates, c.head_dim)
    x_BPW, _ = blocks(self.config, name='blocks')(x_BPW, angles, batch, full_L)
    return Merger(self.config, name='merger')(x_BPW)


def _compute_angles(coordinates_BP2: Array, head_dim: int) -> tuple[Array, Array]:
  """Sin and cos [B, P, 1, H / 2]: half of a head's pairs turn by row, half by column."""
  freq_X = rope.frequencies(_THETA, head_dim // 2).reshape(1, 1, 1, -1)
  angles = coordinates_BP2[..., None].astype(jnp.float32) * freq_X
  angles = angles.reshape(*coordinates_BP2.shape[:2], 1, -1)
  return jnp.sin(angles), jnp.cos(angles)


def init(config: DecoderConfig, key: Array) -> dict[str, Any]:
  """Random float32 parameters of a tower, which are `params['vision']`."""
  c: Any = config.vision
  batch: Any = picture_tokens.pack([], c, rows=1, patches=c.window_patches)[0]
  batch = jax.tree.map(jnp.asarray, batch)
  return dict(Tower(config).init(key, batch)['params'])


def features(
  params: dict[str, Any], config: DecoderConfig, batch: PatchBatch
) -> Float[Array, 'F D']:
  """Computes the embeddings of all tokens of a batch's pictures, row after row.

  Those of a picture begin at the row that picture_tokens.pack says, and are in the order
  of the text. Padding has finite embeddings that nothing else depends on.

  Args:
    params: The model's, of which 'vision' is read.
    config: The model's.
    batch: From picture_tokens.pack.
  """
  batch = jax.tree.map(jnp.asarray, batch)
  tower = sharded_params.constrain_params({'vision': params['vision']})['vision']
  windows_BFD: Any = Tower(config).apply({'params': tower}, batch)
  text_BFD = jnp.take_along_axis(windows_BFD, batch.order[..., None], axis=1)
  return text_BFD.reshape(-1, text_BFD.shape[-1])
