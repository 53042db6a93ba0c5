"""The parts of all servers: requests that never come whole, clients that do not read."""

import asyncio
import contextlib
import io
import logging
import os
import socket
import threading

import answers
import httpx2
import pytest
from starlette import applications, routing
from uvicorn.protocols.http import h11_impl

from agent_r1_jax.web import http

HEAD = b'POST /size HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n'
WHOLE = HEAD + b'\r\n{"text": "12345678"}'


@contextlib.contextmanager
def _serve(**handlers):
  """The address of a server in a thread, and the server."""

  async def size(request):
    try:
      return http.answer_json({'size': len(await http.read_json(request, 1 << 20))})
    except http.RefusedError as error:
      refused.append(error.status)
      return http.answer_json({}, error.status)

  refused = []
  handlers |= {'size': size}
  routes = [
    routing.Route(f'/{name}', handler, methods=['GET', 'POST'])
    for name, handler in handlers.items()
  ]
  with answers.run(applications.Starlette(routes=routes)) as (port, server):
    yield ('127.0.0.1', port), server, refused


@pytest.mark.parametrize(('size', 'in_thread'), [(100, False), (5000, True)])
def test_a_long_body_is_read_while_others_are_answered(size, in_thread, monkeypatch):
  monkeypatch.setattr(http, '_LONG', 1000)
  on_loop = []

  def make(fields):
    on_loop.append(asyncio._get_running_loop() is not None)
    return len(fields['a'])

  async def count(request):
    return http.answer_json({'count': await http.read_json(request, 1 << 20, make)})

  with _serve(count=count) as ((host, port), *_):
    answer = httpx2.post(f'http://{host}:{port}/count', json={'a': 'x' * size})
  assert answer.json() == {'count': size} and on_loop == [not in_thread]


def _read(connection) -> bytes:
  """All that the server sends until it closes the connection."""
  connection.settimeout(60)
  parts = []
  while part := connection.recv(1 << 16):
    parts.append(part)
  return b''.join(parts)


@pytest.mark.parametrize(
  ('sent', 'refused'),
  [
    (b'', []),
    (b'POST /size HTTP/1.1\r\nHost:', []),
    (HEAD, []),
    (HEAD + b'\r\n', [408]),
    (HEAD + b'\r\n{"text":', [408]),
    (HEAD.replace(b'Content-Length: 20', b'Transfer-Encoding: chunked') + b'\r\n', [408]),
  ],
)
def test_a_request_that_never_comes_whole_is_answered_with_408(
  sent, refused, monkeypatch, capfd
):
  monkeypatch.setattr(http, 'REQUEST_SECONDS', 0.2)
  with _serve() as (address, server, seen), socket.create_connection(address) as client:
    client.sendall(sent)
    answer = _read(client)
    assert answer.startswith(b'HTTP/1.1 408 ')
    assert answer.endswith(b'the request was not complete in time (0.2 seconds)')
  assert seen == refused and not server.server_state.connections
  # The end of a client is no error of the application.
  assert capfd.readouterr().err == ''


@pytest.mark.skipif(not os.path.exists('/proc/self/fd'), reason='Linux has it')
def test_half_sent_requests_leave_no_socket(monkeypatch):
  assert http.REQUEST_SECONDS == 30

  def count():
    links = (os.path.join('/proc/self/fd', name) for name in os.listdir('/proc/self/fd'))
    return sum(os.path.islink(x) and 'socket:' in os.readlink(x) for x in links)

  monkeypatch.setattr(http, 'REQUEST_SECONDS', 0.2)
  with _serve() as (address, server, _):
    before = count()
    clients = [socket.create_connection(address) for _ in range(40)]
    sent = [b'', b'P', HEAD, HEAD + b'\r\n{"']
    for client, some in zip(clients, sent * 10, strict=True):
      client.sendall(some)
    for client in clients:
      with client:
        assert _read(client).startswith(b'HTTP/1.1 408 ')
    assert not server.server_state.connections
    assert count() == before


def test_a_server_leaves_the_handlers_of_logs_alone():
  handler = logging.StreamHandler(io.StringIO())
  handler.close = lambda: handler.stream.close()  # As absl's does.
  http.make_server(applications.Starlette(), 1)
  assert not handler.stream.closed
  logging.StreamHandler.close(handler)


def test_a_request_that_trickles_in_is_refused_in_time(monkeypatch):
  monkeypatch.setattr(http, 'REQUEST_SECONDS', 0.5)
  with _serve() as (address, _, _), socket.create_connection(address) as client:
    client.sendall(HEAD + b'\r\n')
    client.settimeout(0.05)
    for _ in range(1000):  # A byte every 50 ms; the body has room for more than it takes.
      try:
        assert not (answer := client.recv(100)) or answer.startswith(b'HTTP/1.1 408 ')
        break
      except TimeoutError:
        client.sendall(b' ')
    else:
      raise AssertionError('the connection is open still')


