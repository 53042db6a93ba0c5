"""A retriever behind HTTP, in the protocols of Search-R1, SkyRL and Agent-R1.

  POST /retrieve  {"queries": [...] or "query": "...", "topk": 3, "return_scores": false}
                  -> {"result": [[{"document": {"id", "title", "contents"}, "score"}]]};
                  without scores, only the documents
  GET or POST /search  {"queries": [...], "top_k": 5}
                  -> {"results": [[{"id", "title", "text", "score"}]]}
  GET /health     200, or 503 while searches hang
  GET /metrics    counts and times in Prometheus's text format

An error is {"error": "..."}: 400 for bad input, 413 for too much of it, 503 with
Retry-After if too many queries wait, 504 for a search that took too long, 500 for a
failed search.
"""

import asyncio
import collections
from collections.abc import Sequence
import dataclasses
import gc
import hashlib
import threading
import time
from typing import Annotated, Any

from agent_r1_jax.host import thread_pool, workers
from agent_r1_jax.retrieval import batching
from agent_r1_jax.retrieval.documents import Hit, Retriever
from agent_r1_jax.web import http

_CALL = 'retriever'  # The name of a search in the thread pool.
_MAX_BODY = 1 << 20  # Of a request, in bytes.
_SHUTDOWN_SECONDS = 3  # How long running requests may take after SIGTERM.


class _SearchMetrics:
  def __init__(self):
    import prometheus_client as prometheus

    self.registry = prometheus.CollectorRegistry()
    options: dict[str, Any] = {'registry': self.registry}
    self.answers = prometheus.Counter(
      'retriever_answers', 'Answers by HTTP status.', ['status'], **options
    )
    self.cached = prometheus.Counter(
      'retriever_cached_queries', 'Queries answered from the cache.', **options
    )
    self.waiting = prometheus.Gauge(
      'retriever_waiting_queries', 'Queries that wait or are searched.', **options
    )
    self.batches = prometheus.Histogram(
      'retriever_batch_queries',
      'Queries of a search.',
      buckets=[1, 2, 4, 8, 16, 32, 64, 128, 256],
      **options,
    )
    self.seconds = prometheus.Histogram(
      'retriever_answer_seconds', 'Seconds from request to answer.', **options
    )


class _Searches:
  """Searches queries in batches, one batch at a time, and caches answers."""

  def __init__(self, retriever, metrics, max_batch, window, max_waiting, timeout, cache):
    self._retriever, self._metrics = retriever, metrics
    self._timeout, self._max_waiting, self._cache_size = timeout, max_waiting, cache
    # By k and the sha256 of the query, which may be as long as a request.
    self._cache: collections.OrderedDict[tuple[bytes, int], list[Hit]] = (
      collections.OrderedDict()
    )
    self._lock = threading.Lock()  # For the cache, which searches fill in their threads.
    self._count = 0  # Queries in the queue or in a search.
    self._batcher = batching.Batcher(
      self._search,
      _CALL,
      window=window,
      timeout=timeout,
      max_size=max_batch,
      # So that no answer depends on another query's k.
      group=lambda query: query[1],
    )

  async def search(self, texts: Sequence[str], k: int) -> list[list[Hit]]:
    """Finds the passages of each query; raises RefusedError if there is no answer."""
    hits_by_text = {
      text: hits for text in texts if (hits := self._find_cached(text, k)) is not None
    }
    self._metrics.cached.inc(sum(text in hits_by_text for text in texts))
    uncached = [text for text in dict.fromkeys(texts) if text not in hits_by_text]
    if self._count + len(uncached) > self._max_waiting:
      raise http.RefusedError(503, f'{self._count} queries wait already; ask again later')
    self._add(len(uncached))
    try:
      async with asyncio.timeout(self._timeout):
        asked = (self._batcher.ask((text, k)) for text in uncached)
        hits_by_text |= zip(uncached, await asyncio.gather(*asked), strict=True)
    except (TimeoutError, thread_pool.PoolFullError) as error:
      text = f'no answer within {self._timeout:g} seconds; {self._count} queries wait'
      raise http.RefusedError(504, f'{text}; {error}'.rstrip('; ')) from None
    except Exception as error:
      text = f'the search failed: {workers.describe_error(error)}'
      raise http.RefusedError(500, text) from None
    finally:
      self._add(-len(uncached))
    return [hits_by_text[text] for text in texts]

  def _search(self, queries: list[tuple[str, int]]) -> list[list[Hit]]:
    """Searches a batch of queries with the same k, in a thread."""
    self._metrics.batches.observe(len(queries))
    rankings = self._retriever.search([text for text, _ in queries], queries[0][1])
    # Cached even if nobody waits any longer, so that a retry is fast.
    for (text, k), hits in zip(queries, rankings, strict=False):
      with self._lock:
        self._cache[_digest(text), k] = hits
        if len(self._cache) > self._cache_size:
          self._cache.popitem(last=False)
    return rankings

  def _find_cached(self, text: str, k: int) -> list[Hit] | None:
    key = _digest(text), k
    with self._lock:
      if key in self._cache:
        self._cache.move_to_end(key)
      return self._cache.get(key)

  def _add(self, count):
    self._count += count
    self._metrics.waiting.set(self._count)


def _digest(text: str) -> bytes:
  return hashlib.sha256(text.encode(errors='surrogatepass')).digest()


