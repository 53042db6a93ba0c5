"""Where arrays lie on several chips: a mesh, and which of its axes split a parameter.

  mesh = sharding.make_mesh(fsdp=8)
  config, params = weights.load(directory, place=sharding.make_placer(mesh))
  with jax.set_mesh(mesh):
    state = learner.init(params, optimizer)
    state, metrics = learner.update(state, batches, ...)
  engine = Engine(config, state.params, mesh=mesh, ...)

Rows lie over `data` and `fsdp`, a row's tokens over `context`. `data` copies the
parameters; `fsdp` and `context` split them, and XLA gathers a layer where it is used;
`tensor` splits heads, feed-forward and vocabulary. `context` is for rows that are too
long for one chip: all work is a token's own, but for attention, for which the chips of a
row exchange tokens for heads, and the shift by one of the learner. It is last, so that
these chips are neighbours. XLA does most of it by itself, from where its arguments lie.
What it does not see is said in the models, and only where a mesh is set:
`constrain_params` in the
decoder, and the work of one chip in the embedding, attention and the vocabulary head.
"""

from collections.abc import Callable, Sequence
import contextlib
import math
import re
from typing import Any

import jax
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)
import numpy as np

from agent_r1_jax.models import families

AXES = ('data', 'fsdp', 'tensor', 'context')
ROW_AXES = ('data', 'fsdp')
TOKEN_SPEC = PartitionSpec(ROW_AXES, 'context')  # B T
PARAM_AXES = ('fsdp', 'context')  # D of parameters

# The mesh axes of a parameter's dimensions, by their letters in models/families.py;
# the others are not split. An adapter's rank lies on every chip: merging moves nothing.
_SPLIT_BY = {'D': PARAM_AXES} | dict.fromkeys('VNKF', ('tensor',))
# What adafactor holds of a kernel is thousands of times smaller, and has fewer axes.
_FACTORED = re.compile(r'\bv_(row|col)/')
# The engine's parameters are a tree a layer: they have no L.
_ONE_LAYER = re.compile(r'\blayers/\d+/')


def make_mesh(
  *,
  data: int = 1,
  fsdp: int = 1,
  tensor: int = 1,
  context: int = 1,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """A mesh of (data, fsdp, tensor, context) over `devices`, by default all there are.

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
    # What is left of a slice need not be a block, which alone can be laid out.
    return Mesh(np.reshape(devices, shape), AXES, axis_types=types)
  return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)


def split_devices(samplers: int) -> tuple[list[Any], list[Any]]:
  """Chips that train, of all processes, and those of this process that only sample.

  Args:
    samplers: How many of each process's chips sample; its last ones do.

  Raises:
    ValueError: No chip of a process would be left to train.
  """
  training, mine = [], []
  for process in range(jax.process_count()):
    chips = jax.local_devices(process_index=process)
    if not 0 <= samplers < len(chips):
      raise ValueError(
        f'mesh.samplers is {samplers}, yet process {process} has {len(chips)} chips, '
        'of which one at least must train.'
      )
    training += chips[: len(chips) - samplers]
    if process == jax.process_index():
      mine = chips[len(chips) - samplers :]
  return training, mine


def make_shardings(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
  """A NamedSharding for each leaf of parameters, of an optimizer's or a TrainState.

  Scalars are on every chip. A leaf that cannot be split as its rule says is an error and
  not a copy on every chip: that would be found when memory runs out, if at all.

  Args:
    tree: Of arrays or ShapeDtypeStructs.
    mesh: From `make_mesh`.

  Raises:
    ValueError: models/families.py does not know a leaf, or an axis does not divide one of
      its dimensions.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: NamedSharding(mesh, _spec(path, leaf.shape, mesh)), tree
  )


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Of a batch's leaves [B, T]: rows over data and fsdp, tokens over context."""
  return NamedSharding(mesh, TOKEN_SPEC)


def use_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager:
  """Sets the mesh inside `with`; None sets none."""
  return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def make_placer(mesh: Mesh | None) -> Callable[[str, np.ndarray], jax.Array]:
  """(path, host array) -> the array where its rule says, as weights.load places it.

  Each process must have the whole array. Without a mesh: on JAX's default device.
  """
  if mesh is None:
    return lambda path, x: jax.device_put(x)

  def place(path: str, x: np.ndarray) -> jax.Array:
    where = NamedSharding(mesh, _rule(path, x.shape, mesh))
    return jax.make_array_from_callback(x.shape, where, lambda at: x[at])

  return place


