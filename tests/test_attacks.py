"""Attacks on the sandbox, a line each: none may succeed, and the next session works."""

import os
import platform
import re

import confined
import pytest

from agent_r1_jax.tools import sandbox

pytestmark = pytest.mark.usefixtures('needs_sandbox')
box, outside = confined.box, confined.outside
needs_sandbox = confined.needs_sandbox

# A cell that must end does so in far less; it only guards against hanging.
SECONDS = 60.0
_IMPORTS = (
  'import ctypes, errno, fcntl, mmap, os, re, resource, signal, socket, stat, sys, time\n'
  'import gc, multiprocessing, subprocess, threading\n'
  'libc = ctypes.CDLL(None, use_errno=True)\nbuffer = ctypes.create_string_buffer(4096)\n'
)


def _run(box, code, seconds=SECONDS):
  return box.run(_IMPORTS + code, seconds)


# What must raise PermissionError: the refusal of the kernel.
REFUSED = {
  'a fork bomb': 'while True: os.fork()',
  'a fork with a terminal': 'os.forkpty()',
  'a program': 'subprocess.run(["/bin/ls"])',
  'a shell': 'subprocess.run("true", shell=True)',
  'a spawned program': 'os.posix_spawn("/bin/true", ["true"], {})',
  'a process of Python': 'multiprocessing.get_context("fork").Process().start()',
  'exec': 'os.execv(sys.executable, ["python"])',
  'exec of a descriptor': 'os.execve(os.open("/dev/null", 0), ["x"], {})',
  'a socket': 'socket.socket()',
  'a datagram': 'socket.socket(type=socket.SOCK_DGRAM)',
  'a raw socket': 'socket.socket(socket.AF_INET6, socket.SOCK_RAW)',
  'a Unix socket': 'socket.socket(socket.AF_UNIX)',
  'a pair of sockets': 'socket.socketpair()',
  'netlink': 'socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)',
  'packets': 'socket.socket(socket.AF_PACKET, socket.SOCK_RAW)',
  'the kernel\'s cryptography': 'socket.socket(socket.AF_ALG)',
  'a virtual machine\'s socket': 'socket.socket(socket.AF_VSOCK)',
  'a signal to its parent': 'os.kill(os.getppid(), signal.SIGKILL)',
  'a signal to all': 'os.kill(-1, signal.SIGKILL)',
  'a signal to its group': 'os.killpg(0, signal.SIGKILL)',
  'a signal to a thread': 'signal.pthread_kill(threading.get_ident(), signal.SIGKILL)',
  'a signal by a file': 'fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())',
  'a descriptor of its parent': 'os.pidfd_open(os.getppid())',
  'large pipes': 'fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)',  # F_SETPIPE_SZ
  'a lock': 'fcntl.flock(os.open("/dev/null", 0), fcntl.LOCK_EX)',
  'a typed character': 'fcntl.ioctl(0, 0x5412, b"x")',  # TIOCSTI
  'the root': 'os.listdir("/")',
  'processes': 'os.listdir("/proc")',
  'its own environment': 'open("/proc/self/environ").read()',
  'another environment': 'open("/proc/1/environ").read()',
  'its parent\'s environment': 'open(f"/proc/{os.getppid()}/environ").read()',
  'its own memory': 'open("/proc/self/mem", "rb")',
  'its parent\'s memory': 'open(f"/proc/{os.getppid()}/mem", "rb")',
  'its own addresses': 'open("/proc/self/maps")',
  'its parent\'s descriptors': 'os.listdir(f"/proc/{os.getppid()}/fd")',
  'its mounts': 'open("/proc/self/mountinfo")',
  'its own limits of memory': 'open("/proc/self/oom_score_adj", "w")',
  'connections': 'open("/proc/net/tcp")',
  'the kernel\'s settings': 'open("/proc/sys/kernel/core_pattern", "w")',
  'the kernel\'s requests': 'open("/proc/sysrq-trigger", "w")',
  'what is in /tmp': 'os.listdir("/tmp")',
  'a folder by a descriptor': 'os.open(".", 0, dir_fd=os.open("/tmp", os.O_PATH))',
  'a directory': 'os.mkdir("/tmp/sandbox_attack")',
  'a symbolic link': 'os.symlink("/etc/passwd", "/tmp/sandbox_attack")',
  'a hard link': 'os.link(sys.executable, "/tmp/sandbox_attack")',
  'a named pipe': 'os.mkfifo("/tmp/sandbox_attack")',
  'a device node': 'os.mknod("/tmp/sandbox_attack", stat.S_IFCHR)',
  'a new file': 'open("/tmp/sandbox_attack", "x")',
  'a file without a name': 'os.open("/tmp", os.O_TMPFILE | os.O_RDWR)',
  'a file in memory': 'os.memfd_create("x")',
  'its own modules': 'open(os.__file__, "a")',
  'removal': 'os.remove(os.__file__)',
  'another name': 'os.rename(os.__file__, os.__file__ + "x")',
  'truncation': 'os.truncate(os.__file__, 0)',
  'other rights': 'os.chmod(os.__file__, 0o777)',
  'another owner': 'os.chown(os.__file__, 0, 0)',
  'another time': 'os.utime(os.__file__)',
  'an attribute': 'os.setxattr(os.__file__, "user.x", b"x")',
  'another directory': 'os.chdir("/usr")',
  'another root': 'os.chroot("/usr")',
  'another user': 'os.setuid(0)',
  'another group': 'os.setgroups([0])',
  'another session': 'os.setsid()',
  'priority': 'os.nice(-20)',
  'a scheduler': 'os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))',
  'all processors': 'os.sched_setaffinity(0, range(os.cpu_count()))',
  'what the disk has free': 'os.statvfs("/")',
  'the terminal': 'os.openpty()',
}  # fmt: skip
# Files that it must not read. With namespaces they are not there.
HIDDEN = {
  'a password': 'open("/etc/shadow").read()',
  'the users': 'open("/etc/passwd").read()',
  'the host': 'open("/etc/hostname").read()',
  'the checkout': f'open({__file__!r}).read()',
  'another way to it': f'open("/proc/self/root" + {__file__!r}).read()',
  'a way up': 'open("/usr/lib/../../etc/passwd").read()',
  'a way up from a descriptor':
    'os.open("../../etc/passwd", 0, dir_fd=os.open("/usr/lib", os.O_PATH))',
  'a list of the checkout': f'os.listdir({os.path.dirname(__file__)!r})',
}  # fmt: skip
# Functions of the C library that must fail with EPERM.
CALLS = """
  ptrace(16, os.getppid(), 0, 0) | ptrace(0, 0, 0, 0) | unshare(0x10000000) | setns(0, 0)
  mount(b"none", b"/tmp", b"tmpfs", 0, 0) | umount2(b"/tmp", 2) | swapoff(b"/tmp")
  process_vm_readv(os.getppid(), buffer, 1, buffer, 1, 0) | personality(0x0040000)
  process_vm_writev(os.getppid(), buffer, 1, buffer, 1, 0) | prctl(4, 1, 0, 0, 0)
  prctl(22, 0, 0, 0, 0) | sethostname(b"x", 1) | setdomainname(b"x", 1) | reboot(0)
  klogctl(3, buffer, 4096) | acct(b"/tmp/x") | adjtimex(buffer) | settimeofday(buffer, 0)
  inotify_init() | fanotify_init(0, 0) | timerfd_create(1, 0) | signalfd(-1, buffer, 0)
  splice(0, 0, 1, 0, 1, 0) | tee(0, 1, 1, 0) | vmsplice(1, buffer, 1, 0)
  shmget(0, 4096, 0o1600) | semget(0, 1, 0o1600) | msgget(0, 0o1600) | mlockall(3)
  setreuid(0, 0) | setresgid(0, 0, 0) | setpgid(0, 0) | setpriority(0, 0, -20)
  name_to_handle_at(-100, b"/", buffer, buffer, 0) | open_by_handle_at(0, buffer, 0)
  fallocate(1, 0, 0, 1) | sync_file_range(1, 0, 1, 0) | syncfs(1) | chroot(b"/")
  syscall(424, 0, 9, 0, 0) | syscall(425, 1, buffer) | syscall(428, -100, b"/", 0)
  syscall(430, b"tmpfs", 0) | syscall(434, os.getppid(), 0) | syscall(438, 0, 0, 0)
  syscall(437, -100, b"/", buffer) | syscall(440, 0, buffer, 1, 4, 0) | syscall(447, 0)
  syscall(442, -100, b"/", 0, 0) | syscall(444, buffer, 8, 0) | syscall(449, buffer, 1, 0)
""".replace('\n', '|').split('|')
# Code, and what its output must have.
OTHERS = {
  'memory': ('x = bytearray(1 << 30)', 'MemoryError'),
  'memory by pieces': ('x = []\nwhile True: x.append(bytearray(1 << 20))', 'MemoryError'),
  'memory of a text': ('"a" * (1 << 40)', 'MemoryError'),
  'memory of a number': ('1 << (1 << 40)', 'MemoryError'),
  'memory that is mapped': ('mmap.mmap(-1, 1 << 30)', 'OSError: .*Cannot allocate'),
  'memory of threads': (
    'threading.stack_size(1 << 30)\nthreading.Thread().start()', "can't start new thread",
  ),
  'more memory': ('resource.setrlimit(resource.RLIMIT_AS, (-1, -1))', 'Error'),
  'less of another': ('resource.prlimit(os.getppid(), 0, (0, 0))', 'PermissionError'),
  'many files': ('x = [os.pipe() for _ in range(99)]', 'Too many open files'),
  'a device': ('open("/dev/mem", "rb").read(1)', 'Error'),
  'a disk': ('open("/dev/sda", "rb").read(1)', 'Error'),
  'shared memory': ('open("/dev/shm/x", "w")', 'Error'),
  'what is in /dev': ('os.listdir("/dev/shm")', 'Error'),
  'the home': ('os.listdir(os.path.expanduser("~root"))', 'Error'),
  'a socket of the machine': ('open("/var/run/docker.sock")', 'Error'),
  'the kernel': ('os.listdir("/sys/kernel")', 'Error'),
  'control groups': ('open("/sys/fs/cgroup/cgroup.procs", "w")', 'Error'),
  'an alarm': ('signal.setitimer(0, 1)', 'Operation not permitted'),
  'capabilities': ('open("/proc/self/status").read()', 'PermissionError'),
  'an older system call': ('libc.syscall(435, 0, 0), ctypes.get_errno()', r'\(-1, 38\)'),
  'a socket that is open': (
    'def mode(f):\n  try: return os.fstat(f).st_mode\n  except OSError: return 0\n'
    '[f for f in range(64) if stat.S_ISSOCK(mode(f))]', r'^\[\]\n',
  ),
  'an environment': ('sorted({*os.environ} - {"LC_CTYPE"})',
    r"^\['LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'",
  ),
  'the package': ('{*sys.modules} & {"agent_r1_jax", "jax", "numpy"}', r'^set\(\)\n'),
}  # fmt: skip
# What ends the interpreter, and the status that the session then has.
ENDS = {
  'it exits': ('os._exit(0)', 'ended'),
  'it aborts': ('os.abort()', 'ended'),
  'it reads no address': ('ctypes.string_at(0)', 'ended'),
  'it fills the stack': (
    'sys.setrecursionlimit(10**9)\nf = lambda x: [*map(f, [x])]\nf(0)', 'ended|error',
  ),
  'it closes all files': ('os.closerange(0, 64)', 'ended'),
  'it stops itself': ('signal.raise_signal(signal.SIGKILL)', 'error|ended'),
  'it prints without end': ('while True: print("a" * 1000)', 'output'),
  'it catches what stops it': (
    'while True:\n  try: time.sleep(9)\n  except BaseException: pass', 'timeout',
  ),
  'it holds the interpreter': ('re.match("(a+)+b", "a" * 60)', 'timeout'),
  'it counts for ever': ('10 ** 10 ** 10', 'timeout|error'),
  'a thread outlives its cell': (
    'def f():\n  while True: pass\nthreading.Thread(target=f).start()\ntime.sleep(9)',
    'timeout',
  ),
  'it ignores signals': (
    'for s in (2, 15): signal.signal(s, signal.SIG_IGN)\nwhile True: pass', 'timeout',
  ),
  'it reads what it is sent': (
    'for f in range(3, 9):\n  try: os.read(f, 1 << 20)\n  except OSError: pass',
    'timeout',
  ),
}  # fmt: skip
if platform.machine() == 'x86_64':  # Calls by the numbers of its other architectures.
  ENDS |= {
    'fork of 32 bits': (
      'code = mmap.mmap(-1, 4096, prot=7)\n'
      'code.write(bytes.fromhex("b802000000cd80c3"))\n'
      'address = ctypes.addressof(ctypes.c_char.from_buffer(code))\n'
      'ctypes.CFUNCTYPE(ctypes.c_int)(address)()',
      'ended',
    ),
    'fork of x32': ('if libc.syscall(0x40000039) < 0: os._exit(0)', 'ended'),
  }


