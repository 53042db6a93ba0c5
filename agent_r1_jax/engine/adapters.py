"""The named LoRA adapters of an engine, stacked on the device; each row selects one.

A request names an adapter and holds its slot until it ends. The slot is not reused before
that, so a removed adapter still answers the requests that have begun. New weights under a
name replace the old ones in its slot, for active requests too. A name that is removed and
set again is a different adapter.

Each layer has one stack of A and one of B for every projection of families.TARGETS. An
adapter that lacks a target, or has a lower rank, is padded with zeros. Slot 0 is all
zeros and means no adapter.

A is stored [slots, R, I], not [slots, I, R]: a TPU tiles the last axis by 128, and R is
small. Letters as in models/lora.py.
"""

from collections.abc import Iterator, Sequence
import itertools
import math
import threading
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from agent_r1_jax.models import lora, sharding
from agent_r1_jax.models.decoder_config import DecoderConfig
from agent_r1_jax.models.family import Parameter

# The type of lora.Adapters.layers.
Stacks = tuple[dict[str, Any], ...]


class Weights(NamedTuple):
  """Identifies the weights in a slot."""

  version: int  # Different weights have different versions.
  step: int  # The policy_step of AdapterTable.set, reported with each token.
  adapter: int  # The name's first version; 0 means no adapter.


class Slots(NamedTuple):
  """An immutable snapshot of all slots; new weights make a new snapshot."""

  weights: tuple[Weights, ...]
  # The stacks on each chip (or each group of `tensor` chips); empty without adapters.
  copies: list[Stacks]

  def select(self, copy_index: int, slots: np.ndarray) -> lora.Adapters | None:
    """Selects the adapter of each entry of a call; None if the engine has none."""
    index: Any = slots  # jit takes numpy arrays too.
    return lora.Adapters(self.copies[copy_index], index) if self.copies else None


