"""Functions in a process: killed when late, replaced, and never left behind."""

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import graders
import pytest
import waiting

from agent_r1_jax.host import isolated, workers


async def test_a_call_returns_what_the_function_returns():
  grade = isolated.in_subprocess(graders.length, seconds=60, processes=1)
  assert await grade('four') == 4
  assert await grade('four', times=3) == 12
  assert grade.__name__ == 'length' and workers.is_async(grade)
  chat = isolated.in_subprocess(graders.chat, seconds=60, processes=1)
  assert await chat('what it prints is no answer') == 'what it prints is no answer'


async def test_it_is_the_function_of_the_same_file(tmp_path, monkeypatch):
  """And not one that lies in the working directory and has its name."""
  (tmp_path / 'graders.py').write_text('def length(text):\n  return "another"')
  monkeypatch.chdir(tmp_path)
  grade = isolated.in_subprocess(graders.length, seconds=60, processes=1)
  assert await grade('four') == 4


async def test_modules_are_imported_before_the_first_call(refused):
  grade = isolated.in_subprocess(graders.imported, seconds=60, imports=['this'])
  assert await grade('this')
  missing = isolated.in_subprocess(graders.imported, seconds=60, imports=['not_there'])
  with refused('not_there', isolated.FailedError):
    await missing('this')


async def test_processes_are_kept_and_are_so_many():
  which = isolated.in_subprocess(graders.process, seconds=60, processes=2)
  found = await asyncio.gather(*(which(n) for n in range(12)))
  assert 1 <= len(set(found)) <= 2 and os.getpid() not in found
  assert await which() in found


async def test_a_catastrophe_is_killed_and_holds_nobody_up(refused):
  which = isolated.in_subprocess(graders.catastrophe, seconds=1.0, processes=1)
  assert await which('aab') is True
  caught = asyncio.create_task(which('a' * 60))
  turns = 0
  while not caught.done():  # The interpreter goes on.
    await asyncio.sleep(0.01)
    turns += 1
  with refused('catastrophe gave no', TimeoutError):
    await caught
  assert turns > 5
  assert await which('aab') is True  # In another process.


async def test_a_process_that_ends_is_replaced(refused):
  leave = isolated.in_subprocess(graders.leave, seconds=60, processes=1)
  for _ in range(2):
    with refused('leave ended with', isolated.EndedError):
      await leave()


async def test_a_function_beyond_its_memory_is_lost_and_replaced(refused):
  allocate = isolated.in_subprocess(
    graders.allocate, seconds=60, processes=1, memory_mb=256
  )
  assert await allocate(200) == 200 << 20
  with refused('status 12 before it', isolated.EndedError):
    await allocate(300)
  assert await allocate(200) == 200 << 20  # In another process.
  free = isolated.in_subprocess(graders.allocate, seconds=60, processes=1)
  assert await free(2048) == 2 << 30


async def test_threads_take_no_memory_of_a_function():
  """Each would reserve 64 MiB for itself, and the call fail now and then."""
  allocate = isolated.in_subprocess(
    graders.allocate_beside_threads, seconds=60, processes=1, memory_mb=256
  )
  assert await allocate(200) == 200 << 20


def test_a_lower_limit_of_memory_is_kept():
  code = (
    'import asyncio, resource, sys\nsys.path.insert(0, "tests")\nimport graders\n'
    'from agent_r1_jax.host import isolated\n'
    'resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n'
    'fn = isolated.in_subprocess(graders.allocate, seconds=60, memory_mb=1 << 20)\n'
    'assert asyncio.run(fn(1024)) == 1 << 30\n'
    'try:\n  asyncio.run(fn(4096))\nexcept isolated.EndedError:\n  print("lost")'
  )
  root = pathlib.Path(__file__).parents[1]
  command = [sys.executable, '-c', code]
  run = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, timeout=120)
  assert run.stdout == b'lost\n'


