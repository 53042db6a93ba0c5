"""The small base policy of hotpotqa.search, from nothing, on programmatic demonstrations.

  third_party/fetch.py hotpotqa
  python -m experiments.hotpotqa.pretrain

A byte-level BPE of the corpus, then a policy of 0.7M parameters: strings of random tokens
to copy at first, then demonstrations of the training rows, half of them wrong, and
practice made from the corpus (demos.py). The rows that are held out for the table or
watched during the training are never used. On 2 CPU cores: 25 minutes.
"""

from collections.abc import Iterator
import itertools
import json
import pathlib

from absl import app, flags

from agent_r1_jax import fields
from agent_r1_jax.host import runtime
from agent_r1_jax.retrieval import bm25, documents
from agent_r1_jax.tasks import qa_data
from agent_r1_jax.tools import search
from agent_r1_jax.train import sft
from experiments import small_policy
from experiments.hotpotqa import demos

_DATA = flags.DEFINE_string(
  'data', qa_data.FETCHED.format('hotpotqa'), 'Folder of corpus and train.jsonl.gz.'
)
_OUT = flags.DEFINE_string(
  'out', 'runs/hotpotqa_base', 'Directory that the model is written to.'
)
_SPLIT = flags.DEFINE_integer('split', 0, 'Seed of the split; as in hotpotqa.search.')
_HELD_OUT = flags.DEFINE_integer('held_out', 300, 'Rows held out for the table.')
_WATCHED = flags.DEFINE_integer('watched', 100, 'Rows to watch the training with.')
_CFG = fields.define_flags(
  sft.Config(steps=2400, rows=8, row_tokens=512, learning_rate=2e-3), 'sft'
)


def tokenizer_texts(passages, rows, examples) -> Iterator[str]:
  """Yields what the tokenizer is trained on: the corpus, questions, conversations."""
  yield from (passage.contents for passage in passages)
  yield from (task.info['question'] for task in rows)
  for example in itertools.islice(examples, 2000):
    yield from (f'{m["role"]}\n{m["content"]}' for m in example.messages)


def main(_):
  runtime.quiet_logging()
  runtime.initialize()
  out = pathlib.Path(_OUT.value)
  corpus, _ = qa_data.find(_DATA.value)
  passages = documents.read_corpus(corpus)
  rows = list(qa_data.read_questions(_DATA.value))
  *_, rows = demos.split(rows, _HELD_OUT.value, _WATCHED.value, seed=_SPLIT.value)
  out.mkdir(parents=True, exist_ok=True)
  (out / 'rows.json').write_text(json.dumps([task.id for task in rows]))

  retriever = bm25.BM25(passages)
  maker = demos.Maker(passages, retriever)
  examples = demos.examples(rows, maker, small_policy.SEED.value)
  texts = tokenizer_texts(passages, rows, examples)
  schemas = [search.search_tool(retriever).schema]
  small_policy.train(out, texts, examples, schemas, _CFG.value)


if __name__ == '__main__':
  app.run(main)
