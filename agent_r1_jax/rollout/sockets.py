"""The interfaces of a run that others implement: Watcher, Player, Choice and Samplers.

The core calls them: report/watcher.py watches a run, serve/program.py plays an episode,
guided/choice.py and guided/search.py choose its replies, contrib/ray plays episodes on
machines that come and go. Observers of events inside an episode, such as a tool call, are
in host/moments.py.
"""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import pathlib
from typing import Any, NamedTuple, Protocol

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import call_formats
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.engine import protocol
from agent_r1_jax.host import processes
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import table as table_lib

Ended = Callable[[types.Trajectory], None]


class RunInfo(NamedTuple):
  """A run that begins or resumes.

  Attributes:
    config: The run's configuration.
    workdir: The run's directory.
    label: The run's name.
    step: The number of steps completed before.
    next_line: The step of the next line of metrics.jsonl.
    call_format: The format of tool calls in replies.
    engine: The engine, whose counters give the speed.
  """

  config: config_lib.Config
  workdir: pathlib.Path
  label: str
  step: int
  next_line: int
  call_format: call_formats.CallFormat
  engine: protocol.AnyEngine


class Watcher:
  """Observes a run and prints one line per step; subclasses override methods.

  The loop calls the same methods in all processes. An exception in a method ends the run,
  so a watcher must catch and report its own errors.
  """

  def check(self, config: config_lib.Config) -> None:
    """Raises ValueError for settings that it does not support, before the run is made."""
    default = config_lib.Config()
    for name in ('sinks', 'profile', 'alarms'):
      value = getattr(config, name)
      if value and value != getattr(default, name):
        raise ValueError(
          f'{name} is {value!r}, and nobody watches this run who does that: give '
          'train.run(..., watcher=report.Watcher()), or leave it out.'
        )

  def begin(self, run: RunInfo) -> contextlib.AbstractContextManager:
    """Watches a run inside `with`."""
    return contextlib.nullcontext()

  def print_line(self, line: str) -> None:
    """Shows a line of text, in the first process."""
    if processes.is_first():
      print(line, flush=True)

  def set_phase(self, name: str, done: int | None = None, total: int | None = None):
    """Shows what the run is doing, for example ('rollout', 45, 128)."""

  def trace_step(self, step: int) -> contextlib.AbstractContextManager:
    """Wraps the rollout and the update of a step."""
    return contextlib.nullcontext()

  def see_episodes(self, step: int, played: Sequence[types.Trajectory]) -> None:
    """Receives all episodes of a rollout or an evaluation as soon as they have ended."""
    if errors := [t.error for t in played if t.status == types.Status.FAILED]:
      self.print_line(f'Step {step}: {len(errors)} episodes failed. {errors[0]}')

  def log_rollout(
    self,
    step: int,
    played: Sequence[types.Trajectory],
    learned_from: Sequence[types.Trajectory],
    table: table_lib.TokenTable,
  ) -> None:
    """Logs some episodes of a rollout, for people to read.

    Args:
      step: The number of completed steps, including this one.
      played: All episodes of the rollout; config.log_episodes of them have messages.
      learned_from: The episodes of the table, in its order.
      table: The table that updates.learn returned.
    """

  def log_evaluation(
    self, name: str, step: int, played: Sequence[types.Trajectory]
  ) -> None:
    """Logs all episodes of an evaluation set."""

  def measure(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns further metrics of a step, before they are written."""
    return {}

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Receives the line that was written to metrics.jsonl, and shows it."""
    shown = [
      f'{name} {value:.3f}' for name, value in metrics.items() if name.endswith('/reward')
    ]
    self.print_line(f'Step {step}: {", ".join(shown)}')

  def finish(self, workdir: pathlib.Path, label: str) -> None:
    """Called at the end of a run, after its models are written."""
    self.print_line(f'{label}: {workdir}')

  @contextlib.contextmanager
  def count_episodes(self, label: str, total: int) -> Iterator[Ended]:
    """Shows inside `with` how many episodes have ended; call the result for each."""
    self.print_line(f'{label}: {total} episodes')
    yield lambda trajectory: None


PLAIN = Watcher()


class Player(abc.ABC):
  """Plays an episode by itself; make_env may make one (serve/program.py)."""

  @abc.abstractmethod
  async def play(self, episode: Any, task: types.Task) -> types.Status:
    """Plays an episode to its end, and returns its status.

    Write sampled tokens to `episode.transcript`, messages to `episode.trajectory`, and
    rewards with `episode.add_reward`. `task` is a copy that the player may change.

    Raises:
      faults.EnvironmentFaultError: The user's code raised or was late.
    """


class Chooser(Protocol):
  """Chooses in one episode among candidates of a reply, or of complete turns."""

  @property
  def sampled(self) -> int:
    """The number of tokens of all candidates so far."""
    ...

  async def play(self, episode: Any) -> Any:
    """Plays an episode (rollout/episode.py), already reset, to its end.

    Returns:
      The episode, or the fork of it whose record counts.
    """
    ...

  def close(self) -> None:
    """Frees the rows of the cache that the chooser holds."""
    ...


class Choice(Protocol):
  """Makes the choosers of all episodes: guided/choice.py and guided/search.py."""

  @property
  def rows(self) -> int:
    """The rows of the cache that an episode needs."""
    ...

  def begin(self, replica: protocol.AnyReplica) -> Chooser:
    """Returns the chooser of an episode that this replica samples."""
    ...


class Order(NamedTuple):
  """An episode to play.

  Its random keys depend on the seed, `rollout`, the task's id and `number`.

  Attributes:
    task: The task.
    group: The index of the task in its rollout.
    sample: The index of the episode in its group.
    number: The index of the episode among all with this task's id in the rollout.
    rollout: The number of the rollout.
  """

  task: types.Task
  group: int
  sample: int
  number: int
  rollout: int


class Job(NamedTuple):
  """The common settings of a run's training episodes, to play them elsewhere.

  Attributes:
    config: The run's configuration, with all sizes.
    model: The policy's shape.
    chat: Turns messages into tokens.
    make_env: Makes a new environment for each episode.
    decoding: How replies are sampled, a rollout/decoding.py Decoding.
    made_of: Describes algorithm, environment and tools (train/fingerprint.py).
    corrected: Whether the algorithm corrects for the difference between the log-probs of
      sampler and learner.
  """

  config: config_lib.Config
  model: decoder.DecoderConfig
  chat: chat_lib.Chat
  make_env: Callable[[], Any]
  decoding: Any
  made_of: Mapping[str, Any]
  corrected: bool


class SamplersLostError(RuntimeError):
  """There were too few samplers for too long; the run can resume later."""


class Samplers(abc.ABC):
  """Plays the episodes of training rollouts elsewhere; contrib/ray implements it.

  The learner's own engine plays evaluations and greedy baselines.
  """

  @abc.abstractmethod
  def check(self, config: config_lib.Config) -> None:
    """Raises ValueError for settings that it does not support, before the run is made."""

  @abc.abstractmethod
  def open(self, job: Job) -> contextlib.AbstractContextManager:
    """Starts samplers for a run's episodes inside `with`, without waiting for them."""

  @abc.abstractmethod
  def sync_weights(self, params: decoder.Params, policy_step: int) -> None:
    """Publishes the policy that samples from now on, like Engine.sync_weights.

    Without `schedule.partial`, no order is open during the call.
    """

  @abc.abstractmethod
  async def play(self, order: Order) -> types.Trajectory:
    """Plays an episode; the result does not depend on the sampler or on retries.

    Raises:
      SamplersLostError: There were too few samplers for too long.
      RuntimeError: The episode raised repeatedly.
    """

  @abc.abstractmethod
  def measure(self) -> dict[str, float]:
    """Returns metrics since the last call, named 'samplers/...'."""
