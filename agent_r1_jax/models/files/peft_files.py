"""Low-rank adapters in the layout of the PEFT library, which inference servers read.

PEFT adds s · B · A to a weight [outputs, inputs]; ours is s · A · B beside a kernel
[inputs, outputs] (models/lora.py). So a tensor of PEFT is our layer, transposed.
"""

import json
import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agent_r1_jax.models import decoder, lora, sharding
from agent_r1_jax.models.files import json_fields, tensor_files

_ROOT = 'base_model.model.'  # In front of the names of the base's modules.
_CONFIG, _TENSORS = 'adapter_config.json', 'adapter_model.safetensors'
# Settings of PEFT, and the values of each with which it adds s · B · A, with one s and
# one rank, to the weights of the base as they are.
_PLAIN: dict[str, tuple[Any, ...]] = {
  'peft_type': ('LORA',),
  'use_rslora': (False, None),
  'use_dora': (False, None),
  'fan_in_fan_out': (False, None),
  'rank_pattern': ({}, None),
  'alpha_pattern': ({}, None),
  'bias': ('none', None),
  'lora_bias': (False, None),
  'modules_to_save': (None, []),
  'alora_invocation_tokens': (None, []),
  'layer_replication': (None, []),
  # The others, such as PiSSA's, change the base.
  'init_lora_weights': (True, False, None, 'gaussian', 'orthogonal', 'eva'),
}


def save(
  directory: str | os.PathLike,
  params: decoder.Params,
  base: str | os.PathLike,
  config: decoder.DecoderConfig,
) -> None:
  """Writes adapter_config.json and adapter_model.safetensors, in float32.

  Args:
    directory: Is made if it is missing; earlier files of these names are replaced.
    params: Parameters with adapters. If several processes hold them, all must call this,
      and the first one writes.
    base: The model that the adapters belong to, which PEFT loads first.
    config: Its shape.

  Raises:
    ValueError: params have no adapters.
    OSError: The files cannot be written.
  """
  if not lora.is_in(params):
    raise ValueError('params have no adapters; weights.save writes a complete model.')
  facts = config.facts
  tensors: dict[str, np.ndarray] = {}
  modules, rank, alpha = [], 0, 0.0
  for target in lora.list_targets(config):
    leaf = params['layers'].get(target.place, {}).get(target.target, {})
    if 'lora_a' not in leaf:
      continue
    a, b, scale = (sharding.to_numpy(leaf[part]) for part in lora.LEAVES)
    rank, alpha = a.shape[-1], float(scale[0]) * a.shape[-1]
    module = target.tensor.removesuffix('.weight')
    modules.append(module.split('.')[-1])
    having = config.list_layers(target.path)
    for layer, a_layer, b_layer in zip(having, a, b, strict=True):
      path = _ROOT + facts.write_name(module.format(layer))
      tensors[f'{path}.lora_A.weight'] = _stored(a_layer.reshape(-1, rank))
      tensors[f'{path}.lora_B.weight'] = _stored(b_layer.reshape(rank, -1))
  if jax.process_index():
    return
  folder = pathlib.Path(directory)
  folder.mkdir(parents=True, exist_ok=True)
  tensor_files.save(folder / _TENSORS, tensors)
  # Other modules, such as a vision tower's, have names with the same ends.
  modules = [*dict.fromkeys(modules)]
  names = f'{facts.write_name("model.")}.*({"|".join(modules)})'
  settings = _config(rank, alpha, names if facts.renamed else modules, base)
  text = json.dumps(settings, indent=2) + '\n'
  (folder / _CONFIG).write_text(text, 'utf-8')


