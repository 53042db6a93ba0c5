r"""The quickstart with one thing changed: a loss, what the policy sees, or a reward.

  python -m experiments.miniwiki.variants --workdir=runs/variants \
    --config.schedule.steps=12 --questions=100
  python -m experiments.miniwiki.variants --workdir=runs/variants --only=cispo,summary
  python -m experiments.miniwiki.variants --workdir=runs/rewards --config.seed=0 \
    --only=outcome,process,shaping,hybrid,reward_model,model_shaping \
    --reward_model=runs/reward_model/model --config.schedule.eval_every=2

The last command, with the model of experiments/train_reward_model.py, compares rewards;
docs/reward_models.md has its numbers. With eval_every, exact match on the development
questions is tabulated by step, so that sample efficiency is read off.

Each variant is trained from the quickstart's base policy and then answers the questions
of the quickstart's tables; docs/algorithms.md has the numbers. Losses take two optimizer
steps a rollout, at half the learning rate: with one, the ratio to the policy that sampled
is 1, and they are all alike.
"""

from collections.abc import Callable
import copy
import dataclasses
import functools
import pathlib
import statistics
from typing import NamedTuple

from absl import app, flags

from agent_r1_jax import report, train, types
from agent_r1_jax.agent import env, tool
from agent_r1_jax.guided import reward_model
from agent_r1_jax.host import runtime
from agent_r1_jax.report import summary, tables
from agent_r1_jax.rl import algorithms, losses
from agent_r1_jax.tasks import context, qa, rewards
from agent_r1_jax.tools import search
from agent_r1_jax.train import metrics as metrics_lib
from experiments.miniwiki import search as quickstart
from experiments.miniwiki import tasks as miniwiki

GRPO = algorithms.grpo(kl_coef=0.0)
# Each turn has a return of its own, so that the time of a reward counts.
TURNS = algorithms.reinforce_plus_plus(kl_coef=0.0)


class Variant(NamedTuple):
  """What differs from the quickstart.

  Attributes:
    algorithm: The advantages and the loss.
    wrap: Makes the variant's environment from the quickstart's.
    reward: The reward of an episode.
    process_reward: The reward of each turn, or None.
    minibatches: Number of optimizer steps for a rollout.
  """

  algorithm: algorithms.Algorithm = GRPO
  wrap: Callable[[env.Env], env.Env] = lambda agent: agent
  reward: env.Reward = qa.paper_reward
  process_reward: env.ProcessReward | None = None
  minibatches: int = 1

  def make_env(self, search_tool: tool.Tool) -> env.Env:
    """Makes the environment of one episode."""
    return self.wrap(
      env.ToolEnv(
        [search_tool],
        self.reward,
        process_reward=self.process_reward,
        metrics=qa.metrics,
      )
    )


def passages_so_far(agent: env.ToolEnv) -> list[types.Message]:
  """The question, and every passage that was found for it."""
  found = [m['content'] for m in agent.messages if m['role'] == 'tool']
  question = agent.messages[0]['content']
  return [{'role': 'user', 'content': '\n'.join([question, *found])}]


def found_share(task: types.Task, messages: list[types.Message]) -> float:
  """The share of the passages to look up that the search tool has shown."""
  info = {'supporting_titles': task.info['chain']}
  return qa.found_share(dataclasses.replace(task, info=info), messages)


def progress(agent: env.ToolEnv, calls, results) -> dict[str, float]:
  """0.3 times the share of the passages to look up that this turn was first to show."""
  before = agent.messages[: len(agent.messages) - len(results)]
  found = found_share(agent.task, agent.messages) - found_share(agent.task, before)
  return {'progress': 0.3 * found}


def progress_and_efficiency(agent: env.ToolEnv, calls, results) -> dict[str, float]:
  """The progress of the turn, and a price of 0.02 for each of its calls."""
  return {**progress(agent, calls, results), 'efficiency': -0.02 * len(calls)}


