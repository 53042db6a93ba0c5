"""Multi-turn RL with a search tool on real questions and real passages: HotpotQA.

  python -m experiments.hotpotqa_base --data=$AGENT_R1_DATA/hotpotqa
  python -m experiments.hotpotqa_search --data=$AGENT_R1_DATA/hotpotqa

The second command takes 20 minutes on 2 CPU cores and prints a table: direct answer,
Naive RAG, Base Tool Call and GRPO on 300 held-out rows. With an instruct model in Hugging
Face layout it is the paper's experiment, with that model's tokenizer and chat template:

  python -m experiments.hotpotqa_search --model=Qwen2.5-3B-Instruct

What the two differ in stands in SMALL and INSTRUCT; `--config.<field>` changes either.
The small policy learns from comparisons alone, unless `--types=` names other types of
rows, or none for all. Any folder of that layout will do as --data: 2WikiMultihopQA,
MuSiQue.
"""

from collections.abc import Callable
import dataclasses
import json
import os
import pathlib
import time
from typing import NamedTuple

from absl import app, flags, logging
from ml_collections import config_flags
import numpy as np

from agent_r1_jax import evaluate, metrics, train, types
from agent_r1_jax.agent import env
from agent_r1_jax.retrieval import bm25, dense, documents, hashing
from agent_r1_jax.rl import algorithms, correction
from agent_r1_jax.tasks import qa, qa_data, qa_demos
from agent_r1_jax.tools import search


class Setting(NamedTuple):
  """How a kind of policy is asked, what it is given to read, and how it is trained."""

  agent_task: Callable[[types.Task], types.Task]
  direct_task: Callable[[types.Task], types.Task]
  rag_task: Callable[..., types.Task]
  template: str  # of a passage
  k: int  # passages a search
  rag_k: int
  reward: env.Reward
  types: tuple[str, ...]  # of the rows to learn from; all if there are none
  kl: float
  config: train.Config


SMALL = Setting(
  qa_demos.agent_task,
  qa_demos.agent_task,
  qa_demos.rag_task,
  template=qa_demos.PASSAGE,
  k=1,
  rag_k=3,
  reward=qa.em_reward,
  # Of the other rows the base answers one in a hundred: there is nothing to amplify.
  types=('comparison',),
  kl=0.0,
  config=train.Config(
    steps=60,
    tasks=24,
    samples=8,
    max_turns=4,
    max_turn_tokens=96,
    learning_rate=3e-4,
    rows=192,
    slots=640,
    decode_steps=16,
    feed_rows=32,
    feed_tokens=32,
    bucket=64,
    microbatch=16,
    eval_every=20,
  ),
)
INSTRUCT = Setting(
  qa.agent_task,
  qa.direct_task,
  qa.rag_task,
  template=documents.PASSAGE,
  k=5,
  rag_k=5,
  reward=qa.paper_reward,
  types=(),
  kl=0.001,
  config=train.Config(dtype='bfloat16', remat='full', eval_every=20),
)

_DATA = flags.DEFINE_string('data', 'data/hotpotqa', 'Of corpus and train.jsonl.gz.')
_WORKDIR = flags.DEFINE_string('workdir', 'runs/hotpotqa', 'Where the run writes.')
_MODEL = flags.DEFINE_string('model', '', 'An instruct model; else the small policy.')
_BASE = flags.DEFINE_string('base', 'runs/hotpotqa_base', 'What hotpotqa_base wrote.')
_RETRIEVER = flags.DEFINE_enum('retriever', 'bm25', ['bm25', 'dense'], 'Of the tool.')
_SPLIT = flags.DEFINE_integer('split', 0, 'Seed of the split; as in hotpotqa_base.')
_HELD_OUT = flags.DEFINE_integer('held_out', 300, 'Rows of the table.')
_WATCHED = flags.DEFINE_integer('watched', 100, 'Rows to watch the training with.')
_TYPES = flags.DEFINE_list('types', None, 'Of rows to learn from; "" is all.')
_CFG = config_flags.DEFINE_config_dataclass('config', train.Config())


