r"""A paper's figure and table from any runs: groups of seeds, with means and intervals.

  python -m experiments.plot 'GRPO=runs/grpo-*' 'PPO=runs/ppo-*' \
    --metrics='rollout/reward,eval/*/em' --out=figures/main

Each argument is a label and a pattern of workdirs, the seeds of one setting. --out is
written as .png, .pdf, .md and .tex. A metric is a name in metrics.jsonl, or a pattern
whose metrics are averaged. The table has each run's mean over the last tenth of its
values: their mean over the seeds, and its 95 % interval (Student's t).
"""

import glob
import pathlib

from absl import app, flags

from agent_r1_jax.report import tables
from agent_r1_jax.train import metrics as metrics_lib
from experiments import curves
from experiments import tables as tables_lib

_METRICS = flags.DEFINE_list('metrics', ['rollout/reward', 'eval/*/em'], 'What is drawn.')
_OUT = flags.DEFINE_string('out', 'runs/plot', 'Prefix of the files that are written.')
_TITLE = flags.DEFINE_string('title', '', 'Title of the figure.')


def find_groups(arguments: list[str]) -> dict[str, list[str]]:
  """Returns the workdirs of each label; reports those that ended early.

  Raises:
    app.UsageError: An argument is not LABEL=PATTERN, or nothing matches it.
  """
  groups = {}
  for argument in arguments:
    label, found, pattern = argument.partition('=')
    workdirs = [p for p in sorted(glob.glob(pattern)) if _last_step(p) is not None]
    if not found or not workdirs:
      raise app.UsageError(
        f"{argument!r}: give LABEL=PATTERN, such as 'GRPO=runs/grpo-*', of which at "
        'least one is a directory with metrics.jsonl.'
      )
    groups[label] = workdirs
  if not groups:
    raise app.UsageError("name the runs: 'LABEL=runs/pattern-*' for each group.")
  ends = {path: _last_step(path) for paths in groups.values() for path in paths}
  longest = max(step for step in ends.values() if step is not None)
  for path, step in ends.items():
    if step != longest:
      print(f'{path} ends at step {step}, others at step {longest}')
  return groups


def _last_step(workdir: str) -> int | None:
  """Returns the last step of a run, None if there are no metrics."""
  if not (pathlib.Path(workdir) / 'metrics.jsonl').exists():
    return None
  return max((line['step'] for line in metrics_lib.read(workdir)), default=None)


def main(argv):
  groups, names = find_groups(argv[1:]), _METRICS.value
  rows: dict[str, dict[str, tables.Cell]] = {
    label: {'seeds': str(len(runs))} for label, runs in groups.items()
  }
  for name in names:
    for label, values in curves.final_values(groups, name).items():
      if values:
        rows[label][name] = tables.Interval(*tables_lib.mean_interval(values))
  columns = [name for name in names if any(name in row for row in rows.values())]
  # `with_suffix` would cut a path's last part at a dot.
  out = pathlib.Path(_OUT.value)
  out.parent.mkdir(parents=True, exist_ok=True)
  for kind in ('png', 'pdf'):
    curves.plot_groups(groups, f'{out}.{kind}', names, title=_TITLE.value)
  text = tables.format_table(rows, [*columns, 'seeds'], corner='runs')
  pathlib.Path(f'{out}.md').write_text(text + '\n')
  latex = tables_lib.format_latex(rows, [*columns, 'seeds'], corner='runs')
  pathlib.Path(f'{out}.tex').write_text(latex + '\n')
  print(f'{text}\nfigure and table: {_OUT.value}.png, .pdf, .md, .tex')


if __name__ == '__main__':
  app.run(main)
