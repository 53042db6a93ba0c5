"""The quickstart: an agent learns to answer multi-hop questions with a search tool.

  python -m experiments.miniwiki_search --workdir=runs/quickstart

GRPO with the paper's reward on miniwiki, from the small base policy kept beside this
script. On 2 CPU cores: under 8 minutes, the tables included.
"""

import dataclasses
import json
import pathlib
import time

from absl import app, flags, logging
from ml_collections import config_flags

from agent_r1_jax import evaluate, metrics, train, types
from agent_r1_jax.agent import env
from agent_r1_jax.rl import algorithms, correction
from agent_r1_jax.tasks import miniwiki, qa
from agent_r1_jax.tools import search

SETS = ('miniwiki-hotpot', 'miniwiki-2wiki', 'miniwiki-musique')
BASE = pathlib.Path(__file__).parent / 'miniwiki_model'

_WORKDIR = flags.DEFINE_string('workdir', 'runs/quickstart', 'Where the run writes.')
_WORLD = flags.DEFINE_integer('world', 0, 'Seed of the worlds and the questions.')
_SPLIT = flags.DEFINE_enum('split', 'test', ['dev', 'test'], 'Of the tables.')
_QUESTIONS = flags.DEFINE_integer('questions', 300, 'Of each set in the tables.')
_WATCHED = flags.DEFINE_integer('watched', 64, 'Questions of each set during training.')
_CFG = config_flags.DEFINE_config_dataclass(
  'config',
  train.Config(
    model=str(BASE),
    steps=40,
    tasks=16,
    samples=8,
    max_turn_tokens=80,
    learning_rate=3e-4,
    rows=128,
    slots=448,
    decode_steps=16,
    feed_rows=32,
    feed_tokens=32,
    bucket=128,
    replicas=2,
    microbatch=16,
    eval_every=10,
  ),
)


def main(_):
  logging.set_verbosity(logging.WARNING)  # Orbax and FAISS narrate at INFO
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
  rows = train.play(config, config.model, baselines)
  corrected = correction.token_truncated() if config.oldest else None
  train.run(
    config,
    str(workdir),
    tasks=miniwiki.train_tasks(_WORLD.value, 4096),
    make_env=agent,
    algorithm=algorithms.grpo(kl_coef=0.0, correction=corrected),
    evals=questions(_WATCHED.value, 'dev'),
    label='GRPO',
  )
  rows |= train.play(config, workdir / 'model', {'GRPO': (sets, agent)})
  report(rows, workdir)
  print(f'{(time.time() - start) / 60:.1f} minutes in all.')


def questions(n: int, split: str) -> dict[str, list[types.Task]]:
  """The two in-domain sets and the out-of-domain set."""
  return {name: miniwiki.test_set(name, n, _WORLD.value, split) for name in SETS}


def with_rag(tasks, retriever) -> list[types.Task]:
  """Puts the passages that the question itself finds into the prompt."""
  found = retriever.search([task.info['question'] for task in tasks], 3)
  return [miniwiki.rag_task(t, hits) for t, hits in zip(tasks, found, strict=True)]


def report(rows, workdir):
  """Prints and stores the tables, and draws the curve."""
  tables = [f'## Exact match\n\n{evaluate.table(rows)}']
  for kind, where in miniwiki.KINDS.items():
    tables.append(f'## Exact match, {kind}\n\n{evaluate.table(rows, where=where)}')
  text = '\n\n'.join(tables) + '\n'
  print('\n' + text)
  (workdir / 'table.md').write_text(text)
  numbers = {
    row: {name: evaluate.by_kind(ts, miniwiki.KINDS) for name, ts in sets.items()}
    for row, sets in rows.items()
  }
  (workdir / 'table.json').write_text(json.dumps(numbers, indent=2) + '\n')
  metrics.curve(
    str(workdir),
    workdir / 'curve.png',
    panels={'Reward in training': ('rollout/reward',), 'Exact match': ('eval/*/em',)},
    title='GRPO on miniwiki',
  )
  for what, where in (
    ('learning curve', 'curve.png'),
    ('tables', 'table.md'),
    ('metrics', 'metrics.jsonl and tensorboard/'),
    ('trajectories', 'trajectories/ (inspect view --log-dir ...)'),
    ('trained model', 'model/ (Hugging Face layout)'),
  ):
    print(f'{what}: {workdir / where}')


if __name__ == '__main__':
  app.run(main)
