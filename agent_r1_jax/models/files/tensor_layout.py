"""Maps the tensors of a Hugging Face directory to the parameters of a model."""

from collections.abc import Mapping, Sequence
import math
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from agent_r1_jax.models import decoder, four_bits
from agent_r1_jax.models import parameters as parameters_lib
from agent_r1_jax.models.family import Parameter
from agent_r1_jax.models.files import mxfp4, tensor_files
from agent_r1_jax.models.pictures import vision_config


class Leaf(NamedTuple):
  """A parameter of a model, and the tensors stacked in it."""

  path: str  # Path among the parameters, joined by '/'.
  tensor: str  # Name of its tensors; '{}' stands for the layer.
  shape: tuple[int, ...]  # Shape of the parameter; stacked dimensions come first.
  stored: tuple[int, ...]  # Shape of a tensor.
  # Index of each tensor in the parameter, for example (layer,) -> its name.
  tensors: dict[tuple[int, ...], str]
  transposed: bool  # Whether a tensor is [outputs, *inputs], and the parameter is not.


class Stored(NamedTuple):
  """A tensor to write: the concatenated rows of its parts.

  A part is a leaf and the index of a tensor in it; () is the complete leaf.
  """

  spec: tensor_files.Spec
  parts: list[tuple[Leaf, tuple[int, ...]]]
  interleaved: bool  # Whether the last dimensions of the parts alternate instead.


def list_leaves(
  config: decoder.DecoderConfig, value_head: bool, *, packed: bool = False
) -> list[Leaf]:
  """Lists the parameters of a model from the table of its family.

  With `packed`, kernels of experts have 4 bits (four_bits.py).
  """
  sizes = config.sizes | {'1': 1, '2': 2, '3': 3}
  if config.vision:
    sizes |= {x: getattr(config.vision, y) for x, y in vision_config.SIZES.items()}
  parameters = [
    *config.facts.parameters,
    *(parameters_lib.VALUE_HEAD if value_head else ()),
  ]
  untied = lambda parameter: parameter.path != 'lm_head/kernel'
  if config.tie_embeddings:
    parameters = filter(untied, parameters)
  leaves = []
  for parameter in parameters:
    layers = config.list_layers(parameter.path) if parameter.dims[0] == 'L' else []
    leaf = _leaf(parameter, sizes | {'L': len(layers)}, layers)
    if not math.prod(leaf.shape):  # A model may lack a part that its family has.
      continue
    kernel = 'E' in parameter.inputs and parameter.path.endswith('/kernel')
    leaves += _pack(leaf) if packed and kernel else [leaf]
  return leaves


