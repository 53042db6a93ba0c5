"""The configuration of a training run: dataclasses that are absl flags and config.json.

Each part of a run has a dataclass with a method `check`. `Config` nests them: the field
`rows` of `engine` is the flag --config.engine.rows.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

from agent_r1_jax import fields
from agent_r1_jax.config.learning import Alarms as Alarms
from agent_r1_jax.config.learning import Batch as Batch
from agent_r1_jax.config.learning import Checkpoint as Checkpoint
from agent_r1_jax.config.learning import Curriculum as Curriculum
from agent_r1_jax.config.learning import Mesh as Mesh
from agent_r1_jax.config.learning import Optimizer as Optimizer
from agent_r1_jax.config.learning import Schedule as Schedule
from agent_r1_jax.config.playing import GREEDY as GREEDY
from agent_r1_jax.config.playing import TOOL_FORMATS as TOOL_FORMATS
from agent_r1_jax.config.playing import Chat as Chat
from agent_r1_jax.config.playing import Engine as Engine
from agent_r1_jax.config.playing import Limits as Limits
from agent_r1_jax.config.playing import Model as Model
from agent_r1_jax.config.playing import Sampling as Sampling

# The built-in destinations of metrics; see report/sinks.py.
SINKS = ('tensorboard', 'wandb', 'mlflow')


def _default(kind: Any) -> Any:
  return dataclasses.field(default_factory=kind)


@dataclasses.dataclass
class Config:
  """All settings of a run; the defaults are the paper's where it states them.

  Attributes:
    model: The models to load, and how they compute.
    chat: How tasks and tools become text.
    limits: The budgets of one episode.
    sampling: How training rollouts are sampled.
    evaluation: How evaluations are sampled; greedy by default.
    engine: Sizes and number formats of the engine.
    schedule: The number of episodes and updates, and their order.
    curriculum: Which tasks are drawn for training.
    batch: Sizes of the micro-batches of gradients.
    optimizer: The optimizer of policy and critic.
    mesh: How the chips share the work.
    checkpoint: How often the run is saved.
    alarms: Limits of metrics beyond which an alarm is logged.
    seed: The seed of the order of tasks and of all sampling.
    max_error_rate: The largest share of a rollout's episodes that may end with an error,
      and of its calls that may meet a broken tool, before the run ends.
    log_episodes: How many episodes of each rollout are written to trajectories/. As many
      of these and of each evaluation set include per-token numbers.
    sinks: Services that get metrics besides metrics.jsonl: names in SINKS, and modules
      with a class Sink, such as my_package.my_sink, separated by commas.
    profile: Steps to trace for Perfetto and XProf, to profile/ in the workdir: numbers as
      in metrics.jsonl, separated by commas, such as '2,50'.
  """

  # The sizes of --first_try, a quick check that a script works.
  FIRST_TRY: ClassVar[Mapping[str, int]] = {
    'schedule.steps': 4,
    'schedule.tasks': 4,
    'schedule.samples': 4,
  }

  model: Model = _default(Model)
  chat: Chat = _default(Chat)
  limits: Limits = _default(Limits)
  sampling: Sampling = _default(Sampling)
  evaluation: Sampling = _default(lambda: Sampling(temperature=0.0))
  engine: Engine = _default(Engine)
  schedule: Schedule = _default(Schedule)
  curriculum: Curriculum = _default(Curriculum)
  batch: Batch = _default(Batch)
  optimizer: Optimizer = _default(Optimizer)
  mesh: Mesh = _default(Mesh)
  checkpoint: Checkpoint = _default(Checkpoint)
  alarms: Alarms = _default(Alarms)
  seed: int = 0
  max_error_rate: float = fields.from_0_to_1(0.1)
  log_episodes: int = 8
  sinks: str = 'tensorboard'
  profile: str = ''

  @property
  def sink_names(self) -> list[str]:
    """The names in `sinks` that are among SINKS."""
    return [name for name in self._sinks if '.' not in name]

  @property
  def sink_modules(self) -> list[str]:
    """The modules in `sinks`."""
    return [name for name in self._sinks if '.' in name]

  @property
  def _sinks(self) -> list[str]:
    return [name.strip() for name in self.sinks.split(',') if name.strip()]

  @property
  def profiled_steps(self) -> list[int]:
    """The steps in `profile`."""
    return [int(step) for step in self.profile.split(',') if step.strip()]

  def check(self) -> None:
    """Raises ValueError for a value of a wrong type or out of its range.

    Raises:
      ValueError: Names the field, the value and the allowed values.
    """
    fields.check(self)
    unknown = set(self.sink_names).difference(SINKS)
    # Such as '.my_sink', which would be relative to an unknown package.
    unknown.update(m for m in self.sink_modules if not all(m.split('.')))
    if unknown:
      raise ValueError(
        f'sinks is {self.sinks!r}, with {", ".join(sorted(unknown))}; give some of '
        f'{", ".join(SINKS)}, separated by commas, or modules such as my_package.sink.'
      )
    if not all(s.strip().isdecimal() for s in self.profile.split(',') if s.strip()):
      raise ValueError(
        f"profile is {self.profile!r}; give numbers of steps, such as '2,50'."
      )
    for field in dataclasses.fields(self):
      part = getattr(self, field.name)
      if hasattr(part, 'check'):
        part.check(field.name)


# Fields whose value the run chooses if it is 0 (train/plan/sizes.py).
SIZES = tuple(fields.names(Config, fields.chosen_if_0))
# Fields, and parts with all their fields, that may differ when a run is resumed: they do
# not affect training, except for rounding and for episodes that hit a time limit.
# docs/launching.md lists them. engine.slots is fixed, as it bounds episodes.
_MAY_CHANGE = (
  *('alarms', 'checkpoint', 'mesh', 'max_error_rate', 'log_episodes', 'sinks', 'profile'),
  *('schedule.steps', 'schedule.eval_every', 'schedule.max_staleness'),
  *('limits.reset_seconds', 'limits.step_seconds'),
  *('limits.close_seconds', 'limits.episode_seconds'),
  *('engine.decode_steps', 'engine.width', 'engine.narrow', 'engine.drafts'),
  *('model.remat', 'optimizer.offload', 'batch.trees'),
  *(name for name in SIZES if name != 'engine.slots'),
)
MAY_CHANGE = tuple(
  name
  for name in fields.names(Config)
  if name in _MAY_CHANGE or name.partition('.')[0] in _MAY_CHANGE
)
