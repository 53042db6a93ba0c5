"""Mixtures of experts: each token is computed by the few experts that its router takes.

No token is dropped, whatever the router does, and all shapes are static. The (token,
expert) pairs are sorted by expert, and each expert's product reads its own rows:

- on a TPU or a GPU of Hopper's kind by kernels (kernels/group_products.py), or on a TPU
  by XLA's ragged product, where these do not know a shape;
- on other GPUs in rounds, each of which takes up to twice as many pairs of every expert
  as they have on average: one batched product. There are as many rounds as the busiest
  expert needs, so one if no expert has more;
- on a CPU in blocks, one after the other, to which an expert's rows are filled up.

Where a mesh is set, `tensor` shards the experts: a chip computes its own ones for all
tokens of its rows, and the sum over chips is that which a sharded feed-forward has
anyway. So there is no axis for experts, and no token is sent to another chip.

Letters as in decoder.py, and: M tokens, k experts of a token, E experts, I feed-forward
of an expert, S slots for the sorted pairs, U slots of a block, Z blocks, C slots of an
expert in a round.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from agent_r1_jax import types
from agent_r1_jax.models import four_bits, sharded_params, sharding
from agent_r1_jax.models.kernels import hopper
from agent_r1_jax.models.layers import RMSNorm, Scale

# The most slots of a block on a CPU, and the least; the least of an expert in a round.
_BLOCKS, _LEAST = (64, 8), 16


class Kernels(NamedTuple):
  """The gated feed-forwards of E experts; each kernel may be four_bits.Packed."""

  gate: Any  # [E, D, I]
  up: Any  # [E, D, I]
  down: Any  # [E, I, D]
  biases: tuple[Array | None, ...] = (None, None, None)  # [E, I], [E, I], [E, D]


class _Kernel(nn.Module):
  """The router's kernel, or one for each expert, in `dtype`; and any bias.

  Where there are exponents beside it, it is four_bits.Packed.
  """

  shape: tuple[int, ...]
  dtype: str
  use_bias: bool = False
  scale: float = 1.0  # The variance at the beginning, times the number of inputs.

  @nn.compact
  def __call__(self):
    stacked = tuple(range(len(self.shape) - 2))
    init = nn.initializers.variance_scaling(
      self.scale, 'fan_in', 'truncated_normal', batch_axis=stacked
    )
    gather = lambda x, leaf: sharded_params.gather_kernel(x, '/'.join((*self.path, leaf)))
    if self.has_variable('params', four_bits.SCALE):
      leaves = 'kernel', four_bits.SCALE
      parts = (gather(self.get_variable('params', leaf), leaf) for leaf in leaves)
      kernel: Any = four_bits.Packed(*parts)
    else:
      kernel = self.param('kernel', init, self.shape).astype(self.dtype)
      kernel = gather(kernel, 'kernel')
    if not self.use_bias:
      return kernel, None
    outputs = (*self.shape[:-2], self.shape[-1])
    return kernel, self.param('bias', nn.initializers.zeros, outputs).astype(self.dtype)


class Experts(nn.Module):
  """The weighted sum of the experts that a router takes for each token."""

  num_experts: int
  per_token: int
  expert_dim: int
  normalize: bool  # Whether the weights of a token's experts sum to 1.
  use_bias: bool  # Of the router and of each expert's products.
  dtype: str
  activate: Callable[[Array, Array], Array]  # (gate, up) -> what down is given.
  out_scale: float  # As _Kernel's `scale`, of the experts' last product.
  # The ε of a router with a norm and a scale of each expert's weights; None without.
  router_eps: float | None = None

  @nn.compact
  def __call__(self, x_BTD, route_BTk=None, routed_BTD=None):
    """[B, T, D] to [B, T, D]; and the experts that each token takes, [B, T, k].

    Where `route_BTk` names experts, these are taken. The router reads `routed_BTD`, by
    default what the experts read.
    """
    D, E, I = x_BTD.shape[-1], self.num_experts, self.expert_dim
    routed_BTD = x_BTD if routed_BTD is None else routed_BTD
    if self.router_eps is not None:
      normed_BTD = RMSNorm(self.router_eps, name='router_norm')(routed_BTD)
      routed_BTD = normed_BTD * jnp.asarray(D**-0.5, normed_BTD.dtype)
    router_DE, bias_E = _Kernel((D, E), 'float32', self.use_bias, name='router')()
    weight_BTk, expert_BTk = route(
      routed_BTD, router_DE, self.per_token, self.normalize, route_BTk, bias_E
    )
    if self.router_eps is not None:
      weight_BTk *= Scale((E,), name='router_out')()[expert_BTk]
    options = self.dtype, self.use_bias
    kernels: Any
    kernels, biases = zip(
      _Kernel((E, D, I), *options, name='gate')(),
      _Kernel((E, D, I), *options, name='up')(),
      _Kernel((E, I, D), *options, self.out_scale, name='down')(),
      strict=True,
    )
    kernels = Kernels(*kernels, biases=biases)
    if self.is_initializing():
      return x_BTD, expert_BTk  # No mesh can split one token.
    return mix(x_BTD, weight_BTk, expert_BTk, kernels, self.activate), expert_BTk


def count_loads(
  expert: Int[Array, 'B T k'], E: int, counts: Bool[Array, 'B T']
) -> Float[Array, 'E']:
  """Counts the tokens that take each expert, of those that count."""
  taken = (expert[..., None] == jnp.arange(E)[None, None, None]) & counts[..., None, None]
  return taken.sum((0, 1, 2)).astype(jnp.float32)


def route(
  x: Float[Array, '*M D'],
  router_DE: Float[Array, 'D E'],
  k: int,
  normalize: bool,
  given: Int[Array, '*M k'] | None = None,
  bias_E: Float[Array, 'E'] | None = None,
) -> tuple[Float[Array, '*M k'], Int[Array, '*M k']]:
  """Takes the k likeliest experts of each token; returns their weights, float32, too.

  Experts that are given are taken instead, with the weights of this router, which learns
  from them (rollout routing replay, arXiv 2510.11370).

  Logits are float32 everywhere: what the sampler and the learner compute then differs as
  little as their hidden states do.
  """
  logits = jnp.matmul(
    x.astype(jnp.float32), router_DE, precision=jax.lax.Precision.HIGHEST
  )
  if bias_E is not None:
    logits += jnp.expand_dims(bias_E, tuple(range(logits.ndim - 1)))
  weights = jax.nn.softmax(logits)
  weight, expert = jax.lax.top_k(weights, k)
  if given is not None:
    expert = jnp.where(given == types.NO_EXPERT, expert, given)
    weight = jnp.take_along_axis(weights, expert, axis=-1)
  if normalize:
    weight /= weight.sum(-1, keepdims=True)
  return weight, expert


def mix(
  x_BTD: Float[Array, 'B T D'],
  weight_BTk: Float[Array, 'B T k'],
  expert_BTk: Int[Array, 'B T k'],
  kernels: Kernels,
  activate: Callable[[Array, Array], Array],
) -> Float[Array, 'B T D']:
  """Σ over a token's experts of weight · down(activate(gate(x), up(x)))."""
  mesh = sharding.active_mesh()
  if mesh is None:
    return _mix(x_BTD, weight_BTk, expert_BTk, kernels, activate)
  chips = mesh.shape['tensor']

  def on_chip(x_BTD, weight_BTk, expert_BTk, kernels):
    first = jax.lax.axis_index('tensor') * kernels.gate.shape[0]
    out = _mix(x_BTD, weight_BTk, expert_BTk - first, kernels, activate)
    return jax.lax.psum(out, 'tensor') if chips > 1 else out

  tokens, experts = sharding.TOKEN_SPEC, PartitionSpec('tensor')
  return jax.shard_map(
    on_chip,
    in_specs=(tokens, tokens, tokens, experts),
    out_specs=tokens,
    check_vma=False,
  )(x_BTD, weight_BTk, expert_BTk, kernels)


