r"""A shell for an agent, in a workspace of its episode, confined by the kernel.

  session = shell.Shell()
  session.write_files({'names.txt': 'Ada\nBob\n'})
  print(session.run('wc -l < names.txt').text)  # 2
  tool = shell.shell_tool(session)

Each command is a shell of its own, and whatever it started is ended with it. What lasts
from call to call are the files and the directory: a shell that lasted could be hung,
stopped or flooded by what runs beside it, and a call's end would be a guess.

A command may write the workspace and a directory for temporary files, and read the
system's programs. It has no network and no environment of the trainer, sees and signals
no other process, and is bounded in processes, memory, disk, files, output and time. This
needs seccomp, and bubblewrap's namespaces or, where they are missing, Landlock of Linux
6.12; docs/tools.md says which layer does what.
"""

from collections.abc import Mapping
import contextlib
import functools
import itertools
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from typing import Any, NamedTuple
import weakref

from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.agent import tool_schema
from agent_r1_jax.tools import sandbox

# The first is run, and imports the others from its own folder.
_FILES = ('shell_worker.py', 'shell_layers.py', 'sandbox_worker.py')
_FOLDER = pathlib.Path(__file__).parent
_LONGEST = 100_000  # Bytes of a command; the kernel takes 128 KiB as one argument.
_START_SECONDS = 60.0
_END_SECONDS = 10.0
# Beyond a command's own time: for its end, and for what it left.
_GRACE_SECONDS = 30.0
# Where the trainer is root, shells get these users, which no system gives to others.
_USERS = itertools.cycle(range(60_100, 64_900))


class ShellLimits(NamedTuple):
  """What a session may use.

  Attributes:
    processes: Processes and threads at a time.
    memory_mb: MiB of memory of each process, and of all of them.
    disk_mb: MiB of files in the workspace, and of temporary ones.
    files: Files and directories.
    max_output: Bytes of a command's output that are kept; one that prints 256 times as
      much is ended. The chat then cuts it to chat.max_tool_tokens.
  """

  processes: int = 64
  memory_mb: int = 512
  disk_mb: int = 64
  files: int = 20_000
  max_output: int = 32_768


LIMITS = ShellLimits()


class CommandOutput(NamedTuple):
  """The result of a command.

  Attributes:
    text: What it printed, errors among it; cut where it was too long.
    code: Its exit status.
    reason: Why it was ended, in words; empty where it ended by itself.
  """

  text: str
  code: int
  reason: str


class CommandError(ValueError):
  """The agent's command is to blame, not the shell."""


class Shell:
  """The shell of one episode, with a workspace that is empty at first.

  Attributes:
    workspace: The path of the workspace, as commands see it.
  """

  def __init__(self, limits: ShellLimits = LIMITS, *, packages: bool = False):
    """Starts its process, which takes about a tenth of a second.

    Args:
      limits: What commands may use.
      packages: Whether commands find this interpreter first, with the packages that are
        installed for it, such as pytest; they can be read and not written.

    Raises:
      RuntimeError: This machine cannot confine a shell; says what to install.
    """
    self._lock = threading.Lock()
    isolation = _isolate(limits.disk_mb)
    paths = {sysconfig.get_path(kind) for kind in ('purelib', 'platlib')}
    root = '/' if isolation else os.path.realpath(tempfile.mkdtemp(prefix='shell-'))
    process, self._socket = sandbox.start_worker(isolation, _FOLDER / _FILES[0], {})
    self._lines = self._socket.makefile('rw')
    self.close = weakref.finalize(
      self, _end, process, self._socket, self._lines, None if isolation else root
    )
    settings = limits._asdict() | {
      'root': root,
      'namespaces': bool(isolation),
      'user': next(_USERS),
      'packages': sorted(paths) if packages else [],
    }
    self.workspace = os.path.join(root, 'workspace')
    try:
      missing = self._ask(_START_SECONDS, settings)
    except CommandError as error:
      raise RuntimeError('a shell did not start; the reason is printed above') from error
    if missing:
      self.close()
      raise RuntimeError(
        f'a shell cannot be confined on this machine. Missing are {"; ".join(missing)}.'
      )

  def write_files(self, files: Mapping[str, str]) -> None:
    """Writes new files: texts by relative path; what begins with #! can be executed.

    Raises:
      ValueError: A path leads out of the workspace.
    """
    for name in files:
      path = pathlib.PurePosixPath(name)
      if path.is_absolute() or '..' in path.parts or not path.name:
        raise ValueError(f'files: {name!r} is no path below the workspace.')
    self._ask(_GRACE_SECONDS, ['write', dict(files)])

  def run(self, command: str, seconds: float = 10.0) -> CommandOutput:
    """Runs a command within so many seconds of the clock; one at a time.

    Raises:
      CommandError: It is no command, or this one or an earlier has ended the session.
    """
    command = command.encode(errors='replace').decode()
    if '\0' in command or len(command.encode()) > _LONGEST:
      raise CommandError(f'a command has at most {_LONGEST} bytes, and no NUL among them')
    return CommandOutput(*self._ask(seconds + _GRACE_SECONDS, ['run', command, seconds]))

  def read_files(
    self, most_files: int = 2000, most_bytes: int = 1 << 22
  ) -> dict[str, str | None]:
    """Returns the texts of the workspace's files by their relative paths.

    What is no regular file, such as a link, is None; so is a directory, whose name ends
    with a slash. Bytes that are no UTF-8 are surrogates (os.fsencode gives them back).

    Raises:
      CommandError: There are more, or the session has been ended.
    """
    found = self._ask(_GRACE_SECONDS, ['read', most_files, most_bytes])
    if found is None:
      raise CommandError('the workspace holds too much to be read')
    return found

  def _ask(self, seconds: float, request: list | dict) -> Any:
    with self._lock:
      try:
        self._socket.settimeout(seconds)
        print(json.dumps(request), file=self._lines, flush=True)
        return json.loads(self._lines.readline())
      except (OSError, ValueError):
        self.close()
        raise CommandError('the shell has ended; its files are gone') from None


