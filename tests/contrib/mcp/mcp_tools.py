"""An MCP server for tests: `mcp_tools.py FOLDER [PORT]`, over stdio or over HTTP.

It looks into FOLDER when it starts: where there is a file `changed`, it has other tools.
The tools `hang` and `freeze` write a file of their name there before they never return.
"""

import os
import pathlib
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.types import CallToolResult, ToolAnnotations

folder = pathlib.Path(sys.argv[1])
server = MCPServer('tools', log_level='CRITICAL')


def add(a: int, b: int = 1) -> int:
  """Adds."""
  return a + b


def add_other(a: int, b: int, c: int) -> int:
  """Adds three."""
  return a + b + c


def fail() -> str:
  """Fails."""
  raise ValueError


def refuse(silently: bool = False) -> CallToolResult:
  """Fails, and says why in structured content alone, or not at all."""
  reason = None if silently else {'reason': 'closed on Sundays'}
  return CallToolResult(content=[], structured_content=reason, is_error=True)


def hang() -> str:
  """Hangs, in a thread."""
  (folder / 'hang').touch()
  time.sleep(1000)
  return ''


async def freeze() -> str:
  """Hangs, and the server with it."""
  (folder / 'freeze').touch()
  time.sleep(1000)
  return ''


def pid() -> int:
  """Says the server's process id."""
  return os.getpid()


def picture() -> list:
  """Shows a picture."""
  return ['a dot', Image(data=b'PNG', format='png')]


def environment() -> str:
  """Names its environment variables."""
  return ' '.join(sorted(os.environ))


changed = (folder / 'changed').exists()
server.add_tool(add_other if changed else add, name='add')
for function in (refuse, hang, freeze, picture, environment):
  server.add_tool(function)
if not changed:
  server.add_tool(fail)
server.add_tool(pid, annotations=ToolAnnotations(read_only_hint=True))
print('this line is no message')
if len(sys.argv) > 2:
  server.run('streamable-http', port=int(sys.argv[2]))
else:
  server.run()
