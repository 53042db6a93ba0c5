"""Runs model-written Python, confined by the kernel.

  box = sandbox.Sandbox()
  with box.open_session() as session:
    print(session.run('x = 6 * 7').text)
    print(session.run('x').text)  # 42

One worker process, a fresh interpreter with an empty environment, forks an interpreter
for each session, which takes a few milliseconds. The fork is confined by resource limits,
Landlock and seccomp (sandbox_worker.confine): it can read the interpreter's own files and
nothing else, write no file, use no network, start no process and signal no one. If
`bwrap` (bubblewrap) is installed and allowed, the worker also has its own namespaces,
without any other files; otherwise `stat` reveals which files exist, and their sizes.
"""

from collections.abc import Mapping, Sequence
from concurrent import futures
import contextlib
import importlib.util
import json
import math
import os
import pathlib
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import NamedTuple, Self
import weakref

LAYERS = ('landlock', 'seccomp')
_WORKER = pathlib.Path(__file__).with_name('sandbox_worker.py')
# What namespaces show of the system besides the interpreter: programs, libraries, and how
# the linker finds them. Everything else, such as homes and data, is absent.
_SYSTEM = ('/usr', '/bin', '/sbin', '/lib', '/lib64')
_LINKER = ('/etc/ld.so.cache', '/etc/alternatives')
_SECCOMP = 'pyseccomp'  # The module that the worker imports for this layer.
# A program that fails unless all the modules in its arguments exist.
_FIND = (
  'import sys, importlib.util as u\nsys.exit(None in map(u.find_spec, sys.argv[1:]))'
)
_START_SECONDS = 60.0
_PROBE_SECONDS = 10.0
_LONGEST_SECONDS = 1e6  # Of a cell.
# The kernel kills bubblewrap with the thread that started it, so this thread never ends.
_STARTER = futures.ThreadPoolExecutor(1, 'sandbox-starter')


class CodeOutput(NamedTuple):
  """The result of a cell.

  Attributes:
    text: What it printed, tracebacks included; cut if it was too long.
    status: 'ok'; 'error' if it raised; 'timeout'; 'output' if it printed far too much;
      'ended' if its interpreter ended, such as by os._exit or a crash.
    seconds: The seconds it took.
  """

  text: str
  status: str
  seconds: float


class Sandbox:
  """A worker process that starts confined interpreters; it is thread-safe."""

  def __init__(
    self,
    *,
    memory_mb: int = 512,
    max_output: int = 20_000,
    preload: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
  ):
    """Starts the worker.

    Args:
      memory_mb: MiB that a session may allocate.
      max_output: Maximum bytes of a cell's output; a cell that prints sixteen times as
        much is ended.
      preload: Modules to import once, before any session, such as 'numpy'.
      without: Layers of confinement (LAYERS) to waive if the machine lacks them.

    Raises:
      RuntimeError: The machine lacks a layer that is not waived; says which, and what it
        needs.
    """
    if unknown := set(without) - {*LAYERS}:
      raise ValueError(f'without: {sorted(unknown)} are no layers; there are {LAYERS}.')
    self._limits = {'memory': memory_mb << 20, 'without': [*without]}
    self._preload, self.max_output = preload, max_output
    self._lock, self._closed = threading.Lock(), False
    self._start()

  def _start(self) -> None:
    """Starts the worker; raises if the machine cannot confine it."""
    # Keeps numpy from starting a thread per core in each interpreter.
    variables = {'OPENBLAS_NUM_THREADS': '1', 'OMP_NUM_THREADS': '1'}
    process, self._socket = start_worker(
      _isolate(self._preload), _WORKER, variables, kind=socket.SOCK_SEQPACKET
    )
    self._socket.settimeout(_START_SECONDS)
    self._end_worker = weakref.finalize(self, _end, process, self._socket)
    try:
      missing = self._ask({'preload': [*self._preload]})['missing']
    except (OSError, ValueError) as error:
      self._end_worker()
      raise RuntimeError(
        'the worker of the sandbox did not start, for the reason that is printed above; '
        f'it imports {[*self._preload]} first (preload)'
      ) from error
    waived = self._limits['without']
    missing = [text for text in missing if text.partition(':')[0] not in waived]
    if missing:
      self._end_worker()
      raise RuntimeError(
        'untrusted code cannot be confined on this machine. Missing are '
        f'{"; ".join(missing)}. To run it all the same, with less protection, name the '
        'layer: Sandbox(without=(...,)).'
      )

  def close(self) -> None:
    """Ends the worker and all interpreters, for good."""
    self._closed = True
    self._end_worker()

  def open_session(self) -> 'Interpreter':
    """Starts an interpreter, whose variables persist until it is closed.

    Raises:
      RuntimeError: The sandbox is closed, or the worker cannot be restarted.
    """
    return Interpreter(self)

  def run(self, code: str, seconds: float = 10.0) -> CodeOutput:
    """Runs code in an interpreter of its own."""
    with self.open_session() as session:
      return session.run(code, seconds)

  def _fork(self, descriptors: list[int]) -> tuple[socket.socket, int]:
    """Forks an interpreter; returns the worker's socket and the fork's process id."""
    request = {'fork': self._limits}
    with self._lock:
      try:
        return self._socket, self._ask(request, descriptors)['pid']
      except (OSError, ValueError):
        if self._closed:
          raise RuntimeError('the sandbox was closed; make another one.') from None
        self._end_worker()  # It has ended or does not answer: replace it.
        self._start()
        return self._socket, self._ask(request, descriptors)['pid']

  def _ask(self, request: dict, descriptors: Sequence[int] = ()) -> dict:
    socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
    return json.loads(self._socket.recv(1 << 16))


