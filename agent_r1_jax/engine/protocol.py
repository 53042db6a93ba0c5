"""The interface of engines: this project's, or an external one.

  results = engine.run(coroutines)     # Waits until all have ended.

  with engine.open():
    future = engine.start(coroutines)  # They run in the background.
    engine.sync_weights(params, 1)     # From here on these parameters sample.
    results = future.result()

A coroutine requests a reply with `engine.submit(request)`; see request.py. engine.py is
this project's engine; contrib/external connects to other engines over HTTP.
"""

import abc
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
from typing import Any

from jax.sharding import Mesh

from agent_r1_jax import types
from agent_r1_jax.engine import clients as clients_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.models import decoder


class PreemptedError(Exception):
  """The process got a signal to terminate before all requests were answered."""


@dataclasses.dataclass
class Stats:
  """Counts and times since the engine was made."""

  prefilled: int = 0  # Tokens that prefills computed.
  shared: int = 0  # Tokens that were copied from another row instead of being computed.
  sampled: int = 0  # Tokens that decodes sampled.
  # Policy calls that sampled them, counted per row; with drafts, a call may sample
  # several tokens.
  calls: int = 0
  steps: int = 0  # Policy calls of all decodes, counted per row, idle rows included.
  # Host time of prefills; the device's time is part of the decode that follows.
  prefill_seconds: float = 0.0
  decode_seconds: float = 0.0  # Wall time of decodes.
  # Wall time with nothing to compute, while clients waited for tools.
  idle_seconds: float = 0.0
  # Wall time from the end of a decode to the next device call, while requests waited.
  host_seconds: float = 0.0


@dataclasses.dataclass(eq=False)
class Policy:
  """Parameters that requests are sampled with."""

  # The parameters on each chip (or group of `tensor` chips), for decoder.extend.
  copies: list[decoder.Params]
  step: int  # The policy_step of engine.sync_weights, reported with each token.
  version: int  # Different parameters have different versions.


class AnyReplica(abc.ABC):
  """Samples replies for a share of the clients, and holds all their sequences.

  Attributes:
    config: The policy's shape.
    sizes: Has at least `rows`, the maximum number of open sequences; `slots`, the maximum
      length of a sequence in tokens; and `drafts`, the number of drafted tokens.
    interrupted: Called while it serves; if it returns True, `serve` raises
      PreemptedError.
  """

  config: decoder.DecoderConfig
  sizes: Any
  interrupted: Callable[[], bool] = staticmethod(lambda: False)

  def start(self):
    """Resets the state of `serve`; call it in the event loop that will run `serve`."""
    self._reservations = clients_lib.Reservations(self.sizes.rows)

  @abc.abstractmethod
  async def serve(self) -> None:
    """Answers requests until it is cancelled; raises PreemptedError if interrupted."""

  @abc.abstractmethod
  def stop(self) -> None:
    """Cancels all requests, and waits for work in other threads."""

  @property
  @abc.abstractmethod
  def load(self) -> int:
    """The number of requests that are queued or active."""

  @abc.abstractmethod
  def submit(self, request: request_lib.Request) -> request_lib.Generation:
    """Starts a reply; call it only inside the event loop that `serve` runs in.

    Raises:
      ValueError: The request cannot be answered.
    """

  def _extend_sequence(self, request: request_lib.Request) -> request_lib.Sequence:
    """Appends a request's tokens to its sequence, or begins a new one with them."""
    parent, prompt = request.parent, request.prompt
    if isinstance(parent, request_lib.Sequence):
      parent.append(prompt)
      return parent
    prefix = parent.sequence.prompt[: parent.length] if parent else types.Prompt()
    return request_lib.Sequence(self, prefix + prompt)

  @abc.abstractmethod
  def stop_sharing(self) -> None:
    """Stops new sequences from sharing prefixes with existing ones."""

  @contextlib.asynccontextmanager
  async def reserve(self, policy: Policy | None = None, rows: int = 1):
    """Waits for `rows` free rows and holds them inside `with`; see AnyEngine.reserve."""
    version = policy.version if policy else None
    async with self._reservations.reserve(version, rows):
      yield self


