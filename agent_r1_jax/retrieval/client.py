"""A retriever on another machine: any server that speaks Search-R1's protocol."""

from collections.abc import Mapping, Sequence
import json
import math
import random
import threading
import time
from typing import Any

from agent_r1_jax.retrieval.documents import Document, Hit

_MAX_ANSWER = 1 << 26  # Bytes; a server that sends more is broken.


class RemoteError(ConnectionError):
  """A server gave no passages; the text names it, and says why."""


class _FailedError(Exception):
  """The server failed.

  Attributes:
    passes: Whether another attempt may succeed.
    after: Seconds before the next attempt, if the server says so.
  """

  def __init__(self, text: str, *, passes: bool = True, after: float = 0.0):
    super().__init__(text)
    self.passes, self.after = passes, after


class Remote:
  """Asks a server for passages, and fails within a deadline, whatever the server does.

  What may pass (no connection, a time-out, 429 and 5xx) is tried again with exponential
  back-off until the deadline. After `failures` failures in a row the server is left alone
  for `pause` seconds: searches fail at once. Then one search tries it, while the others
  still fail at once, and if that succeeds, all go on (a circuit breaker).
  """

  def __init__(
    self,
    url: str,
    *,
    timeout: float = 5.0,
    deadline: float = 20.0,
    backoff: float = 0.1,
    max_backoff: float = 2.0,
    failures: int = 8,
    pause: float = 10.0,
  ):
    """Connects at the first search; `with` closes the connections at its end.

    Args:
      url: The server's address without the path, such as http://10.0.0.7:8000.
      timeout: Seconds for one attempt.
      deadline: Seconds for a search with all its attempts; below search_tool's timeout,
        so that the agent reads why there are no passages.
      backoff: Seconds before the second attempt, about twice as many before the third.
      max_backoff: The most seconds between two attempts.
      failures: Failed attempts in a row after which the server is left alone.
      pause: Seconds that it is left alone.
    """
    import httpx2

    if not url.startswith(('http://', 'https://')):
      raise ValueError(f'url is {url!r}; give one such as http://10.0.0.7:8000')
    self._url = url.rstrip('/') + '/retrieve'
    self._timeout, self._deadline = timeout, deadline
    self._backoff, self._max_backoff = backoff, max_backoff
    self._breaker = _Breaker(failures, pause)
    self._client = httpx2.Client()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._client.close()

  def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
    """Finds at most k passages for each query.

    Raises:
      RemoteError: No passages before the deadline, or an answer that makes no sense.
    """
    if not queries:
      return []
    end, wait = time.monotonic() + self._deadline, self._backoff
    while True:
      if left := self._breaker.hold_back():
        raise RemoteError(
          f'{self._url}: left alone for {left:.1f} more seconds after '
          f'{self._breaker.last_error}'
        )
      try:
        found = self._attempt(queries, k, min(end, time.monotonic() + self._timeout))
      except _FailedError as error:
        self._breaker.fail(str(error))
        # Random, so that the clients of a server that was down do not come back at once.
        pause = max(error.after, wait * random.uniform(0.5, 1.0))
        wait = min(2 * wait, self._max_backoff)
        if not error.passes:
          raise RemoteError(f'{self._url}: {error}') from error
        if time.monotonic() + pause >= end:
          raise RemoteError(
            f'{self._url}: no passages within {self._deadline:g} seconds: {error}'
          ) from error
        time.sleep(pause)
      else:
        self._breaker.succeed()
        return found

  def _attempt(self, queries, k, end) -> list[list[Hit]]:
    status, headers, body = self._post(
      {'queries': list(queries), 'topk': k, 'return_scores': True}, end
    )
    if status != 200:
      text = f'status {status}: {body[:200].decode(errors="replace")}'
      if status in (408, 429) or status >= 500:
        raise _FailedError(text, after=_seconds(headers.get('Retry-After', '')))
      self._breaker.succeed()  # It is there, and refuses this search.
      raise RemoteError(f'{self._url}: {text}')
    try:
      return _parse(json.loads(body), len(queries), k)
    except (ValueError, RecursionError) as error:
      text = f'an answer that makes no sense: {error}'
      raise _FailedError(text, passes=False) from error

  def _post(self, fields, end) -> tuple[int, Mapping[str, str], bytes]:
    import httpx2

    seconds, body = max(end - time.monotonic(), 0.001), bytearray()
    request: dict[str, Any] = {
      # Not `json=`, which raises on lone surrogates.
      'content': json.dumps(fields),
      'headers': {'Content-Type': 'application/json'},
      'timeout': seconds,
    }
    try:
      with self._client.stream('POST', self._url, **request) as response:
        for chunk in response.iter_bytes():
          body += chunk
          if len(body) > _MAX_ANSWER:
            raise _FailedError(f'sent more than {_MAX_ANSWER} bytes', passes=False)
          if time.monotonic() > end:  # httpx2 limits each wait, and not their sum.
            raise httpx2.ReadTimeout('the answer came too slowly')
        return response.status_code, response.headers, bytes(body)
    except httpx2.TimeoutException as error:
      text = f'no answer within {seconds:.1f} seconds ({type(error).__name__})'
      raise _FailedError(text) from error
    except httpx2.HTTPError as error:
      passes = isinstance(error, httpx2.TransportError)
      raise _FailedError(f'{type(error).__name__}: {error}', passes=passes) from error


