"""Writes metrics to TensorBoard, Weights & Biases and MLflow, besides metrics.jsonl.

A sink has two methods, `write(step, metrics)` and `close()`, which may raise or hang, and
an attribute `run`: the run's name in its service, or '' if resuming needs none.
metrics.jsonl is the record; a sink may miss lines.

A third-party module is a sink too if it has a class Sink, made without arguments: a
RunSink, which may also observe the moments of the run (host/moments.py).
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import importlib
import json
import os
import pathlib
import queue
import re
import threading
import time
from typing import Any, Protocol
import uuid
import warnings

from agent_r1_jax.host import disk
from agent_r1_jax.report import tensorboard
from agent_r1_jax.rollout import sockets

# When this many lines are queued for a sink, further lines are dropped.
_MOST_LINES = 1000
# How long the end of a run waits for a sink's last lines.
_CLOSE_SECONDS = 20.0


class Sink(Protocol):
  """A destination of a run's metrics."""

  run: str

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Writes the metrics of a step; steps are ascending."""
    ...

  def close(self) -> None:
    """Marks the run as finished; this is the last call."""
    ...


class RunSink(Protocol):
  """A third-party sink; its exceptions end the run, and its methods should not block."""

  def open(self, run: sockets.RunInfo) -> contextlib.AbstractContextManager[None]:
    """Entered around the run, in every process."""
    ...

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Receives a step's metrics, in the first process."""
    ...


class Background:
  """Writes to a sink in a thread, so that an error or hang there does not end the run.

  For a sink with a `run`, a file stores that name and the last step. A resumed run
  continues it and writes no step twice: steps repeated after the last checkpoint keep the
  numbers that were written first.

  Attributes:
    lost: The number of lines that were not written.
  """

  def __init__(self, name: str, make: Callable[[str], Sink], notes: pathlib.Path):
    """Starts the thread, which makes the sink.

    `make` gets the name of the sink's run, '' at the first start; `notes` is the file
    with that name and the last step.
    """
    self._name, self._make, self._notes = name, make, notes
    # Lines being written (0 or 1); why the sink stopped, or ''.
    self.lost, self._writing, self._warned, self._failure = 0, 0, False, ''
    self._queue: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(
      _MOST_LINES
    )
    self._thread = threading.Thread(target=self._run, daemon=True, name=f'sink {name}')
    self._thread.start()

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Queues a line without waiting; warns when the first line is lost."""
    try:
      if not self._failure:
        return self._queue.put_nowait((step, metrics))
    except queue.Full:
      pass
    self.lost += 1
    self._warn(self._failure or f'it is {_MOST_LINES} lines behind')

  def close(self) -> None:
    """Waits for queued lines, at most _CLOSE_SECONDS; warns of lost lines."""
    with contextlib.suppress(queue.Full):
      self._queue.put_nowait(None)
    self._thread.join(_CLOSE_SECONDS)
    if self._thread.is_alive():
      self._failure = f'it did not end within {_CLOSE_SECONDS:g} seconds'
    if self._failure:
      self._warn(self._failure)
    self.lost += self._writing
    with contextlib.suppress(queue.Empty):
      while True:
        self.lost += self._queue.get_nowait() is not None
    if self.lost:
      warnings.warn(f'{self._name}: {self.lost} lines were not written', stacklevel=2)

  def _warn(self, why: str) -> None:
    if not self._warned:
      self._warned = True
      warnings.warn(
        f'{self._name} does not take all metrics: {why}. The run goes on, and '
        'metrics.jsonl has all numbers; the next start of the run writes to it again',
        stacklevel=3,
      )

  def _run(self) -> None:
    """Makes the sink and writes queued lines until the run ends or the sink fails."""
    sink = None
    try:
      noted = json.loads(self._notes.read_text()) if self._notes.exists() else {}
      last = noted.get('step', -1)
      sink = self._make(noted.get('run', ''))
      while line := self._queue.get():
        step, metrics = line
        if step <= last:
          continue
        if sink.run:
          # Noted first: if killed in between, the line is not written twice.
          self._note(sink.run, step)
        self._writing = 1
        sink.write(step, metrics)
        self._writing = 0
      sink.close()
    except (Exception, SystemExit) as error:  # A library's sys.exit must not end the run.
      # Measured before closing the sink, which may free space on the disk.
      folder = self._notes.parents[1] / self._name
      self._failure = disk.describe_failure(folder, error) or repr(error)
      with contextlib.suppress(Exception, SystemExit):
        if sink is not None:
          sink.close()

  def _note(self, run: str, step: int) -> None:
    self._notes.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({'run': run, 'step': step}) + '\n'
    disk.write_atomically(self._notes, text.encode())


class WandbSink:
  """A run of Weights & Biases; WANDB_MODE=offline writes only to WORKDIR/wandb.

  WANDB_PROJECT and wandb's other variables set where it belongs.
  """

  def __init__(self, workdir: pathlib.Path, config: Mapping[str, Any], run: str):
    """Begins the run, or continues it if `run` is its name."""
    import wandb  # pyright: ignore[reportMissingImports]

    # Without a key, wandb would prompt for one on the terminal.
    online = os.environ.get('WANDB_MODE', 'online') == 'online'
    if online and not wandb.login(prompt=False):
      raise ValueError(
        'there is no API key: run `wandb login`, or set WANDB_MODE=offline'
      )
    self.run = run or uuid.uuid4().hex[:8]
    settings = wandb.Settings(console='off', silent=True, x_disable_stats=True)
    self._run = wandb.init(
      dir=str(workdir),
      id=self.run,
      name=workdir.name,
      resume='allow',
      config=dict(config),
      settings=settings,
    )

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Logs a step."""
    self._run.log(dict(metrics), step=step)

  def close(self) -> None:
    """Marks the run as finished."""
    self._run.finish()


