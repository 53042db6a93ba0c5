"""Attention over packed rows (training) and over a cache (generation).

Letters as in decoder.py: B rows, T queries, S key slots, N query heads, K key-value
heads, G = N / K, H head dim.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int, Num

from agent_r1_jax import types
from agent_r1_jax.models import kv_cache, sharding
from agent_r1_jax.models.kernels import attention_kernels as kernels
from agent_r1_jax.models.kernels import block_attention

# The least number of queries in a block of causal attention.
_MIN_BLOCK = 64
# A call with fewer queries per key-value head is a decoding step.
_FEW = 16
# Larger than any distance between two positions.
_FAR = 1 << 30
# And no token attends to more after it: those of the largest picture of Gemma 4.
_MOST_AHEAD = 1120


class Rules(NamedTuple):
  """A model's attention options besides causality, the same for all layers."""

  window: int = 0  # The width of sliding layers in tokens; 0 for no limit.
  cap: float | None = None  # A cap c turns each score x into c · tanh(x / c).


_PLAIN = Rules()


class Local(NamedTuple):
  """A layer's part in a model with sliding layers."""

  slides: Any  # Whether this layer slides; a bool, or a scalar array.
  positions: Int[Array, 'B T']  # The tokens' positions in their sequences.
  # How many later tokens each one attends to if the layer slides; None for none.
  ahead: Int[Array, 'B T'] | None = None

  def since(self, window: int) -> Int[Array, 'B T']:
    """Returns the first position that each token attends to."""
    return self.positions - jnp.where(self.slides, window - 1, _FAR)


def packed(
  q_BTNH: Float[Array, 'B T N H'],
  k_BTKH: Float[Array, 'B T K H'],
  v_BTKH: Float[Array, 'B T K H'],
  sees: types.Segments | types.Tree,
  local: Local | None = None,
  rules: Rules = _PLAIN,
  sinks_N: Float[Array, 'N'] | None = None,
) -> Float[Array, 'B T N H']:
  """Computes causal attention inside segments of packed rows, or along paths of trees.

  In a sliding layer, a query attends to keys less than rules.window positions before it,
  and a picture's token may attend to later ones. A sink is one more score per head in the
  softmax, without a key; its weight is lost (gpt-oss; arXiv 2309.17453).

  On a mesh, a chip computes some heads for all tokens of its rows. Chips that share a row
  hold all heads of some of its tokens, and exchange tokens for heads before and after
  (all-to-all as in DeepSpeed-Ulysses, arXiv 2309.14509). A chip then needs memory for T /
  context tokens, computes an equal part of the causal triangle, and uses the same kernel.
  Ring attention would need a kernel that continues another's partial sums, and an order
  of tokens that balances the triangle.
  """
  trees = isinstance(sees, types.Tree)
  spans_BT = sees.ends if trees else sees.ids
  mesh = sharding.active_mesh()
  options: dict[str, Any] = {'trees': trees, 'rules': rules}
  if mesh is None:
    return _packed(q_BTNH, k_BTKH, v_BTKH, spans_BT, local, sinks_N, **options)
  # Only the shards of T reach `context`: each chip has T / context tokens of its heads.
  heads = PartitionSpec(*sharding.TOKEN_SPEC, 'tensor')
  rows = PartitionSpec(sharding.ROW_AXES)
  specs: Any = (
    PartitionSpec(),
    rows,
    rows if local and local.ahead is not None else None,
  )
  chips = mesh.shape['tensor']
  return jax.shard_map(
    functools.partial(_attend_across_chips, **options),
    in_specs=(
      *(heads, heads, heads, rows, local and Local(*specs)),
      PartitionSpec('tensor'),
    ),
    out_specs=heads,
    check_vma=False,
  )(
    *_split_heads(q_BTNH, k_BTKH, v_BTKH, chips),
    spans_BT,
    local,
    _pad_sinks(sinks_N, chips),
  )


