"""The worker process of sandbox.py, which forks a confined interpreter for each session.

It runs as a script (`python -I sandbox_worker.py FD`) with an empty environment and never
imports the package, so that its memory, which the interpreters inherit, has nothing of
the trainer. Requests come over a Unix socket, one JSON object each:

  {"fork": {...limits}} with three descriptors: code, output, done  -> {"pid": n}
  {"kill": pid}                                                     -> nothing

A forked interpreter reads cells of code (a length of 4 bytes, then UTF-8), writes what
they print to `output`, and after each cell one byte to `done`: b'0' if it returned, b'1'
if it raised. Four layers confine it, see `confine`.
"""

import ast
from collections.abc import Iterable
import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import resource
import signal
import socket
import struct
import sys
import sysconfig
import traceback
import types
from typing import Any

# Landlock's access rights (linux/landlock.h), by the ABI version that introduced them. A
# right that is handled and not granted is denied.
READ = 1 << 2 | 1 << 3  # READ_FILE and READ_DIR: an interpreter's only rights.
_RIGHTS_OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
_NETWORK_RIGHTS = {4: 1 << 0 | 1 << 1}  # TCP: bind and connect.
_SCOPES = {6: 1 << 0 | 1 << 1}  # Abstract Unix sockets and signals.
# The system call numbers of Landlock, which are the same on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446

# Calls that an interpreter needs. Everything else fails with EPERM: sockets, fork, exec,
# kill, ptrace, mount, io_uring, and whatever changes a file system.
ALLOWED = """
  read readv pread64 write writev pwrite64 close fstat stat lstat newfstatat statx lseek
  access faccessat faccessat2 getdents64 readlink readlinkat getcwd dup dup2
  dup3 pipe pipe2 poll ppoll select pselect6 epoll_create1 epoll_ctl epoll_wait
  epoll_pwait eventfd2 mmap mprotect munmap mremap madvise brk mincore membarrier futex
  set_robust_list get_robust_list rseq set_tid_address arch_prctl rt_sigaction
  rt_sigprocmask rt_sigreturn sigaltstack restart_syscall exit exit_group sched_yield
  sched_getaffinity getpid getppid gettid getuid geteuid getgid getegid getrlimit
  getrusage sysinfo uname getrandom clock_gettime clock_getres clock_nanosleep nanosleep
  gettimeofday time times
""".split()
_CLONE_THREAD = 0x10000
# Flags that `open` must not have: to write, create, truncate or make a nameless file.
# Landlock handles truncation only since version 3, and may be waived.
_NOT_TO_READ = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
# Not F_SETOWN, which can send any signal to any process, and not F_SETPIPE_SZ, whose
# memory no process limit counts.
FCNTL_COMMANDS = (
  fcntl.F_DUPFD,
  fcntl.F_DUPFD_CLOEXEC,
  fcntl.F_GETFD,
  fcntl.F_SETFD,
  fcntl.F_GETFL,
  fcntl.F_SETFL,
)
TERMINAL_REQUESTS = (0x5401, 0x5413, 0x5451)  # TCGETS, TIOCGWINSZ, FIOCLEX
# CAP_DAC_READ_SEARCH: root may need it to read the interpreter's own files.
_KEPT_CAPABILITIES = 1 << 2
_CAPABILITY_VERSION = 0x20080522
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38

libc = ctypes.CDLL(None, use_errno=True)


class _PathRule(ctypes.Structure):
  _pack_ = 1
  _fields_ = [('allowed', ctypes.c_uint64), ('parent', ctypes.c_int32)]


def main(descriptor: int) -> None:
  """Serves requests until the other end of the socket is closed."""
  server = socket.socket(fileno=descriptor)
  for module in json.loads(server.recv(1 << 16))['preload']:
    __import__(module)
  server.sendall(json.dumps({'missing': find_missing_layers()}).encode())
  children, killed, worker = set(), set(), os.getpid()
  while True:
    data, descriptors, _, _ = socket.recv_fds(server, 1 << 16, 3)
    if not data:
      return
    request = json.loads(data)
    # Without blocking: clearing a killed interpreter takes longer than a fork.
    killed = {pid for pid in killed if os.waitpid(pid, os.WNOHANG)[0] == 0}
    if 'fork' in request:
      _prepare(request['fork'])
      pid = os.fork()
      if pid == 0:
        server.close()
        _run_interpreter(descriptors, request['fork'], worker)
      children.add(pid)
      for descriptor in descriptors:
        os.close(descriptor)
      server.sendall(json.dumps({'pid': pid}).encode())
    # Only children: a process id may be reused once its process has ended.
    elif (pid := request['kill']) in children:
      children.remove(pid)
      os.kill(pid, signal.SIGKILL)
      killed.add(pid)


