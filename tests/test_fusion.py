"""Reciprocal rank fusion, by hand and of real retrievers."""

import numpy as np
import pytest

from agent_r1_jax.retrieval import bm25, dense, fusion
from agent_r1_jax.retrieval.documents import Document, Hit


class Fixed:
  """Finds the passages that a query's letters name, in their order."""

  def __init__(self, rank):
    self.rank, self.asked = rank, []

  def search(self, queries, k):
    self.asked.append(k)
    found = [sorted(query, key=self.rank) for query in queries]
    return [[Hit(Document(x, x, x), 100.0) for x in names[:k]] for names in found]


def test_scores_by_hand():
  forward, backward = Fixed(ord), Fixed(lambda x: -ord(x))
  fused = fusion.Fusion([forward, backward, Fixed('cab'.index)])
  (hits, none) = fused.search(['abc', ''], 2)
  assert [(hit.document.id, hit.score) for hit in hits] == [
    ('c', pytest.approx(1 / 63 + 1 / 61 + 1 / 61)),
    ('a', pytest.approx(1 / 61 + 1 / 63 + 1 / 62)),
  ]
  assert none == [] and forward.asked == [100]
  # Deeper than it was asked, and what only one of them finds.
  half = Fixed(ord)
  half.search = lambda queries, k: [[] for _ in queries]
  fused = fusion.Fusion([half, forward], depth=1)
  assert [hit.document.id for hit in fused.search(['bca'], 3)[0]] == ['a', 'b', 'c']
  with pytest.raises(ValueError, match='retrievers is empty'):
    fusion.Fusion([])


def test_each_finds_what_the_other_misses():
  names = ('red apple', 'green pear', 'blue plum')
  passages = [Document(str(i), name, name) for i, name in enumerate(names)]
  near = lambda texts: np.eye(3, dtype=np.float32)[['rgb'.index(t[0]) for t in texts]]
  near_plum = lambda texts: near(['b' + text for text in texts])
  by_meaning = dense.Dense(passages, near, encode_query=near_plum)
  fused = fusion.Fusion([bm25.BM25(passages), by_meaning])
  (hits,) = fused.search(['pear'], 3)
  assert [hit.document.id for hit in hits] == ['1', '2', '0']
