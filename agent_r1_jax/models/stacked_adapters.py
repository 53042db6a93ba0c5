"""Adapters side by side on the device, of which each row of a batch uses one.

  stacks = stacked_adapters.make(config, slots=4, rank=16)  # Zeros.
  values = stacked_adapters.prepare(config, adapter, rank=16)
  stacks = stacked_adapters.put(stacks, 2, values)
  decoder.extend(params, ..., lora.Adapters(stacks, index))

Every projection of families.TARGETS has a stack of A and one of B in each layer, so that
adapters of whatever targets and of lower ranks are rows of the same arrays: those that an
adapter lacks are zeros. Slot 0 is zeros and stands for no adapter.

A is stored [slots, R, I] and not [slots, I, R]: a TPU stores the last axis in tiles of
128, and a rank has a few numbers. Letters as in lora.py.
"""

from collections.abc import Iterator
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from agent_r1_jax.models import families, lora, sharding
from agent_r1_jax.models.decoder_config import DecoderConfig

# The type of lora.Adapters.layers.
Stacks = tuple[dict[str, Any], ...]


def list_targets(config: DecoderConfig) -> dict[str, families.Parameter]:
  """Lists the kernels of a layer that can have an adapter, by the adapter's name."""
  return {
    name: target
    for name, target in families.TARGETS.items()
    if config.facts.has(target.path.removeprefix('layers/'))
  }


def get_shapes(
  config: DecoderConfig, target: families.Parameter, rank: int
) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of an adapter's leaves for all layers, as lora.add makes them."""
  inputs, outputs = (
    tuple(getattr(config, families.SIZES[letter][0]) for letter in letters)
    for letters in (target.inputs, target.dims.split('>')[1])
  )
  L = config.num_layers
  shapes = (L, *inputs, rank), (L, rank, *outputs), (L,)
  return dict(zip(lora.LEAVES, shapes, strict=True))


def make(
  config: DecoderConfig, slots: int, rank: int, mesh: Mesh | None = None
) -> Stacks:
  """Makes stacks of zeros in config.dtype.

  Args:
    config: The policy's shape.
    slots: Number of slots, slot 0 included.
    rank: The highest rank of an adapter.
    mesh: The chips of a replica: `tensor` shards inputs and outputs as the kernel's.
  """
  stacks: Stacks = tuple({} for _ in range(config.num_layers))
  for name, target in list_targets(config).items():
    shapes = get_shapes(config, target, rank)
    specs = mesh and _make_specs(target, shapes, mesh)
    for layer in stacks:
      stack = layer.setdefault(_get_place(target), {}).setdefault(name, {})
      for leaf, numbers in zip('ab', _count_numbers(shapes), strict=True):
        zeros = np.zeros((slots, rank, numbers), jnp.dtype(config.dtype))
        where = NamedSharding(mesh, specs[leaf]) if mesh and specs else None
        stack[leaf] = jax.device_put(zeros, where)
  # So `put` is compiled, and all stacks ever are what it returns.
  none = jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), stacks)
  return put(stacks, 0, none)


def prepare(config: DecoderConfig, adapter: dict[str, Any], rank: int) -> Stacks:
  """Makes what `put` writes to a slot, in numpy: s · A [R, I] and B [R, O] of each layer.

  If several processes hold the adapter, all must call this.

  Args:
    config: The policy's shape.
    adapter: The leaves of an adapter, as lora.take returns them.
    rank: That of the stacks. What an adapter of a lower rank lacks is zeros.

  Raises:
    ValueError: A leaf is missing, unknown, of a wrong shape or of a higher rank, or not
      finite; or there is none.
  """
  leaves = _check(config, adapter, rank)
  layers: Stacks = tuple({} for _ in range(config.num_layers))
  for name, target in list_targets(config).items():
    place = _get_place(target)
    shapes = get_shapes(config, target, rank)
    L, I, O = len(layers), *_count_numbers(shapes)
    a_LRI, b_LRO = np.zeros((L, rank, I)), np.zeros((L, rank, O))
    if (place, name) in leaves:
      a, b, scale = (leaves[place, name][leaf] for leaf in lora.LEAVES)
      R = a.shape[-1]
      # In float32, as when an adapter is merged, and rounded to config.dtype once.
      scaled_LIR = a.reshape(L, I, R) * scale[:, None, None]
      a_LRI[:, :R], b_LRO[:, :R] = scaled_LIR.swapaxes(1, 2), b.reshape(L, R, O)
    a_LRI, b_LRO = (x.astype(jnp.dtype(config.dtype)) for x in (a_LRI, b_LRO))
    for layer, a_RI, b_RO in zip(layers, a_LRI, b_LRO, strict=True):
      layer.setdefault(place, {})[name] = {'a': a_RI, 'b': b_RO}
  return layers


