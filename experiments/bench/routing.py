"""How often the sampler and the learner send a token to different experts, and its price.

  python -m experiments.bench.routing                    # 32 experts of 4, random
  python -m experiments.bench.routing --model=DIR        # a mixture of experts on disk

Texts of random tokens, or those of a file, are computed as the engine decodes them, one
token at a time with a cache, and as the learner does, whole rows at once; all layers of
both note the experts that they take. A line of JSON for each dtype: the share of (token,
layer) pairs with another set of experts, and of tokens with one in any layer; the routing
weight that moves there; and the gap of the log-probs, mean and p99 of |nats|, for all
tokens, for those whose routing is the same and those where it differs, and for a learner
that replays the sampler's experts.

Letters as in models/decoder.py, and k experts of a token.
"""

from collections.abc import Callable
import dataclasses
import functools
import json
import os
import sys
from typing import Any, NamedTuple
from unittest import mock

from absl import app, flags
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from agent_r1_jax.host import runtime
from agent_r1_jax.models import decoder, experts, sampling_params, weights
from experiments.bench import gaps

_MODEL = flags.DEFINE_string('model', '', 'A directory; else random parameters.')
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


class Computed(NamedTuple):
  """What a way to compute says of texts."""

  logprobs: np.ndarray  # float32 [B, T - 1], of the tokens but the first.
  expert: np.ndarray  # int32 [B, T - 1, L, k], taken at the token before.
  weight: np.ndarray  # float32 [B, T - 1, L, k].


def apply_block(config: decoder.DecoderConfig, params, *args) -> tuple[Any, Any, Any]:
  """Applies a layer; returns its two results, and the experts [B, T, k] and weights."""
  noted = []

  def route(*args):
    noted.append(taken := experts_route(*args))
    return taken

  experts_route = experts.route
  with mock.patch.object(experts, 'route', route):
    out, second = decoder.Block(config).apply({'params': params}, *args)
  return out, second, noted[0][::-1]


@functools.partial(jax.jit, static_argnames='config')
def decode(params, tokens_BT: Array, *, config: decoder.DecoderConfig):
  """Computes a token at a time, as the engine does; see `Computed`."""
  B, T = tokens_BT.shape
  layers = params['layers']

  def step(cache, t):
    token_B1, at_B1 = tokens_BT[:, t][:, None], jnp.full((B, 1), t)
    x: Any = params['embed']['embedding'].astype(config.dtype)[token_B1]
    angles, noted, new = decoder._compute_angles(at_B1, config), [], []
    for layer, part in zip(layers, cache, strict=True):
      x, part, taken = apply_block(config, layer, x, at_B1, angles, None, None, part)
      noted.append(taken)
      new.append(part)
    x = decoder._norm(config).apply({'params': params['final_norm']}, x)
    logits = jax.nn.log_softmax(decoder.logits(params, config, x[:, 0]))
    chosen = jnp.take_along_axis(logits, tokens_BT[:, t + 1][:, None], axis=1)[:, 0]
    return tuple(new), (
      chosen,
      *(x[:, :, 0] for x in stack(noted, 1)),
    )

  cache = decoder.empty_cache(config, B, T)
  _, found = jax.lax.scan(step, cache, jnp.arange(T - 1))
  return tuple(jnp.swapaxes(x, 0, 1) for x in found)


@functools.partial(jax.jit, static_argnames='config')
def learn(params, tokens_BT: Array, replayed=None, *, config: decoder.DecoderConfig):
  """Computes whole rows, as the learner does, or with the experts [B, T, L, k] given."""
  B, T = tokens_BT.shape
  at_BT = jnp.tile(jnp.arange(T)[None], (B, 1))
  x: Any = params['embed']['embedding'].astype(config.dtype)[tokens_BT]
  angles, noted = decoder._compute_angles(at_BT, config), []
  segments = jnp.ones_like(tokens_BT), None
  for number in range(config.num_layers):
    layer = jax.tree.map(lambda x, i=number: x[i], params['layers'])
    with force(None if replayed is None else replayed[:, :, number]):
      x, _, taken = apply_block(config, layer, x, at_BT, angles, segments, None)
    noted.append(taken)
  x = decoder._norm(config).apply({'params': params['final_norm']}, x)
  every = decoder.logits(params, config, x)
  logits = jax.nn.log_softmax(every)[:, :-1]
  chosen = jnp.take_along_axis(logits, tokens_BT[:, 1:, None], axis=2)[..., 0]
  return chosen, *(x[:, :-1] for x in stack(noted, 2))


