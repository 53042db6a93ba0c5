"""The engine: samples replies for many clients at once, from one or several policies.

Clients are coroutines in the engine's own event loop: episodes of a rollout, an
evaluation, a search, a server's handlers. protocol.py has their interface.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import itertools
from typing import Any

from jax.sharding import Mesh

from agent_r1_jax import types
from agent_r1_jax.engine import adapters as adapters_lib
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import protocol
from agent_r1_jax.engine import replica as replica_lib
from agent_r1_jax.engine import sizes as sizes_lib
from agent_r1_jax.models import decoder, engine_params, lora, quantization, sharding
from agent_r1_jax.models import ops as ops_lib


class Engine(protocol.AnyEngine):
  """The replicas of a policy, each with a cache on its chips.

  Attributes:
    weights: The format of the sampling kernels.
    sizes: The sizes of the compiled programs.
    adapters: The named adapters; use its `set` and `remove`.
  """

  replicas: Sequence[replica_lib.Replica]

  def __init__(
    self,
    config: decoder.DecoderConfig,
    params: decoder.Params,
    *,
    guides: Mapping[guide_lib.Guide, Any] | None = None,
    mesh: Mesh | None = None,
    chips: Sequence[Any] = (),
    replicas: int = 1,
    adapters: int = 0,
    adapter_rank: int = 16,
    weights: str = 'model',
    **sizes: Any,
  ):
    """Allocates the cache.

    Args:
      config: The policy's shape.
      params: Parameters of the policy. Adapters in them are merged into the kernels,
        unless the kernels have 8 bits.
      guides: Additional guides that requests may use, with their parameters.
      mesh: The mesh of `params`. Each of this process's chips has a replica, or `tensor`
        chips share one. None: one replica on JAX's default device.
      chips: Chips of this process that sample instead of the mesh's.
      replicas: Number of replicas per chip.
      adapters: Maximum number of named adapters. If not 0, `params` must be the base
        model's alone.
      adapter_rank: Maximum rank of a named adapter; every slot takes memory for it.
      weights: 'model', 'unpacked', or the 8-bit format that kernels are rounded to for
        sampling; see engine_params.unstack.
      **sizes: rows, slots and the other sizes of sizes.make.

    Raises:
      ValueError: A size is too small, or does not fit the number of replicas; the kernels
        cannot have 8 bits; `params` have adapters and named ones are allowed too; or
        config.ops does not support the options.
    """
    quantization.check(weights, config, 'weights')
    ops_lib.choose(config).check(
      config,
      params,
      chips=1 if mesh is None else mesh.size,
      adapters=adapters,
      weights=weights,
      cache=sizes.get('cache', 'model'),
    )
    if replicas > 1 and mesh is not None and mesh.shape['tensor'] > 1:
      # The collectives of the replicas would deadlock.
      raise ValueError(f'replicas is {replicas}: with tensor > 1 it must be 1.')
    with sharding.use_mesh(mesh):
      self.sizes = sizes_lib.make(config, replicas=replicas, **sizes)
    self.weights, stats = weights, protocol.Stats()
    self._meshes = [None] if mesh is None else sharding.make_replica_meshes(mesh, chips)
    self.adapters = adapters_lib.AdapterTable(
      config, adapters, adapter_rank, self._meshes
    )
    self._check(params)
    shared = self.sizes, guides or {}, stats, self.adapters
    own = [
      replica_lib.Replica(config, *shared, part, number)
      for number, part in enumerate(self._meshes)
      for _ in range(replicas)
    ]
    super().__init__(config, mesh, own, stats)
    # The engine's parameters, and the ones that the replicas' policy was made from.
    self._params, self._step = params, 0
    self._synced: decoder.Params | None = None
    self._versions = itertools.count()

  @contextlib.contextmanager
  def open(self) -> Iterator[None]:
    """Syncs the parameters to the replicas, then opens; see AnyEngine.open."""
    if not self._loop:
      self._sync()
    with super().open():
      yield

  def sync_weights(self, params: decoder.Params, policy_step: int):
    """Replaces the engine's policy, even while replies are sampled; from any thread.

    Existing sequences keep their cached keys and values; new sequences do not share them.
    While requests are active, two copies of the policy are in memory.
    """
    self._params, self._step = params, policy_step
    self._sync()

  def make_policy(self, params: decoder.Params, policy_step: int) -> protocol.Policy:
    """Makes a policy that requests can name; it is freed with the last such request.

    Copies nothing if `params` are the parameters of the engine's current policy.
    """
    synced = self.replicas[0].policy
    if params is self._synced and synced is not None:
      return protocol.Policy(synced.copies, policy_step, synced.version)
    copies = self._copy_params(params)
    return protocol.Policy(copies, policy_step, next(self._versions))

  def warm_up(
    self,
    on_done: Callable[[int, int], None] = lambda done, all: None,
    automata: Sequence[types.Automaton] = (),
  ):
    """Compiles every program, with calls that use no row."""
    self._sync()
    done, programs = itertools.count(1), self.sizes.programs * len(self.replicas)
    for replica in self.replicas:
      replica.warm_up(lambda: on_done(next(done), programs), automata)

  def _sync(self):
    """Makes a policy from the engine's parameters and gives it to the replicas."""
    if self._params is not self._synced and not self.busy:
      # Free the old copy before making the new one.
      self._synced = None
      for replica in self.replicas:
        replica.policy = None
    policy = self.make_policy(self._params, self._step)
    self._synced = self._params
    for replica in self.replicas:
      replica.policy = policy

  def _copy_params(self, params: decoder.Params) -> list[decoder.Params]:
    """Copies parameters to each chip (or each group of `tensor` chips)."""
    self._check(params)
    merged = engine_params.unstack(params, self.config, self.weights)
    if self.mesh is None:
      return [merged]
    merged = sharding.gather_params(merged, self.mesh)
    return [sharding.take_replica_params(merged, part) for part in self._meshes if part]

  def _check(self, params: decoder.Params):
    """Raises ValueError if `params` have adapters and the engine has named ones."""
    if self.adapters.count and lora.is_in(params):
      raise ValueError(
        'params have adapters, and the engine has named ones, which would be added to '
        "them: give the base's parameters, and adapters.set(name, lora.take(params))."
      )
