"""Mixtures of experts: each token is computed by the few experts that its router takes.

No token is dropped, whatever the router does, and all shapes are static. The (token,
expert) pairs are sorted by expert; each expert's product then reads its own rows. On
accelerators that is XLA's ragged product. A CPU's would compute every expert for every
token; there, an expert's rows are filled up to blocks, and a loop computes the blocks in
use.

Where a mesh is set, `tensor` shards the experts: a chip computes its own ones for all
tokens of its rows, and the sum over chips is that which a sharded feed-forward has
anyway. So there is no axis for experts, and no token is sent to another chip.

Letters as in decoder.py, and: M tokens, k experts of a token, E experts, I feed-forward
of an expert, S slots for the sorted pairs, U slots of a block, Z blocks.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from agent_r1_jax.models import sharded_params, sharding

# The most slots of a block on a CPU, and the least.
_BLOCKS = 64, 8


class Kernels(NamedTuple):
  """The gated feed-forwards of E experts."""

  gate: Float[Array, 'E D I']
  up: Float[Array, 'E D I']
  down: Float[Array, 'E I D']


class _Kernel(nn.Module):
  """The router's kernel, or one for each expert, in `dtype`."""

  shape: tuple[int, ...]
  dtype: str
  scale: float = 1.0  # The variance at the beginning, times the number of inputs.

  @nn.compact
  def __call__(self):
    stacked = tuple(range(len(self.shape) - 2))
    init = nn.initializers.variance_scaling(
      self.scale, 'fan_in', 'truncated_normal', batch_axis=stacked
    )
    kernel = self.param('kernel', init, self.shape).astype(self.dtype)
    return sharded_params.gather_kernel(kernel, '/'.join((*self.path, 'kernel')))


class Experts(nn.Module):
  """The weighted sum of the experts that a router takes for each token."""

  num_experts: int
  per_token: int
  expert_dim: int
  normalize: bool  # Whether the weights of a token's experts sum to 1.
  dtype: str
  activate: Callable[[Array], Array]
  out_scale: float  # As _Kernel's `scale`, of the experts' last product.

  @nn.compact
  def __call__(self, x_BTD):
    """[B, T, D] to [B, T, D]; and the experts that each token takes, [B, T, k]."""
    D, E, I = x_BTD.shape[-1], self.num_experts, self.expert_dim
    router_DE = _Kernel((D, E), 'float32', name='router')()
    weight_BTk, expert_BTk = route(x_BTD, router_DE, self.per_token, self.normalize)
    kernels = Kernels(
      _Kernel((E, D, I), self.dtype, name='gate')(),
      _Kernel((E, D, I), self.dtype, name='up')(),
      _Kernel((E, I, D), self.dtype, self.out_scale, name='down')(),
    )
    return mix(x_BTD, weight_BTk, expert_BTk, kernels, self.activate), expert_BTk


def route(
  x: Float[Array, '*M D'], router_DE: Float[Array, 'D E'], k: int, normalize: bool
) -> tuple[Float[Array, '*M k'], Int[Array, '*M k']]:
  """Takes the k likeliest experts of each token; returns their weights, float32, too.

  Logits are float32 everywhere: what the sampler and the learner compute then differs as
  little as their hidden states do.
  """
  logits = jnp.matmul(
    x.astype(jnp.float32), router_DE, precision=jax.lax.Precision.HIGHEST
  )
  weight, expert = jax.lax.top_k(jax.nn.softmax(logits), k)
  if normalize:
    weight /= weight.sum(-1, keepdims=True)
  return weight, expert


def mix(
  x_BTD: Float[Array, 'B T D'],
  weight_BTk: Float[Array, 'B T k'],
  expert_BTk: Int[Array, 'B T k'],
  kernels: Kernels,
  activate: Callable[[Array], Array],
) -> Float[Array, 'B T D']:
  """Σ over a token's experts of weight · down(activate(gate(x)) * up(x))."""
  mesh = sharding.active_mesh()
  if mesh is None or x_BTD.shape[:2] == (1, 1):  # No mesh can split one token.
    return _mix(x_BTD, weight_BTk, expert_BTk, kernels, activate)
  chips = mesh.shape['tensor']

  def on_chip(x_BTD, weight_BTk, expert_BTk, kernels):
    first = jax.lax.axis_index('tensor') * (kernels.gate.shape[0])
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
  cpu = sharding.platform() == 'cpu'
  block = _choose_block(expert_Mk.size, E) if cpu else 1
  slots = _sort(expert_Mk, E, block)
  x_SD = x_MD.at[slots.token].get(mode='fill', fill_value=0)
  compute = _compute_blocks if cpu else _compute_ragged
  y_SD: Any = compute(x_SD, kernels, slots.sizes, block, activate)
  y_MkD = y_SD.at[slots.slot].get(mode='fill', fill_value=0)
  # The order of the sum is that of the router, whatever the other tokens are.
  out_MD = (y_MkD * weight_BTk.reshape(-1, k, 1)).sum(1)
  return out_MD.astype(x_BTD.dtype).reshape(x_BTD.shape)


