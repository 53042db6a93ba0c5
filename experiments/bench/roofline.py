"""Estimates the time of a compiled program's kernels, and finds missing kernels."""

import collections
from collections.abc import Sequence
import sys
from typing import Any

from agent_r1_jax.models.kernels import attention_kernels, slot_attention
from experiments.bench import chips as chips_lib
from experiments.bench import kernels as kernels_lib

# The attention kernels, by a part of their target or name.
_EXPECTED: dict[tuple[str, str], tuple[str, ...]] = {
  ('gpu', 'gradient'): ('fmhaScaleBiasSoftmax', 'fmhaScaleBiasSoftmaxBackward'),
  ('tpu', 'gradient'): ('fwd', 'dq', 'dkv'),
  ('tpu', 'decode'): ('paged_attention',),
  ('tpu', 'prefill'): ('prefill_attention',),
}
# The same for GPUs with our own kernels.
_HOPPER = 'h100', 'h200'
_EXPECTED_HOPPER: dict[str, tuple[str, ...]] = {
  'gradient': tuple(f'row_attention_{x}' for x in ('forward', 'queries', 'keys')),
  'prefill': ('slot_attention',),
  'decode': ('slot_attention',),
}
# The slots that decode kernels read at a time.
_READS = {
  'paged_attention': attention_kernels.PAGE,
  'slot_attention': slot_attention.BLOCK,
}
_EXPECTED_TREES = {('tpu', 'gradient'): ('forward', 'queries', 'keys')}


def count_seconds(kernel: kernels_lib.Kernel, chip: chips_lib.Chip) -> float:
  """Returns the seconds of all calls of a kernel, without collectives."""
  if kernel.kind == 'exchange':
    return 0.0
  if kernel.cycles and chip.clock:
    return kernel.calls * kernel.cycles / chip.clock
  operations = kernel.operations / chip.operations
  return kernel.calls * max(operations, kernel.bytes / chip.bandwidth)


def sum_seconds(
  kernels: Sequence[kernels_lib.Kernel], chip: chips_lib.Chip
) -> tuple[float, float]:
  """Sums the seconds of kernels.

  Returns:
    The seconds with perfect overlap of copies and collectives, at least the time of all
    bytes at the bandwidth; and the seconds with no overlap.
  """
  alone = sum(count_seconds(k, chip) for k in kernels if not k.beside)
  moved = sum(k.calls * k.bytes for k in kernels) / chip.bandwidth
  sent = sum(k.calls * sum(k.exchanged.values()) for k in kernels) / chip.links
  in_turn = sum(count_seconds(k, chip) for k in kernels) + sent
  return max(alone, moved, sent), max(in_turn, moved)


def sum_by_kind(
  kernels: Sequence[kernels_lib.Kernel], chip: chips_lib.Chip
) -> dict[str, Any]:
  """Sums calls, operations, bytes and seconds of kernels by their kind."""
  sums: dict[str, Any] = {}
  for kind in kernels_lib.KINDS:
    own = [k for k in kernels if k.kind == kind]
    sums[kind] = {
      'calls': sum(k.calls for k in own),
      'operations': float(f'{sum(k.calls * k.operations for k in own):.4g}'),
      'bytes': float(f'{sum(k.calls * k.bytes for k in own):.4g}'),
      'seconds': float(f'{sum(count_seconds(k, chip) for k in own):.4g}'),
    }
  return {kind: numbers for kind, numbers in sums.items() if numbers['calls']}


def show_longest(
  kernels: Sequence[kernels_lib.Kernel], chip: chips_lib.Chip, count: int
) -> None:
  """Prints the parts of the model that take longest, to stderr."""
  seconds: dict[Any, float] = collections.defaultdict(float)
  parts = collections.defaultdict(list)
  for k in kernels:
    key = k.kind, k.part
    seconds[key] += count_seconds(k, chip)
    parts[key].append(k)
  longest = sorted(seconds.items(), key=lambda item: -item[1])
  for key, taken in longest[:count]:
    own, (kind, part) = parts[key], key
    operations = sum(k.calls * k.operations for k in own)
    moved = sum(k.calls * k.bytes for k in own)
    line = f'{1e3 * taken:9.3f} ms  {operations:8.2e} operations  {moved:8.2e} bytes  '
    print(f'{line}{kind:9s} {part[-70:]} ({own[0].name})', file=sys.stderr)


def find_missing(
  kernels: Sequence[kernels_lib.Kernel], program: str, kind: str, *, trees: bool = False
) -> list[str]:
  """Returns the expected attention kernels of a chip that the program lacks."""
  platform = chips_lib.CHIPS[kind].platform
  expected = _EXPECTED.get((platform, program), ())
  if trees:
    expected = _EXPECTED_TREES.get((platform, program), expected)
  if kind in _HOPPER:
    expected = _EXPECTED_HOPPER.get(program, ())
  own = [k for k in kernels if k.kind == 'attention']
  ends = lambda k, x: k.target.endswith(x) or f'_{x}' in f'_{k.name}'
  return [x for x in expected if not any(ends(k, x) for k in own)]


def read_used_slots(
  kernels: Sequence[kernels_lib.Kernel], used: int, slots: int
) -> list[kernels_lib.Kernel]:
  """Scales a decode's kernels to sequences of `used` tokens, in rows of `slots`.

  Attention kernels read only the used pages or blocks; attention by XLA reads all slots.
  """

  def leave_out(kernel: kernels_lib.Kernel) -> kernels_lib.Kernel:
    names = f'{kernel.target} {kernel.name}'
    block = next((n for name, n in _READS.items() if name in names), 0)
    if not block:
      return kernel
    read = min(slots, -(-used // block) * block)
    return kernel._replace(
      bytes=kernel.bytes * read // slots,
      operations=kernel.operations * read / slots,
    )

  return [leave_out(k) for k in kernels]
