r"""Makes a world's small base policy from scratch, trains it by RL, and compares.

  python -m experiments.worlds.learn --world=lake --workdir=runs/lake0 --config.seed=0

Writes the base policy to WORKDIR/base (--config.model.path uses another), trains it in
WORKDIR/ALGORITHM, and prints a table of the held-out tasks before and after. The worlds
are in all_worlds.py; docs/tutorials.md has their numbers. Every seed starts from scratch,
with its own training tasks; --held_out_seed selects the held-out tasks.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import time
from typing import Any

from absl import app, flags
from ml_collections import config_flags

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, sft
from agent_r1_jax.host import runtime
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.report import summary
from agent_r1_jax.rl import algorithms
from agent_r1_jax.rollout import evaluate
from experiments import comparison, small_policy
from experiments.worlds import all_worlds
from experiments.worlds import world as world_lib


def _distillation(kl_coef: float, **fields: Any) -> algorithms.Algorithm:
  """Makes on-policy distillation from the model in --config.model.reference."""
  if kl_coef:
    raise app.UsageError('--kl_coef: distillation has one KL, that to its teacher.')
  return algorithms.distillation(**fields)


ALGORITHMS = {
  'grpo': algorithms.grpo,
  'dapo': algorithms.dapo,
  # An action has about 24 tokens, an episode five actions.
  'dr_grpo': functools.partial(algorithms.dr_grpo, length=128),
  'ppo': algorithms.ppo,
  'reinforce++': algorithms.reinforce_plus_plus,
  'rloo': algorithms.rloo,
  'gigpo': algorithms.gigpo,
  'distillation': _distillation,
}
_SHOWN = 3000  # Examples that train the tokenizer.

_WORLD = flags.DEFINE_enum(
  'world', None, [*all_worlds.WORLDS], 'The world.', required=True
)
_ALGORITHM = flags.DEFINE_enum('algorithm', 'grpo', [*ALGORITHMS], 'The algorithm.')
_ENTROPY = flags.DEFINE_float('entropy_coef', 0.0, 'Weight of an entropy bonus.', 0.0)
# As in the other experiments with small policies, there is no penalty.
_KL = flags.DEFINE_float('kl_coef', 0.0, 'Weight of the KL to the base policy.', 0.0)
_LOSS_MASK = flags.DEFINE_bool('loss_mask', True, "The paper's loss mask.")
_ADVANTAGE_MASK = flags.DEFINE_bool('advantage_mask', True, 'Its advantage mask.')
_WORKDIR = flags.DEFINE_string('workdir', 'runs/world', 'Where everything is written.')
_TASKS = flags.DEFINE_integer('tasks', 4096, 'Tasks to train on.', 1)
_HELD_OUT = flags.DEFINE_integer('held_out', 300, 'Held-out tasks of each set.', 1)
_HELD_OUT_SEED = flags.DEFINE_integer('held_out_seed', 0, 'Seed of the held-out tasks.')
_SPLIT = flags.DEFINE_enum('split', 'test', ['dev', 'test'], 'Split of the table.')
_WATCHED = flags.DEFINE_integer('watched', 64, 'Tasks of each set during training.', 1)
_CFG = fields.define_flags(config_lib.Config())
_SFT = fields.define_flags(sft.Config(), 'sft')


def main(_):
  runtime.quiet_logging()
  start, workdir = time.time(), pathlib.Path(_WORKDIR.value)
  world = all_worlds.WORLDS[_WORLD.value]
  given = config_flags.get_override_values(flags.FLAGS['config'])
  config = fields.replace(world.config, given)
  if not config.model.path:
    config.model.path = str(make_base(world, config.seed, workdir / 'base'))
  print(json.dumps(dataclasses.asdict(config), indent=2))
  made, seed = time.time() - start, _HELD_OUT_SEED.value
  folder = workdir / _ALGORITHM.value
  numbers, seconds = comparison.run(
    config,
    folder,
    functools.partial(
      comparison.play,
      workdir=folder,
      made_of=world.options(),
      summarize=lambda sets: {
        name: evaluate.by_kind(episodes, world.kinds, world.score)
        for name, episodes in sets.items()
      },
    ),
    world.methods(world.held_out(seed, _HELD_OUT.value, _SPLIT.value)),
    tasks=world.tasks(config.seed, _TASKS.value),
    evals=comparison.watch(world.held_out(seed, _WATCHED.value, 'dev')),
    algorithm=make_algorithm(),
    label=f'{_ALGORITHM.value} on {_WORLD.value}',
    name=_ALGORITHM.value.upper(),
    labels=world.labels,
    also=world.also,
  )
  print('\n' + summary.write_tables(numbers, folder, 'Solved'))
  print(summary.list_files(folder))
  seconds = {'base policy': made, **seconds}
  print(', '.join(f'{name} {value:.0f} s' for name, value in seconds.items()))


def make_algorithm() -> algorithms.Algorithm:
  """Makes the algorithm that the flags describe."""
  algorithm = ALGORITHMS[_ALGORITHM.value](kl_coef=_KL.value, entropy_coef=_ENTROPY.value)
  return algorithm._replace(
    loss_mask=_LOSS_MASK.value, advantage_mask=_ADVANTAGE_MASK.value
  )


def make_base(world: world_lib.World, seed: int, out: pathlib.Path) -> pathlib.Path:
  """Makes a world's base policy, unless it exists; returns its directory.

  Raises:
    ValueError: The existing policy was made with other settings.
  """
  config = fields.replace(
    world.base, config_flags.get_override_values(flags.FLAGS['sft'])
  )
  config.check()
  shape = dataclasses.asdict(small_policy.make_config(world.vocab, world.reader))
  made_of = {'seed': seed, 'model': shape, 'sft': dataclasses.asdict(config)}
  workdir_lib.check_config(out, made_of, name='made_of.json')
  done = out / 'done'
  if not done.exists():
    shown = itertools.islice(world.examples(seed + 1_000_000), _SHOWN)
    small_policy.train(
      out,
      (text for example in shown for text in world.text(example)),
      world.examples(seed),
      world.schemas(),
      config,
      seed=seed,
      vocab=world.vocab,
      more_tokens=world.more_tokens,
      reader=world.reader,
    )
    done.touch()
  return out / 'model'


if __name__ == '__main__':
  app.run(main)
