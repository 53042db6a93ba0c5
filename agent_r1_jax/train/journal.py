"""The journal: everything a training run keeps in its workdir, and how far it is.

with journal.Journal(config, workdir, label) as run_log:
train_state = run_log.restore(train_state, plan)
while run_log.position.step < config.steps:
...
run_log.position.learned(numbers, tasks_drawn)
run_log.write(numbers)
if run_log.checkpoints.should_save(run_log.position.step):
run_log.save(train_state, plan)
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import os
import pathlib
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax.host import checkpoint, processes
from agent_r1_jax.report import metrics
from agent_r1_jax.report import progress as progress_lib
from agent_r1_jax.rl import updates
from agent_r1_jax.train import spool as spool_lib


@dataclasses.dataclass
class Position:
  """How far a run is.

  Attributes:
    step: Rollouts that were learned from.
    tasks_drawn: Tasks that were drawn.
    written: The last step whose line is written; the first line is of step 0.
    unwritten: The line of `step` while its evaluation is missing; numbers as text, for
      not all that a float can be is JSON.
  """

  step: int = 0
  tasks_drawn: int = 0
  written: int = -1
  unwritten: dict[str, str] = dataclasses.field(default_factory=dict)

  def learned(self, numbers: Mapping[str, float], tasks_drawn: int):
    """Notes a step: its numbers so far, and the tasks that it drew."""
    self.step += 1
    self.tasks_drawn += tasks_drawn
    self.unwritten = {name: repr(float(value)) for name, value in numbers.items()}

  def numbers(self) -> dict[str, float]:
    """Of the line that is not written yet."""
    return {name: float(text) for name, text in self.unwritten.items()}


class Journal:
  """A run's files. Only the first process writes lines and shows progress.

  Attributes:
    position: How far the run is.
    checkpoints: Of all processes.
    progress: On the terminal.
    spool: Of finished episodes, if config.checkpoint.keep_rollouts.
  """

  def __init__(
    self,
    config: config_lib.Config,
    workdir: str | os.PathLike,
    label: str,
    made_of: Mapping[str, Any] | None = None,
  ):
    """Opens the workdir.

    Args:
      config: Of the run.
      workdir: Made if missing.
      label: What the progress bar calls the run.
      made_of: What else may not change between two starts (identity.describe_run).

    Raises:
      ValueError: Another run holds the workdir, or it is of another configuration, or
        made of something else.
    """
    self._config, self._workdir, self._label = config, workdir, label
    self.position = Position()
    self.spool = spool_lib.Spool(workdir) if config.checkpoint.keep_rollouts else None
    with contextlib.ExitStack() as stack:
      if processes.is_first():
        stack.enter_context(checkpoint.lock_workdir(workdir))
      self.checkpoints = stack.enter_context(
        checkpoint.Checkpointer(
          workdir, every=config.checkpoint.every, keep=config.checkpoint.keep
        )
      )
      # Only now: what has failed so far leaves no mark, and can be mended.
      fields = dataclasses.asdict(config)
      checkpoint.check_config(workdir, fields, may_change=('schedule.steps',))
      if made_of is not None:
        path = pathlib.Path(workdir) / 'made_of.json'
        mend = (
          'Give another workdir. If the change is meant, or is of no account, delete '
          f'{path}: this run then goes on with what it is given now'
        )
        checkpoint.check_config(workdir, made_of, name=path.name, mend=mend)
      self._stack = stack.pop_all()

  def __enter__(self):
    return self

  def __exit__(self, *error):
    return self._stack.__exit__(*error)

  def restore(
    self, train_state: updates.TrainState, plan: updates.Plan
  ) -> updates.TrainState:
    """What the newest checkpoint holds, or `train_state` as it is; opens the lines there.

    Raises:
      ValueError: The run had checkpoints, and none is there that can be read.
    """
    if restored := self.checkpoints.restore(like=train_state.checkpoint_arrays(plan)):
      _, arrays, host = restored
      train_state = train_state.restore(arrays, host['train_state'])
      self.position = Position(**host['position'])
    else:
      self._check_new()
    self._writer, shown = None, None
    if processes.is_first():
      writer = metrics.Writer(self._workdir, resume_step=self.position.written + 1)
      self._writer = self._stack.enter_context(writer)
    else:
      shown = self._stack.enter_context(open(os.devnull, 'w'))
    self.progress = self._stack.enter_context(
      progress_lib.Progress(
        self._config.schedule.steps,
        label=self._label,
        start=self.position.step,
        file=shown,
      )
    )
    return train_state

  def _check_new(self):
    """Refuses to begin anew where checkpoints have been.

    A checkpoint is complete before the next is begun, and that after the line of its
    step: once there is a line beyond the second one's step, the first was complete.
    """
    path = pathlib.Path(self._workdir) / 'metrics.jsonl'
    lines = metrics.read(self._workdir) if path.exists() else []
    last = max((line['step'] for line in lines), default=0)
    if last > 2 * self._config.checkpoint.every:
      raise ValueError(
        f'{path} has lines up to step {last}, and there is no checkpoint in '
        f'{self.checkpoints.directory}: were they deleted? Put them back, or give '
        'another workdir to start anew'
      )

  def write(self, numbers: Mapping[str, float]):
    """Writes the line of the present step."""
    if self._writer:
      self._writer.write(self.position.step, numbers)
    self.position.written, self.position.unwritten = self.position.step, {}

  def save(self, train_state: updates.TrainState, plan: updates.Plan):
    """Starts to write a checkpoint of the present step, if there is none."""
    host = {
      'position': dataclasses.asdict(self.position),
      'train_state': train_state.checkpoint_numbers(),
    }
    self.checkpoints.save(self.position.step, train_state.checkpoint_arrays(plan), host)
    # The new one is still on its way; the one before it is safe.
    if self.spool and (safe := self.checkpoints.steps):
      self.spool.delete(before=rollout_number(self._config.schedule, safe[-1]))


def rollout_number(schedule: config_lib.Schedule, step: int) -> int:
  """The number of a step's first rollout; its refills follow."""
  return step * (schedule.max_refills + 1)
