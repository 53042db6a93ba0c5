r"""Multi-turn RL with tools on problems whose answers can be verified.

  python -m experiments.problems --task=gsm8k --data=$AGENT_R1_DATA/gsm8k/train.jsonl.gz \
    --config.model.path=Qwen2.5-0.5B-Instruct

Trains an instruct model in Hugging Face layout by GRPO. GSM8K and MATH (`--task=math`)
give it a calculator, and math-verify judges the last \boxed{}; HumanEval and MBPP give it
a Python interpreter in a sandbox, and hidden tests judge its last block of code. Prints a
table of right answers among `--held_out` rows: of the model alone and with its tool
before training, and of the agent after it. The numbers before training are in
WORKDIR/results.jsonl, and are measured again only if what they depend on changes.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import pathlib
from typing import Any, NamedTuple

from absl import app, flags
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, train, types
from agent_r1_jax.agent import env
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.host import runtime
from agent_r1_jax.report import tables
from agent_r1_jax.rl import algorithms
from agent_r1_jax.tasks import mathematics, programming
from agent_r1_jax.tools import calculator, python, sandbox
from agent_r1_jax.train import evaluate, evaluation_cache


class Family(NamedTuple):
  """A kind of problem: how it is read, asked and judged, and the tool that it comes with.

  Attributes:
    load: The tasks of a file.
    prompts: A module with agent_task and direct_task.
    make_judge: Makes an object with reward and metrics.
    make_tool: Makes the agent's tool.
    score: The metric that is 1 for a right answer.
    rest: Further metrics of the table.
  """

  load: Callable[[str], list[types.Task]]
  prompts: Any
  make_judge: Callable[[], Any]
  make_tool: Callable[[], tool_lib.Tool]
  score: str
  rest: tuple[str, ...]


MATHEMATICS = Family(
  mathematics.load,
  mathematics,
  mathematics.Grader,
  calculator.calculator_tool,
  score='accuracy',
  rest=('answered', 'tool_calls', 'grading_failed'),
)
PROGRAMMING = Family(
  programming.load_humaneval,
  programming,
  programming.Judge,
  lambda: python.python_tool(sandbox.Sandbox()),
  score='passed',
  rest=('answered', 'tool_calls', 'late'),
)
FAMILIES = {
  'gsm8k': MATHEMATICS,
  'math': MATHEMATICS,
  'humaneval': PROGRAMMING,
  'mbpp': PROGRAMMING._replace(load=programming.load_mbpp),
}

_TASK = flags.DEFINE_enum('task', None, [*FAMILIES], 'Kind of problem.', required=True)
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
  family = FAMILIES[_TASK.value]
  held_out, watched, rows = split(family.load(_DATA.value))
  judge, tool = family.make_judge(), family.make_tool()
  agent = lambda: env.ToolEnv([tool], judge.reward, metrics=judge.metrics)
  alone = lambda: env.ToolEnv([], judge.reward, metrics=judge.metrics)
  ask = lambda tasks: [family.prompts.agent_task(task) for task in tasks]
  baselines = {
    'Direct answer': ([family.prompts.direct_task(task) for task in held_out], alone),
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
  rows = rows_of(numbers, family)
  text = tables.format_table(rows, rows['GRPO'])
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
  return evaluation_cache.evaluate_or_read(
    pathlib.Path(_WORKDIR.value) / 'results.jsonl',
    config,
    model,
    {method: ({'': tasks}, make_env) for method, (tasks, make_env) in rows.items()},
    summarize=lambda sets: summarize(sets[''], FAMILIES[_TASK.value]),
    depends_on={'task': _TASK.value},
  )


def summarize(episodes: Sequence[types.Trajectory], family: Family) -> dict[str, Any]:
  """Counts a method's right answers, by MATH's levels where the tasks have them."""
  levels = sorted({t.task.info['level'] for t in episodes if 'level' in t.task.info})
  kinds = {
    level: lambda task, level=level: task.info.get('level') == level for level in levels
  }
  right = {'right': evaluate.by_kind(episodes, kinds, family.score)}
  return right | {name: evaluate.mean_metric(episodes, name) for name in family.rest}


def rows_of(numbers: dict[str, Any], family: Family) -> dict[str, dict[str, Any]]:
  """Makes a row of the table of each method's numbers."""
  count = lambda cell: tables.Count(round(cell['mean'] * cell['count']), cell['count'])
  return {
    method: {kind: count(cell) for kind, cell in found['right'].items()}
    | {name: found[name] for name in family.rest}
    for method, found in numbers.items()
  }


if __name__ == '__main__':
  app.run(main)