class Interpreter:
  """One confined interpreter; not thread-safe."""

  def __init__(self, box: Sandbox):
    """Forks the interpreter."""
    self._box = box
    code_end, self._code = os.pipe()
    self._output, output_end = os.pipe()
    self._done, done_end = os.pipe()
    worker_ends = [code_end, output_end, done_end]
    own_ends = (self._code, self._output, self._done)
    try:
      worker, pid = box._fork(worker_ends)
    except BaseException:
      _close_all(own_ends)
      raise
    finally:
      _close_all(worker_ends)
    # The interpreter can reopen these pipes, and consume what `poll` announced here.
    for descriptor in own_ends:
      os.set_blocking(descriptor, False)
    self.close = weakref.finalize(self, _close_session, worker, pid, own_ends)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error) -> None:
    self.close()

  def run(self, code: str, seconds: float = 10.0) -> CodeOutput:
    """Runs a cell of code; any status except 'ok' and 'error' closes the session.

    `seconds` limit the wall time; the value of a last expression is printed, as in a
    notebook.
    """
    if not self.close.alive:
      return CodeOutput('', 'ended', 0.0)
    start = time.monotonic()
    data = code.encode(errors='replace')
    data = struct.pack('>I', len(data)) + data
    text, status = self._exchange(data, start + min(seconds, _LONGEST_SECONDS))
    if status not in ('ok', 'error'):
      self.close()
    shown_text = text[: self._box.max_output].decode(errors='replace')
    if len(text) > self._box.max_output:
      shown_text += '\n... (the rest of the output is cut)'
    return CodeOutput(shown_text, status, time.monotonic() - start)

  def _exchange(self, data: bytes, deadline: float) -> tuple[bytes, str]:
    """Sends a cell, and reads output until it is done; returns (output, status)."""
    text, status = bytearray(), ''
    poll = select.poll()  # `select` only accepts descriptors below 1,024.
    for descriptor in (self._output, self._done):
      poll.register(descriptor, select.POLLIN)
    poll.register(self._code, select.POLLOUT)
    while (left := deadline - time.monotonic()) > 0:
      # Once the cell is done, read only what it has already printed.
      wait = 0 if status else math.ceil(left * 1000)
      ready = {descriptor for descriptor, _ in poll.poll(wait)}
      if data and self._code in ready:
        try:
          data = data[os.write(self._code, data) :]
        except BlockingIOError:
          pass
        except BrokenPipeError:
          return bytes(text), 'ended'
        if not data:
          poll.unregister(self._code)
      if self._done in ready and (word := _read(self._done, 1)) is not None:
        # With data left the worker has not read the cell, and cannot have sent this.
        known = {} if data else {b'0': 'ok', b'1': 'error'}
        status = known.get(word, 'ended')
        poll.unregister(self._done)
      elif self._output in ready:
        piece = _read(self._output, 1 << 16)
        text += piece or b''
        if piece == b'':
          return bytes(text), status or 'ended'
        if len(text) > 16 * self._box.max_output:
          return bytes(text), 'output'
      elif status:
        return bytes(text), status
    return bytes(text), 'timeout'


