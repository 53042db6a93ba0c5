r"""Trains a reward model on a policy's trajectories on miniwiki, and says what it knows.

  python -m experiments.train_reward_model --workdir=runs/reward_model \
    --tasks=192 --loss=cross_entropy --config.schedule.steps=150

Each task is played `config.schedule.samples` times by the policy in `config.model.path`,
from whose parameters the reward model starts. A quarter of the tasks is held out. An
optimizer step takes all trajectories of `config.schedule.tasks` tasks. The model goes to
WORKDIR, for train.reward_model.load; docs/reward_models.md has the numbers.
"""

import pathlib

from absl import app, flags
import numpy as np

from agent_r1_jax import train, types
from agent_r1_jax.agent import env
from agent_r1_jax.host import runtime
from agent_r1_jax.report import progress as progress_lib
from agent_r1_jax.rl import optimizers, packing
from agent_r1_jax.rl import reward_model as rl_reward_model
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from agent_r1_jax.train import reward_model, rollout, sizes
from experiments.miniwiki import search as quickstart  # noqa: F401, defines the flags
from experiments.miniwiki import tasks as miniwiki

_LIMIT = 0.5  # A trajectory succeeds if its reward is above.
_TASKS = flags.DEFINE_integer('tasks', 192, 'Tasks to play.')
_LOSS = flags.DEFINE_enum('loss', 'cross_entropy', ['cross_entropy', 'bradley_terry'], '')
_PREFIXES = flags.DEFINE_bool(
  'prefixes', False, 'Train on each state before a reply too, for use as a potential.'
)


def main(_):
  runtime.quiet_logging()
  f = flags.FLAGS
  config = sizes.resolve(f.config)
  tool = search.search_tool(miniwiki.index(f.world), k=1)
  shape, params, chat = train.load(config.model, config.chat)
  played = collect(config, shape, params, chat, tool, f.world)
  texts, rewards, groups = examples(played, chat, [tool.schema])
  held_out = groups % 4 == 3
  rows = packing.MicrobatchShape(
    config.batch.microbatch, max(config.engine.slots, max(map(len, texts)) + 1)
  )
  known = {
    'bradley_terry': rl_reward_model.bradley_terry,
    'cross_entropy': rl_reward_model.cross_entropy(_LIMIT),
  }
  options = config.optimizer
  with progress_lib.Progress(config.schedule.steps, label='Reward model') as progress:
    params = rl_reward_model.fit(
      rl_reward_model.init(params),
      [t for t, held in zip(texts, held_out, strict=True) if not held],
      rewards[~held_out],
      groups[~held_out],
      config=shape,
      loss=known[_LOSS.value],
      optimizer=optimizers.make(options, options.learning_rate),
      shape=rows,
      steps=config.schedule.steps,
      groups_per_step=config.schedule.tasks,
      seed=config.seed,
      on_step=lambda step, metrics: progress.update(step, loss=metrics['loss']),
    )
  scores = rl_reward_model.score(params, texts, config=shape, shape=rows)
  auc = report('training tasks', scores, rewards, groups, ~held_out)
  auc = report('held-out tasks', scores, rewards, groups, held_out)
  reward_model.save(
    f.workdir,
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
  print(f'Wrote {pathlib.Path(f.workdir)}.')


def collect(config, shape, params, chat, tool, world) -> list[types.Trajectory]:
  """Plays the tasks, and keeps the trajectories that have a reward."""
  engine = train.make_engine(config, shape, params)
  played = rollout.collect(
    engine,
    chat,
    miniwiki.train_tasks(world, _TASKS.value),
    lambda: env.ToolEnv([tool], qa.paper_reward),
    limits=config.limits,
    samples=config.schedule.samples,
    seed=config.seed,
  )
  return [t for t in played if t.status != 'error' and t.turns]


def examples(played, chat, tools) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
  """Returns the tokens, the reward and the task of each conversation to be scored."""
  texts, rewards, groups = [], [], []
  for t in played:
    replies = [i for i, m in enumerate(t.messages) if m['role'] == 'assistant']
    for end in [*(replies if _PREFIXES.value else ()), len(t.messages)]:
      texts.append(reward_model.encode(chat, t.messages[:end], tools))
      rewards.append(t.reward)
      groups.append(t.group)
  return texts, np.array(rewards), np.array(groups)


def report(name: str, scores, rewards, groups, chosen) -> float:
  """Prints what scores know of the rewards of the chosen ones; returns the AUC."""
  scores, rewards, groups = scores[chosen], rewards[chosen], groups[chosen]
  success = rewards > _LIMIT
  auc = rl_reward_model.auc(scores, success)
  margins = rl_reward_model.pair_margins(scores, rewards, groups)
  print(
    f'\n{name}: {len(scores)} conversations, {success.mean():.1%} successes, AUC '
    f'{auc:.3f}; of {len(margins)} pairs of one task {(margins > 0).mean():.1%} are '
    'ordered rightly'
  )
  said, seen = 1 / (1 + np.exp(-scores)), success
  if _LOSS.value == 'bradley_terry':
    # Its probabilities are those of the order of a pair; each pair counts both ways.
    said = 1 / (1 + np.exp(np.append(-margins, margins)))
    seen = np.arange(2 * len(margins)) < len(margins)
  error, rows = rl_reward_model.calibration(said, seen)
  print(
    f'expected calibration error {error:.3f}\n\n| said | seen | count |\n|---|---|---|'
  )
  for row in rows:
    print('| {:.2f} | {:.2f} | {} |'.format(*row))
  return auc


if __name__ == '__main__':
  app.run(main)
