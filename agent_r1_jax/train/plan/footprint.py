"""The memory that a run needs on one chip, from shapes and compiled programs.

Nothing is loaded or computed. Parameters, optimizer states and the cache are shapes of
the run's own objects (first_state.py). The temporaries of a program come from the
compiler's `memory_analysis`; the run later finds the program already compiled.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
import time
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from agent_r1_jax import config as config_lib
from agent_r1_jax.engine import drafts
from agent_r1_jax.engine import sizes as sizes_lib
from agent_r1_jax.host import processes
from agent_r1_jax.models import (
  decoder,
  engine_params,
  four_bits,
  head,
  kv_cache,
  lora,
  quantization,
  sharding,
)
from agent_r1_jax.rl import algorithms, packing, train_state
from agent_r1_jax.train.plan import first_state, lowering, setup

# Bytes of the process itself on a CPU: Python, libraries, XLA and compiled programs; the
# engine's programs contain the code of each layer.
_PROCESS, _LAYER_CODE = 0.8e9, 1.2e7
_PROGRAMS = ('the gradient', 'sampling', 'the update')
# If a run fits this share of the memory with the bound of its temporaries, nothing is
# compiled to choose its sizes.
_OBVIOUS = 0.5


class RunSizes(NamedTuple):
  """The chosen sizes of a run's programs, and its rematerialisation."""

  engine: config_lib.Engine
  batch: config_lib.Batch
  remat: str = 'none'  # As config.Model.remat.

  @classmethod
  def of(cls, config: config_lib.Config) -> 'RunSizes':
    """Returns the sizes of a configuration that has all of them."""
    return cls(config.engine, config.batch, config.model.remat or 'none')


class Machine(NamedTuple):
  """The devices of a run."""

  platform: str  # 'cpu', 'gpu' or 'tpu'.
  memory: float  # Bytes on each chip.
  chips: int = 1  # Number of training chips, over all processes.
  engines: int = 1  # Number of sampling engines, over all processes.
  cores: int = 1  # CPU cores per engine.
  # Target chips of ahead-of-time compilation, and the chips of one engine among them.
  absent: tuple[Any, ...] = ()
  absent_engine: tuple[Any, ...] = ()


class ModelShapes(NamedTuple):
  """The models of a run before training."""

  policy: decoder.DecoderConfig  # The policy's shape, with the run's dtype.
  algorithm: algorithms.Algorithm | None = None  # None if the policy only plays.
  # The shape of a reference policy with its own directory.
  reference: decoder.DecoderConfig | None = None
  shared_critic: bool = False  # Whether the policy's directory has a value head.


class Peak(NamedTuple):
  """The phase of a step that needs the most memory.

  Attributes:
    phase: The phase's name.
    parts: The bytes of each part, by name.
    is_bound: Whether the run fits with the temporaries' bound, so nothing was compiled.
  """

  phase: str
  parts: dict[str, float]
  is_bound: bool = False

  @property
  def bytes(self) -> float:
    """The bytes of all parts."""
    return sum(self.parts.values())


# Jitted, so that several footprints of one model trace its parameters once.
_init = jax.jit(decoder.init, static_argnums=0)


