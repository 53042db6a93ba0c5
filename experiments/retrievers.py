"""Opens indexes of experiments.build_index, or experiments.serve_retriever's server."""

from collections.abc import Sequence
import pathlib

from agent_r1_jax.retrieval import bm25, dense, encoder, fusion
from agent_r1_jax.retrieval.documents import Retriever


def open_indexes(directories: Sequence[str], model: str) -> Retriever:
  """Loads one index, or several, fused by reciprocal rank.

  Args:
    directories: The directories of the indexes.
    model: The directory of the dense indexes' model.
  """
  made = encoder.Encoder(model) if model else None
  found = []
  for directory in directories:
    if not (pathlib.Path(directory) / 'index.faiss').is_file():
      found.append(bm25.BM25.load(directory))
    elif made is None:
      raise ValueError(f'{directory} is a dense index; name its model with --encoder=DIR')
    else:
      found.append(dense.Dense.load(directory, made.encode_queries))
  return found[0] if len(found) == 1 else fusion.Fusion(found)


def open_retriever(places: str, model: str) -> Retriever:
  """Opens a server's address, or directories of indexes, separated by commas."""
  if places.startswith(('http://', 'https://')):
    from agent_r1_jax.contrib.search_servers import client  # It may be missing.

    return client.Remote(places)
  return open_indexes(places.split(','), model)