def shard_params(params: Any, mesh: Mesh | None) -> Any:
  """Parameters of which some are new, and each process has them whole: on the mesh."""
  if mesh is None:
    return params
  place = make_placer(mesh)

  def leaf(path, x):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    return x if isinstance(x.sharding, NamedSharding) else place(name, np.asarray(x))

  return jax.tree_util.tree_map_with_path(leaf, params)


def shard_batch(batch: Any) -> Any:
  """A batch of host arrays on the mesh that is set; unchanged without one.

  Each process must have the whole batch; each chip gets its rows.
  """
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return batch
  where = batch_sharding(mesh)
  put = lambda x: jax.make_array_from_callback(x.shape, where, lambda at: x[at])
  return jax.tree.map(put, batch)


def replicate(x: Any) -> Any:
  """Inside jit: arrays that every chip has, and so every process can read."""
  found = active_mesh()
  if found is None:
    return x
  everywhere = NamedSharding(found, PartitionSpec())
  return jax.lax.with_sharding_constraint(x, everywhere)


def init_sharded(make: Callable[..., Any], *args: Any) -> Any:
  """make(*args), whose leaves lie where their rules say if a mesh is set."""
  found = active_mesh()
  if found is None:
    return make(*args)
  where = make_shardings(jax.eval_shape(make, *args), found)
  return jax.jit(make, out_shardings=where)(*args)


def make_replica_meshes(mesh: Mesh, chips: Sequence[Any] = ()) -> list[Mesh]:
  """This process's chips in meshes of `tensor` chips: each can hold a whole policy.

  Args:
    mesh: Of the training.
    chips: Of this process, which are not on the mesh; they then are what is parted.

  Raises:
    ValueError: `tensor` reaches over processes, or does not divide the number of chips.
  """
  tensor = mesh.shape['tensor']
  groups = np.moveaxis(mesh.devices, mesh.axis_names.index('tensor'), -1)
  part = lambda group: Mesh(
    np.reshape(group, [tensor if axis == 'tensor' else 1 for axis in mesh.axis_names]),
    mesh.axis_names,
    axis_types=mesh.axis_types,
  )
  found = []
  for group in groups.reshape(-1, tensor):
    mine = [d.process_index == jax.process_index() for d in group]
    if any(mine) and not all(mine):
      raise ValueError(
        f'tensor is {tensor}: its chips must belong to one process, which samples on '
        f'them; make it a divisor of {len(mesh.local_devices)}.'
      )
    if all(mine):
      found.append(part(group))
  if not chips:
    return found
  if len(chips) % tensor:
    raise ValueError(
      f'tensor is {tensor}, which must divide the {len(chips)} chips that sample.'
    )
  return [part(chips[i : i + tensor]) for i in range(0, len(chips), tensor)]


def gather_params(params: Any, mesh: Mesh) -> Any:
  """Parameters that only `tensor` splits, from those that lie on the mesh."""
  with jax.set_mesh(mesh):
    return _gathered(params)


def take_replica_params(params: Any, part: Mesh) -> Any:
  """The replica, on its own, of what `gather_params` gave.

  Args:
    params: Of all processes.
    part: One of `make_replica_meshes`; nothing is copied to chips that are on the mesh.
  """

  def leaf(x: jax.Array) -> jax.Array:
    where = NamedSharding(part, _named(x).spec)
    held: dict[str, dict[Any, jax.Array]] = {}
    for shard in x.addressable_shards:
      held.setdefault(str(shard.index), {})[shard.device] = shard.data
    pieces = []
    for chip, index in where.devices_indices_map(x.shape).items():
      copies = held[str(index)]
      copy = copies[chip] if chip in copies else next(iter(copies.values()))
      pieces.append(jax.device_put(copy, chip))
    return jax.make_array_from_single_device_arrays(x.shape, where, pieces)

  return jax.tree.map(leaf, params)


def shard_cache(cache: Any, part: Mesh) -> Any:
  """Puts a new key-value cache on a replica's chips: heads lie with their kernel."""

  def put(x):
    heads = x.ndim == 4 and x.shape[1] % part.shape['tensor'] == 0
    spec = PartitionSpec(None, 'tensor') if heads else PartitionSpec()
    return jax.device_put(x, NamedSharding(part, spec))

  return jax.tree.map(put, cache)


