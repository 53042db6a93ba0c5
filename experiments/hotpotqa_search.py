"""Multi-turn RL with a search tool on real questions and real passages: HotpotQA.

  python -m experiments.hotpotqa_base --data=$AGENT_R1_DATA/hotpotqa
  python -m experiments.hotpotqa_search --data=$AGENT_R1_DATA/hotpotqa

The second command takes 20 minutes on 2 CPU cores and prints a table: direct answer,
Naive RAG, Base Tool Call and GRPO on 300 held-out rows. With a model directory in Hugging
Face layout it is the paper's experiment, with that model's tokenizer and chat template:

  python -m experiments.hotpotqa_search --model=Qwen2.5-3B-Instruct

What the two differ in stands in SMALL and INSTRUCT; `--config.<field>` changes either.
"""

from collections.abc import Callable
import dataclasses
import itertools
import json
import os
import pathlib
import time

from absl import app, flags
from ml_collections import config_flags
import numpy as np

from agent_r1_jax import evaluate, metrics, rollout, train, types
from agent_r1_jax.agent import env
from agent_r1_jax.retrieval import bm25, dense, documents, hashing
from agent_r1_jax.rl import algorithms
from agent_r1_jax.tasks import qa, qa_data, qa_demos
from agent_r1_jax.tools import search


@dataclasses.dataclass(frozen=True)
class Setting:
  """What suits a kind of policy.

  Attributes:
    agent: Puts the question to an agent.
    direct: Puts it to the policy alone.
    rag: Puts it with passages.
    template: Of a passage.
    passages: A search gives, and Naive RAG.
    kl: Coefficient of the KL to the base.
    config: Of the training.
  """

  agent: Callable
  direct: Callable
  rag: Callable
  template: str
  passages: tuple[int, int]
  kl: float
  config: train.Config


SMALL = Setting(
  agent=qa_demos.agent_task,
  direct=qa_demos.agent_task,
  rag=qa_demos.rag_task,
  template=qa_demos.PASSAGE,
  passages=(1, 3),
  kl=0.0,
  config=train.Config(
    steps=32,
    max_turns=4,
    max_turn_tokens=64,
    learning_rate=3e-4,
    rows=128,
    slots=512,
    decode_steps=16,
    feed_rows=32,
    feed_tokens=32,
    bucket=64,
    microbatch=16,
    eval_every=8,
  ),
)
INSTRUCT = Setting(
  agent=qa.agent_task,
  direct=qa.direct_task,
  rag=qa.rag_task,
  template=documents.PASSAGE,
  passages=(5, 5),
  kl=0.001,
  config=train.Config(dtype='bfloat16', remat=True, eval_every=20),
)

_DATA = flags.DEFINE_string(
  'data',
  os.path.join(os.environ.get('AGENT_R1_DATA', 'data'), 'hotpotqa'),
  'Folder of corpus.jsonl.gz and train.jsonl.gz.',
)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/hotpotqa', 'Where the run writes.')
_MODEL = flags.DEFINE_string('model', '', 'An instruct model; else the small policy.')
_BASE = flags.DEFINE_string('base', 'runs/hotpotqa_base', 'What hotpotqa_base wrote.')
_RETRIEVER = flags.DEFINE_enum('retriever', 'bm25', ['bm25', 'dense'], 'Of the tool.')
_SPLIT = flags.DEFINE_integer('split', 0, 'Seed of the split; as in hotpotqa_base.')
_HELD_OUT = flags.DEFINE_integer('held_out', 300, 'Rows of the table.')
_WATCHED = flags.DEFINE_integer('watched', 100, 'Rows to watch the training with.')
_CFG = config_flags.DEFINE_config_dataclass('config', train.Config())


