"""The process of an episode's shell (shell.py), which runs its commands one by one.

It runs as a script (`python -I shell_worker.py FD`) with an empty environment, inside
bubblewrap's namespaces if available, and never imports the package. It confines itself
(`_enter`), confines each command further (`_start`), ends whatever a command leaves
behind, and exits when the other end of its socket is closed. Requests and answers are
lines of JSON; bytes that are not UTF-8 become surrogates.
"""

from collections.abc import Iterator
import contextlib
import json
import os
import re
import resource
import select
import signal
import socket
import stat
import sys
import time
import traceback

sys.path.append(os.path.dirname(__file__))  # `-I` leaves it out.
import sandbox_worker
import shell_layers

# The command's final directory is reported at its end.
_SCRIPT = 'trap "pwd -P >&{} 2>/dev/null" EXIT; eval " $1"'
_PATH = '/usr/local/bin:/usr/bin:/bin'
_OWN_PATH = f'{sys.base_prefix}/bin'
# Below level 1 bash takes the refusal of `getpeername` for a remote login.
_VARIABLES = {
  'PATH': f'{_PATH}:{_OWN_PATH}',
  'LANG': 'C.UTF-8',
  'TERM': 'dumb',
  'SHLVL': '1',
}
_TICK = 0.05  # Seconds between two checks of a command's usage.
_FLOOD = 256  # A command that prints this many times max_output is ended.


def main(descriptor: int) -> None:
  """Serves requests until the other end of the socket is closed."""
  server = socket.socket(fileno=descriptor)
  server.set_inheritable(False)
  lines = server.makefile('rw')
  shell = _CommandRunner(json.loads(lines.readline()), server)
  answers = {'write': shell.write, 'run': shell.run, 'read': shell.read}
  with contextlib.suppress(OSError):
    print(json.dumps(shell.missing), file=lines, flush=True)
    for line in lines:
      name, *arguments = json.loads(line)
      print(json.dumps(answers[name](*arguments)), file=lines, flush=True)
  if not shell.missing:
    shell.end_all()
    if not shell.namespaces:  # Else its files end with the namespaces.
      os.chdir(shell.root)
      os.execv('/bin/sh', ['sh', '-c', 'chmod -R u+rwx .; rm -rf workspace tmp'])


