r"""Compiles training and sampling for TPUs that are not here: what fits, what it costs.

  pip install -e '.[tpu]'
  TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu python -m experiments.bench.compile_for \
    --topology=v5e:4x4 --config.model.path=qwen2.5-7b

`--config.model.path` is a Hugging Face directory, a config.json, or a name of
experiments/published.py.

Hardware: one CPU core, 3 GB; 3 minutes for a gradient, 1 for another program. The
learner's gradient and update are compiled for all chips of the topology (float32 master
parameters and AdamW, bfloat16 activations, layers rematerialised), the engine's prefill
and decode for the chips of a bfloat16 replica: tensor of them, by default as many of a
host's four as divide the number of key-value heads; a run's `tensor` must be that. The
mesh of training, where no flag names an axis (`mesh_for`): tensor is 1, context is the
least power of 2 that leaves a chip 8,192 tokens of a row or fewer, fsdp is as many of the
other chips as can split the parameters, data is the rest.

Prints one JSON line a program. GiB a chip: arguments, temporaries, outputs that are not
an argument's memory, what else lies there meanwhile (the optimizer's state while a
gradient is made, the training state while a host samples), their total and the chip's
memory. XLA counts the body of a loop once: its operations and bytes are those of one
layer and one block of logits for the gradient, of one token for decode, and whole for
prefill and apply; what kernels do is not in them. `estimated` are the operations of all
layers: 2 a parameter and token, four times that for a gradient that recomputes.
`collectives` are bytes of the results of what the chips exchange, on one chip and in one
call, times the passes of the loops that they are in; `loops_counted_once` are loops with
such results whose passes the compiler does not know.

Expected: docs/scaling.md. A second micro-batch adds the sum of the gradients, as large as
`outputs`.
"""

import collections
import dataclasses
import json
import math
import re
import sys
import time
from typing import Any

from absl import app, flags
import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import optax

from agent_r1_jax import types
from agent_r1_jax.engine import active_request, automaton_guide
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.models import decoder, sampling_params, sharding
from agent_r1_jax.rl import algorithms, learner, prefix_trees
from experiments import published

_TRAINING, _SAMPLING = ('gradient', 'apply'), ('prefill', 'decode')
_LONGEST = 8192  # Tokens of a row on one chip.
_GIB = 2**30
# HBM of a chip, as its maker says.
_CHIP = {'v5e': 16 * _GIB, 'v5p': 95 * _GIB, 'v6e': 32 * _GIB, 'v4': 32 * _GIB}
# Chips of one host, and how those of a replica lie.
_HOST = 4
_BLOCKS = {1: '1x1', 2: '1x2', 4: '2x2'}

_COLLECTIVE = re.compile(
  r' = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)'
  r'(?:-done)?\('
)
_ARRAY = re.compile(r'\b(pred|[a-z]+\d+)\w*\[([\d,]*)\]')

_TOPOLOGY = flags.DEFINE_string(
  'topology', 'v5e:4x4', 'Chips, for example v5p:4x4x4, v6e:8x8.'
)
_MODEL = flags.DEFINE_string(
  'config.model.path', 'qwen2.5-3b', 'Directory, config.json or name.'
)
_PROGRAMS = flags.DEFINE_multi_enum(
  'program', _TRAINING + _SAMPLING, _TRAINING + _SAMPLING, 'What to compile.'
)
_TOKENS = flags.DEFINE_integer('tokens', 4096, 'Tokens of a row of a micro-batch.')
_ROWS = flags.DEFINE_integer('rows', 1, 'Rows of a micro-batch, on one chip.')
_TREES = flags.DEFINE_bool(
  'trees', False, 'Whether rows of a micro-batch hold prefix trees, not whole texts.'
)
_DATA = flags.DEFINE_integer('copies', None, 'Copies of the parameters.')
_FSDP = flags.DEFINE_integer('fsdp', None, 'Chips that split the parameters.')
_TENSOR = flags.DEFINE_integer('tensor', None, 'Chips that share a layer.')
_CONTEXT = flags.DEFINE_integer('context', None, 'Chips that share a row.')
_TEXTS = flags.DEFINE_integer('texts', 32, "Rows of one host's replicas together.")
_SLOTS = flags.DEFINE_integer('slots', 4096, 'Tokens of such a row.')
_STEPS = flags.DEFINE_integer('steps', 32, 'Tokens of one decode.')
_PREFILL = flags.DEFINE_integer('prefill_tokens', 256, 'Tokens of a row in one prefill.')
_PREFILL_ROWS = flags.DEFINE_integer('prefill_rows', 8, 'Rows of one prefill.')


