"""Attention by the kernels of one platform: in Pallas for TPUs, and cuDNN's for GPUs.

models/attention.py computes by one of them where it supports the shapes, else by XLA; the
results are the same up to rounding. A kernel is imported where it is used: that is slow,
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

# Causal attention over a row is computed in at most this many blocks of queries.
MAX_BLOCKS = 8
# The kernel for TPUs takes whole tiles of LANES numbers, and blocks of this many tokens.
LANES, _SPLASH_BLOCK = 128, 512
# The most slots of a page of the kernel for decoding on TPUs, and the most pages: their
# numbers are in scalar memory, of which a core has 1 MiB.
PAGE, _PAGES = 512, 1 << 16
# The dtypes of cuDNN's attention on every GPU that has it, and its largest head dim (on
# Hopper it could be 256), which must be a multiple of 8.
_CUDNN_DTYPES, _CUDNN_HEAD = ('float16', 'bfloat16'), 128


def reads_used_slots(
  shape: tuple[int, ...], dtype: Any, queries: int = 1, rounded: bool = False
) -> bool:
  """Whether attention to a cache reads no slots of a row but those of its text.

  All kernels compute in bfloat16: on TPUs one for one token and one for many, and one on
  GPUs of the kind of the H100, where it has passed a check. Those of TPUs have no form
  for a cache of 8 bits: JAX's for one token repeats a scale H times, in float32.

  Args:
    shape: The cache's [B, K, S, H].
    dtype: Of the queries.
    queries: How many tokens of a row are computed at a time.
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
  """Computes `cached` by a kernel that reads nothing after a position's page or block.

  A token that is past the last slot reads one of them, and its result has no meaning.
  """
  attend = _attend_to_blocks if sharding.platform() == 'gpu' else _attend_on_tpu
  mesh = sharding.active_mesh()
  K = k_BKSH.shape[1]
  if mesh is None:
    return attend(q_BTNH, k_BKSH, v_BKSH, positions_BT, 0, K, scales)
  tensor = mesh.shape['tensor']
  # As sharding.cached lays them out: fewer key-value heads than chips are on each, and
  # the query heads of a chip then share one of them.
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
  """Attends on one chip; its queries are for `heads` key-value heads, from `first` on."""
  assert scales is None
  if q_BTNH.shape[1] == 1:
    return _attend_to_pages(q_BTNH, k_BKSH, v_BKSH, positions_BT, first, heads)
  from agent_r1_jax.models.kernels import tpu_attention

  positions_BT = jnp.where(positions_BT < k_BKSH.shape[2], positions_BT, 0)
  slots = q_BTNH, k_BKSH, v_BKSH, positions_BT
  return tpu_attention.attend_to_slots(*slots, first, heads)


def _attend_to_pages(q_B1NH, k_BKSH, v_BKSH, positions_B1, first, heads: int):
  """Attends from one token of each row.

  The slots of a row and a key-value head lie together: they are the pages of a text.
  """
  from jax.experimental.pallas.ops.tpu import paged_attention

  B, K, S, H = k_BKSH.shape
  N, page = q_B1NH.shape[2], math.gcd(S, PAGE)
  # Each row and key-value head is a text to the kernel, with one key-value head. It sums
  # in the type of the queries.
  q_QGH = (q_B1NH.astype(jnp.float32) * H**-0.5).reshape(B * heads, N // heads, H)
  k_1PSH, v_1PSH = (x.reshape(1, -1, page, H) for x in (k_BKSH, v_BKSH))
  # The pages of row b and head k begin at (b K + k) S / page; with 4 pages a text, K = 2
  # and both heads here, row 1's are 8 9 10 11 and 12 13 14 15.
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
  """The same by the kernel for GPUs (slot_attention.py)."""
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
  """Computes `packed` by Pallas' kernel for TPUs: scores never leave the chip's core.

  A mask is a constant of the kernel, so that there are two where some layers slide; a
  layer computes one of them.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention

  T, N, H = q_BTNH.shape[1:]
  block = next(b for b in (_SPLASH_BLOCK, 256, LANES) if T % b == 0)
  names = ('q', 'kv', 'q_dkv', 'kv_dkv', 'q_dq', 'kv_dq')
  sizes: dict[str, Any] = {f'block_{name}': block for name in names}
  ids = splash_attention.SegmentIds(segment_ids_BT, segment_ids_BT)
  # Heads of fewer numbers (64 in the smallest Qwen2.5) end with zeros.
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
  # (tokens before, tokens after); the causal mask has no tokens after either.
  near = splash_attention.LocalMask((T, T), (window - 1, 0), 0)
  return jax.lax.cond(slides, lambda: attend(near), lambda: attend(causal))


def along_trees(q_BTNH, k_BTKH, v_BTKH, ends_BT) -> Float[Array, 'B T N H']:
  """Computes `packed` along the paths of trees by a kernel of our own for TPUs.

  Splash attention, which knows segments, would need a mask of T x T numbers for each row.
  """
  from agent_r1_jax.models.kernels import tpu_attention

  return tpu_attention.attend_along_trees(q_BTNH, k_BTKH, v_BTKH, ends_BT)


def knows_spans(q_BTNH) -> bool:
  """Whether attention over rows of this shape and dtype is that of row_attention.py.

  It is for GPUs of the kind of the H100, where it has passed a check.
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
  """Computes `packed` by the kernel for GPUs that `knows_spans`."""
  from agent_r1_jax.models.kernels import row_attention

  return row_attention.attend(q_BTNH, k_BTKH, v_BTKH, ends_BT)


def has_cudnn(q_BTNH) -> bool:
  """Whether cuDNN's attention supports queries of this shape and dtype."""
  T, H = q_BTNH.shape[1], q_BTNH.shape[3]
  fits = H <= _CUDNN_HEAD and H % 8 == 0
  # All blocks must have an even number of tokens.
  return q_BTNH.dtype in _CUDNN_DTYPES and fits and T % (2 * MAX_BLOCKS) == 0


def cudnn(
  q_BTNH, k_BSKH, v_BSKH, mask_BTS, implementation: Any = 'cudnn'
) -> Float[Array, 'B T N H']:
  """Computes `_attend` by cuDNN: a mask reaches the GPU's memory, scores do not.

  JAX's public interface has no segments, so that the mask becomes an addend of B T S
  numbers of 2 bytes, the same for all heads, and the backward pass gives one more of that
  size. In blocks of an eighth of a row of 16,384 tokens that is 64 MiB each, where scores
  in float32 would be 128 MiB times N.
  """
  return jax.nn.dot_product_attention(
    q_BTNH, k_BSKH, v_BSKH, mask=mask_BTS[:, None], implementation=implementation
  )