class AnyEngine(abc.ABC):
  """Replicas of a policy, and the event loop in which they serve requests.

  Attributes:
    config: The policy's shape.
    mesh: The mesh of the learner's parameters.
    sizes: The sizes of each replica; see AnyReplica.
    replicas: The replicas.
    stats: Counts since the engine was made, over all replicas.
    interrupted: Called while requests are served; if it returns True, clients end with
      PreemptedError.
  """

  sizes: Any

  def __init__(
    self,
    config: decoder.DecoderConfig,
    mesh: Mesh | None,
    replicas: Sequence[AnyReplica],
    stats: Stats,
  ):
    """Makes an engine that is not open yet."""
    self.config, self.mesh = config, mesh
    self.replicas, self.stats = replicas, stats
    self.interrupted: Callable[[], bool] = lambda: False
    for replica in replicas:
      replica.interrupted = lambda: self.interrupted()
    self._loop: clients_lib.ClientLoop | None = None

  @abc.abstractmethod
  def sync_weights(self, params: decoder.Params, policy_step: int) -> None:
    """Replaces the engine's policy; from any thread.

    `policy_step` is reported with each token; in training it is the number of rollouts
    that the policy was trained on.
    """

  @abc.abstractmethod
  def make_policy(self, params: decoder.Params, policy_step: int) -> Policy:
    """Makes a policy that requests can name; it is freed with the last such request."""

  @abc.abstractmethod
  def warm_up(
    self,
    on_done: Callable[[int, int], None] = lambda done, all: None,
    automata: Sequence[types.Automaton] = (),
  ) -> None:
    """Prepares the engine to sample: compiles its programs, if it has any.

    Calls `on_done` with the number of programs compiled so far and their total number.
    The programs' tables are made large enough for `automata`, the grammars and long stop
    strings that requests will use.
    """

  def run(self, coroutines: Iterable[Coroutine]) -> list:
    """Runs clients until all have ended, and returns their results in order.

    The first exception of a client or of the engine cancels the others and is raised.
    """
    with self.open():
      return clients_lib.wait(self.start(coroutines)).result()

  @contextlib.contextmanager
  def open(self) -> Iterator[None]:
    """Runs the event loop inside `with`, so that `start` can be called.

    Clients that are still running at the end of the block are cancelled.
    """
    if self._loop:
      yield
      return
    self._loop = clients_lib.ClientLoop(self.replicas)
    try:
      yield
    finally:
      loop, self._loop = self._loop, None
      loop.close()

  @property
  def busy(self) -> bool:
    """Whether any client is running or any reply is being sampled."""
    clients = self._loop is not None and self._loop.busy
    return clients or any(replica.load for replica in self.replicas)

  def start(self, coroutines: Iterable[Coroutine]) -> futures.Future[list]:
    """Starts clients; returns a future of their results in order, or first exception.

    Raises:
      RuntimeError: The engine is not open.
    """
    if not self._loop:
      raise RuntimeError('The engine is not open: start inside `with engine.open()`.')
    if not self.busy:
      # The last bits of a run's log-probs must not depend on previous runs.
      for replica in self.replicas:
        replica.stop_sharing()
    return self._loop.start(coroutines)

  def reserve(self, group: int = 0, policy: Policy | None = None, rows: int = 1):
    """Reserves rows of a replica: an async context manager that yields the replica.

    A client that will continue its sequences, as an episode does after a tool call,
    submits inside it, so that there are never more such sequences than rows. Clients are
    served in the order of their calls; if clients of several policies wait, the policies
    take turns, so that an evaluation and the rollouts do not wait for each other to end.

    Args:
      group: Clients of one group share a replica, so that their common prefix is computed
        once.
      policy: The policy that the client's requests will name.
      rows: How many sequences the client keeps open at once.

    Raises:
      ValueError: A replica has fewer rows.
    """
    if rows > self.sizes.rows:
      raise ValueError(
        f'rows: {rows} sequences of one client do not fit the {self.sizes.rows} rows of '
        'a replica; raise engine.rows, or take fewer replicas or candidates.'
      )
    return self.replicas[group % len(self.replicas)].reserve(policy, rows)

  def submit(self, request: request_lib.Request) -> request_lib.Generation:
    """Submits a request from a client of this engine; see AnyReplica.submit."""
    parent = request.parent
    if isinstance(parent, request_lib.Fork):
      parent = parent.sequence
    replica = parent.replica if parent else min(self.replicas, key=lambda r: r.load)
    return replica.submit(request)
