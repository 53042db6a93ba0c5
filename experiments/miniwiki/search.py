"""The quickstart: an agent learns to answer multi-hop questions with a search tool.

  agent-r1-jax quickstart --workdir=runs/quickstart

GRPO with the paper's reward on miniwiki, from the small base policy in this folder. On 2
idle CPU cores it takes 3 minutes, the tables included. The tables' episodes are stored in
WORKDIR/episodes, and only missing ones are played.
"""

import dataclasses
import functools
import json
import pathlib
import time

from absl import app, flags

from agent_r1_jax import fields, types
from agent_r1_jax.host import runtime
from agent_r1_jax.report import summary
from agent_r1_jax.rollout import evaluate
from experiments import comparison
from experiments.miniwiki import shapes
from experiments.miniwiki import tasks as miniwiki

SETS = ('miniwiki-hotpot', 'miniwiki-2wiki', 'miniwiki-musique')

_WORKDIR = flags.DEFINE_string('workdir', 'runs/quickstart', 'Directory of the run.')
_WORLD = flags.DEFINE_integer('world', 0, 'Seed of the worlds and the questions.')
_SPLIT = flags.DEFINE_enum('split', 'test', ['dev', 'test'], 'Split of the tables.')
_QUESTIONS = flags.DEFINE_integer('questions', 300, 'Questions of each set.')
_WATCHED = flags.DEFINE_integer('watched', 64, 'Questions of each set during training.')
_CFG = fields.define_flags(shapes.CONFIG)


def main(_):
  runtime.quiet_logging()
  config, workdir, start = _CFG.value, pathlib.Path(_WORKDIR.value), time.time()
  print(json.dumps(dataclasses.asdict(config), indent=2))
  sets = questions(_QUESTIONS.value, _SPLIT.value)
  numbers, _ = comparison.run(
    config,
    workdir,
    make_play(workdir),
    shapes.methods(sets, _WORLD.value),
    tasks=miniwiki.train_tasks(_WORLD.value, 4096),
    evals=comparison.watch(questions(_WATCHED.value, 'dev')),
    algorithm=comparison.make_grpo(config, 0.0),
    label='GRPO on miniwiki',
  )
  print('\n' + summary.write_tables(numbers, workdir))
  print(summary.list_files(workdir))
  print(f'{(time.time() - start) / 60:.1f} minutes in all.')


def questions(n: int, split: str) -> dict[str, list[types.Task]]:
  """Makes the two in-domain sets and the out-of-domain set."""
  return {name: miniwiki.test_set(name, n, _WORLD.value, split) for name in SETS}


def make_play(workdir: pathlib.Path) -> comparison.Play:
  """Makes the function that plays episodes, or reads their numbers from the workdir."""
  return functools.partial(
    comparison.play,
    workdir=workdir,
    summarize=lambda sets: {
      name: evaluate.by_kind(episodes, miniwiki.KINDS) for name, episodes in sets.items()
    },
  )


if __name__ == '__main__':
  app.run(main)
