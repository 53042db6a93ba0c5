"""Runs model-written Python on a server that speaks SandboxFusion's protocol.

  box = remote_sandbox.RemoteSandbox('http://sandbox:8080')
  tool = python.python_tool(box)

The server confines the code. Each call is one request, POST /run_code.
"""

import functools
import inspect
import json
import time
from typing import Any

from agent_r1_jax.tools import sandbox, sandbox_worker
from agent_r1_jax.web import bounded_http

# Allowed beyond the code's time limit, for queueing, starting and the network.
_EXTRA_SECONDS = 20.0
_COMPILE_SECONDS = 10.0
# A character may take six bytes of JSON.
_BYTES_PER_CHARACTER = 6


class RemoteSandbox:
  """A server that runs code; thread-safe."""

  def __init__(self, url: str, *, memory_mb: int = 512, max_output: int = 20_000):
    """Sends nothing to the server yet.

    Args:
      url: The server's address, without /run_code.
      memory_mb: MiB that a call's code may allocate.
      max_output: Maximum characters of a call's output; one that prints sixteen times as
        much has printed too much.
    """
    import httpx2

    self._url = bounded_http.check_url(url) + '/run_code'
    self._memory_mb = memory_mb
    self._max_output = max_output
    self._client = httpx2.Client(limits=httpx2.Limits(max_connections=None))
    self.close = self._client.close

  def run(self, code: str, seconds: float = 10.0) -> sandbox.CodeOutput:
    """Runs code in an interpreter of its own; prints what a notebook cell would.

    `seconds` limit the wall time.

    Raises:
      ConnectionError: The server is unreachable, late, or gives an invalid answer.
    """
    import httpx2

    request = {
      'code': _make_script(code),
      'language': 'python',
      'run_timeout': seconds,
      'compile_timeout': _COMPILE_SECONDS,
      'memory_limit_MB': self._memory_mb,
      'stdin': '',
      'files': {},
      'fetch_files': [],
    }
    start = time.monotonic()
    try:
      status, _, body = bounded_http.post(
        self._client,
        self._url,
        request,
        seconds=seconds + _EXTRA_SECONDS,
        max_bytes=32 * self._max_output * _BYTES_PER_CHARACTER,
      )
    except bounded_http.LongAnswerError:  # Far longer than the output may be.
      return sandbox.CodeOutput('', 'output', time.monotonic() - start)
    except (httpx2.HTTPError, TimeoutError) as error:
      raise ConnectionError(
        f'the sandbox at {self._url}: {error or repr(error)}'
      ) from error
    if status != 200:
      raise ConnectionError(f'the sandbox at {self._url}: status {status}')
    try:
      text, status = _read_result(json.loads(body))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
      raise ConnectionError(
        f'{self._url} gave an answer that is no result of code: {body[:300]!r}'
      ) from error
    if len(text) > 16 * self._max_output:
      status = 'output'
    if len(text) > self._max_output:
      text = text[: self._max_output] + '\n... (the rest of the output is cut)'
    return sandbox.CodeOutput(text, status, time.monotonic() - start)


def _read_result(answer: dict[str, Any]) -> tuple[str, str]:
  """Returns (output, status) from an answer of the protocol.

  Raises:
    ValueError, LookupError, TypeError: The answer is invalid, or the server failed.
  """
  if answer['status'] not in ('Success', 'Failed'):
    raise ValueError(answer['status'])
  result = answer['run_result']
  text = (result['stdout'] or '') + (result['stderr'] or '')
  if result['status'] == 'TimeLimitExceeded':
    return text, 'timeout'
  if result['status'] != 'Finished':
    raise ValueError(result['status'])
  return text, {0: 'ok', 1: 'error'}.get(result['return_code'], 'ended')


def _make_script(code: str) -> str:
  """Returns a program that runs code as this machine's sandbox does."""
  return (
    f'import ast, traceback\n{_read_cell_source()}\n'
    f'raise SystemExit(_run_cell({code!r}, {{"__name__": "__main__"}}))\n'
  )


@functools.cache
def _read_cell_source() -> str:
  return inspect.getsource(sandbox_worker._run_cell)
