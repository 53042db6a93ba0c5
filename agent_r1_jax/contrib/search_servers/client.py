"""A remote retriever: any server that speaks Search-R1's protocol."""

from collections.abc import Sequence
import json
import math
import time
from typing import Any

from agent_r1_jax.retrieval.documents import Document, Hit
from agent_r1_jax.web import bounded_http

_MAX_BACKOFF = 2.0  # Seconds between two attempts, unless the server asks for more.
_MAX_ANSWER = 1 << 26  # Bytes; a server that sends more is broken.


class RemoteError(ConnectionError):
  """A server gave no passages; the text names the server and the reason."""


class _TransientError(Exception):
  """A temporary failure of the server.

  Attributes:
    after: Seconds before the next attempt, if the server sets them.
  """

  def __init__(self, text: str, after: float = 0.0):
    super().__init__(text)
    self.after = after


class Remote:
  """Asks a server for passages; fails within a deadline, whatever the server does.

  Temporary failures (no connection, a time-out, 429 and 5xx) are retried with exponential
  back-off until the deadline. If the server stays away, its search tool is isolated like
  any failing tool (agent/tool.py).
  """

  def __init__(
    self,
    url: str,
    *,
    timeout: float = 5.0,
    deadline: float = 20.0,
    backoff: float = 0.1,
  ):
    """Connects at the first search; `with` closes the connections at its end.

    Args:
      url: The server's address without the path, such as http://10.0.0.7:8000.
      timeout: Seconds for one attempt.
      deadline: Seconds for a search with all its attempts; below search_tool's timeout,
        so that the agent reads why there are no passages.
      backoff: Maximum seconds before the second attempt, doubled before each further one.
    """
    import httpx2

    self._url = bounded_http.check_url(url) + '/retrieve'
    self._timeout, self._deadline, self._backoff = timeout, deadline, backoff
    self._client = httpx2.Client()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._client.close()

  def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
    """Finds at most k passages for each query.

    Raises:
      RemoteError: No passages before the deadline, or an invalid answer.
    """
    if not queries:
      return []
    import tenacity

    # Random, so that a restarted server's clients do not all return at once.
    backoff = tenacity.wait_random_exponential(self._backoff, _MAX_BACKOFF)

    def wait(state: Any) -> float:
      return max(state.outcome.exception().after, backoff(state))

    attempts = tenacity.Retrying(
      retry=tenacity.retry_if_exception_type(_TransientError),
      wait=wait,
      stop=tenacity.stop_before_delay(self._deadline),
    )
    end = time.monotonic() + self._deadline
    try:
      return attempts(self._ask, queries, k, end)
    except tenacity.RetryError as error:
      last = error.last_attempt.exception()
      raise RemoteError(
        f'{self._url}: no passages within {self._deadline:g} seconds: {last}'
      ) from last

  def _ask(self, queries, k, end: float) -> list[list[Hit]]:
    """Asks once, until `end` at most."""
    import httpx2

    seconds = min(max(end - time.monotonic(), 0.001), self._timeout)
    fields = {'queries': list(queries), 'topk': k, 'return_scores': True}
    try:
      status, headers, body = bounded_http.post(
        self._client, self._url, fields, seconds=seconds, max_bytes=_MAX_ANSWER
      )
    except (TimeoutError, httpx2.TransportError) as error:
      raise _TransientError(f'{type(error).__name__}: {error}') from error
    except bounded_http.LongAnswerError as error:
      raise RemoteError(f'{self._url}: {error}') from error
    text = f'status {status}: {body[:200].decode(errors="replace")}'
    if status in (408, 429) or status >= 500:
      raise _TransientError(text, _read_seconds(headers.get('Retry-After', '')))
    if status != 200:
      raise RemoteError(f'{self._url}: {text}')
    try:
      return _parse(json.loads(body), len(queries), k)
    except (ValueError, RecursionError) as error:
      text = f'{self._url}: an answer that makes no sense: {error}'
      raise RemoteError(text) from error


def _read_seconds(text: str) -> float:
  """Reads Retry-After in seconds; a date is ignored."""
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
  # Not every server has ids; fusion needs equal ids for equal passages.
  name = str(document.get('id', document['contents']))
  return Hit(Document(name, str(document.get('title', title)), text), float(score))
