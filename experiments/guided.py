r"""Fits an implicit value to a policy's own episodes, to choose among its samples.

  python -m experiments.guided --policy=runs/quickstart/model --workdir=runs/guided
  agent-r1-jax evaluate --task=miniwiki --methods=tools --candidates=8 \
    --config.model.path=runs/quickstart/model --critic=runs/guided/critic \
    --workdir=runs/eval8

The episodes are of practice questions: tasks that the policy was not trained on. What was
played before a kill is not played again. WORKDIR/critic is the value
(agent_r1_jax/guided/implicit_value.py); docs/reward_models.md says how it is used.
--config.seed is also the number of miniwiki's world.
"""

from collections.abc import Iterator, Mapping, Sequence
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
from agent_r1_jax.report import progress as progress_lib
from agent_r1_jax.rl import packing
from agent_r1_jax.rollout import rollout
from agent_r1_jax.rollout import store as store_lib
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from agent_r1_jax.train import fingerprint
from agent_r1_jax.train.plan import sizes
from experiments import model_formats
from experiments.miniwiki import tasks as miniwiki
from experiments.worlds import all_worlds
from experiments.worlds import world as world_lib

_MINIWIKI = config_lib.Config(
  limits=config_lib.Limits(max_turn_tokens=80),
  schedule=config_lib.Schedule(steps=600, tasks=10000, samples=3),
  engine=config_lib.Engine(rows=144, slots=448, decode_steps=16, replicas=2),
)
# How practice and fit differ from the training of a world.
_WORLD = {
  'schedule.steps': 200,
  'schedule.tasks': 600,
  'schedule.samples': 4,
  'engine.rows': 128,
}
CONFIGS: Mapping[str, config_lib.Config] = {
  'miniwiki': _MINIWIKI,
  **{n: fields.replace(w.config, _WORLD) for n, w in all_worlds.WORLDS.items()},
}
_WORLDS = 10  # Of miniwiki.
_EPISODES = 48  # Of a step of the fit.

_TASK = flags.DEFINE_enum('task', 'miniwiki', [*CONFIGS], 'The task.')
_POLICY = flags.DEFINE_string('policy', 'runs/quickstart/model', 'The policy.')
_BETA = flags.DEFINE_float('beta', 0.3, 'How far log-odds follow log-probs, β.')
_WORKDIR = flags.DEFINE_string('workdir', 'runs/guided', 'Directory of the run.')
_CFG = fields.define_flags(config_lib.Config())


def practise(
  task: str, seed: int, n: int
) -> Iterator[tuple[Sequence[types.Task], rollout.MakeEnv]]:
  """Yields about n tasks that no policy is trained on, each part with its environment."""
  if task != 'miniwiki':
    yield world_lib.practise(all_worlds.WORLDS[task], seed, n)
    return
  if n < _WORLDS:
    raise ValueError(f'schedule.tasks is {n}, for {_WORLDS} worlds; give each a task.')
  for world in range(100 * seed + 1, 100 * seed + 1 + _WORLDS):
    index = miniwiki.make_index(miniwiki.corpus(world, 'train'))
    tool = search.search_tool(index, k=1)
    make_env = lambda tool=tool: env.ToolEnv([tool], qa.em_reward)
    yield miniwiki.train_tasks(world, n // _WORLDS), make_env


def main(_):
  runtime.quiet_logging()
  given = config_flags.get_override_values(flags.FLAGS['config'])
  changes = given | {'model.path': _POLICY.value}
  config = model_formats.add(fields.replace(CONFIGS[_TASK.value], changes))
  config = sizes.resolve(config)
  workdir, schedule = pathlib.Path(_WORKDIR.value), config.schedule
  made_of = {'task': _TASK.value, 'policy': fingerprint.model_digest(_POLICY.value)}
  workdir_lib.check_config(workdir, made_of | {'seed': config.seed}, name='made_of.json')
  shape, params, chat = train.load(config.model, config.chat)
  engine = train.make_engine(config, shape, params)
  played = []
  parts = practise(_TASK.value, config.seed, schedule.tasks)
  for part, (tasks, make_env) in enumerate(parts):
    label, count = f'practice, part {part}', len(tasks) * schedule.samples
    with progress_lib.Progress(count, label=label) as progress:
      played += rollout.collect(
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
  played = [t for t in played if t.turns]
  print(f'{len(played)} episodes, {np.mean([t.reward for t in played]):.3f} are right')
  warmup = 1 + schedule.steps // 40
  rate = optax.warmup_cosine_decay_schedule(0, 5e-4, warmup, schedule.steps, 2.5e-5)
  with progress_lib.Progress(schedule.steps, label='value') as bar:
    # The fit donates its parameters, and the engine still has its own.
    params, odds = implicit_value.fit(
      train.load(config.model, config.chat)[1],
      played,
      config=shape,
      optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate)),
      shape=packing.MicrobatchShape(16, engine.sizes.slots),
      steps=schedule.steps,
      episodes=_EPISODES,
      beta=_BETA.value,
      seed=config.seed,
      on_step=lambda step, metrics: bar.update(step, loss=metrics['loss']),
    )
  implicit_value.save(workdir / 'critic', shape, params, _POLICY.value, odds)
  print(f'Wrote {workdir / "critic"}.')


if __name__ == '__main__':
  app.run(main)
