r"""Trains a reward model on a policy's trajectories, and says what it knows.

  python -m experiments.train_reward_model --workdir=runs/reward_model \
    --tasks=192 --loss=cross_entropy --config.schedule.steps=150

The tasks are miniwiki's, or with --task those of a world (docs/tutorials.md). Each is
played `config.schedule.samples` times by the policy in `config.model.path`, from whose
parameters the reward model starts. A quarter of the tasks is held out. An optimizer step
takes all trajectories of `config.schedule.tasks` tasks. The model goes to WORKDIR/model,
for guided.reward_model.load; docs/reward_models.md has the numbers.
"""

import pathlib

from absl import app, flags
from ml_collections import config_flags
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, train, types
from agent_r1_jax.agent import env
from agent_r1_jax.guided import reward_model, reward_training
from agent_r1_jax.host import runtime
from agent_r1_jax.models import decoder, sharding
from agent_r1_jax.report import progress as progress_lib
from agent_r1_jax.rl import optimizers, packing
from agent_r1_jax.rollout import rollout
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from agent_r1_jax.train.plan import sizes
from experiments import model_formats, tables
from experiments.miniwiki import search as quickstart  # noqa: F401, defines the flags
from experiments.miniwiki import tasks as miniwiki
from experiments.worlds import all_worlds
from experiments.worlds import world as world_lib

_LIMIT = 0.5  # A trajectory succeeds if its reward is above.
_LOSSES = {
  'bradley_terry': reward_training.bradley_terry,
  'cross_entropy': reward_training.cross_entropy(_LIMIT),
}
_TASK = flags.DEFINE_enum('task', 'miniwiki', ['miniwiki', *all_worlds.WORLDS], 'Task.')
_TASKS = flags.DEFINE_integer('tasks', 192, 'Tasks to play.')
_LOSS = flags.DEFINE_enum('loss', 'cross_entropy', list(_LOSSES), 'The loss.')


def main(_):
  runtime.quiet_logging()
  f = flags.FLAGS
  config, tasks, make_env = read_miniwiki() if _TASK.value == 'miniwiki' else read_world()
  config = sizes.resolve(model_formats.add(config))
  mesh = train.make_mesh(config.mesh)
  policy = train.load(config.model, config.chat, mesh)
  played = collect(config, mesh, policy, tasks, make_env)
  shape, params, chat = policy
  schemas = [tool.schema for tool in getattr(make_env(), 'tools', ())]
  texts = [reward_model.encode(chat, t.messages, schemas) for t in played]
  rewards = np.array([t.reward for t in played])
  groups = np.array([t.group for t in played])
  held_out = groups % 4 == 3
  row_tokens = max(config.engine.slots, max(map(len, texts)) + 1)
  rows = packing.MicrobatchShape(config.batch.microbatch, row_tokens)
  with sharding.use_mesh(mesh):
    params = fit(
      config,
      decoder.add_value_head(params),
      [t for t, held in zip(texts, held_out, strict=True) if not held],
      rewards[~held_out],
      groups[~held_out],
      config=shape,
      shape=rows,
    )
    scores = reward_training.score(params, texts, config=shape, shape=rows)
  report('training tasks', scores, rewards, groups, ~held_out)
  auc = report('held-out tasks', scores, rewards, groups, held_out)
  model = pathlib.Path(f.workdir, 'model')
  reward_model.save(
    model,
    shape,
    params,
    tokenizer_from=config.model.path,
    loss=_LOSS.value,
    limit=_LIMIT,
    mean=float(scores[~held_out].mean()),
    std=float(scores[~held_out].std()),
    auc=auc,
    row_tokens=rows.row_tokens,
  )
  print(f'Wrote {model}.')


def read_miniwiki():
  """Returns the configuration, the tasks to play and their environment."""
  world, config = flags.FLAGS.world, flags.FLAGS.config
  tool = search.search_tool(miniwiki.index(world), k=1)
  make_env = lambda: env.ToolEnv([tool], qa.paper_reward)
  return config, miniwiki.train_tasks(world, _TASKS.value), make_env


def read_world():
  """Returns the same for a world; its policy was trained on tasks of other seeds."""
  world = all_worlds.WORLDS[_TASK.value]
  given = config_flags.get_override_values(flags.FLAGS['config'])
  if 'model.path' not in given:
    raise app.UsageError('--task: name its policy with --config.model.path.')
  config = fields.replace(world.config, given)
  return config, *world_lib.practise(world, config.seed, _TASKS.value)


def fit(options: config_lib.Config, *examples, **shapes):
  """Fits the reward model by the run's options, under a progress bar."""
  schedule, optimizer = options.schedule, options.optimizer
  with progress_lib.Progress(schedule.steps, label='Reward model') as progress:
    return reward_training.fit(
      *examples,
      **shapes,
      loss=_LOSSES[_LOSS.value],
      optimizer=optimizers.make(optimizer, optimizer.learning_rate),
      steps=schedule.steps,
      groups_per_step=schedule.tasks,
      seed=options.seed,
      on_step=lambda step, metrics: progress.update(step, loss=metrics['loss']),
    )


def collect(config, mesh, policy, tasks, make_env) -> list[types.Trajectory]:
  """Plays the tasks, and keeps the trajectories that have a reward."""
  shape, params, chat = policy
  engine = train.make_engine(config, shape, params, mesh)
  played = rollout.collect(
    engine,
    chat,
    tasks,
    make_env,
    limits=config.limits,
    samples=config.schedule.samples,
    seed=config.seed,
  )
  return [t for t in played if t.status != 'error' and t.turns]


def report(name: str, scores, rewards, groups, chosen) -> float:
  """Prints what scores know of the rewards of the chosen ones; returns the AUC."""
  scores, rewards, groups = scores[chosen], rewards[chosen], groups[chosen]
  success = rewards > _LIMIT
  auc = tables.auc(scores, success)
  margins = tables.pair_margins(scores, rewards, groups)
  print(
    f'\n{name}: {len(scores)} trajectories, {success.mean():.1%} successes, AUC '
    f'{auc:.3f}; of {len(margins)} pairs of one task {(margins > 0).mean():.1%} are '
    'ordered rightly'
  )
  each = [(success[groups == g], scores[groups == g].argmax()) for g in np.unique(groups)]
  print(
    f'best of n: the one with the highest score succeeds in '
    f'{np.mean([group[best] for group, best in each]):.1%} of {len(each)} tasks, one at '
    f'random in {np.mean([group.mean() for group, _ in each]):.1%}, any in '
    f'{np.mean([group.any() for group, _ in each]):.1%}'
  )
  said, seen = 1 / (1 + np.exp(-scores)), success
  if _LOSS.value == 'bradley_terry':
    # Its probabilities are those of the order of a pair; each pair counts both ways.
    said = 1 / (1 + np.exp(np.append(-margins, margins)))
    seen = np.arange(2 * len(margins)) < len(margins)
  error, rows = tables.calibration(said, seen)
  print(
    f'expected calibration error {error:.3f}\n\n| said | seen | count |\n|---|---|---|'
  )
  for row in rows:
    print('| {:.2f} | {:.2f} | {} |'.format(*row))
  return auc


if __name__ == '__main__':
  app.run(main)
