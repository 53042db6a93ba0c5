r"""Trains a reward model on a policy's own episodes, and measures it.

  python -m experiments.train_reward_model --workdir=runs/reward_model
  python -m experiments.train_reward_model --task=programs --workdir=runs/of_programs \
    --config.model.path=runs/programs1/grpo/model

The episodes are of practice tasks, on which no policy was trained; a quarter of the tasks
is held out. Episodes played before a kill are not played again. WORKDIR/model is the
model (agent_r1_jax/guided/implicit_value.py), for rewards and for choosing among samples:
see docs/reward_models.md. --config.seed also selects miniwiki's worlds.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import pathlib

from absl import app, flags
from ml_collections import config_flags
import numpy as np
import optax

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, train, types
from agent_r1_jax.agent import env
from agent_r1_jax.guided import implicit_value
from agent_r1_jax.host import runtime
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.models import sharding
from agent_r1_jax.report import progress as progress_lib
from agent_r1_jax.rl import packing
from agent_r1_jax.rl import table as table_lib
from agent_r1_jax.rollout import rollout
from agent_r1_jax.rollout import store as store_lib
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from agent_r1_jax.train import fingerprint
from agent_r1_jax.train.plan import sizes
from experiments import model_formats, tables
from experiments.miniwiki import shapes
from experiments.miniwiki import tasks as miniwiki
from experiments.worlds import all_worlds
from experiments.worlds import world as world_lib

# How practice and fit differ from a policy's training.
_CHANGES = {
  'schedule.steps': 120,
  'schedule.tasks': 400,
  'schedule.samples': 8,
  'engine.rows': 128,
  'batch.microbatch': 16,
}
CONFIGS: Mapping[str, config_lib.Config] = {
  'miniwiki': fields.replace(shapes.CONFIG, _CHANGES),
  **{n: fields.replace(w.config, _CHANGES) for n, w in all_worlds.WORLDS.items()},
}
_WORLD_TASKS = 1000  # Maximum per miniwiki world.
_EPISODES = 48  # Per step of the fit.

_TASK = flags.DEFINE_enum('task', 'miniwiki', [*CONFIGS], 'The task.')
_BETA = flags.DEFINE_float('beta', 0.3, 'How far log-odds follow log-probs, β.')
_WORKDIR = flags.DEFINE_string('workdir', 'runs/reward_model', 'Directory of the run.')
_CFG = fields.define_flags(config_lib.Config())


def practise(
  task: str, seed: int, n: int
) -> Iterator[tuple[Sequence[types.Task], rollout.MakeEnv]]:
  """Yields about n tasks that no policy is trained on, in parts with environments."""
  if task != 'miniwiki':
    yield world_lib.practise(all_worlds.WORLDS[task], seed, n)
    return
  count = -(-n // _WORLD_TASKS)
  for world in range(100 * seed + 1, 100 * seed + 1 + count):
    index = miniwiki.make_index(miniwiki.corpus(world, 'train'))
    tool = search.search_tool(index, k=1)
    make_env = lambda tool=tool: env.ToolEnv([tool], qa.em_reward)
    yield miniwiki.train_tasks(world, n // count), make_env


def main(_):
  runtime.quiet_logging()
  config = read_config()
  workdir = pathlib.Path(_WORKDIR.value)
  made_of = {
    'task': _TASK.value,
    'policy': fingerprint.model_digest(config.model.path),
    'seed': config.seed,
  }
  workdir_lib.check_config(workdir, made_of, name='made_of.json')
  mesh = train.make_mesh(config.mesh)
  shape, params, chat = train.load(config.model, config.chat, mesh)
  played = collect(config, mesh, (shape, params, chat), workdir)
  held_out = np.array([t.group % 4 == 3 for t in played])
  longest = max(len(s.tokens) for t in played for s in t.segments)
  row_tokens = max(config.engine.slots, longest)
  rows = packing.MicrobatchShape(config.batch.microbatch, row_tokens)
  with sharding.use_mesh(mesh):
    learned = [t for t, held in zip(played, held_out, strict=True) if not held]
    params, odds = fit(config, params, learned, config=shape, shape=rows)
    table = table_lib.build(played)
    scores = implicit_value.log_odds(params, table, odds, config=shape, shape=rows)
  measured = {
    name: report(name, scores[chosen], list(itertools.compress(played, chosen)))
    for name, chosen in (('training tasks', ~held_out), ('held-out tasks', held_out))
  }
  implicit_value.save(
    workdir / 'model',
    shape,
    params,
    config.model.path,
    odds,
    auc=measured['held-out tasks'],
    row_tokens=row_tokens,
  )
  print(f'Wrote {workdir / "model"}.')


def read_config() -> config_lib.Config:
  """Returns the task's configuration with the flags' changes.

  Raises:
    UsageError: The task is a world, and its policy is not given.
  """
  given = config_flags.get_override_values(flags.FLAGS['config'])
  config = model_formats.add(fields.replace(CONFIGS[_TASK.value], given))
  if not config.model.path:
    raise app.UsageError('--task: name its policy with --config.model.path.')
  return sizes.resolve(config)


def collect(config, mesh, policy, workdir: pathlib.Path) -> list[types.Trajectory]:
  """Plays the tasks; returns the trajectories that have a reward."""
  shape, params, chat = policy
  engine, schedule = train.make_engine(config, shape, params, mesh), config.schedule
  played, groups = [], 0
  parts = practise(_TASK.value, config.seed, schedule.tasks)
  for part, (tasks, make_env) in enumerate(parts):
    label, count = f'practice, part {part}', len(tasks) * schedule.samples
    with progress_lib.Progress(count, label=label) as progress:
      found = rollout.collect(
        engine,
        chat,
        tasks,
        make_env,
        limits=config.limits,
        samples=schedule.samples,
        seed=config.seed,
        store=store_lib.EpisodeStore(workdir / 'practice' / str(part)),
        on_done=progress.step_counter(),
      )
    played += [dataclasses.replace(t, group=groups + t.group) for t in found]
    groups += len(tasks)
  return [t for t in played if t.status != 'error' and t.turns]


def fit(options: config_lib.Config, params, played, **shapes):
  """Fits the model with the run's options, under a progress bar."""
  steps = options.schedule.steps
  rate = optax.warmup_cosine_decay_schedule(0, 5e-4, 1 + steps // 40, steps + 1, 2.5e-5)
  with progress_lib.Progress(steps, label='Reward model') as progress:
    return implicit_value.fit(
      params,
      played,
      **shapes,
      optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate)),
      steps=steps,
      episodes=_EPISODES,
      beta=_BETA.value,
      seed=options.seed,
      on_step=lambda step, metrics: progress.update(step, loss=metrics['loss']),
    )


def report(name: str, scores, played: Sequence[types.Trajectory]) -> float:
  """Prints how well scores predict the episodes' success; returns the AUC."""
  success, groups = implicit_value.succeeds(played), np.array([t.group for t in played])
  auc = tables.auc(scores, success)
  margins = tables.pair_margins(scores, success, groups)
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
  error, rows = tables.calibration(1 / (1 + np.exp(-scores)), success)
  print(
    f'expected calibration error {error:.3f}\n\n| said | seen | count |\n|---|---|---|'
  )
  for row in rows:
    print('| {:.2f} | {:.2f} | {} |'.format(*row))
  return auc


if __name__ == '__main__':
  app.run(main)
