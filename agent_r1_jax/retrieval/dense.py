"""Dense retrieval: inner products in FAISS over vectors of a given encoder."""

from collections.abc import Callable, Iterator, Sequence
import os
import pathlib

import numpy as np

from agent_r1_jax.retrieval import documents, index_files
from agent_r1_jax.retrieval.documents import Document, Hit

# From texts to float32 [n, d]; normalise there for cosine similarity.
Encode = Callable[[Sequence[str]], np.ndarray]

_INDEX, _DOCUMENTS, _PROBE = 'index.faiss', 'documents.jsonl.gz', 'probe.npy'
# Relative difference of a text's vectors. bfloat16 instead of float32 makes about 0.01,
# another prefix or pooling more than 0.1.
_ROUNDING = 0.05
_BATCH = 1024  # Texts per call of the encoder.
_ADDED = 65_536  # Vectors per call that adds to an index.


class Dense:
  """A FAISS index of passages, searched by inner product."""

  def __init__(
    self,
    passages: Sequence[Document],
    encode: Encode,
    *,
    vectors: Sequence[np.ndarray] | None = None,
    encode_query: Encode | None = None,
    factory: str = 'Flat',
    parameters: str = '',
    train_size: int = 100_000,
  ):
    """Encodes `Document.contents` of all passages and indexes them.

    Args:
      passages: The corpus, at least one passage.
      encode: Encodes batches of passages, with the title on the first line.
      vectors: Vectors already made by `encode`: float32 arrays [n, d] whose rows, in
        order, belong to the passages. Memory-mapped files are read a piece at a time.
      encode_query: Encodes queries, if they need another prefix; None uses `encode`.
      factory: A FAISS index factory string: 'Flat' is exact; 'IVF4096,SQ8', 'HNSW32' or
        'IVF4096,PQ64' for millions.
      parameters: Parameters of the search, in FAISS's form: 'nprobe=64', 'efSearch=128'.
        The defaults of approximate indexes are the fastest and least accurate.
      train_size: How many passages, sampled with a fixed seed, train an index that learns
        (IVF, SQ, PQ).
    """
    if not passages:
      raise ValueError('passages is empty; Dense needs at least one')
    if vectors is None:
      texts = [passage.contents for passage in passages]
      vectors = list(encode_batches(encode, texts))
    if (rows := sum(map(len, vectors))) != len(passages):
      raise ValueError(f'vectors has {rows} rows for {len(passages)} passages')
    self.documents, self._encode_query = passages, encode_query or encode
    self._index = _make_index(vectors, factory, parameters, train_size)

  def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
    """Finds the k passages with the largest inner product with each query, best first.

    An approximate index may find fewer.
    """
    documents.check_k(k)
    if not queries:
      return []
    scores, rows = self._index.search(self._encode(queries), min(k, len(self.documents)))
    return [
      [Hit(self.documents[i], float(s)) for i, s in zip(*pairs, strict=True) if i >= 0]
      for pairs in zip(rows, scores, strict=True)
    ]

  def save(self, directory: str | os.PathLike) -> None:
    """Writes the index, its passages, and a fingerprint of the encoder.

    Raises:
      ValueError: A passage has a blank field, or the id of an earlier one.
    """
    import faiss

    with index_files.replace(directory) as folder:
      documents.write_corpus(folder / _DOCUMENTS, self.documents)
      faiss.write_index(self._index, str(folder / _INDEX))
      np.save(folder / _PROBE, self._probe())

  @classmethod
  def load(cls, directory: str | os.PathLike, encode_query: Encode) -> 'Dense':
    """Reads what `save` wrote; `encode_query` must be the saved index's.

    Raises:
      ValueError: The index cannot be read, has another metric, does not belong to its
        passages, or was made with another encoder, prefix or pooling.
    """
    import faiss

    index_files.check(directory)
    path = pathlib.Path(directory) / _INDEX
    try:
      index = faiss.read_index(str(path))
      expected = np.load(path.with_name(_PROBE))
    except (RuntimeError, OSError, ValueError) as error:
      raise ValueError(f'{path}: no FAISS index; save it again ({error})') from error
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
      raise ValueError(
        f'{path}: its metric is no inner product, so the best passages would come last; '
        'build it with faiss.METRIC_INNER_PRODUCT'
      )
    dense = cls.__new__(cls)
    dense.documents = documents.read_corpus(path.with_name(_DOCUMENTS))
    dense._index, dense._encode_query = index, encode_query
    if index.ntotal != len(dense.documents):
      raise ValueError(
        f'{directory}: {index.ntotal} vectors for {len(dense.documents)} passages; '
        'save it again'
      )
    if not is_same_encoder(dense._probe(), expected):
      raise ValueError(
        f'{directory}: made with another encoder, of whose vectors these are not; give '
        'the same model, prefixes and pooling, or build the index again'
      )
    return dense

  def _probe(self) -> np.ndarray:
    """Returns the query encoder's vector of the first passage, as a fingerprint."""
    return self._encode([self.documents[0].contents])[0]

  def _encode(self, queries: Sequence[str]) -> np.ndarray:
    vectors = encode_batch(self._encode_query, queries)
    if vectors.shape[1] != self._index.d:
      raise ValueError(
        f'encode_query gave {vectors.shape[1]} numbers a text, the index holds '
        f'{self._index.d}; encode queries as the passages were'
      )
    return vectors


