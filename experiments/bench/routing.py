"""How often the sampler and the learner send a token to different experts, and its price.

  python -m experiments.bench.routing                    # 32 experts of 4, random
  python -m experiments.bench.routing --policy=DIR       # a mixture of experts on disk

Texts of random tokens are computed as the engine decodes them, one
token at a time with a cache, and as the learner does, whole rows at once; all layers of
both note the experts that they take. A line of JSON for each dtype: the share of (token,
layer) pairs with another set of experts, and of tokens with one in any layer; the routing
weight that moves there; and the gap of the log-probs, mean and p99 of |nats|, for all
tokens, for those whose routing is the same and those where it differs, and for a learner
that replays the sampler's experts. A second line is of texts that the engine samples in
three turns: the learner's log-probs without and with what `batch.replay` does.
"""

import dataclasses
import json
import os
import sys

from absl import app, flags
import jax
import numpy as np

from agent_r1_jax.host import runtime
from agent_r1_jax.models import decoder, weights
from experiments.bench import routes

_POLICY = flags.DEFINE_string('policy', '', 'A directory; else random parameters.')
_DTYPES = flags.DEFINE_list('dtypes', ['bfloat16', 'float32'], 'Of the activations.')
_TEXTS = flags.DEFINE_integer('texts', 40, 'Texts.')
_LENGTH = flags.DEFINE_integer('length', 257, 'Tokens of a text.')
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of parameters and texts.')
_RANDOM = decoder.DecoderConfig(
  family='qwen3_moe',
  vocab_size=4096,
  embed_dim=256,
  num_layers=6,
  num_heads=8,
  num_kv_heads=2,
  head_dim=32,
  num_experts=32,
  experts_per_token=4,
  expert_dim=96,
  normalize_experts=True,
)


def main(_):
  runtime.quiet_logging()
  runtime.initialize()
  if _POLICY.value:
    config, params = weights.load(_POLICY.value, dtype='float32')
    if not config.num_experts:
      sys.exit(f'--policy={_POLICY.value}: a {config.family} has no experts.')
  else:
    config, params = _RANDOM, decoder.init(_RANDOM, jax.random.key(_SEED.value))
  rng = np.random.default_rng(_SEED.value)
  shape = _TEXTS.value, _LENGTH.value
  tokens = rng.integers(0, config.vocab_size, shape).astype(np.int32)
  for dtype in _DTYPES.value:
    about = {
      'measurement': 'routing',
      'policy': _POLICY.value or 'random',
      'dtype': dtype,
      'layers': config.num_layers,
      'experts': config.num_experts,
      'per_token': config.experts_per_token,
      'device': f'{jax.devices()[0].device_kind}, {os.cpu_count()} cores',
    }
    config = dataclasses.replace(config, dtype=dtype)
    found = routes.measure(config, params, tokens)
    print(json.dumps(about | found), flush=True)
    about['measurement'] = 'replay'
    found = routes.measure_replay(config, params, _TEXTS.value)
    print(json.dumps(about | found), flush=True)


if __name__ == '__main__':
  app.run(main)