def _attend_across_chips(q_BUNH, k_BUKH, v_BUKH, spans_BT, local, sinks_N, **options):
  """Computes on one chip the attention of its U = T / context tokens to the full row."""
  exchange = functools.partial(jax.lax.all_to_all, axis_name='context', tiled=True)
  chips = jax.lax.axis_size('context')
  heads = _split_heads(q_BUNH, k_BUKH, v_BUKH, chips)
  q_BTNH, k_BTKH, v_BTKH = (exchange(x, split_axis=2, concat_axis=1) for x in heads)
  if sinks_N is not None:
    n = q_BTNH.shape[2]
    first = n * jax.lax.axis_index('context')
    sinks_N = jax.lax.dynamic_slice_in_dim(_pad_sinks(sinks_N, chips), first, n)
  out_BTNH = _packed(q_BTNH, k_BTKH, v_BTKH, spans_BT, local, sinks_N, **options)
  return exchange(out_BTNH, split_axis=1, concat_axis=2)[:, :, : q_BUNH.shape[2]]


def _pad_sinks(sinks_N: Any, chips: int) -> Any:
  """Pads the sinks for the heads that `_split_heads` appends."""
  return None if sinks_N is None else jnp.pad(sinks_N, (0, -len(sinks_N) % chips))


def _split_heads(q_BTNH, k_BTKH, v_BTKH, chips: int) -> tuple[Array, Array, Array]:
  """Repeats and pads heads so that each chip gets the same number of each kind.

  Key-value heads are repeated: twice for 16 query heads, 2 key-value heads and 4 chips.
  If query heads that share keys cannot all be on one chip, each gets its own copy of the
  keys, and heads of zeros are appended: 28 query heads become 32 on 8 chips.
  """
  N, K = q_BTNH.shape[2], k_BTKH.shape[2]
  times = math.lcm(K, chips) // K
  times = times if N // K % times == 0 else N // K
  repeated = (jnp.repeat(x_BTKH, times, axis=2) for x_BTKH in (k_BTKH, v_BTKH))
  spare = ((0, 0), (0, 0), (0, -N % chips), (0, 0))
  q_BTNH, k_BTKH, v_BTKH = (jnp.pad(x, spare) for x in (q_BTNH, *repeated))
  return q_BTNH, k_BTKH, v_BTKH


def supports_trees() -> bool:
  """Whether rows of trees take the same time per token as rows of segments.

  With `context` above 1 they take longer: chips that share a row would have to exchange
  the hidden states of parents.
  """
  return not sharding.uses_context_parallelism()


