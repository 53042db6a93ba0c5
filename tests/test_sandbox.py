"""The sandbox: what it runs, and what its code cannot reach."""

import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading

import confined
import pytest
import waiting

from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.tools import python, sandbox

pytestmark = pytest.mark.usefixtures('needs_sandbox')
box, needs_sandbox = confined.box, confined.needs_sandbox

# A cell that must end does so in far less; it only guards against hanging.
SECONDS = 60.0


def _run(box, code, seconds=SECONDS):
  with box.open_session() as session:
    return session.run(code, seconds)


class TestSession:
  """What a session gives."""

  def test_it_prints_and_keeps_its_variables(self, box):
    with box.open_session() as session:
      assert session.run('x = 6 * 7\nprint("hi")')[:2] == ('hi\n', 'ok')
      assert session.run('x')[:2] == ('42\n', 'ok')
      assert session.run('None')[:2] == ('', 'ok')
    assert 'NameError' in _run(box, 'x').text

  def test_an_error_is_its_traceback(self, box):
    with box.open_session() as session:
      output = session.run('def f():\n  return 1 / 0\nf()')
      assert output.status == 'error'
      assert output.text.startswith('Traceback') and 'sandbox_worker' not in output.text
      assert output.text.endswith('ZeroDivisionError: division by zero\n')
      assert session.run('1').status == 'ok'

  @pytest.mark.parametrize('code', ['def f(:', '"' + 'a' * 10, '\x00', 'é = 1\né', ''])
  def test_whatever_the_code_is(self, box, code):
    assert _run(box, code).status in ('ok', 'error')

  def test_it_imports_the_standard_library(self, box):
    code = 'import json, decimal, collections, datetime, zoneinfo, threading, re\n1'
    assert _run(box, code)[:2] == ('1\n', 'ok')

  def test_its_main_module_has_what_it_defines(self, box):
    code = 'import pickle\nclass A: x = 5\npickle.loads(pickle.dumps(A())).x'
    assert _run(box, code)[:2] == ('5\n', 'ok')

  def test_a_thread_runs(self, box):
    code = 'import threading\nt = threading.Thread(target=print, args=(3,))\n'
    code += 't.start()\nt.join()'
    assert _run(box, code)[:2] == ('3\n', 'ok')

  @pytest.mark.parametrize('code', ['while True: pass', 'import time\ntime.sleep(1e6)'])
  def test_late_code_is_stopped(self, box, code):
    with box.open_session() as session:
      assert session.run(code, 0.2).status == 'timeout'
      assert session.run('1')[:2] == ('', 'ended')

  def test_output_is_cut_and_a_flood_is_stopped(self, box):
    output = _run(box, 'print("é" * 1000)')
    assert output.status == 'ok' and output.text.endswith('output is cut)')
    assert len(output.text.encode()) < 1100
    assert _run(box, 'while True: print("a" * 100)').status == 'output'

  @pytest.mark.parametrize('code', ['import os\nos._exit(0)', 'import os\nos.abort()'])
  def test_an_interpreter_that_ends(self, box, code):
    assert _run(box, code).status == 'ended'

  def test_sys_exit_ends_the_cell(self, box):
    assert _run(box, 'print(1)\nimport sys\nsys.exit(3)\nprint(2)')[:2] == ('1\n', 'ok')

  def test_many_sessions_at_a_time(self, box):
    sessions = [box.open_session() for _ in range(20)]
    for number, session in enumerate(sessions):
      session.run(f'x = {number}')
    found = [session.run('x').text for session in sessions]
    assert found == [f'{number}\n' for number in range(20)]
    for session in sessions:
      session.close()

  def test_output_that_the_code_takes_back_is_no_hang(self, box):
    """It opens the pipes again and races the caller for what it wrote."""
    code = (
      'import os, time\nfor f in range(1, 8):\n  try:\n'
      '    pair = os.open(f"/proc/self/fd/{f}", os.O_RDONLY), f\n'
      '    while True: os.write(pair[1], b"x"); os.read(pair[0], 1)\n'
      '  except OSError: pass'
    )
    with box.open_session() as session:
      # The race is narrow: what would hang in it is a read that waits.
      assert not any(map(os.get_blocking, session.close.peek()[2][-1]))
      assert session.run(code, 0.5).status in ('timeout', 'output', 'ended')

  def test_many_files_are_open(self, box):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
      pytest.skip('it may not open so many')
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    many = [os.dup(0) for _ in range(1100)]
    try:
      assert _run(box, '1')[:2] == ('1\n', 'ok')
    finally:
      for descriptor in many:
        os.close(descriptor)
      resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

  def test_the_garbage_collector_may_close_it_while_the_worker_answers(self, box):
    other = box.open_session()
    with box._lock:  # As in a thread that opens a session.
      thread = threading.Thread(target=other.close, daemon=True)
      thread.start()
      thread.join(SECONDS)
      assert not thread.is_alive()

  def test_one_of_an_earlier_worker_ends_none_of_the_next(self):
    box = sandbox.Sandbox()
    old = box.open_session()
    box._end_worker()
    with box.open_session() as session:
      _, pid, _ = session.close.peek()[2]
      # With namespaces numbers begin anew; here it is made to have the same.
      worker = old.close.peek()[2][0]
      old.close.detach()
      sandbox._close_session(worker, pid, ())
      assert session.run('1')[:2] == ('1\n', 'ok')
    box.close()


def test_root_is_no_root_in_it(monkeypatch):
  monkeypatch.setattr(sandbox, '_isolate', lambda *_: [])
  box = sandbox.Sandbox()
  with box.open_session() as session:
    session.run('1')
    pid = next(n for n in session.close.peek()[2] if type(n) is int)
    status = pathlib.Path(f'/proc/{pid}/status').read_text()
  found = re.search(r'CapPrm:\s(\w+)\nCapEff:\s(\w+)', status)
  assert found and all(int(bits, 16) in (0, 1 << 2) for bits in found.groups())
  box.close()


