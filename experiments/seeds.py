r"""Several seeds of a comparison side by side: tables by kind of task.

  for s in 0 1 2; do
    python -m experiments.miniwiki.search --workdir=runs/seed$s --config.seed=$s
  done
  python -m experiments.seeds --out=runs/seeds runs/seed0 runs/seed1 runs/seed2
  python -m experiments.plot 'GRPO=runs/seed*' --out=runs/seeds_curves

The arguments are directories with a table.json, such as those of
experiments.miniwiki.search, or runs/lake*/grpo of experiments.worlds.learn. A method has
a row for each run and their mean, or one row if all runs have the same numbers of it.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any

from absl import app, flags

from agent_r1_jax.host import refusals
from agent_r1_jax.report import tables
from experiments import comparison

_OUT = flags.DEFINE_string('out', 'runs/seeds', 'Prefix of the .md written.')


def main(argv):
  refusals.install()
  workdirs = [pathlib.Path(name) for name in argv[1:]]
  if not workdirs:
    raise app.UsageError('name the working directories of the runs')
  if unfinished := [w for w in workdirs if not (w / 'table.json').is_file()]:
    raise ValueError(
      f'{unfinished[0]} has no table.json: it is no workdir of '
      'experiments.miniwiki.search or of an algorithm in experiments.worlds.learn, or '
      'the run has not ended.'
    )
  found = [json.loads((w / 'table.json').read_text()) for w in workdirs]
  runs = dict(zip(name_runs(workdirs), found, strict=True))
  if len(runs) < len(workdirs) or any(table.keys() != found[0].keys() for table in found):
    raise ValueError(
      'a run is named twice, or the runs have other methods; name seeds of one command.'
    )
  text = '\n'.join(
    f'### {kind}\n\n{format_kind(runs, kind)}\n' for kind in list_kinds(runs)
  )
  out = pathlib.Path(f'{_OUT.value}.md')
  out.parent.mkdir(parents=True, exist_ok=True)
  out.write_text(text)
  print(text)


def name_runs(workdirs: Sequence[pathlib.Path]) -> list[str]:
  """Returns the first part of the paths that tells all of them apart, or the paths."""
  if len(workdirs) == 1:
    return [workdirs[0].name]
  parts = zip(*(workdir.parts for workdir in workdirs), strict=False)
  whole = [str(workdir) for workdir in workdirs]
  return next(([*part] for part in parts if len({*part}) == len(part)), whole)


def list_kinds(runs: Mapping[str, Any]) -> list[str]:
  """Returns the kinds of tasks of the first run, in their order."""
  table = next(iter(runs.values()))
  return list(dict.fromkeys(k for row in table.values() for s in row.values() for k in s))


def format_kind(runs: Mapping[str, Any], kind: str) -> str:
  """Formats the table of a kind of tasks."""
  first = next(iter(runs.values()))
  cells: dict[str, dict[str, tables.Cell]] = {}
  for method, row in first.items():
    sets = [s for s in row if row[s][kind]['count']]
    if all(table.get(method) == row for table in runs.values()):
      cells[method] = {s: comparison.count(row[s][kind]) for s in sets}
      continue
    for run, table in runs.items():
      found = table[method]
      cells[f'{method}, {run}'] = {s: comparison.count(found[s][kind]) for s in sets}
    means = {s: [table[method][s][kind]['mean'] for table in runs.values()] for s in sets}
    cells[f'{method}, mean'] = {s: sum(m) / len(m) for s, m in means.items()}
  return tables.format_table(cells, list(next(iter(first.values()))))


if __name__ == '__main__':
  app.run(main)
