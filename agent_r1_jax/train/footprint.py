"""What a run holds in the memory of one chip: counted from shapes, and compiled.

Nothing is loaded or computed. Parameters, optimizer states and the cache are counted from
the shapes of the run's own objects. The temporaries of a program are what the compiler
says (`memory_analysis`), and the run finds the program compiled when it calls it.

Letters: B rows, T tokens of a row, M = B · T, the others as in models/decoder.py.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import active_request, automaton_guide
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.engine import sizes as sizes_lib
from agent_r1_jax.host import processes
from agent_r1_jax.models import decoder, head, lora, sampling_params, sharding
from agent_r1_jax.rl import algorithms, credit, learner, optimizers, packing, train_state
from agent_r1_jax.rl import table as table_lib

# Bytes of the process itself on a CPU: Python, the libraries, XLA and what it compiled;
# the engine's programs have the code of each layer.
_PROCESS, _LAYER_CODE = 0.8e9, 1.2e7
_COPY = "engine's copy"


class Machine(NamedTuple):
  """The devices of a run."""

  platform: str  # 'cpu', 'gpu' or 'tpu'.
  memory: float  # Bytes on each chip.
  chips: int = 1  # How many chips train, over all processes.
  engines: int = 1  # How many engines sample, over all processes.
  cores: int = 1  # Processor cores for each engine.


class Models(NamedTuple):
  """The models of a run, as they are before training."""

  policy: decoder.DecoderConfig  # The policy's shape, with the run's dtype.
  algorithm: algorithms.Algorithm | None = None  # None if the policy only plays.
  # The shape of a reference policy that has a directory of its own.
  reference: decoder.DecoderConfig | None = None
  shared_critic: bool = False  # Whether the policy's directory has a value head.


# Takes 'gradient', 'sampling' or 'update', and returns the bytes of its temporaries on a
# chip if the run has these sizes.
Ask = Callable[[str, config_lib.Config], float]


def count(
  config: config_lib.Config, models: Models, machine: Machine
) -> dict[str, float]:
  """Counts the bytes on one chip of what a run holds, whatever its sizes.

  'learned' is what one gradient takes, and 'checkpoint' what a checkpoint does.
  """
  # Of the optimizer, only the kind matters here; another check looks at the rest.
  optimizer = config_lib.Optimizer(kind=config.optimizer.kind)
  config = dataclasses.replace(config, optimizer=optimizer)
  shapes, copy = jax.eval_shape(functools.partial(_make_state, config, models, machine))
  axes = config.mesh.axes(machine.chips)
  one = dict.fromkeys(axes, 1) | {'tensor': axes['tensor']}
  mesh, replica = (
    AbstractMesh(tuple(sizes.values()), tuple(sizes)) for sizes in (axes, one)
  )
  parts = {name: _on_chip(tree, mesh) for name, tree in shapes.items()}
  return parts | {_COPY: _on_chip(copy, replica)}


def _on_chip(tree: Any, mesh: Any) -> float:
  size = lambda x, at: math.prod(at.shard_shape(x.shape)) * x.dtype.itemsize
  sizes = jax.tree.map(size, tree, sharding.make_shardings(tree, mesh))
  return float(sum(jax.tree.leaves(sizes)))


def _make_state(config, models, machine) -> tuple[dict[str, Any], Any]:
  """Makes the parts that a run holds, and the engine's copy; only for jax.eval_shape."""
  params, copy = _make_params(config, models), _make_copy(models)
  if models.policy.dtype == 'float32' and machine.chips == 1 and not config.mesh.samplers:
    copy = {'layers': copy['layers']}  # The rest is shared with the training's.
  parts: dict[str, Any] = {'parameters, float32': params}
  if not models.algorithm:
    return parts, copy
  update_config, learned = make_update_config(config, models), lora.split(params)[0]
  reference = models.reference and decoder.init(models.reference, jax.random.key(0))
  state = train_state.init(params, update_config, reference)
  # What is not learned is shared with the policy.
  if 'critic' in state.states:
    parts['critic, float32'] = lora.split(state.states['critic'].params)[0]
  opt_states = [model.opt_state for model in state.states.values()]
  parts[f'state of {config.optimizer.kind}'] = opt_states
  if state.reference:
    parts['reference, float32'] = reference or learned
  if update_config.keeps_old_sampler:
    parts["policy as the engine's is, float32"] = learned
  others = {'learned': learned, 'checkpoint': state.checkpoint_arrays(update_config)}
  return parts | others, copy


