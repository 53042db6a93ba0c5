"""The search tool: what it shows, how it gathers queries, and how it fails."""

import asyncio
import collections
import pathlib
import re
import subprocess
import sys
import threading
import types

import pytest
import waiting

from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.host import thread_pool
from agent_r1_jax.retrieval import batching
from agent_r1_jax.retrieval.documents import Document, Hit
from agent_r1_jax.tools import search


class Echo:
  """Finds passages titled as the query, once its gate is open."""

  def __init__(self, error=None):
    self.batches, self.error = [], error
    self.inside = self.most_inside = 0
    self.gate = threading.Event()
    self.gate.set()

  def search(self, queries, k):
    self.inside += 1
    self.most_inside = max(self.inside, self.most_inside)
    self.batches.append((list(queries), k, threading.current_thread()))
    assert self.gate.wait(20)
    self.inside -= 1
    if self.error:
      raise self.error
    return [[Hit(Document(q, q, f'text {i}'), 1.0) for i in range(k)] for q in queries]


def _call(tool, query):
  return tool_lib.call(tool, {'query': query})


async def test_what_the_model_sees():
  echo = Echo()
  tool = search.search_tool(echo, k=2)
  result = await _call(tool, 'Ann Berg')
  assert result.ok
  assert result.text == 'Doc 1 (Title: Ann Berg) text 0\nDoc 2 (Title: Ann Berg) text 1'
  function = tool.schema['function']
  assert (tool.name, function['name'], echo.batches[0][1]) == ('search', 'search', 2)
  assert function['parameters']['required'] == ['query']
  assert function['parameters']['properties'] == {
    'query': {'type': 'string', 'description': 'What to search for.'}
  }
  assert (await _call(tool, ' Ann\n Berg ')).text == result.text
  short = search.search_tool(echo, k=1, template='{title}: {text}')
  assert (await _call(short, 'Bo')).text == 'Bo: text 0'


async def test_queries_at_the_same_time_are_one_search():
  echo = Echo()
  tool = search.search_tool(echo, k=1)
  queries = [f'q{i}' for i in range(50)]
  results = await asyncio.gather(*(_call(tool, query) for query in queries))
  assert [r.text for r in results] == [f'Doc 1 (Title: {q}) text 0' for q in queries]
  assert [batch[0] for batch in echo.batches] == [queries]
  assert echo.batches[0][2] is not threading.main_thread()
  await _call(tool, 'later')
  assert [batch[0] for batch in echo.batches] == [queries, ['later']]


async def test_the_window_stays_open_for_later_queries(monkeypatch):
  echo, waited, over = Echo(), [], asyncio.Event()
  tool = search.search_tool(echo, k=1, window=0.3)

  async def sleep(seconds):
    waited.append(seconds)
    await over.wait()

  theirs = vars(asyncio) | {'sleep': sleep}
  monkeypatch.setattr(batching, 'asyncio', types.SimpleNamespace(**theirs))
  asked = [asyncio.create_task(_call(tool, 'first'))]
  while not waited:
    await asyncio.sleep(0)
  asked += [asyncio.create_task(_call(tool, f'{i}')) for i in range(3)]
  for _ in range(10):
    await asyncio.sleep(0)
  over.set()
  await asyncio.gather(*asked)
  assert waited == [0.3]
  assert [sorted(batch[0]) for batch in echo.batches] == [['0', '1', '2', 'first']]


async def test_what_is_asked_while_the_retriever_is_busy_is_one_search():
  echo = Echo()
  echo.gate.clear()
  tool = search.search_tool(echo, k=1, window=0)
  first = asyncio.create_task(_call(tool, 'first'))
  await waiting.soon(lambda: echo.inside, 'a call')
  later = [asyncio.create_task(_call(tool, f'{number}')) for number in range(20)]
  for _ in range(20):  # Turns of the loop, in which the questions are asked.
    await asyncio.sleep(0)
  assert not first.done() and len(echo.batches) == 1
  echo.gate.set()
  await asyncio.gather(first, *later)
  assert [batch[0] for batch in echo.batches] == [['first'], [*map(str, range(20))]]
  assert echo.most_inside == 1


