"""Shards arrays over chips: the mesh, and each parameter's mesh axes.

  mesh = sharding.make_mesh(fsdp=8)
  config, params = weights.load(directory, place=sharding.make_placer(mesh))
  with jax.set_mesh(mesh):
    state = learner.init(params, optimizer)
    gradients = learner.forward_backward(state.params, batches, ...)
    state, metrics = learner.optim_step(state, gradients, optimizer=optimizer)
  engine = Engine(config, state.params, mesh=mesh, ...)

A batch's rows are sharded over `data` and `fsdp`, and a row's tokens over `context`.
Parameters are replicated over `data`, sharded over `fsdp` and `context` (XLA gathers a
layer where it is used), and their heads, feed-forward, experts and vocabulary over
`tensor`.

`context` is for rows that are too long for one chip. Only two computations mix tokens:
attention, for which the chips of a row exchange tokens for heads, and the learner's shift
by one. It is the last axis, so that these chips are neighbours.

XLA derives most of the computation from the shardings of its arguments. The models state
the rest explicitly when a mesh is set: how parameters are gathered (sharded_params.py),
and what each chip computes in attention and the vocabulary head.
"""

from collections.abc import Callable, Iterable, Sequence
import contextlib
import functools
import math
import re
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from agent_r1_jax.models import families

AXES = ('data', 'fsdp', 'tensor', 'context')
ROW_AXES = ('data', 'fsdp')
TOKEN_SPEC = PartitionSpec(ROW_AXES, 'context')  # B T
PARAM_AXES = ('fsdp', 'context')  # These shard a parameter's dimension D.

# Mesh axes of parameter dimensions, by their letters in models/families.py. Other
# dimensions are replicated; LoRA's rank is, so that merging is local.
_SPLIT_BY = dict.fromkeys('DWQl', PARAM_AXES) | dict.fromkeys('VNKkFfESGU', ('tensor',))
# Adafactor's statistics of a kernel are thousands of times smaller and have fewer axes.
_FACTORED = re.compile(r'\bv_(row|col)/')
# The engine's parameters are one dict per layer, without the dimension L.
_ONE_LAYER = re.compile(r'\blayers/\d+/')