def find_missing_layers() -> list[str]:
  """Lists the layers that this machine cannot provide, each with a remedy."""
  missing = []
  if landlock_version() < 1:
    missing.append('landlock: it needs Linux 5.13 with Landlock enabled')
  try:
    import pyseccomp  # noqa: F401
  except (ImportError, RuntimeError, OSError):
    missing.append("seccomp: it needs Debian's libseccomp2 and pip's pyseccomp")
  return missing


def confine(limits: dict) -> None:
  """Irrevocably takes from this process everything that untrusted code must not have.

  1. Resource limits: address space, size of files (0), open files, no core dump.
  2. no_new_privs; not dumpable (siblings cannot ptrace it); killed when the worker ends;
     of root's capabilities only the one to read.
  3. Landlock: of the file system only the interpreter and its libraries, read-only.
  4. seccomp: an allow-list of system calls, without sockets, processes and signals.

  Args:
    limits: 'memory': bytes that it may allocate beyond what the worker has;
      'without': names of layers that the user has waived.
  """
  libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
  libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
  libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
  seccomp = None if 'seccomp' in limits['without'] else _make_filter()
  for name, value in {
    resource.RLIMIT_AS: _address_space() + limits['memory'],
    resource.RLIMIT_FSIZE: 0,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
  }.items():
    resource.setrlimit(name, (value, value))
  if 'landlock' not in limits['without']:
    restrict_self(_make_ruleset())
  _drop_capabilities()
  if seccomp:
    seccomp.load()


def _prepare(limits: dict) -> None:
  """Makes what confines all interpreters, so that each need not make its own."""
  if 'landlock' not in limits['without']:
    _make_ruleset()
  if 'seccomp' not in limits['without']:
    _make_filter()


def _drop_capabilities() -> None:
  header = struct.pack('Ii', _CAPABILITY_VERSION, 0)
  sets = ctypes.create_string_buffer(24)  # effective, permitted, inheritable; twice
  if libc.capget(header, sets) == 0:
    effective, permitted, *_ = struct.unpack('6I', sets.raw)
    remaining = [held & _KEPT_CAPABILITIES for held in (effective, permitted)]
    if libc.capset(header, struct.pack('6I', *remaining, 0, 0, 0, 0)) == 0:
      return
  code = ctypes.get_errno()
  raise OSError(code, f'capabilities: {os.strerror(code)}')


def _address_space() -> int:
  with open('/proc/self/statm') as file:
    return int(file.read().split()[0]) * resource.getpagesize()


def landlock_version() -> int:
  """Returns the version of Landlock's ABI; below 1 if there is none."""
  return libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))


@functools.cache
def _make_ruleset() -> int:
  return make_ruleset(dict.fromkeys(_readable_paths(), READ))