def _pack(leaf: Leaf) -> list[Leaf]:
  """Returns the two leaves of 4 bits that replace a kernel of experts."""

  def part(name: str, ending: str, inputs: int) -> Leaf:
    return leaf._replace(
      path=leaf.path.removesuffix('kernel') + name,
      tensor=leaf.tensor + ending,
      shape=(*leaf.shape[:2], inputs, leaf.shape[-1]),
      stored=(leaf.stored[0], inputs, leaf.stored[-1]),
      tensors={index: x + ending for index, x in leaf.tensors.items()},
    )

  inputs = leaf.shape[2]
  return [
    part('kernel', mxfp4.BLOCKS, inputs // 2),
    part(four_bits.SCALE, mxfp4.SCALES, inputs // four_bits.GROUP),
  ]


def list_unread(config: decoder.DecoderConfig) -> set[str]:
  """Lists tensors that published files have for layers that share keys and values."""
  names = ('k', 'v', 'k_norm')
  return {
    x.tensor.format(layer)
    for x in config.facts.parameters
    for layer, shape in enumerate(config.layer_shapes)
    if shape.shares and x.path.startswith('layers/') and x.target in names
  }


def _leaf(parameter: Parameter, sizes: dict[str, int], layers: Sequence[int]) -> Leaf:
  path, tensor, dims, convolves = parameter
  shape = tuple(sizes[letter] for letter in parameter.letters)
  stacked = tensor.count('{}')
  stored = shape[stacked:]
  if '>' in dims:
    sides = [side for side in dims[stacked:].split('>') if side]
    stored = tuple(math.prod(sizes[letter] for letter in side) for side in sides[::-1])
    if convolves:
      stored = (stored[0], *(sizes[letter] for letter in sides[0]))
  names = {}
  for index in np.ndindex(shape[:stacked]):
    names[index] = tensor.format(*([layers[index[0]], *index[1:]] if layers else index))
  transposed = path.endswith('/kernel') and '>' in dims
  return Leaf(path, tensor, shape, stored, names, transposed)


def check_tensor(
  directory: pathlib.Path,
  tensors: Mapping[str, tensor_files.Tensor],
  name: str,
  shape: tuple[int, ...],
) -> None:
  """Raises ValueError if no tensor has this name and shape."""
  if name not in tensors:
    tied = '; or is "tie_word_embeddings": true?' if name == 'lm_head.weight' else ''
    raise ValueError(f'{directory}: no tensor {name}; fetch the whole model{tied}')
  if tensors[name].shape != shape:
    file = tensors[name].file
    source = 'config.json' if file.suffix == '.safetensors' else 'the metadata'
    raise ValueError(
      f'{file}: tensor {name} has shape {list(tensors[name].shape)}, by {source} it is '
      f'{list(shape)}; take both from one model'
    )


def rename(
  config: decoder.DecoderConfig, tensors: Mapping[str, tensor_files.Tensor]
) -> dict[str, tensor_files.Tensor]:
  """Renames tensors to the names in the family's table."""
  return {config.facts.read_name(name): tensor for name, tensor in tensors.items()}


def split_fused(
  directory: pathlib.Path,
  config: decoder.DecoderConfig,
  leaves: list[Leaf],
  tensors: dict[str, tensor_files.Tensor],
) -> dict[str, tensor_files.Tensor]:
  """Splits tensors of a file that contain several parameters into their parts."""
  shapes = {name: leaf.stored for leaf in leaves for name in leaf.tensors.values()}
  tensors = dict(tensors)
  for pattern, parts in config.facts.fused.items():
    for layer in range(config.num_layers):
      name, first = pattern.format(layer), 0
      if parts[0].format(layer) not in shapes:
        continue  # The layer has no such part.
      rows = {part.format(layer): shapes[part.format(layer)][0] for part in parts}
      inputs = shapes[parts[0].format(layer)][1:]
      check_tensor(directory, tensors, name, (sum(rows.values()), *inputs))
      whole = tensors.pop(name)
      for part, count in rows.items():
        lines = slice(first, first + count)
        tensors[part] = whole._replace(shape=(count, *inputs), part=lines)
        first += count
  for pattern, parts in config.facts.stacked.items():
    for layer in range(config.num_layers):
      if (name := pattern.format(layer)) in tensors and config.num_experts:
        each = [[p.format(layer, e) for p in parts] for e in range(config.num_experts)]
        rows, *inputs = shapes[each[0][0]]  # The same for all parts.
        check_tensor(directory, tensors, name, (len(each), rows * len(parts), *inputs))
        whole = tensors.pop(name)
        for e, names in enumerate(each):
          for i, part in enumerate(names):
            lines = e, slice(i * rows, (i + 1) * rows)
            tensors[part] = whole._replace(shape=shapes[part], part=lines)
  for pattern, parts in config.facts.interleaved.items():
    for layer in range(config.num_layers):
      name, names = pattern.format(layer), [part.format(layer) for part in parts]
      if names[0] not in shapes or (name not in tensors and names[0] in tensors):
        continue  # In 4 bits, absent, or the file has the parts.
      *outer, last = shapes[names[0]]
      check_tensor(directory, tensors, name, (*outer, last * len(parts)))
      whole = tensors.pop(name)
      for i, part in enumerate(names):
        alternate = ..., slice(i, None, len(parts))
        tensors[part] = whole._replace(shape=shapes[part], part=alternate)
  return tensors


def list_stored(
  config: decoder.DecoderConfig, leaves: list[Leaf], flat: dict[str, Any], dtype: Any
) -> dict[str, Stored]:
  """Lists the tensors to write by name, layer by layer as in published files.

  Parameters that share a tensor come together, at the place of the first.
  """
  facts = config.facts
  joined = [*facts.fused.items(), *facts.interleaved.items()]
  owner = {
    part.format(layer): pattern.format(layer)
    for pattern, names in joined
    for layer in range(config.num_layers)
    for part in names
  }
  alternate = {p.format(i) for p in facts.interleaved for i in range(config.num_layers)}
  stacks = {p.format(i) for p in facts.stacked for i in range(config.num_layers)}
  if facts.writes_stacked:
    owner |= {
      part.format(layer, expert): pattern.format(layer)
      for pattern, names in facts.stacked.items()
      for layer in range(config.num_layers)
      for part in names
      for expert in range(config.num_experts)
    }
  parts = [(leaf, i, name) for leaf in leaves for i, name in leaf.tensors.items()]
  place = lambda part: _find_place(config, *part[:2])
  groups: dict[str, list[tuple[Leaf, tuple[int, ...]]]] = {}
  for leaf, index, name in sorted(parts, key=place):
    groups.setdefault(owner.get(name, name), []).append((leaf, index))
  stored = {}
  for own, group in groups.items():
    name = facts.write_name(own) if facts.writes_renamed else own
    kept = {flat[leaf.path].dtype for leaf, _ in group}
    packed = kept == {jnp.dtype('uint8')}
    dtypes = kept if packed else {check_dtype(x) for x in kept if dtype is None}
    dtypes = dtypes or {check_dtype(dtype)}
    if len(dtypes) > 1:
      raise ValueError(f'params: {name} is of several dtypes; give a dtype')
    interleaved, shape = own in alternate, [*group[0][0].stored]
    axis = -1 if interleaved else 0
    if len(group) > 1:  # A single part may be a scalar.
      shape[axis] = sum(leaf.stored[axis] for leaf, _ in group)
    if own in stacks:  # All parts of one expert, then of the next.
      group.sort(key=lambda part: part[1][1:])
      shape = [config.num_experts, shape[0] // config.num_experts, *shape[1:]]
    shape = mxfp4.get_shape(name, tuple(shape)) if packed else tuple(shape)
    spec = tensor_files.Spec(name, dtypes.pop(), shape)
    stored[name] = Stored(spec, group, interleaved)
  return stored


def _find_place(
  config: decoder.DecoderConfig, leaf: Leaf, index: tuple[int, ...]
) -> tuple[int, ...]:
  """Returns a sort key: embeddings first, then layers in order, then the rest."""
  if index:
    layers = leaf.path.startswith('layers/') and config.list_layers(leaf.path)
    return 1, layers[index[0]] if layers else index[0]
  return (0,) if leaf.path == 'embed/embedding' else (2,)


def check_dtype(dtype: Any) -> np.dtype:
  """Returns a dtype that files support; raises ValueError for others."""
  dtype = jnp.dtype(dtype)
  if dtype not in tensor_files.DTYPES.values():
    raise ValueError(f'dtype is {dtype.name}; give float32, bfloat16 or float16')
  return dtype