class AdapterTable:
  """The named adapters; any thread may call it.

  Attributes:
    count: Maximum number of adapters; 0 leaves adapters out of all programs.
    rank: Maximum rank of an adapter.
    slots: The current snapshot. Slot 0 means no adapter.
  """

  def __init__(
    self,
    config: DecoderConfig,
    count: int,
    rank: int,
    meshes: Sequence[Mesh | None],
  ):
    """Allocates the stacks on each mesh.

    Raises:
      ValueError: A number is too small.
    """
    if count < 0 or rank < 1:
      raise ValueError(
        f'adapters is {count} and adapter_rank {rank}; they must be at least 0 and 1.'
      )
    self.count, self.rank, self._config = count, rank, config
    copies = [
      make_stacks(config, count + 1, rank, mesh) for mesh in (meshes if count else ())
    ]
    self.slots = Slots((Weights(0, 0, 0),) * (count + 1), copies)
    self._names: dict[str, int] = {}
    self._users = [0] * (count + 1)
    self._versions = itertools.count(1)
    # `_setting` is held while weights are copied, `_naming` only while names change: the
    # event loop takes only `_naming`, so it never waits for a copy.
    self._setting, self._naming = threading.Lock(), threading.Lock()

  @property
  def names(self) -> list[str]:
    """The names, in the order in which they were added."""
    return [*self._names]

  @property
  def free(self) -> int:
    """The number of slots that no name and no request uses."""
    with self._naming:
      return len(self._list_free_slots())

  @property
  def unused(self) -> list[str]:
    """The names that no request uses, in the order in which they were added."""
    with self._naming:
      return [name for name, slot in self._names.items() if not self._users[slot]]

  def set(self, name: str, adapter: dict[str, Any], policy_step: int | None = None):
    """Adds an adapter, or replaces its weights, even while replies are sampled.

    If the adapter is sharded over several processes, all must call this. The weights
    apply to new requests and to the remaining tokens of active ones. As with
    Engine.sync_weights, a sequence keeps the keys and values that older weights computed,
    each token records the step of its weights, and no sequence copies a prefix that
    several versions computed. Two copies of all adapters are briefly in memory.

    Args:
      name: The name that requests use.
      adapter: The leaves of lora.take or peft_files.load: projections of
        families.TARGETS, of ranks up to `rank`.
      policy_step: Reported with each token that the adapter samples, in place of the
        engine's policy_step. None: 0 at first, plus 1 with each update.

    Raises:
      ValueError: The adapter does not fit the policy, its rank is too high, its numbers
        are not finite, or all slots are used.
    """
    if not isinstance(name, str) or not name:
      raise ValueError(f'an adapter is named {name!r}; give it a text.')
    if not self.count:
      raise ValueError('the engine has no room for adapters: make it with adapters=n.')
    values = prepare(self._config, adapter, self.rank)
    with self._setting:
      weights, version = [*self.slots.weights], next(self._versions)
      if name in self._names:
        slot = self._names[name]
        _, step, first = weights[slot]
      else:
        slot, step, first = self._find_free_slot(name), -1, version
      step = step + 1 if policy_step is None else policy_step
      weights[slot] = Weights(version, step, first)
      copies = [put(x, slot, values) for x in self.slots.copies]
      # Set before the name, which requests may use as soon as it exists.
      self.slots = Slots(tuple(weights), copies)
      with self._naming:
        self._names[name] = slot

  def remove(self, name: str):
    """Removes an adapter: new requests cannot name it; active ones are still answered.

    An adapter that is later set under the same name is a different one: sequences that
    continue with it are prefilled again.

    Raises:
      ValueError: No adapter has the name.
    """
    with self._setting, self._naming:
      self._find_slot(name)
      del self._names[name]

  def acquire(self, name: str | None) -> int:
    """Adds a user to an adapter and returns its slot; pass it to `release` at the end.

    Raises:
      ValueError: No adapter has the name.
    """
    if name is None:
      return 0
    with self._naming:
      slot = self._find_slot(name)
      self._users[slot] += 1
    return slot

  def release(self, slot: int):
    """Removes the user that `acquire` added."""
    with self._naming:
      self._users[slot] -= 1 if slot else 0

  def _find_slot(self, name: str) -> int:
    if name not in self._names:
      names = ', '.join(self._names) or 'none'
      raise ValueError(
        f'there is no adapter {name!r:.80}; there are: {names}. engine.adapters.set '
        'adds one.'
      )
    return self._names[name]

  def _find_free_slot(self, name: str) -> int:
    """Finds a slot that no name and no request uses."""
    free = self._list_free_slots()
    if not free:
      raise ValueError(
        f'there is no room for the adapter {name!r:.80}: {", ".join(self._names)} and '
        f'requests of removed ones use all {self.count} slots. Remove one, wait until '
        'its requests have ended, or make the engine with more adapters.'
      )
    return free[0]

  def _list_free_slots(self) -> list[int]:
    used = {0, *self._names.values()}
    return [slot for slot, n in enumerate(self._users) if not (n or slot in used)]


def make_stacks(
  config: DecoderConfig, slots: int, rank: int, mesh: Mesh | None = None
) -> Stacks:
  """Makes stacks of zeros in config.dtype.

  Args:
    config: The policy's shape.
    slots: Number of slots, including slot 0.
    rank: Maximum rank of an adapter.
    mesh: The chips of a replica; `tensor` shards inputs and outputs like the kernel's.
  """
  stacks: Stacks = tuple({} for _ in range(config.num_layers))
  for target in lora.list_targets(config):
    name, shapes = target.target, lora.get_shapes(config, target, rank)
    specs = mesh and _make_specs(target, shapes, mesh)
    for layer in config.list_layers(target.path):
      stack = stacks[layer].setdefault(target.place, {}).setdefault(name, {})
      for leaf, numbers in zip('ab', _count_numbers(shapes), strict=True):
        zeros = np.zeros((slots, rank, numbers), jnp.dtype(config.dtype))
        where = NamedSharding(mesh, specs[leaf]) if mesh and specs else None
        stack[leaf] = jax.device_put(zeros, where)
  # Compiles `put`, and gives these stacks the same layout as all later ones.
  none = jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), stacks)
  return put(stacks, 0, none)