def _packed(
  q_BTNH,
  k_BTKH,
  v_BTKH,
  spans_BT,
  local: Local | None,
  sinks_N: Array | None,
  *,
  trees: bool,
  rules: Rules,
) -> Float[Array, 'B T N H']:
  """Computes `packed` on one chip with the fastest kernel that supports the shapes.

  spans_BT is types.Tree.ends with trees, else types.Segments.ids.
  """
  T, sinks = q_BTNH.shape[1], sinks_N is not None
  plain = local is None and rules.cap is None and not sinks
  looks = local is not None and local.ahead is not None
  if sharding.platform() == 'tpu' and T % kernels.LANES == 0 and not looks:
    if trees and plain:
      return kernels.along_trees(q_BTNH, k_BTKH, v_BTKH, spans_BT)
    if not trees:
      layer: Any = (local and local.slides, *rules, sinks_N)
      return kernels.splash(q_BTNH, k_BTKH, v_BTKH, spans_BT, *layer)
  reach = _find_reach(local, rules, spans_BT, trees)
  by_rows = plain and kernels.knows_spans(q_BTNH)
  if by_rows or sharding.platform() == 'cpu':
    ends_BT = spans_BT if trees else block_attention.find_ends(spans_BT)
    if by_rows:
      return kernels.over_rows(q_BTNH, k_BTKH, v_BTKH, ends_BT)
    out = block_attention.attend_and_sum(
      q_BTNH, k_BTKH, v_BTKH, ends_BT, reach, rules.cap
    )
    return _let_sinks_take(*out, sinks_N)
  gpu, capped = sharding.platform() == 'gpu', rules.cap is not None
  fused = gpu and kernels.has_cudnn(q_BTNH) and not capped and not sinks
  blocks = count_blocks(T)
  ends = [T * (i + 1) // blocks for i in range(blocks)]
  k_BKTH, v_BKTH = (jnp.swapaxes(x, 1, 2) for x in (k_BTKH, v_BTKH))
  # The gradient of a split is one concatenation; the gradient of slices sums them all.
  blocks_q, out = jnp.split(q_BTNH, ends[:-1], axis=1), []
  for q_BUNH, begin, stop in zip(blocks_q, [0, *ends[:-1]], ends, strict=True):
    # A block of queries reads only the keys before its end: half the work of the square.
    end = min(T, stop + _MOST_AHEAD) if looks else stop
    queries_T1, keys_B1S = jnp.arange(begin, stop)[:, None], spans_BT[:, None, :end]
    causal_BTS = (queries_T1 >= jnp.arange(end)[None])[None]
    if reach and reach.until is not None:
      until_BT1 = reach.until[:, begin:stop, None]
      causal_BTS |= jnp.arange(end)[None, None] < until_BT1
    queries = queries_T1[None] if trees else spans_BT[:, begin:stop, None]
    mask_BTS = causal_BTS & (queries < keys_B1S if trees else queries == keys_B1S)
    if reach:
      first_BT1 = reach.since[:, begin:stop, None]
      mask_BTS &= reach.positions[:, None, :end] >= first_BT1
    if fused:
      out.append(kernels.cudnn(q_BUNH, k_BTKH[:, :end], v_BTKH[:, :end], mask_BTS))
    else:
      until = k_BKTH[:, :, :end], v_BKTH[:, :, :end]
      out.append(_attend(q_BUNH, *until, mask_BTS, rules.cap, sinks_N=sinks_N))
  return jnp.concatenate(out, axis=1)


def _find_reach(
  local: Local | None, rules: Rules, spans_BT: Array, trees: bool
) -> block_attention.Reach | None:
  """Finds how far tokens see in a layer of a model in which some slide."""
  if local is None:
    return None
  reach = block_attention.Reach(local.positions, local.since(rules.window))
  if local.ahead is None:
    return reach
  ends_BT = spans_BT if trees else block_attention.find_ends(spans_BT)
  after_1T = jnp.arange(1, spans_BT.shape[1] + 1)[None]
  until_BT = after_1T + jnp.where(local.slides, local.ahead, 0)
  return reach._replace(until=jnp.minimum(until_BT, ends_BT))


def _let_sinks_take(
  out_BTNH: Array, lse_BTN: Array, sinks_N: Array | None
) -> Float[Array, 'B T N H']:
  """Scales attention outputs by the softmax weight that the sinks leave to the keys.

  lse_BTN is ln Σ exp(scores) over the keys that a token sees.
  """
  if sinks_N is None:
    return out_BTNH
  left_BTN = jax.nn.sigmoid(lse_BTN - sinks_N.astype(jnp.float32)[None, None])
  return (out_BTNH * left_BTN[..., None]).astype(out_BTNH.dtype)


def cached(
  q_BTNH: Float[Array, 'B T N H'],
  k_BKSH: Num[Array, 'B K S H'],
  v_BKSH: Num[Array, 'B K S H'],
  positions_BT: Int[Array, 'B T'],
  rules: Rules = _PLAIN,
  scales: kv_cache.Scales | None = None,
  sinks_N: Float[Array, 'N'] | None = None,
  ahead_BT: Int[Array, 'B T'] | None = None,
) -> Float[Array, 'B T N H']:
  """Attends to every slot up to the query's position, without any other mask.

  With a window, attends to that many last tokens, the query's own included; the cache may
  then be a ring (kv_cache.py). int8 keys and values come with scales. Each token also
  attends to `ahead_BT` later ones, which this call has written.
  """
  slots = k_BKSH.shape[2]
  plain = rules.cap is None and not 0 < rules.window < slots and sinks_N is None
  plain &= ahead_BT is None
  sizes = k_BKSH.shape, q_BTNH.dtype, q_BTNH.shape[1]
  if plain and kernels.reads_used_slots(*sizes, rounded=scales is not None):
    return kernels.over_used_slots(q_BTNH, k_BKSH, v_BKSH, positions_BT, scales)
  held_BS = jnp.arange(slots)[None]
  if rules.window:
    held_BS = kv_cache.find_held(positions_BT, slots)
  after_BTS = positions_BT[:, :, None] - held_BS[:, None, :]
  mask_BTS = after_BTS >= (0 if ahead_BT is None else -ahead_BT[..., None])
  if rules.window:
    mask_BTS &= (after_BTS < rules.window) & (held_BS >= 0)[:, None]
  return _attend(q_BTNH, k_BKSH, v_BKSH, mask_BTS, rules.cap, scales, sinks_N)


def count_blocks(tokens: int) -> int:
  """Returns the number of query blocks for attention over a packed row."""
  return min(kernels.MAX_BLOCKS, tokens // _MIN_BLOCK) or 1


def cap_scores(x: Array, cap: float | None) -> Array:
  """Returns c · tanh(x / c) for a cap c (Gemma 2), or x without a cap."""
  return x if cap is None else cap * jnp.tanh(x / cap)


def _attend(
  q_BTNH,
  k_BKSH,
  v_BKSH,
  mask_BTS,
  cap,
  scales: kv_cache.Scales | None = None,
  sinks_N: Array | None = None,
) -> Float[Array, 'B T N H']:
  """Computes masked attention with XLA; scores and softmax are float32."""
  B, T, N, H = q_BTNH.shape
  K = k_BKSH.shape[1]
  q_BKGTH = jnp.transpose((q_BTNH * H**-0.5).reshape(B, T, K, N // K, H), (0, 2, 3, 1, 4))
  # G and T are merged so that both products are plain matmuls per (row, kv head).
  q_BKMH = q_BKGTH.reshape(B, K, (N // K) * T, H)
  if scales:  # int8 values are exact in the queries' dtype.
    k_BKSH, v_BKSH = (x.astype(q_BTNH.dtype) for x in (k_BKSH, v_BKSH))
  scores = _scores(q_BKMH, k_BKSH)
  scores = scores * scales[0][:, :, None] if scales else scores
  scores = cap_scores(scores.reshape(B, K, N // K, T, -1), cap)
  scores = jnp.where(mask_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(scores, axis=-1)
  weights = weights * scales[1][:, :, None, None] if scales else weights
  weights = weights.astype(v_BKSH.dtype).reshape(B, K, -1, k_BKSH.shape[2])
  out_BKMH = jnp.einsum('bkms,bksh->bkmh', weights, v_BKSH)
  out_BKGTH = out_BKMH.reshape(B, K, N // K, T, H)
  out_BTNH = jnp.transpose(out_BKGTH, (0, 3, 1, 2, 4)).reshape(B, T, N, H)
  if sinks_N is None:
    return out_BTNH
  lse_BTN = jnp.transpose(jax.nn.logsumexp(scores, axis=-1), (0, 3, 1, 2))
  return _let_sinks_take(out_BTNH, lse_BTN.reshape(B, T, N), sinks_N)


def _scores(q_BKMH, k_BKSH) -> Float[Array, 'B K M S']:
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  if q_BKMH.shape[2] < _FEW and sharding.platform() == 'cpu':
    # Otherwise XLA repacks all keys for a few queries, which takes three times as long.
    scores_BKSM = jax.lax.optimization_barrier(dot('bksh,bkmh->bksm', k_BKSH, q_BKMH))
    return jnp.swapaxes(scores_BKSM, 2, 3)
  return dot('bkmh,bksh->bkms', q_BKMH, k_BKSH)