class _CommandRunner:
  """Runs commands, and reports what they leave in the workspace."""

  def __init__(self, settings: dict, server: socket.socket):
    self.settings, self.server = settings, server
    self.root, self.namespaces = settings['root'], settings['namespaces']
    self.workspace = os.path.join(self.root, 'workspace')
    self.scratch = os.path.join(self.root, 'tmp')
    self.memory, self.disk = settings['memory_mb'] << 20, settings['disk_mb'] << 20
    self.place, self.codes = self.workspace, {}
    self.missing = shell_layers.find_missing(self.namespaces)
    if not self.missing:
      self._enter()

  def _enter(self) -> None:
    """Confines this process so that commands can neither signal nor trace it."""
    uid = os.geteuid()
    libc = sandbox_worker.libc
    libc.prctl(sandbox_worker.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become its children.
    # As process 1 of its namespace, it gets only the signals it handles.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not self.namespaces:
      os.mkdir(self.workspace)
      os.mkdir(self.scratch)
    # Made before the user changes, since the new user may not reach the paths.
    paths = [self.workspace, self.scratch]
    self.shares_user = uid != 0 and not self.namespaces
    self.rulesets = shell_layers.make_rulesets(
      paths, self.root, self.namespaces, self.shares_user, self.settings['packages']
    )
    # Switch to a user of its own: the kernel counts the processes of users except root,
    # and that user owns only the shell's files and processes.
    if uid == 0:
      user = self.settings['user']
      for path in paths if self.namespaces else [*paths, self.root]:
        os.chown(path, user, user)
      os.setgroups([])
      os.setresgid(user, user, user)
      os.setresuid(user, user, user)
    self.filter = shell_layers.make_filter(of_owners=not self.shares_user)
    libc.prctl(sandbox_worker.PR_SET_DUMPABLE, 0, 0, 0, 0)
    # `end_all` signals everything that it may. Check first that this excludes the
    # machine's other processes.
    if self.namespaces and os.getpid() != 1:
      raise RuntimeError('the shell is not the first of its namespace')
    if self.rulesets:
      sandbox_worker.restrict_self(self.rulesets.pop())
    if not self.namespaces:
      with contextlib.suppress(PermissionError):
        os.kill(os.getppid(), 0)
        raise RuntimeError('the shell could signal processes of the machine')

  def write(self, files: dict[str, str]) -> None:
    """Writes files into the workspace; texts with #! become executable."""
    for name, text in files.items():
      path = os.path.join(self.workspace, name)
      os.makedirs(os.path.dirname(path), exist_ok=True)
      with open(path, 'xb') as file:
        file.write(text.encode(errors='surrogateescape'))
      if text.startswith('#!'):
        os.fchmod(fd := os.open(path, os.O_RDONLY), 0o755)
        os.close(fd)

  def run(self, command: str, seconds: float) -> tuple[str, int, str]:
    """Runs a command and ends what it started; (output, exit status, why it ended)."""
    deadline, kept = time.monotonic() + seconds, self.settings['max_output']
    output, output_end = os.pipe()
    place, place_end = os.pipe()
    size, count = self._measure_disk()
    # A workspace over the limit can still be cleaned up.
    allowed = size if size < float('inf') else 0.0, count
    pid = self._start(command, output_end, place_end)
    os.close(output_end)
    os.close(place_end)
    os.set_blocking(output, False)
    ended = os.pidfd_open(pid)
    poll = select.poll()
    for descriptor in (output, ended, self.server.fileno()):
      poll.register(descriptor, select.POLLIN)
    text, size, reason, next_look = b'', 0, '', 0.0
    while not reason:
      ready = {descriptor for descriptor, _ in poll.poll(_TICK * 1000)}
      if output in ready:
        with contextlib.suppress(BlockingIOError):  # The command has read it back.
          piece = os.read(output, 1 << 16)
          text, size = text + piece[: kept - len(text)], size + len(piece)
          if not piece:  # All writers have closed it.
            poll.unregister(output)
      if ended in ready:
        break
      if self.server.fileno() in ready:
        reason = 'it was given up'
      elif size > _FLOOD * kept:
        reason = 'it printed too much'
      elif (now := time.monotonic()) > deadline:
        reason = f'it took longer than {seconds:g} seconds'
      elif now > next_look:
        reason = self._find_excess(allowed)
        # Spend at most a fifth of the time on checks.
        next_look = time.monotonic() + max(_TICK, 4 * (time.monotonic() - now))
    os.close(ended)
    self.end_all()
    code = self.codes.pop(pid)
    while piece := os.read(output, 1 << 16):
      text, size = text + piece[: kept - len(text)], size + len(piece)
    told = os.read(place, 1 << 13)
    if told.startswith(b'/'):
      self.place = told.removesuffix(b'\n')
    os.close(output)
    os.close(place)
    shown = text.decode(errors='replace')
    shown += '\n... (the rest of the output is cut)' if size > kept else ''
    return shown, code if code >= 0 else 128 - code, reason

  def _start(self, command: str, output: int, place: int) -> int:
    """Forks and confines a shell for a command; returns its process id."""
    processes = self.settings['processes'] + 2  # This process, and the shell.
    if self.shares_user:
      processes += _count_threads()
    if pid := os.fork():
      return pid
    try:
      os.setsid()
      signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it.
      os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
      os.dup2(output, 1)
      os.dup2(output, 2)
      os.set_inheritable(place, True)
      for name, value in {
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_AS: self.memory,
        resource.RLIMIT_FSIZE: self.disk,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
      }.items():
        resource.setrlimit(name, (value, value))
      try:
        os.chdir(self.place)
      except OSError:  # It has gone.
        os.chdir(self.workspace)
      if self.rulesets:
        sandbox_worker.restrict_self(*self.rulesets)
      self.filter.load()
      shell = '/bin/bash' if os.path.exists('/bin/bash') else '/bin/sh'
      variables = _VARIABLES | {'HOME': self.workspace, 'TMPDIR': self.scratch}
      if packages := self.settings['packages']:
        variables |= {'PATH': f'{_OWN_PATH}:{_PATH}', 'PYTHONPATH': ':'.join(packages)}
      script = _SCRIPT.format(place)
      os.execve(shell, ['shell', '-c', script, 'shell', command], variables)
    except BaseException:
      traceback.print_exc()
    finally:
      os._exit(126)

  def end_all(self) -> None:
    """Kills every process that it may signal, and waits for them.

    The kernel signals all at once, so no process escapes by forking. It may signal only
    processes in its namespace, or in its Landlock domain.
    """
    while True:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-1, signal.SIGKILL)
      if not self._reap(0):
        return

  def _reap(self, options: int) -> bool:
    """Records how a child ended; returns whether there was one."""
    try:
      pid, status = os.waitpid(-1, options)
    except ChildProcessError:
      return False
    if pid:
      self.codes[pid] = os.waitstatus_to_exitcode(status)
    return bool(pid)

  def _find_excess(self, allowed: tuple[float, int]) -> str:
    """Returns which limit that the kernel does not enforce is exceeded, or ''."""
    while self._reap(os.WNOHANG):  # Ended orphans count as processes until then.
      pass
    memory, deleted = self._measure_processes()
    if memory > self.memory:
      return f'it used more than {self.memory >> 20} MiB of memory'
    size, count = self._measure_disk()
    if size + deleted > max(allowed[0], self.disk):
      return f'the workspace holds more than {self.disk >> 20} MiB, or hides it'
    if count > max(allowed[1], self.settings['files']):
      return f'the workspace holds more than {self.settings["files"]} files'
    return ''

  def _measure_processes(self) -> tuple[int, int]:
    """Returns the bytes of all processes' memory, and of their deleted files."""
    memory, deleted, parents = 0, {}, [os.getpid()]
    while parents:
      parent = parents.pop()
      with contextlib.suppress(OSError):  # It has ended.
        for task in os.listdir(f'/proc/{parent}/task'):
          children = _read_text(f'/proc/{parent}/task/{task}/children').split()
          parents += map(int, children)
        if parent == os.getpid():
          continue
        _, resident, shared, *_ = _read_text(f'/proc/{parent}/statm').split()
        memory += (int(resident) - int(shared)) * resource.getpagesize()
        # With namespaces, the kernel counts them like all files.
        for entry in [] if self.namespaces else os.scandir(f'/proc/{parent}/fd'):
          status = entry.stat()
          if stat.S_ISREG(status.st_mode) and not status.st_nlink:
            deleted[status.st_dev, status.st_ino] = status.st_blocks * 512
    return memory, sum(deleted.values())

  def _measure_disk(self) -> tuple[float, int]:
    """Returns size and number of the commands' files; size 0 if the kernel limits it."""
    size, count = 0.0, 0
    for path in (self.workspace, self.scratch):
      if self.namespaces:
        status = os.statvfs(path)
        count += status.f_files - status.f_ffree
        continue
      try:
        for entry in _walk(path):
          with contextlib.suppress(FileNotFoundError):
            size += entry.stat(follow_symlinks=False).st_blocks * 512
          count += 1
      except OSError:  # Nested too deeply, or unreadable.
        return float('inf'), count
    return size, count

  def read(self, most_files: int, most_bytes: int) -> dict[str, str | None] | None:
    """Reads the workspace: texts by path; None for anything but regular files.

    The names of directories end with a slash.

    Returns:
      None if there is more than `most_files` or `most_bytes`.
    """
    found: dict[str, str | None] = {}
    try:
      for entry in _walk(self.workspace):
        name, text = os.path.relpath(entry.path, self.workspace), None
        if entry.is_dir(follow_symlinks=False):
          name += '/'
        elif entry.is_file(follow_symlinks=False):
          if not os.access(entry.path, os.R_OK):
            os.chmod(entry.path, 0o600)
          with open(entry.path, 'rb') as file:
            data = file.read(most_bytes + 1)
          most_bytes -= len(data)
          text = data.decode(errors='surrogateescape')
        found[name] = text
        if len(found) > most_files or most_bytes < 0:
          return None
    except OSError:  # Nested too deeply.
      return None
    return found


