r"""Compiles training and sampling ahead of time: what fits a chip, and what it costs.

  pip install 'agent_r1_jax[tpu]'    # or [cuda], or both; no TPU or GPU is needed
  agent-r1-jax compile-for --topology=v5e:4x4 \
    --config.model.path=qwen2.5-7b
  agent-r1-jax compile-for --topology=h100:1 --program=gradient --top=20

`--topology` is one of experiments/bench/chips.py; `--config.model.path` is a Hugging Face
directory, a config.json, or a name in experiments/published.py.

One CPU core and 3 GB are enough. A TPU's gradient takes 1 to 3 minutes, its other
programs less than one; a GPU's take 5 to 30 seconds each. The learner's gradient and
update are compiled for all chips of the topology, the engine's prefill and decode for
one bfloat16 replica. Prints one JSON line per program, with figures per chip;
docs/scaling.md explains its columns. `--top=N` lists the N parts that take longest.
"""

import collections
import dataclasses
import functools
import json
import math
import sys
import time
from typing import Any

from absl import app, flags
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import optax

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import active_request, automaton_guide
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.engine import sizes as sizes_lib
from agent_r1_jax.models import (
  costs,
  decoder,
  engine_params,
  four_bits,
  head,
  kv_cache,
  lora,
  quantization,
  sharding,
)
from agent_r1_jax.models.pictures import picture_tokens
from agent_r1_jax.rl import algorithms, learner, prefix_trees
from experiments import published
from experiments.bench import chips as chips_lib
from experiments.bench import hlo, roofline
from experiments.bench import kernels as kernels_lib

_TRAINING, _SAMPLING = ('gradient', 'apply'), ('prefill', 'decode')
_LONGEST = 8192  # Tokens of a row on one chip.

_TOPOLOGY = flags.DEFINE_string(
  'topology', 'v5e:4x4', 'Chips, for example v5p:4x4x4, h100:1, h100:2x8.'
)
_MODEL = flags.DEFINE_string('config.model.path', 'qwen2.5-3b', 'Directory or name.')
_PROGRAMS = flags.DEFINE_multi_enum(
  'program', _TRAINING + _SAMPLING, _TRAINING + _SAMPLING, 'What to compile.'
)
_TOKENS = flags.DEFINE_integer('tokens', 4096, 'Tokens of a row of a micro-batch.')
_ROWS = flags.DEFINE_integer('rows', 1, 'Rows of a micro-batch, on one chip.')
_PATCHES = flags.DEFINE_integer('patches', 0, 'Patches of pictures beside such a row.')
_TREES = flags.DEFINE_bool('trees', False, 'Whether rows hold prefix trees.')
_DATA = flags.DEFINE_integer('copies', None, 'Copies of the parameters.')
_FSDP = flags.DEFINE_integer('fsdp', None, 'Chips that split the parameters.')
_TENSOR = flags.DEFINE_integer('tensor', None, 'Chips that share a layer.')
_CONTEXT = flags.DEFINE_integer('context', None, 'Chips that share a row.')
_TEXTS = flags.DEFINE_integer('texts', 32, "Rows of one host's replicas together.")
_SLOTS = flags.DEFINE_integer('slots', 4096, 'Tokens of such a row.')
_USED = flags.DEFINE_integer('used', None, 'Tokens of a text; by default all slots.')
_STEPS = flags.DEFINE_integer('steps', 32, 'Tokens of one decode.')
_PREFILL = flags.DEFINE_integer('prefill_tokens', 256, 'Tokens of a row in one prefill.')
_REMAT = flags.DEFINE_enum('remat', 'full', ['none', 'dots', 'full'], 'As model.remat.')
_FORMATS = ['model', four_bits.UNPACKED, *quantization.FORMATS]
_WEIGHTS = flags.DEFINE_enum('config.engine.weights', 'model', _FORMATS, 'As in a run.')
_CACHE = flags.DEFINE_enum('config.engine.cache', 'model', kv_cache.NUMBERS, 'The same.')
_RANK = flags.DEFINE_integer('config.model.lora_rank', 0, 'Rank of adapters, if any.')
_FROZEN = flags.DEFINE_enum(
  'config.model.frozen',
  'float32',
  ['float32', *quantization.FORMATS, four_bits.FORMAT],
  'As in a run.',
)
_TOP = flags.DEFINE_integer('top', 0, 'How many of the longest parts are listed.')
_PREFILL_ROWS = flags.DEFINE_integer('prefill_rows', 8, 'Rows of one prefill.')


