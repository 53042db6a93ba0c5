"""The process of an episode's shell (shell.py), which runs its commands one by one.

It runs as a script (`python -I shell_worker.py FD`) with an empty environment, inside
bubblewrap's namespaces where there are any, and never imports the package. It confines
itself (`_enter`), each command further (`_start`), ends whatever a command leaves behind,
and itself as soon as the other end of its socket is closed. Requests and answers are
lines of JSON; bytes that are no UTF-8 travel as surrogates.
"""

from collections.abc import Iterator
import contextlib
import errno
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
from typing import Any

sys.path.append(os.path.dirname(__file__))  # `-I` leaves it out.
import sandbox_worker

# What a shell and common programs need beside an interpreter's calls. Sockets, mounts,
# namespaces, ptrace, keys, io_uring, shared memory and files in memory are not here.
_CALLS = """
  fork vfork execve execveat wait4 waitid kill tkill tgkill getpgrp getpgid setpgid getsid
  setsid getgroups getresuid getresgid getpriority umask pause alarm setitimer getitimer
  rt_sigsuspend rt_sigpending rt_sigtimedwait setrlimit getcpu sched_getparam
  sched_getscheduler open openat openat2 creat mkdir mkdirat rmdir unlink unlinkat rename
  renameat renameat2 link linkat symlink symlinkat truncate ftruncate fallocate fadvise64
  readahead fsync fdatasync chdir fchdir sendfile copy_file_range statfs fstatfs
  close_range
""".split()
# They change any file of the user, which Landlock does not hold: only where no others are
# there, or the user is the shell's own.
_CALLS_OF_OWNERS = """
  chmod fchmod fchmodat fchmodat2 chown lchown fchown fchownat utime utimes futimesat
  utimensat
""".split()
# Programs that find no such attributes go on without; they do not where it is forbidden.
_ATTRIBUTES = [
  f'{prefix}{verb}xattr'
  for prefix in ('', 'l', 'f')
  for verb in ('get', 'set', 'list', 'remove')
]
_REQUESTS = (0x540F, 0x541B, 0x40049409)  # TIOCGPGRP, FIONREAD, FICLONE
_COMMANDS = (5, 6, 7, 36, 37, 38)  # The locks of a range.
_NEW_NAMESPACES = 0x7E020080  # Flags of clone.
_EXECUTE, _WRITE = 1 << 0, 1 << 1 | 1 << 14
_SYSTEM = ('/usr', '/bin', '/sbin', '/lib', '/lib64', '/etc/ld.so.cache')
_SYSTEM += ('/etc/alternatives', sys.base_prefix)
_DEVICES = ('/dev/null', '/dev/zero', '/dev/full', '/dev/random', '/dev/urandom')
# Everything but devices, sockets and the requests of devices.
_OWN = ((1 << 15) - 1) & ~(1 << 6 | 1 << 9 | 1 << 11)
# The directory that the command ends in is told at the end, whichever it is.
_SCRIPT = 'trap "pwd -P >&{} 2>/dev/null" EXIT; eval " $1"'
_PATH = f'/usr/local/bin:/usr/bin:/bin:{sys.base_prefix}/bin'
# Below level 1 bash takes the refusal of `getpeername` for a login from afar.
_VARIABLES = {'PATH': _PATH, 'LANG': 'C.UTF-8', 'TERM': 'dumb', 'SHLVL': '1'}
_SCOPED = 6  # The version of Landlock since which it confines signals.
_TICK = 0.05  # Seconds between two looks at what a command uses.
_FLOOD = 256  # A command ends that prints so many times what is kept.


def main(descriptor: int) -> None:
  """Serves requests until the other end of the socket is closed."""
  server = socket.socket(fileno=descriptor)
  server.set_inheritable(False)
  lines = server.makefile('rw')
  shell = _Shell(json.loads(lines.readline()), server)
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


