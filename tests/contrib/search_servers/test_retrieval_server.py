"""The server: both protocols, batches, its bounds, bad input, searches that hang."""

import collections
from concurrent import futures
import contextlib
import json
import pathlib
import signal
import threading

import answers
import httpx2
import pytest
import script
import waiting

from agent_r1_jax.contrib.search_servers import client, server
from agent_r1_jax.retrieval import bm25, dense, documents, encoder, fusion
from agent_r1_jax.retrieval.documents import Document, Hit

ROOT = pathlib.Path(__file__).parents[3]
GOLDEN = ROOT / 'tests' / 'golden' / 'encoder'


class Echo:
  """Finds passages titled as the query; 'hang' waits for the gate, 'raise' raises."""

  def __init__(self):
    self.batches, self.gate = [], threading.Event()
    self.entered = threading.Semaphore(0)

  def search(self, queries, k):
    self.batches.append((list(queries), k))
    self.entered.release()
    if any(query.startswith('hang') for query in queries):
      self.gate.wait()
    if 'raise' in queries:
      raise RuntimeError('out of luck')
    return [
      [Hit(Document(q, q, f'text {i}'), 2.0 - i) for i in range(k)] for q in queries
    ]


@contextlib.contextmanager
def _serve(retriever, **limits):
  """A client of a server in a thread."""
  with answers.run(server.make_app(retriever, **limits)) as (port, _):
    with httpx2.Client(base_url=f'http://127.0.0.1:{port}', timeout=30) as asked:
      yield asked


def _wait_for_metric(asked, line):
  waiting.until(lambda: line in asked.get('/metrics').text, line)


@pytest.fixture
def echo():
  retriever = Echo()
  yield retriever
  retriever.gate.set()


def test_the_protocols(echo):
  with _serve(echo) as asked:
    fields = {'id': 'a', 'title': 'a', 'contents': 'a\ntext 0'}
    given = {'queries': ['a', 'b'], 'topk': 2, 'return_scores': True}
    result = asked.post('/retrieve', json=given).json()['result']
    assert [len(hits) for hits in result] == [2, 2]
    assert result[0][0] == {'document': fields, 'score': 2.0}
    # SkyRL's, without scores; null is what clients send for the default.
    given = {'query': 'a', 'topk': None}
    assert asked.post('/retrieve', json=given).json()['result'][0][0] == fields
    fields = {'id': 'b', 'title': 'b', 'text': 'text 0', 'score': 2.0}
    for answer in (
      asked.post('/search', json={'queries': ['a', 'b'], 'top_k': 1}),
      asked.get('/search', params={'queries': ['a', 'b'], 'top_k': 1}),
    ):
      assert answer.json()['results'][1] == [fields]
    assert len(asked.get('/search', params={'query': 'c'}).json()['results'][0]) == 5
    assert asked.get('/health').json() == {'status': 'ok'}
    counts = asked.get('/metrics').text
    assert 'retriever_answers_total{status="200"} 5.0' in counts
    assert 'retriever_cached_queries_total 2.0' in counts
    assert 'retriever_waiting_queries 0.0' in counts


def test_what_comes_together_is_one_search_and_k_is_kept_apart(echo):
  with (
    _serve(echo, max_batch=3, timeout=60) as asked,
    futures.ThreadPoolExecutor(8) as pool,
  ):
    ask = lambda query, k: asked.get('/search', params={'queries': query, 'top_k': k})
    first = pool.submit(ask, 'hang', 1)
    assert echo.entered.acquire(timeout=20)
    later = [pool.submit(ask, f'q{i}', 1 + (i == 5)) for i in range(6)]
    _wait_for_metric(asked, 'waiting_queries 7.0')
    echo.gate.set()
    found = [answer.result().json()['results'][0] for answer in (first, *later)]
  assert [len(hits) for hits in found] == [1] * 6 + [2]
  assert found[3][0]['title'] == 'q2'
  sizes = collections.Counter((len(queries), k) for queries, k in echo.batches[1:])
  assert sizes == {(3, 1): 1, (2, 1): 1, (1, 2): 1}


def test_a_full_queue_refuses(echo):
  limits = {'max_waiting': 2, 'timeout': 60, 'max_batch': 1}
  with _serve(echo, **limits) as asked, futures.ThreadPoolExecutor(8) as pool:
    ask = lambda query: asked.post('/retrieve', json={'query': query})
    waiting = [pool.submit(ask, f'hang {i}') for i in range(2)]
    _wait_for_metric(asked, 'waiting_queries 2.0')
    refused = ask('third')
    echo.gate.set()
    assert (refused.status_code, refused.headers['Retry-After']) == (503, '1')
    assert '2 queries wait already' in refused.json()['error']
    assert [answer.result().status_code for answer in waiting] == [200, 200]
    assert ask('third').status_code == 200


def test_a_search_that_hangs_is_abandoned(echo):
  with _serve(echo, timeout=0.3) as asked:
    ask = lambda query: asked.post('/retrieve', json={'query': query})
    late = ask('hang')
    assert (late.status_code, 'within 0.3 seconds' in late.json()['error']) == (504, True)
    waiting.until(lambda: ask('another').status_code == 200, 'an answer')
    health = asked.get('/health')
    assert health.status_code == 503 and '1 searches hang' in health.json()['error']
    echo.gate.set()
    waiting.until(lambda: asked.get('/health').status_code == 200, 'health')
    assert 'waiting_queries 0.0' in asked.get('/metrics').text


