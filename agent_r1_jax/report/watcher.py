"""Watches a run: a live view, alarms, faults, logs of episodes, sinks, traces, curves.

train.run(..., watcher=report.Watcher())
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import os
import pathlib
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.host import processes
from agent_r1_jax.report import alarms, episodes, profile, sinks, summary
from agent_r1_jax.report import meter as meter_lib
from agent_r1_jax.report import progress as progress_lib
from agent_r1_jax.rl import table as table_lib
from agent_r1_jax.rollout import sockets
from agent_r1_jax.train import metrics as metrics_lib


class Watcher(sockets.Watcher):
  """Shows a run to people; only the first process shows and writes."""

  def __init__(self, *run_sinks: sinks.RunSink):
    """Creates a watcher; it writes metrics to these sinks and the run's own."""
    self._given_sinks = self._run_sinks = run_sinks
    self._stepped = False
    self._bar: progress_lib.Progress | None = None
    self._meter: meter_lib.Meter | None = None

  def check(self, config: config_lib.Config) -> None:
    """Makes the sinks of modules, and accepts all other settings."""
    self._run_sinks = (*self._given_sinks, *sinks.load(config.sink_modules))

  @contextlib.contextmanager
  def begin(self, run: sockets.RunInfo) -> Iterator[None]:
    """Shows a view of the run, with its sinks open, inside `with`."""
    config = self._config = run.config
    self._workdir, self._call_format = run.workdir, run.call_format
    with contextlib.ExitStack() as stack:
      # At the end of a run, the engine's copy of the policy must be freed.
      stack.callback(self._forget)
      logged, self._sinks = [], []
      if processes.is_first():
        logged = metrics_lib.read(run.workdir)
        values = {name: fields.get(config, name) for name in fields.names(type(config))}
        self._sinks = sinks.start(config.sink_names, run.workdir, values, run.next_line)
        for sink in self._sinks:
          stack.callback(sink.close)
      for sink in self._run_sinks:
        stack.enter_context(sink.open(run))
      schedule, stats = config.schedule, run.engine.stats
      self._bar = stack.enter_context(
        _open_bar(
          schedule.steps,
          label=run.label,
          start=run.step,
          every=0.0,
          count_tokens=lambda: stats.sampled,
        )
      )
      if run.step < schedule.steps:
        self.print_line(_announce(run.label, schedule, run.step))
      self._alarms = alarms.AlarmMonitor(config.alarms, self.print_line, logged)
      self._faults = alarms.FaultCounter(self.print_line)
      self._meter, self._stepped = meter_lib.Meter(run.engine), False
      yield
      self._faults.report_totals()

  def _forget(self):
    self._bar = self._meter = None

  def print_line(self, line: str) -> None:
    """Prints a line above the live view."""
    if self._bar:
      self._bar.print_line(line)

  def set_phase(self, name: str, done: int | None = None, total: int | None = None):
    """Shows the phase of the current step."""
    if self._bar:
      self._bar.set_phase(name, done, total)

  def trace_step(self, step: int) -> contextlib.AbstractContextManager:
    """Traces the steps in config.profile; speed is measured from the first call.

    Compilation and the evaluation of the untrained policy come before it.
    """
    if self._meter and not self._stepped:
      self._meter.measure()
    self._stepped = True
    return profile.trace_step(self._config.profiled_steps, self._workdir, step)

  def see_episodes(self, step: int, played: Sequence[types.Trajectory]) -> None:
    """Prints each new kind of fault in users' code."""
    self._faults.count(step, played)

  def log_rollout(
    self,
    step: int,
    played: Sequence[types.Trajectory],
    learned_from: Sequence[types.Trajectory],
    table: table_lib.TokenTable,
  ) -> None:
    """Writes the first config.log_episodes, with their token columns."""
    numbers = {id(t): number for number, t in enumerate(learned_from)}
    if logged := played[: self._config.log_episodes]:
      tables = [
        table.take(table.trajectory == numbers[id(t)])
        if id(t) in numbers
        else table_lib.build([t])
        for t in logged
      ]
      self._write_episodes('rollout', step, logged, tables)

  def log_evaluation(
    self, name: str, step: int, played: Sequence[types.Trajectory]
  ) -> None:
    """Writes all episodes; config.log_episodes of them with their token columns."""
    logged = played[: self._config.log_episodes]
    self._write_episodes(name, step, played, [table_lib.build([t]) for t in logged])

  def _write_episodes(
    self,
    name: str,
    step: int,
    played: Sequence[types.Trajectory],
    tables: Sequence[table_lib.TokenTable],
  ):
    """Writes trajectories/step-<step>-<name>.jsonl; the first episodes have `tables`."""
    if processes.is_first():
      episodes.write(
        self._workdir / 'trajectories' / f'step-{step:05d}-{name}.jsonl',
        played,
        step=step,
        columns=[table.list_tokens() for table in tables],
        parse=self._call_format.parse,
      )

  def measure(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns speed and memory ('machine/...') and alarms; prints alarms that begin."""
    machine = self._meter.measure(metrics) if self._meter else {}
    return machine | self._alarms.check(step, {**metrics, **machine})

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Shows a step's metrics, and queues them for the sinks."""
    run_sinks = self._run_sinks if processes.is_first() else ()
    for sink in (*self._sinks, *run_sinks):
      sink.write(step, metrics)
    # Step 0 has only an evaluation.
    if self._bar and 'rollout/reward' in metrics:
      self._bar.show_metrics(step, metrics)

  def finish(self, workdir: pathlib.Path, label: str) -> None:
    """Writes curve and numbers, and prints which files there are."""
    if processes.is_first():
      summary.write_training_report(workdir, label)
      print(summary.list_files(workdir))

  @contextlib.contextmanager
  def count_episodes(self, label: str, total: int) -> Iterator[sockets.Ended]:
    """Shows a progress bar of an evaluation's episodes."""
    try:
      with _open_bar(total, label=label) as self._bar:
        yield self._bar.step_counter()
    finally:
      self._bar = None


def _announce(label: str, schedule: config_lib.Schedule, done: int) -> str:
  tasks, samples = schedule.tasks, schedule.samples
  return (
    f'{label}: {schedule.steps - done} steps, each of {tasks * samples} episodes '
    f'({tasks} tasks, {samples} samples each). First programs are compiled; the first '
    'rollout then tells how long the rest will take.'
  )


@contextlib.contextmanager
def _open_bar(total: int, **options: Any) -> Iterator[progress_lib.Progress]:
  """Shows a bar inside `with`; only the first process's is visible."""
  with contextlib.ExitStack() as stack:
    if not processes.is_first():
      options['file'] = stack.enter_context(open(os.devnull, 'w'))
    yield stack.enter_context(progress_lib.Progress(total, **options))