def chips(topology: str) -> list[Any]:
  """Those of a topology, such as v5e:4x4."""
  sizes = [int(n) for n in topology.partition(':')[2].split('x')]
  few: dict[str, Any] = {}
  if math.prod(sizes) < _HOST:
    few['chips_per_host_bounds'] = (*sizes, 1, 1)[:3]
  try:
    found = topologies.get_topology_desc(platform='tpu', topology_name=topology, **few)
  except RuntimeError as error:
    sys.exit(f"{error}\nNeeded are pip install -e '.[tpu]' and TPU_SKIP_MDS_QUERY=1")
  return list(found.devices)


def replica_mesh(kind: str, config: decoder.DecoderConfig) -> Any:
  """The chips that hold one copy of the policy: they split the heads."""
  tensor = _TENSOR.value or math.gcd(_HOST, config.num_kv_heads)
  if tensor not in _BLOCKS:
    raise app.UsageError(f'--tensor={tensor}: replicas have {list(_BLOCKS)} chips')
  # A program for some of a topology's chips does not compile: they are one by themselves.
  name = _BLOCKS[tensor] + ('x1' if kind in ('v4', 'v5p') else '')
  return sharding.make_mesh(tensor=tensor, devices=chips(f'{kind}:{name}'))


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


def model(name: str) -> decoder.DecoderConfig:
  """As it is trained on TPUs: bfloat16, layers rematerialised."""
  config = published.read_shape(name)
  return dataclasses.replace(config, dtype='bfloat16', remat='full')


