"""host/runtime.py and memory.py: what a process is told before JAX starts."""

import os
import platform
import queue
import socket
import subprocess
import sys

import pytest
import script

from agent_r1_jax.host import runtime

_MEMORY = """
import contextlib
import resource
import threading
import numpy as np
from agent_r1_jax.host import preemption, runtime
def allocate():
  faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  for _ in range(2): np.ones(10_000_000)
  before = faults()
  for _ in range(5): np.ones(10_000_000)
  print(faults() - before)
with {watch}():
  # As XLA does, in threads that are younger than the one that awaits signals.
  for _ in range(2):
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
"""
_RELEASE = """
import gc
gc.disable()
import numpy as np
from agent_r1_jax.host import memory
memory.retain_freed_memory()
def allocate():
  pairs = [(np.ones(2_000_000), np.ones(1000)) for _ in range(20)]
  cycle = [np.ones(10_000_000)]
  cycle.append(cycle)
  return [small for _, small in pairs]  # They lie between the large ones, now freed.
kept = allocate()
for _ in range(2):
  before = memory._own_memory()
  memory.release_freed_memory(cycles=True)
  print(before - memory._own_memory())
  memory.KEPT = 0
"""
_COMPILE = """
import jax
from agent_r1_jax.host import runtime
runtime.enable_compilation_cache()
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
jax.jit(lambda x: x + 1)(1.0)
"""


def python(code, **environment):
  """What a new process prints, whose memory is its own and which JAX was told nothing."""
  names = ('JAX_COMPILATION_CACHE_DIR', 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS')
  kept = {k: v for k, v in os.environ.items() if k not in names}
  kept |= {'PYTHONPATH': str(script.ROOT)} | environment
  command = [sys.executable, '-c', code]
  done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=1200)
  assert done.returncode == 0, done.stderr
  return done.stdout


def run(code, **environment):
  done = script.run('-c', code, **environment)
  assert done.returncode == 0, done.stderr
  return done


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='mallopt is glibc’s')
def test_freed_memory_is_not_faulted_in_again():
  watches = ('preemption.watch', 'contextlib.nullcontext')
  outputs = (python(_MEMORY.format(watch=watch)) for watch in watches)
  kept, given_back = (max(map(int, output.split())) for output in outputs)
  pages = 5 * 80_000_000 // os.sysconf('SC_PAGE_SIZE')
  assert kept < pages / 100
  # Large pages, where the kernel gives them, make fewer faults of the same work.
  assert given_back > 2 * kept


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='malloc_trim is glibc’s')
def test_a_large_process_returns_what_it_freed_and_a_small_one_does_not():
  small, large = map(int, python(_RELEASE).split())
  assert abs(small) < 1e7
  assert large > 0.9 * 400e6  # 20 blocks of 16 MB, and 80 MB in a cycle.


def test_where_accelerators_are_memory_is_left_alone():
  code = """
import importlib.util
from agent_r1_jax.host import memory
importlib.util.find_spec = lambda name: name == 'libtpu'
print(memory.retain_freed_memory())
"""
  assert run(code, JAX_PLATFORMS='').stdout.split() == ['False']


def test_a_workdir_that_is_reserved_sets_malloc_before_jax_starts_threads(tmp_path):
  code = f"""
import os
from agent_r1_jax import config, playing
from agent_r1_jax.host import memory
from agent_r1_jax.rl import algorithms
retain = memory.retain_freed_memory
def note():
  from jax._src import xla_bridge
  print(xla_bridge.backends_are_initialized())
  return retain()
memory.retain_freed_memory = note
try:
  with playing.reserve(config.Config(), {str(tmp_path)!r}, algorithms.grpo()):
    pass
except ValueError:  # It names no model.
  pass
"""
  assert run(code).stdout.split()[0] == 'False'


def test_compilations_lie_in_the_users_cache(tmp_path):
  python(_COMPILE, XDG_CACHE_HOME=str(tmp_path))
  assert list((tmp_path / 'agent_r1_jax' / 'compiled').iterdir())


@pytest.mark.parametrize('chosen', ['', 'elsewhere'])
def test_unless_jax_was_told_where(tmp_path, chosen):
  folder = str(tmp_path / chosen) if chosen else ''
  python(_COMPILE, XDG_CACHE_HOME=str(tmp_path), JAX_COMPILATION_CACHE_DIR=folder)
  assert not (tmp_path / 'agent_r1_jax').exists()
  assert bool(chosen) == (tmp_path / 'elsewhere').exists()


_JOIN = """
import os, pathlib, socket
from agent_r1_jax.host import runtime
with socket.socket() as free:
  free.bind(('127.0.0.1', 0))
  os.environ['JAX_COORDINATOR_ADDRESS'] = f'localhost:{free.getsockname()[1]}'
os.environ |= {'JAX_NUM_PROCESSES': '1', 'JAX_PROCESS_ID': '0'}
runtime.join_processes()
port = int(os.environ['JAX_COORDINATOR_ADDRESS'].rpartition(':')[2])
for name in ('tcp', 'tcp6'):
  for line in pathlib.Path('/proc/self/net', name).read_text().splitlines()[1:]:
    address, _, there = line.split()[1].partition(':')
    if int(there, 16) == port and line.split()[3] == '0A':  # it listens
      print(address)
"""


