r"""Multi-turn RL with tools on problems whose answers can be verified.

  python -m experiments.problems --task=gsm8k --data=$AGENT_R1_DATA/gsm8k/train.jsonl.gz \
    --config.model.path=Qwen2.5-0.5B-Instruct

Trains an instruct model in Hugging Face layout by GRPO. GSM8K and MATH (`--task=math`)
give it a calculator, and math-verify judges the last \boxed{}; HumanEval and MBPP give it
a Python interpreter in a sandbox, and hidden tests judge its last block of code. Prints a
table of right answers on `--held_out` rows: of the model alone and with its tool before
training, and of the agent after it. Episodes are stored in WORKDIR/episodes, and only
missing ones are played.
"""

from collections.abc import Sequence
import dataclasses
import functools
import json
import pathlib
from typing import Any

from absl import app, flags

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.host import runtime
from agent_r1_jax.report import tables
from agent_r1_jax.rollout import evaluate
from experiments import comparison, task_list

_TASK = flags.DEFINE_enum(
  'task', None, [*task_list.FAMILIES], 'Kind of problem.', required=True
)
_DATA = flags.DEFINE_string('data', None, 'The file of its rows.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/problems', 'Where the run writes.')
_HELD_OUT = flags.DEFINE_integer('held_out', 100, 'Rows of the table.')
_WATCHED = flags.DEFINE_integer('watched', 32, 'Other rows to watch the training with.')
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
  family = task_list.FAMILIES[_TASK.value]
  tasks = task_list.shuffle(family.load(_DATA.value), _SPLIT.value)
  held_out, watched, rows = comparison.split(tasks, _HELD_OUT.value, _WATCHED.value)
  play = functools.partial(
    comparison.play,
    workdir=workdir,
    summarize=lambda sets: summarize(sets[''], family),
  )
  ask = lambda tasks: [family.prompts.agent_task(task) for task in tasks]
  numbers, _ = comparison.run(
    config,
    workdir,
    play,
    family.methods(held_out),
    tasks=ask(rows),
    evals={'watched': ask(watched)},
    algorithm=comparison.make_grpo(config, 0.001),
    label='GRPO',
  )
  rows = rows_of(numbers, family)
  text = tables.format_table(rows, rows['GRPO'])
  print(f'\n{text}')
  (workdir / 'table.md').write_text(text + '\n')
  (workdir / 'table.json').write_text(json.dumps(numbers, indent=2) + '\n')


def summarize(
  episodes: Sequence[types.Trajectory], family: task_list.Family
) -> dict[str, Any]:
  """Counts a method's right answers, by MATH's levels if the tasks have them."""
  levels = sorted({t.task.info['level'] for t in episodes if 'level' in t.task.info})
  kinds = {
    level: lambda task, level=level: task.info.get('level') == level for level in levels
  }
  right = {'right': evaluate.by_kind(episodes, kinds, family.score)}
  return right | {name: evaluate.mean_metric(episodes, name) for name in family.rest}


def rows_of(
  numbers: dict[str, Any], family: task_list.Family
) -> dict[str, dict[str, Any]]:
  """Makes a table row of each method's numbers."""
  return {
    method: {kind: comparison.count(cell) for kind, cell in found['right'].items()}
    | {name: found[name] for name in family.rest}
    for method, found in numbers.items()
  }


if __name__ == '__main__':
  app.run(main)