def _make_params(config, models: Models) -> decoder.Params:
  params = decoder.init(models.policy, jax.random.key(0))
  if models.shared_critic:
    params = decoder.add_value_head(params)
  if models.algorithm and (rank := config.model.lora_rank):
    targets, alpha = config.model.adapter_targets, config.model.lora_alpha
    params = lora.add(params, rank, targets, alpha, jax.random.key(0))
  return params


def _make_copy(models: Models) -> decoder.Params:
  params = _make_params(config_lib.Config(), models)
  return sampling_params.unstack(params, models.policy)


def make_update_config(
  config: config_lib.Config, models: Models
) -> train_state.UpdateConfig:
  """Makes the constants of a run's updates, without a reference of another shape."""
  algorithm, optimizer = models.algorithm, config.optimizer
  assert algorithm is not None
  made = {'policy': optimizers.make(optimizer, optimizer.learning_rate)}
  if algorithm.needs_critic and not models.shared_critic:
    made['critic'] = optimizers.make(optimizer, optimizer.critic_learning_rate)
  return train_state.UpdateConfig(
    dataclasses.replace(models.policy, remat=config.model.remat or 'none'),
    algorithm,
    packing.MicrobatchShape(config.batch.microbatch, config.batch.row_tokens),
    made,
    config.schedule,
    temperature=config.sampling.temperature,
  )


