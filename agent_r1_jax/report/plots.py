"""Draws learning curves of one run, or of several seeds."""

from collections.abc import Callable, Mapping, Sequence
import fnmatch
import os
import pathlib
from typing import Any

import numpy as np

from agent_r1_jax.train import metrics

Run = str | os.PathLike | Sequence[Mapping[str, Any]]
# Label of a line -> steps [S], values [seeds, S].
Curves = dict[str, tuple[np.ndarray, np.ndarray]]


def plot_curves(
  runs: Sequence[Run],
  path: str | os.PathLike,
  panels: Mapping[str, Sequence[str]],
  *,
  title: str = '',
) -> None:
  """Draws a learning curve as a PNG.

  Args:
    runs: One run, or several seeds of one: workdirs, or lines of `metrics.read`. Several
      seeds are thin lines, with their mean and a band from lowest to highest.
    path: The PNG file.
    panels: Titles, each with the names to draw under it (fnmatch patterns). Names that no
      run has are left out, and so are panels without names.
    title: The title above all panels.

  Raises:
    ValueError: The runs have none of the names.
  """
  seeds = [read_run(run) for run in runs]
  drawn: dict[str, Curves] = {}
  for panel, patterns in panels.items():
    for name in dict.fromkeys(name for rows in seeds for row in rows for name in row):
      if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
        drawn.setdefault(panel, {})[_short(name)] = align_seeds(seeds, name)
  if not drawn:
    raise ValueError(f'the runs have none of {[p for ps in panels.values() for p in ps]}')
  caption = 'thin: as measured; thick: running mean over a twentieth of the run'
  if len(seeds) > 1:
    caption = f'thin: each of {len(seeds)} seeds; thick: their running mean; '
    caption += 'band: lowest to highest'
  draw_panels(drawn, path, title, caption, lambda values: (values.min(0), values.max(0)))


def draw_panels(
  panels: Mapping[str, Curves],
  path: str | os.PathLike,
  title: str,
  caption: str,
  band: Callable,
) -> None:
  """Draws panels side by side; `band` returns the ends of a band around values."""
  import matplotlib
  from matplotlib import figure as figures  # not pyplot: no window, no global state

  with matplotlib.rc_context(_STYLE):
    figure = figures.Figure(figsize=(4.9 * len(panels), 3.6), layout='constrained')
    axes = figure.subplots(1, len(panels), squeeze=False)
    for axis, (name, curves) in zip(axes[0], panels.items(), strict=True):
      _draw_panel(axis, name, curves, band)
    if title:
      figure.suptitle(title, x=0.01, ha='left', fontweight='bold')
    figure.supxlabel(caption, fontsize=8, color='#6b7280')
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


def _draw_panel(axis, title: str, curves: Curves, band: Callable) -> None:
  for i, (label, (steps, values)) in enumerate(curves.items()):
    color = _COLORS[i % len(_COLORS)]
    axis.plot(steps, values.T, color=color, alpha=0.25, linewidth=0.8)
    smooth = np.stack([_smooth(row) for row in values])
    axis.fill_between(steps, *band(smooth), color=color, alpha=0.13, lw=0)
    marker = 'o' if len(steps) <= 12 else None
    mean = smooth.mean(0)
    axis.plot(steps, mean, color=color, lw=2.2, marker=marker, ms=4, label=label)
  axis.set_title(title, loc='left', fontsize=11, fontweight='bold', color='#111827')
  axis.set_xlabel('step', color='#4b5563')
  axis.margins(x=0.02)
  heights = np.concatenate([values.ravel() for _, values in curves.values()])
  heights = heights[np.isfinite(heights)]
  # From the values alone: the interval of two seeds may be many times wider.
  low, high = (heights.min(), heights.max()) if heights.size else (0.0, 1.0)
  margin = 0.06 * max(high - low, 0.1)
  axis.set_ylim(0.0 if 0 <= low and high <= 1 else low - margin, high + margin)
  if len(curves) > 1:
    axis.legend(loc='best', fontsize=8.5)


def read_run(run: Run) -> Sequence[Mapping[str, Any]]:
  """Returns a run's lines of metrics."""
  return metrics.read(run) if isinstance(run, str | os.PathLike) else run


def align_seeds(seeds, name: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns the steps [S] that all seeds with this metric have, and values [seeds, S]."""
  series = [{r['step']: float(r[name]) for r in rows if name in r} for rows in seeds]
  series = [values for values in series if values]
  steps = sorted(set.intersection(*(set(values) for values in series or [{}])))
  return np.array(steps), np.array([[values[s] for s in steps] for values in series])


def _smooth(values: np.ndarray) -> np.ndarray:
  """Returns a centred running mean over a twentieth; windows shrink at the ends."""
  half = len(values) // 40
  windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
  return np.array([np.mean(window) for window in windows])


def _short(name: str) -> str:
  parts = [part for part in name.split('/') if part not in ('em', 'eval')]
  return ' '.join(parts) or name