def main(_):
  logging.set_verbosity(logging.WARNING)  # Orbax and FAISS narrate at INFO
  setting = INSTRUCT if _MODEL.value else SMALL
  base = _MODEL.value or os.path.join(_BASE.value, 'model')
  given = config_flags.get_override_values(flags.FLAGS['config'])
  config = dataclasses.replace(setting.config, **given, model=base)
  workdir, data, laps = _WORKDIR.value, pathlib.Path(_DATA.value), [time.time()]
  rows = qa_data.jsonl(data / 'train.jsonl.gz')
  sizes = (_HELD_OUT.value, _WATCHED.value)
  held_out, watched, rows = qa_demos.split(rows, *sizes, seed=_SPLIT.value)
  if not _MODEL.value:
    check_unseen(held_out + watched)
  print(json.dumps(dataclasses.asdict(config), indent=2))
  kinds = setting.types if _TYPES.value is None else _TYPES.value
  rows = [task for task in rows if not kinds or task.info.get('type') in kinds]
  if not rows:
    raise ValueError(
      f'--types={",".join(kinds)}: no row is of these types; --types= is all.'
    )

  passages = documents.read_corpus(data / 'corpus.jsonl.gz')
  encode = hashing.HashingEncoder(1024).fit([d.contents for d in passages]).encode
  found = {'bm25': bm25.BM25(passages), 'dense': dense.Dense(passages, encode)}
  recalls = {name: recall(retriever, held_out) for name, retriever in found.items()}
  retriever = found[_RETRIEVER.value]
  hits = retriever.search([t.info['question'] for t in held_out], setting.rag_k)
  laps.append(time.time())

  tool = search.search_tool(retriever, k=setting.k, template=setting.template)
  agent = lambda: env.ToolEnv([tool], setting.reward, metrics=qa.metrics)
  alone = lambda: env.ToolEnv([], setting.reward, metrics=qa.metrics)
  ask = lambda tasks: [setting.agent_task(task) for task in tasks]
  read = [setting.rag_task(t, h) for t, h in zip(held_out, hits, strict=True)]
  baselines = {
    'Direct answer': ([setting.direct_task(task) for task in held_out], alone),
    'Naive RAG': (read, alone),
    'Base Tool Call': (ask(held_out), agent),
  }
  played = play(config, base, baselines)
  laps.append(time.time())
  corrected = correction.token_truncated() if config.oldest else None
  train.run(
    config,
    workdir,
    tasks=ask(rows),
    make_env=agent,
    algorithm=algorithms.grpo(kl_coef=setting.kl, correction=corrected),
    evals={'watched': ask(watched)},
    label='GRPO',
  )
  laps.append(time.time())
  played |= play(config, f'{workdir}/model', {'GRPO': (ask(held_out), agent)})
  laps.append(time.time())
  parts = ('indices and recall', 'three baselines', 'training', 'trained agent')
  times = dict(zip(parts, np.diff(laps).round().tolist(), strict=True))
  report(pathlib.Path(workdir), played, recalls, times)


def check_unseen(tasks) -> None:
  """Raises ValueError if the base policy has seen a row that it is to be measured on."""
  path = pathlib.Path(_BASE.value) / 'rows.json'
  if not path.is_file():
    raise ValueError(f'{path} is missing: run experiments.hotpotqa_base, or give --base.')
  if seen := {task.id for task in tasks} & set(json.loads(path.read_text())):
    raise ValueError(
      f'{path}: the base has seen {len(seen)} of the rows kept from training; give both '
      'scripts the same --split, --held_out and --watched.'
    )


def recall(retriever, tasks) -> dict[str, float]:
  """Of the gold passages, the share among the first 5; and how often that is all."""
  hits = retriever.search([task.info['question'] for task in tasks], 5)
  found = [{hit.document.title for hit in five} for five in hits]
  gold = [set(task.info['supporting_titles']) for task in tasks]
  shares = [len(g & f) / len(g) for g, f in zip(gold, found, strict=True)]
  whole = np.equal(shares, 1)
  return {'recall@5': float(np.mean(shares)), 'all in 5': float(np.mean(whole))}


def play(config, model, rows) -> dict[str, list[types.Trajectory]]:
  """Greedy episodes of one policy, whose memory is free again afterwards."""
  rows = {method: ({'': tasks}, make_env) for method, (tasks, make_env) in rows.items()}
  played = train.play(config, model, rows)
  return {method: sets[''] for method, sets in played.items()}


def report(workdir, played, recalls, times) -> None:
  """Prints and stores the tables, and draws the curve."""
  kind = lambda task: task.info.get('type', 'all')
  rows = {}
  for method, episodes in played.items():
    f1 = [t.metrics.get('f1', 0.0) for t in episodes]
    wide = 1.96 * np.std(f1) / len(f1) ** 0.5
    rows[method] = {
      'EM': count(episodes, lambda task: True),
      'F1': f'{np.mean(f1):.3f} ± {wide:.3f}',
      **{
        f'EM, {k}': count(episodes, lambda task, k=k: kind(task) == k)
        for k in sorted({kind(t.task) for t in episodes})
      },
      'searches': evaluate.score(episodes, 'tool_calls').mean,
    }
  text = '\n\n'.join(
    (
      metrics.table(rows, rows['GRPO']),
      metrics.table(recalls, recalls['bm25']),
      metrics.table({'seconds': times}, times),
    )
  )
  print(f'\n{text}\n{workdir}')
  (workdir / 'table.md').write_text(text + '\n')
  methods = {method: evaluate.summary(episodes) for method, episodes in played.items()}
  numbers = {'methods': methods, 'recall': recalls, 'seconds': times}
  (workdir / 'table.json').write_text(json.dumps(numbers, indent=2) + '\n')
  panels = {'Reward in training': ('rollout/reward',), 'Held out': ('eval/*/em',)}
  metrics.curve(str(workdir), workdir / 'curve.png', panels=panels, title='HotpotQA')


def count(episodes, where) -> metrics.Count:
  """How many answers are right."""
  score = evaluate.score(episodes, 'em', where)
  return metrics.Count(round(score.mean * score.count), score.count)


if __name__ == '__main__':
  app.run(main)