class _Breaker:
  """Counts failures in a row, and says how long to leave the server alone."""

  def __init__(self, failures: int, pause: float):
    self._failures, self._pause = failures, pause
    self._lock = threading.Lock()
    self._count, self._until = 0, 0.0
    self.last_error = ''

  def hold_back(self) -> float:
    """Returns the seconds to wait; 0 lets the caller try, and holds others back then."""
    with self._lock:
      now = time.monotonic()
      if self._count < self._failures:
        return 0.0
      if now < self._until:
        return self._until - now
      self._until = now + self._pause
      return 0.0

  def fail(self, error: str) -> None:
    with self._lock:
      self._count, self.last_error = self._count + 1, error
      if self._count >= self._failures:
        self._until = time.monotonic() + self._pause

  def succeed(self) -> None:
    with self._lock:
      self._count = 0


def _seconds(text: str) -> float:
  """Reads Retry-After; it may hold a date, which is ignored."""
  return float(text) if text.isdecimal() else 0.0


def _parse(answer: Any, queries: int, k: int) -> list[list[Hit]]:
  """Makes hits of {"result": [[{"document", "score"}]]}; raises ValueError for others."""
  lists = answer.get('result') if isinstance(answer, dict) else None
  if not isinstance(lists, list):
    raise ValueError(f'no list "result" in {str(answer)!r:.80}')
  if len(lists) != queries:
    raise ValueError(f'{len(lists)} lists of passages for {queries} queries')
  if strange := [hits for hits in lists if not isinstance(hits, list)]:
    raise ValueError(f'{strange[0]!r:.80} is no list of passages')
  return [[_parse_hit(hit) for hit in hits[:k]] for hits in lists]


def _parse_hit(hit: Any) -> Hit:
  document = hit.get('document') if isinstance(hit, dict) else None
  score = hit.get('score') if isinstance(hit, dict) else None
  if not isinstance(document, dict) or not isinstance(document.get('contents'), str):
    raise ValueError(f'a passage without document or contents: {hit!r:.80}')
  if isinstance(score, bool) or not isinstance(score, int | float):
    raise ValueError(f'score is {score!r:.80}, and not a number')
  if not math.isfinite(score):
    raise ValueError(f'score is {score}')
  title, newline, text = document['contents'].partition('\n')
  title, text = (title.strip('"'), text) if newline else ('', title)
  # Not every server has ids; fusion needs one that is the same for the same passage.
  name = str(document.get('id', document['contents']))
  return Hit(Document(name, str(document.get('title', title)), text), float(score))