class Footprint:
  """The bytes that a run needs on one chip, as a function of its sizes.

  Attributes:
    parts: The bytes that do not depend on sizes, by name. 'copy' is the engine's copy of
      the policy, 'learned' one gradient, 'checkpoint' a checkpoint's copy.
    missing: The programs that were not compiled for lack of time.
  """

  def __init__(
    self,
    config: config_lib.Config,
    models: ModelShapes,
    machine: Machine,
    seconds: float = 0.0,
  ):
    """Counts the fixed parts. No compilation starts after `seconds` of compilations."""
    self._mesh, self._schedule = config.mesh, config.schedule
    self._optimizer = config.optimizer
    self.models, self.machine, self.missing = models, machine, set[str]()
    self._left, self._known = seconds, dict[tuple[str, str, int, int], float]()
    self._update_config: train_state.UpdateConfig | None = None
    self._frozen = config.model.frozen
    if not models.algorithm and self._frozen != four_bits.FORMAT:
      self._frozen = 'float32'  # A policy that only plays has no adapters.
    made = jax.eval_shape(functools.partial(self._make, config))
    self._params, self._copy, parts = made
    axes = config.mesh.axes(machine.chips)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    one = dict.fromkeys(axes, 1) | {'tensor': axes['tensor']}
    replica = AbstractMesh(tuple(one.values()), tuple(one))
    self.parts = {name: _on_chip(tree, mesh) for name, tree in parts.items()}
    copy = self._copy
    shares = models.policy.dtype == 'float32' or self._frozen != 'float32'
    if shares and machine.chips == 1 and not config.mesh.samplers:
      copy = {'layers': copy['layers']}  # Other leaves are shared with training.
    self.parts['copy'] = _on_chip(copy, replica)

  def _make(self, config: config_lib.Config):
    """Makes the parameters, the engine's copy and the parts; only for jax.eval_shape."""
    models = self.models
    params = _init(models.policy, jax.random.key(0))
    if models.shared_critic:
      params = decoder.add_value_head(params)
    if self._frozen != 'float32':
      params = quantization.freeze(params, models.policy, self._frozen)
    copy = lambda p: engine_params.unstack(p, models.policy, config.engine.weights)
    if not models.algorithm:
      plain = {f'parameters, {self._frozen}': params, 'learned': (), 'checkpoint': ()}
      return params, copy(params), plain
    # Only the optimizer's kind matters here; another check covers its other fields.
    kind = config.optimizer.kind
    config = dataclasses.replace(config, optimizer=config_lib.Optimizer(kind=kind))
    reference = None
    if shape := models.reference:
      reference = shape, _init(shape, jax.random.key(0))
    update_config, state = first_state.make(
      config,
      models.policy,
      params,
      models.algorithm,
      reference=reference,
    )
    self._update_config = update_config
    params = state.states['policy'].params
    learned = lora.split(params)[0]
    opt_states = [model.opt_state for model in state.states.values()]
    parts: dict[str, Any] = {
      f'parameters, {self._frozen}': params,
      f'state of {kind}': opt_states,
    }
    # Frozen parameters are shared with the policy.
    if 'critic' in state.states:
      parts['critic, float32'] = lora.split(state.states['critic'].params)[0]
    if state.reference:
      parts['reference, float32'] = reference[1] if reference else learned
    if update_config.keeps_old_sampler:
      parts["policy as the engine's is, float32"] = learned
    others = {'learned': learned, 'checkpoint': state.checkpoint_arrays(update_config)}
    return params, copy(params), parts | others

  def measure(self, sizes: RunSizes, memory: float) -> Peak:
    """Returns the phase of a step that needs the most memory with these sizes.

    Compiles only programs that can decide whether the run fits `memory` bytes; others
    count as 0. If time runs out, temporaries are scaled from other sizes.
    """
    temporaries: dict[str, float] = {}
    find_peak = lambda: max(
      (Peak(*phase) for phase in self.list_phases(sizes, temporaries).items()),
      key=lambda peak: peak.bytes,
    )
    bound = {'temporaries, at most': self.bound(sizes)}
    peak = find_peak()
    if peak.bytes + sum(bound.values()) <= _OBVIOUS * self.machine.memory:
      return Peak(peak.phase, peak.parts | bound, is_bound=True)
    for program in _PROGRAMS if self.models.algorithm else ['sampling']:
      if peak.bytes <= memory:
        temporaries[program] = self._compile(program, sizes)
        peak = find_peak()
    return peak

  def list_phases(
    self, sizes: RunSizes, temporaries: Mapping[str, float]
  ) -> dict[str, dict[str, float]]:
    """Returns the parts in memory in each phase of a step.

    With mesh.samplers, the rollout's parts are on a sampling chip and all others on a
    training chip.
    """
    c, schedule, state = self.models.policy, self._schedule, dict(self.parts)
    copy, learned = state.pop('copy'), state.pop('learned')
    written = {'copy for the checkpoint': state.pop('checkpoint')}
    takes = lambda program: {f'temporaries of {program}': temporaries.get(program, 0.0)}
    cpu = self.machine.platform == 'cpu'
    code = _PROCESS + _LAYER_CODE * c.num_layers
    process = {'the process itself': code} if cpu else {}
    numbers = sizes.engine.weights if sizes.engine.rounds_weights else c.dtype
    if self._frozen != 'float32' and sizes.engine.weights != four_bits.UNPACKED:
      numbers = self._frozen
    engine = {
      f"engine's copy, {numbers}": copy,
      'cache': _count_cache(sizes.engine, self._mesh.tensor, c),
    }
    if not self.models.algorithm:
      return {'rollout': process | engine | state | takes('sampling')}
    moments, offloaded = f'state of {self._optimizer.kind}', {}
    if self._optimizer.offload:
      offloaded = {moments: state.pop(moments)}
    plays = trains = process | engine | state
    if self._mesh.samplers:
      plays, trains = process | engine, process | state
    elif schedule.ahead:  # Rollouts are played during updates.
      trains = trains | takes('sampling')
    if schedule.ahead and schedule.eval_every:
      # Rollouts under way keep their policy while a newer policy is evaluated.
      plays = plays | {"evaluation's copy of the policy": copy}
    gradient = {'gradient, float32': learned}
    sums = gradient | {'sum of the gradients before it': learned}
    phases = {
      'gradient': trains | sums | takes('the gradient'),
      'rollout': plays | takes('sampling'),
      'update': trains | gradient | offloaded | takes('the update'),
    }
    return phases | ({'checkpoint': trains | written} if cpu else {})

  def bound(self, sizes: RunSizes) -> float:
    """Returns an upper bound of any program's temporaries, without fusion or freeing.

    M tokens are computed at a time, each over S slots; other letters as in
    models/decoder.py.
    """
    c, engine, batch = self.models.policy, sizes.engine, sizes.batch
    D, F, V, N = c.embed_dim, c.mlp_dim, c.vocab_size, c.num_heads
    F, H = F * (2 if c.wide_mlp else 1), max(c.head_dim, c.full_head_dim)
    prefilled = engine.prefill_rows * engine.replicas * engine.prefill_tokens
    learned = batch.microbatch / self._mesh.count_groups(self.machine.chips)
    learned *= batch.row_tokens if self.models.algorithm else 0
    M, S = max(learned, engine.rows + prefilled), max(engine.slots, batch.row_tokens)
    layer = M * (10 * D + 6 * F + 16 * N * H + 4 * N * S)
    cache = 12 * max(c.num_kv_heads, c.full_kv_heads) * H * engine.rows * engine.slots
    logits = 4 * D * V + (8 * engine.rows + 4 * min(M, head.block_tokens(V))) * V
    return 4 * (c.num_layers * (layer + cache) + logits) + 8 * self.parts['learned']

  def _compile(self, program: str, sizes: RunSizes) -> float:
    """Returns the temporaries of a program, compiled if there is time.

    Otherwise they are scaled from the largest of other sizes, or 0 if none is known.
    """
    _, _, rows, tokens = key = _key(program, sizes)
    if key not in self._known and self._left <= 0:
      self.missing.add(program)
      scale = lambda r, t: min(1, rows / r) * min(1, tokens / t)
      known = [(n, k) for k, n in self._known.items() if k[0] == program and n < math.inf]
      return max((size * scale(*k[2:]) for size, k in known), default=0.0)
    if key not in self._known:
      begin = time.monotonic()
      try:
        size = max(_count_temporaries(lowered) for lowered in self.lower(program, sizes))
      except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
          raise
        size = math.inf  # The TPU compiler fails if a program does not fit.
      size *= sizes.engine.replicas if program == 'sampling' else 1
      # All processes must choose the same sizes.
      shares = processes.gather([size, time.monotonic() - begin])
      self._known[key] = max(share[0] for share in shares)
      self._left -= max(share[1] for share in shares)
    return self._known[key]

  def lower(self, program: str, sizes: RunSizes) -> list[Any]:
    """Lowers a program from shapes, on the mesh of the run."""
    mesh, samplers = setup.split_chips(self._mesh, self.machine.absent)
    if program == 'sampling':
      if chips := self.machine.absent_engine:
        mesh = sharding.make_mesh(tensor=len(chips), devices=chips)
      elif mesh:
        mesh = sharding.make_replica_meshes(mesh, samplers)[0]
    with sharding.use_mesh(mesh):
      if program == 'sampling':
        return lowering.lower_sampling(sizes.engine, self.models.policy, self._copy, mesh)
      if program == 'the update':
        return [lowering.lower_update(self._optimizer, self._params, mesh)]
      assert self._update_config
      model = dataclasses.replace(self.models.policy, remat=sizes.remat)
      batch = sizes.batch
      trees = self._update_config.shape.trees
      shape = packing.MicrobatchShape(batch.microbatch, batch.row_tokens, trees)
      changes: Any = {'model': model, 'shape': shape}
      update_config = dataclasses.replace(self._update_config, **changes)
      return [lowering.lower_gradient(update_config, self._params, batch.replay, mesh)]


