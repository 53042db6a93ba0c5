"""What the kernel allows a shell's commands: their system calls and paths.

Only shell_worker.py imports this, in its own process.
"""

import errno
import os
import stat
import sys
from typing import Any

sys.path.append(os.path.dirname(__file__))  # `-I` leaves it out.
import sandbox_worker

# What a shell and common programs need besides an interpreter's calls. Excludes sockets,
# mounts, namespaces, ptrace, keys, io_uring, shared memory and files in memory.
_CALLS = """
  fork vfork execve execveat wait4 waitid kill tkill tgkill getpgrp getpgid setpgid getsid
  setsid getgroups getresuid getresgid getpriority umask pause alarm setitimer getitimer
  rt_sigsuspend rt_sigpending rt_sigtimedwait setrlimit getcpu sched_getparam
  sched_getscheduler open openat openat2 creat mkdir mkdirat rmdir unlink unlinkat rename
  renameat renameat2 link linkat symlink symlinkat truncate ftruncate fallocate fadvise64
  readahead fsync fdatasync chdir fchdir sendfile copy_file_range statfs fstatfs
  close_range
""".split()
# These change any file of the user, which Landlock does not prevent: allowed only if no
# other files are there, or the user is the shell's own.
_CALLS_OF_OWNERS = """
  chmod fchmod fchmodat fchmodat2 chown lchown fchown fchownat utime utimes futimesat
  utimensat
""".split()
# Programs do without these attributes if there are none, but not if access is forbidden.
_ATTRIBUTES = """
  getxattr lgetxattr fgetxattr setxattr lsetxattr fsetxattr listxattr llistxattr
  flistxattr removexattr lremovexattr fremovexattr
""".split()
_REQUESTS = (0x540F, 0x541B, 0x40049409)  # TIOCGPGRP, FIONREAD, FICLONE
_COMMANDS = (5, 6, 7, 36, 37, 38)  # Locks of a byte range.
_NEW_NAMESPACES = 0x7E020080  # Flags of clone.
_EXECUTE, _WRITE = 1 << 0, 1 << 1 | 1 << 14
_SYSTEM = ('/usr', '/bin', '/sbin', '/lib', '/lib64')
_SYSTEM += ('/etc/ld.so.cache', '/etc/alternatives')
_DEVICES = ('/dev/null', '/dev/zero', '/dev/full', '/dev/random', '/dev/urandom')
# All rights except devices, sockets and device ioctls.
_OWN = ((1 << 15) - 1) & ~(1 << 6 | 1 << 9 | 1 << 11)
_SCOPED = 6  # The version of Landlock that first confines signals.


def find_missing(namespaces: bool) -> list[str]:
  """Lists what the machine lacks to confine a shell, with the remedy."""
  layers = sandbox_worker.find_missing_layers()
  missing = [text for text in layers if text.startswith('seccomp')]
  if not namespaces and sandbox_worker.landlock_version() < _SCOPED:
    missing.append(
      'namespaces: install bubblewrap (bwrap, 0.7 or later) and allow user namespaces, '
      'or use Linux 6.12 or later with Landlock enabled'
    )
  return missing


def make_rulesets(
  workspace: list[str],
  root: str,
  namespaces: bool,
  shares_user: bool,
  packages: list[str],
) -> list[int]:
  """Returns Landlock's rulesets for commands, and for the process that starts them.

  The latter may also see processes, and remove the workspace. There are none if Landlock
  does not confine signals.

  Args:
    workspace: The directories that commands may write.
    root: Their parent directory.
    namespaces: Whether namespaces already hide everything that commands must not read.
    shares_user: Whether commands run as the trainer's user, who may own the interpreter
      and could change the times of any file that commands can open.
    packages: The directories of an interpreter's packages, if they may be read.
  """
  if sandbox_worker.landlock_version() < _SCOPED:
    return []
  system = _SYSTEM if shares_user else (*_SYSTEM, sys.base_prefix, *packages)
  seen = ('/',) if namespaces else system
  rights = dict.fromkeys(seen, sandbox_worker.READ | _EXECUTE)
  rights |= dict.fromkeys(_DEVICES, sandbox_worker.READ | _WRITE)
  rights |= dict.fromkeys(workspace, _OWN)
  own = rights | {'/proc': sandbox_worker.READ, root: _OWN}
  return [sandbox_worker.make_ruleset(grants) for grants in (rights, own)]


def make_filter(of_owners: bool) -> Any:
  """Makes the seccomp filter of commands.

  Args:
    of_owners: Whether they may change modes, owners and times of files.
  """
  names = [*sandbox_worker.ALLOWED, *_CALLS, *(_CALLS_OF_OWNERS if of_owners else ())]
  requests = (*sandbox_worker.TERMINAL_REQUESTS, *_REQUESTS)
  commands = (*sandbox_worker.FCNTL_COMMANDS, *_COMMANDS)
  rules = sandbox_worker.make_filter(names, requests, commands)
  sandbox_worker.refuse(rules, _ATTRIBUTES, errno.ENOTSUP)
  allow = sandbox_worker.allow
  allow(rules, 'clone', 0, 0, _NEW_NAMESPACES)
  allow(rules, 'prlimit64', 0, 0)  # Its own limits, which can only be lowered.
  for name in ('mknod', 'mknodat'):  # Only named pipes.
    allow(rules, name, 1 + (name == 'mknodat'), stat.S_IFIFO, 0o170000)
  allow(rules, 'prctl', 0, 15)  # PR_SET_NAME
  if not of_owners:
    allow(rules, 'utimensat', 1, 0)  # Only of a file that it could open.
  return rules
