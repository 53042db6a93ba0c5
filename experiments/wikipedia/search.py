r"""Multi-turn RL with a search tool on real questions of several hops.

  D=$AGENT_R1_DATA/2wikimultihopqa
  python -m experiments.wikipedia.pretrain --data=$D --vocab=2048
  python -m experiments.wikipedia.search --data=$D

The first command makes a small base policy. The second prints a table: direct answer,
Naive RAG, Base Tool Call and GRPO on the held-out rows. With `--rows=FILE` the table is
of the rows of that file in place of the held-out ones; their passages must be in the
corpus. Any folder of corpus.jsonl.gz and train.jsonl.gz will do as --data: HotpotQA,
2WikiMultihopQA, MuSiQue.

With an instruct model in Hugging Face layout it is the paper's experiment, with that
model's tokenizer and chat template (docs/memory.md has the command for one GPU of 80 GB).
What the two differ in stands in settings.py; `--config.<field>` changes either. A model
with pretrain.py's rows.json beside its directory is the small one. Episodes of the table
are kept in WORKDIR/episodes, and only missing ones are played.
"""

import collections
import dataclasses
import json
import pathlib
import time

from absl import app, flags
from ml_collections import config_flags
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.host import runtime
from agent_r1_jax.report import tables
from agent_r1_jax.rollout import evaluate
from agent_r1_jax.tasks import qa_data
from agent_r1_jax.train import fingerprint
from experiments import comparison, retrievers
from experiments.wikipedia import rows as rows_lib
from experiments.wikipedia import settings

flags.adopt_module_key_flags(rows_lib)  # for --help
_WORKDIR = flags.DEFINE_string('workdir', 'runs/wikipedia', 'Directory of the run.')
_RETRIEVER = flags.DEFINE_string(
  'retriever', '', 'What experiments.build_index made or serves; by default the corpus.'
)
_ENCODER = flags.DEFINE_string('encoder', '', 'Directory of the model of dense indexes.')
_ROWS = flags.DEFINE_string('rows', '', 'File of other rows to score.')
_UNTRAINED = flags.DEFINE_string(
  'untrained', '', "Policy of the table's other rows; by default config.model.path."
)
_TYPES = flags.DEFINE_list('types', [], 'Types of rows to learn from; all by default.')
_CFG = fields.define_flags(config_lib.Config())


def main(_):
  runtime.quiet_logging()
  given = config_flags.get_override_values(flags.FLAGS['config'])
  setting = settings.setting_of(given.get('model.path', ''))
  config = fields.replace(setting.config, given)
  workdir, start = pathlib.Path(_WORKDIR.value), time.time()
  passages, retriever = settings.open_folder(setting, rows_lib.DATA.value)
  held_out, watched, rows = rows_lib.read()
  base = _UNTRAINED.value or config.model.path
  if setting is settings.SMALL:
    settings.check_unseen(base, held_out + watched)
  if _ROWS.value:
    held_out = qa_data.load(_ROWS.value)
  rows = choose(rows, _TYPES.value)
  print(json.dumps(dataclasses.asdict(config), indent=2))

  if _RETRIEVER.value:
    retriever = retrievers.open_retriever(_RETRIEVER.value, _ENCODER.value)
  recall = comparison.recall(retriever, held_out)
  searched = [_RETRIEVER.value, _ENCODER.value, *map(dataclasses.astuple, passages)]

  def play(config, model, rows):
    return comparison.play(
      config,
      base if model == config.model.path else model,
      rows,
      workdir=workdir,
      summarize=lambda sets: summarize(sets['']),
      made_of=fingerprint.digest(searched),
    )

  ask = lambda tasks: [setting.agent_task(task) for task in tasks]
  prepared = time.time() - start
  numbers, seconds = comparison.run(
    config,
    workdir,
    play,
    settings.methods(setting, {'': held_out}, retriever),
    tasks=ask(rows),
    evals={'watched': ask(watched)},
    algorithm=comparison.make_grpo(config, setting.kl),
    label='GRPO',
  )
  if setting is settings.SMALL:
    # By which experiments.evaluate knows the trained policy as a small one, too.
    seen = settings.rows_of(config.model.path).read_text()
    settings.rows_of(str(workdir / 'model')).write_text(seen)
  report(workdir, numbers, recall, {'indices': prepared, **seconds})


def choose(rows: list[types.Task], kinds: list[str]) -> list[types.Task]:
  """Chooses the rows of some types; all if none is named."""
  rows = [task for task in rows if not kinds or task.info.get('type') in kinds]
  if not rows:
    raise ValueError(f'--types={",".join(kinds)}: no row is of these types.')
  return rows


def summarize(episodes):
  """Which episodes match exactly, in order, by kind of question; F1 and searches."""
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

  The table's last row compares GRPO and its base by question: both answer the same ones.
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
    f'EM, {kind}': tables.Interval(*tables.mean_interval(np.subtract(trained[kind], r)))
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
