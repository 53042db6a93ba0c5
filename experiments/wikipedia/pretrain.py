r"""The small base policy of wikipedia.search, from nothing, on practice about the corpus.

  python -m experiments.wikipedia.pretrain --data=$AGENT_R1_DATA/2wikimultihopqa \
    --vocab=2048

A byte-level BPE of the corpus, then a small policy: strings of random tokens to copy at
first, then practice (practice.py), two thirds of it wrong, so that RL has something to
find. The rows held out for the table or watched during the training are never used.
"""

from collections.abc import Iterator
import itertools
import json
import pathlib

from absl import app, flags

from agent_r1_jax import fields, sft
from agent_r1_jax.host import runtime
from agent_r1_jax.tools import search
from experiments import small_policy
from experiments.wikipedia import practice, settings
from experiments.wikipedia import rows as rows_lib

flags.adopt_module_key_flags(rows_lib)  # for --help
flags.adopt_module_key_flags(small_policy)
_OUT = flags.DEFINE_string('out', 'runs/wikipedia_base', 'Directory of the model.')
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
  passages, retriever = settings.open_folder(settings.SMALL, rows_lib.DATA.value)
  *_, rows = rows_lib.read()
  out.mkdir(parents=True, exist_ok=True)
  (out / 'rows.json').write_text(json.dumps([task.id for task in rows]))

  maker = practice.Maker(passages, retriever, rows)
  seed, vocab = small_policy.SEED.value, small_policy.VOCAB.value
  examples = practice.examples(maker, seed)
  schemas = [search.search_tool(retriever).schema]
  small_policy.train(
    out,
    tokenizer_texts(passages, examples),
    examples,
    schemas,
    _CFG.value,
    seed=seed,
    vocab=vocab,
  )


if __name__ == '__main__':
  app.run(main)
