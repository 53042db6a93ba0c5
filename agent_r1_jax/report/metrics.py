"""What a run tells people: numbers in files, progress on the terminal, curves, tables.

with metrics.Writer(workdir, resume_step=start) as writer:
  with metrics.Progress(steps, label='GRPO', start=start) as progress:
    for step in range(start, steps):
      progress.phase('rollout')
      ...
      writer.write(step, {'reward': 0.4, 'em': 0.3})
      progress.update(step + 1, reward=0.4)
metrics.curve(workdir, 'curve.png')
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import fnmatch
import io
import itertools
import json
import math
import os
import pathlib
import sys
import time
from typing import Any, NamedTuple

import numpy as np

from agent_r1_jax.host import disk
from agent_r1_jax.report import tensorboard

# A curve's panels: a title, and the names (patterns of fnmatch) drawn in it.
PANELS = {'Mean reward': ('reward', 'rollout/reward'), 'Exact match': ('em', '*/em')}


class Writer:
  """Writes numbers to `<workdir>/metrics.jsonl` and `<workdir>/tensorboard/`.

  A line of the file is one JSON object with 'step' and the numbers; it is on disk when
  `write` returns. JSON has no NaN and no infinity: they are the strings 'nan', 'inf' and
  '-inf', which `read` turns back.
  """

  def __init__(self, workdir: str | os.PathLike, *, resume_step: int | None = None):
    """Opens the files of `workdir`; goes on after what is there.

    Args:
      workdir: The run's directory; made if missing.
      resume_step: The step that comes next. What a killed run wrote at this step and
        after, behind its last checkpoint, is dropped; with None nothing is, but for a
        last line that was cut in half.
    """
    self._path = path = _file(workdir)
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.writing(path, 'The lines before this start'):
      _drop(path, math.inf if resume_step is None else resume_step)
      self._lines = io.FileIO(path, 'a')
    self._tensorboard = tensorboard.Events(path.parent / 'tensorboard', resume_step)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes one line.

    Args:
      step: Lines of one step may be several, for example of training and evaluation.
      values: Names and scalars (also of NumPy and JAX). 'a/b' groups in TensorBoard.

    Raises:
      ValueError: A value is no scalar, or is called 'step'.
      OSError: The line cannot be written, and the file is as it was: this file is the
        record of a run. TensorBoard is a convenience: what it is not given is told once.
    """
    if 'step' in values:
      raise ValueError("a metric cannot be called 'step': the line has one already")
    numbers = {name: _scalar(name, value) for name, value in values.items()}
    line = {name: v if math.isfinite(v) else str(v) for name, v in numbers.items()}
    text = json.dumps({'step': int(step)} | line, allow_nan=False) + '\n'
    with disk.writing(self._path, f'The line of step {step}'):
      disk.append(self._lines, text.encode())
    self._tensorboard.add(int(step), numbers)

  def close(self) -> None:
    """Closes both files."""
    self._lines.close()
    self._tensorboard.close()


def read(workdir: str | os.PathLike) -> list[dict[str, Any]]:
  """The lines of `<workdir>/metrics.jsonl`, without a last one that was cut in half.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: Another line than the last is broken; the message has its number.
  """
  path = _file(workdir)
  lines = path.read_text(encoding='utf-8', errors='replace').splitlines()
  rows = []
  for number, line in enumerate(lines, start=1):
    try:
      row = json.loads(line)
      rows.append({'step': int(row.pop('step'))} | {k: float(v) for k, v in row.items()})
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
      if number < len(lines):
        raise ValueError(
          f'{path}, line {number} is no line of metrics: {error}'
        ) from None
  return rows


def _file(workdir: str | os.PathLike) -> pathlib.Path:
  return pathlib.Path(workdir) / 'metrics.jsonl'


def _drop(path: pathlib.Path, resume_step: float) -> None:
  """Rewrites the file, atomically, with the whole lines of the steps before."""
  if not path.exists():
    return
  whole = path.read_bytes().splitlines(keepends=True)[: len(read(path.parent))]
  kept = [x for x in whole if json.loads(x)['step'] < resume_step]
  part = path.with_suffix('.part')
  try:
    part.write_bytes(b''.join(line.rstrip(b'\r\n') + b'\n' for line in kept))
    part.replace(path)
  except OSError:
    part.unlink(missing_ok=True)
    raise


def _scalar(name: str, value: Any) -> float:
  try:
    return float(value)
  except (TypeError, ValueError):
    raise ValueError(f'metric {name}={value!r} is no scalar') from None


