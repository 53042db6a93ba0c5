"""Common parts of HTTP servers: errors, JSON, metrics, sockets, uvicorn."""

import asyncio
from collections.abc import Callable, Collection
import contextvars
import functools
import hmac
import json
import math
import socket
from typing import TYPE_CHECKING, Any, TypeVar

from agent_r1_jax.host import thread_pool

if TYPE_CHECKING:
  import pydantic

_Model = TypeVar('_Model', bound='pydantic.BaseModel')
_Made = TypeVar('_Made')
MAX_CONNECTIONS = 4096
REQUEST_SECONDS = 30.0  # For a complete request to arrive.
_MAX_DEPTH = 64  # Of JSON.
# A longer body, in bytes, is read in a thread: 4 MB may take seconds.
_LONG = 1 << 18
_THREAD_SECONDS = 60.0  # Time limit there, including the wait for a thread.
_POOL = thread_pool.Pool(threads=2)
# The client: its key, if the server requires keys, else its connection.
client: contextvars.ContextVar[str] = contextvars.ContextVar('client', default='')
_UNREAD_SECONDS = 60  # Before dropping a client that does not read its answer.
# Before closing an idle connection: longer than clients keep one for reuse (httpx 5,
# aiohttp 15), so that no client uses a connection as it closes.
_IDLE_SECONDS = 20


class RefusedError(Exception):
  """A rejected request; raised in a handler, it becomes the response.

  Attributes:
    status: The HTTP status.
    code: An identifier of the error for programs, or None.
  """

  def __init__(self, status: int, text: str, code: str | None = None):
    super().__init__(text)
    self.status, self.code = status, code

  @property
  def headers(self) -> dict[str, str]:
    """The response's headers: Retry-After, if the same request may succeed later."""
    return {'Retry-After': '1'} if self.status in (429, 503) else {}


async def read_body(request: Any, max_bytes: int) -> bytes:
  """Reads the body of a starlette request.

  Raises:
    RefusedError: The body is too long, or the client left.
  """
  from starlette import requests

  body = bytearray()
  try:
    async for chunk in request.stream():
      body += chunk
      if len(body) > max_bytes:
        raise RefusedError(413, f'the request has more than {max_bytes} bytes')
  except requests.ClientDisconnect:
    raise RefusedError(408, 'the client left before its request was complete') from None
  return bytes(body)


async def read(request: Any, max_bytes: int, make: Callable[[bytes], _Made]) -> _Made:
  """Makes an object from a starlette request's body, in a thread if it is long.

  Raises:
    RefusedError: The body is too long, the client left, or `make` raised it.
  """
  body = await read_body(request, max_bytes)
  if len(body) <= _LONG:
    return make(body)
  return await run_in_thread(functools.partial(make, body))


async def read_json(
  request: Any, max_bytes: int, make: Callable[[dict[str, Any]], Any] = lambda x: x
) -> Any:
  """Like `read`, but `make` gets the JSON object in the body.

  Raises:
    RefusedError: The body is too long or not a JSON object, or `make` raised it.
  """
  return await read(request, max_bytes, lambda body: make(_parse_object(body)))


def _parse_object(body: bytes) -> dict[str, Any]:
  try:
    fields = parse_json(body)
  except ValueError as error:
    raise RefusedError(400, f'the body is no JSON: {error}') from None
  if not isinstance(fields, dict):
    raise RefusedError(400, 'the body is no JSON object; give {"a field": "its value"}')
  return fields


async def run_in_thread(fn: Callable[[], _Made]) -> _Made:
  """Calls a function that would block the event loop in one of a few threads.

  Raises:
    RefusedError: It did not finish in time, or no thread was free.
  """
  try:
    async with asyncio.timeout(_THREAD_SECONDS):
      return await asyncio.wrap_future(_POOL.submit(fn))
  except (TimeoutError, thread_pool.PoolFullError) as error:
    text = f'a long text was not read or written within {_THREAD_SECONDS:g} seconds; '
    raise RefusedError(503, f'{text}{error}'.rstrip('; ')) from None


def check_fields(model: type[_Model], fields: dict[str, Any]) -> _Model:
  """Makes a pydantic model from a request's fields.

  Raises:
    RefusedError: A field is wrong; the text says which one, and what it must be.
  """
  import pydantic

  try:
    return model.model_validate(fields)
  except pydantic.ValidationError as error:
    errors = error.errors(include_url=False, include_context=False)
  first = max(errors, key=lambda error: len(error['loc']))
  where, missing = '', first['type'] == 'missing'
  value: Any = fields
  for part in first['loc']:  # For a union it also has the types, which are not fields.
    if isinstance(part, int) and isinstance(value, list):
      where, value = f'{where}[{part}]', value[part]
    elif isinstance(value, dict) and (part in value or missing):
      where, value = f'{where}.{part}'.removeprefix('.'), value.get(part)
  reason = first['msg'].removeprefix('Value error, ').replace('Input should', 'it should')
  if missing:
    reason = f'{where} is missing'
  elif where:
    reason = f'{where} is {first["input"]!r:.80}; {reason}'
  raise RefusedError(400, reason)


