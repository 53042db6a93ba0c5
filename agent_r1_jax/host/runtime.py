"""Sets up a process: its connection to others, the compilation cache, malloc, logging."""

import ctypes
import functools
import gc
import importlib.util
import ipaddress
import logging as py_logging
import os
import pathlib
import platform
import socket
import subprocess
import threading
from typing import Any

from absl import flags, logging
import jax

import agent_r1_jax
from agent_r1_jax.host import processes, terminal, watchdog

# From glibc's malloc.h; see mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_PROCESSES = ('COORDINATOR_ADDRESS', 'NUM_PROCESSES', 'PROCESS_ID')
# What is said of a start that takes longer, while JAX connects the processes.
_NAMED_SECONDS = 15.0
_WAITS = (
  'waiting for the other processes of the run to connect. If one has ended already, such '
  'as for a wrong flag, its own standard error says why: end all, and start them again.'
)
# Where Linux lists the control groups of a process, and where their limits are.
_GROUP, _GROUPS = pathlib.Path('/proc/self/cgroup'), pathlib.Path('/sys/fs/cgroup')
# A process with fewer resident bytes keeps what it frees (release_freed_memory).
KEPT = 2e9
_ACCELERATORS = ('jax_cuda12_plugin', 'jax_cuda13_plugin', 'jax_rocm7_plugin', 'libtpu')


def initialize() -> None:
  """Connects processes, and sets up the compilation cache and memory.

  `train` calls it, and a script may call it before that.
  """
  # JAX must not abort the others when a process is lost: `watch_others` ends them.
  jax.config.update('jax_enable_recoverability', True)
  join_processes()
  processes.watch_others()
  enable_compilation_cache()
  retain_freed_memory()
  try:
    jax.devices()
  except (RuntimeError, AssertionError) as error:
    platforms = os.environ.get('JAX_PLATFORMS', '')
    raise ValueError(
      f'JAX finds no device of JAX_PLATFORMS={platforms}: install its '
      "build for this machine (pip install 'agent_r1_jax[cuda]' or [tpu]), or unset "
      f'JAX_PLATFORMS. {error}'
    ) from None


def describe_devices() -> str:
  """Returns the number and kind of a run's devices, and the number of its processes."""
  kind = jax.devices()[0].device_kind
  return f'{jax.device_count()} x {kind}, processes: {jax.process_count()}'


@functools.cache
def describe_version() -> str:
  """Returns the package's version and, if it runs in a checkout, the commit."""
  version = agent_r1_jax.__version__
  checkout = pathlib.Path(agent_r1_jax.__file__).resolve().parents[1]
  if not (checkout / '.git').exists():
    return version
  # Without a lock: somebody may be working in the checkout.
  command = ['git', '--no-optional-locks', '-C', str(checkout)]
  command += ['describe', '--always', '--dirty', '--abbrev=12', '--exclude=*']
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=5)
  except (OSError, subprocess.TimeoutExpired):
    return version
  commit = done.stdout.strip()
  return f'{version}, commit {commit}' if commit else version


def quiet_logging() -> None:
  """Drops INFO lines of installed libraries, and tracebacks of refused input.

  The user's own lines and all warnings stay. It also sets sys.excepthook, so that an
  error which refuses a user's input ends the program with its text alone.
  With --verbosity, all lines stay. In any case no log record, warning or error that ends
  the program can control the terminal (terminal.py).
  """
  terminal.install()
  parsed = flags.FLAGS.is_parsed() and 'verbosity' in flags.FLAGS
  if parsed and flags.FLAGS['verbosity'].present:
    return
  # Adding a filter twice has no effect. JAX does not log through absl.
  logging.get_absl_logger().addFilter(_is_worth_showing)
  for name in ('jax', 'faiss', 'httpx', 'httpx2'):
    py_logging.getLogger(name).setLevel(py_logging.WARNING)


def _is_worth_showing(record: py_logging.LogRecord) -> bool:
  installed = not {'site-packages', 'dist-packages'}.isdisjoint(
    pathlib.Path(record.pathname).parts
  )
  return record.levelno >= py_logging.WARNING or not installed


