"""The small base policy of miniwiki, supervised on imperfect demonstrations.

  python -m experiments.miniwiki.pretrain --out=runs/base

It learns to read, to copy names and to call the search tool, but not well: three in four
demonstrations are wrong in some way. Its worlds share no word of a name with the worlds
of RL or of the tests.
"""

import pathlib

from absl import app, flags

from agent_r1_jax import fields, sft
from agent_r1_jax.host import runtime
from agent_r1_jax.tools import search
from experiments import small_policy
from experiments.miniwiki import demos
from experiments.miniwiki import tasks as miniwiki

flags.adopt_module_key_flags(small_policy)  # for --help
_OUT = flags.DEFINE_string('out', 'runs/base', 'Directory that the model is written to.')
_EXAMPLES = flags.DEFINE_integer('examples', 6000, 'Examples to train the tokenizer on.')
_CFG = fields.define_flags(sft.Config(steps=2000, rows=8, learning_rate=2e-3), 'sft')


def main(_):
  runtime.quiet_logging()
  runtime.initialize()
  seed = small_policy.SEED.value
  sample = list(demos.examples(seed + 2, _EXAMPLES.value, miniwiki.make_search))
  retriever = miniwiki.make_index(miniwiki.corpus(seed, 'base'))
  small_policy.train(
    pathlib.Path(_OUT.value),
    demos.tokenizer_texts(sample),
    demos.examples(seed, 10**9, miniwiki.make_search),
    [search.search_tool(retriever).schema],
    _CFG.value,
    seed=seed,
    vocab=small_policy.VOCAB.value,
  )


if __name__ == '__main__':
  app.run(main)
