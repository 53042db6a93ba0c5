"""The learner's side: connects to Ray, publishes parameters, and starts samplers."""

import asyncio
import collections
from collections.abc import Iterator, Mapping
from concurrent import futures
import contextlib
import logging
import threading
from typing import Any

import jax
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.contrib.ray import actors
from agent_r1_jax.contrib.ray import pool as pool_lib
from agent_r1_jax.contrib.ray import remote as remote_lib
from agent_r1_jax.contrib.ray import sampler as sampler_lib
from agent_r1_jax.host import processes, records
from agent_r1_jax.models import decoder, engine_params, lora, quantization
from agent_r1_jax.rollout import sockets
from agent_r1_jax.rollout import store as store_lib

_LOGGER = logging.getLogger(__name__)
# How long the end of a run waits for the thread that manages samplers.
_CLOSE_SECONDS = 10.0


class RaySamplers(sockets.Samplers):
  """Samplers that are Ray actors; use ray.samplers."""

  def __init__(
    self, options: pool_lib.Options, takes: Mapping[str, Any], address: str | None
  ):
    """Connects to nothing yet; `takes` are the resources of each actor."""
    self._options, self._takes, self._address = options, takes, address
    self._job: sockets.Job | None = None
    self._step = -1  # Of the last published policy.
    self._published = self._bytes = self._tokens = 0
    self._frozen: Any = None

  @property
  def size(self) -> int:
    """The number of samplers that can play now."""
    return self._pool.size

  def check(self, config: config_lib.Config) -> None:
    """See sockets.Samplers.check."""
    options = self._options
    actors.check_installed('samplers')
    if not 1 <= options.minimum <= options.maximum:
      raise ValueError(
        f'samplers: minimum is {options.minimum} and maximum {options.maximum}; the '
        'minimum must be at least 1, and the maximum at least the minimum.'
      )
    if processes.is_distributed():
      raise ValueError(
        'samplers: a learner of several processes has its own samplers in each; start it '
        'in one process, or leave samplers out.'
      )

  @contextlib.contextmanager
  def open(self, job: sockets.Job) -> Iterator[None]:
    """See sockets.Samplers.open."""
    self._job, self._step, self._published = job, -1, 0
    self._counted = collections.Counter()
    self._me = sampler_lib.describe_process()
    packed = actors.pack(job, 'samplers: what plays the episodes')
    with actors.connection(self._address, 'samplers'):
      started: futures.Future[None] = futures.Future()
      thread = threading.Thread(
        target=lambda: asyncio.run(self._run(packed, started)),
        daemon=True,
        name='samplers',
      )
      thread.start()
      started.result(_CLOSE_SECONDS)
      try:
        yield
      finally:
        self._loop.call_soon_threadsafe(self._closed.set)
        thread.join(_CLOSE_SECONDS)
        self._frozen = None  # Ray frees it.

  def sync_weights(self, params: decoder.Params, policy_step: int) -> None:
    """See sockets.Samplers.sync_weights."""
    assert self._job is not None
    if policy_step == self._step:
      return
    learned, frozen = lora.split(params)
    if not self._published:
      self._frozen = self._store(frozen)
    weights, model = self._job.config.engine.weights, self._job.model
    # Fewer bytes, and the same numbers sample. Adapters are small, and merged earlier.
    if not frozen and weights == 'model':
      learned = engine_params.cast_params(learned, model)
    elif not frozen:
      learned = quantization.freeze(learned, model, weights)
    reference = self._store(learned)
    policy = remote_lib.Policy(self._published, policy_step, reference, self._frozen)
    self._step, self._published = policy_step, self._published + 1
    self._loop.call_soon_threadsafe(self._pool.publish, policy)

  async def play(self, order: sockets.Order) -> types.Trajectory:
    """See sockets.Samplers.play."""
    future = asyncio.run_coroutine_threadsafe(self._pool.orders.play(order), self._loop)
    trajectory = await asyncio.wrap_future(future)
    self._tokens += sum(int(s.action_mask.sum()) for s in trajectory.segments)
    return trajectory

  def measure(self) -> dict[str, float]:
    """See sockets.Samplers.measure.

    'samplers/playing' is their number; the other metrics count since the last call:
    samplers that joined, were lost and were refused; episodes replayed because their
    sampler was lost, and played twice by idle samplers; tokens sampled, without dropped
    ones; bytes published.
    """
    counts = self._pool.orders.counts
    names = ('joined', 'lost', 'refused', 'replayed', 'twice')
    new = {name: counts[name] - self._counted[name] for name in names}
    self._counted.update(new)
    numbers = {f'samplers/{name}': float(number) for name, number in new.items()}
    for name, number in (('tokens', self._tokens), ('bytes', self._bytes)):
      numbers[f'samplers/{name}'] = float(number)
    self._tokens = self._bytes = 0
    return numbers | {'samplers/playing': float(self._pool.size)}

  def _store(self, params: Any) -> Any:
    """Puts parameters into the object store; each machine reads them from there once."""
    arrays = jax.tree.map(np.asarray, params)
    self._bytes += sum(x.nbytes for x in jax.tree.leaves(arrays))
    return _put(arrays)

  async def _run(self, packed: bytes, started: futures.Future):
    """Runs the pool until the run is closed."""
    self._loop, self._closed = asyncio.get_running_loop(), asyncio.Event()
    self._pool = pool_lib.Pool(self._start, packed, self._refuse, _read, self._options)
    started.set_result(None)
    running = asyncio.create_task(self._pool.run())
    closed = asyncio.create_task(self._closed.wait())
    await asyncio.wait([running, closed], return_when=asyncio.FIRST_COMPLETED)
    if not self._closed.is_set():
      _LOGGER.error('samplers: their pool has ended', exc_info=running.exception())
      await closed  # Later orders get the error.
    running.cancel()
    await asyncio.wait([running])

  def _start(self, number: int) -> remote_lib.Remote:
    """Requests an actor from Ray; it starts once a machine has room for it."""
    return actors.start(sampler_lib.Sampler, self._takes)

  def _refuse(self, found: Mapping[str, Any]) -> str | None:
    """Returns why a sampler with this description may not play; None if it may."""
    assert self._job is not None
    mine = {**self._me, 'made_of': self._job.made_of}
    for part in ('versions', 'made_of', 'programs'):
      theirs = found.get(part, {})
      names = [n for n in theirs if theirs[n] != mine[part].get(n)]
      if part == 'programs' and self._job.corrected:
        continue
      if names:
        pairs = (f'{n}: {theirs[n]!s:.80}, here {mine[part].get(n)!s:.80}' for n in names)
        return (
          f'{found.get("where", "it")} differs from the learner in {"; ".join(pairs)}. '
          + _REMEDIES[part]
        )
    return None


_REMEDIES = {
  'versions': 'Install the same versions on all machines.',
  'made_of': 'Give all machines the same code of the environment, tools and rewards.',
  'programs': (
    'Take machines of one kind, or an algorithm with a correction (rl/losses.py).'
  ),
}


def _put(arrays: Any) -> Any:
  import ray

  return ray.put(arrays)


def _read(packed: bytes, order: sockets.Order) -> types.Trajectory:
  """Makes an order's trajectory from a sampler's data; runs no code in it."""
  return store_lib.make_trajectory(records.unpack(packed), order.task)
