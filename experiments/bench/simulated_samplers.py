"""Simulates a run's samplers, up to 64 of them, with stragglers and losses.

  python -m experiments.bench.simulated_samplers

What hands out orders, replaces lost samplers and plays stragglers twice is contrib/ray's
own code, in an event loop whose waits take no time. Samplers only wait: an episode takes
a log-normal time of 2 minutes on average (σ = 1), on one machine of 20 four times that; a
new sampler takes 90 seconds to start and compile, and parameters what a link of 10 Gbit/s
takes for them in bfloat16, to each machine. A sampler has 8 rows, a rollout 16 episodes
for each sampler, and an update takes a minute. A lost machine is replaced at once.

Prints for each cell the seconds of a step, and the share of all rows' time in which an
episode was played that counted (slower machines play no more); the first two steps are
not counted.
"""

import asyncio
import collections
import json
import logging
import selectors
from typing import Any

from absl import app
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.contrib.ray import orders as orders_lib
from agent_r1_jax.contrib.ray import pool as pool_lib
from agent_r1_jax.contrib.ray import remote as remote_lib
from agent_r1_jax.rollout import sockets

_STEPS, _WARM = 8, 2
_MEAN, _SIGMA, _ROWS, _EPISODES = 120.0, 1.0, 8, 16
_START, _UPDATE, _BYTES_PER_SECOND = 90.0, 60.0, 1.25e9


class _Selector(selectors.SelectSelector):
  """Returns at once, and notes how long it would have waited."""

  now = 0.0

  def select(self, timeout=None):
    self.now += timeout or 0.0
    return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
  """An event loop whose waits take no time."""

  def __init__(self):
    self._clock = _Selector()
    super().__init__(self._clock)

  def time(self):
    return self._clock.now


class _Machine:
  """A remote.Remote that only takes time, and is lost at some moment."""

  def __init__(self, rng: np.random.Generator, losses: float, transfer: float):
    life = rng.exponential(3600 / losses) if losses else float('inf')
    self._dies_at = orders_lib.now() + life
    self._seconds = {'open': _START, 'sync': transfer}
    self._slowness = 4.0 if rng.random() < 0.05 else 1.0

  async def call(self, method: str, *args: Any) -> Any:
    seconds = self._seconds.get(method, 0.0)
    if method == 'play':
      order = args[0]
      # Equal wherever it is played.
      draw = np.random.default_rng([order.rollout, order.number]).normal()
      seconds = _MEAN * np.exp(_SIGMA * draw - _SIGMA**2 / 2)
    takes = seconds * self._slowness
    left = self._dies_at - orders_lib.now()
    await asyncio.sleep(min(takes, max(left, 0.0)))
    if takes >= left:
      raise remote_lib.LostError('its machine is gone')
    return {'capacity': _ROWS} if method == 'open' else seconds

  def kill(self):
    self._dies_at = 0.0


def _read(seconds: float, order: sockets.Order) -> types.Trajectory:
  metrics = {'seconds': seconds}
  return types.Trajectory(order.task, 0, 0, [], [], [], types.Status.DONE, metrics)


async def _simulate(samplers: int, losses: float, gigabytes: float, ahead: int, twice):
  """Returns the seconds of a step, the share of used time, and what was counted."""
  rng, transfer = np.random.default_rng(0), gigabytes * 1e9 / _BYTES_PER_SECOND
  start = lambda number: _Machine(rng, losses, transfer)
  options = pool_lib.Options(1, samplers, wait_seconds=36_000, twice=twice)
  pool = pool_lib.Pool(start, 'job', lambda found: None, _read, options)
  running = asyncio.create_task(pool.run())
  pool.publish(remote_lib.Policy(0, 0, None, None))
  task = types.Task('t', [])
  played = lambda n: asyncio.gather(
    *(
      pool.orders.play(sockets.Order(task, i, 0, i, n))
      for i in range(samplers * _EPISODES)
    )
  )
  times, used = [orders_lib.now()], []
  rollout = asyncio.ensure_future(played(0))
  for step in range(_STEPS):
    done = await rollout
    used.append(sum(t.metrics['seconds'] for t in done))
    if ahead:  # Of the policy before the update that runs meanwhile.
      pool.publish(remote_lib.Policy(step, step, None, None))
      rollout = asyncio.ensure_future(played(step + 1))
    await asyncio.sleep(_UPDATE)
    if not ahead:
      pool.publish(remote_lib.Policy(step + 1, step + 1, None, None))
      rollout = asyncio.ensure_future(played(step + 1))
    times.append(orders_lib.now())
  for future in (rollout, running):
    future.cancel()
  await asyncio.gather(rollout, running, return_exceptions=True)
  seconds = times[-1] - times[_WARM]
  share = sum(used[_WARM:]) / (seconds * samplers * _ROWS)
  return seconds / (_STEPS - _WARM), share, collections.Counter(pool.orders.counts)


def main(_):
  """Prints a line of JSON for each cell."""
  # Idle samplers look less often than every quarter of a second.
  pool_lib._LOOK_SECONDS, pool_lib._PING_SECONDS = 4.0, 5.0
  logging.disable(logging.WARNING)
  counts = [(n, losses) for n in (4, 16, 64) for losses in (0, 1)]
  cells = [(n, r, 6.0, 0, twice) for n, r in counts for twice in (False, True)]
  cells += [(64, 1, 6.0, 1, True), (64, 1, 64.0, 0, True), (64, 1, 64.0, 1, True)]
  for samplers, losses, gigabytes, ahead, twice in cells:
    with asyncio.Runner(loop_factory=_Loop) as runner:
      seconds, share, counts = runner.run(
        _simulate(samplers, losses, gigabytes, ahead, twice)
      )
    cell = {'samplers': samplers, 'losses an hour': losses, 'GB': gigabytes}
    cell |= {'ahead': ahead, 'twice': twice, 'seconds': round(seconds)}
    print(json.dumps(cell | {'used': round(share, 2), 'counts': counts}), flush=True)


if __name__ == '__main__':
  app.run(main)
