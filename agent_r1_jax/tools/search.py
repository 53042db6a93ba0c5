"""The search tool, which batches the queries of many agents."""

from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.agent import tool_schema
from agent_r1_jax.retrieval import batching, documents
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
  call, in a thread, one call at a time. If the retriever raises, each of these queries
  gets the error.

  A retriever call that takes longer than `timeout` is abandoned and counted as
  'abandoned/search'; later queries do not wait for it.

  Args:
    retriever: The retriever. It need not be thread-safe: two calls overlap only if the
      first was abandoned.
    k: Number of passages per query.
    template: The template of one passage, for `documents.render`.
    window: Seconds to wait for further queries.
    timeout: Time limit of a query in seconds, including the window.
  """
  documents.check_k(k)
  _check_template(template)
  batcher = batching.Batcher(
    lambda queries: retriever.search(queries, k),
    'search',
    window=window,
    timeout=timeout,
  )

  async def search(query: str) -> str:
    """Searches an encyclopedia and returns the passages that fit best.

    Args:
      query: What to search for.
    """
    query = ' '.join(query.split())
    if not query:
      raise ValueError('query is empty; say what to search for')
    return documents.render(await batcher.ask(query), template)

  return tool_lib.Tool('search', tool_schema.describe(search, 'search'), search, timeout)


def _check_template(template):
  try:
    documents.render([Hit(Document('', '', ''), 0.0)], template)
  except (AttributeError, KeyError, IndexError, ValueError) as error:
    raise ValueError(
      f'template {template!r} cannot be filled ({error!r}); it may use {{rank}}, '
      '{title}, {text}, {id} and {score}'
    ) from error
