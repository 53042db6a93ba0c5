"""Accelerators that are not here, for which programs can be compiled all the same.

  v5e:4x4     sixteen chips of a TPU v5e; v5p and v6e too (extra 'tpu')
  h100:8      a host with eight GPUs; a100, h200 and b200 too (extra 'cuda')
  h100:2x8    two such hosts

A TPU's compiler knows its chips; a GPU's is told of them in the terms of
GpuTargetConfigProto (openxla/xla). The numbers are those that the makers publish.
"""

import importlib.util
import math
import os
import sys
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

GIB = 2**30


class Chip(NamedTuple):
  """One kind of accelerator.

  Attributes:
    platform: 'tpu' or 'gpu'.
    memory: Bytes of main memory, as its maker says.
    operations: The most operations a second in bfloat16, without sparsity.
    bandwidth: Bytes a second of main memory.
    links: Bytes a second that a chip sends to the other chips of a slice or a host.
    clock: Cycles a second, where the compiler estimates cycles: `operations` over those
      of a cycle.
    capability: Of a GPU, its compute capability, cores, bytes of shared memory a core and
      of the second cache, and its clock in GHz.
  """

  platform: str
  memory: float
  operations: float
  bandwidth: float
  links: float
  clock: float = 0.0
  capability: tuple[str, int, int, int, float] | None = None


# A matrix unit of a TPU multiplies and adds 128 x 128 numbers a cycle (v6e: 256 x 256);
# v5p has eight, v5e and v6e four. Not v4: its topology has two devices a chip, of which
# JAX makes no mesh.
CHIPS = {
  'v5e': Chip('tpu', 16 * GIB, 197e12, 0.819e12, 200e9, 197e12 / (2 * 4 * 128**2)),
  'v5p': Chip('tpu', 95 * GIB, 459e12, 2.765e12, 600e9, 459e12 / (2 * 8 * 128**2)),
  'v6e': Chip('tpu', 32 * GIB, 918e12, 1.64e12, 448e9, 918e12 / (2 * 4 * 256**2)),
  'a100': Chip(
    'gpu', 80e9, 312e12, 2.039e12, 300e9, 0, ('8.0', 108, 167_936, 40 << 20, 1.41)
  ),
  'h100': Chip(
    'gpu', 80e9, 989e12, 3.352e12, 450e9, 0, ('9.0', 132, 233_472, 50 << 20, 1.98)
  ),
  'h200': Chip(
    'gpu', 141e9, 989e12, 4.8e12, 450e9, 0, ('9.0', 132, 233_472, 50 << 20, 1.98)
  ),
  'b200': Chip(
    'gpu', 180e9, 2250e12, 8e12, 900e9, 0, ('10.0', 148, 233_472, 126 << 20, 1.965)
  ),
}
# The package of a platform's compiler, and the extra that installs it.
_COMPILERS = {'tpu': ('libtpu', 'tpu'), 'gpu': ('jax_cuda12_plugin', 'cuda')}
# Chips of one host of a TPU, and how fewer of them lie.
_TPU_HOST = 4
_BLOCKS = {1: '1x1', 2: '1x2', 4: '2x2'}
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {optin}
  core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f} l2_cache_size: {cache}
  device_memory_size: {memory:.0f}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


def name_part(kind: str, count: int) -> str:
  """Returns the topology of a few chips of one host.

  A program for some of a topology's chips does not compile: they are one by themselves.

  Raises:
    ValueError: There are no such.
  """
  if CHIPS[kind].platform == 'gpu':
    return f'{kind}:{count}'
  if count not in _BLOCKS:
    raise ValueError(f'{count} chips of a {kind} are no block: {list(_BLOCKS)} are.')
  # In slices of v5p, chips lie in three dimensions.
  return f'{kind}:{_BLOCKS[count]}' + ('x1' if kind == 'v5p' else '')


def count_host(topology: str) -> int:
  """Returns the number of chips of one host."""
  kind, _, sizes = topology.partition(':')
  if CHIPS[kind].platform == 'tpu':
    return _TPU_HOST
  return int(sizes.split('x')[-1])


def find(topology: str) -> list[Any]:
  """Returns the devices of a topology, for example v5e:4x4 or h100:8.

  Nothing else of this machine's is used: JAX computes on the CPU from here on.

  Raises:
    SystemExit: It is none, or its compiler is not installed.
  """
  kind, _, text = topology.partition(':')
  try:
    sizes = [int(n) for n in text.split('x')]
    platform = CHIPS[kind].platform
    if min(sizes) < 1 or (platform == 'gpu' and len(sizes) > 2):
      raise ValueError
  except (KeyError, ValueError):
    sys.exit(
      f'--topology={topology}: known are {", ".join(CHIPS)}, as in v5e:4x4, h100:8'
    )
  jax.config.update('jax_platforms', 'cpu')
  # JAX cannot read such programs back.
  jax.config.update('jax_enable_compilation_cache', False)
  try:
    found = _find_tpus(topology, sizes) if platform == 'tpu' else _find_gpus(kind, sizes)
  except (RuntimeError, ValueError) as error:
    package, extra = _COMPILERS[platform]
    if importlib.util.find_spec(package):
      sys.exit(f'--topology={topology}: {error}')
    sys.exit(f"{error}\nNeeded is the compiler: pip install 'agent_r1_jax[{extra}]'")
  if platform == 'gpu':
    # One of JAX's own kernels asks this machine's devices for it.
    type(jax.devices()[0]).core_count = found.devices[0].core_count
  return list(found.devices)


def _find_tpus(topology: str, sizes: list[int]) -> Any:
  # Otherwise the library asks the cloud who it is, and waits for an answer; and it
  # refuses to be loaded twice on a machine, although no TPU is used.
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  few: dict[str, Any] = {}
  if math.prod(sizes) < _TPU_HOST:
    few['chips_per_host_bounds'] = (*sizes, 1, 1)[:3]
  return topologies.get_topology_desc(platform='tpu', topology_name=topology, **few)


def _find_gpus(kind: str, sizes: list[int]) -> Any:
  # To choose the fastest of several kernels needs a GPU that they run on.
  flags = os.environ.get('XLA_FLAGS', '')
  if 'xla_gpu_autotune_level' not in flags:
    os.environ['XLA_FLAGS'] = f'{flags} --xla_gpu_autotune_level=0'
  chip = CHIPS[kind]
  assert chip.capability
  capability, cores, shared, cache, clock = chip.capability
  major, minor = capability.split('.')
  target = _TARGET.format(
    shared=shared,
    optin=shared - 1024,
    cores=cores,
    units=64 if major == '8' else 128,
    clock=clock,
    bandwidth=chip.bandwidth,
    cache=cache,
    memory=chip.memory,
    major=major,
    minor=minor,
    name=f'NVIDIA {kind.upper()}',
  )
  hosts, gpus = sizes if len(sizes) == 2 else (1, *sizes)
  return topologies.get_topology_desc(
    topology_name='',
    platform='cuda',
    target_config=target,
    topology=f'1x{hosts}x{gpus}',
  )
