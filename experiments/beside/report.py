"""The systems beside each other: a table of exact match, one of costs, and the curves.

  python -m experiments.beside.report --runs=runs     # plays the test questions, collects
  python -m experiments.beside.report                 # draws what was collected

The directory of a run is named SYSTEM-SEED; a run that has not ended is left out. All
policies are measured by this project: the quickstart's questions, greedy decoding.
OUT.jsonl has a line for each run, and OUT.md and OUT.png are made from it.
"""

from collections.abc import Sequence
import json
import pathlib
import statistics
from typing import Any

from absl import app, flags

from agent_r1_jax import report, train
from agent_r1_jax.report import plots, tables
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from agent_r1_jax.train import evaluate
from experiments import comparison
from experiments.miniwiki import shapes
from experiments.miniwiki import tasks as miniwiki

_RUNS = flags.DEFINE_string('runs', '', 'Directory of the runs; empty only draws.')
_OUT = flags.DEFINE_string('out', 'docs/results/beside_tables', 'Prefix of the files.')
_QUESTIONS = flags.DEFINE_integer('questions', 300, 'Questions of each set.')

NAMES = {'jax': 'this project', 'trl': 'TRL', 'tunix': 'tunix'}
SETS = ('miniwiki-hotpot', 'miniwiki-2wiki', 'miniwiki-musique')
_CURVES = ('em', 'reward', 'seconds', 'cpu_seconds')

Run = dict[str, Any]


def collect(workdir: pathlib.Path) -> Run:
  """Reads the numbers of a run and measures its policy, if it wrote one."""
  system, seed = workdir.name.rsplit('-', 1)
  lines = [*map(json.loads, (workdir / 'steps.jsonl').read_text().splitlines())]
  run: Run = {'system': system, 'seed': int(seed)}
  run |= {name: [line[name] for line in lines if name in line] for name in _CURVES}
  counted = [line for line in lines if 'computed' in line]
  if counted:
    run |= {name: counted[-1][name] for name in ('computed', 'distinct')}
  run['cost'] = json.loads((workdir / 'cost.json').read_text())
  if (workdir / 'model').exists():
    run['sets'] = measure(workdir)
  return run


def measure(workdir: pathlib.Path) -> dict[str, Any]:
  """Plays what is missing of the test questions; returns exact match by set and kind."""
  tool = search.search_tool(miniwiki.index(0), k=1)
  make_env, _ = comparison.make_envs(tool, qa.paper_reward)
  sets = {name: miniwiki.test_set(name, _QUESTIONS.value, 0) for name in SETS}
  methods, folder = {'tools': (sets, make_env)}, workdir / 'episodes'
  played = train.play(
    shapes.CONFIG, workdir / 'model', methods, workdir=folder, watcher=report.Watcher()
  )['tools']
  return {name: evaluate.by_kind(some, miniwiki.KINDS) for name, some in played.items()}


def render(runs: Sequence[Run], out: pathlib.Path) -> None:
  """Writes the tables and the curves."""
  runs = sorted(runs, key=lambda run: (list(NAMES).index(run['system']), run['seed']))
  measured = [run for run in runs if 'sets' in run]
  parts = [tabulate(measured, kind) for kind in ('all', *miniwiki.KINDS)]
  parts.append(tabulate_costs(runs))
  out.with_suffix('.md').write_text('\n'.join(parts))
  print('\n'.join(parts))
  seeds: dict[int, dict[int, dict[str, float]]] = {}
  for run in measured:
    lines = seeds.setdefault(run['seed'], {})
    for step, value in enumerate(run['em'], 1):
      lines.setdefault(step, {'step': step})[NAMES[run['system']]] = value
  plots.plot_curves(
    [list(lines.values()) for lines in seeds.values()],
    out.with_suffix('.png'),
    panels={'Exact match in training': list(NAMES.values())},
    title='GRPO on miniwiki, by system',
  )


def tabulate(runs: Sequence[Run], kind: str) -> str:
  """Tabulates exact match on a kind of questions: each seed, and all of a system's."""
  cells: dict[str, dict[str, tables.Cell]] = {}
  for run in runs:
    row = {name: run['sets'][name][kind] for name in SETS}
    cells[f'{NAMES[run["system"]]}, seed {run["seed"]}'] = {
      name: comparison.count(cell) for name, cell in row.items() if cell['count']
    }
  for system in dict.fromkeys(run['system'] for run in runs):
    rows = [run['sets'] for run in runs if run['system'] == system]
    if len(rows) > 1:
      cells[f'{NAMES[system]}, mean'] = {
        name: tables.Interval(
          *tables.mean_interval([row[name][kind]['mean'] for row in rows])
        )
        for name in SETS
        if rows[0][name][kind]['count']
      }
  return f'### {kind}\n\n{tables.format_table(cells, SETS, "policy")}\n'


def tabulate_costs(runs: Sequence[Run]) -> str:
  """Tabulates what each run took."""
  cells: dict[str, dict[str, tables.Cell]] = {}
  for run in runs:
    cost, steps = run['cost'], len(run['em'])
    row: dict[str, tables.Cell] = {
      'steps': str(steps),
      'CPU-seconds': f'{cost["cpu_seconds"]:.0f}',
      'seconds': f'{cost["seconds"]:.0f}',
      'CPU-seconds a step': f'{statistics.median(run["cpu_seconds"][1:]):.1f}',
      'peak GB': f'{cost["peak_mb"] / 1024:.1f}',
    }
    if 'computed' in run:
      row['computed / distinct'] = f'{run["computed"] / run["distinct"]:.2f}'
    cells[f'{NAMES[run["system"]]}, seed {run["seed"]}'] = row
  columns = list(dict.fromkeys(name for row in cells.values() for name in row))
  return f'### Costs\n\n{tables.format_table(cells, columns, "run")}\n'


def main(_):
  out = pathlib.Path(_OUT.value)
  out.parent.mkdir(parents=True, exist_ok=True)
  if _RUNS.value:
    workdirs = sorted(
      path.parent for path in pathlib.Path(_RUNS.value).glob('*/cost.json')
    )
    lines = [json.dumps(collect(workdir)) + '\n' for workdir in workdirs]
    out.with_suffix('.jsonl').write_text(''.join(lines))
  found = out.with_suffix('.jsonl')
  if not found.exists():
    raise app.UsageError(f'{found} is not there: give --runs, whose numbers it gets')
  lines = found.read_text().splitlines()
  render([*map(json.loads, lines)], out)


if __name__ == '__main__':
  app.run(main)
