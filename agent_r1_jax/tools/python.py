"""The Python tool: runs an agent's code in a sandbox, local or remote."""

import threading
from typing import Protocol

from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.agent import tool_schema
from agent_r1_jax.tools import sandbox

# A call may take the code's time limit, and this for starting an interpreter.
_START_SECONDS = 30.0
_FAILURES = {
  'timeout': 'the code was stopped after {seconds:g} seconds',
  'output': 'the code printed too much and was stopped',
  'ended': 'the interpreter ended before the code did',
}


class CodeError(ValueError):
  """The fault is in the agent's code, not in the sandbox."""


class CodeRunner(Protocol):
  """Runs code: a sandbox on this machine, or a client of a server."""

  def run(self, code: str, seconds: float) -> sandbox.CodeOutput:
    """Runs code in an interpreter of its own, which ends with the code."""
    ...


def python_tool(
  box: CodeRunner,
  *,
  seconds: float = 10.0,
  stateful: bool = False,
) -> tool_lib.Tool:
  """Makes a tool `python(code: str)` that runs code in a sandbox.

  The tool's text is the code's output, tracebacks included. Code that times out, ends its
  interpreter or prints too much is an error of the call.

  Args:
    box: The sandbox; one serves all episodes.
    seconds: Time limit of a call's code, in seconds of wall time.
    stateful: Whether variables persist between calls. Each episode then needs its own
      tool: make it in `make_env`. The interpreter ends with the tool. Only a sandbox on
      this machine has state.
  """
  here = isinstance(box, sandbox.Sandbox)
  if not stateful:
    runner = box
  elif here:
    runner = _Stateful(box)
  else:
    raise ValueError('python_tool: stateful needs a sandbox on this machine.')
  consequence = '; the variables of earlier calls are gone' if stateful else ''

  def python(code: str) -> str:
    """Runs Python code and returns what it prints, or its error.

    Args:
      code: The code; the value of a last line that is an expression is printed too.
    """
    output = runner.run(code, seconds)
    if output.status in _FAILURES:
      failure = _FAILURES[output.status].format(seconds=seconds)
      raise CodeError(f'{failure}{consequence}\n{output.text}'.rstrip())
    return output.text or '(The code printed nothing.)'

  schema = tool_schema.describe(python, 'python')
  timeout = seconds + _START_SECONDS
  # A retry may reach a server.
  return tool_lib.Tool('python', schema, python, timeout, idempotent=not here)


class _Stateful:
  """Runs all calls in one interpreter, in turn; starts a new one if it ends."""

  def __init__(self, box: sandbox.Sandbox):
    self._box, self._session = box, None
    self._lock = threading.Lock()

  def run(self, code: str, seconds: float) -> sandbox.CodeOutput:
    with self._lock:
      if self._session is None:
        self._session = self._box.open_session()
      output = self._session.run(code, seconds)
      if not self._session.close.alive:
        self._session = None
      return output
