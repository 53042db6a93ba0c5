"""Where arrays lie on several chips: a mesh, and rules from parameter paths to its axes.

  mesh = sharding.mesh(fsdp=8)
  state = jax.device_put(state, sharding.shardings(state, mesh))
  with jax.set_mesh(mesh):
    batches = [jax.device_put(batch, sharding.rows(mesh)) for batch in batches]
    state, metrics = learner.update(state, batches, ...)

Rows lie over `data` and `fsdp`, a row's tokens over `context`. `data` copies the
parameters; `fsdp` and `context` split them, and XLA gathers a layer where it is used;
`tensor` splits heads, feed-forward and vocabulary. `context` is for rows that are too
long for one chip: all work is a token's own, but for attention, for which the chips of a
row exchange tokens for heads, and the shift by one of the learner. It is last, so that
these chips are neighbours. XLA does most of it by itself, from where its arguments lie.
What it does not see is said in the models, and only where a mesh is set: `settled` in the
decoder, and the work of one chip in the embedding, attention and the vocabulary head.
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

AXES = ('data', 'fsdp', 'tensor', 'context')
ROWS = ('data', 'fsdp')
TOKENS = PartitionSpec(ROWS, 'context')  # B T
SPLIT = ('fsdp', 'context')  # D of parameters

# The first expression that is found in a leaf's path counts. Leaves of an optimizer end
# with the path of their parameter; L, D, N, K, H, F, V as in models/decoder.py.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
  (r'\bembed/embedding$', PartitionSpec('tensor', SPLIT)),  # V D
  (r'\blm_head/kernel$', PartitionSpec(SPLIT, 'tensor')),  # D V
  (r'\battn/[qkv]/kernel$', PartitionSpec(None, SPLIT, 'tensor')),  # L D N|K H
  (r'\battn/[qkv]/bias$', PartitionSpec(None, 'tensor')),  # L N|K H
  (r'\battn/o/kernel$', PartitionSpec(None, 'tensor', None, SPLIT)),  # L N H D
  (r'\bmlp/(gate|up)/kernel$', PartitionSpec(None, SPLIT, 'tensor')),  # L D F
  (r'\bmlp/down/kernel$', PartitionSpec(None, 'tensor', SPLIT)),  # L F D
  (r'_norm/scale$', PartitionSpec()),
  (r'\bvalue_head/(kernel|bias)$', PartitionSpec()),
)
# Fewer key-value heads than `tensor`, which they divide, lie on every chip: they are
# small, and attention takes of them what a chip's query heads need.
_KEYS_VALUES = re.compile(r'\battn/[kv]/(kernel|bias)$')


def mesh(
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
  return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)


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
  """Of a batch's leaves [B, T]: rows over data and fsdp, tokens over context."""
  return NamedSharding(mesh, TOKENS)


def settled(params: Any) -> Any:
  """Parameters where their rules put them, if a mesh is set; so are their gradients.

  Left to itself, XLA leaves some gradients whole on every chip.
  """
  found = active()
  if found is None:
    return params
  return jax.lax.with_sharding_constraint(params, shardings(params, found))


def active() -> AbstractMesh | None:
  """The mesh that is set by jax.set_mesh, if it has our axes."""
  found = jax.sharding.get_abstract_mesh()
  return found if set(AXES) <= set(found.axis_names) else None


def splits_rows() -> bool:
  """Whether a mesh is set that splits the tokens of a row."""
  found = active()
  return found is not None and found.shape['context'] > 1


def platform() -> str:
  """What is compiled for, 'cpu', 'gpu' or 'tpu': of the mesh, else of this machine."""
  found = active()
  device = found.abstract_device if found else None
  return device.platform if device else jax.default_backend()


def _spec(path: Any, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
  if not shape:
    return PartitionSpec()
  name = jax.tree_util.keystr(path, simple=True, separator='/')
  spec = next((spec for pattern, spec in RULES if re.search(pattern, name)), None)
  if spec is None:
    raise ValueError(f'{name}: no rule in sharding.RULES is for this leaf; add one.')
  tensor = mesh.shape['tensor']
  if _KEYS_VALUES.search(name) and shape[-2] < tensor and tensor % shape[-2] == 0:
    spec = PartitionSpec(*(None if axes == 'tensor' else axes for axes in spec))
  for size, axes in zip(shape, spec, strict=False):
    axes = (axes,) if isinstance(axes, str) else axes or ()
    chips = math.prod(mesh.shape[axis] for axis in axes)
    if size % chips:
      named = ' x '.join(axes)
      raise ValueError(
        f'{name}: a dimension of {size} in {shape} cannot be split over {named} = '
        f'{chips}; choose a mesh whose {named} divides it.'
      )
  return spec
