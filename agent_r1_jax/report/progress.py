"""Shows the progress of a loop on the terminal, and times its parts.

with progress.Progress(steps, label='GRPO', start=start) as bar:
  for step in range(start, steps):
    bar.set_phase('rollout')
    ...
    bar.update(step + 1, reward=0.4)
"""

from collections.abc import Callable
import itertools
import math
import sys
import time
from typing import Any

from agent_r1_jax.host import disk


class Progress:
  """Shows the steps of a loop: a bar on a terminal, a line at intervals in a log file."""

  def __init__(
    self,
    total: int,
    *,
    label: str = '',
    start: int = 0,
    every: float = 5.0,
    file: Any = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Shows nothing before `with`.

    Args:
      total: Number of steps of the whole loop.
      label: What the loop does, for example 'GRPO'.
      start: Number of steps done before, when a run is resumed.
      every: Seconds between two lines where `file` is no terminal.
      file: Where to show it; by default standard output.
      clock: Returns monotonic seconds.
    """
    self._total, self._label, self._start, self._every = total, label, start, every
    self._file, self._clock = file or sys.stdout, clock
    self._step, self._phase, self._numbers, self._line = start, '', '', ''
    self._began = self._shown = clock()
    self._bar = None

  def __enter__(self):
    from rich import console, progress

    self._began = self._shown = self._clock()
    terminal = console.Console(file=self._file)
    if terminal.is_terminal:
      self._bar = progress.Progress(
        progress.TextColumn('[bold]{task.description}'),
        progress.BarColumn(bar_width=24),
        progress.TextColumn('{task.completed:.0f}/{task.total:.0f}'),
        progress.TextColumn('[cyan]{task.fields[numbers]}'),
        progress.TextColumn('{task.fields[left]}'),
        progress.SpinnerColumn(),
        progress.TextColumn('[dim]{task.fields[phase]}'),
        console=terminal,
      )
      self._task = self._bar.add_task(
        self._label, total=self._total, completed=self._start, **self._fields()
      )
      self._bar.start()
    return self

  def __exit__(self, *_):
    self._phase = ''
    if self._bar:
      self._show()
      self._bar.stop()
    else:
      self._print()

  def set_phase(
    self, name: str, done: int | None = None, total: int | None = None
  ) -> None:
    """Shows what the step is doing, for example ('rollout', 45, 128)."""
    self._phase = name if done is None else f'{name} {done}/{total}'
    self._show()

  def update(self, step: int, **numbers: float) -> None:
    """Shows that `step` steps are done, and metrics of the last, such as reward=0.4."""
    self._step, self._phase = step, ''
    self._numbers = '  '.join(f'{name} {value:.3f}' for name, value in numbers.items())
    self._show()

  def print_line(self, line: str) -> None:
    """Prints a line that stays, above the bar."""
    if self._bar:
      self._bar.console.print(line, markup=False, highlight=False)
    else:
      self._write(line)

  def step_counter(self) -> Callable[[Any], None]:
    """Returns a callback that counts each call of it as a step."""
    ended = itertools.count(self._start + 1)
    return lambda _: self.update(next(ended))

  def _show(self) -> None:
    if self._bar:
      self._bar.update(self._task, completed=self._step, **self._fields())
    elif self._clock() - self._shown >= self._every:
      self._shown = self._clock()
      self._print()

  def _print(self) -> None:
    parts = [f'{self._label} {self._step}/{self._total}', *self._fields().values()]
    line = '  '.join(part for part in parts if part)
    if line != self._line:
      self._write(line)
    self._line = line

  def _write(self, line: str) -> None:
    try:
      print(line, file=self._file, flush=True)
    except OSError as error:
      # Standard output goes to a file on a full disk; metrics.jsonl has the numbers.
      if not disk.is_full(error):
        raise

  def _fields(self) -> dict[str, Any]:
    spent = self._clock() - self._began
    done = self._step - self._start
    left = spent / done * (self._total - self._step) if done else math.nan
    times = f'{_minutes(spent)} spent' + (f', {_minutes(left)} left' if left > 0 else '')
    return {'numbers': self._numbers, 'left': times, 'phase': self._phase}


def _minutes(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02}:{seconds:02}' if hours else f'{minutes}:{seconds:02}'


class Clock:
  """Measures the seconds between laps."""

  def __init__(self):
    self._last = time.perf_counter()

  def lap(self) -> float:
    """Returns the seconds since the last call, or since the clock was made."""
    now = time.perf_counter()
    seconds, self._last = now - self._last, now
    return seconds
