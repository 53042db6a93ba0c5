"""Parts of all HTTP servers here: refusals, JSON, metrics, sockets, uvicorn."""

import json
import socket
from typing import Any

MAX_CONNECTIONS = 4096


class RefusedError(Exception):
  """A request is refused; raised in a handler, it becomes the response.

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


async def read_json(request: Any, max_bytes: int) -> dict[str, Any]:
  """Reads the JSON object in the body of a starlette request.

  Raises:
    RefusedError: It is too long, or no JSON object.
  """
  body = bytearray()
  async for chunk in request.stream():
    body += chunk
    if len(body) > max_bytes:
      raise RefusedError(413, f'the request has more than {max_bytes} bytes')
  try:
    fields = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise RefusedError(400, f'the body is no JSON: {error}') from None
  if not isinstance(fields, dict):
    raise RefusedError(400, 'the body is no JSON object; give {"a field": "its value"}')
  return fields


def answer_json(content: Any, status: int = 200, headers: Any = None) -> Any:
  """Makes a JSON response; unlike starlette's, it supports lone surrogates in texts."""
  from starlette import responses

  text = json.dumps(content)
  return responses.Response(text, status, headers, media_type='application/json')


def show_metrics(registry: Any) -> Any:
  """Makes the endpoint that returns the metrics of a registry of prometheus_client."""
  import prometheus_client as prometheus
  from starlette import responses

  async def show(request):
    text = prometheus.generate_latest(registry)
    return responses.Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

  return show


def listen(host: str, port: int) -> socket.socket:
  """Opens a listening socket; port 0 chooses a free one.

  Raises:
    ValueError: The port is taken, or the address is none of this machine.
  """
  try:
    return socket.create_server((host, port), backlog=MAX_CONNECTIONS)
  except OSError as error:
    raise ValueError(
      f'nothing can listen at {host}:{port} ({error}); give another address or port '
      '(--host, --port; port 0 takes a free one).'
    ) from None


def make_server(app: Any, shutdown_seconds: int, **options: Any) -> Any:
  """Makes a uvicorn server; at its end, requests get `shutdown_seconds` to finish."""
  import uvicorn

  return uvicorn.Server(
    uvicorn.Config(
      app,
      log_level='warning',
      access_log=False,
      ws='none',
      limit_concurrency=MAX_CONNECTIONS,
      timeout_graceful_shutdown=shutdown_seconds,
      **options,
    )
  )
