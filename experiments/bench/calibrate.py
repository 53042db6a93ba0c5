"""Compares the estimates of compile_for.py with times that others measured on TPUs.

  pip install -e '.[tpu]'    # no TPU is needed
  python -m experiments.bench.calibrate --match=product
  python -m experiments.bench.calibrate

Hardware: one CPU core, 3 GB; products take seconds, each training step 3 to 15 minutes.

Products and copies are the very programs that were measured. A training step is the
nearest of ours: gradient and update of the same shape, with the same tokens a chip, the
same mesh and about the same recomputation. Ours is the loss of GRPO, and its head
computes its logits once more.

Prints one JSON line each: `published` seconds, `seconds` and `in_turn` as compile_for.py
prints them, and `ratio`, the published time over `seconds`. Expected: docs/scaling.md.
"""

from collections.abc import Callable
import dataclasses
import json
import math
from typing import Any, NamedTuple

from absl import app, flags
import jax
from jax import ShapeDtypeStruct as Shape
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import optax

from agent_r1_jax.models import decoder, head, sharding
from experiments.bench import chips as chips_lib
from experiments.bench import compile_for, hlo, roofline
from experiments.bench import kernels as kernels_lib

_MATCH = flags.DEFINE_string('match', '', 'Part of the names of the programs to compare.')


class Step(NamedTuple):
  """A training step."""

  shape: tuple[int, ...]  # V, D, L, N, K, H, F, as in models/decoder.py.
  rows: int  # Of one data shard.
  tokens: int  # Of a row.
  mesh: dict[str, int]
  remat: str = 'full'

  def seconds(self, rate: float) -> float:
    """Returns the time of a step in which a chip computes `rate` operations a second.

    As MaxText counted when it published them: 6 operations a parameter and token, without
    the embedding, and attention to all tokens of a row, later ones too.
    """
    V, D, L, N, K, H, F = self.shape
    parameters = L * (2 * D * (N + K) * H + 3 * D * F) + V * D
    operations = 6 * parameters + 12 * L * N * H * self.tokens
    return self.rows * self.tokens * operations / self.mesh.get('tensor', 1) / rate


class Published(NamedTuple):
  """A time that was measured."""

  name: str
  topology: str
  seconds: float
  source: str
  program: Callable[..., Any] | Step
  arguments: tuple[Shape, ...] = ()
  options: dict[str, Any] = {}  # Of the compiler, as they were measured.


_16B = Step((32_000, 4096, 32, 64, 64, 128, 28_672), 6, 2048, {'fsdp': 256})
_32B = Step((32_000, 8192, 32, 64, 64, 128, 28_672), 4, 2048, {'fsdp': 256})
# Half of the rows that were measured, which need more memory in ours.
_HALF = _32B._replace(rows=12, mesh={'fsdp': 16, 'tensor': 4}, remat='dots')
_LLAMA = Step((128_256, 4096, 32, 32, 8, 128, 14_336), 3, 8192, {'fsdp': 8})

_MATMUL, _SPARSE = (f'JAX, docs/pallas/tpu/{x}.ipynb' for x in ('matmul', 'sparse'))
_V5E, _V5P = (f'MaxText, src/maxtext/configs/tpu/{x}' for x in ('v5e', 'v5p'))
_RECIPES = 'AI-Hypercomputer/tpu-recipes, microbenchmarks'
_TRILLIUM = 'AI-Hypercomputer/tpu-recipes, training/trillium/Llama3.1-8B-MaxText/v6e-8'
_LINE = Shape((2**24,), jnp.bfloat16)
# The vector memory that one fusion may take, in KiB.
_MEMORY = 'xla_tpu_scoped_vmem_limit_kib'


def _product(size, kind, seconds, source, **options) -> Published:
  square = Shape((size, size), jnp.bfloat16)
  one = (f'product {size}', f'{kind}:1x1', seconds, source)
  return Published(*one, jnp.matmul, (square, square), options)


PUBLISHED = (
  _product(1024, 'v5e', 0.00011943, _MATMUL),
  _product(4096, 'v5e', 0.00082729, _MATMUL),
  _product(8192, 'v5e', 0.00604715, _MATMUL),
  _product(16_384, 'v5e', 0.046953, _SPARSE),
  _product(8192, 'v6e', 0.001328756, _RECIPES, **{_MEMORY: 65_536}),
  Published('copy of 34 MB', 'v6e:1x1', 4.9359e-5, _RECIPES, jnp.copy, (_LINE,)),
  Published('step of 16B', 'v5e:16x16', _16B.seconds(0.6110 * 197e12), _V5E, _16B),
  Published('step of 32B', 'v5e:16x16', _32B.seconds(0.6686 * 197e12), _V5E, _32B),
  Published('step of 32B', 'v5p:4x4x4', _HALF.seconds(0.7147 * 459e12), _V5P, _HALF),
  Published('step of Llama 3.1 8B', 'v6e:2x4', 3.443, _TRILLIUM, _LLAMA),
)


def lower(one: Published) -> tuple[list[Any], int]:
  """Returns the programs, and the passes of the loops of which only the data say them."""
  devices, step = chips_lib.find(one.topology), one.program
  if not isinstance(step, Step):
    where = NamedSharding(sharding.make_mesh(devices=devices), PartitionSpec())
    arguments = compile_for.abstract(one.arguments, where)
    return [jax.jit(step).lower(*arguments)], 1
  flags.FLAGS.rows, flags.FLAGS.tokens = step.rows, step.tokens
  V, D, L, N, K, H, F = step.shape
  config = decoder.DecoderConfig('llama', V, D, L, N, K, H, F, remat=step.remat)
  config = dataclasses.replace(config, dtype='bfloat16')
  mesh = sharding.make_mesh(**step.mesh, devices=devices)
  with jax.set_mesh(mesh):
    both = ('gradient', 'apply')
    found = [compile_for.lowered(x, config, mesh, optax.adamw(1e-4))[0] for x in both]
    blocks = step.rows * step.tokens / head.block_tokens(config.vocab_size)
  return found, math.ceil(blocks)


def main(_):
  for one in PUBLISHED:
    if _MATCH.value not in one.name:
      continue
    programs, unknown = lower(one)
    chip, best, in_turn = chips_lib.CHIPS[one.topology.partition(':')[0]], 0.0, 0.0
    for program in programs:
      text = program.compile(one.options).as_text()
      kernels = kernels_lib.list_kernels(hlo.Program(text), unknown)
      seconds = roofline.sum_seconds(kernels, chip)
      best, in_turn = best + seconds[0], in_turn + seconds[1]
    numbers = {'published': one.seconds, 'seconds': best, 'in_turn': in_turn}
    numbers = {k: float(f'{v:.4g}') for k, v in numbers.items()}
    line = {'chips': one.topology, 'program': one.name, **numbers}
    line |= {'ratio': round(one.seconds / best, 3), 'source': one.source}
    print(json.dumps(line), flush=True)


if __name__ == '__main__':
  app.run(main)