@pytest.mark.parametrize('name', REFUSED)
def test_it_is_refused(box, name):
  assert 'PermissionError' in _run(box, REFUSED[name]).text
  assert _run(box, '1')[:2] == ('1\n', 'ok')  # The worker is as it was.


@pytest.mark.parametrize('name', HIDDEN)
def test_a_file_is_not_read(box, outside, name):
  assert outside in _run(box, HIDDEN[name]).text


def test_what_stat_tells(box, outside):
  """Landlock does not cover it, and Python needs it: namespaces alone hide a file."""
  told = _run(box, f'os.stat({__file__!r}).st_size').text
  if outside == 'FileNotFoundError':
    assert outside in told
    # Of the folders above the interpreter and this package nothing else is there.
    shown = (
      f'os.path.exists({os.path.dirname(__file__)!r}), os.path.exists("/etc/passwd")'
    )
    assert _run(box, shown).text == '(False, False)\n'
  else:
    assert told == f'{os.stat(__file__).st_size}\n'


@pytest.mark.parametrize('call', [call.strip() for call in CALLS if call.strip()])
def test_a_system_call_is_refused(box, call):
  code = f'libc.{call}, errno.errorcode.get(ctypes.get_errno())'
  assert _run(box, code)[:2] == ("(-1, 'EPERM')\n", 'ok')


