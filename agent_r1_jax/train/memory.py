"""How much memory a run takes on a chip, by arithmetic: nothing is compiled for it.

The terms are those of docs/memory.md, which compares them with what XLA allocates. The
phases of a step are estimated, and what the largest of them holds is the run's peak:

- rollout: the engine prefills and decodes, while the training state lies there;
- gradient: of one micro-batch, while engine and cache lie there;
- update: the optimizer's step;
- checkpoint, on a CPU: its copy lies in the same memory.

Letters: B rows, T tokens of a row, M = B · T, S slots, L layers, D embed, F feed-forward,
N query heads, K key-value heads, H head dim, V vocabulary, C tokens of one block of the
vocabulary head; all on one chip.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import NamedTuple

import jax

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields
from agent_r1_jax.models import attention, decoder, head, lora
from agent_r1_jax.rl import algorithms, learner, optimizers

GB = 1e9
_FLOAT = 4
# The process itself on a CPU: Python, the libraries, what XLA compiles and has compiled.
_PROCESS = 0.8e9
# Attention on a CPU holds this many times the scores of the causal blocks: those that
# wait for the backward pass, and those of the layer that is computed. Below _FUSED bytes
# of scores, products need no copy in another order.
_SAVED_SCORES, _SCORES, _FUSED = 2.1, 3.15, 2**25
# On a CPU, bfloat16 is computed in float32: the engine's view of a cache in bfloat16 is
# copied so often.
_VIEWS = {'float32': 1.03, 'bfloat16': 5.0}
# The share of what a rollout freed that a CPU's heap cannot use again.
_GAPS = 0.5
# And of what a gradient freed, while a checkpoint is copied.
_GRADIENT_GAPS = 0.8
# What XLA holds beyond the terms on a TPU (docs/memory.md); a GPU is taken to be alike.
_MARGIN = 1.2
# The share of a chip's layers that XLA casts before its loop over them: where they are
# whole, it takes most casts out of the loop.
_CAST = 0.75
# Bytes that the optimizer's step takes beside its arguments on a CPU: 1 is those of the
# gradient.
_STEP = {'adamw': 1.0, 'adamw8': 6.6, 'adafactor': 1.85}
# And on an accelerator: 1 is those of the largest leaf. Compiled for a TPU it is below
# 0.1 of all kinds; a GPU's compiler was not at hand, and may keep a leaf or two.
_STEP_OF_LEAF = {'adamw': 1.0, 'adamw8': 2.0, 'adafactor': 2.0}


class Machine(NamedTuple):
  """What a run may use.

  Attributes:
    platform: 'cpu', 'gpu' or 'tpu'.
    memory: Bytes on each chip.
    chips: That train, of all processes.
    engines: That sample, of all processes.
    cores: Of the processor, for each engine.
  """

  platform: str
  memory: float
  chips: int = 1
  engines: int = 1
  cores: int = 1


class Models(NamedTuple):
  """What a run loads.

  Attributes:
    policy: Its shape, with the run's dtype and remat.
    algorithm: None: the policy only plays.
    reference: The shape of a reference policy of its own, where a directory is given.
    shared_critic: Whether the directory of the policy has a value head.
  """

  policy: decoder.DecoderConfig
  algorithm: algorithms.Algorithm | None = None
  reference: decoder.DecoderConfig | None = None
  shared_critic: bool = False


class Estimate(NamedTuple):
  """Bytes on one chip.

  Attributes:
    phases: Of each phase, bytes by term.
  """

  phases: dict[str, dict[str, float]]

  @property
  def largest(self) -> str:
    """The phase that holds most."""
    return max(self.phases, key=lambda name: sum(self.phases[name].values()))

  @property
  def peak(self) -> float:
    """What that phase holds."""
    return sum(self.phases[self.largest].values())

  def table(self) -> str:
    """The terms of that phase in GB, the largest first, a line each."""
    terms = sorted(self.phases[self.largest].items(), key=lambda term: -term[1])
    return '\n'.join(f'  {n / GB:8.2f} GB  {name}' for name, n in terms if n >= 5e6)


def count_splits(config: config_lib.Mesh, chips: int) -> tuple[int, int]:
  """Over how many chips rows and parameters are split: data x fsdp, and fsdp x ..."""
  rest = config.data * config.tensor * config.context
  fsdp = config.fsdp or max(1, chips // rest)
  return config.data * fsdp, fsdp * config.tensor * config.context


def estimate(config: config_lib.Config, models: Models, machine: Machine) -> Estimate:
  """The bytes that a run with these sizes takes on one chip, by phase and term.

  On a chip that both trains and samples; with mesh.samplers, of the two kinds of chips
  the one that holds more in each phase.

  Args:
    config: With all sizes chosen.
    models: What it loads.
    machine: Where it runs.
  """
  engine = _engine(config, models.policy, machine)
  playing = _playing(config, models.policy, machine)
  process = {'the process itself': _PROCESS} if machine.platform == 'cpu' else {}
  if models.algorithm is None:
    return Estimate({'rollout': process | engine | playing})
  rollout = dict(playing)
  if config.schedule.ahead and config.schedule.eval_every:
    # Rollouts that are under way keep their policy while another one is evaluated.
    rollout["evaluation's copy of the policy"] = _copy(config, models.policy, machine)
  state = _state(config, models, machine)
  gradient = _gradient(config, models, machine)
  update = _update(config, models, machine)
  if config.mesh.samplers:
    phases = {'rollout': engine | rollout, 'gradient': state | gradient}
    phases['update'] = state | update
    return Estimate({name: process | terms for name, terms in phases.items()})
  # With `ahead` rollouts are played while updates are computed.
  beside = playing if config.schedule.ahead else {}
  if machine.platform == 'cpu':
    # What a rollout has freed lies between what is still used: part of it is too small
    # for the next phase.
    gaps = {'freed by rollouts, in pieces': _GAPS * sum(playing.values())}
    gradient, update = gaps | gradient, gaps | update
  always = process | engine | state
  phases = {'rollout': rollout, 'gradient': beside | gradient, 'update': beside | update}
  if machine.platform == 'cpu':
    phases['checkpoint'] = _checkpoint(config, models, machine, gradient)
  return Estimate({name: always | terms for name, terms in phases.items()})


@functools.cache
def _parameters(model: decoder.DecoderConfig) -> Mapping[str, int]:
  """How many there are: of the layers, and beside them."""
  plain = dataclasses.replace(model, dtype='float32', remat='none')
  shapes = jax.eval_shape(lambda: decoder.init(plain, jax.random.key(0)))
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  layers = count(shapes['layers'])
  return {'layers': layers, 'all': count(shapes), 'rest': count(shapes) - layers}


@functools.cache
def _learned(
  model: decoder.DecoderConfig, rank: int, targets: str, optimizer: str
) -> tuple[int, int]:
  """Bytes of what is learned, and of the optimizer's state for it."""
  plain = dataclasses.replace(model, dtype='float32', remat='none')

  def make():
    params = decoder.init(plain, jax.random.key(0))
    if rank:
      params = lora.add(params, rank, targets.split(','), 1.0, jax.random.key(0))
    learned = lora.split(params)[0]
    made = optimizers.make(config_lib.Optimizer(kind=optimizer), 1.0)
    return learned, learner.init(params, made).opt_state

  size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  learned, state = jax.eval_shape(make)
  return size(learned), size(state)


