"""Accelerators to compile for ahead of time, without having them.

  v5e:4x4     sixteen chips of a TPU v5e; v5p and v6e too (extra 'tpu')
  h100:8      a host with eight GPUs; a100, h200 and b200 too (extra 'cuda')
  h100:2x8    two such hosts

The TPU compiler knows its chips; the GPU compiler gets a GpuTargetConfigProto
(openxla/xla). The numbers are those published by the manufacturers.
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
    memory: Bytes of main memory.
    operations: Peak operations per second in bfloat16, without sparsity.
    bandwidth: Bytes per second of main memory.
    links: Bytes per second that a chip sends to the other chips of a slice or a host.
    clock: Cycles per second, if the compiler estimates cycles: `operations` divided by
      the operations per cycle.
    capability: A GPU's compute capability, cores, bytes of shared memory per core, bytes
      of L2 cache, and clock in GHz.
  """

  platform: str
  memory: float
  operations: float
  bandwidth: float
  links: float
  clock: float = 0.0
  capability: tuple[str, int, int, int, float] | None = None


# A matrix unit of a TPU multiplies and adds 128 x 128 numbers per cycle (v6e: 256 x 256);
# v5p has eight, v5e and v6e four. v4 is not supported: its topology has two devices per
# chip, from which JAX makes no mesh.
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
# Chips per TPU host, and the topologies of parts of a host.
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
  """Returns the topology of `count` chips of one host.

  Programs compile only for all chips of a topology, so a part needs its own topology.

  Raises:
    ValueError: No topology of this TPU has `count` chips.
  """
  if CHIPS[kind].platform == 'gpu':
    return f'{kind}:{count}'
  if count not in _BLOCKS:
    raise ValueError(f'{count} chips of a {kind} are no block: {list(_BLOCKS)} are.')
  # Slices of v5p have three dimensions.
  return f'{kind}:{_BLOCKS[count]}' + ('x1' if kind == 'v5p' else '')


def count_host(topology: str) -> int:
  """Returns the number of chips per host."""
  kind, _, sizes = topology.partition(':')
  if CHIPS[kind].platform == 'tpu':
    return _TPU_HOST
  return int(sizes.split('x')[-1])


def find(topology: str) -> list[Any]:
  """Returns the devices of a topology, for example v5e:4x4 or h100:8.

  From here on, JAX uses only the CPU of this machine.

  Raises:
    SystemExit: The topology is unknown, or its compiler is not installed.
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
  # JAX cannot load such programs from the cache.
  jax.config.update('jax_enable_compilation_cache', False)
  try:
    found = _find_tpus(topology, sizes) if platform == 'tpu' else _find_gpus(kind, sizes)
  except (RuntimeError, ValueError) as error:
    package, extra = _COMPILERS[platform]
    if importlib.util.find_spec(package):
      sys.exit(f'--topology={topology}: {error}')
    sys.exit(f"{error}\nNeeded is the compiler: pip install 'agent_r1_jax[{extra}]'")
  if platform == 'gpu':
    # A kernel of JAX's reads it from this machine's devices.
    type(jax.devices()[0]).core_count = found.devices[0].core_count
  return list(found.devices)


def _find_tpus(topology: str, sizes: list[int]) -> Any:
  # Otherwise libtpu waits for the cloud's metadata server, and refuses a second process
  # on the machine although no TPU is used.
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  few: dict[str, Any] = {}
  if math.prod(sizes) < _TPU_HOST:
    few['chips_per_host_bounds'] = (*sizes, 1, 1)[:3]
  return topologies.get_topology_desc(platform='tpu', topology_name=topology, **few)


def _find_gpus(kind: str, sizes: list[int]) -> Any:
  # Autotuning needs a GPU.
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
