"""Where arrays lie on several chips: a mesh, and rules from parameter paths to its axes.

  mesh = sharding.mesh(fsdp=8)
  state = jax.device_put(state, sharding.shardings(state, mesh))
  with jax.set_mesh(mesh):
    batches = [jax.device_put(batch, sharding.rows(mesh)) for batch in batches]
    state, metrics = learner.update(state, batches, ...)

Rows lie over `data` and `fsdp`. `data` copies the parameters; `fsdp` splits them, and XLA
gathers a layer where it is used; `tensor` splits heads, feed-forward and vocabulary. XLA
does most of it by itself, from where its arguments lie. What it does not see is said in
the models, and only where a mesh is set: `settled` and `by_rows` in the decoder, and the
work of one chip in the vocabulary head and around a TPU's attention kernel.
"""

from collections.abc import Sequence
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

AXES = ('data', 'fsdp', 'tensor')
ROWS = ('data', 'fsdp')

# The first expression that is found in a leaf's path counts. Leaves of an optimizer end
# with the path of their parameter; L, D, N, K, H, F, V as in models/decoder.py.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
  # What adafactor holds of a kernel is thousands of times smaller, and has fewer axes.
  (r'\bv_(row|col)/', PartitionSpec()),
  (r'\bembed/embedding$', PartitionSpec('tensor', 'fsdp')),  # V D
  (r'\blm_head/kernel$', PartitionSpec('fsdp', 'tensor')),  # D V
  (r'\battn/[qkv]/kernel$', PartitionSpec(None, 'fsdp', 'tensor')),  # L D N|K H
  (r'\battn/[qkv]/bias$', PartitionSpec(None, 'tensor')),  # L N|K H
  (r'\battn/o/kernel$', PartitionSpec(None, 'tensor', None, 'fsdp')),  # L N H D
  (r'\bmlp/(gate|up)/kernel$', PartitionSpec(None, 'fsdp', 'tensor')),  # L D F
  (r'\bmlp/down/kernel$', PartitionSpec(None, 'tensor', 'fsdp')),  # L F D
  # As their kernel, and the rank R on every chip: merging moves nothing.
  (r'\battn/[qkv]/lora_a$', PartitionSpec(None, 'fsdp')),  # L D R
  (r'\battn/[qkv]/lora_b$', PartitionSpec(None, None, 'tensor')),  # L R N|K H
  (r'\battn/o/lora_a$', PartitionSpec(None, 'tensor')),  # L N H R
  (r'\battn/o/lora_b$', PartitionSpec(None, None, 'fsdp')),  # L R D
  (r'\bmlp/(gate|up)/lora_a$', PartitionSpec(None, 'fsdp')),  # L D R
  (r'\bmlp/(gate|up)/lora_b$', PartitionSpec(None, None, 'tensor')),  # L R F
  (r'\bmlp/down/lora_a$', PartitionSpec(None, 'tensor')),  # L F R
  (r'\bmlp/down/lora_b$', PartitionSpec(None, None, 'fsdp')),  # L R D
  (r'/lora_scale$', PartitionSpec()),  # L
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


def to_host(tree: Any) -> Any:
  """The same arrays in the host's memory, split over the same devices.

  It is pinned: their programs can copy it, and none but copies are meant to read it.
  """
  return jax.tree.map(lambda x: _moved(x, 'pinned_host'), tree)


def to_device(tree: Any) -> Any:
  """The inverse of `to_host`; what lies on devices is not copied."""
  return jax.tree.map(lambda x: _moved(x, 'device'), tree)


def as_before(tree: Any, before: Any) -> Any:
  """`tree` in the kind of memory in which the leaves of `before` lie."""
  return jax.tree.map(lambda x, y: _moved(x, y.sharding.memory_kind), tree, before)


def _moved(x, kind):
  if x.sharding.memory_kind == kind:
    return x
  return jax.device_put(x, x.sharding.with_memory_kind(kind))


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
  # Optimizers put a single number where they need none.
  if math.prod(shape) == 1:
    return PartitionSpec()
  name = jax.tree_util.keystr(path, simple=True, separator='/')
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
