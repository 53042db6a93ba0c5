"""The small base policy of two_wiki.search, from nothing, on practice about the corpus.

  D=$AGENT_R1_DATA/2wikimultihopqa
  python -m experiments.two_wiki.pretrain --data=$D --vocab=2048

A byte-level BPE of the corpus, then a small policy: strings of random tokens to copy at
first, then practice (practice.py), a quarter of it wrong. The rows that are held out for
the table or watched during the training are never used.
"""

from collections.abc import Iterator
import itertools
import json
import pathlib

from absl import app, flags

from agent_r1_jax import fields
from agent_r1_jax.host import runtime
from agent_r1_jax.retrieval import bm25
from agent_r1_jax.tasks import qa_data
from agent_r1_jax.tools import search
from agent_r1_jax.train import sft
from experiments import small_policy
from experiments.hotpotqa import demos
from experiments.two_wiki import practice

_DATA = flags.DEFINE_string(
  'data',
  qa_data.FETCHED.format('2wikimultihopqa'),
  'Folder of corpus and train.jsonl.gz.',
)
_OUT = flags.DEFINE_string('out', 'runs/two_wiki_base', 'Directory of the model.')
_SPLIT = flags.DEFINE_integer('split', 0, 'Seed of the split; as in two_wiki.search.')
_HELD_OUT = flags.DEFINE_integer('held_out', 300, 'Rows held out for the table.')
_WATCHED = flags.DEFINE_integer('watched', 100, 'Rows to watch the training with.')
_CFG = fields.define_flags(
  sft.Config(steps=3200, rows=6, row_tokens=1024, learning_rate=2e-3), 'sft'
)


def tokenizer_texts(passages, examples) -> Iterator[str]:
  """Yields what the tokenizer is trained on: the corpus and conversations."""
  yield from (passage.contents for passage in passages)
  for example in itertools.islice(examples, 3000):
    yield from (f'{m["role"]}\n{m["content"]}' for m in example.messages)


def main(_):
  runtime.quiet_logging()
  runtime.initialize()
  out = pathlib.Path(_OUT.value)
  corpus, _ = qa_data.find(_DATA.value)
  passages = practice.read_passages(corpus)
  rows = list(qa_data.read_questions(_DATA.value))
  *_, rows = demos.split(rows, _HELD_OUT.value, _WATCHED.value, seed=_SPLIT.value)
  out.mkdir(parents=True, exist_ok=True)
  (out / 'rows.json').write_text(json.dumps([task.id for task in rows]))

  retriever = practice.TitleFirst(passages, bm25.BM25(passages))
  maker = practice.Maker(passages, retriever, rows)
  examples = practice.examples(maker, small_policy.SEED.value)
  schemas = [search.search_tool(retriever).schema]
  small_policy.train(
    out, tokenizer_texts(passages, examples), examples, schemas, _CFG.value
  )


if __name__ == '__main__':
  app.run(main)
