"""Layers that vision towers share: colour scaling, and attention among patches.

Letters as in vision.py.
"""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, UInt8

from agent_r1_jax.models import sharding
from agent_r1_jax.models.kernels import attention_kernels as kernels
from agent_r1_jax.models.pictures.vision_config import VisionConfig


def normalise(
  patches: UInt8[Any, 'B P C'], config: VisionConfig
) -> Float[Array, 'B P 3 X']:
  """Scales colours from 0 to 255, [B, P, 3 X], as in the tower's training."""
  colours = patches.reshape(*patches.shape[:2], 3, -1).astype(jnp.float32)
  mean, std = (jnp.asarray(x, jnp.float32).reshape(1, 1, 3, 1) for x in config.colours)
  return (colours / 255.0 - mean) / std


def attend(q_BPMH, k_BSMH, v_BSMH, ids_BP, ids_BS) -> Array:
  """Attends from each patch to the patches with the same id."""
  mask_BPS = ids_BP[:, :, None] == ids_BS[:, None, :]
  if sharding.platform() == 'gpu' and kernels.has_cudnn(q_BPMH):
    return kernels.cudnn(q_BPMH, k_BSMH, v_BSMH, mask_BPS)
  mask_B1PS = mask_BPS[:, None]
  return jax.nn.dot_product_attention(q_BPMH, k_BSMH, v_BSMH, mask=mask_B1PS)


def attend_windows(q_BPMH, k_BPMH, v_BPMH, ids_BP, size: int) -> Array:
  """Computes `attend` for ids of at most `size` patches each, which are contiguous.

  A block of `size` patches then needs only its own keys and those of the blocks before
  and after it.
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