def to_numpy(x: Any) -> np.ndarray:
  """An array on this host; all processes must ask for it if it lies on all of them."""
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    with jax.set_mesh(_named(x).mesh):
      x = jax.jit(replicate)(x)
  return np.asarray(x)


def _named(x: jax.Array) -> Any:
  """The NamedSharding that all of our arrays on several chips have."""
  return x.sharding


@jax.jit
def _gathered(params: Any) -> Any:
  mesh: Any = active_mesh()
  only = lambda axis: axis if axis == 'tensor' else None

  def leaf(path, x):
    spec = PartitionSpec(*map(only, _spec(path, x.shape, mesh)))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

  return jax.tree_util.tree_map_with_path(leaf, params)


def to_host(tree: Any) -> Any:
  """The same arrays in the host's memory, split over the same devices.

  It is pinned: their programs can copy it, and none but copies are meant to read it.
  """
  return jax.tree.map(lambda x: _moved(x, 'pinned_host'), tree)


def to_device(tree: Any) -> Any:
  """The inverse of `to_host`; what lies on devices is not copied."""
  return jax.tree.map(lambda x: _moved(x, 'device'), tree)


def match_memory_kind(tree: Any, before: Any) -> Any:
  """`tree` in the kind of memory in which the leaves of `before` lie."""
  return jax.tree.map(lambda x, y: _moved(x, y.sharding.memory_kind), tree, before)


def _moved(x, kind):
  if x.sharding.memory_kind == kind:
    return x
  return jax.device_put(x, x.sharding.with_memory_kind(kind))


def constrain_params(params: Any) -> Any:
  """Parameters where their rules put them, if a mesh is set; so are their gradients.

  Left to itself, XLA leaves some gradients whole on every chip.
  """
  found = active_mesh()
  if found is None:
    return params
  return jax.lax.with_sharding_constraint(params, make_shardings(params, found))


def active_mesh() -> AbstractMesh | None:
  """The mesh that is set by jax.set_mesh, if it has our axes."""
  found = jax.sharding.get_abstract_mesh()
  return found if set(AXES) <= set(found.axis_names) else None


def uses_context_parallelism() -> bool:
  """Whether a mesh is set that splits the tokens of a row."""
  found = active_mesh()
  return found is not None and found.shape['context'] > 1


def platform() -> str:
  """What is compiled for, 'cpu', 'gpu' or 'tpu': of the mesh, else of this machine."""
  found = active_mesh()
  device = found.abstract_device if found else None
  return device.platform if device else jax.default_backend()


def _spec(path: Any, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
  name = jax.tree_util.keystr(path, simple=True, separator='/')
  return _rule(name, shape, mesh)


def _rule(name: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
  """Gives the mesh axes of a leaf whose name ends with the path of a parameter."""
  # Optimizers put a single number where they need none.
  if math.prod(shape) == 1 or _FACTORED.search(name):
    return PartitionSpec()
  letters = _letters(_ONE_LAYER.sub('layers/', name))
  if _ONE_LAYER.search(name):
    letters = letters.removeprefix('L')
  spec = []
  for size, letter in zip(shape, letters, strict=False):
    axes = _SPLIT_BY.get(letter, ())
    chips = math.prod(mesh.shape[axis] for axis in axes)
    # The scales of 8-bit moments are one a row of the last axis. Fewer key-value heads
    # than `tensor`, which they divide, lie on every chip: they are small, and attention
    # takes of them what a chip's query heads need.
    if size == 1 or (letter == 'K' and size < chips and chips % size == 0):
      axes = ()
    elif size % chips:
      named = ' x '.join(axes)
      raise ValueError(
        f'{name}: a dimension of {size} in {shape} cannot be split over {named} = '
        f'{chips}; choose a mesh whose {named} divides it.'
      )
    spec.append(axes if len(axes) > 1 else next(iter(axes), None))
  while spec and spec[-1] is None:
    spec.pop()
  return PartitionSpec(*spec)


def _letters(name: str) -> str:
  """Finds the dimensions of the parameter with whose path a leaf's name ends."""
  parts = name.split('/')
  paths = ('/'.join(parts[start:]) for start in range(len(parts)))
  found = next((families.DIMS[path] for path in paths if path in families.DIMS), None)
  if found is None:
    raise ValueError(f'{name}: no parameter in models/families.py has this path; add it.')
  return found
