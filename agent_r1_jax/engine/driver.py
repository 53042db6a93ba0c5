"""The driver: keeps the rows of its replicas busy for many episodes at once.

Episodes are coroutines. Each takes a row, and in turns awaits `Row.generate` and its
tools; all of them, and what serves them, share one event loop in a thread of its own.

  played = driver.run(episodes)

  with driver.open():
    future = driver.start(episodes)  # They play while this thread does something else.
    driver.params, driver.policy_step = params, 1
    driver.hand_over()  # The rest of them is played by another policy.
    played = future.result()
"""

from collections.abc import (
  AsyncIterator,
  Callable,
  Coroutine,
  Iterable,
  Iterator,
  Sequence,
)
from concurrent import futures
import contextlib
import hashlib
import itertools
from typing import Any

from jax.sharding import Mesh
import numpy as np

from agent_r1_jax import sharding
from agent_r1_jax.engine import grammar as grammar_lib
from agent_r1_jax.engine import loop as loop_lib
from agent_r1_jax.engine import replica as replica_lib
from agent_r1_jax.engine import sampling as sampling_lib
from agent_r1_jax.engine import stop as stop_lib
from agent_r1_jax.models import decoder, lora


def key(*parts: int | str) -> np.ndarray:
  """A row's key, uint32 [2], from what identifies its trajectory (seed, task, sample)."""
  digest = hashlib.sha256('/'.join(map(str, parts)).encode()).digest()
  return np.frombuffer(digest[:8], np.uint32).copy()


