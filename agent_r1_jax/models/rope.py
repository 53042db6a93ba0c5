"""Rotary position embeddings (RoPE, arXiv 2104.09864) and their scalings.

A model has one rotation, or several from which each layer uses one: sliding layers of
Gemma 3 rotate faster, and some layers of SmolLM3 do not rotate at all.

Letters as in decoder.py, and: R rotations, P rotated pairs of a head's numbers, at most
H / 2.
"""

from collections.abc import Sequence
import math
from typing import Any

from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np

# Scalings of a rotation: `rope_type` in config.json -> the other fields of
# DecoderConfig.rope_scaling. models/files/hf_config.py reads them.
SCALINGS = {
  'linear': ('factor',),
  'llama3': (
    'factor',
    'low_freq_factor',
    'high_freq_factor',
    'original_max_position_embeddings',
  ),
  'yarn': (
    'factor',
    'original_max_position_embeddings',
    'beta_fast',
    'beta_slow',
    'attention_factor',
    'truncate',
  ),
  'proportional': ('partial_rotary_factor',),
}


def frequencies(
  theta: float, size: int, scaling: dict[str, Any] | None = None
) -> Float[Array, 'P']:
  """Computes the angle per position of each pair in a rotation of `size` numbers."""
  freq = 1.0 / theta ** (jnp.arange(0, size, 2, dtype=jnp.float32) / size)
  if scaling is None:
    return freq
  kind = scaling['rope_type']
  if kind == 'proportional':  # The last pairs are not rotated (Gemma 4).
    turned = int(scaling['partial_rotary_factor'] * size // 2)
    return jnp.where(jnp.arange(size // 2) < turned, freq, 0.0)
  factor = scaling['factor']
  # 1 keeps a frequency, 0 divides it by the factor; values between mix the two.
  keep: Array | float = 0.0
  if kind == 'llama3':
    rotations = scaling['original_max_position_embeddings'] * freq / (2 * math.pi)
    low, high = scaling['low_freq_factor'], scaling['high_freq_factor']
    keep = jnp.clip((rotations - low) / (high - low), 0.0, 1.0)
  elif kind == 'yarn':
    keep = _keep_by_yarn(theta, size, scaling)
  return keep * freq + (1.0 - keep) * freq / factor


def list_axes(section: Sequence[int], alternates: bool) -> Int[np.ndarray, 'P']:
  """Lists the coordinate that rotates each pair in M-RoPE: 0 time, 1 row, 2 column.

  `section` has the number of pairs per coordinate. In Qwen3-VL they alternate while all
  three have pairs left: 4, 2 and 2 pairs give 0 1 2 0 1 2 0 0.
  """
  axes_P = np.repeat(np.arange(3), section)
  if alternates:
    axes_P[:] = 0
    for axis in (1, 2):
      axes_P[axis : 3 * section[axis] : 3] = axis
  return axes_P


def _keep_by_yarn(theta: float, size: int, scaling: dict[str, Any]) -> Array:
  """Computes how much of each frequency YaRN keeps (arXiv 2309.00071, section 3.2).

  1 before the pair that turns beta_fast times in the original context, 0 after the pair
  that turns beta_slow times.
  """
  original = scaling['original_max_position_embeddings']
  pair = lambda turns: (
    size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
  )
  first, last = pair(scaling['beta_fast']), pair(scaling['beta_slow'])
  if scaling['truncate']:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, size - 1)
  last = last if last != first else last + 0.001
  ramp = (jnp.arange(size // 2, dtype=jnp.float32) - first) / (last - first)
  return 1.0 - jnp.clip(ramp, 0.0, 1.0)


def compute_angles(
  positions: Int[Array, 'B T *P'], rotations: list[tuple[Array, float]]
) -> tuple[Float[Array, 'R B T 1 P'], Float[Array, 'R B T 1 P']]:
  """Computes sin and cos at each position, times the factor of each rotation.

  Args:
    positions: The tokens' positions; [B, T, P] if each pair has its own coordinate, as in
      M-RoPE (arXiv 2409.12191).
    rotations: (frequencies, factor) of each rotation; zero frequencies rotate nothing.
      Shorter frequencies, for smaller heads, are padded with zeros.
  """
  most = max(len(freq) for freq, _ in rotations)
  freq_RP = jnp.stack([jnp.pad(x, (0, most - len(x))) for x, _ in rotations])
  freq_RP = freq_RP[:, None, None, None]
  one = (None,) if positions.ndim == 2 else ()
  angles = positions[None, :, :, None, *one].astype(jnp.float32) * freq_RP
  factor_R = jnp.asarray([factor for _, factor in rotations], jnp.float32)
  factor_R = factor_R.reshape(-1, 1, 1, 1, 1)
  return jnp.sin(angles) * factor_R, jnp.cos(angles) * factor_R


def rotate(x_BTNH: Array, angles: tuple[Array, Array]) -> Array:
  """Rotates the first 2 P numbers of each head, number i together with number i + P."""
  sin, cos = angles
  turned = 2 * sin.shape[-1]
  x, rest = x_BTNH[..., :turned], x_BTNH[..., turned:]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  x = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
  return jnp.concatenate([x, rest], -1) if rest.shape[-1] else x
