"""Estimates the memory of a run on a chip by arithmetic; nothing is compiled.

The terms are those of docs/memory.md, which compares them with what XLA allocates. Each
phase of a step is estimated, and the run's peak is that of the largest phase:

- rollout: the engine prefills and decodes, beside the training state;
- gradient: of one micro-batch, beside the engine and its cache;
- update: the optimizer's step;
- checkpoint, on a CPU only: its copy is in the same memory.

Letters: B rows, T tokens of a row, M = B · T, S slots, L layers, D embed, F feed-forward,
N query heads, K key-value heads, H head dim, V vocabulary; all on one chip.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from agent_r1_jax import config as config_lib
from agent_r1_jax.host import runtime
from agent_r1_jax.models import attention, attention_kernels, decoder, head, lora
from agent_r1_jax.rl import algorithms, learner, optimizers

GB = 1e9
_FLOAT = 4
# The factors below were fitted with jax 0.10.2 and libtpu 0.0.42 to `memory_analysis()`
# of compiled programs, and the shares of the heap to the peaks of complete processes on a
# CPU. docs/memory.md has the programs and the errors of the estimates;
# tests/test_sizes.py compares some of them with this machine's compiler. With a factor
# that is too small a run may start that runs out of memory; with one that is too large,
# smaller sizes are chosen than would fit.

# Bytes of the process itself on a CPU: Python, the libraries, XLA and what it compiled;
# the engine's programs have the code of each layer.
_PROCESS, _LAYER_CODE = 0.8e9, 1.2e7
# Attention on a CPU holds this many times the scores of the causal blocks: those saved
# for the backward pass, and those of the layer that is being computed. If the scores have
# fewer than _FUSED bytes, the latter factor is the former, too.
_SAVED_SCORES, _SCORES, _FUSED = 2.1, 3.15, 2**25
# On a CPU, the temporaries of a prefill or decode per byte of the cache that it reads;
# bfloat16 is computed in float32 there.
_CACHE_COPIES = {'float32': 1.03, 'bfloat16': 5.0}
# The share of the bytes freed by a rollout, or by a gradient, that fragmentation makes
# unusable on a CPU, in a process that keeps what it frees (runtime.KEPT).
_ROLLOUT_GAPS, _GRADIENT_GAPS = 0.5, 0.8
# The factor by which XLA's allocations exceed the terms on a TPU (docs/memory.md), and by
# assumption on a GPU.
_MARGIN = 1.2
# The share of a chip's layers that XLA casts before its loop over them, if they are not
# sharded: it then moves most casts out of the loop.
_CAST = 0.75
# Bytes of the optimizer step's temporaries on a CPU, per byte of the gradient.
_STEP = {'adamw': 1.0, 'adamw8': 6.6, 'adafactor': 1.85}
# And on an accelerator, per byte of the largest leaf. Compiled for a TPU they are below
# 0.1 for all kinds; a GPU's compiler was not at hand, and may keep a leaf or two.
_STEP_OF_LEAF = {'adamw': 1.0, 'adamw8': 2.0, 'adafactor': 2.0}


class Machine(NamedTuple):
  """The devices of a run.

  Attributes:
    platform: 'cpu', 'gpu' or 'tpu'.
    memory: Bytes on each chip.
    chips: How many chips train, over all processes.
    engines: How many engines sample, over all processes.
    cores: Processor cores for each engine.
  """

  platform: str
  memory: float
  chips: int = 1
  engines: int = 1
  cores: int = 1


class Models(NamedTuple):
  """The models of a run.

  Attributes:
    policy: The policy's shape, with the run's dtype.
    algorithm: The algorithm; None if the policy only plays.
    reference: The shape of a reference policy that has a directory of its own.
    shared_critic: Whether the policy's directory has a value head.
  """

  policy: decoder.DecoderConfig
  algorithm: algorithms.Algorithm | None = None
  reference: decoder.DecoderConfig | None = None
  shared_critic: bool = False

  @property
  def trained(self) -> int:
    """The number of trained models: 2 if there is a critic with a model of its own."""
    critic = self.algorithm is not None and self.algorithm.needs_critic
    return 2 if critic and not self.shared_critic else 1


class Estimate(NamedTuple):
  """Bytes on one chip.

  Attributes:
    phases: Phase -> term -> bytes.
  """

  phases: dict[str, dict[str, float]]

  @property
  def largest(self) -> str:
    """The phase that holds most."""
    return max(self.phases, key=lambda name: sum(self.phases[name].values()))

  @property
  def peak(self) -> float:
    """The bytes of that phase."""
    return sum(self.phases[self.largest].values())

  def table(self) -> str:
    """Returns lines with the terms of the largest phase in GB, in descending order."""
    terms = sorted(self.phases[self.largest].items(), key=lambda term: -term[1])
    return '\n'.join(f'  {n / GB:8.2f} GB  {name}' for name, n in terms if n >= 5e6)


def count_splits(config: config_lib.Mesh, chips: int) -> tuple[int, int]:
  """Returns how many chips the rows are split over, and how many the parameters are."""
  data, fsdp, tensor, context = config.axes(chips).values()
  return data * fsdp, fsdp * tensor * context


def estimate(config: config_lib.Config, models: Models, machine: Machine) -> Estimate:
  """Estimates the bytes that a run takes on one chip, by phase and term.

  All sizes of the configuration are chosen. With mesh.samplers, the rollout's bytes are
  those of a chip that samples, and the other phases' those of a chip that trains.
  """
  if config.model.remat:
    policy = dataclasses.replace(models.policy, remat=config.model.remat)
    models = models._replace(policy=policy)
  engine = _engine_terms(config, models.policy, machine)
  sampling = _sampling_terms(config, models.policy, machine)
  process, freed = {}, {}
  if machine.platform == 'cpu':
    code = _LAYER_CODE * models.policy.num_layers
    process = {'the process itself': _PROCESS + code}
    freed = {'freed by rollouts, in pieces': _ROLLOUT_GAPS * sum(sampling.values())}
  if models.algorithm is None:
    # The engine's copy is made of them, and they stay.
    frozen = {'parameters, float32': _frozen_bytes(config, models, machine)}
    return Estimate({'rollout': process | frozen | engine | sampling | freed})
  rollout = sampling | freed
  if config.schedule.ahead and config.schedule.eval_every:
    # Rollouts under way keep their policy while another one is evaluated.
    rollout["evaluation's copy of the policy"] = _copy_bytes(
      config, models.policy, machine
    )
  state = _training_terms(config, models, machine)
  gradient = _gradient_terms(config, models, machine)
  update = _update_terms(config, models, machine)
  if config.mesh.samplers:
    phases = {'rollout': engine | rollout, 'gradient': state | gradient}
    phases['update'] = state | update
    return Estimate({name: process | terms for name, terms in phases.items()})
  always = process | engine | state
  # With `ahead` rollouts are played while updates are computed.
  beside = sampling | freed if config.schedule.ahead else _kept(always, freed)
  phases = {'rollout': rollout, 'gradient': beside | gradient, 'update': beside | update}
  if machine.platform == 'cpu':
    freed = {'freed by gradients, in pieces': _GRADIENT_GAPS * sum(gradient.values())}
    copy = {'copy for the checkpoint': _checkpoint_bytes(config, models, machine)}
    phases['checkpoint'] = copy | _kept(always | copy, freed)
  return Estimate({name: always | terms for name, terms in phases.items()})


def _kept(held: Mapping[str, float], freed: dict[str, float]) -> dict[str, float]:
  """Returns `freed` as far as a process that holds `held` keeps it."""
  most = max(0.0, runtime.KEPT - sum(held.values()))
  return {name: min(n, most) for name, n in freed.items()}


@functools.cache
def count_parameters(model: decoder.DecoderConfig) -> Mapping[str, int]:
  """Counts the parameters of a model: {'layers': ..., 'all': ...}."""
  plain = dataclasses.replace(model, dtype='float32', remat='none')
  shapes = jax.eval_shape(lambda: decoder.init(plain, jax.random.key(0)))
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  return {'layers': count(shapes['layers']), 'all': count(shapes)}


@functools.cache
def trained_bytes(
  model: decoder.DecoderConfig, rank: int, targets: tuple[str, ...], optimizer: str
) -> tuple[int, int]:
  """Returns the bytes of the trained parameters and of the optimizer's state."""
  plain = dataclasses.replace(model, dtype='float32', remat='none')

  def make():
    params = decoder.init(plain, jax.random.key(0))
    if rank:
      params = lora.add(params, rank, targets, 1.0, jax.random.key(0))
    learned = lora.split(params)[0]
    transformation = optimizers.make(config_lib.Optimizer(kind=optimizer), 1.0)
    return learned, learner.init(params, transformation).opt_state

  size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  learned, state = jax.eval_shape(make)
  return size(learned), size(state)


