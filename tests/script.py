"""Experiments as their users start them, in processes of their own."""

from collections.abc import Sequence
import contextlib
import functools
import json
import os
import pathlib
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]


def one_program(slots: int) -> tuple[str, ...]:
  """Flags of a run with one program to decode and one to prefill: most time is theirs."""
  sizes = {'slots': slots, 'bucket': slots, 'narrow': False, 'replicas': 1}
  return tuple(f'--config.engine.{name}={value}' for name, value in sizes.items())


# Small sizes for runs of miniwiki, with one program to decode and one to prefill.
QUICKSTART = {
  'engine.rows': 8,
  'engine.slots': 448,
  'engine.decode_steps': 16,
  'engine.prefill_rows': 8,
  'engine.prefill_tokens': 32,
  'engine.bucket': 448,
  'engine.narrow': False,
  'engine.replicas': 1,
  'batch.row_tokens': 448,
  'batch.microbatch': 4,
}


def config_flags(fields: dict[str, object]) -> list[str]:
  return [f'--config.{name}={value}' for name, value in fields.items()]


# The address of the process of forks.py, which the workers of the tests share.
_FORKS = 'AGENT_R1_TEST_FORKS'


@functools.cache
def start_forks() -> tuple[subprocess.Popen, socket.socket]:
  """Starts the process of forks.py; it ends when this socket and the workers' close."""
  os.environ[_FORKS] = f'agent_r1_jax.{os.getpid()}'
  with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.bind(_address())
    server.listen()
    command = [sys.executable, str(ROOT / 'tests' / 'forks.py'), str(server.fileno())]
    environment = os.environ | {'PYTHONPATH': str(ROOT)}
    # Its errors are those of its start: what it forks writes elsewhere.
    process = subprocess.Popen(
      command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[server.fileno()]
    )
    return process, _connect()


def _address() -> str:
  return f'\0{os.environ[_FORKS]}'  # No file: it is gone with the process.


def _connect() -> socket.socket:
  requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
  requests.connect(_address())
  return requests


@functools.cache
def _requests() -> socket.socket:
  return _connect() if _FORKS in os.environ else start_forks()[1]


def end_forks():
  """Ends the process of forks.py if it is this one's, so that its time is counted."""
  if _requests.cache_info().currsize:
    _requests().close()
  if start_forks.cache_info().currsize:
    process, requests = start_forks()
    requests.close()
    try:
      process.wait(60)
    finally:
      process.kill()


def write_python(path: pathlib.Path) -> str:
  """Writes a program that is as `python`, without the cost of its start; its path.

  For what starts programs itself, such as a launcher.
  """
  _requests()  # The process of forks.py is there.
  command = [sys.executable, '-I', '-S', str(ROOT / 'tests' / 'forked.py')]
  path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} {os.environ[_FORKS]} "$@"\n')
  path.chmod(0o755)
  return str(path)


class Process:
  """`python ...` without the cost of its start (see forks.py), as a subprocess.Popen.

  What it prints goes to the files; without one, `stdout` is a pipe to read from, and
  errors go where those of the tests go.
  """

  def __init__(self, *command, stdout=None, stderr=None, cwd=ROOT, **environment: str):
    variables = os.environ | {'PYTHONPATH': str(ROOT)} | environment
    request = json.dumps([[*map(str, command)], str(cwd), variables])
    (said, report), (read, write) = os.pipe(), os.pipe()
    self._said, self.stdout = os.fdopen(said), os.fdopen(read)
    files = [x.fileno() if x else y for x, y in ((stdout, write), (stderr, 2))]
    socket.send_fds(_requests(), [request.encode()], [*files, report])
    os.close(report)
    os.close(write)
    self.pid, self.returncode = int(self._said.readline()), None

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.kill()

  def poll(self) -> int | None:
    if self.returncode is None and select.select([self._said], [], [], 0)[0]:
      self.returncode = int(self._said.readline())
    return self.returncode

  def wait(self, timeout: float) -> int:
    """Returns the exit status.

    Raises:
      subprocess.TimeoutExpired: It has not ended by then.
    """
    if self.returncode is None:
      select.select([self._said], [], [], timeout)
    if self.poll() is None:
      raise subprocess.TimeoutExpired('python', timeout)
    return self.returncode

  def send_signal(self, number: int):
    if self.poll() is None:
      # It may have ended since, and its status not have arrived.
      with contextlib.suppress(ProcessLookupError):
        os.kill(self.pid, number)

  def kill(self):
    """Ends it if it has not ended, and closes its files."""
    self.send_signal(signal.SIGKILL)
    if self.returncode is None:
      self.wait(60)
    self._said.close()
    self.stdout.close()


def run(
  *command: str, timeout: float = 900.0, cwd: pathlib.Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
  """`python ...` with this checkout's packages."""
  with tempfile.TemporaryFile('w+') as out, tempfile.TemporaryFile('w+') as err:
    with Process(*command, stdout=out, stderr=err, cwd=cwd, **environment) as process:
      status = process.wait(timeout)
    out.seek(0)
    err.seek(0)
    return subprocess.CompletedProcess(command, status, out.read(), err.read())


def run_in_turn(
  module: str, *commands: Sequence[str], **environment: str
) -> list[subprocess.CompletedProcess[str]]:
  """`python -m module ...` with each command's flags, in one process (in_turn.py)."""
  given = json.dumps([[*map(str, command)] for command in commands])
  done = run(str(ROOT / 'tests' / 'in_turn.py'), module, given, **environment)
  said = [re.split(r'\0(\d+)\n', text) for text in (done.stdout, done.stderr)]
  assert [len(parts) for parts in said] == [2 * len(commands) + 1] * 2, done.stderr
  return [
    subprocess.CompletedProcess(command, int(status), out, err)
    for command, (out, err), status in zip(
      commands, zip(*(parts[:-1:2] for parts in said)), said[0][1::2]
    )
  ]
