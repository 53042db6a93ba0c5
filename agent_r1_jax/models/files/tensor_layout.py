"""Which tensors of a Hugging Face directory hold which parameters of a model."""

from collections.abc import Mapping
import math
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from agent_r1_jax.models import decoder, families
from agent_r1_jax.models.files import tensor_files
from agent_r1_jax.models.pictures import vision_config


class Leaf(NamedTuple):
  """A parameter of a model, and the tensors that are stacked in it."""

  path: str  # Path among the parameters, joined by '/'.
  tensor: str  # Name of its tensors; '{}' stands for the layer.
  shape: tuple[int, ...]  # Shape of the parameter; stacked dimensions come first.
  stored: tuple[int, ...]  # Shape of a tensor. A kernel is stored [outputs, *inputs].
  # Index of each tensor in the parameter, for example (layer,) -> its name.
  tensors: dict[tuple[int, ...], str]

  @property
  def is_kernel(self) -> bool:
    return self.path.endswith('/kernel')


class Part(NamedTuple):
  """A tensor, the part of a leaf at `index`; () is all of the leaf."""

  spec: tensor_files.Spec
  leaf: Leaf
  index: tuple[int, ...]


class Stored(NamedTuple):
  """A tensor to be written: the rows of its parts, one after the other."""

  spec: tensor_files.Spec
  parts: list[Part]


def list_leaves(config: decoder.DecoderConfig, value_head: bool) -> list[Leaf]:
  """Lists the parameters of a model by the table of its family."""
  sizes = {x: getattr(config, field) for x, (field, _) in config.facts.sizes.items()}
  sizes |= {'d': sizes['D'], 'e': sizes.get('E', 0), '1': 1, '3': 3}
  if config.vision:
    sizes |= {x: getattr(config.vision, y) for x, y in vision_config.SIZES.items()}
  parameters = [*config.facts.parameters, *(families.VALUE_HEAD if value_head else ())]
  untied = lambda parameter: parameter.path != 'lm_head/kernel'
  if config.tie_embeddings:
    parameters = filter(untied, parameters)
  return [_leaf(parameter, sizes) for parameter in parameters]


def _leaf(parameter: families.Parameter, sizes: dict[str, int]) -> Leaf:
  path, tensor, dims, convolves = parameter
  shape = tuple(sizes[letter] for letter in parameter.letters)
  stacked = tensor.count('{}')
  stored = shape[stacked:]
  if '>' in dims:
    sides = [side for side in dims[stacked:].split('>') if side]
    stored = tuple(math.prod(sizes[letter] for letter in side) for side in sides[::-1])
    if convolves:
      stored = (stored[0], *(sizes[letter] for letter in sides[0]))
  names = {index: tensor.format(*index) for index in np.ndindex(shape[:stacked])}
  return Leaf(path, tensor, shape, stored, names)


def check_tensor(
  directory: pathlib.Path,
  tensors: Mapping[str, tensor_files.Tensor],
  name: str,
  shape: tuple[int, ...],
) -> None:
  """Raises ValueError if there is no tensor of this name and shape."""
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
  """Gives tensors the names that the family's table has."""
  return {config.facts.read_name(name): tensor for name, tensor in tensors.items()}


def split_fused(
  directory: pathlib.Path,
  config: decoder.DecoderConfig,
  leaves: list[Leaf],
  tensors: dict[str, tensor_files.Tensor],
) -> dict[str, tensor_files.Tensor]:
  """Gives each of the parameters that a file has in one tensor its rows of it."""
  shapes = {name: leaf.stored for leaf in leaves for name in leaf.tensors.values()}
  tensors = dict(tensors)
  for pattern, parts in config.facts.fused.items():
    for layer in range(config.num_layers):
      name, first = pattern.format(layer), 0
      rows = {part.format(layer): shapes[part.format(layer)][0] for part in parts}
      inputs = shapes[parts[0].format(layer)][1]
      check_tensor(directory, tensors, name, (sum(rows.values()), inputs))
      whole = tensors.pop(name)
      for part, count in rows.items():
        tensors[part] = whole._replace(shape=(count, inputs), first=first)
        first += count
  return tensors


def list_parts(leaves: list[Leaf], flat: dict[str, Any], dtype: Any) -> dict[str, Part]:
  """Lists the tensors by name, in the order of published files: layer by layer."""
  parts = []
  for leaf in leaves:
    target = check_dtype(flat[leaf.path].dtype if dtype is None else dtype)
    for index, name in leaf.tensors.items():
      spec = tensor_files.Spec(name, target, leaf.stored)
      parts.append(Part(spec, leaf, index))

  def order(part: Part) -> tuple[int, ...]:
    if part.index:
      return 1, part.index[0]
    return (0,) if part.leaf.path == 'embed/embedding' else (2,)

  return {part.spec.name: part for part in sorted(parts, key=order)}


def fuse(config: decoder.DecoderConfig, parts: dict[str, Part]) -> dict[str, Stored]:
  """Puts the parameters that a file has in one tensor together, where the first was."""
  owner = {
    part.format(layer): pattern.format(layer)
    for pattern, names in config.facts.fused.items()
    for layer in range(config.num_layers)
    for part in names
  }
  groups: dict[str, list[Part]] = {}
  for name, part in parts.items():
    groups.setdefault(owner.get(name, name), []).append(part)
  stored = {}
  for name, group in groups.items():
    spec = group[0].spec._replace(name=name)
    if len({part.spec.dtype for part in group}) > 1:
      raise ValueError(f'params: {name} is of several dtypes; give a dtype')
    if len(group) > 1:
      rows = sum(part.spec.shape[0] for part in group)
      spec = spec._replace(shape=(rows, *spec.shape[1:]))
    stored[name] = Stored(spec, group)
  return stored


def check_dtype(dtype: Any) -> np.dtype:
  """Returns a type that tensors can have in a file; raises ValueError for others."""
  dtype = jnp.dtype(dtype)
  if dtype not in tensor_files.DTYPES.values():
    raise ValueError(f'dtype is {dtype.name}; give float32, bfloat16 or float16')
  return dtype
