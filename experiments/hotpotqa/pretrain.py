"""The small base policy of hotpotqa.search, from nothing, on programmatic demonstrations.

  third_party/fetch.py hotpotqa
  python -m experiments.hotpotqa.pretrain

A byte-level BPE of the corpus, then a policy of 0.7M parameters that can copy from the
start (miniwiki/induction.py): strings of random tokens at first, then demonstrations of
the training rows, half of them wrong, and practice made from the corpus (demos.py).
Rows that are kept for the table or for watching are never used. On 2 CPU cores: 25
minutes.
"""

from collections.abc import Iterator
import itertools
import json
import pathlib
import time

from absl import app, flags
import jax

from agent_r1_jax import fields
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import tokenizer
from agent_r1_jax.host import runtime
from agent_r1_jax.models import decoder, weights
from agent_r1_jax.report import progress as progress_lib
from agent_r1_jax.retrieval import bm25, documents
from agent_r1_jax.tasks import qa_data
from agent_r1_jax.tools import search
from agent_r1_jax.train import sft
from experiments.hotpotqa import demos
from experiments.miniwiki import induction

_DATA = flags.DEFINE_string(
  'data', qa_data.FETCHED.format('hotpotqa'), 'Folder of corpus and train.jsonl.gz.'
)
_OUT = flags.DEFINE_string('out', 'runs/hotpotqa_base', 'Where the model is written.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of the initialisation and the examples.')
_SPLIT = flags.DEFINE_integer('split', 0, 'Seed of the split; as in hotpotqa.search.')
_HELD_OUT = flags.DEFINE_integer('held_out', 300, 'Rows kept for the table.')
_WATCHED = flags.DEFINE_integer('watched', 100, 'Rows kept for watching the training.')
_VOCAB = flags.DEFINE_integer('vocab', 1024, 'Size of the vocabulary.')
_LAYERS = flags.DEFINE_integer('layers', 3, 'Layers.')
_DIM = flags.DEFINE_integer('dim', 128, 'Embedding; the feed-forward is 3 times as wide.')
_COPYING = flags.DEFINE_float('copying', 0.05, 'Share of the steps that only copy.')
_CFG = fields.define_flags(
  sft.Config(steps=2400, rows=8, row_tokens=512, learning_rate=2e-3), 'sft'
)


def shape(vocab_size: int) -> decoder.DecoderConfig:
  """The policy's architecture: Llama's, small."""
  return decoder.DecoderConfig(
    family='llama',
    vocab_size=vocab_size,
    embed_dim=_DIM.value,
    num_layers=_LAYERS.value,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=3 * _DIM.value,
    rope_theta=1e6,
    tie_embeddings=True,
    max_positions=2048,
  )


def texts(passages, rows, examples) -> Iterator[str]:
  """What the tokenizer is trained on: the corpus, and how conversations look."""
  yield from (passage.contents for passage in passages)
  yield from (task.info['question'] for task in rows)
  for example in itertools.islice(examples, 2000):
    yield from (f'{m["role"]}\n{m["content"]}' for m in example.messages)


def main(_):
  runtime.quiet_logging()
  runtime.initialize()
  config, seed, start = _CFG.value, _SEED.value, time.time()
  out = pathlib.Path(_OUT.value)
  corpus, questions = qa_data.find(_DATA.value)
  passages, rows = documents.read_corpus(corpus), qa_data.jsonl(questions)
  *_, rows = demos.split(rows, _HELD_OUT.value, _WATCHED.value, seed=_SPLIT.value)
  out.mkdir(parents=True, exist_ok=True)
  (out / 'rows.json').write_text(json.dumps([task.id for task in rows]))

  retriever = bm25.BM25(passages)
  examples = demos.examples(rows, demos.Maker(passages, retriever), seed)
  read = texts(passages, rows, examples)
  tokenizer.train(read, vocab_size=_VOCAB.value, directory=out / 'tokenizer')
  tok = tokenizer.load(out / 'tokenizer')
  chat, model = chat_lib.Chat(tok), shape(len(tok))
  params = induction.init(model, seed)
  size = sum(x.size for x in jax.tree.leaves(params))
  print(f'{size:,} parameters; ready after {time.time() - start:.0f} s', flush=True)

  schemas = [search.search_tool(retriever).schema]
  conversations = (
    sft.Conversation(example.messages, schemas if example.tools else ())
    for example in examples
  )
  budget = _COPYING.value * config.steps * config.rows * config.row_tokens
  text = itertools.chain(
    sft.repeats(seed, len(tok), budget), (sft.segment(chat, c) for c in conversations)
  )
  with (
    (out / 'log.jsonl').open('w') as log,
    progress_lib.Progress(config.steps, label='base policy') as progress,
  ):

    def on_step(step, numbers, params):
      seconds = time.time() - start
      log.write(json.dumps({'step': step, 'seconds': seconds, **numbers}) + '\n')
      progress.update(step, loss=numbers['loss'])
      if step % 200 == 0 or step == config.steps:
        weights.save(out / 'model', model, params, tokenizer_from=out / 'tokenizer')

    sft.run(model, params, text, config, on_step=on_step)


if __name__ == '__main__':
  app.run(main)