def shell_tool(session: Shell, *, seconds: float = 10.0) -> tool_lib.Tool:
  """Makes a tool `shell(command: str)` that runs commands in a session.

  What a command prints is the tool's text, with its exit status where that is not 0. A
  command that is late or exceeds a limit is an error of the call, which says why. Calls
  of one reply would run in any order: give `ToolEnv` max_parallel_calls=1.

  The session is that of the episode, made in `make_env`; it ends with the tool. A command
  may take so many seconds of the clock.
  """

  def shell(command: str) -> str:
    """Runs a command in a shell and returns what it prints.

    Args:
      command: The command, such as "ls -l". Files and the directory last from call to
        call; programs, variables and functions end with the call.
    """
    output = session.run(command, seconds)
    if output.reason:
      raise CommandError(f'the command was ended: {output.reason}\n{output.text}')
    if output.code:
      line = '' if output.text.endswith('\n') or not output.text else '\n'
      return f'{output.text}{line}[exit status {output.code}]'
    return output.text or '(The command printed nothing.)'

  schema = tool_schema.describe(shell, 'shell')
  return tool_lib.Tool('shell', schema, shell, seconds + _GRACE_SECONDS + _START_SECONDS)


@functools.cache
def _isolate(disk_mb: int) -> list[str]:
  """Returns the command of bubblewrap for a session; empty where there is none."""
  options = ['--unshare-ipc', '--unshare-pid', '--unshare-net', '--unshare-uts']
  # In a namespace of users, root could not take a user of its own (_USERS).
  options = ['--unshare-all'] if os.getuid() else [*options, '--unshare-cgroup-try']
  options += [
    '--as-pid-1',
    '--new-session',
    '--clearenv',
    '--dev',
    '/dev',
    '--proc',
    '/proc',
  ]
  # bubblewrap makes directories above what it shows such that only root may enter them.
  prefixes = (sys.base_prefix, os.path.join(sys.prefix, 'x'))
  above = dict.fromkeys(
    str(p) for f in prefixes for p in [*pathlib.Path(f).parents][::-1]
  )
  for path in ('/etc', *above):
    options += ['--dir', path]
  for path in ('/workspace', '/tmp'):
    options += ['--size', str(disk_mb << 20), '--tmpfs', path]
  found = sandbox.make_namespaces(options, [str(_FOLDER / name) for name in _FILES])
  # What bubblewrap itself made could be written otherwise, and would count nowhere.
  return [*found, '--remount-ro', '/dev', '--remount-ro', '/'] if found else []


def _end(process: subprocess.Popen, there: socket.socket, lines: Any, root: str | None):
  """Ends a session's process, which ends its commands and removes its files.

  The garbage collector may call this in any thread, at any line.
  """
  with contextlib.suppress(OSError):
    there.shutdown(socket.SHUT_RDWR)
  try:
    process.wait(_END_SECONDS)
  except subprocess.TimeoutExpired:
    process.kill()
    process.wait()
  with contextlib.suppress(OSError):  # What was not sent is lost, as it should be.
    lines.close()
  there.close()
  if root:
    shutil.rmtree(root, ignore_errors=True)
