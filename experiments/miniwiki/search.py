"""The quickstart: an agent learns to answer multi-hop questions with a search tool.

  python -m experiments.miniwiki.search --workdir=runs/quickstart

GRPO with the paper's reward on miniwiki, from the small base policy kept beside this
script. On 2 CPU cores: under 8 minutes, the tables included. The baselines are kept in
WORKDIR/results.jsonl, and played again only if what they depend on changes.
"""

import dataclasses
import json
import pathlib
import time

from absl import app, flags

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, train, types
from agent_r1_jax.agent import env
from agent_r1_jax.host import runtime
from agent_r1_jax.report import summary
from agent_r1_jax.rl import algorithms, correction
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import search
from agent_r1_jax.train import evaluate, results
from experiments.miniwiki import tasks as miniwiki

SETS = ('miniwiki-hotpot', 'miniwiki-2wiki', 'miniwiki-musique')
BASE = pathlib.Path(__file__).parent / 'model'

# Set -> kind of question -> mean and count of exact match.
Numbers = dict[str, dict[str, dict[str, float]]]

_WORKDIR = flags.DEFINE_string('workdir', 'runs/quickstart', 'Where the run writes.')
_WORLD = flags.DEFINE_integer('world', 0, 'Seed of the worlds and the questions.')
_SPLIT = flags.DEFINE_enum('split', 'test', ['dev', 'test'], 'Of the tables.')
_QUESTIONS = flags.DEFINE_integer('questions', 300, 'Of each set in the tables.')
_WATCHED = flags.DEFINE_integer('watched', 64, 'Questions of each set during training.')
_CFG = fields.define_flags(
  config_lib.Config(
    model=config_lib.Model(path=str(BASE)),
    schedule=config_lib.Schedule(steps=40, tasks=16, samples=8, eval_every=10),
    limits=config_lib.Limits(max_turn_tokens=80),
    optimizer=config_lib.Optimizer(learning_rate=2e-4),
    engine=config_lib.Engine(
      rows=128,
      slots=448,
      decode_steps=16,
      feed_rows=32,
      feed_tokens=32,
      bucket=128,
      replicas=2,
    ),
    batch=config_lib.Batch(microbatch=16),
  ),
)


def main(_):
  runtime.quiet_logging()
  config, workdir, start = _CFG.value, pathlib.Path(_WORKDIR.value), time.time()
  print(json.dumps(dataclasses.asdict(config), indent=2))
  retriever = miniwiki.index(_WORLD.value)
  tool = search.search_tool(retriever, k=1)
  agent = lambda: env.ToolEnv([tool], qa.paper_reward, metrics=qa.metrics)
  alone = lambda: env.ToolEnv([], qa.paper_reward, metrics=qa.metrics)
  sets = questions(_QUESTIONS.value, _SPLIT.value)

  with_passages = {name: with_rag(tasks, retriever) for name, tasks in sets.items()}
  baselines = {
    'Direct answer': (sets, alone),
    'Naive RAG': (with_passages, alone),
    'Base Tool Call': (sets, agent),
  }
  numbers = play(config, config.model.path, baselines)
  corrected = correction.token_truncated() if config.schedule.oldest else None
  train.run(
    config,
    str(workdir),
    tasks=miniwiki.train_tasks(_WORLD.value, 4096),
    make_env=agent,
    algorithm=algorithms.grpo(kl_coef=0.0, correction=corrected),
    evals=questions(_WATCHED.value, 'dev'),
    label='GRPO on miniwiki',
  )
  numbers |= play(config, workdir / 'model', {'GRPO': (sets, agent)})
  print('\n' + summary.write_tables(numbers, workdir))
  print(summary.list_files(workdir))
  print(f'{(time.time() - start) / 60:.1f} minutes in all.')


def questions(n: int, split: str) -> dict[str, list[types.Task]]:
  """The two in-domain sets and the out-of-domain set."""
  return {name: miniwiki.test_set(name, n, _WORLD.value, split) for name in SETS}


def with_rag(tasks, retriever) -> list[types.Task]:
  """Puts the passages that the question itself finds into the prompt."""
  found = retriever.search([task.info['question'] for task in tasks], 3)
  return [miniwiki.rag_task(t, hits) for t, hits in zip(tasks, found, strict=True)]


def play(config, model, rows) -> dict[str, Numbers]:
  """Numbers of greedy episodes of one policy: stored ones where nothing has changed."""
  return results.play(
    pathlib.Path(_WORKDIR.value) / 'results.jsonl',
    config,
    model,
    rows,
    summarize=lambda sets: {
      name: evaluate.by_kind(episodes, miniwiki.KINDS) for name, episodes in sets.items()
    },
    depends_on={'world': _WORLD.value},
  )


if __name__ == '__main__':
  app.run(main)
