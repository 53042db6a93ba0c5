"""Shows a loop's progress on the terminal, and how long it will take.

with progress.Progress(steps, label='GRPO', start=start) as bar:
  for step in range(start, steps):
    bar.set_phase('rollout')
    ...
    bar.update(step + 1, reward=0.4)
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import contextlib
import itertools
import logging
import math
import statistics
import sys
import threading
import time
from typing import Any, NamedTuple

from agent_r1_jax.host import disk, preemption, terminal

# The displayed metrics of a training step, in order: from label to name in
# metrics.jsonl.
VIEW = {
  'reward': 'rollout/reward',
  'exact match': 'rollout/em',
  'length': 'rollout/action_tokens',
  'turns': 'rollout/turns',
  'tool calls': 'rollout/tool_calls',
  'tool errors': 'rollout/tool_errors',
  'failed episodes': 'rollout/status/error',
  'KL': 'train/kl',
  'KL to sampler': 'train/behaviour_kl',
  'entropy': 'train/entropy',
  'tokens/s': 'machine/tokens_per_second',
  'idle': 'machine/idle',
  'memory': 'machine/memory_gb',
  'MFU': 'machine/mfu',
}
# All other metrics have three decimals.
_FORMATS = {
  'length': '{:.1f}',
  'failed episodes': '{:.1%}',
  'tokens/s': '{:,.0f}',
  'idle': '{:.0%}',
  'memory': '{:.1f} GB',
  'MFU': '{:.0%}',
}
_BARS = '▁▂▃▄▅▆▇█'
# Widths of a metric's columns in the view: name, last value, sparkline.
_WIDTHS = 15, 8, 12
# Redraws of the view per second, and the longest time to wait for the last one.
_REFRESHES, _STOP_SECONDS = 2.0, 2.0
# How often a long step's phase is written to a log file. In the first step, which shows
# people whether all is well, the interval grows to this from a few seconds.
_PHASE_SECONDS, _FIRST_PHASE_SECONDS = 60.0, 5.0
# How often to check whether a line is due.
_LOOK_SECONDS = 1.0
# The share of a rollout's episodes that must have ended to estimate the others' time.
_TELLING = 0.25


class Progress:
  """Shows the steps of a loop: a live view on a terminal, lines in a log file."""

  def __init__(
    self,
    total: int,
    *,
    label: str = '',
    start: int = 0,
    every: float = 5.0,
    file: Any = None,
    count_tokens: Callable[[], int] | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Shows nothing before `with`.

    `start` steps of `total` are already done. If `file`, by default standard output, is
    not a terminal, a line is printed every `every` seconds; 0 prints one line per step.
    `count_tokens` returns how many tokens have been sampled so far, which shows that a
    phase without reports is alive.
    """
    self._total, self._label, self._start, self._every = total, label, start, every
    self._file, self._clock = file or sys.stdout, clock
    self._count_tokens = count_tokens
    self._step, self._printed_step = start, -1
    self._phase = _Phase('', 0.0, 0)
    # When the first rollout began.
    self._rollout_began: float | None = None
    self._ended, self._printing = threading.Event(), threading.Lock()
    self._teller = threading.Thread(target=self._keep_telling, daemon=True)
    # The metrics of the last step, and of all steps.
    self._numbers: dict[str, float] = {}
    self._histories: dict[str, list[float]] = {}
    # (step, time) of the last updates.
    self._updates: collections.deque[tuple[int, float]] = collections.deque(maxlen=20)
    self._started_at = self._printed_at = clock()
    self._live, self._console = None, None
    self._handlers: list[tuple[logging.StreamHandler, Any]] = []
    self._stopping = threading.Lock()

  def __enter__(self):
    from rich import console

    self._started_at = self._printed_at = self._clock()
    screen = console.Console(file=self._file)
    if screen.is_terminal and not screen.is_dumb_terminal:
      self._console = screen
      self._start_live()
    elif self._count_tokens:
      self._teller.start()
    return self

  def __exit__(self, *_):
    self._ended.set()
    if self._teller.is_alive():
      self._teller.join(_STOP_SECONDS)
    self._begin_phase('')
    self._stop_live()
    if self._console is None and self._step != self._printed_step:
      self._print()

  def set_phase(
    self, name: str, done: int | None = None, total: int | None = None
  ) -> None:
    """Shows the current step's phase, for example ('rollout', 45, 128)."""
    if name != self._phase.name:
      self._begin_phase(name)
    self._phase = self._phase._replace(done=done, total=total)
    if name == 'rollout' and self._rollout_began is None:
      self._rollout_began = self._clock()
    self._print_after(self._phase_interval())

  def _begin_phase(self, name: str) -> None:
    tokens = self._count_tokens() if self._count_tokens else 0
    self._phase = _Phase(name, self._clock(), tokens)

  def _phase_interval(self) -> float:
    if self._updates:
      return max(self._every, _PHASE_SECONDS)
    spent = self._clock() - self._started_at
    return max(self._every, _FIRST_PHASE_SECONDS, min(_PHASE_SECONDS, spent / 4))

  def _keep_telling(self) -> None:
    """Prints the phase when a line is due and nothing was reported."""
    while not self._ended.wait(_LOOK_SECONDS):
      if self._phase.name:
        with contextlib.suppress(OSError):  # The loop's own print reports it.
          self._print_after(self._phase_interval())

  def update(self, step: int, **numbers: float) -> None:
    """Shows that `step` steps are done, with metrics of the last, such as reward=0.4."""
    self._step, self._numbers = step, numbers
    self._begin_phase('')
    self._updates.append((step, self._clock()))
    for name, value in numbers.items():
      self._histories.setdefault(name, []).append(value)
    self._print_after(self._every)

  def show_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """Shows that a training step is done, and its metrics in VIEW."""
    numbers = {name: metrics[key] for name, key in VIEW.items() if key in metrics}
    scores = [
      v for k, v in metrics.items() if k.startswith('eval/') and k.endswith('/em')
    ]
    if scores:
      numbers['eval match'] = statistics.fmean(scores)
    self.update(step, **numbers)

  def print_line(self, line: str) -> None:
    """Prints a line above the live view."""
    if live := self._live:
      live.console.print(terminal.printable(line), markup=False, highlight=False)
    else:
      self._write(line)

  def step_counter(self) -> Callable[[Any], None]:
    """Returns a callback that counts a step per call."""
    steps = itertools.count(self._start + 1)
    return lambda _: self.update(next(steps))

  def _start_live(self) -> None:
    from rich import live

    self._live = live.Live(
      get_renderable=self._render,
      console=self._console,
      refresh_per_second=_REFRESHES,
    )
    before = sys.stdout, sys.stderr
    self._live.start(refresh=True)
    # A killed process must not leave a terminal without a cursor.
    self._live.console.show_cursor(True)
    self._handlers = _redirect_logging(
      dict(zip(before, (sys.stdout, sys.stderr), strict=True))
    )
    preemption.before_answer.append(self._stop_live)

  def _stop_live(self) -> None:
    """Draws the view for the last time; later output is plain lines.

    On Ctrl-C the signal-reading thread calls this, and a terminal that accepts no text,
    as after Ctrl-S, must not block it.
    """
    if not self._stopping.acquire(timeout=_STOP_SECONDS):
      return
    if live := self._live:
      with contextlib.suppress(ValueError):
        preemption.before_answer.remove(self._stop_live)
      for handler, stream in self._handlers:
        handler.stream = stream
      stop = threading.Thread(target=live.stop, daemon=True)
      stop.start()
      stop.join(_STOP_SECONDS)
      self._live = None
    self._stopping.release()

  def _render(self):
    from rich import columns, console, panel, progress_bar, table, text

    head = table.Table.grid(padding=(0, 2, 0, 0), expand=True)
    head.add_column(ratio=1)
    for _ in range(2):
      head.add_column(no_wrap=True)
    bar = progress_bar.ProgressBar(max(1, self._total), self._step)
    head.add_row(bar, f'{self._step}/{self._total}', self._times())
    cells = []
    for name, history in list(self._histories.items()):
      cell = table.Table.grid(padding=(0, 1, 0, 0))
      for width, justify in zip(_WIDTHS, ('left', 'right', 'left'), strict=True):
        cell.add_column(width=width, justify=justify, no_wrap=True)
      line = text.Text(_draw_sparkline(history, _WIDTHS[-1]), 'cyan')
      cell.add_row(text.Text(name, 'dim'), text.Text(_format(name, history[-1])), line)
      cells.append(cell)
    view = panel.Panel(
      console.Group(head, columns.Columns(cells, equal=True)),
      title=text.Text(self._label, 'bold'),
      title_align='left',
      subtitle=text.Text(phase) if (phase := self._describe_phase()) else None,
      subtitle_align='left',
      border_style='dim',
    )
    # An empty line, where the terminal can show ^C without moving the view.
    return console.Group(view, text.Text())

  def _print_after(self, seconds: float) -> None:
    """Prints a line if the last one is older than `seconds`, unless there is a view."""
    with self._printing:
      if self._live is None and self._clock() - self._printed_at >= seconds:
        self._printed_at = self._clock()
        self._print()

  def _print(self) -> None:
    numbers = '  '.join(f'{name} {_format(name, v)}' for name, v in self._numbers.items())
    parts = (f'{self._label} {self._step}/{self._total}', numbers, self._times())
    self._write('  '.join(part for part in (*parts, self._describe_phase()) if part))
    self._printed_step = self._step

  def _describe_phase(self) -> str:
    name, _, tokens, done, total = self._phase
    text = name if done is None else f'{name} {done}/{total}'
    sampled = self._count_tokens() - tokens if name and self._count_tokens else 0
    return f'{text}, {sampled:,} tokens' if sampled else text

  def _write(self, line: str) -> None:
    try:
      encoding = getattr(self._file, 'encoding', None)
      print(terminal.printable(line, encoding), file=self._file, flush=True)
    except OSError as error:
      # Standard output is a file on a full disk; metrics.jsonl has the numbers.
      if not disk.is_full(error):
        raise

  def _times(self) -> str:
    seconds, about = self._estimate_step()
    remaining = seconds * (self._total - self._step)
    text = f'{_minutes(self._clock() - self._started_at)} spent'
    return text + (f', {about}{_minutes(remaining)} left' if remaining > 0 else '')

  def _estimate_step(self) -> tuple[float, str]:
    """Returns the seconds per step, NaN if unknown, and 'about ' for a guess.

    The first step compiles, and is ignored once there are others. Before it ends, the
    estimate comes from the episodes of its rollout that have ended.
    """
    phase, began = self._phase, self._rollout_began
    done, total = phase.done or 0, phase.total or 0
    if len(self._updates) > 1:
      first, last = self._updates[0], self._updates[-1]
      steps, seconds = (b - a for a, b in zip(first, last, strict=True))
      return (seconds / steps if steps else math.nan), ''
    if began is not None and self._updates:
      return self._updates[0][1] - began, 'about '
    if phase.name == 'rollout' and done and done >= _TELLING * total:
      return (self._clock() - phase.began) * total / done, 'about '
    return math.nan, ''


