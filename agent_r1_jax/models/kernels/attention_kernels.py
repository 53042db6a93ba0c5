"""Attention with platform kernels: Pallas on TPUs and Hopper GPUs, cuDNN on other GPUs.

models/attention.py uses a kernel if it supports the shapes, and XLA otherwise; results
agree up to rounding. Kernels are imported where they are used, because imports are slow
and useless on other platforms. Letters as there.
"""

import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float

from agent_r1_jax.models import kv_cache, sharding
from agent_r1_jax.models.kernels import hopper

# The most query blocks of causal attention over a row.
MAX_BLOCKS = 8
# The TPU kernel needs full tiles of LANES numbers, and takes blocks of so many tokens.
LANES, _SPLASH_BLOCK = 128, 512
# The most slots per page of the TPU kernel for decoding, and the most pages: their
# indices are in scalar memory, of which a core has 1 MiB.
PAGE, _PAGES = 512, 1 << 16
# The dtypes of cuDNN's attention on every GPU that has it, and its largest head dim (256
# on Hopper), which must be a multiple of 8.
_CUDNN_DTYPES, _CUDNN_HEAD = ('float16', 'bfloat16'), 128


def reads_used_slots(
  shape: tuple[int, ...], dtype: Any, queries: int = 1, rounded: bool = False
) -> bool:
  """Whether a kernel exists that reads only the slots that a row's sequence uses.

  All kernels compute in bfloat16: TPUs have one for a single token and one for many,
  Hopper GPUs have one, used after it has passed a check. The TPU kernels do not support
  8-bit caches: JAX's for a single token repeats a scale H times, in float32.

  Args:
    shape: The cache's [B, K, S, H].
    dtype: The dtype of the queries.
    queries: Number of tokens per row and call.
    rounded: Whether the cache has 8 bits.
  """
  B, K, S, H = shape
  if hopper.is_here():
    from agent_r1_jax.models.kernels import slot_attention

    if slot_attention.supports(shape, dtype):
      kernel: Any = slot_attention
      return hopper.passes_check(kernel, H, rounded)
  if sharding.platform() != 'tpu' or rounded:
    return False
  tiles = S % LANES == 0 and H % LANES == 0 and jnp.dtype(dtype) == jnp.bfloat16
  if queries == 1:
    tiles &= B * K * S // math.gcd(S, PAGE) <= _PAGES
  return tiles and (queries == 1 or queries % LANES == 0)


def over_used_slots(
  q_BTNH, k_BKSH, v_BKSH, positions_BT, scales: kv_cache.Scales | None = None
) -> Float[Array, 'B T N H']:
  """Computes `cached` with a kernel that reads no page or block after the position.

  A token past the last slot reads another slot instead; its result is meaningless.
  """
  attend = _attend_to_blocks if sharding.platform() == 'gpu' else _attend_on_tpu
  mesh = sharding.active_mesh()
  K = k_BKSH.shape[1]
  if mesh is None:
    return attend(q_BTNH, k_BKSH, v_BKSH, positions_BT, 0, K, scales)
  tensor = mesh.shape['tensor']
  # As in sharding.cache_sharding: if `tensor` does not divide the key-value heads, each
  # chip has all of them, and its query heads share one.
  split = K % tensor == 0

  def on_chip(q_BTNH, k_BKSH, v_BKSH, positions_BT, scales):
    first = 0 if split else jax.lax.axis_index('tensor') * K // tensor
    heads = k_BKSH.shape[1] if split else 1
    return attend(q_BTNH, k_BKSH, v_BKSH, positions_BT, first, heads, scales)

  queries = PartitionSpec(sharding.ROW_AXES, None, 'tensor')
  slots = PartitionSpec(sharding.ROW_AXES, 'tensor' if split else None)
  return jax.shard_map(
    on_chip,
    in_specs=(queries, slots, slots, PartitionSpec(sharding.ROW_AXES), slots),
    out_specs=queries,
    check_vma=False,
  )(q_BTNH, k_BKSH, v_BKSH, positions_BT, scales)


def _attend_on_tpu(q_BTNH, k_BKSH, v_BKSH, positions_BT, first, heads: int, scales):
  """Attends on one chip with queries for `heads` key-value heads, from `first` on."""
  assert scales is None
  if q_BTNH.shape[1] == 1:
    return _attend_to_pages(q_BTNH, k_BKSH, v_BKSH, positions_BT, first, heads)
  from agent_r1_jax.models.kernels import tpu_attention

  positions_BT = jnp.where(positions_BT < k_BKSH.shape[2], positions_BT, 0)
  slots = q_BTNH, k_BKSH, v_BKSH, positions_BT
  return tpu_attention.attend_to_slots(*slots, first, heads)


