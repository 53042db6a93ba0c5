r"""Runs that fail on purpose, for the curves of docs/cookbook.md.

  python -m experiments.miniwiki.failures --workdir=runs/failures
  python -m experiments.miniwiki.failures --workdir=runs/failures --draw=docs

Each run trains the quickstart's base policy with one wrong setting, and `right` trains it
without. The second command draws every wrong run beside the right one.
"""

from collections.abc import Callable, Mapping, Sequence
import pathlib
from typing import Any, NamedTuple

from absl import app, flags

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, report, train, types
from agent_r1_jax.agent import env
from agent_r1_jax.host import runtime
from agent_r1_jax.rl import algorithms
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from agent_r1_jax.train import metrics
from experiments.miniwiki import shapes
from experiments.miniwiki import tasks as miniwiki


def pay_for_calls(agent: env.ToolEnv, calls, results) -> dict[str, float]:
  """Pays 2 for every call, whatever it finds: the mistake of `storm`."""
  return {'calls': 2.0 * len(calls)}


def compare_replies(task: types.Task, messages: list[types.Message]) -> float:
  """Compares the complete reply with the answer: the mistake of `dead_groups`."""
  return float(messages[-1]['content'] == task.answer)


class Failure(NamedTuple):
  """One wrong setting, and the metrics that show it.

  Attributes:
    changes: Fields of the configuration, by their dotted names.
    kl_coef: The coefficient of GRPO's KL penalty.
    reward: The reward of an episode.
    process_reward: What each turn is paid besides.
    panels: Title -> name in metrics.jsonl.
  """

  changes: Mapping[str, Any]
  kl_coef: float = 0.001
  reward: env.Reward = qa.paper_reward
  process_reward: Callable[..., dict[str, float]] | None = None
  panels: Mapping[str, str] = {}


_DRIFT = {
  'reward': 'rollout/reward',
  'entropy, nats a token': 'train/entropy',
  'KL to the start': 'train/kl',
}
FAILURES = {
  'right': Failure({}),
  'collapse': Failure({'optimizer.learning_rate': 5e-3}, panels=_DRIFT),
  'unstable': Failure({'optimizer.learning_rate': 1e-3}, panels=_DRIFT),
  'kl': Failure(
    {},
    kl_coef=10.0,
    panels={
      'reward': 'rollout/reward',
      'KL to the start': 'train/kl',
      'gradient norm': 'train/grad_norm',
    },
  ),
  'dead_groups': Failure(
    {},
    reward=compare_replies,
    panels={
      'exact match': 'rollout/em',
      'share of dead groups': 'rollout/dead_groups',
      'gradient norm': 'train/grad_norm',
    },
  ),
  'storm': Failure(
    {},
    process_reward=pay_for_calls,
    panels={
      'reward': 'rollout/reward',
      'exact match': 'rollout/em',
      'tool calls an episode': 'rollout/tool_calls',
    },
  ),
}

_WORKDIR = flags.DEFINE_string('workdir', 'runs/failures', 'Directory of the runs.')
_ONLY = flags.DEFINE_list('only', list(FAILURES), 'Runs to make, or to draw.')
_DRAW = flags.DEFINE_string(
  'draw', '', 'Directory of pictures to draw beside `right`; trains nothing.'
)
_CFG = fields.define_flags(
  fields.replace(
    shapes.CONFIG,
    {'schedule.steps': 24, 'schedule.tasks': 8, 'schedule.eval_every': 0},
  )
)


def main(_):
  runtime.quiet_logging()
  workdir = pathlib.Path(_WORKDIR.value)
  if unknown := set(_ONLY.value) - {*FAILURES}:
    raise ValueError(f'--only: there is no {sorted(unknown)}; there are {[*FAILURES]}.')
  if _DRAW.value:
    for name in {'right': None, **dict.fromkeys(_ONLY.value)}:
      if not (workdir / name / 'metrics.jsonl').exists():
        raise ValueError(f'{workdir / name} is no run; make it first: --only={name}')
      if name != 'right':
        draw(workdir, name, pathlib.Path(_DRAW.value))
    return
  search_tool = search.search_tool(miniwiki.index(0), k=1)
  for name in _ONLY.value:
    run(_CFG.value, FAILURES[name], workdir / name, search_tool)


def run(config: config_lib.Config, failure: Failure, workdir, search_tool) -> None:
  """Trains with the wrong setting."""
  train.run(
    fields.replace(config, failure.changes),
    str(workdir),
    tasks=miniwiki.train_tasks(0, 4096),
    make_env=lambda: env.ToolEnv(
      [search_tool],
      failure.reward,
      process_reward=failure.process_reward,
      metrics=qa.metrics,
    ),
    algorithm=algorithms.grpo(kl_coef=failure.kl_coef),
    label=workdir.name,
    watcher=report.Watcher(),
  )


def draw(workdir: pathlib.Path, name: str, folder: pathlib.Path) -> None:
  """Draws a wrong run beside the right one, readable on light and on dark pages."""
  import matplotlib
  from matplotlib import figure as figures

  panels = FAILURES[name].panels
  gray = '#808890'
  style: Any = {key: gray for key in ('text.color', 'axes.labelcolor', 'axes.edgecolor')}
  style |= {key: gray for key in ('xtick.color', 'ytick.color')}
  style |= {'svg.fonttype': 'none', 'font.family': 'sans-serif', 'font.size': 10}
  style |= {'axes.spines.top': False, 'axes.spines.right': False, 'svg.hashsalt': name}
  with matplotlib.rc_context(style):
    figure = figures.Figure(figsize=(9.6, 2.6), layout='constrained')
    for axis, (title, metric) in zip(figure.subplots(1, 3), panels.items(), strict=True):
      for run_name, color in (('right', gray), (name, '#dd4b39')):
        rows = [row for row in metrics.read(workdir / run_name) if metric in row]
        _plot(axis, rows, metric, color=color, label=run_name)
      axis.set_title(title, loc='left', fontsize=10)
      axis.set_xlabel('step')
    lines = figure.axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc='outside upper right', ncols=2, frameon=False)
    path = folder / f'cookbook_{name}.svg'
    figure.savefig(path, transparent=True, metadata={'Date': None})


def _plot(axis, rows: Sequence[Mapping[str, Any]], metric: str, **style) -> None:
  axis.plot([row['step'] for row in rows], [row[metric] for row in rows], **style)


if __name__ == '__main__':
  app.run(main)
