"""What a process is told before JAX first uses a device: others, compilations, memory."""

import ctypes
import importlib.util
import os
import pathlib
import platform
from typing import Any

import jax

# From glibc's malloc.h; see mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_PROCESSES = ('COORDINATOR_ADDRESS', 'NUM_PROCESSES', 'PROCESS_ID')
_ACCELERATORS = ('jax_cuda12_plugin', 'jax_cuda13_plugin', 'jax_rocm7_plugin', 'libtpu')


def prepare() -> None:
  """All of what follows; `train` calls it, and a script may before that."""
  join()
  keep_compilations()
  keep_memory()


def join() -> None:
  """Meets the other processes of this run, if the environment says that there are some.

  JAX_COORDINATOR_ADDRESS (host:port of the first), JAX_NUM_PROCESSES and JAX_PROCESS_ID
  name them; with AGENT_R1_PROCESSES=auto JAX asks Slurm, Open MPI or the TPU's metadata.
  A process that is silent for AGENT_R1_HEARTBEAT_SECONDS (60) is taken for dead, and the
  others end.

  Raises:
    ValueError: Of the three variables some are missing.
  """
  found = {name: os.environ.get(f'JAX_{name}') for name in _PROCESSES}
  auto = os.environ.get('AGENT_R1_PROCESSES') == 'auto'
  if jax.distributed.is_initialized() or not (auto or any(found.values())):
    return
  if missing := [f'JAX_{name}' for name in _PROCESSES if not (auto or found[name])]:
    raise ValueError(f'{" and ".join(missing)} must be set too, to join other processes.')
  # A signal's handler of JAX's own would take SIGTERM from preemption.watch.
  jax.config.update('jax_enable_preemption_service', False)
  address, count, number = found.values()
  given: dict[str, Any] = {}
  if count and number:
    given = {'num_processes': int(count), 'process_id': int(number)}
    # Slurm would be asked all the same, and give each process one device.
    given['cluster_detection_method'] = 'deactivate'
  jax.distributed.initialize(
    address,
    heartbeat_timeout_seconds=int(os.environ.get('AGENT_R1_HEARTBEAT_SECONDS', 60)),
    **given,
  )


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