def _bytes(config, models, machine) -> tuple[float, float]:
  """Bytes on one chip of what is learned, and of its optimizer's state."""
  adapters = (config.model.lora_rank, config.model.lora_targets)
  sizes = _learned(models.policy, *adapters, config.optimizer.kind)
  split = count_splits(config.mesh, machine.chips)[1]
  return sizes[0] / split, sizes[1] / split


def _state(config, models, machine) -> dict[str, float]:
  """What training holds all the time."""
  algorithm, split = models.algorithm, count_splits(config.mesh, machine.chips)[1]
  learned, opt_state = _bytes(config, models, machine)
  frozen = _parameters(models.policy)['all'] * _FLOAT / split
  terms = {'parameters, float32': frozen + (learned if config.model.lora_rank else 0)}
  trained = 1
  if algorithm.needs_critic and not models.shared_critic:
    terms['critic, float32'] = learned
    trained = 2
  if not config.optimizer.offload:
    terms[f'state of {config.optimizer.kind}'] = trained * opt_state
  if models.reference:
    terms['reference, float32'] = _parameters(models.reference)['all'] * _FLOAT / split
  elif algorithm.needs_reference:
    terms['reference, float32'] = learned
  if config.schedule.sync_every > 1 or config.schedule.ahead:
    terms["policy as the engine's is, float32"] = learned
  return terms


def _engine(config, model, machine) -> dict[str, float]:
  """The engine's copy of the policy, and its cache."""
  return {
    f"engine's copy, {model.dtype}": _copy(config, model, machine),
    'cache': config.engine.rows * config.engine.slots * _slot(model, config.mesh.tensor),
  }


