"""The files of a training run's workdir, and the state of its loop."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import os
import pathlib
from typing import Any

import jax
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.host import checkpoint, disk, processes, runtime
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.models import lora
from agent_r1_jax.models.files import peft_files, weights
from agent_r1_jax.rl.train_state import TrainState
from agent_r1_jax.rollout import store as store_lib
from agent_r1_jax.train import curriculum, fingerprint
from agent_r1_jax.train import metrics as metrics_lib
from agent_r1_jax.train.plan import plan as plan_lib


@dataclasses.dataclass
class LoopState:
  """The progress of a run, saved in checkpoints.

  Attributes:
    step: The number of rollouts learned from.
    draws: The tasks drawn.
    written_step: The last step whose line is in metrics.jsonl; -1 if there is no line
      yet. The first line, of step 0, has the evaluation before training.
    pending_metrics: The metrics of a step from its update until its line is written,
      after the evaluation; otherwise empty. A run preempted during the evaluation resumes
      with them.
  """

  step: int = 0
  draws: curriculum.Draws = dataclasses.field(default_factory=curriculum.Draws)
  written_step: int = -1
  pending_metrics: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def is_new(self) -> bool:
    """Whether nothing has been written or learned yet."""
    return self.written_step < 0 and not self.pending_metrics

  def advance(self, metrics: Mapping[str, float], draws: curriculum.Draws):
    """Counts a step, with its metrics so far and the draws at its end."""
    self.step += 1
    self.draws = draws
    self.pending_metrics = {name: float(value) for name, value in metrics.items()}

  def to_json(self) -> dict[str, Any]:
    """Returns the state as JSON; metrics are strings, since JSON has no NaN."""
    return {
      'step': self.step,
      'draws': dataclasses.asdict(self.draws),
      'written': self.written_step,
      'unwritten': {name: repr(value) for name, value in self.pending_metrics.items()},
    }

  @classmethod
  def from_json(cls, saved: Mapping[str, Any]) -> 'LoopState':
    """The inverse of `to_json`."""
    metrics = {name: float(text) for name, text in saved['unwritten'].items()}
    draws = curriculum.Draws(**saved['draws'])
    return cls(saved['step'], draws, saved['written'], metrics)


@contextlib.contextmanager
def lock(workdir: str | os.PathLike) -> Iterator[None]:
  """Locks a workdir inside `with`; raises ValueError if another run holds it."""
  with workdir_lib.lock(workdir) if processes.is_first() else contextlib.nullcontext():
    yield


def check_config(
  values: Mapping[str, Any], workdir: str | os.PathLike, *, write: bool = False
) -> None:
  """Compares a configuration's values with the workdir's run, if there is one.

  Raises:
    ValueError: A field differs that a resumed run may not change.
  """
  made_with = {
    'devices': runtime.describe_devices(),
    'version': runtime.describe_version(),
  }
  named, may_change = {**values, **made_with}, [*config_lib.MAY_CHANGE, *made_with]
  workdir_lib.check_config(workdir, named, may_change=may_change, write=write)


class RunFiles:
  """A run's files. Only the first process writes lines.

  Attributes:
    workdir: The run's directory.
    loop_state: The progress of the run.
    checkpoints: Writes and restores the train state, in all processes together.
    store: Stores finished episodes if config.checkpoint.keep_rollouts, else None.
  """

  def __init__(self, plan: plan_lib.Plan, workdir: str | os.PathLike):
    """Opens and locks the workdir.

    Raises:
      ValueError: Another run holds the workdir, or the workdir's run has another
        configuration or `made_of`.
    """
    self._plan, self.workdir = plan, pathlib.Path(workdir)
    self.loop_state, values = LoopState(), dataclasses.asdict(plan.config)
    every, keep, keeps_rollouts = dataclasses.astuple(plan.config.checkpoint)
    self.store = store_lib.EpisodeStore(workdir) if keeps_rollouts else None
    with contextlib.ExitStack() as stack:
      stack.enter_context(lock(workdir))
      check_config(values, workdir)
      checkpoints = checkpoint.Checkpointer(workdir, every=every, keep=keep)
      self.checkpoints = stack.enter_context(checkpoints)
      # Written last, so that a start that fails earlier leaves no file.
      check_config(values, workdir, write=True)
      path = self.workdir / 'made_of.json'
      remedy = (
        'Give another workdir. If the change is intended or does not matter, delete '
        f'{path}: this run then goes on with what it is given now'
      )
      workdir_lib.check_config(workdir, plan.made_of, name=path.name, remedy=remedy)
      self._stack = stack.pop_all()

  def __enter__(self):
    return self

  def __exit__(self, *error):
    return self._stack.__exit__(*error)

  @property
  def next_line(self) -> int:
    """The step of the next line of metrics.jsonl."""
    return self.loop_state.written_step + 1

  def restore(self, train_state: TrainState) -> TrainState:
    """Restores the newest checkpoint, and opens the files for the steps after it.

    Sets the loop state and drops later lines of metrics.jsonl. Call this before `write`
    and `save`.

    Returns:
      The restored train state; `train_state` itself if there is no checkpoint yet.

    Raises:
      ValueError: The run had checkpoints, but none can be read.
    """
    processes.check_same({'the steps in checkpoints/': self.checkpoints.steps})
    if restored := self.checkpoints.restore(
      like=train_state.checkpoint_arrays(self._plan.update_config)
    ):
      _, arrays, host_state = restored
      train_state = train_state.restore(arrays, host_state['train_state'])
      self.loop_state = LoopState.from_json(host_state['position'])
    if processes.is_first():
      metrics_lib.drop_lines(self.workdir, self.next_line)
    return train_state

  def write(self, metrics: Mapping[str, float]):
    """Writes the line of the current step to metrics.jsonl.

    Only the first process writes. In all processes the loop state counts the step as
    written, and drops its pending metrics.
    """
    if processes.is_first():
      metrics_lib.write(self.workdir, self.loop_state.step, metrics)
    self.loop_state.written_step = self.loop_state.step
    self.loop_state.pending_metrics = {}

  def save(self, train_state: TrainState):
    """Starts to write a checkpoint of the current step, if there is none."""
    arrays = train_state.checkpoint_arrays(self._plan.update_config)
    host_state = {
      'position': self.loop_state.to_json(),
      'train_state': train_state.checkpoint_numbers(),
    }
    self.checkpoints.save(self.loop_state.step, arrays, host_state)
    # The new checkpoint is not complete yet; a run may still resume from the one before.
    if self.store and (complete := self.checkpoints.steps):
      self.store.delete(before=rollout_number(self._plan.schedule, complete[-1]))

  def save_models(self, train_state: TrainState):
    """Writes the policy, its adapters, and a critic, privileged or not."""
    plan = self._plan
    base, model = plan.config.model.path, plan.update_config.model
    value_head = fingerprint.describe_critic(
      plan.update_config.algorithm, base, privileged=plan.privileged is not None
    )
    options = {'tokenizer_from': base, 'value_head': value_head}
    for name, state in train_state.states.items():
      target = self.workdir / ('model' if name == 'policy' else name)
      weights.save(target, model, state.params, **options)
    policy = train_state.states['policy'].params
    if lora.is_in(policy):
      source = pathlib.Path(base).resolve()
      peft_files.save(self.workdir / 'adapter', policy, source, model)

  def find_newest_checkpoint(self) -> int:
    """Returns the newest checkpoint's step, or 0; any thread may call it."""
    names = [path.name for path in self.checkpoints.directory.glob('*')]
    return max([int(name) for name in names if name.isdigit()], default=0)

  def dump_batches(self, batches: Sequence[types.Batch]) -> str:
    """Writes the micro-batches of a non-finite loss to not_finite.npz.

    The arrays are named by micro-batch, such as '0/advantages' or '0/rows/tokens'.

    Returns:
      A sentence that says where the arrays are, or why they could not be written.
    """
    path = self.workdir / 'not_finite.npz'
    leaves = jax.tree_util.tree_leaves_with_path(list(batches))
    arrays: dict[str, Any] = {
      jax.tree_util.keystr(where, simple=True, separator='/'): np.asarray(value)
      for where, value in leaves
    }
    try:
      np.savez_compressed(path, **arrays)
    except OSError as error:
      reason = disk.describe_failure(path, error)
      path.unlink(missing_ok=True)
      return f'Its batch could not be written: {reason}.'
    return f'The batch is in {path}.'


def rollout_number(schedule: config_lib.Schedule, step: int) -> int:
  """Returns the number of a step's first rollout; its refills follow."""
  return step * (schedule.max_refills + 1)
