"""A small base policy from scratch: tokenizer, initialisation, supervised text.

The scripts pretrain.py of miniwiki and wikipedia differ only in their examples. The
policy can copy from the start (miniwiki/induction.py); without that hand-made circuit it
had not learned to copy after 3M tokens. --shape selects another family, some of which
begin without the circuit.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import itertools
import json
import pathlib
import time
from typing import Any

from absl import flags
import jax

from agent_r1_jax import sft
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import pictures, tokenizer
from agent_r1_jax.models import decoder
from agent_r1_jax.models.files import hf_config, weights
from agent_r1_jax.models.pictures import vision_config
from agent_r1_jax.report import progress as progress_lib
from experiments import train_tokenizer
from experiments.miniwiki import induction

SEED = flags.DEFINE_integer('seed', 0, 'Seed of the initialisation and the examples.')
VOCAB = flags.DEFINE_integer('vocab', 1024, 'Size of the vocabulary.')
_LAYERS = flags.DEFINE_integer('layers', 3, 'Number of layers.')
_DIM = flags.DEFINE_integer('dim', 128, 'Embedding; the feed-forward is 3 times as wide.')
_SHAPE = flags.DEFINE_string(
  'shape', '', 'A config.json of another family, in place of --layers and --dim.'
)
_COPYING = flags.DEFINE_float('copying', 0.05, 'Share of the steps that only copy.')
_SAVE_EVERY = 200  # steps


def make_config(
  vocab_size: int, reader: pictures.Reader | None = None
) -> decoder.DecoderConfig:
  """Makes the policy's architecture: a small Llama, or --shape.

  With a picture reader it is Qwen2.5-VL's.
  """
  if _SHAPE.value:
    return dataclasses.replace(hf_config.read(_SHAPE.value), vocab_size=vocab_size)
  dim = _DIM.value
  wide: dict[str, Any] = {'family': 'llama', 'mlp_dim': 3 * dim}
  if reader:
    tower = vision_config.VisionConfig(
      num_layers=2,
      embed_dim=64,
      num_heads=4,
      mlp_dim=128,
      out_dim=dim,
      patch_size=reader.side // 2,
      # The small worlds' pictures have at most 3 x 3 tokens: one window.
      window_size=3 * reader.side,
    )
    wide |= {'family': 'qwen2_5_vl', 'vision': tower, 'mrope_section': (4, 6, 6)}
  return decoder.DecoderConfig(
    **wide,
    vocab_size=vocab_size,
    embed_dim=dim,
    num_layers=_LAYERS.value,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    tie_embeddings=True,
    rope_theta=1e6,
    max_positions=2048,
  )


def train(
  out: pathlib.Path,
  texts: Iterable[str],
  examples: Iterable[Any],
  schemas: Sequence[dict[str, Any]],
  config: sft.Config,
  *,
  seed: int,
  vocab: int,
  more_tokens: Sequence[str] = (),
  reader: pictures.Reader | None = None,
) -> None:
  """Writes the tokenizer, the model and log.jsonl, with one line per step.

  Args:
    out: The directory to write to.
    texts: Trains the tokenizer; read to its end before `examples` is.
    examples: Endless training examples: each has `messages`, a conversation, and `tools`,
      whether its prompt offers the tools.
    schemas: The schemas of the tools, for examples that offer them.
    config: The configuration of the training.
    seed: The seed of the initialisation and of the text for copying.
    vocab: The maximum size of the vocabulary.
    more_tokens: Texts that become one token each, besides the standard ones.
    reader: Reads the pictures of the examples, if there are any.
  """
  start = time.time()
  train_tokenizer.train(
    texts, vocab_size=vocab, directory=out / 'tokenizer', more_tokens=more_tokens
  )
  tok = tokenizer.load(out / 'tokenizer')
  model = make_config(len(tok), reader)
  if reader and model.vision:
    pictures.save(reader, out / 'tokenizer', model.vision.patch_size)
  copies = model.family in induction.FAMILIES
  params = (
    induction.init(model, seed) if copies else decoder.init(model, jax.random.key(seed))
  )
  print(f'{sum(x.size for x in jax.tree.leaves(params)):,} parameters', flush=True)

  chat = chat_lib.Chat(tok, pictures=reader)
  conversations = (
    sft.segment(chat, sft.Conversation(e.messages, schemas if e.tools else ()))
    for e in examples
  )
  budget = _COPYING.value * config.steps * config.rows * config.row_tokens
  text = itertools.chain(induction.repeats(seed, len(tok), budget), conversations)
  with (
    (out / 'log.jsonl').open('w') as log,
    progress_lib.Progress(config.steps, label='base policy') as progress,
  ):

    def on_step(step, numbers, params):
      seconds = time.time() - start
      log.write(json.dumps({'step': step, 'seconds': seconds, **numbers}) + '\n')
      progress.update(step, loss=numbers['loss'])
      if step % _SAVE_EVERY == 0 or step == config.steps:
        weights.save(out / 'model', model, params, tokenizer_from=out / 'tokenizer')

    sft.run(model, params, text, config, on_step=on_step)
