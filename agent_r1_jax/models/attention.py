"""Attention over packed rows (training) and over a cache (generation).

Letters as in decoder.py: B rows, T queries, S key slots, N query heads, K key-value
heads, G = N / K, H head dim.
"""

import functools
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from agent_r1_jax.models import sharding

# Causal attention is computed in at most this many blocks of at least this many queries.
_MAX_BLOCKS, _MIN_BLOCK = 8, 64
# With fewer queries for each key-value head than this, a call is a decoding step.
_FEW = 16
# The kernel for TPUs takes whole tiles of LANES numbers, and blocks of this many tokens.
LANES, _SPLASH_BLOCK = 128, 512
# The most slots of a page of the kernel for decoding on TPUs, and the most pages: their
# numbers are in scalar memory, of which a core has 1 MiB.
_PAGE, _PAGES = 512, 1 << 16
# The dtypes of cuDNN's attention on every GPU that has it, and its largest head dim (on
# Hopper it could be 256), which must be a multiple of 8.
_CUDNN_DTYPES, _CUDNN_HEAD = ('float16', 'bfloat16'), 128


def packed(
  q_BTNH: Float[Array, 'B T N H'],
  k_BTKH: Float[Array, 'B T K H'],
  v_BTKH: Float[Array, 'B T K H'],
  segment_ids_BT: Int[Array, 'B T'],
) -> Float[Array, 'B T N H']:
  """Causal attention inside each segment of a packed row.

  Where a mesh is set, a chip computes some heads for all tokens of its rows. Chips that
  share a row hold all heads of some of its tokens, and exchange tokens for heads before
  and after (all to all: DeepSpeed-Ulysses, arXiv 2309.14509). Memory is then that of T /
  context tokens, each chip computes an equal part of the causal triangle, and the kernel
  is the same. A ring of keys and values would need a kernel that can continue another's
  partial sums, and an order of tokens that shares the triangle evenly.
  """
  mesh = sharding.active_mesh()
  if mesh is None:
    return _packed(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)
  # Only the shards of T reach `context`: each chip has T / context tokens of its heads.
  heads = PartitionSpec(*sharding.TOKEN_SPEC, 'tensor')
  return jax.shard_map(
    _attend_across_chips,
    in_specs=(heads, heads, heads, PartitionSpec(sharding.ROW_AXES)),
    out_specs=heads,
    check_vma=False,
  )(*_split_heads(q_BTNH, k_BTKH, v_BTKH, mesh.shape['tensor']), segment_ids_BT)


def _attend_across_chips(q_BUNH, k_BUKH, v_BUKH, segment_ids_BT):
  """Attends, on one chip, from its U = T / context tokens to those of the whole row."""
  exchange = functools.partial(jax.lax.all_to_all, axis_name='context', tiled=True)
  heads = _split_heads(q_BUNH, k_BUKH, v_BUKH, jax.lax.axis_size('context'))
  q_BTNH, k_BTKH, v_BTKH = (exchange(x, split_axis=2, concat_axis=1) for x in heads)
  out_BTNH = _packed(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)
  return exchange(out_BTNH, split_axis=1, concat_axis=2)[:, :, : q_BUNH.shape[2]]


def _split_heads(q_BTNH, k_BTKH, v_BTKH, chips: int) -> tuple[Array, Array, Array]:
  """Repeats and pads heads so that each chip gets the same number of each kind.

  Key-value heads are repeated: twice for 16 query heads, 2 key-value heads and 4 chips.
  Where query heads that share keys cannot be on one chip, each gets its own copy of them,
  and heads of zeros are appended: 28 query heads become 32 on 8 chips.
  """
  N, K = q_BTNH.shape[2], k_BTKH.shape[2]
  times = math.lcm(K, chips) // K
  times = times if N // K % times == 0 else N // K
  repeated = (jnp.repeat(x_BTKH, times, axis=2) for x_BTKH in (k_BTKH, v_BTKH))
  spare = ((0, 0), (0, 0), (0, -N % chips), (0, 0))
  q_BTNH, k_BTKH, v_BTKH = (jnp.pad(x, spare) for x in (q_BTNH, *repeated))
  return q_BTNH, k_BTKH, v_BTKH


