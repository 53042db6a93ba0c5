"""First light, part 1: the device, and the two speeds that later bounds use."""

from collections.abc import Iterator
import importlib.metadata
import os
import platform
import subprocess

import jax
import jax.numpy as jnp

from agent_r1_jax.report import meter
from experiments.bench import chips
from experiments.bench.light import lines

COPY, PRODUCT = 'copy', 'bfloat16 product'
# JAX's name of a TPU -> a key of chips.CHIPS; a GPU's name contains its key.
_TPUS = {'TPU v5 lite': 'v5e', 'TPU v5': 'v5p', 'TPU v6 lite': 'v6e'}
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy', 'transformers')


def describe() -> Iterator[lines.Line]:
  """Yields the device, its driver and the versions of packages."""
  device = jax.devices()[0]
  stats = device.memory_stats() or {}
  yield {
    'what': 'device',
    'device': device.device_kind,
    'platform': device.platform,
    'devices': len(jax.devices()),
    'memory': stats.get('bytes_limit'),
    'driver': _ask_driver(),
    'cores': os.cpu_count(),
    'python': platform.python_version(),
    'packages': {name: importlib.metadata.version(name) for name in _PACKAGES},
  }


def copy() -> Iterator[lines.Line]:
  """Measures the bytes per second that a copy in device memory reads and writes."""
  x = jax.random.normal(
    jax.random.key(0), (1 << (22 if lines.is_tiny() else 30),), jnp.bfloat16
  )
  add = jax.jit(lambda x: x + 1)
  first, seconds = lines.measure_seconds(lambda: add(x), repeats=5, calls=3)
  published = _find_chip()
  yield lines.make(
    COPY,
    2 * x.nbytes / seconds,
    'bytes/s',
    published and published.bandwidth,
    higher_is_better=True,
    first_seconds=first,
  )


def multiply() -> Iterator[lines.Line]:
  """Measures the operations per second of a large product of random matrices."""
  n = 512 if lines.is_tiny() else 8192
  keys = jax.random.split(jax.random.key(0))
  x, y = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in keys)
  product = jax.jit(jnp.matmul)
  first, seconds = lines.measure_seconds(lambda: product(x, y), repeats=5, calls=10)
  yield lines.make(
    PRODUCT,
    2 * n**3 / seconds,
    'operations/s',
    meter.find_peak(jax.devices()[0].device_kind),
    higher_is_better=True,
    first_seconds=first,
  )


def find_bandwidth() -> float:
  """Returns the measured bytes per second of a copy, or else the published bandwidth."""
  return lines.find('card', COPY) or getattr(_find_chip(), 'bandwidth', 1e10)


def find_peak() -> float:
  """Returns the published peak operations per second; for a CPU, the measured ones."""
  published = meter.find_peak(jax.devices()[0].device_kind)
  return published or lines.find('card', PRODUCT) or 1e11


def _ask_driver() -> str:
  """Returns what nvidia-smi says about the card, or an empty string."""
  command = ['nvidia-smi', '--format=csv,noheader']
  command += ['--query-gpu=name,memory.total,driver_version,power.limit']
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=5)
  except (OSError, subprocess.TimeoutExpired):
    return ''
  return done.stdout.strip()


def _find_chip() -> chips.Chip | None:
  kind = jax.devices()[0].device_kind
  names = [_TPUS.get(kind, ''), *kind.lower().split()]
  return next((chips.CHIPS[name] for name in names if name in chips.CHIPS), None)


MEASUREMENTS = (describe, copy, multiply)

if __name__ == '__main__':
  lines.run(MEASUREMENTS)
