r"""A shell for an agent, in a workspace of its episode, confined by the kernel.

  session = shell.Shell()
  session.write_files({'names.txt': 'Ada\nBob\n'})
  print(session.run('wc -l < names.txt').text)  # 2
  tool = shell.shell_tool(session)

Each command is a shell of its own, and everything it started ends with it. Only files and
the directory persist between calls: a shell that persisted could be hung, stopped or
flooded by its background processes, and the end of a call would be a guess.

A command may write the workspace and a directory for temporary files, and read the
system's programs. It has no network and no environment of the trainer, cannot see or
signal other processes, and is limited in processes, memory, disk, files, output and time.
This needs seccomp, and bubblewrap's namespaces or, without them, Landlock of Linux 6.12;
docs/tools.md says which layer does what.
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

# The first is run, and imports the others from its folder.
_FILES = ('shell_worker.py', 'shell_layers.py', 'sandbox_worker.py')
_FOLDER = pathlib.Path(__file__).parent
_LONGEST = 100_000  # Bytes of a command; the kernel takes 128 KiB as one argument.
_START_SECONDS = 60.0
_END_SECONDS = 10.0
# Allowed beyond a command's own time limit, for ending it and cleaning up.
_GRACE_SECONDS = 30.0
# If the trainer is root, shells get these users, which no system gives to others.
_USERS = itertools.cycle(range(60_100, 64_900))


class ShellLimits(NamedTuple):
  """The resource limits of a session.

  Attributes:
    processes: Concurrent processes and threads.
    memory_mb: MiB of memory, for each process and for all of them together.
    disk_mb: MiB of files in the workspace, and of temporary files.
    files: Files and directories.
    max_output: Maximum bytes of a command's output; one that prints 256 times as much is
      ended. The chat then cuts it to chat.max_tool_tokens.
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
    text: Its output, errors included; cut if it was too long.
    code: Its exit status.
    reason: Why it was ended, in words; empty if it ended by itself.
  """

  text: str
  code: int
  reason: str


class CommandError(ValueError):
  """The fault is in the agent's command, not in the shell."""


class Shell:
  """The shell of one episode, with a workspace that is empty at first.

  Attributes:
    workspace: The path of the workspace, as commands see it.
  """

  def __init__(self, limits: ShellLimits = LIMITS, *, packages: bool = False):
    """Starts its process, which takes about a tenth of a second.

    Args:
      limits: The resource limits of commands.
      packages: Whether commands find this interpreter first, with its installed packages,
        such as pytest, read-only.

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
    """Writes new files: texts by relative path; texts with #! become executable.

    Raises:
      ValueError: A path leads out of the workspace.
    """
    for name in files:
      path = pathlib.PurePosixPath(name)
      if path.is_absolute() or '..' in path.parts or not path.name:
        raise ValueError(f'files: {name!r} is no path below the workspace.')
    self._ask(_GRACE_SECONDS, ['write', dict(files)])

  def run(self, command: str, seconds: float = 10.0) -> CommandOutput:
    """Runs a command, limited to `seconds` of wall time; one at a time.

    Raises:
      CommandError: The command is invalid, or it or an earlier one ended the session.
    """
    command = command.encode(errors='replace').decode()
    if '\0' in command or len(command.encode()) > _LONGEST:
      raise CommandError(f'a command has at most {_LONGEST} bytes, and no NUL among them')
    return CommandOutput(*self._ask(seconds + _GRACE_SECONDS, ['run', command, seconds]))

  def read_files(
    self, most_files: int = 2000, most_bytes: int = 1 << 22
  ) -> dict[str, str | None]:
    """Returns the texts of the workspace's files by their relative paths.

    Links and other special files are None; so are directories, whose names end with a
    slash. Bytes that are not UTF-8 become surrogates (os.fsencode restores them).

    Raises:
      CommandError: There are more files or bytes, or the session has ended.
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

  The tool's text is the command's output, with its exit status if that is not 0. A
  command that times out or exceeds a limit is an error of the call, which says why. Calls
  of one reply would run in any order: set max_parallel_calls=1 in `ToolEnv`.

  Make the session in `make_env`, one per episode; it ends with the tool. `seconds` limit
  a command's wall time.
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
  """Returns a session's bubblewrap command; empty if unavailable."""
  options = ['--unshare-ipc', '--unshare-pid', '--unshare-net', '--unshare-uts']
  # In a user namespace, root could not switch to one of _USERS.
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
  # bubblewrap makes parent directories that only root may enter.
  prefixes = (sys.base_prefix, os.path.join(sys.prefix, 'x'))
  above = dict.fromkeys(
    str(p) for f in prefixes for p in [*pathlib.Path(f).parents][::-1]
  )
  for path in ('/etc', *above):
    options += ['--dir', path]
  for path in ('/workspace', '/tmp'):
    options += ['--size', str(disk_mb << 20), '--tmpfs', path]
  found = sandbox.make_namespaces(options, [str(_FOLDER / name) for name in _FILES])
  # bubblewrap's own directories would be writable, and escape the disk limit.
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
  with contextlib.suppress(OSError):  # Unsent data may be lost.
    lines.close()
  there.close()
  if root:
    shutil.rmtree(root, ignore_errors=True)
