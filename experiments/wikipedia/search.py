r"""Multi-turn RL with a search tool on real multi-hop questions: the paper's task.

  python -m experiments.wikipedia.search --data=$AGENT_R1_DATA/hotpotqa \
    --config.model.path=DIR

DIR is an instruct model in Hugging Face layout; its tokenizer and chat template are used
(docs/memory.md has the command for one GPU of 80 GB). --data may be any folder with
corpus.jsonl.gz and train.jsonl.gz: HotpotQA, 2WikiMultihopQA, MuSiQue.

Prints a table: direct answer, Naive RAG, Base Tool Call and GRPO on the held-out rows.
`--rows=FILE` replaces the held-out rows by those of the file; their passages must be in
the corpus. The table's episodes are stored in WORKDIR/episodes, and only missing ones are
played.
"""

import collections
import dataclasses
import functools
import json
import pathlib
import time

from absl import app, flags
import numpy as np

from agent_r1_jax import fields
from agent_r1_jax.host import runtime
from agent_r1_jax.models.files import hf_config
from agent_r1_jax.report import tables
from agent_r1_jax.retrieval import bm25, documents
from agent_r1_jax.rollout import evaluate
from agent_r1_jax.tasks import qa, qa_data
from agent_r1_jax.train import fingerprint
from experiments import comparison, model_formats, retrievers
from experiments import tables as tables_lib
from experiments.wikipedia import settings

_DATA = flags.DEFINE_string(
  'data',
  qa_data.FETCHED.format('2wikimultihopqa'),
  'Folder of corpus and train.jsonl.gz.',
)
_SPLIT = flags.DEFINE_integer('split', 0, 'Seed of the split.')
_HELD_OUT = flags.DEFINE_integer('held_out', 300, 'Rows held out for the table.')
_WATCHED = flags.DEFINE_integer('watched', 100, 'Rows to watch the training with.')
_WORKDIR = flags.DEFINE_string('workdir', 'runs/wikipedia', 'Directory of the run.')
_RETRIEVER = flags.DEFINE_string(
  'retriever', '', 'What experiments.build_index made or serves; by default the corpus.'
)
_ENCODER = flags.DEFINE_string('encoder', '', 'Directory of the model of dense indexes.')
_ROWS = flags.DEFINE_string('rows', '', 'File of other rows to score.')
_CFG = fields.define_flags(settings.CONFIG)


def main(_):
  runtime.quiet_logging()
  config, workdir, start = _CFG.value, pathlib.Path(_WORKDIR.value), time.time()
  # A wrong path is named before the corpus is read.
  hf_config.read(config.model.path, model_formats.find())
  corpus, _ = qa_data.find(_DATA.value)
  passages = documents.read_corpus(corpus)
  held_out, watched, rows = settings.split(
    list(qa_data.read_questions(_DATA.value)),
    *(_HELD_OUT.value, _WATCHED.value),
    seed=_SPLIT.value,
  )
  if _ROWS.value:
    held_out = qa_data.load(_ROWS.value)
  print(json.dumps(dataclasses.asdict(config), indent=2))

  if _RETRIEVER.value:
    retriever = retrievers.open_retriever(_RETRIEVER.value, _ENCODER.value)
  else:
    retriever = bm25.BM25(passages)
  recall = comparison.recall(retriever, held_out)
  searched = [_RETRIEVER.value, _ENCODER.value, *map(dataclasses.astuple, passages)]

  play = functools.partial(
    comparison.play,
    workdir=workdir,
    summarize=lambda sets: summarize(sets['']),
    made_of=fingerprint.digest(searched),
  )
  ask = lambda tasks: [qa.agent_task(task) for task in tasks]
  prepared = time.time() - start
  numbers, seconds = comparison.run(
    config,
    workdir,
    play,
    settings.methods({'': held_out}, retriever),
    tasks=ask(rows),
    evals={'watched': ask(watched)},
    algorithm=comparison.make_grpo(config, 0.001),
    label='GRPO',
  )
  report(workdir, numbers, recall, {'indices': prepared, **seconds})


def summarize(episodes):
  """Returns exact matches in order, by kind of question, with F1 and searches."""
  kinds = {t.task.info.get('type', '') for t in episodes} - {''}
  several = 'comparison' in kinds and len(kinds) > 2
  right = collections.defaultdict(list)
  for t in episodes:
    kind = t.task.info.get('type', '')
    multi_hop = several and kind != 'comparison'
    for name in ('all', *([kind] if kind else []), *(['multi-hop'] if multi_hop else [])):
      right[name].append(int(t.metrics.get('em', 0.0)))
  return {
    'right': dict(sorted(right.items())),
    'f1': evaluate.mean_metric(episodes, 'f1'),
    'searches': evaluate.mean_metric(episodes, 'tool_calls'),
    'errors': evaluate.summarize(episodes)['status/error'],
  }


def report(workdir, numbers, recall, seconds) -> None:
  """Prints and stores the table.

  The table's last row compares GRPO and its base on the same questions.
  """
  rows: dict[str, dict[str, tables.Cell]] = {
    method: {
      **{f'EM, {k}': tables.Count(sum(r), len(r)) for k, r in of['right'].items()},
      'F1': of['f1'],
      'searches': of['searches'],
    }
    for method, of in numbers.items()
  }
  base, trained = (numbers[method]['right'] for method in ('Base Tool Call', 'GRPO'))
  rows['GRPO less base'] = {
    f'EM, {kind}': tables.Interval(
      *tables_lib.mean_interval(np.subtract(trained[kind], r))
    )
    for kind, r in base.items()
  }
  table = tables.format_table(rows, rows['GRPO'])
  about = {'': {**recall, **{f'seconds, {part}': s for part, s in seconds.items()}}}
  print(f'\n{table}\n\n{tables.format_table(about, about[""])}\n{workdir}')
  (workdir / 'table.md').write_text(table + '\n')
  found = {'methods': numbers, 'recall': recall, 'seconds': seconds}
  (workdir / 'table.json').write_text(json.dumps(found, indent=2) + '\n')


if __name__ == '__main__':
  app.run(main)
