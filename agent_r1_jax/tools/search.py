"""The search tool: passages for a query, many agents' queries in one call."""

import asyncio
from collections.abc import Callable, Sequence
import concurrent.futures
import threading
from typing import Any

from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.retrieval import documents
from agent_r1_jax.retrieval.documents import Document, Hit, Retriever


def search_tool(
  retriever: Retriever,
  *,
  k: int = 5,
  template: str = documents.PASSAGE,
  window: float = 0.003,
  timeout: float = 30.0,
) -> tool_lib.Tool:
  """A tool `search(query: str)` over a retriever.

  Queries of agents that run at the same time go to the retriever together, in a thread,
  one call at a time. What the retriever raises, each of them gets.

  Args:
    retriever: Need not be thread-safe.
    k: Passages a query.
    template: Of one passage, as `documents.render` takes it.
    window: Seconds to wait for further queries.
    timeout: Seconds a query may take, the window included.
  """
  if k < 1:
    raise ValueError(f'k is {k}; it must be at least 1')
  _check(template)
  batcher = _Batcher(retriever, k, window)

  async def search(query: str) -> str:
    """Searches an encyclopedia and returns the passages that fit best.

    Args:
      query: What to search for.
    """
    query = ' '.join(query.split())
    if not query:
      raise ValueError('query is empty; say what to search for')
    return documents.render(await batcher.search(query), template)

  return tool_lib.Tool('search', tool_lib.schema(search, 'search'), search, timeout)


def _check(template):
  try:
    documents.render([Hit(Document('', '', ''), 0.0)], template)
  except (AttributeError, KeyError, IndexError, ValueError) as error:
    raise ValueError(
      f'template {template!r} cannot be filled ({error!r}); it may use {{rank}}, '
      '{title}, {text}, {id} and {score}'
    ) from error


class _Batcher:
  """Gathers the queries that one event loop asks within a window.

  A batch belongs to the loop that opened it and is answered there, so that one tool
  serves many loops, one after the other or at once.
  """

  def __init__(self, retriever, k, window):
    self._retriever, self._k, self._window = retriever, k, window
    self._lock = threading.Lock()
    self._open = None  # (loop, queries, answer) of the batch that may still grow.

  async def search(self, query: str) -> list[Hit]:
    loop = asyncio.get_running_loop()
    batch = self._open
    if batch is None or batch[0] is not loop:
      queries = []
      batch = self._open = (loop, queries, loop.create_task(self._answer(queries)))
    _, queries, answer = batch
    queries.append(query)
    row = len(queries) - 1
    # One agent's time-out must not cancel the search of the others.
    return (await asyncio.shield(answer))[row]

  async def _answer(self, queries: list[str]) -> list[list[Hit]]:
    await asyncio.sleep(self._window)
    batch = self._open
    if batch and batch[1] is queries:
      self._open = None
    return await _in_thread(lambda: self._ask(queries))

  def _ask(self, queries: Sequence[str]) -> list[list[Hit]]:
    with self._lock:
      found = self._retriever.search(queries, self._k)
    if len(found) != len(queries):
      raise ValueError(f'search gave {len(found)} lists of hits, not {len(queries)}')
    return found


def _in_thread(fn: Callable[[], Any]) -> asyncio.Future:
  """Runs fn in a daemon thread: an executor's are joined at exit, a hung one for ever."""
  future = concurrent.futures.Future()
  future.set_running_or_notify_cancel()

  def run():
    try:
      future.set_result(fn())
    except BaseException as error:
      future.set_exception(error)

  threading.Thread(target=run, name='search', daemon=True).start()
  return asyncio.wrap_future(future)
