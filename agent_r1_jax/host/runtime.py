"""Sets up a process: connection to other processes, compilation cache, logging."""

import functools
import ipaddress
import logging as py_logging
import os
import pathlib
import socket
import subprocess
import threading
from typing import Any

from absl import flags, logging
import jax

import agent_r1_jax
from agent_r1_jax.host import memory, processes, terminal, watchdog

_PROCESSES = ('COORDINATOR_ADDRESS', 'NUM_PROCESSES', 'PROCESS_ID')
# The message of a start in which JAX takes longer to connect the processes.
_NAMED_SECONDS = 15.0
_WAITS = (
  'waiting for the other processes of the run to connect. If one has ended already, such '
  'as for a wrong flag, its own standard error says why: end all, and start them again.'
)


def initialize() -> None:
  """Connects processes, and sets up the compilation cache and memory.

  `train` calls it, and a script may call it before that.
  """
  # JAX must not abort the others when a process is lost; `watch_others` ends them.
  jax.config.update('jax_enable_recoverability', True)
  join_processes()
  processes.watch_others()
  enable_compilation_cache()
  memory.retain_freed_memory()
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
  """Describes the number and kind of a run's devices, and the number of processes."""
  kind = jax.devices()[0].device_kind
  return f'{jax.device_count()} x {kind}, processes: {jax.process_count()}'


@functools.cache
def describe_version() -> str:
  """Returns the package's version and, in a checkout, the commit."""
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
  """Drops INFO lines of installed libraries, and tracebacks of rejected input.

  The user's own lines and all warnings stay. It also sets sys.excepthook, so that an
  error that rejects a user's input ends the program with only its message. With
  --verbosity, all lines stay. Log records, warnings and fatal errors can never control
  the terminal (terminal.py).
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

  The variables are JAX_COORDINATOR_ADDRESS (host:port of the first process),
  JAX_NUM_PROCESSES and JAX_PROCESS_ID; with AGENT_R1_PROCESSES=auto JAX asks Slurm, Open
  MPI or the TPU's metadata. A process that is silent for AGENT_R1_HEARTBEAT_SECONDS (60)
  counts as dead, and the others end.

  The first process listens only at the coordinator's address. It listens at all its
  addresses, like JAX by default, if other machines resolve the coordinator's name to
  another address (a service, or a machine that calls itself 127.0.1.1), and with
  AGENT_R1_PROCESSES=auto, where only JAX knows the address. JAX_COORDINATOR_BIND_ADDRESS
  (host:port) overrides both. Anyone who can connect to the address can take part in the
  run, so it must not be reachable from outside.

  Raises:
    ValueError: Some of the three variables are missing or wrong.
  """
  variables = {name: os.environ.get(f'JAX_{name}') for name in _PROCESSES}
  auto = os.environ.get('AGENT_R1_PROCESSES') == 'auto'
  if jax.distributed.is_initialized() or not (auto or any(variables.values())):
    return
  if missing := [f'JAX_{name}' for name in _PROCESSES if not (auto or variables[name])]:
    raise ValueError(f'{" and ".join(missing)} must be set too, to join other processes.')
  # JAX's signal handler would replace the one of preemption.watch.
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
    # Otherwise JAX asks Slurm anyway, and gives each process one device.
    options['cluster_detection_method'] = 'deactivate'
    if number == '0' and 'JAX_COORDINATOR_BIND_ADDRESS' not in os.environ:
      options['coordinator_bind_address'] = _bind_address(address or '')
  # A process with rejected flags ends before this point, and JAX waits for it silently.
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
    host:port in numbers; None, for all addresses, if this machine does not have the
    host's address, or other machines resolve the host to another address.
  """
  host, _, port = coordinator.rpartition(':')
  host = host.strip('[]')
  try:
    family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
      probe.bind((address[0], 0, *address[2:]))
  except OSError:
    return None  # The address of a service or router that forwards to this machine.
  number = str(address[0])
  # Other machines resolve a name of this machine's loopback to another address.
  if ipaddress.ip_address(number).is_loopback and host not in ('localhost', number):
    return None
  return f'[{number}]:{port}' if family == socket.AF_INET6 else f'{number}:{port}'


def enable_compilation_cache() -> None:
  """Sets JAX's persistent compilation cache to a folder in ~/.cache/agent_r1_jax.

  JAX_COMPILATION_CACHE_DIR names another folder; an empty value disables the cache.
  """
  if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
    folder = pathlib.Path(home) / 'agent_r1_jax' / 'compiled'
    jax.config.update('jax_compilation_cache_dir', str(folder))
  if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
