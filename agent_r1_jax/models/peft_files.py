"""Low-rank adapters in the layout of the PEFT library, which inference servers read.

PEFT adds s · B · A to a weight [outputs, inputs]; ours is s · A · B beside a kernel
[inputs, outputs] (models/lora.py). So a tensor of PEFT is our layer, transposed.
"""

import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
from safetensors import numpy as safetensors_numpy

from agent_r1_jax.models import decoder, families, lora, sharding


def save(
  directory: str | os.PathLike, params: decoder.Params, base: str | os.PathLike
) -> None:
  """Writes adapter_config.json and adapter_model.safetensors, in float32.

  Args:
    directory: Is made if it is missing; earlier files of these names are replaced.
    params: Parameters with adapters. If several processes hold them, all must call this,
      and the first one writes.
    base: The model that the adapters belong to, which PEFT loads first.

  Raises:
    ValueError: params have no adapters.
    OSError: The files cannot be written.
  """
  if not lora.has_adapters(params):
    raise ValueError('params have no adapters; weights.save writes a complete model.')
  tensors: dict[str, np.ndarray] = {}
  modules, rank, alpha = [], 0, 0.0
  for name, target in families.TARGETS.items():
    _, place, *_ = target.path.split('/')
    leaf = params['layers'][place][name]
    if 'lora_a' not in leaf:
      continue
    a, b, scale = (sharding.to_numpy(leaf[part]) for part in lora.LEAVES)
    rank, alpha = a.shape[-1], float(scale[0]) * a.shape[-1]
    module = target.tensor.removesuffix('.weight')
    modules.append(module.split('.')[-1])
    for layer, (a_layer, b_layer) in enumerate(zip(a, b, strict=True)):
      path = f'base_model.model.{module.format(layer)}'
      tensors[f'{path}.lora_A.weight'] = _stored(a_layer.reshape(-1, rank))
      tensors[f'{path}.lora_B.weight'] = _stored(b_layer.reshape(rank, -1))
  if jax.process_index():
    return
  folder = pathlib.Path(directory)
  folder.mkdir(parents=True, exist_ok=True)
  safetensors_numpy.save_file(
    tensors, folder / 'adapter_model.safetensors', metadata={'format': 'pt'}
  )
  text = json.dumps(_config(rank, alpha, modules, base), indent=2) + '\n'
  (folder / 'adapter_config.json').write_text(text, 'utf-8')


def _stored(matrix: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(matrix.T, np.float32)


def _config(rank: int, alpha: float, modules: list[str], base) -> dict[str, Any]:
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