VARIANTS = {
  'ppo_clip': Variant(minibatches=2),
  'cispo': Variant(GRPO._replace(loss=losses.cispo()), minibatches=2),
  'sapo': Variant(GRPO._replace(loss=losses.sapo()), minibatches=2),
  'dppo_tv': Variant(GRPO._replace(loss=losses.dppo_tv()), minibatches=2),
  'window': Variant(wrap=lambda agent: context.SlidingWindow(agent, turns=2)),
  'summary': Variant(wrap=lambda agent: context.Summary(agent, turns=1)),
  'rebuilt': Variant(wrap=lambda agent: context.Rebuilt(agent, passages_so_far)),
  'parts': Variant(
    algorithms.gdpo(kl_coef=0.0),
    reward=rewards.hybrid(answer=(1.0, qa.em_reward), format=(0.2, rewards.well_formed)),
  ),
  'shaping': Variant(TURNS, process_reward=rewards.potential_based(found_share)),
  'outcome': Variant(TURNS),
  'process': Variant(TURNS, process_reward=progress),
  'hybrid': Variant(TURNS, process_reward=progress_and_efficiency),
}
_ONLY = flags.DEFINE_list('only', list(VARIANTS), 'Variants to run.')
_MODEL = flags.DEFINE_string(
  'reward_model', '', 'Directory of a reward model; adds variants with it.'
)


def model_variants(directory: str, search_tool: tool.Tool, steps: int):
  """A reward model as a decaying part of the reward, in its place, and as a potential."""
  model = reward_model.load(directory, tools=[search_tool.schema])
  weight = lambda step: 0.2 * max(0.0, 1 - step / steps)
  mixed = rewards.hybrid(outcome=(1.0, qa.paper_reward), model=(weight, model))

  async def potential(task, messages):
    return 0.2 * await model(task, messages)

  return {
    'reward_model': Variant(TURNS, reward=mixed),
    'model_alone': Variant(TURNS, reward=model),
    'model_shaping': Variant(TURNS, process_reward=rewards.potential_based(potential)),
  }


def main(_):
  runtime.quiet_logging()
  f = flags.FLAGS
  search_tool = search.search_tool(miniwiki.index(f.world), k=1)
  sets = quickstart.questions(f.questions, f.split)
  play, numbers = quickstart.make_play(pathlib.Path(f.workdir)), {}
  variants = dict(VARIANTS)
  if _MODEL.value:
    variants |= model_variants(_MODEL.value, search_tool, f.config.schedule.steps)
  if unknown := [name for name in _ONLY.value if name not in variants]:
    raise ValueError(f'--only: there is no {unknown}; there are {", ".join(variants)}.')
  for name in _ONLY.value:
    variant, workdir = variants[name], pathlib.Path(f.workdir, name)
    make_env = functools.partial(variant.make_env, search_tool)
    config = copy.deepcopy(f.config)
    config.schedule.minibatches = variant.minibatches
    config.optimizer.learning_rate /= variant.minibatches
    train.run(
      config,
      str(workdir),
      tasks=miniwiki.train_tasks(f.world, 4096),
      evals=quickstart.questions(f.watched, 'dev')
      if config.schedule.eval_every
      else None,
      make_env=make_env,
      algorithm=variant.algorithm,
      label=name,
      watcher=report.Watcher(),
    )
    numbers |= play(config, workdir / 'model', {name: (sets, make_env)})
  print('\n' + summary.write_tables(numbers, pathlib.Path(f.workdir)))
  if f.config.schedule.eval_every:
    print('\n' + tabulate_learning([pathlib.Path(f.workdir, n) for n in _ONLY.value]))


def tabulate_learning(workdirs: list[pathlib.Path]) -> str:
  """Tabulates the mean exact match on the development sets by step."""
  names = [f'eval/{name}/em' for name in quickstart.SETS]
  cells: dict[str, dict[str, tables.Count | float | str]] = {
    workdir.name: {
      str(row['step']): statistics.fmean(row[name] for name in names)
      for row in metrics_lib.read(workdir)
      if names[0] in row
    }
    for workdir in workdirs
  }
  return tables.format_table(cells, cells[workdirs[0].name], 'exact match at step')


if __name__ == '__main__':
  app.run(main)
