"""The experiment by this project: the quickstart's training, without evaluations.

taskset --cpu-list 0 python -m experiments.beside.by_jax --workdir=runs/jax-0 --seed=0
"""

import pathlib

from absl import app

from agent_r1_jax import config as config_lib
from agent_r1_jax import report, train
from agent_r1_jax.host import runtime
from agent_r1_jax.rl import advantages, algorithms
from agent_r1_jax.tasks import qa
from agent_r1_jax.train import metrics, rollout, sizes
from experiments import comparison
from experiments.beside import shared


def make_algorithm(laps: list[dict[str, float]], record: shared.Record):
  """Makes GRPO with TRL's constants; from one estimate to the next it is a lap."""

  def estimate(table):
    laps.append(record.lap())
    return advantages.group_relative(table, eps=shared.EPSILON)

  return algorithms.grpo(kl_coef=0.0, dual_clip=None)._replace(advantages=estimate)


def count_computed(config: config_lib.Config, model: pathlib.Path, make_env):
  """Plays the last step's tasks; returns the tokens computed and the distinct ones."""
  config.model.path = str(model)
  config = sizes.resolve(config, None, None)
  engine_of, params, chat = train.load(config.model, config.chat)
  engine = train.make_engine(config, engine_of, params)
  played = rollout.collect(
    engine,
    chat,
    shared.draw_tasks(config)[-config.schedule.tasks :],
    make_env,
    limits=config.limits,
    samples=config.schedule.samples,
  )
  prompts = [int(t.segments[0].action_mask.argmax()) for t in played]
  distinct = sum(len(t.segments[0].tokens) for t in played)
  distinct -= sum(prompts) - sum(prompts) // config.schedule.samples
  return engine.stats.prefilled + engine.stats.sampled, distinct


def main(_):
  runtime.quiet_logging()
  config, workdir = shared.make_config(), pathlib.Path(shared.WORKDIR.value)
  make_env, _ = comparison.make_envs(shared.make_search_tool(), qa.paper_reward)
  tasks, record, laps = shared.train_tasks(), shared.Record(), []
  train.run(
    config,
    str(workdir),
    tasks=tasks,
    make_env=make_env,
    algorithm=make_algorithm(laps, record),
    watcher=report.Watcher(),
  )
  record.finish()
  computed, distinct = count_computed(config, workdir / 'model', make_env)
  for line, lap in zip(metrics.read(workdir), laps, strict=True):
    record.add(
      step=line['step'],
      em=line['rollout/em'],
      reward=line['rollout/reward'],
      truncated=line['rollout/status/truncated'],
      **lap,
    )
  record.add(step=config.schedule.steps, computed=computed, distinct=distinct)


if __name__ == '__main__':
  app.run(main)