def test_the_next_request_of_a_connection_is_watched_and_whole_ones_are_not_cut(
  monkeypatch,
):
  entered, gate = threading.Event(), threading.Event()

  async def slow(request):
    entered.set()
    await asyncio.get_running_loop().run_in_executor(None, gate.wait, 60)
    return http.answer_json({'slow': True})

  monkeypatch.setattr(http, 'REQUEST_SECONDS', 0.2)
  with _serve(slow=slow) as (address, _, _):
    host = f'http://127.0.0.1:{address[1]}'
    answers = []
    ask = lambda: answers.append(httpx2.get(f'{host}/slow', timeout=60).json())
    thread = threading.Thread(target=ask)
    thread.start()
    assert entered.wait(60)
    with socket.create_connection(address) as client:
      client.sendall(WHOLE)
      client.settimeout(60)
      assert client.recv(1 << 16).startswith(b'HTTP/1.1 200 OK')
      client.sendall(HEAD)
      assert _read(client).startswith(b'HTTP/1.1 408 ')
    # That took longer than the slow answer, which was asked for before, may wait.
    gate.set()
    thread.join(60)
  assert answers == [{'slow': True}]


def test_a_request_that_is_refused_before_its_body_gets_one_answer(monkeypatch):
  """Such as a request with a wrong key: the rest is waited for no longer."""

  async def refuse(request):
    return http.answer_json({}, 401)

  monkeypatch.setattr(http, 'REQUEST_SECONDS', 0.2)
  with _serve(refuse=refuse) as (address, _, _):
    with socket.create_connection(address) as client:
      client.sendall(HEAD.replace(b'size', b'refuse') + b'\r\n')
      answer = _read(client)
  assert answer.startswith(b'HTTP/1.1 401 ') and answer.count(b'HTTP/1.1') == 1


@pytest.mark.parametrize('sent', [HEAD, WHOLE])
def test_many_connections_that_wait_keep_nobody_out(monkeypatch, sent):
  """The oldest of them is given up for each new one."""
  monkeypatch.setattr(http, 'MAX_CONNECTIONS', 8)
  with _serve() as (address, _, _), contextlib.ExitStack() as stack:
    clients = []
    for _ in range(20):
      clients.append(stack.enter_context(socket.create_connection(address)))
      clients[-1].sendall(sent)
      if sent == WHOLE:
        clients[-1].settimeout(60)
        assert clients[-1].recv(1 << 16).startswith(b'HTTP/1.1 200 OK')
    last = stack.enter_context(socket.create_connection(address))
    last.sendall(WHOLE)
    last.settimeout(60)
    assert last.recv(1 << 16).startswith(b'HTTP/1.1 200 OK')
    assert _read(clients[0]).startswith(b'HTTP/1.1 408 ')


def test_idle_connections_are_kept_longer_than_clients_use_them_again():
  """Otherwise a request may meet a connection that is just being closed."""
  kept = http.make_server(None, 1).config.timeout_keep_alive
  # Those of OpenAI's client are the same.
  assert kept > 2 * (httpx2.Limits().keepalive_expiry or 0)


def test_a_client_that_does_not_read_is_let_go(monkeypatch):
  lost = threading.Event()
  monkeypatch.setattr(http, '_UNREAD_SECONDS', 1)
  monkeypatch.setattr(
    h11_impl.H11Protocol, 'connection_lost', lambda protocol, error: lost.set()
  )

  async def large(request):
    return http.answer_json('x' * (32 << 20))

  with _serve(large=large) as (address, _, _):
    with socket.create_connection(address) as client:
      client.sendall(b'GET /large HTTP/1.1\r\nHost: x\r\n\r\n')
      assert lost.wait(60)


@pytest.mark.parametrize('depth', [65, 200, 500, 990, 3000, 100_000])
@pytest.mark.parametrize(('opening', 'closing'), ['[]', ('{"a":', '}'), ('[{"a":', '}]')])
def test_json_of_more_than_64_levels_is_refused(depth, opening, closing):
  text = (opening * depth + '1' + closing * depth).encode()
  with pytest.raises(ValueError, match='nested deeper than 64 levels'):
    http.parse_json(text)


def test_json_of_64_levels_is_read():
  assert http.parse_json('[' * 64 + '1' + ']' * 64) is not None
  text = '{"a": [1, {"b": "[[["}], "c": null}'
  assert http.parse_json(text) == {'a': [1, {'b': '[[['}], 'c': None}
