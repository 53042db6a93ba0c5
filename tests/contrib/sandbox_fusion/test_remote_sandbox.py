"""The client of SandboxFusion's protocol, against a small server that runs the code."""

import json
import re
import subprocess
import sys

import answers
import pytest

from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.contrib.sandbox_fusion import remote_sandbox
from agent_r1_jax.tools import python

requests = []


def run_code(request):
  """Runs code as the protocol says, without any confinement."""
  command = [sys.executable, '-I', '-c', request['code']]
  run = {'status': 'Finished', 'return_code': None, 'stdout': '', 'stderr': ''}
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, timeout=request['run_timeout']
    )
    run |= {'return_code': done.returncode, 'stdout': done.stdout, 'stderr': done.stderr}
  except subprocess.TimeoutExpired:
    run['status'] = 'TimeLimitExceeded'
  status = 'Success' if run['return_code'] == 0 else 'Failed'
  return {'status': status, 'run_result': run | {'execution_time': 0.1}}


def answer(handler, request):
  requests.append(request)
  made = {
    '/run_code': lambda: json.dumps(run_code(request)),
    '/words/run_code': lambda: 'no JSON',
    '/list/run_code': lambda: '[1]',
    '/failed/run_code': lambda: '{"status": "SandboxError", "message": "full"}',
    '/huge/run_code': lambda: 'x' * (1 << 20),
  }.get(handler.path)
  return (200, made().encode()) if made else (503, b'')


@pytest.fixture(scope='module')
def url():
  with answers.serve_posts(answer) as url:
    yield url


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
  monkeypatch.setattr(tool_lib, '_PAUSES', (0.0,))


@pytest.mark.parametrize(
  ('path', 'code', 'text', 'ok'),
  [
    ('', 'x = 6 * 7\nx', '42\n', True),
    ('', 'print("ä\\u20ac")', 'ä€\n', True),
    ('', '1 / 0', 'File "<cell>", line 1.*ZeroDivisionError', True),
    ('', 'x = 1', 'printed nothing', True),
    ('', 'import os; os.kill(os.getpid(), 9)', 'CodeError: the interpreter ended', False),
    ('', 'while True: pass', 'CodeError: the code was stopped after 1 seconds', False),
    ('', 'print("x" * 1700)', 'printed too much', False),
    ('', 'print("x" * 200)', 'x{100}\n... .the rest of the output is cut', True),
    ('/words', '1', "ConnectionError: .*no result of code: b'no JSON'", False),
    ('/list', '1', 'no result of code', False),
    ('/failed', '1', 'SandboxError.*full', False),
    ('/huge', '1', 'printed too much', False),
    ('/elsewhere', '1', 'ConnectionError: the sandbox at .*: status 503', False),
  ],
)
async def test_a_call(url, path, code, text, ok):
  box = remote_sandbox.RemoteSandbox(url + path, max_output=100)
  # Only the endless loop may take less than a busy machine needs.
  tool = python.python_tool(box, seconds=1.0 if 'while' in code else 60.0)
  result = await tool_lib.call(tool, {'code': code})
  box.close()
  assert result.ok == ok
  # Only the server's own failures are worth another try.
  assert result.retries == ('ConnectionError' in result.text)
  assert re.search(text, result.text, re.DOTALL), result.text


async def test_the_request_and_a_server_that_is_not_there(url):
  box = remote_sandbox.RemoteSandbox(url, memory_mb=64)
  box.run('1')
  box.close()
  request = requests[-1]
  assert request.pop('code').startswith('import ast')
  assert request == {
    'language': 'python',
    'run_timeout': 10.0,
    'compile_timeout': 10.0,
    'memory_limit_MB': 64,
    'stdin': '',
    'files': {},
    'fetch_files': [],
  }
  nobody = remote_sandbox.RemoteSandbox('http://127.0.0.1:9')
  result = await tool_lib.call(python.python_tool(nobody), {'code': '1'})
  nobody.close()
  assert 'the sandbox at http://127.0.0.1:9/run_code: ' in result.text
  with pytest.raises(ValueError, match='stateful needs'):
    python.python_tool(nobody, stateful=True)
  with pytest.raises(ValueError, match="url is 'localhost"):
    remote_sandbox.RemoteSandbox('localhost:8080')
