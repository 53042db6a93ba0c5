"""The small base policy of hotpotqa_search, from scratch on programmatic demonstrations.

  python -m experiments.hotpotqa_base --data=$AGENT_R1_DATA/hotpotqa

A byte-level BPE of the corpus, then a policy of 2.5M parameters: first strings of random
tokens, to learn to copy; then demonstrations of the training rows, half of them wrong,
and practice made from the corpus (tasks/qa_demos.py). Held-out rows are never used. On 2
CPU cores: 25 minutes. Any folder with corpus.jsonl.gz and train.jsonl.gz of that layout
will do: 2WikiMultihopQA, MuSiQue.
"""

from collections.abc import Iterator
import itertools
import json
import os
import pathlib
import time

from absl import app, flags
import jax
from ml_collections import config_flags
import numpy as np

from agent_r1_jax import sft, types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import tokenizer
from agent_r1_jax.models import decoder, induction, weights
from agent_r1_jax.retrieval import bm25, documents
from agent_r1_jax.tasks import qa_data, qa_demos
from agent_r1_jax.tools import search

_DATA = flags.DEFINE_string(
  'data',
  os.path.join(os.environ.get('AGENT_R1_DATA', 'data'), 'hotpotqa'),
  'Folder of corpus.jsonl.gz and train.jsonl.gz.',
)
_OUT = flags.DEFINE_string('out', 'runs/hotpotqa_base', 'Where the model is written.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of the initialisation and the examples.')
_SPLIT = flags.DEFINE_integer('split', 0, 'Seed of the split; as in hotpotqa_search.')
_HELD_OUT = flags.DEFINE_integer('held_out', 300, 'Rows kept for the table.')
_WATCHED = flags.DEFINE_integer('watched', 100, 'Rows kept for watching the training.')
_VOCAB = flags.DEFINE_integer('vocab', 4096, 'Size of the vocabulary.')
_LAYERS = flags.DEFINE_integer('layers', 4, 'Layers.')
_DIM = flags.DEFINE_integer('dim', 160, 'Embedding; the feed-forward is 3 times as wide.')
_COPYING = flags.DEFINE_float('copying', 0.05, 'Share of the steps that only copy.')
_CFG = config_flags.DEFINE_config_dataclass(
  'sft', sft.Config(steps=1500, rows=8, learning_rate=2e-3)
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


def copying(seed: int, vocab_size: int, tokens: float) -> Iterator[types.Segment]:
  """Strings of random tokens, each written two to four times, of `tokens` tokens in all.

  Nothing but copying predicts the repetitions: here the induction heads form, in some
  hundred steps; on text alone, not in millions of tokens.
  """
  rng = np.random.default_rng(seed)
  while tokens > 0:
    string = rng.integers(0, vocab_size, rng.integers(4, 41))
    text = np.tile(string, rng.integers(2, 5)).astype(np.int32)
    repeated = np.arange(len(text)) > len(string)
    yield types.Segment(text, repeated, np.zeros(len(text), np.float32))
    tokens -= len(text)


def texts(passages, tasks, examples) -> Iterator[str]:
  """What the tokenizer is trained on, the frame of the conversations included."""
  yield from (passage.contents for passage in passages)
  yield from (task.info['question'] for task in tasks)
  for example in itertools.islice(examples, 2000):
    yield from (f'{m["role"]}\n{m["content"]}' for m in example.messages)


def main(_):
  start, out, data = time.time(), pathlib.Path(_OUT.value), pathlib.Path(_DATA.value)
  passages = documents.read_corpus(data / 'corpus.jsonl.gz')
  rows = qa_data.jsonl(data / 'train.jsonl.gz')
  *_, rows = qa_demos.split(rows, _HELD_OUT.value, _WATCHED.value, seed=_SPLIT.value)
  retriever = bm25.BM25(passages)
  maker = qa_demos.Maker(passages, retriever)
  out.mkdir(parents=True, exist_ok=True)
  (out / 'rows.json').write_text(json.dumps([task.id for task in rows]))

  examples = qa_demos.examples(rows, maker, _SEED.value)
  corpus = texts(passages, rows, examples)
  tokenizer.train(corpus, vocab_size=_VOCAB.value, directory=out / 'tokenizer')
  tok = tokenizer.load(out / 'tokenizer')
  chat, model = chat_lib.Chat(tok), shape(len(tok))
  params = induction.init(model, _SEED.value)
  size = sum(x.size for x in jax.tree.leaves(params))
  print(f'{size:,} parameters; {time.time() - start:.0f} s to get ready', flush=True)
  schemas = [search.search_tool(retriever).schema]
  log = (out / 'log.jsonl').open('w')

  def segments():
    for example in examples:
      tools = schemas if example.tools else ()
      yield sft.segment(chat, sft.Conversation(example.messages, tools))

  def on_step(step, metrics, params):
    log.write(json.dumps({'step': step, 'time': time.time() - start, **metrics}) + '\n')
    log.flush()
    if step % 50 == 0:
      print(step, {k: round(v, 3) for k, v in metrics.items()}, flush=True)
    if step % 200 == 0:
      weights.save(out / 'model', model, params, tokenizer_from=out / 'tokenizer')

  config = _CFG.value
  budget = _COPYING.value * config.steps * config.rows * config.row_tokens
  text = itertools.chain(copying(_SEED.value, len(tok), budget), segments())
  params = sft.run(model, params, text, config, on_step=on_step)
  weights.save(out / 'model', model, params, tokenizer_from=out / 'tokenizer')
  print(f'{time.time() - start:.0f} s', flush=True)


if __name__ == '__main__':
  app.run(main)