def start_worker(
  isolation: Sequence[str],
  script: pathlib.Path,
  variables: Mapping[str, str],
  kind: socket.SocketKind = socket.SOCK_STREAM,
) -> tuple[subprocess.Popen, socket.socket]:
  """Starts a script, prefixed by `isolation` (bubblewrap's command), and its socket.

  Of the trainer's environment, which holds API keys, it gets only `variables`.
  """
  here, there = socket.socketpair(socket.AF_UNIX, kind)
  command = [*isolation, sys.executable, '-I', str(script), str(there.fileno())]
  with there:
    process = _STARTER.submit(
      subprocess.Popen,
      command,
      env={'LANG': 'C.UTF-8', **variables},
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      cwd='/',
      pass_fds=[there.fileno()],
      start_new_session=True,
    ).result()
  return process, here


def _isolate(preload: Sequence[str] = ()) -> list[str]:
  """Returns the command that gives the worker namespaces; empty if unavailable."""
  options = ['--unshare-all', '--dev', '/dev', '--proc', '/proc', '--tmpfs', '/tmp']
  return make_namespaces(options, [str(_WORKER)], preload)


def make_namespaces(
  options: Sequence[str], files: Sequence[str], modules: Sequence[str] = ()
) -> list[str]:
  """Returns a bubblewrap command that shows nothing but the system.

  It is empty if bubblewrap is missing or not allowed, or if the namespaces would hide a
  module that the worker imports.

  Args:
    options: Options of bwrap, before those that show the system.
    files: Further paths to show, read-only.
    modules: Names of modules that the worker imports.
  """
  program = shutil.which('bwrap')
  if not program:
    return []
  command = [program, '--die-with-parent', *options]
  needed = [*modules]
  if importlib.util.find_spec(_SECCOMP):  # Else its layer is missing either way.
    needed.append(_SECCOMP)
  prefixes = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)}
  # Parents first: a later mount covers an earlier one below it.
  for path in (*_SYSTEM, *_LINKER, *sorted(prefixes), *files):
    command += ['--ro-bind-try', path, path]
  try:
    probe = [*command, sys.executable, '-I', '-c', _FIND, *needed]
    subprocess.run(probe, env={}, capture_output=True, timeout=_PROBE_SECONDS, check=True)
  except (OSError, subprocess.SubprocessError):
    return []
  return command


def _end(process: subprocess.Popen, there: socket.socket) -> None:
  """Ends the worker; the kernel then kills the interpreters it forked."""
  there.close()
  process.kill()
  process.wait()


def _close_session(worker: socket.socket, pid: int, descriptors: tuple[int, ...]) -> None:
  """Makes the worker kill an interpreter.

  The garbage collector may call this in any thread, at any line: even in a thread that
  holds the lock and awaits an answer. So this takes no lock and awaits no answer.
  """
  _close_all(descriptors)
  # If the worker has ended, so has the interpreter; a new worker has its own process ids.
  with contextlib.suppress(OSError):
    worker.send(json.dumps({'kill': pid}).encode())


def _read(descriptor: int, size: int) -> bytes | None:
  """Reads without blocking; None if there is nothing yet, b'' at the end."""
  try:
    return os.read(descriptor, size)
  except BlockingIOError:
    return None


def _close_all(descriptors: Sequence[int]) -> None:
  for descriptor in descriptors:
    os.close(descriptor)