def _trained_on_chip(config, models, machine) -> tuple[float, float]:
  """Returns `trained_bytes`, divided over the chips."""
  adapters = (config.model.lora_rank, config.model.adapter_targets)
  sizes = trained_bytes(models.policy, *adapters, config.optimizer.kind)
  split = count_splits(config.mesh, machine.chips)[1]
  return sizes[0] / split, sizes[1] / split


def _training_terms(config, models, machine) -> dict[str, float]:
  """Returns the bytes that training holds in every phase."""
  algorithm, split = models.algorithm, count_splits(config.mesh, machine.chips)[1]
  learned, opt_state = _trained_on_chip(config, models, machine)
  frozen = _frozen_bytes(config, models, machine)
  terms = {'parameters, float32': frozen + (learned if config.model.lora_rank else 0)}
  if models.trained == 2:
    terms['critic, float32'] = learned
  if not config.optimizer.offload:
    terms[f'state of {config.optimizer.kind}'] = models.trained * opt_state
  # A reference from its own directory is a whole model; otherwise the frozen parameters
  # are shared with the policy, and only the trained ones are held twice.
  if models.reference:
    terms['reference, float32'] = (
      count_parameters(models.reference)['all'] * _FLOAT / split
    )
  elif algorithm.needs_reference:
    terms['reference, float32'] = learned
  # The engine samples from an older policy than the one that is trained.
  if config.schedule.sync_every > 1 or config.schedule.ahead:
    terms["policy as the engine's is, float32"] = learned
  return terms


