"""Where arrays lie on several chips: a mesh, and rules from parameter paths to its axes.

  mesh = sharding.mesh(fsdp=8)
  config, params = weights.load(directory, place=sharding.placer(mesh))
  with jax.set_mesh(mesh):
    state = learner.init(params, optimizer)
    state, metrics = learner.update(state, batches, ...)
  driver = Driver(config, state.params, mesh=mesh, ...)

Rows lie over `data` and `fsdp`. `data` copies the parameters; `fsdp` splits them, and XLA
gathers a layer where it is used; `tensor` splits heads, feed-forward and vocabulary. XLA
does most of it by itself, from where its arguments lie. What it does not see is said in
the models, and only where a mesh is set: `settled` and `by_rows` in the decoder, and the
work of one chip in the vocabulary head and around a TPU's attention kernel.
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

AXES = ('data', 'fsdp', 'tensor')
ROWS = ('data', 'fsdp')

# The first expression that is found in a leaf's path counts. Leaves of an optimizer end
# with the path of their parameter; L, D, N, K, H, F, V as in models/decoder.py.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
  (r'\bembed/embedding$', PartitionSpec('tensor', 'fsdp')),  # V D
  (r'\blm_head/kernel$', PartitionSpec('fsdp', 'tensor')),  # D V
  (r'\battn/[qkv]/kernel$', PartitionSpec(None, 'fsdp', 'tensor')),  # L D N|K H
  (r'\battn/[qkv]/bias$', PartitionSpec(None, 'tensor')),  # L N|K H
  (r'\battn/o/kernel$', PartitionSpec(None, 'tensor', None, 'fsdp')),  # L N H D
  (r'\bmlp/(gate|up)/kernel$', PartitionSpec(None, 'fsdp', 'tensor')),  # L D F
  (r'\bmlp/down/kernel$', PartitionSpec(None, 'tensor', 'fsdp')),  # L F D
  (r'_norm/scale$', PartitionSpec()),
  (r'\bvalue_head/(kernel|bias)$', PartitionSpec()),
)


def mesh(
  *, data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
  """A mesh of (data, fsdp, tensor) over `devices`, by default all there are.

  Raises:
    ValueError: The axes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  shape = (data, fsdp, tensor)
  if math.prod(shape) != len(devices):
    raise ValueError(
      f'data x fsdp x tensor is {data} x {fsdp} x {tensor}, yet there are '
      f'{len(devices)} devices; the product must be their number.'
    )
  return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def shardings(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
  """A NamedSharding for each leaf of parameters, of an optimizer's or a TrainState.

  Scalars are on every chip. A leaf that cannot be split as its rule says is an error and
  not a copy on every chip: that would be found when memory runs out, if at all.

  Args:
    tree: Of arrays or ShapeDtypeStructs.
    mesh: From `mesh`.

  Raises:
    ValueError: No rule is for a leaf, or an axis does not divide its dimension.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: NamedSharding(mesh, _spec(path, leaf.shape, mesh)), tree
  )


def rows(mesh: Mesh) -> NamedSharding:
  """Of a batch's leaves: rows over data and fsdp, a row's tokens on one chip."""
  return NamedSharding(mesh, PartitionSpec(ROWS))


def use(mesh: Mesh | None) -> contextlib.AbstractContextManager:
  """Sets the mesh inside `with`; None sets none."""
  return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def placer(mesh: Mesh | None) -> Callable[[str, np.ndarray], jax.Array]:
  """(path, host array) -> the array where its rule says, as weights.load places it.

  Each process must have the whole array. Without a mesh: on JAX's default device.
  """
  if mesh is None:
    return lambda path, x: jax.device_put(x)

  def place(path: str, x: np.ndarray) -> jax.Array:
    where = NamedSharding(mesh, _rule(path, x.shape, mesh))
    return jax.make_array_from_callback(x.shape, where, lambda at: x[at])

  return place


def put_rows(batch: Any) -> Any:
  """A batch of host arrays on the mesh that is set; unchanged without one.

  Each process must have the whole batch; each chip gets its rows.
  """
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return batch
  where = rows(mesh)
  put = lambda x: jax.make_array_from_callback(x.shape, where, lambda at: x[at])
  return jax.tree.map(put, batch)


def whole(x: Any) -> Any:
  """Inside jit: arrays that every chip has, and so every process can read."""
  found = active()
  if found is None:
    return x
  everywhere = NamedSharding(found, PartitionSpec())
  return jax.lax.with_sharding_constraint(x, everywhere)


def built(make: Callable[..., Any], *args: Any) -> Any:
  """make(*args), whose leaves lie where their rules say if a mesh is set."""
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return make(*args)
  where = shardings(jax.eval_shape(make, *args), mesh)
  return jax.jit(make, out_shardings=where)(*args)


def replicas(mesh: Mesh) -> list[Mesh]:
  """This process's chips in meshes of `tensor` chips: each can hold a whole policy.

  Raises:
    ValueError: `tensor` reaches over processes.
  """
  tensor = mesh.shape['tensor']
  groups = np.moveaxis(mesh.devices, mesh.axis_names.index('tensor'), -1)
  found = []
  for group in groups.reshape(-1, tensor):
    mine = [d.process_index == jax.process_index() for d in group]
    if any(mine) and not all(mine):
      raise ValueError(
        f'tensor is {tensor}: its chips must belong to one process, which samples on '
        f'them; make it a divisor of {jax.local_device_count()}.'
      )
    if all(mine):
      sizes = [tensor if axis == 'tensor' else 1 for axis in mesh.axis_names]
      found.append(
        Mesh(group.reshape(sizes), mesh.axis_names, axis_types=mesh.axis_types)
      )
  return found


def gathered(params: Any, mesh: Mesh) -> Any:
  """Parameters that only `tensor` splits, from those that lie on the mesh."""
  with jax.set_mesh(mesh):
    return _gathered(params)


def local(params: Any, part: Mesh) -> Any:
  """The replica, on its own, of what `gathered` gave: nothing is copied.

  Args:
    params: Of all processes.
    part: One of `replicas`.
  """
  chips = set(part.devices.flat)

  def leaf(x: jax.Array) -> jax.Array:
    mine = [shard.data for shard in x.addressable_shards if shard.device in chips]
    where = NamedSharding(part, _named(x).spec)
    return jax.make_array_from_single_device_arrays(x.shape, where, mine)

  return jax.tree.map(leaf, params)


def cached(state: Any, part: Mesh) -> Any:
  """A new DecodeState on a replica's chips: the key-value heads lie with their kernel."""

  def put(x):
    heads = x.ndim == 4 and x.shape[1] % part.shape['tensor'] == 0
    spec = PartitionSpec(None, 'tensor') if heads else PartitionSpec()
    return jax.device_put(x, NamedSharding(part, spec))

  return jax.tree.map(put, state)


def read(x: Any) -> np.ndarray:
  """An array on this host; all processes must ask for it if it lies on all of them."""
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    with jax.set_mesh(_named(x).mesh):
      x = jax.jit(whole)(x)
  return np.asarray(x)


def _named(x: jax.Array) -> Any:
  """The NamedSharding that all of our arrays on several chips have."""
  return x.sharding


@jax.jit
def _gathered(params: Any) -> Any:
  mesh: Any = active()
  only = lambda axis: axis if axis == 'tensor' else None

  def leaf(path, x):
    spec = PartitionSpec(*map(only, _spec(path, x.shape, mesh)))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

  return jax.tree_util.tree_map_with_path(leaf, params)


def settled(params: Any) -> Any:
  """Parameters where their rules put them, if a mesh is set; so are their gradients.

  Left to itself, XLA leaves some gradients whole on every chip.
  """
  found = active()
  if found is None:
    return params
  return jax.lax.with_sharding_constraint(params, shardings(params, found))


def by_rows(x: Any) -> Any:
  """Activations whose rows lie as a batch's, if a mesh is set.

  Left to itself, XLA splits what the embedding gives as the embedding is, over D, and
  gathers the activations of all tokens wherever D is contracted.
  """
  found = active()
  if found is None:
    return x
  return jax.lax.with_sharding_constraint(x, NamedSharding(found, PartitionSpec(ROWS)))


def active() -> AbstractMesh | None:
  """The mesh that is set by jax.set_mesh, if it has our axes."""
  found = jax.sharding.get_abstract_mesh()
  return found if set(AXES) <= set(found.axis_names) else None


def platform() -> str:
  """What is compiled for, 'cpu', 'gpu' or 'tpu': of the mesh, else of this machine."""
  found = active()
  device = found.abstract_device if found else None
  return device.platform if device else jax.default_backend()


def _spec(path: Any, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
  name = jax.tree_util.keystr(path, simple=True, separator='/')
  return _rule(name, shape, mesh)


def _rule(name: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
  if not shape:
    return PartitionSpec()
  spec = next((spec for pattern, spec in RULES if re.search(pattern, name)), None)
  if spec is None:
    raise ValueError(f'{name}: no rule in sharding.RULES is for this leaf; add one.')
  for size, axis in zip(shape, spec, strict=False):
    if axis and size % mesh.shape[axis]:
      raise ValueError(
        f'{name}: a dimension of {size} in {shape} cannot be split over {axis} = '
        f'{mesh.shape[axis]}; choose a mesh whose {axis} divides it.'
      )
  return spec
