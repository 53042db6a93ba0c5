"""The small base policy of miniwiki, supervised on imperfect demonstrations.

  python -m experiments.miniwiki.pretrain --out=runs/base

It learns to read, to copy names and to call the search tool, but not to do it well: three
in four demonstrations are wrong in one way or another. Its worlds share no word of a name
with those of RL or of the tests. The initialisation holds a hand-made induction circuit
(induction.py); without it the policy had not learned to copy after 3M tokens.
"""

from collections.abc import Iterator
import itertools
import json
import pathlib
import time

from absl import app, flags
import jax

from agent_r1_jax import fields, types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import tokenizer
from agent_r1_jax.host import runtime
from agent_r1_jax.models import decoder, weights
from agent_r1_jax.report import progress as progress_lib
from agent_r1_jax.retrieval import dense, documents
from agent_r1_jax.tools import search as search_lib
from agent_r1_jax.train import sft
from experiments.miniwiki import demos, hashing, induction
from experiments.miniwiki import tasks as miniwiki

_OUT = flags.DEFINE_string('out', 'runs/base', 'Where the model is written.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of the worlds and of the initialisation.')
_VOCAB = flags.DEFINE_integer('vocab', 1024, 'Size of the vocabulary.')
_LAYERS = flags.DEFINE_integer('layers', 3, 'Layers.')
_DIM = flags.DEFINE_integer('dim', 128, 'Embedding; the feed-forward is 3 times as wide.')
_EXAMPLES = flags.DEFINE_integer('examples', 6000, 'That the tokenizer is trained on.')
_COPYING = flags.DEFINE_float(
  'copying', 0.05, 'Share of the steps that practise copying.'
)
_CFG = fields.define_flags(sft.Config(steps=2000, rows=8, learning_rate=2e-3), 'sft')


def index(passages):
  """The FAISS index that serves a world."""
  encoder = hashing.HashingEncoder().fit([d.contents for d in passages])
  return dense.Dense(passages, encoder.encode)


def make_search(passages):
  """query -> what the search tool answers."""
  retriever = index(passages)
  return lambda query: documents.render(retriever.search([query], 1)[0])


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
    tie_embeddings=True,
    rope_theta=1e6,
    max_positions=2048,
  )


def reading(seed: int, chat: chat_lib.Chat, tools) -> Iterator[types.Segment]:
  """Demonstrations and practice items, for ever."""
  for example in demos.examples(seed, 10**9, make_search):
    conversation = sft.Conversation(example.messages, tools if example.tools else ())
    yield sft.segment(chat, conversation)


def main(_):
  runtime.quiet_logging()
  runtime.initialize()
  config, seed, out = _CFG.value, _SEED.value, pathlib.Path(_OUT.value)
  start = time.time()
  sample = list(demos.examples(seed + 2, _EXAMPLES.value, make_search))
  texts = demos.tokenizer_texts(sample)
  tokenizer.train(texts, vocab_size=_VOCAB.value, directory=out / 'tokenizer')
  tok = tokenizer.load(out / 'tokenizer')
  model = shape(len(tok))
  params = induction.init(model, seed)
  print(f'{sum(x.size for x in jax.tree.leaves(params)):,} parameters', flush=True)

  tools = [search_lib.search_tool(index(miniwiki.corpus(seed, 'base'))).schema]
  budget = _COPYING.value * config.steps * config.rows * config.row_tokens
  text = itertools.chain(
    sft.repeats(seed, len(tok), budget), reading(seed, chat_lib.Chat(tok), tools)
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
