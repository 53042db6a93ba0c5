"""Compiles training and sampling for TPUs that are not here: what fits, what it costs.

  pip install 'jax[tpu]==0.10.2'
  TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu python -m experiments.tpu_memory \
    --topology=v5e:4x4 --model=qwen2.5-7b

Hardware: one CPU core, 3 GB; 3 minutes for a gradient, 1 for another program. The
learner's gradient and update are compiled for all chips of the topology (parameters over
fsdp, float32 master parameters and AdamW, bfloat16 activations, layers rematerialised),
the engine's feed and decode for the chips of one host, which samples from a bfloat16
replica of its own (heads over tensor).

Prints one JSON line a program. GiB a chip: arguments, temporaries, outputs that are not
an argument's memory, what else lies there meanwhile (the optimizer's state while a
gradient is made, the training state while a host samples), their total and the chip's
memory. XLA counts the body of a loop once: its operations and bytes are those of one
layer and one block of logits for the gradient, of one token for decode, and whole for
feed and apply; what kernels do is not in them. `estimated` are the operations of all
layers: 2 a parameter and token, four times that for a gradient that recomputes.

Expected total of the gradient, decode in GiB: v5e:4x4 3B 7.2, 7B 12.9, 12.5 of 16; a
second micro-batch adds the sum of the gradients, as large as `outputs`. v5p:4x4x4 7B with
--rows=2 10.2 of 95.
"""

import functools
import json
import math
import time
from typing import Any

from absl import app, flags
import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import optax

from agent_r1_jax import sharding, types
from agent_r1_jax.engine import sampling
from agent_r1_jax.engine import state as state_lib
from agent_r1_jax.engine import stop as stop_lib
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import algorithms, learner

_TRAINING, _SAMPLING = ('gradient', 'apply'), ('feed', 'decode')
_QWEN = functools.partial(
  decoder.DecoderConfig,
  family='qwen2',
  head_dim=128,
  rope_theta=1e6,
  qkv_bias=True,
  dtype='bfloat16',
  remat='full',
)
MODELS = {
  'qwen2.5-3b': _QWEN(
    vocab_size=151_936,
    embed_dim=2048,
    num_layers=36,
    num_heads=16,
    num_kv_heads=2,
    mlp_dim=11_008,
    tie_embeddings=True,
  ),
  'qwen2.5-7b': _QWEN(
    vocab_size=152_064,
    embed_dim=3584,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    mlp_dim=18_944,
  ),
  'tiny': _QWEN(
    vocab_size=1024,
    embed_dim=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=256,
  ),
}
_GIB = 2**30
# HBM of a chip, as its maker says, and the chips of one host.
_CHIP = {'v5e': 16 * _GIB, 'v5p': 95 * _GIB, 'v6e': 32 * _GIB, 'v4': 32 * _GIB}
_HOST = {'v5e': '2x2', 'v5p': '2x2x1', 'v6e': '2x2', 'v4': '2x2x1'}

_TOPOLOGY = flags.DEFINE_string('topology', 'v5e:4x4', 'As v5p:4x4x4, v6e:8x8.')
_MODEL = flags.DEFINE_enum('model', 'qwen2.5-3b', list(MODELS), 'Shape of the policy.')
_PROGRAMS = flags.DEFINE_multi_enum(
  'program', _TRAINING + _SAMPLING, _TRAINING + _SAMPLING, 'What to compile.'
)
_TOKENS = flags.DEFINE_integer('tokens', 4096, 'Of a row of a micro-batch.')
_ROWS = flags.DEFINE_integer('rows', 1, 'Of a micro-batch, on one chip.')
_TENSOR = flags.DEFINE_integer('tensor', 1, 'Chips that share a layer in training.')
_TEXTS = flags.DEFINE_integer('texts', 32, "Rows of one host's engine.")
_SLOTS = flags.DEFINE_integer('slots', 4096, 'Tokens of such a row.')
_STEPS = flags.DEFINE_integer('steps', 32, 'Tokens of one decode segment.')
_FEED = flags.DEFINE_integer('feed_tokens', 256, 'Of a row in one feed.')
_FEED_ROWS = flags.DEFINE_integer('feed_rows', 8, 'Of one feed.')


def chips(topology: str) -> list[Any]:
  """Those of a topology, such as v5e:4x4."""
  found = topologies.get_topology_desc(platform='tpu', topology_name=topology)
  return list(found.devices)


def abstract(tree: Any, where: Any) -> Any:
  """Shapes and types of `tree` that lie where `where` says."""
  struct = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
  if not isinstance(where, NamedSharding):
    return jax.tree.map(struct, tree, where)
  return jax.tree.map(lambda x: struct(x, where), tree)


def on_chip(tree: Any) -> int:
  """Bytes of an abstract tree on one chip."""
  leaves = jax.tree.leaves(tree)
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves
  )


def parameters(config: decoder.DecoderConfig) -> Any:
  """Their shapes."""
  return jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))


def training_state(config, optimizer, mesh) -> learner.TrainState:
  """Abstract and split."""
  shapes = jax.eval_shape(lambda p: learner.init(p, optimizer), parameters(config))
  return abstract(shapes, sharding.shardings(shapes, mesh))


def batch(mesh, rows: int, tokens: int) -> types.Batch:
  """One micro-batch of GRPO without a KL term: `rows` for each chip that has rows."""
  rows *= mesh.shape['data'] * mesh.shape['fsdp']
  kinds = {'tokens': jnp.int32, 'positions': jnp.int32, 'segment_ids': jnp.int32}
  kinds |= {'action_mask': jnp.bool}
  fields = types.Batch._fields[:7]
  shapes: dict[str, Any] = {
    name: jax.ShapeDtypeStruct((rows, tokens), kinds.get(name, jnp.float32))
    for name in fields
  }
  return abstract(types.Batch(**shapes), sharding.rows(mesh))


