r"""The quickstart with one thing changed: a loss, what the policy sees, or a reward.

  python -m experiments.miniwiki.variants --workdir=runs/variants \
    --config.schedule.steps=12 --questions=100
  python -m experiments.miniwiki.variants --workdir=runs/variants --only=cispo,summary

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
from typing import NamedTuple

from absl import app, flags

from agent_r1_jax import train, types
from agent_r1_jax.agent import context, env, rewards, tool
from agent_r1_jax.host import runtime
from agent_r1_jax.report import summary
from agent_r1_jax.rl import algorithms, losses
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from experiments.miniwiki import search as quickstart
from experiments.miniwiki import tasks as miniwiki

GRPO = algorithms.grpo(kl_coef=0.0)


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
  'shaping': Variant(
    algorithms.reinforce_plus_plus(kl_coef=0.0),
    process_reward=rewards.potential_based(found_share),
  ),
}
_ONLY = flags.DEFINE_list('only', list(VARIANTS), 'Variants to run.')


def main(_):
  runtime.quiet_logging()
  f = flags.FLAGS
  search_tool = search.search_tool(miniwiki.index(f.world), k=1)
  sets = quickstart.questions(f.questions, f.split)
  play, numbers = quickstart.make_play(pathlib.Path(f.workdir)), {}
  for name in _ONLY.value:
    variant, workdir = VARIANTS[name], pathlib.Path(f.workdir, name)
    make_env = functools.partial(variant.make_env, search_tool)
    config = copy.deepcopy(f.config)
    config.schedule.minibatches = variant.minibatches
    config.optimizer.learning_rate /= variant.minibatches
    train.run(
      config,
      str(workdir),
      tasks=miniwiki.train_tasks(f.world, 4096),
      make_env=make_env,
      algorithm=variant.algorithm,
      label=name,
    )
    numbers |= play(config, workdir / 'model', {name: (sets, make_env)})
  print('\n' + summary.write_tables(numbers, pathlib.Path(f.workdir)))


if __name__ == '__main__':
  app.run(main)