def replica_mesh(topology: str, config: decoder.DecoderConfig) -> Any:
  """Makes the mesh of one copy of the policy, whose chips split the heads."""
  kind = topology.partition(':')[0]
  gpu, host = chips_lib.CHIPS[kind].platform == 'gpu', chips_lib.count_host(topology)
  tensor = _TENSOR.value or (1 if gpu else math.gcd(host, config.num_kv_heads))
  try:
    devices = chips_lib.find(chips_lib.name_part(kind, tensor))
  except ValueError as error:
    raise app.UsageError(f'--tensor={tensor}: {error}') from error
  return sharding.make_mesh(tensor=tensor, devices=devices)


def abstract(tree: Any, where: Any) -> Any:
  """Returns the shapes and dtypes of `tree`, sharded by `where`."""
  struct = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
  if not isinstance(where, NamedSharding):
    return jax.tree.map(struct, tree, where)
  return jax.tree.map(lambda x: struct(x, where), tree)


def on_chip(tree: Any) -> int:
  """Returns the bytes of an abstract tree on one chip."""
  size = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
  return sum(map(size, jax.tree.leaves(tree)))


def model(name: str, remat: str = 'full') -> decoder.DecoderConfig:
  """Returns a shape as in training: bfloat16, by default with layers recomputed."""
  return dataclasses.replace(published.read_shape(name), dtype='bfloat16', remat=remat)


def mesh_for(
  config: decoder.DecoderConfig, chips: int, tokens: int, given: dict[str, int]
) -> dict[str, int]:
  """Completes the `given` sizes of the mesh's axes by the rule of docs/scaling.md."""
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


def learned_parameters(config: decoder.DecoderConfig) -> Any:
  """Returns the shapes of the learner's parameters, adapters included."""

  def make(params):
    if _FROZEN.value != 'float32':
      params = quantization.freeze(params, config, _FROZEN.value)
    targets = config_lib.Model().adapter_targets
    if config.num_experts:  # Experts get no adapters.
      targets = [name for name in targets if name in 'qkvo']
    adapters = (_RANK.value, targets, 16.0, jax.random.key(0))
    return lora.add(params, *adapters) if _RANK.value else params

  return jax.eval_shape(make, parameters(config))


def training_state(config, optimizer, mesh) -> learner.ModelState:
  """Returns the shapes and shardings of the training state."""
  params = learned_parameters(config)
  shapes = jax.eval_shape(lambda p: learner.init(p, optimizer), params)
  return abstract(shapes, sharding.make_shardings(shapes, mesh))


def _make_pictures(text: Any, vision: Any) -> types.Pictures | None:
  """Returns the shapes of the rows' pictures, if --patches and a tower are given."""
  if not _PATCHES.value or vision is None:
    return None
  rows = text.shape[0]
  made: Any = picture_tokens.pack([], vision, rows=rows, patches=_PATCHES.value)[0]
  patches = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made)
  axes: Any = jax.ShapeDtypeStruct((*text.shape, 3), jnp.int32)
  return types.Pictures(axes, text, patches=patches)


def batch(
  mesh, rows: int, tokens: int, *, trees: bool = False, vision: Any = None
) -> types.Batch:
  """Returns the shapes of a micro-batch of GRPO with `rows` rows per data shard.

  With a tower's shape, `vision`, each row has --patches patches.
  """
  rows *= mesh.shape['data'] * mesh.shape['fsdp']
  text: Any = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
  sees = types.Tree(text, text) if trees else types.Segments(text)
  columns = prefix_trees.ENTRIES * tokens if trees else tokens
  kinds = {'segment_ids': jnp.int32, 'action_mask': jnp.bool, 'columns': jnp.int32}
  names = *types.Batch._fields[1:6], *(('columns',) if trees else ())
  shapes: dict[str, Any] = {
    name: jax.ShapeDtypeStruct((rows, columns), kinds.get(name, jnp.float32))
    for name in names
  }
  shapes['rows'] = types.Rows(text, text, sees, _make_pictures(text, vision))
  return abstract(types.Batch(**shapes), sharding.batch_sharding(mesh))


def replica(config: decoder.DecoderConfig, mesh) -> Any:
  """Returns the shapes and shardings of the engine's parameters."""
  copy = lambda p: engine_params.unstack(p, config, _WEIGHTS.value)
  shapes = jax.eval_shape(copy, learned_parameters(config))
  return abstract(shapes, sharding.make_shardings(shapes, mesh))


