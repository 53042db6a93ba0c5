"""The client against servers that are down, slow, overloaded, or return nonsense."""

import contextlib
import json
import pathlib
import re
import threading
import types

import answers
import pytest

from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.contrib import search_servers
from agent_r1_jax.contrib.search_servers import client
from agent_r1_jax.retrieval.documents import Document, Hit
from agent_r1_jax.tools import search

FOLDER = pathlib.Path(search_servers.__file__).parent
GOOD = {'result': [[{'document': {'contents': '"Ann"\nBorn.'}, 'score': 1}]]}
QUICK = {'timeout': 20.0, 'deadline': 60.0, 'backoff': 0.001}


@contextlib.contextmanager
def scripted(*given, retry_after='0'):
  """A server that gives its answers one by one, the last one again and again."""
  given, asked, gate = list(given), [], threading.Event()

  def drip(handler):
    """Sends a byte now and then: an answer that never ends."""
    handler.send_response(200)
    handler.send_header('Content-Length', str(10**6))
    handler.end_headers()
    with contextlib.suppress(OSError):  # The client has left.
      while not gate.wait(0.01):
        handler.wfile.write(b'.')

  def answer(handler, fields):
    asked.append((handler.path, fields))
    now = given.pop(0) if len(given) > 1 else given[0]
    if now == 'drip':
      drip(handler)
    if now == 'hang':
      gate.wait()
    if isinstance(now, str):
      return None
    status, content = now if isinstance(now, tuple) else (200, now)
    return status, content if isinstance(content, bytes) else json.dumps(content).encode()

  with answers.serve_posts(answer, **{'Retry-After': retry_after}) as url:
    yield types.SimpleNamespace(url=f'{url}/', asked=asked)
    gate.set()


@pytest.fixture
def remote():
  """Makes clients, which are closed at the end."""
  with contextlib.ExitStack() as stack:
    yield lambda url, **options: stack.enter_context(client.Remote(url, **options))


def test_a_search(remote):
  passage = {'id': 7, 'title': 'Ann "A"', 'contents': 'Ann "A"\nBorn.\nDied.'}
  two = [{'document': passage, 'score': 2.5}, {'document': {'contents': 'x'}, 'score': 1}]
  with scripted({'result': [two, []]}) as fake:
    found = remote(fake.url).search(['a', 'b\ud800'], 2)
    assert remote(fake.url).search([], 2) == []
  ann = Hit(Document('7', 'Ann "A"', 'Born.\nDied.'), 2.5)
  assert found == [[ann, Hit(Document('x', '', 'x'), 1.0)], []]
  body = {'queries': ['a', 'b\ud800'], 'topk': 2, 'return_scores': True}
  assert fake.asked == [('/retrieve', body)]


def test_what_may_pass_is_tried_again(remote):
  with scripted((503, {'error': 'full'}), 'close', (500, b''), 'hang', GOOD) as fake:
    ((hit,),) = remote(fake.url, **QUICK | {'timeout': 0.5}).search(['a'], 1)
  assert hit.document == Document('"Ann"\nBorn.', 'Ann', 'Born.')
  assert len(fake.asked) >= 5


def test_a_server_that_asks_for_more_time_than_is_left_is_not_asked_again(remote):
  with scripted((503, b''), retry_after='3600') as fake:
    with pytest.raises(client.RemoteError, match='within 60 seconds: status 503'):
      remote(fake.url, **QUICK).search(['a'], 1)
  assert len(fake.asked) == 1


@pytest.mark.parametrize('answer', ['hang', 'drip'])
def test_a_slow_server_costs_no_more_than_the_deadline(remote, answer):
  with scripted(answer) as fake:
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
  with scripted(answer) as fake:
    with pytest.raises(client.RemoteError, match=f'{fake.url}retrieve: .*{message}'):
      remote(fake.url, **QUICK).search(['a'], 1)
  assert len(fake.asked) == 1


def test_an_address_without_a_protocol_is_refused():
  with pytest.raises(ValueError, match="url is 'host:8000'; begin with http"):
    client.Remote('host:8000')


async def test_a_server_that_fails_is_told_to_the_model():
  with scripted(GOOD, {'result': 3}) as fake:
    with client.Remote(fake.url) as remote:
      tool = search.search_tool(remote, k=1)
      good = await tool_lib.call(tool, {'query': 'Ann'})
      assert (good.ok, good.text) == (True, 'Doc 1 (Title: Ann) Born.')
      bad = await tool_lib.call(tool, {'query': 'Ann'})
  assert not bad.ok and fake.url in bad.text and 'makes no sense' in bad.text


def test_the_guide_runs():
  (code,) = re.findall(r'```python\n(.*?)```', (FOLDER / 'guide.md').read_text(), re.S)
  names: dict = {}
  exec(code, names)
  with names['remote']:
    assert names['tool'].name == 'search'
