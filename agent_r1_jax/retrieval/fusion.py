"""Several retrievers as one."""

import collections
from collections.abc import Sequence

from agent_r1_jax.retrieval import documents
from agent_r1_jax.retrieval.documents import Hit, Retriever

# The larger, the less the top ranks dominate.
_CONSTANT = 60.0


class Fusion:
  """Reciprocal rank fusion: a passage scores Σ 1 / (60 + its rank) over retrievers.

  Cormack, Clarke and Büttcher 2009. Ranks count from 1; retrievers that did not find the
  passage add nothing, and their own scores are not compared. Passages with the same id
  are the same passage; ties are in the order of the retrievers.
  """

  def __init__(self, retrievers: Sequence[Retriever], *, depth: int = 100):
    """Wraps the retrievers.

    Each is asked for `depth` passages, or for `search`'s k if that is more.
    """
    if not retrievers:
      raise ValueError('retrievers is empty; Fusion needs at least one')
    self._retrievers, self._depth = retrievers, depth

  def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
    """Finds the k passages with the largest fused score for each query, best first."""
    documents.check_k(k)
    rankings = [r.search(queries, max(k, self._depth)) for r in self._retrievers]
    return [self._fuse(lists)[:k] for lists in zip(*rankings, strict=True)]

  def _fuse(self, lists: Sequence[Sequence[Hit]]) -> list[Hit]:
    scores: dict[str, float] = collections.defaultdict(float)
    documents = {}
    for hits in lists:
      for rank, hit in enumerate(hits, 1):
        scores[hit.document.id] += 1 / (_CONSTANT + rank)
        # A passage's text is the first retriever's.
        documents.setdefault(hit.document.id, hit.document)
    best = sorted(scores, key=lambda name: -scores[name])
    return [Hit(documents[name], scores[name]) for name in best]
