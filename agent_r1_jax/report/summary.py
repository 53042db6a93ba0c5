"""Writes the tables and learning curve of a finished run."""

from collections.abc import Mapping, Sequence
import json
import os
import pathlib

import numpy as np

from agent_r1_jax.report import plots, tables
from agent_r1_jax.train import metrics

# Method -> set -> kind of task, or 'all' -> 'mean' and 'count'.
Scores = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]

# The files of a workdir, each with a description.
_FILES = {
  'learning curve': 'curve.png',
  'numbers of the run': 'numbers.md',
  'tables': 'table.md',
  'metrics': 'metrics.jsonl',
  'trajectories': 'trajectories',
  'trained model': 'model',
  'adapters': 'adapter',
  'critic': 'critic',
}


def write_training_report(workdir: str | os.PathLike, title: str = '') -> None:
  """Writes curve.png and numbers.md from a run's metrics."""
  folder, lines = pathlib.Path(workdir), metrics.read(workdir)
  if not any('rollout/reward' in line for line in lines):
    return
  second = {'Exact match': ('eval/*/em',)}
  if not any(name.endswith('/em') for line in lines for name in line):
    second = {'Reward in evaluations': ('eval/*/reward',)}
  panels = {'Reward in training': ('rollout/reward',), **second}
  plots.plot_curves([lines], folder / 'curve.png', panels, title=title)
  (folder / 'numbers.md').write_text(_summarize_metrics(lines) + '\n')


def _summarize_metrics(lines: Sequence[Mapping[str, float]]) -> str:
  """Makes a table of each metric's mean at the beginning and end, and its extremes."""
  names = dict.fromkeys(name for line in lines for name in line if name != 'step')
  rows = {}
  for name in names:
    values = [line[name] for line in lines if name in line]
    tenth = max(1, len(values) // 10)
    begin, end = np.mean(values[:tenth]), np.mean(values[-tenth:])
    cells = {'first tenth': begin, 'last tenth': end}
    cells |= {'lowest': min(values), 'highest': max(values)}
    rows[name] = {column: f'{value:.4g}' for column, value in cells.items()}
  columns = ('first tenth', 'last tenth', 'lowest', 'highest')
  return tables.format_table(rows, columns, corner='number')


def write_tables(
  scores: Scores, workdir: str | os.PathLike, measure: str = 'Exact match'
) -> str:
  """Writes table.md and table.json: a measure by method, set and kind of task.

  `scores` has the result of `evaluate.by_kind` for each method and set; `measure` names
  the scores, for the titles.

  Returns:
    The text of table.md.
  """
  sets = {name: kinds for by_set in scores.values() for name, kinds in by_set.items()}
  kinds = dict.fromkeys(kind for by_kind in sets.values() for kind in by_kind)
  parts = []
  for kind in kinds:
    rows = {
      method: {
        name: tables.Count(round(cell['mean'] * cell['count']), round(cell['count']))
        for name, by_kind in by_set.items()
        if (cell := by_kind[kind])['count']
      }
      for method, by_set in scores.items()
    }
    title = measure if kind == 'all' else f'{measure}, {kind}'
    parts.append(f'## {title}\n\n{tables.format_table(rows, sets)}')
  text, folder = '\n\n'.join(parts) + '\n', pathlib.Path(workdir)
  (folder / 'table.md').write_text(text)
  (folder / 'table.json').write_text(json.dumps(scores, indent=2) + '\n')
  return text


def list_files(workdir: str | os.PathLike) -> str:
  """Returns a line for each of _FILES that is in a workdir."""
  paths = {label: pathlib.Path(workdir) / name for label, name in _FILES.items()}
  return '\n'.join(f'{label}: {path}' for label, path in paths.items() if path.exists())
