r"""Runs that fail on purpose, for the curves of docs/cookbook.md.

  python -m experiments.miniwiki.failures --workdir=runs/failures
  python -m experiments.plot right=runs/failures/right kl=runs/failures/kl \
    --metrics=rollout/reward,train/kl,train/grad_norm --out=runs/failures/kl

Each run trains the quickstart's base policy with one wrong setting, and `right` trains it
without. The second command draws a wrong run beside the right one.
"""

from collections.abc import Callable, Mapping
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
from experiments.miniwiki import shapes
from experiments.miniwiki import tasks as miniwiki


def pay_for_calls(agent: env.ToolEnv, calls, results) -> dict[str, float]:
  """Pays 2 for every call, whatever it finds: the mistake of `storm`."""
  return {'calls': 2.0 * len(calls)}


def compare_replies(task: types.Task, messages: list[types.Message]) -> float:
  """Compares the complete reply with the answer: the mistake of `dead_groups`."""
  return float(messages[-1]['content'] == task.answer)


class Failure(NamedTuple):
  """One wrong setting.

  Attributes:
    changes: Fields of the configuration, by their dotted names.
    kl_coef: The coefficient of GRPO's KL penalty.
    reward: The reward of an episode.
    process_reward: What each turn is paid besides.
  """

  changes: Mapping[str, Any]
  kl_coef: float = 0.001
  reward: env.Reward = qa.paper_reward
  process_reward: Callable[..., dict[str, float]] | None = None


FAILURES = {
  'right': Failure({}),
  'collapse': Failure({'optimizer.learning_rate': 5e-3}),
  'unstable': Failure({'optimizer.learning_rate': 1e-3}),
  'kl': Failure({}, kl_coef=10.0),
  'dead_groups': Failure({}, reward=compare_replies),
  'storm': Failure({}, process_reward=pay_for_calls),
}

_WORKDIR = flags.DEFINE_string('workdir', 'runs/failures', 'Directory of the runs.')
_ONLY = flags.DEFINE_list('only', list(FAILURES), 'Runs to make.')
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


if __name__ == '__main__':
  app.run(main)
