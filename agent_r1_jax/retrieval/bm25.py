"""BM25: lexical retrieval, a strong baseline on entity questions."""

from collections.abc import Sequence
import logging
import os
import pathlib

from agent_r1_jax.retrieval import documents, index_files
from agent_r1_jax.retrieval.documents import Document, Hit

# numba takes some six seconds to compile; NumPy answers 1,800 queries per second over
# 30,000 passages, but its cost grows with the corpus.
_NUMBA_PAYS_ABOVE = 100_000
_DOCUMENTS = 'documents.jsonl.gz'


class BM25:
  """Scores Σ idf(w) · tf / (tf + k1·(1 - b + b·|d|/mean |d|)) over the query's words.

  Robertson and Zaragoza 2009 in Lucene's form: idf = log(1 + (N - n + ½) / (n + ½)).
  Title words count `title_weight` times. A passage that shares no word with the query is
  not a hit.
  """

  def __init__(
    self,
    passages: Sequence[Document],
    *,
    k1: float = 1.5,
    b: float = 0.75,
    title_weight: int = 3,
    backend: str | None = None,
  ):
    """Indexes the passages: 4 s for 30,000 on one core.

    Args:
      passages: The corpus, at least one passage.
      k1: The term frequency at which a word's score saturates.
      b: Length normalisation, 0 to 1.
      title_weight: How many times to index the title, besides the text; recall@5 on
        HotpotQA's 28,757 passages is .73 with 1, .75 with 3.
      backend: 'numpy' or 'numba'; None uses numba for large corpora.
    """
    bm25s = _import_bm25s()
    if not passages:
      raise ValueError('passages is empty; BM25 needs at least one')
    self.documents = passages
    self._backend = backend or _default_backend(passages)
    self._index = bm25s.BM25(k1=k1, b=b, backend=self._backend)
    terms = [
      documents.words(passage.title) * title_weight + documents.words(passage.text)
      for passage in passages
    ]
    if not any(terms):
      raise ValueError('passages have no words; BM25 needs a letter or digit in one')
    self._index.index(terms, show_progress=False)

  def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
    """Finds the k best passages that share a word with each query, best first."""
    documents.check_k(k)
    # bm25s fails on a query without a known word, and infers the type of all queries from
    # the first.
    vocabulary = self._index.vocab_dict
    terms = [[word for word in documents.words(q) if word in vocabulary] for q in queries]
    searched = [words for words in terms if words]
    if not searched:
      return [[] for _ in queries]
    rows, scores = self._index.retrieve(
      searched,
      k=min(k, len(self.documents)),
      show_progress=False,
      backend_selection=self._backend,
    )
    # Only queries with a known word have answers.
    answers, hits = zip(rows, scores, strict=True), []
    for known_words in terms:
      pairs = zip(*next(answers), strict=True) if known_words else ()
      hits.append([Hit(self.documents[i], float(s)) for i, s in pairs if s > 0])
    return hits

  def save(self, directory: str | os.PathLike) -> None:
    """Writes the index and its passages.

    Raises:
      ValueError: A passage has a blank field, or the id of an earlier one.
    """
    with index_files.replace(directory) as folder:
      documents.write_corpus(folder / _DOCUMENTS, self.documents)
      self._index.save(folder, show_progress=False)

  @classmethod
  def load(cls, directory: str | os.PathLike) -> 'BM25':
    """Reads what `save` wrote; its arrays are memory-mapped.

    Raises:
      ValueError: The index cannot be read, or does not belong to its passages.
    """
    bm25s = _import_bm25s()
    index_files.check(directory)
    index = cls.__new__(cls)
    index.documents = documents.read_corpus(pathlib.Path(directory) / _DOCUMENTS)
    index._backend = _default_backend(index.documents)
    try:
      index._index = bm25s.BM25.load(directory, mmap=True, backend=index._backend)
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise ValueError(f'{directory}: no BM25 index; save it again ({error})') from error
    count = index._index.scores['num_docs']
    if count != len(index.documents):
      raise ValueError(
        f'{directory}: an index of {count} passages beside {len(index.documents)}; save '
        'it again'
      )
    return index


def _default_backend(passages: Sequence[Document]) -> str:
  return 'numba' if len(passages) > _NUMBA_PAYS_ABOVE else 'numpy'


def _import_bm25s():
  import bm25s

  # Importing bm25s sets its logger to print everything.
  logging.getLogger('bm25s').setLevel(logging.WARNING)
  return bm25s
