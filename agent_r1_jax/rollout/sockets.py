"""The four sockets of a run: watching it, playing and choosing in it, sampling elsewhere.

The core calls them, and others implement them: report/watcher.py watches,
serve/program.py plays an episode, guided/choice.py and guided/search.py choose its
replies, contrib/ray plays episodes on machines that come and go. Observers of what
happens inside an episode, such as a tool call, are in host/moments.py.
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
    config: Its configuration.
    workdir: Its directory.
    label: Its name.
    step: How many steps were completed before.
    next_line: The step of the next line of metrics.jsonl.
    call_format: The format of tool calls in replies.
    engine: The engine, whose counts give the speed.
  """

  config: config_lib.Config
  workdir: pathlib.Path
  label: str
  step: int
  next_line: int
  call_format: call_formats.CallFormat
  engine: protocol.AnyEngine


class Watcher:
  """Observes a run and prints one line per step; subclasses override what they show.

  The loop calls the same methods in all processes. An exception in a method ends the run,
  so a watcher has to catch and report its own faults.
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
    """Receives all episodes of a rollout or an evaluation, as soon as they have ended."""
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
      step: The completed steps, this one included.
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
    """Called at the end of a run, when its models are written."""
    self.print_line(f'{label}: {workdir}')

  @contextlib.contextmanager
  def count_episodes(self, label: str, total: int) -> Iterator[Ended]:
    """Shows inside `with` how many episodes have ended; it is called for each."""
    self.print_line(f'{label}: {total} episodes')
    yield lambda trajectory: None


PLAIN = Watcher()


class Player(abc.ABC):
  """Plays an episode by itself; make_env may make one (serve/program.py)."""

  @abc.abstractmethod
  async def play(self, episode: Any, task: types.Task) -> types.Status:
    """Plays an episode to its end, and returns its status.

    What is sampled goes into `episode.transcript`, messages into `episode.trajectory`,
    and rewards through `episode.add_reward`.

    The player may change `task`, which is a copy.

    Raises:
      faults.EnvironmentFaultError: The user's code raised or was late.
    """


class Chooser(Protocol):
  """Who chooses in one episode: among candidates of a reply, or of whole turns."""

  @property
  def sampled(self) -> int:
    """The tokens of all candidates so far."""
    ...

  async def play(self, episode: Any) -> Any:
    """Plays an episode that has been reset to its end (rollout/episode.py).

    Returns:
      That episode, or the fork of it whose record counts.
    """
    ...

  def close(self) -> None:
    """Frees the rows of the cache that it took."""
    ...


class Choice(Protocol):
  """How it is chosen, in all episodes: guided/choice.py and guided/search.py."""

  @property
  def rows(self) -> int:
    """The rows of the cache that an episode takes."""
    ...

  def begin(self, replica: protocol.AnyReplica) -> Chooser:
    """Returns who chooses in an episode that this replica samples."""
    ...


class Order(NamedTuple):
  """An episode that is to be played.

  With the seed, its rollout, the task's id and its number make its random keys.

  Attributes:
    task: The task.
    group: The number of the task in its rollout.
    sample: The number of the episode in its group.
    number: The number of the episode among all of this task's id in the rollout.
    rollout: The number of the rollout.
  """

  task: types.Task
  group: int
  sample: int
  number: int
  rollout: int


class Job(NamedTuple):
  """What all episodes of a run's rollouts have in common, so that others can play them.

  Attributes:
    config: The run's configuration, with all sizes.
    model: The policy's shape.
    chat: Makes tokens of messages.
    make_env: Makes a new environment for each episode.
    decoding: How replies are sampled, as rollout/decoding.py's Decoding.
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
  """Too few samplers have been there for too long; the run can resume later."""


class Samplers(abc.ABC):
  """Plays the episodes of training rollouts elsewhere; contrib/ray implements it.

  Evaluations and greedy baselines are played by the learner's own engine.
  """

  @abc.abstractmethod
  def check(self, config: config_lib.Config) -> None:
    """Raises ValueError for settings that it does not support, before the run is made."""

  @abc.abstractmethod
  def open(self, job: Job) -> contextlib.AbstractContextManager:
    """Has samplers play a run's episodes inside `with`; does not wait for any of them."""

  @abc.abstractmethod
  def sync_weights(self, params: decoder.Params, policy_step: int) -> None:
    """Publishes the policy that samples from now on, as Engine.sync_weights.

    Without `schedule.partial`, no order is open meanwhile.
    """

  @abc.abstractmethod
  async def play(self, order: Order) -> types.Trajectory:
    """Plays an episode; who plays it, and how often, changes nothing.

    Raises:
      SamplersLostError: See there.
      RuntimeError: The episode raised, again and again.
    """

  @abc.abstractmethod
  def measure(self) -> dict[str, float]:
    """Returns metrics since the last call, named 'samplers/...'."""