def load(directory: str | os.PathLike, config: decoder.DecoderConfig) -> decoder.Params:
  """Reads what `save` or PEFT wrote: the leaves of lora.take, float32.

  lora.join(base's params, adapter) adds them to a policy.

  Args:
    directory: Holds adapter_config.json and adapter_model.safetensors.
    config: The shape of the model that the adapter belongs to.

  Raises:
    ValueError: A file or tensor is missing, broken, unexpected, not finite or of another
      shape than the policy's, or the settings are not those of a plain adapter.
  """
  folder = pathlib.Path(directory)
  for name in (_CONFIG, _TENSORS):
    if not (folder / name).is_file():
      raise ValueError(
        f'{folder / name}: missing; give a directory with an adapter, such as '
        'WORKDIR/adapter of a run, or what save_pretrained of PEFT writes.'
      )
  rank, alpha = _read_config(folder / _CONFIG)
  file = folder / _TENSORS
  tensors = {}
  for name, tensor in tensor_files.read_header(file).items():
    _, root, module = name.rpartition(_ROOT)
    tensors[root + config.facts.read_name(module)] = tensor
  layers: dict[str, Any] = {}
  for target in lora.list_targets(config):
    tensor = f'{_ROOT}{target.tensor.removesuffix(".weight")}.lora_{{}}.weight'
    having = config.list_layers(target.path)
    names = {
      leaf: [tensor.format(layer, part) for layer in having]
      for leaf, part in (('lora_a', 'A'), ('lora_b', 'B'))
    }
    if tensors.keys().isdisjoint(names['lora_a'] + names['lora_b']):
      continue
    shapes = lora.get_shapes(config, target, rank)
    leaves = {
      leaf: _read_leaf(file, tensors, names[leaf], shapes[leaf]) for leaf in names
    }
    leaves['lora_scale'] = jnp.full(len(having), alpha / rank, jnp.float32)
    layers.setdefault(target.place, {})[target.target] = leaves
  if tensors:
    targets = dict.fromkeys(x.target for x in lora.list_targets(config))
    raise ValueError(
      f'{file}: tensor {min(tensors)} has no place in a {config.family} of '
      f'{config.num_layers} layers; adapters may be in '
      f'{", ".join(targets)}.'
    )
  if not layers:
    raise ValueError(f'{file}: has no tensors; write the adapter again.')
  return {'layers': layers}


def _read_config(file: pathlib.Path) -> tuple[int, float]:
  """Reads the rank and alpha; refuses settings that compute something else."""
  raw = json_fields.read_json(file)
  for name, values in _PLAIN.items():
    value = raw.get(name, values[0])
    if value not in values:
      raise ValueError(
        f'{file}: {name} is {value!r:.80}, and only {values[0]!r} is computed here; '
        'merge the adapter with PEFT (merge_and_unload) and load the model.'
      )
  try:
    rank = json_fields.read_number(raw, 'r')
    return rank, json_fields.read_number(raw, 'lora_alpha', float)
  except ValueError as error:
    raise ValueError(f'{file}: {error}') from None


def _read_leaf(
  file: pathlib.Path,
  tensors: dict[str, tensor_files.Tensor],
  names: list[str],
  shape: tuple[int, ...],
) -> jax.Array:
  """Reads A [L, *inputs, R] or B [L, R, *outputs], and takes its tensors from `tensors`.

  Args:
    file: Where they are.
    tensors: Those that no leaf has read yet.
    names: A name for each layer.
    shape: The leaf's.
  """
  array = np.empty(shape, np.float32)
  for layer, name in enumerate(names):
    tensor = tensors.pop(name, None)
    if tensor is None:
      raise ValueError(
        f'{file}: no tensor {name}; every layer must have the same adapters.'
      )
    # Transposed, A is [inputs, R] and B is [R, outputs].
    inner = shape[1:-1] if '.lora_A.' in name else shape[1:2]
    transposed = math.prod(inner), math.prod(shape[1:]) // math.prod(inner)
    if tensor.shape != transposed[::-1]:
      raise ValueError(
        f'{file}: tensor {name} has shape {list(tensor.shape)}, by the model and '
        f'{_CONFIG} it is {list(transposed[::-1])}; take an adapter of this model.'
      )
    x = np.asarray(tensor_files.read(tensor), np.float32)
    if not np.isfinite(x).all():
      raise ValueError(
        f'{file}: tensor {name} has numbers that are not finite: the training that wrote '
        'them diverged, or the file is damaged; take an earlier adapter.'
      )
    array[layer] = x.T.reshape(shape[1:])
  return jax.device_put(array)


def _stored(matrix: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(matrix.T, np.float32)


def _config(rank: int, alpha: float, modules: str | list[str], base) -> dict[str, Any]:
  return {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': os.fspath(base),
    'r': rank,
    'lora_alpha': alpha,
    'lora_dropout': 0.0,
    'target_modules': modules,
    'bias': 'none',
    'inference_mode': True,
  }