def test_a_search_that_fails_costs_its_own_queries(echo):
  with _serve(echo) as asked:
    failed = asked.post('/retrieve', json={'queries': ['raise', 'x']})
    assert failed.status_code == 500
    assert failed.json()['error'] == 'the search failed: RuntimeError: out of luck'
    assert asked.post('/retrieve', content='{"query": "\\ud800"}').status_code == 200
    echo.search = lambda queries, k: []
    failed = asked.post('/retrieve', json={'query': 'y'})
    assert 'retriever gave 0 answers to 1 questions' in failed.json()['error']


def test_the_cache_is_bounded(echo):
  with _serve(echo, cache=2) as asked:
    for query in 'abcab':
      asked.post('/retrieve', json={'query': query})
    asked.post('/retrieve', json={'query': 'b'})
    asked.post('/retrieve', json={'query': 'b', 'topk': 1})
  assert [queries for queries, _ in echo.batches] == [[q] for q in 'abcabb']


def test_what_is_cached_is_short_however_long_a_query_is(echo, monkeypatch):
  made = []
  init = server._Searches.__init__
  keep = lambda self, *args, **kwargs: made.append(self) or init(self, *args, **kwargs)
  monkeypatch.setattr(server._Searches, '__init__', keep)
  with _serve(echo) as asked:
    for _ in range(2):
      assert asked.post('/retrieve', json={'query': 'a' * 10**5}).is_success
  assert len(echo.batches) == 1
  ((key, _),) = made[0]._cache
  assert len(key) == 32


def test_bad_input_names_the_field(echo):
  with _serve(echo, max_waiting=3) as asked:
    for path, body, status, message in (
      ('/retrieve', '{', 400, 'the body is no JSON'),
      ('/retrieve', '[' * 100_000, 400, 'the body is no JSON'),
      ('/retrieve', f'{{"query": {"[" * 500 + "]" * 500}}}', 400, 'nested deeper than'),
      ('/retrieve', '[]', 400, 'the body is no JSON object'),
      ('/retrieve', '{}', 400, 'queries is missing'),
      ('/retrieve', '{"queries": []}', 400, r'queries is \[\]; .*at least 1 item'),
      ('/retrieve', '{"queries": ["a", 3]}', 400, r'queries\[1\] is 3; it should be'),
      ('/retrieve', '{"query": " "}', 400, "query is ' '; give a text"),
      ('/retrieve', '{"queries": ["a", "b", "c", "d"]}', 400, 'at most 3 items'),
      ('/retrieve', '{"query": "a", "topk": 0}', 400, 'topk is 0; .*or equal to 1'),
      ('/retrieve', '{"query": "a", "topk": true}', 400, 'topk is True'),
      ('/search', '{"query": "a", "top_k": 101}', 400, 'top_k is 101; .* equal to 100'),
      ('/search?queries=a&top_k=x', None, 400, "top_k is 'x'"),
      ('/retrieve', ' ' * (1 << 20) + '{}', 413, 'more than 1048576 bytes'),
    ):
      given = asked.post(path, content=body) if body else asked.get(path)
      assert given.status_code == status
      with pytest.raises(ValueError, match=message):
        raise ValueError(given.json()['error'])
    assert asked.get('/retrieve').status_code == 405
  assert echo.batches == []


_HUNG = """
import threading
from agent_r1_jax.contrib.search_servers import server

class Hung:
  def search(self, queries, k):
    print('inside', flush=True)
    threading.Event().wait()

server._SHUTDOWN_SECONDS = 1
server.serve(server.make_app(Hung()), port=0)
"""


def test_sigterm_ends_it_though_a_search_hangs():
  with script.Process('-c', _HUNG) as process:
    url = process.stdout.readline().strip()
    with futures.ThreadPoolExecutor() as pool:
      pool.submit(httpx2.post, f'{url}/retrieve', json={'query': 'a'}, timeout=60)
      assert process.stdout.readline() == 'inside\n'
      process.send_signal(signal.SIGTERM)
      process.wait(20)


def test_build_serve_and_ask(tmp_path):
  """The two scripts, and a client."""
  passages = [Document(str(i), f'Title {i}', f'was born {i} the') for i in range(30)]
  documents.write_corpus(tmp_path / 'corpus.jsonl.gz', passages)
  bm25.BM25(passages).save(tmp_path / 'bm25')
  flags = [f'--corpus={tmp_path / "corpus.jsonl.gz"}', f'--out={tmp_path / "dense"}']
  build = ['-m', 'experiments.build_index', *flags, '--shard=8', f'--encoder={GOLDEN}']
  assert script.run(*build).returncode == 0
  flags = [f'--index={tmp_path / "dense"},{tmp_path / "bm25"}', f'--encoder={GOLDEN}']
  flags += ['--port=0', '--batch=2']
  with script.Process('-m', 'experiments.serve_retriever', *flags) as process:
    url = process.stdout.readline().strip()
    with client.Remote(url) as remote:
      found = remote.search(['who was born', 'Title 7'], 4)
    process.send_signal(signal.SIGTERM)
    process.wait(20)
  made = encoder.Encoder(GOLDEN)
  index = dense.Dense(passages, made.encode_passages, encode_query=made.encode_queries)
  here = fusion.Fusion([index, bm25.BM25(passages)])
  for ours, theirs in zip(
    here.search(['who was born', 'Title 7'], 4), found, strict=True
  ):
    assert [hit.document for hit in theirs] == [hit.document for hit in ours]
    assert [hit.score for hit in theirs] == [hit.score for hit in ours]
  assert json.dumps(found[0][0].document.title).startswith('"Title')
