"""Requests over HTTP whose answers are bounded in time and in bytes."""

from collections.abc import Mapping
import json
import time
from typing import Any

from agent_r1_jax.host import moments

Answer = tuple[int, Mapping[str, str], bytes]


class LongAnswerError(ValueError):
  """The answer has more bytes than are wanted."""


def check_url(url: str) -> str:
  """Returns the address without a slash at its end.

  Raises:
    ValueError: It names no protocol.
  """
  if not url.startswith(('http://', 'https://')):
    raise ValueError(f'url is {url!r}; begin with http://, as in http://10.0.0.7:8000')
  return url.rstrip('/')


def post(client: Any, url: str, fields: Any, *, seconds: float, max_bytes: int) -> Answer:
  """Posts JSON; returns status, headers and body.

  Args:
    client: An httpx2.Client.
    url: The address.
    fields: What is sent.
    seconds: The time until the whole answer is there.
    max_bytes: The most bytes of the body.

  Raises:
    TimeoutError: It took longer.
    LongAnswerError: The body is longer.
    httpx2.HTTPError: Another failure.
  """
  import httpx2

  end, body = time.monotonic() + seconds, bytearray()
  request: dict[str, Any] = {
    # Not `json=`, which raises on lone surrogates.
    'content': json.dumps(fields),
    'headers': {'Content-Type': 'application/json'} | moments.carrier(),
    'timeout': seconds,
  }
  try:
    with client.stream('POST', url, **request) as response:
      for piece in response.iter_bytes():
        body += piece
        if len(body) > max_bytes:
          raise LongAnswerError(f'sent more than {max_bytes} bytes')
        if time.monotonic() > end:  # httpx2 bounds each read, and not their sum.
          raise httpx2.ReadTimeout('the answer came too slowly')
      return response.status_code, response.headers, bytes(body)
  except httpx2.TimeoutException as error:
    kind = type(error).__name__
    raise TimeoutError(f'no answer within {seconds:.1f} seconds ({kind})') from error