def _mix(x_BTD, weight_BTk, expert_BTk, kernels: Kernels, activate):
  """Computes `mix` with the experts on one chip; others have no number in [0, E)."""
  D, k, E = x_BTD.shape[-1], expert_BTk.shape[-1], kernels.gate.shape[0]
  x_MD, expert_Mk = x_BTD.reshape(-1, D), expert_BTk.reshape(-1, k)
  platform = sharding.platform()
  block = _choose_block(expert_Mk.size, E) if platform == 'cpu' else 1
  slots = _sort(expert_Mk, E, block)
  x_SD = x_MD.at[slots.token].get(mode='fill', fill_value=0)
  if multiply := _choose_product(expert_Mk.size, kernels, x_SD.dtype):
    y_SD = _compute_ragged(x_SD, kernels, slots.sizes, activate, multiply)
  else:
    y_SD: Any = _compute_steps(x_SD, kernels, slots.sizes, block, activate)
  y_MkD = y_SD.at[slots.slot].get(mode='fill', fill_value=0)
  # The order of the sum is that of the router, whatever the other tokens are.
  out_MD = (y_MkD * weight_BTk.reshape(-1, k, 1)).sum(1)
  return out_MD.astype(x_BTD.dtype).reshape(x_BTD.shape)


class _SortedPairs(NamedTuple):
  """Where the pairs lie that are sorted by expert, each expert's in whole blocks."""

  slot: Int[Array, 'M k']  # The slot of each pair; S if its expert is not here.
  token: Int[Array, 'S']  # The token in each slot; M if there is none.
  sizes: Int[Array, 'E']  # The slots of each expert.


