"""Measures speed, idle time and memory of training steps."""

from collections.abc import Mapping
import time
from typing import Any

import jax

from agent_r1_jax.host import memory

# Peak bfloat16 operations per second, without sparsity, as published by the makers; by
# the beginning of jax.Device.device_kind.
PEAKS = {
  'TPU v4': 275e12,
  'TPU v5e': 197e12,
  'TPU v5 lite': 197e12,
  'TPU v5': 459e12,
  'TPU v6e': 918e12,
  'TPU v6 lite': 918e12,
  'NVIDIA A100': 312e12,
  'NVIDIA H100': 989e12,
  'NVIDIA H100 NVL': 835e12,
  'NVIDIA H100 PCIe': 756e12,
  'NVIDIA H200': 989e12,
  'NVIDIA B200': 2250e12,
}


def find_peak(device_kind: str) -> float | None:
  """Returns a chip's peak operations per second, or None if unknown."""
  names = [name for name in PEAKS if device_kind.startswith(name)]
  return PEAKS[max(names, key=len)] if names else None


class Meter:
  """Measures speed, idle time and memory of each training step in this process."""

  def __init__(self, engine: Any):
    """Begins a step; `engine` is the run's engine.Engine, whose counts are read."""
    self._engine = engine
    self._before = self._read()

  def _read(self) -> tuple[float, int, float]:
    stats = self._engine.stats
    return time.perf_counter(), stats.sampled, stats.idle_seconds

  def measure(self, metrics: Mapping[str, float] | None = None) -> dict[str, float]:
    """Returns metrics of the time since the last call, evaluations included.

    They are the sampled tokens per second; the share of time that the engine was idle
    because all agents waited for tools; and the memory in use, in GB (10^9 bytes): of the
    process on a CPU, otherwise of the fullest chip.

    With an update's `metrics`, they also include the operations of its gradients
    (models/costs.py) per second and chip, in units of 10^12, and, for chips of known
    peak, MFU.
    """
    now, before = self._read(), self._before
    seconds, sampled, idle = (a - b for a, b in zip(now, before, strict=True))
    self._before = now
    # A wait is counted when it ends, and may have begun in the step before.
    idle = min(idle, seconds * len(self._engine.replicas))
    return {
      'machine/tokens_per_second': sampled / seconds,
      'machine/idle': idle / (seconds * len(self._engine.replicas)),
      'machine/memory_gb': memory.used_memory() / 1e9,
      **self._measure_update(metrics or {}),
    }

  def _measure_update(self, metrics: Mapping[str, float]) -> dict[str, float]:
    if 'train/operations' not in metrics:
      return {}
    chips = 1 if self._engine.mesh is None else self._engine.mesh.size
    speed = metrics['train/operations'] / metrics['time/update'] / chips
    peak = find_peak(jax.devices()[0].device_kind)
    mfu = {'machine/mfu': speed / peak} if peak else {}
    return {'machine/update_tflops': speed / 1e12} | mfu