def _copy(config, model, machine) -> float:
  """Bytes of one copy of the policy that samples, on one chip."""
  count = _parameters(model)
  size = 2 if model.dtype == 'bfloat16' else _FLOAT
  # On one chip, float32 embeddings are shared with the training's.
  shared = size == _FLOAT and machine.chips == 1 and not config.mesh.samplers
  return (count['layers'] if shared else count['all']) * size / config.mesh.tensor


def _slot(model, tensor) -> float:
  """Bytes of a slot of the cache on one chip."""
  size = 2 if model.dtype == 'bfloat16' else _FLOAT
  heads = model.num_kv_heads
  heads = heads / tensor if heads % tensor == 0 else heads
  return 2 * model.num_layers * heads * model.head_dim * size


def _playing(config, model, machine) -> dict[str, float]:
  """Temporaries of a decode or a prefill, whichever are more."""
  sizes, tensor = config.engine, config.mesh.tensor
  slot, heads = _slot(model, tensor), model.num_heads / tensor
  views = _VIEWS[model.dtype] if machine.platform == 'cpu' else 1.0
  width = min(sizes.width or sizes.rows, sizes.rows)
  # Logits, their log-probs and what is chosen of them.
  logits = 4 * width * model.vocab_size * _FLOAT / tensor
  scores = 2 * width * heads * sizes.slots * _FLOAT
  decode = {
    'decode: copy of the cache': views * width * sizes.slots * slot,
    'decode: logits and scores': logits + scores,
  }
  # Replicas that share a chip prefill at the same time.
  fed = min(sizes.feed_rows * sizes.replicas, sizes.rows)
  tokens = fed * sizes.feed_tokens
  size = 2 if model.dtype == 'bfloat16' else _FLOAT
  hidden = tokens * (2 * model.mlp_dim / tensor + 4 * model.embed_dim) * size
  prefill = {
    'prefill: copy of the cache': views * fed * sizes.slots * slot,
    'prefill: scores': 2 * tokens * heads * sizes.slots * _FLOAT,
    'prefill: activations': hidden,
  }
  return max(decode, prefill, key=lambda terms: sum(terms.values()))