def stack(noted: list[Any], axis: int) -> tuple[Any, Any]:
  """Stacks the experts and the weights of all layers."""
  expert, weight = ([layer[i] for layer in noted] for i in range(2))
  return jnp.stack(expert, axis), jnp.stack(weight, axis)


def force(expert_BTk: Array | None) -> Any:
  """Makes routers take these experts inside `with`, with their own weights."""

  def route(x, router_DE, k, normalize):
    if expert_BTk is None:
      return free(x, router_DE, k, normalize)
    every, taken = free(x, router_DE, router_DE.shape[1], False)
    place = jnp.argsort(taken, axis=-1)
    weight = jnp.take_along_axis(jnp.take_along_axis(every, place, -1), expert_BTk, -1)
    return (weight / weight.sum(-1, keepdims=True) if normalize else weight), expert_BTk

  free: Callable = experts.route
  return mock.patch.object(experts, 'route', route)


def compare(sampled: Computed, learned: Computed, replayed: Computed) -> dict[str, Any]:
  """Measures what the top of this file says."""
  sets = np.sort(sampled.expert), np.sort(learned.expert)
  differs = (sets[0] != sets[1]).any(-1)
  # What a router gave to experts that the other did not take.
  lost = (sampled.expert[..., None] != learned.expert[..., None, :]).all(-1)
  moved = (sampled.weight * lost).sum(-1) / sampled.weight.sum(-1)
  gap, changed = learned.logprobs - sampled.logprobs, differs.any(-1)
  keep = lambda x: {
    name: value
    for name, value in gaps.describe(x).items()
    if name in ('mean_difference', 'p99_difference', 'max_difference')
  }
  parts = {'all': gap, 'same': gap[~changed], 'other': gap[changed]}
  parts['replayed'] = replayed.logprobs - sampled.logprobs
  return {
    'tokens': gap.size,
    'pairs_differ': float(differs.mean()),
    'tokens_differ': float(changed.mean()),
    'weight_moved': float(moved[differs].mean()) if differs.any() else 0.0,
    **{name: keep(x) for name, x in parts.items() if x.size},
  }


def measure(config: decoder.DecoderConfig, params, tokens: np.ndarray) -> dict[str, Any]:
  """Compares the two for texts [B, T]."""
  copy = sampling_params.unstack(params, config)
  to_numpy = lambda found: Computed(*map(np.asarray, found))
  sampled = to_numpy(decode(copy, tokens, config=config))
  learned = to_numpy(learn(params, tokens, config=config))
  # The last token predicts nothing; its own experts are as good as any.
  whole = np.pad(sampled.expert, ((0, 0), (0, 1), (0, 0), (0, 0)), mode='edge')
  replayed = to_numpy(learn(params, tokens, whole, config=config))
  return compare(sampled, learned, replayed)


def main(_):
  runtime.quiet_logging()
  runtime.initialize()
  if _MODEL.value:
    config, params = weights.load(_MODEL.value, dtype='float32')
    if not config.num_experts:
      sys.exit(f'--model={_MODEL.value}: a {config.family} has no experts.')
  else:
    config, params = _RANDOM, decoder.init(_RANDOM, jax.random.key(_SEED.value))
  rng = np.random.default_rng(_SEED.value)
  shape = _TEXTS.value, _LENGTH.value
  tokens = rng.integers(0, config.vocab_size, shape).astype(np.int32)
  for dtype in _DTYPES.value:
    about = {
      'measurement': 'routing',
      'policy': _MODEL.value or 'random',
      'dtype': dtype,
      'layers': config.num_layers,
      'experts': config.num_experts,
      'per_token': config.experts_per_token,
      'device': f'{jax.devices()[0].device_kind}, {os.cpu_count()} cores',
    }
    found = measure(dataclasses.replace(config, dtype=dtype), params, tokens)
    print(json.dumps(about | found), flush=True)


if __name__ == '__main__':
  app.run(main)