def make_app(
  retriever: Retriever,
  *,
  max_batch: int = 64,
  window: float = 0.002,
  max_waiting: int = 1024,
  timeout: float = 10.0,
  cache: int = 10_000,
  max_k: int = 100,
) -> Any:
  """Makes an ASGI application that serves a retriever.

  Args:
    retriever: The retriever. It need not be thread-safe: two calls overlap only if the
      first was abandoned.
    max_batch: The maximum number of queries per search.
    window: Seconds to wait for further queries before a search.
    max_waiting: The maximum number of queries in progress; further ones get HTTP 503.
    timeout: Seconds until a query gets HTTP 504, and until a search is abandoned and the
      next one begins.
    cache: The number of cached answers, least recently used dropped first; 0 is none.
    max_k: The maximum number of passages per query.
  """
  from starlette import applications, routing

  metrics = _SearchMetrics()
  limits = max_batch, window, max_waiting, timeout, cache
  searches = _Searches(retriever, metrics, *limits)

  def route(path, methods, k_name, default_k, render):
    model = _make_model(k_name, default_k, max_waiting, max_k)
    endpoint = _make_endpoint(searches, metrics, model, render)
    return routing.Route(path, endpoint, methods=methods)

  async def health(request):
    if hung := thread_pool.POOL.abandoned.get(_CALL):
      text = f'{hung} searches hang for more than {timeout:g} seconds'
      return http.answer_json({'status': 'error', 'error': text}, 503)
    return http.answer_json({'status': 'ok'})

  return applications.Starlette(
    routes=[
      route('/retrieve', ['POST'], 'topk', 3, _render_result),
      route('/search', ['GET', 'POST'], 'top_k', 5, _render_results),
      routing.Route('/health', health),
      routing.Route('/metrics', http.show_metrics(metrics.registry)),
    ],
  )


def _make_endpoint(searches: _Searches, metrics: _SearchMetrics, model, render) -> Any:
  """Makes the handler of one protocol's requests, which counts and times them."""

  async def answer(request):
    began, headers = time.perf_counter(), {}
    try:
      fields = await _read(request)
      # Search-R1's clients send null for the default.
      fields = {name: value for name, value in fields.items() if value is not None}
      asked = http.check_fields(model, fields)
      rankings = await searches.search(asked.queries, asked.k)
      status, content = 200, render(rankings, asked.return_scores)
    except http.RefusedError as error:
      status, content = error.status, {'error': str(error)}
      headers = error.headers
    metrics.answers.labels(status).inc()
    metrics.seconds.observe(time.perf_counter() - began)
    return http.answer_json(content, status, headers)

  return answer


async def _read(request) -> dict[str, Any]:
  """Reads the fields of a request, from its JSON or, for GET, from its URL."""
  if request.method == 'GET':
    fields: dict[str, Any] = dict(request.query_params)
    if 'queries' in fields:
      fields['queries'] = request.query_params.getlist('queries')
    if fields.get('top_k', '').isdecimal():
      fields['top_k'] = int(fields['top_k'])
    return fields
  return await http.read_json(request, _MAX_BODY)


def _make_model(k_name: str, default_k: int, max_queries: int, max_k: int) -> Any:
  """Makes the pydantic model of a protocol's request."""
  import pydantic

  def make_list(queries):
    return [queries] if isinstance(queries, str) else queries

  def check_text(query):
    if not query.strip():
      raise ValueError('give a text that is not blank')
    return query

  text = Annotated[str, pydantic.AfterValidator(check_text)]
  size = pydantic.Field(min_length=1, max_length=max_queries, fail_fast=True)
  texts: Any = Annotated[list[text], size, pydantic.BeforeValidator(make_list)]
  names = pydantic.AliasChoices('queries', 'query')
  return pydantic.create_model(
    'Request',
    __config__=pydantic.ConfigDict(strict=True),
    queries=(texts, pydantic.Field(validation_alias=names)),
    k=(int, pydantic.Field(default_k, ge=1, le=max_k, validation_alias=k_name)),
    return_scores=(bool, pydantic.Field(False, strict=False)),
  )


def _render_result(rankings: list[list[Hit]], with_scores: bool) -> dict[str, Any]:
  """Writes passages as Search-R1 does, with the title on the first line of contents."""

  def render(hit: Hit) -> dict[str, Any]:
    document = hit.document
    fields = {'id': document.id, 'title': document.title, 'contents': document.contents}
    return {'document': fields, 'score': hit.score} if with_scores else fields

  return {'result': [[render(hit) for hit in hits] for hits in rankings]}


def _render_results(rankings: list[list[Hit]], with_scores: bool) -> dict[str, Any]:
  return {
    'results': [
      [dataclasses.asdict(document) | {'score': score} for document, score in hits]
      for hits in rankings
    ]
  }


def serve(app: Any, host: str = '127.0.0.1', port: int = 8000) -> None:
  """Serves until SIGTERM or SIGINT; prints the address once it accepts requests.

  The host 0.0.0.0 accepts other machines; port 0 chooses a free one.
  """
  # The passages are permanent. Garbage collection over a million of them would block all
  # answers for a third of a second.
  gc.collect()
  gc.freeze()
  with http.listen(host, port) as listener:
    print(f'http://{host}:{listener.getsockname()[1]}', flush=True)
    http.make_server(app, _SHUTDOWN_SECONDS).run([listener])
