"""Reads and writes decoders as Hugging Face directories: config.json and safetensors.

Both stream one tensor at a time: reading needs host memory for the parameters and one
tensor, writing for one tensor. Reading and then writing a model reproduces every tensor
byte for byte.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import errno
import json
import logging
import math
import mmap
import os
import pathlib
import shutil
from typing import Any

from flax import traverse_util
import jax
import numpy as np

from agent_r1_jax.host import model_paths
from agent_r1_jax.models import decoder, four_bits, lora, quantization, sharding
from agent_r1_jax.models.files import hf_config, mxfp4, tensor_files, tensor_layout

_LOGGER = logging.getLogger(__name__)
_TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'generation_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'chat_template.jinja',
  'chat_template.json',
  'vocab.json',
  'merges.txt',
  'preprocessor_config.json',
  'processor_config.json',
  'video_preprocessor_config.json',
)


def load(
  directory: str | os.PathLike,
  *,
  dtype: Any = None,
  place: Callable[[str, np.ndarray], Any] = lambda path, array: jax.device_put(array),
  formats: Sequence[tensor_files.Format] = (),
  packed: bool = False,
) -> tuple[decoder.DecoderConfig, decoder.Params]:
  """Reads a model from model.safetensors or from shards and their index.

  A tied model may have `lm_head.weight` if it equals the embedding byte for byte; it is
  then dropped, and an export does not write it. A critic's value head is read if
  config.json has a `value_head`: true, or an object that describes it.

  Args:
    directory: A directory in Hugging Face layout, or a path in one of `formats`.
    dtype: Dtype of every parameter: float32, bfloat16 or float16; None keeps the file's.
    place: Called with each leaf's path ('layers/attn/q/kernel') and host array; returns
      the leaf. It can shard a leaf while others are still on disk.
    formats: Formats besides Hugging Face's, such as contrib.gguf.FORMAT.
    packed: Whether to keep experts in the file's 4 bits (models/four_bits.py).

  Raises:
    ValueError: A file or tensor is missing, broken, unexpected or of the wrong shape or
      dtype, which is checked before any parameter is placed; a number is not finite; or
      `packed` is set and no experts have 4 bits.
  """
  directory = pathlib.Path(directory)
  config = hf_config.read(directory, formats)
  value_head = bool(hf_config.read_raw(directory, formats)[1].get('value_head'))
  leaves = tensor_layout.list_leaves(config, value_head, packed=packed)
  tensors = tensor_files.find(directory, formats=formats)
  tensors = mxfp4.turn(directory, tensors) if packed else mxfp4.join(tensors)
  tensors = tensor_layout.rename(config, tensors)
  _drop_ignored(directory, config, tensors)
  if config.tie_embeddings:
    _drop_tied(tensors)
  tensors = tensor_layout.split_fused(directory, config, leaves, tensors)
  _check_tensors(directory, leaves, tensors)
  dtypes = [_leaf_dtype(leaf, tensors, dtype) for leaf in leaves]
  flat = {}
  for leaf, leaf_dtype in zip(leaves, dtypes, strict=True):
    array = _read_leaf(leaf, tensors, leaf_dtype)
    check_finite(directory, leaf.path, array)
    flat[leaf.path] = place(leaf.path, array)
  return config, traverse_util.unflatten_dict(flat, sep='/')


def check_finite(directory: pathlib.Path, path: str, array: np.ndarray) -> None:
  """Raises ValueError if a parameter has numbers that are not finite."""
  # A sum is fast, and not finite if any number is not.
  with np.errstate(over='ignore', invalid='ignore'):
    if np.isfinite(array.sum(dtype=np.float32)):
      return
  if lost := int((~np.isfinite(array)).sum()):
    raise ValueError(
      f'{directory}: {lost} of {array.size} numbers of {path} are not finite: the '
      'training that wrote them diverged, or the file is damaged. Take an earlier '
      'checkpoint, or copy the model again.'
    )


def save(
  directory: str | os.PathLike,
  config: decoder.DecoderConfig,
  params: decoder.Params,
  *,
  dtype: Any = None,
  max_shard_bytes: int = 5 * 10**9,
  tokenizer_from: str | os.PathLike | None = None,
  value_head: Mapping[str, Any] | None = None,
) -> None:
  """Writes a model that `load` and transformers read.

  The files are written next to `directory`, and renamed to it when all are on disk. A
  crash leaves the earlier model unchanged or, between the two renames, under the name
  `.<name>.previous`, which the next save restores.

  Args:
    directory: New, empty, or a model to replace; other files in it raise ValueError.
    config: The model's shape.
    params: Parameters as from `decoder.init`; a critic's have a 'value_head'. Adapters
      are merged one tensor at a time. If several processes hold the parameters, all must
      call this, and the first one writes.
    dtype: Dtype of every tensor: float32, bfloat16 or float16; None keeps each leaf's, or
      is float32 if kernels have 8 bits. Experts of 4 bits keep them.
    max_shard_bytes: The most tensor data in a file; a larger tensor gets its own file.
    tokenizer_from: A directory whose tokenizer, chat template and generation config are
      copied; None keeps those already in `directory`.
    value_head: The description of the value head for config.json.

  Raises:
    ValueError: Wrong parameters, config or directories; nothing was written.
    OSError: The disk is full or cannot be written; `directory` is unchanged.
  """
  directory = pathlib.Path(directory).resolve()
  if jax.process_index() == 0:
    _recover(directory)
  flat: Any = traverse_util.flatten_dict(params, sep='/')
  if dtype is None and any(path.endswith(quantization.SCALE) for path in flat):
    dtype = 'float32'
  packed = four_bits.is_in(params)
  leaves = tensor_layout.list_leaves(config, 'value_head' in params, packed=packed)
  _check_params(leaves, flat)
  stored = tensor_layout.list_stored(config, leaves, flat, dtype)
  specs = [tensor.spec for tensor in stored.values()]
  files = tensor_files.shards(specs, max_shard_bytes)
  source = model_paths.get_directory(tokenizer_from or directory)
  if tokenizer_from and not (source / 'tokenizer.json').is_file():
    raise ValueError(f'tokenizer_from: {source} has no tokenizer.json')
  raw = hf_config.make(config, specs[0].dtype)
  raw |= {'quantization_config': mxfp4.CONFIG} if packed else {}
  text = raw.get('text_config', raw)
  text |= hf_config.token_ids(source, config.vocab_size) | text
  if 'value_head' in params:
    raw['value_head'] = dict(value_head) if value_head else True
  _check_target(directory)
  if jax.process_index():
    for file in files.values():
      for spec in file:
        _to_stored(stored[spec.name], flat)
    return
  with _replace(directory, sum(spec.nbytes for spec in specs)) as partial:
    for file in _TOKENIZER_FILES:
      if (source / file).is_file():
        shutil.copyfile(source / file, partial / file)
    (partial / 'config.json').write_text(json.dumps(raw, indent=2) + '\n', 'utf-8')
    tensor_files.write(partial, files, lambda name: _to_stored(stored[name], flat))


def _drop_ignored(
  directory: pathlib.Path,
  config: decoder.DecoderConfig,
  tensors: dict[str, tensor_files.Tensor],
) -> None:
  for beginning, what in config.facts.ignored.items():
    if names := [name for name in tensors if name.startswith(beginning)]:
      _LOGGER.warning(
        '%s: %d tensors %s... are not read, nor written by an export (%s).',
        *(directory, len(names), beginning, what),
      )
    for name in names:
      del tensors[name]
  for name in tensor_layout.list_unread(config) & tensors.keys():
    del tensors[name]


def _drop_tied(tensors: dict[str, tensor_files.Tensor]) -> None:
  head = tensors.pop('lm_head.weight', None)
  embedding = tensors.get('model.embed_tokens.weight')
  if head is None or embedding is None:
    return
  a, b = (tensor_files.read(tensor).view(np.uint8) for tensor in (head, embedding))
  if head.dtype != embedding.dtype or not np.array_equal(a, b):
    raise ValueError(
      f'{head.file}: lm_head.weight differs from the embedding, though config.json ties '
      'them; set "tie_word_embeddings": false in config.json'
    )


def _check_tensors(
  directory: pathlib.Path,
  leaves: list[tensor_layout.Leaf],
  tensors: dict[str, tensor_files.Tensor],
) -> None:
  expected = {name: leaf for leaf in leaves for name in leaf.tensors.values()}
  for name, leaf in expected.items():
    tensor_layout.check_tensor(directory, tensors, name, leaf.stored)
  for name, tensor in tensors.items():
    if name not in expected:
      raise ValueError(
        f'{tensor.file}: tensor {name} has no place in the model of config.json; take '
        'both from one model'
      )


def _leaf_dtype(
  leaf: tensor_layout.Leaf, tensors: dict[str, tensor_files.Tensor], dtype: Any
) -> np.dtype:
  parts = [tensors[name] for name in leaf.tensors.values()]
  dtypes = sorted({tensor.dtype for tensor in parts})
  if dtypes == [mxfp4.PACKED]:
    return np.dtype('uint8')
  if dtype is not None:
    return tensor_layout.check_dtype(dtype)
  if len(dtypes) > 1:
    raise ValueError(
      f'{parts[0].file}: tensors {leaf.tensor} are {" and ".join(dtypes)}; '
      'all layers are one array: give a dtype'
    )
  return tensor_files.DTYPES[dtypes[0]]


def _read_leaf(
  leaf: tensor_layout.Leaf, tensors: dict[str, tensor_files.Tensor], dtype: np.dtype
) -> np.ndarray:
  array = _mapped_zeros(leaf.shape, dtype)
  for index, name in leaf.tensors.items():
    x = tensor_files.read(tensors[name])
    # A kernel is [outputs, *inputs] in the file; scales and biases are not transposed.
    x = x.reshape(len(x), -1).T if leaf.transposed else x
    array[index] = x.reshape(array[index].shape)
  return array


def _mapped_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Allocates an array in its own memory pages, which JAX on a CPU uses without a copy.

  The pages return to the kernel with the array. `np.empty` uses the heap, where NumPy
  requests huge pages: any later object in one keeps 2 MB resident.
  """
  nbytes = max(1, math.prod(shape) * dtype.itemsize)
  raw = np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 'u1')
  return raw[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _check_params(leaves: list[tensor_layout.Leaf], flat: dict[str, Any]) -> None:
  known = {leaf.path for leaf in leaves}
  siblings = (*lora.LEAVES, quantization.SCALE)
  known |= {_sibling(leaf, name) for leaf in leaves for name in siblings}
  for path in sorted(flat.keys() - known):
    raise ValueError(f'params: {path} has no place in the model of config')
  for leaf in leaves:
    if leaf.path not in flat:
      raise ValueError(f'params: no {leaf.path}, which config asks for')
    if flat[leaf.path].shape != leaf.shape:
      raise ValueError(
        f'params: {leaf.path} has shape {flat[leaf.path].shape}, by config it is '
        f'{leaf.shape}'
      )


def _sibling(leaf: tensor_layout.Leaf, name: str) -> str:
  return f'{leaf.path.rpartition("/")[0]}/{name}'


def _to_stored(tensor: tensor_layout.Stored, flat: dict[str, Any]) -> np.ndarray:
  """Copies one tensor to the host, in the file's layout."""
  parts = []
  for leaf, index in tensor.parts:
    x = flat[leaf.path]
    # Slice the layer on the device: JAX would keep a host copy of the complete leaf.
    x = x[index] if index else x
    if leaf.transposed:
      siblings = {n: _sibling(leaf, n) for n in (*lora.LEAVES, quantization.SCALE)}
      beside = {n: flat[path][index] for n, path in siblings.items() if path in flat}
      x = sharding.to_numpy(lora.merge({'kernel': x} | beside)['kernel'])
      x = x.reshape(-1, leaf.stored[0]).T
    x = sharding.to_numpy(x)
    parts.append(np.ascontiguousarray(x.reshape(leaf.stored), tensor.spec.dtype))
  if tensor.interleaved:
    joined = np.stack(parts, -1).reshape(*parts[0].shape[:-1], -1)
  else:
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
  if tensor.spec.dtype == np.uint8:
    return np.ascontiguousarray(mxfp4.turn_back(tensor.spec.name, joined))
  return joined.reshape(tensor.spec.shape)


def _check_target(directory: pathlib.Path) -> None:
  """Raises ValueError if a directory holds more than a model."""
  if not directory.exists():
    return
  if not directory.is_dir():
    raise ValueError(f'{directory}: is a file; give a directory')
  known = {*_TOKENIZER_FILES, 'config.json', 'model.safetensors.index.json'}
  for path in sorted(directory.iterdir()):
    if path.name not in known and path.suffix != '.safetensors':
      raise ValueError(
        f'{directory}: holds {path.name}, which is no part of a model and would be lost; '
        'give another directory'
      )


def _temporary_paths(directory: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
  """Returns the directories of the model being written and of the replaced model."""
  name = f'.{directory.name}'
  return directory.with_name(f'{name}.partial'), directory.with_name(f'{name}.previous')


def _recover(directory: pathlib.Path) -> None:
  """Restores or removes the temporary directories of a save that was killed."""
  partial, previous = _temporary_paths(directory)
  if previous.exists() and not directory.exists():
    previous.rename(directory)
  for left_over in (partial, previous):
    shutil.rmtree(left_over, ignore_errors=True)


@contextlib.contextmanager
def _replace(directory: pathlib.Path, nbytes: int) -> Iterator[pathlib.Path]:
  """Yields an empty directory, which is renamed to `directory` if the body succeeds."""
  partial, previous = _temporary_paths(directory)
  partial.mkdir(parents=True)
  try:
    free = shutil.disk_usage(partial).free
    if free < nbytes:
      reason = f'the model needs {nbytes:,} bytes, {free:,} are free'
      raise OSError(errno.ENOSPC, reason, str(directory))
    yield partial
    if directory.exists():
      directory.rename(previous)
    partial.rename(directory)
  except BaseException:
    _recover(directory)
    raise
  shutil.rmtree(previous, ignore_errors=True)
