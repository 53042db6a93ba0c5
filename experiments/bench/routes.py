"""The experts that the sampler and the learner take for the same tokens.

Both are computed a layer at a time, so that each layer's routing can be noted: the
sampler as the engine decodes, one token at a time with a cache, the learner as it
computes whole rows.

Letters as in models/decoder.py, and k experts of a token.
"""

import dataclasses
import functools
from typing import Any, NamedTuple
from unittest import mock

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.models import decoder, experts, kv_cache, sampling_params
from agent_r1_jax.rl import learner, packing
from agent_r1_jax.rl import table as table_lib
from experiments.bench import gaps


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
    angles, noted, new = decoder.compute_angles(at_B1, config), [], []
    for layer, part in zip(layers, cache, strict=True):
      args = x, at_B1, angles, None, None, None, part
      x, part, taken = apply_block(config, layer, *args)
      noted.append(taken)
      new.append(part)
    x = decoder._norm(config).apply({'params': params['final_norm']}, x)
    logits = jax.nn.log_softmax(decoder.logits(params, config, x[:, 0]))
    chosen = jnp.take_along_axis(logits, tokens_BT[:, t + 1][:, None], axis=1)[:, 0]
    return tuple(new), (
      chosen,
      *(x[:, :, 0] for x in stack(noted, 1)),
    )

  cache = kv_cache.empty(config, B, T)
  _, found = jax.lax.scan(step, cache, jnp.arange(T - 1))
  return tuple(jnp.swapaxes(x, 0, 1) for x in found)


@functools.partial(jax.jit, static_argnames='config')
def learn(params, tokens_BT: Array, replayed=None, *, config: decoder.DecoderConfig):
  """Computes whole rows, as the learner does, or with the experts [B, T, L, k] given."""
  B, T = tokens_BT.shape
  at_BT = jnp.tile(jnp.arange(T)[None], (B, 1))
  x: Any = params['embed']['embedding'].astype(config.dtype)[tokens_BT]
  angles, noted = decoder.compute_angles(at_BT, config), []
  segments = jnp.ones_like(tokens_BT), None
  for number in range(config.num_layers):
    layer = jax.tree.map(lambda x, i=number: x[i], params['layers'])
    given = None if replayed is None else replayed[:, :, number]
    x, _, taken = apply_block(config, layer, x, at_BT, angles, segments, None, given)
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


def compare(sampled: Computed, learned: Computed, replayed: Computed) -> dict[str, Any]:
  """Measures what the top of routing.py says."""
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


def measure_replay(config: decoder.DecoderConfig, params, texts: int) -> dict[str, Any]:
  """Compares an engine's log-probs with the learner's, without and with replay."""
  sizes = {'turns': 3, 'prompt': 64, 'reply': 48, 'answer': 32}
  engine = engine_lib.Engine(
    config, params, rows=16, slots=272, decode_steps=16, prefill_rows=8, prefill_tokens=64
  )
  play = lambda n: gaps.play(engine, config.vocab_size, n, **sizes)
  segments = [text.segment for text in engine.run([play(n) for n in range(texts)])]
  table = table_lib.from_segments(segments)
  found = {}
  for name, routes in {'routed_again': None, 'replayed': table.routes}.items():
    shape = packing.MicrobatchShape(4, 272)
    given = dataclasses.replace(table, routes=routes)
    batches, layout = packing.pack_microbatches(given, shape)
    computed = [learner.logprobs(params, batch, config=config) for batch in batches]
    gap = layout.extract(np.concatenate(computed)) - table.behaviour_logprobs
    found[name] = gaps.describe(gap[table.action_mask])
  return found


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