def prepare(config: DecoderConfig, adapter: dict[str, Any], rank: int) -> Stacks:
  """Makes the values that `put` writes: s · A [R, I] and B [R, O] per layer, in numpy.

  If the adapter is sharded over several processes, all must call this.

  Args:
    config: The policy's shape.
    adapter: The leaves of an adapter, as lora.take returns them.
    rank: The rank of the stacks; adapters of a lower rank are padded with zeros.

  Raises:
    ValueError: A leaf is missing, unknown or not finite, or its shape or rank does not
      fit; or there are no leaves.
  """
  leaves = _check(config, adapter, rank)
  layers: Stacks = tuple({} for _ in range(config.num_layers))
  for target in lora.list_targets(config):
    name, shapes = target.target, lora.get_shapes(config, target, rank)
    having = config.list_layers(target.path)
    L, I, O = len(having), *_count_numbers(shapes)
    a_LRI, b_LRO = np.zeros((L, rank, I)), np.zeros((L, rank, O))
    if (target.place, name) in leaves:
      a, b, scale = (leaves[target.place, name][leaf] for leaf in lora.LEAVES)
      R = a.shape[-1]
      # In float32, as when merging an adapter, and rounded to config.dtype once.
      scaled_LIR = a.reshape(L, I, R) * scale[:, None, None]
      a_LRI[:, :R], b_LRO[:, :R] = scaled_LIR.swapaxes(1, 2), b.reshape(L, R, O)
    a_LRI, b_LRO = (x.astype(jnp.dtype(config.dtype)) for x in (a_LRI, b_LRO))
    for layer, a_RI, b_RO in zip(having, a_LRI, b_LRO, strict=True):
      layers[layer].setdefault(target.place, {})[name] = {'a': a_RI, 'b': b_RO}
  return layers


def put(stacks: Stacks, slot: int, values: Stacks) -> Stacks:
  """Returns copies of the stacks with the values of `prepare` in one slot."""

  def put_leaf(stack, value):
    new = _put(stack, np.int32(slot), value)
    # A sharded update may change the sharding. Without a mesh, arguments must stay
    # uncommitted: programs would be compiled again for committed ones.
    return jax.device_put(new, stack.sharding) if stack.committed else new

  return jax.tree.map(put_leaf, stacks, values)


@jax.jit
def _put(stack: Array, slot: Array, value: Array) -> Array:
  return stack.at[slot].set(value)


def _check(
  config: DecoderConfig, adapter: dict[str, Any], rank: int
) -> dict[tuple[str, str], dict[str, np.ndarray]]:
  """Returns an adapter's leaves in numpy, by place and name; raises like `prepare`."""
  targets = {(x.place, x.target): x for x in lora.list_targets(config)}
  found = {}
  for (place, name), node in _list_nodes(adapter):
    path = f'layers/{place}/{name}'
    if (place, name) not in targets:
      names = dict.fromkeys(name for _, name in targets)
      raise ValueError(
        f'adapter: {path} has no adapter in a {config.family}; one may be in '
        f'{", ".join(names)}.'
      )
    if node.keys() != {*lora.LEAVES}:
      raise ValueError(
        f'adapter: {path} has the leaves {sorted(node)}, and must have '
        f'{", ".join(lora.LEAVES)}; lora.take(params) returns an adapter.'
      )
    leaves = {leaf: sharding.to_numpy(x).astype(np.float32) for leaf, x in node.items()}
    shape = leaves['lora_a'].shape
    rank_of_it = shape[-1] if shape else 0
    shapes = lora.get_shapes(config, targets[place, name], rank_of_it)
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
  """Lists the nodes under layers/PLACE/NAME; raises ValueError for any others."""
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
  """Returns the number of inputs and of outputs of a kernel (I and O)."""
  return math.prod(shapes['lora_a'][1:-1]), math.prod(shapes['lora_b'][2:])


def _make_specs(
  target: Parameter, shapes: dict[str, tuple[int, ...]], mesh: Mesh
) -> dict[str, PartitionSpec]:
  """Shards the first input of A, and the first output of B, over `tensor`."""
  place, specs = target.path.removesuffix('kernel'), {}
  for name, leaf, axis in (('a', 'lora_a', 1), ('b', 'lora_b', 2)):
    axes = (*sharding.make_spec(place + leaf, shapes[leaf], mesh), None, None, None)
    # A replica is sharded over `tensor` only.
    specs[name] = PartitionSpec(None, None, 'tensor' if axes[axis] == 'tensor' else None)
  return specs
