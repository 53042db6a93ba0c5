"""The memory of a process: retained by malloc, in use, and available."""

import ctypes
import gc
import importlib.util
import os
import pathlib
import platform

import jax

# From glibc's malloc.h; see mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
# Where Linux lists the control groups of a process, and where their limits are.
_GROUP, _GROUPS = pathlib.Path('/proc/self/cgroup'), pathlib.Path('/sys/fs/cgroup')
# A process with fewer resident bytes keeps freed memory (release_freed_memory).
KEPT = 2e9
_ACCELERATORS = ('jax_cuda12_plugin', 'jax_cuda13_plugin', 'jax_rocm7_plugin', 'libtpu')


def retain_freed_memory() -> bool:
  """Makes malloc keep freed memory; call it before the first thread starts.

  XLA allocates all temporaries of a CPU program at each call, and glibc returns blocks of
  that size to the kernel at once. Faulting in and zeroing the pages again takes a fifth
  of a training step on one core (docs/results/performance.md).

  A thread that allocates before the call has its own arena, with blocks of at most 64 MB,
  and glibc assigns that arena to some later threads too, such as XLA's.

  Returns:
    Whether malloc was set; this needs glibc, and JAX without an accelerator.
  """
  if platform.libc_ver()[0] != 'glibc':
    return False
  platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
  if platforms != 'cpu' and any(map(importlib.util.find_spec, _ACCELERATORS)):
    return False
  libc = ctypes.CDLL(None)
  settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1))
  return all([libc.mallopt(*setting) == 1 for setting in settings])


def release_freed_memory(*, cycles: bool = False) -> None:
  """Returns freed memory to the kernel; call it between the phases of a run.

  `retain_freed_memory` keeps freed memory. If a phase frees large blocks between small
  live blocks, the next phase's blocks do not fit the gaps, and the process grows. A
  process with less than KEPT bytes keeps everything: its phases are short, and faulting
  pages in again would slow them.

  Args:
    cycles: Whether to free arrays in reference cycles first, such as arrays of an unused
      engine. This takes up to a second in a large process.
  """
  if _own_memory() < KEPT:
    return
  if cycles:
    gc.collect()
  if platform.libc_ver()[0] == 'glibc':
    ctypes.CDLL(None).malloc_trim(0)


def available_memory() -> int:
  """Returns the bytes that the machine and its control groups let this process use.

  Memory that the process already has counts as available, because freed memory stays in
  the process (`retain_freed_memory`) and is reused.
  """
  own = _own_memory()
  limits = [1024 * n + own for n in _read_fields('/proc/meminfo', 'MemAvailable')]
  for line in _lines(_GROUP):
    _, kinds, name = line.split(':', 2)
    if kinds not in ('', 'memory'):
      continue
    files = 'memory.max', 'memory.current'
    if kinds:  # Version 1 of control groups has a tree for each kind.
      files = 'memory.limit_in_bytes', 'memory.usage_in_bytes'
    # A container sees its own group as the root. The limits of parent groups apply too:
    # for a/b/c, the limits of a/b and a.
    group = pathlib.Path(name.strip('/'))
    for folder in {_GROUPS / kinds / above for above in (group, *group.parents)}:
      limit, current = (_number(folder / file) for file in files)
      if limit is not None and current is not None:
        # The kernel frees cached files when memory is needed.
        cached = sum(_read_fields(folder / 'memory.stat', 'inactive_file'))
        limits.append(max(0, limit - current + cached) + own)
  physical = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  return min([physical, *limits])


def used_memory() -> float:
  """Returns the bytes in use, of this process on a CPU, otherwise of its fullest chip."""
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  return float(max(s.get('bytes_in_use', 0) for s in stats) or _own_memory())


def _own_memory() -> int:
  """Returns the resident bytes of this process."""
  return 1024 * sum(_read_fields('/proc/self/status', 'VmRSS'))


def _number(path: pathlib.Path) -> int | None:
  """Reads the number in a file; None if there is no file or no number."""
  text = ''.join(_lines(path))
  return int(text) if text.isdigit() else None


def _read_fields(path: str | os.PathLike, name: str) -> list[int]:
  """Returns the numbers of a file's lines 'name number' or 'name: number'."""
  lines = (line.replace(':', ' ').split() for line in _lines(path))
  return [int(words[1]) for words in lines if words[:1] == [name]]


def _lines(path: str | os.PathLike) -> list[str]:
  """Returns the lines of a file; none if it cannot be read."""
  try:
    return pathlib.Path(path).read_text().splitlines()
  except OSError:
    return []