@pytest.mark.skipif(not os.path.exists('/proc/self/net/tcp'), reason='needs /proc')
def test_the_coordinator_listens_where_it_was_told_to():
  (listening,) = set(run(_JOIN, JAX_PLATFORMS='cpu').stdout.split())
  loopback = ('0100007F', '0' * 16 + 'FFFF00000100007F', '0' * 24 + '01000000')
  assert listening in loopback, 'others than those at the address can reach it'


def test_a_start_that_waits_for_other_processes_says_so(monkeypatch):
  """JAX itself says nothing while one is missing whose flags were refused."""
  said = queue.Queue()
  monkeypatch.setattr(runtime, '_NAMED_SECONDS', 0.0)
  monkeypatch.setattr(runtime.watchdog, 'print_line', said.put)
  lines = []
  monkeypatch.setattr(
    runtime.jax.distributed, 'initialize', lambda *_, **__: lines.append(said.get())
  )
  variables = {'COORDINATOR_ADDRESS': 'x:1', 'NUM_PROCESSES': '2', 'PROCESS_ID': '1'}
  for name, value in variables.items():
    monkeypatch.setenv(f'JAX_{name}', value)
  runtime.join_processes()
  assert lines[0].startswith('waiting for the other processes')


@pytest.mark.parametrize(
  ('coordinator', 'expected'),
  [
    ('127.0.0.1:1234', '127.0.0.1:1234'),
    ('[::1]:1234', '[::1]:1234'),
    ('192.0.2.7:1234', None),  # kept for documents: nobody's
    ('no.such.host.invalid:1234', None),
    ('thismachine:1234', None),
    ('service:1234', None),
  ],
)
def test_where_the_coordinator_listens(coordinator, expected, monkeypatch):
  resolve = socket.getaddrinfo
  names = {'thismachine': '127.0.1.1', 'service': '192.0.2.7'}

  def named(host, *args, **kwargs):
    return resolve(names.get(host, host), *args, **kwargs)

  monkeypatch.setattr(socket, 'getaddrinfo', named)
  if coordinator.startswith('[') and not socket.has_ipv6:
    pytest.skip('no IPv6 here')
  assert runtime._bind_address(coordinator) == expected


_NARRATION = """
import pathlib, sys
from absl import app, flags, logging
from agent_r1_jax.host import runtime
folder = pathlib.Path({folder!r}) / 'site-packages'
folder.mkdir(exist_ok=True)
(folder / 'library.py').write_text(
  'from absl import logging\\nlogging.info("narrates")\\nlogging.warning("warns")')
sys.path.insert(0, str(folder))
def main(_):
  for _ in range(2): runtime.quiet_logging()
  import library
  logging.info('mine')
  import logging as py
  py.getLogger('jax._src.x').info('narrates')
app.run(main, argv=['x', *{arguments!r}])
"""


@pytest.mark.parametrize('arguments, narrated', [([], 0), (['--verbosity=0'], 2)])
def test_libraries_do_not_narrate_and_warn_all_the_same(tmp_path, arguments, narrated):
  done = run(_NARRATION.format(folder=str(tmp_path), arguments=arguments))
  assert done.stderr.count('narrates') == narrated
  assert done.stderr.count('warns') == done.stderr.count('mine') == 1


_REFUSED = """
from absl import app
from agent_r1_jax import config, train
from agent_r1_jax.rl import algorithms
class Tasks:
  def __len__(self): return 1
  def __getitem__(self, index): raise ValueError('a bug of theirs')
class Short(Tasks):
  def __len__(self): return -1
def main(_):
  train.run(config.Config(schedule=config.Schedule(steps={steps})), 'x',
            tasks={tasks}, make_env=None, algorithm=algorithms.grpo())
app.run(main)
"""


@pytest.mark.parametrize(
  'steps, tasks, flags, said',
  [
    (-3, '[]', [], '{path}:11: schedule.steps is -3; '),
    (1, "['hello']", [], "{path}:11: tasks[0] is 'hello'; it must be "),
    (1, 'Tasks()', [], 'ValueError: a bug of theirs'),
    (1, 'Short()', [], 'ValueError: __len__() should return >= 0'),
    (-3, '[]', ['--verbosity=0'], 'ValueError: schedule.steps is -3; '),
  ],
)
def test_a_refusal_is_one_line_and_a_bug_has_its_traceback(
  tmp_path, steps, tasks, flags, said
):
  path = tmp_path / 'mine.py'
  path.write_text(_REFUSED.format(steps=steps, tasks=tasks))
  done = script.run(path, *flags)
  *before, last = done.stderr.splitlines()
  said = said.format(path=path)
  assert (done.returncode, last[: len(said)]) == (1, said)
  assert bool(before) == said.startswith('ValueError: ')
