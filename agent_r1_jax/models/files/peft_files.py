"""Low-rank adapters in the layout of the PEFT library, which inference servers read.

PEFT adds s · B · A to a weight [outputs, inputs]; we add s · A · B to a kernel [inputs,
outputs] (models/lora.py). So a PEFT tensor is our layer's leaf, transposed.

If a transformers module fuses n of our kernels (Phi-4, Qwen3.5), its adapter has n times
the rank: the A stacked, and each B in its own block. An adapter of the plain rank, as
other libraries train it, becomes n adapters that share its A.
"""

import json
import math
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agent_r1_jax.models import decoder, lora, sharding
from agent_r1_jax.models.decoder_config import DecoderConfig
from agent_r1_jax.models.family import Parameter
from agent_r1_jax.models.files import json_fields, tensor_files

_ROOT = 'base_model.model.'  # The prefix of the base's module names.
_CONFIG, _TENSORS = 'adapter_config.json', 'adapter_model.safetensors'
# PEFT settings, and their values that mean adding s · B · A, with a single s and rank, to
# the unchanged weights of the base.
_PLAIN: dict[str, tuple[Any, ...]] = {
  'peft_type': ('LORA',),
  'use_rslora': (False, None),
  'use_dora': (False, None),
  'fan_in_fan_out': (False, None),
  'bias': ('none', None),
  'lora_bias': (False, None),
  'modules_to_save': (None, []),
  'alora_invocation_tokens': (None, []),
  'layer_replication': (None, []),
  # Other initialisations, such as PiSSA's, change the base.
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
    directory: Created if missing; earlier files of these names are replaced.
    params: Parameters with adapters. If they span processes, all processes must call
      this, and the first writes.
    base: The model that the adapters belong to, which PEFT loads first.
    config: The base model's shape.

  Raises:
    ValueError: params have no adapters.
    OSError: The files cannot be written.
  """
  if not lora.is_in(params):
    raise ValueError('params have no adapters; weights.save writes a complete model.')
  facts = config.facts
  tensors: dict[str, np.ndarray] = {}
  modules, rank, alpha, joined = [], 0, 0.0, {}
  for module in _list_modules(config):
    adapters = [_get_adapter(params, target) for target in module.targets]
    having = [adapter for adapter in adapters if adapter]
    if not having:
      continue
    rank, alpha = having[0][0].shape[-1], having[0][2] * having[0][0].shape[-1]
    modules.append(module.end)
    if len(adapters) > 1:
      joined[module.end] = len(adapters)
    a, b = _join(config, module, adapters, rank)
    for layer, a_IR, b_RO in zip(module.layers, a, b, strict=True):
      path = _ROOT + facts.write_name(module.name.format(layer))
      tensors[f'{path}.lora_A.weight'] = _stored(a_IR)
      tensors[f'{path}.lora_B.weight'] = _stored(b_RO)
  if jax.process_index():
    return
  folder = pathlib.Path(directory)
  folder.mkdir(parents=True, exist_ok=True)
  tensor_files.save(folder / _TENSORS, tensors)
  # Names of other modules, such as a vision tower's, have the same endings.
  modules = [*dict.fromkeys(modules)]
  names = f'{facts.write_name("model.")}.*({"|".join(modules)})'
  settings = _config(rank, alpha, names if facts.renamed else modules, base)
  settings |= _list_patterns(joined, rank, alpha)
  text = json.dumps(settings, indent=2) + '\n'
  (folder / _CONFIG).write_text(text, 'utf-8')


def load(directory: str | os.PathLike, config: decoder.DecoderConfig) -> decoder.Params:
  """Reads an adapter written by `save` or PEFT: the leaves of lora.take, float32.

  lora.join(base's params, adapter) adds them to a policy.

  Args:
    directory: Contains adapter_config.json and adapter_model.safetensors.
    config: The shape of the model that the adapter belongs to.

  Raises:
    ValueError: A file or tensor is missing, broken, unexpected, not finite or does not
      fit the policy's shape, or the settings do not describe a plain adapter.
  """
  folder = pathlib.Path(directory)
  for name in (_CONFIG, _TENSORS):
    if not (folder / name).is_file():
      raise ValueError(
        f'{folder / name}: missing; give a directory with an adapter, such as '
        'WORKDIR/adapter of a run, or what save_pretrained of PEFT writes.'
      )
  modules = _list_modules(config)
  parts = {x.end: len(x.targets) for x in modules if len(x.targets) > 1}
  rank, alpha, wide = _read_config(folder / _CONFIG, parts)
  file = folder / _TENSORS
  tensors = {}
  for name, tensor in tensor_files.read_header(file).items():
    _, root, module = name.rpartition(_ROOT)
    tensors[root + config.facts.read_name(module)] = tensor
  layers: dict[str, Any] = {}
  for module in modules:
    names = {
      part: [f'{_ROOT}{module.name}.lora_{part}.weight'.format(x) for x in module.layers]
      for part in 'AB'
    }
    if tensors.keys().isdisjoint(names['A'] + names['B']):
      continue
    shapes = [lora.get_shapes(config, target, rank) for target in module.targets]
    inner = rank * (len(module.targets) if module.end in wide else 1)
    inputs = math.prod(shapes[0]['lora_a'][1:-1])
    outputs = [math.prod(x['lora_b'][2:]) for x in shapes]
    a = _read_tensors(file, tensors, names['A'], (inputs, inner))
    b = _read_tensors(file, tensors, names['B'], (inner, sum(outputs)))
    for i, (a_part, b_part) in enumerate(_split(file, names['B'], a, b, rank, outputs)):
      if len(module.targets) > 1 and not a_part.any():
        continue  # This kernel of a fused module has no adapter.
      target, leaves = module.targets[i], (a_part, b_part)
      leaves = {
        leaf: jax.device_put(x.reshape(shapes[i][leaf]))
        for leaf, x in zip(('lora_a', 'lora_b'), leaves, strict=True)
      }
      leaves['lora_scale'] = jnp.full(len(module.layers), alpha / rank, jnp.float32)
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


class _Module(NamedTuple):
  """A transformers module, and our kernels whose outputs it computes."""

  name: str  # '{}' stands for the layer.
  targets: list[Parameter]
  layers: list[int]

  @property
  def end(self) -> str:
    """The last part of the module's name."""
    return self.name.split('.')[-1]


def _list_modules(config: DecoderConfig) -> list[_Module]:
  """Lists the modules that can have adapters, in the order of lora.list_targets."""
  fused = config.facts.fused
  owner = {part: whole for whole, parts in fused.items() for part in parts}
  modules: dict[str, _Module] = {}
  for target in lora.list_targets(config):
    name = owner.get(target.tensor, target.tensor).removesuffix('.weight')
    # Layers of different kinds may have modules of the same name.
    key = f'{target.place}/{name}'
    module = _Module(name, [], config.list_layers(target.path))
    modules.setdefault(key, module).targets.append(target)
  return [*modules.values()]


def _get_adapter(
  params: decoder.Params, target: Parameter
) -> tuple[np.ndarray, np.ndarray, float] | None:
  """Returns A [L, I, R], B [L, R, O] and s; None without an adapter."""
  leaf = params['layers'].get(target.place, {}).get(target.target, {})
  if 'lora_a' not in leaf:
    return None
  a, b, scale = (sharding.to_numpy(leaf[part]) for part in lora.LEAVES)
  L, R = len(a), a.shape[-1]
  return a.reshape(L, -1, R), b.reshape(L, R, -1), float(scale[0])


def _join(
  config: DecoderConfig, module: _Module, adapters: list[Any], rank: int
) -> tuple[np.ndarray, np.ndarray]:
  """Joins the adapters of a module into one A and one B, with zeros for missing ones."""
  shapes = [lora.get_shapes(config, target, rank) for target in module.targets]
  L, n = len(module.layers), len(adapters)
  outputs = [math.prod(x['lora_b'][2:]) for x in shapes]
  a_LIR = np.zeros((L, math.prod(shapes[0]['lora_a'][1:-1]), n * rank), np.float32)
  b_LRO = np.zeros((L, n * rank, sum(outputs)), np.float32)
  for adapter, rows, columns in zip(adapters, *_list_blocks(rank, outputs), strict=True):
    if adapter:
      a_LIR[..., rows], b_LRO[:, rows, columns] = adapter[:2]
  return a_LIR, b_LRO


def _split(
  file: pathlib.Path,
  names: list[str],
  a_LIR: np.ndarray,
  b_LRO: np.ndarray,
  rank: int,
  outputs: list[int],
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Inverts `_join`, or shares an A of the plain rank among all parts."""
  ranks, columns = _list_blocks(rank, outputs)
  if a_LIR.shape[-1] == rank:
    return [(a_LIR, b_LRO[..., block]) for block in columns]
  blocks = [*zip(ranks, columns, strict=True)]
  others = b_LRO.copy()
  for rows, block in blocks:
    others[:, rows, block] = 0
  if others.any():
    raise ValueError(
      f'{file}: {names[int(others.any((1, 2)).argmax())]} mixes the outputs of '
      f'{len(blocks)} projections, and only such as `save` writes them are read at this '
      'rank; merge the adapter with PEFT (merge_and_unload) and load the model.'
    )
  return [(a_LIR[..., rows], b_LRO[:, rows, block]) for rows, block in blocks]


def _list_blocks(rank: int, outputs: list[int]) -> tuple[list[slice], list[slice]]:
  """Returns the slices of ranks and of outputs that belong to each part of a module."""
  ends = np.cumsum(outputs)
  ranks = [slice(i * rank, (i + 1) * rank) for i in range(len(outputs))]
  return ranks, [slice(end - n, end) for n, end in zip(outputs, ends, strict=True)]


def _list_patterns(joined: dict[str, int], rank: int, alpha: float) -> dict[str, Any]:
  """Returns PEFT's settings for fused modules; `joined` has their numbers of kernels."""
  if not joined:
    return {}
  return {
    'rank_pattern': {name: n * rank for name, n in joined.items()},
    'alpha_pattern': {name: n * alpha for name, n in joined.items()},
  }


def _read_config(
  file: pathlib.Path, parts: dict[str, int]
) -> tuple[int, float, list[str]]:
  """Reads the rank, alpha, and the fused modules that have the rank of all their parts.

  Settings other than a plain adapter's raise ValueError.
  """
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
    alpha = json_fields.read_number(raw, 'lora_alpha', float)
  except ValueError as error:
    raise ValueError(f'{file}: {error}') from None
  wide = [name for name in raw.get('rank_pattern') or {} if name in parts]
  plain = _list_patterns({name: parts[name] for name in wide}, rank, alpha)
  for name in ('rank_pattern', 'alpha_pattern'):
    if (raw.get(name) or {}) != plain.get(name, {}):
      raise ValueError(
        f'{file}: {name} is {raw.get(name)!r:.80}, and one rank and one alpha are '
        'computed here; merge the adapter with PEFT (merge_and_unload), load it.'
      )
  return rank, alpha, wide


def _read_tensors(
  file: pathlib.Path,
  tensors: dict[str, tensor_files.Tensor],
  names: list[str],
  transposed: tuple[int, int],
) -> np.ndarray:
  """Reads A [L, I, R] or B [L, R, O], and removes its tensors from `tensors`.

  Args:
    file: The file of the tensors.
    tensors: The tensors that have not been read yet, by name.
    names: The tensor's name in each layer.
    transposed: The shape of a tensor's transpose.
  """
  array = np.empty((len(names), *transposed), np.float32)
  for layer, name in enumerate(names):
    tensor = tensors.pop(name, None)
    if tensor is None:
      raise ValueError(
        f'{file}: no tensor {name}; every layer must have the same adapters.'
      )
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
    array[layer] = x.T
  return array


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
