"""What a run asks of whatever samples its replies: this engine, or somebody else's.

  results = engine.run(coroutines)     # Waits until all have ended.

  with engine.open():
    future = engine.start(coroutines)  # They run while this thread does something else.
    engine.sync_weights(params, 1)     # From here on these parameters sample.
    results = future.result()

A coroutine requests a reply by `engine.submit(request)`; see request.py. engine.py is the
engine of this project, and contrib/external reaches those of others over HTTP.
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
  """The process received a signal to end before all requests were answered."""


@dataclasses.dataclass
class Stats:
  """Counts and times since the engine was made."""

  prefilled: int = 0  # Tokens that prefills computed.
  shared: int = 0  # Tokens that were copied from another row instead of being computed.
  sampled: int = 0  # Tokens that decodes sampled.
  # Calls of the policy that sampled them, each of one row; a call samples one token, or
  # with drafts several.
  calls: int = 0
  steps: int = 0  # Calls of all rows of all decodes, idle rows included.
  # Host time of prefills; the device's time is part of the decode that follows.
  prefill_seconds: float = 0.0
  decode_seconds: float = 0.0  # Wall time of decodes.
  # Wall time without anything to compute, while clients waited for tools.
  idle_seconds: float = 0.0
  # Wall time from the end of a decode to the next call to the device, while requests
  # waited.
  host_seconds: float = 0.0


@dataclasses.dataclass(eq=False)
class Policy:
  """Parameters that requests are sampled with."""

  # The parameters on each chip (or on `tensor` of them), as decoder.extend takes them.
  copies: list[decoder.Params]
  step: int  # The policy_step of engine.sync_weights, reported with each token.
  version: int  # A number that differs where the parameters do.


class AnyReplica(abc.ABC):
  """Samples the replies of some clients, all of whose texts it knows.

  Attributes:
    config: The policy's shape.
    sizes: At least `rows`, the texts that clients may continue at a time; `slots`, the
      most tokens of a text; and `drafts`, the tokens that are drafted.
    interrupted: Called while it serves; if it returns True, `serve` raises
      PreemptedError.
  """

  config: decoder.DecoderConfig
  sizes: Any
  interrupted: Callable[[], bool] = staticmethod(lambda: False)

  def start(self):
    """Resets what `serve` keeps; call it in the event loop that will run `serve`."""
    self._reservations = clients_lib.Reservations(self.sizes.rows)

  @abc.abstractmethod
  async def serve(self) -> None:
    """Answers requests until it is cancelled; raises PreemptedError if interrupted."""

  @abc.abstractmethod
  def stop(self) -> None:
    """Cancels all requests, and waits for what is under way elsewhere."""

  @property
  @abc.abstractmethod
  def load(self) -> int:
    """The number of requests that are waiting or under way."""

  @abc.abstractmethod
  def submit(self, request: request_lib.Request) -> request_lib.Generation:
    """Begins a reply; call it only inside the event loop that `serve` runs in.

    Raises:
      ValueError: The request cannot be answered.
    """

  def _extend_text(self, request: request_lib.Request) -> request_lib.Text:
    """Appends a request's tokens to its text, or begins one with them."""
    parent, prompt = request.parent, request.prompt
    if isinstance(parent, request_lib.Text):
      parent.append(prompt)
      return parent
    prefix = parent.text.prompt[: parent.length] if parent else types.Prompt()
    return request_lib.Text(self, prefix + prompt)

  @abc.abstractmethod
  def stop_sharing(self) -> None:
    """Makes the texts that begin from now on share nothing with those before."""

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
    mesh: The mesh that the learner's parameters are on.
    sizes: As those of a replica.
    replicas: The replicas.
    stats: Counts since the engine was made, over all replicas.
    interrupted: Called while requests are served; if it returns True, the clients end
      with PreemptedError.
  """

  sizes: Any

  def __init__(
    self,
    config: decoder.DecoderConfig,
    mesh: Mesh | None,
    replicas: Sequence[AnyReplica],
    stats: Stats,
  ):
    """Opens nothing yet."""
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
    that the policy has learned from.
    """

  @abc.abstractmethod
  def make_policy(self, params: decoder.Params, policy_step: int) -> Policy:
    """Makes a policy that requests can name; it is freed with the last of them."""

  @abc.abstractmethod
  def warm_up(
    self,
    on_done: Callable[[int, int], None] = lambda done, all: None,
    automata: Sequence[types.Automaton] = (),
  ) -> None:
    """Waits until it can sample.

    `on_done` is called with the number of programs compiled so far, and of all. The
    programs are compiled for tables that are large enough for `automata`: the grammars
    and long stop strings that requests will use.
    """

  def run(self, coroutines: Iterable[Coroutine]) -> list:
    """Runs clients until all have ended, and returns their results in order.

    The first exception of one of them or of the engine cancels the others and is raised.
    """
    with self.open():
      return clients_lib.wait(self.start(coroutines)).result()

  @contextlib.contextmanager
  def open(self) -> Iterator[None]:
    """Runs the event loop inside `with`, so that `start` can be called.

    At the end of the block, clients that are still under way are cancelled.
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
    """Whether a client is under way, or a reply is, even if no client awaits it."""
    clients = self._loop is not None and self._loop.busy
    return clients or any(replica.load for replica in self.replicas)

  def start(self, coroutines: Iterable[Coroutine]) -> futures.Future[list]:
    """Starts clients; the future has their results in order, or the first exception.

    Raises:
      RuntimeError: The engine is not open.
    """
    if not self._loop:
      raise RuntimeError('The engine is not open: start inside `with engine.open()`.')
    if not self.busy:
      # A run's log-probs must not depend, in their last bits, on the runs before.
      for replica in self.replicas:
        replica.stop_sharing()
    return self._loop.start(coroutines)

  def reserve(self, group: int = 0, policy: Policy | None = None, rows: int = 1):
    """Reserves rows of a replica: an async context manager that yields the replica.

    A client that continues its texts later, as an episode does after a tool's answer,
    submits inside it, so that there are no more such texts than rows. Clients are served
    in the order of their calls. Where clients of several policies wait, the policies take
    turns: an evaluation does not wait until all rollouts have begun, nor they for all of
    it.

    Args:
      group: Clients of one group share a replica, so that the prefix which their texts
        have in common is computed once.
      policy: The policy that the client's requests will name.
      rows: The most texts that the client will continue at a time.

    Raises:
      ValueError: A replica has fewer rows.
    """
    if rows > self.sizes.rows:
      raise ValueError(
        f'rows: {rows} texts of one client do not fit the {self.sizes.rows} rows of a '
        'replica; raise engine.rows, or take fewer replicas or candidates.'
      )
    return self.replicas[group % len(self.replicas)].reserve(policy, rows)

  def submit(self, request: request_lib.Request) -> request_lib.Generation:
    """Submits a request from a client that was started here; see AnyReplica.submit."""
    parent = request.parent
    if isinstance(parent, request_lib.Fork):
      parent = parent.text
    replica = parent.replica if parent else min(self.replicas, key=lambda r: r.load)
    return replica.submit(request)
