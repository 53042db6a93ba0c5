"""Mixtures of experts: a router sends each token to a few of the experts.

No token is dropped, whatever the router does, and all shapes are static. The (token,
expert) pairs are sorted by expert, and each expert's product reads its own rows:

- on TPUs and Hopper GPUs with kernels (kernels/group_products.py); a TPU uses XLA's
  ragged product for shapes that they do not support;
- on other GPUs in rounds, each one batched product of up to twice the average number of
  pairs per expert. The busiest expert determines how many rounds there are, mostly one;
- on a CPU in blocks, one after the other, with an expert's rows padded to whole blocks.

On a mesh, `tensor` shards the experts: a chip computes its own experts for all tokens of
its rows, and the sum over chips is the one that any sharded feed-forward needs. So there
is no axis for experts, and no token is sent to another chip.

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

# The most and fewest slots of a block on a CPU; the fewest of an expert in a round.
_BLOCKS, _LEAST = (64, 8), 16


class Kernels(NamedTuple):
  """The gated feed-forwards of E experts; each kernel may be four_bits.Packed."""

  gate: Any  # [E, D, I]
  up: Any  # [E, D, I]
  down: Any  # [E, I, D]
  biases: tuple[Array | None, ...] = (None, None, None)  # [E, I], [E, I], [E, D]


class _Kernel(nn.Module):
  """The router's kernel, or one per expert, in `dtype`; and any bias.

  If the parameters have exponents next to it, the kernel is four_bits.Packed.
  """

  shape: tuple[int, ...]
  dtype: str
  use_bias: bool = False
  scale: float = 1.0  # The variance at initialization, times the number of inputs.

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
  """The weighted sum of the experts that a router chooses for each token."""

  num_experts: int
  per_token: int
  expert_dim: int
  normalize: bool  # Whether the weights of a token's experts sum to 1.
  use_bias: bool  # Whether the router and the experts' products have biases.
  dtype: str
  activate: Callable[[Array, Array], Array]  # (gate, up) -> the input of down.
  out_scale: float  # _Kernel's `scale` for the experts' last product.
  # ε of the norm of a router that also scales each expert's weights; None for others.
  router_eps: float | None = None

  @nn.compact
  def __call__(self, x_BTD, route_BTk=None, routed_BTD=None):
    """Returns [B, T, D], and the experts of each token, [B, T, k].

    Experts in `route_BTk` replace the router's choice. The router reads `routed_BTD`, by
    default the experts' input.
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
      return x_BTD, expert_BTk  # No mesh can split the single token of `init`.
    return mix(x_BTD, weight_BTk, expert_BTk, kernels, self.activate), expert_BTk


def count_loads(
  expert: Int[Array, 'B T k'], E: int, counts: Bool[Array, 'B T']
) -> Float[Array, 'E']:
  """Counts the tokens of each expert, among the tokens that count."""
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
  """Chooses the k likeliest experts of each token; returns float32 weights and experts.

  Experts in `given` are chosen instead, with this router's weights, so that it learns
  from them (rollout routing replay, arXiv 2510.11370).

  Logits are float32 everywhere: sampler and learner then differ no more than their
  hidden states.
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
  """Computes Σ weight · down(activate(gate(x), up(x))) over a token's experts."""
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
  """Computes `mix` with one chip's experts, [0, E); ignores other numbers."""
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
  # The sum is in the router's order, so it does not depend on the other tokens.
  out_MD = (y_MkD * weight_BTk.reshape(-1, k, 1)).sum(1)
  return out_MD.astype(x_BTD.dtype).reshape(x_BTD.shape)


class _SortedPairs(NamedTuple):
  """The slots of pairs sorted by expert; each expert has whole blocks of slots."""

  slot: Int[Array, 'M k']  # The slot of each pair; S if its expert is not here.
  token: Int[Array, 'S']  # The token in each slot; M if there is none.
  sizes: Int[Array, 'E']  # The slots of each expert.