@pytest.mark.parametrize(
  'kind, message',
  [('exit', 'SystemExit: 0'), ('value', 'ValueError: bad'), ('stop', 'StopIteration')],
)
async def test_what_a_function_raises_is_in_the_error(refused, kind, message):
  fail = isolated.in_subprocess(graders.fail, seconds=60, processes=1)
  with refused(message, isolated.FailedError):
    await fail(kind)


async def test_a_result_that_is_no_json_is_an_error(refused):
  with refused('is not JSON: TypeError', isolated.FailedError):
    await isolated.in_subprocess(graders.odd, seconds=60)()


@pytest.mark.parametrize(
  'kwargs, message',
  [
    ({'fn': lambda: 0}, 'is no name to import'),
    ({'seconds': 0}, 'seconds'),
    ({'processes': 0}, 'processes'),
    ({'memory_mb': 0}, 'memory_mb'),
  ],
)
def test_wrong_arguments_are_refused(refused, kwargs, message):
  with refused(message):
    isolated.in_subprocess(**{'fn': graders.length, 'seconds': 1.0} | kwargs)


_TOLD_TO_END = """
  import asyncio, os, pathlib, signal, sys
  sys.path.insert(0, 'tests')
  import graders
  from agent_r1_jax.host import isolated

  wait_for = isolated.in_subprocess(graders.wait_for, seconds=60, processes=1)
  which = isolated.in_subprocess(graders.process, seconds=60, processes=1)

  async def main(go_on):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      signal.signal(number, lambda *_: None)
    grading, before = asyncio.create_task(wait_for(str(go_on))), await which()
    while not go_on.with_name('go.begun').exists():
      await asyncio.sleep(0.01)
    (process,) = which._idle
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      os.killpg(0, number)
      os.kill(process._process.pid, number)
    go_on.touch()
    assert await grading == 'went on' and await which() == before
    os.kill(before, signal.SIGKILL)
    process._process.wait()
    assert await which() != before

  asyncio.run(main(pathlib.Path(sys.argv[1])))
"""


def test_what_ends_a_run_fails_no_call(tmp_path):
  """Ctrl-C goes to a terminal's whole group, and a scheduler's SIGTERM to every process.

  One that was killed while it had no call is replaced.
  """
  run = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(_TOLD_TO_END), str(tmp_path / 'go')],
    cwd=pathlib.Path(__file__).parents[1],
    start_new_session=True,
    capture_output=True,
    text=True,
  )
  assert run.returncode == 0 and not run.stderr, run.stderr


_KILLED = """
  import asyncio, sys
  sys.path.insert(0, 'tests')
  import graders
  from agent_r1_jax.host import isolated

  which = isolated.in_subprocess(graders.process, seconds=60, processes=1)
  hangs = isolated.in_subprocess(graders.catastrophe, seconds=0.5, processes=1)

  async def main():
    print(await which(), flush=True)
    await hangs('aab')
    (process,) = hangs._idle
    print(process._process.pid, flush=True)
    # From here on nobody kills it, for this process is killed.
    process._pipe.send(((['a' * 60], {}), 0.5))
    print('ready', flush=True)
    await asyncio.sleep(3600)

  asyncio.run(main())
"""


def test_none_is_left_behind_by_a_process_that_is_killed():
  run = subprocess.Popen(
    [sys.executable, '-c', textwrap.dedent(_KILLED)],
    cwd=pathlib.Path(__file__).parents[1],
    stdout=subprocess.PIPE,
    text=True,
  )
  idle, busy, ready = (run.stdout.readline().strip() for _ in range(3))
  assert ready == 'ready' and not any(map(waiting.has_ended, (int(idle), int(busy))))
  run.send_signal(signal.SIGKILL)
  run.wait()
  run.stdout.close()
  waiting.until(lambda: waiting.has_ended(int(idle)), 'the end of the idle one')
  waiting.until(lambda: waiting.has_ended(int(busy)), 'the end of the busy one')
