"""HTTP requests whose answers are limited in time and size."""

from collections.abc import Mapping
import json
import time
from typing import Any

from agent_r1_jax.host import moments

Answer = tuple[int, Mapping[str, str], bytes]


class LongAnswerError(ValueError):
  """The answer is longer than allowed."""


def check_url(url: str) -> str:
  """Returns the address without a trailing slash.

  Raises:
    ValueError: The address has no protocol.
  """
  if not url.startswith(('http://', 'https://')):
    raise ValueError(f'url is {url!r}; begin with http://, as in http://10.0.0.7:8000')
  return url.rstrip('/')


def post(client: Any, url: str, fields: Any, *, seconds: float, max_bytes: int) -> Answer:
  """Posts JSON; returns status, headers and body.

  Args:
    client: An httpx2.Client.
    url: The address.
    fields: The content, sent as JSON.
    seconds: Time limit until the answer is complete.
    max_bytes: Maximum bytes of the body.

  Raises:
    TimeoutError: It took longer.
    LongAnswerError: The body is longer.
    httpx2.HTTPError: Any other failure.
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
        if time.monotonic() > end:  # httpx2 limits each read, not their sum.
          raise httpx2.ReadTimeout('the answer came too slowly')
      return response.status_code, response.headers, bytes(body)
  except httpx2.TimeoutException as error:
    kind = type(error).__name__
    raise TimeoutError(f'no answer within {seconds:.1f} seconds ({kind})') from error
