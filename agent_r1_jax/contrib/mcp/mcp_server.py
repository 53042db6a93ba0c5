"""The tools of an MCP server, started here or at an address.

  server = mcp_server.McpServer(command=['python', 'my_server.py'])
  make_env = lambda: env.ToolEnv(server.tools, reward)

All episodes share one connection, which lives on an event loop in its own thread.
Whatever the server does, a call ends in time with an answer or an error text. A
connection that has ended, or a server that no longer answers, is replaced at the next
call.
"""

import asyncio
import atexit
from collections.abc import Sequence
import contextlib
import json
import logging
import math
import os
import threading
from typing import Any, Self

from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.host import workers

# After a failed call, a server that takes longer than this to list its tools hangs.
_PROBE_SECONDS = 5.0
# For closing a connection: the package stops a process in three steps.
_STOP_SECONDS = 10.0
# The pause between starts that fail in a row doubles up to this.
_MAX_PAUSE = 60.0
# A server that lists its tools in more pages than this never ends.
_MAX_PAGES = 100


class McpServer:
  """The connection to one server.

  Attributes:
    tools: The server's tools, with its names, descriptions and schemas.
  """

  def __init__(
    self,
    *,
    command: Sequence[str] = (),
    url: str = '',
    env: Sequence[str] = (),
    seconds: float = 30.0,
    start_seconds: float = 30.0,
  ):
    """Connects to the server and lists its tools.

    Args:
      command: Starts the server, which talks over its standard input and output.
      url: The address of a server that talks over HTTP ("streamable HTTP").
      env: Names of environment variables to pass to the started server. By default it
        gets only HOME, LOGNAME, PATH, SHELL, TERM and USER, and so no API key.
      seconds: Time limit of a call, including a restart if needed.
      start_seconds: Time limit of a start.

    Raises:
      ValueError: Not exactly one of command and url is given, a variable of `env` is not
        set, or a tool's schema is not a JSON Schema.
      ConnectionError: The server did not start in time.
    """
    if bool(command) == bool(url):
      raise ValueError('mcp_server: give either command or url.')
    if missing := sorted({*env} - os.environ.keys()):
      raise ValueError(f'mcp_server: env: {missing} are not set in this process.')
    self._command, self._env = [*command], {name: os.environ[name] for name in env}
    self._url, self._name = url, url or ' '.join(command)
    self._seconds, self._start_seconds = seconds, start_seconds
    self._connection: _Connection | None = None  # It may still be opening.
    self._holding: set[asyncio.Task] = set()
    self._failures, self._not_before = 0, 0.0
    self._closing = asyncio.Event()
    self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    self._loop = self._runner.get_loop()
    self._thread = threading.Thread(target=self._run_loop, name='mcp', daemon=True)
    self._thread.start()
    atexit.register(self.close)
    try:
      start = asyncio.run_coroutine_threadsafe(self._connect(), self._loop)
      listed = start.result(start_seconds + _STOP_SECONDS).tools
      self.tools = [self._make_tool(tool) for tool in listed.values()]
    except BaseException:
      self.close()
      raise

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error) -> None:
    self.close()

  def close(self) -> None:
    """Closes the connection, and ends the started process; waits up to 10 seconds."""
    atexit.unregister(self.close)
    with contextlib.suppress(RuntimeError):  # Already closed.
      self._loop.call_soon_threadsafe(self._closing.set)
    self._thread.join(_STOP_SECONDS)

  def _run_loop(self) -> None:
    with self._runner:  # Cancels tasks that still run.
      self._runner.run(self._wait_for_close())

  async def _wait_for_close(self) -> None:
    await self._closing.wait()
    if self._connection:
      self._connection.leave.set()
    if self._holding:
      await asyncio.wait(self._holding, timeout=_STOP_SECONDS - 1)

  def _make_tool(self, listed: Any) -> tool_lib.Tool:
    name = listed.name

    async def call(**arguments):
      if not self._thread.is_alive():
        raise ConnectionError(f'the connection to {self._name} was closed')
      work = asyncio.run_coroutine_threadsafe(self._call(listed, arguments), self._loop)
      try:
        return await asyncio.wrap_future(work)
      except asyncio.CancelledError:  # The call timed out.
        with contextlib.suppress(RuntimeError):  # The server was closed meanwhile.
          self._loop.call_soon_threadsafe(self._probe_if_open)
        raise

    function = {
      'name': name,
      'description': listed.description or '',
      'parameters': listed.input_schema,
    }
    schema = {'type': 'function', 'function': function}
    hints = listed.annotations
    idempotent = bool(hints and (hints.idempotent_hint or hints.read_only_hint))
    return tool_lib.Tool(name, schema, call, self._seconds, idempotent)

  async def _call(self, listed: Any, arguments: dict[str, Any]) -> str:
    connection, name = await self._connect(), listed.name
    now = connection.tools.get(name)
    if now is None:
      names = ', '.join(connection.tools) or 'none'
      raise LookupError(f'the server has changed and has no such tool; it has: {names}')
    if now.input_schema != listed.input_schema:
      raise LookupError(
        'the server has changed, and this tool takes other arguments now: '
        f'{json.dumps(now.input_schema)}'
      )
    try:
      result = await connection.client.call_tool(name, arguments)
    except Exception as error:
      await asyncio.shield(self._probe(connection))
      raise ConnectionError(f'{self._name}: {_describe(error)}') from error
    self._failures = 0
    text = '\n'.join(map(_to_text, result.content))
    if not text and result.structured_content is not None:
      text = json.dumps(result.structured_content)
    if result.is_error:
      raise ValueError(text or 'it failed, and does not say why')
    return text

  async def _connect(self) -> '_Connection':
    """Returns the connection; opens one if there is none.

    Raises:
      ConnectionError: The server did not start, or has not been restarted yet.
    """
    if self._connection is None:
      if (pause := self._not_before - self._loop.time()) > 0:
        raise ConnectionError(
          f'{self._name} ended {self._failures} times in a row; it is started again in '
          f'{math.ceil(pause)} seconds'
        )
      self._connection = _Connection()
      task = self._loop.create_task(self._hold(self._connection))
      self._holding.add(task)
      task.add_done_callback(self._holding.discard)
    connection = self._connection
    # A cancelled call must not cancel the start for others that wait for it.
    await asyncio.shield(connection.opened)
    if connection.probe is None:
      return connection
    await asyncio.shield(connection.probe)
    return await self._connect()

  async def _hold(self, connection: '_Connection') -> None:
    """Opens a connection and holds it until it is to be closed.

    The package's cancel scopes must be entered and left by the same task.
    """
    import anyio
    import mcp

    # It prints a traceback for each server line that is not a message.
    logging.getLogger('mcp.client.stdio').setLevel(logging.CRITICAL)
    target: Any = self._url or mcp.StdioServerParameters(
      command=self._command[0], args=self._command[1:], env=self._env
    )
    error: BaseException = TimeoutError(f'no answer within {self._start_seconds:g} s')
    try:
      with anyio.CancelScope() as scope:
        scope.deadline = anyio.current_time() + self._start_seconds
        async with mcp.Client(target, cache=None) as connection.client:
          await connection.list_tools()
          scope.deadline = math.inf
          connection.opened.set_result(None)
          await connection.leave.wait()
          scope.deadline = anyio.current_time() + _STOP_SECONDS
    except Exception as raised:
      error = raised
    if not connection.opened.done():
      self._count_failure(connection)
      text = f'the MCP server {self._name} did not start: {_describe(error)}'
      connection.opened.set_exception(ConnectionError(text))

  def _probe_if_open(self) -> None:
    if self._connection and self._connection.opened.done():
      self._probe(self._connection)

  def _probe(self, connection: '_Connection') -> asyncio.Task:
    """Starts listing the tools again; a server that does not answer is restarted."""

    async def probe():
      try:
        async with asyncio.timeout(_PROBE_SECONDS):
          await connection.list_tools()
      except Exception as error:
        self._count_failure(connection)
        if not (connection.leave.is_set() or self._closing.is_set()):
          logging.warning('%s: %s; it is started again', self._name, _describe(error))
        connection.leave.set()
      connection.probe = None

    connection.probe = connection.probe or self._loop.create_task(probe())
    return connection.probe

  def _count_failure(self, connection: '_Connection') -> None:
    """Lets the next call restart the server: at once, later after growing pauses."""
    if self._connection is not connection:  # Already counted.
      return
    self._connection = None
    self._failures += 1
    pause = min(2.0 ** (self._failures - 2), _MAX_PAUSE) if self._failures > 1 else 0.0
    self._not_before = self._loop.time() + pause


