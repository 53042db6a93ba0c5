r"""Multi-turn RL with a search tool on real questions and real passages: HotpotQA.

  third_party/fetch.py hotpotqa
  python -m experiments.hotpotqa.pretrain
  python -m experiments.hotpotqa.search

The last command takes 20 minutes on 2 CPU cores and prints a table: direct answer,
Naive RAG, Base Tool Call and GRPO on 300 held-out rows. With an instruct model in
Hugging Face layout it is the paper's experiment, with that model's tokenizer and chat
template. On one GPU of 80 GB, as docs/memory.md counts it:

  XLA_PYTHON_CLIENT_MEM_FRACTION=.95 python -m experiments.hotpotqa.search \
    --config.model.path=Qwen2.5-3B-Instruct --config.optimizer.kind=adamw8 \
    --config.engine.slots=4096

What the two differ in stands in settings.py; `--config.<field>` changes either. A
model with pretrain.py's rows.json beside its directory is the small one. The baselines
are kept in WORKDIR/results.jsonl, and played again only if what they depend on changes.
The small policy learns from comparisons alone, unless `--types=` names other types of
rows, or none for all. Any folder of that layout will do as --data: 2WikiMultihopQA,
MuSiQue; it is corpus.jsonl.gz and train.jsonl.gz.
"""

import dataclasses
import functools
import json
import pathlib
import time
from typing import Any

from absl import app, flags
from ml_collections import config_flags
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.checks import identity
from agent_r1_jax.host import runtime
from agent_r1_jax.report import plots, tables
from agent_r1_jax.retrieval import bm25, dense, documents
from agent_r1_jax.tasks import qa_data
from agent_r1_jax.train import evaluate, evaluation_cache
from experiments import comparison, retrievers
from experiments.hotpotqa import demos, settings
from experiments.miniwiki import hashing

_DATA = flags.DEFINE_string(
  'data', qa_data.FETCHED.format('hotpotqa'), 'Folder of corpus and train.jsonl.gz.'
)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/hotpotqa', 'Directory of the run.')
_RETRIEVER = flags.DEFINE_string(
  'retriever', 'bm25', 'bm25, dense, or what experiments.build_index made or serves.'
)
_ENCODER = flags.DEFINE_string('encoder', '', 'Directory of the model of dense indexes.')
_SPLIT = flags.DEFINE_integer('split', 0, 'Seed of the split; as in hotpotqa.pretrain.')
_HELD_OUT = flags.DEFINE_integer('held_out', 300, 'Rows of the table.')
_WATCHED = flags.DEFINE_integer('watched', 100, 'Rows to watch the training with.')
_TYPES = flags.DEFINE_list('types', None, 'Types of rows to learn from; "" is all.')
_CFG = fields.define_flags(config_lib.Config())


def main(_):
  runtime.quiet_logging()
  given = config_flags.get_override_values(flags.FLAGS['config'])
  setting = settings.setting_of(given.get('model.path', ''))
  config = fields.replace(setting.config, given)
  workdir, start = pathlib.Path(_WORKDIR.value), time.time()
  corpus, _ = qa_data.find(_DATA.value)
  rows = list(qa_data.read_questions(_DATA.value))
  sizes = (_HELD_OUT.value, _WATCHED.value)
  held_out, watched, rows = demos.split(rows, *sizes, seed=_SPLIT.value)
  if setting is settings.SMALL:
    settings.check_unseen(config.model.path, held_out + watched)
  print(json.dumps(dataclasses.asdict(config), indent=2))
  rows = choose_rows(rows, setting)

  passages = documents.read_corpus(corpus)
  encode = hashing.HashingEncoder(1024).fit([d.contents for d in passages]).encode
  found = {'bm25': bm25.BM25(passages), 'dense': dense.Dense(passages, encode)}
  if _RETRIEVER.value not in found:
    place = _RETRIEVER.value
    found[place] = retrievers.open_retriever(place, _ENCODER.value)
  recalls = {
    name: comparison.recall(retriever, held_out) for name, retriever in found.items()
  }
  retriever = found[_RETRIEVER.value]
  ask = lambda tasks: [setting.agent_task(task) for task in tasks]
  play = functools.partial(
    evaluation_cache.evaluate_or_read,
    workdir / 'results.jsonl',
    summarize=lambda sets: summarize(sets['']),
    depends_on={
      'retriever': [_RETRIEVER.value, _ENCODER.value],
      'passages': identity.digest([dataclasses.astuple(d) for d in passages]),
      'k': setting.k,
      'template': setting.template,
      'reward': setting.reward.__name__,
    },
  )
  prepared = time.time() - start
  numbers, seconds = comparison.run(
    config,
    workdir,
    play,
    settings.methods(setting, {'': held_out}, retriever),
    tasks=ask(rows),
    evals={'watched': ask(watched)},
    kl_coef=setting.kl,
    label='GRPO',
  )
  times = {'indices and recall': prepared, **seconds}
  report(workdir, numbers, recalls, {k: float(round(s)) for k, s in times.items()})


def choose_rows(rows: list[types.Task], setting: settings.Setting) -> list[types.Task]:
  """Chooses the rows to learn from by --types, else by the setting."""
  kinds = setting.types if _TYPES.value is None else _TYPES.value
  rows = [task for task in rows if not kinds or task.info.get('type') in kinds]
  if not rows:
    raise ValueError(
      f'--types={",".join(kinds)}: no row is of these types; --types= is all.'
    )
  return rows


def summarize(episodes) -> dict[str, Any]:
  """A method's numbers: all that the tables show of its episodes."""
  kind = lambda task: task.info.get('type', 'all')
  kinds = {
    name: lambda task, name=name: kind(task) == name
    for name in sorted({kind(t.task) for t in episodes})
  }
  f1 = [t.metrics.get('f1', 0.0) for t in episodes]
  return {
    'em': evaluate.by_kind(episodes, kinds),
    'f1': float(np.mean(f1)),
    'f1_interval': float(1.96 * np.std(f1) / len(f1) ** 0.5),
    'searches': evaluate.mean_metric(episodes, 'tool_calls'),
    'summary': evaluate.summarize(episodes),
  }


def report(workdir, numbers, recalls, times) -> None:
  """Prints and stores the tables, and draws the curve."""
  rows = {}
  for method, of in numbers.items():
    kinds = {f'EM, {name}': cell for name, cell in of['em'].items() if name != 'all'}
    rows[method] = {
      'EM': comparison.count(of['em']['all']),
      'F1': f'{of["f1"]:.3f} ± {of["f1_interval"]:.3f}',
      **{name: comparison.count(cell) for name, cell in kinds.items()},
      'searches': of['searches'],
    }
  parts = [tables.format_table(rows, rows['GRPO'])]
  if recalls['bm25']:
    parts.append(tables.format_table(recalls, recalls['bm25']))
  text = '\n\n'.join([*parts, tables.format_table({'seconds': times}, times)])
  print(f'\n{text}\n{workdir}')
  (workdir / 'table.md').write_text(text + '\n')
  methods = {method: of['summary'] for method, of in numbers.items()}
  table = {'methods': methods, 'recall': recalls, 'seconds': times}
  (workdir / 'table.json').write_text(json.dumps(table, indent=2) + '\n')
  panels = {'Reward in training': ('rollout/reward',), 'Held out': ('eval/*/em',)}
  plots.plot_curves(str(workdir), workdir / 'curve.png', panels=panels, title='HotpotQA')


if __name__ == '__main__':
  app.run(main)