def lowered(program: str, config, mesh, optimizer) -> tuple[Any, int]:
  """Lowers a training program; also returns the bytes of state that it does not get."""
  state = training_state(config, optimizer, mesh)
  if program == 'apply':
    learned, kept = lora.split(state.params)
    state = state._replace(params=learned)
    return learner._apply.lower(state, learned, optimizer=optimizer), on_chip(kept)
  return learner._gradient.lower(
    state.params,
    batch(mesh, _ROWS.value, _TOKENS.value, trees=_TREES.value, vision=config.vision),
    config=config,
    loss=learner.objective(algorithms.grpo(kl_coef=0.0)),
    temperature=1.0,
  ), on_chip(state.opt_state)


def replica_texts(mesh) -> int:
  """Returns a replica's share of the host's sequences."""
  return max(1, _TEXTS.value * mesh.size // chips_lib.count_host(_TOPOLOGY.value))


def lowered_sampling(program: str, config, mesh) -> Any:
  """Lowers a program of one replica: all its sequences at once, over all their slots."""
  texts, slots = replica_texts(mesh), _SLOTS.value
  everywhere = NamedSharding(mesh, PartitionSpec())

  def ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=everywhere)

  ring = sizes_lib.count_window_slots(config, slots, max(_PREFILL.value, _STEPS.value))
  shape = config, texts, slots, _CACHE.value, ring
  shapes = jax.eval_shape(functools.partial(kv_cache.empty, *shape))
  params = replica(config, mesh)
  where = lambda x: sharding.cache_sharding(x.shape[1], mesh)
  cache = abstract(shapes, jax.tree.map(where, shapes))
  options = {'config': config, 'bucket': slots}
  if program == 'prefill':
    rows, width = _PREFILL_ROWS.value, _PREFILL.value
    tokens = types.Rows(ints(rows, width), ints(rows, width))
    prefill_batch = programs_lib.PrefillBatch(ints(rows), tokens)
    return programs_lib.prefill.lower(params, cache, prefill_batch, **options)
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


def count_needed(
  program: str, config: decoder.DecoderConfig, mesh
) -> tuple[float, float]:
  """Counts the work that a program needs on one chip, without any recomputation.

  Returns:
    The operations (agent_r1_jax/models/costs.py), for a prefill those of a sequence's
    first tokens; and for a decode, the bytes of the parameters and of the used slots of
    the cache, else 0. Experts count in expectation, if all are equally likely: only those
    that some sequence chooses are read.
  """
  size = costs.count_parameters(parameters(config), config)
  if program == 'gradient':
    rows, tokens = batch(mesh, _ROWS.value, _TOKENS.value).weights.shape
    times = {'products': 2 if _RANK.value else 3, 'attention': 3}
    row = costs.count_forward(size, config, np.arange(tokens), tokens, **times)
    return rows * row / mesh.size, 0.0
  if program == 'prefill':
    row = costs.count_forward(size, config, np.arange(_PREFILL.value), 0)
    return _PREFILL_ROWS.value * row / mesh.size, 0.0
  if program == 'decode':
    texts, used = replica_texts(mesh), _USED.value or _SLOTS.value
    shape = config, texts, used, _CACHE.value, config.window or None
    cache = jax.eval_shape(functools.partial(kv_cache.empty, *shape))
    count = lambda *kinds: sum(
      k.size for k in jax.tree.leaves(replica(config, mesh)) if k.dtype.name in kinds
    )
    # A chip reads its heads, or one head if there are fewer heads than chips.
    slots = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    taken = (1 - (1 - size.share) ** texts) * size.experts
    read = 2 * (size.layers + size.head) - count('int8', 'float8_e4m3fn')
    packed = count('uint8')  # Experts of 4 bits, and their exponents.
    read += taken * (packed / size.experts if packed else 2)
    needed = read / mesh.size + slots / min(mesh.size, config.num_kv_heads)
    operations = costs.count_forward(size, config, np.full(texts, used - 1), texts)
    return operations / mesh.size, needed
  return 0.0, 0.0


