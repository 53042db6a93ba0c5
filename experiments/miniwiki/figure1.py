"""The three shapes of the paper's figure 1 side by side on miniwiki.

  python -m experiments.miniwiki.figure1 --workdir=runs/figure1

Trains the autonomous agent by GRPO from the quickstart's base policy, as the quickstart
does. Fine-tunes the base on the prompts of the workflow and of ReAct (shapes.lessons):
once on lessons that are as imperfect as those that the base was made of, and once on
right ones. Then all answer the same questions. It goes on where it was stopped.
"""

import json
import pathlib
import time

from absl import app, flags
import numpy as np

from agent_r1_jax import fields, report, sft, train
from agent_r1_jax.host import runtime
from agent_r1_jax.models import weights
from agent_r1_jax.report import progress, tables
from agent_r1_jax.rl import algorithms
from experiments import task_list
from experiments.miniwiki import demos, shapes
from experiments.miniwiki import tasks as miniwiki

# Policy -> its methods, in the order of the table.
SHAPES = {
  'base': ('workflow', 'tools'),
  'lessons': ('workflow', 'react'),
  'right lessons': ('workflow', 'react'),
  'GRPO': ('tools',),
}
NAMES = {
  'workflow': 'Workflow',
  'react': 'Agentic workflow (ReAct)',
  'tools': 'Autonomous agent',
}

_WORKDIR = flags.DEFINE_string('workdir', 'runs/figure1', 'Directory of the run.')
_QUESTIONS = flags.DEFINE_integer('questions', 300, 'Questions of each set.')
_CFG = fields.define_flags(shapes.CONFIG)
_SFT = fields.define_flags(sft.Config(steps=300, rows=8, learning_rate=1e-3), 'sft')


def main(_):
  runtime.quiet_logging()
  config, workdir = _CFG.value, pathlib.Path(_WORKDIR.value)
  path = config.model.path
  benchmark = task_list.load_miniwiki(task_list.Source('', path, _QUESTIONS.value))
  models, seconds = {'base': path}, {}
  for name, mixture in (('lessons', demos.MIXTURE), ('right lessons', miniwiki.RIGHT)):
    start, out = time.time(), workdir / name / 'model'
    if not out.exists():
      fine_tune(config, mixture, out)
    models[name], seconds[name] = out, time.time() - start
  start = time.time()
  train.run(
    config,
    str(workdir / 'GRPO'),
    tasks=miniwiki.train_tasks(0, 4096),
    make_env=benchmark.methods['tools'][1],
    algorithm=algorithms.grpo(kl_coef=0.0),
    label='GRPO on miniwiki',
    watcher=report.Watcher(),
  )
  models['GRPO'], seconds['GRPO'] = workdir / 'GRPO' / 'model', time.time() - start
  playing = fields.replace(config, {'engine.slots': benchmark.config.engine.slots})
  rows, numbers = {}, {}
  for policy, names in SHAPES.items():
    methods = {name: benchmark.methods[name] for name in names}
    folder = workdir / 'episodes' / policy
    played = train.play(
      playing, models[policy], methods, workdir=folder, watcher=report.Watcher()
    )
    numbers[policy] = task_list.summarize(played, benchmark, n=1)
    for method in names:
      rows[f'{NAMES[method]}, {policy}'] = make_row(numbers[policy][method])
  text = tables.format_table(rows, next(iter(rows.values())), corner='shape, policy')
  print(f'\n{text}\n{ {name: round(s) for name, s in seconds.items()} } seconds')
  (workdir / 'table.md').write_text(text + '\n')
  (workdir / 'table.json').write_text(json.dumps(numbers, indent=2) + '\n')


def fine_tune(config, mixture, out: pathlib.Path) -> None:
  """Fine-tunes the base policy on lessons of both prompts."""
  shape, params, chat = train.load(config.model, config.chat)
  told = shapes.lessons(config.seed, mixture)
  segments = (sft.segment(chat, sft.Conversation(messages)) for messages in told)
  with progress.Progress(_SFT.value.steps, label='fine-tuning') as bar:
    on_step = lambda step, numbers, _: bar.update(step, loss=numbers['loss'])
    params = sft.run(shape, params, segments, _SFT.value, on_step=on_step)
  weights.save(out, shape, params, tokenizer_from=config.model.path)


def make_row(sets) -> dict[str, tables.Count | float | str]:
  """Makes a row: exact match of each set, and the means of what an episode takes."""
  row: dict[str, tables.Count | float | str] = {
    name: tables.Count(round(found['mean'] * found['tasks']), found['tasks'])
    for name, found in sets.items()
  }
  for cost in ('tokens', 'action_tokens', 'turns', 'tool_calls'):
    row[cost] = f'{np.mean([found[cost] for found in sets.values()]):.1f}'
  return row


if __name__ == '__main__':
  app.run(main)
