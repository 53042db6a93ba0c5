"""A sampler: a Ray actor with an engine on its own chips, which plays whole episodes.

pool.py calls its methods. Loading, compiling and the engine run in other threads, so that
it always answers.
"""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import socket
from typing import Any

import jax

from agent_r1_jax.contrib.ray import actors
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.host import memory, records, runtime
from agent_r1_jax.models import lora, quantization, sharding
from agent_r1_jax.rollout import rollout, sockets
from agent_r1_jax.rollout import store as store_lib
from agent_r1_jax.train import fingerprint, preflight
from agent_r1_jax.train.plan import setup

# What determines XLA's programs besides the code and the chip.
_FLAGS = ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')
# The parts of a run's fingerprint that a sampler has, too.
_COMPARED = ('environment', 'tools', 'guides')


def describe_process() -> dict[str, Any]:
  """Describes this process's code and machine, for pool.Pool's `refuse`."""
  runtime.initialize()
  options = ('jax_default_matmul_precision', 'jax_disable_most_optimizations')
  programs = {name: str(getattr(jax.config, name, None)) for name in options}
  programs |= {name: os.environ.get(name, '').strip() for name in _FLAGS}
  programs['chip'] = _describe_chip()
  return {
    'where': f'process {os.getpid()} on {socket.gethostname()}',
    'versions': fingerprint.describe_versions(),
    'programs': programs,
  }


def _describe_chip() -> str:
  """Names the kind of chip; for a CPU the model, which determines XLA's instructions."""
  kind, info = jax.devices()[0].device_kind, pathlib.Path('/proc/cpuinfo')
  if kind != 'cpu' or not info.exists():
    return kind
  lines = info.read_text().splitlines()
  models = {line.partition(':')[2].strip() for line in lines if 'model name' in line}
  return ', '.join([kind, *sorted(models)])


class Sampler:
  """Plays episodes with the user's tools and environment where it runs."""

  def __init__(self):
    """Loads nothing yet."""
    self._job: Any = None
    self._engine: engine_lib.Engine | None = None
    self._frozen: Any = {}
    self._stack = contextlib.ExitStack()

  async def describe(self) -> dict[str, Any]:
    """Describes this process."""
    return await asyncio.to_thread(describe_process)

  async def ping(self) -> None:
    """Answers."""

  async def open(self, packed: bytes) -> dict[str, Any]:
    """Unpickles the run's sockets.Job.

    Returns:
      How many episodes it plays at once, and a description of its environment.
    """
    return await asyncio.to_thread(self._open, packed)

  async def sync(self, step: int, learned: Any, frozen: Any = None) -> None:
    """Loads parameters; the first time all of them, and makes the engine."""
    await asyncio.to_thread(self._sync, step, learned, frozen)

  async def play(self, order: sockets.Order) -> bytes:
    """Plays an episode; returns the fields of its trajectory (rollout/store.py)."""
    assert self._engine is not None
    future = self._engine.start([self._play(order)])
    (trajectory,) = await asyncio.wrap_future(future)
    return records.pack(store_lib.list_fields(trajectory))

  def _open(self, packed: bytes) -> dict[str, Any]:
    self._job = job = actors.unpack(packed)
    with preflight.open_environment(job.make_env, job.config.limits) as env:
      made_of = fingerprint.describe_run(None, env, [], guides=job.decoding.guides)
    # All local chips sample; the learner's mesh only determines how many share a layer.
    mesh = dataclasses.replace(job.config.mesh, data=1, fsdp=0, context=1, samplers=0)
    self._config = dataclasses.replace(job.config, mesh=mesh)
    self._mesh = setup.make_mesh(mesh)
    replicas = (job.config.engine.replicas or 1) * (
      self._mesh.size // mesh.tensor if self._mesh else 1
    )
    capacity = job.config.engine.rows * replicas
    compared = {name: made_of[name] for name in _COMPARED if name in made_of}
    return {'capacity': capacity, 'made_of': compared}

  def _sync(self, step: int, learned: Any, frozen: Any):
    if frozen is not None:
      self._frozen = self._place(frozen)
    params = lora.join(self._place(learned), self._frozen)
    if self._engine:
      self._engine.sync_weights(params, step)
      memory.release_freed_memory()
      return
    job, config = self._job, self._config
    if quantization.is_frozen(params):  # The learner has rounded them.
      own = dataclasses.replace(config.engine, weights='model')
      config = dataclasses.replace(config, engine=own)
    guides = job.decoding.guides
    engine = setup.make_engine(config, job.model, params, self._mesh, guides)
    engine.sync_weights(params, step)
    automata = [job.chat.stop_automaton(job.model.vocab_size)]
    automata += [job.decoding.grammar] if job.decoding.grammar else []
    engine.warm_up(automata=automata)
    self._stack.enter_context(engine.open())
    self._play = rollout.make_play(
      engine,
      job.chat,
      job.make_env,
      limits=config.limits,
      decoding=job.decoding,
      seed=config.seed,
      attempts=config.engine.rows * len(engine.replicas),
    )
    self._engine = engine

  def _place(self, params: Any) -> Any:
    """Puts arrays from the object store on this process's chips."""
    if self._mesh is None:
      return jax.device_put(params)
    return sharding.shard_params(params, self._mesh)