def _sort(expert_Mk: Int[Array, 'M k'], E: int, block: int) -> _SortedPairs:
  """Sorts pairs by expert.

  With blocks of 2, and the experts 1, 0 and 1 of three tokens: the slots 2, 0 and 3, the
  tokens 1 3 0 2, and sizes 2 and 2; with blocks of 1: 1, 0 and 2; 1 0 2; and 1 and 2.
  """
  M, k = expert_Mk.shape
  expert_P = expert_Mk.reshape(-1)
  expert_P = jnp.where((expert_P >= 0) & (expert_P < E), expert_P, E)
  counts_E = (expert_P[:, None] == jnp.arange(E)[None]).sum(0)
  sizes_E = -(-counts_E // block) * block
  S = (M * k // block + (E if block > 1 else 0)) * block
  order_P = jnp.argsort(expert_P, stable=True)
  sorted_P = expert_P[order_P]
  # A pair's slot is as far from its expert's first slot as it is from its first pair.
  shift_E = jnp.cumsum(sizes_E) - sizes_E - (jnp.cumsum(counts_E) - counts_E)
  slot_P = jnp.arange(M * k) + shift_E.at[sorted_P].get(mode='fill', fill_value=S)
  slot_P = jnp.minimum(slot_P, S)
  token_S = jnp.full(S, M, jnp.int32).at[slot_P].set(order_P // k, mode='drop')
  slot_P = jnp.zeros_like(slot_P).at[order_P].set(slot_P)
  return _SortedPairs(slot_P.reshape(M, k), token_S, sizes_E)


def _choose_product(
  pairs: int, kernels: Kernels, dtype: Any
) -> Callable[..., Array] | None:
  """Returns what multiplies sorted rows by each expert's kernel, if anything does."""
  from agent_r1_jax.models.kernels import group_products

  on_tpu, (_, *sizes) = sharding.platform() == 'tpu', kernels.gate.shape
  if not on_tpu and not hopper.is_here():
    return None
  fits = group_products.supports(pairs, tuple(sizes), dtype)
  if fits and (on_tpu or hopper.passes_everywhere(group_products)):
    return group_products.multiply
  return _multiply_ragged if on_tpu else None


def _multiply_ragged(x_SX, kernel_EXY, sizes_E) -> Array:
  y_SY = jax.lax.ragged_dot(x_SX, kernel_EXY, sizes_E)
  # What is after the last group has no meaning; no slot there is read.
  return jnp.where((jnp.arange(len(y_SY)) < sizes_E.sum())[:, None], y_SY, 0)


def _compute_ragged(x_SD, kernels: Kernels, sizes_E, activate, multiply) -> Array:
  def apply(x_SX, kernel):
    kernel_EXY = four_bits.unpack(kernel, x_SX.dtype)
    return multiply(x_SX, kernel_EXY, sizes_E.astype(jnp.int32))

  def dot(x_SX, kernel, bias_EY):
    packed = isinstance(kernel, four_bits.Packed)
    # The backward pass unpacks it again: a scan over layers would stack those of all.
    y_SY = (jax.checkpoint(apply) if packed else apply)(x_SX, kernel)
    if bias_EY is None:
      return y_SY
    # Each slot gets the bias of its expert; that of those after the last has no meaning.
    return y_SY + jnp.repeat(bias_EY, sizes_E, 0, total_repeat_length=len(x_SX))

  return _feed_forward(x_SD, kernels, activate, dot)


def _choose_block(pairs: int, E: int) -> int:
  """Returns a power of 2 such that an expert has some blocks, and few slots are empty."""
  most, least = _BLOCKS
  return min(most, max(least, 1 << (pairs // (2 * E)).bit_length()))


class _Steps(NamedTuple):
  """How a loop over slots computes some of them at a time."""

  count: Any  # The number of steps.
  read: Callable[[Array, Any], Array]  # (slots, step) -> the step's rows.
  write: Callable[[Array, Array, Any], Array]  # (slots, rows, step) -> the slots.
  take: Callable[[Kernels, Any], Kernels]  # (kernels, step) -> those of its experts.
  add: Callable[[Array, Array, Any], Array]  # (a sum for each expert, part, step) -> it.


def _list_steps(S: int, sizes_E, block: int) -> _Steps:
  """Blocks of one expert, of [U, D]; or, where a block is 1, rounds of all, [E, C, D]."""
  if block > 1:
    ends_E = jnp.cumsum(sizes_E) // block
    expert_Z = jnp.searchsorted(ends_E, jnp.arange(S // block), side='right')
    expert_Z = jnp.minimum(expert_Z, len(ends_E) - 1)
    replace = jax.lax.dynamic_update_slice_in_dim
    return _Steps(
      count=ends_E[-1],
      read=lambda x_SD, z: jax.lax.dynamic_slice_in_dim(x_SD, z * block, block),
      write=lambda x_SD, rows_UD, z: replace(x_SD, rows_UD, z * block, 0),
      take=lambda kernels, z: jax.tree.map(lambda x: x[expert_Z[z]], kernels),
      add=lambda total, part, z: total.at[expert_Z[z]].add(part),
    )
  E = len(sizes_E)
  C = max(_LEAST, -(-2 * S // E // _LEAST) * _LEAST)
  first_E = jnp.cumsum(sizes_E) - sizes_E

  def list_slots(r):
    rank_1C = r * C + jnp.arange(C)[None]
    return jnp.where(rank_1C < sizes_E[:, None], first_E[:, None] + rank_1C, S)

  return _Steps(
    count=-(-sizes_E.max() // C),
    read=lambda x_SD, r: x_SD.at[list_slots(r)].get(mode='fill', fill_value=0),
    write=lambda x_SD, rows, r: x_SD.at[list_slots(r)].set(rows, mode='drop'),
    take=lambda kernels, r: kernels,
    add=lambda total, part, r: total + part,
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _compute_steps(x_SD, kernels: Kernels, sizes_E, block: int, activate) -> Array:
  """Computes the slots that are in use, step by step."""
  steps = _list_steps(len(x_SD), sizes_E, block)

  def compute(i, y_SD):
    rows = _feed_forward(steps.read(x_SD, i), steps.take(kernels, i), activate)
    return steps.write(y_SD, rows, i)

  return jax.lax.fori_loop(0, steps.count, compute, jnp.zeros_like(x_SD))


def _forward(x_SD, kernels, sizes_E, block, activate):
  y_SD = _compute_steps(x_SD, kernels, sizes_E, block, activate)
  return y_SD, (x_SD, kernels, sizes_E)


def _backward(block, activate, saved, dy_SD):
  """Computes each step again, so that nothing of the forward pass is kept."""
  x_SD, kernels, sizes_E = saved
  steps = _list_steps(len(x_SD), sizes_E, block)
  # Kernels of 4 bits are frozen, and so are the biases beside them.
  frozen = isinstance(kernels.gate, four_bits.Packed)
  learned = () if frozen else (kernels,)

  def differentiate(i, dx_SD):
    given = steps.take(kernels, i)

    def feed_forward(rows, *learned):
      return _feed_forward(rows, learned[0] if learned else given, activate)

    _, pull = jax.vjp(feed_forward, steps.read(x_SD, i), *(() if frozen else (given,)))
    drows, *parts = pull(steps.read(dy_SD, i))
    return steps.write(dx_SD, drows, i), tuple(parts)

  def add_step(i, sums):
    dx_SD, parts = differentiate(i, sums[0])
    return dx_SD, jax.tree.map(lambda x, part: steps.add(x, part, i), sums[1], parts)

  begin, first = jnp.zeros_like(x_SD), 0
  if block > 1:
    # Sums over many blocks are float32, whatever the kernels are.
    sums = begin, jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), learned)
  else:
    # Mostly there is one round, and nothing to add.
    sums, first = differentiate(0, begin), 1
  dx_SD, dlearned = jax.lax.fori_loop(first, steps.count, add_step, sums)
  dlearned = jax.tree.map(lambda x, y: x.astype(y.dtype), dlearned, learned)
  return dx_SD, None if frozen else dlearned[0], None


_compute_steps.defvjp(_forward, _backward)


def _multiply(x, kernel, bias) -> Array:
  """Computes [U, X] by one kernel, or [E, C, X] by one each."""
  y = x @ four_bits.unpack(kernel, x.dtype)
  return y if bias is None else y + jnp.expand_dims(bias, -2)


def _feed_forward(x, kernels: Kernels, activate, multiply=_multiply) -> Array:
  gate, up, down = kernels.biases
  gate, up = multiply(x, kernels.gate, gate), multiply(x, kernels.up, up)
  return multiply(activate(gate, up), kernels.down, down)
