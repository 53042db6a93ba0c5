"""Several seeds of the quickstart side by side: tables by kind of question.

  for s in 0 1 2; do
    python -m experiments.miniwiki.search --workdir=runs/seed$s --config.seed=$s
  done
  python -m experiments.miniwiki.seeds --out=runs/seeds runs/seed0 runs/seed1 ...
  python -m experiments.plot 'GRPO=runs/seed*' --out=runs/seeds_curves

Every number is exact match at the last step. The rows above GRPO are greedy episodes of
one base policy and the same in every run.
"""

import json
import pathlib

from absl import app, flags

from agent_r1_jax.host import refusals
from agent_r1_jax.report import tables
from experiments import comparison

_OUT = flags.DEFINE_string('out', 'docs/miniwiki', 'Prefix of the .md written.')


def main(argv):
  refusals.install()
  workdirs = [pathlib.Path(name) for name in argv[1:]]
  if not workdirs:
    raise app.UsageError('name the working directories of the runs')
  if unfinished := [w for w in workdirs if not (w / 'table.json').is_file()]:
    raise ValueError(
      f'{unfinished[0]} has no table.json: it is no workdir of '
      'experiments.miniwiki.search, or the run has not ended.'
    )
  seeds = {w.name: json.loads((w / 'table.json').read_text()) for w in workdirs}
  first = next(iter(seeds.values()))
  sets = list(first['GRPO'])
  rows = {name: row for name, row in first.items() if name != 'GRPO'}
  rows |= {f'GRPO, {run}': table['GRPO'] for run, table in seeds.items()}
  parts = []
  for kind in ('all', '2 hops', '3 hops', '2 and 3 hops', 'comparison'):
    cells: dict[str, dict[str, tables.Count | float | str]] = {
      name: {s: comparison.count(row[s][kind]) for s in sets if row[s][kind]['count']}
      for name, row in rows.items()
    }
    for s in sets:
      means = [table['GRPO'][s][kind]['mean'] for table in seeds.values()]
      if s in cells['Naive RAG']:
        cells.setdefault('GRPO, mean', {})[s] = sum(means) / len(means)
    parts.append(f'### {kind}\n\n{tables.format_table(cells, sets)}\n')
  out = pathlib.Path(_OUT.value)
  out.parent.mkdir(parents=True, exist_ok=True)
  out.with_suffix('.md').write_text('\n'.join(parts))
  print('\n'.join(parts))


if __name__ == '__main__':
  app.run(main)
