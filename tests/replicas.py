"""What an engine's replica of several chips computes: rows of eight.py."""

import dataclasses
from typing import Any

import adapted
import clients
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from placed import draw, split
import test_adapters
import test_prompt_scores
import tiny

from agent_r1_jax import types
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.models import (
  attention,
  decoder,
  engine_params,
  families,
  kv_cache,
  quantization,
  sharding,
)
from agent_r1_jax.models.kernels import attention_kernels


def extends(family: str, numbers: str, mesh: Any, **changes: Any) -> dict[str, Any]:
  """The engine's replica: experts and heads on two chips."""
  config = dataclasses.replace(tiny.config(family, 2), num_heads=8, **changes)
  params = jax.jit(engine_params.unstack, static_argnums=1)(tiny.params(config), config)
  text = [jnp.asarray(x) for x in ([range(6), range(6, 12)], [range(6)] * 2)]
  cache = kv_cache.empty(config, 2, 16, numbers)
  extend = jax.jit(lambda p, c: decoder.extend(p, config, types.Rows(*text), c)[0])
  with sharding.use_mesh(mesh):
    if mesh:
      cache = sharding.shard_cache(cache, mesh)
      params = jax.device_put(params, sharding.make_shardings(params, mesh))
    return {numbers: extend(params, cache)}


def over_slots(length: int, mesh: Any) -> dict[str, Any]:
  """Decodes and prefills on TPUs: key-value heads on a chip each, and both on all."""
  slots, first = jnp.array(draw(0, 2, 8, 2, 256, 128)), jnp.arange(0, 128, 16)
  q, at = jnp.array(draw(1, 8, length, 8, 128)), first[:, None] + jnp.arange(length)[None]
  if mesh is None:
    return {'bfloat16': jax.jit(attention.cached)(q, *slots, at)}
  with jax.set_mesh(mesh), pltpu.force_tpu_interpret_mode():
    return {'bfloat16': jax.jit(attention_kernels.over_used_slots)(q, *slots, at)}


def quantized(mesh: Any) -> dict[str, Any]:
  """Kernels of 8 bits under adapters: two replicas of two chips sample and score.

  Both are on-policy, which needs no second computation on one device.
  """
  if mesh is None:
    return {}
  shape = tiny.config('qwen2', 1)
  frozen = quantization.freeze(tiny.params(shape), shape, 'int8')
  frozen = tiny.add_adapters(frozen, 4, [*families.TARGETS], 6.0, b=0.3)
  placed = jax.device_put(frozen, sharding.make_shardings(frozen, mesh))
  engine = tiny.engine(placed, shape=shape, mesh=mesh, **clients.EXACT)
  prompts = [test_prompt_scores.SHARED[:n] for n in (9, 33)]
  asked = [test_prompt_scores.ask(engine, p, top_logprobs=1) for p in prompts]
  scored = tiny.within(engine.run, asked)
  segments = [*clients.run(engine, range(2)).values()]
  with sharding.use_mesh(mesh):
    tiny.assert_on_policy(placed, segments, shape=shape)
    test_prompt_scores.assert_learners(scored, params=placed, shape=shape)
  copy = engine.replicas[1].policy.copies[1]['layers'][0]['attn']
  parts = ('kernel', 'kernel_scale')
  assert split(copy['q'], *parts) == [(16, 16), (1, 16)]
  assert split(copy['o'], *parts) == [(2, 8, 16), (1, 1, 16)]
  assert split(placed['layers']['mlp']['up'], *parts) == [(1, 8, 12), (1, 1, 12)]
  return {}


def mixed_adapters(mesh: Any) -> dict[str, Any]:
  """Adapters side by side, whose stacks are split as the kernels are."""
  params = sharding.shard_params(clients.params(), mesh)
  sizes = tiny.SIZES | clients.EXACT | {'adapters': 4, 'adapter_rank': 4}
  engine = engine_lib.Engine(tiny.config(), params, mesh=mesh, **sizes)
  names = adapted.NAMES
  for name in names:
    engine.adapters.set(name, adapted.make(name))
  if mesh:
    (stacks,) = engine.adapters.slots.copies[0]
    q = stacks['attn']['q']
    assert split(q, 'b') == [(5, 4, 16)] != [q['b'].shape]
    assert split(stacks['mlp']['down'], 'a') == [(5, 4, 12)]
    assert split(q, 'a') == [q['a'].shape]
  asked = [test_adapters._ask(engine, *one, most=8) for one in enumerate(names)]
  replies = test_adapters._run(engine, *asked)
  return {'tokens': [reply.tokens for reply, _ in replies]}