class _Shell:
  """Runs commands, and says what they leave in the workspace."""

  def __init__(self, settings: dict, server: socket.socket):
    self.settings, self.server = settings, server
    self.root, self.namespaces = settings['root'], bool(settings['pid_namespace'])
    self.workspace = os.path.join(self.root, 'workspace')
    self.scratch = os.path.join(self.root, 'tmp')
    self.memory, self.disk = settings['memory_mb'] << 20, settings['disk_mb'] << 20
    self.place, self.codes = self.workspace, {}
    self.missing = _find_missing(self.namespaces)
    if not self.missing:
      self._enter()

  def _enter(self) -> None:
    """Confines this process, which commands can then neither signal nor trace."""
    uid = os.geteuid()
    libc = sandbox_worker.libc
    libc.prctl(sandbox_worker.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become its children.
    if not self.namespaces:
      os.mkdir(self.workspace)
      os.mkdir(self.scratch)
    # Where there are namespaces, nothing is there that it must not read.
    seen = ('/',) if self.namespaces else _SYSTEM
    system = dict.fromkeys(seen, sandbox_worker.READ | _EXECUTE)
    system |= dict.fromkeys(_DEVICES, sandbox_worker.READ | _WRITE)
    system |= {self.workspace: _OWN, self.scratch: _OWN}
    # These are made before the user changes, who may not be able to reach the paths.
    self.ruleset = outer = None
    if sandbox_worker.landlock_version() >= _SCOPED:
      self.ruleset = sandbox_worker.make_ruleset(system)
      own = {'/proc': sandbox_worker.READ, self.root: _OWN}
      outer = sandbox_worker.make_ruleset(system | own)
    # A user of its own, so that the kernel counts its processes, which it does not for
    # root, and no file or process is its own but what the shell made.
    if uid == 0:
      for path in (self.workspace, self.scratch, *([self.root] * (not self.namespaces))):
        os.chown(path, self.settings['user'], self.settings['user'])
      os.setgroups([])
      os.setresgid(*[self.settings['user']] * 3)
      os.setresuid(*[self.settings['user']] * 3)
    self.filter = _make_filter(of_owners=self.namespaces or uid == 0)
    self.shares_user = uid != 0 and not self.namespaces
    libc.prctl(sandbox_worker.PR_SET_DUMPABLE, 0, 0, 0, 0)
    # `end_all` signals everything that it may: here, before it ever does, is checked that
    # this is nothing of the machine.
    if self.namespaces:
      apart = os.readlink('/proc/self/ns/pid') != self.settings['pid_namespace']
    if outer is not None:
      sandbox_worker.restrict_self(outer)
    if not self.namespaces:
      apart = not _may_signal(os.getppid())
    if not apart:
      raise RuntimeError('the shell could signal processes of the machine')

  def write(self, files: dict[str, str]) -> None:
    """Writes files into the workspace; those that begin with #! can be executed."""
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
    allowed = self._measure_disk()  # Who has too much can still remove it.
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
        piece = _read_piece(output)
        text, size = text + (piece or b'')[: kept - len(text)], size + len(piece or b'')
        if piece == b'':  # Closed by all.
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
        # At most a fifth of the time is spent on looking.
        next_look = time.monotonic() + max(_TICK, 4 * (time.monotonic() - now))
    os.close(ended)
    self.end_all()
    code = self.codes.pop(pid)
    while piece := _read_piece(output):
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
    """Forks a shell for a command, and confines it; returns its number."""
    processes = self.settings['processes'] + 3  # This one, bubblewrap's, the shell.
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
      except OSError:  # It is gone.
        os.chdir(self.workspace)
      if self.ruleset is not None:
        sandbox_worker.restrict_self(self.ruleset)
      self.filter.load()
      shell = '/bin/bash' if os.path.exists('/bin/bash') else '/bin/sh'
      variables = _VARIABLES | {'HOME': self.workspace, 'TMPDIR': self.scratch}
      script = _SCRIPT.format(place)
      os.execve(shell, ['shell', '-c', script, 'shell', command], variables)
    except BaseException:
      traceback.print_exc()
    finally:
      os._exit(126)

  def end_all(self) -> None:
    """Kills all that it may signal, and waits for it.

    The kernel lets no process escape by a fork while it signals all. It may signal what
    is in its namespace, or in its domain of Landlock, and nothing else.
    """
    while True:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-1, signal.SIGKILL)
      if not self._reap(0):
        return

  def _reap(self, options: int) -> bool:
    """Notes how a child ended; whether there was one."""
    try:
      pid, status = os.waitpid(-1, options)
    except ChildProcessError:
      return False
    if pid:
      self.codes[pid] = os.waitstatus_to_exitcode(status)
    return bool(pid)

  def _find_excess(self, allowed: tuple[float, int]) -> str:
    """Says which limit that the kernel does not keep is exceeded; or nothing."""
    while self._reap(os.WNOHANG):  # Orphans that ended count as processes until then.
      pass
    memory, deleted = self._measure_processes()
    if memory > self.memory:
      return f'it used more than {self.memory >> 20} MiB of memory'
    size, count = self._measure_disk()
    if size + deleted > max(allowed[0], self.disk):
      return f'the workspace holds more than {self.disk >> 20} MiB'
    if count > max(allowed[1], self.settings['files']):
      return f'the workspace holds more than {self.settings["files"]} files'
    return ''

  def _measure_processes(self) -> tuple[int, int]:
    """Bytes of memory of all processes, and of their files that are deleted."""
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
        # Where there are namespaces, the kernel counts them as all files.
        for entry in [] if self.namespaces else os.scandir(f'/proc/{parent}/fd'):
          status = entry.stat()
          if stat.S_ISREG(status.st_mode) and not status.st_nlink:
            deleted[status.st_dev, status.st_ino] = status.st_blocks * 512
    return memory, sum(deleted.values())

  def _measure_disk(self) -> tuple[float, int]:
    """Bytes and number of the files that commands made; no bytes if the kernel counts."""
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
      except OSError:  # Nested too deeply to be counted.
        return float('inf'), count
    return size, count

  def read(self, most_files: int, most_bytes: int) -> dict[str, str | None] | None:
    """Reads the workspace: texts by path; None for what is no regular file.

    The names of directories end with a slash.

    Returns:
      None if there is more than it may read.
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


def _find_missing(namespaces: bool) -> list[str]:
  """Names what the machine lacks to confine a shell, with the remedy."""
  layers = sandbox_worker.find_missing_layers()
  missing = [text for text in layers if text.startswith('seccomp')]
  if not namespaces and sandbox_worker.landlock_version() < _SCOPED:
    missing.append(
      'namespaces: install bubblewrap (bwrap, 0.7 or later) and allow user namespaces, '
      'or use Linux 6.12 or later with Landlock enabled'
    )
  return missing


def _make_filter(of_owners: bool) -> Any:
  names = [*sandbox_worker.ALLOWED, *_CALLS, *(_CALLS_OF_OWNERS if of_owners else ())]
  requests = (*sandbox_worker.TERMINAL_REQUESTS, *_REQUESTS)
  commands = (*sandbox_worker.FCNTL_COMMANDS, *_COMMANDS)
  rules = sandbox_worker.make_filter(names, requests, commands)
  sandbox_worker.refuse(rules, _ATTRIBUTES, errno.ENOTSUP)
  allow = sandbox_worker.allow
  allow(rules, 'clone', 0, 0, _NEW_NAMESPACES)
  allow(rules, 'prlimit64', 0, 0)  # Its own limits, which can only be lowered.
  for name in ('mknod', 'mknodat'):  # Pipes with names.
    allow(rules, name, 1 + (name == 'mknodat'), stat.S_IFIFO, 0o170000)
  for option in (15, 16):  # PR_SET_NAME, PR_GET_NAME
    allow(rules, 'prctl', 0, option)
  if not of_owners:
    allow(rules, 'utimensat', 1, 0)  # Of a file that it could open.
  return rules


def _walk(top: str) -> Iterator[os.DirEntry]:
  """Yields all entries below a directory, and enters those that forbid it too."""
  directories = [top]
  while directories:
    path = directories.pop()
    try:
      if not os.access(path, os.R_OK | os.X_OK):
        os.chmod(path, 0o700)
      with os.scandir(path) as entries:
        for entry in entries:
          yield entry
          if entry.is_dir(follow_symlinks=False):
            directories.append(entry.path)
    except FileNotFoundError:  # A command has removed it.
      continue


def _count_threads() -> int:
  """The threads of this user, which the kernel counts as processes."""
  total = 0
  for name in filter(str.isdigit, os.listdir('/proc')):
    with contextlib.suppress(OSError):
      text = _read_text(f'/proc/{name}/status')
      if re.search(rf'\nUid:\t{os.getuid()}\t', text):
        total += int(text.partition('\nThreads:')[2].split()[0])
  return total


def _may_signal(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except PermissionError:
    return False
  return True


def _read_text(path: str) -> str:
  with open(path) as file:
    return file.read()


def _read_piece(descriptor: int) -> bytes | None:
  """Reads without waiting; None if there is nothing yet, b'' if nothing can come."""
  try:
    return os.read(descriptor, 1 << 16)
  except BlockingIOError:
    return None


if __name__ == '__main__':
  main(int(sys.argv[1]))
