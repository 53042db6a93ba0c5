"""Writes the paper's tables from results: by method, and for pairs of methods."""

from collections.abc import Mapping, Sequence
import itertools
import json
import pathlib
from typing import Any

import numpy as np

from agent_r1_jax.report import plots, tables
from experiments import tables as tables_lib

Line = dict[str, Any]
# Two methods with fewer common seeds are not compared.
_LEAST_SEEDS = 4


def render(
  lines: Sequence[Line], target: pathlib.Path, groups: Mapping[str, Sequence[str]]
) -> None:
  """Writes the tables (.md), the curves (.png) and their numbers (.jsonl).

  Args:
    lines: The results.
    target: Prefix of the files.
    groups: The methods of each table, in their order; masks are in parentheses.
  """
  order = {m: i for i, m in enumerate(dict.fromkeys(itertools.chain(*groups.values())))}
  lines = sorted(lines, key=lambda r: (order[r['method']], r['seed']))
  of = {m: [r for r in lines if r['method'] == m] for m in order}
  of = {method: rows for method, rows in of.items() if rows}
  sets, parts, shown = list(lines[0]['sets']), [], set()
  for title, methods in groups.items():
    chosen = {m: of[m] for m in methods if m in of}
    if chosen.keys() <= shown:
      continue  # It is in an earlier table.
    shown |= chosen.keys()
    for kind in lines[0]['sets'][sets[0]]:
      rows = {m: _average_seeds(found, sets, kind) for m, found in chosen.items()}
      columns = [*sets, 'average', 'seeds', 'minutes a seed']
      parts.append(f'### {title}, {kind}\n\n{tables.format_table(rows, columns)}\n')
    if pairs := compare_pairs({m: _average_sets(r, sets) for m, r in chosen.items()}):
      columns = ['difference', 'seeds', 'ahead', 'would show']
      parts.append(f'### {title}, pairs\n\n{tables.format_table(pairs, columns)}\n')
  target.parent.mkdir(parents=True, exist_ok=True)
  target.with_suffix('.md').write_text('\n'.join(parts))
  target.with_suffix('.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in lines))
  print('\n'.join(parts))
  plotted = [m for title in list(groups)[:2] for m in groups[title]]
  if learned := {m: r for m, r in of.items() if r[0]['rewards'] and m in plotted}:
    _plot_rewards(learned, target.with_suffix('.png'))


def compare_pairs(
  scores: Mapping[str, Mapping[int, float]],
) -> dict[str, dict[str, tables.Cell]]:
  """Compares methods seed by seed.

  Args:
    scores: The score of each method and seed.

  Returns:
    For each pair the mean difference with its 95 % interval (Student's t, not corrected
    for the number of pairs), the common seeds, in how many of them the first leads, and
    the true difference that this many seeds would detect in four of five experiments.
  """
  from scipy import stats  # Takes a second.

  cells: dict[str, dict[str, tables.Cell]] = {}
  for a, b in itertools.combinations(scores, 2):
    seeds = sorted(scores[a].keys() & scores[b].keys())
    n, gaps = len(seeds), np.array([scores[a][s] - scores[b][s] for s in seeds])
    if n < _LEAST_SEEDS:
      continue
    # For a test with 5 % false positives and 20 % false negatives.
    far = stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1)
    cells[f'{a} - {b}'] = {
      'difference': tables.Interval(*tables_lib.mean_interval(gaps)),
      'seeds': str(n),
      'ahead': f'{(gaps > 0).sum()}/{n}',
      'would show': float(far * gaps.std(ddof=1) / n**0.5),
    }
  return cells


def _average_sets(rows: Sequence[Line], sets: Sequence[str]) -> dict[int, float]:
  """Returns the mean over the sets, by seed; nothing for methods without seeds."""
  if not rows[0]['rewards'] and len(rows) < 2:
    return {}
  mean = lambda row: float(np.mean([row['sets'][s]['all']['mean'] for s in sets]))
  return {row['seed']: mean(row) for row in rows}


def _average_seeds(rows, sets, kind) -> dict[str, Any]:
  """Returns a method's cells: means over seeds, with 95 % intervals (Student's t)."""
  cells: dict[str, Any] = {}
  means = [[r['sets'][s][kind]['mean'] for s in sets] for r in rows]
  counts = [rows[0]['sets'][s][kind]['count'] for s in sets]
  interval = lambda values: tables.Interval(*tables_lib.mean_interval(values))
  for name, values, n in zip(sets, zip(*means, strict=True), counts, strict=True):
    if n:
      alone = tables.Count(round(values[0] * n), n)
      cells[name] = interval(values) if len(rows) > 1 else alone
  if all(counts):
    average = [float(np.mean(m)) for m in means]
    cells['average'] = interval(average) if len(rows) > 1 else average[0]
  cells['seeds'] = str(len(rows))
  cells['minutes a seed'] = f'{np.mean([r["seconds"] for r in rows]) / 60:.1f}'
  return cells


def _plot_rewards(learned, path) -> None:
  """Plots every method's reward in training, with the spread of the seeds."""
  seeds: dict[int, dict[int, dict[str, float]]] = {}
  for method, rows in learned.items():
    for r in rows:
      for step, reward in enumerate(r['rewards'], 1):
        line = seeds.setdefault(r['seed'], {}).setdefault(step, {'step': step})
        line[method] = reward
  plain = [m for m in learned if '(' not in m]
  panels = {'Methods': plain}
  for name in ('PPO', 'GRPO'):
    panels[f'{name} and its masks'] = [m for m in learned if m.split(' (')[0] == name]
  runs = [list(lines.values()) for lines in seeds.values()]
  plots.plot_curves(runs, path, panels=panels, title='Reward in training')