def _frozen_bytes(config, models, machine) -> float:
  """Returns the bytes of the policy's parameters, without adapters, on one chip."""
  split = count_splits(config.mesh, machine.chips)[1]
  return count_parameters(models.policy)['all'] * _FLOAT / split


def _engine_terms(config, model, machine) -> dict[str, float]:
  """Returns the engine's copy of the policy, and its cache."""
  return {
    f"engine's copy, {model.dtype}": _copy_bytes(config, model, machine),
    'cache': config.engine.rows
    * config.engine.slots
    * _slot_bytes(model, config.mesh.tensor),
  }


def _copy_bytes(config, model, machine) -> float:
  """Returns the bytes of one copy of the policy that samples, on one chip."""
  count = count_parameters(model)
  size = jnp.dtype(model.dtype).itemsize
  # On one chip, float32 embeddings are shared with the training's.
  shared = size == _FLOAT and machine.chips == 1 and not config.mesh.samplers
  return (count['layers'] if shared else count['all']) * size / config.mesh.tensor


def _slot_bytes(model, tensor) -> float:
  """Returns the bytes of one slot of one row of the cache, on one chip."""
  size = jnp.dtype(model.dtype).itemsize
  heads = model.num_kv_heads
  heads = heads / tensor if heads % tensor == 0 else heads
  return 2 * model.num_layers * heads * model.head_dim * size