def _sort(expert_Mk: Int[Array, 'M k'], E: int, block: int) -> _SortedPairs:
  """Sorts pairs by expert.

  Three tokens with experts 1, 0 and 1, in blocks of 2: slots 2, 0 and 3, tokens 1 3 0 2,
  sizes 2 and 2. In blocks of 1: slots 1, 0 and 2, tokens 1 0 2, sizes 1 and 2.
  """
  M, k = expert_Mk.shape
  expert_P = expert_Mk.reshape(-1)
  expert_P = jnp.where((expert_P >= 0) & (expert_P < E), expert_P, E)
  counts_E = (expert_P[:, None] == jnp.arange(E)[None]).sum(0)
  sizes_E = -(-counts_E // block) * block
  S = (M * k // block + (E if block > 1 else 0)) * block
  order_P = jnp.argsort(expert_P, stable=True)
  sorted_P = expert_P[order_P]
  # A pair has the same rank among its expert's slots as among its expert's pairs.
  shift_E = jnp.cumsum(sizes_E) - sizes_E - (jnp.cumsum(counts_E) - counts_E)
  slot_P = jnp.arange(M * k) + shift_E.at[sorted_P].get(mode='fill', fill_value=S)
  slot_P = jnp.minimum(slot_P, S)
  token_S = jnp.full(S, M, jnp.int32).at[slot_P].set(order_P // k, mode='drop')
  slot_P = jnp.zeros_like(slot_P).at[order_P].set(slot_P)
  return _SortedPairs(slot_P.reshape(M, k), token_S, sizes_E)


def _choose_product(
  pairs: int, kernels: Kernels, dtype: Any
) -> Callable[..., Array] | None:
  """Returns a function that multiplies sorted rows by their experts' kernels, or None."""
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
  # Rows after the last group are undefined, and never read.
  return jnp.where((jnp.arange(len(y_SY)) < sizes_E.sum())[:, None], y_SY, 0)


def _compute_ragged(x_SD, kernels: Kernels, sizes_E, activate, multiply) -> Array:
  def apply(x_SX, kernel):
    kernel_EXY = four_bits.unpack(kernel, x_SX.dtype)
    return multiply(x_SX, kernel_EXY, sizes_E.astype(jnp.int32))

  def dot(x_SX, kernel, bias_EY):
    packed = isinstance(kernel, four_bits.Packed)
    # The backward pass unpacks again: a scan over layers would stack unpacked kernels.
    y_SY = (jax.checkpoint(apply) if packed else apply)(x_SX, kernel)
    if bias_EY is None:
      return y_SY
    # Each slot gets its expert's bias; slots after the last group are undefined.
    return y_SY + jnp.repeat(bias_EY, sizes_E, 0, total_repeat_length=len(x_SX))

  return _feed_forward(x_SD, kernels, activate, dot)


def _choose_block(pairs: int, E: int) -> int:
  """Returns a power of 2 that gives an expert a few blocks with few empty slots."""
  most, least = _BLOCKS
  return min(most, max(least, 1 << (pairs // (2 * E)).bit_length()))


class _Steps(NamedTuple):
  """The functions of a loop that computes some slots at a time."""

  count: Any  # The number of steps.
  read: Callable[[Array, Any], Array]  # (slots, step) -> the step's rows.
  write: Callable[[Array, Array, Any], Array]  # (slots, rows, step) -> the slots.
  take: Callable[[Kernels, Any], Kernels]  # (kernels, step) -> the step's kernels.
  add: Callable[[Array, Array, Any], Array]  # (sums by expert, part, step) -> sums.


def _list_steps(S: int, sizes_E, block: int) -> _Steps:
  """Makes steps of one expert's block [U, D], or for block 1 of all experts [E, C, D]."""
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
  """Computes the used slots, step by step."""
  steps = _list_steps(len(x_SD), sizes_E, block)

  def compute(i, y_SD):
    rows = _feed_forward(steps.read(x_SD, i), steps.take(kernels, i), activate)
    return steps.write(y_SD, rows, i)

  return jax.lax.fori_loop(0, steps.count, compute, jnp.zeros_like(x_SD))


def _forward(x_SD, kernels, sizes_E, block, activate):
  y_SD = _compute_steps(x_SD, kernels, sizes_E, block, activate)
  return y_SD, (x_SD, kernels, sizes_E)


def _backward(block, activate, saved, dy_SD):
  """Recomputes each step, so that the forward pass saves no activations."""
  x_SD, kernels, sizes_E = saved
  steps = _list_steps(len(x_SD), sizes_E, block)
  # Kernels of 4 bits are frozen, and their biases too.
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
    # Sums over many blocks are float32, whatever the dtype of the kernels.
    sums = begin, jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), learned)
  else:
    # Mostly there is only one round.
    sums, first = differentiate(0, begin), 1
  dx_SD, dlearned = jax.lax.fori_loop(first, steps.count, add_step, sums)
  dlearned = jax.tree.map(lambda x, y: x.astype(y.dtype), dlearned, learned)
  return dx_SD, None if frozen else dlearned[0], None


_compute_steps.defvjp(_forward, _backward)


def _multiply(x, kernel, bias) -> Array:
  """Multiplies [U, X] by one kernel, or [E, C, X] by one kernel per expert."""
  y = x @ four_bits.unpack(kernel, x.dtype)
  return y if bias is None else y + jnp.expand_dims(bias, -2)


def _feed_forward(x, kernels: Kernels, activate, multiply=_multiply) -> Array:
  gate, up, down = kernels.biases
  gate, up = multiply(x, kernels.gate, gate), multiply(x, kernels.up, up)
  return multiply(activate(gate, up), kernels.down, down)
