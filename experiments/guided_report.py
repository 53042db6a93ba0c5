"""Tables and a picture of what experiments/guided.py measured, over several seeds.

python -m experiments.guided_report runs/guided/results-test-100.jsonl ...
"""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

from absl import app, flags
import numpy as np

from agent_r1_jax.report import tables
from experiments import results

_OUT = flags.DEFINE_string('out', 'runs/guided/report', 'Prefix of the files written.')
_K = flags.DEFINE_integer('k', 8, 'The K of the second table.')
_COLORS = (
  *('#2563eb', '#d97706', '#059669', '#9333ea', '#111827', '#6b7280', '#dc2626'),
  *('#db2777', '#0891b2', '#65a30d', '#a16207', '#fb7185', '#14b8a6'),
)
Lines = Sequence[Mapping[str, Any]]


def pool(lines: Lines) -> tables.Count:
  """Adds the right answers of several seeds and sets."""
  cells = [s['all'] for line in lines for s in line['sets'].values()]
  right = sum(round(cell['mean'] * cell['count']) for cell in cells)
  return tables.Count(right, sum(cell['count'] for cell in cells))


def mean(lines: Lines, name: str) -> float:
  """Averages a number of several seeds."""
  return float(np.mean([line[name] for line in lines]))


def format_share(count: tables.Count) -> str:
  """Writes exact match as .750."""
  return f'{count.successes / count.n:.3f}'.lstrip('0')


def make_tables(methods: Mapping[tuple[str, int], Lines], k: int) -> tuple[str, str]:
  """Makes a table of exact match by K, and one of one K with all its numbers."""
  by_k: dict[str, dict[str, str]] = {}
  rows, names = {}, sorted({n for _, n in methods})
  for (method, n), lines in methods.items():
    by_k.setdefault(method, {})[f'K = {n}'] = format_share(pool(lines))
    if n in (1, k):
      sets = list(lines[0]['sets'])
      of = lambda name, lines=lines: [{'sets': {name: x['sets'][name]}} for x in lines]
      rows[method] = {name: format_share(pool(of(name))) for name in sets} | {
        'all': pool(lines),
        'tokens': f'{mean(lines, "tokens"):.0f}',
        'seconds': f'{mean(lines, "seconds"):.2f}',
      }
  columns = [f'K = {n}' for n in names]
  first = tables.format_table(by_k, columns)
  return first, tables.format_table(rows, [*sets, 'all', 'tokens', 'seconds'])


def plot(methods: Mapping[tuple[str, int], Lines], calibrations: Lines, path) -> None:
  """Draws exact match by tokens and by seconds, and the calibration of the values."""
  from matplotlib import figure as figures

  figure = figures.Figure(figsize=(14, 5), layout='constrained')
  axes = figure.subplots(1, 3)
  names = list(dict.fromkeys(name for name, _ in methods))
  for axis, by in zip(axes, ('tokens', 'seconds'), strict=False):
    axis.set_prop_cycle(color=_COLORS)
    for name in names:
      points = [(k, lines) for (n, k), lines in methods.items() if n == name]
      x = [mean(lines, by) for _, lines in points]
      counts = [pool(lines) for _, lines in points]
      y = np.array([c.successes / c.n for c in counts])
      low, high = np.array([tables.wilson_interval(*c) for c in counts]).T
      style = {'marker': 'o', 'capsize': 2, 'lw': 1.4, 'ms': 4}
      axis.errorbar(x, y, [y - low, high - y], label=name, **style)
    axis.set(xscale='log', xlabel=f'{by} a question', ylabel='exact match')
    ticks = [100, 200, 400, 800, 1600] if by == 'tokens' else [0.05, 0.1, 0.2, 0.4, 0.8]
    axis.set_xticks(ticks, map(str, ticks))
    axis.set_xticks([], minor=True)
  lines, labels = axes[0].get_legend_handles_labels()
  figure.legend(lines, labels, loc='outside lower center', ncols=4, fontsize=8)
  for part in ('turns before', 'last turn'):
    bins = np.array([b for line in calibrations for b in line[part]['bins']])
    axes[2].scatter(bins[:, 0], bins[:, 1], np.sqrt(bins[:, 2]) + 4, label=part)
  axes[2].plot([0, 1], [0, 1], color='#9ca3af', lw=1)
  axes[2].set(
    xlabel='probability of success by the value', ylabel='share of right episodes'
  )
  axes[2].legend(fontsize=8)
  figure.savefig(path, dpi=130)


def main(argv):
  if len(argv) < 2:
    raise app.UsageError('name the files of results')
  read = [line for name in argv[1:] for line in results.read(name)]
  if not any('sets' in line for line in read):
    names = ', '.join(argv[1:])
    raise app.UsageError(
      f'{names}: no such file, or no result in it (experiments.guided)'
    )
  methods: dict[tuple[str, int], list] = {}
  for line in read:
    if 'sets' in line:
      methods.setdefault((line['method'], line['k']), []).append(line)
  # What was measured with some of the seeds cannot stand beside the means of all.
  seeds = len({line['seed'] for line in read})
  methods = {key: lines for key, lines in methods.items() if len(lines) == seeds}
  out = pathlib.Path(_OUT.value)
  out.parent.mkdir(parents=True, exist_ok=True)
  calibrations = [line for line in read if line['method'] == 'calibration']
  plot(methods, calibrations, out.with_suffix('.png'))
  print(*make_tables(methods, _K.value), sep='\n\n')
  for line in calibrations:
    parts = {name: part for name, part in line.items() if isinstance(part, dict)}
    for name, part in parts.items():
      numbers = {key: round(part[key], 3) for key in ('count', 'auc', 'ece')}
      print(f'seed {line["seed"]}, {name}: {numbers}')


if __name__ == '__main__':
  app.run(main)