def _walk(top: str) -> Iterator[os.DirEntry]:
  """Yields all entries below a directory; makes unreadable directories readable."""
  directories = [top]
  while directories:
    path = directories.pop()
    with contextlib.suppress(FileNotFoundError):  # A command has removed it.
      if not os.access(path, os.R_OK | os.X_OK):
        _open_shut(path, top)
      with os.scandir(path) as entries:
        for entry in entries:
          yield entry
          if entry.is_dir(follow_symlinks=False):
            directories.append(entry.path)


def _open_shut(path: str, top: str) -> None:
  """Restores the owner's rights on a directory, if it is below `top`.

  A command may replace parts of the path by links, so this opens the directory first,
  checks where it is, and changes what it opened.
  """
  descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
  opened = f'/proc/self/fd/{descriptor}'
  if os.readlink(opened).startswith(f'{top}/'):
    os.chmod(opened, 0o700)
  os.close(descriptor)


def _count_threads() -> int:
  """Counts this user's threads, as the kernel does for its limit of processes."""
  total = 0
  for name in filter(str.isdigit, os.listdir('/proc')):
    with contextlib.suppress(OSError):
      text = _read_text(f'/proc/{name}/status')
      if re.search(rf'\nUid:\t{os.getuid()}\t', text):
        total += int(text.partition('\nThreads:')[2].split()[0])
  return total


def _read_text(path: str) -> str:
  with open(path) as file:
    return file.read()


if __name__ == '__main__':
  main(int(sys.argv[1]))
