"""What a process is told before JAX first uses a device: compilations, memory."""

import ctypes
import importlib.util
import os
import pathlib
import platform

import jax

# From glibc's malloc.h; see mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_ACCELERATORS = ('jax_cuda12_plugin', 'jax_cuda13_plugin', 'jax_rocm7_plugin', 'libtpu')


def prepare() -> None:
  """Both of what follows; `train.load` calls it, and a script may before that."""
  keep_compilations()
  keep_memory()


def keep_compilations() -> None:
  """Keeps compiled programs on disk for the next process, unless JAX was told where.

  They lie in ~/.cache/agent_r1_jax, or in JAX_COMPILATION_CACHE_DIR; that set to nothing
  turns it off.
  """
  if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
    folder = pathlib.Path(home) / 'agent_r1_jax' / 'compiled'
    jax.config.update('jax_compilation_cache_dir', str(folder))
  if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)


def keep_memory() -> bool:
  """Keeps freed memory in the process; only before JAX's first use of a device.

  XLA allocates all temporaries of a CPU program anew at each call, and glibc gives
  blocks of that size back to the kernel at once: every page is then faulted in and
  zeroed again: on one core a fifth of a training step (docs/performance.md).

  Returns:
    Whether it was done: with glibc, where JAX will use no accelerator.
  """
  if platform.libc_ver()[0] != 'glibc':
    return False
  platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
  if platforms != 'cpu' and any(map(importlib.util.find_spec, _ACCELERATORS)):
    return False
  libc = ctypes.CDLL(None)
  settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1))
  return all([libc.mallopt(*setting) == 1 for setting in settings])