class Progress:
  """How far a loop is: a bar on a terminal, a line every few seconds in a log file."""

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
    """Shows nothing before it is entered (`with`).

    Args:
      total: Steps of the whole loop.
      label: What the loop does, for example 'GRPO'.
      start: Steps done before, when a run goes on.
      every: Seconds between two lines where `file` is no terminal.
      file: Where to show it; by default standard output.
      clock: Seconds that only grow.
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

  def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
    """Says what is going on inside the step, for example ('rollout', 45, 128)."""
    self._phase = name if done is None else f'{name} {done}/{total}'
    self._show()

  def update(self, step: int, **numbers: float) -> None:
    """Says that `step` steps are done, and the newest numbers, for example reward=0.4."""
    self._step, self._phase = step, ''
    self._numbers = '  '.join(f'{name} {value:.3f}' for name, value in numbers.items())
    self._show()

  def say(self, line: str) -> None:
    """Says something that stays: above the bar, or as a line of its own."""
    if self._bar:
      self._bar.console.print(line, markup=False, highlight=False)
    else:
      self._write(line)

  def counter(self) -> Callable[[Any], None]:
    """A callback that counts its calls as steps, for what has no numbers of its own."""
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
      # A log that the terminal was sent to: what it lacks is in metrics.jsonl.
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


Run = str | os.PathLike | Sequence[Mapping[str, Any]]


def curve(
  runs: Run | Sequence[Run],
  path: str | os.PathLike,
  *,
  panels: Mapping[str, Sequence[str]] = PANELS,
  title: str = '',
  baselines: Mapping[str, float] | None = None,
) -> None:
  """Draws a learning curve as a PNG.

  Args:
    runs: One run or several seeds of one: working directories, or what `read` returns.
      Several give their mean, a band from the lowest to the highest, and thin lines.
    path: The picture.
    panels: Titles, and the patterns of the names to draw. A name that no run has is left
      out, and so is a panel without any.
    title: Above all panels.
    baselines: Names and heights of dashed lines in the last panel.

  Raises:
    ValueError: The runs have none of the names.
  """
  import matplotlib
  from matplotlib import figure as figures  # not pyplot: no window, no global state

  seeds = [_rows(run) for run in _as_list(runs)]
  found = {name: _names(seeds, patterns) for name, patterns in panels.items()}
  found = {name: names for name, names in found.items() if names}
  if not found:
    raise ValueError(f'the runs have none of {[p for ps in panels.values() for p in ps]}')
  with matplotlib.rc_context(_STYLE):
    figure = figures.Figure(figsize=(4.9 * len(found), 3.6), layout='constrained')
    axes = figure.subplots(1, len(found), squeeze=False)
    for axis, (name, names) in zip(axes[0], found.items(), strict=True):
      _panel(axis, name, names, seeds, baselines if name == list(found)[-1] else None)
    if title:
      figure.suptitle(title, x=0.01, ha='left', fontweight='bold')
    figure.supxlabel(_caption(len(seeds)), fontsize=8, color='#6b7280')
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


_COLORS = ('#2563eb', '#d97706', '#059669', '#9333ea', '#dc2626', '#475569')
_STYLE: Any = {
  'font.size': 10,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.edgecolor': '#9ca3af',
  'axes.grid': True,
  'axes.axisbelow': True,
  'grid.color': '#e5e7eb',
  'grid.linewidth': 0.8,
  'xtick.color': '#4b5563',
  'ytick.color': '#4b5563',
  'legend.frameon': False,
}


def _caption(seeds: int) -> str:
  if seeds == 1:
    return 'thin: as measured; thick: running mean over a twentieth of the run'
  return (
    f'thin: each of {seeds} seeds; thick: their running mean; band: lowest to highest'
  )


def _panel(axis, title: str, names: Sequence[str], seeds, baselines) -> None:
  for color, name in zip(_COLORS * len(names), names, strict=False):
    steps, values = _aligned(seeds, name)
    for row in values:
      axis.plot(steps, row, color=color, alpha=0.25, linewidth=0.8)
    smooth = np.stack([_smooth(row) for row in values])
    axis.fill_between(steps, smooth.min(0), smooth.max(0), color=color, alpha=0.13, lw=0)
    marker = 'o' if len(steps) <= 12 else None
    axis.plot(
      steps, smooth.mean(0), color=color, lw=2.2, marker=marker, ms=4, label=_short(name)
    )
  for name, height in (baselines or {}).items():
    axis.axhline(height, color='#6b7280', linestyle=(0, (4, 3)), linewidth=1)
    axis.annotate(
      name,
      (1, height),
      xycoords=('axes fraction', 'data'),
      xytext=(-2, 3),
      textcoords='offset points',
      ha='right',
      fontsize=8.5,
      color='#4b5563',
    )
  axis.set_title(title, loc='left', fontsize=11, fontweight='bold', color='#111827')
  axis.set_xlabel('step', color='#4b5563')
  axis.margins(x=0.02)
  low, high = axis.get_ylim()
  if 0 <= axis.dataLim.y0 and axis.dataLim.y1 <= 1:
    axis.set_ylim(0, max(high, 0.05))
  if len(names) > 1:
    axis.legend(loc='best', fontsize=8.5)


def _as_list(runs: Any) -> list[Any]:
  if isinstance(runs, str | os.PathLike) or (runs and isinstance(runs[0], Mapping)):
    return [runs]
  return list(runs)


def _rows(run: Run) -> Sequence[Mapping[str, Any]]:
  return read(run) if isinstance(run, str | os.PathLike) else run


def _names(seeds, patterns: Sequence[str]) -> list[str]:
  every = dict.fromkeys(name for rows in seeds for row in rows for name in row)
  return [n for n in every if any(fnmatch.fnmatchcase(n, p) for p in patterns)]


def _aligned(seeds, name: str) -> tuple[np.ndarray, np.ndarray]:
  """Steps [S] that every seed with this name has, and its values [seeds, S]."""
  series = [{r['step']: float(r[name]) for r in rows if name in r} for rows in seeds]
  series = [values for values in series if values]
  steps = sorted(set.intersection(*(set(values) for values in series)))
  return np.array(steps), np.array([[values[s] for s in steps] for values in series])


def _smooth(values: np.ndarray) -> np.ndarray:
  """A centred running mean over a twentieth of the curve; windows shrink at the ends."""
  half = len(values) // 40
  windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
  return np.array([np.mean(window) for window in windows])


def _short(name: str) -> str:
  parts = [part for part in name.split('/') if part not in ('em', 'eval')]
  return ' '.join(parts) or name


def wilson(successes: int, n: int) -> tuple[float, float]:
  """Computes the 95 % confidence interval of a proportion (Wilson, 1927).

  Unlike p̂ ± 1.96 σ it stays inside [0, 1] and is right for few trials and for p̂ near 0
  or 1.

  Args:
    successes: How many of the trials succeeded.
    n: How many trials there were; with none, the interval is (0, 1).

  Raises:
    ValueError: `successes` is not in [0, n].
  """
  from scipy import stats  # It takes a second.

  if not 0 <= successes <= n:
    raise ValueError(f'{successes} successes of {n} trials')
  if n == 0:
    return 0.0, 1.0
  low, high = stats.binomtest(successes, n).proportion_ci(method='wilson')
  return float(low), float(high)


class Count(NamedTuple):
  """A cell of a table: `successes` of `n`."""

  successes: int
  n: int


def table(
  rows: Mapping[str, Mapping[str, Count | float | str]],
  columns: Iterable[str],
  corner: str = 'method',
) -> str:
  """A table in Markdown that reads well as plain text, as the paper's Table 3.

  Args:
    rows: Name of a method -> name of a column -> its cell. A `Count` is shown as a
      proportion, its 95 % interval and the counts: '.713 [.659, .761] 214/300'; a number
      with three decimals; a missing cell as '-'.
    columns: The columns, in order.
    corner: The title of the first column, which holds the rows' names.

  Raises:
    ValueError: A row has a column that is not in `columns`.
  """
  columns = list(columns)
  for name, cells in rows.items():
    if unknown := cells.keys() - set(columns):
      raise ValueError(f'row {name!r} has {sorted(unknown)}, the columns are {columns}')
  lines = [[corner, *columns]]
  lines += [[name, *(_cell(r.get(c, '-')) for c in columns)] for name, r in rows.items()]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  text = [
    '| ' + ' | '.join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + ' |'
    for r in lines
  ]
  text.insert(1, '|' + '|'.join('-' * (width + 2) for width in widths) + '|')
  return '\n'.join(text)


def _cell(cell: Count | float | str) -> str:
  if isinstance(cell, str):
    return cell
  if not isinstance(cell, Count):
    return _decimal(cell)
  low, high = wilson(*cell)
  share = _decimal(cell.successes / cell.n) if cell.n else '-'
  return f'{share} [{_decimal(low)}, {_decimal(high)}] {cell.successes}/{cell.n}'


def _decimal(value: float) -> str:
  text = f'{value:.3f}'
  return text[1:] if text.startswith('0.') else text


class Clock:
  """Seconds since the last lap."""

  def __init__(self):
    self._last = time.perf_counter()

  def lap(self) -> float:
    """Seconds since this was called last, or since the clock was made."""
    now = time.perf_counter()
    seconds, self._last = now - self._last, now
    return seconds