class Footprint:
  """Estimates what a run of given sizes holds on one chip, in bytes.

  Attributes:
    missing: The programs that were asked for when there was no time left to compile.
  """

  def __init__(
    self, config: config_lib.Config, models: Models, machine: Machine, seconds: float
  ):
    """Counts what all sizes share. No compilation begins after `seconds` of them."""
    self.models, self.machine, self.missing = models, machine, set[str]()
    self._parts, self._left = count(config, models, machine), seconds
    self._known: dict[tuple[str, str, int, int], float] = {}

  def phases(
    self, config: config_lib.Config, ask: Ask
  ) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the phases of a step, and the parts that each holds.

    `ask` is `compile`, `least` or `bound`. With mesh.samplers the rollout's parts are on
    a chip that samples, and the others' on a chip that trains.
    """
    c, schedule, state = self.models.policy, config.schedule, dict(self._parts)
    cpu = self.machine.platform == 'cpu'
    code = _PROCESS + _LAYER_CODE * c.num_layers
    process = {'the process itself': code} if cpu else {}
    copy, learned = state.pop(_COPY), state.pop('learned', 0.0)
    written = {'copy for the checkpoint': state.pop('checkpoint', 0.0)}
    engine = {f'{_COPY}, {c.dtype}': copy, 'cache': _count_cache(config, c)}
    sampling = lambda: {'temporaries of sampling': ask('sampling', config)}
    if not self.models.algorithm:
      yield 'rollout', process | engine | state | sampling()
      return
    moments, offloaded = f'state of {config.optimizer.kind}', {}
    if config.optimizer.offload:
      offloaded = {moments: state.pop(moments)}
    plays = trains = process | engine | state
    if config.mesh.samplers:
      plays, trains = process | engine, process | state
    elif schedule.ahead:  # Rollouts are played while updates are computed.
      trains = trains | sampling()
    gradient = {'gradient, float32': learned}
    sums = {'sum of the gradients before it': learned}
    sums['temporaries of the gradient'] = ask('gradient', config)
    yield 'gradient', trains | gradient | sums
    if schedule.ahead and schedule.eval_every:
      # Rollouts under way keep their policy while another one is evaluated.
      plays = plays | {"evaluation's copy of the policy": copy}
    yield 'rollout', plays | sampling()
    update = gradient | offloaded | {'temporaries of the update': ask('update', config)}
    yield 'update', trains | update
    if cpu:
      yield 'checkpoint', trains | written

  def largest(
    self, config: config_lib.Config, ask: Ask
  ) -> tuple[float, str, dict[str, float]]:
    """Returns the bytes of the phase that holds most, its name and its parts."""
    phases = self.phases(config, ask)
    return max((sum(parts.values()), name, parts) for name, parts in phases)

  def compile(self, program: str, config: config_lib.Config) -> float:
    """Returns the temporaries of a program, compiled.

    If no time is left it is scaled from other sizes: of the same remat, or else of any,
    which is too much for 'full'. For a decode that nothing is known of it is a copy of
    the cache.
    """
    key = _key(program, config)
    if key not in self._known and self._left <= 0:
      self.missing.add(program)
      copied = _count_cache(config, self.models.policy)
      known = self.least(program, config) or self._scale(program, config)
      return known or copied * (program == 'sampling')
    if key not in self._known:
      begin = time.monotonic()
      try:
        size = _compile(program, config, self.models)
      except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
          raise
        size = math.inf  # A TPU's compiler refuses what does not fit.
      # All processes have to choose the same sizes.
      shares = processes.gather([size, time.monotonic() - begin])
      self._known[key] = max(share[0] for share in shares)
      self._left -= max(share[1] for share in shares)
    return self._known[key]

  def least(self, program: str, config: config_lib.Config) -> float:
    """Returns no more than the temporaries, as far as other sizes were compiled.

    A part of them grows with the rows, and at most with the square of the tokens.
    """
    key = _key(program, config)
    if key in self._known:
      return self._known[key]
    return self._scale(program, config, key[1])

  def _scale(
    self, program: str, config: config_lib.Config, kind: str | None = None
  ) -> float:
    """Scales what other sizes take, of one kind of program or of all; 0 if none is."""
    name, _, rows, tokens = _key(program, config)
    return max(
      (
        size * min(1, rows / r) * min(1, tokens / t) ** 2
        for (n, k, r, t), size in self._known.items()
        if n == name and kind in (None, k) and math.isfinite(size)
      ),
      default=0.0,
    )

  def bound(self, program: str, config: config_lib.Config) -> float:
    """Returns more than the temporaries: nothing is fused, split or freed."""
    c, sizes = self.models.policy, config.engine
    D, F, V, N = c.embed_dim, c.mlp_dim, c.vocab_size, c.num_heads
    token = 10 * D + 6 * F + 16 * N * c.head_dim
    if program == 'gradient':
      groups = config.mesh.count_groups(self.machine.chips)
      B, T = config.batch.microbatch / groups, _row_tokens(config)
      logits = min(B * T, head.block_tokens(V)) * V
      layer = B * T * token + 4 * B * N * T**2
      return 4 * (c.num_layers * layer + 4 * D * V + 4 * logits)
    if program == 'sampling':
      prefilled = sizes.prefill_rows * sizes.replicas * sizes.prefill_tokens
      scores = (sizes.rows + prefilled) * N * sizes.slots
      cache = c.num_layers * c.num_kv_heads * c.head_dim * sizes.rows * sizes.slots
      return 4 * (12 * cache + 4 * scores + 8 * sizes.rows * V + prefilled * token)
    return 8 * self._parts['learned']


def _count_cache(config: config_lib.Config, c: decoder.DecoderConfig) -> float:
  tensor = config.mesh.tensor
  heads = c.num_kv_heads / (tensor if c.num_kv_heads % tensor == 0 else 1)
  slots = config.engine.rows * config.engine.slots
  return 2 * c.num_layers * slots * heads * c.head_dim * jnp.dtype(c.dtype).itemsize


def _row_tokens(config: config_lib.Config) -> int:
  return config.batch.row_tokens or config.engine.slots


def _key(program: str, config: config_lib.Config) -> tuple[str, str, int, int]:
  """Returns a program's name, its kind, its rows and its tokens."""
  if program == 'gradient':
    return program, config.model.remat, config.batch.microbatch, _row_tokens(config)
  if program == 'sampling':
    return program, '', config.engine.rows, config.engine.slots
  return program, '', 1, 1


def make_mesh(config: config_lib.Mesh) -> tuple[Any, list[Any]]:
  """Returns the mesh that trains, None for one chip; and this process's samplers.

  Raises:
    ValueError: The axes do not multiply to the number of chips.
  """
  devices, samplers = sharding.split_devices(config.samplers)
  axes = config.axes(len(devices))
  if len(devices) == math.prod(axes.values()) == 1 and not samplers:
    return None, []
  return sharding.make_mesh(**axes, devices=devices), samplers