def guard(
  handle: Callable[[Any], Any], refuse: Callable[[RefusedError], Any]
) -> Callable[[Any], Any]:
  """Makes a handler of starlette requests; `refuse` answers exceptions of `handle`.

  A ValueError is an invalid request, like RefusedError with status 400.
  """

  async def answer(request):
    client.set(str(request.client))
    try:
      return await handle(request)
    except RefusedError as error:
      return refuse(error)
    except ValueError as error:
      return refuse(RefusedError(400, str(error)))

  return answer


def check_key(key: str, keys: Collection[str], remedy: str):
  """Raises RefusedError if keys are required and this is none of them."""
  # Compare every key in full, so that timing reveals nothing.
  if keys and not sum(hmac.compare_digest(key.encode(), k.encode()) for k in keys):
    raise RefusedError(401, f'the API key is wrong; {remedy}', 'invalid_api_key')
  if keys:
    client.set(key)


def parse_json(text: str | bytes | bytearray) -> Any:
  """Parses JSON from outside; the result is safe to process recursively.

  Raises:
    ValueError: It is not JSON, or nested too deeply to be meaningful.
  """
  too_deep = ValueError(f'it is nested deeper than {_MAX_DEPTH} levels')
  try:
    value = json.loads(text)
  except RecursionError:
    raise too_deep from None
  level = [value]
  for _ in range(_MAX_DEPTH + 1):
    level = [
      inner
      for outer in level
      if isinstance(outer, dict | list)
      for inner in (outer.values() if isinstance(outer, dict) else outer)
    ]
    if not level:
      return value
  raise too_deep


def answer_json(content: Any, status: int = 200, headers: Any = None) -> Any:
  """Makes a JSON response; unlike starlette's, it supports lone surrogates in texts."""
  from starlette import responses

  text = json.dumps(content)
  return responses.Response(text, status, headers, media_type='application/json')


def show_metrics(registry: Any) -> Any:
  """Makes the endpoint that returns a prometheus_client registry's metrics."""
  import prometheus_client as prometheus
  from starlette import responses

  async def show(request):
    text = prometheus.generate_latest(registry)
    return responses.Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

  return show


def listen(host: str, port: int) -> socket.socket:
  """Opens a listening socket; port 0 chooses a free one.

  Raises:
    ValueError: The port is in use, or the address is not this machine's.
  """
  try:
    listener = socket.create_server((host, port), backlog=MAX_CONNECTIONS)
  except OSError as error:
    raise ValueError(
      f'nothing can listen at {host}:{port} ({error}); give another address or port '
      '(--host, --port; port 0 chooses a free one).'
    ) from None
  if hasattr(socket, 'TCP_USER_TIMEOUT'):  # Linux only; connections inherit it.
    milliseconds = _UNREAD_SECONDS * 1000
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
  return listener


def _make_protocol() -> Any:
  """Adds a time-out for incomplete requests to uvicorn's protocol."""
  import h11
  from uvicorn.protocols.http import h11_impl

  class Protocol(h11_impl.H11Protocol):
    """Closes a connection whose request, head and body, is not complete in time.

    The time starts with the connection, or with the end of the previous answer.
    (uvicorn's `timeout_keep_alive` ends with the first byte of a request.) At the limit
    of connections, each new one closes the one that has waited longest.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport):
      super().connection_made(transport)
      connections: Any = self.connections
      waiting = [c for c in connections if c._timer is not None]
      if len(connections) >= (self.limit_concurrency or math.inf) and waiting:
        min(waiting, key=lambda c: c._timer.when())._refuse()
      self._watch()

    def data_received(self, data):
      super().data_received(data)
      self._watch()

    def on_response_complete(self):
      super().on_response_complete()
      self._watch()

    def connection_lost(self, exc):
      super().connection_lost(exc)
      self._stop()

    def _watch(self):
      if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
        self._stop()
      elif self._timer is None and not self.transport.is_closing():
        self._timer = self.loop.call_later(REQUEST_SECONDS, self._refuse)

    def _stop(self):
      if self._timer is not None:
        self._timer.cancel()
      self._timer = None

    def _refuse(self):
      self._stop()
      if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # No answer has begun.
        text = f'the request was not complete in time ({REQUEST_SECONDS:g} seconds)'
        headers = [('connection', 'close'), ('content-length', str(len(text)))]
        head = h11.Response(status_code=408, headers=headers, reason='Request Timeout')
        for event in (head, h11.Data(data=text.encode()), h11.EndOfMessage()):
          self.transport.write(self.conn.send(event))
      self.transport.close()
      self.connections.discard(self)  # Frees its place at once.

  return Protocol


def make_server(app: Any, shutdown_seconds: int, **options: Any) -> Any:
  """Makes a uvicorn server; at shutdown, requests get `shutdown_seconds` to finish."""
  import uvicorn

  return uvicorn.Server(
    uvicorn.Config(
      app,
      http=_make_protocol(),
      log_level='warning',
      access_log=False,
      log_config=None,  # uvicorn's own would close all handlers of the process.
      ws='none',
      limit_concurrency=MAX_CONNECTIONS,
      timeout_keep_alive=_IDLE_SECONDS,
      timeout_graceful_shutdown=shutdown_seconds,
      **options,
    )
  )