def _gradient(config, models, machine) -> dict[str, float]:
  """The gradient, the sum of those before it, and the temporaries of one micro-batch."""
  learned = _bytes(config, models, machine)[0]
  temporaries = activations(
    models.policy,
    rows=max(1, config.batch.microbatch // count_splits(config.mesh, machine.chips)[0]),
    tokens=config.batch.row_tokens or config.engine.slots,
    platform=machine.platform,
    tensor=config.mesh.tensor,
    context=config.mesh.context,
    whole=machine.chips == 1,
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
  whole: bool = True,
) -> dict[str, float]:
  """Bytes that XLA allocates on a chip for one gradient, by term; an estimate.

  Args:
    model: The shape, with dtype and remat.
    rows: Of the micro-batch, on this chip (B).
    tokens: Of a row (T).
    platform: 'cpu', 'gpu' or 'tpu'.
    tensor: Chips that share a layer.
    context: Chips that share a row.
    whole: The chip has all parameters, not a part of each.
  """
  cpu = platform == 'cpu'
  # What a CPU computes in bfloat16 XLA holds in float32.
  size = 2 if model.dtype == 'bfloat16' and not cpu else _FLOAT
  D, F = model.embed_dim, model.mlp_dim / tensor
  NH = model.num_heads * model.head_dim / tensor
  KH = model.num_kv_heads * model.head_dim / tensor
  L, M = model.num_layers, rows * tokens / context
  layer = M * size * (8 * D + 5.5 * F + 3 * NH + 9 * KH)
  scores = _score_bytes(model, rows, tokens, platform, tensor * context)
  working = (_SCORES if scores > _FUSED else _SAVED_SCORES) * scores
  projected = M * size * (NH + 2 * KH + 2 * D + 2 * F)
  # Of the scanned layers of a CPU in bfloat16, some activations are saved in both types.
  both = 1.1 if cpu and model.dtype != 'float32' else 1.0
  saved = {'none': both * layer, 'dots': projected, 'full': M * size * D}[model.remat]
  saved_scores = _SAVED_SCORES * scores if model.remat == 'none' else 0.0
  terms = {}
  if cpu and L <= decoder._UNROLLED:
    # Layers that are compiled one after the other: XLA finds what is computed twice and
    # keeps it, so that `remat` changes nothing.
    terms['activations of all layers'] = L * layer
    terms['attention scores of all layers'] = L * working
    terms['vocabulary head'] = _head(model, M, platform, tensor)
    return terms
  terms['saved for the backward pass'] = L * saved
  terms['attention scores saved'] = L * saved_scores
  largest = max(_head(model, M, platform, tensor), layer + working)
  if cpu:
    terms['vocabulary head, or one layer with its scores'] = largest
    return terms
  # On TPUs the head's gradient lies there while the layers' are made.
  terms['one layer'] = layer + working
  terms['vocabulary head'] = _head(model, M, platform, tensor)
  terms = {name: _MARGIN * n for name, n in terms.items()}
  if size < _FLOAT:
    count = _parameters(model)['layers'] / tensor
    cast = _CAST * count if whole else 2 * _MARGIN * count / L
    terms[f'layers cast to {model.dtype}'] = size * cast
  return terms


def _score_bytes(model, rows, tokens, platform, split) -> float:
  """Bytes of one layer's attention scores; 0 where a kernel keeps them on the core.

  cuDNN's kernel does too, and has a mask of 2 bytes, and one more in the backward pass,
  which all heads share.
  """
  if platform == 'tpu' and tokens % attention._LANES == 0:
    return 0.0
  parts = min(attention._MAX_BLOCKS, tokens // attention._MIN_BLOCK) or 1
  causal = (parts + 1) / (2 * parts)
  queries = (rows, tokens, model.num_heads, model.head_dim)
  if platform == 'gpu' and attention._has_cudnn(
    jax.ShapeDtypeStruct(queries, model.dtype)
  ):
    return causal * rows * tokens**2 * 4
  return causal * rows * tokens**2 * model.num_heads / split * _FLOAT


def _head(model, M, platform, tensor) -> float:
  """Bytes of the vocabulary head: blocks of logits, its kernel, the kernel's gradient."""
  DV = model.embed_dim * model.vocab_size / tensor
  if platform == 'cpu':
    block = min(256, M)
    kernels = (2 if model.tie_embeddings else 1) + (
      1.2 if model.dtype != 'float32' else 0
    )
    return _FLOAT * (kernels * DV + 1.6 * block * model.vocab_size)
  block = min(max(256, head._BLOCK_LOGITS // model.vocab_size), M)
  size = 2 if model.dtype == 'bfloat16' else 0
  return (_FLOAT + size) * DV + _FLOAT * block * model.vocab_size / tensor


def _update(config, models, machine) -> dict[str, float]:
  """The gradient, and what the optimizer's step takes beside it."""
  learned, opt_state = _bytes(config, models, machine)
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


def _checkpoint(config, models, machine, gradient) -> dict[str, float]:
  """On a CPU: the copy that is written, and what a gradient left of the heap."""
  learned, opt_state = _bytes(config, models, machine)
  algorithm = models.algorithm
  trained = 2 if algorithm.needs_critic and not models.shared_critic else 1
  return {
    'copy for the checkpoint': trained * (learned + opt_state),
    'freed by gradients, in pieces': _GRADIENT_GAPS * sum(gradient.values()),
  }


def suggest_changes(
  config: config_lib.Config, models: Models, machine: Machine
) -> tuple[dict[str, object], bool]:
  """Fields to change so that the run fits, one after the other; and whether it then does.

  Changes that it then fits without are not named.
  """
  groups = count_splits(config.mesh, machine.chips)[0]
  candidates: list[tuple[str, object]] = []
  if models.algorithm is not None:
    halves = [config.batch.microbatch >> i for i in range(1, 16)]
    candidates += [
      ('batch.microbatch', n) for n in halves if n >= groups and n % groups == 0
    ]
    candidates += [('model.remat', 'full'), ('optimizer.kind', 'adamw8')]
    candidates += [('optimizer.offload', True)] if machine.platform != 'cpu' else []
  rows = _halves('engine.rows', config.engine.rows, 1)
  candidates += [change for change in rows if change[1] % config.engine.replicas == 0]
  candidates += _halves('engine.slots', config.engine.slots, 256)
  if models.algorithm is not None:
    candidates += [('batch.microbatch', groups), ('model.lora_rank', 16)]

  def peak(changes: dict[str, object]) -> float:
    other = fields.replace(config, changes)
    if 'engine.slots' in changes:
      other.batch.row_tokens = other.engine.slots
    policy = dataclasses.replace(models.policy, remat=other.model.remat)
    return estimate(other, models._replace(policy=policy), machine).peak

  found: dict[str, object] = {}
  for name, value in candidates:
    if peak(found) > machine.memory and peak(found | {name: value}) < peak(found):
      found[name] = value
  enough = peak(found) <= machine.memory
  for name in list(found):
    fewer = {key: value for key, value in found.items() if key != name}
    if enough and peak(fewer) <= machine.memory:
      found = fewer
  return found, enough


def _halves(name: str, value: int, least: int) -> list[tuple[str, int]]:
  return [(name, n) for i in range(1, 16) if (n := value >> i) >= least]