def _compile(program: str, config: config_lib.Config, models: Models) -> float:
  """Compiles a program from shapes; returns the bytes of its temporaries on one chip."""
  mesh, samplers = make_mesh(config.mesh)
  if program == 'sampling':
    replica = sharding.make_replica_meshes(mesh, samplers)[0] if mesh else None
    with sharding.use_mesh(replica):
      programs = _lower_sampling(config, models, replica)
      return max(map(_temporaries, programs)) * config.engine.replicas
  params = _place(jax.eval_shape(functools.partial(_make_params, config, models)), mesh)
  update_config = make_update_config(config, models)
  with sharding.use_mesh(mesh):
    if program == 'gradient':
      options = {'config': update_config.model, 'temperature': update_config.temperature}
      loss, batch = update_config.objectives['policy'], _make_batch(config, update_config)
      batch = _place(batch, mesh, mesh and sharding.batch_sharding(mesh))
      return _temporaries(learner._gradient.lower(params, batch, loss=loss, **options))
    optimizer, learned = update_config.optimizers['policy'], lora.split(params)[0]
    state: Any = jax.eval_shape(lambda p: learner.init(p, optimizer), params)
    state = _place(state._replace(params=learned), mesh)
    return _temporaries(learner._apply.lower(state, learned, optimizer=optimizer))


def _temporaries(lowered: Any) -> float:
  return float(lowered.compile().memory_analysis().temp_size_in_bytes)


def _place(tree: Any, mesh: Any, where: Any = None) -> Any:
  """Returns the shapes of a tree as they lie on a mesh, or all as `where` says."""
  if mesh is None:
    return tree
  struct = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
  if where is not None:
    return jax.tree.map(lambda x: struct(x, where), tree)
  return jax.tree.map(struct, tree, sharding.make_shardings(tree, mesh))


def _make_batch(
  config: config_lib.Config, update_config: train_state.UpdateConfig
) -> types.Batch:
  """Makes a micro-batch of one episode, with the columns that the algorithm needs."""
  one, algorithm = np.ones(1), update_config.algorithm
  text = types.Segment(np.ones(1, np.int32), np.ones(1, bool), one)
  columns: dict[str, Any] = {'advantages': one}
  if algorithm.needs_reference:
    columns['ref_logprobs'] = one
  if algorithm.needs_critic:
    columns |= {'values': one, 'returns': one}
  if algorithm.correction:
    columns['correction'] = one
  table = dataclasses.replace(table_lib.from_segments([text]), **columns)
  shape = packing.MicrobatchShape(config.batch.microbatch, _row_tokens(config))
  options = {'shape': shape, 'shared_critic': update_config.shared_critic}
  return credit.make_minibatch(table, [0], algorithm, **options)[0][0]


def _lower_sampling(config: config_lib.Config, models: Models, mesh: Any) -> list[Any]:
  """Lowers a replica's largest decode and prefill, on the mesh that is set."""
  model = models.policy
  options: Any = dataclasses.asdict(config.engine) | {
    'width': config.engine.width or None
  }
  sizes = sizes_lib.make(model, **options)
  params = _place(jax.eval_shape(functools.partial(_make_copy, models)), mesh)
  cache: Any = jax.eval_shape(lambda: decoder.empty_cache(model, sizes.rows, sizes.slots))
  if mesh is not None:
    split = model.num_kv_heads % mesh.shape['tensor'] == 0
    spec = PartitionSpec(None, 'tensor') if split else PartitionSpec()
    cache = _place(cache, mesh, NamedSharding(mesh, spec))
  guides = (automaton_guide.AUTOMATA, guide_lib.TRUNCATION)
  pool = automaton_guide.AutomatonPool(model.vocab_size)
  rows, bucket = sizes.decode_rows[-1], sizes.decode_buckets[-1]
  decode = programs_lib.decode.lower(
    params,
    cache,
    active_request.make_decode_batch({}, rows, guides, sizes.rows),
    (automaton_guide.make_tables(pool.entries), None),
    config=model,
    guides=guides,
    steps=sizes.decode_steps,
    bucket=bucket,
    in_place=sizes.decodes_in_place(rows, bucket),
  )
  zeros = np.zeros(sizes.prefill_rows[-1], np.int32)
  tokens = np.zeros((len(zeros), sizes.prefill_tokens), np.int32)
  prefill = programs_lib.prefill.lower(
    *(params, cache, zeros, zeros, tokens, zeros), config=model, bucket=sizes.buckets[-1]
  )
  return [decode, prefill]