class _Slots(NamedTuple):
  """Where the pairs lie that are sorted by expert, each expert's in whole blocks."""

  slot: Int[Array, 'M k']  # The slot of each pair; S if its expert is not here.
  token: Int[Array, 'S']  # The token in each slot; M if there is none.
  sizes: Int[Array, 'E']  # The slots of each expert.


def _sort(expert_Mk: Int[Array, 'M k'], E: int, block: int) -> _Slots:
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
  return _Slots(slot_P.reshape(M, k), token_S, sizes_E)


def _compute_ragged(x_SD, kernels: Kernels, sizes_E, block: int, activate):
  dot = functools.partial(jax.lax.ragged_dot, group_sizes=sizes_E.astype(jnp.int32))
  # What is after the last group has no meaning, nor has its gradient.
  used_S1 = (jnp.arange(x_SD.shape[0]) < sizes_E.sum())[:, None]
  x_SD = jnp.where(used_S1, x_SD, 0)
  y_SD = dot(activate(dot(x_SD, kernels.gate)) * dot(x_SD, kernels.up), kernels.down)
  return jnp.where(used_S1, y_SD, 0)


def _choose_block(pairs: int, E: int) -> int:
  """Returns a power of 2 such that an expert has some blocks, and few slots are empty."""
  most, least = _BLOCKS
  return min(most, max(least, 1 << (pairs // (2 * E)).bit_length()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _compute_blocks(x_SD, kernels: Kernels, sizes_E, block: int, activate):
  """Computes the blocks that are in use, one after the other."""
  expert_Z, used = _list_blocks(x_SD.shape[0], sizes_E, block)

  def add_block(z, y_ZUD):
    y_UD = _feed_forward(x_ZUD[z], _take(kernels, expert_Z[z]), activate)
    return jax.lax.dynamic_update_index_in_dim(y_ZUD, y_UD, z, 0)

  x_ZUD = x_SD.reshape(-1, block, x_SD.shape[-1])
  y_ZUD = jax.lax.fori_loop(0, used, add_block, jnp.zeros_like(x_ZUD))
  return y_ZUD.reshape(x_SD.shape)


def _forward(x_SD, kernels, sizes_E, block, activate):
  y_SD = _compute_blocks(x_SD, kernels, sizes_E, block, activate)
  return y_SD, (x_SD, kernels, sizes_E)


def _backward(block, activate, saved, dy_SD):
  """Computes each block again, so that nothing of the forward pass is kept."""
  x_SD, kernels, sizes_E = saved
  expert_Z, used = _list_blocks(x_SD.shape[0], sizes_E, block)
  x_ZUD, dy_ZUD = (x.reshape(-1, block, x_SD.shape[-1]) for x in (x_SD, dy_SD))

  def add_block(z, sums):
    dx_ZUD, dkernels = sums
    expert = expert_Z[z]
    compute = functools.partial(_feed_forward, activate=activate)
    _, pull = jax.vjp(compute, x_ZUD[z], _take(kernels, expert))
    dx_UD, dkernel = pull(dy_ZUD[z])
    add = lambda total, x: total.at[expert].add(x.astype(jnp.float32))
    dx_ZUD = jax.lax.dynamic_update_index_in_dim(dx_ZUD, dx_UD, z, 0)
    return dx_ZUD, jax.tree.map(add, dkernels, dkernel)

  # Sums over several blocks are float32, whatever the kernels are.
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), kernels)
  begin = jnp.zeros_like(x_ZUD), zeros
  dx_ZUD, dkernels = jax.lax.fori_loop(0, used, add_block, begin)
  dkernels = jax.tree.map(lambda x, y: x.astype(y.dtype), dkernels, kernels)
  return dx_ZUD.reshape(x_SD.shape), dkernels, None


_compute_blocks.defvjp(_forward, _backward)


def _list_blocks(slots: int, sizes_E, block: int) -> tuple[Int[Array, 'Z'], Any]:
  """Lists the expert of each block, and counts those in use, which come first."""
  ends_E = jnp.cumsum(sizes_E) // block
  expert_Z = jnp.searchsorted(ends_E, jnp.arange(slots // block), side='right')
  return jnp.minimum(expert_Z, len(ends_E) - 1), ends_E[-1]


def _take(kernels: Kernels, expert) -> Kernels:
  return jax.tree.map(lambda x: x[expert], kernels)


def _feed_forward(x_UD, kernels, activate):
  return (activate(x_UD @ kernels.gate) * (x_UD @ kernels.up)) @ kernels.down