def mesh_for(
  config: decoder.DecoderConfig, chips: int, tokens: int, given: dict[str, int]
) -> dict[str, int]:
  """Sizes of the axes by the rule at the top; those that are given stay."""
  sizes = {**given}
  tensor = sizes.setdefault('tensor', 1)
  needed = math.ceil(tokens / _LONGEST)
  context = sizes.setdefault('context', 1 << (needed - 1).bit_length())
  left = chips // (tensor * context * sizes.get('data', 1))
  fsdp = sizes.setdefault('fsdp', math.gcd(left, config.embed_dim // context))
  sizes.setdefault('data', left // fsdp)
  return sizes


def parameters(config: decoder.DecoderConfig) -> Any:
  """Returns the shapes of the parameters, without computing them."""
  return jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))


def training_state(config, optimizer, mesh) -> learner.ModelState:
  """Returns the shapes of the training state, with their sharding on the mesh."""
  shapes = jax.eval_shape(lambda p: learner.init(p, optimizer), parameters(config))
  return abstract(shapes, sharding.make_shardings(shapes, mesh))


def batch(mesh, rows: int, tokens: int, *, trees: bool = False) -> types.Batch:
  """Returns the shapes of a micro-batch of GRPO with `rows` rows for each data shard."""
  rows *= mesh.shape['data'] * mesh.shape['fsdp']
  columns = prefix_trees.ENTRIES * tokens if trees else tokens
  kinds = {'tokens': jnp.int32, 'positions': jnp.int32, 'segment_ids': jnp.int32}
  kinds |= {'action_mask': jnp.bool}
  fields = types.Batch._fields[:7]
  shapes: dict[str, Any] = {
    name: jax.ShapeDtypeStruct((rows, columns), kinds.get(name, jnp.float32))
    for name in fields
  }
  if trees:
    text: Any = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    nodes: Any = jax.ShapeDtypeStruct((rows, columns), jnp.int32)
    shapes['tree'] = types.Tree(text, text, text, text, nodes)
  return abstract(types.Batch(**shapes), sharding.batch_sharding(mesh))


def replica(config: decoder.DecoderConfig, mesh) -> Any:
  """The engine's parameters."""
  shapes = jax.eval_shape(
    lambda p: sampling_params.unstack(p, config), parameters(config)
  )
  return abstract(shapes, sharding.make_shardings(shapes, mesh))


def lowered(program: str, config, mesh, optimizer) -> tuple[Any, int]:
  """A training program, and the bytes of the training state it does not get."""
  state = training_state(config, optimizer, mesh)
  if program == 'apply':
    return learner._apply.lower(state, state.params, optimizer=optimizer), 0
  return learner._gradient.lower(
    state.params,
    batch(mesh, _ROWS.value, _TOKENS.value, trees=_TREES.value),
    config=config,
    loss=learner.objective(algorithms.grpo(kl_coef=0.0)),
    temperature=1.0,
  ), on_chip(state.opt_state)


def replica_texts(mesh) -> int:
  """A replica's share of the host's texts."""
  return max(1, _TEXTS.value * mesh.size // _HOST)


def lowered_sampling(program: str, config, mesh) -> Any:
  """A program of one replica: all its texts at once, over all their slots."""
  texts, slots = replica_texts(mesh), _SLOTS.value
  everywhere = NamedSharding(mesh, PartitionSpec())
  heads = NamedSharding(mesh, PartitionSpec(None, 'tensor'))

  def ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=everywhere)

  shapes = jax.eval_shape(lambda: decoder.empty_cache(config, texts, slots))
  params, cache = replica(config, mesh), abstract(shapes, heads)
  options = {'config': config, 'bucket': slots}
  if program == 'prefill':
    rows, width = _PREFILL_ROWS.value, _PREFILL.value
    places = (ints(rows), ints(rows), ints(rows, width), ints(rows))
    return programs_lib.prefill.lower(params, cache, *places, **options)
  guides = (automaton_guide.AUTOMATA, guide_lib.TRUNCATION)
  tables = automaton_guide.make_tables(
    automaton_guide.AutomatonPool(config.vocab_size).entries
  )
  decode_batch = active_request.make_decode_batch({}, texts, guides, unused_row=texts)
  return programs_lib.decode.lower(
    params,
    cache,
    abstract(decode_batch, everywhere),
    (abstract(tables, everywhere), None),
    guides=guides,
    steps=_STEPS.value,
    in_place=True,
    **options,
  )


def estimated(program: str, config: decoder.DecoderConfig, mesh) -> float:
  """Operations of all matrix products with parameters, on one chip."""
  shapes = parameters(config)
  if not config.tie_embeddings:
    shapes.pop('embed')  # Looked up only.
  size = sum(x.size for x in jax.tree.leaves(shapes))
  tokens = {
    'gradient': 4 * math.prod(batch(mesh, _ROWS.value, _TOKENS.value).tokens.shape),
    'prefill': _PREFILL_ROWS.value * _PREFILL.value,
    'decode': replica_texts(mesh),
  }
  return 2 * size * tokens.get(program, 0) / mesh.size


def collectives(text: str) -> tuple[dict[str, int], int]:
  """Bytes that a program's collectives give, by kind, and how many loops counted once.

  A result counts as often as the loops around it run, where the program says how often.
  One that runs beside other work counts once: its end (-done), or, where a TPU's compiler
  made several fusions of it, any of the pieces that share a chain.
  """
  inside, name, entry = collections.defaultdict(list), '', ''
  for line in text.splitlines():
    if head := re.match(r'(ENTRY )?%?([\w.-]+) .*{$', line):
      name = head[2]
      entry = name if head[1] else entry
    inside[name].append(line)
  chains, once = set(), set()

  def of(name: str) -> collections.Counter:
    total = collections.Counter()
    for line in inside[name]:
      chain = re.search(r'channel_id=(\d+),.*chain_id="(\d+)"', line)
      piece = chain and chain.groups()
      if (found := _COLLECTIVE.search(line)) and piece not in chains:
        total[found[2]] += sum(map(_bytes, _ARRAY.finditer(found[1])))
        chains.update([piece] if piece else [])
      within = sum(map(of, _called(line)), collections.Counter())
      passes = _passes(line, inside) if ' while(' in line else 1
      if within and passes is None:
        once.add(line)
      for kind, size in within.items():
        total[kind] += size * (passes or 1)
    return total

  return dict(of(entry)), len(once)


def _passes(line: str, inside: dict[str, list[str]]) -> int | None:
  """Returns how often a loop runs.

  XLA notes it, or it is the only constant of a condition that counts up.
  """
  if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
    return int(noted[1])
  condition = re.search(r'condition=%([\w.-]+)', line)
  body = '\n'.join(inside[condition[1]]) if condition else ''
  constants = re.findall(r' s32\[\]\S* constant\((\d+)\)', body)
  counts_up = 'direction=LT' in body and len(constants) == 1
  return int(constants[0]) if counts_up else None


def _called(line: str) -> list[str]:
  """Computations that an instruction runs."""
  if re.search(r' async-(done|update)\(', line):
    return []
  lists = re.findall(r'(?:calls|body|to_apply|branch_computations)=([^=]*)', line)
  return [name for found in lists for name in re.findall(r'%([\w.-]+)', found)]


def _bytes(array: re.Match) -> int:
  bits = int(''.join(c for c in array[1] if c.isdigit()) or 8)
  return math.prod(int(n) for n in array[2].split(',') if n) * bits // 8


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
  exchanged, unknown = collectives(text)
  return {
    'program': name,
    **{f'{key}_gib': round(size / _GIB, 2) for key, size in parts.items()},
    'total_gib': round(total / _GIB, 2),
    'chip_gib': round(chip / _GIB, 2),
    'fits': total < chip,
    'operations': cost.get('flops'),
    'bytes': cost.get('bytes accessed'),
    'collectives_gib': round(sum(exchanged.values()) / _GIB, 2),
    'collectives': exchanged,
    'loops_counted_once': unknown,
    'kernels': text.count('tpu_custom_call'),
    'compile_seconds': round(seconds, 1),
  }


def main(_):
  config = model(_MODEL.value)
  kind = _TOPOLOGY.value.split(':')[0]
  devices = chips(_TOPOLOGY.value)
  flags_of = {'data': _DATA, 'fsdp': _FSDP, 'tensor': _TENSOR, 'context': _CONTEXT}
  given = {axis: flag.value for axis, flag in flags_of.items() if flag.value}
  sizes = mesh_for(config, len(devices), _TOKENS.value, given)
  if _TREES.value and sizes['context'] > 1:
    raise app.UsageError('--trees: a row of trees lies on one chip; give --context=1')
  everyone = sharding.make_mesh(**sizes, devices=devices)
  one_replica = replica_mesh(kind, config)
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1e-6, b2=0.95, weight_decay=0.0)
  )
  for name in _PROGRAMS.value:
    if name in _TRAINING:
      mesh = everyone
      with jax.set_mesh(mesh):
        program, elsewhere = lowered(name, config, mesh, optimizer)
    else:
      mesh, elsewhere = one_replica, on_chip(training_state(config, optimizer, everyone))
      with jax.set_mesh(mesh):
        program = lowered_sampling(name, config, mesh)
    asked = {'topology': _TOPOLOGY.value, 'model': _MODEL.value, 'mesh': dict(mesh.shape)}
    asked['trees'] = _TREES.value and name == 'gradient'
    line = asked | report(name, program, elsewhere, _CHIP[kind])
    line['estimated'] = estimated(name, config, mesh)
    print(json.dumps(line), flush=True)


if __name__ == '__main__':
  app.run(main)