async def test_after_a_search_that_hung_the_next_is_served():
  """Not only those that come after it: also those that wait meanwhile."""
  echo, hung = Echo(), threading.Event()
  search_as_before = echo.search

  def hang_once(queries, k):
    if not hung.is_set():
      hung.set()
      threading.Event().wait(600)
    return search_as_before(queries, k)

  echo.search = hang_once
  tool = search.search_tool(echo, k=1, timeout=1.0)
  thread_pool.abandoned_calls.set(tally := collections.Counter())
  first = asyncio.create_task(_call(tool, 'first'))
  await asyncio.to_thread(hung.wait, 60)
  waiting = asyncio.create_task(tool.fn('waits'))
  result = await first
  assert (result.text, result.timed_out) == (
    'Error: search gave no answer within 1 seconds',
    True,
  )
  assert await waiting == 'Doc 1 (Title: waits) text 0'
  assert (await _call(tool, 'next')).text == 'Doc 1 (Title: next) text 0'
  assert tally == {'search': 1}


async def test_an_exception_goes_to_every_waiter_and_the_next_search_works():
  echo = Echo(error=OSError('index gone'))
  tool = search.search_tool(echo, k=1)
  results = await asyncio.gather(*(_call(tool, f'q{i}') for i in range(3)))
  assert len(echo.batches) == 1
  assert not any(result.ok for result in results)
  assert all('index gone' in result.text for result in results)
  echo.error = None
  assert (await _call(tool, 'q')).ok


async def test_a_time_out_of_one_leaves_the_others():
  echo = Echo()
  echo.gate.clear()
  tool = search.search_tool(echo, k=1)
  hasty = asyncio.create_task(tool.fn('hasty'))
  patient = asyncio.create_task(_call(tool, 'patient'))
  await waiting.soon(lambda: echo.inside, 'a call')
  hasty.cancel()
  with pytest.raises(asyncio.CancelledError):
    await hasty
  echo.gate.set()
  assert (await patient).text == 'Doc 1 (Title: patient) text 0'
  assert [batch[0] for batch in echo.batches] == [['hasty', 'patient']]


def test_one_tool_serves_many_loops():
  echo = Echo()
  tool = search.search_tool(echo, k=1, window=0.05)

  async def ask(*queries):
    return [r.text for r in await asyncio.gather(*(_call(tool, q) for q in queries))]

  for name in 'abc':
    assert asyncio.run(ask(name)) == [f'Doc 1 (Title: {name}) text 0']

  async def give_up():
    await asyncio.wait_for(tool.fn('never'), 0.001)

  with pytest.raises(TimeoutError):  # A loop that ends with a batch still open.
    asyncio.run(give_up())
  answers, workers = {}, []
  for number in range(8):
    queries = [f'{number}-{i}' for i in range(20)]

    def work(number=number, queries=queries):
      answers[number] = asyncio.run(ask(*queries))

    workers.append(threading.Thread(target=work))
  for worker in workers:
    worker.start()
  for worker in workers:
    worker.join(timeout=20)
  assert answers == {
    n: [f'Doc 1 (Title: {n}-{i}) text 0' for i in range(20)] for n in range(8)
  }


_HUNG = """
import asyncio, threading
from agent_r1_jax.agent import tool
from agent_r1_jax.tools import search

class Hung:
  def search(self, queries, k):
    threading.Event().wait()

call = tool.call(search.search_tool(Hung(), timeout=0.05), {'query': 'q'})
print(asyncio.run(call).text)
"""


def test_a_hung_retriever_holds_nobody_up():
  """Neither the agent, nor the loop's end, nor the program's."""
  run = subprocess.run(
    [sys.executable, '-c', _HUNG],
    cwd=pathlib.Path(__file__).parents[1],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert run.stdout == 'Error: search gave no answer within 0.05 seconds\n'
  named = 'WARNING:root:search has given no answer for 0.03 of 0.05 seconds'
  assert {*run.stderr.splitlines()} == {named}


async def test_misuse():
  result = await _call(search.search_tool(Echo()), '  ')
  assert (result.ok, 'query is empty' in result.text) == (False, True)
  with pytest.raises(ValueError, match='k is 0'):
    search.search_tool(Echo(), k=0)
  for template in ('{name}', '{title', '{0}', '{title.size}'):
    with pytest.raises(ValueError, match=r'it may use {rank}'):
      search.search_tool(Echo(), template=template)

  class Short:
    def search(self, queries, k):
      return []

  assert (
    '0 answers to 1 questions' in (await _call(search.search_tool(Short()), 'q')).text
  )


async def test_the_retrievers_of_the_documentation_run():
  page = pathlib.Path(__file__).parents[1] / 'docs' / 'retrieval.md'
  (own,) = re.findall(r'```python\n(.*?)```', page.read_text(), re.S)
  names: dict = {}
  exec(own, names)
  found = await _call(names['tool'], 'Where was Ann Berg born?')
  assert found.text == 'Doc 1 (Title: Ann Berg) Ann Berg was born in Oslo.'
