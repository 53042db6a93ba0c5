"""The C library's allocator, told to keep what XLA's CPU client frees."""

import ctypes
import importlib.util
import platform

import jax

# From glibc's malloc.h; see mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_ACCELERATORS = ('jax_cuda12_plugin', 'jax_cuda13_plugin', 'jax_rocm7_plugin', 'libtpu')


def keep() -> bool:
  """Keeps freed memory in the process; call it before the first use of a JAX device.

  XLA allocates all temporaries of a CPU program anew at each call, and glibc gives
  blocks of that size back to the kernel at once: every page is then faulted in and
  zeroed again, a fifth of a training step (docs/performance.md).

  Returns:
    Whether it was done: with glibc only, and where JAX will use no accelerator.
  """
  if platform.libc_ver()[0] != 'glibc':
    return False
  platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
  if platforms != 'cpu' and any(map(importlib.util.find_spec, _ACCELERATORS)):
    return False
  libc = ctypes.CDLL(None)
  settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1))
  return all([libc.mallopt(*setting) == 1 for setting in settings])