def test_it_has_nothing_of_the_environment(monkeypatch):
  monkeypatch.setenv('API_KEY', 'secret')
  box = sandbox.Sandbox()
  output = _run(box, 'import os, sys\nprint(os.environ)\n"numpy" in sys.modules')
  assert 'secret' not in output.text and output.text.endswith('False\n')
  box.close()


def test_a_worker_that_was_killed_is_replaced(box):
  with box.open_session() as session:
    process, _ = box._end_worker.peek()[2]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert session.run('1').status == 'ended'
  assert _run(box, '1')[:2] == ('1\n', 'ok')


def test_nothing_is_left_behind(tmp_path):
  """Whoever uses it is killed in the midst of a call: its processes end with it."""
  script = (
    'import sys\nfrom agent_r1_jax.tools import sandbox\n'
    'box = sandbox.Sandbox()\nsession = box.open_session()\n'
    'import json\nprint(json.dumps([box._end_worker.peek()[2][0].pid]), flush=True)\n'
    'session.run("while True: pass", 1e6)'
  )
  with subprocess.Popen(
    [sys.executable, '-c', script], stdout=subprocess.PIPE, text=True
  ) as process:
    assert process.stdout
    (worker,) = json.loads(process.stdout.readline())
    process.kill()
  waiting.until(lambda: waiting.has_ended(worker), 'the end of the worker')


class TestMachine:
  """What a machine lacks is named."""

  @pytest.fixture
  def poor(self, monkeypatch, tmp_path):
    """A worker that finds no Landlock."""
    worker = tmp_path / 'sandbox_worker.py'
    text = sandbox._WORKER.read_text()
    assert 'landlock_version() < 1' in text
    worker.write_text(text.replace('landlock_version() < 1', 'True'))
    monkeypatch.setattr(sandbox, '_WORKER', worker)
    monkeypatch.setattr(sandbox, '_isolate', lambda *_: [])

  def test_it_refuses_to_run(self, poor):
    with pytest.raises(RuntimeError, match='confined.*landlock: it needs Linux'):
      sandbox.Sandbox()

  def test_unless_the_layer_is_named(self, poor):
    box = sandbox.Sandbox(without=('landlock',))
    assert _run(box, '1')[:2] == ('1\n', 'ok')
    assert 'PermissionError' in _run(box, 'import socket\nsocket.socket()').text
    box.close()

  def test_a_checkout_in_tmp(self, monkeypatch, tmp_path):
    if not str(tmp_path).startswith('/tmp/'):
      pytest.skip('the folder of the tests is not in /tmp')
    worker = shutil.copy(sandbox._WORKER, tmp_path)
    monkeypatch.setattr(sandbox, '_WORKER', pathlib.Path(worker))
    box = sandbox.Sandbox()
    assert _run(box, '1')[:2] == ('1\n', 'ok')
    box.close()

  def test_namespaces_that_hide_what_it_imports_are_none(self):
    """Such as a package that a .pth file names, in a folder of its own."""
    if not sandbox._isolate(('pytest',)):
      pytest.skip('bubblewrap is not installed, or namespaces are not allowed here')
    assert not sandbox._isolate(('pytest', 'no_such_module'))

  def test_a_bubblewrap_that_hangs_is_none(self, monkeypatch, tmp_path):
    (tmp_path / 'bwrap').write_text('#!/bin/sh\nexec sleep 1000\n')
    (tmp_path / 'bwrap').chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path), ':')
    monkeypatch.setattr(sandbox, '_PROBE_SECONDS', 0.1)
    assert sandbox._isolate() == []

  def test_mistakes(self):
    box = sandbox.Sandbox()
    box.close()
    with pytest.raises(RuntimeError, match='was closed; make another'):
      box.open_session()
    with pytest.raises(ValueError, match=r"without: \['bubble'\] are no layers"):
      sandbox.Sandbox(without=('bubble',))
    with pytest.raises(RuntimeError, match=r"it imports \['no_such_module'\] first"):
      sandbox.Sandbox(preload=('no_such_module',))


class TestTool:
  """The tool that an agent calls."""

  async def test_stateless(self, box):
    tool = python.python_tool(box)
    assert tool.name == 'python'
    assert tool.schema['function']['parameters']['required'] == ['code']
    first = await tool_lib.call(tool, {'code': 'x = 1'})
    assert (first.text, first.ok) == ('(The code printed nothing.)', True)
    assert 'NameError' in (await tool_lib.call(tool, {'code': 'x'})).text

  async def test_stateful(self, box):
    tool = python.python_tool(box, stateful=True)
    await tool_lib.call(tool, {'code': 'x = 1'})
    assert (await tool_lib.call(tool, {'code': 'x'})).text == '1\n'
    ended = await tool_lib.call(tool, {'code': 'print(5)\nimport os\nos.abort()'})
    assert not ended.ok
    assert (
      'ended before the code did; the variables of earlier calls are gone' in ended.text
    )
    assert 'NameError' in (await tool_lib.call(tool, {'code': 'x'})).text

  async def test_late(self, box):
    tool = python.python_tool(box, seconds=0.2)
    late = await tool_lib.call(tool, {'code': 'print(1, flush=True)\nwhile True: pass'})
    assert not late.ok and 'was stopped after 0.2 seconds' in late.text


def test_bubblewrap_is_used_where_there_is_one():
  if not shutil.which('bwrap'):
    pytest.skip('bubblewrap is not installed')
  assert sandbox._isolate()[:1] in ([shutil.which('bwrap')], [])