def replica(config: decoder.DecoderConfig, mesh) -> Any:
  """The engine's parameters: cast once to what they are cast to wherever they are used.

  Norms' scales stay float32: they are never cast.
  """

  def cast(path, x):
    norm = 'norm' in jax.tree_util.keystr(path)
    return jax.ShapeDtypeStruct(x.shape, x.dtype if norm else config.dtype)

  shapes = jax.tree_util.tree_map_with_path(cast, parameters(config))
  return abstract(shapes, sharding.shardings(shapes, mesh))


def lowered(program: str, config, mesh, optimizer) -> tuple[Any, int]:
  """A training program, and the bytes of the training state it does not get."""
  state = training_state(config, optimizer, mesh)
  if program == 'apply':
    return learner._apply.lower(state, state.params, optimizer=optimizer), 0
  return learner._gradient.lower(
    state.params,
    batch(mesh, _ROWS.value, _TOKENS.value),
    config=config,
    loss=learner.objective(algorithms.grpo(kl_coef=0.0)),
    temperature=1.0,
  ), on_chip(state.opt_state)


def lowered_sampling(program: str, config, mesh) -> Any:
  """A program of one host's engine: all its texts at once, over all their slots."""
  texts, slots, vocab = _TEXTS.value, _SLOTS.value, config.vocab_size
  everywhere = NamedSharding(mesh, PartitionSpec())
  cache = NamedSharding(mesh, PartitionSpec('data', 'tensor'))

  def ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=everywhere)

  shapes = jax.eval_shape(lambda: state_lib.empty(config, texts, slots))
  state = abstract(shapes, everywhere)._replace(cache=abstract(shapes.cache, cache))
  options = {'config': config, 'bucket': slots}
  if program == 'feed':
    rows, width = _FEED_ROWS.value, _FEED.value
    fed = (ints(rows), ints(rows, width), ints(rows))
    return state_lib.feed.lower(replica(config, mesh), state, *fed, **options)
  return state_lib.decode.lower(
    replica(config, mesh),
    state,
    ints(texts),
    ints(texts),
    stop_lib.Stop(ints(2), ints(16, vocab)),
    sampling=sampling.ON_POLICY,
    steps=_STEPS.value,
    **options,
  )


def estimated(program: str, config: decoder.DecoderConfig, mesh) -> float:
  """Operations of all matrix products with parameters, on one chip."""
  shapes = parameters(config)
  if not config.tie_embeddings:
    shapes.pop('embed')  # Looked up only.
  size = sum(x.size for x in jax.tree.leaves(shapes))
  tokens = {
    'gradient': 4 * _ROWS.value * _TOKENS.value * mesh.size / mesh.shape['tensor'],
    'feed': _FEED_ROWS.value * _FEED.value,
    'decode': _TEXTS.value,
  }
  return 2 * size * tokens.get(program, 0) / mesh.size


def report(name: str, program: Any, elsewhere: int, chip: int) -> dict[str, Any]:
  """Compiles; `elsewhere` are bytes on the chip that the program does not get."""
  start = time.time()
  compiled = program.compile()
  seconds = time.time() - start
  memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
  parts = {
    'arguments': memory.argument_size_in_bytes,
    'temporaries': memory.temp_size_in_bytes,
    'outputs': memory.output_size_in_bytes - memory.alias_size_in_bytes,
    'elsewhere': elsewhere,
  }
  total = sum(parts.values())
  text = compiled.as_text()
  return {
    'program': name,
    **{f'{key}_gib': round(size / _GIB, 2) for key, size in parts.items()},
    'total_gib': round(total / _GIB, 2),
    'chip_gib': round(chip / _GIB, 2),
    'fits': total < chip,
    'operations': cost.get('flops'),
    'bytes': cost.get('bytes accessed'),
    'kernels': text.count('tpu_custom_call'),
    'compile_seconds': round(seconds, 1),
  }


def main(_):
  config = MODELS[_MODEL.value]
  kind = _TOPOLOGY.value.split(':')[0]
  # A program for some of a topology's chips does not compile: a host is one by itself.
  devices, host = chips(_TOPOLOGY.value), chips(f'{kind}:{_HOST[kind]}')
  tensor = _TENSOR.value
  everyone = sharding.mesh(fsdp=len(devices) // tensor, tensor=tensor, devices=devices)
  heads = math.gcd(len(host), config.num_kv_heads)
  one_host = sharding.mesh(data=len(host) // heads, tensor=heads, devices=host)
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1e-6, b2=0.95, weight_decay=0.0)
  )
  for name in _PROGRAMS.value:
    if name in _TRAINING:
      mesh = everyone
      with jax.set_mesh(mesh):
        program, elsewhere = lowered(name, config, mesh, optimizer)
    else:
      mesh, elsewhere = one_host, on_chip(training_state(config, optimizer, everyone))
      with jax.set_mesh(mesh):
        program = lowered_sampling(name, config, mesh)
    asked = {'topology': _TOPOLOGY.value, 'model': _MODEL.value, 'mesh': dict(mesh.shape)}
    line = asked | report(name, program, elsewhere, _CHIP[kind])
    line['estimated'] = estimated(name, config, mesh)
    print(json.dumps(line), flush=True)


if __name__ == '__main__':
  app.run(main)