def join_processes() -> None:
  """Connects to the other processes of this run, if environment variables name them.

  These are JAX_COORDINATOR_ADDRESS (host:port of the first process), JAX_NUM_PROCESSES
  and JAX_PROCESS_ID; with AGENT_R1_PROCESSES=auto JAX asks Slurm, Open MPI or the TPU's
  metadata. A process that is silent for AGENT_R1_HEARTBEAT_SECONDS (60) counts as dead,
  and the others end.

  The first process listens at the coordinator's address only. It listens at all its
  addresses, as JAX does by default, if the address is a name that other machines resolve
  to another one (a service, or a machine that calls itself 127.0.1.1), and with
  AGENT_R1_PROCESSES=auto, where only JAX knows the address. JAX_COORDINATOR_BIND_ADDRESS
  (host:port) overrides both. Whoever can connect to the address can take part in the run:
  it must not be reachable from outside.

  Raises:
    ValueError: Some of the three variables are missing or wrong.
  """
  variables = {name: os.environ.get(f'JAX_{name}') for name in _PROCESSES}
  auto = os.environ.get('AGENT_R1_PROCESSES') == 'auto'
  if jax.distributed.is_initialized() or not (auto or any(variables.values())):
    return
  if missing := [f'JAX_{name}' for name in _PROCESSES if not (auto or variables[name])]:
    raise ValueError(f'{" and ".join(missing)} must be set too, to join other processes.')
  # JAX's own signal handler would replace that of preemption.watch.
  jax.config.update('jax_enable_preemption_service', False)
  address, count, number = variables.values()
  options: dict[str, Any] = {}
  if count and number:
    if not (count.isdecimal() and number.isdecimal() and int(number) < int(count)):
      raise ValueError(
        f'JAX_PROCESS_ID is {number} and JAX_NUM_PROCESSES {count}; the processes are '
        'numbered from 0 to their number less 1.'
      )
    options = {'num_processes': int(count), 'process_id': int(number)}
    # Otherwise JAX asks Slurm all the same, and gives each process one device.
    options['cluster_detection_method'] = 'deactivate'
    if number == '0' and 'JAX_COORDINATOR_BIND_ADDRESS' not in os.environ:
      options['coordinator_bind_address'] = _bind_address(address or '')
  # One whose flags are refused ends before it is here, and JAX waits for it in silence.
  waits = threading.Timer(_NAMED_SECONDS, watchdog.print_line, [_WAITS])
  waits.daemon = True
  waits.start()
  try:
    jax.distributed.initialize(
      address, heartbeat_timeout_seconds=processes.heartbeat_seconds(), **options
    )
  finally:
    waits.cancel()


def _bind_address(coordinator: str) -> str | None:
  """Returns the address at which the first process listens.

  `coordinator` is the address (host:port) to which the others connect.

  Returns:
    host:port in numbers; None, for all addresses, if the host is no address of this
    machine, or if other machines resolve it to another address.
  """
  host, _, port = coordinator.rpartition(':')
  host = host.strip('[]')
  try:
    family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
      probe.bind((address[0], 0, *address[2:]))
  except OSError:
    return None  # The address of a service or router, which forwards to this machine.
  number = str(address[0])
  # On other machines, a name of this machine's loopback has another address.
  if ipaddress.ip_address(number).is_loopback and host not in ('localhost', number):
    return None
  return f'[{number}]:{port}' if family == socket.AF_INET6 else f'{number}:{port}'


def enable_compilation_cache() -> None:
  """Sets JAX's persistent compilation cache to a folder in ~/.cache/agent_r1_jax.

  JAX_COMPILATION_CACHE_DIR names another folder; if it is empty, there is no cache.
  """
  if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
    folder = pathlib.Path(home) / 'agent_r1_jax' / 'compiled'
    jax.config.update('jax_compilation_cache_dir', str(folder))
  if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)


def retain_freed_memory() -> bool:
  """Makes malloc keep freed memory; call it before the first thread starts.

  XLA allocates all temporaries of a CPU program anew at each call, and glibc returns
  blocks of that size to the kernel at once. Faulting in and zeroing the pages again takes
  a fifth of a training step on one core (docs/results/performance.md).

  A thread that allocates before the call has an arena of its own, in which no block is
  larger than 64 MB, and glibc assigns it to some later threads too, such as XLA's.

  Returns:
    Whether malloc was set; this needs glibc, and a JAX that uses no accelerator.
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

  `retain_freed_memory` keeps it, and where a phase frees large blocks between small ones
  that stay, the next phase's blocks do not fit the gaps: the process grows. One with less
  than KEPT bytes keeps everything: its phases are short, and faulting pages in again
  would take a part of them.

  Args:
    cycles: Whether arrays in reference cycles, such as those of an engine that is no
      longer used, are freed first. That takes up to a second in a large process.
  """
  if _own_memory() < KEPT:
    return
  if cycles:
    gc.collect()
  if platform.libc_ver()[0] == 'glibc':
    ctypes.CDLL(None).malloc_trim(0)


def available_memory() -> int:
  """Returns the bytes that the machine and its control groups let this process use.

  Memory that the process uses already counts as available: freed memory stays in the
  process (`retain_freed_memory`), and is used again.
  """
  own = _own_memory()
  limits = [1024 * n + own for n in _read_fields('/proc/meminfo', 'MemAvailable')]
  for line in _lines(_GROUP):
    _, kinds, name = line.split(':', 2)
    if kinds not in ('', 'memory'):
      continue
    files = 'memory.max', 'memory.current'
    if kinds:  # The first version of control groups has a tree for each kind.
      files = 'memory.limit_in_bytes', 'memory.usage_in_bytes'
    # A container sees its own group as the root. The limits of all groups above a group
    # hold too: for a/b/c those of a/b and a.
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
  """Returns the bytes in use: this process's on a CPU, else those of its fullest chip."""
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  return float(max(s.get('bytes_in_use', 0) for s in stats) or _own_memory())


def _own_memory() -> int:
  """Returns the resident bytes of this process."""
  return 1024 * sum(_read_fields('/proc/self/status', 'VmRSS'))


def _number(path: pathlib.Path) -> int | None:
  """Reads the number in a file; None if there is no file or no number in it."""
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
