"""Small HTTP servers in a thread, for the tests of clients and of servers."""

from collections.abc import Callable, Iterator
import contextlib
import http.server
import json
import pathlib
import signal
import socket
import subprocess
import threading
from typing import Any

from agent_r1_jax.web import http as http_lib

# (the handler, the request's JSON) -> status and content, or None: no answer is sent.
Answer = Callable[[Any, Any], tuple[int, bytes] | None]


@contextlib.contextmanager
def serve_posts(answer: Answer, **headers: str) -> Iterator[str]:
  """Gives the address of a server whose answers to POST `answer` makes."""

  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_POST(self):
      fields = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
      if (found := answer(self, fields)) is None:
        self.close_connection = True
        return
      status, content = found
      self.send_response(status)
      for name, value in ({'Content-Length': str(len(content))} | headers).items():
        self.send_header(name, value)
      self.end_headers()
      with contextlib.suppress(OSError):  # The client need not read all of it.
        self.wfile.write(content)

    def log_message(self, *args):
      pass

  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
      yield f'http://127.0.0.1:{server.server_port}'
    finally:
      server.shutdown()
      thread.join(20)


@contextlib.contextmanager
def run(app: Any) -> Iterator[tuple[int, Any]]:
  """Runs an ASGI application on a port of the loopback; gives the port and the server."""
  server = http_lib.make_server(app, 1)
  with http_lib.listen('127.0.0.1', 0) as listener:
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
      yield listener.getsockname()[1], server
    finally:
      server.should_exit = True
      thread.join(20)


@contextlib.contextmanager
def run_script(python: str, script: pathlib.Path) -> Iterator[str]:
  """Gives the address of a server in a process: a script that is given a socket.

  The socket listens before the server is there: who connects waits.
  """
  with socket.create_server(('127.0.0.1', 0)) as listener:
    number = listener.fileno()
    server = subprocess.Popen([python, str(script), str(number)], pass_fds=[number])
    yield f'http://127.0.0.1:{listener.getsockname()[1]}'
  server.send_signal(signal.SIGTERM)
  assert server.wait(60) in (0, -signal.SIGTERM)
