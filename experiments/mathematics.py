r"""Multi-turn RL with a calculator on GSM8K or MATH.

  python -m experiments.mathematics --data=$AGENT_R1_DATA/gsm8k/train.jsonl.gz \
    --config.model.path=Qwen2.5-0.5B-Instruct

Trains an instruct model in Hugging Face layout by GRPO, whose reward is math-verify's
judgement of the last \boxed{}. Prints a table of right answers among `--held_out` rows:
the model alone and with the calculator before training, and the agent after it. The
numbers before training are in WORKDIR/results.jsonl, and are measured again only if what
they depend on changes.
"""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
from typing import Any

from absl import app, flags
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, train, types
from agent_r1_jax.agent import env
from agent_r1_jax.host import runtime
from agent_r1_jax.report import tables
from agent_r1_jax.rl import algorithms
from agent_r1_jax.tasks import mathematics
from agent_r1_jax.tools import calculator
from agent_r1_jax.train import evaluate, results

_DATA = flags.DEFINE_string('data', None, 'JSON lines of GSM8K or MATH.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/mathematics', 'Where the run writes.')
_HELD_OUT = flags.DEFINE_integer('held_out', 300, 'Rows of the table.')
_WATCHED = flags.DEFINE_integer('watched', 64, 'Other rows to watch the training with.')
_SPLIT = flags.DEFINE_integer('split', 0, 'Seed by which these rows are chosen.')
_CFG = fields.define_flags(
  config_lib.Config(
    schedule=config_lib.Schedule(steps=100, tasks=32, samples=8, eval_every=20),
    limits=config_lib.Limits(max_turns=6, max_turn_tokens=512),
    optimizer=config_lib.Optimizer(learning_rate=1e-6),
  )
)


def main(_):
  runtime.quiet_logging()
  config, workdir = _CFG.value, pathlib.Path(_WORKDIR.value)
  print(json.dumps(dataclasses.asdict(config), indent=2))
  held_out, watched, rows = split(mathematics.load(_DATA.value))
  grader = mathematics.Grader()
  tool = calculator.calculator_tool()
  agent = lambda: env.ToolEnv([tool], grader.reward, metrics=grader.metrics)
  alone = lambda: env.ToolEnv([], grader.reward, metrics=grader.metrics)
  ask = lambda tasks: [mathematics.agent_task(task) for task in tasks]
  baselines = {
    'Direct answer': ([mathematics.direct_task(task) for task in held_out], alone),
    'Base Tool Call': (ask(held_out), agent),
  }
  numbers = play(config, config.model.path, baselines)
  train.run(
    config,
    str(workdir),
    tasks=ask(rows),
    make_env=agent,
    algorithm=algorithms.grpo(kl_coef=0.001),
    evals={'watched': ask(watched)},
    label='GRPO',
  )
  numbers |= play(config, workdir / 'model', {'GRPO': (ask(held_out), agent)})
  text = tables.format_table(rows_of(numbers), rows_of(numbers)['GRPO'])
  print(f'\n{text}')
  (workdir / 'table.md').write_text(text + '\n')
  (workdir / 'table.json').write_text(json.dumps(numbers, indent=2) + '\n')


def split(tasks: list[types.Task]) -> tuple[list[types.Task], ...]:
  """Splits the tasks, in a seeded order, into held-out, watched and training rows.

  Raises:
    ValueError: No row would be left to train on.
  """
  first, second = _HELD_OUT.value, _HELD_OUT.value + _WATCHED.value
  if second >= len(tasks):
    raise ValueError(
      f'{_DATA.value} has {len(tasks)} rows, and --held_out and --watched take {second}; '
      'lower them, so that rows are left to train on.'
    )
  order = np.random.default_rng(_SPLIT.value).permutation(len(tasks))
  tasks = [tasks[i] for i in order]
  return tasks[:first], tasks[first:second], tasks[second:]


def play(config, model, rows) -> dict[str, Any]:
  """Plays the held-out rows greedily by each method, or reads what is stored of them."""
  return results.play(
    pathlib.Path(_WORKDIR.value) / 'results.jsonl',
    config,
    model,
    {method: ({'': tasks}, make_env) for method, (tasks, make_env) in rows.items()},
    summarize=lambda sets: summarize(sets['']),
    depends_on={},
  )


def summarize(episodes: Sequence[types.Trajectory]) -> dict[str, Any]:
  """Counts a method's right answers, by MATH's levels where the tasks have them."""
  levels = sorted({t.task.info['level'] for t in episodes if 'level' in t.task.info})
  kinds = {
    level: lambda task, level=level: task.info.get('level') == level for level in levels
  }
  return {
    'accuracy': evaluate.by_kind(episodes, kinds, 'accuracy'),
    'answered': evaluate.score(episodes, 'answered').mean,
    'tool_calls': evaluate.score(episodes, 'tool_calls').mean,
    'grading_failed': evaluate.score(episodes, 'grading_failed').mean,
  }


def rows_of(numbers: dict[str, Any]) -> dict[str, dict[str, Any]]:
  """Makes a row of the table of each method's numbers."""
  count = lambda cell: tables.Count(round(cell['mean'] * cell['count']), cell['count'])
  rest = ('answered', 'tool_calls', 'grading_failed')
  return {
    method: {kind: count(cell) for kind, cell in found['accuracy'].items()}
    | {name: found[name] for name in rest}
    for method, found in numbers.items()
  }


if __name__ == '__main__':
  app.run(main)