def report(name: str, program: Any, elsewhere: int, chip: chips_lib.Chip, guess):
  """Compiles a program, and describes its memory, its kernels and their time.

  `elsewhere` are bytes on the chip that the program does not get. `guess` gives the
  passes of loops that depend on the data; see kernels.list_kernels.
  """
  start = time.time()
  compiled = program.compile()
  seconds = time.time() - start
  memory = compiled.memory_analysis()
  parts = {
    'arguments': memory.argument_size_in_bytes,
    'temporaries': memory.temp_size_in_bytes,
    'outputs': memory.output_size_in_bytes - memory.alias_size_in_bytes,
    'elsewhere': elsewhere,
  }
  total = sum(parts.values())
  kernels = kernels_lib.list_kernels(hlo.Program(compiled.as_text()), guess)
  if name == 'decode':
    kernels = roofline.read_used_slots(kernels, _USED.value or _SLOTS.value, _SLOTS.value)
  if _TOP.value:
    roofline.show_longest(kernels, chip, _TOP.value)
  exchanged = collections.Counter()
  for kernel in kernels:
    for kind, size in kernel.exchanged.items():
      exchanged[kind] += kernel.calls * size
  best, in_turn = roofline.sum_seconds(kernels, chip)
  kind = _TOPOLOGY.value.partition(':')[0]
  missing = roofline.find_missing(kernels, name, kind, trees=_TREES.value)
  if missing:
    print(f'{name}: expected kernels that are not there: {missing}', file=sys.stderr)
  return {
    'program': name,
    **{f'{key}_gib': round(size / chips_lib.GIB, 2) for key, size in parts.items()},
    'total_gib': round(total / chips_lib.GIB, 2),
    'chip_gib': round(chip.memory / chips_lib.GIB, 2),
    'fits': total < chip.memory,
    'operations': sum(k.calls * k.operations for k in kernels),
    'bytes': sum(k.calls * k.bytes for k in kernels),
    'exchanged_gib': round(exchanged.total() / chips_lib.GIB, 2),
    'exchanged': dict(exchanged),
    'seconds': float(f'{best:.4g}'),
    'in_turn': float(f'{in_turn:.4g}'),
    'kernels': roofline.sum_by_kind(kernels, chip),
    'missing': missing,
    'data_loops': len({name for k in kernels for name in k.inside}),
    'compile_seconds': round(seconds, 1),
  }


def main(_):
  config = model(_MODEL.value, _REMAT.value)
  devices = chips_lib.find(_TOPOLOGY.value)
  chip = chips_lib.CHIPS[_TOPOLOGY.value.partition(':')[0]]
  flags_of = {'data': _DATA, 'fsdp': _FSDP, 'tensor': _TENSOR, 'context': _CONTEXT}
  given = {axis: flag.value for axis, flag in flags_of.items() if flag.value}
  sizes = mesh_for(config, len(devices), _TOKENS.value, given)
  if _TREES.value and sizes['context'] > 1:
    raise app.UsageError('--trees: a row of trees lies on one chip; give --context=1')
  everyone = sharding.make_mesh(**sizes, devices=devices)
  one_replica = replica_mesh(_TOPOLOGY.value, config)
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1e-6, b2=0.95, weight_decay=0.0)
  )
  for name in _PROGRAMS.value:
    tokens = 1.0
    if name in _TRAINING:
      mesh = everyone
      with jax.set_mesh(mesh):
        program, elsewhere = lowered(name, config, mesh, optimizer)
        tokens = _ROWS.value * _TOKENS.value / sizes['context']
    else:
      mesh, elsewhere = one_replica, on_chip(training_state(config, optimizer, everyone))
      with jax.set_mesh(mesh):
        program = lowered_sampling(name, config, mesh)
    asked = {'topology': _TOPOLOGY.value, 'model': _MODEL.value, 'mesh': dict(mesh.shape)}
    asked['trees'] = _TREES.value and name == 'gradient'
    numbers = {'weights': _WEIGHTS.value, 'cache': _CACHE.value}
    asked |= numbers if name in _SAMPLING else dict.fromkeys(numbers, 'model')
    asked |= {'lora_rank': _RANK.value, 'frozen': _FROZEN.value}
    blocks = math.ceil(tokens / head.block_tokens(config.vocab_size))
    guess = functools.partial(kernels_lib.guess_passes, blocks)
    line = asked | report(name, program, elsewhere, chip, guess)
    useful, needed = count_needed(name, config, mesh)
    line |= {'useful': useful, 'needed': needed}
    if useful and name != 'decode':
      line['mfu'] = round(useful / chip.operations / line['seconds'], 3)
    if needed:
      line['hbm'] = round(needed / chip.bandwidth / line['seconds'], 3)
    print(json.dumps(line), flush=True)


if __name__ == '__main__':
  app.run(main)
