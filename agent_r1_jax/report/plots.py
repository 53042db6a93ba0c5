"""Learning curves of one run or of several seeds, as a PNG."""

from collections.abc import Mapping, Sequence
import fnmatch
import os
import pathlib
from typing import Any

import numpy as np

from agent_r1_jax.report import metrics

# The default panels: a title, and the names (patterns of fnmatch) drawn under it.
PANELS = {'Mean reward': ('reward', 'rollout/reward'), 'Exact match': ('em', '*/em')}

Run = str | os.PathLike | Sequence[Mapping[str, Any]]


def plot_curves(
  runs: Run | Sequence[Run],
  path: str | os.PathLike,
  *,
  panels: Mapping[str, Sequence[str]] = PANELS,
  title: str = '',
  baselines: Mapping[str, float] | None = None,
) -> None:
  """Draws a learning curve as a PNG.

  Args:
    runs: One run or several seeds of one: workdirs, or lines of `metrics.read`. Several
      seeds give their mean, a band from the lowest to the highest, and thin lines.
    path: The PNG file.
    panels: Titles, each with patterns of the names to draw. Names that no run has are
      left out, and so are panels without any.
    title: The title above all panels.
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
  return metrics.read(run) if isinstance(run, str | os.PathLike) else run


def _names(seeds, patterns: Sequence[str]) -> list[str]:
  every = dict.fromkeys(name for rows in seeds for row in rows for name in row)
  return [n for n in every if any(fnmatch.fnmatchcase(n, p) for p in patterns)]


def _aligned(seeds, name: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns the steps [S] that all seeds with this name have, and values [seeds, S]."""
  series = [{r['step']: float(r[name]) for r in rows if name in r} for rows in seeds]
  series = [values for values in series if values]
  steps = sorted(set.intersection(*(set(values) for values in series)))
  return np.array(steps), np.array([[values[s] for s in steps] for values in series])


def _smooth(values: np.ndarray) -> np.ndarray:
  """Returns a centred running mean over a twentieth; windows shrink at the ends."""
  half = len(values) // 40
  windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
  return np.array([np.mean(window) for window in windows])


def _short(name: str) -> str:
  parts = [part for part in name.split('/') if part not in ('em', 'eval')]
  return ' '.join(parts) or name
