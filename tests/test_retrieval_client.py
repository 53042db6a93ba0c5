"""The client against servers that are down, slow, overloaded, or return nonsense."""

import contextlib
import http.server
import json
import threading

import pytest

from agent_r1_jax.retrieval import client
from agent_r1_jax.retrieval.documents import Document, Hit

GOOD = {'result': [[{'document': {'contents': '"Ann"\nBorn.'}, 'score': 1}]]}
QUICK = {'timeout': 20.0, 'deadline': 60.0, 'backoff': 0.001}


class Scripted:
  """A server that gives its answers one by one, the last one again and again."""

  def __init__(self, *answers):
    self.answers, self.asked, self.gate = list(answers), [], threading.Event()
    scripted = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = 'HTTP/1.1'

      def do_POST(self):
        body = self.rfile.read(int(self.headers['Content-Length']))
        scripted.asked.append((self.path, json.loads(body)))
        scripted.give(self)

      def log_message(self, *args):
        pass

    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
    self.url = f'http://127.0.0.1:{self._server.server_port}/'

  def give(self, handler):
    answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
    if answer == 'hang':
      self.gate.wait()
      answer = 'close'
    if answer == 'close':
      handler.close_connection = True
      return
    if isinstance(answer, tuple):
      status, content = answer
    else:
      status, content = 200, answer
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    handler.send_response(status)
    # One byte more than there is, and a byte now and then: an answer that never ends.
    drips = content == b'drip'
    handler.send_header('Content-Length', str(len(content) + 10**6 * drips))
    if status == 503:
      handler.send_header('Retry-After', '0')
    handler.end_headers()
    handler.wfile.write(content)
    try:
      while drips and not self.gate.wait(0.01):
        handler.wfile.write(b'.')
    except OSError:
      pass  # The client has left.

  def __enter__(self):
    self._thread.start()
    return self

  def __exit__(self, *_):
    self.gate.set()
    self._server.shutdown()
    self._server.server_close()
    self._thread.join(20)


@pytest.fixture
def remote():
  """Makes clients, which are closed at the end."""
  with contextlib.ExitStack() as stack:
    yield lambda url, **options: stack.enter_context(client.Remote(url, **options))


def test_a_search(remote):
  passage = {'id': 7, 'title': 'Ann "A"', 'contents': 'Ann "A"\nBorn.\nDied.'}
  two = [{'document': passage, 'score': 2.5}, {'document': {'contents': 'x'}, 'score': 1}]
  with Scripted({'result': [two, []]}) as fake:
    found = remote(fake.url).search(['a', 'b\ud800'], 2)
    assert remote(fake.url).search([], 2) == []
  ann = Hit(Document('7', 'Ann "A"', 'Born.\nDied.'), 2.5)
  assert found == [[ann, Hit(Document('x', '', 'x'), 1.0)], []]
  body = {'queries': ['a', 'b\ud800'], 'topk': 2, 'return_scores': True}
  assert fake.asked == [('/retrieve', body)]


def test_what_may_pass_is_tried_again(remote):
  with Scripted((503, {'error': 'full'}), 'close', (500, b''), 'hang', GOOD) as fake:
    ((hit,),) = remote(fake.url, **QUICK | {'timeout': 0.5}).search(['a'], 1)
  assert hit.document == Document('"Ann"\nBorn.', 'Ann', 'Born.')
  assert len(fake.asked) >= 5


@pytest.mark.parametrize('answer', ['hang', b'drip'])
def test_a_slow_server_costs_no_more_than_the_deadline(remote, answer):
  with Scripted(answer) as fake:
    asked = remote(fake.url, timeout=0.1, deadline=0.5, backoff=0.01)
    with pytest.raises(
      client.RemoteError, match='no passages within 0.5 seconds: .*no an'
    ):
      asked.search(['a'], 1)


@pytest.mark.parametrize(
  ('answer', 'message'),
  [
    (b'<html>', 'Expecting value'),
    (b'[' * 100_000, 'recursion'),
    (b'\xff', 'decode'),
    ([], 'no list "result"'),
    ({'result': 3}, 'no list "result"'),
    ({'result': []}, '0 lists of passages for 1 queries'),
    ({'result': ['abc']}, "'abc' is no list"),
    ({'result': [['abc']]}, 'a passage without document'),
    ({'result': [[{'document': {'contents': 3}, 'score': 1}]]}, 'a passage without'),
    ({'result': [[{'document': {'contents': 'a'}, 'score': '1'}]]}, "score is '1'"),
    ({'result': [[{'document': {'contents': 'a'}, 'score': float('nan')}]]}, 'is nan'),
    ((302, b'elsewhere'), 'status 302'),
    ((400, {'error': 'topk is 0'}), 'status 400: .*topk is 0'),
  ],
)
def test_nonsense_names_the_server(remote, answer, message):
  with Scripted(answer) as fake:
    with pytest.raises(client.RemoteError, match=f'{fake.url}retrieve: .*{message}'):
      remote(fake.url, **QUICK).search(['a'], 1)
  assert len(fake.asked) == 1


def test_an_address_without_a_protocol_is_refused():
  with pytest.raises(ValueError, match="url is 'host:8000'; begin with http"):
    client.Remote('host:8000')
