"""Tools of an MCP server, against real server processes over stdio and HTTP."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import pytest
import script
import waiting

from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.contrib.mcp import mcp_server
from agent_r1_jax.host import workers

SCRIPT = str(pathlib.Path(__file__).with_name('mcp_tools.py'))


class Http:
  """The test's own server process, which can be killed and started again."""

  def __init__(self, folder):
    with socket.create_server(('127.0.0.1', 0)) as listener:
      self.port = listener.getsockname()[1]
    self.command = [sys.executable, SCRIPT, str(folder), str(self.port)]

  def start(self):
    self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
    waiting.until(self.answers, 'an answer')
    return f'http://127.0.0.1:{self.port}/mcp'

  def answers(self):
    assert self.process.poll() is None
    with contextlib.suppress(OSError):
      socket.create_connection(('127.0.0.1', self.port)).close()
      return True

  def stop(self):
    self.process.kill()
    self.process.wait()

  def restart(self):
    self.stop()
    self.start()


@pytest.fixture(params=['stdio', 'http'])
def server(request, tmp_path, monkeypatch):
  """Yields (server, restart); restart is what the server's owner does after its death."""
  monkeypatch.setenv('API_KEY', 'secret')
  if request.param == 'stdio':
    command = [sys.executable, SCRIPT, str(tmp_path)]
    with mcp_server.McpServer(command=command) as server:
      yield server, lambda: None
    return
  http = Http(tmp_path)
  try:
    with mcp_server.McpServer(url=http.start()) as server:
      yield server, http.restart
  finally:
    http.stop()


async def ask(server, name, seconds=60.0, **arguments):
  (tool,) = (tool for tool in server.tools if tool.name == name)
  return await tool_lib.call(
    dataclasses.replace(tool, timeout=seconds, idempotent=False), arguments
  )


async def test_lists_calls_and_survives_a_hanging_call_and_its_death(server, tmp_path):
  server, restart = server
  await lists_and_calls(server)
  await survives(server, restart, tmp_path)


async def lists_and_calls(server):
  names = ['add', 'environment', 'fail', 'freeze', 'hang', 'picture', 'pid', 'refuse']
  assert sorted(tool.name for tool in server.tools) == names
  assert [tool.name for tool in server.tools if tool.idempotent] == ['pid']
  function = server.tools[0].schema['function']
  assert function['description'] == 'Adds.'
  assert function['parameters']['required'] == ['a']
  results = await asyncio.gather(*(ask(server, 'add', a=i, b=i) for i in range(20)))
  assert [r.text for r in results] == [str(2 * i) for i in range(20)]
  # Several event loops may call at once: training has more than one.
  result = await workers.call_on_user_loop(lambda: ask(server, 'add', a=3))
  assert (result.text, result.ok) == ('4', True)
  failed = await ask(server, 'fail')
  assert not failed.ok and 'Error executing tool fail' in failed.text
  refused = await ask(server, 'refuse')
  assert not refused.ok and 'closed on Sundays' in refused.text
  silent = await ask(server, 'refuse', silently=True)
  assert not silent.ok and 'does not say why' in silent.text
  wrong = await ask(server, 'add', a='x')
  assert not wrong.ok and "argument 'a'" in wrong.text
  assert (await ask(server, 'picture')).text == 'a dot\n[image, image/png]'


async def survives(server, restart, tmp_path):
  before = int((await ask(server, 'pid')).text)
  late = await ask(server, 'hang', seconds=0.2)
  assert late.timed_out and 'hang gave no answer within 0.2 s' in late.text
  # The server answers others meanwhile, and is left alone.
  assert (await ask(server, 'pid')).text == str(before)
  (tmp_path / 'hang').unlink(missing_ok=True)
  lost = asyncio.create_task(ask(server, 'hang'))
  await asyncio.to_thread(waiting.until, (tmp_path / 'hang').exists, 'the hang')
  (tmp_path / 'changed').touch()
  os.kill(before, signal.SIGKILL)
  assert not (await lost).ok
  restart()
  after = await ask(server, 'pid')
  assert after.ok and after.text != str(before)
  for name, arguments, said in (
    ('add', {'a': 1}, 'takes other arguments now: {"type": "object", '),
    ('fail', {}, 'has no such tool; it has: add, refuse, hang'),
  ):
    changed = await ask(server, name, **arguments)
    assert not changed.ok and said in changed.text


async def test_a_server_that_hangs_is_replaced(tmp_path, monkeypatch):
  monkeypatch.setattr(mcp_server, '_PROBE_SECONDS', 0.1)
  monkeypatch.setenv('GIVEN', 'x')
  monkeypatch.setenv('API_KEY', 'secret')
  command = [sys.executable, SCRIPT, str(tmp_path)]
  with mcp_server.McpServer(command=command, env=['GIVEN']) as server:
    before = (await ask(server, 'pid')).text
    frozen = asyncio.create_task(ask(server, 'freeze'))
    await asyncio.to_thread(waiting.until, (tmp_path / 'freeze').exists, 'the freeze')
    assert (await ask(server, 'pid', seconds=0.1)).timed_out
    assert int((await ask(server, 'pid')).text) != int(before)
    assert not (await frozen).ok
    names = (await ask(server, 'environment')).text.split()
    assert 'GIVEN' in names and 'PATH' in names and 'API_KEY' not in names
    monkeypatch.setattr(server, '_command', ['/no/such/program'])
    os.kill(int((await ask(server, 'pid')).text), signal.SIGKILL)
    texts = [(await ask(server, 'pid')).text for _ in range(3)]
    assert 'Connection closed' in texts[0] and 'did not start' in texts[1]
    assert 'ended 2 times in a row; it is started again in' in texts[2]
  assert 'was closed' in (await ask(server, 'pid')).text


@pytest.mark.parametrize(
  ('arguments', 'said'),
  [
    ({'command': [sys.executable, '-c', 'input()']}, 'Connection closed'),
    ({'command': ['sleep', '100']}, 'no answer within 0.5 s'),
    ({'command': ['/no/such/program']}, 'No such file'),
    ({'url': 'http://127.0.0.1:9/mcp'}, 'did not start'),
    ({'url': 'http://127.0.0.1:9/mcp', 'command': ['x']}, 'either command or url'),
    ({'command': ['x'], 'env': ['NOT_SET_HERE']}, "\\['NOT_SET_HERE'\\] are not set"),
  ],
)
def test_a_server_that_does_not_start(arguments, said):
  limit = 0.5 if arguments.get('command') == ['sleep', '100'] else 60.0
  with pytest.raises((ConnectionError, ValueError), match=said):
    mcp_server.McpServer(**arguments, start_seconds=limit)


def test_the_example_of_the_docs(tmp_path):
  text = (script.ROOT / 'agent_r1_jax/contrib/mcp/guide.md').read_text()
  server, client, printed = re.findall(r'```(?:python)?\n(.*?)```', text, re.DOTALL)
  (tmp_path / 'warehouse.py').write_text(server)
  done = script.run('-c', client, cwd=tmp_path)
  assert (done.returncode, done.stdout) == (0, printed), done.stderr
