"""Dense retrieval: inner products in FAISS over what a passed-in function encodes."""

from collections.abc import Callable, Sequence
import dataclasses
import gzip
import json
import os
import pathlib

import numpy as np

from agent_r1_jax.retrieval import documents
from agent_r1_jax.retrieval.documents import Document, Hit

# Texts to float32 [n, d]; normalise there to have cosines.
Encode = Callable[[Sequence[str]], np.ndarray]

_INDEX, _DOCUMENTS = 'index.faiss', 'documents.jsonl.gz'


class Dense:
  """A FAISS index of passages, searched by inner product."""

  def __init__(
    self,
    passages: Sequence[Document],
    encode: Encode,
    *,
    encode_query: Encode | None = None,
    factory: str = 'Flat',
    parameters: str = '',
    batch_size: int = 1024,
    train_size: int = 100_000,
  ):
    """Encodes `Document.contents` of all passages and indexes them.

    Args:
      passages: The corpus, at least one passage.
      encode: Encodes batches of passages, with the title on the first line.
      encode_query: Encodes queries, where they need another prefix; None is `encode`.
      factory: A FAISS index factory string: 'Flat' is exact; 'IVF4096,SQ8' or 'HNSW32'
        for millions.
      parameters: Parameters of the search, in FAISS's form: 'nprobe=64', 'efSearch=128'.
        The defaults of approximate indexes are the fastest and least accurate.
      batch_size: Number of texts in a call of `encode`.
      train_size: How many passages, sampled with a fixed seed, train an index that learns
        (IVF, SQ, PQ); they are encoded twice.
    """
    import faiss

    if not passages:
      raise ValueError('passages is empty; Dense needs at least one')
    self.documents = passages
    self._encode_query = encode_query or encode
    dim = _vectors(encode, [passages[0].contents]).shape[1]
    try:
      self._index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
      faiss.ParameterSpace().set_index_parameters(self._index, parameters)
    except RuntimeError as error:
      raise ValueError(
        f'FAISS knows no factory {factory!r} with parameters {parameters!r}: {error}'
      ) from error
    if not self._index.is_trained:
      chosen = np.random.default_rng(0).permutation(len(passages))[:train_size]
      sample = [passages[i].contents for i in chosen]
      self._index.train(np.concatenate(list(_batches(encode, sample, batch_size))))
    for vectors in _batches(encode, [p.contents for p in passages], batch_size):
      self._index.add(vectors)

  def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
    """Finds the k passages of the largest inner product with each query, best first.

    An approximate index may find fewer.
    """
    if not queries:
      return []
    vectors = _vectors(self._encode_query, queries)
    if vectors.shape[1] != self._index.d:
      raise ValueError(
        f'encode_query gave {vectors.shape[1]} numbers a text, the index holds '
        f'{self._index.d}; encode queries as the passages were'
      )
    scores, rows = self._index.search(vectors, min(k, len(self.documents)))
    return [
      [Hit(self.documents[i], float(s)) for i, s in zip(*found, strict=True) if i >= 0]
      for found in zip(rows, scores, strict=True)
    ]

  def save(self, directory: str | os.PathLike) -> None:
    """Writes the index and its passages, without the encoder."""
    import faiss

    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    faiss.write_index(self._index, str(directory / _INDEX))
    with gzip.open(directory / _DOCUMENTS, 'wt', compresslevel=3) as file:
      for passage in self.documents:
        file.write(json.dumps(dataclasses.asdict(passage)) + '\n')

  @classmethod
  def load(cls, directory: str | os.PathLike, encode_query: Encode) -> 'Dense':
    """Reads what `save` wrote; `encode_query` must be that of the saved index.

    Raises:
      ValueError: The index cannot be read, or is not of the passages beside it.
    """
    import faiss

    path = pathlib.Path(directory) / _INDEX
    try:
      index = faiss.read_index(str(path))
    except RuntimeError as error:
      raise ValueError(f'{path}: no FAISS index; save it again ({error})') from error
    dense = cls.__new__(cls)
    dense.documents = documents.read_corpus(path.with_name(_DOCUMENTS))
    dense._index, dense._encode_query = index, encode_query
    if index.ntotal != len(dense.documents):
      raise ValueError(
        f'{directory}: {index.ntotal} vectors for {len(dense.documents)} passages; '
        'save it again'
      )
    return dense


def _batches(encode, texts, size):
  for start in range(0, len(texts), size):
    yield _vectors(encode, texts[start : start + size])


def _vectors(encode, texts):
  vectors = np.ascontiguousarray(encode(texts), np.float32)
  if vectors.ndim != 2 or len(vectors) != len(texts):
    raise ValueError(
      f'encode gave shape {vectors.shape} for {len(texts)} texts; it must give [n, d]'
    )
  return vectors