def _on_chip(tree: Any, mesh: AbstractMesh) -> float:
  size = lambda x, at: math.prod(at.shard_shape(x.shape)) * x.dtype.itemsize
  sizes = jax.tree.map(size, tree, sharding.make_shardings(tree, mesh))
  return float(sum(jax.tree.leaves(sizes)))


def _count_cache(
  engine: config_lib.Engine, tensor: int, c: decoder.DecoderConfig
) -> float:
  most = max(engine.prefill_tokens, drafts.count_most(engine.decode_steps, engine.drafts))
  ring = sizes_lib.count_window_slots(c, engine.slots, most)
  shape = c, engine.rows, engine.slots, engine.cache, ring
  make = functools.partial(kv_cache.empty, *shape)
  split = lambda heads: tensor if heads % tensor == 0 else 1
  arrays = jax.tree.leaves(jax.eval_shape(make))
  return sum(x.size * x.dtype.itemsize / split(x.shape[1]) for x in arrays)


def _key(program: str, sizes: RunSizes) -> tuple[str, str, int, int]:
  """Returns a program's name, its kind, its rows and its tokens."""
  if program == 'the gradient':
    return program, sizes.remat, sizes.batch.microbatch, sizes.batch.row_tokens
  if program == 'sampling':
    return program, '', sizes.engine.rows, sizes.engine.slots
  return program, '', 1, 1


def _count_temporaries(lowered: Any) -> float:
  return float(lowered.compile().memory_analysis().temp_size_in_bytes)
