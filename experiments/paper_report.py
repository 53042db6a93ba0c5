"""The tables and the picture of what experiments/paper_tables.py measured."""

from collections.abc import Sequence
import json
import pathlib
from typing import Any

import numpy as np

from agent_r1_jax.report import plots, tables


def render(
  lines: Sequence[dict[str, Any]],
  target: pathlib.Path,
  methods: Sequence[str],
  steady: Sequence[str],
) -> None:
  """Writes the tables (.md), the curves (.png) and the numbers they are of (.jsonl).

  Args:
    lines: The results.
    target: Prefix of the files.
    methods: The methods of the paper's tables, in their order; masks are in parentheses.
    steady: Those that may keep GRPO from collapsing, which have a table of their own.
  """
  order = {method: i for i, method in enumerate([*methods, *steady])}
  lines = sorted(lines, key=lambda r: (order[r['method']], r['seed']))
  of = {m: [r for r in lines if r['method'] == m] for m in order}
  of = {method: rows for method, rows in of.items() if rows}
  sets = list(lines[0]['sets'])
  chosen_for = {
    'Table 3: methods': [m for m in of if '(' not in m and m not in steady],
    'Table 4: masks': [m for m in of if m in ('PPO', 'GRPO') or '(' in m],
  }
  if {*steady} & of.keys():
    chosen_for['Against collapse'] = [m for m in of if m == 'GRPO' or m in steady]
  parts = []
  for title, chosen in chosen_for.items():
    kinds = list(lines[0]['sets'][sets[0]])
    for kind in kinds:
      rows = {m: _row(of[m], sets, kind) for m in chosen}
      columns = [*sets, 'average', 'seeds', 'minutes a seed']
      parts.append(f'### {title}, {kind}\n\n{tables.format_table(rows, columns)}\n')
  target.parent.mkdir(parents=True, exist_ok=True)
  target.with_suffix('.md').write_text('\n'.join(parts))
  target.with_suffix('.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in lines))
  print('\n'.join(parts))
  learned = {m: r for m, r in of.items() if r[0]['rewards'] and m not in steady}
  if learned:
    _curves(learned, target.with_suffix('.png'))


def _row(rows, sets, kind) -> dict[str, Any]:
  """A method's cells: the mean over seeds, and its 95 % interval (Student's t)."""
  cells: dict[str, Any] = {}
  means = [[r['sets'][s][kind]['mean'] for s in sets] for r in rows]
  counts = [rows[0]['sets'][s][kind]['count'] for s in sets]
  for name, values, n in zip(sets, zip(*means, strict=True), counts, strict=True):
    if n:
      alone = tables.Count(round(values[0] * n), n)
      cells[name] = (
        tables.Interval(*tables.mean_interval(values)) if len(rows) > 1 else alone
      )
  if all(counts):
    average = [float(np.mean(m)) for m in means]
    cells['average'] = (
      tables.Interval(*tables.mean_interval(average)) if len(rows) > 1 else average[0]
    )
  cells['seeds'] = str(len(rows))
  cells['minutes a seed'] = f'{np.mean([r["seconds"] for r in rows]) / 60:.1f}'
  return cells


def _curves(learned, path) -> None:
  """The reward in training of every method, with the seeds' spread."""
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
