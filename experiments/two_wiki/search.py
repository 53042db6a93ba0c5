r"""Multi-turn RL with a search tool on real questions of several hops: 2WikiMultihopQA.

  python -m experiments.two_wiki.pretrain --data=$AGENT_R1_DATA/2wikimultihopqa
  python -m experiments.two_wiki.search --data=$AGENT_R1_DATA/2wikimultihopqa

The first command makes the base policy. The second prints a table: direct answer, Naive
RAG, Base Tool Call and GRPO on the held-out rows. With `--rows=FILE` the table is of the
rows of that file in place of the held-out ones; their passages must be in the corpus.
"""

from collections.abc import Callable
import dataclasses
import functools
import json
import pathlib
import time

from absl import app, flags

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.host import runtime
from agent_r1_jax.report import tables
from agent_r1_jax.retrieval import bm25, documents
from agent_r1_jax.tasks import qa, qa_data
from agent_r1_jax.tools import search
from agent_r1_jax.train import evaluate, evaluation_cache, identity
from experiments import comparison
from experiments.hotpotqa import demos, settings
from experiments.two_wiki import practice

_DATA = flags.DEFINE_string(
  'data',
  qa_data.FETCHED.format('2wikimultihopqa'),
  'Folder of corpus and train.jsonl.gz.',
)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/two_wiki', 'Directory of the run.')
_SPLIT = flags.DEFINE_integer('split', 0, 'Seed of the split; as in two_wiki.pretrain.')
_HELD_OUT = flags.DEFINE_integer('held_out', 300, 'Rows of the table.')
_WATCHED = flags.DEFINE_integer('watched', 100, 'Rows to watch the training with.')
_ROWS = flags.DEFINE_string('rows', '', 'File of other rows to score.')
_TYPES = flags.DEFINE_list('types', [], 'Types of rows to learn from; all by default.')
_CFG = fields.define_flags(
  config_lib.Config(
    model=config_lib.Model(path='runs/two_wiki_base/model'),
    schedule=config_lib.Schedule(steps=40, tasks=24, samples=8, eval_every=20),
    limits=config_lib.Limits(max_turns=6, max_turn_tokens=96),
    optimizer=config_lib.Optimizer(learning_rate=2e-4),
    engine=config_lib.Engine(
      rows=96,
      slots=1280,
      decode_steps=16,
      prefill_rows=32,
      prefill_tokens=32,
      bucket=128,
      replicas=1,
    ),
    batch=config_lib.Batch(microbatch=8),
  )
)


def main(_):
  runtime.quiet_logging()
  config = _CFG.value
  workdir, start = pathlib.Path(_WORKDIR.value), time.time()
  corpus, _ = qa_data.find(_DATA.value)
  rows = list(qa_data.read_questions(_DATA.value))
  sizes = (_HELD_OUT.value, _WATCHED.value)
  held_out, watched, rows = demos.split(rows, *sizes, seed=_SPLIT.value)
  settings.check_unseen(config.model.path, held_out + watched)
  if _ROWS.value:
    held_out = qa_data.load(_ROWS.value)
  kinds = _TYPES.value
  rows = [task for task in rows if not kinds or task.info['type'] in kinds]
  print(json.dumps(dataclasses.asdict(config), indent=2))

  passages = practice.read_passages(corpus)
  retriever = practice.TitleFirst(passages, bm25.BM25(passages))
  methods = comparison.qa_methods(
    {'': held_out},
    retriever,
    search.search_tool(retriever, k=1, template=practice.PASSAGE),
    qa.em_reward,
    direct=demos.agent_task,
    rag=_ask_with_passages,
    agent=demos.agent_task,
    rag_k=practice.SHOWN,
  )
  play = functools.partial(
    evaluation_cache.evaluate_or_read,
    workdir / 'results.jsonl',
    summarize=lambda sets: summarize(sets['']),
    depends_on={
      'passages': identity.digest([dataclasses.astuple(d) for d in passages]),
      'template': practice.PASSAGE,
    },
  )
  ask = lambda tasks: [demos.agent_task(task) for task in tasks]
  prepared = time.time() - start
  numbers, seconds = comparison.run(
    config,
    workdir,
    play,
    methods,
    tasks=ask(rows),
    evals={'watched': ask(watched)},
    kl_coef=0.0,
    label='GRPO',
  )
  report(workdir, numbers, {'indices': prepared, **seconds})


def _ask_with_passages(task, hits):
  passages = documents.render(hits, practice.PASSAGE)
  content = demos.READING.format(passages=passages, question=task.info['question'])
  return dataclasses.replace(task, messages=[{'role': 'user', 'content': content}])


def summarize(episodes):
  """A method's exact match by kind of question, and its searches."""
  kind = lambda task: task.info['type']
  names = sorted({kind(t.task) for t in episodes})
  kinds: dict[str, Callable[[types.Task], bool]] = {
    n: lambda task, n=n: kind(task) == n for n in names
  }
  kinds['multi-hop'] = lambda task: kind(task) != 'comparison'
  return {
    'em': evaluate.by_kind(episodes, kinds),
    'searches': evaluate.mean_metric(episodes, 'tool_calls'),
  }


def report(workdir, numbers, seconds) -> None:
  """Prints and stores the table."""
  rows = {
    method: {
      **{f'EM, {kind}': comparison.count(cell) for kind, cell in of['em'].items()},
      'searches': of['searches'],
    }
    for method, of in numbers.items()
  }
  table = tables.format_table(rows, rows['GRPO'])
  print(f'\n{table}\n{tables.format_table({"seconds": seconds}, seconds)}\n{workdir}')
  (workdir / 'table.md').write_text(table + '\n')
  (workdir / 'table.json').write_text(
    json.dumps({'methods': numbers, 'seconds': seconds})
  )


if __name__ == '__main__':
  app.run(main)