def _packed(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT) -> Float[Array, 'B T N H']:
  """Computes `packed` on one chip, by the fastest kernel that supports the shapes."""
  T = q_BTNH.shape[1]
  if sharding.platform() == 'tpu' and T % LANES == 0:
    return _splash(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)
  fused = sharding.platform() == 'gpu' and has_cudnn(q_BTNH)
  blocks = count_blocks(T)
  ends = [T * (i + 1) // blocks for i in range(blocks)]
  k_BKTH, v_BKTH = (jnp.swapaxes(x, 1, 2) for x in (k_BTKH, v_BTKH))
  # The gradient of a split is one concatenation, that of slices a sum over all of them.
  blocks_q, out = jnp.split(q_BTNH, ends[:-1], axis=1), []
  for q_BUNH, begin, end in zip(blocks_q, [0, *ends[:-1]], ends, strict=True):
    # A block of queries reads the keys before its end only: half the work of the square.
    causal_TS = jnp.arange(begin, end)[:, None] >= jnp.arange(end)[None]
    same_BTS = segment_ids_BT[:, begin:end, None] == segment_ids_BT[:, None, :end]
    mask_BTS = causal_TS[None] & same_BTS
    if fused:
      out.append(_cudnn(q_BUNH, k_BTKH[:, :end], v_BTKH[:, :end], mask_BTS))
    else:
      out.append(_attend(q_BUNH, k_BKTH[:, :, :end], v_BKTH[:, :, :end], mask_BTS))
  return jnp.concatenate(out, axis=1)


def cached(
  q_BTNH: Float[Array, 'B T N H'],
  k_BKSH: Float[Array, 'B K S H'],
  v_BKSH: Float[Array, 'B K S H'],
  positions_BT: Int[Array, 'B T'],
) -> Float[Array, 'B T N H']:
  """Attends to every slot at or before the query's position: the cache's only mask."""
  if q_BTNH.shape[1] == 1 and reads_used_slots(k_BKSH.shape, k_BKSH.dtype):
    return _paged(q_BTNH, k_BKSH, v_BKSH, positions_BT)
  slots_S = jnp.arange(k_BKSH.shape[2])
  mask_BTS = positions_BT[:, :, None] >= slots_S[None, None, :]
  return _attend(q_BTNH, k_BKSH, v_BKSH, mask_BTS)


def count_blocks(tokens: int) -> int:
  """Returns the number of blocks in which attention over a row is computed."""
  return min(_MAX_BLOCKS, tokens // _MIN_BLOCK) or 1


def reads_used_slots(
  shape: tuple[int, ...], dtype: Any, platform: str | None = None
) -> bool:
  """Whether a decode's attention reads no slots of a row but those of its text.

  `shape` is the cache's [B, K, S, H]. The kernel that reads pages computes in bfloat16,
  on TPUs.
  """
  B, K, S, H = shape
  tiles = S % LANES == 0 and H % LANES == 0 and jnp.dtype(dtype) == jnp.bfloat16
  few = B * K * S // math.gcd(S, _PAGE) <= _PAGES
  return (platform or sharding.platform()) == 'tpu' and tiles and few


def _paged(q_B1NH, k_BKSH, v_BKSH, positions_B1) -> Float[Array, 'B 1 N H']:
  """Computes `cached` by Pallas' kernel for TPUs, which reads no page after a position's.

  A row that is past the last slot reads one page, and its result has no meaning.
  """
  mesh = sharding.active_mesh()
  K = k_BKSH.shape[1]
  if mesh is None:
    return _attend_to_pages(q_B1NH, k_BKSH, v_BKSH, positions_B1, 0, K)
  tensor = mesh.shape['tensor']
  # As sharding.cached lays them out: fewer key-value heads than chips are on each, and
  # the query heads of a chip then share one of them.
  split = K % tensor == 0

  def on_chip(q_B1NH, k_BKSH, v_BKSH, positions_B1):
    first = 0 if split else jax.lax.axis_index('tensor') * K // tensor
    heads = k_BKSH.shape[1] if split else 1
    return _attend_to_pages(q_B1NH, k_BKSH, v_BKSH, positions_B1, first, heads)

  queries = PartitionSpec(sharding.ROW_AXES, None, 'tensor')
  slots = PartitionSpec(sharding.ROW_AXES, 'tensor' if split else None)
  return jax.shard_map(
    on_chip,
    in_specs=(queries, slots, slots, PartitionSpec(sharding.ROW_AXES)),
    out_specs=queries,
    check_vma=False,
  )(q_B1NH, k_BKSH, v_BKSH, positions_B1)


def _attend_to_pages(q_B1NH, k_BKSH, v_BKSH, positions_B1, first, heads: int):
  """Attends on one chip, whose queries are for `heads` key-value heads, from `first` on.

  The slots of a row and a key-value head lie together: they are the pages of a text.
  """
  # The import is slow, and useless on other platforms.
  from jax.experimental.pallas.ops.tpu import paged_attention as kernels

  B, K, S, H = k_BKSH.shape
  N, page = q_B1NH.shape[2], math.gcd(S, _PAGE)
  # Each row and key-value head is a text to the kernel, with one key-value head. It sums
  # in the type of the queries.
  q_QGH = (q_B1NH.astype(jnp.float32) * H**-0.5).reshape(B * heads, N // heads, H)
  k_1PSH, v_1PSH = (x.reshape(1, -1, page, H) for x in (k_BKSH, v_BKSH))
  # The pages of row b and head k begin at (b K + k) S / page; with 4 pages a text, K = 2
  # and both heads here, row 1's are 8 9 10 11 and 12 13 14 15.
  text_BK = jnp.arange(B)[:, None] * K + first + jnp.arange(heads)[None]
  pages_QP = text_BK.reshape(-1, 1) * (S // page) + jnp.arange(S // page)[None]
  length_B = jnp.where(positions_B1[:, 0] < S, positions_B1[:, 0] + 1, 1)
  out_QGH = kernels.paged_attention(
    q_QGH,
    k_1PSH,
    v_1PSH,
    jnp.repeat(length_B, heads).astype(jnp.int32),
    pages_QP.astype(jnp.int32),
    pages_per_compute_block=1,
  )
  return out_QGH.reshape(B, 1, N, H).astype(q_B1NH.dtype)


def _splash(
  q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, interpret: bool = False
) -> Float[Array, 'B T N H']:
  """Computes `packed` by Pallas' kernel for TPUs: scores never leave the chip's core."""
  # The import is slow, and useless on other platforms.
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  T, N, H = q_BTNH.shape[1:]
  block = next(b for b in (_SPLASH_BLOCK, 256, LANES) if T % b == 0)
  names = ('q', 'kv', 'q_dkv', 'kv_dkv', 'q_dq', 'kv_dq')
  sizes: dict[str, Any] = {f'block_{name}': block for name in names}
  kernel: Any = splash.make_splash_mha_single_device(
    splash.MultiHeadMask([splash.CausalMask((T, T))] * N),
    block_sizes=splash.BlockSizes(**sizes),
    interpret=interpret,
  )
  ids = splash.SegmentIds(segment_ids_BT, segment_ids_BT)
  # Heads of fewer numbers (64 in the smallest Qwen2.5) end with zeros.
  lanes = ((0, 0), (0, 0), (0, 0), (0, -H % LANES))
  padded = (jnp.pad(x, lanes) for x in (q_BTNH * H**-0.5, k_BTKH, v_BTKH))
  heads_first = (jnp.swapaxes(x, 1, 2) for x in padded)
  return jnp.swapaxes(jax.vmap(kernel)(*heads_first, ids), 1, 2)[..., :H]


def has_cudnn(q_BTNH) -> bool:
  """Whether cuDNN's attention supports queries of this shape and dtype."""
  T, H = q_BTNH.shape[1], q_BTNH.shape[3]
  fits = H <= _CUDNN_HEAD and H % 8 == 0
  # All blocks must have an even number of tokens.
  return q_BTNH.dtype in _CUDNN_DTYPES and fits and T % (2 * _MAX_BLOCKS) == 0


def _cudnn(
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


def _attend(q_BTNH, k_BKSH, v_BKSH, mask_BTS) -> Float[Array, 'B T N H']:
  """Computes masked attention by XLA; scores and softmax are float32."""
  B, T, N, H = q_BTNH.shape
  K = k_BKSH.shape[1]
  q_BKGTH = jnp.transpose((q_BTNH * H**-0.5).reshape(B, T, K, N // K, H), (0, 2, 3, 1, 4))
  # G and T are merged so that both products are plain matrix products a (row, kv head).
  q_BKMH = q_BKGTH.reshape(B, K, (N // K) * T, H)
  scores = _scores(q_BKMH, k_BKSH)
  scores = scores.reshape(B, K, N // K, T, -1)
  scores = jnp.where(mask_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(scores, axis=-1).astype(v_BKSH.dtype)
  out_BKMH = jnp.einsum(
    'bkms,bksh->bkmh', weights.reshape(B, K, -1, k_BKSH.shape[2]), v_BKSH
  )
  out_BKGTH = out_BKMH.reshape(B, K, N // K, T, H)
  return jnp.transpose(out_BKGTH, (0, 3, 1, 2, 4)).reshape(B, T, N, H)


def _scores(q_BKMH, k_BKSH) -> Float[Array, 'B K M S']:
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  if q_BKMH.shape[2] < _FEW and sharding.platform() == 'cpu':
    # Otherwise XLA repacks all keys for a few queries: three times the time.
    scores_BKSM = jax.lax.optimization_barrier(dot('bksh,bkmh->bksm', k_BKSH, q_BKMH))
    return jnp.swapaxes(scores_BKSM, 2, 3)
  return dot('bkmh,bksh->bkms', q_BKMH, k_BKSH)
