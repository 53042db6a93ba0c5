"""Curves of groups of runs; each group is the seeds of one setting."""

from collections.abc import Mapping, Sequence
import fnmatch
import os

import numpy as np

from agent_r1_jax.report import plots
from experiments import tables


def plot_groups(
  groups: Mapping[str, Sequence[plots.Run]],
  path: str | os.PathLike,
  names: Sequence[str],
  *,
  title: str = '',
) -> None:
  """Draws groups of runs in one figure: each group's mean and its 95 % interval.

  Args:
    groups: The runs of each setting, with different seeds, by label.
    path: The file, of any of matplotlib's kinds.
    names: The metric of each panel: a name, or a pattern whose metrics are averaged.
    title: The title above all panels.

  Raises:
    ValueError: No run has any of the names.
  """
  rows_of = {
    label: [plots.read_run(run) for run in runs] for label, runs in groups.items()
  }
  panels: dict[str, plots.Curves] = {}
  for name in names:
    for label, seeds in rows_of.items():
      curve = plots.align_seeds([_averaged(rows, name) for rows in seeds], name)
      if curve[0].size:
        panels.setdefault(name, {})[label] = curve
  if not panels:
    raise ValueError(f'the runs have none of {list(names)}')
  caption = (
    'thin: each seed; thick: mean over seeds of running means over a twentieth of the '
    "run; band: its 95 % interval (Student's t)"
  )
  plots.draw_panels(panels, path, title, caption, _interval)


def final_values(
  groups: Mapping[str, Sequence[plots.Run]], name: str
) -> dict[str, list[float]]:
  """Returns each run's mean of a metric over the last tenth of its values, by group.

  `name` may be a pattern, whose metrics are averaged at each step.
  """
  series = {
    label: [[row[name] for row in _averaged(plots.read_run(run), name)] for run in runs]
    for label, runs in groups.items()
  }
  last = lambda values: float(np.mean(values[-max(1, len(values) // 10) :]))
  return {label: [last(v) for v in runs if v] for label, runs in series.items()}


def _interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the 95 % interval of the mean over seeds; for one seed, its value twice."""
  mean, half = tables.mean_interval(values)
  half = np.nan_to_num(half)
  return mean - half, mean + half


def _averaged(rows, pattern: str) -> list[dict[str, float]]:
  """Returns {'step': ..., pattern: mean} for each line with metrics of a pattern."""
  means = []
  for row in rows:
    values = [v for n, v in row.items() if fnmatch.fnmatchcase(n, pattern)]
    if values:
      means.append({'step': row['step'], pattern: float(np.mean(values))})
  return means