class Driver:
  """Runs episodes on the rows of one or several replicas of the policy.

  Attributes:
    params: Of the policy, with or without adapters; assign new ones between runs.
    policy_step: The updates that it has seen: what its tokens are marked with.
    sampling: How tokens are chosen; may be changed between runs.
    grammar: What a reply may say; may be changed between runs. None allows all.
    interrupted: Asked while a run goes on; True ends it with replica.PreemptedError.
    sizes: Of what is compiled.
    replicas: Copies of the policy, each with rows of its own.
    stats: Counts so far, over all replicas.
  """

  def __init__(
    self,
    config: decoder.DecoderConfig,
    params: decoder.Params,
    *,
    stop: stop_lib.Stop,
    sampling: sampling_lib.Sampling = sampling_lib.ON_POLICY,
    grammar: grammar_lib.Grammar | None = None,
    mesh: Mesh | None = None,
    chips: Sequence[Any] = (),
    rows: int = 64,
    slots: int = 1024,
    steps: int = 32,
    width: int | None = None,
    feed_rows: int = 16,
    feed_tokens: int = 64,
    bucket: int = 256,
    narrow: bool = True,
    replicas: int = 1,
  ):
    """Allocates the cache.

    Args:
      config: Of the policy.
      params: Of the policy.
      stop: What ends a reply.
      sampling: How tokens are chosen.
      grammar: What a reply may say. It makes the samples off-policy.
      mesh: That `params` lie on. This process's chips then have a replica each, or one
        together where its `tensor` splits a layer. None: one, on JAX's default device.
      chips: Of this process, which sample in place of those of the mesh.
      rows: Texts at a time (B) on each chip (or `tensor` of them).
      slots: Most tokens of a text (S).
      steps: Tokens of one decode segment: what a row that has been answered by its tool
        waits for, at most.
      width: Most rows that are decoded at a time; all by default. With slow tools, twice
        as many rows as this keep the device busy.
      feed_rows: Rows of one feed (M).
      feed_tokens: Tokens of one feed (T).
      bucket: Cache reads are rounded up to this, twice this, four times this ...
      narrow: Whether few rows are fed and decoded by programs for a quarter of them.
      replicas: That work side by side on each chip: they share its parameters and divide
        its rows and width. One a core keeps a CPU busy, whose decode steps XLA computes
        mostly on one core.

    A log-prob's last bits depend on the program that computed it: runs whose tools take
    their time repeat to the last bit only with bucket = slots and narrow = False.
    """
    width = rows if width is None else min(width, rows)
    given = {'rows': rows, 'slots': slots, 'steps': steps, 'bucket': bucket}
    given |= {'width': width, 'feed_rows': feed_rows, 'feed_tokens': feed_tokens}
    for name, size in (given | {'replicas': replicas}).items():
      if size < 1:
        raise ValueError(f'{name} is {size}; it must be at least 1.')
    if rows % replicas or width % replicas:
      raise ValueError(
        f'rows = {rows} and width = {width} must divide by {replicas}, replicas.'
      )
    if replicas > 1 and mesh is not None and mesh.shape['tensor'] > 1:
      # Each would wait for the other's part of a sum over chips.
      raise ValueError(f'replicas is {replicas}: with tensor > 1 it must be 1.')
    rows, width = rows // replicas, width // replicas
    widths = lambda n: sorted({max(1, n // 4), n}) if narrow else [n]
    self.sizes = replica_lib.Sizes(
      rows=rows,
      slots=slots,
      steps=steps,
      feed_tokens=feed_tokens,
      feed_rows=widths(min(feed_rows, rows)),
      decode_rows=widths(width),
      buckets=[b for i in range(32) if (b := bucket << i) < slots] + [slots],
    )
    self.config, self.params, self.policy_step = config, params, 0
    self.sampling, self.grammar, self.mesh = sampling, grammar, mesh
    self.interrupted: Callable[[], bool] = lambda: False
    self.stats = replica_lib.Stats()
    self._parts = None if mesh is None else sharding.replicas(mesh, chips)
    self.replicas = [
      replica_lib.Replica(config, stop, self.sizes, self.stats, part)
      for part in self._parts or [None]
      for _ in range(replicas)
    ]
    # The parameters that `_copies`, one a chip, were made of.
    self._copied: decoder.Params | None = None
    self._copies: list[decoder.Params] = []
    self._loop: loop_lib.Loop | None = None

  def run(self, episodes: Iterable[Coroutine]) -> list:
    """Runs episodes to their ends and returns their results in order.

    The first exception of an episode or of the engine cancels the others and is raised.
    """
    with self.open():
      return loop_lib.wait(self.start(episodes)).result()

  @contextlib.contextmanager
  def open(self) -> Iterator[None]:
    """Inside, `start` may be called; what it started ends with it, done or not."""
    if self._loop:
      yield
      return
    self._loop = loop_lib.Loop(self.replicas)
    try:
      yield
    finally:
      loop, self._loop = self._loop, None
      loop.close()

  def start(self, episodes: Iterable[Coroutine]) -> futures.Future[list]:
    """As `run`, but does not wait: the future has the results, or the exception.

    Raises:
      RuntimeError: The driver is not open; or see `hand_over`.
    """
    if not self._loop:
      raise RuntimeError('The driver is not open: start inside `with driver.open()`.')
    self.hand_over()
    return self._loop.start(episodes)

  def hand_over(self):
    """Gives the replicas the policy as it is now, also in the midst of episodes.

    `start` does it too. While episodes are under way there is room for two copies.

    Raises:
      RuntimeError: Episodes are under way with another sampling or grammar.
    """
    busy = bool(self._loop and self._loop.busy)
    for replica in self.replicas:
      same = replica.sampling == self.sampling and replica.grammar is self.grammar
      if busy and not same:
        raise RuntimeError(
          'Episodes are under way with another sampling or grammar: wait for them first.'
        )
      replica.sampling, replica.grammar = self.sampling, self.grammar
      replica.interrupted = self.interrupted
    if not busy:
      for replica in self.replicas:
        replica.forget_prompts()
    if self.params is not self._copied:
      self._copies, self._copied = [], None
      if not busy:
        for replica in self.replicas:
          replica.forget_policy()
      self._copies, self._copied = self._made(), self.params
    each = len(self.replicas) // len(self._copies)
    for n, replica in enumerate(self.replicas):
      replica.hand(self._copies[n // each], self.policy_step)

  def warm_up(
    self,
    on_done: Callable[[int, int], None] = lambda done, all: None,
    also: Sequence[sampling_lib.Sampling] = (),
  ):
    """Compiles every program, on places without rows.

    Args:
      on_done: Called with the programs compiled so far, and how many there are.
      also: Other ways than `sampling` in which tokens will be chosen.
    """
    self.hand_over()
    programs = self.sizes.programs + len(also) * self.sizes.decodes
    done, all_of_them = itertools.count(1), programs * len(self.replicas)
    for replica in self.replicas:
      replica.warm_up(lambda: on_done(next(done), all_of_them), also)

  @contextlib.asynccontextmanager
  async def row(
    self, row_key: np.ndarray, group: int = 0
  ) -> AsyncIterator[replica_lib.Row]:
    """An empty row for one episode; waits until one is free.

    Args:
      row_key: The episode's randomness.
      group: Those of one group share a replica, where their prompt is computed once.
    """
    free = self.replicas[group % len(self.replicas)].free
    row = await free.get()
    row.restart(row_key)
    try:
      yield row
    finally:
      free.put_nowait(row)

  def _made(self) -> list[decoder.Params]:
    """A copy of the policy for each chip (or `tensor` of them)."""
    used = decoder.unstacked(lora.merge(self.params), self.config)
    if self.mesh is None or self._parts is None:
      return [used]
    used = sharding.gathered(used, self.mesh)
    return [sharding.local(used, part) for part in self._parts]