def make_mesh(
  *,
  data: int = 1,
  fsdp: int = 1,
  tensor: int = 1,
  context: int = 1,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """Makes a mesh of (data, fsdp, tensor, context) over `devices`, by default all.

  Raises:
    ValueError: The axes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  shape = (data, fsdp, tensor, context)
  if math.prod(shape) != len(devices):
    raise ValueError(
      f'data x fsdp x tensor x context is {" x ".join(map(str, shape))}, yet there are '
      f'{len(devices)} devices; the product must be their number.'
    )
  types = (AxisType.Auto,) * len(AXES)
  if len(devices) < jax.device_count():
    # jax.make_mesh needs a contiguous block of chips, which part of a slice may not be.
    return Mesh(np.reshape(devices, shape), AXES, axis_types=types)
  return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)


def split_devices(samplers: int) -> tuple[list[Any], list[Any]]:
  """Splits the chips into training chips and chips that only sample.

  Returns:
    The training chips of all processes, and the sampling chips of this process.

  Raises:
    ValueError: A process has no chip left to train.
  """
  training, mine = [], []
  for process in range(jax.process_count()):
    chips = jax.local_devices(process_index=process)
    if not 0 <= samplers < len(chips):
      raise ValueError(
        f'mesh.samplers is {samplers}, but process {process} has {len(chips)} chips, '
        'of which one at least must train.'
      )
    training += chips[: len(chips) - samplers]
    if process == jax.process_index():
      mine = chips[len(chips) - samplers :]
  return training, mine


def map_named(change: Callable[..., Any], params: Any, *others: Any) -> Any:
  """Maps (path, leaf, ...) -> leaf over parameters; see jax.tree.map.

  A path is like 'layers/attn/q/kernel'.
  """
  name = functools.partial(jax.tree_util.keystr, simple=True, separator='/')
  return jax.tree.map_with_path(lambda at, *xs: change(name(at), *xs), params, *others)


def make_shardings(state: Any, mesh: Mesh | AbstractMesh) -> Any:
  """Returns a NamedSharding for each leaf of parameters, optimizer state or TrainState.

  Scalars are replicated. A leaf that cannot be sharded raises: silent replication would
  be noticed only when memory runs out, if at all.

  Raises:
    ValueError: models/families.py does not list a leaf, or an axis does not divide one of
      a leaf's dimensions.
  """
  return map_named(lambda p, x: NamedSharding(mesh, make_spec(p, x.shape, mesh)), state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of [B, T]: rows over data and fsdp, tokens over context."""
  return NamedSharding(mesh, TOKEN_SPEC)


def use_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager:
  """Sets the mesh inside `with`; does nothing if it is None."""
  return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def make_placer(mesh: Mesh | None) -> Callable[[str, np.ndarray], jax.Array]:
  """Makes a function (path, host array) -> the sharded array, for weights.load.

  Each process must have the whole array. Without a mesh, arrays go to JAX's default
  device.
  """
  if mesh is None:
    return lambda path, x: jax.device_put(x)

  def place(path: str, x: np.ndarray) -> jax.Array:
    named = NamedSharding(mesh, make_spec(path, x.shape, mesh))
    return jax.make_array_from_callback(x.shape, named, lambda index: x[index])

  return place


def shard_params(params: Any, mesh: Mesh | None) -> Any:
  """Shards the leaves that are not on the mesh yet; each process must have their data."""
  if mesh is None:
    return params
  place = make_placer(mesh)

  def leaf(path, x):
    return x if isinstance(x.sharding, NamedSharding) else place(path, np.asarray(x))

  return map_named(leaf, params)


def shard_batch(batch: Any) -> Any:
  """Shards a batch of host arrays over the active mesh; without a mesh, returns it.

  Each process must have the whole batch.
  """
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return batch
  named = batch_sharding(mesh)
  shard = lambda x: jax.make_array_from_callback(x.shape, named, lambda index: x[index])
  return jax.tree.map(shard, batch)


def replicate(x: Any) -> Any:
  """Replicates arrays inside jit, so that every process can read them."""
  mesh = active_mesh()
  if mesh is None:
    return x
  everywhere = NamedSharding(mesh, PartitionSpec())
  return jax.lax.with_sharding_constraint(x, everywhere)


def init_sharded(make: Callable[..., Any], *args: Any) -> Any:
  """Computes make(*args), and shards its leaves if a mesh is set."""
  mesh = active_mesh()
  if mesh is None:
    return make(*args)
  shardings = make_shardings(jax.eval_shape(make, *args), mesh)
  return jax.jit(make, out_shardings=shardings)(*args)


def make_replica_meshes(mesh: Mesh, chips: Sequence[Any] = ()) -> list[Mesh]:
  """Groups this process's chips into meshes of `tensor` chips, one per replica.

  If this process has sampling chips (`chips`), groups those instead of the mesh's.

  Raises:
    ValueError: `tensor` spans processes, or does not divide the number of chips.
  """
  tensor = mesh.shape['tensor']
  groups = np.moveaxis(mesh.devices, mesh.axis_names.index('tensor'), -1)
  make_replica_mesh = lambda group: Mesh(
    np.reshape(group, [tensor if axis == 'tensor' else 1 for axis in mesh.axis_names]),
    mesh.axis_names,
    axis_types=mesh.axis_types,
  )
  if len(chips) % tensor:
    raise ValueError(
      f'tensor is {tensor}, which must divide the {len(chips)} chips that sample.'
    )
  replicas: list[Any] = [chips[i : i + tensor] for i in range(0, len(chips), tensor)]
  for group in groups.reshape(-1, tensor):
    mine = [d.process_index == jax.process_index() for d in group]
    if any(mine) and not all(mine):
      raise ValueError(
        f'tensor is {tensor}: its chips must belong to one process, which samples on '
        f'them; make it a divisor of {len(mesh.local_devices)}.'
      )
    if all(mine) and not chips:
      replicas.append(group)
  return [make_replica_mesh(group) for group in replicas]


def gather_params(params: Any, mesh: Mesh) -> Any:
  """Gathers parameters on the mesh; only `tensor` still shards the result."""
  with jax.set_mesh(mesh):
    return _gather(params)


def take_replica_params(params: Any, replica: Mesh) -> Any:
  """Returns one replica's part of the parameters that `gather_params` returned."""

  def leaf(x: jax.Array) -> jax.Array:
    spread: Any = x.sharding
    named = NamedSharding(replica, spread.spec)
    # The copies of each shard, by the shard's index in the array and the copy's chip.
    shards: dict[str, dict[Any, jax.Array]] = {}
    for shard in x.addressable_shards:
      shards.setdefault(str(shard.index), {})[shard.device] = shard.data
    arrays = []
    for chip, index in named.devices_indices_map(x.shape).items():
      copies = shards[str(index)]
      copy = copies[chip] if chip in copies else next(iter(copies.values()))
      arrays.append(jax.device_put(copy, chip))
    return jax.make_array_from_single_device_arrays(x.shape, named, arrays)

  return jax.tree.map(leaf, params)


def cache_sharding(heads: int, replica: Mesh | AbstractMesh) -> NamedSharding:
  """Returns the sharding of a KV cache [B, K, S, H] with K = `heads`.

  `tensor` shards the heads if it divides their number; otherwise they are replicated.
  """
  split = heads % replica.shape['tensor'] == 0
  return NamedSharding(replica, PartitionSpec(*(None, 'tensor') if split else ()))


def shard_cache(cache: Any, replica: Mesh) -> Any:
  """Puts a new KV cache on a replica's chips."""
  put = lambda x: jax.device_put(x, cache_sharding(x.shape[1], replica))
  return jax.tree.map(put, cache)


def to_numpy(x: Any) -> np.ndarray:
  """Copies an array to this host; if it spans processes, all of them must call this."""
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    named: Any = x.sharding
    with jax.set_mesh(named.mesh):
      x = jax.jit(replicate)(x)
  return np.asarray(x)


@jax.jit
def _gather(params: Any) -> Any:
  mesh: Any = active_mesh()

  def leaf(path, x):
    spec = keep_tensor(make_spec(path, x.shape, mesh))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

  return map_named(leaf, params)


def keep_tensor(spec: Iterable[Any]) -> PartitionSpec:
  """Drops all mesh axes but `tensor` from a leaf's spec."""
  return PartitionSpec(*(axis if axis == 'tensor' else None for axis in spec))


def to_host(state: Any) -> Any:
  """Moves arrays to pinned host memory, sharded over the same devices.

  Programs can copy arrays to and from host memory, but not compute with them there.
  """
  return jax.tree.map(lambda x: _move(x, 'pinned_host'), state)


def to_device(state: Any) -> Any:
  """The inverse of `to_host`; arrays already on devices are not copied."""
  return jax.tree.map(lambda x: _move(x, 'device'), state)


def match_memory_kind(state: Any, before: Any) -> Any:
  """Moves the leaves to the memory kind of the leaves of `before`."""
  return jax.tree.map(lambda x, y: _move(x, y.sharding.memory_kind), state, before)


def _move(x, kind):
  if x.sharding.memory_kind == kind:
    return x
  return jax.device_put(x, x.sharding.with_memory_kind(kind))


def active_mesh() -> AbstractMesh | None:
  """Returns the mesh set by jax.set_mesh, or None if it lacks our axes."""
  mesh = jax.sharding.get_abstract_mesh()
  return mesh if set(AXES) <= set(mesh.axis_names) else None


def uses_context_parallelism() -> bool:
  """Whether the active mesh shards the tokens of a row."""
  mesh = active_mesh()
  return mesh is not None and mesh.shape['context'] > 1


def platform() -> str:
  """Returns the platform, 'cpu', 'gpu' or 'tpu', of the mesh or else of this machine."""
  device = _abstract_device()
  return device.platform if device else jax.default_backend()


def device_kind() -> str:
  """Returns the vendor's name of the chips, for example 'NVIDIA H100 80GB HBM3'."""
  return (_abstract_device() or jax.local_devices()[0]).device_kind


def _abstract_device() -> Any:
  mesh = active_mesh()
  return mesh.abstract_device if mesh else None


def make_spec(
  name: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
  """Returns the mesh axes of a leaf whose name ends with a parameter's path."""
  # Optimizers store a single number where they need no array.
  if math.prod(shape) == 1 or _FACTORED.search(name):
    return PartitionSpec()
  letters = _letters(_ONE_LAYER.sub('layers/', name))
  if _ONE_LAYER.search(name):
    letters = letters.removeprefix('L')
  spec = []
  for size, letter in zip(shape, letters, strict=False):
    axes = _SPLIT_BY.get(letter, ())
    chips = math.prod(mesh.shape[axis] for axis in axes)
    # The scales of 8-bit moments have size 1 in the last axis. Key-value heads are
    # replicated if their number is below `tensor` and divides it: they are small, and
    # attention picks those that a chip's query heads need.
    if size == 1 or (letter in 'Kk' and size < chips and chips % size == 0):
      axes = ()
    elif size % chips:
      named = ' x '.join(axes)
      raise ValueError(
        f'{name}: a dimension of {size} in {shape} cannot be sharded over {named} = '
        f'{chips}; choose a mesh whose {named} divides it.'
      )
    spec.append(axes if len(axes) > 1 else next(iter(axes), None))
  while spec and spec[-1] is None:
    spec.pop()  # As in XLA's own specs; otherwise equal shardings would differ.
  return PartitionSpec(*spec)


def _letters(name: str) -> str:
  """Returns the dimension letters of the parameter whose path ends a leaf's name."""
  parts = name.split('/')
  paths = ('/'.join(parts[start:]) for start in range(len(parts)))
  letters = next((families.DIMS[path] for path in paths if path in families.DIMS), None)
  if letters is None:
    raise ValueError(f'{name}: no parameter in models/families.py has this path; add it.')
  return letters