class _Connection:
  """A connection, opened and held by a task of its own.

  Attributes:
    client: The package's client.
    tools: The server's tools by name, as the package describes them.
    opened: Done when the connection is open, or has failed to open.
    leave: Set to close the connection.
    probe: Checks whether the server still answers; None if no call has failed.
  """

  def __init__(self):
    self.client: Any = None
    self.tools: dict[str, Any] = {}
    self.opened = asyncio.get_running_loop().create_future()
    # If nobody waits for it, asyncio would warn of its exception.
    self.opened.add_done_callback(lambda opened: opened.exception())
    self.leave = asyncio.Event()
    self.probe: asyncio.Task | None = None

  async def list_tools(self) -> None:
    """Asks the server for its tools."""
    tools, cursor = {}, None
    for _ in range(_MAX_PAGES):
      page = await self.client.list_tools(cursor=cursor)
      tools |= {tool.name: tool for tool in page.tools}
      cursor = page.next_cursor
      if cursor is None:
        break
    self.tools = tools


def _to_text(block: Any) -> str:
  """Returns the text of a part of a result; parts that are not text are only named."""
  if block.type == 'text':
    return block.text
  resource = getattr(block, 'resource', block)
  if hasattr(resource, 'text'):
    return resource.text
  named = (getattr(resource, name, None) for name in ('uri', 'mime_type'))
  return f'[{", ".join(str(x) for x in (block.type, *named) if x)}]'


def _describe(error: BaseException) -> str:
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return workers.describe_error(error)