def _sampling_terms(config, model, machine) -> dict[str, float]:
  """Returns the temporaries of a decode or of a prefill, whichever are more."""
  sizes, tensor = config.engine, config.mesh.tensor
  slot, heads = _slot_bytes(model, tensor), model.num_heads / tensor
  copies = _CACHE_COPIES[model.dtype] if machine.platform == 'cpu' else 1.0
  width = min(sizes.width or sizes.rows, sizes.rows)
  in_place = width == sizes.rows and attention_kernels.reads_used_slots(
    (sizes.rows // sizes.replicas, model.num_kv_heads, sizes.slots, model.head_dim),
    model.dtype,
    machine.platform,
  )
  # Logits, their log-probs, and temporaries of the sampling.
  decode = {'decode: logits and scores': 4 * width * model.vocab_size * _FLOAT / tensor}
  if not in_place:
    decode['decode: logits and scores'] += 2 * width * heads * sizes.slots * _FLOAT
    decode['decode: copy of the cache'] = copies * width * sizes.slots * slot
  # Replicas that share a chip prefill at the same time.
  rows = min(sizes.prefill_rows * sizes.replicas, sizes.rows)
  tokens = rows * sizes.prefill_tokens
  size = jnp.dtype(model.dtype).itemsize
  hidden = tokens * (2 * model.mlp_dim / tensor + 4 * model.embed_dim) * size
  prefill = {
    'prefill: copy of the cache': copies * rows * sizes.slots * slot,
    'prefill: scores': 2 * tokens * heads * sizes.slots * _FLOAT,
    'prefill: activations': hidden,
  }
  return max(decode, prefill, key=lambda terms: sum(terms.values()))


def _gradient_terms(config, models, machine) -> dict[str, float]:
  """Returns the gradients and the temporaries of one micro-batch."""
  learned = _trained_on_chip(config, models, machine)[0]
  temporaries = activations(
    models.policy,
    rows=max(1, config.batch.microbatch // count_splits(config.mesh, machine.chips)[0]),
    tokens=config.batch.row_tokens or config.engine.slots,
    platform=machine.platform,
    tensor=config.mesh.tensor,
    context=config.mesh.context,
    sharded=machine.chips > 1,
    frozen=config.model.lora_rank > 0,
  )
  sums = {'gradient, float32': learned, 'sum of the gradients before it': learned}
  return sums | temporaries


def activations(
  model: decoder.DecoderConfig,
  *,
  rows: int,
  tokens: int,
  platform: str,
  tensor: int = 1,
  context: int = 1,
  sharded: bool = False,
  frozen: bool = False,
) -> dict[str, float]:
  """Estimates the bytes that XLA allocates on a chip for one gradient, by term.

  Args:
    model: The shape, with dtype and remat.
    rows: Rows of the micro-batch on this chip (B).
    tokens: Tokens of a row (T).
    platform: 'cpu', 'gpu' or 'tpu'.
    tensor: How many chips share a layer.
    context: How many chips share a row.
    sharded: Whether the parameters are split over chips.
    frozen: Whether the vocabulary head has no gradient, as with adapters.
  """
  cpu = platform == 'cpu'
  layer = _layer_bytes(model, rows * tokens / context, platform, tensor)
  scores = _score_bytes(model, rows, tokens, platform, tensor * context)
  vocabulary = _head_bytes(model, rows * tokens / context, platform, tensor, frozen)
  # Below _FUSED bytes of scores XLA makes no copy of them in another order.
  computing = (_SCORES if scores > _FUSED else _SAVED_SCORES) * scores
  L = model.num_layers
  if cpu and L <= decoder.UNROLLED_LAYERS:
    # The loop over layers is unrolled: XLA finds what `remat` would compute twice and
    # keeps it, so that `remat` has no effect.
    return {
      'activations of all layers': L * layer['all'],
      'attention scores of all layers': L * computing,
      'vocabulary head': vocabulary,
    }
  saved_scores = _SAVED_SCORES * scores if model.remat == 'none' else 0.0
  terms = {
    'saved for the backward pass': L * layer[model.remat],
    'attention scores saved': L * saved_scores,
  }
  if cpu:
    # The head's memory is free again when the backward pass reaches the layers.
    largest = max(vocabulary, layer['all'] + computing)
    return terms | {'vocabulary head, or one layer with its scores': largest}
  # On accelerators the head's gradient stays in memory while the layers' are computed.
  terms |= {'one layer': layer['all'] + computing, 'vocabulary head': vocabulary}
  terms = {name: _MARGIN * n for name, n in terms.items()}
  if model.dtype == 'bfloat16':
    count = count_parameters(model)['layers'] / tensor
    cast = 2 * _MARGIN * count / L if sharded else _CAST * count
    terms[f'layers cast to {model.dtype}'] = 2 * cast
  return terms


def _layer_bytes(model, tokens: float, platform: str, tensor: int) -> dict[str, float]:
  """Returns the bytes of one layer's activations that each `remat` saves, and of 'all'.

  For Qwen2.5-3B (D 2048, F 11,008, 16 query and 2 key-value heads of 128) and 1,000
  tokens in bfloat16 they are, in MB: 2 · (8 · 2.05 + 5.5 · 11 + 3 · 2.05 + 9 · .26) = 171
  for 'all', 4.1 for 'full' and 57 for 'dots'. The factors of each width were fitted to
  the measurements in docs/memory.md.
  """
  # On a CPU, XLA holds bfloat16 activations in float32.
  cpu = platform == 'cpu'
  unit = tokens * (2 if model.dtype == 'bfloat16' and not cpu else _FLOAT)
  D, F = model.embed_dim, model.mlp_dim / tensor
  NH = model.num_heads * model.head_dim / tensor
  KH = model.num_kv_heads * model.head_dim / tensor
  layer = unit * (8 * D + 5.5 * F + 3 * NH + 9 * KH)
  if model.facts.qk_norm:
    layer += unit * 2.2 * (NH + KH)
  # A CPU that scans layers in bfloat16 saves some activations in both dtypes.
  both = 1.1 if cpu and model.dtype != 'float32' else 1.0
  return {
    'all': layer,
    'none': both * layer,
    'dots': unit * (NH + 2 * KH + 2 * D + 2 * F),
    'full': unit * D,
  }


def _score_bytes(model, rows, tokens, platform, split) -> float:
  """Returns the bytes of one layer's attention scores; 0 with the kernel for TPUs.

  cuDNN's kernel stores no scores either, but reads a mask of 2 bytes a score that all
  heads share, and in the backward pass a second one.
  """
  if platform == 'tpu' and tokens % attention_kernels.LANES == 0:
    return 0.0
  blocks = attention.count_blocks(tokens)
  causal = (blocks + 1) / (2 * blocks)
  queries = (rows, tokens, model.num_heads, model.head_dim)
  if platform == 'gpu' and attention_kernels.has_cudnn(
    jax.ShapeDtypeStruct(queries, model.dtype)
  ):
    return causal * rows * tokens**2 * 4
  return causal * rows * tokens**2 * model.num_heads / split * _FLOAT


def _head_bytes(model, M, platform, tensor, frozen) -> float:
  """Returns the bytes of the vocabulary head: logits, its kernel and its gradient."""
  DV = model.embed_dim * model.vocab_size / tensor
  if platform == 'cpu':
    block = min(256, M)
    kernels = 2 if model.tie_embeddings and not frozen else 1
    kernels += 1.2 if model.dtype != 'float32' else 0
    blocks = 2.2 if frozen else 1.6
    return _FLOAT * (kernels * DV + blocks * block * model.vocab_size)
  block = min(max(256, head.BLOCK_LOGITS // model.vocab_size), M)
  size = 2 if model.dtype == 'bfloat16' else 0
  return (_FLOAT + size) * DV + _FLOAT * block * model.vocab_size / tensor


def _update_terms(config, models, machine) -> dict[str, float]:
  """Returns the bytes of the gradient and of the optimizer step's temporaries."""
  learned, opt_state = _trained_on_chip(config, models, machine)
  terms = {'gradient, float32': learned}
  if config.optimizer.offload:
    terms[f'state of {config.optimizer.kind}'] = opt_state
  if machine.platform == 'cpu':
    terms["optimizer's temporaries"] = _STEP[config.optimizer.kind] * learned
  else:
    # XLA computes leaf by leaf; the largest is a stack of feed-forward kernels.
    model, split = models.policy, count_splits(config.mesh, machine.chips)[1]
    leaf = model.num_layers * model.embed_dim * model.mlp_dim / split
    leaf = min(leaf * _FLOAT, learned)
    terms["optimizer's temporaries"] = _STEP_OF_LEAF[config.optimizer.kind] * leaf
  return terms


def _checkpoint_bytes(config, models, machine) -> float:
  """Returns the bytes of a checkpoint's copy."""
  learned, opt_state = _trained_on_chip(config, models, machine)
  # A reference that changes, and a sampler that is older than the policy, are in the
  # checkpoint too (TrainState.checkpoint_arrays in rl/updates.py).
  schedule = config.schedule
  older = schedule.sync_every > 1 or (schedule.ahead and not schedule.partial)
  others = bool(schedule.reference_every) + bool(older)
  return models.trained * (learned + opt_state) + others * learned
