"""How far apart the sampler's and the learner's log-probs are in bfloat16, by cause.

  python -m experiments.bench.precision                     # shape s5, random parameters
  python -m experiments.bench.precision --policy=experiments/miniwiki/model

An engine samples texts of several turns: more texts than rows, groups that share prompts,
replies that are cut into several decodes, random answers between them. Then the log-probs
of the sampled tokens are computed in the ways of gaps.list_scores, from the sampler's to
the learner's. Each differs from the one before it in one thing, the cause of a line; the
line `together` is of the two ends. `float32 instead` compares the learner with itself in
float32: what bfloat16 changes whoever computes. A line of JSON each, and at the end a
table on stderr: |gap| in nats, the mean |ratio - 1| of the importance ratio, how often
another token is the likeliest, and how many log-probs are equal to the bit.
--float32_attention measures a code that keeps attention's weights in float32; with
--weights=int8 or fp8 the engine's kernels have 8 bits, and with --cache=int8 its cache;
each is one more cause. With --batch_invariant there are only the two ends, whose bits are
to be equal (models/batch_invariant.py): the learner's in packed rows, and in trees.

With s5, about 3 minutes on one CPU core.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import json
import os
import platform
import sys
from typing import Any

from absl import app, flags
import jax
import numpy as np

from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.host import runtime
from agent_r1_jax.models import decoder, kv_cache, quantization, weights
from experiments.bench import common, gaps

_SHAPE = flags.DEFINE_enum('shape', 's5', [*common.SHAPES], 'The policy, untrained.')
_POLICY = flags.DEFINE_string(
  'policy', '', 'A directory with a policy, instead of a shape.'
)
_DTYPES = flags.DEFINE_list('dtypes', ['bfloat16', 'float32'], 'Of the activations.')
_TEXTS = flags.DEFINE_integer('texts', 80, 'Texts that are sampled.')
_ROWS = flags.DEFINE_integer('rows', 16, 'Texts that are computed at a time.')
_TURNS = flags.DEFINE_integer('turns', 4, 'Replies of a text.')
_PROMPT = flags.DEFINE_integer('prompt', 64, 'Tokens of a prompt, which 8 texts share.')
_REPLY = flags.DEFINE_integer('reply', 32, 'Tokens of a reply.')
_ANSWER = flags.DEFINE_integer('answer', 32, 'Tokens between two replies.')
_WEIGHTS = flags.DEFINE_enum(
  'weights',
  'model',
  ['model', *quantization.FORMATS],
  "The numbers of the engine's kernels.",
)
_CACHE = flags.DEFINE_enum(
  'cache', 'model', kv_cache.NUMBERS, "The numbers of the engine's cache."
)
_FLOAT32_ATTENTION = flags.DEFINE_bool(
  'float32_attention', False, "Whether attention's weights stay float32."
)
_BATCH_INVARIANT = flags.DEFINE_bool(
  'batch_invariant', False, 'As model.batch_invariant.'
)
_ROW_TOKENS = flags.DEFINE_integer('row_tokens', 1024, 'Tokens of a packed row.')

# The second of two ways to compute log-probs -> what it does otherwise than the first.
CAUSES = {
  'decoded': 'calls: pieces of prompts and replies, shared prefixes, or the text alone',
  'rounded': "kernels: of 8 bits, or the learner's",
  'cached': 'cache: of 8 bits, or of the type of the activations',
  'prefilled': 'order of sums: one token at a time, or the whole text at once',
  'packed': 'attention: to a cache, or in blocks of packed rows',
  'blocks': 'head: logits of a token of each text, or of blocks of tokens',
  'head': 'softmax: log_softmax, or logits less their logsumexp',
  'learner': 'program: hidden states and head apart, or in one',
}
_TOGETHER, _INSTEAD = 'together', 'float32 instead'
_ROWS_OR_TREES = {False: f'{_TOGETHER}, packed rows', True: f'{_TOGETHER}, prefix trees'}
_COLUMNS = ('mean_difference', 'p99_difference', 'max_difference', 'mean_ratio_deviation')


def sample(config: decoder.DecoderConfig, params: decoder.Params) -> gaps.Model:
  """Samples the texts with an engine that has room for `rows` of them."""
  turns, sizes = _TURNS.value, {'prompt': _PROMPT.value}
  sizes |= {'reply': _REPLY.value, 'answer': _ANSWER.value}
  length = sizes['prompt'] + turns * sizes['reply'] + (turns - 1) * sizes['answer']
  engine = engine_lib.Engine(
    config,
    params,
    rows=_ROWS.value,
    slots=length,
    decode_steps=max(1, _REPLY.value // 4),
    prefill_rows=_ROWS.value,
    prefill_tokens=max(1, _ANSWER.value * 3 // 4),
    bucket=128,
    narrow=False,
    weights=_WEIGHTS.value,
    cache=_CACHE.value,
  )
  play = lambda n: gaps.play(engine, config.vocab_size, n, turns=turns, **sizes)
  played = engine.run([play(n) for n in range(_TEXTS.value)])
  row_tokens = max(length, _ROW_TOKENS.value)
  numbers = _WEIGHTS.value, _CACHE.value
  return gaps.Model(config, params, played, row_tokens, *numbers)


def measure(model: gaps.Model) -> Iterator[dict[str, Any]]:
  """Yields a line for each cause, and for the two ends."""
  mask = np.stack([text.segment.action_mask for text in model.played])

  def compare(cause: str, a: gaps.Scores, b: gaps.Scores) -> dict[str, Any]:
    line = {'cause': cause, 'dtype': model.config.dtype}
    line |= gaps.describe((b.logprobs - a.logprobs)[mask])
    return line | {'other_likeliest': float((a.likeliest != b.likeliest)[mask].mean())}

  if model.config.batch_invariant:
    sampled = next(gaps.list_scores(model, _ROWS.value))[1]
    for trees, cause in _ROWS_OR_TREES.items():
      # The learner does not say which token is the likeliest.
      learned = sampled._replace(logprobs=gaps.learn(model, trees=trees))
      yield compare(cause, sampled, learned) | {'other_likeliest': None}
    return
  first, before = None, None
  for name, scores in gaps.list_scores(model, _ROWS.value):
    if before is None:
      first = scores
    else:
      yield compare(CAUSES[name], before, scores)
    before = scores
  assert first is not None and before is not None
  yield compare(_TOGETHER, first, before)
  if model.config.dtype != 'float32':
    config = dataclasses.replace(model.config, dtype='float32')
    *_, exact = gaps.list_learner_scores(model._replace(config=config), _ROWS.value)
    yield compare(_INSTEAD, before, exact[1])


def format_table(lines: list[dict[str, Any]]) -> str:
  """Formats lines of `measure` as a table of Markdown."""
  head = ['cause', 'dtype', 'mean', 'p99', 'largest', 'ratio', 'other likeliest', 'equal']
  rows = [head, ['---'] * len(head)]
  for line in lines:
    cells = [line['cause'], line['dtype'], *(f'{line[x]:.1e}' for x in _COLUMNS)]
    other = line['other_likeliest']
    other = '' if other is None else f'{other:.2%}'
    rows.append([*cells, other, f'{line["equal"]:.1%}'])
  return '\n'.join('| ' + ' | '.join(row) + ' |' for row in rows)


def _load(dtype: str) -> tuple[decoder.DecoderConfig, decoder.Params]:
  if _POLICY.value:
    config, params = weights.load(_POLICY.value)
  else:
    config = common.SHAPES[_SHAPE.value]
    params = decoder.init(config, jax.random.key(0))
  changes = {'dtype': dtype, 'batch_invariant': _BATCH_INVARIANT.value}
  return dataclasses.replace(config, **changes), params


def main(_):
  runtime.quiet_logging()
  runtime.initialize()
  lines, changed = [], _FLOAT32_ATTENTION.value
  for dtype in _DTYPES.value:
    config, params = _load(dtype)
    about = {
      'measurement': 'precision',
      'policy': _POLICY.value or _SHAPE.value,
      'float32_attention': changed,
      'weights': _WEIGHTS.value,
      'cache': _CACHE.value,
      'batch_invariant': _BATCH_INVARIANT.value,
      'parameters': sum(x.size for x in jax.tree.leaves(params)),
      'device': f'{jax.devices()[0].device_kind}, {os.cpu_count()} cores',
      'jax': jax.__version__,
      'python': platform.python_version(),
    }
    with gaps.float32_attention() if changed else contextlib.nullcontext():
      for line in measure(sample(config, params)):
        print(json.dumps(about | line), flush=True)
        lines.append(line)
  print(format_table(lines), file=sys.stderr)


if __name__ == '__main__':
  app.run(main)