def make_ruleset(grants: dict[str, int]) -> int:
  """Returns the descriptor of a Landlock ruleset that grants rights by path.

  Args:
    grants: The rights, such as READ, by path; missing paths are skipped, and files get
      only the rights that files have.
  """
  version = landlock_version()
  handled = [
    sum(bits for first, bits in table.items() if first <= version)
    for table in (_FILE_RIGHTS, _NETWORK_RIGHTS, _SCOPES)
  ]
  # Older kernels have a shorter struct.
  fields = 1 if version < 4 else 2 if version < 6 else 3
  attributes = struct.pack(f'{fields}Q', *handled[:fields])
  ruleset = _checked(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
  for path, rights in grants.items():
    with contextlib.suppress(FileNotFoundError):
      parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
      known = handled[0] if os.path.isdir(path) else handled[0] & _RIGHTS_OF_FILES
      rule = _PathRule(rights & known, parent)
      _checked(_ADD_RULE, ruleset, 1, ctypes.byref(rule), 0)
      os.close(parent)
  return ruleset


def restrict_self(ruleset: int) -> None:
  """Restricts this thread and its descendants by a Landlock ruleset."""
  _checked(_RESTRICT_SELF, ruleset, 0)
  os.close(ruleset)


def _readable_paths() -> set[str]:
  """The interpreter's modules, shared libraries, time zones and harmless devices.

  Not all of sys.path: an editable installation adds a checkout, data included.
  """
  kinds = ('stdlib', 'platstdlib', 'purelib', 'platlib')
  modules = {sysconfig.get_path(kind) for kind in kinds}
  libraries = {'/lib', '/lib64', '/usr/lib'}
  return modules | libraries | {'/usr/share/zoneinfo', '/dev/null', '/dev/urandom'}


def _checked(number: int, *arguments) -> int:
  result = libc.syscall(number, *arguments)
  if result < 0:
    code = ctypes.get_errno()
    raise OSError(code, f'landlock: {os.strerror(code)}')
  return result


def make_filter(
  names: Iterable[str], requests: Iterable[int], commands: Iterable[int]
) -> Any:
  """Makes a seccomp filter that fails all other system calls with EPERM.

  `names` are allowed with any arguments, `ioctl` only with `requests`, `fcntl` only with
  `commands`.
  """
  import pyseccomp

  rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
  for name in names:
    with contextlib.suppress(OSError):  # Some do not exist on every architecture.
      rules.add_rule(pyseccomp.ALLOW, name)
  # The C library then falls back to clone, whose flags a filter can see.
  refuse(rules, ['clone3'], errno.ENOSYS)
  for name, numbers in (('ioctl', requests), ('fcntl', commands)):
    for number in numbers:
      allow(rules, name, 1, number)
  return rules


def allow(rules: Any, name: str, argument: int, value: int, mask: int = -1) -> None:
  """Allows a system call if its argument at that index, masked, has the value."""
  import pyseccomp

  bits = mask & (1 << 64) - 1
  with contextlib.suppress(OSError):  # Some do not exist on every architecture.
    condition = pyseccomp.Arg(argument, pyseccomp.MASKED_EQ, bits, value)
    rules.add_rule(pyseccomp.ALLOW, name, condition)


def refuse(rules: Any, names: Iterable[str], code: int) -> None:
  """Makes system calls fail with a code other than EPERM."""
  import pyseccomp

  for name in names:
    rules.add_rule(pyseccomp.ERRNO(code), name)


@functools.cache
def _make_filter() -> Any:
  rules = make_filter(ALLOWED, TERMINAL_REQUESTS, FCNTL_COMMANDS)
  allow(rules, 'clone', 0, _CLONE_THREAD, _CLONE_THREAD)
  for name, flags in (('open', 1), ('openat', 2)):
    allow(rules, name, flags, 0, _NOT_TO_READ)
  allow(rules, 'prlimit64', 2, 0)  # Limits may be read, not set.
  return rules


def _run_interpreter(descriptors: list[int], limits: dict, worker: int) -> None:
  """Runs an interpreter in the forked process; never returns."""
  try:
    code, output, done = descriptors
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.chdir('/')
    os.setsid()
    confine(limits)
    if os.getppid() == worker:  # Else it ended before `confine`.
      _run_cells(code, done)
  except BaseException:
    traceback.print_exc()
  finally:
    os._exit(1)


def _run_cells(code: int, done: int) -> None:
  # Pickle, dataclasses and unittest look up a cell's definitions there.
  module = sys.modules['__main__'] = types.ModuleType('__main__')
  names = module.__dict__
  names['__builtins__'] = __builtins__
  while header := _read_exactly(code, 4):
    cell = _read_exactly(code, struct.unpack('>I', header)[0])
    raised = _run_cell(cell.decode(), names)
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(Exception):
        stream.flush()
    os.write(done, b'1' if raised else b'0')


def _run_cell(cell: str, names: dict) -> bool:
  """Runs a cell, and prints the value of its last expression as a notebook does.

  Returns:
    Whether it raised; the traceback has then been printed.
  """
  try:
    tree = ast.parse(cell, '<cell>')
    expression = None
    if tree.body and isinstance(last_statement := tree.body[-1], ast.Expr):
      expression = ast.Expression(last_statement.value)
      tree.body.pop()
    exec(compile(tree, '<cell>', 'exec'), names)
    if expression is not None:
      value = eval(compile(expression, '<cell>', 'eval'), names)
      if value is not None:
        print(repr(value))
  except SystemExit:
    return False
  except BaseException as error:
    # Skip the frames of this file.
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != '<cell>':
      trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    return True
  return False


def _read_exactly(descriptor: int, size: int) -> bytes:
  data = b''
  while len(data) < size:
    piece = os.read(descriptor, size - len(data))
    if not piece:
      return b''
    data += piece
  return data


if __name__ == '__main__':
  main(int(sys.argv[1]))