def put(stacks: Stacks, slot: int, values: Stacks) -> Stacks:
  """Returns stacks with what `prepare` made in a slot; the given ones stay as is."""

  def put_leaf(stack, value):
    # The result of a sharded update may lie elsewhere.
    return jax.device_put(_put(stack, np.int32(slot), value), stack.sharding)

  return jax.tree.map(put_leaf, stacks, values)


@jax.jit
def _put(stack: Array, slot: Array, value: Array) -> Array:
  return stack.at[slot].set(value)


def _check(
  config: DecoderConfig, adapter: dict[str, Any], rank: int
) -> dict[tuple[str, str], dict[str, np.ndarray]]:
  """Returns an adapter's leaves in numpy, by place and name; raises as `prepare`."""
  found, targets = {}, list_targets(config)
  for (place, name), node in _list_nodes(adapter):
    path = f'layers/{place}/{name}'
    if name not in targets or _get_place(targets[name]) != place:
      raise ValueError(
        f'adapter: {path} has no adapter in a {config.family}; one may be in '
        f'{", ".join(targets)}.'
      )
    if node.keys() != {*lora.LEAVES}:
      raise ValueError(
        f'adapter: {path} has the leaves {sorted(node)}, and must have '
        f'{", ".join(lora.LEAVES)}; lora.take(params) returns an adapter.'
      )
    leaves = {leaf: sharding.to_numpy(x).astype(np.float32) for leaf, x in node.items()}
    shape = leaves['lora_a'].shape
    shapes = get_shapes(config, targets[name], shape[-1] if shape else 0)
    for leaf, x in leaves.items():
      if x.shape != shapes[leaf]:
        raise ValueError(
          f'adapter: {path}/{leaf} has the shape {x.shape}, and by the policy it is '
          f'{shapes[leaf]}; take an adapter of this policy.'
        )
      if not np.isfinite(x).all():
        raise ValueError(
          f'adapter: {path}/{leaf} has numbers that are not finite: the training that '
          'made it diverged; take an earlier one.'
        )
    if shape[-1] > rank:
      raise ValueError(
        f'adapter: {path} has the rank {shape[-1]}, and there is room for {rank}; make '
        f'the engine with adapter_rank={shape[-1]}.'
      )
    found[place, name] = leaves
  if not found:
    raise ValueError('adapter: it has no leaves; lora.take(params) returns an adapter.')
  return found


def _list_nodes(adapter: Any) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
  """Lists what stands under layers/PLACE/NAME; refuses whatever else there is."""
  if not isinstance(adapter, dict) or adapter.keys() - {'layers'}:
    kind = sorted(adapter) if isinstance(adapter, dict) else type(adapter).__name__
    raise ValueError(
      f'adapter: it is {kind}, and must be the leaves under "layers" alone; '
      'lora.take(params) returns them.'
    )
  for place, kernels in adapter.get('layers', {}).items():
    for name, node in kernels.items():
      yield (place, name), node if isinstance(node, dict) else {name: node}


def _count_numbers(shapes: dict[str, tuple[int, ...]]) -> tuple[int, int]:
  """Counts all inputs and all outputs of a kernel (I and O)."""
  return math.prod(shapes['lora_a'][1:-1]), math.prod(shapes['lora_b'][2:])


def _get_place(target: families.Parameter) -> str:
  """Returns 'attn' or 'mlp'."""
  return target.path.split('/')[1]


def _make_specs(
  target: families.Parameter, shapes: dict[str, tuple[int, ...]], mesh: Mesh
) -> dict[str, PartitionSpec]:
  """Shards the first input of A, and the first output of B, over `tensor`."""
  place, specs = target.path.removesuffix('kernel'), {}
  for name, leaf, axis in (('a', 'lora_a', 1), ('b', 'lora_b', 2)):
    axes = (*sharding.make_spec(place + leaf, shapes[leaf], mesh), None, None, None)
    # A replica is not sharded over the other axes.
    specs[name] = PartitionSpec(None, None, 'tensor' if axes[axis] == 'tensor' else None)
  return specs