class MlflowSink:
  """A run of MLflow: at MLFLOW_TRACKING_URI, or in the file WORKDIR/mlflow.db.

  MLFLOW_EXPERIMENT_NAME names the experiment, by default agent_r1_jax.
  """

  def __init__(self, workdir: pathlib.Path, config: Mapping[str, Any], run: str):
    """Begins the run, or continues it if `run` is its id."""
    import mlflow  # pyright: ignore[reportMissingImports]
    from mlflow import entities  # pyright: ignore[reportMissingImports]

    self._metric = entities.Metric
    uri = os.environ.get('MLFLOW_TRACKING_URI')
    self._client = mlflow.MlflowClient(uri or f'sqlite:///{workdir / "mlflow.db"}')
    self.run = run
    if run:
      self._client.update_run(run, 'RUNNING')
      return
    name = os.environ.get('MLFLOW_EXPERIMENT_NAME', 'agent_r1_jax')
    experiment = self._client.get_experiment_by_name(name)
    number = (
      experiment.experiment_id if experiment else self._client.create_experiment(name)
    )
    self.run = self._client.create_run(number, run_name=workdir.name).info.run_id
    params = [entities.Param(key, str(value)) for key, value in config.items()]
    self._client.log_batch(self.run, params=params)

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Logs a step; characters that MLflow does not allow in a name become '_'."""
    now = int(time.time() * 1000)
    self._client.log_batch(
      self.run,
      [
        self._metric(re.sub(r'[^\w\-./ ]', '_', name), value, now, step)
        for name, value in metrics.items()
      ],
    )

  def close(self) -> None:
    """Marks the run as finished."""
    self._client.set_terminated(self.run)


def start(
  names: Sequence[str],
  workdir: str | os.PathLike,
  config: Mapping[str, Any],
  resume_step: int | None = None,
) -> list[Background]:
  """Starts sinks by name (config.SINKS), each in a thread.

  `config` has the run's settings by dotted names; `resume_step` is the next step.
  """
  folder = pathlib.Path(workdir).resolve()
  make = {
    'tensorboard': lambda run: tensorboard.EventWriter(
      folder / 'tensorboard', resume_step
    ),
    'wandb': lambda run: WandbSink(folder, config, run),
    'mlflow': lambda run: MlflowSink(folder, config, run),
  }
  notes = folder / 'sinks'
  return [Background(name, make[name], notes / f'{name}.json') for name in names]


def load(modules: Sequence[str]) -> list[RunSink]:
  """Makes the sinks of modules that train/preflight.py has checked."""
  return [importlib.import_module(name).Sink() for name in modules]