@pytest.mark.parametrize('name', OTHERS)
def test_it_gets_nothing(box, name):
  code, expected = OTHERS[name]
  assert re.search(expected, _run(box, code).text)
  assert _run(box, '1')[:2] == ('1\n', 'ok')


@pytest.mark.parametrize('name', ENDS)
def test_it_ends_itself_alone(box, name):
  code, status = ENDS[name]
  late = 0.2 if 'timeout' in status else SECONDS
  assert re.fullmatch(status, _run(box, code, late).status)
  assert _run(box, '1')[:2] == ('1\n', 'ok')


def test_it_writes_no_file(box, tmp_path):
  there = tmp_path / 'mine.txt'
  there.write_text('mine')
  for code in (
    f'open({str(there)!r}, "w")',
    f'open({str(tmp_path / "new")!r}, "x")',
    f'import os\nos.remove({str(there)!r})',
    f'import os\nos.truncate({str(there)!r}, 0)',
    f'import os\nos.chmod({str(there)!r}, 0o777)',
    f'open({str(there)!r}).read()',
  ):
    # With namespaces it has another /tmp, where there is no such file.
    assert re.search('PermissionError|FileNotFoundError', _run(box, code).text)
  assert [path.read_text() for path in tmp_path.iterdir()] == ['mine']


def test_seccomp_alone_keeps_files_and_processes(tmp_path):
  """As where Landlock is waived, or too old to know truncation and signals."""
  there = tmp_path / 'mine.txt'
  there.write_text('mine')
  box = sandbox.Sandbox(without=('landlock',))
  for code in (
    f'import os\nos.open({str(there)!r}, os.O_ACCMODE | os.O_TRUNC)',
    f'import os\nos.open({str(there)!r}, os.O_RDONLY | os.O_TRUNC)',
    f'open({str(there)!r}, "a")',
    f'open({str(tmp_path / "new")!r}, "x")',
    f'import os\nos.open({str(tmp_path)!r}, os.O_TMPFILE | os.O_RDWR)',
    f'import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {os.getpid()})',
  ):
    # With namespaces it has another /tmp, where there is no such file.
    assert re.search('PermissionError|FileNotFoundError', _run(box, code).text)
  assert [path.read_text() for path in tmp_path.iterdir()] == ['mine']
  box.close()
