"""The search tool, which batches the queries of many agents."""

import asyncio
from collections.abc import Sequence
import threading
import time

from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.agent import workers
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
  """Makes a tool `search(query: str)` over a retriever.

  Queries that arrive within a window, or while the retriever is busy, go to it in one
  call, in a thread, one call at a time. An exception of the retriever is an error of each
  of these queries.

  A call of the retriever that takes longer than `timeout` is abandoned and counted as
  'abandoned/search'; later queries do not wait for it.

  Args:
    retriever: The retriever. It need not be thread-safe: two calls overlap only if the
      first one was abandoned.
    k: Number of passages for a query.
    template: The template of one passage, for `documents.render`.
    window: Seconds to wait for further queries.
    timeout: Seconds that a query may take, including the window.
  """
  if k < 1:
    raise ValueError(f'k is {k}; it must be at least 1')
  _check_template(template)
  batcher = _Batcher(retriever, k, window, timeout)

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


def _check_template(template):
  try:
    documents.render([Hit(Document('', '', ''), 0.0)], template)
  except (AttributeError, KeyError, IndexError, ValueError) as error:
    raise ValueError(
      f'template {template!r} cannot be filled ({error!r}); it may use {{rank}}, '
      '{title}, {text}, {id} and {score}'
    ) from error


class _Batcher:
  """Collects the queries of an event loop into batches.

  A batch belongs to the loop that opened it and is answered there, so that one tool can
  serve many loops. It grows until its turn comes.
  """

  def __init__(self, retriever, k, window, timeout):
    self._retriever, self._k, self._window = retriever, k, window
    self._timeout = timeout
    self._lock = threading.Lock()
    self._open = None  # (loop, queries, answer) of the batch that may still grow.
    # The batch whose turn it is, and the end of its turn.
    self._turn: tuple[object, float] | None = None

  async def search(self, query: str) -> list[Hit]:
    loop = asyncio.get_running_loop()
    batch = self._open
    if batch is None or batch[0] is not loop:
      queries = []
      batch = self._open = (loop, queries, loop.create_task(self._answer(queries)))
      # Nobody may await it any longer; asyncio would warn of its exception.
      batch[2].add_done_callback(lambda task: task.cancelled() or task.exception())
    _, queries, answer = batch
    queries.append(query)
    row = len(queries) - 1
    # One agent's time-out must not cancel the search of the others.
    return (await asyncio.shield(answer))[row]

  async def _answer(self, queries: list[str]) -> list[list[Hit]]:
    await asyncio.sleep(self._window)
    # A search that hangs would hold a lock for ever.
    while not (turn := self._take_turn()):
      await asyncio.sleep(max(self._window, 0.001))
    batch = self._open
    if batch and batch[1] is queries:
      self._open = None
    return await workers.call(
      self._ask, turn, queries, name='search', seconds=self._timeout
    )

  def _take_turn(self) -> object | None:
    """Returns a turn of `timeout` seconds; None during the turn of another batch."""
    with self._lock:
      now = time.monotonic()
      if self._turn and now < self._turn[1]:
        return None
      self._turn = object(), now + self._timeout
      return self._turn[0]

  def _ask(self, turn: object, queries: Sequence[str]) -> list[list[Hit]]:
    try:
      found = self._retriever.search(queries, self._k)
    finally:
      with self._lock:
        if self._turn and self._turn[0] is turn:
          self._turn = None
    if len(found) != len(queries):
      raise ValueError(f'search gave {len(found)} lists of hits, not {len(queries)}')
    return found