def is_same_encoder(vectors: np.ndarray, expected: np.ndarray) -> bool:
  """Whether two vectors of a text differ only by bfloat16 and device rounding."""
  if vectors.shape != expected.shape:
    return False
  difference = np.linalg.norm(vectors - expected)
  return bool(difference <= _ROUNDING * np.linalg.norm(expected))


def encode_batches(encode: Encode, texts: Sequence[str]) -> Iterator[np.ndarray]:
  """Encodes many texts, _BATCH per call of `encode`."""
  for start in range(0, len(texts), _BATCH):
    yield encode_batch(encode, texts[start : start + _BATCH])


def encode_batch(encode: Encode, texts: Sequence[str]) -> np.ndarray:
  """Encodes texts; raises ValueError unless the result is finite, [n, d]."""
  vectors = np.ascontiguousarray(encode(texts), np.float32)
  if vectors.ndim != 2 or len(vectors) != len(texts):
    raise ValueError(
      f'encode gave shape {vectors.shape} for {len(texts)} texts; it must give [n, d]'
    )
  if not np.isfinite(vectors).all():
    raise ValueError('encode gave numbers that are not finite; the model is damaged')
  return vectors


def _make_index(vectors: Sequence[np.ndarray], factory, parameters, train_size):
  import faiss

  try:
    index = faiss.index_factory(vectors[0].shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    faiss.ParameterSpace().set_index_parameters(index, parameters)
  except RuntimeError as error:
    raise ValueError(
      f'FAISS knows no factory {factory!r} with parameters {parameters!r}: {error}'
    ) from error
  if not index.is_trained:
    # Positions in the corpus become rows of the arrays: with arrays of 3 and 4 vectors,
    # the ends are [3, 7], and positions 1, 2 and 5 are rows 1 and 2 of the first array
    # and row 2 of the second.
    ends = np.cumsum([len(part) for part in vectors])
    chosen = np.sort(np.random.default_rng(0).permutation(ends[-1])[:train_size])
    parts = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
    starts = ends - [len(part) for part in vectors]
    sample = [
      v[rows - start] for v, rows, start in zip(vectors, parts, starts, strict=True)
    ]
    try:
      index.train(np.concatenate(sample))
    except RuntimeError as error:
      raise ValueError(
        f'factory {factory!r} cannot learn from {len(chosen)} passages; fewer lists or '
        f'bits need fewer of them ({error})'
      ) from error
  for part in vectors:
    for start in range(0, len(part), _ADDED):
      index.add(np.ascontiguousarray(part[start : start + _ADDED], np.float32))
  return index