def main(_):
  setting = INSTRUCT if _MODEL.value else SMALL
  given = config_flags.get_override_values(flags.FLAGS['config'])
  base = _MODEL.value or os.path.join(_BASE.value, 'model')
  config = dataclasses.replace(setting.config, **given, model=base)
  print(json.dumps(dataclasses.asdict(config), indent=2))
  workdir, data = pathlib.Path(_WORKDIR.value), pathlib.Path(_DATA.value)
  rows = qa_data.jsonl(data / 'train.jsonl.gz')
  sizes = (_HELD_OUT.value, _WATCHED.value)
  held_out, watched, rows = qa_demos.split(rows, *sizes, seed=_SPLIT.value)
  if not _MODEL.value:
    check_unseen(held_out)

  clock = Clock()
  passages = documents.read_corpus(data / 'corpus.jsonl.gz')
  retrievers = {'bm25': bm25.BM25(passages)}
  clock.lap('index with BM25')
  encoder = hashing.HashingEncoder(1024).fit([d.contents for d in passages])
  retrievers['dense'] = dense.Dense(passages, encoder.encode)
  clock.lap('index with FAISS')
  recalls = {name: recall(r, held_out, 5) for name, r in retrievers.items()}
  retriever = retrievers[_RETRIEVER.value]
  found = retriever.search([t.info['question'] for t in held_out], setting.passages[1])

  tool = search.search_tool(retriever, k=setting.passages[0], template=setting.template)
  agent = lambda: env.ToolEnv([tool], qa.paper_reward, metrics=qa.metrics)
  alone = lambda: env.ToolEnv([], qa.paper_reward, metrics=qa.metrics)
  asked = [setting.agent(task) for task in held_out]
  with_passages = [setting.rag(t, hits) for t, hits in zip(held_out, found, strict=True)]
  episodes = {
    'Direct answer': ([setting.direct(task) for task in held_out], alone),
    'Naive RAG': (with_passages, alone),
    'Base Tool Call': (asked, agent),
  }
  played = play(config, base, episodes)
  clock.lap('three baselines')
  train.run(
    config,
    str(workdir),
    tasks=[setting.agent(task) for task in rows],
    make_env=agent,
    algorithm=algorithms.grpo(kl_coef=setting.kl),
    evals={'watched': [setting.agent(task) for task in watched]},
    label='GRPO',
  )
  clock.lap('training')
  played |= play(config, workdir / 'model', {'GRPO': (asked, agent)})
  clock.lap('trained agent')
  report(workdir, config, played, recalls, clock.laps)


def check_unseen(held_out) -> None:
  """Raises ValueError if the base policy has seen a row that it is to be measured on."""
  path = pathlib.Path(_BASE.value) / 'rows.json'
  if not path.is_file():
    raise ValueError(f'{path} is missing: run experiments.hotpotqa_base, or give --base.')
  if seen := {task.id for task in held_out} & set(json.loads(path.read_text())):
    raise ValueError(f'split: {_BASE.value} has seen {len(seen)} of the held-out rows.')


def recall(retriever, tasks, k: int) -> dict[str, float]:
  """The share of gold passages in the first k, and of questions that have all."""
  hits = retriever.search([task.info['question'] for task in tasks], k)
  shares = []
  for task, found in zip(tasks, hits, strict=True):
    gold = set(task.info['supporting_titles'])
    shares.append(len(gold & {hit.document.title for hit in found}) / len(gold))
  return {
    f'recall@{k}': float(np.mean(shares)),
    'all': float(np.mean(np.equal(shares, 1))),
  }


def play(config, model, episodes) -> dict[str, list[types.Trajectory]]:
  """Greedy episodes of one policy; its memory is free again afterwards."""
  shape, params, chat = train.load(dataclasses.replace(config, model=str(model)))
  driver = train.make_driver(config, shape, params, chat)
  limits, played = rollout.Limits(config.max_turns, config.max_turn_tokens), {}
  for label, (tasks, make_env) in episodes.items():
    ended = itertools.count(1)
    with metrics.Progress(len(tasks), label=label) as progress:
      count = lambda trajectory: progress.update(next(ended))  # noqa: B023
      sets = {label: tasks}
      played |= evaluate.run(driver, chat, sets, make_env, limits=limits, on_done=count)
  return played


class Clock:
  """Wall times by what they were spent on."""

  def __init__(self):
    self.laps, self._last = {}, time.time()

  def lap(self, what: str):
    """Books the time since the last lap."""
    self.laps[what], self._last = time.time() - self._last, time.time()


def report(workdir, config, played, recalls, laps):
  """Prints and stores the table, the recalls and the times."""
  kinds = sorted({t.task.info.get('type', 'all') for ts in played.values() for t in ts})
  rows = {}
  for method, trajectories in played.items():
    f1 = [t.metrics.get('f1', 0.0) for t in trajectories]
    rows[method] = {'EM': count(trajectories, lambda task: True)}
    rows[method]['F1'] = f'{np.mean(f1):.3f} ± {1.96 * np.std(f1) / len(f1) ** 0.5:.3f}'
    for kind in kinds:
      where = lambda task, kind=kind: task.info.get('type', 'all') == kind
      rows[method][f'EM, {kind}'] = count(trajectories, where)
    rows[method]['searches'] = evaluate.score(trajectories, 'tool_calls').mean
  text = metrics.table(rows, list(rows['GRPO']))
  text += '\n\n' + metrics.table(recalls, ['recall@5', 'all'])
  text += '\n\n' + metrics.table(
    {k: {'seconds': round(v)} for k, v in laps.items()}, ['seconds']
  )
  print('\n' + text)
  (workdir / 'table.md').write_text(text + '\n')
  numbers = {m: evaluate.summary(ts) for m, ts in played.items()}
  whole = {'methods': numbers, 'recall': recalls, 'seconds': laps}
  (workdir / 'table.json').write_text(json.dumps(whole, indent=2) + '\n')


if __name__ == '__main__':
  app.run(main)