def _attend_to_pages(q_B1NH, k_BKSH, v_BKSH, positions_B1, first, heads: int):
  """Attends from one token of each row.

  The slots of a (row, key-value head) are contiguous; they form the pages of a sequence.
  """
  from jax.experimental.pallas.ops.tpu import paged_attention

  B, K, S, H = k_BKSH.shape
  N, page = q_B1NH.shape[2], math.gcd(S, PAGE)
  # To the kernel each (row, key-value head) is a sequence with one key-value head. It
  # sums in the queries' dtype.
  q_QGH = (q_B1NH.astype(jnp.float32) * H**-0.5).reshape(B * heads, N // heads, H)
  k_1PSH, v_1PSH = (x.reshape(1, -1, page, H) for x in (k_BKSH, v_BKSH))
  # The pages of row b and head k begin at (b K + k) S / page; with 4 pages per sequence,
  # K = 2 and both heads here, row 1 has pages 8 9 10 11 and 12 13 14 15.
  text_BK = jnp.arange(B)[:, None] * K + first + jnp.arange(heads)[None]
  pages_QP = text_BK.reshape(-1, 1) * (S // page) + jnp.arange(S // page)[None]
  length_B = jnp.where(positions_B1[:, 0] < S, positions_B1[:, 0] + 1, 1)
  out_QGH = paged_attention.paged_attention(
    q_QGH,
    k_1PSH,
    v_1PSH,
    jnp.repeat(length_B, heads).astype(jnp.int32),
    pages_QP.astype(jnp.int32),
    pages_per_compute_block=1,
  )
  return out_QGH.reshape(B, 1, N, H).astype(q_B1NH.dtype)


def _attend_to_blocks(q_BTNH, k_BKSH, v_BKSH, positions_BT, first, heads: int, scales):
  """Attends on one chip with the GPU kernel (slot_attention.py)."""
  from agent_r1_jax.models.kernels import slot_attention

  positions_BT = jnp.where(positions_BT < k_BKSH.shape[2], positions_BT, 0)
  slots = q_BTNH, k_BKSH, v_BKSH, positions_BT
  return slot_attention.attend(*slots, first, heads, scales=scales)


def splash(
  q_BTNH,
  k_BTKH,
  v_BTKH,
  segment_ids_BT,
  slides: Any = None,
  window: int = 0,
  cap: float | None = None,
  sinks_N: Array | None = None,
  interpret: bool = False,
) -> Float[Array, 'B T N H']:
  """Computes `packed` with Pallas' TPU kernel; scores never leave the chip's core.

  A mask is a constant of the kernel, so a model with sliding layers has two kernels, of
  which each layer runs one.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention

  T, N, H = q_BTNH.shape[1:]
  block = next(b for b in (_SPLASH_BLOCK, 256, LANES) if T % b == 0)
  names = ('q', 'kv', 'q_dkv', 'kv_dkv', 'q_dq', 'kv_dq')
  sizes: dict[str, Any] = {f'block_{name}': block for name in names}
  ids = splash_attention.SegmentIds(segment_ids_BT, segment_ids_BT)
  # Smaller heads (64 in the smallest Qwen2.5) are padded with zeros.
  lanes = ((0, 0), (0, 0), (0, 0), (0, -H % LANES))
  padded = (jnp.pad(x, lanes) for x in (q_BTNH * H**-0.5, k_BTKH, v_BTKH))
  heads_first = [jnp.swapaxes(x, 1, 2) for x in padded]

  def attend(mask):
    kernel: Any = splash_attention.make_splash_mha_single_device(
      splash_attention.MultiHeadMask([mask] * N),
      block_sizes=splash_attention.BlockSizes(**sizes),
      attn_logits_soft_cap=cap,
      interpret=interpret,
    )
    kernel = jax.vmap(kernel, (0, 0, 0, 0, None))
    return jnp.swapaxes(kernel(*heads_first, ids, sinks_N), 1, 2)[..., :H]

  causal = splash_attention.CausalMask((T, T))
  if slides is None or window >= T:
    return attend(causal)
  # (tokens before, tokens after)
  near = splash_attention.LocalMask((T, T), (window - 1, 0), 0)
  return jax.lax.cond(slides, lambda: attend(near), lambda: attend(causal))


def along_trees(q_BTNH, k_BTKH, v_BTKH, ends_BT) -> Float[Array, 'B T N H']:
  """Computes `packed` along the paths of trees with our own TPU kernel.

  Splash attention knows only segments, and would need a T x T mask for each row.
  """
  from agent_r1_jax.models.kernels import tpu_attention

  return tpu_attention.attend_along_trees(q_BTNH, k_BTKH, v_BTKH, ends_BT)


def knows_spans(q_BTNH) -> bool:
  """Whether row_attention.py computes attention over rows of this shape and dtype.

  It does on Hopper GPUs, after the kernel has passed a check.
  """
  if not hopper.is_here():
    return False
  from agent_r1_jax.models.kernels import row_attention

  _, T, _, H = q_BTNH.shape
  if not row_attention.supports(T, H, q_BTNH.dtype):
    return False
  kernel: Any = row_attention
  return hopper.passes_everywhere(kernel, H)


def over_rows(q_BTNH, k_BTKH, v_BTKH, ends_BT) -> Float[Array, 'B T N H']:
  """Computes `packed` with the GPU kernel of row_attention.py."""
  from agent_r1_jax.models.kernels import row_attention

  return row_attention.attend(q_BTNH, k_BTKH, v_BTKH, ends_BT)


def has_cudnn(q_BTNH) -> bool:
  """Whether cuDNN's attention supports queries of this shape and dtype."""
  T, H = q_BTNH.shape[1], q_BTNH.shape[3]
  fits = H <= _CUDNN_HEAD and H % 8 == 0
  # Every block must have an even number of tokens.
  return q_BTNH.dtype in _CUDNN_DTYPES and fits and T % (2 * MAX_BLOCKS) == 0


def cudnn(
  q_BTNH, k_BSKH, v_BSKH, mask_BTS, implementation: Any = 'cudnn'
) -> Float[Array, 'B T N H']:
  """Computes `_attend` with cuDNN: the mask is stored in GPU memory, scores are not.

  JAX's public interface has no segments, so the mask becomes a bias of B T S 2-byte
  numbers, shared by all heads; the backward pass returns another of that size. In blocks
  of an eighth of a row of 16,384 tokens that is 64 MiB each; float32 scores would take
  N times 128 MiB.
  """
  return jax.nn.dot_product_attention(
    q_BTNH, k_BSKH, v_BSKH, mask=mask_BTS[:, None], implementation=implementation
  )