class _Phase(NamedTuple):
  """A phase of a step.

  Attributes:
    name: Its name; empty between phases.
    began: When it began, by the clock.
    tokens: The number of tokens sampled before it.
    done: How much of `total` is done; None if it is not counted.
    total: The total amount.
  """

  name: str
  began: float
  tokens: int
  done: int | None = None
  total: int | None = None


def _redirect_logging(streams: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
  """Redirects log handlers to other streams.

  Handlers keep the standard streams from their creation, and would write into the view.

  Returns:
    The handlers, each with its old stream.
  """
  loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
  handlers = [h for logger in loggers for h in getattr(logger, 'handlers', ())]
  handlers += [getattr(handler, 'python_handler', None) for handler in handlers]  # absl's
  changed = {}
  for handler in handlers:
    if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
      changed[handler] = handler.stream
      handler.stream = streams[handler.stream]
  return list(changed.items())


def _format(name: str, value: float) -> str:
  if name not in _FORMATS and 0 < abs(value) < 5e-4:
    return f'{value:.0e}'
  return _FORMATS.get(name, '{:.3f}').format(value)


def _draw_sparkline(values: Sequence[float], width: int) -> str:
  """Draws the finite values as bars, each the mean of equally many values."""
  values = [value for value in values if math.isfinite(value)]
  n = min(width, len(values))
  edges = [round(i * len(values) / n) for i in range(n + 1)] if n else []
  means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
  low = min(means, default=0.0)
  scale = (len(_BARS) - 1) / ((max(means, default=0.0) - low) or 1.0)
  return ''.join(_BARS[round((mean - low) * scale)] for mean in means)


def _minutes(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02}:{seconds:02}' if hours else f'{minutes}:{seconds:02}'
